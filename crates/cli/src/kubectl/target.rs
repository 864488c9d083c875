//! The objects of a command: `pods`, `pod web`, `pod/web svc/web`, `deploy,svc -l app=web`.
//!
//! In: the words after the verb. Out: [`Target`]s with their resources.
//! Upstream: `cli-runtime/pkg/resource/builder.go`.

use super::resources::{Catalog, Resource};
use crate::failure::{Result, own};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub resource: Resource,
    /// `None`: all objects, or those of a selector.
    pub name: Option<String>,
}

#[derive(Debug, Default)]
pub struct Targets {
    pub all: Vec<Target>,
    /// Whether several types were requested: then names are printed with their kind.
    pub has_many_types: bool,
}

pub fn parse(words: &[String], catalog: &Catalog) -> Result<Targets> {
    if words.iter().any(|word| word.contains('/')) {
        return pairs(words, catalog);
    }
    let Some((types, names)) = words.split_first() else { return Ok(Targets::default()) };
    let mut resources = vec![];
    for word in types.split(',').filter(|word| !word.is_empty()) {
        match catalog.category(word) {
            found if found.is_empty() => resources.push(catalog.find(word)?),
            found => resources.extend(found),
        }
    }
    let mut all = vec![];
    for resource in &resources {
        let named = names.iter().map(|name| Some(name.clone()));
        let names: Vec<_> = if names.is_empty() { vec![None] } else { named.collect() };
        let target = |name| Target { resource: (*resource).clone(), name };
        all.extend(names.into_iter().map(target));
    }
    let has_many_types = resources.len() > 1 || types.contains(',');
    Ok(Targets { all, has_many_types })
}

fn pairs(words: &[String], catalog: &Catalog) -> Result<Targets> {
    let mut targets = Targets::default();
    for word in words {
        let parts: Vec<&str> = word.split('/').collect();
        let (kind, name) = match parts.as_slice() {
            [kind, name] if !kind.is_empty() && !name.is_empty() => (*kind, *name),
            [_] => {
                return Err(own(
                    "there is no need to specify a resource type as a separate argument when passing arguments in resource/name form (e.g. 'kubectl get resource/<resource_name>' instead of 'kubectl get resource resource/<resource_name>'",
                ));
            }
            [_, _] => {
                return Err(own(format!(
                    "arguments in resource/name form must have a single resource and name: {word}"
                )));
            }
            _ => {
                return Err(own(format!(
                    "arguments in resource/name form may not have more than one slash: {word}"
                )));
            }
        };
        let resource = catalog.find(kind)?.clone();
        targets.has_many_types |=
            targets.all.first().is_some_and(|first: &Target| first.resource != resource);
        targets.all.push(Target { resource, name: Some(name.into()) });
    }
    Ok(targets)
}

#[cfg(test)]
mod tests {
    use super::super::resources::tests::catalog;
    use super::*;

    #[test]
    fn words_name_targets() {
        let check = |words: &str, expected: &[&str], many: bool| {
            let words: Vec<String> = words.split(' ').map(Into::into).collect();
            let got = parse(&words, &catalog()).expect("parses");
            let described: Vec<String> = got
                .all
                .iter()
                .map(|one| format!("{}/{}", one.resource.name, one.name.as_deref().unwrap_or("*")))
                .collect();
            assert_eq!(described, expected, "{words:?}");
            assert_eq!(got.has_many_types, many, "{words:?}");
        };
        check("po", &["pods/*"], false);
        check("pod a b", &["pods/a", "pods/b"], false);
        check("deploy,svc", &["deployments/*", "services/*"], true);
        check("pod/a pod/b", &["pods/a", "pods/b"], false);
        check("pod/a svc/b", &["pods/a", "services/b"], true);
        check("po,svc a", &["pods/a", "services/a"], true);
    }

    #[test]
    fn mixed_forms_are_refused() {
        for bad in ["pod pod/a", "pod/", "/a", "a/b/c", "nonsense"] {
            let words: Vec<String> = bad.split(' ').map(Into::into).collect();
            assert!(parse(&words, &catalog()).is_err(), "{bad}");
        }
    }
}
