//! Tests of the provider `metal`, with real files and commands.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

const FILE: &str = r"
region: berlin
machines:
- name: a
  zone: rack1
  type: r650
  addresses: [{type: InternalIP, address: 10.0.0.4}, {type: ExternalIP, address: 203.0.113.4}]
  labels: {rack: '1'}
- {name: b, providerID: 'redfish://serial-7', zone: rack2, region: potsdam}
- providerID: metal://c
";

fn node(name: &str, id: &str) -> Node {
    let node = json!({"metadata": {"name": name}, "spec": {"providerID": id}});
    serde_json::from_value(node).expect("a Node")
}

/// A provider with `FILE` and more lines. Scripts of the test are in the same directory.
fn metal(directory: &TempDir, more: &str) -> Metal {
    let path = directory.path().join("inventory.yaml");
    std::fs::write(&path, format!("{FILE}{more}")).expect("written");
    Metal::open(&path).expect("a valid inventory")
}

fn script(directory: &TempDir, name: &str, body: &str) -> String {
    let path = directory.path().join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("changed");
    path.display().to_string()
}

#[tokio::test]
async fn machines_are_found_by_provider_id_or_name() {
    let directory = TempDir::new().expect("a directory");
    let metal = metal(&directory, "");
    let check = async |name: &str, id: &str, expected: Result<bool, &str>| {
        let found = metal.exists(&node(name, id)).await.map_err(|error| error.to_string());
        assert_eq!(found, expected.map_err(str::to_owned), "{name} {id}");
    };
    check("a", "", Ok(true)).await;
    check("a", "metal://a", Ok(true)).await;
    check("a", "simulated://x/a", Ok(true)).await;
    check("b", "", Ok(true)).await;
    check("x", "redfish://serial-7", Ok(true)).await;
    check("x", "metal://c", Ok(true)).await;
    check("x", "", Ok(false)).await;
    check("x", "metal://x", Ok(false)).await;
    // Another cloud's node must not be deleted.
    let foreign =
        "node b has the provider ID \"hcloud://5\", which is not of the cloud provider \"metal\"";
    check("b", "hcloud://5", Err(foreign)).await;
}

#[tokio::test]
async fn metadata_come_from_the_file() {
    let directory = TempDir::new().expect("a directory");
    let metal = metal(&directory, "");
    let found = metal.metadata(&node("a", "")).await.expect("known").expect("some");
    assert_eq!(found.provider_id, "metal://a");
    assert_eq!((found.zone.as_str(), found.region.as_str()), ("rack1", "berlin"));
    assert_eq!(found.instance_type, "r650");
    assert_eq!(found.addresses.len(), 2);
    let found = metal.metadata(&node("b", "")).await.expect("known").expect("some");
    assert_eq!(
        (found.provider_id.as_str(), found.region.as_str()),
        ("redfish://serial-7", "potsdam")
    );
    let found = metal.metadata(&node("a", "simulated://x/a")).await.expect("known").expect("some");
    assert_eq!(found.provider_id, "simulated://x/a", "it cannot change");
    let error = metal.metadata(&node("x", "")).await.expect_err("unknown");
    assert!(matches!(error, Error::InstanceNotFound), "{error}");
}

#[test]
fn mistakes_in_the_file_are_named() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("file");
    let check = |text: &str, expected: &str| {
        std::fs::write(&path, text).expect("written");
        let error = Inventory::read(&path).expect_err("a mistake").to_string();
        assert!(error.contains(expected), "{error}");
    };
    check("machines: [{zone: a}]", "machines[0]: name or providerID is required");
    check("machines: [{name: a}, {name: a}]", "machines[1].name: \"a\" is there twice");
    check("machines: [{name: a}, {providerID: 'metal://a'}]", "machines[1].providerID");
    check("machines: [{name: a, rack: b}]", "rack");
    check(
        "machines: [{name: a, addresses: [{type: IP, address: x}]}]",
        "addresses[0].type: \"IP\"",
    );
    check("machines: [{name: a, addresses: [{type: InternalIP, address: x}]}]", "is no IP address");
    check("machines: []\npower: {command: []}", "power.command: a program is required");
    check("machines: []\npower: {command: [x], timeout: soon}", "soon");
    check("region: a", "machines");
}

#[tokio::test]
async fn a_wrong_file_changes_nothing() {
    let directory = TempDir::new().expect("a directory");
    let metal = metal(&directory, "");
    let tasks = Tasks::new("test");
    metal.start(&tasks);
    let replace = |text: &str| {
        let other = directory.path().join("other");
        std::fs::write(&other, text).expect("written");
        std::fs::rename(&other, &metal.path).expect("replaced");
    };
    let has = async |name: &str| metal.exists(&node(name, "")).await.expect("known");
    replace("machines: [{name: a}, {rack: 1}]");
    replace("machines: [{name: z}]");
    let changed = async {
        while !has("z").await {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), changed).await.expect("the file is read again");
    assert!(!has("a").await);
    std::fs::remove_file(&metal.path).expect("removed");
    replace("machines: [{name: z}, {name: y}]\nregion: [");
    std::fs::write(directory.path().join("inventory.yaml"), "machines: [{name: z}, {name: x}]")
        .expect("written");
    let changed = async {
        while !has("x").await {
            assert!(has("z").await, "the last good file counts");
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), changed).await.expect("the file is read again");
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_command_knows_the_power() {
    let directory = TempDir::new().expect("a directory");
    let power = script(
        &directory,
        "power",
        r#"case "$(cat)" in *'"machine":"a"'*) echo OFF;; *'"machine":"b"'*) echo on;; *) echo perhaps;; esac"#,
    );
    let metal = metal(&directory, &format!("power: {{command: [{power}]}}\n"));
    assert!(metal.is_shut_down(&node("a", "")).await.expect("off"));
    assert!(!metal.is_shut_down(&node("b", "")).await.expect("on"));
    let error =
        metal.is_shut_down(&node("x", "metal://c")).await.expect_err("no answer").to_string();
    assert!(error.ends_with("printed \"perhaps\", expected on or off"), "{error}");
}

#[tokio::test]
async fn a_slow_command_is_killed_with_its_children() {
    let directory = TempDir::new().expect("a directory");
    let mark = directory.path().join("pid");
    let body = format!("sleep 1000 & echo $! > {}\nwait", mark.display());
    let power = script(&directory, "power", &body);
    let metal = metal(&directory, &format!("power: {{command: [{power}], timeout: 1s}}\n"));
    let error = metal.is_shut_down(&node("a", "")).await.expect_err("too slow").to_string();
    assert!(error.ends_with("did not end within 1s"), "{error}");
    let child = std::fs::read_to_string(&mark).expect("it has started");
    // A zombie that no one has reaped yet has no command line.
    let lives = || {
        let line = std::fs::read(format!("/proc/{}/cmdline", child.trim()));
        line.is_ok_and(|line| !line.is_empty())
    };
    let gone = async {
        while lives() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("the child is killed as well");
}

#[tokio::test]
async fn a_command_makes_load_balancers() {
    let directory = TempDir::new().expect("a directory");
    let said = directory.path().join("said");
    let body = format!(
        "cat > {0}\ngrep -q '\"name\":\"bad\"' {0} && {{ echo no pool >&2; exit 3; }}\necho 203.0.113.10\necho lb.example.com",
        said.display()
    );
    let balancer = script(&directory, "balancer", &body);
    assert!(metal(&directory, "").load_balancers().is_none());
    let metal = metal(&directory, &format!("loadBalancers: {{command: [{balancer}, x]}}\n"));
    let service = |name: &str| -> Service {
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "ns", "uid": "u",
            "annotations": {"a": "b"}}, "spec": {"ports": [{"port": 80, "nodePort": 30080}]}}))
        .expect("a Service")
    };
    let target = Target { name: "a".into(), provider_id: "metal://a".into(), addresses: vec![] };
    let found = metal.ensure("c", &service("s"), &[Arc::new(target)]).await.expect("made");
    assert_eq!(found, [ingress("203.0.113.10"), ingress("lb.example.com")]);
    let question: Value =
        serde_json::from_slice(&std::fs::read(&said).expect("asked")).expect("JSON");
    assert_eq!(question["operation"], "ensure");
    assert_eq!(question["service"]["ports"][0]["nodePort"], 30080);
    assert_eq!(question["service"]["annotations"]["a"], "b");
    assert_eq!(question["nodes"][0]["providerID"], "metal://a");
    let error = metal.ensure("c", &service("bad"), &[]).await.expect_err("refused").to_string();
    assert!(error.ends_with("failed: exit status: 3: no pool"), "{error}");
    metal.delete("c", &service("s")).await.expect("deleted");
    let question: Value =
        serde_json::from_slice(&std::fs::read(&said).expect("asked")).expect("JSON");
    assert_eq!(question["operation"], "delete");
}

#[test]
fn answers_are_addresses() {
    let check = |answer: &str, expected: Option<&[&str]>| {
        assert_eq!(command::addresses(answer).as_deref(), expected, "{answer:?}");
    };
    check("", Some(&[]));
    check("10.0.0.1\n\n fd00::1 \n", Some(&["10.0.0.1", "fd00::1"]));
    check("lb-1.example.com", Some(&["lb-1.example.com"]));
    check("10.0.0.256", None);
    check("created 10.0.0.1", None);
    check("LB.example.com", None);
    check(&"10.0.0.1\n".repeat(17), None);
}
