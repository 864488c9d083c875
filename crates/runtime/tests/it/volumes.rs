//! Image volumes and host ports.

use cri::*;
use net::host_ports::none;
use net::nft::{Nft, Ruleset, diff};
use tokio::io::AsyncReadExt;

use crate::world::{BUSYBOX, container, eventually, in_world};

fn image_mount(at: &str, sub_path: &str) -> Mount {
    Mount {
        container_path: at.into(),
        image: Some(ImageSpec::named(BUSYBOX)),
        image_sub_path: sub_path.into(),
        ..Mount::default()
    }
}

#[test]
fn images_are_volumes() {
    in_world(|world| async move {
        let mut config = container("main", "sleep 600");
        config.mounts = vec![image_mount("/image", ""), image_mount("/below", "etc")];
        let (sandbox, id) = world.run("pod", config.clone()).await;
        let (code, text) =
            world.exec(&id, "cat /image/etc/passwd >/dev/null && ls /below/passwd").await;
        assert_eq!((code, text.as_str()), (0, "/below/passwd\n"));
        let (code, _) = world.exec(&id, "touch /image/new").await;
        assert_ne!(code, 0, "an image cannot be written");
        // After removal of the image, the container that uses it continues.
        world.runtime.remove_image(&ImageSpec::named(BUSYBOX)).await.expect("removed");
        let (code, _) = world.exec(&id, "cat /image/etc/passwd").await;
        assert_eq!(code, 0);
        let pod = world.pod("pod");
        let error = world.runtime.create_container(&sandbox, config, &pod).await;
        assert!(error.expect_err("no image").is_not_found());
    });
}

#[test]
fn a_sub_path_cannot_leave_its_image() {
    in_world(|world| async move {
        let pod = world.pod("pod");
        let sandbox = world.runtime.run_pod_sandbox(pod.clone(), "").await.expect("sandbox");
        for path in ["../..", "no/such"] {
            let mut config = container("main", "sleep 600");
            config.mounts = vec![image_mount("/image", path)];
            let made = world.runtime.create_container(&sandbox, config, &pod).await;
            assert!(made.is_err(), "{path}");
        }
    });
}

#[test]
fn host_ports_lead_into_pods() {
    in_world(|world| async move {
        let mut pod = world.pod("web");
        pod.port_mappings = vec![PortMapping {
            protocol: Protocol::Tcp as i32,
            container_port: 80,
            host_port: 8080,
            host_ip: "10.99.0.1".into(),
        }];
        let sandbox = world.runtime.run_pod_sandbox(pod.clone(), "").await.expect("sandbox");
        let script = "while :; do echo hello | nc -l -p 80; done";
        world.start(&sandbox, &pod, container("main", script)).await;
        let asked = async || {
            let mut stream = tokio::net::TcpStream::connect("10.99.0.1:8080").await.ok()?;
            let mut text = [0; 6];
            stream.read_exact(&mut text).await.ok()?;
            String::from_utf8(text.to_vec()).ok()
        };
        let text = eventually("an answer", &asked).await;
        assert_eq!(text, "hello\n");
        // All rules are flushed: the next pod with a host port restores the others' rules, too.
        let gone = diff(&none("deca-test-hostports"), &Ruleset::default());
        Nft::open().and_then(|mut nft| nft.apply(&gone)).expect("flushed");
        let mut other = world.pod("other");
        other.port_mappings = pod.port_mappings.clone();
        other.port_mappings[0].host_port = 8081;
        let other = world.runtime.run_pod_sandbox(other, "").await.expect("another sandbox");
        let text = eventually("an answer", &asked).await;
        assert_eq!(text, "hello\n");
        world.runtime.remove_pod_sandbox(&other).await.expect("removed");
        // The next runtime keeps the rules, and the end of the pod removes them.
        let world = world.restarted().await;
        let text = eventually("an answer", &asked).await;
        assert_eq!(text, "hello\n");
        world.runtime.stop_pod_sandbox(&sandbox).await.expect("stopped");
        // The namespace's loopback is down: a connection to the node itself gets no answer.
        let limit = std::time::Duration::from_secs(2);
        let answer = tokio::time::timeout(limit, asked()).await;
        assert!(!matches!(answer, Ok(Some(_))), "nothing listens on the node itself");
    });
}
