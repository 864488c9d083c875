//! The schemas of built-in kinds, as JSON schemas with upstream's extensions.
//!
//! In: the schemas that come with the types (structure and descriptions), the field facts
//! (`x-kubernetes-*`). Out: one definition at a time, by name, with references of the form
//! `#/definitions/NAME`.
//!
//! All definitions together are a few megabytes of text. They are made on first use (OpenAPI is
//! read by people and tools, not by the cluster itself) and kept as text, a tenth of what value
//! trees would take.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

pub use schemars::JsonSchema;
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use crate::facts::{self, Definition, Field};

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

/// Is there a definition of this name?
pub fn knows(name: &str) -> bool {
    texts().contains_key(name)
}

/// One definition.
pub fn definition(name: &str) -> Option<Value> {
    let text = texts().get(name)?;
    Some(serde_json::from_str(text).expect("written by serde_json"))
}

/// What a type's schema says about one of its fields; empty if it has no such field.
///
/// Makes the schema of this type only (and of what it consists of), and keeps the answer: tables ask
/// for a few dozen sentences, for which megabytes of definitions would be too much.
pub fn describe<T: JsonSchema>(field: &'static str) -> String {
    type Known = Mutex<HashMap<(String, &'static str), String>>;
    static KNOWN: OnceLock<Known> = OnceLock::new();
    let known = KNOWN.get_or_init(Known::default);
    let key = (T::schema_name().into_owned(), field);
    if let Some(text) = known.lock().expect("no panic under the lock").get(&key) {
        return text.clone();
    }
    let mut generator = SchemaSettings::draft07().into_generator();
    let schema = T::json_schema(&mut generator).to_value();
    let text = schema["properties"][field]["description"].as_str().unwrap_or_default().to_owned();
    known.lock().expect("no panic under the lock").insert(key, text.clone());
    text
}

/// Changes when the definitions do.
pub const REVISION: &str = "k8s-openapi 0.29 v1_36";

fn texts() -> &'static HashMap<String, Box<str>> {
    static TEXTS: OnceLock<HashMap<String, Box<str>>> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let settings = SchemaSettings::draft07().with(|settings| {
            settings.definitions_path = "/definitions".into();
            settings.meta_schema = None;
        });
        let mut generator = settings.into_generator();
        roots(&mut generator);
        generator.subschema_for::<k8s_openapi::apimachinery::pkg::apis::meta::v1::WatchEvent<()>>();
        let mut all: Map<String, Value> = generator.take_definitions(false);
        for name in lists(&all) {
            let list = list(&name);
            all.insert(name, list);
        }
        all.insert(format!("{META}.Patch"), json!({
            "type": "object",
            "description": "Patch is provided to give a concrete name and type to the Kubernetes PATCH request body.",
        }));
        all.into_iter().map(|(name, schema)| extended(name, schema)).collect()
    })
}

/// The names of the lists of the kinds in `all`.
fn lists(all: &Map<String, Value>) -> Vec<String> {
    let list = |name: &String| {
        Some(format!("{name}List")).filter(|list| facts::definition(list).is_some())
    };
    all.keys().filter_map(list).filter(|list| !all.contains_key(list)).collect()
}

/// The types have lists as a generic; the API has one definition each.
fn list(name: &str) -> Value {
    let item = name.strip_suffix("List").unwrap_or(name);
    let kind = name.rsplit('.').next().unwrap_or(name);
    json!({
        "type": "object",
        "description": format!("{kind} is a list of objects."),
        "required": ["items"],
        "properties": {
            "apiVersion": { "type": "string", "description": "APIVersion defines the versioned schema of this representation of an object." },
            "kind": { "type": "string", "description": "Kind is a string value representing the REST resource this object represents." },
            "metadata": { "$ref": format!("#/definitions/{META}.ListMeta"), "description": "Standard list metadata." },
            "items": { "type": "array", "description": "The objects.", "items": { "$ref": format!("#/definitions/{item}") } },
        },
    })
}

/// Adds the extensions, and keeps the text.
fn extended(name: String, mut schema: Value) -> (String, Box<str>) {
    let fields = schema.as_object_mut().expect("every definition is an object");
    // The types' mark for what OpenAPI writes as a format.
    if fields.remove("x-kubernetes-int-or-string").is_some() {
        fields.insert("type".into(), "string".into());
        fields.insert("format".into(), "int-or-string".into());
    }
    if let Some(definition) = facts::definition(&name) {
        // The types cannot be without metadata; the API's kinds can.
        if definition.kinds().next().is_some()
            && let Some(Value::Array(required)) = fields.get_mut("required")
        {
            required.retain(|field| field != "metadata");
            if required.is_empty() {
                fields.remove("required");
            }
        }
        add_kinds(fields, definition);
        if !definition.map_type.is_empty() {
            fields.insert("x-kubernetes-map-type".into(), definition.map_type.into());
        }
        let properties = fields.get_mut("properties").and_then(Value::as_object_mut);
        for field in properties.into_iter().flat_map(|properties| matching(properties, definition))
        {
            let (schema, facts) = field;
            add_facts(schema, facts);
        }
    }
    let text = schema.to_string().into_boxed_str();
    (name, text)
}

fn matching(
    properties: &mut Map<String, Value>,
    definition: Definition,
) -> impl Iterator<Item = (&mut Map<String, Value>, Field)> {
    properties
        .iter_mut()
        .filter_map(move |(name, schema)| Some((schema.as_object_mut()?, definition.field(name)?)))
}

fn add_kinds(schema: &mut Map<String, Value>, definition: Definition) {
    let kinds: Vec<Value> = definition
        .kinds()
        .map(|(group, version, kind)| json!({ "group": group, "version": version, "kind": kind }))
        .collect();
    if !kinds.is_empty() {
        schema.insert("x-kubernetes-group-version-kind".into(), kinds.into());
    }
}

fn add_facts(schema: &mut Map<String, Value>, field: Field) {
    let mut put = |name: &str, text: &str| {
        if !text.is_empty() {
            schema.insert(name.into(), text.into());
        }
    };
    let type_of =
        if field.shape == "[]" { "x-kubernetes-list-type" } else { "x-kubernetes-map-type" };
    put(type_of, field.list_type);
    put("x-kubernetes-patch-merge-key", field.merge_key);
    put("x-kubernetes-patch-strategy", field.strategy);
    if !field.map_keys.is_empty() {
        let keys: Vec<&str> = field.map_keys.split(',').collect();
        schema.insert("x-kubernetes-list-map-keys".into(), keys.into());
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_have_structure_descriptions_and_facts() {
        let spec = definition("io.k8s.api.core.v1.ServiceSpec").expect("known");
        let ports = &spec["properties"]["ports"];
        assert_eq!(ports["items"]["$ref"], "#/definitions/io.k8s.api.core.v1.ServicePort");
        assert_eq!(ports["x-kubernetes-list-type"], "map");
        assert_eq!(ports["x-kubernetes-list-map-keys"], json!(["port", "protocol"]));
        assert_eq!(ports["x-kubernetes-patch-merge-key"], "port");
        assert_eq!(spec["properties"]["selector"]["x-kubernetes-map-type"], "atomic");
        assert!(ports["description"].as_str().is_some_and(|text| text.len() > 20));
        let deployment = definition("io.k8s.api.apps.v1.Deployment").expect("known");
        assert_eq!(
            deployment["x-kubernetes-group-version-kind"],
            json!([{ "group": "apps", "version": "v1", "kind": "Deployment" }])
        );
        let list = definition("io.k8s.api.apps.v1.DeploymentList").expect("known");
        assert_eq!(
            list["properties"]["items"]["items"]["$ref"],
            "#/definitions/io.k8s.api.apps.v1.Deployment"
        );
        let either = definition("io.k8s.apimachinery.pkg.util.intstr.IntOrString").expect("known");
        assert_eq!(either["format"], "int-or-string");
    }

    #[test]
    fn references_lead_somewhere() {
        fn check(schema: &Value, name: &str) {
            match schema {
                Value::Object(fields) => {
                    if let Some(Value::String(reference)) = fields.get("$ref") {
                        let target = reference.strip_prefix("#/definitions/").unwrap_or_default();
                        assert!(knows(target), "{name}: {reference}");
                    }
                    fields.values().for_each(|value| check(value, name));
                }
                Value::Array(items) => items.iter().for_each(|item| check(item, name)),
                _ => {}
            }
        }
        for name in texts().keys() {
            check(&definition(name).expect("known"), name);
        }
        let bytes: usize = texts().values().map(|text| text.len()).sum();
        assert!(
            texts().len() > 500 && bytes < 4 << 20,
            "{} definitions, {bytes} bytes",
            texts().len()
        );
    }
}
