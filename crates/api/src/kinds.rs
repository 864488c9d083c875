//! The codec of every built-in kind.
//!
//! In: nothing but types. Out: [`codec`]. Reading and writing a kind is most of the code that the
//! compiler makes for it; made here, it is not made again whenever a strategy changes.

use std::sync::Arc;

use k8s_openapi::Resource;
use k8s_openapi::api::{
    admissionregistration, apps, authentication, authorization, autoscaling, batch, certificates,
    coordination, core, discovery, events, flowcontrol, networking, node, policy, rbac, resource,
    scheduling, storage,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration;
use machinery::object::{Codec, Typed};

/// The codec of a built-in kind, as of `apps/v1` and `Deployment`.
pub fn codec(api_version: &str, kind: &str) -> Option<Arc<dyn Codec>> {
    KINDS
        .iter()
        .find(|row| row.api_version == api_version && row.kind == kind)
        .map(|row| (row.codec)())
}

struct Kind {
    api_version: &'static str,
    kind: &'static str,
    codec: fn() -> Arc<dyn Codec>,
}

macro_rules! kinds {
    ($($group:ident::$version:ident { $($kind:ident)* })*) => {
        &[$($(Kind {
            api_version: <$group::$version::$kind as Resource>::API_VERSION,
            kind: <$group::$version::$kind as Resource>::KIND,
            codec: || Arc::new(Typed::<$group::$version::$kind>::new()),
        },)*)*]
    };
}

const KINDS: &[Kind] = kinds! {
    apiregistration::v1 { APIService }
    admissionregistration::v1 {
        MutatingAdmissionPolicy MutatingAdmissionPolicyBinding MutatingWebhookConfiguration
        ValidatingAdmissionPolicy ValidatingAdmissionPolicyBinding ValidatingWebhookConfiguration
    }
    apiextensions::v1 { CustomResourceDefinition }
    apps::v1 { ControllerRevision DaemonSet Deployment ReplicaSet StatefulSet }
    authentication::v1 { TokenReview TokenRequest SelfSubjectReview }
    authorization::v1 {
        LocalSubjectAccessReview SelfSubjectAccessReview SelfSubjectRulesReview SubjectAccessReview
    }
    autoscaling::v1 { HorizontalPodAutoscaler Scale }
    autoscaling::v2 { HorizontalPodAutoscaler }
    batch::v1 { CronJob Job }
    certificates::v1 { CertificateSigningRequest }
    coordination::v1 { Lease }
    core::v1 {
        Binding ComponentStatus ConfigMap Endpoints Event LimitRange Namespace Node PersistentVolume
        PersistentVolumeClaim Pod PodTemplate ReplicationController ResourceQuota Secret Service
        ServiceAccount
    }
    discovery::v1 { EndpointSlice }
    events::v1 { Event }
    flowcontrol::v1 { FlowSchema PriorityLevelConfiguration }
    networking::v1 { IPAddress Ingress IngressClass NetworkPolicy ServiceCIDR }
    node::v1 { RuntimeClass }
    policy::v1 { Eviction PodDisruptionBudget }
    rbac::v1 { ClusterRole ClusterRoleBinding Role RoleBinding }
    resource::v1 { DeviceClass ResourceClaim ResourceClaimTemplate ResourceSlice }
    scheduling::v1 { PriorityClass }
    storage::v1 {
        CSIDriver CSINode CSIStorageCapacity StorageClass VolumeAttachment VolumeAttributesClass
    }
};
