//! What whoever starts a server decides, and what it says of itself.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use machinery::protobuf::Descriptors;

use crate::aggregate::Aggregator;
use crate::audit::Audit;
use crate::metrics::{family, labels, samples};
use crate::schemas::SchemaSource;

/// What `/version` says.
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
    /// What `/version` answers.
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

    /// The figure `kubernetes_build_info`.
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

/// A document that is served as it is.
#[derive(Clone, Debug)]
pub struct Page {
    pub path: String,
    pub content_type: &'static str,
    pub body: Bytes,
    /// What OpenAPI says that it is, and under which heading.
    pub about: &'static str,
    pub tag: &'static str,
}

pub struct Options {
    /// Requests without credentials count for `system:anonymous`.
    pub anonymous: bool,
    /// Only on these paths, if there are any.
    pub anonymous_paths: Vec<String>,
    pub request_timeout: Duration,
    /// How many requests run at one time, watches aside. With priority and fairness their sum is
    /// shared by all; without, 0 stands for no limit.
    pub reads_in_flight: usize,
    pub writes_in_flight: usize,
    pub fairness: bool,
    /// Watches that name no timeout end within once and twice this time.
    pub min_watch: Duration,
    /// What `/api` tells as the server's address, as `192.0.2.1:6443`.
    pub advertised: String,
    pub version: Version,
    /// Groups in the order of discovery; unknown ones follow by name.
    pub group_order: &'static [&'static str],
    /// Documents at fixed paths: the OpenID configuration and keys.
    pub pages: Vec<Page>,
    /// Where the schemas of kinds come from; without it OpenAPI has paths only.
    pub schemas: Option<Arc<dyn SchemaSource>>,
    /// Messages of the built-in kinds, asked for when the first client speaks protobuf.
    pub protobuf: Option<fn() -> &'static Descriptors>,
    /// Knows the servers that answer for other groups.
    pub aggregator: Option<Arc<dyn Aggregator>>,
    /// Notes what is asked and done.
    pub audit: Option<Arc<Audit>>,
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
        }
    }
}
