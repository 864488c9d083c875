//! A gRPC server on a Unix socket, for unary methods.
//!
//! In: a listener, and a function from requests to answers, which routes by path to [`unary`].
//! Out: a future that serves until the stop.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use base::task::Stop;
use http::{Request, Response};
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::server::{Grpc, UnaryService};
use tonic_prost::ProstCodec;
use transport::{Incoming, Limits, Listener};

const DRAIN: Duration = Duration::from_secs(1);

/// Adapts a function to tonic's service trait.
struct Method<F>(F);

impl<Q, A, F, W> UnaryService<Q> for Method<F>
where
    F: FnMut(Q) -> W,
    W: Future<Output = Result<A, Status>> + Send + 'static,
{
    type Response = A;
    type Future = Pin<Box<dyn Future<Output = Result<tonic::Response<A>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        let work = (self.0)(request.into_inner());
        Box::pin(async move { work.await.map(tonic::Response::new) })
    }
}

/// Answers with the result of `run`.
pub async fn unary<Q, A, F, W>(request: Request<Incoming>, run: F) -> Response<Body>
where
    Q: Message + Default + Send + 'static,
    A: Message + Send + 'static,
    F: FnMut(Q) -> W + Send,
    W: Future<Output = Result<A, Status>> + Send + 'static,
{
    Grpc::new(ProstCodec::<A, Q>::default()).unary(Method(run), request).await
}

/// The answer to an unknown method, in the words of gRPC for Go.
pub fn unknown(path: &str) -> Response<Body> {
    let (service, method) = path.trim_start_matches('/').rsplit_once('/').unwrap_or_default();
    let text = format!("unknown method {method} for service {service}");
    Status::unimplemented(text).into_http()
}

pub async fn serve<F, W>(listener: Listener, answer: F, stop: Stop)
where
    F: Fn(Request<Incoming>) -> W + Clone + Send + 'static,
    W: Future<Output = Response<Body>> + Send + 'static,
{
    let service = tower::service_fn(move |request: Request<Incoming>| {
        let work = answer(request);
        async move { Ok::<_, Infallible>(work.await) }
    });
    let limits = Limits { drain: DRAIN, ..Limits::default() };
    transport::serve(listener, None, service, limits, stop).await;
}
