//! Admission plugins: they reject or change objects before they are written.
//!
//! One file per plugin; the order of the table is the order of execution, as upstream.

mod always;
mod always_pull_images;
mod anti_affinity;
mod certificates;
mod claim_resize;
mod conditions;
mod configuration;
mod default_ingress_class;
mod default_storage_class;
mod default_toleration_seconds;
mod error;
mod event_rate_limit;
mod extended_resource_toleration;
mod external_ips;
mod limit_ranger;
mod matching;
mod namespace_exists;
mod namespace_lifecycle;
mod node_restriction;
mod pod_group_protection;
mod pod_node_selector;
mod pod_resize;
mod pod_security;
mod pod_toleration_restriction;
mod policy;
mod priority;
mod resource_quota;
mod resources;
mod rounds;
mod runtime_class;
mod service_account;
mod storage_in_use;
mod taint_nodes_by_condition;
mod topology_labels;
mod webhook;

use std::sync::Arc;

use apiserver::admission::{Chain, Plugin};
use apiserver::authz::Authorizer;
use release::features::{self, Feature};

pub use certificates::PodCertificateSigning;
pub use configuration::Configuration;
pub use error::{OptionsError, WebhookError};
pub use policy::validating::encode_metrics;
/// The HTTP client of webhooks, also for the conversion webhooks of custom resources.
pub use webhook::call::{Address, Clients, Endpoint};

/// The inputs for the construction of plugins.
#[derive(Clone, Default)]
pub struct Options {
    /// Plugins to enable or disable besides the defaults.
    pub enable: Vec<String>,
    pub disable: Vec<String>,
    /// From `--admission-control-config-file`.
    pub configuration: Configuration,
    /// Decides about further rights of a request's user.
    pub authorizer: Option<Arc<dyn Authorizer>>,
}

impl Options {
    fn authorizer(&self, plugin: &'static str) -> Result<Arc<dyn Authorizer>, OptionsError> {
        self.authorizer.clone().ok_or(OptionsError::NoAuthorizer(plugin))
    }
}

/// The registration of a plugin, in the plugin's file.
pub(crate) struct Row {
    pub name: &'static str,
    make: Make,
    /// Whether it runs without `--enable-admission-plugins`.
    default: bool,
    /// The feature gate without which it never runs.
    gate: Option<Feature>,
}

type Make = fn(&Options) -> Result<Box<dyn Plugin>, OptionsError>;

impl Row {
    /// A plugin that runs unless `--disable-admission-plugins` names it.
    pub const fn enabled(name: &'static str, make: Make) -> Self {
        Self { name, make, default: true, gate: None }
    }

    /// A plugin that runs if `--enable-admission-plugins` names it.
    pub const fn disabled(name: &'static str, make: Make) -> Self {
        Self { name, make, default: false, gate: None }
    }

    /// The plugin runs only while this feature gate is enabled.
    pub const fn gated(mut self, gate: Feature) -> Self {
        self.gate = Some(gate);
        self
    }

    fn is_enabled(&self, options: &Options) -> bool {
        let says = |list: &[String]| list.iter().any(|one| one == self.name);
        (self.default || says(&options.enable))
            && !says(&options.disable)
            && self.gate.is_none_or(features::enabled)
    }
}

/// The order of execution, which is upstream's. Namespaces come first, because requests in a terminating one are
/// rejected anyway.
/// Fields that later plugins read (the priority, the service account) are set before these run; webhooks
/// run after all plugins that set fields, and quotas last, because the counted amounts must not change.
///
/// Deviation: NodeRestriction is enabled, as by every installer of upstream.
const PLUGINS: &[Row] = &[
    always::ALWAYS_ADMIT,
    namespace_exists::NAMESPACE_AUTO_PROVISION,
    namespace_lifecycle::ROW,
    namespace_exists::NAMESPACE_EXISTS,
    anti_affinity::ROW,
    limit_ranger::ROW,
    service_account::ROW,
    node_restriction::ROW,
    taint_nodes_by_condition::ROW,
    always_pull_images::ROW,
    pod_security::ROW,
    pod_node_selector::ROW,
    priority::ROW,
    default_toleration_seconds::ROW,
    pod_toleration_restriction::ROW,
    event_rate_limit::ROW,
    extended_resource_toleration::ROW,
    default_storage_class::ROW,
    storage_in_use::ROW,
    pod_group_protection::ROW,
    claim_resize::ROW,
    runtime_class::ROW,
    certificates::CERTIFICATE_APPROVAL,
    certificates::CERTIFICATE_SIGNING,
    certificates::CLUSTER_TRUST_BUNDLE_ATTEST,
    certificates::CERTIFICATE_SUBJECT_RESTRICTION,
    default_ingress_class::ROW,
    external_ips::ROW,
    topology_labels::ROW,
    pod_resize::ROW,
    policy::mutating::ROW,
    webhook::mutating::ROW,
    policy::validating::ROW,
    webhook::validating::ROW,
    resource_quota::ROW,
    always::ALWAYS_DENY,
];

/// Joins errors into one text, without duplicates. Upstream: `utilerrors.NewAggregate`.
pub(crate) fn aggregate(mut errors: Vec<String>) -> Option<String> {
    let mut seen = std::collections::BTreeSet::new();
    errors.retain(|error| seen.insert(error.clone()));
    match errors.len() {
        0 => None,
        1 => errors.pop(),
        _ => Some(format!("[{}]", errors.join(", "))),
    }
}

/// The chain of the enabled plugins. An unknown name is an error that lists the known ones.
pub fn chain(options: &Options) -> Result<Chain, OptionsError> {
    for name in options.enable.iter().chain(&options.disable) {
        if !PLUGINS.iter().any(|row| row.name == name) {
            let known: Vec<&str> = PLUGINS.iter().map(|row| row.name).collect();
            let (name, known) = (name.clone(), known.join(", "));
            return Err(OptionsError::UnknownPlugin { name, known });
        }
    }
    let enabled = PLUGINS.iter().filter(|row| row.is_enabled(options));
    let made: Result<Vec<_>, OptionsError> = enabled.map(|row| (row.make)(options)).collect();
    Ok(Chain(made?))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use apiserver::authz::{Attributes, Authorizer, Decision};
    use release::features::{self, Gates};

    struct Nobody;

    #[async_trait::async_trait]
    impl Authorizer for Nobody {
        async fn authorize(&self, _: &Attributes) -> Decision {
            Decision::NoOpinion { reason: String::new() }
        }
    }

    #[test]
    fn plugins_are_enabled_and_disabled_by_name() {
        let names = |enable: &[&str], disable: &[&str]| {
            let owned =
                |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
            let (enable, disable) = (owned(enable), owned(disable));
            let chain = super::chain(&super::Options {
                enable,
                disable,
                authorizer: Some(Arc::new(Nobody)),
                ..super::Options::default()
            });
            let chain = chain.map_err(|why| why.to_string());
            chain.map(|chain| chain.0.iter().map(|plugin| plugin.name()).collect::<Vec<_>>())
        };
        assert_eq!(
            names(&[], &[]).map(|all| all.len()),
            Ok(super::PLUGINS
                .iter()
                .filter(|row| row.default && row.gate.is_none_or(features::enabled))
                .count())
        );
        assert_eq!(names(&[], &["Priority"]).map(|all| all.contains(&"Priority")), Ok(false));
        assert!(names(&["Nope"], &[]).is_err());
        for row in super::PLUGINS {
            let Some(gate) = row.gate else { continue };
            let gates = Gates::DEFAULT.with(gate, false);
            let enabled = features::scoped(gates, || names(&[row.name], &[]));
            assert_eq!(enabled.map(|all| all.contains(&row.name)), Ok(false), "{}", row.name);
        }
    }

    #[test]
    fn a_row_has_the_name_of_its_plugin() {
        let options =
            super::Options { authorizer: Some(Arc::new(Nobody)), ..super::Options::default() };
        for row in super::PLUGINS {
            // EventRateLimit alone cannot be made without a configuration.
            if let Ok(plugin) = (row.make)(&options) {
                assert_eq!(plugin.name(), row.name);
            }
        }
    }
}
