//! Forwards a request to another server, and its answer back: kubelets, pods and Services, aggregated API
//! servers.
//!
//! In: a request, and its target address. Out: the answer as a stream. A task of the server copies the bytes
//! of upgraded connections without parsing them.
//! Upstream: `k8s.io/apimachinery/pkg/util/proxy.UpgradeAwareHandler`.

use base::task::Tasks;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, header};
use machinery::StatusError;
use transport::{ClientError, ConnectionInfo, HttpClient, Upgrade};

use crate::resource::Body;

/// Prefix of the WebSocket subprotocol in which browsers send a bearer token.
pub const WEBSOCKET_TOKEN: &str = "base64url.bearer.authorization.k8s.io.";
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The target, its credentials, and the client's error if it cannot be reached.
pub struct Onward<'a> {
    pub http: &'a HttpClient,
    pub uri: Uri,
    /// Added to the request's headers, or replaces them.
    pub headers: HeaderMap,
    pub failed: fn(ClientError) -> StatusError,
}

/// Forwards the request without its credentials and impersonation headers, which are for this server.
pub async fn relay(
    tasks: &Tasks,
    onward: Onward<'_>,
    mut request: Request<Body>,
) -> Result<Response<Body>, StatusError> {
    let Onward { http, uri, headers, failed } = onward;
    let upgrades = is_upgrade(request.headers());
    let mut outgoing = Request::builder()
        .method(request.method().clone())
        .uri(uri)
        .body(())
        .map_err(|error| StatusError::bad_request(error.to_string()))?;
    *outgoing.headers_mut() = passed_on(&request, upgrades);
    outgoing.headers_mut().extend(headers);
    if !upgrades {
        let body = std::mem::replace(request.body_mut(), transport::empty());
        let answer = http.request(outgoing.map(|()| body)).await.map_err(failed)?;
        let (mut parts, body) = answer.into_parts();
        drop_connection_headers(&mut parts.headers);
        return Ok(Response::from_parts(parts, transport::boxed(body)));
    }
    match http.upgrade(outgoing.map(|()| transport::empty())).await.map_err(failed)? {
        Upgrade::Refused(answer) => {
            let mut answer = answer.map(transport::full);
            drop_connection_headers(answer.headers_mut());
            Ok(answer)
        }
        Upgrade::Switched(parts, backend) => {
            let client = transport::server_io(&mut request);
            tasks.spawn_contained("a relayed stream", async move {
                match client.await {
                    // Either side may close the connection at any time: that is how streams end.
                    Ok(client) => drop(transport::forward(client, backend).await),
                    Err(error) => {
                        tracing::debug!(%error, "the client disconnected before its stream began");
                    }
                }
            });
            Ok(Response::from_parts(parts, transport::empty()))
        }
    }
}

fn is_upgrade(headers: &HeaderMap) -> bool {
    headers.contains_key(header::UPGRADE)
}

/// The headers for the target.
fn passed_on(request: &Request<Body>, upgrades: bool) -> HeaderMap {
    let mut headers = request.headers().clone();
    for name in
        [header::HOST, header::AUTHORIZATION, header::CONTENT_LENGTH, header::ACCEPT_ENCODING]
    {
        headers.remove(name);
    }
    let private = |name: &HeaderName| {
        name.as_str().starts_with("impersonate-") || name.as_str().starts_with("x-remote-")
    };
    let private: Vec<HeaderName> = headers.keys().filter(|name| private(name)).cloned().collect();
    for name in private {
        headers.remove(name);
    }
    remove_token(&mut headers);
    if !upgrades {
        drop_connection_headers(&mut headers);
    }
    let remote = request.extensions().get::<ConnectionInfo>().and_then(|info| info.remote);
    if let Some(remote) = remote {
        let before = headers.get(FORWARDED_FOR).and_then(|value| value.to_str().ok());
        let chain = before.map_or(String::new(), |before| format!("{before}, "));
        let value = HeaderValue::from_str(&format!("{chain}{}", remote.ip().to_canonical()));
        headers.insert(FORWARDED_FOR, value.expect("an address and what was a header"));
    }
    headers
}

/// Browsers send their token as a subprotocol, because they cannot set other headers.
pub(crate) fn remove_token(headers: &mut HeaderMap) {
    let offered = transport::ws::offered(headers);
    if !offered.iter().any(|one| one.starts_with(WEBSOCKET_TOKEN)) {
        return;
    }
    let kept: Vec<&str> =
        offered.into_iter().filter(|one| !one.starts_with(WEBSOCKET_TOKEN)).collect();
    let kept = kept.join(", ");
    headers.remove(header::SEC_WEBSOCKET_PROTOCOL);
    if let Some(kept) = HeaderValue::try_from(kept).ok().filter(|kept| !kept.is_empty()) {
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, kept);
    }
}

/// Removes the headers of one connection, and those that `Connection` names.
fn drop_connection_headers(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in [
        header::CONNECTION,
        header::UPGRADE,
        header::TRANSFER_ENCODING,
        header::TE,
        header::TRAILER,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
    ] {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hop_by_hop_headers_are_removed() {
        let request = Request::builder()
            .header("Authorization", "Bearer secret")
            .header("Impersonate-User", "a")
            .header("X-Remote-User", "root")
            .header("Connection", "x-this-hop, keep-alive")
            .header("X-This-Hop", "1")
            .header("Accept", "text/html")
            .header("X-Forwarded-For", "10.0.0.1")
            .body(transport::empty())
            .expect("a request");
        let headers = passed_on(&request, false);
        let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["accept", "x-forwarded-for"]);
    }

    #[test]
    fn tokens_of_browsers_are_removed() {
        let check = |sent: &[&str], expected: Option<&str>| {
            let mut request = Request::builder();
            for one in sent {
                request = request.header("Sec-WebSocket-Protocol", *one);
            }
            let headers = passed_on(&request.body(transport::empty()).expect("a request"), true);
            let got: Vec<_> = headers.get_all("Sec-WebSocket-Protocol").iter().collect();
            assert_eq!(got, expected.into_iter().collect::<Vec<_>>(), "{sent:?}");
        };
        let token = "base64url.bearer.authorization.k8s.io.YWJj";
        check(&[], None);
        check(&["v4.channel.k8s.io, chat"], Some("v4.channel.k8s.io, chat"));
        check(&[token], None);
        check(&["v4.channel.k8s.io", token, "chat"], Some("v4.channel.k8s.io, chat"));
        check(&[&format!("{token},chat")], Some("chat"));
    }
}
