//! The syntax of names, labels and annotations, with upstream's error texts
//! (`k8s.io/apimachinery/pkg/util/validation`).

const DNS1123_LABEL: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const DNS1123_SUBDOMAIN: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const DNS1035_LABEL: &str = "[a-z]([-a-z0-9]*[a-z0-9])?";
const QUALIFIED: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";

fn lower_alnum(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit()
}

fn label_shaped(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(|c| lower_alnum(c) || c == '-')
        && text.starts_with(lower_alnum)
        && text.ends_with(lower_alnum)
}

/// Upstream has two words for the unit: `bytes` in errors about labels, `characters` in all others.
fn too_long(limit: usize) -> String {
    format!("must be no more than {limit} characters")
}

fn too_many_bytes(limit: usize) -> String {
    format!("must be no more than {limit} bytes")
}

/// Errors of a DNS-1123 label (namespaces, container names); empty if it is valid.
pub fn dns1123_label(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > 63 {
        wrong.push(too_long(63));
    }
    if !label_shaped(text) {
        let subdomain = text.split('.').count() > 1 && text.split('.').all(label_shaped);
        wrong.push(if subdomain {
            "must not contain dots".into()
        } else {
            format!("a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '{DNS1123_LABEL}')")
        });
    }
    wrong
}

/// Errors of a DNS-1123 subdomain (most object names).
pub fn dns1123_subdomain(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > 253 {
        wrong.push(too_long(253));
    }
    if !text.split('.').all(label_shaped) {
        wrong.push(format!("a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '{DNS1123_SUBDOMAIN}')"));
    }
    wrong
}

/// Errors of a DNS-1035 label (Service names).
pub fn dns1035_label(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > 63 {
        wrong.push(too_long(63));
    }
    if !(label_shaped(text) && text.starts_with(|c: char| c.is_ascii_lowercase())) {
        wrong.push(format!("a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '{DNS1035_LABEL}')"));
    }
    wrong
}

/// Errors of a name that is used as a path segment (RBAC objects).
pub fn path_segment(text: &str) -> Vec<String> {
    if text == "." || text == ".." {
        return vec![format!("may not be '{text}'")];
    }
    let mut wrong = vec![];
    for forbidden in ['/', '%'] {
        if text.contains(forbidden) {
            wrong.push(format!("may not contain '{forbidden}'"));
        }
    }
    wrong
}

fn qualified_shaped(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
}

/// Errors of a label's or annotation's key.
pub fn qualified_name(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    let (prefix, name) = match text.split_once('/') {
        None => (None, text),
        Some((_, rest)) if rest.contains('/') => {
            return vec![format!(
                "a valid label key must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{QUALIFIED}') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
        Some((prefix, name)) => (Some(prefix), name),
    };
    match prefix {
        Some("") => wrong.push("prefix part must be non-empty".into()),
        Some(prefix) => {
            wrong.extend(dns1123_subdomain(prefix).into_iter().map(|text| {
                format!(
                    "prefix part {}",
                    if text == too_long(253) { too_many_bytes(253) } else { text }
                )
            }));
        }
        None => {}
    }
    if name.is_empty() {
        wrong.push("name part must be non-empty".into());
    } else if name.len() > 63 {
        wrong.push(format!("name part {}", too_many_bytes(63)));
    }
    if !qualified_shaped(name) {
        wrong.push(format!("name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{QUALIFIED}')"));
    }
    wrong
}

/// Errors of a label's value.
pub fn label_value(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > 63 {
        wrong.push(too_many_bytes(63));
    }
    if !text.is_empty() && !qualified_shaped(text) {
        wrong.push("a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')".into());
    }
    wrong
}

/// Errors of a DNS-1123 subdomain whose labels may have underscores (DNS search paths).
pub fn dns1123_subdomain_with_underscore(text: &str) -> Vec<String> {
    let label = |label: &str| {
        let rest = label.strip_prefix('_').unwrap_or(label);
        !rest.is_empty()
            && rest.chars().all(|c| lower_alnum(c) || c == '-' || c == '_')
            && rest.starts_with(lower_alnum)
            && rest.ends_with(lower_alnum)
    };
    let mut wrong = vec![];
    if text.len() > 253 {
        wrong.push(too_long(253));
    }
    if !text.split('.').all(label) {
        wrong.push("a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '_', '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '_?[a-z0-9]([-_a-z0-9]*[a-z0-9])?(\\._?[a-z0-9]([-_a-z0-9]*[a-z0-9])?)*')".into());
    }
    wrong
}

/// Errors of a wildcard name such as `*.example.com`.
pub fn wildcard_subdomain(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > 253 {
        wrong.push(too_long(253));
    }
    if !text.strip_prefix("*.").is_some_and(|rest| rest.split('.').all(label_shaped)) {
        wrong.push(format!("a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, which must consist of lower case alphanumeric characters, '-' or '.' and end with an alphanumeric character (e.g. '*.example.com', regex used for validation is '\\*\\.{DNS1123_SUBDOMAIN}')"));
    }
    wrong
}

/// Errors of a port's name (`IANA_SVC_NAME`).
pub fn port_name(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > 15 {
        wrong.push(too_long(15));
    }
    if text.is_empty() || !text.chars().all(|c| lower_alnum(c) || c == '-') {
        wrong.push("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".into());
    }
    if !text.contains(|c: char| c.is_ascii_lowercase()) {
        wrong.push("must contain at least one letter (a-z)".into());
    }
    if text.contains("--") {
        wrong.push("must not contain consecutive hyphens".into());
    }
    if text.starts_with('-') || text.ends_with('-') {
        wrong.push("must not begin or end with a hyphen".into());
    }
    wrong
}

/// Errors of a port's number.
pub fn port_number(port: i64) -> Option<&'static str> {
    (!(1..=65535).contains(&port)).then_some("must be between 1 and 65535, inclusive")
}

/// Errors of a percentage such as `50%`.
pub fn percent(text: &str) -> Vec<String> {
    let digits = text.strip_suffix('%').unwrap_or_default();
    if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return vec![];
    }
    vec!["a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')".into()]
}

/// Errors of an HTTP header's name.
pub fn http_header_name(text: &str) -> Vec<String> {
    if !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
        return vec![];
    }
    vec!["a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex used for validation is '[-A-Za-z0-9]+')".into()]
}

/// Errors of an environment variable's name.
pub fn env_var_name(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.is_empty() {
        wrong.push("environment variable name must be non-empty".into());
    }
    if text.chars().any(|c| !(' '..='~').contains(&c) || c == '=') {
        wrong.push("a valid environment variable name must consist only of printable ASCII characters other than '='".into());
    }
    wrong
}

/// Errors of a key of a ConfigMap or Secret.
pub fn config_map_key(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > 253 {
        wrong.push(too_long(253));
    }
    if text.is_empty() || !text.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)) {
        wrong.push("a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')".into());
    }
    match text {
        "." => wrong.push("must not be '.'".into()),
        ".." => wrong.push("must not be '..'".into()),
        _ if text.starts_with("..") => wrong.push("must not start with '..'".into()),
        _ => {}
    }
    wrong
}

/// Errors of a C identifier.
pub fn c_identifier(text: &str) -> Vec<String> {
    let starts = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if starts && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return vec![];
    }
    vec!["a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is '[A-Za-z_][A-Za-z0-9_]*')".into()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_judged_as_upstream_does() {
        type Judge = fn(&str) -> Vec<String>;
        let good: [(Judge, &str); 5] = [
            (dns1123_label, "a-1"),
            (dns1123_subdomain, "a.b-c.d"),
            (dns1035_label, "web"),
            (qualified_name, "example.com/My_name"),
            (label_value, ""),
        ];
        for (check, text) in good {
            assert!(check(text).is_empty(), "{text}: {:?}", check(text));
        }
        let bad: [(Judge, &str); 6] = [
            (dns1123_label, "a.b"),
            (dns1123_subdomain, "A"),
            (dns1035_label, "1web"),
            (qualified_name, "/x"),
            (label_value, "-"),
            (path_segment, "a/b"),
        ];
        for (check, text) in bad {
            assert!(!check(text).is_empty(), "{text}");
        }
    }
}
