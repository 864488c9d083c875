//! A machine with a join token that attacks the cluster: it tries to get another node's identity, the API
//! server's names, other nodes' packets, all pods and Secrets, and access after its Node is deleted. It
//! gets only what a new node gets. Leaves no Node, no requests, and everything else as it was.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pki::{Certificate, Component, Identity, Issued, JoinToken, Profile};
use serde_json::{Value, json};
use testkit::host::Host;
use testkit::http::{ApiClient, Connection, Response};
use testkit::wait;

use crate::story::{LONG, Story};

const REQUEST: Duration = Duration::from_secs(20);
const CSRS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
const KUBELET_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const KUBELET_SERVING: &str = "kubernetes.io/kubelet-serving";
const CLIENT: &str = "kubernetes.io/kube-apiserver-client";
const NODES: &str = "/api/v1/nodes";

/// The machine's credentials.
enum Who<'a> {
    Token,
    Certificate(&'a Issued),
}

/// A created CertificateSigningRequest, and its key.
struct Asked {
    name: String,
    key_pem: String,
}

struct Machine {
    host: Host,
    address: String,
    server: String,
    authority: String,
    token: String,
}

impl Machine {
    fn new(story: &mut Story) -> Result<Self> {
        let host = Host::new("evil")?;
        let address = story.switch.connect(&host)?;
        let data = story.server.data_directory();
        let token = JoinToken::parse(&std::fs::read_to_string(data.join("token"))?)?;
        Ok(Self {
            host,
            address,
            server: story.server.url()?.trim_start_matches("https://").to_owned(),
            authority: std::fs::read_to_string(data.join("pki/ca.crt"))?,
            token: token.bootstrap().to_string(),
        })
    }

    fn send(&self, who: &Who<'_>, verb: &str, path: &str, body: &Value) -> Result<Response> {
        let kind = match verb {
            "PATCH" => "application/merge-patch+json",
            _ => "application/json",
        };
        let bearer = format!("Bearer {}", self.token);
        let mut headers = vec![("Accept", "application/json"), ("Content-Type", kind)];
        let client = match who {
            Who::Certificate(issued) => {
                ApiClient::new(&self.server, &self.authority, &issued.cert_pem, &issued.key_pem)?
            }
            Who::Token => {
                headers.push(("Authorization", &bearer));
                let any = pki::Authority::generate("any")?.issue(&Profile::client("any", &[]))?;
                ApiClient::new(&self.server, &self.authority, &any.cert_pem, &any.key_pem)?
                    .without_identity()?
            }
        };
        let text = if body.is_null() { String::new() } else { body.to_string() };
        self.host.in_network(|| {
            Connection::new(client, REQUEST).send(verb, path, &headers, text.as_bytes())
        })?
    }

    fn refused(&self, who: &Who<'_>, verb: &str, path: &str, body: &Value) -> Result<()> {
        let answer = self.send(who, verb, path, body)?;
        ensure!(answer.status == 403, "{verb} {path} {body}: {answer:?}");
        Ok(())
    }

    fn allowed(&self, who: &Who<'_>, verb: &str, path: &str, body: &Value) -> Result<()> {
        let answer = self.send(who, verb, path, body)?;
        ensure!((200..300).contains(&answer.status), "{verb} {path} {body}: {answer:?}");
        Ok(())
    }

    /// Creates a CertificateSigningRequest, whatever its result will be.
    fn ask(&self, who: &Who<'_>, signer: &str, profile: &Profile) -> Result<Asked> {
        let (request, key_pem) = pki::new_request(profile)?;
        let usage = if signer == KUBELET_SERVING { "server auth" } else { "client auth" };
        let body = json!({
            "apiVersion": "certificates.k8s.io/v1",
            "kind": "CertificateSigningRequest",
            "metadata": {"generateName": "hostile-"},
            "spec": {
                "request": STANDARD.encode(request),
                "signerName": signer,
                "usages": ["digital signature", usage],
            },
        });
        let answer = self.send(who, "POST", CSRS, &body)?;
        ensure!(answer.status == 201, "{answer:?}");
        let made: Value = serde_json::from_str(&answer.body)?;
        let name = made["metadata"]["name"].as_str().context("a name")?.to_owned();
        Ok(Asked { name, key_pem })
    }

    /// A certificate that is approved automatically.
    fn gets(
        &self,
        story: &Story,
        who: &Who<'_>,
        signer: &str,
        profile: &Profile,
    ) -> Result<Issued> {
        let asked = self.ask(who, signer, profile)?;
        let what = format!("the request {} of {} is signed", asked.name, profile.common_name);
        let pem = wait::until(LONG, &what, || {
            let text = story.value(&format!("csr {}", asked.name), ".status.certificate")?;
            ensure!(!text.is_empty(), "{}", story.kubectl(&format!("get csr {}", asked.name))?);
            Ok(String::from_utf8(STANDARD.decode(text)?)?)
        })?;
        Ok(Issued { cert_pem: pem, key_pem: asked.key_pem })
    }
}

fn leaf(issued: &Issued) -> Result<Certificate> {
    let chain = pki::certificates(issued.cert_pem.as_bytes())?;
    chain.into_iter().next().context("a certificate")
}

fn conditions(story: &Story, name: &str) -> Result<String> {
    story.value(&format!("csr {name}"), ".status.conditions[*].type")
}

pub fn a_join_token_leads_nowhere(story: &mut Story) -> Result<()> {
    let machine = Machine::new(story)?;
    other_names(story, &machine).context("the name of a node that exists")?;
    let evil = Identity::node("evil").profile();
    let first = machine.gets(story, &Who::Token, KUBELET_CLIENT, &evil)?;
    let rival = machine.gets(story, &Who::Token, KUBELET_CLIENT, &evil)?;
    let cert = leaf(&first)?;
    let lives = cert.not_after.duration_since(cert.not_before).as_secs();
    ensure!(cert.uid.is_none() && lives <= 3900, "{cert:?}");
    registers(story, &machine, &first, &rival).context("a Node of one's own making")?;
    let bound = machine.gets(story, &Who::Certificate(&first), KUBELET_CLIENT, &evil)?;
    let uid = story.value("node evil", ".metadata.uid")?;
    ensure!(leaf(&bound)?.uid.as_deref() == Some(&uid), "{:?}", leaf(&bound)?);
    let who = Who::Certificate(&bound);
    server_names(story, &machine, &who).context("the API server's names")?;
    let parts = components(story, &machine, &who).context("the identities of proxy and DNS")?;
    reaches(&machine, &who).context("what a node may reach")?;
    mirror_pods(&machine, &who, &uid).context("mirror pods")?;
    packets(story).context("other nodes' packets")?;
    let all: Vec<&Issued> = [&first, &rival, &bound].into_iter().chain(&parts).collect();
    revoked(story, &machine, &bound, &all).context("after its Node is deleted")?;
    story.kubectl("delete csr --all").map(drop)
}

/// Neither with a request of its own nor with the agent.
fn other_names(story: &Story, machine: &Machine) -> Result<()> {
    let node1 = Identity::node("node1").profile();
    let asked = machine.ask(&Who::Token, KUBELET_CLIENT, &node1)?;
    wait::until(LONG, "the request is denied", || {
        let found = conditions(story, &asked.name)?;
        ensure!(found == "Denied", "{found:?}");
        Ok(())
    })?;
    let token = story.server.data_directory().join("token").display().to_string();
    let data = machine.host.directory().join("twin").display().to_string();
    let url = story.server.url()?;
    let mut command = machine.host.command(&story.binary);
    command.args(["agent", "--server", &url, "--token-file", &token, "--data-dir", &data]);
    command.args(["--node-name", "node1", "--node-ip", &machine.address]);
    let output = machine.host.output(&mut command)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let complaints: Vec<&str> = said.lines().filter(|line| line.starts_with("decapod: ")).collect();
    ensure!(output.status.code() == Some(1) && complaints.len() == 1, "{said}");
    ensure!(complaints[0].contains("a node named \"node1\" exists already"), "{said}");
    Ok(())
}

/// Registers a Node that claims addresses of others; the server accepts it but ignores these addresses.
fn registers(story: &Story, machine: &Machine, first: &Issued, rival: &Issued) -> Result<()> {
    let who = Who::Certificate(first);
    let (server, own) = (story.address.as_str(), machine.address.as_str());
    let claimed = [server, "10.43.0.1", "127.0.0.1", own, "10.0.0.5/exec/?x="];
    let addresses: Vec<Value> =
        claimed.iter().map(|address| json!({"type": "InternalIP", "address": address})).collect();
    let node = |spec: Value, annotations: Value| {
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "evil", "annotations": annotations},
            "spec": spec,
            "status": {"addresses": addresses},
        })
    };
    for cidr in ["1.0.0.0/8", "0.0.0.0/0", "10.42.0.0/24", "10.42.77.0/24"] {
        let body = node(json!({"podCIDR": cidr, "podCIDRs": [cidr]}), json!({}));
        machine.refused(&who, "POST", NODES, &body)?;
    }
    for name in [api::nodes::SERVING_ADDRESSES, api::nodes::REGISTERED_BY] {
        let body = node(json!({}), json!({ name: server }));
        machine.refused(&who, "POST", NODES, &body)?;
    }
    machine.allowed(&who, "POST", NODES, &node(json!({}), json!({})))?;
    let own = format!("{NODES}/evil");
    for patch in [
        json!({"spec": {"podCIDR": "1.0.0.0/8", "podCIDRs": ["1.0.0.0/8"]}}),
        json!({"metadata": {"annotations": {(api::nodes::SERVING_ADDRESSES): server}}}),
        json!({"metadata": {"annotations": {(api::nodes::REGISTERED_BY): "x"}}}),
    ] {
        machine.refused(&who, "PATCH", &own, &patch)?;
    }
    // Removing the annotation has no effect.
    let removal = json!({"metadata": {"annotations": {(api::nodes::REGISTERED_BY): null}}});
    machine.allowed(&who, "PATCH", &own, &removal)?;
    let noted = story.json("get node evil")?["metadata"]["annotations"].clone();
    ensure!(noted[api::nodes::REGISTERED_BY].is_string(), "{noted}");
    machine.allowed(&who, "GET", &own, &Value::Null)?;
    // The other certificate with that name did not register the Node.
    wait::until(LONG, "the rival's certificate ends", || {
        machine.refused(&Who::Certificate(rival), "GET", &own, &Value::Null)
    })
}

fn server_names(story: &Story, machine: &Machine, who: &Who<'_>) -> Result<()> {
    let evil = || Identity::node("evil").profile();
    let server: &str = &story.address;
    for names in [
        &["10.43.0.1", server, "127.0.0.1", "kubernetes.default.svc"][..],
        &["10.43.0.1"],
        &[server],
        &["127.0.0.1"],
        &["evil", "kubernetes"],
        &["node1"],
        &["192.168.77.250"],
    ] {
        let asked = machine.ask(who, KUBELET_SERVING, &evil().with_sans(names))?;
        story.soon_has_events(&asked.name, &["NotAutoApproved"])?;
        let found = conditions(story, &asked.name)?;
        ensure!(found.is_empty(), "{names:?}: {found}");
    }
    let own = evil().with_sans(["evil", machine.address.as_str()]);
    machine.gets(story, who, KUBELET_SERVING, &own).map(drop)
}

fn components(story: &Story, machine: &Machine, who: &Who<'_>) -> Result<[Issued; 2]> {
    let of = |component: Component, node: &str| -> Result<Profile> {
        Ok(component.on_node(node).context("nodes have it")?.profile())
    };
    let mut others = vec![Component::Scheduler.profile(), Component::ControllerManager.profile()];
    for component in [Component::Proxy, Component::Dns] {
        others.extend([component.profile(), of(component, "node1")?]);
    }
    let asked = others.iter().map(|profile| machine.ask(who, CLIENT, profile));
    let asked = asked.collect::<Result<Vec<_>>>()?;
    let proxy = machine.gets(story, who, CLIENT, &of(Component::Proxy, "evil")?)?;
    let dns = machine.gets(story, who, CLIENT, &of(Component::Dns, "evil")?)?;
    // These requests were created before those that were signed.
    for one in asked {
        let found = conditions(story, &one.name)?;
        ensure!(found.is_empty(), "{}: {found}", one.name);
    }
    machine.allowed(&Who::Certificate(&dns), "GET", "/api/v1/services", &Value::Null)?;
    machine.allowed(&Who::Certificate(&proxy), "GET", NODES, &Value::Null)?;
    for path in ["/api/v1/pods", "/api/v1/secrets", "/api/v1/configmaps", CSRS] {
        for part in [&dns, &proxy] {
            machine.refused(&Who::Certificate(part), "GET", path, &Value::Null)?;
        }
    }
    machine.refused(&Who::Certificate(&dns), "GET", NODES, &Value::Null)?;
    // For network policies the proxy reads pods reduced to labels and addresses; others do not.
    let reduced = "/apis/network.decapod.io/v1/podaddresses";
    let found = machine.send(&Who::Certificate(&proxy), "GET", reduced, &Value::Null)?;
    ensure!(found.status == 200 && found.body.contains("\"podIPs\""), "{found:?}");
    for hidden in ["\"image\"", "\"env\"", "\"volumes\"", "\"annotations\"", "\"managedFields\""] {
        ensure!(!found.body.contains(hidden), "{hidden} is in {found:?}");
    }
    for other in [&Who::Certificate(&dns), who] {
        machine.refused(other, "GET", reduced, &Value::Null)?;
    }
    Ok([proxy, dns])
}

fn reaches(machine: &Machine, who: &Who<'_>) -> Result<()> {
    for path in [
        NODES,
        "/api/v1/nodes/node1",
        "/api/v1/pods",
        "/api/v1/pods?fieldSelector=spec.nodeName%3Dnode1",
        "/api/v1/secrets",
        "/api/v1/namespaces/kube-system/secrets",
        "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/node1",
    ] {
        machine.refused(who, "GET", path, &Value::Null)?;
    }
    let other = json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}});
    machine.refused(who, "PATCH", &format!("{NODES}/evil"), &other)?;
    machine.refused(who, "PATCH", &format!("{NODES}/node1/status"), &json!({"status": {}}))
}

fn mirror_pods(machine: &Machine, who: &Who<'_>, uid: &str) -> Result<()> {
    for (name, volume) in [
        ("csi", json!({"csi": {"driver": "d", "nodePublishSecretRef": {"name": "s"}}})),
        ("rbd", json!({"rbd": {"monitors": ["m"], "image": "i", "secretRef": {"name": "s"}}})),
        ("secret", json!({"secret": {"secretName": "s"}})),
    ] {
        let mut volume = volume;
        volume["name"] = "v".into();
        let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "evil", "uid": uid,
            "controller": true});
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "ownerReferences": [owner],
                "annotations": {"kubernetes.io/config.mirror": "x"}},
            "spec": {"nodeName": "evil", "volumes": [volume],
                "automountServiceAccountToken": false,
                "containers": [{"name": "c", "image": "i"}]},
        });
        machine.refused(who, "POST", "/api/v1/namespaces/default/pods", &pod)?;
    }
    Ok(())
}

/// The Node has a pod CIDR by now, and claims the first node's address.
fn packets(story: &Story) -> Result<()> {
    let share = wait::until(LONG, "the Node has a pod network", || {
        let share = story.value("node evil", ".spec.podCIDR")?;
        ensure!(!share.is_empty(), "none yet");
        Ok(share)
    })?;
    wait::until(LONG, "the first node refuses its routes", || {
        let log = story.server.log();
        ensure!(log.contains("refused the routes to a node's pods"), "{log}");
        Ok(())
    })?;
    let routes = story.server.host().run("ip", &["route"])?;
    ensure!(!routes.contains("1.0.0.0/8") && !routes.contains(&share), "{routes}");
    Ok(())
}

/// The Node's credentials end with it, also after a restart of the server.
fn revoked(story: &mut Story, machine: &Machine, bound: &Issued, all: &[&Issued]) -> Result<()> {
    story.kubectl("delete node evil")?;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "evil"}});
    let (request, _) = pki::new_request(&Identity::node("evil").profile())?;
    let csr = json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"generateName": "hostile-"},
        "spec": {"request": STANDARD.encode(request), "signerName": KUBELET_CLIENT,
            "usages": ["digital signature", "client auth"]},
    });
    let nothing = |one: &Issued| -> Result<()> {
        let who = Who::Certificate(one);
        machine.refused(&who, "POST", NODES, &node)?;
        machine.refused(&who, "POST", CSRS, &csr)?;
        machine.refused(&who, "GET", "/api/v1/services", &Value::Null)?;
        machine.refused(&who, "GET", NODES, &Value::Null)
    };
    wait::until(LONG, "the Node's certificate ends", || nothing(bound))?;
    all.iter().try_for_each(|one| nothing(one))?;
    // Its kubelet may see that its pods are gone, so that it ends them.
    let own = "/api/v1/pods?fieldSelector=spec.nodeName%3Devil";
    machine.allowed(&Who::Certificate(bound), "GET", own, &Value::Null)?;
    story.server.stop(LONG)?;
    story.server.start()?;
    nothing(bound)?;
    let left = story.kubectl("get nodes -o name")?;
    ensure!(!left.contains("evil"), "{left}");
    Ok(())
}
