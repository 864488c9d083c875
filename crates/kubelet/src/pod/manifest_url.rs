//! Static pods from a server: a pod or a list of pods at a URL (`staticPodURL`).
//!
//! In: the URL, its headers, answers in JSON or YAML. Out: pods of this node, when the answer changes.
//! Invariants: the same answer gives the same uids; an answer that cannot be used leaves the pods as they
//! are; an empty one is an error, not "no pods".
//! Cost: one request each 20 s (`httpCheckFrequency`).
//! Upstream: `pkg/kubelet/config/http.go`.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use transport::{ClientOptions, HttpClient};

use crate::config::ManifestUrl;
use crate::names;
use crate::pod::static_pods::{Source, of_value};

/// The largest answer.
const LIMIT: usize = 10 << 20;
/// Upstream: the timeout of its HTTP client.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Client(#[from] transport::ClientError),
    #[error("failed to make the request: {0}")]
    Request(#[from] http::Error),
    #[error("failed to read the answer: {0}")]
    Body(String),
    #[error("{0}")]
    Status(StatusCode),
    #[error("zero-length data received")]
    Empty,
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Silence,
    #[error("couldn't parse the answer as single or multiple pods: {0}")]
    Parse(String),
}

/// Calls `changed` with all pods after every change. Never returns.
pub async fn follow(
    server: ManifestUrl,
    period: Duration,
    node_name: String,
    changed: impl Fn(BTreeMap<String, Pod>),
) {
    let mut last: Option<Bytes> = None;
    let mut failures: u32 = 0;
    loop {
        match ask(&server).await {
            Ok(body) if last.as_ref() == Some(&body) => failures = 0,
            Ok(body) => match pods(&body, &server.url, &node_name) {
                Ok(pods) => {
                    changed(pods);
                    (last, failures) = (Some(body), 0);
                }
                Err(error) => tell(&server, &error, &mut failures),
            },
            Err(error) => tell(&server, &error, &mut failures),
        }
        tokio::time::sleep(period).await;
    }
}

/// Upstream: after some failures, they are details.
fn tell(server: &ManifestUrl, error: &Error, failures: &mut u32) {
    *failures += 1;
    if *failures <= 3 {
        tracing::warn!(url = server.url, %error, "failed to read pods from the URL");
    } else {
        tracing::debug!(url = server.url, %error, "failed to read pods from the URL");
    }
}

async fn ask(server: &ManifestUrl) -> Result<Bytes, Error> {
    let asked = async {
        let mut request = Request::get(&server.url);
        for (name, value) in &server.headers {
            request = request.header(name, value);
        }
        let client = HttpClient::new(&ClientOptions::default())?;
        let response = client.request(request.body(Empty::<Bytes>::new())?).await?;
        if response.status() != StatusCode::OK {
            return Err(Error::Status(response.status()));
        }
        let body = Limited::new(response.into_body(), LIMIT).collect().await;
        let body = body.map_err(|error| Error::Body(error.to_string()))?.to_bytes();
        if body.is_empty() { Err(Error::Empty) } else { Ok(body) }
    };
    tokio::time::timeout(PATIENCE, asked).await.map_err(|_| Error::Silence)?
}

/// The pods of an answer, by uid.
fn pods(body: &[u8], url: &str, node_name: &str) -> Result<BTreeMap<String, Pod>, Error> {
    let text = std::str::from_utf8(body).map_err(|error| Error::Parse(error.to_string()))?;
    let mut value: Value =
        serde_saphyr::from_str(text).map_err(|error| Error::Parse(error.to_string()))?;
    let all = match value["kind"].as_str() {
        Some("PodList" | "List") => {
            value["items"].as_array_mut().map(std::mem::take).unwrap_or_default()
        }
        _ => vec![value],
    };
    let mut out = BTreeMap::new();
    for mut one in all {
        // Items of a list do not repeat their type.
        if let Value::Object(fields) = &mut one {
            fields.entry("kind").or_insert("Pod".into());
            fields.entry("apiVersion").or_insert("v1".into());
        }
        let pod = of_value(one, Source::Http, &format!("url:{url}"), node_name);
        let pod = pod.map_err(|error| Error::Parse(error.to_string()))?;
        out.insert(names::uid(&pod).to_owned(), pod);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
        "spec": {"containers": [{"name": "c", "image": "x"}]}}"#;

    #[test]
    fn answers_are_a_pod_or_a_list() {
        let names = |text: &str| -> Vec<String> {
            let all = pods(text.as_bytes(), "http://s/p", "n").expect("pods");
            all.values().map(|pod| names::name(pod).to_owned()).collect()
        };
        assert_eq!(names(ONE), ["a-n"]);
        let item = r#"{"metadata": {"name": "b"}, "spec": {"containers": [{"name": "c"}]}}"#;
        let list = format!(r#"{{"apiVersion": "v1", "kind": "PodList", "items": [{item}]}}"#);
        assert_eq!(names(&list), ["b-n"]);
        let empty = r#"{"apiVersion": "v1", "kind": "PodList", "items": []}"#;
        assert_eq!(names(empty), [""; 0]);
        assert!(pods(b"kind: Service\napiVersion: v1", "u", "n").is_err());
        let pod = pods(ONE.as_bytes(), "http://s/p", "n").expect("a pod");
        let pod = pod.values().next().expect("one");
        assert_eq!(names::annotation(pod, names::CONFIG_SOURCE), Some("http"));
    }

    #[tokio::test]
    async fn a_server_is_asked_with_the_headers() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}/pods", listener.local_addr().expect("an address"));
        let serving = async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut asked = vec![0; 4096];
            let count = stream.read(&mut asked).await.expect("a request");
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{ONE}", ONE.len());
            stream.write_all(answer.as_bytes()).await.expect("written");
            String::from_utf8_lossy(&asked[..count]).to_lowercase()
        };
        let headers = vec![("X-Token".to_owned(), "secret".to_owned())];
        let server = ManifestUrl { url, headers };
        let (asked, body) = tokio::join!(serving, ask(&server));
        assert!(asked.starts_with("get /pods") && asked.contains("x-token: secret"), "{asked}");
        assert_eq!(pods(&body.expect("an answer"), &server.url, "n").expect("pods").len(), 1);
    }
}
