//! Attacks from hostile containers: on their own limits, the host's binary, the kernel's settings,
//! and their end.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use cri::*;

use crate::world::{World, container, eventually, in_world, sh};

/// The container's cgroup in one version 1 hierarchy, if that is mounted.
fn hierarchy(world: &World, controller: &str, pod: &str, id: &str) -> Option<PathBuf> {
    let point = PathBuf::from("/sys/fs/cgroup").join(controller);
    let cgroup = format!("{}/{pod}/{id}", world.cgroup);
    let path = point.join(cgroup.trim_start_matches('/'));
    path.is_dir().then_some(path)
}

/// The pid of the container's shim.
fn shim_of(world: &World, id: &str) -> i32 {
    let expected = world.config.run_dir.join("containers").join(&id[..20]).join("shim.json");
    let processes = fs::read_dir("/proc").expect("processes").flatten();
    let found = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let mut found = found.filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        line.starts_with("decapod-shim\0") && line.contains(&*expected.to_string_lossy())
    });
    found.next().expect("it has a shim")
}

#[test]
fn a_container_sees_its_own_cgroup_and_cannot_change_it() {
    in_world(|world| async move {
        let (_, id) = world.run("cgroup", container("c", "sleep 600")).await;
        let script = "for d in /sys/fs/cgroup /sys/fs/cgroup/*; do \
                        mkdir $d/evil && echo wrote $d; \
                        for f in $d/tasks $d/cgroup.procs $d/memory.limit_in_bytes $d/pids.max; do \
                          [ -e $f ] && cat $f > /tmp/was && cat /tmp/was > $f && echo wrote $f; \
                        done; \
                      done 2>/dev/null; \
                      grep ' - cgroup' /proc/self/mountinfo; cat /proc/1/cgroup";
        let (_, text) = world.exec(&id, script).await;
        assert!(!text.contains("wrote"), "{text}");
        let mounts: Vec<&str> = text.lines().filter(|line| line.contains(" - cgroup")).collect();
        assert!(!mounts.is_empty(), "{text}");
        for mount in mounts {
            let options = mount.split(' ').nth(5).unwrap_or_default();
            assert!(options.split(',').any(|option| option == "ro"), "{mount}");
        }
        assert!(!text.contains("shims"), "a hierarchy shows what is shared: {text}");
        if hierarchy(&world, "memory", "cgroup", &id).is_some() {
            let (code, text) =
                world.exec(&id, "cat /sys/fs/cgroup/memory/memory.limit_in_bytes").await;
            assert_eq!(code, 0, "it may look: {text}");
        }
    });
}

#[test]
fn memory_and_swap_are_limited_together() {
    in_world(|world| async move {
        const MIB: i64 = 1 << 20;
        let limits = |memory: i64| LinuxContainerResources {
            memory_limit_in_bytes: memory,
            memory_swap_limit_in_bytes: memory,
            ..Default::default()
        };
        let probe = PathBuf::from("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes");
        if !probe.exists() {
            println!("skipped: this kernel does not count swap in cgroups of version 1");
            return;
        }
        let mut config = container("c", "sleep 600");
        config.linux.as_mut().expect("there").resources = Some(limits(32 * MIB));
        let (_, id) = world.run("swap", config).await;
        let cgroup = hierarchy(&world, "memory", "swap", &id).expect("it has one");
        let read = |file: &str| {
            let text = fs::read_to_string(cgroup.join(file)).expect("a limit");
            text.trim().parse::<i64>().expect("a number")
        };
        let both = || (read("memory.limit_in_bytes"), read("memory.memsw.limit_in_bytes"));
        assert_eq!(both(), (32 * MIB, 32 * MIB));
        for memory in [64 * MIB, 48 * MIB] {
            let changed = world.runtime.update_container_resources(&id, limits(memory)).await;
            changed.expect("changed");
            assert_eq!(both(), (memory, memory));
        }
    });
}

#[test]
fn a_frozen_container_is_stopped_in_its_time() {
    in_world(|world| async move {
        let (sandbox, id) = world.run("frozen", container("c", "sleep 600")).await;
        let Some(freezer) = hierarchy(&world, "freezer", "frozen", &id) else {
            println!("skipped: no freezer of version 1 here");
            return;
        };
        let inner = freezer.join("inner");
        fs::create_dir(&inner).expect("made");
        for cgroup in [&inner, &freezer] {
            fs::write(cgroup.join("freezer.state"), "FROZEN").expect("frozen");
        }
        // A process that joins the cgroup is frozen, too, and the shim waits for it.
        let runtime = world.runtime.clone();
        let hung = id.clone();
        let executing = async move { runtime.exec_sync(&hung, sh("true"), None).await };
        let stopping = async {
            let procs = freezer.join("cgroup.procs");
            eventually("the exec hangs in the cgroup", async || {
                let text = fs::read_to_string(&procs).unwrap_or_default();
                (text.lines().count() > 1).then_some(())
            })
            .await;
            world.runtime.stop_container(&id, Duration::from_secs(1)).await
        };
        let (executed, stopped) = futures::future::join(executing, stopping).await;
        stopped.expect("stopped");
        assert!(!executed.is_ok_and(|answer| answer.exit_code == 0));
        let status = world.runtime.container_status(&id).await.expect("there");
        assert_eq!((status.state(), status.exit_code), (ContainerState::Exited, 137));
        world.runtime.remove_pod_sandbox(&sandbox).await.expect("removed");
        assert!(!freezer.exists());
    });
}

#[test]
fn containers_cannot_write_to_the_hosts_binary() {
    in_world(|world| async move {
        let (_, id) = world.run("program", container("c", "sleep 600")).await;
        let pid = shim_of(&world, &id);
        let exe = fs::File::open(format!("/proc/{pid}/exe")).expect("opened");
        let mount = nix::sys::statvfs::fstatvfs(&exe).expect("told");
        assert!(mount.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY));
        // The executable shares the file's pages: a container needs no copy.
        use std::os::unix::fs::MetadataExt;
        let file = fs::metadata(&world.config.executable).expect("there");
        let same = exe.metadata().expect("told");
        assert_eq!((same.dev(), same.ino()), (file.dev(), file.ino()));
    });
}

#[test]
fn a_container_ends_when_its_shim_gets_sigterm() {
    in_world(|world| async move {
        let script = "trap '' TERM; while true; do sleep 1; done";
        let (_, id) = world.run("shutdown", container("c", script)).await;
        let pid = nix::unistd::Pid::from_raw(shim_of(&world, &id));
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("told");
        let status = world.ended(&id).await;
        assert_eq!(status.exit_code, 137);
    });
}

#[test]
fn mounts_into_proc_are_refused() {
    in_world(|world| async move {
        let volume = world.directory.join("volume");
        fs::create_dir_all(&volume).expect("made");
        std::os::unix::fs::symlink("/proc", volume.join("link")).expect("linked");
        let pod = world.pod("proc");
        let sandbox = world.runtime.run_pod_sandbox(pod.clone(), "").await.expect("sandbox");
        let mount = |at: &str| Mount {
            container_path: at.into(),
            host_path: volume.display().to_string(),
            ..Default::default()
        };
        let asked = |mounts| ContainerConfig { mounts, ..container("c", "sleep 600") };

        let plain = asked(vec![mount("/proc/sys/kernel")]);
        let refused = world.runtime.create_container(&sandbox, plain, &pod).await;
        let error = refused.expect_err("refused").to_string();
        assert!(error.contains("inside /proc"), "{error}");

        let linked = asked(vec![mount("/volume"), mount("/volume/link/sys/kernel")]);
        let id = world.runtime.create_container(&sandbox, linked, &pod).await.expect("created");
        let error = world.runtime.start_container(&id).await.expect_err("refused").to_string();
        assert!(error.contains("inside /proc"), "{error}");
        let status = world.runtime.container_status(&id).await.expect("there");
        assert_eq!(status.state(), ContainerState::Exited);
    });
}
