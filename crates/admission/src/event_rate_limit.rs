//! EventRateLimit: rejects events above the configured rates, per server, namespace, user, or source and
//! object.

use std::num::NonZeroUsize;
use std::sync::Mutex;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::Event;
use lru::LruCache;
use serde::Deserialize;
use tokio::time::Instant;

use crate::{OptionsError, Row};

const CACHE_SIZE: usize = 4096;

#[derive(Deserialize)]
struct Configuration {
    limits: Vec<Limit>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Limit {
    r#type: Kind,
    qps: u32,
    burst: u32,
    #[serde(default)]
    cache_size: usize,
}

#[derive(Clone, Copy, Debug, Deserialize)]
enum Kind {
    Server,
    Namespace,
    User,
    SourceAndObject,
}

/// A token bucket: gets `qps` tokens a second, up to `burst`; an event takes one.
struct Bucket {
    tokens: f64,
    at: Instant,
}

struct Enforcer {
    limit: Limit,
    /// By key; the least recently used one is evicted first.
    buckets: Mutex<LruCache<String, Bucket>>,
}

pub(crate) const ROW: Row = Row::disabled("EventRateLimit", |options| {
    let configuration = options.configuration.of("EventRateLimit");
    Ok(Box::new(EventRateLimit::new(configuration)?))
});

pub(crate) struct EventRateLimit(Vec<Enforcer>);

impl EventRateLimit {
    pub fn new(configuration: Option<&serde_json::Value>) -> Result<Self, OptionsError> {
        let tree = configuration.ok_or(OptionsError::NoLimits)?;
        let read: Configuration = serde_json::from_value(tree.clone())?;
        let enforcer = |limit: Limit| {
            let size = NonZeroUsize::new(limit.cache_size);
            let size = size.or(NonZeroUsize::new(CACHE_SIZE)).unwrap_or(NonZeroUsize::MIN);
            Enforcer { limit, buckets: Mutex::new(LruCache::new(size)) }
        };
        Ok(Self(read.limits.into_iter().map(enforcer).collect()))
    }
}

impl Enforcer {
    fn key(&self, attributes: &Attributes<'_>) -> String {
        match self.limit.r#type {
            Kind::Server => String::new(),
            Kind::Namespace => attributes.key.namespace.clone(),
            Kind::User => attributes.ctx.user.name.clone(),
            Kind::SourceAndObject => {
                attributes.object_as::<Event>().map(source_and_object).unwrap_or_default()
            }
        }
    }

    fn accepts(&self, key: &str, now: Instant) -> bool {
        let burst = f64::from(self.limit.burst);
        let mut buckets = self.buckets.lock().expect("no panic under the lock");
        let fresh = || Bucket { tokens: burst, at: now };
        let bucket = buckets.get_or_insert_mut(key.to_owned(), fresh);
        let passed = now.saturating_duration_since(bucket.at).as_secs_f64();
        bucket.tokens = (bucket.tokens + passed * f64::from(self.limit.qps)).min(burst);
        bucket.at = now;
        let accepts = bucket.tokens >= 1.0;
        if accepts {
            bucket.tokens -= 1.0;
        }
        accepts
    }
}

fn source_and_object(event: &Event) -> String {
    let source = event.source.clone().unwrap_or_default();
    let about = &event.involved_object;
    let parts = [
        &source.component,
        &source.host,
        &about.kind,
        &about.namespace,
        &about.name,
        &about.uid,
        &about.api_version,
    ];
    parts.into_iter().flatten().map(String::as_str).collect()
}

#[async_trait]
impl Plugin for EventRateLimit {
    fn name(&self) -> &'static str {
        "EventRateLimit"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let is_event = attributes.object.as_deref().is_some_and(|object| object.kind() == "Event");
        if !is_event || attributes.ctx.dry_run {
            return Ok(());
        }
        let now = Instant::now();
        let refused = self.0.iter().filter_map(|enforcer| {
            let key = enforcer.key(attributes);
            let kind = enforcer.limit.r#type;
            (!enforcer.accepts(&key, now))
                .then(|| format!("limit reached on type {kind:?} for key {key}"))
        });
        match crate::aggregate(refused.collect()) {
            Some(why) => Err(StatusError::too_many_requests(why, 0)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_bucket_empties_and_fills() {
        let limits = serde_json::json!({"limits": [{"type": "Server", "qps": 1, "burst": 2}]});
        let limit = EventRateLimit::new(Some(&limits)).expect("limits");
        let now = Instant::now();
        let mut got = vec![];
        for seconds in [0, 0, 0, 1, 1, 10, 10, 10] {
            got.push(limit.0[0].accepts("", now + Duration::from_secs(seconds)));
        }
        assert_eq!(got, [true, true, false, true, false, true, true, false]);
    }
}
