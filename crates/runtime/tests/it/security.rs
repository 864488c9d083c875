//! Limits on containers: users, capabilities, seccomp, mounts, shared namespaces.

use cri::*;

use crate::world::{container, eventually, in_world, namespaces, sh, with_security};

#[test]
fn seccomp_applies_to_the_container_and_to_exec() {
    in_world(|world| async move {
        let script = "grep -E 'Seccomp:|NoNewPrivs' /proc/self/status; sleep 600";
        for no_new_privs in [false, true] {
            let config = with_security(container("c", script), |s| s.no_new_privs = no_new_privs);
            let (sandbox, id) = world.run("filter", config).await;
            let privileges = if no_new_privs { "NoNewPrivs:\t1" } else { "NoNewPrivs:\t0" };
            // The first process executes the container's command a moment after the start.
            eventually("the filter holds for both", async || {
                let (_, text) = world.exec(&id, "cat /proc/1/status; cat /proc/self/status").await;
                let both = |what: &str| text.matches(what).count() == 2;
                (both("Seccomp:\t2") && both(privileges)).then_some(())
            })
            .await;
            let (code, text) = world.exec(&id, "unshare -m true").await;
            assert!(code != 0 && text.contains("Operation not permitted"), "{text}");
            world.runtime.remove_pod_sandbox(&sandbox).await.expect("removed");
        }
        let unconfined = SecurityProfile {
            profile_type: ProfileType::Unconfined as i32,
            localhost_ref: String::new(),
        };
        let config = with_security(container("c", "sleep 600"), |s| s.seccomp = Some(unconfined));
        let (_, id) = world.run("unconfined", config).await;
        let (_, text) = world.exec(&id, "cat /proc/self/status").await;
        assert!(text.contains("Seccomp:\t0"), "{text}");

        let profile = world.directory.join("profile.json");
        let text = r#"{"defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}]}"#;
        std::fs::write(&profile, text).expect("written");
        let localhost = SecurityProfile {
            profile_type: ProfileType::Localhost as i32,
            localhost_ref: format!("localhost/{}", profile.display()),
        };
        let config = with_security(container("c", "sleep 600"), |s| s.seccomp = Some(localhost));
        let (_, id) = world.run("localhost", config).await;
        let (code, text) = world.exec(&id, "mkdir /tmp/x").await;
        assert!(code != 0 && text.contains("Operation not permitted"), "{text}");
    });
}

#[test]
fn users_groups_and_capabilities_follow_the_pod() {
    in_world(|world| async move {
        let config = with_security(container("c", "sleep 600"), |security| {
            security.run_as_user = Some(1000.into());
            security.run_as_group = Some(3000.into());
            security.supplemental_groups = vec![4000];
            security.readonly_rootfs = true;
        });
        let (_, id) = world.run("user", config).await;
        let (_, text) =
            world.exec(&id, "id -u; id -g; id -G; touch /x; grep CapEff /proc/self/status").await;
        let expected =
            "1000\n3000\n3000 4000\nCapEff:\t0000000000000000\ntouch: /x: Read-only file system\n";
        assert_eq!(text, expected);
        let (_, text) = world.exec(&id, "grep -E 'Uid|Gid|Groups|CapEff' /proc/1/status").await;
        assert!(
            text.contains("1000\t1000\t1000\t1000") && text.contains("CapEff:\t0000000000000000"),
            "{text}"
        );

        let config = with_security(container("c", "sleep 600"), |security| {
            security.capabilities = Some(Capability {
                add_capabilities: vec!["NET_ADMIN".into()],
                drop_capabilities: vec!["ALL".into()],
                ..Default::default()
            });
        });
        let (_, id) = world.run("caps", config).await;
        let (_, text) = world.exec(&id, "grep -h CapEff /proc/1/status /proc/self/status").await;
        assert_eq!(text, "CapEff:\t0000000000001000\n".repeat(2));

        let (_, id) = world.run("plain", container("c", "sleep 600")).await;
        let script = "grep CapEff /proc/self/status; cat /proc/sys/kernel/panic > /proc/sys/kernel/panic; \
                      touch /sys/x; echo $HOME $HOSTNAME; umask; ls /proc/1/fd; grep SigIgn /proc/1/status";
        let (_, text) = world.exec(&id, script).await;
        assert!(text.contains("CapEff:\t00000000a80425fb"), "{text}");
        assert_eq!(text.matches("Read-only file system").count(), 2, "{text}");
        assert!(text.contains("/root plain\n0022\n0\n1\n2\n"), "{text}");
        // SIGPIPE must end a program, so it must not be ignored.
        assert!(text.contains("SigIgn:\t000000000000000"), "{text}");
    });
}

#[test]
fn mounts_have_the_requested_options() {
    in_world(|world| async move {
        let host = world.directory.join("volume");
        std::fs::create_dir_all(host.join("sub")).expect("made");
        std::fs::write(host.join("file"), "content").expect("written");
        let mount = |at: &str, change: &dyn Fn(&mut Mount)| {
            let mut mount = Mount {
                container_path: at.into(),
                host_path: host.display().to_string(),
                ..Default::default()
            };
            change(&mut mount);
            mount
        };
        let file = host.join("file").display().to_string();
        let config = ContainerConfig {
            mounts: vec![
                mount("/rw", &|_| {}),
                mount("/ro", &|m| m.readonly = true),
                mount("/rro", &|m| (m.readonly, m.recursive_read_only) = (true, true)),
                mount("/slave", &|m| m.propagation = MountPropagation::HostToContainer as i32),
                mount("/etc/hosts", &|m| m.host_path = file.clone()),
                mount("/rw/sub/deep", &|m| m.readonly = true),
            ],
            ..container("c", "sleep 600")
        };
        let (_, id) = world.run("mounts", config).await;
        let (_, text) =
            world.exec(&id, "echo x > /rw/new; cat /etc/hosts; cat /rw/sub/deep/file").await;
        assert_eq!(text, "contentcontent");
        assert!(host.join("new").exists());
        for at in ["/ro", "/rro", "/rw/sub/deep"] {
            let (code, _) = world.exec(&id, &format!("touch {at}/y")).await;
            assert_ne!(code, 0, "{at}");
        }
        // A later mount on the host is visible where propagation is requested.
        let flags = nix::mount::MsFlags::empty();
        let later = host.join("sub");
        nix::mount::mount(Some("t"), &later, Some("tmpfs"), flags, None::<&str>).expect("mounted");
        std::fs::write(later.join("late"), "").expect("written");
        let (code, text) = world.exec(&id, "ls /slave/sub/late").await;
        let (private, seen) = world.exec(&id, "ls /ro/sub/late").await;
        nix::mount::umount(&later).expect("unmounted");
        assert_eq!(code, 0, "{text}");
        assert_ne!(private, 0, "{seen}");
    });
}

#[test]
fn mounts_propagate_to_the_host_on_request() {
    in_world(|world| async move {
        let host = world.directory.join("shared");
        std::fs::create_dir_all(host.join("sub")).expect("made");
        let mount = Mount {
            container_path: "/shared".into(),
            host_path: host.display().to_string(),
            propagation: MountPropagation::Bidirectional as i32,
            ..Default::default()
        };
        let config = ContainerConfig { mounts: vec![mount], ..container("c", "sleep 600") };
        let config = with_security(config, |security| security.privileged = true);
        let (_, id) = world.run("travel", config).await;
        let (code, text) =
            world.exec(&id, "mount -t tmpfs t /shared/sub && touch /shared/sub/inside").await;
        assert_eq!(code, 0, "{text}");
        assert!(host.join("sub/inside").exists());
        nix::mount::umount(&host.join("sub")).expect("it is mounted here, too");
        let (_, text) = world.exec(&id, "cat /proc/self/status; ls /dev").await;
        assert!(text.contains("Seccomp:\t0") && text.contains("kmsg"), "{text}");
    });
}

#[test]
fn namespaces_are_shared_on_request() {
    in_world(|world| async move {
        let mut pod = world.pod("together");
        let shared = NamespaceOption { pid: NamespaceMode::Pod as i32, ..namespaces() };
        let linux = pod.linux.as_mut().expect("there");
        linux.security_context.as_mut().expect("there").namespace_options = Some(shared.clone());
        linux.sysctls.insert("net.core.somaxconn".into(), "77".into());
        linux.sysctls.insert("kernel.shm_rmid_forced".into(), "1".into());
        let sandbox = world.runtime.run_pod_sandbox(pod.clone(), "").await.expect("sandbox");
        let one = with_security(container("one", "exec sleep 601"), |s| {
            s.namespace_options = Some(shared.clone());
        });
        let two = with_security(container("two", "exec sleep 602"), |s| {
            s.namespace_options = Some(shared.clone());
        });
        let first = world.start(&sandbox, &pod, one).await;
        let second = world.start(&sandbox, &pod, two).await;
        eventually("each sees the other's process", async || {
            let (_, text) = world.exec(&first, "ps").await;
            (text.contains("sleep 601") && text.contains("sleep 602")).then_some(())
        })
        .await;
        let script = "cat /proc/sys/net/core/somaxconn /proc/sys/kernel/shm_rmid_forced; \
                      ls /proc/1/root/; echo end; echo here > /dev/shm/note";
        let (_, text) = world.exec(&first, script).await;
        assert!(text.contains("77\n1\n"), "{text}");
        // The init of the shared namespace exposes nothing of the host.
        assert!(!text.contains("etc\n") && text.contains("end\n"), "{text}");
        let (_, text) = world.exec(&second, "cat /dev/shm/note").await;
        assert_eq!(text, "here\n");
        // The end of the first container does not affect the second.
        world.runtime.stop_container(&first, std::time::Duration::ZERO).await.expect("stopped");
        let (code, _) = world.exec(&second, "true").await;
        assert_eq!(code, 0);

        let mut pod = world.pod("host");
        pod.hostname = String::new();
        let options = NamespaceOption {
            network: NamespaceMode::Node as i32,
            pid: NamespaceMode::Node as i32,
            ipc: NamespaceMode::Node as i32,
            ..Default::default()
        };
        let linux = pod.linux.as_mut().expect("there");
        linux.security_context.as_mut().expect("there").namespace_options = Some(options.clone());
        let sandbox = world.runtime.run_pod_sandbox(pod.clone(), "").await.expect("sandbox");
        let config =
            with_security(container("c", "sleep 600"), |s| s.namespace_options = Some(options));
        let id = world.start(&sandbox, &pod, config).await;
        let (_, text) = world.exec(&id, "ip link; echo $$").await;
        assert!(text.contains("deca-test"), "{text}");
        let mine = std::fs::read_link("/proc/thread-self/ns/ipc").expect("a link");
        let theirs = world.runtime.exec_sync(&id, sh("readlink /proc/self/ns/ipc"), None).await;
        let theirs = theirs.expect("exec").stdout;
        assert_eq!(String::from_utf8_lossy(&theirs).trim(), mine.to_string_lossy());

        let mut pod = world.pod("bad");
        pod.linux.as_mut().expect("there").sysctls.insert("kernel.panic".into(), "1".into());
        assert!(world.runtime.run_pod_sandbox(pod, "").await.is_err());
    });
}
