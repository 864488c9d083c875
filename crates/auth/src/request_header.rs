//! Users from a trusted front proxy, by `X-Remote-User` and similar headers. Aggregated API servers
//! authenticate requests this way. The client certificate must come from the front-proxy CA, otherwise
//! the headers are ignored.

use apiserver::StatusError;
use apiserver::authn::Authenticator;
use apiserver::request::{UserInfo, header_text};
use async_trait::async_trait;
use base::percent;
use http::HeaderMap;
use http::request::Parts;
use transport::tls::{ChainVerifier, TlsError};

use crate::x509::{peer_chain, verified_leaf};

/// The headers with the user, in lower case. Among several names and uids, the first one counts.
#[derive(Clone, Debug)]
pub struct Headers {
    pub user: Vec<String>,
    pub uid: Vec<String>,
    pub group: Vec<String>,
    pub extra_prefix: Vec<String>,
}

impl Default for Headers {
    fn default() -> Self {
        let one = |name: &str| vec![name.to_owned()];
        Self {
            user: one("x-remote-user"),
            uid: one("x-remote-uid"),
            group: one("x-remote-group"),
            extra_prefix: one("x-remote-extra-"),
        }
    }
}

pub struct RequestHeader {
    verifier: ChainVerifier,
    /// The accepted common names; empty accepts all certificates of the CA.
    allowed_names: Vec<String>,
    headers: Headers,
}

impl RequestHeader {
    pub fn new(ca_pem: &str, allowed_names: Vec<String>) -> Result<Self, TlsError> {
        Self::with_headers(ca_pem, allowed_names, Headers::default())
    }

    pub fn with_headers(
        ca_pem: &str,
        allowed_names: Vec<String>,
        mut headers: Headers,
    ) -> Result<Self, TlsError> {
        let Headers { user, uid, group, extra_prefix } = &mut headers;
        for name in [user, uid, group, extra_prefix].into_iter().flatten() {
            name.make_ascii_lowercase();
        }
        Ok(Self { verifier: ChainVerifier::new(ca_pem)?, allowed_names, headers })
    }
}

#[async_trait]
impl Authenticator for RequestHeader {
    async fn authenticate(&self, request: &Parts) -> Result<Option<UserInfo>, StatusError> {
        let Some(name) = text(&request.headers, &self.headers.user) else { return Ok(None) };
        let Some(chain) = peer_chain(request).filter(|chain| !chain.is_empty()) else {
            return Ok(None);
        };
        let Ok(leaf) = verified_leaf(&self.verifier, &chain) else { return Ok(None) };
        if !self.allowed_names.is_empty() && !self.allowed_names.contains(&leaf.common_name) {
            return Err(StatusError::unauthorized());
        }
        Ok(Some(UserInfo {
            name,
            uid: text(&request.headers, &self.headers.uid).unwrap_or_default(),
            groups: all_texts(&request.headers, &self.headers.group),
            extra: self
                .headers
                .extra_prefix
                .iter()
                .flat_map(|prefix| extras(&request.headers, prefix))
                .collect(),
        }))
    }
}

/// The first nonempty value.
fn text(headers: &HeaderMap, names: &[String]) -> Option<String> {
    let values = names.iter().filter_map(|name| headers.get(name));
    values.map(|value| header_text(value).into_owned()).find(|value| !value.is_empty())
}

fn all_texts(headers: &HeaderMap, names: &[String]) -> Vec<String> {
    names.iter().flat_map(|name| texts(headers, name)).collect()
}

pub(crate) fn texts(headers: &HeaderMap, name: &str) -> Vec<String> {
    headers.get_all(name).into_iter().map(|value| header_text(value).into_owned()).collect()
}

/// Headers `<prefix><key>: <value>`; keys are percent-encoded where HTTP requires it. A key with invalid
/// encoding is used unchanged.
pub(crate) fn extras(
    headers: &HeaderMap,
    prefix: &str,
) -> std::collections::BTreeMap<String, Vec<String>> {
    let keys = headers.keys().filter_map(|name| name.as_str().strip_prefix(prefix).zip(Some(name)));
    keys.map(|(key, name)| (percent::decode_whole(key), texts(headers, name.as_str()))).collect()
}

#[cfg(test)]
mod tests {
    use apiserver::authn::PeerCertificates;
    use pki::{Authority, Component};

    use super::*;

    #[tokio::test]
    async fn only_the_front_proxys_headers_are_trusted() {
        let authority = Authority::generate("front-proxy-ca").expect("keys can be made");
        let other = Authority::generate("kubernetes").expect("keys can be made");
        let names = vec!["front-proxy-client".to_owned()];
        let authenticator = RequestHeader::new(authority.cert_pem(), names).expect("an authority");
        let check = async |signer: &Authority, expected: Option<&str>| {
            let issued = signer.issue(&Component::FrontProxyClient.profile()).expect("signs");
            let (mut parts, ()) = http::Request::builder()
                .header("X-Remote-User", "j\u{fc}rgen".as_bytes())
                .header("X-Remote-Group", "d\u{e9}v".as_bytes())
                .header("X-Remote-Group", "ops")
                .header("X-Remote-Extra-Example.com%2Fscope", "all")
                .header("X-Remote-Extra-A%2Fb%zz", "odd")
                .body(())
                .expect("a request")
                .into_parts();
            let chain = pki::certificates(issued.cert_pem.as_bytes()).expect("parses");
            let chain = chain.iter().map(|cert| cert.der().to_vec()).collect();
            parts.extensions.insert(PeerCertificates(chain));
            let got = authenticator.authenticate(&parts).await.expect("no wrong credentials");
            assert_eq!(got.as_ref().map(|user| user.name.as_str()), expected);
            if let Some(user) = got {
                assert_eq!(user.groups, ["d\u{e9}v", "ops"]);
                assert_eq!(user.extra["example.com/scope"], ["all"]);
                assert_eq!(user.extra["a%2fb%zz"], ["odd"]);
            }
        };
        check(&authority, Some("j\u{fc}rgen")).await;
        check(&other, None).await;
    }
}
