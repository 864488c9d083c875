//! The connection and the unary calls, by name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::backoff::Backoff;
use prost::Message;
use store::{Error, Revision};
use tonic::client::Grpc;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::{Options, convert, messages as wire};

/// As upstream's API server dials etcd.
const DIAL_TIMEOUT: Duration = Duration::from_secs(20);
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(30);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// What etcd may send before it is asked to go on. The usual 64 KiB for the whole of a connection are
/// a stop for every sixty objects of a list, and for all watches together.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// How often a call is made, and the pauses in between: about a second and a half, the time that an
/// election takes.
const ATTEMPTS: usize = 8;
const AGAIN_FIRST: Duration = Duration::from_millis(25);
const AGAIN_CEILING: Duration = Duration::from_millis(500);
/// What may be called twice.
const READS: &[&str] = &[
    "/etcdserverpb.KV/Range",
    "/etcdserverpb.Lease/LeaseLeases",
    "/etcdserverpb.Lease/LeaseTimeToLive",
    "/etcdserverpb.Maintenance/Status",
];
/// Lists have no limit of their own; upstream's client sets none either.
const ANSWER_LIMIT: usize = i32::MAX as usize;

/// One connection to each endpoint; calls go to those that answer. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Rpc {
    grpc: Grpc<Channel>,
    /// The newest revision that etcd has named.
    heard: Arc<AtomicU64>,
}

impl Rpc {
    pub fn new(options: &Options) -> Result<Self, Error> {
        let unusable = |why: String| Error::Unusable(why.into());
        if options.endpoints.is_empty() {
            return Err(unusable("no etcd endpoint is given".into()));
        }
        let mut endpoints = vec![];
        for url in &options.endpoints {
            let wrong = |error: tonic::transport::Error| {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                unusable(format!("etcd endpoint {url:?}: {}", cause.unwrap_or(error.to_string())))
            };
            let mut endpoint = Endpoint::from_shared(url.clone())
                .map_err(wrong)?
                .connect_timeout(DIAL_TIMEOUT)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
                .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
                .keep_alive_while_idle(true);
            if url.starts_with("https://") {
                endpoint = endpoint.tls_config(tls(options)).map_err(wrong)?;
            }
            endpoints.push(endpoint);
        }
        let channel = match &endpoints[..] {
            [only] => only.connect_lazy(),
            _ => Channel::balance_list(endpoints.into_iter()),
        };
        let grpc = Grpc::new(channel).max_decoding_message_size(ANSWER_LIMIT);
        Ok(Self { grpc, heard: Arc::default() })
    }

    /// Notes the revision of an answer.
    pub fn hear(&self, revision: Revision) -> Revision {
        self.heard.fetch_max(revision.0, Ordering::AcqRel);
        revision
    }

    pub fn heard(&self) -> Revision {
        Revision(self.heard.load(Ordering::Acquire))
    }

    /// The newest revision, linearizably.
    pub async fn present(&self) -> Result<Revision, Status> {
        let key = bytes::Bytes::from_static(b"\0");
        let nothing = wire::RangeRequest { key, count_only: true, ..Default::default() };
        let answer: wire::RangeResponse = self.call("/etcdserverpb.KV/Range", nothing).await?;
        Ok(self.hear(convert::at(answer.header.as_ref())))
    }

    /// Whether this etcd may say how far a watch is before the events that it speaks of.
    pub async fn answers_overtake_events(&self) -> Result<bool, Status> {
        let path = "/etcdserverpb.Maintenance/Status";
        let status: wire::StatusResponse = self.call(path, wire::Empty {}).await?;
        Ok(overtakes(&status.version))
    }

    /// A call of one request and one answer, as `/etcdserverpb.KV/Range`. It is made again where
    /// nobody can have heard it (a member is down; another may answer), and if it only reads,
    /// whatever became of it. Upstream: so does etcd's own client.
    pub async fn call<Q, A>(&self, path: &'static str, request: Q) -> Result<A, Status>
    where
        Q: Message + Clone + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let only_reads = READS.contains(&path);
        let mut backoff = Backoff::new(AGAIN_FIRST, AGAIN_CEILING).with_jitter(0.5);
        for _ in 1..ATTEMPTS {
            match self.call_once(path, request.clone()).await {
                Err(status)
                    if never_sent(&status) || only_reads && status.code() == Code::Unavailable =>
                {
                    tokio::time::sleep(backoff.step()).await;
                }
                answer => return answer,
            }
        }
        self.call_once(path, request).await
    }

    async fn call_once<Q, A>(&self, path: &'static str, request: Q) -> Result<A, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = self.grpc.clone();
        ready(&mut grpc).await?;
        let path = http::uri::PathAndQuery::from_static(path);
        let answer = grpc.unary(Request::new(request), path, ProstCodec::default()).await?;
        Ok(answer.into_inner())
    }

    /// A call of one request whose answer is a stream.
    pub async fn download<Q, A>(
        &self,
        path: &'static str,
        request: Q,
    ) -> Result<Streaming<A>, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = self.grpc.clone();
        ready(&mut grpc).await?;
        let path = http::uri::PathAndQuery::from_static(path);
        let answer =
            grpc.server_streaming(Request::new(request), path, ProstCodec::default()).await?;
        Ok(answer.into_inner())
    }

    /// A call with a stream in both directions.
    pub async fn stream<Q, A>(
        &self,
        path: &'static str,
        requests: impl futures::Stream<Item = Q> + Send + 'static,
    ) -> Result<Streaming<A>, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = self.grpc.clone();
        ready(&mut grpc).await?;
        let path = http::uri::PathAndQuery::from_static(path);
        let mut request = Request::new(requests);
        // A member that lost its leader ends the stream instead of keeping silent.
        request
            .metadata_mut()
            .insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
        Ok(grpc.streaming(request, path, ProstCodec::default()).await?.into_inner())
    }
}

async fn ready(grpc: &mut Grpc<Channel>) -> Result<(), Status> {
    grpc.ready().await.map_err(|error| Status::unavailable(deepest(&error)))
}

fn tls(options: &Options) -> ClientTlsConfig {
    let mut tls = ClientTlsConfig::new();
    if let Some(pem) = &options.ca_pem {
        tls = tls.ca_certificate(Certificate::from_pem(pem));
    }
    if let Some((certificate, key)) = &options.identity_pem {
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    tls
}

/// The answer to who asks when this side has hung up for good.
pub(crate) fn closed() -> Status {
    let mut status = Status::unavailable("the connection is closed");
    status.set_source(Arc::new(Error::Closed));
    status
}

/// What the store's callers can act on; anything else leaves a write's fate unknown.
pub(crate) fn unavailable(status: &Status) -> Error {
    let own = std::error::Error::source(status).and_then(|cause| cause.downcast_ref::<Error>());
    if let Some(own) = own {
        return own.clone();
    }
    let what = match status.code() {
        Code::Unknown | Code::Unavailable => String::new(),
        code => format!("{code:?}: "),
    };
    let why = match std::error::Error::source(status) {
        Some(cause) => deepest(cause),
        None => status.message().to_owned(),
    };
    Error::Unavailable(format!("etcd: {what}{why}").into())
}

/// Whether there was no connection to send it on.
fn never_sent(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The innermost cause: "connection refused" tells more than "transport error".
fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// Upstream: its servers ask only etcds from these versions on.
fn overtakes(version: &str) -> bool {
    let numbers = version.split(['.', '-', '+']).map(|part| part.parse::<u32>().ok());
    match numbers.take(3).collect::<Option<Vec<_>>>().as_deref() {
        Some([3, 4, patch]) => *patch < 31,
        Some([3, 5, patch]) => *patch < 13,
        Some([major, minor, _]) => (*major, *minor) < (3, 4),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_etcds_are_known_by_their_versions() {
        let check = |version, expected| assert_eq!(overtakes(version), expected, "{version}");
        check("3.3.27", true);
        check("3.4.23", true);
        check("3.4.31", false);
        check("3.5.0-rc.1", true);
        check("3.5.12", true);
        check("3.5.13", false);
        check("3.6.0", false);
        check("4.0.0-alpha", false);
        check("a fork", false);
    }
}
