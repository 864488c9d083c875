//! Which object: in a file, in a ConfigMap's list, in a path of the API.

use std::fmt;

use serde_json::Value;

/// An object's identity. Its text is one line: `apiVersion kind namespace/name`, without a namespace `apiVersion kind
/// name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    pub api_version: String,
    pub kind: String,
    /// As the file says; `None` also for objects of the namespace `default`.
    pub namespace: Option<String>,
    pub name: String,
}

impl Identity {
    /// # Errors
    /// What the object lacks.
    pub fn of(object: &Value) -> Result<Self, Incomplete> {
        let text =
            |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let metadata = &object["metadata"];
        let kind = text(&object["kind"]).ok_or(Incomplete::Kind)?;
        let api_version =
            text(&object["apiVersion"]).ok_or_else(|| Incomplete::Version(kind.clone()))?;
        let name = text(&metadata["name"]).ok_or_else(|| Incomplete::Name(kind.clone()))?;
        let namespace = text(&metadata["namespace"]);
        Ok(Self { api_version, kind, namespace, name })
    }

    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let (api_version, kind) = (words.next()?, words.next()?);
        let place = words.next().filter(|_| words.next().is_none())?;
        let (namespace, name) = match place.split_once('/') {
            Some((namespace, name)) => (Some(namespace.to_owned()), name),
            None => (None, place),
        };
        let (api_version, kind) = (api_version.to_owned(), kind.to_owned());
        Some(Self { api_version, kind, namespace, name: name.to_owned() })
    }

    /// Group and version.
    pub fn group_version(&self) -> (&str, &str) {
        self.api_version.split_once('/').unwrap_or(("", &self.api_version))
    }

    /// The same object, whatever its version.
    pub fn is(&self, other: &Self) -> bool {
        let namespace = |one: &Self| one.namespace.clone().unwrap_or_else(|| "default".into());
        self.kind == other.kind
            && self.name == other.name
            && self.group_version().0 == other.group_version().0
            && namespace(self) == namespace(other)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ", self.api_version, self.kind)?;
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// What an object in a file lacks.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum Incomplete {
    #[error("an object has no kind")]
    Kind,
    #[error("an object of kind {0} has no apiVersion")]
    Version(String),
    #[error("an object of kind {0} has no metadata.name")]
    Name(String),
}

/// The objects of the old list that are in neither of the others: they are pruned, the last one first.
pub fn pruned<'a>(
    old: &'a [Identity],
    new: &[Identity],
    is_elsewhere: impl Fn(&Identity) -> bool,
) -> Vec<&'a Identity> {
    let is_gone = |one: &&Identity| !new.iter().any(|other| one.is(other)) && !is_elsewhere(one);
    old.iter().rev().filter(is_gone).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(line: &str) -> Identity {
        Identity::parse(line).expect("an identity")
    }

    #[test]
    fn identities_are_lines() {
        for line in ["v1 Namespace a", "apps/v1 Deployment a/b"] {
            assert_eq!(of(line).to_string(), line);
        }
        assert_eq!(of("apps/v1 Deployment a/b").group_version(), ("apps", "v1"));
        assert_eq!(of("v1 Pod a/b").group_version(), ("", "v1"));
        for wrong in ["", "v1", "v1 Pod", "v1 Pod a b"] {
            assert_eq!(Identity::parse(wrong), None, "{wrong}");
        }
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "b"}});
        assert_eq!(Identity::of(&pod).map(|pod| pod.to_string()), Ok("v1 Pod b".to_owned()));
        assert_eq!(Identity::of(&json!({"apiVersion": "v1"})), Err(Incomplete::Kind));
        let nameless =
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "b"}});
        assert_eq!(Identity::of(&nameless), Err(Incomplete::Name("Pod".into())));
    }

    #[test]
    fn only_what_no_file_has_is_pruned() {
        let old =
            ["v1 Namespace n", "v1 ConfigMap a", "x/v1 Y c", "v1 ConfigMap default/d"].map(of);
        let new = ["v1 Namespace n", "x/v2 Y c"].map(of);
        let elsewhere = of("v1 ConfigMap d");
        let gone = pruned(&old, &new, |one| one.is(&elsewhere));
        assert_eq!(gone, [&of("v1 ConfigMap a")]);
        let all = pruned(&old, &[], |_| false);
        assert_eq!(all.len(), 4);
        assert_eq!(all[3], &of("v1 Namespace n"), "the first one goes last");
    }
}
