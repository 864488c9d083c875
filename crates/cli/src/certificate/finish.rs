//! `decapod certificate rotate-ca --finish`: removes the replaced CA from the bundle.
//!
//! ```text
//!  rotate-ca            ca.crt: new, new cross-signed by the old one, old
//!  restarts, rotations  all clients get certificates of the new one, and trust it
//!  rotate-ca --finish   ca.crt: new
//! ```
//!
//! In: the files of this machine, and the running server's data: users with certificates of the old CA,
//! nodes' heartbeats, the CA bundles of pods. Out: the bundle without the old CA, or a list of clients
//! that would lose access.
//! Invariant: nothing is changed while that list is not empty, unless with --force; nothing is
//! deleted, replaced files are kept in `pki/old-TIME`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use pki::Certificate;
use serde_json::Value;

use super::{AGENT, Found, PKI, ROOTS, aside, find, move_aside, read};
use crate::cluster::{Cluster, Connection, with_query};
use crate::duration;

const END: &str = "-----END CERTIFICATE-----";
/// Metric: when each user last used a certificate of a replaced CA (`auth::sightings`).
const SEEN: &str = "decapod_old_authority_last_seen_timestamp_seconds";
const STARTED: &str = "process_start_time_seconds";
/// The maximum length of the printed list.
const SHOWN: usize = 20;

/// The options of `--finish`.
pub struct Finish<'a> {
    pub data_dir: &'a Path,
    pub kubeconfig: Option<&'a Path>,
    /// Users that were last seen longer ago are ignored.
    pub unused_for: Duration,
    pub force: bool,
}

/// A CA's file: its text, the present CA, and the older ones.
struct Bundle {
    name: &'static str,
    text: String,
    present: Certificate,
    goes: Vec<Certificate>,
}

impl Bundle {
    fn read(directory: &Path, name: &'static str) -> Result<Self> {
        let path = directory.join(format!("{name}.crt"));
        let text = read(&path)?;
        let mut all = pki::certificates(text.as_bytes())
            .with_context(|| path.display().to_string())?
            .into_iter();
        let present = all.next().with_context(|| format!("{}: no certificate", path.display()))?;
        let goes: Vec<Certificate> = all.collect();
        if !goes.is_empty() && !present.is_issued_by(&present) {
            bail!(
                "{}: the first certificate is not self-signed, so it is unknown which others belong to it; remove the old authority from the file by hand",
                path.display()
            );
        }
        Ok(Self { name, text, present, goes })
    }

    /// Only the first certificate.
    fn rest(&self) -> &str {
        let end = self.text.find(END).map_or(self.text.len(), |at| at + END.len());
        &self.text[..end]
    }
}

impl Finish<'_> {
    pub async fn run(self) -> Result<String> {
        let directory = self.data_dir.join(PKI);
        let bundles = ROOTS.map(|name| Bundle::read(&directory, name));
        let mut bundles: Vec<Bundle> = bundles.into_iter().collect::<Result<_>>()?;
        let cluster_ca = bundles[0].present.clone();
        bundles.retain(|bundle| !bundle.goes.is_empty());
        if bundles.is_empty() {
            return Ok("there is no older authority to remove\n".into());
        }
        let mut lost = on_this_machine(self.data_dir, &bundles)?;
        if bundles.iter().any(|bundle| bundle.name == ROOTS[0]) {
            lost.extend(self.in_the_cluster(&cluster_ca).await);
        }
        if !lost.is_empty() && !self.force {
            bail!("{}", refusal(&lost));
        }
        let aside = aside(&directory)?;
        for one in leaves(self.data_dir)? {
            if one.path.starts_with(&directory) {
                move_aside(&one.path, &aside)?;
            }
        }
        for bundle in &bundles {
            let file = format!("{}.crt", bundle.name);
            pki::write_private(&aside.join(&file), bundle.text.as_bytes(), 0o600)?;
            let rest = format!("{}\n", bundle.rest());
            pki::write_private(&directory.join(&file), rest.as_bytes(), 0o600)?;
        }
        let names: Vec<&str> = bundles.iter().map(|bundle| bundle.name).collect();
        Ok(format!(
            "removed the older authorities from {}; the replaced files are in {}\n\
             restart the server, then the agents; from then on, certificates of an older authority are refused\n",
            names.join(", "),
            aside.display()
        ))
    }

    /// Reasons from the server's data; a failed request is a reason, too.
    async fn in_the_cluster(&self, present: &Certificate) -> Vec<String> {
        let kubeconfig = self.kubeconfig.map(Path::to_owned);
        let kubeconfig = kubeconfig.unwrap_or_else(|| self.data_dir.join("kubeconfig"));
        let connection = Connection { kubeconfig: Some(kubeconfig), ..Connection::default() };
        let asked = async {
            let cluster = connection.open(self.data_dir)?;
            Known::ask(&cluster).await
        };
        match asked.await {
            Ok(known) => known.lost(present, base::clock::now(), self.unused_for),
            Err(failure) => vec![format!(
                "failed to ask the server for its clients: {}",
                failure.to_string().trim_start_matches("error: ")
            )],
        }
    }
}

fn refusal(lost: &[String]) -> String {
    let shown: Vec<String> = lost.iter().take(SHOWN).map(|line| format!("  {line}\n")).collect();
    let more = match lost.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("  and {more} more\n"),
    };
    format!(
        "the older authority is still needed, so nothing was changed:\n{}{more}`decapod certificate rotate` and a restart give an agent new certificates; --force takes the authority out all the same",
        shown.concat()
    )
}

/// All certificates except CAs.
fn leaves(data_dir: &Path) -> Result<Vec<Found>> {
    let mut found = find(data_dir)?;
    found.retain(|one| !ROOTS.contains(&one.name.as_str()) && !one.certificate.is_authority);
    Ok(found)
}

/// Certificates of an older CA in the data directory.
fn on_this_machine(data_dir: &Path, bundles: &[Bundle]) -> Result<Vec<String>> {
    let mut lost = vec![];
    for one in leaves(data_dir)? {
        let is_of = |authority: &Certificate| one.certificate.is_issued_by(authority);
        if bundles.iter().any(|bundle| is_of(&bundle.present)) {
            continue;
        }
        let older = bundles.iter().flat_map(|bundle| &bundle.goes).find(|older| is_of(older));
        if let Some(older) = older {
            let path = one.path.strip_prefix(data_dir).unwrap_or(&one.path).display();
            lost.push(format!("{path} on this machine is signed by CN={}", older.common_name));
        }
    }
    let trusted = data_dir.join(AGENT).join("ca.crt");
    if let (Ok(text), Some(first)) = (fs::read(&trusted), bundles.first())
        && first.name == ROOTS[0]
        && !names(&text, &first.present)
    {
        lost.push("the agent on this machine does not know the new authority yet".into());
    }
    Ok(lost)
}

/// Whether a PEM text contains exactly this certificate.
fn names(pem: &[u8], authority: &Certificate) -> bool {
    let all = pki::certificates(pem).unwrap_or_default();
    all.iter().any(|one| one.der() == authority.der())
}

/// The server's answers.
struct Known {
    metrics: String,
    nodes: Value,
    leases: Value,
    roots: Value,
    tokens: Value,
}

impl Known {
    async fn ask(cluster: &Cluster) -> crate::failure::Result<Self> {
        let metrics = cluster.get_raw("/metrics", "text/plain").await?;
        let selected = |path: &str, fields: &str| with_query(path, &[("fieldSelector", fields)]);
        let roots = selected("/api/v1/configmaps", "metadata.name=kube-root-ca.crt");
        let tokens = selected("/api/v1/secrets", "type=kubernetes.io/service-account-token");
        let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
        Ok(Self {
            metrics: String::from_utf8_lossy(&metrics).into_owned(),
            nodes: cluster.get("/api/v1/nodes").await?,
            leases: cluster.get(leases).await?,
            roots: cluster.get(&roots).await?,
            tokens: cluster.get(&tokens).await?,
        })
    }

    /// The clients that would lose access, as text.
    fn lost(&self, present: &Certificate, now: Timestamp, unused_for: Duration) -> Vec<String> {
        let mut lost = self.still_shown(now, unused_for);
        lost.extend(self.silent_nodes());
        for (list, key) in [(&self.roots, "configmap"), (&self.tokens, "secret")] {
            for object in items(list) {
                let text = object["data"]["ca.crt"].as_str().unwrap_or_default();
                let pem = match key {
                    "secret" => STANDARD.decode(text).unwrap_or_default(),
                    _ => text.as_bytes().to_vec(),
                };
                if !names(&pem, present) {
                    let (namespace, name) = (meta(object, "namespace"), meta(object, "name"));
                    lost.push(format!(
                        "{key} {namespace}/{name}, with which service accounts verify the server, lacks the new authority"
                    ));
                }
            }
        }
        lost
    }

    /// Users with a certificate of an older CA.
    fn still_shown(&self, now: Timestamp, unused_for: Duration) -> Vec<String> {
        if !self.metrics.contains(SEEN) {
            return vec![
                "the server has not been restarted since, so it does not know the new authority"
                    .into(),
            ];
        }
        let lines = self.metrics.lines().filter(|line| line.starts_with(SEEN));
        let users = lines.filter_map(|line| {
            let (labels, at) = line.strip_prefix(SEEN)?.rsplit_once(' ')?;
            let ago = now.as_second() - at.parse::<f64>().ok()? as i64;
            let is_used = u64::try_from(ago).map_or(true, |ago| ago < unused_for.as_secs().max(1));
            let (user, authority) = (label(labels, "user")?, label(labels, "authority")?);
            is_used.then(|| {
                let ago = duration::short(ago.max(0));
                format!("{user} used a certificate of CN={authority} {ago} ago")
            })
        });
        users.collect()
    }

    /// Nodes without a heartbeat since the server's start: their certificates are unknown.
    fn silent_nodes(&self) -> Vec<String> {
        let started = self.metrics.lines().find_map(|line| {
            let value = line.strip_prefix(STARTED)?.trim().parse::<f64>().ok()?;
            Timestamp::from_second(value as i64).ok()
        });
        let Some(started) = started else { return vec![] };
        let heard: BTreeMap<&str, Timestamp> = items(&self.leases)
            .iter()
            .filter_map(|lease| {
                let at = lease["spec"]["renewTime"].as_str()?.parse().ok()?;
                Some((meta(lease, "name"), at))
            })
            .collect();
        let nodes: BTreeSet<&str> =
            items(&self.nodes).iter().map(|node| meta(node, "name")).collect();
        let silent = nodes.iter().filter(|node| heard.get(*node).is_none_or(|at| *at < started));
        silent
            .map(|node| format!("node {node} has sent no heartbeat since the server started"))
            .collect()
    }
}

fn items(list: &Value) -> &[Value] {
    list["items"].as_array().map(Vec::as_slice).unwrap_or_default()
}

fn meta<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

/// A label's value of `{a="b",c="d"}`.
fn label(labels: &str, name: &str) -> Option<String> {
    let (_, rest) = labels.split_once(&format!("{name}=\""))?;
    let mut value = String::new();
    let mut signs = rest.chars();
    loop {
        match signs.next()? {
            '"' => return Some(value),
            '\\' => match signs.next()? {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use pki::{Component, Pki};
    use serde_json::json;

    use super::*;
    use crate::certificate::RotateCa;

    const NOW: i64 = 1_800_000_000;

    fn known(metrics: &str) -> Known {
        let none = || json!({"items": []});
        Known {
            metrics: format!("# HELP {SEEN} x\n{STARTED} {}.5\n{metrics}", NOW - 100),
            nodes: none(),
            leases: none(),
            roots: none(),
            tokens: none(),
        }
    }

    fn lost(known: &Known, present: &Certificate) -> String {
        let now = Timestamp::from_second(NOW).expect("a time");
        known.lost(present, now, Duration::from_secs(60)).join("; ")
    }

    #[test]
    fn clients_that_would_lose_access_are_listed() {
        let new = pki::Authority::generate("new").expect("an authority");
        let old = pki::Authority::generate("old").expect("an authority");
        let check = |known: &Known, expected: &str| {
            assert_eq!(lost(known, new.certificate()), expected);
        };
        check(&known(""), "");
        check(
            &Known { metrics: String::new(), ..known("") },
            "the server has not been restarted since, so it does not know the new authority",
        );
        let seen = |user: &str, ago: i64| {
            format!("{SEEN}{{authority=\"old\",user=\"{user}\"}} {}\n", NOW - ago)
        };
        check(&known(&seen("a", 60)), "");
        check(
            &known(&[seen("a", 61), seen("b\\\"c", 9)].concat()),
            "b\"c used a certificate of CN=old 9s ago",
        );
        let node = |name: &str| json!({"metadata": {"name": name}});
        let lease = |name: &str, ago: i64| {
            let at = Timestamp::from_second(NOW - ago).expect("a time").to_string();
            json!({"metadata": {"name": name}, "spec": {"renewTime": at}})
        };
        let nodes = json!({"items": [node("a"), node("b"), node("c")]});
        let leases = json!({"items": [lease("a", 10), lease("b", 200), lease("gone", 300)]});
        check(
            &Known { nodes, leases, ..known("") },
            "node b has sent no heartbeat since the server started; node c has sent no heartbeat since the server started",
        );
        let root = |pem: &str| json!({"metadata": {"namespace": "web", "name": "kube-root-ca.crt"}, "data": {"ca.crt": pem}});
        let both = [old.cert_pem(), new.cert_pem()].concat();
        check(&Known { roots: json!({"items": [root(&both)]}), ..known("") }, "");
        check(
            &Known { roots: json!({"items": [root(old.cert_pem())]}), ..known("") },
            "configmap web/kube-root-ca.crt, with which service accounts verify the server, lacks the new authority",
        );
        let secret = json!({"items": [{"metadata": {"namespace": "web", "name": "t"},
            "data": {"ca.crt": STANDARD.encode(old.cert_pem())}}]});
        check(
            &Known { tokens: secret, ..known("") },
            "secret web/t, with which service accounts verify the server, lacks the new authority",
        );
    }

    #[tokio::test]
    async fn an_unused_old_authority_is_removed() {
        let root = tempfile::tempdir().expect("a directory");
        let directory = root.path().join(PKI);
        let old = Pki::open_or_create(&directory).expect("made");
        let finish = |force| Finish {
            data_dir: root.path(),
            kubeconfig: None,
            unused_for: Duration::from_secs(60),
            force,
        };
        old.component(Component::Admin).expect("issued");
        let nothing = finish(false).run().await.expect("nothing to do");
        assert_eq!(nothing, "there is no older authority to remove\n");

        RotateCa::default().replace(root.path()).expect("rotated");
        let new = Pki::open_or_create(&directory).expect("loads");
        new.component(Component::Admin).expect("issued");
        // An old certificate of an agent on the same machine.
        let node = old.issue(&pki::Identity::node("n1").profile()).expect("issued");
        let agent = root.path().join(AGENT);
        fs::create_dir(&agent).expect("made");
        fs::write(agent.join("kubelet-client.pem"), &node.cert_pem).expect("written");
        fs::write(agent.join("ca.crt"), old.cluster_ca.cert_pem()).expect("written");
        let told = finish(false).run().await.expect_err("refused").to_string();
        for part in [
            "agent/kubelet-client.pem on this machine is signed by CN=kubernetes\n",
            "the agent on this machine does not know the new authority yet\n",
            "failed to ask the server for its clients: no cluster found",
        ] {
            assert!(told.contains(part), "{told}");
        }
        assert!(!told.contains("admin.crt"), "{told}");
        let before = read(&directory.join("ca.crt")).expect("there");
        assert_eq!(before, new.cluster_ca.cert_pem(), "nothing has changed");

        finish(true).run().await.expect("forced");
        let after = Pki::open_or_create(&directory).expect("loads");
        assert_eq!(after.cluster_ca.fingerprint(), new.cluster_ca.fingerprint());
        for authority in [&after.cluster_ca, &after.front_proxy_ca] {
            let left = pki::certificates(authority.cert_pem().as_bytes()).expect("PEM");
            assert_eq!(left.len(), 1);
        }
        let leaf = after.component(Component::Admin).expect("issued").cert_pem;
        let chain = pki::certificates(leaf.as_bytes()).expect("PEM");
        assert_eq!(chain.len(), 1, "the cross-signed certificate is removed");
        let again = finish(false).run().await.expect("nothing to do");
        assert_eq!(again, "there is no older authority to remove\n");
    }
}
