//! Links of HTML pages, made to lead through the proxy.
//!
//! In: a body of HTML. Out: the same with those attributes changed that hold URLs of the page's own
//! server. All other bytes pass unchanged as soon as no tag is open.
//! Upstream: `k8s.io/apimachinery/pkg/util/proxy.Transport`.
//!
//! Invariant: at most [`LONGEST_TAG`] bytes are held back. A longer tag passes unchanged.

use apiserver::resource::Body;
use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt;

const LONGEST_TAG: usize = 64 << 10;

/// Attributes that hold URLs.
const ATTRIBUTES: &[(&str, &[&str])] = &[
    ("a", &["href"]),
    ("applet", &["codebase"]),
    ("area", &["href"]),
    ("audio", &["src"]),
    ("base", &["href"]),
    ("blockquote", &["cite"]),
    ("body", &["background"]),
    ("button", &["formaction"]),
    ("command", &["icon"]),
    ("del", &["cite"]),
    ("embed", &["src"]),
    ("form", &["action"]),
    ("frame", &["longdesc", "src"]),
    ("head", &["profile"]),
    ("html", &["manifest"]),
    ("iframe", &["longdesc", "src"]),
    ("img", &["longdesc", "src", "usemap"]),
    ("input", &["src", "formaction", "usemap"]),
    ("ins", &["cite"]),
    ("link", &["href"]),
    ("object", &["classid", "codebase", "data", "usemap"]),
    ("q", &["cite"]),
    ("script", &["src"]),
    ("source", &["src"]),
    ("video", &["poster", "src"]),
];

/// The base of rewritten links.
pub(super) struct Links {
    /// The proxy's own path: `/api/v1/namespaces/NS/pods/NAME/proxy`.
    pub prefix: String,
    /// Names of the page's server.
    pub hosts: Vec<String>,
}

impl Links {
    /// The URL through the proxy; `None`: it stays unchanged.
    pub fn rewrite(&self, url: &str) -> Option<String> {
        let path = self.own_path(url)?;
        if !path.starts_with('/') || path.starts_with("//") {
            return None;
        }
        if path.starts_with(&self.prefix) {
            return Some(path.to_owned());
        }
        Some(format!("{}{path}", self.prefix))
    }

    /// Path and query of a URL of this server.
    fn own_path<'a>(&self, url: &'a str) -> Option<&'a str> {
        let behind = match url.split_once("://") {
            Some(("http" | "https", behind)) => behind,
            Some(_) => return Some(url),
            None => match url.strip_prefix("//") {
                Some(behind) => behind,
                None => return Some(url),
            },
        };
        let end = behind.find(['/', '?', '#']).unwrap_or(behind.len());
        let (host, path) = behind.split_at(end);
        self.hosts.iter().any(|own| own == host).then_some(path)
    }
}

/// The body with its links rewritten, as it streams.
pub(super) fn rewrite(body: Body, links: Links) -> Body {
    let rewriter = Rewriter { links, held: vec![], raw_until: None };
    let state = Some((body, rewriter));
    let pieces = futures::stream::unfold(state, |state| async move {
        let (mut body, mut rewriter) = state?;
        loop {
            match body.frame().await {
                None => return Some((Ok(Frame::data(rewriter.finish())), None)),
                Some(Err(error)) => return Some((Err(error), None)),
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    let out = rewriter.feed(&data);
                    if !out.is_empty() {
                        return Some((Ok(Frame::data(out)), Some((body, rewriter))));
                    }
                }
            }
        }
    });
    http_body_util::StreamBody::new(pieces).boxed_unsync()
}

struct Rewriter {
    links: Links,
    /// The beginning of a tag whose end has not come yet.
    held: Vec<u8>,
    /// Inside of an element whose content is no HTML, or of a comment: what ends it.
    raw_until: Option<&'static [u8]>,
}

impl Rewriter {
    fn feed(&mut self, data: &[u8]) -> Bytes {
        self.held.extend_from_slice(data);
        let held = std::mem::take(&mut self.held);
        let mut out = Vec::with_capacity(held.len() + 64);
        let mut at = 0;
        while at < held.len() {
            let rest = &held[at..];
            let (taken, is_open) = match self.raw_until {
                Some(end) => self.raw(rest, end, &mut out),
                None => self.markup(rest, &mut out),
            };
            at += taken;
            if is_open && held.len() - at <= LONGEST_TAG {
                break;
            }
            if is_open {
                out.extend_from_slice(&held[at..]);
                at = held.len();
            }
        }
        self.held = held[at..].to_vec();
        out.into()
    }

    fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.held).into()
    }

    /// Takes raw content up to its end; keeps what may be the beginning of the end.
    fn raw(&mut self, rest: &[u8], end: &'static [u8], out: &mut Vec<u8>) -> (usize, bool) {
        let found = rest.windows(end.len()).position(|one| one.eq_ignore_ascii_case(end));
        if let Some(found) = found {
            out.extend_from_slice(&rest[..found]);
            self.raw_until = None;
            // A comment's end is part of it; an element's is a tag of its own.
            let tail = if end == b"-->" { end.len() } else { 0 };
            out.extend_from_slice(&rest[found..found + tail]);
            if tail == 0 {
                // Not looked at again as the beginning of something raw.
                out.push(rest[found]);
                return (found + 1, false);
            }
            return (found + tail, false);
        }
        let safe = rest.len().saturating_sub(end.len() - 1);
        out.extend_from_slice(&rest[..safe]);
        (safe, true)
    }

    /// Takes text up to a tag, or a tag.
    fn markup(&mut self, rest: &[u8], out: &mut Vec<u8>) -> (usize, bool) {
        let Some(open) = rest.iter().position(|byte| *byte == b'<') else {
            out.extend_from_slice(rest);
            return (rest.len(), false);
        };
        out.extend_from_slice(&rest[..open]);
        let tag = &rest[open..];
        if tag.starts_with(b"<!--") {
            self.raw_until = Some(b"-->");
            out.extend_from_slice(b"<!--");
            return (open + 4, false);
        }
        if tag.len() < 4 && b"<!--".starts_with(tag) {
            return (open, true);
        }
        let Some(end) = tag_end(tag) else { return (open, true) };
        let tag = &tag[..=end];
        let name = tag_name(tag);
        match ATTRIBUTES.iter().find(|(known, _)| *known == name) {
            Some((_, attributes)) => write_tag(out, tag, attributes, &self.links),
            None => out.extend_from_slice(tag),
        }
        self.raw_until = match name.as_str() {
            "script" => Some(b"</script"),
            "style" => Some(b"</style"),
            "textarea" => Some(b"</textarea"),
            "title" => Some(b"</title"),
            _ => None,
        };
        (open + end + 1, false)
    }
}

/// The position of a tag's `>` outside of quotes.
fn tag_end(tag: &[u8]) -> Option<usize> {
    let mut quote = None;
    let mut before = b' ';
    for (at, byte) in tag.iter().enumerate() {
        match (quote, byte) {
            (None, b'>') => return Some(at),
            (None, b'"' | b'\'') if before == b'=' => quote = Some(*byte),
            (Some(open), byte) if open == *byte => quote = None,
            _ => {}
        }
        if !byte.is_ascii_whitespace() {
            before = *byte;
        }
    }
    None
}

/// The name in lower case; empty for end tags and declarations.
fn tag_name(tag: &[u8]) -> String {
    let name = tag[1..].iter().take_while(|byte| byte.is_ascii_alphanumeric());
    name.map(|byte| byte.to_ascii_lowercase() as char).collect()
}

/// Writes a tag; changed values of `attributes` are quoted again.
fn write_tag(out: &mut Vec<u8>, tag: &[u8], attributes: &[&str], links: &Links) {
    let mut at = 0;
    while let Some((name, value, end)) = next_attribute(tag, at) {
        let url = std::str::from_utf8(&tag[value.clone()]).ok();
        let url = url.filter(|_| attributes.contains(&name.as_str()));
        let quoted = value.start > 0 && matches!(tag[value.start - 1], b'"' | b'\'');
        match url.and_then(|url| links.rewrite(url.trim())) {
            Some(url) => {
                out.extend_from_slice(&tag[at..value.start]);
                let quote: &[u8] = if quoted { b"" } else { b"\"" };
                out.extend_from_slice(quote);
                out.extend_from_slice(url.as_bytes());
                out.extend_from_slice(quote);
                out.extend_from_slice(&tag[value.end..end]);
            }
            None => out.extend_from_slice(&tag[at..end]),
        }
        at = end;
    }
    out.extend_from_slice(&tag[at..]);
}

/// The next `name=value` from `at` on: its name, where the value is, where both end.
fn next_attribute(tag: &[u8], at: usize) -> Option<(String, std::ops::Range<usize>, usize)> {
    let equals = at + tag[at..].iter().position(|byte| *byte == b'=')?;
    let is_blank = |byte: &u8| byte.is_ascii_whitespace();
    let name_end =
        tag[at..equals].iter().rposition(|byte| !is_blank(byte)).map(|end| at + end + 1)?;
    let name_start = tag[at..name_end]
        .iter()
        .rposition(|byte| is_blank(byte) || matches!(byte, b'"' | b'\'' | b'/'))
        .map_or(at, |start| at + start + 1);
    let name = String::from_utf8_lossy(&tag[name_start..name_end]).to_ascii_lowercase();
    let start = equals + 1 + tag[equals + 1..].iter().position(|byte| !is_blank(byte))?;
    if let quote @ (b'"' | b'\'') = tag[start] {
        let length = tag[start + 1..].iter().position(|byte| *byte == quote)?;
        return Some((name, start + 1..start + 1 + length, start + length + 2));
    }
    let length = tag[start..].iter().position(|byte| is_blank(byte) || *byte == b'>')?;
    Some((name, start..start + length, start + length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links() -> Links {
        Links { prefix: "/p/proxy".into(), hosts: vec!["10.0.0.1:80".into(), "api:6443".into()] }
    }

    #[test]
    fn own_urls_lead_through_the_proxy() {
        for (url, expected) in [
            ("/x", Some("/p/proxy/x")),
            ("/x/?q#f", Some("/p/proxy/x/?q#f")),
            ("x", None),
            ("http://10.0.0.1:80/x", Some("/p/proxy/x")),
            ("https://api:6443/p/proxy/x", Some("/p/proxy/x")),
            ("http://elsewhere/x", None),
            ("//elsewhere/x", None),
            ("mailto:a@b", None),
            ("/p/proxy/x", Some("/p/proxy/x")),
        ] {
            assert_eq!(links().rewrite(url).as_deref(), expected, "{url}");
        }
    }

    #[test]
    fn pages_change_in_their_links_only() {
        for (page, expected) in [
            ("<a href=\"/rewriteme\">test</a>", "<a href=\"/p/proxy/rewriteme\">test</a>"),
            ("<A class=x HREF='/a'>", "<A class=x HREF='/p/proxy/a'>"),
            ("<img src=/a alt=\"/b\">", "<img src=\"/p/proxy/a\" alt=\"/b\">"),
            ("<p title=\"/x\">/y</p>", "<p title=\"/x\">/y</p>"),
            (
                "<!-- <a href=\"/x\"> --><a href=\"/y\">",
                "<!-- <a href=\"/x\"> --><a href=\"/p/proxy/y\">",
            ),
            (
                "<script src=\"/s\">w('<a href=\"/x\">')</script><a href='/y'>",
                "<script src=\"/p/proxy/s\">w('<a href=\"/x\">')</script><a href='/p/proxy/y'>",
            ),
            ("1 < 2 <a href=\"b\">", "1 < 2 <a href=\"b\">"),
            ("unfinished <a href=\"/x", "unfinished <a href=\"/x"),
        ] {
            // Whole, and byte by byte: where pieces end does not matter.
            for size in [page.len(), 1, 3] {
                let mut rewriter = Rewriter { links: links(), held: vec![], raw_until: None };
                let mut out = vec![];
                for piece in page.as_bytes().chunks(size) {
                    out.extend_from_slice(&rewriter.feed(piece));
                }
                out.extend_from_slice(&rewriter.finish());
                assert_eq!(String::from_utf8_lossy(&out), expected, "{size}");
            }
        }
    }
}
