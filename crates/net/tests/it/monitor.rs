//! Changes by other programs are reported, own changes are not.

use std::sync::Mutex;
use std::time::Duration;

use net::Links;
use net::monitor::{Change, Monitor};
use net::nft::{Family, Nft, Ruleset, Set, Table, Type, diff};
use net::vxlan::{Peer, Vxlan};
use testkit::wait::soon;

use crate::lab::{Netns, ip, net, skipped};

/// One table with this many sets.
fn rules(table: &str, sets: usize) -> Ruleset {
    let set = Set { key: vec![Type::Ipv4Addr], ..Set::default() };
    let sets = (0..sets).map(|number| (format!("set{number}"), set.clone())).collect();
    let table = ((Family::Ip, table.to_owned()), Table { sets, ..Table::default() });
    Ruleset { tables: [table].into() }
}

#[tokio::test]
async fn rule_changes_by_others_are_reported() {
    if skipped() {
        return;
    }
    let space = Netns::new();
    let mut own = Nft::open_in(&space.path).expect("a socket");
    let mut other = Nft::open_in(&space.path).expect("another");
    let mut monitor = Monitor::of_rules(Some(&space.path), &own).expect("it listens");
    let nothing = Ruleset::default();
    let ours = rules("ours", 2000);
    own.apply(&diff(&nothing, &ours)).expect("rules");
    other.apply(&diff(&nothing, &rules("theirs", 1))).expect("rules");
    other.apply(&diff(&ours, &nothing)).expect("flushed");
    let seen = Mutex::new(Vec::new());
    let matters = |change: Change<'_>| {
        let Change::Rules { family, table } = change else { panic!("{change:?}") };
        seen.lock().expect("no panic").push(table.to_owned());
        ours.has_table(family, table)
    };
    soon("what others did", monitor.told(matters)).await.expect("told");
    let seen = seen.into_inner().expect("no panic");
    // Messages come in order, so an own change would have come first.
    assert_eq!(seen.first().map(String::as_str), Some("theirs"), "{seen:?}");
    assert!(seen.iter().any(|table| table == "ours"), "{seen:?}");

    // It stays reported until `forget`; creating the objects again reports nothing.
    soon("the same again", monitor.told(|_| false)).await.expect("told");
    monitor.forget().expect("forgotten");
    own.apply(&diff(&nothing, &ours)).expect("rules");
    let again = monitor.told(|change| panic!("{change:?}"));
    assert!(tokio::time::timeout(Duration::from_millis(50), again).await.is_err());
}

#[tokio::test]
async fn losses_of_links_are_reported() {
    if skipped() {
        return;
    }
    let space = Netns::new();
    let links = Links::open_in(&space.path).await.expect("netlink");
    let mut monitor = Monitor::of_links(Some(&space.path)).expect("it listens");
    let own = [net("10.9.0.1/24")];
    net::pods::Bridge::ensure(&links, "br", &own, 1500).await.expect("a bridge");
    let index = links.link("br").await.expect("there").index;
    let via = net::links::Via::Link("br".into());
    let change = async |what: &str| match what {
        "route" => links.remove_route(net("10.8.0.0/24")).await,
        "address" => links.remove_address(index, net("10.9.0.1/24")).await,
        _ => links.remove("br").await,
    };
    links.ensure_route(net("10.8.0.0/24"), &via).await.expect("a route");
    // Creating objects, also a second time, reports nothing.
    let overlay = Vxlan::new("overlay", ip("10.9.0.1"), "br", net("10.42.0.0/24"));
    let peer = Peer { node: ip("10.9.0.2"), pod_cidr: net("10.42.1.0/24") };
    for _ in 0..2 {
        overlay.ensure(&links).await.expect("a device");
        overlay.ensure_peer(&links, &peer).await.expect("a peer");
    }
    let made = links.link("overlay").await.expect("there").index;
    for what in ["route", "address", "link"] {
        if what == "link" {
            // The overlay uses this link.
            links.remove("overlay").await.expect("removed");
            soon("overlay", monitor.told(|c| c == Change::Link(made))).await.expect("told");
            monitor.forget().expect("forgotten");
        }
        change(what).await.expect(what);
        let matters = |change: Change<'_>| {
            assert_ne!(change, Change::Link(made), "{what}");
            change == Change::Link(index)
        };
        soon(what, monitor.told(matters)).await.expect("told");
        monitor.forget().expect("forgotten");
    }
}
