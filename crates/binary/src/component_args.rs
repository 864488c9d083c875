//! Flags of upstream's components for `decapod server` and `decapod agent`: `--kubelet-arg NAME=VALUE` and its sisters.
//!
//! ```text
//!  --kubelet-arg max-pods=50 ─► the component's table ─► a flag of the command itself:  --max-pods=50
//!                               (crates/binary/flags)  └► of the component alone: kept, and read by settle()
//! ```
//!
//! In: words, after files and environment. Out: words for `clap`; then settings of the components.
//! Invariants: the tables decide which flags exist, and what their values look like, as for a component that runs
//! alone. A flag that the command sets itself (a kubeconfig, a certificate) is refused, not ignored.
//! Upstream: k3s' `--kubelet-arg`.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, bail};
use clap::Parser;
use clap::error::ErrorKind;
use serde_json::Value;

use crate::command_line::{CommandLine, Component, Wants};
use crate::config_file::Known;
use crate::controller_manager::ControllerManager;
use crate::{api_settings, component_config, config_file, flags, kubelet_command};

/// A component, its flag here, and its flags that are flags of `decapod server` and `decapod agent`, too.
struct Sister {
    flag: &'static str,
    component: &'static str,
    shared: Shared,
    /// Names that differ.
    renamed: &'static [(&'static str, &'static str)],
}

enum Shared {
    /// All with the same name.
    SameNames,
    These(&'static [&'static str]),
}

const GATES: &str = component_config::FEATURE_GATES;
const SISTERS: [Sister; 5] = [
    Sister {
        flag: "kubelet-arg",
        component: "kubelet",
        shared: Shared::SameNames,
        renamed: &[
            ("hostname-override", "node-name"),
            ("node-labels", "node-label"),
            ("register-with-taints", "node-taint"),
            ("root-dir", "kubelet-dir"),
        ],
    },
    Sister {
        flag: "kube-proxy-arg",
        component: "kube-proxy",
        shared: Shared::These(&["cluster-cidr", GATES]),
        renamed: &[("hostname-override", "node-name")],
    },
    Sister {
        flag: "kube-apiserver-arg",
        component: "kube-apiserver",
        shared: Shared::SameNames,
        renamed: &[
            ("secure-port", "https-listen-port"),
            ("service-cluster-ip-range", "service-cidr"),
            ("etcd-servers", "datastore-endpoint"),
            ("etcd-cafile", "datastore-cafile"),
            ("etcd-certfile", "datastore-certfile"),
            ("etcd-keyfile", "datastore-keyfile"),
        ],
    },
    Sister {
        flag: "kube-controller-manager-arg",
        component: "kube-controller-manager",
        shared: Shared::These(&[
            "allocate-node-cidrs",
            "cluster-cidr",
            "node-cidr-mask-size",
            GATES,
        ]),
        renamed: &[("service-cluster-ip-range", "service-cidr")],
    },
    Sister {
        flag: "kube-scheduler-arg",
        component: "kube-scheduler",
        shared: Shared::These(&[GATES]),
        renamed: &[("config", "scheduler-config")],
    },
];

/// Flags of the controller manager that work in a server, by how their names begin.
const OF_CONTROLLERS: [&str; 13] = [
    "cluster-signing-duration",
    "concurrent-",
    "controllers",
    "horizontal-pod-autoscaler-",
    "large-cluster-size-threshold",
    "legacy-service-account-token-clean-up-period",
    "mirroring-concurrent-",
    "node-eviction-rate",
    "node-monitor-",
    "node-startup-grace-period",
    "secondary-node-eviction-rate",
    "terminated-pod-gc-threshold",
    "unhealthy-zone-threshold",
];

/// Flags of components of a node.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct NodeArgs {
    /// A flag of upstream's kubelet, for example container-log-max-files=5; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    kubelet_arg: Vec<String>,
    /// A flag of upstream's kube-proxy
    #[arg(long, value_name = "NAME=VALUE")]
    kube_proxy_arg: Vec<String>,
}

/// Flags of components of a control plane.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ServerArgs {
    /// A flag of upstream's kube-apiserver, for example event-ttl=2h; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    kube_apiserver_arg: Vec<String>,
    /// A flag of upstream's kube-controller-manager
    #[arg(long, value_name = "NAME=VALUE")]
    kube_controller_manager_arg: Vec<String>,
    /// A flag of upstream's kube-scheduler
    #[arg(long, value_name = "NAME=VALUE")]
    kube_scheduler_arg: Vec<String>,
}

/// Settings of kube-proxy.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ProxySettings {
    #[arg(long, value_delimiter = ',')]
    nodeport_addresses: Vec<String>,
    #[arg(long)]
    masquerade_all: Option<bool>,
    #[arg(long)]
    healthz_bind_address: Option<String>,
    #[arg(long)]
    metrics_bind_address: Option<String>,
}

/// Settings of the controllers.
#[derive(Clone, Debug, Default)]
pub struct ControllerSettings {
    /// `--controllers`
    pub selection: Vec<String>,
    pub options: controllers::Options,
}

/// The words with the components' flags settled as far as possible; notes of flags without effect go into `line`.
pub fn expanded(words: Vec<String>, line: &mut CommandLine) -> anyhow::Result<Vec<String>> {
    let own = ["server", "agent"];
    let at = config_file::command_at(&words).filter(|at| own.contains(&words[*at].as_str()));
    let Some(at) = at else { return Ok(words) };
    if !words[at..].iter().any(|word| SISTERS.iter().any(|one| one.is_flag(word))) {
        return Ok(words);
    }
    let known = Known::of(&words[at]).context("it is a command of ours")?;
    let command = words[at].clone();
    let (mut rest, mut extra) = (words[..=at].to_vec(), vec![]);
    let mut given: Vec<(&Sister, String)> = vec![];
    let mut following = words[at + 1..].iter();
    while let Some(word) = following.next() {
        let Some(sister) = SISTERS.iter().find(|one| one.is_flag(word)) else {
            rest.push(word.clone());
            continue;
        };
        let value = match word.split_once('=') {
            Some((_, value)) => value.to_owned(),
            None => {
                following.next().cloned().with_context(|| format!("{word} needs NAME=VALUE"))?
            }
        };
        given.push((sister, value));
    }
    for sister in &SISTERS {
        let values = given.iter().filter(|(one, _)| one.flag == sister.flag);
        let values: Vec<String> = values.map(|(_, value)| format!("--{value}")).collect();
        extra.extend(sister.words(&values, &known, &command, line)?);
    }
    rest.splice(at + 1..at + 1, extra);
    Ok(rest)
}

impl Sister {
    fn is_flag(&self, word: &str) -> bool {
        let name = word.strip_prefix("--").unwrap_or_default();
        name.split('=').next() == Some(self.flag)
    }

    fn words(
        &self,
        given: &[String],
        known: &Known,
        command: &str,
        line: &mut CommandLine,
    ) -> anyhow::Result<Vec<String>> {
        if given.is_empty() {
            return Ok(vec![]);
        }
        let Self { flag, component, .. } = self;
        if !known.names().iter().any(|name| name == flag) {
            bail!("--{flag}: `decapod {command}` runs no {component}");
        }
        let table = Component::named(component).context("it has a table")?;
        let parsed =
            table.parse(&[], given).map_err(|error| anyhow::anyhow!("--{flag}: {error}"))?;
        if parsed.wants != Wants::Run {
            bail!("--{flag}: help and version are not for running components");
        }
        line.ignored.extend(parsed.ignored);
        line.verbosity = parsed.verbosity.or(line.verbosity);
        let mut found = vec![];
        for word in self.with_file(parsed.words)? {
            let pair = word.trim_start_matches("--");
            let (name, value) = pair.split_once('=').unwrap_or((pair, "true"));
            match self.own(name).filter(|own| known.names().iter().any(|one| one == own)) {
                Some(own) => {
                    let setting = known.setting(own, Value::from(value));
                    found.extend(setting.with_context(|| format!("--{flag} {name}"))?.words);
                }
                None => found.push(format!("--{flag}={name}={value}")),
            }
        }
        Ok(found)
    }

    /// The flags with those of a `--config FILE` in front, which they override.
    fn with_file(&self, words: Vec<String>) -> anyhow::Result<Vec<String>> {
        let is_file = |word: &&String| {
            word.starts_with("--config=")
                || (self.component == "kubelet" && word.starts_with("--config-dir="))
        };
        let words: Vec<String> = words.into_iter().skip(1).collect();
        let named = |start: &str| words.iter().find_map(|word| word.strip_prefix(start));
        let (path, drop_ins) = (named("--config="), named("--config-dir="));
        if path.is_none() && drop_ins.is_none() {
            return Ok(words);
        }
        let Some(fields) = component_config::flags(self.component, path, drop_ins)? else {
            return Ok(words);
        };
        let name = |word: &String| word.split('=').next().map(str::to_owned);
        let is_free = |field: &String| !words.iter().any(|word| name(word) == name(field));
        let fields: Vec<String> = fields.into_iter().filter(is_free).collect();
        Ok(fields.into_iter().chain(words.into_iter().filter(|word| !is_file(&word))).collect())
    }

    /// The flag of the command with the same meaning.
    fn own<'n>(&self, name: &'n str) -> Option<&'n str> {
        if let Some((_, own)) = self.renamed.iter().find(|(theirs, _)| *theirs == name) {
            return Some(own);
        }
        match self.shared {
            Shared::SameNames => Some(name),
            Shared::These(names) => names.contains(&name).then_some(name),
        }
    }
}

/// Reads what only the components have.
pub fn settle_node(node: &mut flags::Node) -> anyhow::Result<()> {
    #[derive(Parser)]
    struct Kubelet {
        #[command(flatten)]
        settings: kubelet_command::Settings,
    }
    #[derive(Parser)]
    struct Proxy {
        #[command(flatten)]
        settings: ProxySettings,
    }
    let NodeArgs { kubelet_arg, kube_proxy_arg } = node.component_args.clone();
    if !kubelet_arg.is_empty() {
        node.settings = parsed::<Kubelet>("kubelet", &kubelet_arg)?.settings;
    }
    if !kube_proxy_arg.is_empty() {
        node.proxy = parsed::<Proxy>("kube-proxy", &kube_proxy_arg)?.settings;
        // Its addresses are read now, so that a wrong one is an error at the start.
        node.proxy.apply(&mut proxy::Config::default())?;
    }
    Ok(())
}

pub fn settle_server(server: &mut flags::Server) -> anyhow::Result<()> {
    #[derive(Parser)]
    struct ApiServer {
        #[command(flatten)]
        settings: api_settings::Settings,
    }
    #[derive(Parser)]
    struct Controllers {
        #[command(flatten)]
        flags: ControllerManager,
    }
    settle_node(&mut server.node)?;
    let ServerArgs { kube_apiserver_arg, kube_controller_manager_arg, kube_scheduler_arg } =
        server.component_args.clone();
    if !kube_apiserver_arg.is_empty() {
        server.settings = parsed::<ApiServer>("kube-apiserver", &kube_apiserver_arg)?.settings;
        server.settings.check()?;
        server.settings.tls.install()?;
    }
    if !kube_controller_manager_arg.is_empty() {
        const NAME: &str = "kube-controller-manager";
        let works = |word: &&String| OF_CONTROLLERS.iter().any(|start| word.starts_with(start));
        if let Some(other) = kube_controller_manager_arg.iter().find(|word| !works(word)) {
            bail!(refused(NAME, other));
        }
        let mut words = kube_controller_manager_arg;
        words.push("kubeconfig=none".to_owned());
        let flags = parsed::<Controllers>(NAME, &words)?.flags;
        server.controllers =
            ControllerSettings { selection: flags.selection(), options: flags.options()? };
    }
    match kube_scheduler_arg.first() {
        Some(word) => bail!(refused("kube-scheduler", word)),
        None => Ok(()),
    }
}

fn refused(component: &str, word: &str) -> String {
    let name = word.split('=').next().unwrap_or_default();
    format!(
        "--{component}-arg {name}: this flag of {component} cannot be set here, because Decapod connects its components itself"
    )
}

/// `words` are `NAME=VALUE`.
fn parsed<T: Parser>(component: &str, words: &[String]) -> anyhow::Result<T> {
    let mut flags = vec![];
    for word in words {
        let flag = [component.to_owned(), format!("--{word}")];
        // One by one, so that an error names its flag.
        if let Err(error) = T::try_parse_from(flag)
            && error.kind() == ErrorKind::UnknownArgument
        {
            bail!(refused(component, word));
        }
        flags.push(format!("--{word}"));
    }
    let line = [component.to_owned()].into_iter().chain(flags);
    T::try_parse_from(line).map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        anyhow::anyhow!("--{component}-arg: {first}")
    })
}

impl ProxySettings {
    pub fn apply(&self, config: &mut proxy::Config) -> anyhow::Result<()> {
        if !self.nodeport_addresses.is_empty() {
            config.nodeport_addresses =
                crate::components::nodeport_addresses(&self.nodeport_addresses)?;
        }
        config.masquerade_all = self.masquerade_all.unwrap_or(config.masquerade_all);
        let usual = proxy::Config::default();
        if let Some(text) = &self.healthz_bind_address {
            config.healthz_bind = Some(bind("healthz-bind-address", text, usual.healthz_bind)?);
        }
        if let Some(text) = &self.metrics_bind_address {
            config.metrics_bind = Some(bind("metrics-bind-address", text, usual.metrics_bind)?);
        }
        Ok(())
    }
}

/// An address with or without a port.
fn bind(name: &str, text: &str, usual: Option<SocketAddr>) -> anyhow::Result<SocketAddr> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(address);
    }
    let address = text.parse::<IpAddr>().ok().zip(usual);
    let address = address.map(|(address, usual)| SocketAddr::new(address, usual.port()));
    address.with_context(|| format!("--kube-proxy-arg {name}={text}: expected ADDRESS[:PORT]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<Vec<String>, String> {
        let words = line.split(' ').map(str::to_owned).collect();
        let found = expanded(words, &mut CommandLine::default());
        found.map(|words| words[2..].to_vec()).map_err(|error| format!("{error:#}"))
    }

    fn server(line: &str) -> Result<flags::Server, String> {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            server: flags::Server,
        }
        let line = ["decapod".to_owned()].into_iter().chain(words(line)?);
        let mut server = Line::try_parse_from(line).expect("flags of a server").server;
        settle_server(&mut server).map_err(|error| format!("{error:#}"))?;
        Ok(server)
    }

    #[test]
    fn shared_flags_become_the_commands_own() {
        let check = |line: &str, expected: &[&str]| {
            let expected: Vec<String> = expected.iter().map(|word| (*word).to_owned()).collect();
            assert_eq!(words(line), Ok(expected), "{line}");
        };
        check("decapod server --tls-san a", &["--tls-san", "a"]);
        check(
            "decapod server --kubelet-arg=max-pods=50 --tls-san a --kubelet-arg node-labels=x=y",
            &["--max-pods=50", "--node-label=x=y", "--tls-san", "a"],
        );
        check(
            "decapod server --kube-apiserver-arg=anonymous-auth=false --kube-apiserver-arg=event-ttl=2h",
            &["--anonymous-auth=false", "--kube-apiserver-arg=event-ttl=2h"],
        );
        check(
            "decapod server --kube-scheduler-arg=config=/s.yaml --kube-proxy-arg=feature-gates=A=true",
            &["--feature-gates=A=true", "--scheduler-config=/s.yaml"],
        );
        check(
            "decapod agent --kubelet-arg=serialize-image-pulls",
            &["--kubelet-arg=serialize-image-pulls=true"],
        );
    }

    #[test]
    fn the_components_take_the_rest() {
        let found = server(
            "decapod server --kube-controller-manager-arg=node-monitor-grace-period=20s \
             --kube-controller-manager-arg=controllers=*,-ttl-controller --kube-proxy-arg=metrics-bind-address=0.0.0.0 \
             --kube-proxy-arg=masquerade-all=true --kubelet-arg=container-log-max-files=7",
        );
        let found = found.expect("they fit");
        assert_eq!(found.controllers.options.node_monitor_grace_period.as_secs(), 20);
        assert_eq!(found.controllers.selection, ["*", "-ttl-controller"]);
        let mut config = proxy::Config::default();
        found.node.proxy.apply(&mut config).expect("addresses");
        assert!(config.masquerade_all);
        assert_eq!(config.metrics_bind.map(|it| it.to_string()).as_deref(), Some("0.0.0.0:10249"));
        let mut kubelet = kubelet::Config::new("n", "/data".into());
        found.node.settings.apply(&mut kubelet).expect("settings");
        assert_eq!(kubelet.log_max_files, 7);
    }

    #[test]
    fn wrong_flags_are_errors_with_their_names() {
        let check = |line: &str, part: &str| {
            let error = server(line).map(drop).expect_err("a wrong flag");
            assert!(error.contains(part), "{error}");
        };
        check("decapod server --kubelet-arg=no-such=1", "--kubelet-arg: unknown flag: --no-such");
        check("decapod server --kubelet-arg=max-pods=x", "--kubelet-arg: invalid argument \"x\"");
        check("decapod server --kubelet-arg=port=1", "--kubelet-arg port: this flag of kubelet");
        check(
            "decapod server --kube-controller-manager-arg=kubeconfig=/x",
            "--kube-controller-manager-arg kubeconfig: this flag",
        );
        check(
            "decapod server --kube-scheduler-arg=leader-elect=false",
            "--kube-scheduler-arg leader-elect",
        );
        let error =
            words("decapod agent --kube-apiserver-arg=event-ttl=1h").expect_err("no server");
        assert_eq!(error, "--kube-apiserver-arg: `decapod agent` runs no kube-apiserver");
    }
}
