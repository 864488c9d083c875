//! Limits of a pod's traffic, with real packets.

use std::path::Path;
use std::time::Duration;

use net::netns;
use net::shaping::{Rates, limit, remove};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use crate::lab::{Node, skipped};

const SIZE: usize = 1 << 20;

/// The time of a transfer of [`SIZE`] bytes from `from` to a server in `to` at `at`.
async fn transfer(from: &Path, to: &Path, at: &str) -> Duration {
    let at = at.parse().expect("an address");
    let listener = netns::listen(to, at).await.expect("listen");
    let receive = async {
        let (mut stream, _) = listener.accept().await.expect("accept");
        let mut received = vec![];
        stream.read_to_end(&mut received).await.expect("read");
        received.len()
    };
    let send = async {
        let mut stream = netns::connect(from, at).await.expect("connect");
        stream.write_all(&vec![1; SIZE]).await.expect("write");
        stream.shutdown().await.expect("shut down");
    };
    let begun = Instant::now();
    let both = async { tokio::join!(receive, send).0 };
    assert_eq!(testkit::wait::soon("a transfer", both).await, SIZE);
    begun.elapsed()
}

#[tokio::test]
async fn a_limited_pod_gets_its_rates() {
    if skipped() {
        return;
    }
    let node = Node::new(&["10.42.0.1/24"]).await;
    let (limited, _) = node.pod("vetha", &["10.42.0.2"], &["10.42.0.1"]).await;
    let (free, _) = node.pod("vethb", &["10.42.0.3"], &["10.42.0.1"]).await;
    // A megabyte needs 2.1 s towards the pod and 1 s from it; a burst passes at once.
    let rates = Rates { to_pod: Some(4_000_000), from_pod: Some(8_000_000) };
    limit(&node.links, "vetha", "ifba", rates).await.expect("limited");
    let towards = transfer(&free.path, &limited.path, "10.42.0.2:80").await;
    assert!(towards > Duration::from_millis(1600), "{towards:?}");
    let away = transfer(&limited.path, &free.path, "10.42.0.3:80").await;
    assert!(away > Duration::from_millis(750), "{away:?}");
    assert!(away < towards, "{away:?} and {towards:?}: each direction has its rate");
    assert!(node.links.find("ifba").await.expect("links").is_some());
    remove(&node.links, "ifba").await.expect("removed");
    remove(&node.links, "ifba").await.expect("twice is fine");
    assert!(node.links.find("ifba").await.expect("links").is_none());
}
