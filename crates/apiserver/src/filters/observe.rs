//! Metrics and log lines of requests; watches are observed until their end.

use std::sync::Arc;

use http::header::{CONTENT_TYPE, USER_AGENT};
use http::{Request, Response};
use http_body::Body as _;
use http_body_util::BodyExt;
use tokio::time::Instant;

use super::in_flight::{UntilTheEnd, Waited};
use crate::metrics::{Answer, Metrics, Subject};
use crate::request::RequestInfo;
use crate::resource::Body;
use crate::shared::Shared;

/// A short request that takes longer is logged.
const SLOW_SECONDS: f64 = 1.0;

/// One request in flight; its drop decreases the gauges.
pub struct Observed {
    metrics: Arc<Metrics>,
    info: Arc<RequestInfo>,
    user_agent: String,
    subject: Subject,
    start: Instant,
    is_answered: bool,
}

impl Observed {
    pub fn start<B>(shared: &Shared, info: &Arc<RequestInfo>, request: &Request<B>) -> Self {
        let text = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
        let is_dry_run = request.uri().query().is_some_and(|query| query.contains("dryRun=All"));
        let table = shared.registry.resources();
        let is_known = table.get(&info.group, &info.version, &info.resource).is_some();
        let is_apply = text(CONTENT_TYPE).is_some_and(|kind| kind.contains("apply-patch+yaml"));
        let method = if is_apply { "APPLY" } else { request.method().as_str() };
        let subject = Subject::new(info, method, is_known, is_dry_run);
        shared.metrics.request_started(&subject);
        Self {
            metrics: shared.metrics.clone(),
            info: info.clone(),
            user_agent: text(USER_AGENT).unwrap_or_default().to_owned(),
            subject,
            start: Instant::now(),
            is_answered: false,
        }
    }

    /// The answer's headers are ready. The body counts only for long-running requests.
    pub fn finish(mut self, mut response: Response<Body>) -> Response<Body> {
        self.is_answered = true;
        let time = self.start.elapsed();
        let (seconds, code) = (time.as_secs_f64(), response.status().as_u16());
        let waited = response.extensions_mut().remove::<Waited>().unwrap_or_default().0;
        let bytes = response.body().size_hint().exact();
        self.metrics.request_answered(&self.subject, &Answer { code, time, waited, bytes });
        let is_long = self.subject.is_long;
        let slow = seconds > SLOW_SECONDS && !is_long;
        let Self { info, user_agent, .. } = &self;
        if slow {
            tracing::info!(
                verb = info.verb,
                path = info.path,
                code,
                seconds,
                user_agent,
                "slow request"
            );
        } else {
            tracing::debug!(
                verb = info.verb,
                path = info.path,
                code,
                seconds,
                user_agent,
                "request"
            );
        }
        if !is_long {
            return response;
        }
        // The gauges decrease when the last frame is sent, or the client disconnects.
        let held = response.extensions_mut().remove::<UntilTheEnd>();
        response.map(|body| {
            body.map_frame(move |frame| {
                let _until_the_end = (&self, &held);
                frame
            })
            .boxed_unsync()
        })
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        if !self.is_answered {
            self.metrics.request_aborted(&self.subject);
        }
        self.metrics.request_ended(&self.subject);
    }
}
