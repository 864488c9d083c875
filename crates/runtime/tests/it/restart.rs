//! The backend stops, or is killed, and restarts.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use cri::*;
use tokio::io::AsyncReadExt;

use crate::world::{World, config, container, eventually, in_world};

/// Set in the process that the test will kill: its directory.
const CHILD: &str = "DECAPOD_RUNTIME_TEST_CHILD";
const SCRIPT: &str = "trap 'exit 3' TERM; while :; do echo tick; sleep 0.05; done";

#[test]
fn containers_survive_a_killed_backend() {
    if let Some(directory) = std::env::var_os(CHILD) {
        return play_the_victim(directory.as_ref());
    }
    in_world(|world| async move {
        let mut victim = Command::new(std::env::current_exe().expect("our own path"))
            .args(["--exact", "restart::containers_survive_a_killed_backend", "--nocapture"])
            .env(CHILD, &world.directory)
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let mut lines = BufReader::new(victim.stdout.take().expect("piped")).lines();
        let ids = lines.find_map(|line| Some(line.ok()?.split_once("ids ")?.1.to_owned()));
        let ids = ids.expect("the victim says what it started");
        let (stays, dies) = ids.split_once(' ').expect("two ids");
        victim.kill().expect("killed");
        victim.wait().expect("reaped");

        let run_dir = world.config.run_dir.clone();
        let started = |id: &str| {
            let path = run_dir.join("containers").join(&id[..20]).join("started.json");
            let text = std::fs::read_to_string(path).expect("a record");
            let record: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            record["pid"].as_i64().expect("a pid")
        };
        let pid = started(stays);
        // One container ends while no backend runs.
        // SAFETY: a plain system call.
        unsafe { libc::kill(started(dies) as i32, libc::SIGTERM) };
        let exit = world.config.data_dir.join("containers").join(dies).join("exit.json");
        eventually("the shim records the end", async || exit.exists().then_some(())).await;

        let world = world.restarted().await;
        let status = world.runtime.container_status(dies).await.expect("known");
        assert_eq!((status.state(), status.exit_code), (ContainerState::Exited, 3));
        let status = world.runtime.container_status(stays).await.expect("known");
        assert_eq!(status.state(), ContainerState::Running);
        assert_eq!(started(stays), pid);
        assert_eq!(status.metadata.expect("metadata").name, "stays");
        let (_, text) = world.exec(stays, "echo $$ hello").await;
        assert!(text.ends_with("hello\n"), "{text}");
        let before = world.log(stays).await.len();
        eventually("the log goes on", async || {
            (world.log(stays).await.len() > before).then_some(())
        })
        .await;
        let pods = world.runtime.list_pod_sandbox(None).await.expect("pods");
        assert!(pods.iter().all(|pod| pod.state() == PodSandboxState::Ready));
        world.runtime.stop_container(stays, Duration::from_secs(30)).await.expect("stopped");
        let status = world.runtime.container_status(stays).await.expect("known");
        assert_eq!((status.state(), status.exit_code), (ContainerState::Exited, 3));
    });
}

fn play_the_victim(directory: &std::path::Path) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let world = World::open(config(directory), directory).await;
        let (_, stays) = world.run("stays", container("stays", SCRIPT)).await;
        let (_, dies) = world.run("dies", container("dies", SCRIPT)).await;
        for id in [&stays, &dies] {
            // Output shows that the trap is set.
            eventually("output", async || (!world.log(id).await.is_empty()).then_some(())).await;
        }
        println!("ids {stays} {dies}");
        std::future::pending::<()>().await;
    });
}

#[test]
fn a_killed_shim_takes_its_container_along() {
    in_world(|world| async move {
        let (_, id) = world.run("shim", container("c", "sleep 600")).await;
        let path = world.config.run_dir.join("containers").join(&id[..20]).join("started.json");
        let text = std::fs::read_to_string(path).expect("a record");
        let record: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let of = |key: &str| record[key].as_i64().expect("a number") as i32;
        // SAFETY: a plain system call.
        unsafe { libc::kill(of("shim_pid"), libc::SIGKILL) };
        let status = world.ended(&id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (255, "Unknown"));
        eventually("the container is killed", async || {
            let text = std::fs::read_to_string(format!("/proc/{}/stat", of("pid"))).ok();
            // The process stays a zombie until its new parent reaps it.
            text.is_none_or(|text| text.contains(") Z ")).then_some(())
        })
        .await;
    });
}

#[test]
fn created_and_stopped_containers_are_restored() {
    in_world(|world| async move {
        let pod = world.pod("read");
        let sandbox = world.runtime.run_pod_sandbox(pod.clone(), "").await.expect("sandbox");
        let config = container("c", "exit 4");
        let id = world.runtime.create_container(&sandbox, config, &pod).await.expect("created");
        let world = world.restarted().await;
        let status = world.runtime.container_status(&id).await.expect("known");
        assert_eq!(status.state(), ContainerState::Created);
        world.runtime.start_container(&id).await.expect("started");
        assert_eq!(world.ended(&id).await.exit_code, 4);
        world.runtime.stop_pod_sandbox(&sandbox).await.expect("stopped");
        let world = world.restarted().await;
        let status = world.runtime.pod_sandbox_status(&sandbox).await.expect("known");
        assert_eq!(status.state(), PodSandboxState::NotReady);
        assert_eq!(world.runtime.container_status(&id).await.expect("known").exit_code, 4);
        let image = ImageSpec::named(crate::world::BUSYBOX);
        assert!(world.runtime.image_status(&image).await.expect("asked").is_some());
    });
}

#[test]
fn a_backend_killed_at_any_moment_leaves_nothing_behind() {
    if let Some(directory) = std::env::var_os(CHILD) {
        return churn(directory.as_ref());
    }
    const NAME: &str = "restart::a_backend_killed_at_any_moment_leaves_nothing_behind";
    in_world(|world| async move {
        let mut world = world;
        for round in 0..6u64 {
            let mut victim = Command::new(std::env::current_exe().expect("our own path"))
                .args(["--exact", NAME, "--nocapture"])
                .env(CHILD, &world.directory)
                .stdout(Stdio::piped())
                .spawn()
                .expect("started");
            let mut lines = BufReader::new(victim.stdout.take().expect("piped")).lines();
            let ready = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("ready")));
            assert!(ready.is_some());
            tokio::time::sleep(Duration::from_millis(37 * (round * round + 1))).await;
            victim.kill().expect("killed");
            victim.wait().expect("reaped");
            world = world.restarted().await;
            for container in world.runtime.list_containers(None).await.expect("listed") {
                let status = world.runtime.container_status(&container.id).await.expect("known");
                match status.state() {
                    // Running containers accept exec and stop.
                    ContainerState::Running => {
                        let command = vec!["true".into()];
                        let answer = world.runtime.exec_sync(&container.id, command, None).await;
                        // The container may end at this moment.
                        assert!(
                            matches!(answer, Ok(_) | Err(Error::FailedPrecondition(_))),
                            "{answer:?}"
                        );
                    }
                    // The backend was killed between recording the start and starting the shim.
                    ContainerState::Exited if status.started_at == 0 => {
                        assert_eq!(status.reason, "Unknown", "{status:?}");
                    }
                    ContainerState::Exited => assert_eq!(status.exit_code, 0, "{status:?}"),
                    _ => {}
                }
            }
            for pod in world.runtime.list_pod_sandbox(None).await.expect("listed") {
                world.runtime.remove_pod_sandbox(&pod.id).await.expect("removed");
            }
            assert!(world.runtime.list_containers(None).await.expect("listed").is_empty());
            let left = |kind: &str| {
                let directory = world.config.data_dir.join(kind);
                std::fs::read_dir(directory).map_or(0, Iterator::count)
            };
            assert_eq!((left("containers"), left("sandboxes")), (0, 0), "round {round}");
        }
    });
}

/// Creates and removes pods concurrently until the process is killed.
fn churn(directory: &std::path::Path) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let world = World::open(config(directory), directory).await;
        println!("ready");
        let lanes = (0..3).map(|lane| {
            let world = &world;
            async move {
                for number in 0.. {
                    let name = format!("churn{lane}-{number}");
                    let (sandbox, id) = world.run(&name, container("c", "exit 0")).await;
                    world.ended(&id).await;
                    if number % 2 == 0 {
                        world.runtime.remove_pod_sandbox(&sandbox).await.expect("removed");
                    }
                }
            }
        });
        futures::future::join_all(lanes).await;
    });
}

#[test]
fn containers_do_not_restart_after_a_reboot() {
    in_world(|world| async move {
        let (sandbox, id) = world.run("reboot", container("c", "sleep 600")).await;
        // Simulates a reboot: processes, namespaces and `/run` are gone, the disk is not.
        let sandboxes = world.config.run_dir.join("sandboxes");
        for pin in ["net", "uts", "ipc"] {
            nix::mount::umount(&sandboxes.join(&sandbox[..20]).join(pin)).expect("unpinned");
        }
        let started = world.config.run_dir.join("containers").join(&id[..20]).join("started.json");
        let text = std::fs::read_to_string(started).expect("a record");
        let record: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        world.tasks.shutdown(crate::world::LIMIT).await;
        for key in ["shim_pid", "pid"] {
            // SAFETY: a plain system call.
            unsafe { libc::kill(record[key].as_i64().expect("a number") as i32, libc::SIGKILL) };
        }
        std::fs::remove_dir_all(&world.config.run_dir).expect("removed");
        let world = world.restarted().await;
        let status = world.runtime.container_status(&id).await.expect("known");
        assert_eq!((status.state(), status.exit_code), (ContainerState::Exited, 255));
        let status = world.runtime.pod_sandbox_status(&sandbox).await.expect("known");
        assert_eq!(status.state(), PodSandboxState::NotReady);
        assert!(world.runtime.start_container(&id).await.is_err());
        world.runtime.remove_pod_sandbox(&sandbox).await.expect("removed");
    });
}

#[test]
fn bridged_pods_of_an_old_version_are_routed_after_a_restart() {
    in_world(|world| async move {
        let server = container("main", "while :; do echo hello | nc -l -p 80; done");
        let (sandbox, _) = world.run("pod", server).await;
        let asked = async || {
            let mut stream = tokio::net::TcpStream::connect("10.99.0.2:80").await.ok()?;
            let mut text = [0; 6];
            stream.read_exact(&mut text).await.ok()?;
            String::from_utf8(text.to_vec()).ok()
        };
        assert_eq!(eventually("an answer", &asked).await, "hello\n");
        let links = net::Links::open().expect("netlink");
        let veth = format!("veth{}", &sandbox[..10]);
        let port = links.link(&veth).await.expect("the pod's").index;
        let bridge = links.link("deca-test").await.expect("the runtime's").index;
        links.remove_route("10.99.0.2/32".parse().expect("a network")).await.expect("no route");
        links.set_controller(port, Some(bridge)).await.expect("a port of the bridge");
        let world = world.restarted().await;
        assert_eq!(links.link(&veth).await.expect("the pod's").controller, None);
        assert_eq!(eventually("an answer", &asked).await, "hello\n");
        world.runtime.remove_pod_sandbox(&sandbox).await.expect("removed");
    });
}
