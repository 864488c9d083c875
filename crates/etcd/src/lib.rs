//! etcd's v3 API in both directions: a real etcd cluster as the store (to grow beyond one machine), and
//! any store served as an etcd ([`server`]).
//!
//! In: etcd's endpoints, CA and credentials. Out: [`store::Store`]. Every call is one of etcd's v3
//! API, over gRPC; messages are written by hand, because a fresh machine has no protoc.
//!
//! Invariants: nothing is cached here, reads are linearizable; every call ends within the time of
//! [`Patience`]; a call that fails without an answer of etcd is `Unavailable`, and the outcome of such a
//! write is unknown, as with etcd's own client. Watches reconnect automatically and resume, at another
//! member if theirs is silent; those of the registry share one stream.

pub mod cluster;
pub mod compactor;
mod convert;
mod hub;
mod members;
mod messages;
mod rpc;
pub mod server;
mod watch;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use base::task::Tasks;
use futures::StreamExt;
use store::{
    Error, KeyRange, Lease, LeaseId, RangeResponse, Result, Revision, Store, Txn, TxnResponse,
    Watch, WatchRequest,
};
use tokio::sync::mpsc;
use tonic::{Code, Status};

use hub::Hub;
pub use members::Patience;
use rpc::{Rpc, unavailable};

/// Items that may wait in a watch; its task waits for the reader, and etcd for the task.
const WATCH_QUEUE: usize = 64;

/// Servers compact revisions that are five minutes old.
const ASK_EVERY: Duration = Duration::from_secs(60);

/// The prefix of Kubernetes' objects.
const REGISTRY: &[u8] = b"/registry/";

/// etcd's answer, before it is converted to the store's types.
type Answer<T> = std::result::Result<T, Status>;

/// The endpoints of etcd, and the credentials of both sides.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// For example `https://10.0.0.1:2379`.
    pub endpoints: Vec<String>,
    /// PEM; without it, `https` endpoints are refused: the system's CAs are not used.
    pub ca_pem: Option<Vec<u8>>,
    /// The client's certificate chain and key, PEM.
    pub identity_pem: Option<(Vec<u8>, Vec<u8>)>,
    /// Watches below this prefix share a stream [default: `/registry/`]
    pub shared_prefix: Option<bytes::Bytes>,
    /// How often a quiet watch requests progress: several times per compaction [default: 1m]
    pub ask_every: Option<Duration>,
    /// How often the endpoints are replaced by those of all voting members [default: never]
    pub follow_every: Option<Duration>,
    /// Timeouts of calls [default: `Patience::default()`]
    pub patience: Option<Patience>,
}

pub struct Etcd {
    rpc: Rpc,
    /// A separate connection for streams that may be read slowly.
    slow: Rpc,
    shared_prefix: bytes::Bytes,
    ask_every: Duration,
    /// The stream of the watches below that prefix; it starts with the first of them.
    shared: OnceLock<Arc<Hub>>,
    tasks: Tasks,
}

impl Etcd {
    /// Connects at the first call, and again whenever a connection is lost.
    pub fn open(options: &Options) -> Result<Arc<dyn Store>> {
        let registry = || bytes::Bytes::from_static(REGISTRY);
        let tasks = Tasks::new("etcd watches");
        let (rpc, slow) = (Rpc::new(options, &tasks)?, Rpc::new(options, &tasks)?);
        if let Some(every) = options.follow_every {
            tasks.spawn("etcd members", cluster::follow([rpc.clone(), slow.clone()], every));
        }
        Ok(Arc::new(Self {
            rpc,
            slow,
            shared_prefix: options.shared_prefix.clone().unwrap_or_else(registry),
            ask_every: options.ask_every.unwrap_or(ASK_EVERY),
            shared: OnceLock::new(),
            tasks,
        }))
    }

    /// The hub for a watch of this range.
    fn hub(&self, range: &KeyRange) -> Arc<Hub> {
        let start = |range| Hub::start(self.rpc.clone(), range, self.ask_every, &self.tasks);
        let together = KeyRange::prefix(self.shared_prefix.clone());
        if !hub::within(range, &together) {
            return start(range.clone());
        }
        self.shared.get_or_init(|| start(together)).clone()
    }

    /// The reader of a new watch, and its first revision.
    async fn reader(
        &self,
        request: WatchRequest,
        items: mpsc::Sender<store::WatchItem>,
        asked: mpsc::Receiver<()>,
    ) -> Answer<watch::Reader> {
        let hub = self.hub(&request.range);
        hub.begun().await?;
        let after = |revision: Revision| Revision(revision.0 + 1);
        let (next, owes) = match request.start {
            None | Some(Revision(0)) => (after(self.rpc.present().await?), None),
            Some(start) => {
                let is_known = start <= after(self.rpc.heard());
                let present = if is_known { self.rpc.heard() } else { self.rpc.present().await? };
                (start, (start <= after(present)).then_some(present))
            }
        };
        let (history, range) = (self.slow.clone(), request.range);
        Ok(watch::Reader { hub, history, range, next, delivered: Revision(0), owes, items, asked })
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q) -> Answer<A>
    where
        Q: prost::Message + Clone + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        self.tasks.stop_signal().or(self.rpc.call(path, request)).await.ok_or_else(rpc::closed)?
    }

    /// A list without a limit may take longer than other calls.
    async fn ask(&self, wire: messages::RangeRequest) -> Answer<messages::RangeResponse> {
        if wire.limit > 0 || wire.count_only || wire.range_end.is_empty() {
            return self.call("/etcdserverpb.KV/Range", wire).await;
        }
        self.tasks.stop_signal().or(self.rpc.list(wire)).await.ok_or_else(rpc::closed)?
    }

    /// The error of a call with a revision, completed with the oldest or the current revision, which etcd
    /// does not report.
    async fn revision_error(&self, status: Status, requested: Revision) -> Error {
        match () {
            () if convert::says_compacted(&status) => match watch::floor(&self.rpc).await {
                Ok(floor) => Error::Compacted { requested, floor },
                Err(status) => unavailable(&status),
            },
            () if status.message().ends_with("required revision is a future revision") => {
                match self.revision().await {
                    Ok(current) => Error::Future { requested, current },
                    Err(error) => error,
                }
            }
            () => unavailable(&status),
        }
    }
}

#[async_trait]
impl Store for Etcd {
    async fn range(&self, request: store::RangeRequest) -> Result<RangeResponse> {
        let wire = messages::RangeRequest {
            key: convert::start(&request.range),
            range_end: convert::end(&request.range),
            limit: request.limit.try_into().unwrap_or(i64::MAX),
            revision: convert::number(request.revision.unwrap_or_default()),
            count_only: request.count_only,
            ..Default::default()
        };
        let answer = match self.ask(wire).await {
            Ok(answer) => answer,
            Err(status) => {
                return Err(self
                    .revision_error(status, request.revision.unwrap_or_default())
                    .await);
            }
        };
        Ok(RangeResponse {
            kvs: answer.kvs.into_iter().map(convert::key_value).collect(),
            count: answer.count.try_into().unwrap_or_default(),
            more: answer.more,
            revision: self.rpc.hear(convert::at(answer.header.as_ref())),
        })
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        store::backend::check_sizes(&txn)?;
        let lease = convert::first_lease(&txn);
        let answer: Answer<messages::TxnResponse> =
            self.call("/etcdserverpb.KV/Txn", convert::txn(txn)).await;
        match answer {
            Ok(answer) => Ok(TxnResponse {
                succeeded: answer.succeeded,
                revision: self.rpc.hear(convert::at(answer.header.as_ref())),
                results: answer
                    .responses
                    .into_iter()
                    .map(convert::result)
                    .collect::<Result<_>>()?,
            }),
            Err(status) => Err(lease_error(&status, lease)),
        }
    }

    async fn watch(&self, request: WatchRequest) -> Result<Watch> {
        let (sender, items) = mpsc::channel(WATCH_QUEUE);
        let (progress, asked) = mpsc::channel(1);
        let starting = self.reader(request, sender, asked);
        let reader = self.tasks.stop_signal().or(starting).await.ok_or(Error::Closed)?;
        self.tasks.spawn("etcd watch", reader.map_err(|status| unavailable(&status))?.run());
        Ok(Watch { items, progress })
    }

    async fn revision(&self) -> Result<Revision> {
        let asked = self.tasks.stop_signal().or(self.rpc.present()).await;
        asked.ok_or(Error::Closed)?.map_err(|status| unavailable(&status))
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        let wire = messages::CompactionRequest { revision: convert::number(revision) };
        let done: Answer<messages::CompactionResponse> =
            self.call("/etcdserverpb.KV/Compact", wire).await;
        match done {
            Ok(_) => Ok(()),
            Err(status) => Err(self.revision_error(status, revision).await),
        }
    }

    async fn lease_grant(&self, ttl_seconds: i64) -> Result<LeaseId> {
        let wire = messages::LeaseGrantRequest { ttl: ttl_seconds.max(1), id: 0 };
        let answer: messages::LeaseGrantResponse = self
            .call("/etcdserverpb.Lease/LeaseGrant", wire)
            .await
            .map_err(|status| unavailable(&status))?;
        Ok(answer.id)
    }

    async fn lease_grant_as(&self, lease: LeaseId, ttl_seconds: i64) -> Result<()> {
        let wire = messages::LeaseGrantRequest { ttl: ttl_seconds.max(1), id: lease };
        let answer: Answer<messages::LeaseGrantResponse> =
            self.call("/etcdserverpb.Lease/LeaseGrant", wire).await;
        match answer {
            Ok(_) => Ok(()),
            Err(status) if status.message().ends_with("lease already exists") => {
                Err(Error::LeaseExists(lease))
            }
            Err(status) => Err(unavailable(&status)),
        }
    }

    async fn leases(&self) -> Result<Vec<Lease>> {
        let list: Answer<messages::LeaseLeasesResponse> =
            self.call("/etcdserverpb.Lease/LeaseLeases", messages::Empty {}).await;
        let mut leases = vec![];
        for messages::LeaseRequest { id } in list.map_err(|s| unavailable(&s))?.leases {
            let wire = messages::LeaseTimeToLiveRequest { id, keys: true };
            let lease: Answer<messages::LeaseTimeToLiveResponse> =
                self.call("/etcdserverpb.Lease/LeaseTimeToLive", wire).await;
            let lease = lease.map_err(|s| unavailable(&s))?;
            // It may have expired meanwhile.
            if lease.ttl >= 0 {
                leases.push(Lease {
                    id,
                    ttl_seconds: lease.granted_ttl,
                    left_seconds: lease.ttl,
                    keys: lease.keys,
                });
            }
        }
        leases.sort_unstable_by_key(|lease| lease.id);
        Ok(leases)
    }

    async fn lease_revoke(&self, lease: LeaseId) -> Result<()> {
        let wire = messages::LeaseRequest { id: lease };
        let done: Answer<messages::LeaseRevokeResponse> =
            self.call("/etcdserverpb.Lease/LeaseRevoke", wire).await;
        done.map(|_| ()).map_err(|status| lease_error(&status, lease))
    }

    async fn lease_keep_alive(&self, lease: LeaseId) -> Result<i64> {
        let once = futures::stream::iter([messages::LeaseRequest { id: lease }]);
        let ask = async {
            let opened = self.rpc.stream("/etcdserverpb.Lease/LeaseKeepAlive", once).await?;
            let rpc::Opened { mut answers, source } = opened;
            let answer: Option<Answer<messages::LeaseKeepAliveResponse>> =
                tokio::time::timeout(self.rpc.patience().open(), answers.next())
                    .await
                    .map_err(|_| source.fell_silent())?;
            answer.unwrap_or_else(|| Err(Status::unavailable("the keep-alive stream ended")))
        };
        let answer = self.tasks.stop_signal().or(ask).await.ok_or(Error::Closed)?;
        let answer = answer.map_err(|status| lease_error(&status, lease))?;
        if answer.ttl <= 0 { Err(Error::LeaseNotFound(lease)) } else { Ok(answer.ttl) }
    }

    async fn status(&self) -> Result<store::Status> {
        let status: Answer<messages::StatusResponse> =
            self.call("/etcdserverpb.Maintenance/Status", messages::Empty {}).await;
        let status = status.map_err(|s| unavailable(&s))?;
        let all = store::RangeRequest {
            count_only: true,
            ..store::RangeRequest::new(store::KeyRange::prefix(bytes::Bytes::new()))
        };
        let all = self.range(all).await?;
        let size = |bytes: i64| bytes.try_into().unwrap_or_default();
        let mut commits =
            store::Histogram { sum_seconds: status.commit_seconds, ..Default::default() };
        for (count, told) in commits.counts.iter_mut().zip(status.commits) {
            *count = told;
        }
        let backend = match status.backend.is_empty() {
            true => format!("etcd {}", status.version),
            false => status.backend,
        };
        Ok(store::Status {
            backend,
            revision: all.revision,
            floor: Some(watch::floor(&self.rpc).await.map_err(|s| unavailable(&s))?),
            keys: all.count,
            disk_bytes: size(status.db_size),
            used_bytes: size(status.db_size_in_use),
            commits,
            alarms: status.errors,
        })
    }

    async fn space(&self) -> Result<store::Space> {
        let status: Answer<messages::StatusResponse> =
            self.call("/etcdserverpb.Maintenance/Status", messages::Empty {}).await;
        let status = status.map_err(|s| unavailable(&s))?;
        let is_low = status.errors.iter().any(|error| error.contains(store::NO_SPACE));
        let disk_bytes = status.db_size.try_into().unwrap_or_default();
        Ok(store::Space { disk_bytes, reserve_bytes: None, is_low })
    }

    async fn snapshot(&self) -> Result<store::Snapshot> {
        let path = "/etcdserverpb.Maintenance/Snapshot";
        let opening = self.slow.download(path, messages::Empty {});
        let mut answers: tonic::Streaming<messages::SnapshotResponse> = self
            .tasks
            .stop_signal()
            .or(opening)
            .await
            .ok_or(Error::Closed)?
            .map_err(|s| unavailable(&s))?;
        let (sender, chunks) = mpsc::channel(4);
        self.tasks.spawn("etcd snapshot", async move {
            while let Some(answer) = answers.next().await {
                let chunk = answer.map(|answer| answer.blob).map_err(|s| unavailable(&s));
                let is_last = chunk.is_err();
                if sender.send(chunk).await.is_err() || is_last {
                    return;
                }
            }
        });
        Ok(store::Snapshot { revision: None, size: None, chunks })
    }

    async fn revision_at(&self, millis: u64) -> Result<Revision> {
        let wire = messages::RevisionAtRequest { millis };
        let answer: Answer<messages::RevisionAtResponse> =
            self.call(server::REVISION_AT, wire).await;
        match answer {
            Ok(answer) => Ok(convert::revision(answer.revision)),
            Err(status) if status.code() == Code::Unimplemented => {
                Err(Error::Unsupported("etcd cannot convert a time to a revision"))
            }
            Err(status) => Err(self.revision_error(status, Revision(0)).await),
        }
    }

    async fn close(&self) {
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}

fn lease_error(status: &Status, lease: LeaseId) -> Error {
    if status.code() == Code::NotFound && status.message().contains("lease not found") {
        Error::LeaseNotFound(lease)
    } else {
        unavailable(status)
    }
}
