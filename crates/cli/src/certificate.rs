//! `decapod certificate`: lists and renews the certificates of this machine, and replaces the CA.
//!
//! In: the data directory, whose `pki` a running server follows, and whose `agent` an agent reads at its
//! start. Out: a table, or files moved aside so that new ones are made.
//!
//! Invariants: nothing is deleted, replaced files are kept in `pki/old-TIME`; keys have mode 0600; a
//! CA is replaced only by one that can sign, and removed only when no client uses its certificates any
//! more (`finish`).

mod finish;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::watch::FileWatch;
use jiff::Timestamp;
use pki::{Authority, Certificate};

use crate::duration;
use crate::grid::Grid;

const PKI: &str = "pki";
const AGENT: &str = "agent";
/// CAs, which `rotate` does not renew.
const ROOTS: [&str; 2] = ["ca", "front-proxy-ca"];
/// Like k3s: a shorter remaining lifetime gets a warning.
const WARNING_DAYS: i64 = 120;
/// How long a running server may take to make missing files.
const PATIENCE: Duration = Duration::from_secs(15);
const STAMP: &str = "%Y%m%dT%H%M%S%.3fZ";

#[derive(clap::Args, Clone, Debug)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct CertificateCommand {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(clap::Subcommand, Clone, Debug)]
pub enum Command {
    /// List the certificates of this machine with their remaining lifetime
    Check,
    /// Renew certificates; a running server uses its new ones at once
    Rotate(Rotate),
    /// Replace the certificate authorities; needs a restart of all servers and agents, and finally
    /// --finish
    RotateCa(RotateCa),
}

#[derive(clap::Args, Clone, Debug)]
pub struct Rotate {
    /// Only these certificates, with the names in `check`
    #[arg(short = 's', long, value_delimiter = ',', value_name = "NAME")]
    pub service: Vec<String>,
}

#[derive(clap::Args, Clone, Debug, Default)]
pub struct RotateCa {
    /// Directory with ca.crt and ca.key, and the same for front-proxy-ca, and sa.key [default: new ones
    /// are made]
    #[arg(long, value_name = "DIRECTORY")]
    pub path: Option<PathBuf>,
    /// Replace the authority also if clients that trust the present one will not trust the new one; with
    /// --finish also if clients still use certificates of the old one
    #[arg(long)]
    pub force: bool,
    /// The last step: trust only the new authority, when no client needs the old one any more
    #[arg(long, conflicts_with = "path")]
    pub finish: bool,
    /// With --finish: ignore certificates of the old authority that were not used for this long
    #[arg(long, default_value = "1h", value_parser = duration::parse, value_name = "DURATION", requires = "finish")]
    pub unused_for: Duration,
    /// With --finish: the kubeconfig for the server [default: <data-dir>/kubeconfig]
    #[arg(long, value_name = "FILE", requires = "finish")]
    pub kubeconfig: Option<PathBuf>,
}

impl CertificateCommand {
    pub async fn run(self, data_dir: &Path) -> Result<ExitCode> {
        let text = match self.command {
            Command::Check => check(data_dir)?,
            Command::Rotate(rotate) => rotate.run(data_dir).await?,
            Command::RotateCa(rotate) => rotate.run(data_dir).await?,
        };
        print!("{text}");
        Ok(ExitCode::SUCCESS)
    }
}

/// A file with a certificate.
struct Found {
    /// The file's stem, e.g. `apiserver`.
    name: String,
    path: PathBuf,
    certificate: Certificate,
}

/// All certificates below the data directory: `pki/NAME.crt` and `agent/NAME.pem`.
fn find(data_dir: &Path) -> Result<Vec<Found>> {
    let mut found = vec![];
    for (directory, end) in [(PKI, "crt"), (AGENT, "pem")] {
        let directory = data_dir.join(directory);
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", directory.display()));
            }
        };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != end) {
                continue;
            }
            let text = fs::read(&path).with_context(|| path.display().to_string())?;
            let all = pki::certificates(&text).with_context(|| path.display().to_string())?;
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if let Some(certificate) = all.into_iter().next() {
                found.push(Found { name, path, certificate });
            }
        }
    }
    found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    if found.is_empty() {
        bail!(
            "there are no certificates in {}; name the place with --data-dir",
            data_dir.display()
        );
    }
    Ok(found)
}

fn check(data_dir: &Path) -> Result<String> {
    let now = base::clock::now();
    let header = ["FILENAME", "SUBJECT", "USAGES", "EXPIRES", "RESIDUAL TIME", "STATUS"];
    let mut lines = vec![header.map(str::to_owned).to_vec()];
    let found = find(data_dir)?;
    lines.extend(found.iter().map(|one| row(one, now)));
    Ok(Grid::default().render(&lines))
}

/// Like `k3s certificate check --output table`.
fn row(found: &Found, now: Timestamp) -> Vec<String> {
    let certificate = &found.certificate;
    let left = certificate.not_after.as_second() - now.as_second();
    let status = match left {
        ..=0 => "EXPIRED",
        _ if certificate.not_before > now => "NOT YET VALID",
        _ if left < WARNING_DAYS * 86_400 => "WARNING",
        _ => "OK",
    };
    let mut usages: Vec<&str> = certificate
        .usages
        .iter()
        .map(|usage| match usage {
            pki::Usage::Client => "ClientAuth",
            pki::Usage::Server => "ServerAuth",
        })
        .collect();
    if certificate.is_authority {
        usages.push("CertSign");
    }
    let mut subject = format!("CN={}", certificate.common_name);
    if !certificate.organizations.is_empty() {
        subject.push_str(&format!(",O={}", certificate.organizations.join("+")));
    }
    let file = found.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let expires = certificate.not_after.strftime("%b %d, %Y %H:%M UTC").to_string();
    vec![file, subject, usages.join(","), expires, duration::short(left.max(0)), status.into()]
}

impl Rotate {
    async fn run(self, data_dir: &Path) -> Result<String> {
        let mut found = find(data_dir)?;
        found.retain(|one| !ROOTS.contains(&one.name.as_str()) && !one.certificate.is_authority);
        let known: BTreeSet<&str> = found.iter().map(|one| one.name.as_str()).collect();
        if let Some(unknown) = self.service.iter().find(|name| !known.contains(name.as_str())) {
            let known: Vec<&str> = known.into_iter().collect();
            bail!("there is no certificate {unknown:?}; there are {}", known.join(", "));
        }
        let all = self.service.is_empty();
        found.retain(|one| all || self.service.contains(&one.name));
        let (of_server, of_agent): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|one| one.path.extension().is_some_and(|end| end == "crt"));
        let mut out = String::new();
        if !of_server.is_empty() {
            let directory = data_dir.join(PKI);
            let aside = aside(&directory)?;
            let watch = FileWatch::directory(&directory)?;
            for one in &of_server {
                move_aside(&one.path, &aside)?;
            }
            let pending = renewed(&watch, &of_server).await;
            out.push_str(&format!(
                "{} certificates moved to {}\n",
                of_server.len(),
                aside.display()
            ));
            out.push_str(&match pending.as_slice() {
                [] => "the running server has renewed them\n".to_owned(),
                some => format!("to be renewed when next needed: {}\n", some.join(", ")),
            });
        }
        if !of_agent.is_empty() {
            let aside = aside(&data_dir.join(AGENT))?;
            for one in &of_agent {
                move_aside(&one.path, &aside)?;
            }
            let count = of_agent.len();
            out.push_str(&format!(
                "{count} certificates of the agent moved to {}; restart it to get new ones\n",
                aside.display()
            ));
        }
        Ok(out)
    }
}

/// Waits until the server has made the files again, and returns the names of the missing ones.
async fn renewed(watch: &FileWatch, moved: &[Found]) -> Vec<String> {
    let missing = || -> Vec<String> {
        moved.iter().filter(|one| !one.path.exists()).map(|one| one.name.clone()).collect()
    };
    let all = async {
        while !missing().is_empty() {
            watch.changed().await;
        }
    };
    // Files of components that do not run here are not made.
    let first = async {
        while missing().len() == moved.len() {
            watch.changed().await;
        }
    };
    if tokio::time::timeout(PATIENCE, first).await.is_ok() {
        let _ = tokio::time::timeout(Duration::from_secs(2), all).await;
    }
    missing()
}

/// Creates a directory for the replaced files.
fn aside(directory: &Path) -> Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let stamp = base::clock::now().strftime(STAMP);
    let path = directory.join(format!("old-{stamp}"));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&path)
        .with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}

fn move_aside(path: &Path, aside: &Path) -> Result<()> {
    let name = path.file_name().context("a file has a name")?;
    fs::rename(path, aside.join(name)).with_context(|| format!("cannot move {}", path.display()))
}

/// Keeps the old file aside, and replaces it atomically: a server that finds no CA would make another
/// one.
fn replace_file(path: &Path, content: &str, aside: &Path) -> Result<()> {
    let name = path.file_name().context("a file has a name")?;
    fs::hard_link(path, aside.join(name))
        .with_context(|| format!("cannot keep {} in {}", path.display(), aside.display()))?;
    Ok(pki::write_private(path, content.as_bytes(), 0o600)?)
}

impl RotateCa {
    async fn run(self, data_dir: &Path) -> Result<String> {
        if !self.finish {
            return self.replace(data_dir);
        }
        let (kubeconfig, unused_for) = (self.kubeconfig.as_deref(), self.unused_for);
        finish::Finish { data_dir, kubeconfig, unused_for, force: self.force }.run().await
    }

    fn replace(&self, data_dir: &Path) -> Result<String> {
        let directory = data_dir.join(PKI);
        let mut replaced = vec![];
        for (name, common_name) in [("ca", "kubernetes"), ("front-proxy-ca", "front-proxy-ca")] {
            let Some((cert, key)) = self.next(&directory, name, common_name)? else { continue };
            replaced.push((name, cert, key));
        }
        if replaced.is_empty() {
            bail!("there is no ca.crt in the directory given with --path");
        }
        let aside = aside(&directory)?;
        for (name, cert, key) in &replaced {
            replace_file(&directory.join(format!("{name}.key")), key, &aside)?;
            replace_file(&directory.join(format!("{name}.crt")), cert, &aside)?;
        }
        if let Some(key) = self.service_account_key()? {
            replace_file(&directory.join("sa.key"), &key, &aside)?;
            move_aside(&directory.join("sa.pub"), &aside)?;
        }
        // Last: a running server issues a missing leaf at once, but must not issue it from a CA that it does
        // not know yet.
        for one in find(data_dir)?.iter().filter(|one| one.path.starts_with(&directory)) {
            if !ROOTS.contains(&one.name.as_str()) {
                move_aside(&one.path, &aside)?;
            }
        }
        let names: Vec<&str> = replaced.iter().map(|(name, ..)| *name).collect();
        Ok(format!(
            "replaced: {}; the old files are in {}\n\
             restart the server, then the agents; kubeconfigs and agents of before keep working\n\
             in the end, `decapod certificate rotate-ca --finish` takes the old authority out\n",
            names.join(", "),
            aside.display()
        ))
    }

    /// Certificate and key of the next CA: the given ones, or new ones. The present CA cross-signs the new
    /// one, for clients that trust only the present one, and stays in the file, so that its certificates
    /// are trusted until they are replaced.
    fn next(
        &self,
        directory: &Path,
        name: &str,
        common_name: &str,
    ) -> Result<Option<(String, String)>> {
        let old = read(&directory.join(format!("{name}.crt")))?;
        let Some(path) = &self.path else {
            let present =
                Authority::from_pem(&old, &read(&directory.join(format!("{name}.key")))?)?;
            // The name is unique, because some programs look for an issuer by its name alone.
            let stamp = base::clock::now().as_millisecond();
            let authority = Authority::generate(&format!("{common_name}@{stamp}"))?;
            let vouched = authority.vouched_for_by(&present)?;
            let bundle = [authority.cert_pem(), &vouched, &old].concat();
            return Ok(Some((bundle, authority.key_pem().to_owned())));
        };
        let cert_path = path.join(format!("{name}.crt"));
        if !cert_path.exists() {
            return Ok(None);
        }
        let (cert, key) = (read(&cert_path)?, read(&path.join(format!("{name}.key")))?);
        // Check that it can sign.
        Authority::from_pem(&cert, &key).with_context(|| cert_path.display().to_string())?;
        let chain = pki::certificates(cert.as_bytes())?;
        let present = pki::certificates(old.as_bytes())?;
        let is_trusted = present.iter().any(|present| {
            chain.iter().any(|one| one.is_issued_by(present) || one.der() == present.der())
        });
        if !is_trusted && !self.force {
            bail!(
                "{}: neither signed by the present authority nor followed by it in the file; clients that trust only the present one would lose access. --force replaces it anyway",
                cert_path.display()
            );
        }
        Ok(Some((cert, key)))
    }

    fn service_account_key(&self) -> Result<Option<String>> {
        let path = self.path.as_ref().map(|path| path.join("sa.key"));
        path.filter(|path| path.exists()).map(|path| read(&path)).transpose()
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use pki::{Component, Pki};
    use transport::tls::ChainVerifier;

    use super::*;

    fn lab() -> (tempfile::TempDir, Pki) {
        let root = tempfile::tempdir().expect("a directory");
        let pki = Pki::open_or_create(&root.path().join(PKI)).expect("made");
        pki.component(Component::Admin).expect("issued");
        (root, pki)
    }

    #[test]
    fn certificates_are_listed_with_their_lifetime() {
        let (root, _) = lab();
        let text = check(root.path()).expect("a table");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[0].starts_with("FILENAME"));
        assert!(lines[1].contains("CN=kubernetes-admin,O=system:masters"), "{text}");
        assert!(lines[1].contains("ClientAuth") && lines[1].trim_end().ends_with("OK"), "{text}");
        assert!(lines[2].contains("CertSign"), "{text}");
        let found = find(root.path()).expect("found");
        for (years, expected) in [(0, "OK"), (2, "EXPIRED")] {
            let now = base::clock::now() + Duration::from_secs(years * 366 * 86_400);
            assert_eq!(row(&found[0], now)[5], expected);
        }
        let soon = base::clock::now() + Duration::from_secs(300 * 86_400);
        assert_eq!(row(&found[0], soon)[5], "WARNING");
        assert!(check(&root.path().join("nowhere")).is_err());
    }

    #[test]
    fn old_and_new_authority_are_trusted_by_both() {
        let (root, before) = lab();
        RotateCa::default().replace(root.path()).expect("rotated");
        let directory = root.path().join(PKI);
        let after = Pki::open_or_create(&directory).expect("loads");
        assert_ne!(after.cluster_ca.fingerprint(), before.cluster_ca.fingerprint());
        let bundle = pki::certificates(after.cluster_ca.cert_pem().as_bytes()).expect("PEM");
        assert_eq!(bundle.len(), 3);
        assert_eq!(bundle[2].fingerprint(), before.cluster_ca.fingerprint());
        // A client that trusts only the old CA accepts certificates of the new one, and vice versa.
        let now = u64::try_from(base::clock::now().as_second()).expect("after 1970");
        for (trusted, signer) in [(&before, &after), (&after, &before), (&after, &after)] {
            let issued = signer.issue(&Component::Scheduler.profile()).expect("signs");
            let verifier = ChainVerifier::new(trusted.cluster_ca.cert_pem()).expect("an authority");
            let chain = pki::certificates(issued.cert_pem.as_bytes()).expect("PEM");
            let chain: Vec<_> = chain.iter().map(|one| one.der().to_vec().into()).collect();
            verifier.verify(&chain, now).expect("trusted");
        }
        assert!(!directory.join("admin.crt").exists(), "leaves are made again");
        for name in ["ca.key", "ca.crt", "front-proxy-ca.key"] {
            let mode = fs::metadata(directory.join(name)).expect("there").permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
    }

    #[test]
    fn an_authority_that_nobody_trusts_needs_force() {
        let (root, _) = lab();
        let other = tempfile::tempdir().expect("a directory");
        Pki::open_or_create(other.path()).expect("made");
        let path = Some(other.path().to_owned());
        let rotate = RotateCa { path, ..RotateCa::default() };
        let told = rotate.replace(root.path()).expect_err("refused").to_string();
        assert!(told.contains("--force"), "{told}");
        let path = Some(other.path().to_owned());
        let rotate = RotateCa { path, force: true, ..RotateCa::default() };
        rotate.replace(root.path()).expect("forced");
        let (new, brought) = (root.path().join("pki/ca.crt"), other.path().join("ca.crt"));
        assert_eq!(fs::read(new).expect("there"), fs::read(brought).expect("there"));
    }
}
