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

fn too_long(limit: usize) -> String {
    format!("must be no more than {limit} bytes")
}

/// What is wrong with a DNS-1123 label (namespaces, container names); empty if nothing.
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

/// What is wrong with a DNS-1123 subdomain (most object names).
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

/// What is wrong with a DNS-1035 label (Service names).
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

/// What is wrong with a name used as a path segment (RBAC objects).
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

/// What is wrong with a label or annotation key.
pub fn qualified_name(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    let (prefix, name) = match text.split_once('/') {
        None => (None, text),
        Some((_, rest)) if rest.contains('/') => {
            return vec![format!(
                "a qualified name must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{QUALIFIED}') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
        Some((prefix, name)) => (Some(prefix), name),
    };
    match prefix {
        Some("") => wrong.push("prefix part must be non-empty".into()),
        Some(prefix) => {
            wrong.extend(
                dns1123_subdomain(prefix).into_iter().map(|text| format!("prefix part {text}")),
            );
        }
        None => {}
    }
    if name.is_empty() {
        wrong.push("name part must be non-empty".into());
    } else if name.len() > 63 {
        wrong.push(format!("name part {}", too_long(63)));
    }
    if !qualified_shaped(name) {
        wrong.push(format!("name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{QUALIFIED}')"));
    }
    wrong
}

/// What is wrong with a label's value.
pub fn label_value(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > 63 {
        wrong.push(too_long(63));
    }
    if !text.is_empty() && !qualified_shaped(text) {
        wrong.push("a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')".into());
    }
    wrong
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
