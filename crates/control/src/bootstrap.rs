//! The objects that every cluster has from its first second: namespaces, the `kubernetes` Service,
//! priority classes, the Service range, what joining nodes need to know.
//!
//! Run at each start: creates missing objects, updates fields that must match the server's flags, and keeps all other changes. An object that cannot be written (an
//! address that another Service has) is named in the log, and keeps no server from starting.

use std::collections::BTreeMap;
use std::net::IpAddr;

use apiserver::Registry;
use apiserver::registry::Intent;
use apiserver::request::Key;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret, Service, ServicePort, ServiceSpec};
use k8s_openapi::api::networking::v1::{ServiceCIDR, ServiceCIDRSpec};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use machinery::status::Reason;
use machinery::{Object, ObjectMeta, StatusError};

use crate::endpoints::{Own, Reconciler};

/// The ConfigMap in kube-system that joined nodes read the cluster's settings from.
pub const CLUSTER_CONFIG: &str = "decapod-cluster";

/// The server's settings that the objects contain.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    pub service_cidrs: Vec<IpNet>,
    /// Settings that a joining node takes over, as text: see [`cluster_config`].
    pub node_settings: BTreeMap<String, String>,
    /// The addresses of this API server.
    pub own: Own,
    /// The host's name.
    pub host: String,
    pub cluster_dns: Vec<IpAddr>,
    /// PEM of the authority that clients trust, and of the one for front proxies.
    pub ca_pem: String,
    pub front_proxy_ca_pem: String,
    /// Id and secret of the token that nodes join with. `None`: another program keeps the cluster's authority,
    /// and publishes how nodes join.
    pub bootstrap_token: Option<(String, String)>,
    /// `https://host:port`, as nodes reach the server.
    pub server_url: String,
    /// Whether there is a built-in storage class.
    pub has_local_path: bool,
}

/// Creates and mends the objects. An error says that the store does not answer.
pub(crate) async fn ensure(
    registry: &Registry,
    cluster: &Cluster,
    endpoints: &Reconciler,
) -> Result<(), StatusError> {
    go_on(keep(registry, cluster, endpoints).await)?;
    for (name, value, description) in PRIORITY_CLASSES {
        go_on(create(registry, priority_class(name, value, description)).await)?;
    }
    if cluster.has_local_path {
        go_on(create(registry, local_path_class()).await)?;
    }
    if let Some(service) = dns_service(cluster) {
        go_on(create(registry, service).await)?;
    }
    let mended = put(registry, token_tracking(), |new, old| {
        if !is_day(old.data.as_ref().and_then(|data| data.get("since"))) {
            old.data = new.data.clone();
        }
    });
    go_on(mended.await)?;
    for map in [authentication_config(cluster), cluster_config(cluster)] {
        go_on(put(registry, map, |new, old| old.data = new.data.clone()).await)?;
    }
    let Some(secret) = bootstrap_secret(cluster) else { return Ok(()) };
    // The signatures of the bootstrap signer stay: without a change nothing is written.
    let mended = put(registry, cluster_info(cluster), |new, old| {
        let data = old.data.get_or_insert_default();
        data.extend(new.data.iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
    });
    go_on(mended.await)?;
    go_on(put(registry, secret, |new, old| old.data = new.data.clone()).await)
}

/// One object that cannot be written does not keep the others from it; a store that does not answer does.
fn go_on(outcome: Result<(), StatusError>) -> Result<(), StatusError> {
    match outcome {
        Err(error) if !error.is(Reason::ServiceUnavailable) => {
            tracing::warn!(%error, "failed to write an object that every cluster has");
            Ok(())
        }
        outcome => outcome,
    }
}

const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];
pub(crate) const KUBERNETES: &str = "kubernetes";
pub(crate) const KUBERNETES_IPV6: &str = "kubernetes-ipv6";
const AUTHENTICATION: &str = "extension-apiserver-authentication";

/// Creates what a cluster cannot do without, where it is missing: all that can be created. The error is
/// the first one.
pub(crate) async fn keep(
    registry: &Registry,
    cluster: &Cluster,
    endpoints: &Reconciler,
) -> Result<(), StatusError> {
    let mut outcome = Ok(());
    for name in NAMESPACES {
        let namespace = Namespace { metadata: named("", name), ..Namespace::default() };
        outcome = outcome.and(create(registry, namespace).await);
    }
    outcome = outcome.and(create(registry, service_cidr(cluster)).await);
    outcome = outcome.and(create(registry, kubernetes_service(cluster)).await);
    outcome = outcome.and(endpoints.round().await);
    outcome.and(create(registry, authentication_config(cluster)).await)
}

/// Might it be one of those?
pub(crate) fn is_kept(namespace: &str, name: &str) -> bool {
    match namespace {
        "" => name == KUBERNETES || NAMESPACES.contains(&name),
        "default" => matches!(name, KUBERNETES | KUBERNETES_IPV6),
        "kube-system" => name == AUTHENTICATION,
        _ => false,
    }
}

const PRIORITY_CLASSES: [(&str, i32, &str); 2] = [
    (
        "system-cluster-critical",
        2_000_000_000,
        "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary.",
    ),
    (
        "system-node-critical",
        2_000_001_000,
        "Used for system critical pods that must not be moved from their current node.",
    ),
];

/// The default class: directories of the node where the first pod that uses a claim runs.
fn local_path_class() -> StorageClass {
    let mut metadata = named("", "local-path");
    metadata.annotations = map([("storageclass.kubernetes.io/is-default-class", "true")]);
    StorageClass {
        metadata,
        provisioner: "decapod.io/local-path".into(),
        reclaim_policy: Some("Delete".into()),
        volume_binding_mode: Some("WaitForFirstConsumer".into()),
        allow_volume_expansion: Some(true),
        ..StorageClass::default()
    }
}

pub(crate) fn named(namespace: &str, name: &str) -> ObjectMeta {
    let namespace = Some(namespace.to_owned()).filter(|namespace| !namespace.is_empty());
    ObjectMeta { name: Some(name.into()), namespace, ..ObjectMeta::default() }
}

pub(crate) fn map<const N: usize>(pairs: [(&str, &str); N]) -> Option<BTreeMap<String, String>> {
    Some(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into())
}

/// Creates missing objects.
pub(crate) async fn create<T>(registry: &Registry, object: T) -> Result<(), StatusError>
where
    T: Object + k8s_openapi::Metadata<Ty = ObjectMeta> + Clone,
{
    let (namespace, name) = (object.namespace().to_owned(), object.name().to_owned());
    if registry.find::<T>(&namespace, &name).await?.is_some() {
        return Ok(());
    }
    let ctx = registry.own_context::<T>();
    let intent = Intent::Create { object: Box::new(object) };
    match registry.write(&ctx, &Key::new(namespace, name), intent).await {
        Err(error) if !error.is(Reason::AlreadyExists) => Err(error),
        _ => Ok(()),
    }
}

/// Creates a missing object, or updates the fields that must match.
pub(crate) async fn put<T>(
    registry: &Registry,
    object: T,
    mend: fn(&T, &mut T),
) -> Result<(), StatusError>
where
    T: Object + k8s_openapi::Metadata<Ty = ObjectMeta> + Clone,
{
    let key = Key::new(object.namespace(), object.name());
    if registry.find::<T>(&key.namespace, &key.name).await?.is_none() {
        return create(registry, object).await;
    }
    let ctx = registry.own_context::<T>();
    let modify = move |there: &mut dyn Object| {
        mend(&object, there.expect_mut::<T>());
        Ok(())
    };
    registry.write(&ctx, &key, Intent::Modify(Box::new(modify))).await.map(|_| ())
}

fn service_cidr(cluster: &Cluster) -> ServiceCIDR {
    let cidrs = cluster.service_cidrs.iter().map(IpNet::to_string).collect();
    ServiceCIDR {
        metadata: named("", KUBERNETES),
        spec: Some(ServiceCIDRSpec { cidrs: Some(cidrs) }),
        status: None,
    }
}

fn priority_class(name: &str, value: i32, description: &str) -> PriorityClass {
    PriorityClass {
        metadata: named("", name),
        value: Some(value),
        description: Some(description.into()),
        ..PriorityClass::default()
    }
}

fn kubernetes_service(cluster: &Cluster) -> Service {
    let first = cluster.service_cidrs.first().and_then(|cidr| cidr.hosts().next());
    let port = ServicePort {
        name: Some("https".into()),
        port: 443,
        protocol: Some("TCP".into()),
        target_port: Some(IntOrString::Int(cluster.own.port.into())),
        ..ServicePort::default()
    };
    Service {
        metadata: ObjectMeta {
            labels: map([("component", "apiserver"), ("provider", "kubernetes")]),
            ..named("default", KUBERNETES)
        },
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".into()),
            cluster_ip: first.map(|ip| ip.to_string()),
            ports: Some(vec![port]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// Every node answers the cluster DNS address itself, so no proxy has a say in it: upstream's label
/// for Services of another proxy makes all of them leave it alone.
fn dns_service(cluster: &Cluster) -> Option<Service> {
    let first = cluster.cluster_dns.first()?;
    let port = |name: &str, protocol: &str, port: i32| ServicePort {
        name: Some(name.into()),
        port,
        protocol: Some(protocol.into()),
        ..ServicePort::default()
    };
    Some(Service {
        metadata: ObjectMeta {
            labels: map([
                ("k8s-app", "kube-dns"),
                ("kubernetes.io/cluster-service", "true"),
                ("kubernetes.io/name", "CoreDNS"),
                ("service.kubernetes.io/service-proxy-name", "decapod-dns"),
            ]),
            ..named("kube-system", "kube-dns")
        },
        spec: Some(ServiceSpec {
            cluster_ip: Some(first.to_string()),
            ports: Some(vec![
                port("dns", "UDP", 53),
                port("dns-tcp", "TCP", 53),
                port("metrics", "TCP", 9153),
            ]),
            ..ServiceSpec::default()
        }),
        status: None,
    })
}

/// How extension servers know the front proxy and clients.
fn authentication_config(cluster: &Cluster) -> ConfigMap {
    ConfigMap {
        metadata: named("kube-system", AUTHENTICATION),
        data: map([
            ("client-ca-file", cluster.ca_pem.as_str()),
            ("requestheader-allowed-names", r#"["front-proxy-client"]"#),
            ("requestheader-client-ca-file", cluster.front_proxy_ca_pem.as_str()),
            ("requestheader-extra-headers-prefix", r#"["X-Remote-Extra-"]"#),
            ("requestheader-group-headers", r#"["X-Remote-Group"]"#),
            ("requestheader-uid-headers", r#"["X-Remote-Uid"]"#),
            ("requestheader-username-headers", r#"["X-Remote-User"]"#),
        ]),
        ..ConfigMap::default()
    }
}

/// Since when Secrets record the last use of their tokens: a cleaner of unused tokens must not
/// look further back.
fn token_tracking() -> ConfigMap {
    let today = base::clock::now().strftime("%Y-%m-%d").to_string();
    ConfigMap {
        metadata: named("kube-system", "kube-apiserver-legacy-service-account-token-tracking"),
        data: map([("since", today.as_str())]),
        ..ConfigMap::default()
    }
}

fn is_day(text: Option<&String>) -> bool {
    text.is_some_and(|text| text.len() == 10 && text.parse::<jiff::civil::Date>().is_ok())
}

/// The public data for joining: the server and its authority, as kubeadm publishes it.
fn cluster_info(cluster: &Cluster) -> ConfigMap {
    use base64::Engine;
    let ca = base64::engine::general_purpose::STANDARD.encode(&cluster.ca_pem);
    let kubeconfig = format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: \"\"\n  cluster:\n    certificate-authority-data: {ca}\n    server: {}\ncontexts: []\ncurrent-context: \"\"\npreferences: {{}}\nusers: []\n",
        cluster.server_url
    );
    ConfigMap {
        metadata: named("kube-public", "cluster-info"),
        data: map([("kubeconfig", kubeconfig.as_str())]),
        ..ConfigMap::default()
    }
}

/// The cluster's settings for joining nodes: networks, DNS, disabled components. Keys
/// are the server's flags.
fn cluster_config(cluster: &Cluster) -> ConfigMap {
    ConfigMap {
        metadata: named("kube-system", CLUSTER_CONFIG),
        data: Some(cluster.node_settings.clone()),
        ..ConfigMap::default()
    }
}

fn bootstrap_secret(cluster: &Cluster) -> Option<Secret> {
    let (id, secret) = cluster.bootstrap_token.as_ref()?;
    let data = [
        ("token-id", id.as_str()),
        ("token-secret", secret.as_str()),
        ("usage-bootstrap-authentication", "true"),
        ("usage-bootstrap-signing", "true"),
        ("auth-extra-groups", "system:bootstrappers:decapod:default-node-token"),
        ("description", "The token that nodes of this cluster join with."),
    ];
    let bytes = |text: &str| k8s_openapi::ByteString(text.as_bytes().to_vec());
    Some(Secret {
        metadata: named("kube-system", &format!("bootstrap-token-{id}")),
        type_: Some("bootstrap.kubernetes.io/token".into()),
        data: Some(data.map(|(key, value)| (key.to_owned(), bytes(value))).into()),
        ..Secret::default()
    })
}
