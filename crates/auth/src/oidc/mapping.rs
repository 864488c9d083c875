//! Maps the claims of a verified token to a user, by claims' names or by expressions.
//!
//! In: claims, rules. Out: a user, or an error in upstream's words. Pure.

use apiserver::request::UserInfo;
use cel::{Budget, CompileError, EvalError, Object, Program, Type, Value};
use serde_json::{Map, Value as Json};

/// The cost limit of one expression.
const COST: u64 = 1_000_000;
const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";

pub type Claims = Map<String, Json>;

#[derive(Debug)]
pub struct Expression {
    pub text: String,
    pub program: Program,
}

/// The source of a field of the user.
#[derive(Debug, Default)]
pub enum Source {
    #[default]
    Absent,
    Claim {
        name: String,
        prefix: String,
    },
    Expression(Expression),
}

#[derive(Debug)]
pub struct Rule {
    pub expression: Expression,
    pub message: String,
}

#[derive(Debug, Default)]
pub struct Mapping {
    pub username: Source,
    pub groups: Source,
    pub uid: Source,
    pub extra: Vec<(String, Expression)>,
    /// Claims and their required values.
    pub required: Vec<(String, String)>,
    pub claim_rules: Vec<Rule>,
    pub user_rules: Vec<Rule>,
}

impl Expression {
    pub fn of_claims(text: &str) -> Result<Self, CompileError> {
        Self::new(text, "claims", Type::Map(Type::Dyn.into()))
    }

    pub fn of_user(text: &str) -> Result<Self, CompileError> {
        let texts = || Type::list(Type::String);
        let fields = [
            ("username", Type::String),
            ("uid", Type::String),
            ("groups", texts()),
            ("extra", Type::Map(texts().into())),
        ];
        let fields = fields.map(|(name, kind)| (name.to_owned(), kind)).into();
        let user = Object { name: "kubernetes.UserInfo".into(), fields, is_open: false };
        Self::new(text, "user", Type::Object(user.into()))
    }

    fn new(text: &str, name: &str, kind: Type) -> Result<Self, CompileError> {
        Ok(Self { text: text.to_owned(), program: cel::compile(text, &[(name, kind)])? })
    }

    /// The expression uses only one variable, so its name does not matter.
    fn evaluate(&self, value: &Value) -> Result<Value, String> {
        let outcome = self.program.evaluate(&|_| Some(value.clone()), &mut Budget::new(COST));
        outcome.map_err(|error| match error {
            EvalError::TooExpensive => error.to_string(),
            EvalError::Failed(why) => {
                format!("expression '{}' resulted in error: {why}", self.text)
            }
        })
    }
}

impl Mapping {
    pub fn user(&self, claims: &Claims) -> Result<UserInfo, String> {
        let value = Value::from_json(&Json::Object(claims.clone()), &Type::Dyn);
        let user = UserInfo {
            name: self.name(claims, &value)?,
            groups: self.groups(claims, &value)?,
            uid: self.uid(claims, &value)?,
            extra: self.extra(claims, &value)?,
        };
        for (name, wanted) in &self.required {
            let claim = claims
                .get(name)
                .ok_or_else(|| format!("oidc: required claim {name} not present in ID token"))?;
            let got = text(claim).map_err(|why| format!("oidc: parse claim {name}: {why}"))?;
            if got != *wanted {
                return Err(format!(
                    "oidc: required claim {name} value does not match. Got = {got}, want = {wanted}"
                ));
            }
        }
        check(&self.claim_rules, &value)
            .map_err(|why| format!("oidc: error evaluating claim validation expression: {why}"))?;
        check(&self.user_rules, &user_value(&user))
            .map_err(|why| format!("oidc: error evaluating user info validation rule: {why}"))?;
        Ok(user)
    }

    fn name(&self, claims: &Claims, value: &Value) -> Result<String, String> {
        let (name, prefix) = match &self.username {
            Source::Claim { name, prefix } => (name, prefix),
            Source::Absent => return Err("oidc: no username is mapped".into()),
            Source::Expression(expression) => {
                let failed = |why: String| {
                    format!("oidc: error evaluating username claim expression: {why}")
                };
                let name = expression.evaluate(value).map_err(failed)?;
                let name = name.as_str().ok_or_else(|| {
                    failed("username claim expression must return a string".into())
                })?;
                if name.is_empty() {
                    return Err("oidc: empty username via CEL expression is not allowed".into());
                }
                return Ok(name.to_owned());
            }
        };
        let claim = claims.get(name).ok_or("claim not present".to_owned()).and_then(text);
        let user = claim.map_err(|why| format!("oidc: parse username claims {name:?}: {why}"))?;
        if name == "email"
            && let Some(verified) = claims.get("email_verified")
        {
            match verified {
                Json::Bool(true) => {}
                Json::Bool(false) | Json::Null => return Err("oidc: email not verified".into()),
                other => {
                    let why = wrong_type(other, "bool");
                    return Err(format!("oidc: parse 'email_verified' claim: {why}"));
                }
            }
        }
        Ok(format!("{prefix}{user}"))
    }

    fn groups(&self, claims: &Claims, value: &Value) -> Result<Vec<String>, String> {
        match &self.groups {
            Source::Absent => Ok(vec![]),
            Source::Claim { name, prefix } => {
                let Some(claim) = claims.get(name) else { return Ok(vec![]) };
                let groups = one_or_many(claim)
                    .map_err(|why| format!("oidc: parse groups claim {name:?}: {why}"))?;
                Ok(groups.into_iter().map(|group| format!("{prefix}{group}")).collect())
            }
            Source::Expression(expression) => expression
                .evaluate(value)
                .and_then(|value| texts(&value))
                .map_err(|why| format!("oidc: error evaluating group claim expression: {why}")),
        }
    }

    fn uid(&self, claims: &Claims, value: &Value) -> Result<String, String> {
        match &self.uid {
            Source::Absent => Ok(String::new()),
            Source::Claim { name, .. } => {
                let claim = claims.get(name).ok_or("claim not present".to_owned()).and_then(text);
                claim.map_err(|why| format!("oidc: parse uid claim {name:?}: {why}"))
            }
            Source::Expression(expression) => {
                let outcome = expression.evaluate(value).and_then(|value| {
                    let uid = value.as_str().map(str::to_owned);
                    uid.ok_or_else(|| "uid claim expression must return a string".to_owned())
                });
                outcome.map_err(|why| format!("oidc: error evaluating uid claim expression: {why}"))
            }
        }
    }

    fn extra(
        &self,
        claims: &Claims,
        value: &Value,
    ) -> Result<std::collections::BTreeMap<String, Vec<String>>, String> {
        let id = claims.get("jti").and_then(Json::as_str).filter(|id| !id.is_empty());
        let id = id.map(|id| (CREDENTIAL_ID.to_owned(), vec![format!("JTI={id}")]));
        let mut extra: std::collections::BTreeMap<_, _> = id.into_iter().collect();
        for (key, expression) in &self.extra {
            let values = texts(&expression.evaluate(value)?).map_err(|why| {
                let text = &expression.text;
                format!("oidc: error evaluating extra claim expression: {text}: {why}")
            })?;
            if !values.is_empty() {
                extra.insert(key.clone(), values);
            }
        }
        Ok(extra)
    }
}

fn check(rules: &[Rule], value: &Value) -> Result<(), String> {
    for Rule { expression, message } in rules {
        match expression.evaluate(value)?.as_bool() {
            Some(true) => {}
            Some(false) => {
                let text = &expression.text;
                return Err(format!("validation expression '{text}' failed: {message}"));
            }
            None => return Err("validation expression must return a boolean".into()),
        }
    }
    Ok(())
}

fn user_value(user: &UserInfo) -> Value {
    let texts =
        |list: &[String]| Value::list(list.iter().map(|one| Value::string(one.as_str())).collect());
    let extra = user.extra.iter().map(|(key, values)| (key.clone(), texts(values)));
    Value::map([
        ("username".to_owned(), Value::string(user.name.as_str())),
        ("uid".to_owned(), Value::string(user.uid.as_str())),
        ("groups".to_owned(), texts(&user.groups)),
        ("extra".to_owned(), Value::map(extra)),
    ])
}

/// A claim as a string; like in Go, null is the empty string.
fn text(claim: &Json) -> Result<String, String> {
    match claim {
        Json::String(text) => Ok(text.clone()),
        Json::Null => Ok(String::new()),
        other => Err(wrong_type(other, "string")),
    }
}

fn one_or_many(claim: &Json) -> Result<Vec<String>, String> {
    match claim {
        Json::Array(items) if items.iter().all(|item| item.is_string() || item.is_null()) => {
            items.iter().map(text).collect()
        }
        Json::Null => Ok(vec![]),
        other => Ok(vec![text(other)?]),
    }
}

/// The result of an expression as a list: from a string, strings, or nothing. Empty strings are dropped.
fn texts(value: &Value) -> Result<Vec<String>, String> {
    const WRONG: &str = "expression must return a string or a list of strings";
    let items = match value {
        Value::Null => return Ok(vec![]),
        Value::List(items, _) => &items[..],
        one => std::slice::from_ref(one),
    };
    let all: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
    let all = all.ok_or(WRONG)?;
    Ok(all.into_iter().filter(|one| !one.is_empty()).map(str::to_owned).collect())
}

fn wrong_type(value: &Json, wanted: &str) -> String {
    let kind = match value {
        Json::Null => "null",
        Json::Bool(_) => "bool",
        Json::Number(_) => "number",
        Json::String(_) => "string",
        Json::Array(_) => "array",
        Json::Object(_) => "object",
    };
    format!("json: cannot unmarshal {kind} into Go value of type {wanted}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::config::AuthenticationConfiguration;
    use super::*;

    /// A user as text, or the error.
    fn shown(rules: &str, claims: Json) -> String {
        let text = format!(
            "{{apiVersion: apiserver.config.k8s.io/v1, kind: AuthenticationConfiguration, \
             jwt: [{{issuer: {{url: 'https://a', audiences: [x]}}, {rules}}}]}}"
        );
        let config = AuthenticationConfiguration::parse(&text).expect("parses");
        let checked = config.check(&[]).expect("is right");
        let Json::Object(claims) = claims else { panic!("claims are an object") };
        match checked[0].mapping.user(&claims) {
            Ok(user) => {
                format!("{} [{}] {} {:?}", user.name, user.groups.join(","), user.uid, user.extra)
            }
            Err(why) => why,
        }
    }

    #[test]
    fn claims_become_users() {
        let by_claim = "claimMappings: {username: {claim: email, prefix: 'o:'}, groups: {claim: groups, prefix: 'g:'}}";
        let check = |rules: &str, claims: Json, expected: &str| {
            assert_eq!(shown(rules, claims), expected);
        };
        check(by_claim, json!({"email": "a@b"}), "o:a@b []  {}");
        check(by_claim, json!({"email": "a@b", "groups": "x"}), "o:a@b [g:x]  {}");
        check(
            by_claim,
            json!({"email": "a@b", "groups": ["x", "y"], "jti": "7"}),
            "o:a@b [g:x,g:y]  {\"authentication.kubernetes.io/credential-id\": [\"JTI=7\"]}",
        );
        check(
            by_claim,
            json!({"email": "a@b", "email_verified": false}),
            "oidc: email not verified",
        );
        check(
            by_claim,
            json!({"email": 7}),
            "oidc: parse username claims \"email\": json: cannot unmarshal number into Go value of type string",
        );
        check(by_claim, json!({}), "oidc: parse username claims \"email\": claim not present");
        check(
            by_claim,
            json!({"email": "a", "groups": [1]}),
            "oidc: parse groups claim \"groups\": json: cannot unmarshal array into Go value of type string",
        );
    }

    #[test]
    fn expressions_become_users() {
        let rules = "claimMappings: {username: {expression: '\"x:\" + claims.sub'}, \
            groups: {expression: 'claims.roles.filter(r, r != \"\")'}, uid: {expression: 'claims.uid'}, \
            extra: [{key: acme.io/t, valueExpression: 'claims.?tenant.orValue(\"\")'}]}, \
            claimValidationRules: [{expression: 'claims.exp - claims.iat <= 60', message: too long}, {claim: hd, requiredValue: acme}], \
            userValidationRules: [{expression: '!user.username.startsWith(\"x:system:\")', message: reserved}]";
        let claims = |sub: &str, exp: i64, hd: &str| json!({"sub": sub, "roles": ["a", "", "b"], "uid": "u", "exp": exp, "iat": 0, "hd": hd, "tenant": "t"});
        let check = |claims: Json, expected: &str| assert_eq!(shown(rules, claims), expected);
        check(claims("jane", 60, "acme"), "x:jane [a,b] u {\"acme.io/t\": [\"t\"]}");
        check(
            claims("jane", 61, "acme"),
            "oidc: error evaluating claim validation expression: validation expression 'claims.exp - claims.iat <= 60' failed: too long",
        );
        check(
            claims("jane", 60, "other"),
            "oidc: required claim hd value does not match. Got = other, want = acme",
        );
        check(
            claims("system:admin", 60, "acme"),
            "oidc: error evaluating user info validation rule: validation expression '!user.username.startsWith(\"x:system:\")' failed: reserved",
        );
        check(
            json!({"roles": []}),
            "oidc: error evaluating username claim expression: expression '\"x:\" + claims.sub' resulted in error: no such key: sub",
        );
    }
}
