//! The kernel's modules that pods and Services need, loaded before the first use.
//!
//! The kernel would load them one after the other, each with its own process, while the first
//! transaction waits. [`load`] starts one `modprobe` for all of them. Without `modprobe` (an image
//! without `kmod`, a kernel with everything built in) the kernel loads them itself.
//! In: names. Out: modules in the kernel; from [`missing`], the names of unavailable modules.
//! Invariant: [`missing`] leaves nothing behind: it adds and deletes in one transaction.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use crate::nft::{
    BaseChain, Batch, ChainKind, Error, Field, Hook, Ip, Nft, Policy, Ruleset, Stmt, Table, Value,
    Verdict, diff,
};

/// The modules for pods.
pub const PODS: &[&str] = &["veth", "bridge"];
/// The modules for Services, host ports, and pods of other nodes.
pub const SERVICES: &[&str] = &[
    "nf_tables",
    "nf_conntrack",
    "nf_conntrack_netlink",
    "nft_chain_nat",
    "nft_ct",
    "nft_nat",
    "nft_masq",
    "nft_numgen",
    "nft_fib_ipv4",
    "nft_fib_ipv6",
    "nft_reject_ipv4",
    "nft_reject_ipv6",
    "vxlan",
];

/// The path of the program that the kernel itself starts.
const MODPROBE: &str = "/proc/sys/kernel/modprobe";
const LIMIT: Duration = Duration::from_secs(60);
const PROBE: &str = "decapod-probe";

/// Loads the modules that are not loaded yet. Best effort: the first use of a missing module reports it.
pub async fn load(names: &[&str]) {
    let is_loaded = |name: &&&str| Path::new("/sys/module").join(name).exists();
    let wanted: Vec<&str> = names.iter().filter(|name| !is_loaded(name)).copied().collect();
    let program = std::fs::read_to_string(MODPROBE).unwrap_or_default();
    if wanted.is_empty() || program.trim().is_empty() {
        return;
    }
    let mut modprobe = Command::new(program.trim());
    modprobe.arg("-a").arg("-q").args(&wanted).kill_on_drop(true);
    modprobe.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match tokio::time::timeout(LIMIT, modprobe.status()).await {
        Ok(Ok(status)) => tracing::debug!(?wanted, %status, "ran modprobe for kernel modules"),
        Ok(Err(error)) => {
            tracing::debug!(program = program.trim(), %error, "failed to run modprobe")
        }
        Err(_) => tracing::warn!(?wanted, "modprobe did not end in time"),
    }
}

/// The nftables modules that the kernel neither has nor can load. Blocks while it loads modules.
pub fn missing(nft: &mut Nft) -> Result<Vec<&'static str>, Error> {
    let all = probes();
    let rulesets = all.iter().map(|(_, ruleset)| ruleset);
    // One transaction: the kernel collects the missing modules of a transaction and loads them together.
    if nft.apply(&trial(rulesets)).is_ok() {
        return Ok(vec![]);
    }
    let mut missing = vec![];
    for (module, ruleset) in &all {
        match nft.apply(&trial([ruleset])) {
            Err(Error::Refused(_)) if !missing.contains(module) => missing.push(*module),
            Ok(()) | Err(Error::Refused(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(missing)
}

/// A transaction that adds and deletes the rulesets.
fn trial<'a>(rulesets: impl IntoIterator<Item = &'a Ruleset>) -> Batch {
    let mut batch = Batch::default();
    for ruleset in rulesets {
        batch.messages.extend(diff(&Ruleset::default(), ruleset).messages);
        batch.messages.extend(diff(ruleset, &Ruleset::default()).messages);
    }
    batch
}

/// A ruleset that needs each module, in dependency order: without tables there are no chains.
fn probes() -> Vec<(&'static str, Ruleset)> {
    let mut out = vec![];
    for ip in [Ip::V4, Ip::V6] {
        let own = |v4, v6| if ip == Ip::V4 { v4 } else { v6 };
        let mut table = Table::default();
        out.push(("nf_tables", ruleset(ip, table.clone())));
        let (hook, kind) = (Hook::Prerouting, ChainKind::Nat);
        table.chain("nat").base =
            Some(BaseChain { kind, hook, priority: -100, policy: Policy::Accept });
        out.push(("nft_chain_nat", ruleset(ip, table)));
        let address = own("192.0.2.1:1", "[2001:db8::1]:1").parse().expect("a literal address");
        let random = vec![(Value::Number(0), Verdict::Accept), (Value::Number(1), Verdict::Drop)];
        let rules = [
            ("nft_ct", Stmt::AnyBit { field: Field::CtState, bits: 1 }),
            ("nft_numgen", Stmt::VmapInline { key: Field::Random(2), entries: random }),
            (
                own("nft_fib_ipv4", "nft_fib_ipv6"),
                Stmt::equals(Field::FibDaddrType, Value::Number(2)),
            ),
            (own("nft_reject_ipv4", "nft_reject_ipv6"), Stmt::Reject),
            ("nft_nat", Stmt::Dnat(address)),
            ("nft_masq", Stmt::Masquerade { fully_random: true }),
        ];
        out.extend(rules.map(|(module, stmt)| {
            let mut table = Table::default();
            let tcp = Stmt::Dport { proto: crate::nft::Proto::Tcp, port: 1 };
            table.rule("rules", vec![tcp, stmt]);
            (module, ruleset(ip, table))
        }));
    }
    out
}

fn ruleset(ip: Ip, table: Table) -> Ruleset {
    Ruleset { tables: [((ip.family(), PROBE.to_owned()), table)].into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_of_a_probe_is_loaded_first() {
        for (module, _) in probes() {
            assert!(SERVICES.contains(&module), "{module}");
        }
    }
}
