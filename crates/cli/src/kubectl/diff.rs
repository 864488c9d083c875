//! `kubectl diff --from-revision`: an object's state at a revision, its state now, and who changed it.
//!
//! In: an object's name and a revision that the server still has. Out: a line for each later change, with
//! its managers from managedFields, then a unified diff of both states as YAML. Like upstream's diff, the
//! exit code is 1 if they differ.
//!
//! It uses only the API: lists with an exact resourceVersion for the two states, and a watch from the
//! older one for the changes.

use serde_json::Value;

use super::console::Console;
use super::get::items_of;
use super::past;
use super::print::yaml;
use super::resources::Catalog;
use super::target::{self, Target};
use crate::cluster::{Cluster, decode, with_query};
use crate::failure::{ApiStatus, Failure, Result, own};
use crate::grid::Grid;

/// Lines of context around a change.
const CONTEXT: usize = 3;
/// The limit for a full comparison: lines of one side times lines of the other.
const LARGEST: usize = 4_000_000;

#[derive(clap::Args, Clone, Debug)]
pub struct Diff {
    /// TYPE NAME or TYPE/NAME
    pub resources: Vec<String>,
    /// The resourceVersion of the older state
    #[arg(long, value_name = "REVISION")]
    pub from_revision: u64,
    /// The resourceVersion of the newer state [default: the present one]
    #[arg(long, value_name = "REVISION")]
    pub to_revision: Option<u64>,
    /// Show managedFields too
    #[arg(long)]
    pub show_managed_fields: bool,
}

impl Diff {
    pub async fn run(self, cluster: &Cluster, console: &Console) -> Result<()> {
        let catalog = Catalog::read(cluster).await?;
        let targets = target::parse(&self.resources, &catalog)?;
        let [target @ Target { name: Some(name), .. }] = &targets.all[..] else {
            return Err(own(
                "expected one object, as in: kubectl diff pod web --from-revision 100",
            ));
        };
        let collection = target.resource.collection(Some(&cluster.namespace));
        let before =
            state(cluster, &past::exact(&collection, Some(name), self.from_revision)).await?;
        let field = format!("metadata.name={name}");
        let now = match self.to_revision {
            Some(revision) => past::exact(&collection, Some(name), revision),
            None => with_query(&collection, &[("fieldSelector", &field)]),
        };
        let after = state(cluster, &now).await?;
        if before.object.is_none() && after.object.is_none() {
            let missing = past::missing(target, Some(self.from_revision));
            return Err(missing.unwrap_or_else(|| own("there is no such object")));
        }
        let from = self.from_revision.to_string();
        let pairs = [
            ("watch", "true"),
            ("fieldSelector", &*field),
            ("resourceVersion", &from),
            // Only past changes, which the server sends at once.
            ("timeoutSeconds", "1"),
        ];
        let path = with_query(&collection, &pairs);
        let until = self.to_revision.unwrap_or(u64::MAX);
        let changes = changes(cluster, &path, before.object.clone(), until).await?;
        console.print(Grid::default().render(&changes))?;
        let text = |state: &State| state.text(self.show_managed_fields);
        let (old, new) = (text(&before), text(&after));
        if old == new {
            return Ok(());
        }
        let newest = self.to_revision.map_or(after.version.clone(), |to| to.to_string());
        console
            .print(format!("--- {name} at revision {from}\n+++ {name} at revision {newest}\n"))?;
        console.print(unified(&old, &new))?;
        Err(Failure::Exit(1, String::new()))
    }
}

/// An object at a revision; `None` if it did not exist.
struct State {
    object: Option<Value>,
    /// The list's resourceVersion.
    version: String,
}

async fn state(cluster: &Cluster, path: &str) -> Result<State> {
    let list = cluster.get(path).await?;
    let version = list["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
    Ok(State { object: items_of(list).pop(), version })
}

impl State {
    fn text(&self, with_managed_fields: bool) -> String {
        let Some(mut object) = self.object.clone() else { return String::new() };
        if let Some(metadata) = object["metadata"].as_object_mut()
            && !with_managed_fields
        {
            metadata.remove("managedFields");
        }
        yaml::to_yaml(&object)
    }
}

/// Prints a line per event, below a line of headers.
async fn changes(
    cluster: &Cluster,
    path: &str,
    mut before: Option<Value>,
    until: u64,
) -> Result<Vec<Vec<String>>> {
    let headers = ["REVISION", "CHANGE", "TIME", "MANAGER", "OPERATION"];
    let mut rows = vec![headers.map(str::to_owned).to_vec()];
    let mut lines = cluster.lines(path, crate::cluster::JSON).await?;
    while let Some(line) = lines.next().await? {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let mut event = decode(&line)?;
        let object = event["object"].take();
        let kind = event["type"].as_str().unwrap_or_default();
        if kind == "ERROR" {
            let code = http::StatusCode::GONE;
            let status = ApiStatus::of(code, object.to_string().as_bytes());
            return Err(Failure::Status(Box::new(status)));
        }
        let version = object["metadata"]["resourceVersion"].as_str().unwrap_or_default();
        if kind == "BOOKMARK" || version.parse::<u64>().is_ok_and(|version| version > until) {
            continue;
        }
        let is_delete = kind == "DELETED";
        let who = if is_delete { Vec::new() } else { changers(before.as_ref(), &object) };
        let none = ["<unknown>", "", ""].map(str::to_owned);
        let shown = if who.is_empty() { vec![none] } else { who };
        for [manager, operation, time] in shown {
            rows.push(vec![version.to_owned(), kind.to_owned(), time, manager, operation]);
        }
        before = (!is_delete).then_some(object);
    }
    Ok(rows)
}

/// Manager, operation (and subresource) and time of the managedFields entries that a change wrote.
fn changers(before: Option<&Value>, after: &Value) -> Vec<[String; 3]> {
    let entries = |object: &Value| -> Vec<Value> {
        object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default()
    };
    let old = before.map(entries).unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let show = |entry: &Value| {
        let operation = match entry["subresource"].as_str() {
            Some(subresource) => format!("{} of {subresource}", text(&entry["operation"])),
            None => text(&entry["operation"]),
        };
        [text(&entry["manager"]), operation, text(&entry["time"])]
    };
    let new = entries(after);
    // An entry with the same time only lost fields to another one.
    let moved = |entry: &&Value| {
        let same = |other: &&Value| {
            ["manager", "operation", "subresource", "apiVersion"]
                .iter()
                .all(|key| other[*key] == entry[*key])
        };
        match old.iter().find(same) {
            None => true,
            Some(other) => other["time"] != entry["time"],
        }
    };
    let mut found: Vec<_> = new.iter().filter(moved).map(show).collect();
    if found.is_empty() {
        // Within one second the time is the same, but the owned fields differ.
        found = new.iter().filter(|entry| !old.contains(entry)).map(show).collect();
    }
    if found.is_empty() {
        // If only values changed, the owned fields are the same, too: take the newest entry.
        found = new.iter().max_by_key(|entry| text(&entry["time"])).map(show).into_iter().collect();
    }
    found
}

/// A line of one side, or of both.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Edit {
    Same,
    Old,
    New,
}

/// The differences with context lines, like `diff -u`.
fn unified(old: &str, new: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let edits = edits(&old, &new);
    let changed: Vec<usize> = (0..edits.len()).filter(|at| edits[*at] != Edit::Same).collect();
    let mut out = String::new();
    let mut rest = &changed[..];
    while let Some(first) = rest.first() {
        let mut last = *first;
        let mut count = 0;
        while let Some(next) = rest.get(count).filter(|next| **next <= last + 2 * CONTEXT + 1) {
            last = *next;
            count += 1;
        }
        rest = &rest[count..];
        let range = first.saturating_sub(CONTEXT)..(last + CONTEXT + 1).min(edits.len());
        hunk(&mut out, &old, &new, &edits, range);
    }
    out
}

fn hunk(
    out: &mut String,
    old: &[&str],
    new: &[&str],
    edits: &[Edit],
    range: std::ops::Range<usize>,
) {
    let count = |edits: &[Edit], not: Edit| edits.iter().filter(|edit| **edit != not).count();
    let (mut a, mut b) =
        (count(&edits[..range.start], Edit::New), count(&edits[..range.start], Edit::Old));
    let inside = &edits[range];
    let (olds, news) = (count(inside, Edit::New), count(inside, Edit::Old));
    // An empty range starts at the line before it.
    let start = |at: usize, count: usize| if count == 0 { at } else { at + 1 };
    let (from, to) = (start(a, olds), start(b, news));
    out.push_str(&format!("@@ -{from},{olds} +{to},{news} @@\n"));
    for edit in inside {
        let (sign, line) = match edit {
            Edit::Same => (' ', old[a]),
            Edit::Old => ('-', old[a]),
            Edit::New => ('+', new[b]),
        };
        a += usize::from(*edit != Edit::New);
        b += usize::from(*edit != Edit::Old);
        out.push(sign);
        out.push_str(line);
        out.push('\n');
    }
}

/// The shortest edit script, by longest common subsequence.
fn edits(old: &[&str], new: &[&str]) -> Vec<Edit> {
    let same = |a: &[&str], b: &[&str]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let head = same(old, new);
    let (a, b) = (&old[head..], &new[head..]);
    let tail = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[..a.len() - tail], &b[..b.len() - tail]);
    let mut edits = vec![Edit::Same; head];
    if a.len() * b.len() > LARGEST {
        edits.extend(vec![Edit::Old; a.len()]);
        edits.extend(vec![Edit::New; b.len()]);
    } else {
        edits.extend(shortest(a, b));
    }
    edits.extend(vec![Edit::Same; tail]);
    edits
}

fn shortest(a: &[&str], b: &[&str]) -> Vec<Edit> {
    let width = b.len() + 1;
    // The number of common lines from here to both ends.
    let mut common = vec![0_u32; (a.len() + 1) * width];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            common[i * width + j] = if a[i] == b[j] {
                common[(i + 1) * width + j + 1] + 1
            } else {
                common[(i + 1) * width + j].max(common[i * width + j + 1])
            };
        }
    }
    let (mut i, mut j, mut edits) = (0, 0, vec![]);
    while i < a.len() || j < b.len() {
        if i < a.len() && j < b.len() && a[i] == b[j] {
            edits.push(Edit::Same);
            (i, j) = (i + 1, j + 1);
        } else if i < a.len()
            && (j == b.len() || common[(i + 1) * width + j] >= common[i * width + j + 1])
        {
            edits.push(Edit::Old);
            i += 1;
        } else {
            edits.push(Edit::New);
            j += 1;
        }
    }
    edits
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn differences_are_unified() {
        let check = |old: &str, new: &str, expected: &str| {
            let lines = |text: &str| text.chars().map(|c| format!("{c}\n")).collect::<String>();
            assert_eq!(unified(&lines(old), &lines(new)), expected, "{old} {new}");
        };
        check("abc", "abc", "");
        check("abcdefghi", "abcdXfghi", "@@ -2,7 +2,7 @@\n b\n c\n d\n-e\n+X\n f\n g\n h\n");
        check("", "ab", "@@ -0,0 +1,2 @@\n+a\n+b\n");
        check("ab", "", "@@ -1,2 +0,0 @@\n-a\n-b\n");
        check(
            "abcdefghijklmnop",
            "Xbcdefghijklmno",
            "@@ -1,4 +1,4 @@\n-a\n+X\n b\n c\n d\n@@ -13,4 +13,3 @@\n m\n n\n o\n-p\n",
        );
    }

    #[test]
    fn managers_of_a_change_are_those_with_a_new_entry() {
        let object = |entries: Value| json!({"metadata": {"managedFields": entries}});
        let entry = |manager: &str, time: &str, fields: &str| json!({"manager": manager, "operation": "Update", "time": time, "fieldsV1": {fields: {}}});
        let before = object(json!([entry("a", "1", "f:x"), entry("b", "1", "f:y")]));
        let check = |after: Value, expected: &[&str]| {
            let found = changers(Some(&before), &object(after));
            let names: Vec<&str> = found.iter().map(|[manager, ..]| manager.as_str()).collect();
            assert_eq!(names, expected);
        };
        check(json!([entry("a", "1", "f:x"), entry("b", "2", "f:y")]), &["b"]);
        check(json!([entry("a", "1", "f:x"), entry("b", "1", "f:z")]), &["b"]);
        check(json!([entry("a", "1", "f:x"), entry("c", "2", "f:y")]), &["c"]);
        check(json!([entry("a", "1", "f:x"), entry("b", "1", "f:y")]), &["b"]);
    }
}
