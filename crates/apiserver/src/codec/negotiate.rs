//! Content negotiation: the representation that `Accept` requests, as upstream understands it.
//!
//! In: the `Accept` header, the query. Out: an [`Accept`], or upstream's 406. Clauses are tried by their
//! `q`, then in order; the first that the server can serve wins.

use http::HeaderMap;
use http::header::{ACCEPT, USER_AGENT};
use machinery::StatusError;
use machinery::status::Reason;

use super::cbor;
use super::protobuf::{self, Protobuf};
use crate::query::Query;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Media {
    Json,
    Yaml,
    Protobuf(Protobuf),
    Cbor,
}

impl Media {
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Yaml => "application/yaml",
            Self::Protobuf(_) => protobuf::MEDIA_TYPE,
            Self::Cbor => cbor::MEDIA_TYPE,
        }
    }
}

/// The kind in which an object is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum As {
    Itself,
    /// `meta.k8s.io/v1` or `v1beta1`.
    Table(&'static str),
    PartialObjectMetadata(&'static str),
    PartialObjectMetadataList(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accept {
    pub media: Media,
    pub shown_as: As,
    pub pretty: bool,
    /// The encoding of errors, which are never converted: the accepted one, else JSON.
    pub of_errors: Media,
}

impl Accept {
    pub const JSON: Self =
        Self { media: Media::Json, shown_as: As::Itself, pretty: false, of_errors: Media::Json };
}

/// What a route serves: lists can be watched, and go-restful's messages depend on that.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    Object,
    List,
    /// The answer to a review or an action, which has no Table form.
    Answer,
}

/// One clause of an `Accept` header.
pub struct Clause<'a> {
    pub media: &'a str,
    params: Vec<(&'a str, &'a str)>,
    q: f32,
}

impl Clause<'_> {
    pub fn param(&self, name: &str) -> Option<&str> {
        self.params.iter().find(|(key, _)| *key == name).map(|(_, value)| *value)
    }
}

/// The clauses by descending `q`, equal ones in order. No header means `*/*`.
pub fn clauses(headers: &HeaderMap) -> Vec<Clause<'_>> {
    let texts = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut clauses: Vec<Clause<'_>> =
        texts.flat_map(|text| text.split(',')).filter_map(parse_clause).collect();
    if clauses.is_empty() {
        clauses.push(Clause { media: "*/*", params: vec![], q: 1.0 });
    }
    clauses.sort_by(|a, b| b.q.total_cmp(&a.q));
    clauses
}

fn parse_clause(text: &str) -> Option<Clause<'_>> {
    let mut parts = text.split(';').map(str::trim);
    let media = parts.next().filter(|media| !media.is_empty())?;
    let mut clause = Clause { media, params: vec![], q: 1.0 };
    for part in parts {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let (key, value) = (key.trim(), value.trim().trim_matches('"'));
        match key {
            "q" => clause.q = value.parse().unwrap_or(1.0),
            _ => clause.params.push((key, value)),
        }
    }
    Some(clause)
}

/// What can be encoded in protobuf: nothing, everything, or only the metadata of kinds without messages.
#[derive(Clone, Copy)]
pub enum Messages {
    None,
    All(Protobuf),
    Metadata(Protobuf),
}

/// The encodings of a route in addition to JSON and YAML.
#[derive(Clone, Copy)]
pub struct Speaks {
    pub protobuf: Messages,
    /// For resources, and for discovery of a version.
    pub cbor: bool,
}

impl Speaks {
    pub const TEXT: Self = Self { protobuf: Messages::None, cbor: false };

    fn media(self, name: &str, shown_as: As) -> Option<Media> {
        match name {
            "*/*" | "application/json" => Some(Media::Json),
            "application/yaml" => Some(Media::Yaml),
            protobuf::MEDIA_TYPE => self.messages(shown_as),
            cbor::MEDIA_TYPE if self.cbor && !matches!(shown_as, As::Table(_)) => Some(Media::Cbor),
            _ => None,
        }
    }

    /// Tables have no messages (and no CBOR form).
    fn messages(self, shown_as: As) -> Option<Media> {
        match (self.protobuf, shown_as) {
            (Messages::None, _) | (_, As::Table(_)) | (Messages::Metadata(_), As::Itself) => None,
            (Messages::All(protobuf) | Messages::Metadata(protobuf), _) => {
                Some(Media::Protobuf(protobuf))
            }
        }
    }

    /// Whether the router accepts the type. It also accepts the watch types, which no client can request.
    fn is_routed(self, name: &str, offer: Offer) -> bool {
        name == protobuf::MEDIA_TYPE
            || (name == cbor::SEQUENCE && self.cbor && offer == Offer::List)
            || self.media(name, As::Itself).is_some()
    }
}

const TYPES: &str = "application/json, application/yaml, application/vnd.kubernetes.protobuf";

pub fn negotiate(
    headers: &HeaderMap,
    query: &Query,
    offer: Offer,
    speaks: Speaks,
) -> Result<Accept, StatusError> {
    let clauses = clauses(headers);
    if !clauses.iter().any(|clause| speaks.is_routed(clause.media, offer)) {
        return Err(not_routed(offer, speaks));
    }
    choose(headers, query, offer, speaks)
}

/// The same for custom resources, which upstream's router does not know.
pub fn choose(
    headers: &HeaderMap,
    query: &Query,
    offer: Offer,
    speaks: Speaks,
) -> Result<Accept, StatusError> {
    let clauses = clauses(headers);
    for clause in &clauses {
        let Some(shown_as) = shown_as(clause) else { continue };
        if offer == Offer::Answer && matches!(shown_as, As::Table(_)) {
            continue;
        }
        let Some(media) = speaks.media(clause.media, shown_as) else { continue };
        let pretty = match clause.param("pretty") {
            Some(value) => value == "1" || value == "true",
            None => wants_pretty(headers, query),
        };
        let itself = |clause: &Clause<'_>| {
            let is_itself = clause.param("as").is_none();
            is_itself.then(|| speaks.media(clause.media, As::Itself)).flatten()
        };
        let of_errors = clauses.iter().find_map(itself).unwrap_or(Media::Json);
        return Ok(Accept { media, shown_as, pretty, of_errors });
    }
    let types = cbor::listed(speaks.cbor, TYPES, cbor::MEDIA_TYPE);
    let message = format!("only the following media types are accepted: {types}");
    Err(StatusError::new(Reason::NotAcceptable, message).without_details())
}

fn not_routed(offer: Offer, speaks: Speaks) -> StatusError {
    let types = cbor::listed(speaks.cbor, TYPES, cbor::MEDIA_TYPE);
    let mut message = format!("406: Not Acceptable\n\nAvailable representations: {types}");
    if offer == Offer::List {
        const WATCHES: &str =
            "application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch";
        message.push_str(", ");
        message.push_str(&cbor::listed(speaks.cbor, WATCHES, cbor::SEQUENCE));
    }
    StatusError::new(Reason::NotAcceptable, message)
}

/// `None`: the clause requests a kind in which no object can be shown.
fn shown_as(clause: &Clause<'_>) -> Option<As> {
    let Some(kind) = clause.param("as") else { return Some(As::Itself) };
    if clause.param("g") != Some("meta.k8s.io") {
        return None;
    }
    let version = match clause.param("v") {
        Some("v1") => "meta.k8s.io/v1",
        Some("v1beta1") => "meta.k8s.io/v1beta1",
        _ => return None,
    };
    match kind {
        "Table" => Some(As::Table(version)),
        "PartialObjectMetadata" => Some(As::PartialObjectMetadata(version)),
        "PartialObjectMetadataList" => Some(As::PartialObjectMetadataList(version)),
        _ => None,
    }
}

/// If the query says so, or the client is curl, wget or a browser.
pub fn wants_pretty(headers: &HeaderMap, query: &Query) -> bool {
    if let Some(text) = query.first("pretty").filter(|text| !text.is_empty()) {
        return crate::query::parse_bool(text).unwrap_or(false);
    }
    let agent = headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default();
    ["curl", "Wget", "Mozilla/5.0"].iter().any(|person| agent.starts_with(person))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(accept: &str, expected: Option<(Media, As)>) {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, accept.parse().expect("a header value"));
        let got = negotiate(&headers, &Query::parse(""), Offer::Object, Speaks::TEXT).ok();
        assert_eq!(got.map(|accept| (accept.media, accept.shown_as)), expected, "{accept}");
    }

    #[test]
    fn cbor_is_an_additional_type() {
        const SPEAKS: Speaks = Speaks { cbor: true, ..Speaks::TEXT };
        let negotiated = |accept: &str, offer| {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, accept.parse().expect("a header value"));
            negotiate(&headers, &Query::parse(""), offer, SPEAKS)
        };
        for (accept, expected) in [
            ("application/json;q=0.9,application/cbor;q=1", Media::Cbor),
            ("application/json,application/cbor", Media::Json),
            ("application/cbor;as=PartialObjectMetadata;v=v1;g=meta.k8s.io", Media::Cbor),
            ("application/cbor;as=Table;v=v1;g=meta.k8s.io,application/json", Media::Json),
        ] {
            let got = negotiated(accept, Offer::Object).map(|accept| accept.media);
            assert_eq!(got.ok(), Some(expected), "{accept}");
        }
        for (offer, expected) in [
            (
                Offer::List,
                "only the following media types are accepted: application/json, application/yaml, application/vnd.kubernetes.protobuf, application/cbor",
            ),
            (
                Offer::Object,
                "406: Not Acceptable\n\nAvailable representations: application/json, application/yaml, application/vnd.kubernetes.protobuf, application/cbor",
            ),
        ] {
            let refused = negotiated("application/cbor-seq", offer).expect_err("of watches only");
            assert_eq!((refused.code, &*refused.message), (406, expected));
        }
    }

    #[test]
    fn answers_have_no_table() {
        for (accept, expected) in [
            ("application/json;as=Table;v=v1;g=meta.k8s.io", None),
            ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", Some(As::Itself)),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, accept.parse().expect("a header value"));
            let got = negotiate(&headers, &Query::parse(""), Offer::Answer, Speaks::TEXT);
            assert_eq!(got.ok().map(|accept| accept.shown_as), expected, "{accept}");
        }
    }

    #[test]
    fn the_first_that_can_be_served_wins() {
        check("application/json", Some((Media::Json, As::Itself)));
        check("*/*", Some((Media::Json, As::Itself)));
        check("application/*", None);
        check("text/html;q=0.9,application/json;q=0.1", Some((Media::Json, As::Itself)));
        check(
            "application/vnd.kubernetes.protobuf,application/json",
            Some((Media::Json, As::Itself)),
        );
        check("application/vnd.kubernetes.protobuf;as=Table;v=v1;g=meta.k8s.io", None);
        check("application/yaml", Some((Media::Yaml, As::Itself)));
        check(
            "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json",
            Some((Media::Json, As::Table("meta.k8s.io/v1"))),
        );
        check(
            "application/json;as=Zebra;v=v1;g=meta.k8s.io,application/json",
            Some((Media::Json, As::Itself)),
        );
    }
}
