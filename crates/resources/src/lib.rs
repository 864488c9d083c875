//! The built-in resources.
//!
//! In: nothing but types. Out: [`table`], from which routes, discovery, columns and storage keys
//! derive. A kind is a file, in which stands all that the server knows about it ([`kind::Kind`]), and
//! a line in [`RESOURCES`].

mod admissionregistration;
mod apiregistration;
mod apiserverinternal;
mod apps;
mod autoscaling;
mod batch;
mod certificates;
mod connect;
mod coordination;
mod core;
mod defaults;
mod discovery;
mod events;
mod flowcontrol;
mod gated;
mod generic;
mod kind;
mod native;
mod networking;
mod node;
mod policy;
mod print;
mod rbac;
mod resource;
mod row;
mod scale;
mod scheduling;
pub mod schemas;
mod storage;
mod storagemigration;
mod validate;
pub mod versions;

use std::ops::RangeInclusive;
use std::sync::Arc;

use apiserver::resource::{CreateHandler, ResourceTable};
use machinery::patch::Schema;

pub use connect::{Connections, Target};
use generic::AnyKind;
pub use native::native;
pub use row::Row;

/// The kinds, a line each, in discovery's order.
static RESOURCES: &[&dyn AnyKind] = &[
    &core::binding::KIND,
    &core::component_status::KIND,
    &core::config_map::KIND,
    &core::endpoints::KIND,
    &events::event::CORE,
    &core::limit_range::KIND,
    &core::namespace::KIND,
    &core::node::KIND,
    &core::persistent_volume::KIND,
    &core::persistent_volume_claim::KIND,
    &core::pod::KIND,
    &core::pod_template::KIND,
    &core::replication_controller::KIND,
    &core::resource_quota::KIND,
    &core::secret::KIND,
    &core::service::KIND,
    &core::service_account::KIND,
    &admissionregistration::mutating_admission_policy::KIND,
    &admissionregistration::mutating_admission_policy_binding::KIND,
    &admissionregistration::mutating_webhook_configuration::KIND,
    &admissionregistration::validating_admission_policy::KIND,
    &admissionregistration::validating_admission_policy_binding::KIND,
    &admissionregistration::validating_webhook_configuration::KIND,
    &apiregistration::api_service::KIND,
    &apps::controller_revision::KIND,
    &apps::daemon_set::KIND,
    &apps::deployment::KIND,
    &apps::replica_set::KIND,
    &apps::stateful_set::KIND,
    &autoscaling::horizontal_pod_autoscaler::KIND,
    &autoscaling::horizontal_pod_autoscaler::V1,
    &batch::cron_job::KIND,
    &batch::job::KIND,
    &certificates::certificate_signing_request::KIND,
    &certificates::cluster_trust_bundle::KIND,
    &certificates::pod_certificate_request::KIND,
    &coordination::lease::KIND,
    &coordination::lease_candidate::KIND,
    &discovery::endpoint_slice::KIND,
    &events::event::KIND,
    &flowcontrol::flow_schema::KIND,
    &flowcontrol::priority_level_configuration::KIND,
    &apiserverinternal::storage_version::KIND,
    &networking::ingress::KIND,
    &networking::ingress_class::KIND,
    &networking::ip_address::KIND,
    &networking::network_policy::KIND,
    &networking::service_cidr::KIND,
    &node::runtime_class::KIND,
    &policy::pod_disruption_budget::KIND,
    &rbac::cluster_role::KIND,
    &rbac::cluster_role_binding::KIND,
    &rbac::role::KIND,
    &rbac::role_binding::KIND,
    &resource::device_class::KIND,
    &resource::device_taint_rule::KIND,
    &resource::resource_claim::KIND,
    &resource::resource_claim_template::KIND,
    &resource::resource_pool_status_request::KIND,
    &resource::resource_slice::KIND,
    &scheduling::pod_group::KIND,
    &scheduling::priority_class::KIND,
    &scheduling::workload::KIND,
    &storage::csi_driver::KIND,
    &storage::csi_node::KIND,
    &storage::csi_storage_capacity::KIND,
    &storage::storage_class::KIND,
    &storage::volume_attachment::KIND,
    &storage::volume_attributes_class::KIND,
    &storagemigration::storage_version_migration::KIND,
];

/// The parts of a running server that some kinds need.
pub(crate) struct Wiring {
    node_ports: RangeInclusive<u16>,
    connections: Box<Connections>,
    tokens: Arc<dyn CreateHandler>,
}

/// The server's parts and flags that some rows need.
pub struct Options {
    /// The merge keys and types of fields, for patches.
    pub schema: Option<Arc<dyn Schema>>,
    /// Upstream's `--service-node-port-range`.
    pub node_ports: RangeInclusive<u16>,
    /// The handlers of `pods/log`, `nodes/proxy` and similar subresources.
    pub connections: Box<Connections>,
    /// The handler of `serviceaccounts/NAME/token`.
    pub tokens: Arc<dyn CreateHandler>,
    /// Selects the rows that are off by default.
    pub is_on: Box<dyn Fn(&Row) -> bool>,
    /// Upstream's `--allow-privileged`: of the whole process, as there.
    pub allow_privileged: bool,
    /// Upstream's `--event-ttl`, of the whole process; zero: Events do not expire.
    pub event_ttl: std::time::Duration,
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
    let Options { schema, node_ports, connections, tokens, is_on, .. } = options;
    validate::capabilities::allow_privileged(options.allow_privileged);
    events::event::set_ttl(options.event_ttl);
    let optional = versions::rows().filter(|row| is_on(row));
    let wiring = Wiring { node_ports, connections, tokens };
    let kinds = RESOURCES.iter().filter(|kind| !kind.is_optional());
    let rows = kinds.map(|kind| kind.row(Some(&wiring))).chain(optional);
    ResourceTable::new(rows.map(|row| row.build(schema.clone())))
}

/// The pods reduced to labels and addresses, for network policies on nodes.
pub fn pod_addresses() -> Row {
    core::pod::addresses::row()
}

/// Where built-in resources are kept below `/registry/`: place, group, plural. For what stands
/// before the table, such as the store's encryption.
pub fn places() -> Vec<(String, (String, String))> {
    let rows = RESOURCES.iter().map(|kind| kind.row(None).build(None));
    rows.filter_map(|row| Some((row.prefix()?.to_owned(), (row.group, row.plural)))).collect()
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn places_are_those_of_the_table() {
        let places = places();
        for row in built_in().iter() {
            let Some(place) = row.prefix() else { continue };
            assert!(places.iter().any(|(one, _)| one == place), "{place}");
        }
    }

    pub(crate) fn kind_of(name: &str) -> &'static dyn AnyKind {
        let mut kinds = RESOURCES.iter().copied();
        kinds.find(|one| one.row(None).resource().kind == name).expect("a kind")
    }

    /// As a server without kubelets has it.
    pub(crate) fn wiring() -> Wiring {
        let Options { node_ports, connections, tokens, .. } = options();
        Wiring { node_ports, connections, tokens }
    }

    fn options() -> Options {
        Options {
            schema: None,
            node_ports: 30000..=32767,
            connections: Box::new(|_| Arc::new(Nowhere)),
            tokens: Arc::new(NoTokens),
            is_on: Box::new(|_| true),
            allow_privileged: true,
            event_ttl: std::time::Duration::from_secs(3600),
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
            assert_eq!(row.is_stored(), row.verbs.contains(&"watch"), "{}", row.plural);
            let object = row.stored_codec().empty();
            let columns = row.table.columns();
            let mut object = object;
            row.strategy.default(&mut *object);
            // Upstream's header of this one lacks the age that its rows have.
            let extra = usize::from(row.plural == "ipaddresses");
            assert_eq!(columns.len() + extra, row.table.cells(&*object).len(), "{}", row.plural);
        }
    }
}
