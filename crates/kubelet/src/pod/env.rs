//! A container's environment.
//!
//! In: the pod, the container, its Services, and the ConfigMaps, Secrets and files that it references;
//! the caller fetches those beforehand ([`references`] and [`file_references`] list them). Out: names
//! and values in order. Pure.
//! Upstream: `kubelet_pods.go` makeEnvironmentVariables, `pkg/kubelet/envvars`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    ConfigMap, Container, EnvVarSource, FileKeySelector, Pod, Secret, Service,
};
use release::features::{self, Feature};

use crate::pod::downward::{self, Addresses, DownwardError};
use crate::pod::expand::expand;
use crate::pod::objects::{ObjectError, References};
use crate::resources::ResourceList;

/// The ConfigMaps and Secrets of one namespace that a pod may read, as far as they exist.
#[derive(Clone, Default)]
pub struct Sources {
    pub config_maps: BTreeMap<String, Arc<ConfigMap>>,
    pub secrets: BTreeMap<String, Arc<Secret>>,
    /// Objects whose existence could not be determined, with the error.
    pub unknown: Unknown,
}

impl Sources {
    /// The ConfigMap, if it exists; an error if that could not be determined.
    pub fn config_map(&self, name: &str) -> Result<Option<&ConfigMap>, ObjectError> {
        let unknown = self.unknown.config_maps.get(name);
        unknown
            .map_or_else(|| Ok(self.config_maps.get(name).map(AsRef::as_ref)), |e| Err(e.clone()))
    }

    /// Like [`Self::config_map`].
    pub fn secret(&self, name: &str) -> Result<Option<&Secret>, ObjectError> {
        let unknown = self.unknown.secrets.get(name);
        unknown.map_or_else(|| Ok(self.secrets.get(name).map(AsRef::as_ref)), |e| Err(e.clone()))
    }
}

/// By name.
#[derive(Clone, Default)]
pub struct Unknown {
    pub config_maps: BTreeMap<String, ObjectError>,
    pub secrets: BTreeMap<String, ObjectError>,
}

impl Unknown {
    pub fn first(&self) -> Option<&ObjectError> {
        self.config_maps.values().chain(self.secrets.values()).next()
    }
}

/// Why a container's environment cannot be made: `CreateContainerConfigError`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    #[error("configmap \"{0}\" not found")]
    NoConfigMap(String),
    #[error("secret \"{0}\" not found")]
    NoSecret(String),
    #[error("couldn't find key {key} in ConfigMap {namespace}/{name}")]
    NoConfigMapKey { key: String, namespace: String, name: String },
    #[error("couldn't find key {key} in Secret {namespace}/{name}")]
    NoSecretKey { key: String, namespace: String, name: String },
    #[error("cannot find the volume {0:?} referenced by FileKeyRef")]
    NoVolume(String),
    /// Upstream logs the details only.
    #[error("couldn't parse env file")]
    File,
    #[error("environment variable key {key:?} not found in file {path:?}")]
    NoFileKey { key: String, path: String },
    #[error(transparent)]
    Downward(#[from] DownwardError),
}

/// The node's data for env and volumes.
pub struct Surroundings<'a> {
    pub addresses: &'a Addresses,
    pub allocatable: &'a ResourceList,
    pub sources: &'a Sources,
}

/// Values from files, by volume, path and key: the value (empty if the file has no such key), and the
/// file's name for messages.
pub type FileValues = BTreeMap<(String, String, String), Result<(String, String), EnvError>>;

/// The file keys that a container's env refers to.
pub fn file_references(container: &Container) -> impl Iterator<Item = &FileKeySelector> {
    let sources = container.env.iter().flatten().filter_map(|var| var.value_from.as_ref());
    let files = sources.filter_map(|source| source.file_key_ref.as_ref());
    files.filter(|_| features::enabled(Feature::EnvFiles))
}

pub fn file_key(from: &FileKeySelector) -> (String, String, String) {
    (from.volume_name.clone(), from.path.clone(), from.key.clone())
}

/// Names of the ConfigMaps and Secrets that a container's env refers to.
pub fn references(container: &Container) -> References {
    let mut all = References::default();
    for from in container.env_from.iter().flatten() {
        all.config_maps.extend(from.config_map_ref.iter().map(|r| r.name.clone()));
        all.secrets.extend(from.secret_ref.iter().map(|r| r.name.clone()));
    }
    for source in container.env.iter().flatten().filter_map(|var| var.value_from.as_ref()) {
        all.config_maps.extend(source.config_map_key_ref.iter().map(|r| r.name.clone()));
        all.secrets.extend(source.secret_key_ref.iter().map(|r| r.name.clone()));
    }
    all
}

/// The environment of `container`; `services` comes from [`service_variables`].
pub fn environment(
    pod: &Pod,
    container: &Container,
    services: &BTreeMap<String, String>,
    around: &Surroundings<'_>,
    files: &FileValues,
) -> Result<Vec<(String, String)>, EnvError> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let mut values: Vec<(String, String)> = vec![];
    let set = |values: &mut Vec<(String, String)>, name: &str, value: String| match values
        .iter_mut()
        .find(|(known, _)| known == name)
    {
        Some(entry) => entry.1 = value,
        None => values.push((name.to_string(), value)),
    };
    for (name, value) in from_whole_objects(container, around.sources)? {
        set(&mut values, &name, value);
    }
    for var in container.env.iter().flatten() {
        let written = var.value.as_deref().unwrap_or_default();
        let value = if written.is_empty() {
            match &var.value_from {
                None => String::new(),
                Some(source) => {
                    let found = match &source.file_key_ref {
                        Some(from) => from_file(from, files)?,
                        None => one_source(pod, container, source, namespace, around)?,
                    };
                    match found {
                        Some(value) => value,
                        None => continue,
                    }
                }
            }
        } else {
            expand(written, |name| {
                let own = values.iter().find(|(known, _)| known == name).map(|(_, value)| value);
                own.or_else(|| services.get(name)).cloned()
            })
        };
        set(&mut values, &var.name, value);
    }
    for (name, value) in services {
        if !values.iter().any(|(known, _)| known == name) {
            values.push((name.clone(), value.clone()));
        }
    }
    Ok(values)
}

fn from_whole_objects(
    container: &Container,
    sources: &Sources,
) -> Result<Vec<(String, String)>, EnvError> {
    let mut out = vec![];
    for from in container.env_from.iter().flatten() {
        let prefix = from.prefix.as_deref().unwrap_or_default();
        if let Some(reference) = &from.config_map_ref {
            match sources.config_maps.get(&reference.name) {
                Some(map) => {
                    let data = map.data.iter().flatten();
                    out.extend(data.map(|(key, value)| (format!("{prefix}{key}"), value.clone())));
                }
                None if reference.optional == Some(true) => {}
                None => return Err(EnvError::NoConfigMap(reference.name.clone())),
            }
        }
        if let Some(reference) = &from.secret_ref {
            match sources.secrets.get(&reference.name) {
                Some(secret) => {
                    let data = secret.data.iter().flatten();
                    out.extend(data.map(|(key, value)| {
                        (format!("{prefix}{key}"), String::from_utf8_lossy(&value.0).into_owned())
                    }));
                }
                None if reference.optional == Some(true) => {}
                None => return Err(EnvError::NoSecret(reference.name.clone())),
            }
        }
    }
    Ok(out)
}

/// The file must exist and be well-formed even if its key is optional.
fn from_file(from: &FileKeySelector, files: &FileValues) -> Result<Option<String>, EnvError> {
    if !features::enabled(Feature::EnvFiles) {
        return Ok(Some(String::new()));
    }
    let known = files.get(&file_key(from)).cloned();
    let (value, path) =
        known.unwrap_or_else(|| Err(EnvError::NoVolume(from.volume_name.clone())))?;
    match value.is_empty() {
        false => Ok(Some(value)),
        true if from.optional == Some(true) => Ok(None),
        true => Err(EnvError::NoFileKey { key: from.key.clone(), path }),
    }
}

/// `None` if an optional source is absent: then the variable is not set.
fn one_source(
    pod: &Pod,
    container: &Container,
    source: &EnvVarSource,
    namespace: &str,
    around: &Surroundings<'_>,
) -> Result<Option<String>, EnvError> {
    if let Some(field) = &source.field_ref {
        return Ok(Some(downward::field(pod, &field.field_path, around.addresses)?));
    }
    if let Some(selector) = &source.resource_field_ref {
        let value = downward::resource(pod, Some(container), selector, around.allocatable)?;
        return Ok(Some(value));
    }
    if let Some(reference) = &source.config_map_key_ref {
        let optional = reference.optional == Some(true);
        let Some(map) = around.sources.config_maps.get(&reference.name) else {
            let error = EnvError::NoConfigMap(reference.name.clone());
            return if optional { Ok(None) } else { Err(error) };
        };
        return match map.data.as_ref().and_then(|data| data.get(&reference.key)) {
            Some(value) => Ok(Some(value.clone())),
            None if optional => Ok(None),
            None => Err(EnvError::NoConfigMapKey {
                key: reference.key.clone(),
                namespace: namespace.into(),
                name: reference.name.clone(),
            }),
        };
    }
    if let Some(reference) = &source.secret_key_ref {
        let optional = reference.optional == Some(true);
        let Some(secret) = around.sources.secrets.get(&reference.name) else {
            let error = EnvError::NoSecret(reference.name.clone());
            return if optional { Ok(None) } else { Err(error) };
        };
        return match secret.data.as_ref().and_then(|data| data.get(&reference.key)) {
            Some(value) => Ok(Some(String::from_utf8_lossy(&value.0).into_owned())),
            None if optional => Ok(None),
            None => Err(EnvError::NoSecretKey {
                key: reference.key.clone(),
                namespace: namespace.into(),
                name: reference.name.clone(),
            }),
        };
    }
    Ok(Some(String::new()))
}

/// The addresses of Services, in the style of container links: `kubernetes` of namespace `default` for
/// every pod, the Services of the pod's namespace if enableServiceLinks is true.
pub fn service_variables<'a>(
    services: impl IntoIterator<Item = &'a Service>,
    namespace: &str,
    enable_links: bool,
) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    for service in services {
        let name = service.metadata.name.as_deref().unwrap_or_default();
        let home = service.metadata.namespace.as_deref().unwrap_or_default();
        let is_api = home == "default" && name == "kubernetes";
        if is_api || (enable_links && home == namespace) {
            // A Service of the same name in the pod's namespace wins over the API's.
            if is_api && home != namespace && out.contains_key("KUBERNETES_SERVICE_HOST") {
                continue;
            }
            add_service(&mut out, name, service);
        }
    }
    out
}

fn add_service(out: &mut BTreeMap<String, String>, name: &str, service: &Service) {
    let Some(spec) = &service.spec else { return };
    let ip = spec.cluster_ip.as_deref().unwrap_or_default();
    if ip.is_empty() || ip == "None" {
        return;
    }
    let Some(ports) = spec.ports.as_ref().filter(|ports| !ports.is_empty()) else { return };
    let prefix = name.to_uppercase().replace('-', "_");
    out.insert(format!("{prefix}_SERVICE_HOST"), ip.to_string());
    out.insert(format!("{prefix}_SERVICE_PORT"), ports[0].port.to_string());
    let is_v6 = ip.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6());
    for (index, port) in ports.iter().enumerate() {
        if let Some(port_name) = port.name.as_deref().filter(|n| !n.is_empty()) {
            let port_name = port_name.to_uppercase().replace('-', "_");
            out.insert(format!("{prefix}_SERVICE_PORT_{port_name}"), port.port.to_string());
        }
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        let lower = protocol.to_lowercase();
        let host_port = match is_v6 {
            true => format!("[{ip}]:{}", port.port),
            false => format!("{ip}:{}", port.port),
        };
        let url = format!("{lower}://{host_port}");
        if index == 0 {
            out.insert(format!("{prefix}_PORT"), url.clone());
        }
        let port_prefix = format!("{prefix}_PORT_{}_{}", port.port, protocol.to_uppercase());
        out.insert(format!("{port_prefix}_PROTO"), lower);
        out.insert(format!("{port_prefix}_PORT"), port.port.to_string());
        out.insert(format!("{port_prefix}_ADDR"), ip.to_string());
        out.insert(port_prefix, url);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn service(namespace: &str, name: &str, ip: &str) -> Service {
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterIP": ip, "ports": [{"name": "https", "port": 443, "protocol": "TCP"}]}}))
        .expect("a service")
    }

    #[test]
    fn service_links() {
        let all = [
            service("default", "kubernetes", "10.43.0.1"),
            service("ns", "my-web", "10.43.0.9"),
            service("ns", "headless", "None"),
            service("other", "x", "10.43.0.8"),
        ];
        let linked = service_variables(&all, "ns", true);
        let expected = [
            ("KUBERNETES_SERVICE_HOST", "10.43.0.1"),
            ("KUBERNETES_SERVICE_PORT_HTTPS", "443"),
            ("KUBERNETES_PORT", "tcp://10.43.0.1:443"),
            ("MY_WEB_PORT_443_TCP_ADDR", "10.43.0.9"),
            ("MY_WEB_PORT_443_TCP", "tcp://10.43.0.9:443"),
        ];
        for (name, value) in expected {
            assert_eq!(linked.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert_eq!(linked.len(), 16);
        assert_eq!(service_variables(&all, "ns", false).len(), 8);
    }

    fn check(container: serde_json::Value, expected: Result<&[(&str, &str)], &str>) {
        let container: Container = serde_json::from_value(container).expect("a container");
        let pod = Pod {
            metadata: serde_json::from_value(json!({"name": "p", "namespace": "ns"}))
                .expect("meta"),
            ..Pod::default()
        };
        let map: ConfigMap =
            serde_json::from_value(json!({"data": {"k": "v", "l": "w"}})).expect("a map");
        let secret: Secret =
            serde_json::from_value(json!({"data": {"pw": "c2VjcmV0"}})).expect("a secret");
        let sources = Sources {
            config_maps: [("cm".to_string(), Arc::new(map))].into(),
            secrets: [("sec".to_string(), Arc::new(secret))].into(),
            ..Sources::default()
        };
        let services = [("SVC_HOST".to_string(), "10.0.0.1".to_string())].into();
        let around = Surroundings {
            addresses: &Addresses::default(),
            allocatable: &ResourceList::new(),
            sources: &sources,
        };
        let found = |value: &str| Ok((value.to_owned(), "/v/f".to_owned()));
        let key = |path: &str, key: &str| ("v".to_owned(), path.to_owned(), key.to_owned());
        let files = FileValues::from([
            (key("f", "K"), found("file")),
            (key("f", "L"), found("")),
            (key("g", "K"), Err(EnvError::File)),
        ]);
        let got = environment(&pod, &container, &services, &around, &files);
        let got = got.map_err(|error| error.to_string());
        let expected = expected.map_err(String::from).map(|pairs| {
            let own = |pair: &(&str, &str)| (pair.0.to_string(), pair.1.to_string());
            pairs.iter().map(own).collect::<Vec<_>>()
        });
        assert_eq!(got, expected);
    }

    #[test]
    fn values_come_from_files() {
        let var = |volume: &str, path: &str, key: &str, optional: bool| {
            json!({"name": "c", "env": [{"name": "X", "valueFrom": {"fileKeyRef":
                {"volumeName": volume, "path": path, "key": key, "optional": optional}}},
                {"name": "Y", "value": "$(X)"}]})
        };
        const LINKS: (&str, &str) = ("SVC_HOST", "10.0.0.1");
        check(var("v", "f", "K", false), Ok(&[("X", "file"), ("Y", "file"), LINKS]));
        check(var("v", "f", "L", true), Ok(&[("Y", "$(X)"), LINKS]));
        let no_key = "environment variable key \"L\" not found in file \"/v/f\"";
        check(var("v", "f", "L", false), Err(no_key));
        check(var("v", "g", "K", true), Err("couldn't parse env file"));
        check(
            var("w", "f", "K", true),
            Err("cannot find the volume \"w\" referenced by FileKeyRef"),
        );
        let gates = features::Gates::DEFAULT.with(Feature::EnvFiles, false);
        features::scoped(gates, || {
            check(var("v", "f", "K", false), Ok(&[("X", ""), ("Y", ""), LINKS]));
        });
    }

    #[test]
    fn values_come_from_all_sources_in_order() {
        check(
            json!({"name": "c", "env": [
                {"name": "A", "value": "1"},
                {"name": "B", "value": "$(A)-$(SVC_HOST)-$(NO)"},
                {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "S", "valueFrom": {"secretKeyRef": {"name": "sec", "key": "pw"}}}]}),
            Ok(&[
                ("A", "1"),
                ("B", "1-10.0.0.1-$(NO)"),
                ("N", "p"),
                ("S", "secret"),
                ("SVC_HOST", "10.0.0.1"),
            ]),
        );
        check(
            json!({"name": "c", "envFrom": [{"prefix": "P_", "configMapRef": {"name": "cm"}}],
                "env": [{"name": "P_k", "value": "own"}, {"name": "SVC_HOST", "value": "mine"}]}),
            Ok(&[("P_k", "own"), ("P_l", "w"), ("SVC_HOST", "mine")]),
        );
    }

    #[test]
    fn absent_sources() {
        let key = |object: &str, name: &str, key: &str, optional: bool| {
            json!({"name": "c", "env": [{"name": "X", "valueFrom":
                {object: {"name": name, "key": key, "optional": optional}}}]})
        };
        check(key("configMapKeyRef", "no", "k", false), Err("configmap \"no\" not found"));
        check(
            key("configMapKeyRef", "cm", "z", false),
            Err("couldn't find key z in ConfigMap ns/cm"),
        );
        check(key("secretKeyRef", "sec", "z", false), Err("couldn't find key z in Secret ns/sec"));
        check(key("secretKeyRef", "no", "z", true), Ok(&[("SVC_HOST", "10.0.0.1")]));
        check(
            json!({"name": "c", "envFrom": [{"secretRef": {"name": "no"}}]}),
            Err("secret \"no\" not found"),
        );
    }
}
