//! The codec of every built-in kind.
//!
//! In: types. Out: [`codec`]. Decoding and encoding make up most of a kind's machine code. Compiled in
//! this crate, it is not compiled again when a strategy changes.

use std::sync::{Arc, LazyLock};

use k8s_openapi::Resource;
use k8s_openapi::api::{
    admissionregistration, apiserverinternal, apps, authentication, authorization, autoscaling,
    batch, certificates, coordination, core, discovery, events, flowcontrol, networking, node,
    policy, rbac, resource, scheduling, storage, storagemigration,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration;
use machinery::Object;
use machinery::object::{Codec, DecodeError, Decoded, Typed};
use machinery::protobuf::{MessageId, Telling, Unsettled};
use serde_json::Value;

use crate::protobuf;

/// The codec of a built-in kind, as of `apps/v1` and `Deployment`.
pub fn codec(api_version: &str, kind: &str) -> Option<Arc<dyn Codec>> {
    KINDS
        .iter()
        .find(|row| row.api_version == api_version && row.kind == kind)
        .map(|row| (row.codec)(row))
        .or_else(|| crate::versions::find(api_version, kind)?.codec())
}

/// A kind's codec with the rules of its Go struct. Decoded and stored objects look as upstream would
/// have written them, and defaults and comparisons rely on that.
struct Settled {
    kind: &'static Kind,
    inner: Box<dyn Codec>,
}

impl Settled {
    fn message(&self) -> Option<MessageId> {
        protobuf::descriptors().kind(self.kind.api_version, self.kind.kind)
    }
}

impl Codec for Settled {
    fn decode(&self, json: &[u8]) -> Result<Decoded, DecodeError> {
        let Some(message) = self.message() else { return self.inner.decode(json) };
        match protobuf::descriptors().settle_but(message, json, telling()) {
            Ok(settled) => self.inner.decode(&settled),
            Err(Unsettled::Malformed) => self.inner.decode(json),
            Err(Unsettled::Value(why)) => Err(DecodeError(why)),
        }
    }

    fn decode_value(&self, value: Value) -> Result<Decoded, DecodeError> {
        self.decode(&serde_json::to_vec(&value).map_err(DecodeError::from)?)
    }

    fn decode_stored(&self, json: &[u8]) -> Result<Box<dyn Object>, DecodeError> {
        self.inner.decode_stored(json)
    }

    fn empty(&self) -> Box<dyn Object> {
        self.inner.empty()
    }

    fn settle(&self, json: Vec<u8>) -> Vec<u8> {
        let Some(message) = self.message() else { return json };
        protobuf::descriptors().settle(message, &json).unwrap_or(json)
    }
}

/// Fields for which an empty value differs from an absent one until the object is stored: a client that
/// sends an empty value owns the field, or gets an error instead of a default.
///
/// The Rust structs cannot express an absent selector. A present, empty one has an empty `matchLabels`
/// until validation refuses it.
fn telling() -> &'static [Telling] {
    const EMPTY_SELECTOR: &str = r#"{"matchLabels":{}}"#;
    const FIELDS: [(&str, &str, &str, &str); 6] = [
        ("autoscaling/v2", "HPAScalingRules", "policies", "[]"),
        ("discovery.k8s.io/v1", "EndpointSlice", "endpoints", "[]"),
        ("apps/v1", "DaemonSetSpec", "selector", EMPTY_SELECTOR),
        ("apps/v1", "DeploymentSpec", "selector", EMPTY_SELECTOR),
        ("apps/v1", "ReplicaSetSpec", "selector", EMPTY_SELECTOR),
        ("apps/v1", "StatefulSetSpec", "selector", EMPTY_SELECTOR),
    ];
    static TELLING: LazyLock<Vec<Telling>> = LazyLock::new(|| {
        let message = |version, name| protobuf::descriptors().kind(version, name);
        FIELDS
            .iter()
            .filter_map(|(version, name, field, text)| {
                Some((message(version, name)?, *field, *text))
            })
            .collect()
    });
    &TELLING
}

struct Kind {
    api_version: &'static str,
    kind: &'static str,
    codec: fn(&'static Kind) -> Arc<dyn Codec>,
}

macro_rules! kinds {
    ($($group:ident::$version:ident { $($kind:ident)* })*) => {
        &[$($(Kind {
            api_version: <$group::$version::$kind as Resource>::API_VERSION,
            kind: <$group::$version::$kind as Resource>::KIND,
            codec: |kind| {
                let inner = Box::new(Typed::<$group::$version::$kind>::new());
                Arc::new(Settled { kind, inner })
            },
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
    apiserverinternal::v1alpha1 { StorageVersion }
    apps::v1 { ControllerRevision DaemonSet Deployment ReplicaSet StatefulSet }
    authentication::v1 { TokenReview TokenRequest SelfSubjectReview }
    authorization::v1 {
        LocalSubjectAccessReview SelfSubjectAccessReview SelfSubjectRulesReview SubjectAccessReview
    }
    autoscaling::v1 { HorizontalPodAutoscaler Scale }
    autoscaling::v2 { HorizontalPodAutoscaler }
    batch::v1 { CronJob Job }
    certificates::v1 { CertificateSigningRequest }
    certificates::v1beta1 { ClusterTrustBundle PodCertificateRequest }
    coordination::v1 { Lease }
    coordination::v1beta1 { LeaseCandidate }
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
    resource::v1alpha3 { DeviceTaintRule ResourcePoolStatusRequest }
    scheduling::v1 { PriorityClass }
    scheduling::v1alpha2 { PodGroup Workload }
    storage::v1 {
        CSIDriver CSINode CSIStorageCapacity StorageClass VolumeAttachment VolumeAttributesClass
    }
    storagemigration::v1beta1 { StorageVersionMigration }
};
