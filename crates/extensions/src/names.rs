//! Assigns names to CRDs. A name that another CRD of the group has is taken.
//!
//! In: a CRD's wanted and accepted names, and the accepted names of its group. Out: the CRD's new
//! accepted names and the `NamesAccepted` condition. Upstream: `controller/status/naming_controller.go`.

use std::collections::BTreeSet;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinitionCondition, CustomResourceDefinitionNames,
};

use crate::definition::conditions;

type Names = CustomResourceDefinitionNames;

/// The accepted names of all CRDs of a group.
#[derive(Default)]
pub struct Taken {
    resources: BTreeSet<String>,
    kinds: BTreeSet<String>,
}

impl Taken {
    pub fn add(&mut self, names: &Names) {
        self.resources.insert(names.plural.clone());
        self.resources.extend(names.singular.clone());
        self.resources.extend(names.short_names.iter().flatten().cloned());
        self.kinds.insert(names.kind.clone());
        self.kinds.extend(names.list_kind.clone());
    }
}

/// The accepted part of `wanted`, given the CRD's present names.
pub fn accept(
    wanted: &Names,
    has: &Names,
    taken: &Taken,
) -> (Names, CustomResourceDefinitionCondition) {
    let mut names = has.clone();
    let mut conflict = None;
    let mut check = |wanted: &str, has: &str, taken: &BTreeSet<String>, reason: &'static str| {
        let is_free = wanted == has || !taken.contains(wanted);
        if !is_free {
            conflict = Some((reason, format!("{wanted:?} is already in use")));
        }
        is_free
    };
    let text = |name: &Option<String>| name.clone().unwrap_or_default();
    if check(&wanted.plural, &has.plural, &taken.resources, "PluralConflict") {
        names.plural = wanted.plural.clone();
    }
    let (singular, list_kind) = (text(&wanted.singular), text(&wanted.list_kind));
    if check(&singular, &text(&has.singular), &taken.resources, "SingularConflict") {
        names.singular = wanted.singular.clone();
    }
    let known = has.short_names.as_deref().unwrap_or_default();
    let asked = wanted.short_names.as_deref().unwrap_or_default();
    let used: Vec<&String> = asked
        .iter()
        .filter(|name| !known.contains(name) && taken.resources.contains(*name))
        .collect();
    if used.is_empty() {
        names.short_names = wanted.short_names.clone();
    } else {
        let texts: Vec<String> =
            used.iter().map(|name| format!("{name:?} is already in use")).collect();
        let message =
            if let [one] = &texts[..] { one.clone() } else { format!("[{}]", texts.join(", ")) };
        conflict = Some(("ShortNamesConflict", message));
    }
    let mut check = |wanted: &str, has: &str, reason: &'static str| {
        let is_free = wanted == has || !taken.kinds.contains(wanted);
        if !is_free {
            conflict = Some((reason, format!("{wanted:?} is already in use")));
        }
        is_free
    };
    if check(&wanted.kind, &has.kind, "KindConflict") {
        names.kind = wanted.kind.clone();
    }
    if check(&list_kind, &text(&has.list_kind), "ListKindConflict") {
        names.list_kind = wanted.list_kind.clone();
    }
    names.categories = wanted.categories.clone();
    let condition = match conflict {
        None => conditions::new("NamesAccepted", true, "NoConflicts", "no conflicts found"),
        Some((reason, message)) => conditions::new("NamesAccepted", false, reason, &message),
    };
    (names, condition)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(plural: &str, kind: &str) -> Names {
        Names {
            plural: plural.into(),
            singular: Some(kind.to_lowercase()),
            kind: kind.into(),
            list_kind: Some(format!("{kind}List")),
            ..Names::default()
        }
    }

    #[test]
    fn what_others_have_is_taken() {
        let mut taken = Taken::default();
        taken.add(&names("things", "Thing"));
        let wanted = names("others", "Thing");
        let (got, condition) = accept(&wanted, &Names::default(), &taken);
        assert_eq!(got, Names { plural: "others".into(), ..Names::default() });
        assert_eq!(condition.reason.as_deref(), Some("ListKindConflict"));
        assert_eq!(condition.message.as_deref(), Some("\"ThingList\" is already in use"));
        let wanted = names("others", "Other");
        let (got, condition) = accept(&wanted, &Names::default(), &taken);
        assert_eq!((got, condition.status.as_str()), (wanted.clone(), "True"));
        taken.add(&wanted);
        assert_eq!(accept(&wanted, &wanted, &taken).1.status, "True");
    }
}
