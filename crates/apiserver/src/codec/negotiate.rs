//! Which representation a client gets: what `Accept` asks for, as upstream understands it.
//!
//! In: the `Accept` header, the query. Out: an [`Accept`], or the 406 that upstream answers. Clauses
//! are tried by their `q`, then in the order given; the first that the server can serve wins.

use http::HeaderMap;
use http::header::{ACCEPT, USER_AGENT};
use machinery::StatusError;
use machinery::status::Reason;

use super::protobuf::{self, Protobuf};
use crate::query::Query;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Media {
    Json,
    Yaml,
    Protobuf(Protobuf),
}

impl Media {
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Yaml => "application/yaml",
            Self::Protobuf(_) => protobuf::MEDIA_TYPE,
        }
    }
}

/// The kind to show an object as.
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
}

impl Accept {
    pub const JSON: Self = Self { media: Media::Json, shown_as: As::Itself, pretty: false };
}

/// What a route can serve: lists can be watched, and go-restful tells so.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    Object,
    List,
    /// The answer to a question, or to an action: there is no Table of those.
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

/// The clauses by descending `q`, equal ones in the order given. None at all means `*/*`.
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

/// What speaks protobuf: nothing, everything, or just the metadata of objects without messages.
#[derive(Clone, Copy)]
pub enum Speaks {
    NoProtobuf,
    Protobuf(Protobuf),
    ProtobufOfMetadata(Protobuf),
}

impl Speaks {
    /// Tables have no messages at all.
    fn protobuf(self, shown_as: As) -> Option<Media> {
        match (self, shown_as) {
            (Self::NoProtobuf, _)
            | (_, As::Table(_))
            | (Self::ProtobufOfMetadata(_), As::Itself) => None,
            (Self::Protobuf(protobuf) | Self::ProtobufOfMetadata(protobuf), _) => {
                Some(Media::Protobuf(protobuf))
            }
        }
    }
}

pub fn negotiate(
    headers: &HeaderMap,
    query: &Query,
    offer: Offer,
    speaks: Speaks,
) -> Result<Accept, StatusError> {
    let clauses = clauses(headers);
    let media_of = |clause: &Clause<'_>, shown_as| match clause.media {
        "*/*" | "application/json" => Some(Media::Json),
        "application/yaml" => Some(Media::Yaml),
        protobuf::MEDIA_TYPE => speaks.protobuf(shown_as),
        _ => None,
    };
    let is_routed = |clause: &Clause<'_>| {
        clause.media == protobuf::MEDIA_TYPE || media_of(clause, As::Itself).is_some()
    };
    if !clauses.iter().any(is_routed) {
        return Err(not_routed(offer));
    }
    for clause in &clauses {
        let Some(shown_as) = shown_as(clause) else { continue };
        if offer == Offer::Answer && matches!(shown_as, As::Table(_)) {
            continue;
        }
        let Some(media) = media_of(clause, shown_as) else { continue };
        let pretty = match clause.param("pretty") {
            Some(value) => value == "1" || value == "true",
            None => wants_pretty(headers, query),
        };
        return Ok(Accept { media, shown_as, pretty });
    }
    Err(StatusError::new(
        Reason::NotAcceptable,
        "only the following media types are accepted: application/json, application/yaml, application/vnd.kubernetes.protobuf",
    ).without_details())
}

fn not_routed(offer: Offer) -> StatusError {
    let mut message = "406: Not Acceptable\n\nAvailable representations: application/json, application/yaml, application/vnd.kubernetes.protobuf".to_owned();
    if offer == Offer::List {
        message.push_str(
            ", application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch",
        );
    }
    StatusError::new(Reason::NotAcceptable, message)
}

/// `None`: the clause asks for a kind that no object can be shown as.
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

/// The query says so, or a person asks: curl, wget and browsers.
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
        let got = negotiate(&headers, &Query::parse(""), Offer::Object, Speaks::NoProtobuf).ok();
        assert_eq!(got.map(|accept| (accept.media, accept.shown_as)), expected, "{accept}");
    }

    #[test]
    fn answers_have_no_table() {
        for (accept, expected) in [
            ("application/json;as=Table;v=v1;g=meta.k8s.io", None),
            ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", Some(As::Itself)),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, accept.parse().expect("a header value"));
            let got = negotiate(&headers, &Query::parse(""), Offer::Answer, Speaks::NoProtobuf);
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
