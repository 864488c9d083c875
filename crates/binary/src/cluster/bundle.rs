//! What travels to a server that joins: the cluster's authorities and keys, and the settings that must agree.
//!
//! ```text
//! {"version": …, "settings": {FLAG: VALUE}, "etcd": true, "files": {"pki/ca.crt": PEM, …}}
//!     └► sealed under the servers' token ► Secret kube-system/decapod-servers
//! ```
//!
//! Invariants: only the files listed here are read or written, and only sealed text leaves the process. The
//! servers' token is another one than that of nodes: who may add a node must not get the authorities.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use apiserver::Registry;
use base::backoff::Backoff;
use base::task::Tasks;
use control::joining::{self, Offer};
use pki::{JoinToken, Pki};
use serde_json::{Value, json};

use crate::flags;

/// In the data directory: the token that servers join with.
pub const TOKEN: &str = "server-token";
const LENGTH: usize = 32;
/// Relative to the data directory.
const FILES: [&str; 10] = [
    "pki/ca.crt",
    "pki/ca.key",
    "pki/front-proxy-ca.crt",
    "pki/front-proxy-ca.key",
    "pki/sa.key",
    "pki/sa.pub",
    "pki/etcd/ca.crt",
    "pki/etcd/ca.key",
    "token",
    cli::secrets_encrypt::FILE,
];
/// A cluster without these is none.
const NEEDED: [&str; 6] = [FILES[0], FILES[1], FILES[2], FILES[3], FILES[4], FILES[5]];
/// Settings of nodes that servers may differ in.
const OWN_SETTINGS: [&str; 1] = ["disable"];
/// A setting whose default follows from another one.
const DERIVED: &str = "cluster-dns";
const AGAIN_FIRST: Duration = Duration::from_secs(1);
const AGAIN_CEILING: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, PartialEq)]
pub struct Bundle {
    pub version: String,
    pub settings: BTreeMap<String, String>,
    /// Whether servers run the etcd, or the user does.
    pub has_etcd: bool,
    pub files: BTreeMap<String, String>,
}

impl Bundle {
    /// Of this server.
    fn collect(flags: &flags::Server, data_dir: &Path, has_etcd: bool) -> anyhow::Result<Self> {
        let mut files = BTreeMap::new();
        for name in FILES {
            let path = data_dir.join(name);
            match std::fs::read_to_string(&path) {
                Ok(text) => drop(files.insert(name.to_owned(), text)),
                Err(error)
                    if error.kind() == std::io::ErrorKind::NotFound && !NEEDED.contains(&name) => {}
                Err(error) => return Err(error).with_context(|| path.display().to_string()),
            }
        }
        let settings = settings(flags);
        Ok(Self { version: release::KUBERNETES.build.to_owned(), settings, has_etcd, files })
    }

    fn encode(&self) -> String {
        let Self { version, settings, has_etcd, files } = self;
        json!({"version": version, "settings": settings, "etcd": has_etcd, "files": files})
            .to_string()
    }

    pub fn open(secret: &str, sealed: &str) -> anyhow::Result<Self> {
        let text = pki::sealed::open(secret, sealed)?;
        let mut value: Value = serde_json::from_slice(&text).context("the bundle is no JSON")?;
        let mut map = |key: &str| -> anyhow::Result<BTreeMap<String, String>> {
            serde_json::from_value(value[key].take()).with_context(|| format!("the bundle's {key}"))
        };
        Ok(Self {
            settings: map("settings")?,
            files: map("files")?,
            version: value["version"].as_str().unwrap_or_default().to_owned(),
            has_etcd: value["etcd"].as_bool().unwrap_or_default(),
        })
    }

    /// Says which setting differs here from the cluster's.
    pub fn check(&self, flags: &flags::Server) -> anyhow::Result<()> {
        let own = release::KUBERNETES.build.to_owned();
        if minor(&self.version) != minor(&own) {
            bail!(
                "this is version {own}, and the cluster's servers have {}: install the same version",
                self.version
            );
        }
        let here = settings(flags);
        // The DNS address follows from the range of Services: the range is what differs.
        let mut all: Vec<_> = self.settings.iter().collect();
        all.sort_by_key(|(name, _)| *name == DERIVED);
        for (name, value) in all {
            let own = here.get(name).map_or("", String::as_str);
            if own != value {
                bail!("--{name} is {own:?} here and {value:?} in the cluster: give the cluster's");
            }
        }
        Ok(())
    }

    /// Writes the files, each private to its owner. Refuses to replace another cluster's authority.
    pub fn write(&self, data_dir: &Path) -> anyhow::Result<()> {
        if let Some(missing) = NEEDED.iter().find(|name| !self.files.contains_key(**name)) {
            bail!("the bundle has no {missing}");
        }
        let authority = data_dir.join(FILES[0]);
        if let Ok(there) = std::fs::read_to_string(&authority)
            && Some(&there) != self.files.get(FILES[0])
        {
            bail!(
                "{} is the authority of another cluster: give an empty --data-dir",
                authority.display()
            );
        }
        for name in FILES {
            let Some(text) = self.files.get(name) else { continue };
            let path = data_dir.join(name);
            make_private(path.parent().unwrap_or(data_dir))?;
            pki::write_private(&path, text.as_bytes(), 0o600)?;
        }
        Ok(())
    }
}

/// `1.36` of `v1.36.2`.
fn minor(version: &str) -> String {
    let parts: Vec<&str> = version.trim_start_matches('v').split('.').take(2).collect();
    parts.join(".")
}

fn settings(flags: &flags::Server) -> BTreeMap<String, String> {
    let mut all = crate::agent::Settings::of_server(flags);
    all.retain(|name, _| !OWN_SETTINGS.contains(&name.as_str()));
    all
}

fn make_private(directory: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.with_context(|| format!("cannot make {}", directory.display()))
}

/// The token that servers join with; made at the first start.
fn servers_token(data_dir: &Path, pki: &Pki) -> anyhow::Result<JoinToken> {
    let path = data_dir.join(TOKEN);
    let secret = match std::fs::read_to_string(&path) {
        Ok(text) => JoinToken::parse(&text).with_context(|| path.display().to_string())?.secret,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => pki::random_token(LENGTH),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let token = JoinToken { ca_hash: Some(pki.cluster_ca.fingerprint()), secret };
    pki::write_private(&path, token.to_string().as_bytes(), 0o600)?;
    Ok(token)
}

/// Publishes this server's bundle for others, in the background: the store may not take writes yet. An
/// embedded store has no other servers.
pub fn publish(
    flags: &flags::Server,
    data_dir: &Path,
    pki: &Pki,
    has_etcd: bool,
    registry: &Registry,
    tasks: &Tasks,
) -> anyhow::Result<()> {
    let mut members = flags.datastore.endpoints.clone();
    if members.is_empty() {
        return Ok(());
    }
    // In the same order from all servers.
    members.sort_unstable();
    if !has_etcd {
        members.clear();
    }
    let token = servers_token(data_dir, pki)?;
    let bundle = Bundle::collect(flags, data_dir, has_etcd)?;
    let registry = registry.clone();
    tasks.spawn("bundle for servers", async move {
        let mut pause = Backoff::new(AGAIN_FIRST, AGAIN_CEILING);
        while let Err(error) = offer(&registry, &token, &bundle, &members).await {
            tracing::warn!(
                error = format!("{error:#}"),
                "failed to publish what servers need to join"
            );
            tokio::time::sleep(pause.step()).await;
        }
    });
    Ok(())
}

async fn offer(
    registry: &Registry,
    token: &JoinToken,
    bundle: &Bundle,
    members: &[String],
) -> anyhow::Result<()> {
    let known = joining::published(registry).await?;
    // Each sealing gives another text: what says the same stays.
    let same = known
        .filter(|sealed| Bundle::open(&token.secret, sealed).is_ok_and(|known| known == *bundle));
    let sealed = match same {
        Some(sealed) => sealed,
        None => pki::sealed::seal(&token.secret, bundle.encode().as_bytes())?,
    };
    let bootstrap = token.bootstrap();
    let token = (bootstrap.id, bootstrap.secret);
    let offer = Offer { token, bundle: sealed, members: members.to_vec() };
    Ok(joining::publish(registry, &offer).await?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        server: flags::Server,
    }

    fn flags(words: &[&str]) -> flags::Server {
        Line::try_parse_from(["server"].iter().chain(words)).expect("they fit").server
    }

    #[test]
    fn a_bundle_reaches_another_directory_and_differences_are_named() {
        let root = tempfile::tempdir().expect("a directory");
        let (from, to) = (root.path().join("a"), root.path().join("b"));
        let pki = Pki::open_or_create(&from.join("pki")).expect("created");
        let token = servers_token(&from, &pki).expect("made");
        assert_eq!(servers_token(&from, &pki).expect("read"), token);
        let bundle = Bundle::collect(&flags(&[]), &from, true).expect("collected");
        let sealed = pki::sealed::seal(&token.secret, bundle.encode().as_bytes()).expect("sealed");
        let opened = Bundle::open(&token.secret, &sealed).expect("opened");
        assert_eq!(opened, bundle);
        assert!(Bundle::open("another", &sealed).is_err());
        opened.write(&to).expect("written");
        let there = Pki::open(&to.join("pki")).expect("complete");
        assert_eq!(there.cluster_ca.fingerprint(), pki.cluster_ca.fingerprint());
        opened.write(&to).expect("the same again");
        assert!(opened.check(&flags(&["--disable=dns"])).is_ok());
        for (words, part) in [
            (&["--cluster-cidr=10.99.0.0/16"][..], "--cluster-cidr is \"10.99.0.0/16\" here"),
            (&["--cluster-domain=example.test"][..], "--cluster-domain"),
            (
                &["--service-cidr=10.98.0.0/16", "--cluster-dns=10.98.0.10"][..],
                "--service-cidr is \"10.98.0.0/16\" here",
            ),
        ] {
            let why = opened.check(&flags(words)).expect_err("it differs").to_string();
            assert!(why.contains(part), "{why}");
        }
        let other = Bundle { version: "v1.35.0".into(), ..opened.clone() };
        let why = other.check(&flags(&[])).expect_err("another version").to_string();
        assert!(why.contains("install the same version"), "{why}");
        let stranger = root.path().join("c");
        Pki::open_or_create(&stranger.join("pki")).expect("created");
        let why = opened.write(&stranger).expect_err("another cluster").to_string();
        assert!(why.contains("another cluster"), "{why}");
    }
}
