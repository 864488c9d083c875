//! Pods with a user namespace (`hostUsers: false`).

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

/// A volume below directories that only the node's root may enter, with files of two owners.
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
fn root_in_the_pod_has_no_rights_on_the_node() {
    in_world(|world| async move {
        let place = make_volume(&world);
        let sandbox_config = pod(&world, "own", &options());
        let sandbox = world.runtime.run_pod_sandbox(sandbox_config.clone(), "").await;
        let sandbox = sandbox.expect("sandbox");
        let script = "while :; do echo hello | nc -l -p 80; done";
        let mut config = own("main", script, &options());
        config.mounts = vec![volume(&place, "/data")];
        let id = world.start(&sandbox, &sandbox_config, config).await;

        // The process has an unprivileged uid on the node, and is root in its user namespace.
        let status = std::fs::metadata(format!("/proc/{}", pid_of(&world, &id))).expect("runs");
        assert_eq!((status.uid(), status.gid()), (FIRST, FIRST));
        let (_, text) = world.exec(&id, "id -u; cat /proc/self/uid_map; hostname").await;
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words, ["0", "0", "65536", "65536", "own"], "{text}");
        // Files of the image and of the volume have the right owners.
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

        // The pod has its own network: a low port works, with the pod's settings.
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
        // Without the capability it is refused, also in a user namespace.
        assert!(code == 0 && !text.contains("mtu 1400"), "{text}");
    });
}

#[test]
fn the_nodes_resources_stay_inaccessible() {
    in_world(|world| async move {
        let place = make_volume(&world);
        let sandbox_config = pod(&world, "own", &options());
        let sandbox = world.runtime.run_pod_sandbox(sandbox_config.clone(), "").await;
        let sandbox = sandbox.expect("sandbox");
        let mut config = own("main", "sleep 600", &options());
        // Without mapping, the files have no owner inside.
        let plain =
            Mount { uid_mappings: vec![], gid_mappings: vec![], ..volume(&place, "/plain") };
        config.mounts = vec![plain, Mount { readonly: true, ..volume(&place, "/fixed") }];
        let config = with_security(config, |security| security.privileged = true);
        let id = world.start(&sandbox, &sandbox_config, config).await;
        let (_, text) = world.exec(&id, "stat -c %u:%g /plain/roots; touch /plain/x").await;
        assert!(text.starts_with("65534:65534\n") && text.contains("denied"), "{text}");
        let (code, text) = world.exec(&id, "touch /fixed/x || mount -o remount,rw /fixed").await;
        assert_ne!(code, 0, "{text}");
        // Privileged applies to the pod's own namespaces only: the node's devices and sysctls stay closed.
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

/// A process executes the container's command a moment after the start.
async fn both_are_seen(world: &World, from: &str, other: &str) {
    eventually("processes of both", async || {
        let (_, text) = world.exec(from, "ps; cat /proc/self/uid_map").await;
        assert!(text.contains("65536"), "{text}");
        (text.contains("sleep 601") && text.contains(other)).then_some(())
    })
    .await;
}

#[test]
fn user_namespaces_survive_a_restart_and_end_with_the_pod() {
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
        // The next container shares the user namespace, and sees the first one's processes.
        let mut second = own("second", "sleep 602", &shared);
        second.tty = true;
        let second = world.start(&sandbox, &sandbox_config, second).await;
        both_are_seen(&world, &second, "sleep 602").await;
        let (code, _) = world.exec(&first, "kill -0 1").await;
        assert_eq!(code, 0);
        // An ephemeral container joins the PID namespace of one container.
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
fn mappings_other_than_the_pods_are_refused() {
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
        // A source that cannot be mapped makes the start fail; it is never mounted unmapped.
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
        // Ids outside of the mapping are refused, too.
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
fn an_image_volume_belongs_to_the_pods_users() {
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
fn output_pipes_belong_to_the_containers_user() {
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
fn later_mounts_propagate_on_request() {
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
        // Mounts below are not mapped: their owners have no id inside.
        assert_eq!(text, "65534\n65534\n");
        assert_eq!(none, "");
    });
}
