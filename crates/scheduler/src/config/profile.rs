//! Which plugins a profile has, at which points, in which order.
//!
//! In: the default set, and what a file enables and disables. Out: per point, an ordered list.
//! Upstream: `mergePlugins`, `expandMultiPointPlugins`.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::{Args, ConfigError, DEFAULT_NAME};

/// One scheduler's name, with the way it decides.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Pods that name it are its own.
    pub name: String,
    pub choices: Choices,
    pub args: Args,
    /// How many of the nodes are looked at, in percent; 0: by their number.
    pub percentage: usize,
}

impl Default for Profile {
    fn default() -> Self {
        let choices = PluginsFile::default().merged();
        Self { name: DEFAULT_NAME.into(), choices, args: Args::default(), percentage: 0 }
    }
}

/// An extension point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Point {
    PreFilter,
    Filter,
    PostFilter,
    Reserve,
    PreScore,
    Score,
    PreBind,
    Bind,
    PostBind,
    Permit,
    PreEnqueue,
    QueueSort,
}

impl Point {
    /// In upstream's order, which decides whose error is seen.
    pub const ALL: [Self; 12] = [
        Self::PreFilter,
        Self::Filter,
        Self::PostFilter,
        Self::Reserve,
        Self::PreScore,
        Self::Score,
        Self::PreBind,
        Self::Bind,
        Self::PostBind,
        Self::Permit,
        Self::PreEnqueue,
        Self::QueueSort,
    ];
}

/// An enabled plugin; weight 0 means 1.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chosen {
    pub name: String,
    #[serde(default)]
    pub weight: i64,
}

/// The enabled and disabled plugins of an extension point, or of all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Set {
    pub enabled: Vec<Chosen>,
    pub disabled: Vec<Chosen>,
}

impl Set {
    fn disables(&self, name: &str) -> bool {
        self.disabled.iter().any(|one| one.name == name || one.name == "*")
    }
}

/// The form in a configuration file.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct PluginsFile {
    multi_point: Set,
    pre_enqueue: Set,
    queue_sort: Set,
    pre_filter: Set,
    filter: Set,
    post_filter: Set,
    pre_score: Set,
    score: Set,
    reserve: Set,
    permit: Set,
    pre_bind: Set,
    bind: Set,
    post_bind: Set,
}

impl PluginsFile {
    /// Together with the defaults.
    pub(super) fn merged(self) -> Choices {
        let points = [
            (Point::PreEnqueue, self.pre_enqueue),
            (Point::QueueSort, self.queue_sort),
            (Point::PreFilter, self.pre_filter),
            (Point::Filter, self.filter),
            (Point::PostFilter, self.post_filter),
            (Point::PreScore, self.pre_score),
            (Point::Score, self.score),
            (Point::Reserve, self.reserve),
            (Point::Permit, self.permit),
            (Point::PreBind, self.pre_bind),
            (Point::Bind, self.bind),
            (Point::PostBind, self.post_bind),
        ];
        Choices { everywhere: merge(&self.multi_point), points: points.into() }
    }
}

/// The defaults with a file's changes, in order: a plugin that is configured again keeps its place.
fn merge(custom: &Set) -> Vec<Chosen> {
    let mut all = vec![];
    let mut placed = BTreeSet::new();
    for row in crate::plugins::PLUGINS {
        if custom.disables(row.name) {
            continue;
        }
        let again = custom.enabled.iter().rposition(|one| one.name == row.name);
        placed.extend(again);
        let default = || Chosen { name: row.name.into(), weight: row.weight };
        all.push(again.map_or_else(default, |at| custom.enabled[at].clone()));
    }
    let rest = custom.enabled.iter().enumerate().filter(|(at, _)| !placed.contains(at));
    all.extend(rest.map(|(_, one)| one.clone()));
    all
}

/// The plugins of a profile before they are made.
#[derive(Clone, Debug)]
pub struct Choices {
    /// At every point that they have.
    everywhere: Vec<Chosen>,
    points: BTreeMap<Point, Set>,
}

impl Choices {
    pub fn of(&self, point: Point) -> &Set {
        &self.points[&point]
    }

    /// All names that are enabled anywhere.
    pub fn names(&self) -> BTreeSet<&str> {
        let enabled = self.points.values().flat_map(|set| &set.enabled);
        self.everywhere.iter().chain(enabled).map(|one| one.name.as_str()).collect()
    }

    /// The plugins of a point, in order. `has`: does this plugin have that point, if it is known?
    pub fn at(
        &self,
        point: Point,
        has: impl Fn(&str) -> Option<bool>,
    ) -> Result<Vec<Chosen>, ConfigError> {
        let set = &self.points[&point];
        let unknown = |name: &str| ConfigError(format!("{point:?}Plugin {name:?} does not exist"));
        let again = |name: &str| {
            ConfigError(format!("plugin {name:?} already registered as \"{point:?}Plugin\""))
        };
        let mut seen = BTreeSet::new();
        for one in &set.enabled {
            let name = &one.name;
            match has(name) {
                None => return Err(unknown(name)),
                Some(false) => {
                    let why = format!("plugin {name:?} does not extend {point:?}Plugin plugin");
                    return Err(ConfigError(why));
                }
                Some(true) if !seen.insert(name) => return Err(again(name)),
                Some(true) => {}
            }
        }
        let is_everywhere = |one: &&Chosen| self.everywhere.iter().any(|all| all.name == one.name);
        let mut order: Vec<Chosen> = set.enabled.iter().filter(is_everywhere).cloned().collect();
        let mut multi = BTreeSet::new();
        for one in &self.everywhere {
            let name = &one.name;
            let has_point = has(name).ok_or_else(|| unknown(name))?;
            if !has_point || set.disables(name) || seen.contains(name) {
                continue;
            }
            if !multi.insert(name) {
                return Err(again(name));
            }
            order.push(one.clone());
        }
        order.extend(set.enabled.iter().filter(|one| !is_everywhere(one)).cloned());
        Ok(order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plugin has a point if the point's letter is in its name; `X` is not known.
    fn order(everywhere: &[&str], set: &str) -> String {
        let chosen = |name: &&str| Chosen { name: (*name).into(), weight: 0 };
        let mut points: BTreeMap<Point, Set> =
            Point::ALL.into_iter().map(|point| (point, Set::default())).collect();
        points.insert(Point::Filter, serde_saphyr::from_str(set).unwrap());
        let choices = Choices { everywhere: everywhere.iter().map(chosen).collect(), points };
        let has = |name: &str| (name != "X").then(|| name.contains('f'));
        match choices.at(Point::Filter, has) {
            Ok(order) => order.into_iter().map(|one| one.name).collect::<Vec<_>>().join(" "),
            Err(why) => why.0,
        }
    }

    #[test]
    fn points_are_filled_as_upstream_fills_them() {
        let all = ["af", "b", "cf", "df"];
        assert_eq!(order(&all, "{}"), "af cf df");
        assert_eq!(order(&all, "{disabled: [{name: cf}, {name: Nobody}]}"), "af df");
        assert_eq!(order(&all, "{disabled: [{name: '*'}], enabled: [{name: df}]}"), "df");
        // Named plugins come first, new plugins last.
        assert_eq!(order(&all, "{enabled: [{name: ef}, {name: df}]}"), "df af cf ef");
        assert_eq!(order(&all, "{enabled: [{name: X}]}"), "FilterPlugin \"X\" does not exist");
        assert_eq!(order(&["X"], "{}"), "FilterPlugin \"X\" does not exist");
        let wrong = "plugin \"b\" does not extend FilterPlugin plugin";
        assert_eq!(order(&all, "{enabled: [{name: b}]}"), wrong);
        let twice = "plugin \"ef\" already registered as \"FilterPlugin\"";
        assert_eq!(order(&all, "{enabled: [{name: ef}, {name: ef}]}"), twice);
    }

    #[test]
    fn defaults_are_changed_in_place() {
        let set = |text: &str| -> Set { serde_saphyr::from_str(text).unwrap() };
        let names = |set: &Set| merge(set).into_iter().map(|one| one.name).collect::<Vec<_>>();
        let default = names(&Set::default());
        let heavier = merge(&set("{enabled: [{name: ImageLocality, weight: 7}]}"));
        assert_eq!(heavier.iter().map(|one| one.name.clone()).collect::<Vec<_>>(), default);
        assert_eq!(heavier.iter().find(|one| one.name == "ImageLocality").unwrap().weight, 7);
        let none = set("{disabled: [{name: '*'}], enabled: [{name: PrioritySort}]}");
        assert_eq!(names(&none), ["PrioritySort"]);
    }
}
