//! Pods with users of their own (`hostUsers: false`).

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use cri::*;
use tokio::io::AsyncReadExt;

use crate::world::{World, container, eventually, in_world, namespaces, with_security};

const FIRST: u32 = 65536;

fn users(host_id: u32) -> UserNamespace {
    let range = vec![IDMapping { host_id, container_id: 0, length: 65536 }];
    UserNamespace { mode: NamespaceMode::Pod as i32, uids: range.clone(), gids: range }
}

fn options() -> NamespaceOption {
    NamespaceOption { userns_options: Some(users(FIRST)), ..namespaces() }
}

fn pod(world: &World, name: &str, options: &NamespaceOption) -> PodSandboxConfig {
    let mut pod = world.pod(name);
    let linux = pod.linux.as_mut().expect("there");
    linux.security_context.as_mut().expect("there").namespace_options = Some(options.clone());
    linux.sysctls.insert("net.core.somaxconn".into(), "77".into());
    linux.sysctls.insert("kernel.shm_rmid_forced".into(), "1".into());
    pod
}

fn own(name: &str, script: &str, options: &NamespaceOption) -> ContainerConfig {
    with_security(container(name, script), |security| {
        security.namespace_options = Some(options.clone());
    })
}

fn volume(host: &Path, at: &str) -> Mount {
    Mount {
        container_path: at.into(),
        host_path: host.display().to_string(),
        uid_mappings: users(FIRST).uids,
        gid_mappings: users(FIRST).gids,
        ..Default::default()
    }
}

/// A volume behind directories that are the node's root's alone, with files of two owners.
fn make_volume(world: &World) -> PathBuf {
    let place = world.directory.join("closed/volume");
    std::fs::create_dir_all(&place).expect("made");
    let closed = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(world.directory.join("closed"), closed).expect("closed");
    std::fs::write(place.join("roots"), "").expect("written");
    std::fs::write(place.join("users"), "").expect("written");
    std::os::unix::fs::chown(place.join("users"), Some(1000), Some(2000)).expect("given");
    place
}

fn pid_of(world: &World, id: &str) -> i32 {
    let path = world.config.run_dir.join("containers").join(&id[..20]).join("started.json");
    let text = std::fs::read_to_string(path).expect("a record");
    let record: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    record["pid"].as_i64().expect("a number") as i32
}

#[test]
fn root_inside_is_nobody_outside() {
    in_world(|world| async move {
        let place = make_volume(&world);
        let sandbox_config = pod(&world, "own", &options());
        let sandbox = world.runtime.run_pod_sandbox(sandbox_config.clone(), "").await;
        let sandbox = sandbox.expect("sandbox");
        let script = "while :; do echo hello | nc -l -p 80; done";
        let mut config = own("main", script, &options());
        config.mounts = vec![volume(&place, "/data")];
        let id = world.start(&sandbox, &sandbox_config, config).await;

        // Another user of the node, who may do nothing there, and the root of its own world here.
        let status = std::fs::metadata(format!("/proc/{}", pid_of(&world, &id))).expect("runs");
        assert_eq!((status.uid(), status.gid()), (FIRST, FIRST));
        let (_, text) = world.exec(&id, "id -u; cat /proc/self/uid_map; hostname").await;
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words, ["0", "0", "65536", "65536", "own"], "{text}");
        // Files of the image and of the volume have the owners that they should.
        let script =
            "stat -c %u:%g /bin/busybox /etc /data/roots /data/users /etc/resolv.conf /dev/shm";
        let (_, text) = world.exec(&id, script).await;
        assert_eq!(text, "0:0\n0:0\n0:0\n1000:2000\n0:0\n0:0\n");
        let script = "echo x > /data/new && touch /bin/mine /dev/shm/s && chown 5:6 /data/new && \
                      stat -c %u:%g /data/new /bin/mine";
        let (code, text) = world.exec(&id, script).await;
        assert_eq!((code, text.as_str()), (0, "5:6\n0:0\n"));
        let about = std::fs::metadata(place.join("new")).expect("written");
        assert_eq!((about.uid(), about.gid()), (5, 6), "owners on the disk are the pod's numbers");
        let upper = world.config.data_dir.join("containers").join(&id).join("upper");
        assert_eq!(std::fs::metadata(upper.join("bin/mine")).expect("there").uid(), FIRST);

        // The network is the pod's own: a low port, the pod's settings, and somebody answers.
        let (_, text) = world
            .exec(&id, "cat /proc/sys/net/core/somaxconn /proc/sys/kernel/shm_rmid_forced")
            .await;
        assert_eq!(text, "77\n1\n");
        let status = world.runtime.pod_sandbox_status(&sandbox).await.expect("there");
        let address = format!("{}:80", status.network.expect("a network").ip);
        let text = eventually("an answer", async || {
            let mut stream = tokio::net::TcpStream::connect(&address).await.ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await.ok()?;
            Some(text)
        })
        .await;
        assert_eq!(text, "hello\n");
        let (code, text) = world.exec(&id, "ip link set eth0 mtu 1400; ip link show eth0").await;
        // Not without the capability, user namespace or not.
        assert!(code == 0 && !text.contains("mtu 1400"), "{text}");
    });
}

#[test]
fn what_is_the_nodes_stays_out_of_reach() {
    in_world(|world| async move {
        let place = make_volume(&world);
        let sandbox_config = pod(&world, "own", &options());
        let sandbox = world.runtime.run_pod_sandbox(sandbox_config.clone(), "").await;
        let sandbox = sandbox.expect("sandbox");
        let mut config = own("main", "sleep 600", &options());
        // Not mapped: nobody's files inside.
        let plain =
            Mount { uid_mappings: vec![], gid_mappings: vec![], ..volume(&place, "/plain") };
        config.mounts = vec![plain, Mount { readonly: true, ..volume(&place, "/fixed") }];
        let config = with_security(config, |security| security.privileged = true);
        let id = world.start(&sandbox, &sandbox_config, config).await;
        let (_, text) = world.exec(&id, "stat -c %u:%g /plain/roots; touch /plain/x").await;
        assert!(text.starts_with("65534:65534\n") && text.contains("denied"), "{text}");
        let (code, text) = world.exec(&id, "touch /fixed/x || mount -o remount,rw /fixed").await;
        assert_ne!(code, 0, "{text}");
        // Privileged is so in its own world alone: devices and switches of the node are closed.
        for script in [
            "echo x > /dev/kmsg",
            "echo 1 > /proc/sys/vm/drop_caches",
            "echo c > /proc/sysrq-trigger",
            "mknod /tmp/null c 1 3",
            "ls /dev/.decapod",
        ] {
            let (code, text) = world.exec(&id, script).await;
            assert_ne!(code, 0, "{script}: {text}");
        }
        let (code, text) = world
            .exec(&id, "mkdir /m && mount -t tmpfs t /m && ip link set eth0 mtu 1400 && echo done")
            .await;
        assert_eq!((code, text.as_str()), (0, "done\n"));
        assert!(Path::new("/dev/null").exists(), "the node's devices are as they were");
    });
}

/// A process becomes the container's a moment after the start.
async fn both_are_seen(world: &World, from: &str, other: &str) {
    eventually("processes of both", async || {
        let (_, text) = world.exec(from, "ps; cat /proc/self/uid_map").await;
        assert!(text.contains("65536"), "{text}");
        (text.contains("sleep 601") && text.contains(other)).then_some(())
    })
    .await;
}

#[test]
fn users_survive_a_restart_and_go_with_the_pod() {
    in_world(|world| async move {
        let shared = NamespaceOption { pid: NamespaceMode::Pod as i32, ..options() };
        let sandbox_config = pod(&world, "own", &shared);
        let sandbox = world.runtime.run_pod_sandbox(sandbox_config.clone(), "").await;
        let sandbox = sandbox.expect("sandbox");
        let first = own("first", "exec sleep 601", &shared);
        let first = world.start(&sandbox, &sandbox_config, first).await;
        let world = world.restarted().await;
        let status = world.runtime.pod_sandbox_status(&sandbox).await.expect("there");
        assert_eq!(status.state(), PodSandboxState::Ready);
        let told = status.linux.expect("there").namespaces.expect("there").options.expect("there");
        assert_eq!(told.userns_options, Some(users(FIRST)));
        // The next container has the same users, and sees the first one's processes.
        let mut second = own("second", "sleep 602", &shared);
        second.tty = true;
        let second = world.start(&sandbox, &sandbox_config, second).await;
        both_are_seen(&world, &second, "sleep 602").await;
        let (code, _) = world.exec(&first, "kill -0 1").await;
        assert_eq!(code, 0);
        // An ephemeral one joins the processes of one container.
        let target = NamespaceOption {
            pid: NamespaceMode::Target as i32,
            target_id: first.clone(),
            ..options()
        };
        let third = own("third", "sleep 603", &target);
        let third = world.start(&sandbox, &sandbox_config, third).await;
        both_are_seen(&world, &third, "sleep 603").await;

        world.runtime.remove_pod_sandbox(&sandbox).await.expect("removed");
        let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").expect("mounts");
        let ours = world.config.run_dir.display().to_string();
        let left: Vec<&str> = mounts.lines().filter(|line| line.contains(&ours)).collect();
        assert!(left.is_empty(), "{left:#?}");
    });
}

#[test]
fn users_that_are_not_the_pods_are_refused() {
    in_world(|world| async move {
        let refused = async |options: NamespaceOption| {
            let made = world.runtime.run_pod_sandbox(pod(&world, "no", &options), "").await;
            let error = made.expect_err("refused");
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        };
        let node = NamespaceMode::Node as i32;
        refused(NamespaceOption { network: node, ..options() }).await;
        refused(NamespaceOption { userns_options: Some(users(0)), ..namespaces() }).await;
        let sandbox_config = pod(&world, "own", &options());
        let sandbox = world.runtime.run_pod_sandbox(sandbox_config.clone(), "").await;
        let sandbox = sandbox.expect("sandbox");
        let others =
            Mount { uid_mappings: users(2 * FIRST).uids, ..volume(&world.directory, "/data") };
        let with_others = ContainerConfig { mounts: vec![others], ..own("c", "true", &options()) };
        for config in [own("c", "true", &namespaces()), with_others] {
            let made = world.runtime.create_container(&sandbox, config, &sandbox_config).await;
            assert!(matches!(made, Err(Error::InvalidArgument(_))), "{made:?}");
        }
        // What cannot be mapped fails to start; it does not run with other rights.
        let nowhere = world.directory.join("overlay");
        for name in ["lower", "upper", "work", "merged"] {
            std::fs::create_dir_all(nowhere.join(name)).expect("made");
        }
        let texts =
            format!("lowerdir={0}/lower,upperdir={0}/upper,workdir={0}/work", nowhere.display());
        let merged = nowhere.join("merged");
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("o"), &merged, Some("overlay"), flags, Some(texts.as_str()))
            .expect("mounted");
        let mut config = own("overlay", "true", &options());
        config.mounts = vec![volume(&merged, "/data")];
        let id = world.runtime.create_container(&sandbox, config, &sandbox_config).await;
        let started = world.runtime.start_container(&id.expect("created")).await;
        nix::mount::umount(&merged).expect("unmounted");
        let text = started.expect_err("refused").to_string();
        assert!(text.contains("does not support mapped mounts"), "{text}");
        // Nor do ids that the pod does not have.
        for change in [
            |security: &mut LinuxContainerSecurityContext| {
                security.run_as_user = Some(Int64Value { value: 70_000 });
            },
            |security: &mut LinuxContainerSecurityContext| {
                security.supplemental_groups = vec![70_000];
            },
        ] {
            let config = with_security(own("beyond", "true", &options()), change);
            let id = world.runtime.create_container(&sandbox, config, &sandbox_config).await;
            assert!(world.runtime.start_container(&id.expect("created")).await.is_err());
        }
    });
}

#[test]
fn an_image_is_a_volume_of_the_pods_users() {
    in_world(|world| async move {
        let sandbox_config = pod(&world, "own", &options());
        let sandbox = world.runtime.run_pod_sandbox(sandbox_config.clone(), "").await;
        let sandbox = sandbox.expect("sandbox");
        let mut config = own("main", "id -u > /dev/stdout; sleep 600", &options());
        config.mounts = vec![Mount {
            image: Some(ImageSpec::named(crate::world::BUSYBOX)),
            host_path: String::new(),
            ..volume(Path::new(""), "/image")
        }];
        let config = with_security(config, |security| {
            security.run_as_user = Some(Int64Value { value: 1000 });
            security.run_as_group = Some(Int64Value { value: 1000 });
            security.supplemental_groups = vec![2000];
            security.no_new_privs = true;
        });
        let id = world.start(&sandbox, &sandbox_config, config).await;
        let (_, text) = world.exec(&id, "stat -c %u:%g /image/bin/busybox; id -G").await;
        assert_eq!(text, "0:0\n1000 2000\n");
        let (_, text) = world.exec(&id, "echo again > /dev/stdout").await;
        assert_eq!(text, "again\n");
        let log =
            eventually("output", async || Some(world.log(&id).await).filter(|l| !l.is_empty()));
        assert_eq!(log.await[0].2, "1000");
        let status = std::fs::metadata(format!("/proc/{}", pid_of(&world, &id))).expect("runs");
        assert_eq!(status.uid(), FIRST + 1000);
    });
}

#[test]
fn output_is_the_users_who_writes_it() {
    in_world(|world| async move {
        let config = container("main", "echo one > /dev/stdout; sleep 600");
        let config = with_security(config, |security| {
            security.run_as_user = Some(Int64Value { value: 1000 });
        });
        let (_, id) = world.run("usual", config).await;
        let log =
            eventually("output", async || Some(world.log(&id).await).filter(|l| !l.is_empty()));
        assert_eq!(log.await[0].2, "one");
        let (_, text) = world.exec(&id, "echo two > /dev/stderr").await;
        assert_eq!(text, "two\n");
    });
}

#[test]
fn later_mounts_come_inside_where_that_is_wanted() {
    in_world(|world| async move {
        let place = make_volume(&world);
        for name in ["first", "second"] {
            std::fs::create_dir_all(place.join(name)).expect("made");
        }
        let flags = nix::mount::MsFlags::empty();
        let mount = |name: &str| {
            let target = place.join(name);
            nix::mount::mount(Some("t"), &target, Some("tmpfs"), flags, None::<&str>)
                .expect("mounted");
            std::fs::write(target.join("file"), "").expect("written");
        };
        mount("first");
        let sandbox_config = pod(&world, "own", &options());
        let sandbox = world.runtime.run_pod_sandbox(sandbox_config.clone(), "").await;
        let sandbox = sandbox.expect("sandbox");
        let mut config = own("main", "sleep 600", &options());
        let follows = MountPropagation::HostToContainer as i32;
        config.mounts = vec![
            volume(&place, "/fixed"),
            Mount { propagation: follows, ..volume(&place, "/follows") },
        ];
        let id = world.start(&sandbox, &sandbox_config, config).await;
        mount("second");
        let (_, text) = world.exec(&id, "cd /follows && stat -c %u first/file second/file").await;
        let (_, none) = world.exec(&id, "ls /fixed/second").await;
        for name in ["first", "second"] {
            nix::mount::umount(&place.join(name)).expect("nothing holds it");
        }
        // What is mounted below is not mapped: nobody's.
        assert_eq!(text, "65534\n65534\n");
        assert_eq!(none, "");
    });
}
