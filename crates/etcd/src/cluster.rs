//! The members of an etcd cluster, as etcd itself keeps them: list, add, promote, remove.
//!
//! In: members that answer. Out: the list, and changes of it, which etcd's consensus decides one at a time.

use std::time::Duration;

use base::task::{Bound, Tasks};
use prost::Message;
use tonic::{Code, Status};

use crate::messages::{Empty, ResponseHeader, StatusResponse};
use crate::rpc::Rpc;
use crate::{Options, rpc};

/// A member; one that has not started yet has no name and no client URLs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    pub id: u64,
    pub name: String,
    pub peer_urls: Vec<String>,
    pub client_urls: Vec<String>,
    /// It gets all data, but has no vote yet.
    pub is_learner: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A retry may succeed: no leader, a learner that lacks data, too few members that answer.
    #[error("{0}")]
    NotNow(String),
    #[error("{0}")]
    Never(String),
}

pub struct Cluster {
    rpc: Rpc,
    tasks: Tasks,
    /// Probes of members end with this.
    _bound: Bound,
}

type Result<T> = std::result::Result<T, Refusal>;

impl Cluster {
    /// Connects at the first call.
    pub fn open(options: &Options) -> std::result::Result<Self, store::Error> {
        let tasks = Tasks::new("etcd members");
        Ok(Self { rpc: Rpc::new(options, &tasks)?, _bound: tasks.bound(), tasks })
    }

    pub async fn members(&self) -> Result<Vec<Member>> {
        let listed = self.tasks.stop_signal().or(list(&self.rpc)).await;
        listed.unwrap_or_else(|| Err(rpc::closed())).map_err(|status| refusal(&status))
    }

    /// Adds a learner, which may start afterwards. Returns all members.
    pub async fn add_learner(&self, peer_url: &str) -> Result<Vec<Member>> {
        let request = AddRequest { peer_urls: vec![peer_url.to_owned()], is_learner: true };
        let answer: Added = self.call("/etcdserverpb.Cluster/MemberAdd", request).await?;
        Ok(answer.members.into_iter().map(Member::from).collect())
    }

    /// Gives a learner that has all data a vote.
    pub async fn promote(&self, id: u64) -> Result<()> {
        let _: Changed = self.call("/etcdserverpb.Cluster/MemberPromote", IdRequest { id }).await?;
        Ok(())
    }

    pub async fn remove(&self, id: u64) -> Result<()> {
        let removed: Result<Changed> =
            self.call("/etcdserverpb.Cluster/MemberRemove", IdRequest { id }).await;
        match removed {
            // The member may have stopped before its answer, and a second try then finds it gone.
            Err(Refusal::Never(why)) if why == "member not found" => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Whether the members of these options answer, learners included: their version.
    pub async fn version(&self) -> Result<String> {
        let answer: StatusResponse =
            self.call("/etcdserverpb.Maintenance/Status", Empty {}).await?;
        Ok(answer.version)
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q) -> Result<A>
    where
        Q: Message + Clone + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let asked = self.tasks.stop_signal().or(self.rpc.call(path, request)).await;
        asked.unwrap_or_else(|| Err(rpc::closed())).map_err(|status| refusal(&status))
    }
}

/// The members that etcd's majority knows.
async fn list(rpc: &Rpc) -> std::result::Result<Vec<Member>, Status> {
    let request = ListRequest { is_linearizable: true };
    let answer: Changed = rpc.call("/etcdserverpb.Cluster/MemberList", request).await?;
    Ok(answer.members.into_iter().map(Member::from).collect())
}

/// Keeps the endpoints of these connections at the client URLs of all voting members. Upstream: the
/// option `AutoSyncInterval` of etcd's client.
pub(crate) async fn follow(all: [Rpc; 2], every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        match list(&all[0]).await {
            Ok(mut members) => {
                members.retain(|member| !member.is_learner);
                let urls: Vec<String> =
                    members.into_iter().flat_map(|member| member.client_urls).collect();
                all.iter().for_each(|rpc| rpc.follow(&urls));
            }
            Err(status) => tracing::debug!(%status, "failed to list etcd's members"),
        }
    }
}

/// Upstream: etcd's error codes (`api/v3rpc/rpctypes`).
fn refusal(status: &Status) -> Refusal {
    let text = rpc::text(status);
    let text = text.trim_start_matches("etcdserver: ").to_owned();
    let passes = [Code::Unavailable, Code::DeadlineExceeded, Code::FailedPrecondition];
    // A member that is not part of the cluster never will be promoted.
    let is_final =
        text.contains("can only promote a learner member") && !text.contains("in sync with leader");
    let is_local = std::error::Error::source(status).is_some();
    match (passes.contains(&status.code()) || is_local) && !is_final {
        true => Refusal::NotNow(text),
        false => Refusal::Never(text),
    }
}

#[derive(Clone, PartialEq, Message)]
struct WireMember {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(string, repeated, tag = "3")]
    peer_urls: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    client_urls: Vec<String>,
    #[prost(bool, tag = "5")]
    is_learner: bool,
}

impl From<WireMember> for Member {
    fn from(wire: WireMember) -> Self {
        let WireMember { id, name, peer_urls, client_urls, is_learner } = wire;
        Self { id, name, peer_urls, client_urls, is_learner }
    }
}

#[derive(Clone, PartialEq, Message)]
struct ListRequest {
    #[prost(bool, tag = "1")]
    is_linearizable: bool,
}

#[derive(Clone, PartialEq, Message)]
struct AddRequest {
    #[prost(string, repeated, tag = "1")]
    peer_urls: Vec<String>,
    #[prost(bool, tag = "2")]
    is_learner: bool,
}

#[derive(Clone, PartialEq, Message)]
struct IdRequest {
    #[prost(uint64, tag = "1")]
    id: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Added {
    #[prost(message, optional, tag = "1")]
    header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "3")]
    members: Vec<WireMember>,
}

#[derive(Clone, PartialEq, Message)]
struct Changed {
    #[prost(message, optional, tag = "1")]
    header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    members: Vec<WireMember>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_tell_what_a_retry_may_change() {
        let check = |status: Status, retries: bool| {
            let refusal = refusal(&status);
            assert_eq!(matches!(refusal, Refusal::NotNow(_)), retries, "{refusal}");
            assert!(!refusal.to_string().starts_with("etcdserver"), "{refusal}");
        };
        let lagging = "etcdserver: can only promote a learner member which is in sync with leader";
        check(Status::failed_precondition(lagging), true);
        let voter = "etcdserver: can only promote a learner member";
        check(Status::failed_precondition(voter), false);
        check(Status::unavailable("etcdserver: unhealthy cluster"), true);
        check(Status::not_found("etcdserver: member not found"), false);
        check(Status::failed_precondition("etcdserver: Peer URLs already exists"), true);
    }
}
