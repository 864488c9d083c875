//! A cluster of one member from the remaining data: after the loss of the majority, or from a snapshot.
//!
//! In: this server's member, or a snapshot. Out: a member that is the whole cluster; the other servers join
//! again. Invariants: the old data directory is renamed, never deleted. No other member of the old cluster
//! runs meanwhile: two clusters of the same members would take each other's messages.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use store::Store;

use super::member::{self, Member, Start};
use super::{Own, REMOVED, aside, mark_joined, serving};
use crate::flags;
use crate::process::{prepare_data_dir, say};

/// Above this many writes etcdutl makes the data, if it is there. It refuses a directory that exists, such as a
/// mount point.
const FEW_REVISIONS: u64 = 20_000;
/// As `decapod snapshot restore`.
const BUMP: u64 = 1_000_000_000;
/// A member that runs answers a question about itself within this time, with or without a leader.
const ANSWER: Duration = Duration::from_secs(2);

/// `decapod server --cluster-reset`: ends when the member serves.
pub async fn reset(flags: &flags::Server, common: &flags::Common) -> anyhow::Result<()> {
    let data_dir = prepare_data_dir(&common.data_dir)?;
    let address = crate::server::advertised(flags).await?;
    let own = Own::of(flags, &data_dir, address)?;
    refuse_beside_others(&own).await?;
    member::ports_are_free(&own).await?;
    let member = match &flags.cluster.from_snapshot {
        None if !own.is_member() => bail!(
            "{} has no etcd member: --cluster-reset works on a server of a cluster; with --from-snapshot it needs none",
            data_dir.display()
        ),
        None => Member::start(&own, flags, Start::Alone)?,
        Some(file) => {
            store::snapshot::read(file, true).with_context(|| file.display().to_string())?;
            if own.has_data() {
                let kept = aside(&own.etcd())?;
                say(&format!("the data of before are kept in {}", kept.display()));
            }
            filled(flags, &own, file).await?
        }
    };
    serving(&own, &member).await?;
    own.remember(&[own.client_url()])?;
    // A server that was removed may be the one that is left.
    let _ = std::fs::remove_file(data_dir.join(REMOVED));
    mark_joined(&own)?;
    member.stop().await;
    say("this server is the whole cluster now: start it without --cluster-reset");
    say(
        "on each other server, delete the data directory's etcd, joined and removed, and join again",
    );
    Ok(())
}

/// Fails if an etcd of the old cluster still runs on another server. Asks all known members at once.
async fn refuse_beside_others(own: &Own) -> anyhow::Result<()> {
    let asked = own.known_urls().into_iter().skip(1).map(|url| async move {
        let there = own.cluster(std::slice::from_ref(&url)).ok()?;
        let answers = matches!(tokio::time::timeout(ANSWER, there.version()).await, Ok(Ok(_)));
        answers.then_some(url)
    });
    let running: Vec<String> =
        futures::future::join_all(asked).await.into_iter().flatten().collect();
    if running.is_empty() {
        return Ok(());
    }
    bail!(
        "other servers of this cluster still run, with an etcd at {}: stop decapod on them first, and delete \
         their etcd, joined and removed before they join again; if they are to stay, this server needs no reset",
        running.join(", ")
    )
}

/// A new member with the state of a snapshot, at a revision above all of its clients'.
pub async fn filled(flags: &flags::Server, own: &Own, file: &Path) -> anyhow::Result<Member> {
    let revision =
        store::snapshot::read(file, true).with_context(|| file.display().to_string())?.revision;
    let program = member::program(&flags.cluster)?;
    if let Some(etcdutl) = member::beside(&program, "etcdutl")
        && revision.0 > FEW_REVISIONS
        && !own.etcd().exists()
    {
        restore(&etcdutl, own, file)?;
        return Member::start(own, flags, Start::Again);
    }
    let member = Member::start(own, flags, Start::First)?;
    let filling = async {
        serving(own, &member).await?;
        let store: Arc<dyn Store> = etcd::Etcd::open(&own.options(&[own.client_url()])?)?;
        let filled = cli::snapshot::fill(&store, file).await;
        store.close().await;
        filled
    };
    if let Err(error) = filling.await {
        member.stop().await;
        // A half-filled etcd must not look like a member. Old data may be beside it.
        let _ = std::fs::remove_dir_all(own.etcd().join("member"));
        return Err(error);
    }
    Ok(member)
}

fn restore(etcdutl: &Path, own: &Own, file: &Path) -> anyhow::Result<()> {
    let mut command = Command::new(etcdutl);
    command.args(["snapshot", "restore"]).arg(file).arg("--data-dir").arg(own.etcd());
    command.args(["--name", &own.name, "--initial-cluster-token", &member::new_token()]);
    command.args(["--initial-advertise-peer-urls", &own.peer_url()]);
    command.arg("--initial-cluster").arg(format!("{}={}", own.name, own.peer_url()));
    command.arg("--bump-revision").arg(BUMP.to_string()).arg("--mark-compacted");
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {}", etcdutl.display()))?;
    if !output.status.success() {
        let _ = std::fs::remove_dir_all(own.etcd().join("member"));
        bail!("{}: {}", etcdutl.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
