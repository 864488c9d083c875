//! What each kind demands of its objects. Upstream: `pkg/apis/*/validation` and the strategies.
//!
//! In: an object, and on updates the one before it. Out: all field errors at once, in upstream's order
//! and words. A kind is a row of [`RULES`]; its checks are functions over places in the object's tree
//! (`at`), in a file per topic.
//!
//! Invariant: checks see objects after defaulting and `prepare_*`, so they need not repeat those.

mod admission;
mod at;
mod batch;
pub(crate) mod capabilities;
mod certificates;
mod container;
mod core;
mod cron;
mod devices;
mod diff;
mod flow;
mod guard;
mod internal;
mod ip;
mod migration;
mod networking;
mod optional;
mod pod;
mod podupdate;
mod policy;
mod quantity;
mod service;
mod storage;
#[cfg(test)]
mod tests;
mod trust;
mod volumes;
mod warnings;
mod workloads;

use apiserver::request::RequestContext;
use apiserver::resource::{Examined, MetadataRules};
use machinery::field::FieldErrors;
use machinery::names;

use at::{At, NameCheck, judged};
#[cfg(test)]
use at::{judge, judge_both};
use guard::Of;

type Check = fn(&At<'_>);
type UpdateCheck = fn(&At<'_>, &At<'_>);

/// What a kind demands.
pub(crate) struct Rules {
    group: &'static str,
    kind: &'static str,
    create: Check,
    /// `None`: as on creation.
    update: Option<UpdateCheck>,
    /// By subresource; the rest is not checked.
    parts: &'static [(&'static str, UpdateCheck)],
    pub(crate) name: NameCheck,
    pub(crate) metadata: MetadataRules,
    pub(crate) create_on_update: bool,
    pub(crate) unconditional_update: bool,
    /// Told in answer to every request.
    pub(crate) deprecation: &'static str,
}

const fn kind(group: &'static str, kind: &'static str, create: Check) -> Rules {
    Rules {
        group,
        kind,
        create,
        update: None,
        parts: &[],
        name: names::dns1123_subdomain,
        metadata: MetadataRules::Full,
        create_on_update: false,
        unconditional_update: true,
        deprecation: "",
    }
}

impl Rules {
    const fn update(mut self, update: UpdateCheck) -> Self {
        self.update = Some(update);
        self
    }

    const fn parts(mut self, parts: &'static [(&'static str, UpdateCheck)]) -> Self {
        self.parts = parts;
        self
    }

    const fn named(mut self, name: NameCheck) -> Self {
        self.name = name;
        self
    }

    const fn metadata(mut self, metadata: MetadataRules) -> Self {
        self.metadata = metadata;
        self
    }

    /// PUT may create.
    const fn create_on_update(mut self) -> Self {
        self.create_on_update = true;
        self
    }

    const fn deprecated(mut self, text: &'static str) -> Self {
        self.deprecation = text;
        self
    }

    /// PUT must name the resourceVersion.
    const fn conditional(mut self) -> Self {
        self.unconditional_update = false;
        self
    }
}

const ADMISSION: &str = "admissionregistration.k8s.io";
const APPS: &str = "apps";
const DEVICES: &str = "resource.k8s.io";
const NETWORKING: &str = "networking.k8s.io";
const RBAC: &str = "rbac.authorization.k8s.io";
const STORAGE: &str = "storage.k8s.io";
const COUNTS: &[(&str, UpdateCheck)] = &[("status", workloads::counts)];

/// Kinds with rules; the others have none but those of metadata.
static RULES: &[Rules] = &[
    kind("", "ConfigMap", core::config_map).update(core::config_map_update),
    kind("", "Endpoints", core::endpoints)
        .update(core::endpoints_update)
        .create_on_update()
        .deprecated("v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice"),
    kind("", "Event", core::event).metadata(MetadataRules::Last).create_on_update(),
    kind("events.k8s.io", "Event", core::new_event)
        .metadata(MetadataRules::Last)
        .create_on_update(),
    kind("", "LimitRange", core::limit_range).create_on_update(),
    kind("", "Namespace", core::namespace)
        .update(core::unchecked)
        .parts(&[("finalize", core::namespace_finalize)])
        .named(names::dns1123_label),
    kind("", "Node", core::node).update(core::node_update),
    kind("", "PersistentVolume", storage::volume).update(storage::volume_update),
    kind("", "PersistentVolumeClaim", storage::claim).update(storage::claim_update),
    kind("", "Pod", pod::create).update(podupdate::update).parts(&[
        ("ephemeralcontainers", podupdate::ephemeral),
        ("resize", podupdate::resize),
        ("status", podupdate::status),
    ]),
    kind("", "PodTemplate", workloads::pod_template),
    kind("", "ReplicationController", workloads::replication_controller).parts(COUNTS),
    kind("", "ResourceQuota", core::resource_quota)
        .update(core::resource_quota_update)
        .parts(&[("status", core::resource_quota_status)]),
    kind("", "Secret", core::secret).update(core::secret_update),
    kind("", "Service", service::create)
        .update(service::update)
        .named(service::name)
        .create_on_update(),
    kind(ADMISSION, "MutatingAdmissionPolicy", admission::mutating_policy)
        .metadata(MetadataRules::Plain)
        .conditional(),
    kind(ADMISSION, "MutatingAdmissionPolicyBinding", admission::mutating_binding)
        .metadata(MetadataRules::Plain)
        .conditional(),
    kind(ADMISSION, "MutatingWebhookConfiguration", admission::mutating_webhooks)
        .metadata(MetadataRules::Plain)
        .conditional(),
    kind(ADMISSION, "ValidatingAdmissionPolicy", admission::validating_policy)
        .parts(&[("status", admission::policy_status)])
        .metadata(MetadataRules::Plain)
        .conditional(),
    kind(ADMISSION, "ValidatingAdmissionPolicyBinding", admission::validating_binding)
        .metadata(MetadataRules::Plain)
        .conditional(),
    kind(ADMISSION, "ValidatingWebhookConfiguration", admission::validating_webhooks)
        .metadata(MetadataRules::Plain)
        .conditional(),
    kind(APPS, "ControllerRevision", workloads::controller_revision)
        .update(workloads::controller_revision_update),
    kind(APPS, "DaemonSet", workloads::daemon_set)
        .update(workloads::daemon_set_update)
        .parts(COUNTS),
    kind(APPS, "Deployment", workloads::deployment)
        .update(workloads::deployment_update)
        .parts(COUNTS),
    kind(APPS, "ReplicaSet", workloads::replica_set)
        .update(workloads::replica_set_update)
        .parts(COUNTS),
    kind(APPS, "StatefulSet", workloads::stateful_set)
        .update(workloads::stateful_set_update)
        .parts(COUNTS)
        .named(names::dns1123_label),
    kind("autoscaling", "HorizontalPodAutoscaler", policy::autoscaler)
        .update(policy::autoscaler_update)
        .parts(&[("status", policy::autoscaler_status)]),
    kind("batch", "CronJob", batch::cron_job).update(batch::cron_job_update),
    kind("batch", "Job", batch::job).update(batch::job_update),
    kind("certificates.k8s.io", "CertificateSigningRequest", certificates::request)
        .update(certificates::request_update)
        .parts(&[("approval", certificates::approval), ("status", certificates::status)]),
    kind("coordination.k8s.io", "Lease", policy::lease)
        .metadata(MetadataRules::Plain)
        .create_on_update()
        .conditional(),
    kind("certificates.k8s.io", "ClusterTrustBundle", trust::bundle)
        .update(trust::bundle_update)
        .named(names::path_segment)
        .conditional(),
    kind("certificates.k8s.io", "PodCertificateRequest", trust::request)
        .update(trust::request_update)
        .parts(&[("status", trust::request_status)])
        .conditional(),
    kind("coordination.k8s.io", "LeaseCandidate", optional::lease_candidate)
        .update(optional::lease_candidate_update)
        .named(names::config_map_key)
        .create_on_update()
        .conditional()
        .deprecated("coordination.k8s.io/v1beta1 LeaseCandidate is deprecated in v1.36+, unavailable in v1.39+"),
    kind("internal.apiserver.k8s.io", "StorageVersion", optional::storage_version)
        .update(core::unchecked)
        .parts(&[("status", optional::storage_version_status)])
        .named(optional::storage_version_name)
        .conditional(),
    kind(DEVICES, "DeviceTaintRule", optional::device_taint_rule)
        .parts(&[("status", optional::device_taint_status)])
        .deprecated("resource.k8s.io/v1alpha3 DeviceTaintRule is deprecated in v1.36+, unavailable in v1.39+"),
    kind(DEVICES, "ResourcePoolStatusRequest", optional::pool_request)
        .update(optional::pool_request_update)
        .parts(&[("status", optional::pool_request_status)])
        .conditional(),
    kind("scheduling.k8s.io", "Workload", optional::workload).update(optional::workload_update),
    kind("scheduling.k8s.io", "PodGroup", optional::pod_group)
        .update(optional::pod_group_update)
        .parts(&[("status", optional::pod_group_status)]),
    kind("discovery.k8s.io", "EndpointSlice", networking::endpoint_slice)
        .update(networking::endpoint_slice_update),
    kind("flowcontrol.apiserver.k8s.io", "FlowSchema", flow::schema),
    kind("flowcontrol.apiserver.k8s.io", "PriorityLevelConfiguration", flow::level),
    kind(NETWORKING, "IPAddress", networking::ip_address)
        .update(networking::ip_address_update)
        .named(networking::ip_address_name),
    kind(NETWORKING, "Ingress", networking::ingress).update(networking::ingress_update),
    kind(NETWORKING, "IngressClass", networking::ingress_class)
        .update(networking::ingress_class_update),
    kind(NETWORKING, "NetworkPolicy", networking::network_policy)
        .update(networking::network_policy_update),
    kind(NETWORKING, "ServiceCIDR", networking::service_cidr)
        .update(networking::service_cidr_update),
    kind("node.k8s.io", "RuntimeClass", policy::runtime_class)
        .update(policy::runtime_class_update)
        .metadata(MetadataRules::Plain)
        .create_on_update()
        .conditional(),
    kind("policy", "PodDisruptionBudget", policy::disruption_budget)
        .parts(&[("status", policy::disruption_budget_status)])
        .metadata(MetadataRules::Last)
        .conditional(),
    kind(RBAC, "ClusterRole", policy::cluster_role).named(names::path_segment).create_on_update(),
    kind(RBAC, "ClusterRoleBinding", policy::cluster_role_binding)
        .update(policy::cluster_role_binding_update)
        .named(names::path_segment)
        .create_on_update(),
    kind(RBAC, "Role", policy::role).named(names::path_segment).create_on_update(),
    kind(RBAC, "RoleBinding", policy::role_binding)
        .update(policy::role_binding_update)
        .named(names::path_segment)
        .create_on_update(),
    kind(DEVICES, "DeviceClass", devices::class),
    kind(DEVICES, "ResourceClaim", devices::claim)
        .update(devices::claim_update)
        .parts(&[("status", devices::claim_status)]),
    kind(DEVICES, "ResourceClaimTemplate", devices::claim_template).update(devices::claim_update),
    kind(DEVICES, "ResourceSlice", devices::slice).update(devices::slice_update),
    kind("scheduling.k8s.io", "PriorityClass", policy::priority_class)
        .update(policy::priority_class_update),
    kind("storagemigration.k8s.io", "StorageVersionMigration", migration::migration)
        .update(migration::update)
        .parts(&[("status", migration::status)])
        .conditional(),
    kind(STORAGE, "CSIDriver", storage::csi_driver)
        .update(storage::csi_driver_update)
        .conditional(),
    kind(STORAGE, "CSINode", storage::csi_node).update(storage::csi_node_update).conditional(),
    kind(STORAGE, "CSIStorageCapacity", storage::storage_capacity)
        .update(storage::storage_capacity_update)
        .conditional(),
    kind(STORAGE, "StorageClass", storage::storage_class).update(storage::storage_class_update),
    kind(STORAGE, "VolumeAttachment", storage::attachment)
        .update(storage::attachment_update)
        .conditional(),
    kind(STORAGE, "VolumeAttributesClass", storage::attributes_class)
        .update(storage::attributes_class_update),
];

static NO_RULES: Rules = kind("", "", core::nothing);

/// The rules of a kind.
pub(crate) fn rules<T: k8s_openapi::Resource>() -> &'static Rules {
    RULES.iter().find(|row| row.kind == T::KIND && row.group == T::GROUP).unwrap_or(&NO_RULES)
}

/// What is wrong with a new object.
pub(crate) fn create<T: k8s_openapi::Resource>(object: &Examined<'_>) -> FieldErrors {
    let check = rules::<T>().create;
    judged(Of::kind(T::GROUP, T::KIND), object.tree(), None, |new, _| check(new))
}

/// What is wrong with a changed one.
pub(crate) fn update<T: k8s_openapi::Resource>(
    ctx: &RequestContext,
    object: &Examined<'_>,
    old: &Examined<'_>,
) -> FieldErrors {
    let rules = rules::<T>();
    let check = match ctx.subresource.as_str() {
        "" | "scale" => rules.update,
        part => match rules.parts.iter().find(|(name, _)| *name == part) {
            Some((_, check)) => Some(*check),
            None => return FieldErrors::default(),
        },
    };
    let of = Of::kind(T::GROUP, T::KIND);
    match check {
        Some(check) => judged(of, object.tree(), Some(old.tree()), check),
        None => judged(of, object.tree(), Some(old.tree()), |new, _| (rules.create)(new)),
    }
}

/// What is wrong with the addresses and families that a Service asks for.
pub(crate) fn service_addresses(
    object: &dyn machinery::Object,
    old: Option<&dyn machinery::Object>,
) -> FieldErrors {
    let tree = object.to_value();
    let old = old.map(|old| old.to_value());
    judged(Of::kind("", "Service"), &tree, old.as_ref(), |new, before| {
        service::addresses(new, old.is_some().then_some(before));
    })
}

/// What a client should know about an object that is fine otherwise.
pub(crate) fn warnings<T: k8s_openapi::Resource>(
    object: &Examined<'_>,
    old: Option<&Examined<'_>>,
) -> Vec<String> {
    warnings::of(T::GROUP, T::KIND, object, old)
}

/// The methods of a [`Strategy`](apiserver::resource::Strategy) that follow from a kind's rules:
/// a macro, because they are a part of an implementation.
macro_rules! checked {
    ($kind:ty) => {
        fn validate(
            &self,
            object: &apiserver::resource::Examined<'_>,
        ) -> machinery::field::FieldErrors {
            $crate::validate::create::<$kind>(object)
        }

        fn validate_update(
            &self,
            ctx: &apiserver::request::RequestContext,
            object: &apiserver::resource::Examined<'_>,
            old: &apiserver::resource::Examined<'_>,
        ) -> machinery::field::FieldErrors {
            $crate::validate::update::<$kind>(ctx, object, old)
        }

        fn warnings(
            &self,
            object: &apiserver::resource::Examined<'_>,
            old: Option<&apiserver::resource::Examined<'_>>,
        ) -> Vec<String> {
            $crate::validate::warnings::<$kind>(object, old)
        }

        fn deprecation(&self) -> Option<&'static str> {
            let text = $crate::validate::rules::<$kind>().deprecation;
            (!text.is_empty()).then_some(text)
        }

        fn name_errors(&self, name: &str) -> Vec<String> {
            ($crate::validate::rules::<$kind>().name)(name)
        }

        fn metadata_rules(&self) -> apiserver::resource::MetadataRules {
            $crate::validate::rules::<$kind>().metadata
        }

        fn create_on_update(&self) -> bool {
            $crate::validate::rules::<$kind>().create_on_update
        }

        fn unconditional_update(&self) -> bool {
            $crate::validate::rules::<$kind>().unconditional_update
        }
    };
}
pub(crate) use checked;
