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
mod event_rate_limit;
mod extended_resource_toleration;
mod external_ips;
mod limit_ranger;
mod matching;
mod namespace_exists;
mod namespace_lifecycle;
mod node_restriction;
mod pod_node_selector;
mod pod_resize;
mod pod_security;
mod pod_toleration_restriction;
mod policy;
mod priority;
mod resource_quota;
mod resources;
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
    fn authorizer(&self, plugin: &str) -> Result<Arc<dyn Authorizer>, String> {
        self.authorizer.clone().ok_or_else(|| format!("{plugin} requires an authorizer"))
    }
}

/// Name, whether it is enabled by default, and its constructor.
type Entry = (&'static str, bool, fn(&Options) -> Result<Box<dyn Plugin>, String>);

/// In upstream's order. Namespaces come first, because requests in a terminating one are rejected anyway.
/// Fields that later plugins read (the priority, the service account) are set before these run; webhooks
/// run after all plugins that set fields, and quotas last, because the counted amounts must not change.
///
/// Deviation: NodeRestriction is enabled, as by every installer of upstream.
const PLUGINS: &[Entry] = &[
    ("AlwaysAdmit", false, |_| Ok(Box::new(always::AlwaysAdmit))),
    ("NamespaceAutoProvision", false, |_| Ok(Box::new(namespace_exists::NamespaceAutoProvision))),
    ("NamespaceLifecycle", true, |_| Ok(Box::new(namespace_lifecycle::NamespaceLifecycle))),
    ("NamespaceExists", false, |_| Ok(Box::new(namespace_exists::NamespaceExists))),
    ("LimitPodHardAntiAffinityTopology", false, |_| Ok(Box::new(anti_affinity::AntiAffinity))),
    ("LimitRanger", true, |_| Ok(Box::new(limit_ranger::LimitRanger))),
    ("ServiceAccount", true, |_| Ok(Box::new(service_account::ServiceAccounts))),
    ("NodeRestriction", true, |options| {
        let authorizer = options.authorizer("NodeRestriction")?;
        Ok(Box::new(node_restriction::NodeRestriction { authorizer }))
    }),
    ("TaintNodesByCondition", true, |_| {
        Ok(Box::new(taint_nodes_by_condition::TaintNodesByCondition))
    }),
    ("AlwaysPullImages", false, |_| Ok(Box::new(always_pull_images::AlwaysPullImages))),
    ("PodSecurity", true, |options| {
        let configuration = options.configuration.of("PodSecurity");
        Ok(Box::new(pod_security::PodSecurity::new(configuration)?))
    }),
    ("PodNodeSelector", false, |options| {
        let configuration = options.configuration.of("PodNodeSelector");
        Ok(Box::new(pod_node_selector::PodNodeSelector::new(configuration)?))
    }),
    ("Priority", true, |_| Ok(Box::new(priority::Priority::new()))),
    ("DefaultTolerationSeconds", true, |_| {
        Ok(Box::new(default_toleration_seconds::DefaultTolerationSeconds))
    }),
    ("PodTolerationRestriction", false, |options| {
        let configuration = options.configuration.of("PodTolerationRestriction");
        let made = pod_toleration_restriction::PodTolerationRestriction::new(configuration)?;
        Ok(Box::new(made))
    }),
    ("EventRateLimit", false, |options| {
        let configuration = options.configuration.of("EventRateLimit");
        Ok(Box::new(event_rate_limit::EventRateLimit::new(configuration)?))
    }),
    ("ExtendedResourceToleration", false, |_| {
        Ok(Box::new(extended_resource_toleration::ExtendedResourceToleration))
    }),
    ("DefaultStorageClass", true, |_| Ok(Box::new(default_storage_class::DefaultStorageClass))),
    ("StorageObjectInUseProtection", true, |_| Ok(Box::new(storage_in_use::StorageInUse))),
    ("PersistentVolumeClaimResize", true, |_| Ok(Box::new(claim_resize::ClaimResize))),
    ("RuntimeClass", true, |_| Ok(Box::new(runtime_class::RuntimeClass))),
    ("CertificateApproval", true, |options| {
        let authorizer = options.authorizer("CertificateApproval")?;
        Ok(Box::new(certificates::SignerUse::approval(authorizer)))
    }),
    ("CertificateSigning", true, |options| {
        let authorizer = options.authorizer("CertificateSigning")?;
        Ok(Box::new(certificates::SignerUse::signing(authorizer)))
    }),
    ("ClusterTrustBundleAttest", true, |options| {
        let authorizer = options.authorizer("ClusterTrustBundleAttest")?;
        Ok(Box::new(certificates::SignerUse::attest(authorizer)))
    }),
    ("CertificateSubjectRestriction", true, |_| Ok(Box::new(certificates::SubjectRestriction))),
    ("DefaultIngressClass", true, |_| Ok(Box::new(default_ingress_class::DefaultIngressClass))),
    ("DenyServiceExternalIPs", false, |_| Ok(Box::new(external_ips::DenyExternalIps))),
    ("PodTopologyLabels", true, |_| Ok(Box::new(topology_labels::TopologyLabels))),
    ("PodResizeValidator", true, |_| Ok(Box::new(pod_resize::PodResize))),
    ("MutatingAdmissionPolicy", true, |options| {
        Ok(Box::new(policy::MutatingPolicies::new(options.authorizer.clone())))
    }),
    ("MutatingAdmissionWebhook", true, |options| {
        Ok(Box::new(webhook::MutatingWebhooks::new(options.authorizer.clone())))
    }),
    ("ValidatingAdmissionPolicy", true, |options| {
        Ok(Box::new(policy::ValidatingPolicies::new(options.authorizer.clone())))
    }),
    ("ValidatingAdmissionWebhook", true, |options| {
        Ok(Box::new(webhook::ValidatingWebhooks::new(options.authorizer.clone())))
    }),
    ("ResourceQuota", true, |_| Ok(Box::new(resource_quota::ResourceQuota::new()))),
    ("AlwaysDeny", false, |_| Ok(Box::new(always::AlwaysDeny))),
];

/// Plugins that need a feature gate.
const GATED: &[(&str, Feature)] = &[
    ("PodTopologyLabels", Feature::PodTopologyLabelsAdmission),
    ("MutatingAdmissionPolicy", Feature::MutatingAdmissionPolicy),
];

fn is_open(plugin: &str) -> bool {
    GATED.iter().all(|(name, gate)| *name != plugin || features::enabled(*gate))
}

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
pub fn chain(options: &Options) -> Result<Chain, String> {
    for name in options.enable.iter().chain(&options.disable) {
        if !PLUGINS.iter().any(|(known, ..)| known == name) {
            let known: Vec<&str> = PLUGINS.iter().map(|(name, ..)| *name).collect();
            return Err(format!(
                "unknown admission plugin {name:?}; known are {}",
                known.join(", ")
            ));
        }
    }
    let says = |list: &[String], name: &str| list.iter().any(|one| one == name);
    let on = |entry: &&Entry| {
        (entry.1 || says(&options.enable, entry.0))
            && !says(&options.disable, entry.0)
            && is_open(entry.0)
    };
    let made: Result<Vec<_>, String> =
        PLUGINS.iter().filter(on).map(|(_, _, make)| make(options)).collect();
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
            chain.map(|chain| chain.0.iter().map(|plugin| plugin.name()).collect::<Vec<_>>())
        };
        assert_eq!(
            names(&[], &[]).map(|all| all.len()),
            Ok(super::PLUGINS.iter().filter(|(_, on, _)| *on).count())
        );
        assert_eq!(names(&[], &["Priority"]).map(|all| all.contains(&"Priority")), Ok(false));
        assert!(names(&["Nope"], &[]).is_err());
        for (name, gate) in super::GATED {
            let gates = Gates::DEFAULT.with(*gate, false);
            let there =
                features::scoped(gates, || names(&[name], &[])).map(|all| all.contains(name));
            assert_eq!(there, Ok(false), "{name}");
        }
    }
}
