//! Makes the schemas of the built-in kinds, and packs them for [`schema`](src/schema.rs).
//!
//! In: the schemas that come with the types. Out: `schemas.rs`, a table of chunks in the order of the
//! definitions' names: the name of a chunk's first definition, and the chunk, which lies in a file beside
//! it. A chunk is a deflated text with a line for each of its definitions: name, tab, schema.
//!
//! At build time, because what makes schemas of types is code for each type: in the program it would
//! be megabytes, where what it makes is a few hundred kilobytes.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::DeflateEncoder;
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::Value;

/// How much text is unpacked for one definition, about.
const CHUNK: usize = 64 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    let out = std::env::var("OUT_DIR")?;
    let mut table = String::from("&[\n");
    for (number, (first, text)) in chunks(&definitions()).into_iter().enumerate() {
        let mut packed = DeflateEncoder::new(Vec::new(), Compression::best());
        packed.write_all(text.as_bytes())?;
        let file = format!("schemas-{number}.deflate");
        std::fs::write(Path::new(&out).join(&file), packed.finish()?)?;
        writeln!(table, "({first:?}, include_bytes!({file:?})),")?;
    }
    table.push(']');
    std::fs::write(Path::new(&out).join("schemas.rs"), table)?;
    Ok(())
}

fn definitions() -> BTreeMap<String, Value> {
    let settings = SchemaSettings::draft07().with(|settings| {
        settings.definitions_path = "/definitions".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    roots(&mut generator);
    generator.subschema_for::<k8s_openapi::apimachinery::pkg::apis::meta::v1::WatchEvent<()>>();
    generator.take_definitions(false).into_iter().collect()
}

/// Lines of definitions, with the name of the first one.
fn chunks(definitions: &BTreeMap<String, Value>) -> Vec<(&str, String)> {
    let mut chunks: Vec<(&str, String)> = Vec::new();
    for (name, schema) in definitions {
        let line = format!("{name}\t{schema}\n");
        match chunks.last_mut() {
            Some((_, text)) if text.len() + line.len() <= CHUNK => text.push_str(&line),
            _ => chunks.push((name, line)),
        }
    }
    chunks
}

/// Names types: only the compiler can turn a path into one, so the table is a macro's.
macro_rules! roots {
    ($($($module:ident)::+: $($kind:ident),+;)+) => {
        /// Lets the generator see every kind, and by them all that kinds consist of.
        fn roots(generator: &mut SchemaGenerator) {
            $({
                use k8s_openapi::$($module)::+ as kinds;
                $(generator.subschema_for::<kinds::$kind>();)+
            })+
        }
    };
}

roots! {
    api::admissionregistration::v1: MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding, ValidatingWebhookConfiguration;
    api::admissionregistration::v1alpha1: MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding;
    api::admissionregistration::v1beta1: MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding;
    api::apiserverinternal::v1alpha1: StorageVersion;
    api::apps::v1: ControllerRevision, DaemonSet, Deployment, ReplicaSet, StatefulSet;
    api::authentication::v1: SelfSubjectReview, TokenRequest, TokenReview;
    api::authorization::v1: LocalSubjectAccessReview, SelfSubjectAccessReview, SelfSubjectRulesReview, SubjectAccessReview;
    api::autoscaling::v1: HorizontalPodAutoscaler, Scale;
    api::autoscaling::v2: HorizontalPodAutoscaler;
    api::batch::v1: CronJob, Job;
    api::certificates::v1: CertificateSigningRequest;
    api::certificates::v1alpha1: ClusterTrustBundle;
    api::certificates::v1beta1: ClusterTrustBundle, PodCertificateRequest;
    api::coordination::v1: Lease;
    api::coordination::v1alpha2: LeaseCandidate;
    api::coordination::v1beta1: LeaseCandidate;
    api::core::v1: Binding, ComponentStatus, ConfigMap, Endpoints, Event, LimitRange, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, PodTemplate, ReplicationController, ResourceQuota, Secret, Service, ServiceAccount;
    api::discovery::v1: EndpointSlice;
    api::events::v1: Event;
    api::flowcontrol::v1: FlowSchema, PriorityLevelConfiguration;
    api::networking::v1: Ingress, IngressClass, IPAddress, NetworkPolicy, ServiceCIDR;
    api::networking::v1beta1: IPAddress, ServiceCIDR;
    api::node::v1: RuntimeClass;
    api::policy::v1: Eviction, PodDisruptionBudget;
    api::rbac::v1: ClusterRole, ClusterRoleBinding, Role, RoleBinding;
    api::resource::v1: DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice;
    api::resource::v1alpha3: DeviceTaintRule, ResourcePoolStatusRequest;
    api::resource::v1beta1: DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice;
    api::resource::v1beta2: DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice;
    api::scheduling::v1: PriorityClass;
    api::scheduling::v1alpha2: PodGroup, Workload;
    api::storage::v1: CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment, VolumeAttributesClass;
    api::storage::v1beta1: VolumeAttributesClass;
    api::storagemigration::v1beta1: StorageVersionMigration;
    apiextensions_apiserver::pkg::apis::apiextensions::v1: CustomResourceDefinition;
    kube_aggregator::pkg::apis::apiregistration::v1: APIService;
    apimachinery::pkg::apis::meta::v1: APIGroup, APIGroupList, APIResourceList, APIVersions, DeleteOptions, Status;
}
