//! Renews the server's own certificates and takes them into use while it runs.
//!
//! In: leaf certificates, each with its profile and its users; their directory; the clock. Out: a valid
//! certificate at any time, in the listener, in clients and in kubeconfigs. Existing connections stay: TLS
//! checks certificates only in the handshake.
//!
//! ```text
//!  four fifths of the lifetime are over ───────────┐
//!  the file was removed (`certificate rotate`) ────┴► issued, stored ► applied
//!  a file from the user has changed ────────────────────────────────► applied
//! ```
//!
//! Invariant: only an authority that the server started with signs. A new authority on the disk takes
//! effect at the next start, because clients that trust only the current one could not connect.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::task::Tasks;
use base::watch::FileWatch;
use jiff::Timestamp;
use pki::{Component, Issued, Pki, Profile};

/// Clocks jump and machines sleep: a waiting renewal checks the time this often.
const LOOK: Duration = Duration::from_secs(1800);
/// Interval of log lines about an expired authority.
const REMINDER: Duration = Duration::from_secs(3600);
/// Shortest wait, so that a certificate that is due already causes no busy loop.
const SHORTEST: Duration = Duration::from_secs(1);
/// Related files change one after the other: certificate and key, an authority and its leaves.
const SETTLE: Duration = Duration::from_millis(200);
/// Wait after a failed renewal.
const RETRY: Duration = Duration::from_secs(60);

/// Takes a certificate into use.
type Apply = Box<dyn Fn(&Issued) -> anyhow::Result<()> + Send + Sync>;

/// The source of a leaf.
enum Source {
    /// Issued by the cluster's authority, stored under this name.
    Own(String, Profile),
    Component(Component),
    /// From the user: read again when it changes.
    Files(PathBuf, PathBuf),
}

struct Leaf {
    source: Source,
    apply: Apply,
    /// The certificate in use.
    present: String,
}

/// The leaves of a server. Clones share them.
#[derive(Clone)]
pub struct Rotation(Arc<Inner>);

struct Inner {
    directory: PathBuf,
    /// Fingerprints of the authorities at the start.
    authorities: [[u8; 32]; 2],
    /// Locked while leaves are added or checked; never held across an await.
    leaves: Mutex<Vec<Leaf>>,
}

impl Rotation {
    pub fn new(pki: &Pki) -> Self {
        let directory = pki.directory().to_owned();
        let authorities = fingerprints(pki);
        Self(Arc::new(Inner { directory, authorities, leaves: Mutex::default() }))
    }

    /// A leaf of the cluster's authority; `present` is in use.
    pub fn own(
        &self,
        name: &str,
        profile: Profile,
        present: &Issued,
        apply: impl Fn(&Issued) -> anyhow::Result<()> + Send + Sync + 'static,
    ) {
        self.add(Source::Own(name.to_owned(), profile), present, Box::new(apply));
    }

    pub fn component(
        &self,
        component: Component,
        present: &Issued,
        apply: impl Fn(&Issued) -> anyhow::Result<()> + Send + Sync + 'static,
    ) {
        self.add(Source::Component(component), present, Box::new(apply));
    }

    pub fn files(
        &self,
        cert: &Path,
        key: &Path,
        present: &Issued,
        apply: impl Fn(&Issued) -> anyhow::Result<()> + Send + Sync + 'static,
    ) {
        self.add(Source::Files(cert.to_owned(), key.to_owned()), present, Box::new(apply));
    }

    fn add(&self, source: Source, present: &Issued, apply: Apply) {
        let leaf = Leaf { source, apply, present: present.cert_pem.clone() };
        self.0.leaves.lock().expect("no panic under the lock").push(leaf);
    }

    /// Starts to renew the leaves. Call it after all are added.
    pub fn start(&self, tasks: &Tasks) {
        let rotation = self.clone();
        tasks.spawn("certificates", async move { rotation.keep().await });
    }

    async fn keep(&self) {
        let watches: Vec<FileWatch> = self
            .directories()
            .iter()
            .filter_map(|directory| match FileWatch::directory(directory) {
                Ok(watch) => Some(watch),
                Err(error) => {
                    tracing::warn!(directory = %directory.display(), %error, "failed to watch the certificates for changes");
                    None
                }
            })
            .collect();
        let mut due = self.refresh();
        loop {
            let left = due.as_second().saturating_sub(base::clock::now().as_second());
            let left = Duration::from_secs(u64::try_from(left).unwrap_or(0)).clamp(SHORTEST, LOOK);
            let has_changed = tokio::select! {
                () = tokio::time::sleep(left) => false,
                () = any_change(&watches) => true,
            };
            if has_changed {
                tokio::time::sleep(SETTLE).await;
            }
            if has_changed || base::clock::now() >= due {
                due = self.refresh();
            }
        }
    }

    fn directories(&self) -> Vec<PathBuf> {
        let mut all = vec![self.0.directory.clone()];
        for leaf in self.0.leaves.lock().expect("no panic under the lock").iter() {
            if let Source::Files(cert, key) = &leaf.source {
                all.extend([cert, key].iter().filter_map(|path| path.parent().map(Path::to_owned)));
            }
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Checks all leaves once, and returns when the next renewal is due.
    fn refresh(&self) -> Timestamp {
        let retry = base::clock::now() + RETRY;
        let pki = match Pki::open(&self.0.directory) {
            Ok(pki) => pki,
            Err(error) => {
                tracing::error!(%error, "failed to read the certificate authorities");
                return retry;
            }
        };
        if fingerprints(&pki) != self.0.authorities {
            tracing::warn!(
                "the certificate authority was replaced; restart the server to use the new one"
            );
            return Timestamp::MAX;
        }
        let authorities = [&pki.cluster_ca, &pki.front_proxy_ca];
        if authorities.iter().any(|one| one.certificate().not_after <= base::clock::now()) {
            tracing::error!(
                "a certificate authority has expired; create a new one with `decapod certificate rotate-ca`"
            );
            return base::clock::now() + REMINDER;
        }
        let mut due = Timestamp::MAX;
        for leaf in self.0.leaves.lock().expect("no panic under the lock").iter_mut() {
            match leaf.refresh(&pki) {
                Ok(at) => due = due.min(at),
                Err(error) => {
                    let name = leaf.source.name();
                    tracing::error!(
                        name,
                        error = format!("{error:#}"),
                        "failed to renew the certificate"
                    );
                    due = due.min(retry);
                }
            }
        }
        due
    }
}

impl Leaf {
    /// Renews the leaf if it is due, and returns when it is due next.
    fn refresh(&mut self, pki: &Pki) -> anyhow::Result<Timestamp> {
        let issued = match &self.source {
            Source::Own(name, profile) => pki.ensure(name, profile)?,
            Source::Component(component) => pki.component(*component)?,
            Source::Files(cert, key) => Issued {
                cert_pem: std::fs::read_to_string(cert)?,
                key_pem: std::fs::read_to_string(key)?,
            },
        };
        if issued.cert_pem != self.present {
            (self.apply)(&issued)?;
            tracing::info!(name = self.source.name(), "replaced the certificate");
            self.present.clone_from(&issued.cert_pem);
        }
        if matches!(self.source, Source::Files(..)) {
            return Ok(Timestamp::MAX);
        }
        let certificates = pki::certificates(issued.cert_pem.as_bytes())?;
        Ok(certificates.first().map_or(Timestamp::MAX, pki::Certificate::renew_at))
    }
}

impl Source {
    fn name(&self) -> String {
        match self {
            Self::Own(name, _) => name.clone(),
            Self::Component(component) => component.file_name().to_owned(),
            Self::Files(cert, _) => cert.display().to_string(),
        }
    }
}

/// Resolves after a change in any of them; never, if there are none.
pub async fn any_change(watches: &[FileWatch]) {
    if watches.is_empty() {
        return std::future::pending().await;
    }
    futures::future::select_all(watches.iter().map(|watch| Box::pin(watch.changed()))).await;
}

fn fingerprints(pki: &Pki) -> [[u8; 32]; 2] {
    [pki.cluster_ca.fingerprint(), pki.front_proxy_ca.fingerprint()]
}

#[cfg(test)]
mod tests {
    use pki::San;
    use transport::tls::ChainVerifier;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    struct Lab {
        directory: tempfile::TempDir,
        pki: Pki,
        rotation: Rotation,
        used: Arc<Mutex<Vec<String>>>,
    }

    impl Lab {
        fn new() -> Self {
            let directory = tempfile::tempdir().expect("a directory");
            let pki = Pki::open_or_create(directory.path()).expect("made");
            let rotation = Rotation::new(&pki);
            let used = Arc::new(Mutex::new(vec![]));
            let lab = Self { directory, pki, rotation, used };
            let first = lab.pki.component(Component::Admin).expect("issued");
            lab.apply(&first);
            let used = lab.used.clone();
            lab.rotation.component(Component::Admin, &first, move |issued| {
                used.lock().expect("no panic").push(issued.cert_pem.clone());
                Ok(())
            });
            lab
        }

        fn apply(&self, issued: &Issued) {
            self.used.lock().expect("no panic").push(issued.cert_pem.clone());
        }

        fn used(&self) -> Vec<String> {
            self.used.lock().expect("no panic").clone()
        }
    }

    /// Ten years of uptime: the certificate in use is valid on every day.
    #[tokio::test(start_paused = true)]
    async fn ten_years_pass_and_every_day_has_a_valid_certificate() {
        let _world = base::sim::enter(1);
        let lab = Lab::new();
        let verifier = ChainVerifier::new(lab.pki.cluster_ca.cert_pem()).expect("an authority");
        let tasks = Tasks::new("test");
        lab.rotation.start(&tasks);
        for day in 0..3_640 {
            tokio::time::sleep(DAY).await;
            let present = lab.used().pop().expect("one is in use");
            let chain = pki::certificates(present.as_bytes()).expect("PEM");
            let der: Vec<_> = chain.iter().map(|one| one.der().to_vec().into()).collect();
            let now = u64::try_from(base::clock::now().as_second()).expect("after 1970");
            verifier.verify(&der, now).unwrap_or_else(|error| panic!("day {day}: {error}"));
        }
        // Renewed after four fifths of a year each time, and not more often. The last but one is cut to the
        // rest of the authority's life.
        assert_eq!(lab.used().len(), 14);
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    /// The clock is changed, or the machine slept for years: half an hour later the certificate is valid.
    #[tokio::test(start_paused = true)]
    async fn a_jump_of_the_clock_is_noticed_by_itself() {
        const YEAR: Duration = Duration::from_secs(365 * 86_400);
        let _world = base::sim::enter(2);
        let lab = Lab::new();
        let verifier = ChainVerifier::new(lab.pki.cluster_ca.cert_pem()).expect("an authority");
        let tasks = Tasks::new("test");
        lab.rotation.start(&tasks);
        let is_valid = || {
            let present = lab.used().pop().expect("one is in use");
            let chain = pki::certificates(present.as_bytes()).expect("PEM");
            let der: Vec<_> = chain.iter().map(|one| one.der().to_vec().into()).collect();
            let now = u64::try_from(base::clock::now().as_second()).expect("after 1970");
            verifier.verify(&der, now).is_ok()
        };
        for jump in [YEAR, 5 * YEAR, 3 * YEAR] {
            tokio::time::sleep(DAY).await;
            let before = lab.used().len();
            base::sim::jump(jump);
            tokio::time::sleep(LOOK + SHORTEST).await;
            assert_eq!(lab.used().len(), before + 1);
            assert!(is_valid(), "after {jump:?}");
        }
        // The authority has expired, too: no renewal is possible, and there is no busy loop.
        base::sim::jump(2 * YEAR);
        let before = lab.used().len();
        tokio::time::sleep(DAY).await;
        assert_eq!(lab.used().len(), before);
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[tokio::test]
    async fn a_removed_certificate_is_issued_again_at_once() {
        let lab = Lab::new();
        let tasks = Tasks::new("test");
        lab.rotation.start(&tasks);
        std::fs::remove_file(lab.directory.path().join("admin.crt")).expect("there");
        testkit::wait::found("noticed", async || (lab.used().len() >= 2).then_some(())).await;
        assert_ne!(lab.used()[0], lab.used()[1]);
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[test]
    fn files_are_watched_and_another_authority_waits() {
        let lab = Lab::new();
        let (cert, key) = (lab.directory.path().join("x.crt"), lab.directory.path().join("x.key"));
        let profile = Profile::server("x", vec![San::parse("x")]);
        let store = || {
            let issued = lab.pki.issue(&profile).expect("issued");
            pki::write_private(&cert, issued.cert_pem.as_bytes(), 0o600).expect("written");
            pki::write_private(&key, issued.key_pem.as_bytes(), 0o600).expect("written");
            issued
        };
        let first = store();
        let used = lab.used.clone();
        lab.rotation.files(&cert, &key, &first, move |issued| {
            used.lock().expect("no panic").push(issued.cert_pem.clone());
            Ok(())
        });
        lab.rotation.refresh();
        assert_eq!(lab.used().len(), 1);
        let second = store();
        lab.rotation.refresh();
        assert_eq!(lab.used().pop(), Some(second.cert_pem));
        // A removed file is not replaced.
        let other = Lab::new();
        let (there, aside) =
            (lab.directory.path().join("ca.crt"), lab.directory.path().join("aside"));
        std::fs::rename(&there, &aside).expect("moved");
        store();
        assert!(lab.rotation.refresh() < Timestamp::MAX);
        assert!(!there.exists());
        for name in ["ca.crt", "ca.key"] {
            std::fs::copy(other.directory.path().join(name), lab.directory.path().join(name))
                .expect("copied");
        }
        assert_eq!(lab.rotation.refresh(), Timestamp::MAX);
        assert_eq!(lab.used().len(), 2);
    }
}
