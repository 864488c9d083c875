//! User namespaces (`hostUsers: false`): a range of the node's ids for each such pod.
//!
//! In: a pod's uid. Out: its range, or a free one, as CRI mappings.
//!
//! ```text
//! <root>/pods/<uid>/userns   {"uidMappings":[{"hostId":65536,"containerId":0,"length":65536}],…}
//! ```
//!
//! The file has upstream's format and is the only state: it is on disk before the range is used, and is
//! removed with the pod's directory, when no container of the pod runs any more. Therefore a restarted
//! kubelet knows all ranges, and nothing has to be released.
//!
//! Invariants: no two pods on the disk have the same range; an unreadable file is an error, never a free
//! range; the node's own ids, below 65536, are never used.
//! Upstream: `pkg/kubelet/userns/userns_manager.go`.
//! Deviation: `/etc/subuid` is read directly, not with `getsubids`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cri::{IDMapping, NamespaceMode, UserNamespace};
use serde::{Deserialize, Serialize};

/// Upstream: DefaultKubeletUserNamespacesIDsPerPod.
const IDS_PER_POD: u32 = 65536;
/// The user whose subordinate ids pods use.
const KUBELET: &str = "kubelet";
const FILE: &str = "userns";

#[derive(Debug, thiserror::Error)]
pub enum UsersError {
    #[error("kubelet mappings: {0}")]
    Window(String),
    #[error("user namespace: {0}")]
    Known(String),
    #[error("create user namespace: {0}")]
    New(String),
    #[error("create user namespace: {0}")]
    Io(#[from] io::Error),
}

/// Allocates ranges. One per kubelet.
pub struct Users {
    pods: PathBuf,
    window: Window,
    /// Serializes allocations, each of which reads the disk and then writes a file.
    allocating: Mutex<()>,
    /// Attempts to start such pods, and failed ones.
    started: AtomicU64,
    failed: AtomicU64,
}

/// All ids for pods, divided into ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    first: u32,
    ranges: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mappings {
    uid_mappings: Vec<Mapping>,
    gid_mappings: Vec<Mapping>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mapping {
    host_id: u32,
    container_id: u32,
    length: u32,
}

/// The user namespace of a pod that uses the node's users.
pub fn of_node() -> UserNamespace {
    UserNamespace { mode: NamespaceMode::Node as i32, ..UserNamespace::default() }
}

impl Users {
    /// `etc` is `/etc`. Like upstream, fails if the ids that are configured there cannot be used.
    pub fn new(root: &Path, max_pods: i64, etc: &Path) -> Result<Self, UsersError> {
        let window = Window::configured(etc, max_pods).map_err(UsersError::Window)?;
        Ok(Self {
            pods: root.join("pods"),
            window,
            allocating: Mutex::default(),
            started: AtomicU64::default(),
            failed: AtomicU64::default(),
        })
    }

    /// Counts a start of a pod with a user namespace, or its failure.
    pub fn count_start(&self, failed: bool) {
        self.started.fetch_add(1, Ordering::Relaxed);
        self.failed.fetch_add(u64::from(failed), Ordering::Relaxed);
    }

    /// Upstream's counters of such pods.
    pub fn encode(&self, out: &mut String) {
        let families = [
            (
                "kubelet_started_user_namespaced_pods_total",
                "Cumulative number of pods with user namespaces started. This metric will only be collected on Linux.",
                &self.started,
            ),
            (
                "kubelet_started_user_namespaced_pods_errors_total",
                "Cumulative number of errors when starting pods with user namespaces. This metric will only be collected on Linux.",
                &self.failed,
            ),
        ];
        for (name, help, count) in families {
            let count = count.load(Ordering::Relaxed);
            // Writing to a string does not fail.
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {count}");
        }
    }

    /// The pod's range, allocated at the first call; the pod's directory must exist. Blocks.
    pub fn of_pod(&self, uid: &str) -> Result<UserNamespace, UsersError> {
        let _one = self.allocating.lock().expect("no panic while held");
        let known = self.read(uid).map_err(UsersError::Known)?;
        let first = match known {
            Some(first) => self.window.check(first).map(|()| first).map_err(UsersError::Known)?,
            None => {
                let taken = self.taken()?;
                // Upstream: a random free range, so that ids are not soon reused.
                let (ranges, start) = (self.window.ranges, self.window.somewhere());
                let mut all = (start..ranges).chain(0..start).map(|at| self.window.at(at));
                let free = all.find(|first| !taken.contains(first)).ok_or_else(|| {
                    UsersError::New(
                        "could not find an empty slot to allocate a user namespace".into(),
                    )
                })?;
                self.write(uid, free)?;
                free
            }
        };
        let range = vec![IDMapping { host_id: first, container_id: 0, length: IDS_PER_POD }];
        let mode = NamespaceMode::Pod as i32;
        Ok(UserNamespace { mode, uids: range.clone(), gids: range })
    }

    /// The first ids of the ranges of all pods on the disk.
    fn taken(&self) -> Result<BTreeSet<u32>, UsersError> {
        let mut out = BTreeSet::new();
        for entry in fs::read_dir(&self.pods)? {
            let uid = entry?.file_name().to_string_lossy().into_owned();
            let found = self.read(&uid).map_err(|why| UsersError::New(format!("pod {uid}: {why}")));
            out.extend(found?);
        }
        Ok(out)
    }

    fn file(&self, uid: &str) -> PathBuf {
        self.pods.join(uid).join(FILE)
    }

    /// The first id of a pod's range; like upstream, an empty file counts as none.
    fn read(&self, uid: &str) -> Result<Option<u32>, String> {
        let bytes = match fs::read(self.file(uid)) {
            Ok(bytes) if bytes.is_empty() => return Ok(None),
            Ok(bytes) => bytes,
            Err(error) if is_absent(&error) => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        parse(&bytes).map(Some)
    }

    fn write(&self, uid: &str, first: u32) -> io::Result<()> {
        let one = vec![Mapping { host_id: first, container_id: 0, length: IDS_PER_POD }];
        let mappings = Mappings { uid_mappings: one.clone(), gid_mappings: one };
        let path = self.file(uid);
        let partial = path.with_extension("partial");
        let mut file = File::create(&partial)?;
        file.write_all(&serde_json::to_vec(&mappings)?)?;
        file.sync_all()?;
        fs::rename(&partial, &path)?;
        // The range must survive a crash while files have its ids.
        path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Upstream: parseUserNsFileAndRecord.
fn parse(bytes: &[u8]) -> Result<u32, String> {
    let invalid = |what: &str| Err(format!("invalid user namespace configuration: {what}"));
    let mappings: Mappings = serde_json::from_slice(bytes)
        .map_err(|error| format!("invalid user namespace mappings file: {error}"))?;
    let [uids] = mappings.uid_mappings[..] else {
        return invalid("no more than one mapping allowed.");
    };
    if mappings.gid_mappings[..] != [uids] {
        return invalid("GID and UID mapping should be identical");
    }
    if uids.container_id != 0 {
        return invalid("UID 0 must be mapped");
    }
    if uids.length != IDS_PER_POD {
        return Err(format!("wrong user namespace length {}", uids.length));
    }
    if !uids.host_id.is_multiple_of(IDS_PER_POD) {
        return Err(format!("wrong user namespace offset specified {}", uids.host_id));
    }
    Ok(uids.host_id)
}

impl Window {
    fn at(self, range: u32) -> u32 {
        self.first + range * IDS_PER_POD
    }

    fn somewhere(self) -> u32 {
        u32::try_from(base::rng::below(u64::from(self.ranges.max(1)))).unwrap_or(0)
    }

    fn check(self, first: u32) -> Result<(), String> {
        let range = first.checked_sub(self.first).map(|above| above / IDS_PER_POD);
        match range.filter(|range| *range < self.ranges) {
            Some(_) => Ok(()),
            None => Err(format!("id {first} is out of range")),
        }
    }

    /// Upstream: getKubeletMappings and the checks of MakeUserNsManager.
    fn configured(etc: &Path, max_pods: i64) -> Result<Self, String> {
        let (first, length) = match subordinates(etc)? {
            Some(found) => found,
            // All ids except the node's.
            None => (IDS_PER_POD, u32::MAX - IDS_PER_POD + 1),
        };
        if !first.is_multiple_of(IDS_PER_POD) {
            return Err(format!(
                "kubelet user assigned ID {first} is not a multiple of {IDS_PER_POD}"
            ));
        }
        if first < IDS_PER_POD {
            return Err(format!(
                "kubelet user assigned ID {first} must be greater or equal to {IDS_PER_POD}"
            ));
        }
        if !length.is_multiple_of(IDS_PER_POD) {
            return Err(format!(
                "kubelet user assigned IDs length {length} is not a multiple of {IDS_PER_POD}"
            ));
        }
        let ranges = length / IDS_PER_POD;
        if i64::from(ranges) < max_pods {
            return Err(format!(
                "kubelet user assigned IDs are not enough to support {max_pods} pods"
            ));
        }
        // The kernel reserves the highest number.
        let above = (u32::MAX - first) / IDS_PER_POD;
        Ok(Self { first, ranges: ranges.min(above) })
    }
}

/// The first id and length of the `kubelet` user's range in `subuid` and `subgid`; `None` if there is no
/// such user or range.
fn subordinates(etc: &Path) -> Result<Option<(u32, u32)>, String> {
    let text = |name: &str| fs::read_to_string(etc.join(name)).unwrap_or_default();
    let passwd = text("passwd");
    let mut users = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let Some(user) = users.find(|fields| fields.first() == Some(&KUBELET)) else {
        return Ok(None);
    };
    let number = user.get(2).copied().unwrap_or_default();
    let of = |name: &str| {
        let text = text(name);
        let own = |line: &&str| {
            line.split_once(':').is_some_and(|(who, _)| who == KUBELET || who == number)
        };
        text.lines().filter(own).map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    let (uids, gids) = (of("subuid"), of("subgid"));
    if uids != gids {
        return Err(format!("mismatched subuids and subgids for user {KUBELET:?}"));
    }
    match &uids[..] {
        [] => Ok(None),
        [line] => {
            let mut numbers = line.split(':').skip(1).map(|number| number.trim().parse::<u32>());
            match (numbers.next(), numbers.next()) {
                (Some(Ok(first)), Some(Ok(length))) => Ok(Some((first, length))),
                _ => Err(format!("invalid line {line:?}")),
            }
        }
        all => {
            Err(format!("error parsing line {:?}: it must contain only one line", all.join("\n")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(root: &Path) -> Users {
        Users::new(root, 110, &root.join("etc")).expect("usable")
    }

    fn first(users: &Users, uid: &str) -> Result<u32, String> {
        fs::create_dir_all(users.pods.join(uid)).expect("made");
        users.of_pod(uid).map(|found| found.uids[0].host_id).map_err(|error| error.to_string())
    }

    #[test]
    fn a_range_is_free_when_the_pods_directory_is_removed() {
        let root = tempfile::tempdir().expect("a directory");
        let few = |ranges| Users { window: Window { first: 65536, ranges }, ..users(root.path()) };
        let own = few(3);
        let of = |users: &Users, uid: &str| first(users, uid).expect("a range");
        let all = BTreeSet::from(["a", "b", "c"].map(|uid| of(&own, uid)));
        assert_eq!(all, BTreeSet::from([65536, 131_072, 196_608]));
        let found = own.of_pod("a").expect("known");
        assert_eq!((found.mode(), found.uids[0].length, found.uids[0].container_id), {
            (NamespaceMode::Pod, 65536, 0)
        });
        assert_eq!(found.uids, found.gids);
        let file = fs::read_to_string(own.file("a")).expect("a file");
        let id = found.uids[0].host_id;
        let range = format!(r#"[{{"hostId":{id},"containerId":0,"length":65536}}]"#);
        assert_eq!(file, format!(r#"{{"uidMappings":{range},"gidMappings":{range}}}"#));
        // A restarted kubelet knows the ranges.
        let next = few(3);
        fs::write(next.pods.join("stray"), "").expect("written");
        assert_eq!((of(&next, "a"), of(&next, "b")), (id, of(&own, "b")));
        assert!(first(&next, "d").is_err(), "there is no fourth range");
        fs::remove_dir_all(next.pods.join("a")).expect("removed");
        assert_eq!(of(&next, "d"), id);
    }

    #[test]
    fn unreadable_files_are_errors() {
        let root = tempfile::tempdir().expect("a directory");
        let own = users(root.path());
        let check = |content: &str, expected: &str| {
            fs::create_dir_all(own.pods.join("x")).expect("made");
            fs::write(own.file("x"), content).expect("written");
            let error = first(&own, "x").expect_err("refused");
            assert_eq!(error, format!("user namespace: {expected}"));
            let error = first(&own, "other").expect_err("refused, too");
            let out_of_range = expected.ends_with("out of range");
            assert!(out_of_range || error.ends_with(expected), "{error}");
        };
        let range = |host: u64, container: u64, length: u64| {
            format!(r#"[{{"hostId":{host},"containerId":{container},"length":{length}}}]"#)
        };
        let both = |range: &str| format!(r#"{{"uidMappings":{range},"gidMappings":{range}}}"#);
        let invalid = |what: &str| format!("invalid user namespace configuration: {what}");
        check(&both(&range(65536, 1, 65536)), &invalid("UID 0 must be mapped"));
        check(&both("[]"), &invalid("no more than one mapping allowed."));
        check(
            &format!(r#"{{"uidMappings":{},"gidMappings":[]}}"#, range(65536, 0, 65536)),
            &invalid("GID and UID mapping should be identical"),
        );
        check(&both(&range(65536, 0, 1)), "wrong user namespace length 1");
        check(&both(&range(65537, 0, 65536)), "wrong user namespace offset specified 65537");
        fs::write(own.file("x"), "").expect("written");
        assert!(first(&own, "x").is_ok(), "an empty file has no range");
    }

    #[test]
    fn the_nodes_ids_are_not_used() {
        let etc = tempfile::tempdir().expect("a directory");
        let check = |passwd: &str, subuid: &str, subgid: &str, max_pods, expected| {
            for (name, text) in [("passwd", passwd), ("subuid", subuid), ("subgid", subgid)] {
                fs::write(etc.path().join(name), text).expect("written");
            }
            let got = Window::configured(etc.path(), max_pods).map(|w| (w.first, w.ranges));
            assert_eq!(got, expected, "{subuid:?}");
        };
        let all = Ok((65536, 65534));
        let user = "root:x:0:0::/:\nkubelet:x:990:990::/:\n";
        let refused = |text: &str| Err(text.to_string());
        check("root:x:0:0::/:\n", "kubelet:1:1\n", "", 110, all.clone());
        check(user, "", "", 110, all.clone());
        check(user, "a:65536:65536\n", "a:65536:65536\n", 110, all);
        let some = "kubelet:131072:7208960\n";
        check(user, some, some, 110, Ok((131_072, 110)));
        check(user, "990:131072:7208960\n", "990:131072:7208960\n", 1, Ok((131_072, 110)));
        check(
            user,
            some,
            some,
            111,
            refused("kubelet user assigned IDs are not enough to support 111 pods"),
        );
        check(user, some, "", 1, refused("mismatched subuids and subgids for user \"kubelet\""));
        let low = "kubelet:0:7208960\n";
        check(
            user,
            low,
            low,
            1,
            refused("kubelet user assigned ID 0 must be greater or equal to 65536"),
        );
        let odd = "kubelet:65537:65536\n";
        check(
            user,
            odd,
            odd,
            1,
            refused("kubelet user assigned ID 65537 is not a multiple of 65536"),
        );
        let short = "kubelet:65536:65537\n";
        check(
            user,
            short,
            short,
            1,
            refused("kubelet user assigned IDs length 65537 is not a multiple of 65536"),
        );
        let two = format!("{some}{some}");
        let text = "error parsing line \"kubelet:131072:7208960\\nkubelet:131072:7208960\": \
                    it must contain only one line";
        check(user, &two, &two, 1, refused(text));
    }

    #[test]
    fn starts_are_counted() {
        let root = tempfile::tempdir().expect("a directory");
        let own = users(root.path());
        own.count_start(true);
        own.count_start(false);
        let mut text = String::new();
        own.encode(&mut text);
        let values: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            values,
            [
                "kubelet_started_user_namespaced_pods_total 2",
                "kubelet_started_user_namespaced_pods_errors_total 1"
            ]
        );
    }

    #[test]
    fn a_node_without_free_ranges_is_an_error() {
        let root = tempfile::tempdir().expect("a directory");
        let own = Users { window: Window { first: 65536, ranges: 1 }, ..users(root.path()) };
        assert_eq!(first(&own, "a"), Ok(65536));
        let text =
            "create user namespace: could not find an empty slot to allocate a user namespace";
        assert_eq!(first(&own, "b"), Err(text.into()));
        let other = Users { window: Window { first: 131_072, ranges: 1 }, ..users(root.path()) };
        assert_eq!(first(&other, "a"), Err("user namespace: id 65536 is out of range".into()));
        assert_eq!(first(&other, "b"), Ok(131_072));
    }
}
