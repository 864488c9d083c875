//! The life of containers: start, logs, exit, limits, stop, removal.

use std::time::Duration;

use cri::*;

use crate::world::{container, eventually, in_world};

#[test]
fn a_container_runs_logs_and_stops_with_grace() {
    in_world(|world| async move {
        let script = "trap 'exit 3' TERM; echo out; echo err >&2; printf partial; \
                      while :; do sleep 0.05; done";
        let (sandbox, id) = world.run("web", container("main", script)).await;
        let status = world.runtime.container_status(&id).await.expect("status");
        assert_eq!(status.state(), ContainerState::Running);
        eventually("the log is written", async || {
            let log = world.log(&id).await;
            (log.len() == 2).then_some(())
        })
        .await;
        let (code, text) = world.exec(&id, "hostname; cat /etc/resolv.conf; exit 7").await;
        assert_eq!((code, text.as_str()), (7, "web\nnameserver 10.43.0.10\n"));

        let pod = world.runtime.pod_sandbox_status(&sandbox).await.expect("status");
        let address = pod.network.expect("a network").ip;
        assert_eq!(address, "10.99.0.2");
        let (_, text) = world.exec(&id, "ip -o -4 addr show eth0; ip route").await;
        assert!(text.contains("10.99.0.2/32") && text.contains("default via 10.99.0.1"), "{text}");

        world.runtime.stop_container(&id, Duration::from_secs(30)).await.expect("stopped");
        let status = world.runtime.container_status(&id).await.expect("status");
        assert_eq!((status.state(), status.exit_code), (ContainerState::Exited, 3));
        assert_eq!(status.reason, "Error");
        assert!(status.started_at > 0 && status.finished_at > status.started_at);
        let log = world.log(&id).await;
        let entry = |stream: &str, tag: &str, text: &str| (stream.into(), tag.into(), text.into());
        assert!(log.contains(&entry("stdout", "F", "out")), "{log:?}");
        assert!(log.contains(&entry("stderr", "F", "err")), "{log:?}");
        assert!(log.contains(&entry("stdout", "P", "partial")), "{log:?}");

        world.runtime.stop_pod_sandbox(&sandbox).await.expect("stopped");
        let pod = world.runtime.pod_sandbox_status(&sandbox).await.expect("status");
        assert_eq!(pod.state(), PodSandboxState::NotReady);
        world.runtime.remove_pod_sandbox(&sandbox).await.expect("removed");
        world.runtime.remove_pod_sandbox(&sandbox).await.expect("twice is fine");
        assert!(world.runtime.container_status(&id).await.expect_err("gone").is_not_found());
    });
}

#[test]
fn exit_codes_and_failed_starts_have_their_reasons() {
    in_world(|world| async move {
        let pod = world.pod("codes");
        let sandbox = world.runtime.run_pod_sandbox(pod.clone(), "").await.expect("sandbox");
        for (script, code, reason) in [
            ("exit 0", 0, "Completed"),
            ("exit 42", 42, "Error"),
            ("kill -9 $$; sleep 5; exit 1", 1, "Error"),
            ("sh -c 'kill -9 $$'; exit $?", 137, "Error"),
        ] {
            let id = world.start(&sandbox, &pod, container("c", script)).await;
            let status = world.ended(&id).await;
            // The first process of a namespace cannot kill itself: `kill -9 $$` does nothing there.
            assert_eq!((status.exit_code, status.reason.as_str()), (code, reason), "{script}");
        }
        for (command, part) in [
            ("nosuch", "exec: \"nosuch\": executable file not found in $PATH"),
            ("/no/such", "exec: \"/no/such\": stat /no/such: no such file or directory"),
            ("/etc/passwd", "exec: \"/etc/passwd\": permission denied"),
        ] {
            let config = ContainerConfig { command: vec![command.into()], ..container("c", "") };
            let id = world.runtime.create_container(&sandbox, config, &pod).await.expect("created");
            let error = world.runtime.start_container(&id).await.expect_err("no such program");
            assert!(error.to_string().contains(part), "{error}");
            let status = world.runtime.container_status(&id).await.expect("status");
            assert_eq!((status.exit_code, status.reason.as_str()), (128, "StartError"));
            assert!(status.message.contains(part), "{}", status.message);
        }
        let missing =
            ContainerConfig { image: Some(ImageSpec::named("nosuch")), ..container("c", "") };
        let error = world.runtime.create_container(&sandbox, missing, &pod).await;
        assert!(error.expect_err("no image").is_not_found());
    });
}

#[test]
fn limits_are_set_and_an_oom_kill_is_reported() {
    in_world(|world| async move {
        let mut config = container("hog", "x=a; while :; do x=$x$x; done");
        let linux = config.linux.as_mut().expect("there");
        linux.resources = Some(LinuxContainerResources {
            memory_limit_in_bytes: 32 << 20,
            cpu_shares: 512,
            cpu_quota: 50_000,
            cpu_period: 100_000,
            // Without CAP_SYS_RESOURCE the score is clamped, not refused.
            oom_score_adj: -997,
            ..Default::default()
        });
        let (_, id) = world.run("oom", config.clone()).await;
        let status = world.ended(&id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (137, "OOMKilled"));

        config.command = crate::world::sh("sleep 600");
        let (sandbox, id) = world.run("quiet", config).await;
        let stats = world.runtime.container_stats(&id).await.expect("stats");
        let memory = stats.memory.expect("memory");
        assert!(memory.usage_bytes.expect("usage").value > 0);
        assert!(memory.available_bytes.expect("available").value < 32 << 20);
        let new = LinuxContainerResources { memory_limit_in_bytes: 64 << 20, ..Default::default() };
        world.runtime.update_container_resources(&id, new).await.expect("updated");
        let stats = world.runtime.pod_sandbox_stats(&sandbox).await.expect("stats");
        let linux = stats.linux.expect("linux");
        assert_eq!(linux.containers.len(), 1);
        assert!(linux.network.expect("network").default_interface.is_some());
    });
}

#[test]
fn events_come_in_order_and_shims_are_small() {
    in_world(|world| async move {
        let mut events = world.runtime.events().await.expect("events");
        let before = tokio::time::Instant::now();
        let (sandbox, id) = world.run("events", container("c", "sleep 600")).await;
        println!("a pod with a container: {:?}", before.elapsed());
        // A process that is about to exec the container still has the shim's name.
        let shim = crate::world::eventually("one shim", async || {
            <[u64; 1]>::try_from(shim_sizes(&world.directory)).ok()
        });
        let [size] = shim.await;
        println!("private memory of the shim: {size} KiB");
        assert!(size < 4096, "{size} KiB");
        world.runtime.stop_container(&id, Duration::ZERO).await.expect("stopped");
        world.runtime.remove_container(&id).await.expect("removed");
        world.runtime.remove_pod_sandbox(&sandbox).await.expect("removed");
        let mut seen = Vec::new();
        use ContainerEventType::*;
        while seen.last() != Some(&("sandbox", Deleted)) {
            let event = testkit::wait::soon("an event", events.recv()).await.expect("an event");
            let what = if event.container_id == id { "container" } else { "sandbox" };
            seen.push((what, event.container_event_type()));
        }
        assert!(events.is_empty());
        let expected = [
            ("sandbox", Created),
            ("sandbox", Started),
            ("container", Created),
            ("container", Started),
            ("container", Stopped),
            ("container", Deleted),
            ("sandbox", Stopped),
            ("sandbox", Deleted),
        ];
        assert_eq!(seen, expected);
    });
}

/// Private KiB of the shims below the directory.
fn shim_sizes(directory: &std::path::Path) -> Vec<u64> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("proc").flatten() {
        let Ok(line) = std::fs::read_to_string(entry.path().join("cmdline")) else { continue };
        if line.starts_with("decapod-shim") && line.contains(directory.to_string_lossy().as_ref()) {
            let text =
                std::fs::read_to_string(entry.path().join("smaps_rollup")).unwrap_or_default();
            let of = |key: &str| -> u64 {
                let line = text.lines().find_map(|line| line.strip_prefix(key));
                line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0)
            };
            println!("a shim's resident memory: {} KiB", of("Rss:"));
            // Clean pages belong to the program and are shared by all shims.
            found.push(of("Private_Dirty:"));
        }
    }
    found
}

#[test]
fn many_pods_start_at_once() {
    const PODS: usize = 20;
    in_world(|world| async move {
        let before = tokio::time::Instant::now();
        let starting = (0..PODS).map(|n| {
            let world = &world;
            async move { world.run(&format!("many{n}"), container("c", "sleep 600")).await }
        });
        let pods = futures::future::join_all(starting).await;
        println!("{PODS} pods with a container each: {:?}", before.elapsed());
        let mut addresses = std::collections::BTreeSet::new();
        for (sandbox, id) in &pods {
            let status = world.runtime.container_status(id).await.expect("known");
            assert_eq!(status.state(), ContainerState::Running);
            let pod = world.runtime.pod_sandbox_status(sandbox).await.expect("known");
            addresses.insert(pod.network.expect("a network").ip);
        }
        assert_eq!(addresses.len(), PODS);
        let (_, first) = &pods[0];
        let other = addresses.iter().last().expect("there").clone();
        eventually("they reach each other", async || {
            let (code, text) = world.exec(first, &format!("ping -c 1 -W 5 {other}")).await;
            println!("{text}");
            (code == 0).then_some(())
        })
        .await;
        println!("private dirty memory of each shim: {:?} KiB", shim_sizes(&world.directory));
        let before = tokio::time::Instant::now();
        let ending = pods.iter().map(|(sandbox, _)| world.runtime.remove_pod_sandbox(sandbox));
        for removed in futures::future::join_all(ending).await {
            removed.expect("removed");
        }
        println!("and gone: {:?}", before.elapsed());
    });
}
