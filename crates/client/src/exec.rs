//! Credential plugins: programs named in a kubeconfig that print the client's credentials.
//!
//! ```text
//!  request ► known and not expired? ► token, or certificate and key ► request
//!              └ run COMMAND with KUBERNETES_EXEC_INFO, read an ExecCredential
//!  401 ► run it again for the next request
//! ```
//!
//! In: the `exec` part of a kubeconfig's user, and its cluster. Out: a
//! [`transport::CredentialSource`]. Versions v1 and v1beta1 of `client.authentication.k8s.io`.
//! Invariants: one run at a time, and all waiting requests get its outcome; secrets are never logged.
//! Upstream: `k8s.io/client-go/plugin/pkg/client/auth/exec`.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::Mutex;
use transport::{BoxError, CredentialSource, Shown};

const GROUP: &str = "client.authentication.k8s.io";
const ENVIRONMENT: &str = "KUBERNETES_EXEC_INFO";

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecError {
    /// The kubeconfig is wrong.
    #[error("{0}")]
    Config(String),
    /// The plugin gave no usable credentials.
    #[error("getting credentials: {0}")]
    Run(String),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
enum Interactive {
    Never,
    #[default]
    IfAvailable,
    Always,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    command: String,
    #[serde(default)]
    args: Option<Vec<String>>,
    #[serde(default)]
    env: Option<Vec<Variable>>,
    #[serde(default)]
    install_hint: Option<String>,
    #[serde(default)]
    provide_cluster_info: bool,
    interactive_mode: Option<Interactive>,
}

#[derive(Clone, Debug, Deserialize)]
struct Variable {
    name: String,
    #[serde(default)]
    value: String,
}

/// The output of a plugin.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Printed {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    status: Option<Status>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct Status {
    expiration_timestamp: Option<Timestamp>,
    token: String,
    client_certificate_data: String,
    client_key_data: String,
}

pub struct Plugin {
    config: Config,
    command: PathBuf,
    /// The cluster, for plugins with `provideClusterInfo`.
    cluster: Value,
    /// The last outcome. The lock is held while the plugin runs; other requests wait for it.
    known: Mutex<Option<Known>>,
}

#[derive(Clone)]
struct Known {
    shown: Shown,
    until: Option<Timestamp>,
}

impl Plugin {
    /// `exec`: the part of the kubeconfig. `cluster`: the cluster as plugins see it. `directory`: the directory
    /// of the kubeconfig; relative commands with a slash start there.
    pub fn new(exec: &Value, cluster: Value, directory: &Path) -> Result<Self, ExecError> {
        let wrong = |why: String| ExecError::Config(why);
        let mut config: Config = serde_json::from_value(exec.clone())
            .map_err(|error| wrong(format!("exec plugin: {error}")))?;
        if config.command.is_empty() {
            return Err(wrong(
                "command must be specified to use exec authentication plugin".into(),
            ));
        }
        let version = config.api_version.strip_prefix(GROUP).unwrap_or_default();
        match (version, config.interactive_mode) {
            ("/v1beta1", None) => config.interactive_mode = Some(Interactive::default()),
            ("/v1", None) => {
                let why = "interactiveMode must be specified to use exec authentication plugin";
                return Err(wrong(why.into()));
            }
            ("/v1" | "/v1beta1", Some(_)) => {}
            _ => {
                let version = &config.api_version;
                return Err(wrong(format!("exec plugin: invalid apiVersion {version:?}")));
            }
        }
        let command = match config.command.contains('/') {
            true => directory.join(&config.command),
            false => PathBuf::from(&config.command),
        };
        Ok(Self { config, command, cluster, known: Mutex::default() })
    }

    /// The value of KUBERNETES_EXEC_INFO.
    fn asked(&self, interactive: bool) -> Value {
        let mut spec = json!({ "interactive": interactive });
        if self.config.provide_cluster_info {
            spec["cluster"] = self.cluster.clone();
        }
        json!({"kind": "ExecCredential", "apiVersion": self.config.api_version, "spec": spec})
    }

    async fn run(&self, generation: u64) -> Result<Known, ExecError> {
        let failed = |why: String| ExecError::Run(why);
        let has_terminal = std::io::stdin().is_terminal();
        let interactive = match self.config.interactive_mode.unwrap_or_default() {
            Interactive::Never => false,
            Interactive::IfAvailable => has_terminal,
            Interactive::Always if has_terminal => true,
            Interactive::Always => {
                let why =
                    "exec plugin cannot support interactive mode: standard input is not a terminal";
                return Err(failed(why.into()));
            }
        };
        let mut command = Command::new(&self.command);
        command.args(self.config.args.iter().flatten()).kill_on_drop(true);
        for Variable { name, value } in self.config.env.iter().flatten() {
            command.env(name, value);
        }
        command.env(ENVIRONMENT, self.asked(interactive).to_string());
        command.stdin(if interactive { Stdio::inherit() } else { Stdio::null() });
        let output = command.stderr(Stdio::inherit()).output().await;
        let shown = &self.config.command;
        let output = output.map_err(|error| {
            let hint = self.config.install_hint.as_deref().filter(|hint| !hint.is_empty());
            let hint = hint.map(|hint| format!("\n\n{hint}")).unwrap_or_default();
            match error.kind() {
                std::io::ErrorKind::NotFound => {
                    failed(format!("exec: executable {shown} not found{hint}"))
                }
                _ => failed(format!("exec: {error}")),
            }
        })?;
        if !output.status.success() {
            let code = output.status.code().unwrap_or(-1);
            return Err(failed(format!("exec: executable {shown} failed with exit code {code}")));
        }
        self.read(&output.stdout, generation).map_err(failed)
    }

    fn read(&self, stdout: &[u8], generation: u64) -> Result<Known, String> {
        let printed: Printed =
            serde_json::from_slice(stdout).map_err(|error| format!("decoding stdout: {error}"))?;
        let wanted = &self.config.api_version;
        if printed.kind != "ExecCredential" || printed.api_version.is_empty() {
            return Err("decoding stdout: it is no ExecCredential".into());
        }
        if printed.api_version != *wanted {
            return Err(format!(
                "exec plugin is configured to use API version {wanted}, plugin returned version {}",
                printed.api_version
            ));
        }
        let status = printed.status.ok_or("exec plugin didn't return a status field")?;
        let some = |text: String| (!text.is_empty()).then_some(text);
        let token = some(status.token);
        let pair = (some(status.client_certificate_data), some(status.client_key_data));
        let identity = match pair {
            (None, None) if token.is_none() => {
                return Err("exec plugin didn't return a token or cert/key pair".into());
            }
            (None, None) => None,
            (Some(cert), Some(key)) => Some((cert, key)),
            _ => return Err("exec plugin returned only certificate or key, not both".into()),
        };
        let shown = Shown { generation, token, identity };
        Ok(Known { shown, until: status.expiration_timestamp })
    }
}

#[async_trait::async_trait]
impl CredentialSource for Plugin {
    async fn current(&self) -> Result<Shown, BoxError> {
        let mut known = self.known.lock().await;
        let is_good = |one: &Known| one.until.is_none_or(|until| base::clock::now() < until);
        if let Some(known) = known.as_ref().filter(|one| is_good(one)) {
            return Ok(known.shown.clone());
        }
        let generation = known.as_ref().map_or(1, |one| one.shown.generation + 1);
        let fresh = self.run(generation).await?;
        Ok(known.insert(fresh).shown.clone())
    }

    async fn refused(&self, generation: u64) {
        let mut known = self.known.lock().await;
        // Another refused request may have renewed them already.
        if let Some(one) = known.as_mut().filter(|one| one.shown.generation == generation) {
            one.until = Some(Timestamp::MIN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plugin that is a shell script; it counts its runs in `runs`.
    fn plugin(script: &str, change: Value) -> (tempfile::TempDir, Result<Plugin, ExecError>) {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("plugin");
        let script = format!("#!/bin/sh\necho run >> \"$0.runs\"\n{script}\n");
        // Another process writes it: what another test forks meanwhile would hold a file open that
        // was written here, and a file open for writing cannot be run.
        let written = std::process::Command::new("sh")
            .args(["-c", r#"printf %s "$2" > "$1" && chmod +x "$1""#, "sh"])
            .args([path.as_os_str(), script.as_ref()])
            .status();
        assert!(written.expect("sh runs").success());
        let mut config = json!({"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin",
            "interactiveMode": "Never", "args": ["one"], "env": [{"name": "WHO", "value": "jane"}]});
        for (name, value) in change.as_object().into_iter().flatten() {
            config[name] = value.clone();
        }
        let plugin = Plugin::new(&config, json!({"server": "https://x"}), root.path());
        (root, plugin)
    }

    fn credential(status: &str) -> String {
        format!(
            r#"echo '{{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{status}}}'"#
        )
    }

    async fn outcome(script: &str, change: Value) -> String {
        let (_root, plugin) = plugin(script, change);
        match plugin {
            Err(error) => error.to_string(),
            Ok(plugin) => match plugin.current().await {
                Ok(shown) => format!("{:?} {}", shown.token, shown.identity.is_some()),
                Err(error) => error.to_string(),
            },
        }
    }

    #[tokio::test]
    async fn plugins_print_credentials_or_errors_say_why() {
        let check = async |script: &str, change: Value, expected: &str| {
            assert_eq!(outcome(script, change).await, expected, "{script}");
        };
        let none = || json!({});
        check(&credential(r#"{"token":"t"}"#), none(), "Some(\"t\") false").await;
        let pair = r#"{"clientCertificateData":"c","clientKeyData":"k"}"#;
        check(&credential(pair), none(), "None true").await;
        // Arguments and environment arrive.
        let echo = r#"echo "{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\"status\":{\"token\":\"$WHO-$1\"}}""#;
        check(echo, none(), "Some(\"jane-one\") false").await;
        let info = r#"case "$KUBERNETES_EXEC_INFO" in *https://x*) T=told;; *) T=untold;; esac
            echo "{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\"status\":{\"token\":\"$T\"}}""#;
        check(info, none(), "Some(\"untold\") false").await;
        check(info, json!({"provideClusterInfo": true}), "Some(\"told\") false").await;

        check(
            "exit 3",
            none(),
            "getting credentials: exec: executable ./plugin failed with exit code 3",
        )
        .await;
        let missing = "getting credentials: exec: executable no-such-plugin not found\n\nget it";
        check("", json!({"command": "no-such-plugin", "installHint": "get it"}), missing).await;
        check(
            &credential("null"),
            none(),
            "getting credentials: exec plugin didn't return a status field",
        )
        .await;
        check(
            &credential("{}"),
            none(),
            "getting credentials: exec plugin didn't return a token or cert/key pair",
        )
        .await;
        let half = "getting credentials: exec plugin returned only certificate or key, not both";
        check(&credential(r#"{"clientKeyData":"k"}"#), none(), half).await;
        let other = "getting credentials: exec plugin is configured to use API version client.authentication.k8s.io/v1beta1, plugin returned version client.authentication.k8s.io/v1";
        let beta = json!({"apiVersion": "client.authentication.k8s.io/v1beta1"});
        check(&credential("{}"), beta, other).await;
        check("", json!({"apiVersion": "v1"}), "exec plugin: invalid apiVersion \"v1\"").await;
        let mode = "interactiveMode must be specified to use exec authentication plugin";
        check("", json!({"interactiveMode": null}), mode).await;
    }

    #[tokio::test]
    async fn it_runs_again_when_it_must_and_not_before() {
        let runs = |root: &tempfile::TempDir| {
            let text = std::fs::read_to_string(root.path().join("plugin.runs")).unwrap_or_default();
            text.lines().count()
        };
        let (root, lasting) = plugin(&credential(r#"{"token":"t"}"#), json!({}));
        let lasting = lasting.expect("right");
        let first = lasting.current().await.expect("a token");
        lasting.current().await.expect("a token");
        assert_eq!(runs(&root), 1);
        lasting.refused(first.generation).await;
        let second = lasting.current().await.expect("a token");
        assert_eq!((runs(&root), second.generation), (2, first.generation + 1));
        lasting.refused(first.generation).await;
        lasting.current().await.expect("a token");
        assert_eq!(runs(&root), 2, "the refusal was of an older one");

        let past = r#"{"token":"t","expirationTimestamp":"2001-01-01T00:00:00Z"}"#;
        let (root, expired) = plugin(&credential(past), json!({}));
        let expired = expired.expect("right");
        expired.current().await.expect("a token");
        expired.current().await.expect("a token");
        assert_eq!(runs(&root), 2);
    }
}
