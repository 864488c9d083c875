//! One pod's change among 10,000 pods and 1,000 policies.

use std::time::Duration;

use client::ObjectKey;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use machinery::Pairs;
use net::nft::Nft;
use policy::model::Model;
use policy::objects::{PodFacts, PolicyFacts};
use serde_json::json;
use tokio::time::Instant;

use crate::kernel::{Netns, skipped};
use crate::world::with_type;

const NAMESPACES: usize = 100;
const PODS: usize = 10_000;
const POLICIES: usize = 1_000;
/// The pods of this node.
const LOCAL: usize = 110;

fn key(number: usize) -> ObjectKey {
    ObjectKey::new(&format!("ns{}", number % NAMESPACES), &format!("pod{number}"))
}

fn pod(number: usize, address: usize) -> PodFacts {
    let labels =
        [("app", format!("app{}", number / NAMESPACES % 10)), ("pod-template-hash", "abc".into())];
    let address = std::net::Ipv4Addr::from(0x0a2a_0000 + address as u32);
    PodFacts {
        uid: number.to_string(),
        labels: labels.into_iter().collect::<Pairs>(),
        addresses: vec![address.into()],
        ports: vec![("http".into(), net::nft::Proto::Tcp, 8080)],
        is_local: number < LOCAL,
        has_ended: false,
    }
}

/// Ten policies in each namespace: one that isolates all, and who may reach what.
fn policy(number: usize) -> PolicyFacts {
    let namespace = format!("ns{}", number % NAMESPACES);
    let app = number / NAMESPACES;
    let (to, from) = (format!("app{app}"), format!("app{}", (app + 1) % 10));
    let policy = json!({
        "metadata": {"namespace": namespace, "name": format!("policy{number}")},
        "spec": {
            "podSelector": if app == 0 { json!({}) } else { json!({"matchLabels": {"app": to}}) },
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"app": from}}}], "ports": [{"port": "http"}]},
                {"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "app3"}}}]},
            ],
            "egress": [{"to": [{"namespaceSelector": {}}]}, {"ports": [{"protocol": "UDP", "port": 53}]}],
        },
    });
    let policy = with_type("networking.k8s.io/v1", "NetworkPolicy", policy);
    PolicyFacts::of(&serde_json::from_value::<NetworkPolicy>(policy).expect("a policy"))
}

fn large() -> Model {
    let mut model = Model::default();
    for number in 0..NAMESPACES {
        model.put_namespace(&format!("ns{number}"), Some(Pairs::default()));
    }
    for number in 0..POLICIES {
        model.put_policy(
            &ObjectKey::new(&format!("ns{}", number % NAMESPACES), &format!("policy{number}")),
            Some(policy(number)),
        );
    }
    for number in 0..PODS {
        model.put_pod(&key(number), Some(pod(number, number + 1)));
    }
    model
}

/// Bytes of this process in memory.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("the kernel's figures");
    let pages: usize = text.split(' ').nth(1).expect("resident").parse().expect("a number");
    pages * 4096
}

#[test]
fn a_pods_change_touches_its_own_elements() {
    let mut model = large();
    model.live().take();
    // A pod of another node, one of this node: gone, and back with another address.
    // With the last pod of some rules these go, too: the limit is that of a pod's own rules.
    for (number, limit) in [(PODS - 1, 3), (PODS - 601, 3), (LOCAL - 1, 60)] {
        for change in [None, Some(pod(number, PODS + 7))] {
            model.put_pod(&key(number), change);
            let batch = model.live().take();
            assert!((1..=limit).contains(&batch.len()), "{:#?}", batch.describe());
        }
    }
}

/// Prints figures for docs/performance.md; the limit only detects a search through all objects.
#[test]
fn a_pods_change_is_fast() {
    if skipped() {
        return;
    }
    let space = Netns::new();
    let mut nft = Nft::open_in(&space.path).expect("a socket");
    let before = resident();
    let begun = Instant::now();
    let mut model = large();
    let built = begun.elapsed();
    let after = resident();
    let begun = Instant::now();
    nft.apply(&model.live().take_all()).expect("everything");
    println!(
        "{PODS} pods, {POLICIES} policies: model {built:?}, {} KiB; first transaction {:?}",
        (after.saturating_sub(before)) >> 10,
        begun.elapsed()
    );
    for (what, number) in [("another node's pod", PODS - 1), ("a pod of this node", LOCAL - 1)] {
        let mut times: Vec<(Duration, Duration, usize)> = (0..100)
            .map(|round| {
                let begun = Instant::now();
                model.put_pod(&key(number), Some(pod(number, PODS + 100 + round)));
                let batch = model.live().take();
                let computed = begun.elapsed();
                nft.apply(&batch).expect("a change");
                (begun.elapsed(), computed, batch.len())
            })
            .collect();
        times.sort_unstable();
        let (total, computed, messages) = times[50];
        println!(
            "{what}: {total:?} of which computed {computed:?}, {messages} messages; p99 {:?}",
            times[98].0
        );
        assert!(total < Duration::from_secs(1));
    }
}
