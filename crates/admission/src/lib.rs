//! Admission plugins: what may be created, and what is filled in on the way.
//!
//! One file per plugin; the table's order is the order of execution, upstream's.

mod default_toleration_seconds;
mod namespace_lifecycle;
mod priority;
mod service_account;
mod taint_nodes_by_condition;

use apiserver::admission::{Chain, Plugin};

/// Name, whether it is on unless said otherwise, and how to make it.
type Entry = (&'static str, bool, fn() -> Box<dyn Plugin>);

/// Namespaces first: nothing else matters in one that is going. What later plugins read (the
/// priority, the service account) is filled in before they run.
const PLUGINS: &[Entry] = &[
    ("NamespaceLifecycle", true, || Box::new(namespace_lifecycle::NamespaceLifecycle)),
    ("ServiceAccount", true, || Box::new(service_account::ServiceAccounts)),
    ("TaintNodesByCondition", true, || Box::new(taint_nodes_by_condition::TaintNodesByCondition)),
    ("Priority", true, || Box::new(priority::Priority)),
    ("DefaultTolerationSeconds", true, || {
        Box::new(default_toleration_seconds::DefaultTolerationSeconds)
    }),
];

/// The chain with some plugins switched from their defaults. An unknown name is an error that lists
/// the known ones.
pub fn chain(enable: &[String], disable: &[String]) -> Result<Chain, String> {
    for name in enable.iter().chain(disable) {
        if !PLUGINS.iter().any(|(known, ..)| known == name) {
            let known: Vec<&str> = PLUGINS.iter().map(|(name, ..)| *name).collect();
            return Err(format!(
                "unknown admission plugin {name:?}; known are {}",
                known.join(", ")
            ));
        }
    }
    let says = |list: &[String], name: &str| list.iter().any(|one| one == name);
    let on = |entry: &&Entry| (entry.1 || says(enable, entry.0)) && !says(disable, entry.0);
    Ok(Chain(PLUGINS.iter().filter(on).map(|(_, _, make)| make()).collect()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn plugins_are_switched_by_name() {
        let names = |enable: &[&str], disable: &[&str]| {
            let owned =
                |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
            let chain = super::chain(&owned(enable), &owned(disable));
            chain.map(|chain| chain.0.iter().map(|plugin| plugin.name()).collect::<Vec<_>>())
        };
        assert_eq!(names(&[], &[]).map(|all| all.len()), Ok(super::PLUGINS.len()));
        assert_eq!(names(&[], &["Priority"]).map(|all| all.contains(&"Priority")), Ok(false));
        assert!(names(&["Nope"], &[]).is_err());
    }
}
