//! Admission plugins: what may be created, and what is filled in on the way.
//!
//! One file per plugin; the table's order is the order of execution, upstream's.

mod conditions;
mod default_toleration_seconds;
mod matching;
mod namespace_lifecycle;
mod priority;
mod service_account;
mod taint_nodes_by_condition;
mod webhook;

use std::sync::Arc;

use apiserver::admission::{Chain, Plugin};
use apiserver::authz::Authorizer;

/// What plugins are made from.
#[derive(Clone, Default)]
pub struct Options {
    /// Plugins to add to the default ones, and to leave out.
    pub enable: Vec<String>,
    pub disable: Vec<String>,
    /// Answers what the user of a request may do besides it.
    pub authorizer: Option<Arc<dyn Authorizer>>,
}

/// Name, whether it is on unless said otherwise, and how to make it.
type Entry = (&'static str, bool, fn(&Options) -> Result<Box<dyn Plugin>, String>);

/// Namespaces first: nothing else matters in one that is going. What later plugins read (the
/// priority, the service account) is filled in before they run; webhooks come behind all that fills
/// something in.
const PLUGINS: &[Entry] = &[
    ("NamespaceLifecycle", true, |_| Ok(Box::new(namespace_lifecycle::NamespaceLifecycle))),
    ("ServiceAccount", true, |_| Ok(Box::new(service_account::ServiceAccounts))),
    ("TaintNodesByCondition", true, |_| {
        Ok(Box::new(taint_nodes_by_condition::TaintNodesByCondition))
    }),
    ("Priority", true, |_| Ok(Box::new(priority::Priority))),
    ("DefaultTolerationSeconds", true, |_| {
        Ok(Box::new(default_toleration_seconds::DefaultTolerationSeconds))
    }),
    ("MutatingAdmissionWebhook", true, |_| Ok(Box::new(webhook::MutatingWebhooks::new()))),
    ("ValidatingAdmissionWebhook", true, |_| Ok(Box::new(webhook::ValidatingWebhooks::new()))),
];

/// The chain with some plugins switched from their defaults. An unknown name is an error that lists
/// the known ones.
pub fn chain(options: &Options) -> Result<Chain, String> {
    for name in options.enable.iter().chain(&options.disable) {
        if !PLUGINS.iter().any(|(known, ..)| known == name) {
            let known: Vec<&str> = PLUGINS.iter().map(|(name, ..)| *name).collect();
            return Err(format!(
                "unknown admission plugin {name:?}; known are {}",
                known.join(", ")
            ));
        }
    }
    let says = |list: &[String], name: &str| list.iter().any(|one| one == name);
    let on = |entry: &&Entry| {
        (entry.1 || says(&options.enable, entry.0)) && !says(&options.disable, entry.0)
    };
    let made: Result<Vec<_>, String> =
        PLUGINS.iter().filter(on).map(|(_, _, make)| make(options)).collect();
    Ok(Chain(made?))
}

#[cfg(test)]
mod tests {
    #[test]
    fn plugins_are_switched_by_name() {
        let names = |enable: &[&str], disable: &[&str]| {
            let owned =
                |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
            let (enable, disable) = (owned(enable), owned(disable));
            let chain =
                super::chain(&super::Options { enable, disable, ..super::Options::default() });
            chain.map(|chain| chain.0.iter().map(|plugin| plugin.name()).collect::<Vec<_>>())
        };
        assert_eq!(
            names(&[], &[]).map(|all| all.len()),
            Ok(super::PLUGINS.iter().filter(|(_, on, _)| *on).count())
        );
        assert_eq!(names(&[], &["Priority"]).map(|all| all.contains(&"Priority")), Ok(false));
        assert!(names(&["Nope"], &[]).is_err());
    }
}
