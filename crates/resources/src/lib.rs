//! The built-in resources: a row and a strategy each.
//!
//! In: nothing but types. Out: [`table`], from which routes, discovery, columns and storage keys
//! derive. A new kind is a file and a line in [`RESOURCES`].

pub mod api_service;
mod apps;
mod autoscaler;
mod columns;
mod component_status;
mod connect;
mod core;
mod csr;
mod defaults;
mod events;
mod gated;
mod job;
mod native;
mod optional;
mod parts;
mod print;
mod printers;
mod resource_claims;
mod row;
mod rows;
mod scale;
pub mod schemas;
mod validate;
pub mod versions;

use std::ops::RangeInclusive;
use std::sync::Arc;

use apiserver::resource::{CreateHandler, Resource, ResourceTable};
use machinery::patch::Schema;

pub use connect::{Connections, Target};
pub use native::native;
pub use row::Row;

/// Rows that need nothing but their type, by group.
const RESOURCES: &[&[fn() -> Row]] =
    &[core::ROWS, apps::ROWS, autoscaler::ROWS, events::ROWS, resource_claims::ROWS, rows::ROWS];

/// As [`RESOURCES`], of kinds that no version is served of unless somebody asks for it.
const OPTIONAL: &[&[fn() -> Row]] = &[optional::ROWS];

/// What some rows need of the server they are in.
pub struct Options {
    /// Tells patches about lists and maps.
    pub schema: Option<Arc<dyn Schema>>,
    /// Upstream's `--service-node-port-range`.
    pub node_ports: RangeInclusive<u16>,
    /// Who answers `pods/log`, `nodes/proxy` and their like.
    pub connections: Box<Connections>,
    /// Answers `serviceaccounts/NAME/token`.
    pub tokens: Arc<dyn CreateHandler>,
    /// Which of the rows that are off by default there are.
    pub is_on: Box<dyn Fn(&Resource) -> bool>,
    /// Upstream's `--allow-privileged`: of the whole process, as there.
    pub allow_privileged: bool,
}

/// How Services get their addresses, for those who repair what a crash left behind.
pub mod cluster_ips {
    pub use crate::core::service::{
        ALLOCATOR, MANAGED_BY, SETTLED, addresses_of, create_address, delete_address,
        has_addresses, is_abandoned, service_cidrs,
    };
}

/// The table of built-in resources.
pub fn table(options: Options) -> ResourceTable {
    let Options { schema, node_ports, connections, tokens, is_on, allow_privileged } = options;
    validate::capabilities::allow_privileged(allow_privileged);
    let plain = RESOURCES.iter().flat_map(|group| group.iter()).map(|row| row());
    let optional = versions::rows().filter(|row| is_on(row.resource()));
    let wired = [
        core::pod::row(&*connections),
        core::node::row(&*connections),
        core::service::row(node_ports, &*connections),
        core::service_account(tokens),
    ];
    let rows = plain.chain(wired).chain(optional);
    ResourceTable::new(rows.map(|row| row.build(schema.clone())))
}

/// Where built-in resources are kept below `/registry/`: place, group, plural. For what stands
/// before the table, such as the store's encryption.
pub fn places() -> Vec<(String, (String, String))> {
    // Those that are wired, see [`table`].
    const WIRED: &[(&str, &str)] = &[
        ("pods", "pods"),
        ("minions", "nodes"),
        ("services/specs", "services"),
        ("serviceaccounts", "serviceaccounts"),
    ];
    let core = WIRED.iter().map(|(place, name)| ((*place).into(), (String::new(), (*name).into())));
    let rows = RESOURCES.iter().chain(OPTIONAL).flat_map(|group| group.iter());
    let rows = rows.map(|row| row().build(None));
    core.chain(rows.filter_map(|row| Some((row.storage?, (row.group, row.plural))))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_the_table() {
        let places = places();
        for row in built_in().iter() {
            let Some(place) = &row.storage else { continue };
            assert!(places.iter().any(|(one, _)| one == place), "{place}");
        }
    }

    fn options() -> Options {
        Options {
            schema: None,
            node_ports: 30000..=32767,
            connections: Box::new(|_| Arc::new(Nowhere)),
            tokens: Arc::new(NoTokens),
            is_on: Box::new(|_| true),
            allow_privileged: true,
        }
    }

    /// Answers nothing.
    pub(crate) struct Nowhere;

    #[async_trait::async_trait]
    impl apiserver::resource::Connect for Nowhere {
        async fn connect(
            &self,
            _: &apiserver::Registry,
            _: &apiserver::request::RequestContext,
            _: &apiserver::request::Key,
            _: http::Request<apiserver::resource::Body>,
        ) -> Result<http::Response<apiserver::resource::Body>, machinery::StatusError> {
            Err(machinery::StatusError::internal("a test has no kubelets"))
        }
    }

    struct NoTokens;

    #[async_trait::async_trait]
    impl CreateHandler for NoTokens {
        fn codec(&self) -> &dyn machinery::object::Codec {
            static CODEC: machinery::object::Typed<k8s_openapi::api::core::v1::Pod> =
                machinery::object::Typed::new();
            &CODEC
        }

        async fn create(
            &self,
            _: &apiserver::Registry,
            _: &apiserver::request::RequestContext,
            _: &apiserver::request::Key,
            _: Box<dyn machinery::Object>,
        ) -> Result<apiserver::resource::Created, machinery::StatusError> {
            Ok(apiserver::resource::Created::Success)
        }
    }

    pub(crate) fn built_in() -> ResourceTable {
        table(options())
    }

    /// Without what `--runtime-config` turns on.
    pub(crate) fn by_default() -> ResourceTable {
        table(Options { is_on: Box::new(|_| false), ..options() })
    }

    #[test]
    fn every_row_is_complete() {
        let table = built_in();
        assert!(table.iter().count() > 50);
        for row in table.iter() {
            assert!(!row.plural.is_empty() && !row.kind.is_empty(), "{}", row.kind);
            assert_eq!(row.singular, row.kind.to_lowercase());
            assert_eq!(row.storage.is_some(), row.verbs.contains(&"watch"), "{}", row.plural);
            let object = row.stored_codec().empty();
            let columns = row.strategy.columns();
            let mut object = object;
            row.strategy.default(&mut *object);
            // Upstream's header of this one lacks the age that its rows have.
            let extra = usize::from(row.plural == "ipaddresses");
            assert_eq!(columns.len() + extra, row.strategy.cells(&*object).len(), "{}", row.plural);
        }
    }
}
