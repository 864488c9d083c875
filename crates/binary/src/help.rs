//! The help of `decapod server` and `decapod agent`: `-h` prints the usual flags, `--help` all of them, both
//! in groups and wrapped to the terminal, at most 100 columns.
//!
//! In: the command line as clap derives it, and the words of the user. Out: the same command line with
//! headings, short names of values, and without the rare flags for `-h`. Nothing changes how words are
//! parsed.

use clap::{Arg, Command};

/// The commands that have so many flags that they need groups.
const COMMANDS: [&str; 2] = ["server", "agent"];

/// The groups, in the order of the output. A flag belongs to the first group that has its name, or the
/// beginning of its name followed by `*`.
const GROUPS: &[(&str, &[&str])] = &[
    (
        "API",
        &[
            "bind-address",
            "https-listen-port",
            "advertise-address",
            "tls-san",
            "write-kubeconfig*",
            "runtime-config",
            "max-*",
            "enable-priority-and-fairness",
            "request-timeout",
            "min-request-timeout",
            "shutdown-delay-duration",
            "endpoint-reconciler-type",
            "apiserver-count",
        ],
    ),
    (
        "Several machines",
        &[
            "server",
            "token",
            "token-file",
            "cluster-init",
            "cluster-reset",
            "from-snapshot",
            "etcd-binary",
            "lb-server-port",
        ],
    ),
    (
        "Network",
        &[
            "cluster-cidr",
            "backend",
            "pod-mtu",
            "cni-*",
            "service-cidr",
            "cluster-dns",
            "cluster-domain",
            "node-cidr-mask-size",
            "allocate-node-cidrs",
            "service-node-port-range",
            "load-balancer-pool",
            "resolv-conf",
            "dns-metrics-address",
        ],
    ),
    (
        "Node",
        &[
            "disable-agent",
            "taint-control-plane",
            "node-*",
            "pod-manifest-path",
            "image-*",
            "allowed-unsafe-sysctls",
            "kubelet-dir",
            "shutdown-grace-*",
            "container-runtime-endpoint",
            "runtime-request-timeout",
            "cri-socket",
            "cgroup-driver",
            "cloud-provider",
        ],
    ),
    (
        "State",
        &["datastore-*", "new-store", "store-*", "snapshot-*", "storage-media-type", "etcd-*"],
    ),
    (
        "Components",
        &[
            "disable",
            "config",
            "feature-gates",
            "scheduler-config",
            "simulat*",
            "kubelet-arg",
            "kube-*",
        ],
    ),
    (
        "Authentication",
        &[
            "anonymous-auth",
            "authentication-*",
            "oidc-*",
            "token-auth-file",
            "requestheader-*",
            "service-account-issuer",
        ],
    ),
    (
        "Authorization and admission",
        &[
            "authorization-*",
            "admission-*",
            "enable-admission-plugins",
            "disable-admission-plugins",
            "allow-privileged",
        ],
    ),
    ("Encryption and audit", &["encryption-*", "audit-*"]),
];

/// `max-pods` is the node's, although it begins like the API's limits.
const EXCEPTIONS: [(&str, &str); 1] = [("max-pods", "Node")];

/// The flags that `-h` shows.
const USUAL: &[&str] = &[
    "advertise-address",
    "bind-address",
    "cluster-cidr",
    "cluster-dns",
    "cluster-domain",
    "cluster-init",
    "config",
    "container-runtime-endpoint",
    "datastore-endpoint",
    "disable",
    "disable-agent",
    "feature-gates",
    "https-listen-port",
    "kubelet-dir",
    "max-pods",
    "node-ip",
    "node-label",
    "node-name",
    "node-taint",
    "server",
    "service-cidr",
    "snapshot-schedule-cron",
    "taint-control-plane",
    "tls-san",
    "token",
    "token-file",
    "write-kubeconfig",
];

/// The command line for these words of the user.
pub fn arrange(command: Command, words: &[String]) -> Command {
    let is_short = words.iter().any(|word| word == "-h");
    COMMANDS.iter().fold(command, |command, name| {
        command.mut_subcommand(name, |command| arrange_one(command, is_short))
    })
}

fn arrange_one(command: Command, is_short: bool) -> Command {
    let command = command.mut_args(|arg| {
        let name = name(&arg);
        let is_hidden = arg.is_hide_set() || (is_short && !USUAL.contains(&name.as_str()));
        let arg = arg.help_heading(group(&name)).hide(is_hidden);
        // clap names a value after the whole flag; its last word says as much.
        let said = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
        let whole = name.replace('-', "_").to_uppercase();
        match (said, name.rsplit('-').next()) {
            (Some(said), Some(last)) if said == whole => {
                // clap keeps static names; a process arranges its command line once.
                let last: &'static str = Box::leak(last.to_uppercase().into_boxed_str());
                arg.value_name(last)
            }
            _ => arg,
        }
    });
    if is_short {
        command.after_help("These are the usual flags; --help lists all of them.")
    } else {
        command
    }
}

fn name(arg: &Arg) -> String {
    arg.get_long().map_or_else(|| arg.get_id().to_string(), str::to_owned)
}

fn group(name: &str) -> Option<&'static str> {
    if let Some((_, group)) = EXCEPTIONS.iter().find(|(flag, _)| *flag == name) {
        return Some(group);
    }
    let has = |patterns: &&[&str]| {
        patterns.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(begin) => name.starts_with(begin),
            None => name == *pattern,
        })
    };
    GROUPS.iter().find(|(_, patterns)| has(patterns)).map(|(group, _)| *group)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn help(command: &str, flag: &str) -> String {
        let words = ["decapod", command, flag].map(str::to_owned);
        let arranged = arrange(crate::Arguments::command(), &words);
        let error = arranged.try_get_matches_from(&words).expect_err("help is no command");
        assert_eq!(error.kind(), clap::error::ErrorKind::DisplayHelp);
        error.render().to_string()
    }

    #[test]
    fn every_flag_has_a_group_and_every_usual_one_exists() {
        let program = crate::Arguments::command();
        let mut names = vec![];
        for command in COMMANDS {
            let command = program.find_subcommand(command).expect("a command");
            names.extend(command.get_arguments().map(name));
        }
        for name in &names {
            assert!(group(name).is_some(), "--{name} needs a line in GROUPS");
        }
        for usual in USUAL {
            assert!(names.iter().any(|name| name == usual), "there is no --{usual}");
        }
    }

    #[test]
    fn help_is_readable() {
        for command in COMMANDS {
            let (short, long) = (help(command, "-h"), help(command, "--help"));
            let widest = |text: &str| text.lines().map(|line| line.chars().count()).max();
            assert!(widest(&short) <= Some(100) && widest(&long) <= Some(100), "{short}\n{long}");
            assert!(short.lines().count() <= 80, "{} lines:\n{short}", short.lines().count());
            assert!(short.contains("--node-name <NAME>") && !short.contains("--pod-manifest-path"));
            assert!(long.contains("--pod-manifest-path <PATH>") && long.contains("\nNode:\n"));
            // What every command has.
            assert!(short.contains("\nOptions:\n  -d, --data-dir"), "{short}");
        }
    }
}
