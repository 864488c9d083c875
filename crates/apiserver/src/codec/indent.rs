//! JSON for people: indented by two spaces, keys in their original order.

/// `json` must be valid; strings are copied unchanged.
pub fn indent(json: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(json.len() * 2);
    let mut depth = 0usize;
    let mut in_string = false;
    let mut escaped = false;
    let mut at = 0;
    while let Some(&byte) = json.get(at) {
        at += 1;
        if in_string {
            out.push(byte);
            in_string = escaped || byte != b'"';
            escaped = byte == b'\\' && !escaped;
            continue;
        }
        match byte {
            b'"' => {
                in_string = true;
                out.push(byte);
            }
            b'{' | b'[' if matches!(json.get(at), Some(b'}' | b']')) => {
                out.extend([byte, json[at]]);
                at += 1;
            }
            b'{' | b'[' => {
                out.push(byte);
                depth += 1;
                new_line(&mut out, depth);
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                new_line(&mut out, depth);
                out.push(byte);
            }
            b',' => {
                out.push(byte);
                new_line(&mut out, depth);
            }
            b':' => out.extend(b": "),
            b' ' | b'\n' | b'\r' | b'\t' => {}
            other => out.push(other),
        }
    }
    out
}

fn new_line(out: &mut Vec<u8>, depth: usize) {
    out.push(b'\n');
    out.extend(std::iter::repeat_n(b' ', depth * 2));
}

#[cfg(test)]
mod tests {
    #[test]
    fn indents_as_go_does() {
        let json = br#"{"a":{},"b":[1,"x,\"{"],"c":[]}"#;
        let expected = "{\n  \"a\": {},\n  \"b\": [\n    1,\n    \"x,\\\"{\"\n  ],\n  \"c\": []\n}";
        assert_eq!(String::from_utf8_lossy(&super::indent(json)), expected);
    }
}
