//! etcd's HTTP pages: health, version, metrics.

use std::fmt::Write;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::{BodyExt, Full};

use super::{Body, CLUSTER_VERSION, Shared, VERSION};

const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
const JSON: &str = "application/json";

pub async fn serve(shared: &Shared, path: &str) -> Response<Body> {
    match path {
        "/health" => match check(shared).await {
            Ok(()) => page(StatusCode::OK, JSON, r#"{"health":"true","reason":""}"#.into()),
            Err(why) => {
                let why = why.replace(['"', '\\'], "'");
                let text = format!(r#"{{"health":"false","reason":"{why}"}}"#);
                page(StatusCode::SERVICE_UNAVAILABLE, JSON, text)
            }
        },
        "/livez" | "/readyz" => match check(shared).await {
            Ok(()) => page(StatusCode::OK, TEXT, "ok\n".into()),
            Err(why) => page(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{why}\n")),
        },
        "/version" => {
            let text = format!(r#"{{"etcdserver":"{VERSION}","etcdcluster":"{CLUSTER_VERSION}"}}"#);
            page(StatusCode::OK, JSON, text)
        }
        "/metrics" => match metrics(shared).await {
            Ok(text) => page(StatusCode::OK, TEXT, text),
            Err(error) => page(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{error}\n")),
        },
        _ => page(StatusCode::NOT_FOUND, TEXT, "404 page not found\n".into()),
    }
}

pub fn denied() -> Response<Body> {
    page(StatusCode::UNAUTHORIZED, TEXT, "a client certificate is needed\n".into())
}

fn page(code: StatusCode, kind: &'static str, text: String) -> Response<Body> {
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static(kind));
    response
}

/// Upstream: with an alarm, the member is not healthy.
async fn check(shared: &Shared) -> Result<(), String> {
    if shared.no_space.load(std::sync::atomic::Ordering::Relaxed) {
        return Err("ALARM NOSPACE".into());
    }
    shared.store.revision().await.map(|_| ()).map_err(|error| error.to_string())
}

async fn metrics(shared: &Shared) -> store::Result<String> {
    let now = shared.store.status().await?;
    let mut out = String::new();
    let gauges = [
        ("etcd_server_has_leader", 1, "Whether or not a leader exists. 1 is existence, 0 is not."),
        (
            "etcd_server_is_leader",
            1,
            "Whether or not this member is a leader. 1 if is, 0 otherwise.",
        ),
        ("etcd_mvcc_db_total_size_in_bytes", now.disk_bytes, "Size of the file in bytes."),
        (
            "etcd_mvcc_db_total_size_in_use_in_bytes",
            now.used_bytes,
            "Size of the records in bytes.",
        ),
        (
            "etcd_server_quota_backend_bytes",
            shared.options.quota_bytes.unwrap_or_default(),
            "Maximum size of the records in bytes; 0 is no limit.",
        ),
        ("etcd_debugging_mvcc_keys_total", now.keys as u64, "Number of live keys."),
        ("etcd_debugging_mvcc_current_revision", now.revision.0, "The current revision."),
        (
            "etcd_debugging_mvcc_compact_revision",
            now.floor.unwrap_or_default().0,
            "The revision of the last compaction.",
        ),
    ];
    for (name, value, help) in gauges {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
    }
    let name = "etcd_disk_wal_fsync_duration_seconds";
    let _ = writeln!(out, "# HELP {name} How long it took to make a commit durable.");
    let _ = writeln!(out, "# TYPE {name} histogram");
    let mut total = 0;
    for (index, count) in now.commits.counts.iter().enumerate() {
        total += count;
        let is_last = index + 1 == now.commits.counts.len();
        let bound =
            if is_last { "+Inf".into() } else { (f64::from(1 << index) / 1000.0).to_string() };
        let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {total}");
    }
    let _ = writeln!(out, "{name}_sum {}\n{name}_count {total}", now.commits.sum_seconds);
    Ok(out)
}
