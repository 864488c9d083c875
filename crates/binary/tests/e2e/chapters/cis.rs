//! The CIS Kubernetes Benchmark's items about a node that docs/security.md answers with "yes".
//! `it/cis.rs` tests those of the control plane, and compares both lists with the document. Leaves
//! nothing.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use testkit::wait;

use crate::story::{LONG, Story};

type Check = fn(&Story) -> Result<()>;

const CHECKS: &[(&str, Check)] = &[
    ("4.1.5–4.1.8", files),
    ("4.2.1–4.2.3", only_whom_the_cluster_allows),
    ("4.2.4", no_read_only_port),
    ("4.2.8", events_come),
    ("4.2.9", serving_certificate),
    ("4.2.10, 4.2.11", certificates_are_renewed),
    ("4.2.12", strong_ciphers),
    ("4.3.1", proxy_on_the_loopback),
    ("5.3.1", policies_have_rules),
];

/// A policy of no pod. The chapters of policies test what rules do.
const POLICY: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: cis}
spec: {podSelector: {matchLabels: {cis: nobody}}}
";

pub fn of_a_node(story: &mut Story) -> Result<()> {
    let mut failures = vec![];
    for (items, check) in CHECKS {
        if let Err(error) = check(story) {
            failures.push(format!("{items}: {error:#}"));
        }
    }
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

fn policies_have_rules(story: &Story) -> Result<()> {
    story.apply(POLICY)?;
    let rules = || -> Result<()> {
        let mut command = story.server.host().command("nft");
        let output = command.args(["list", "table", "ip", "decapod-network-policies"]).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    };
    let found = wait::until(LONG, "the node has rules of network policies", rules);
    story.kubectl("delete networkpolicy cis")?;
    found.map(drop)
}

fn has_mode(path: &Path, wanted: u32) -> Result<()> {
    let meta = fs::metadata(path).with_context(|| path.display().to_string())?;
    let mode = meta.mode() & 0o777;
    ensure!(mode == wanted && meta.uid() == 0, "{}: {mode:o} of {}", path.display(), meta.uid());
    Ok(())
}

fn files(story: &Story) -> Result<()> {
    let data = story.server.data_directory();
    has_mode(&data.join("kubeconfig"), 0o600)?;
    for entry in fs::read_dir(data.join("pki"))? {
        // Certificates from before a rotation are in directories.
        let path = entry?.path();
        has_mode(&path, if path.is_dir() { 0o700 } else { 0o600 })?;
    }
    Ok(())
}

/// A request with curl on the node: its output and the status, or 000.
fn curl(story: &Story, words: &[&str]) -> Result<(String, String)> {
    let mut command = story.server.host().command("curl");
    command.args(["-sS", "-m", "20", "-w", "\n%{http_code}"]).args(words);
    let output = command.output().context("curl")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    let (_, status) = text.rsplit_once('\n').context("no status")?;
    Ok((status.to_owned(), format!("{text}{complaint}")))
}

fn only_whom_the_cluster_allows(story: &Story) -> Result<()> {
    let url = format!("https://{}:10250/pods", story.address);
    let (status, said) = curl(story, &["-k", &url])?;
    ensure!(status == "401", "anonymous: {status} {said}");
    let token = story.kubectl("create token default")?;
    let header = format!("Authorization: Bearer {}", token.trim());
    let (status, said) = curl(story, &["-k", "-H", &header, &url])?;
    ensure!(status == "403", "an account without rights: {status} {said}");
    Ok(())
}

fn no_read_only_port(story: &Story) -> Result<()> {
    let (status, said) = curl(story, &[&format!("http://{}:10255/pods", story.address)])
        .unwrap_or_else(|_| ("000".into(), String::new()));
    ensure!(status == "000", "{status} {said}");
    Ok(())
}

fn events_come(story: &Story) -> Result<()> {
    let events = story.kubectl("get events -A --field-selector source=kubelet")?;
    ensure!(events.lines().count() > 1, "{events}");
    Ok(())
}

/// A client that trusts only the cluster's authority accepts the kubelet's certificate.
fn serving_certificate(story: &Story) -> Result<()> {
    let authority = story.server.data_directory().join("pki/ca.crt").display().to_string();
    let url = format!("https://{}:10250/pods", story.address);
    let (status, said) = curl(story, &["--cacert", &authority, &url])?;
    ensure!(status == "401", "{status} {said}");
    Ok(())
}

fn certificates_are_renewed(story: &Story) -> Result<()> {
    let figures = story.kubectl("get --raw /metrics")?;
    let line = "kubernetes_feature_enabled{name=\"RotateKubeletServerCertificate\"";
    let found = figures.lines().find(|one| one.starts_with(line));
    ensure!(found.is_some_and(|found| found.ends_with(" 1")), "{found:?}");
    let listed = story.server.decapod(&["certificate", "check"])?;
    ensure!(listed.contains("kubelet-server.crt") && !listed.contains("EXPIRED"), "{listed}");
    Ok(())
}

fn strong_ciphers(story: &Story) -> Result<()> {
    let url = format!("https://{}:10250/healthz", story.address);
    let chained = "ECDHE-RSA-AES128-SHA:ECDHE-ECDSA-AES128-SHA";
    for weak in
        [["--tlsv1.0", "--tls-max", "1.1"].as_slice(), &["--tls-max", "1.2", "--ciphers", chained]]
    {
        let words: Vec<&str> = [&["-k"], weak, &[url.as_str()]].concat();
        let (status, said) = curl(story, &words)?;
        ensure!(status == "000", "{weak:?}: {status} {said}");
    }
    Ok(())
}

fn proxy_on_the_loopback(story: &Story) -> Result<()> {
    let url = |host: &str| format!("http://{host}:10249/metrics");
    let (status, said) = curl(story, &[&url("127.0.0.1")])?;
    ensure!(status == "200", "{status} {said}");
    let (status, _) = curl(story, &[&url(&story.address)])?;
    ensure!(status == "000", "it answers at the node's address: {status}");
    Ok(())
}
