//! A container's user: from the pod or the image, looked up in the image's own `/etc/passwd` and
//! `/etc/group`.
//!
//! Upstream: containerd's `generateUserString` and `WithUser`, `WithAdditionalGIDs`.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;

use cri::{LinuxContainerSecurityContext, SupplementalGroupsPolicy};
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

use super::{Error, Result};

const FILE_LIMIT: u64 = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: String,
}

/// The text of the user and group files of a root directory.
#[derive(Clone, Debug, Default)]
pub struct Databases {
    passwd: String,
    group: String,
}

struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

impl Databases {
    /// A missing file counts as empty: images need not have them.
    pub fn read(root: &Path) -> Self {
        let text = |path: &str| read_inside(root, path).unwrap_or_default();
        Self { passwd: text("etc/passwd"), group: text("etc/group") }
    }

    fn accounts(&self) -> impl Iterator<Item = Account<'_>> {
        self.passwd.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, _) = (fields.next()?, fields.next()?);
            let (uid, gid) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            let home = fields.nth(1).unwrap_or("/");
            Some(Account { name, uid, gid, home })
        })
    }

    fn groups_of<'a>(&'a self, user: &'a str) -> impl Iterator<Item = u32> + 'a {
        self.group.lines().filter_map(move |line| {
            let mut fields = line.split(':');
            let gid = fields.nth(2)?.parse().ok()?;
            let members = fields.next()?;
            members.split(',').any(|member| member == user).then_some(gid)
        })
    }

    fn gid(&self, name: &str) -> Option<u32> {
        if let Ok(gid) = name.parse() {
            return Some(gid);
        }
        self.group.lines().find_map(|line| {
            let mut fields = line.split(':');
            (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
        })
    }
}

/// `image_user` is `user[:group]`, by name or number.
pub fn resolve(
    security: &LinuxContainerSecurityContext,
    image_user: &str,
    databases: &Databases,
) -> Result<User> {
    let (image_name, image_group) = match image_user.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (image_user, None),
    };
    let number = |n: &cri::Int64Value| {
        u32::try_from(n.value)
            .map_err(|_| Error::Invalid(format!("{} is not a user or group", n.value)))
    };
    let asked = security.run_as_user.as_ref().map(number).transpose()?;
    let (wanted, group) = match asked {
        Some(uid) => (uid.to_string(), None),
        None if !security.run_as_username.is_empty() => (security.run_as_username.clone(), None),
        None => (image_name.to_owned(), image_group),
    };
    let wanted = if wanted.is_empty() { "0".to_owned() } else { wanted };
    let account = databases
        .accounts()
        .find(|account| account.name == wanted || account.uid.to_string() == wanted);
    let (uid, mut gid, home, name) = match (&account, wanted.parse::<u32>()) {
        (Some(account), _) => (account.uid, account.gid, account.home, account.name),
        (None, Ok(uid)) => (uid, 0, "/", ""),
        (None, Err(_)) => {
            return Err(Error::Invalid(format!(
                "unable to find user {wanted}: no matching entries in passwd file"
            )));
        }
    };
    if let Some(group) = group {
        gid = databases.gid(group).ok_or_else(|| {
            Error::Invalid(format!(
                "unable to find group {group}: no matching entries in group file"
            ))
        })?;
    }
    if let Some(asked) = &security.run_as_group {
        gid = number(asked)?;
    }
    let mut groups = vec![gid];
    let mut add = |more: u32| {
        if !groups.contains(&more) {
            groups.push(more);
        }
    };
    if security.supplemental_groups_policy() == SupplementalGroupsPolicy::Merge && !name.is_empty()
    {
        databases.groups_of(name).for_each(&mut add);
    }
    for more in &security.supplemental_groups {
        add(number(&cri::Int64Value { value: *more })?);
    }
    Ok(User { uid, gid, groups, home: home.to_owned() })
}

/// Reads a file below `root`; symbolic links cannot lead out of `root`.
fn read_inside(root: &Path, path: &str) -> Option<String> {
    let directory = File::open(root).ok()?;
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT);
    let fd: OwnedFd = openat2(&directory, path, how).ok()?;
    let mut text = String::new();
    let file = File::from(fd);
    file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    file.take(FILE_LIMIT).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_come_from_pod_or_image() {
        let databases = Databases {
            passwd: "root:x:0:0:root:/root:/bin/sh\napp:x:101:102:App:/srv:/bin/false\n".into(),
            group: "root:x:0:\ndata:x:200:app,other\nstaff:x:50:\n".into(),
        };
        let number = |value| Some(cri::Int64Value { value });
        let check = |security: LinuxContainerSecurityContext,
                     image: &str,
                     expected: Option<(u32, u32, &[u32], &str)>| {
            let got = resolve(&security, image, &databases).ok();
            let got = got.as_ref().map(|u| (u.uid, u.gid, u.groups.as_slice(), u.home.as_str()));
            assert_eq!(got, expected, "{image:?}");
        };
        let plain = LinuxContainerSecurityContext::default;
        check(plain(), "", Some((0, 0, &[0], "/root")));
        check(plain(), "app", Some((101, 102, &[102, 200], "/srv")));
        check(plain(), "101:staff", Some((101, 50, &[50, 200], "/srv")));
        check(plain(), "4711", Some((4711, 0, &[0], "/")));
        check(plain(), "nobody", None);
        check(plain(), "app:nogroup", None);
        let user = LinuxContainerSecurityContext { run_as_user: number(1000), ..plain() };
        check(user.clone(), "app", Some((1000, 0, &[0], "/")));
        let group = LinuxContainerSecurityContext {
            run_as_group: number(3000),
            supplemental_groups: vec![4000, 3000],
            ..user
        };
        check(group, "", Some((1000, 3000, &[3000, 4000], "/")));
        let strict = LinuxContainerSecurityContext {
            supplemental_groups_policy: SupplementalGroupsPolicy::Strict as i32,
            ..plain()
        };
        check(strict, "app", Some((101, 102, &[102], "/srv")));
    }
}
