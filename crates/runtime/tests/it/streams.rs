//! exec and attach with and without a terminal, port-forward.

use std::time::Duration;

use cri::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::world::{LIMIT, container, eventually, in_world, sh};

async fn all(mut from: Output) -> String {
    let mut text = String::new();
    testkit::wait::soon("the end", from.read_to_string(&mut text)).await.expect("read");
    text
}

async fn until(from: &mut Output, what: &str) -> String {
    let mut text = String::new();
    let mut buffer = [0; 256];
    while !text.contains(what) {
        let n = tokio::time::timeout(LIMIT, from.read(&mut buffer)).await;
        let n =
            n.unwrap_or_else(|_| panic!("{what:?} does not come; so far {text:?}")).expect("read");
        assert!(n > 0, "the end came before {what:?}: {text:?}");
        text.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
    text
}

#[test]
fn exec_streams_carry_bytes_and_the_exit_code() {
    in_world(|world| async move {
        let (_, id) = world.run("exec", container("c", "sleep 600")).await;
        let request = ExecRequest {
            container_id: id.clone(),
            cmd: sh("cat; echo done >&2; exit 9"),
            stdin: true,
            stdout: true,
            stderr: true,
            tty: false,
        };
        let streams = world.runtime.exec(request).await.expect("exec");
        let mut stdin = streams.stdin.expect("stdin");
        stdin.write_all(b"hello\n").await.expect("written");
        stdin.shutdown().await.expect("closed");
        assert_eq!(all(streams.stdout.expect("stdout")).await, "hello\n");
        assert_eq!(all(streams.stderr.expect("stderr")).await, "done\n");
        assert_eq!(streams.exit.await.expect("told"), Ok(9));

        let error = world.runtime.exec_sync(&id, vec!["nosuch".into()], None).await;
        let text = error.expect_err("no such program").to_string();
        assert!(text.contains("executable file not found in $PATH"), "{text}");
        let slow =
            world.runtime.exec_sync(&id, sh("sleep 300 & wait"), Some(Duration::from_millis(300)));
        assert!(matches!(slow.await, Err(Error::DeadlineExceeded(_))));
        eventually("the command that took too long is killed", async || {
            let (_, text) = world.exec(&id, "ps").await;
            (!text.contains("sleep 300")).then_some(())
        })
        .await;
        // A child process that keeps the output open does not delay the answer.
        let (code, text) = world.exec(&id, "sleep 30 & echo quick").await;
        assert_eq!((code, text.as_str()), (0, "quick\n"));
    });
}

#[test]
fn a_terminal_has_a_size_and_a_session() {
    in_world(|world| async move {
        let (_, id) = world.run("tty", container("c", "sleep 600")).await;
        let request = ExecRequest {
            container_id: id.clone(),
            cmd: vec!["/bin/sh".into()],
            stdin: true,
            stdout: true,
            stderr: false,
            tty: true,
        };
        let streams = world.runtime.exec(request).await.expect("exec");
        let resize = streams.resize.expect("a terminal");
        resize.send(TerminalSize { width: 132, height: 43 }).await.expect("sent");
        let (mut stdin, mut stdout) = (streams.stdin.expect("in"), streams.stdout.expect("out"));
        eventually("the size is set", async || {
            stdin.write_all(b"stty size; tty; echo end=$TERM\n").await.expect("written");
            let text = until(&mut stdout, "end=xterm").await;
            (text.contains("43 132") && text.contains("/dev/pts/")).then_some(())
        })
        .await;
        stdin.write_all(b"exit 5\n").await.expect("written");
        assert_eq!(streams.exit.await.expect("told"), Ok(5));
    });
}

#[test]
fn attach_reaches_the_containers_own_streams() {
    in_world(|world| async move {
        let config = ContainerConfig {
            stdin: true,
            stdin_once: true,
            ..container("c", "while read x; do echo got $x; done; echo eof >&2")
        };
        let (_, id) = world.run("attach", config).await;
        let request = AttachRequest {
            container_id: id.clone(),
            stdin: true,
            stdout: true,
            stderr: true,
            tty: false,
        };
        let streams = world.runtime.attach(request.clone()).await.expect("attached");
        let (mut stdin, mut stdout) = (streams.stdin.expect("in"), streams.stdout.expect("out"));
        stdin.write_all(b"one\n").await.expect("written");
        until(&mut stdout, "got one\n").await;
        stdin.shutdown().await.expect("closed");
        assert_eq!(all(streams.stderr.expect("err")).await, "eof\n");
        assert_eq!(world.ended(&id).await.exit_code, 0);

        let config = ContainerConfig { stdin: true, tty: true, ..container("t", "") };
        let config = ContainerConfig { command: vec!["/bin/sh".into()], ..config };
        let (_, id) = world.run("attach-tty", config).await;
        let request =
            AttachRequest { container_id: id.clone(), tty: true, stderr: false, ..request };
        let streams = world.runtime.attach(request).await.expect("attached");
        let (mut stdin, mut stdout) = (streams.stdin.expect("in"), streams.stdout.expect("out"));
        stdin.write_all(b"echo a$((1+1))c\n").await.expect("written");
        until(&mut stdout, "a2c").await;
        stdin.write_all(b"exit 4\n").await.expect("written");
        assert_eq!(world.ended(&id).await.exit_code, 4);
        let log = world.log(&id).await;
        assert!(log.iter().any(|(stream, _, text)| stream == "stdout" && text == "a2c"), "{log:?}");
    });
}

#[test]
fn ports_are_forwarded_to_the_pods_own_loopback() {
    in_world(|world| async move {
        let script = "while :; do echo pong | nc -l -p 8080; done";
        let (sandbox, _) = world.run("forward", container("c", script)).await;
        let text = eventually("the server answers", async || {
            let mut io = world.runtime.port_forward(&sandbox, 8080).await.ok()?;
            let mut text = String::new();
            io.read_to_string(&mut text).await.ok()?;
            (!text.is_empty()).then_some(text)
        })
        .await;
        assert_eq!(text, "pong\n");
        assert!(world.runtime.port_forward(&sandbox, 8081).await.is_err());
    });
}

#[test]
fn logs_continue_in_a_new_file_after_reopen() {
    in_world(|world| async move {
        let (_, id) =
            world.run("rotate", container("c", "while :; do echo tick; sleep 0.05; done")).await;
        let status = world.runtime.container_status(&id).await.expect("status");
        eventually("the log is written", async || (!world.log(&id).await.is_empty()).then_some(()))
            .await;
        let old = format!("{}.1", status.log_path);
        std::fs::rename(&status.log_path, &old).expect("renamed");
        world.runtime.reopen_container_log(&id).await.expect("reopened");
        eventually("the new log is written", async || {
            (!world.log(&id).await.is_empty()).then_some(())
        })
        .await;
    });
}
