//! Control groups: their version, and the controllers that pods' limits need.

use super::Report;
use super::machine::Machine;

const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];
const WANTED: [&str; 2] = ["cpuset", "hugetlb"];

pub fn check(machine: &Machine, report: &mut Report) {
    let found = match machine.read("/sys/fs/cgroup/cgroup.controllers") {
        Some(text) => {
            report.ok("cgroups", "version 2");
            text.split_whitespace().map(str::to_owned).collect()
        }
        None => {
            let enabled = of_version_1(&machine.read("/proc/cgroups").unwrap_or_default());
            let is_mounted = |name: &String| {
                let mounts = machine.read("/proc/self/mountinfo").unwrap_or_default();
                mounts.lines().any(|line| has_controller(line, name))
            };
            match enabled.iter().any(is_mounted) {
                true => report.warning(
                    "cgroups",
                    "version 1",
                    "version 2 has more features: boot with systemd.unified_cgroup_hierarchy=1",
                ),
                false => report.missing(
                    "cgroups",
                    "not mounted",
                    "mount them: mount -t cgroup2 none /sys/fs/cgroup",
                ),
            }
            enabled
        }
    };
    for name in NEEDED {
        let check = format!("cgroup controller {name}");
        match found.iter().any(|one| one == name) {
            true => report.ok(&check, "there"),
            false if name == "memory" => report.missing(
                &check,
                "not enabled",
                "add `cgroup_enable=memory cgroup_memory=1` to the kernel's command line (on a Raspberry Pi, cmdline.txt) and reboot",
            ),
            false => report.missing(
                &check,
                "not enabled",
                format!("use a kernel that has it, and remove cgroup_disable={name} from its command line"),
            ),
        }
    }
    for name in WANTED {
        if !found.iter().any(|one| one == name) {
            report.warning(
                &format!("cgroup controller {name}"),
                "not enabled",
                "pods with CPUs of their own or huge pages need it",
            );
        }
    }
}

/// `name hierarchy cgroups enabled`
fn of_version_1(text: &str) -> Vec<String> {
    let enabled = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next().filter(|name| !name.starts_with('#'))?;
        (words.nth(2)? == "1").then(|| name.to_owned())
    };
    text.lines().filter_map(enabled).collect()
}

fn has_controller(mount: &str, name: &str) -> bool {
    let Some((_, right)) = mount.split_once(" - cgroup ") else { return false };
    right.split([' ', ',']).any(|word| word == name)
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::super::machine::tests::machine;
    use super::*;

    fn states(files: &[(&str, &str)]) -> Vec<(String, State)> {
        let (_root, machine) = machine(files);
        let mut report = Report::default();
        check(&machine, &mut report);
        report.0.into_iter().map(|line| (line.check, line.state)).collect()
    }

    #[test]
    fn both_versions_are_known() {
        let of = |found: &[(String, State)], check: &str| {
            found.iter().find(|(name, _)| name == check).map(|(_, state)| *state)
        };
        let second = states(&[("sys/fs/cgroup/cgroup.controllers", "cpuset cpu hugetlb pids\n")]);
        assert_eq!(of(&second, "cgroups"), Some(State::Ok));
        assert_eq!(of(&second, "cgroup controller cpu"), Some(State::Ok));
        assert_eq!(of(&second, "cgroup controller memory"), Some(State::Missing));

        let table = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t5\t1\nmemory\t2\t5\t0\npids\t3\t5\t1\n";
        let mount = "32 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n";
        let first = states(&[("proc/cgroups", table), ("proc/self/mountinfo", mount)]);
        assert_eq!(of(&first, "cgroups"), Some(State::Warning));
        assert_eq!(of(&first, "cgroup controller pids"), Some(State::Ok));
        assert_eq!(of(&first, "cgroup controller memory"), Some(State::Missing));
        assert_eq!(of(&first, "cgroup controller hugetlb"), Some(State::Warning));
        assert_eq!(of(&states(&[]), "cgroups"), Some(State::Missing));
    }
}
