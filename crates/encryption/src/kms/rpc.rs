//! The three calls of `v2.KeyManagementService`, over gRPC on a unix socket.

use std::collections::BTreeMap;
use std::time::Duration;

use http::uri::PathAndQuery;
use prost::Message;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use crate::Error;

base::messages! {
    message StatusRequest {}

    message StatusResponse {
        string version = 1;
        string healthz = 2;
        string key_id = 3;
    }

    message DecryptRequest {
        buffer ciphertext = 1;
        string uid = 2;
        string key_id = 3;
        map<string, buffer> annotations = 4;
    }

    message DecryptResponse {
        buffer plaintext = 1;
    }

    message EncryptRequest {
        buffer plaintext = 1;
        string uid = 2;
    }

    message EncryptResponse {
        buffer ciphertext = 1;
        string key_id = 2;
        map<string, buffer> annotations = 3;
    }
}

/// A plugin's socket; connects at the first call, and again when the connection is lost.
pub struct Rpc {
    channel: Channel,
    timeout: Duration,
}

impl Rpc {
    /// `endpoint` has the form `unix:///run/kms.sock`; `unix://@name` is an abstract socket.
    pub fn new(endpoint: &str, timeout: Duration) -> Result<Self, Error> {
        let wrong = |error: tonic::transport::Error| Error::Plugin(deepest(&error));
        let channel = Endpoint::from_shared(endpoint.to_owned()).map_err(wrong)?.connect_lazy();
        Ok(Self { channel, timeout })
    }

    pub async fn status(&self) -> Result<StatusResponse, Error> {
        self.call("/v2.KeyManagementService/Status", StatusRequest {}).await
    }

    pub async fn encrypt(&self, plaintext: Vec<u8>) -> Result<EncryptResponse, Error> {
        let request = EncryptRequest { plaintext, uid: base::rng::uuid() };
        self.call("/v2.KeyManagementService/Encrypt", request)
            .await
            .map_err(|error| Error::Plugin(format!("failed to encrypt DEK, error: {error}")))
    }

    pub async fn decrypt(
        &self,
        ciphertext: Vec<u8>,
        key_id: String,
        annotations: BTreeMap<String, Vec<u8>>,
    ) -> Result<Vec<u8>, Error> {
        let request = DecryptRequest { ciphertext, uid: base::rng::uuid(), key_id, annotations };
        let answer: Result<DecryptResponse, Error> =
            self.call("/v2.KeyManagementService/Decrypt", request).await;
        let failed = |error| Error::Plugin(format!("failed to decrypt DEK, error: {error}"));
        Ok(answer.map_err(failed)?.plaintext)
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q) -> Result<A, Error>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone());
        let work = async {
            grpc.ready().await.map_err(|error| Status::unavailable(deepest(&error)))?;
            let path = PathAndQuery::from_static(path);
            grpc.unary(Request::new(request), path, ProstCodec::default()).await
        };
        match tokio::time::timeout(self.timeout, work).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(Error::Plugin(told(&status))),
            Err(_) => Err(Error::Plugin(format!("no answer within {:?}", self.timeout))),
        }
    }
}

fn told(status: &Status) -> String {
    let cause = std::error::Error::source(status).map(deepest);
    match (status.code(), cause) {
        (Code::Unknown | Code::Unavailable, Some(cause)) => cause,
        (code, _) => format!("rpc error: code = {code:?} desc = {}", status.message()),
    }
}

/// The innermost cause: "connection refused" says more than "transport error".
fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(cause) = error.source() {
        error = cause;
    }
    error.to_string()
}
