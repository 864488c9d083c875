//! Upstream's configuration files of components that run alone, as flags.
//!
//! In: the command line. Out: the same, with the content of `--config FILE` as flags in front. The command
//! line wins; feature gates are merged one by one. The kubelet's drop-in files are merged into its file first. A field without a flag is named on stderr and has no
//! effect; so is a field that upstream does not have, which upstream decodes leniently, too. The scheduler
//! reads its file itself.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::{Map, Value};

use crate::flags::push_setting;

/// A component's file: its commands, its kind, and the flags of its fields.
struct File {
    command: &'static str,
    api_version: &'static str,
    kind: &'static str,
    fields: &'static [(&'static str, &'static str)],
    /// Fields that arrive as JSON, in flags `--kubelet-field`.
    structured: &'static [&'static str],
    /// All fields that upstream has, one a line, with their effect (docs/flags.md); the field of a map means
    /// all its keys.
    known: &'static str,
    /// Fields in which zero means the default. Upstream: SetDefaults_KubeletConfiguration.
    zero_is_default: &'static [&'static str],
}

const FILES: &[File] = &[
    File {
        command: "kubelet",
        api_version: "kubelet.config.k8s.io/v1beta1",
        kind: "KubeletConfiguration",
        structured: crate::kubelet_command::fields::STRUCTURED,
        known: include_str!("../flags/KubeletConfiguration.txt"),
        zero_is_default: &[
            "containerLogMaxFiles",
            "imageMinimumGCAge",
            "maxPods",
            "nodeStatusUpdateFrequency",
            "port",
            "runtimeRequestTimeout",
        ],
        fields: &[
            ("address", "address"),
            ("allowedUnsafeSysctls", "allowed-unsafe-sysctls"),
            ("authentication.anonymous.enabled", "anonymous-auth"),
            ("authentication.webhook.enabled", "authentication-token-webhook"),
            ("authentication.x509.clientCAFile", "client-ca-file"),
            ("authorization.mode", "authorization-mode"),
            ("cgroupDriver", "cgroup-driver"),
            ("cgroupRoot", "cgroup-root"),
            ("cgroupsPerQOS", "cgroups-per-qos"),
            ("clusterDNS", "cluster-dns"),
            ("clusterDomain", "cluster-domain"),
            ("containerLogMaxFiles", "container-log-max-files"),
            ("containerLogMaxSize", "container-log-max-size"),
            ("containerRuntimeEndpoint", "container-runtime-endpoint"),
            ("enableDebuggingHandlers", "enable-debugging-handlers"),
            ("enableServer", "enable-server"),
            ("featureGates", FEATURE_GATES),
            ("healthzBindAddress", "healthz-bind-address"),
            ("healthzPort", "healthz-port"),
            ("imageGCHighThresholdPercent", "image-gc-high-threshold"),
            ("imageGCLowThresholdPercent", "image-gc-low-threshold"),
            ("imageMinimumGCAge", "minimum-image-ttl-duration"),
            ("imageServiceEndpoint", "image-service-endpoint"),
            ("kubeReserved", "kube-reserved"),
            ("maxPods", "max-pods"),
            ("nodeStatusUpdateFrequency", "node-status-update-frequency"),
            ("port", "port"),
            ("providerID", "provider-id"),
            ("registerNode", "register-node"),
            ("resolvConf", "resolv-conf"),
            ("rotateCertificates", "rotate-certificates"),
            ("runtimeRequestTimeout", "runtime-request-timeout"),
            ("serializeImagePulls", "serialize-image-pulls"),
            ("shutdownGracePeriod", "shutdown-grace-period"),
            ("shutdownGracePeriodCriticalPods", "shutdown-grace-period-critical-pods"),
            ("staticPodPath", "pod-manifest-path"),
            ("systemReserved", "system-reserved"),
            ("tlsCertFile", "tls-cert-file"),
            ("tlsCipherSuites", "tls-cipher-suites"),
            ("tlsMinVersion", "tls-min-version"),
            ("tlsPrivateKeyFile", "tls-private-key-file"),
        ],
    },
    File {
        command: "kube-proxy",
        api_version: "kubeproxy.config.k8s.io/v1alpha1",
        kind: "KubeProxyConfiguration",
        structured: &[],
        known: include_str!("../flags/KubeProxyConfiguration.txt"),
        zero_is_default: &[],
        fields: &[
            ("clientConnection.kubeconfig", "kubeconfig"),
            ("clusterCIDR", "cluster-cidr"),
            ("conntrack.maxPerCore", "conntrack-max-per-core"),
            ("conntrack.min", "conntrack-min"),
            ("conntrack.tcpBeLiberal", "conntrack-tcp-be-liberal"),
            ("conntrack.tcpCloseWaitTimeout", "conntrack-tcp-timeout-close-wait"),
            ("conntrack.tcpEstablishedTimeout", "conntrack-tcp-timeout-established"),
            ("conntrack.udpStreamTimeout", "conntrack-udp-timeout-stream"),
            ("conntrack.udpTimeout", "conntrack-udp-timeout"),
            ("featureGates", FEATURE_GATES),
            ("healthzBindAddress", "healthz-bind-address"),
            ("hostnameOverride", "hostname-override"),
            ("metricsBindAddress", "metrics-bind-address"),
            ("mode", "proxy-mode"),
            ("nftables.masqueradeAll", "masquerade-all"),
            ("nodePortAddresses", "nodeport-addresses"),
        ],
    },
];

pub const FEATURE_GATES: &str = "feature-gates";

/// The content of `--config FILE` as flags, with that of `--config-dir DIRECTORY` merged into it; `None` for
/// commands with another kind of file.
pub fn flags(
    command: &str,
    path: Option<&str>,
    drop_ins: Option<&str>,
) -> anyhow::Result<Option<Vec<String>>> {
    let Some(file) = FILES.iter().find(|file| file.command == command) else { return Ok(None) };
    let mut all = Value::Object(Map::new());
    if let Some(path) = path {
        all = Value::Object(file.read(Path::new(path))?);
    }
    for path in drop_ins.map(files_of).transpose()?.unwrap_or_default() {
        let fields = file.read(&path).with_context(|| {
            format!("failed to load kubelet dropin file, path: {}", path.display())
        })?;
        merge(&mut all, Value::Object(fields));
    }
    let Value::Object(fields) = all else { return Ok(None) };
    let (flags, unknown) = file.flags(fields)?;
    let (known, strange): (Vec<_>, Vec<_>) = unknown.into_iter().partition(|field| file.has(field));
    let path = path.or(drop_ins).unwrap_or_default();
    if !known.is_empty() {
        eprintln!("decapod: {path}: fields without effect: {}", known.join(", "));
    }
    for field in strange {
        eprintln!(
            "decapod: {path}: using lenient decoding as strict decoding failed: unknown field {field:?}"
        );
    }
    Ok(Some(flags))
}

/// The files `*.conf` below a directory, in the order of their paths.
fn files_of(directory: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut out = vec![];
    let mut left = vec![PathBuf::from(directory)];
    while let Some(directory) = left.pop() {
        let entries = std::fs::read_dir(&directory)
            .with_context(|| format!("cannot read {}", directory.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|end| end == "conf") {
                out.push(path);
            }
        }
    }
    out.sort();
    Ok(out)
}

/// JSON merge patch (RFC 7396): maps are merged, other values replaced, null removes.
fn merge(into: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *into = patch;
        return;
    };
    if !into.is_object() {
        *into = Value::Object(Map::new());
    }
    let Value::Object(into) = into else { return };
    for (key, value) in patch {
        if value.is_null() {
            into.remove(&key);
        } else {
            merge(into.entry(key).or_insert(Value::Null), value);
        }
    }
}

impl File {
    /// Whether upstream has the field, or the map that it is a key of.
    fn has(&self, field: &str) -> bool {
        let is_it = |known: &str| {
            field.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.rows().any(|row| is_it(row[0]))
    }

    /// Field, effect, reason.
    fn rows(&self) -> impl Iterator<Item = [&'static str; 3]> + use<> {
        let lines = self.known.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines.map(|line| {
            let (field, rest) = line.split_once(' ').unwrap_or((line, ""));
            let rest = rest.trim();
            let (effect, reason) = rest.split_once(' ').unwrap_or((rest, ""));
            [field, effect, reason.trim()]
        })
    }

    /// The fields of a file.
    fn read(&self, path: &Path) -> anyhow::Result<Map<String, Value>> {
        let shown = || path.display().to_string();
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", shown()))?;
        self.parse(&text).with_context(shown)
    }

    fn parse(&self, text: &str) -> anyhow::Result<Map<String, Value>> {
        let mut fields: Map<String, Value> = serde_saphyr::from_str(text)?;
        let mut said = |key: &str| match fields.remove(key) {
            Some(Value::String(text)) => text,
            _ => String::new(),
        };
        let (api_version, kind) = (said("apiVersion"), said("kind"));
        if (api_version.as_str(), kind.as_str()) != (self.api_version, self.kind) {
            bail!(
                "no kind {kind:?} of version {api_version:?} is supported: expected {} of {}",
                self.kind,
                self.api_version
            );
        }
        Ok(fields)
    }

    /// The flags, and the fields without a flag.
    fn flags(&self, fields: Map<String, Value>) -> anyhow::Result<(Vec<String>, Vec<String>)> {
        let (mut flags, mut unknown) = (vec![], vec![]);
        self.take(String::new(), fields, &mut flags, &mut unknown)?;
        Ok((flags, unknown))
    }

    fn take(
        &self,
        below: String,
        fields: Map<String, Value>,
        flags: &mut Vec<String>,
        unknown: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        for (key, value) in fields {
            let path = format!("{below}{key}");
            let flag = self.fields.iter().find(|(field, _)| *field == path);
            match (flag, value) {
                // Upstream treats an empty text and an empty list as not set.
                (_, Value::Null) => {}
                (_, value) if self.structured.contains(&path.as_str()) => {
                    flags.push(format!("--kubelet-field={path}={value}"));
                }
                (Some(_), Value::String(text)) if text.is_empty() => {}
                (Some((field, _)), value)
                    if self.zero_is_default.contains(field) && is_zero(&value) => {}
                (Some((_, flag)), Value::Bool(is_on)) => flags.push(format!("--{flag}={is_on}")),
                (Some((_, flag)), value) => {
                    push_setting(flags, flag, value).with_context(|| path.clone())?;
                }
                (None, Value::Object(inner)) => {
                    self.take(format!("{path}."), inner, flags, unknown)?;
                }
                // Not set by the user: programs that write such files write all fields.
                (None, value) if is_zero(&value) => {}
                (None, _) => unknown.push(path),
            }
        }
        Ok(())
    }
}

/// A number or duration of zero, an empty text, an empty list.
fn is_zero(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => {
            text.is_empty() || cli::duration::parse(text).is_ok_and(|time| time.is_zero())
        }
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_become_flags() {
        let check = |at: usize, text: &str, expected: &[&str], unknown: &[&str]| {
            let fields = FILES[at].parse(text).expect("a file");
            let (mut flags, left) = FILES[at].flags(fields).expect("flags");
            flags.sort();
            assert_eq!(
                (flags.as_slice(), left.as_slice()),
                (
                    &expected.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>()[..],
                    &unknown.iter().map(|field| (*field).to_owned()).collect::<Vec<_>>()[..],
                )
            );
        };
        check(
            0,
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 30\nclusterDNS: [10.0.0.10]\nstaticPodPath: ''\nauthentication: {x509: {clientCAFile: /ca}, anonymous: {enabled: false}}\nfeatureGates: {ContainerStopSignals: true, EnvFiles: false}\n",
            &[
                "--anonymous-auth=false",
                "--client-ca-file=/ca",
                "--cluster-dns=10.0.0.10",
                "--feature-gates=ContainerStopSignals=true",
                "--feature-gates=EnvFiles=false",
                "--max-pods=30",
            ],
            &[],
        );
        // As in kubeadm's files.
        check(
            0,
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nport: 0\nmaxPods: 0\nruntimeRequestTimeout: 0s\ncpuManagerReconcilePeriod: 0s\nlogging: {flushFrequency: 0, options: {json: {infoBufferSize: '0'}}, verbosity: 0}\nimageGCHighThresholdPercent: 0\nshutdownGracePeriod: 0s\nallowedUnsafeSysctls: ['kernel.msg*', net.core.somaxconn]\nsyncFrequency: 1m\n",
            &[
                "--allowed-unsafe-sysctls=kernel.msg*",
                "--allowed-unsafe-sysctls=net.core.somaxconn",
                "--image-gc-high-threshold=0",
                "--kubelet-field=cpuManagerReconcilePeriod=\"0s\"",
                "--shutdown-grace-period=0s",
            ],
            &["syncFrequency"],
        );
        check(
            1,
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\nclientConnection: {kubeconfig: /k}\nnftables: {masqueradeAll: true}\n",
            &["--kubeconfig=/k", "--masquerade-all=true", "--proxy-mode=nftables"],
            &[],
        );
        for (field, expected) in
            [("syncFrequency", true), ("evictionHard.memory.available", true), ("sync", false)]
        {
            assert_eq!(FILES[0].has(field), expected, "{field}");
        }
        // A field with a flag that upstream does not have would never be used.
        for file in FILES {
            for (field, _) in file.fields {
                assert!(file.has(field), "{}: {field}", file.kind);
            }
        }
        assert!(FILES[0].parse("apiVersion: v1\nkind: Pod\n").is_err());
    }

    /// The table of docs/flags.md says what happens with each field.
    #[test]
    fn the_table_says_which_fields_have_an_effect() {
        let kubelet = &FILES[0];
        let is_used = |field: &str| {
            let parent = field.split('.').next().unwrap_or_default();
            kubelet.fields.iter().any(|(one, _)| *one == field)
                || kubelet.structured.contains(&field)
                || kubelet.structured.contains(&parent)
        };
        for [field, effect, reason] in kubelet.rows() {
            let expected = if is_used(field) { "does" } else { "nothing" };
            assert_eq!(effect, expected, "{field}");
            assert_eq!(reason.is_empty(), effect == "does", "{field}: {reason}");
        }
        let names: Vec<&str> = kubelet.rows().map(|row| row[0]).collect();
        assert!(names.is_sorted_by(|one, next| one < next));
        for field in kubelet.structured {
            assert!(names.iter().any(|name| name.split('.').next() == Some(field)), "{field}");
        }
    }

    #[test]
    fn drop_ins_are_merged_in_order() {
        let dir = tempfile::tempdir().expect("a directory");
        let put = |name: &str, text: &str| {
            let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            std::fs::write(path, format!("{head}{text}")).expect("written");
        };
        put("base.yaml", "maxPods: 10\nclusterDNS: [1.1.1.1]\nevictionHard: {a: '1', b: '2'}\n");
        put("d/20.conf", "maxPods: 30\nevictionHard: {b: null, c: '3'}\n");
        put("d/10.conf", "maxPods: 20\nclusterDNS: [2.2.2.2]\n");
        put("d/30.yaml", "maxPods: 40\n");
        let (base, drop_ins) = (dir.path().join("base.yaml"), dir.path().join("d"));
        let of = |base: Option<&Path>| {
            let (base, drop_ins) = (base.and_then(Path::to_str), drop_ins.to_str());
            let mut flags = flags("kubelet", base, drop_ins).expect("files").expect("a kubelet");
            flags.sort();
            flags
        };
        assert_eq!(
            of(Some(&base)),
            [
                "--cluster-dns=2.2.2.2",
                "--kubelet-field=evictionHard={\"a\":\"1\",\"c\":\"3\"}",
                "--max-pods=30"
            ]
        );
        assert_eq!(of(None).len(), 3);
        std::fs::write(dir.path().join("d/40.conf"), "kind: Pod\n").expect("written");
        let error = flags("kubelet", None, drop_ins.to_str()).expect_err("another kind");
        assert!(format!("{error:#}").starts_with("failed to load kubelet dropin file, path: "));
    }
}
