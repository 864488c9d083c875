//! The options of a server, and its version.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use machinery::protobuf::Descriptors;

use crate::aggregate::Aggregator;
use crate::audit::Audit;
pub use crate::filters::browsers::Browsers;
use crate::metrics::{family, labels, samples};
use crate::schemas::SchemaSource;

/// The content of `/version`.
#[derive(Clone, Debug)]
pub struct Version {
    pub major: &'static str,
    pub minor: &'static str,
    pub git_version: &'static str,
    pub git_commit: String,
    pub build_date: String,
}

impl Default for Version {
    fn default() -> Self {
        Self {
            major: release::KUBERNETES.major,
            minor: release::KUBERNETES.minor,
            git_version: release::KUBERNETES.build,
            git_commit: String::new(),
            build_date: "1970-01-01T00:00:00Z".into(),
        }
    }
}

impl Version {
    /// The answer of `/version`.
    pub fn json(&self) -> serde_json::Value {
        let older =
            self.minor.parse::<u32>().map_or(String::new(), |minor| (minor - 1).to_string());
        serde_json::json!({
            "major": self.major,
            "minor": self.minor,
            "emulationMajor": self.major,
            "emulationMinor": self.minor,
            "minCompatibilityMajor": self.major,
            "minCompatibilityMinor": older,
            "gitVersion": self.git_version,
            "gitCommit": self.git_commit,
            "gitTreeState": "clean",
            "buildDate": self.build_date,
            "goVersion": "none",
            "compiler": "rustc",
            "platform": base::platform::platform(),
        })
    }

    /// The metric `kubernetes_build_info`.
    pub fn encode(&self, out: &mut String) {
        let labels = labels([
            ("build_date", &self.build_date),
            ("compiler", "rustc"),
            ("git_commit", &self.git_commit),
            ("git_tree_state", "clean"),
            ("git_version", self.git_version),
            ("go_version", "none"),
            ("major", self.major),
            ("minor", self.minor),
            ("platform", &base::platform::platform()),
        ]);
        let help = "[BETA] A metric with a constant '1' value labeled by major, minor, git version, git commit, git tree state, build date, Go version, and compiler from which Kubernetes was built, and platform on which it is running.";
        family(out, "kubernetes_build_info", "gauge", help);
        samples(out, "kubernetes_build_info", [(&labels, 1)]);
    }
}

/// A document with fixed content.
#[derive(Clone, Debug)]
pub struct Page {
    pub path: String,
    pub content_type: &'static str,
    pub body: Bytes,
    /// Its OpenAPI description and tag.
    pub about: &'static str,
    pub tag: &'static str,
}

pub struct Options {
    /// Requests without credentials are `system:anonymous`.
    pub anonymous: bool,
    /// If not empty, anonymous requests are allowed on these paths only.
    pub anonymous_paths: Vec<String>,
    pub request_timeout: Duration,
    /// Maximum numbers of requests in flight, without watches. With priority and fairness all requests share
    /// their sum; without, 0 means no limit.
    pub reads_in_flight: usize,
    pub writes_in_flight: usize,
    pub fairness: bool,
    /// Watches without a timeout end after this time at the earliest, and twice this time at the latest.
    pub min_watch: Duration,
    /// The server's address in `/api`, for example `192.0.2.1:6443`.
    pub advertised: String,
    pub version: Version,
    /// Groups in the order of discovery; unknown ones follow by name.
    pub group_order: &'static [&'static str],
    /// Documents at fixed paths: the OpenID configuration and keys.
    pub pages: Vec<Page>,
    /// The schemas of kinds; without it OpenAPI has paths only.
    pub schemas: Option<Arc<dyn SchemaSource>>,
    /// Messages of the built-in kinds, made when the first client uses protobuf.
    pub protobuf: Option<fn() -> &'static Descriptors>,
    /// Knows the servers of other groups.
    pub aggregator: Option<Arc<dyn Aggregator>>,
    /// The audit log.
    pub audit: Option<Arc<Audit>>,
    /// CORS and Strict-Transport-Security.
    pub browsers: Browsers,
    /// Upstream's `--goaway-chance`, from 0 to 0.02.
    pub goaway_chance: f64,
    /// Upstream's `--delete-collection-workers`.
    pub delete_workers: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            anonymous: true,
            anonymous_paths: vec![],
            request_timeout: Duration::from_secs(60),
            reads_in_flight: 400,
            writes_in_flight: 200,
            fairness: true,
            min_watch: Duration::from_secs(1800),
            advertised: String::new(),
            version: Version::default(),
            group_order: &[],
            pages: vec![],
            schemas: None,
            protobuf: None,
            aggregator: None,
            audit: None,
            browsers: Browsers::default(),
            goaway_chance: 0.0,
            delete_workers: 1,
        }
    }
}
