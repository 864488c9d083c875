//! The CIS Kubernetes Benchmark as docs/security.md answers it: every "yes" of the control plane is tested
//! on a running server. The end-to-end story tests those of a node (`e2e/chapters/cis.rs`).
//!
//! Invariant: a "yes" without a check fails the test, and so does a check without a "yes". Every other
//! answer has a reason.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use testkit::http::Connection;
use testkit::wait;

use crate::support::{LONG, Scratch, Server};

const DOCUMENT: &str = include_str!("../../../../docs/security.md");
const OF_NODES: &str = include_str!("../e2e/chapters/cis.rs");
const VERDICTS: [&str; 5] = ["yes", "flag", "no", "n/a", "your part"];

struct Row {
    /// The numbers, for example `1.1.19–1.1.21`.
    items: String,
    verdict: String,
    why: String,
}

fn rows() -> Vec<Row> {
    let table = DOCUMENT.split("## Defaults against the CIS").nth(1).expect("the table is there");
    let is_row = |line: &&str| line.starts_with("| ") && line.as_bytes()[2].is_ascii_digit();
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [item, verdict, why] = cells[..] else { panic!("three columns: {line}") };
        let is_of_numbers = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',' | '–' | ' ');
        let items = item.split(|c| !is_of_numbers(c)).next().unwrap_or_default().trim();
        Row { items: items.into(), verdict: verdict.into(), why: why.into() }
    };
    table.lines().filter(is_row).map(row).collect()
}

type Check = fn(&mut Audited) -> Result<()>;

/// Every "yes" of the control plane.
const CHECKS: &[(&str, Check)] = &[
    ("1.1.11, 1.1.12", data_directory),
    ("1.1.13, 1.1.14", kubeconfig),
    ("1.1.19–1.1.21", pki),
    ("1.2.2", no_static_tokens),
    ("1.2.4, 1.2.5", kubelets_are_verified),
    ("1.2.6–1.2.8", node_and_rbac),
    ("1.2.10", no_always_admit),
    ("1.2.12–1.2.14", admission),
    ("1.2.15", no_profiling),
    ("1.2.20", request_timeout),
    ("1.2.21, 1.2.22", accounts_are_looked_up),
    ("1.2.24, 1.2.25", certificates),
    ("1.2.29", strong_ciphers),
    ("1.3.1", ended_pods),
    ("1.3.2", no_profiling),
    ("1.3.3", an_account_per_controller),
    ("1.3.4, 1.3.5", token_key_and_root),
    ("1.3.6", serving_certificates_rotate),
    ("1.3.7, 1.4.2", no_other_port),
    ("1.4.1", no_profiling),
];

#[test]
fn the_table_is_complete() {
    let rows = rows();
    assert!(rows.len() > 45, "{} rows", rows.len());
    let mut agreed = BTreeSet::new();
    for Row { items, verdict, why } in &rows {
        assert!(VERDICTS.contains(&verdict.as_str()), "{items}: {verdict}");
        if verdict == "yes" {
            agreed.insert(items.as_str());
        } else {
            assert!(!why.is_empty(), "{items}: {verdict}, and no reason or way");
        }
    }
    let here = CHECKS.iter().map(|(items, _)| *items);
    // The story's table has them in quotes.
    let there = OF_NODES.split('"').skip(1).step_by(2);
    let there = there.filter(|text| text.starts_with("4.") || text.starts_with("5."));
    let tried: BTreeSet<&str> = here.chain(there).collect();
    assert_eq!(agreed, tried, "what the document says and what is tried");
}

#[test]
fn the_control_plane_is_as_the_document_says() -> Result<()> {
    let mut audited = Audited::start()?;
    let mut failures = vec![];
    for (items, check) in CHECKS {
        if let Err(error) = check(&mut audited) {
            failures.push(format!("{items}: {error:#}"));
        }
    }
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// A server with an audit log of all users.
struct Audited {
    server: Server,
    log: String,
}

impl Audited {
    fn start() -> Result<Self> {
        let scratch = Scratch::new()?;
        let policy = json!({"apiVersion": "audit.k8s.io/v1", "kind": "Policy",
            "rules": [{"level": "Metadata"}]});
        let policy = scratch.file("policy.yaml", &policy.to_string())?;
        let log = scratch.path().join("audit.log").display().to_string();
        let arguments = ["--audit-policy-file", &policy, "--audit-log-path", &log];
        let server = Server::start_in(scratch, &arguments)?;
        Ok(Self { server, log })
    }

    fn get(&self, path: &str) -> Result<(u16, String)> {
        let answer = self.server.api()?.get(path, LONG)?;
        Ok((answer.status, answer.body))
    }

    fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let answer = self.server.api()?.post(path, &body.to_string(), LONG)?;
        ensure!(answer.status < 300, "{path}: {} {}", answer.status, answer.body);
        Ok(serde_json::from_str(&answer.body)?)
    }

    fn command_line(&mut self) -> Result<String> {
        let id = self.server.process_id()?;
        Ok(fs::read_to_string(format!("/proc/{id}/cmdline"))?.replace('\0', " "))
    }
}

fn mode(path: &Path) -> Result<u32> {
    let meta = fs::symlink_metadata(path).with_context(|| path.display().to_string())?;
    Ok(meta.mode() & 0o777)
}

fn has_mode(path: &Path, wanted: u32) -> Result<()> {
    let mode = mode(path)?;
    ensure!(mode == wanted, "{}: {mode:o}", path.display());
    Ok(())
}

fn data_directory(audited: &mut Audited) -> Result<()> {
    let data = audited.server.data();
    has_mode(&data, 0o700)?;
    has_mode(&data.join("store"), 0o700)?;
    has_mode(&data.join("store/store.redb"), 0o600)?;
    let owner = fs::metadata(&data)?.uid();
    ensure!(owner == nix::unistd::getuid().as_raw(), "it belongs to {owner}");
    Ok(())
}

fn kubeconfig(audited: &mut Audited) -> Result<()> {
    has_mode(&audited.server.data().join("kubeconfig"), 0o600)
}

fn pki(audited: &mut Audited) -> Result<()> {
    let directory = audited.server.data().join("pki");
    has_mode(&directory, 0o700)?;
    let mut count = 0;
    for entry in fs::read_dir(&directory)? {
        has_mode(&entry?.path(), 0o600)?;
        count += 1;
    }
    ensure!(count > 8, "{count} files");
    Ok(())
}

fn no_static_tokens(audited: &mut Audited) -> Result<()> {
    let line = audited.command_line()?;
    ensure!(!line.contains("token-auth-file"), "{line}");
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "spec": {"token": "secret"}});
    let answer = audited.post("/apis/authentication.k8s.io/v1/tokenreviews", &review)?;
    ensure!(answer["status"]["authenticated"] != true, "{answer}");
    Ok(())
}

/// A Node whose kubelet has a certificate of another authority: the API server refuses it.
fn kubelets_are_verified(audited: &mut Audited) -> Result<()> {
    for name in ["apiserver-kubelet-client.crt", "apiserver-kubelet-client.key"] {
        has_mode(&audited.server.data().join("pki").join(name), 0o600)?;
    }
    let other = Server::start(&[])?;
    let api = other.api()?;
    let port: u16 = api.tls().0.rsplit(':').next().unwrap_or_default().parse()?;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "stranger"},
        "status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}});
    audited.post("/api/v1/nodes", &node)?;
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "strange", "namespace": "default"},
        "spec": {"nodeName": "stranger", "containers": [{"name": "c", "image": "i"}]}});
    // A controller creates the namespace's service account.
    wait::until(LONG, "a pod", || audited.post("/api/v1/namespaces/default/pods", &pod))?;
    let (status, body) = audited.get("/api/v1/namespaces/default/pods/strange/log")?;
    ensure!(status == 500 && body.contains("certificate"), "{status} {body}");
    Ok(())
}

fn allowed(audited: &Audited, user: &str, group: &str, resource: &Value) -> Result<Value> {
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": [group, "system:authenticated"],
            "resourceAttributes": resource}});
    let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    Ok(audited.post(path, &review)?["status"].take())
}

fn node_and_rbac(audited: &mut Audited) -> Result<()> {
    let secret = json!({"verb": "get", "resource": "secrets", "namespace": "x", "name": "y"});
    let answer = allowed(audited, "system:node:n", "system:nodes", &secret)?;
    ensure!(answer["allowed"] == false, "a node reads any Secret: {answer}");
    let reason = answer["reason"].as_str().unwrap_or_default();
    ensure!(reason.contains("no relationship found"), "the Node authorizer says: {reason}");
    let pods = json!({"verb": "list", "resource": "pods"});
    let answer = allowed(audited, "system:kube-scheduler", "x", &pods)?;
    let reason = answer["reason"].as_str().unwrap_or_default();
    ensure!(answer["allowed"] == true && reason.starts_with("RBAC: allowed by"), "{answer}");
    let answer = allowed(audited, "jane", "people", &pods)?;
    ensure!(answer["allowed"] == false, "anybody lists pods: {answer}");
    let anybody = audited.server.api()?.without_identity()?.get("/api/v1/pods", LONG)?;
    ensure!(anybody.status == 403, "{anybody:?}");
    Ok(())
}

fn no_always_admit(audited: &mut Audited) -> Result<()> {
    let line = audited.command_line()?;
    ensure!(!line.contains("AlwaysAdmit"), "{line}");
    // The next check needs AlwaysAdmit to be off.
    admission(audited)
}

fn admission(audited: &mut Audited) -> Result<()> {
    let api = audited.server.api()?;
    let config_map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}});
    let path = "/api/v1/namespaces/absent/configmaps";
    let answer = api.post(path, &config_map.to_string(), LONG)?;
    ensure!(answer.status == 404 && answer.body.contains("namespaces"), "{answer:?}");
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "dry"},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let path = "/api/v1/namespaces/default/pods?dryRun=All";
    let made = wait::until(LONG, "a pod", || audited.post(path, &pod))?;
    ensure!(made["spec"]["serviceAccountName"] == "default", "{made}");
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other"}});
    let mut connection = Connection::new(api, LONG);
    let as_node = [("Impersonate-User", "system:node:n"), ("Impersonate-Group", "system:nodes")];
    let body = node.to_string();
    let answer = connection.send("POST", "/api/v1/nodes", &as_node, body.as_bytes())?;
    ensure!(answer.status == 403 && answer.body.contains("not allowed to modify"), "{answer:?}");
    Ok(())
}

fn no_profiling(audited: &mut Audited) -> Result<()> {
    for path in ["/debug/pprof/", "/debug/pprof/profile", "/debug/pprof/heap"] {
        let (status, body) = audited.get(path)?;
        ensure!(status == 404, "{path}: {status} {body}");
    }
    Ok(())
}

/// The line of `decapod server --help` about a flag.
fn help_of(component: &str, flag: &str) -> Result<String> {
    let output =
        Command::new(env!("CARGO_BIN_EXE_decapod")).args([component, "--help"]).output()?;
    let text = String::from_utf8(output.stdout)?;
    let starts = |line: &&str| line.trim_start().starts_with(flag);
    let mut lines = text.lines().skip_while(|line| !starts(line));
    let first = lines.next().with_context(|| format!("{component} has no {flag}"))?;
    // Its description follows, up to the next flag.
    let rest = lines.take_while(|line| !line.trim_start().starts_with('-'));
    Ok([first].into_iter().chain(rest).collect::<Vec<_>>().join("\n"))
}

fn request_timeout(audited: &mut Audited) -> Result<()> {
    let help = help_of("server", "--request-timeout")?;
    ensure!(help.contains("[default: 1m]"), "{help}");
    let line = audited.command_line()?;
    ensure!(!line.contains("--request-timeout"), "{line}");
    Ok(())
}

fn accounts_are_looked_up(audited: &mut Audited) -> Result<()> {
    let key = |name: &str| fs::read(audited.server.data().join("pki").join(name));
    ensure!(key("sa.key")? != key("apiserver.key")?, "the key of tokens is the server's");
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    let account =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "gone"}});
    audited.post(accounts, &account)?;
    let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"});
    let token =
        audited.post(&format!("{accounts}/gone/token"), &request)?["status"]["token"].take();
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "spec": {"token": token}});
    let is_known = || -> Result<bool> {
        let answer = audited.post("/apis/authentication.k8s.io/v1/tokenreviews", &review)?;
        Ok(answer["status"]["authenticated"] == true)
    };
    ensure!(is_known()?, "a new token is not known");
    let mut connection = Connection::new(audited.server.api()?, LONG);
    let answer = connection.send("DELETE", &format!("{accounts}/gone"), &[], b"")?;
    ensure!(answer.status == 200, "{answer:?}");
    // Answers are cached for some seconds.
    wait::until(LONG, "the token ends with its account", || {
        ensure!(!is_known()?, "it is still good");
        Ok(())
    })
}

/// The kubeconfig's client trusts only the cluster's authority, and has a certificate.
fn certificates(audited: &mut Audited) -> Result<()> {
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview",
        "metadata": {"labels": {"sent": "back"}}});
    let who = audited.post("/apis/authentication.k8s.io/v1/selfsubjectreviews", &review)?;
    ensure!(who["status"]["userInfo"]["username"] == "kubernetes-admin", "{who}");
    // Like upstream, the answer ignores what the client sent.
    let metadata = who["metadata"].as_object().context("metadata")?;
    ensure!(metadata.keys().eq(["creationTimestamp"]), "{who}");
    // Long texts may be wrapped.
    let is_shown = |c: &char| !c.is_whitespace() && *c != '\\';
    let text: String = audited.server.kubeconfig()?.chars().filter(is_shown).collect();
    let authority = fs::read(audited.server.data().join("pki/ca.crt"))?;
    ensure!(text.contains(&STANDARD.encode(authority)), "the kubeconfig has another authority");
    Ok(())
}

/// Old versions of TLS, and one with CBC ciphers: each gets an alert.
fn strong_ciphers(audited: &mut Audited) -> Result<()> {
    let api = audited.server.api()?;
    for minor in [1_u8, 2, 3] {
        let mut hello = vec![3, minor];
        hello.extend([7; 32]);
        // No session; ECDHE-RSA-AES128-CBC-SHA and RSA-AES128-CBC-SHA; no compression.
        hello.extend([0, 0, 4, 0xc0, 0x13, 0x00, 0x2f, 1, 0]);
        let length = u8::try_from(hello.len())?;
        let mut record = vec![22, 3, 1, 0, length + 4, 1, 0, 0, length];
        record.extend(hello);
        let mut socket = TcpStream::connect(api.tls().0)?;
        socket.set_read_timeout(Some(LONG))?;
        socket.write_all(&record)?;
        let mut answer = vec![];
        socket.read_to_end(&mut answer)?;
        ensure!(answer.first() == Some(&21), "TLS 1.{}: {answer:?}", minor - 1);
    }
    Ok(())
}

fn ended_pods(audited: &mut Audited) -> Result<()> {
    let line = audited.command_line()?;
    ensure!(!line.contains("terminated-pod-gc-threshold"), "{line}");
    let most = controllers::Options::default().terminated_pod_gc_threshold;
    ensure!(most == 12_500, "{most}");
    Ok(())
}

fn an_account_per_controller(audited: &mut Audited) -> Result<()> {
    let wanted = ["service-account-controller", "root-ca-cert-publisher"];
    wait::until(LONG, "controllers act under their own names", || {
        let log = fs::read_to_string(&audited.log)?;
        for name in wanted {
            let user = format!("\"username\":\"system:serviceaccount:kube-system:{name}\"");
            ensure!(log.contains(&user), "{name} did nothing yet");
        }
        Ok(())
    })
}

fn token_key_and_root(audited: &mut Audited) -> Result<()> {
    let path = "/api/v1/namespaces/default/configmaps/kube-root-ca.crt";
    let authority = fs::read_to_string(audited.server.data().join("pki/ca.crt"))?;
    wait::until(LONG, "the authority is published", || {
        let (status, body) = audited.get(path)?;
        let found: Value = serde_json::from_str(&body)?;
        ensure!(status == 200 && found["data"]["ca.crt"] == authority.as_str(), "{status} {body}");
        Ok(())
    })?;
    let mut connection = Connection::new(audited.server.api()?, LONG);
    let accept = [("Accept", "application/jwk-set+json")];
    let answer = connection.send("GET", "/openid/v1/jwks", &accept, b"")?;
    ensure!(answer.status == 200 && answer.body.contains("\"kid\""), "{answer:?}");
    Ok(())
}

fn serving_certificates_rotate(audited: &mut Audited) -> Result<()> {
    let (_, figures) = audited.get("/metrics")?;
    let line = "kubernetes_feature_enabled{name=\"RotateKubeletServerCertificate\"";
    let found = figures.lines().find(|one| one.starts_with(line));
    match found {
        Some(found) if found.ends_with(" 1") => Ok(()),
        other => bail!("{other:?}"),
    }
}

/// The process listens only on the API's port.
fn no_other_port(audited: &mut Audited) -> Result<()> {
    let id = audited.server.process_id()?;
    let mut sockets = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{id}/fd"))? {
        // The file may be closed already.
        let Ok(target) = fs::read_link(entry?.path()) else { continue };
        let name = target.display().to_string();
        sockets.extend(name.strip_prefix("socket:[").map(|rest| rest.trim_matches(']').to_owned()));
    }
    let api = audited.server.api()?;
    let port: u16 = api.tls().0.rsplit(':').next().unwrap_or_default().parse()?;
    for table in ["tcp", "tcp6"] {
        for line in fs::read_to_string(format!("/proc/{id}/net/{table}"))?.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [_, local, _, state, _, _, _, _, _, inode, ..] = words[..] else { continue };
            if state == "0A" && sockets.contains(inode) {
                let number = local.rsplit(':').next().unwrap_or_default();
                let number = u16::from_str_radix(number, 16)?;
                ensure!(number == port, "it listens at port {number}, too");
            }
        }
    }
    Ok(())
}
