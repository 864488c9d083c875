//! Counts, durations and log lines of requests, watches until their end.

use std::sync::Arc;

use http::header::USER_AGENT;
use http::{Request, Response};
use http_body_util::BodyExt;
use tokio::time::Instant;

use super::in_flight::{is_long_running, is_read};
use crate::metrics::Metrics;
use crate::request::RequestInfo;
use crate::resource::Body;
use crate::serve::Shared;

/// A short request that takes longer than this is worth a line.
const SLOW_SECONDS: f64 = 1.0;

/// One request under way; the gauges fall when it is dropped.
pub struct Observed {
    metrics: Arc<Metrics>,
    info: Arc<RequestInfo>,
    user_agent: String,
    is_dry_run: bool,
    start: Instant,
}

impl Observed {
    pub fn start<B>(shared: &Shared, info: &Arc<RequestInfo>, request: &Request<B>) -> Self {
        let agent = request.headers().get(USER_AGENT).and_then(|agent| agent.to_str().ok());
        let is_dry_run = request.uri().query().is_some_and(|query| query.contains("dryRun=All"));
        shared.metrics.request_started(info, is_long_running(info), is_read(info));
        Self {
            metrics: shared.metrics.clone(),
            info: info.clone(),
            user_agent: agent.unwrap_or_default().to_owned(),
            is_dry_run,
            start: Instant::now(),
        }
    }

    /// The answer's head is there. What the body takes counts only for long requests.
    pub fn finish(self, response: Response<Body>) -> Response<Body> {
        let seconds = self.start.elapsed().as_secs_f64();
        let code = response.status().as_u16();
        let is_long = is_long_running(&self.info);
        self.metrics.request_answered(&self.info, self.is_dry_run, code, seconds, is_long);
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
        // The gauges fall when the last frame is sent, or the client is gone.
        response.map(|body| {
            body.map_frame(move |frame| {
                let _until_the_end = &self;
                frame
            })
            .boxed_unsync()
        })
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        self.metrics.request_ended(&self.info, is_long_running(&self.info), is_read(&self.info));
    }
}
