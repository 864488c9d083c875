//! `decapod member`: etcd's members, on a machine of one of them.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use etcd::cluster::{Cluster, Member};
use pki::etcd::EtcdPki;

use super::{MEMBERS, insist};
use crate::process::say;

/// Limit for each member's answer in the list.
const ANSWER: Duration = Duration::from_secs(2);

#[derive(clap::Args, Clone, Debug)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct MemberCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Clone, Debug)]
enum Command {
    /// List the servers whose etcd belongs to the cluster
    List,
    /// Remove a server from the cluster; it stops, and does not come back by itself
    Remove {
        /// Its name, or its id in etcd
        name: String,
    },
    /// Give a member that has all data a vote; servers that join do that by themselves
    Promote {
        /// Its name, or its id in etcd
        name: String,
    },
}

impl MemberCommand {
    pub async fn run(self, data_dir: &Path) -> anyhow::Result<ExitCode> {
        let urls = std::fs::read_to_string(data_dir.join(MEMBERS)).with_context(|| {
            format!(
                "{} is not a server with an etcd; name another data directory with -d",
                data_dir.display()
            )
        })?;
        let urls: Vec<String> = urls.lines().map(str::to_owned).collect();
        let cluster = connect(data_dir, &urls)?;
        let members = cluster.members().await.context("cannot list the members")?;
        match self.command {
            Command::List => list(data_dir, &members).await?,
            Command::Remove { name } => {
                let member = find(&members, &name)?;
                if members.len() == 1 {
                    bail!(
                        "{name} is the only member: `decapod uninstall` removes the whole cluster"
                    );
                }
                insist("removing the member", async || cluster.remove(member.id).await).await?;
                say(&format!("{name} was removed; its server stops by itself"));
            }
            Command::Promote { name } => {
                let member = find(&members, &name)?;
                cluster.promote(member.id).await.context("cannot promote it")?;
                say(&format!("{name} votes"));
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn connect(data_dir: &Path, urls: &[String]) -> anyhow::Result<Cluster> {
    let pki = EtcdPki::open_or_create(&data_dir.join("pki"))?;
    let client = pki.client()?.issued;
    let options = etcd::Options {
        endpoints: urls.to_vec(),
        ca_pem: Some(pki.ca().cert_pem().as_bytes().to_vec()),
        identity_pem: Some((client.cert_pem.into_bytes(), client.key_pem.into_bytes())),
        ..etcd::Options::default()
    };
    Ok(Cluster::open(&options)?)
}

fn find<'a>(members: &'a [Member], name: &str) -> anyhow::Result<&'a Member> {
    let is_it = |member: &&Member| member.name == name || format!("{:x}", member.id) == name;
    members.iter().find(is_it).with_context(|| {
        let names: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
        format!("there is no member {name}; there are {}", names.join(", "))
    })
}

async fn list(data_dir: &Path, members: &[Member]) -> anyhow::Result<()> {
    say(&format!("{:<18}{:<24}{:<9}{:<10}ADDRESS", "ID", "NAME", "VOTES", "VERSION"));
    let asked = members.iter().map(|member| async move {
        let there = connect(data_dir, &member.client_urls).ok()?;
        tokio::time::timeout(ANSWER, there.version()).await.ok()?.ok()
    });
    let versions = futures::future::join_all(asked).await;
    for (member, version) in members.iter().zip(versions) {
        let Member { id, name, peer_urls, is_learner, .. } = member;
        let name = if name.is_empty() { "<not started>" } else { name };
        let votes = if *is_learner { "no" } else { "yes" };
        let version = version.unwrap_or_else(|| "<silent>".into());
        let id = format!("{id:x}");
        say(&format!("{id:<18}{name:<24}{votes:<9}{version:<10}{}", peer_urls.join(",")));
    }
    Ok(())
}
