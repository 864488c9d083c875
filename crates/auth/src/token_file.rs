//! `--token-auth-file`: a table of tokens and their users.
//!
//! ```text
//! token,user,uid,"group1,group2"
//! ```
//!
//! Upstream: `k8s.io/apiserver/pkg/authentication/token/tokenfile`.

use apiserver::request::UserInfo;

use crate::ConfigError;
use crate::tokens::StaticTokens;

/// `path` is for messages only.
pub fn parse(text: &str, path: &str) -> Result<StaticTokens, ConfigError> {
    let mut tokens = vec![];
    for (index, record) in records(text)?.into_iter().enumerate() {
        let number = index + 1;
        let [token, user, uid, rest @ ..] = &record[..] else {
            return Err(ConfigError::Columns { path: path.to_owned(), found: record.len() });
        };
        if token.is_empty() {
            tracing::warn!(path, number, "empty token has been found in token file");
            continue;
        }
        if tokens.iter().any(|(known, _)| known == token) {
            tracing::warn!(path, number, "duplicate token has been found in token file");
        }
        let groups = rest.first().filter(|groups| !groups.is_empty());
        let groups = groups.map(|groups| groups.split(',').map(str::to_owned).collect());
        let user = UserInfo {
            name: user.clone(),
            uid: uid.clone(),
            groups: groups.unwrap_or_default(),
            ..UserInfo::default()
        };
        tokens.push((token.clone(), user));
    }
    Ok(StaticTokens::new(tokens))
}

/// Comma-separated values according to RFC 4180: quotes inside of quotes are doubled.
fn records(text: &str) -> Result<Vec<Vec<String>>, ConfigError> {
    let mut records = vec![];
    for (index, line) in text.lines().enumerate() {
        if line.is_empty() {
            continue;
        }
        records.push(record(line).map_err(|why| ConfigError::Record { line: index + 1, why })?);
    }
    Ok(records)
}

fn record(line: &str) -> Result<Vec<String>, &'static str> {
    let (mut fields, mut rest) = (vec![], line);
    loop {
        let Some(quoted) = rest.strip_prefix('"') else {
            let (field, behind) = rest.split_once(',').map_or((rest, None), |(f, r)| (f, Some(r)));
            if field.contains('"') {
                return Err("bare \" in non-quoted-field");
            }
            fields.push(field.to_owned());
            match behind {
                Some(behind) => rest = behind,
                None => return Ok(fields),
            }
            continue;
        };
        let (mut field, mut tail) = (String::new(), quoted);
        let behind = loop {
            let (part, after) =
                tail.split_once('"').ok_or("extraneous or missing \" in quoted-field")?;
            field.push_str(part);
            match after.strip_prefix('"') {
                Some(more) => {
                    field.push('"');
                    tail = more;
                }
                None => break after,
            }
        };
        fields.push(field);
        match (behind, behind.strip_prefix(',')) {
            ("", _) => return Ok(fields),
            (_, Some(more)) => rest = more,
            _ => return Err("extraneous or missing \" in quoted-field"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::TokenAuthenticator;

    #[tokio::test]
    async fn rows_are_users() {
        let text = "t1,jane,u1\n\nt2,bob,u2,\"dev,ops\"\n,nobody,u3\nt4,\"o\"\"x\",,g,ignored\n";
        let tokens = parse(text, "f").expect("a file");
        let check = async |token: &str, expected: Option<&str>| {
            let found = tokens.recognize(token, &[]).await.expect("no error");
            let found = found.map(|found| {
                format!("{} {} {}", found.user.name, found.user.uid, found.user.groups.join(","))
            });
            assert_eq!(found.as_deref(), expected, "{token}");
        };
        check("t1", Some("jane u1 ")).await;
        check("t2", Some("bob u2 dev,ops")).await;
        check("t4", Some("o\"x  g")).await;
        check("", None).await;
        check("t3", None).await;
    }

    #[test]
    fn broken_files_are_refused() {
        let short =
            "token file 'f' must have at least 3 columns (token, user name, user uid), found 2";
        let refused = parse("a,b\n", "f").err().map(|why| why.to_string());
        assert_eq!(refused.as_deref(), Some(short));
        for bad in ["a,\"b,c\n", "a,b\"c,d\n", "a,\"b\"c,d\n"] {
            assert!(parse(bad, "f").is_err(), "{bad}");
        }
    }
}
