//! gRPC whose messages are bytes: the machinery is compiled once for all methods.
//!
//! In: an HTTP/2 request, and a function from the request's message to the answer's messages. Out: the
//! HTTP/2 response. A method with one answer is a stream of one message: both look the same on the wire.

use bytes::{Buf, BufMut, Bytes};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::server::{Grpc, ServerStreamingService};
use transport::Incoming;

/// Upstream: the size limit of a message in either direction.
const MESSAGE_LIMIT: usize = 16 << 20;

pub(super) type Messages = BoxStream<'static, Result<Bytes, Status>>;
type Run = Box<dyn FnOnce(Bytes) -> BoxFuture<'static, Result<Messages, Status>> + Send>;

/// Passes messages on undecoded.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// One call. The function is taken when its request has been read.
struct Call(Option<Run>);

impl ServerStreamingService<Bytes> for Call {
    type Response = Bytes;
    type ResponseStream = Messages;
    type Future = BoxFuture<'static, Result<tonic::Response<Messages>, Status>>;

    fn call(&mut self, request: tonic::Request<Bytes>) -> Self::Future {
        let run = self.0.take();
        Box::pin(async move {
            let run = run.ok_or_else(|| Status::internal("a call has one request"))?;
            run(request.into_inner()).await.map(tonic::Response::new)
        })
    }
}

/// Answers with the messages of `run`.
pub(super) async fn respond(
    request: Request<Incoming>,
    run: impl FnOnce(Bytes) -> BoxFuture<'static, Result<Messages, Status>> + Send + 'static,
) -> Response<Body> {
    let grpc = Grpc::new(Raw)
        .max_decoding_message_size(MESSAGE_LIMIT)
        .max_encoding_message_size(MESSAGE_LIMIT);
    let mut grpc = grpc;
    grpc.server_streaming(Call(Some(Box::new(run))), request).await
}
