//! CNI with plugins that are shell scripts: each of them logs its calls, and then behaves as its name says.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use cri::PodSandboxMetadata;
use nix::sys::signal::kill;
use nix::unistd::Pid;

use super::*;

const ADDRESS: &str = r#"{"ips":[{"address":"10.1.0.2/16"}]}"#;
const VERSIONS: &str = r#"{"cniVersion":"1.1.0","supportedVersions":["0.4.0","1.0.0","1.1.0"]}"#;

struct World {
    directory: tempfile::TempDir,
    limit: Duration,
}

impl World {
    /// Plugins by name, as the lines of their scripts after the first ones.
    fn new(plugins: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let world = Self { directory, limit: Duration::from_secs(60) };
        for name in ["bin", "conf", "sandbox"] {
            fs::create_dir(world.path(name)).expect("made");
        }
        for (name, script) in plugins {
            world.plugin(name, script);
        }
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn plugin(&self, name: &str, script: &str) {
        let (log, path) = (self.path("log"), self.path("bin").join(name));
        let prelude = format!(
            "#!/bin/sh\nin=$(cat)\n[ $CNI_COMMAND = VERSION ] && echo '{VERSIONS}' && exit 0\n\
             echo \"$CNI_COMMAND {name} $CNI_CONTAINERID $CNI_IFNAME $CNI_NETNS $in\" >> {}\n",
            log.display()
        );
        // Another thread's child may still have the file open for writing; a rename has no writer.
        let partial = self.path("partial");
        fs::write(&partial, format!("{prelude}{script}\n")).expect("written");
        fs::set_permissions(&partial, fs::Permissions::from_mode(0o755)).expect("executable");
        fs::rename(&partial, path).expect("renamed");
    }

    fn network(&self, version: &str, plugins: &[&str]) {
        let plugins: Vec<_> = plugins.iter().map(|kind| json!({"type": kind, "own": 1})).collect();
        let list = json!({"name": "net", "cniVersion": version, "plugins": plugins});
        fs::write(self.path("conf/10.conflist"), list.to_string()).expect("written");
    }

    fn open(&self) -> Cni {
        Cni::new(CniConfig {
            conf_dir: Some(self.path("conf")),
            bin_dirs: vec![self.path("none"), self.path("bin")],
            is_required: false,
            limit: self.limit,
        })
    }

    async fn add(&self, cni: &Cni) -> Result<Connected, CniError> {
        let Choice::Plugins(network) = cni.choice() else { panic!("{:?}", cni.choice()) };
        let metadata = PodSandboxMetadata { name: "web".into(), ..Default::default() };
        let config = PodSandboxConfig { metadata: Some(metadata), ..Default::default() };
        let (data, netns) = (self.path("sandbox"), PathBuf::from("/run/netns"));
        let sandbox = Sandbox { id: "id1", data: &data, netns: &netns };
        cni.add(&network, &sandbox, &config, &[]).await
    }

    async fn del(&self, cni: &Cni) -> Result<(), CniError> {
        let (data, netns) = (self.path("sandbox"), self.path("gone"));
        cni.del(&Sandbox { id: "id1", data: &data, netns: &netns }).await
    }

    /// What the plugins got since the last call.
    fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        let _ = fs::remove_file(self.path("log"));
        log.lines().map(ToOwned::to_owned).collect()
    }

    fn is_attached(&self) -> bool {
        self.path("sandbox/cni.json").exists()
    }
}

fn configuration(call: &str) -> Value {
    serde_json::from_str(&call[call.find('{').expect("a configuration")..]).expect("JSON")
}

#[tokio::test]
async fn plugins_run_in_order_and_are_undone_in_reverse() {
    let world = World::new(&[
        ("a", &format!("echo '{ADDRESS}'")),
        ("b", "echo '{\"ips\":[{\"address\":\"10.1.0.9/16\"}],\"mine\":1}'"),
    ]);
    world.network("1.0.0", &["a", "b"]);
    let connected = world.add(&world.open()).await.expect("connected");
    let address = "10.1.0.9/16".parse().expect("an address");
    assert_eq!(connected, Connected { addresses: vec![address], ..Connected::default() });
    let calls = world.calls();
    assert!(calls[0].starts_with("ADD a id1 eth0 /run/netns {"), "{calls:#?}");
    assert!(calls[1].starts_with("ADD b id1 eth0 /run/netns {"), "{calls:#?}");
    let first = json!({"name": "net", "cniVersion": "1.0.0", "type": "a", "own": 1});
    assert_eq!(configuration(&calls[0]), first);
    let previous = &configuration(&calls[1])["prevResult"];
    assert_eq!(*previous, json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.2/16"}]}));
    // A new process, whose network has other plugins meanwhile.
    world.network("1.0.0", &["c"]);
    let cni = world.open();
    let data = world.path("sandbox");
    let netns = PathBuf::from("/run/netns");
    cni.check(&Sandbox { id: "id1", data: &data, netns: &netns }).await.expect("as it was");
    world.del(&cni).await.expect("disconnected");
    let calls = world.calls();
    let heads: Vec<&str> = calls.iter().map(|call| &call[..call.find(" {").unwrap_or(0)]).collect();
    // The namespace is gone for DEL.
    let expected = [
        "CHECK a id1 eth0 /run/netns",
        "CHECK b id1 eth0 /run/netns",
        "DEL b id1 eth0 ",
        "DEL a id1 eth0 ",
    ];
    assert_eq!(heads, expected);
    for call in &calls {
        assert_eq!(configuration(call)["prevResult"]["mine"], 1, "{call}");
    }
    assert!(!world.is_attached());
    world.del(&cni).await.expect("nothing to do");
    assert_eq!(world.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn old_versions_get_no_result_at_the_end() {
    let world = World::new(&[("a", &format!("echo '{ADDRESS}'"))]);
    world.network("0.3.1", &["a"]);
    let cni = world.open();
    world.add(&cni).await.expect("connected");
    world.del(&cni).await.expect("disconnected");
    let calls = world.calls();
    assert_eq!(configuration(&calls[1]).get("prevResult"), None, "{calls:#?}");
}

#[tokio::test]
async fn failures_say_what_happened() {
    let bin =
        |world: &World| format!("{} {}", world.path("none").display(), world.path("bin").display());
    for (script, expected) in [
        (
            "echo '{\"code\":7,\"msg\":\"no\",\"details\":\"really\"}'; exit 1",
            "failed (add): no; really",
        ),
        ("echo '{\"code\":11,\"msg\":\"later\"}'; exit 1", "failed (add): later"),
        ("echo hello >&2; exit 3", "failed (add): netplugin failed: \"hello\\n\""),
        ("exit 3", "failed (add): netplugin failed with no error message: exit status 3"),
        ("kill -9 $$", "failed (add): netplugin failed with no error message: signal: killed"),
        (
            "echo hello; exit 1",
            "failed (add): netplugin failed but error parsing its diagnostic message \"hello\\n\"",
        ),
        ("echo hello", "failed (add): failed to unmarshal result \"hello\\n\""),
        (
            "echo '{\"cniVersion\":\"8.0.0\"}'",
            "failed (add): unsupported CNI result version \"8.0.0\"",
        ),
        (
            "echo '{\"ips\":[{\"interface\":5,\"address\":\"10.1.0.2/16\"}]}'",
            "failed (add): invalid interface config",
        ),
        ("exec yes", "failed (add): the plugin printed more than 1048576 bytes"),
    ] {
        let world = World::new(&[("x", script)]);
        world.network("1.0.0", &["x"]);
        let error = world.add(&world.open()).await.expect_err(script).to_string();
        assert!(error.starts_with(&format!("plugin type=\"x\" {expected}")), "{script}: {error}");
        assert!(world.is_attached(), "its parts must be undone");
    }
    let world = World::new(&[("x", "echo '{}'")]);
    world.network("1.0.0", &["x"]);
    let error = world.add(&world.open()).await.expect_err("no address").to_string();
    assert_eq!(error, "failed to find network info for sandbox \"id1\"");
    world.network("1.0.0", &["missing"]);
    let error = world.add(&world.open()).await.expect_err("no program").to_string();
    let expected = format!("failed to find plugin \"missing\" in path [{}]", bin(&world));
    assert_eq!(error, format!("plugin type=\"missing\" failed (add): {expected}"));
}

#[tokio::test]
async fn a_plugin_that_hangs_is_killed_with_its_children() {
    let mut world = World::new(&[]);
    let child = world.path("child");
    world.plugin("x", &format!("sleep 1000 & echo $! > {}; wait", child.display()));
    world.limit = Duration::from_millis(500);
    world.network("1.0.0", &["x"]);
    let error = world.add(&world.open()).await.expect_err("hangs").to_string();
    let expected =
        "plugin type=\"x\" failed (add): the plugin did not answer within 500ms and was killed";
    assert_eq!(error, expected);
    let pid: i32 = fs::read_to_string(child).expect("it ran").trim().parse().expect("a pid");
    testkit::wait::found("the child is gone", async || {
        // A killed process stays in the table until its new parent reaps it.
        let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let is_alive = kill(Pid::from_raw(pid), None).is_ok() && !state.contains(") Z ");
        (!is_alive).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_failed_del_is_tried_again() {
    let failing = |text: &str| {
        format!(
            "[ $CNI_COMMAND = ADD ] && echo '{ADDRESS}' && exit 0\necho '{{\"msg\":\"{text}\"}}'; exit 1"
        )
    };
    let world = World::new(&[("a", &format!("echo '{ADDRESS}'")), ("b", &failing("busy"))]);
    world.network("1.0.0", &["a", "b"]);
    let cni = world.open();
    world.add(&cni).await.expect("connected");
    let error = world.del(&cni).await.expect_err("busy").to_string();
    assert_eq!(error, "plugin type=\"b\" failed (delete): busy");
    assert!(world.is_attached());
    // Upstream's runtimes take these texts for success.
    world.plugin("b", &failing("address not found"));
    world.calls();
    world.del(&cni).await.expect("gone already");
    let calls = world.calls();
    assert!(calls[0].starts_with("DEL b") && calls[1].starts_with("DEL a"), "{calls:#?}");
    assert!(!world.is_attached());
}

#[tokio::test]
async fn status_and_version_tell_whether_the_network_is_ready() {
    let world = World::new(&[("a", "exit 0")]);
    let trouble = |cni: Cni| async move { cni.trouble().await.map(|error| error.to_string()) };
    assert_eq!(trouble(world.open()).await, None);
    let required = Cni::new(CniConfig { is_required: true, ..world.open().config });
    assert_eq!(trouble(required).await.as_deref(), Some("cni plugin not initialized"));
    world.network("1.1.0", &["a"]);
    assert_eq!(trouble(world.open()).await, None);
    let calls = world.calls();
    assert!(calls.len() == 1 && calls[0].starts_with("STATUS a   "), "{calls:#?}");
    world.plugin("a", "echo '{\"code\":50,\"msg\":\"not yet\"}'; exit 1");
    assert_eq!(trouble(world.open()).await.as_deref(), Some("not yet"));
    world.network("0.3.1", &["a"]);
    let old = "plugin a does not support config version \"0.3.1\"";
    assert_eq!(trouble(world.open()).await.as_deref(), Some(old));
    world.network("1.0.0", &["a"]);
    assert_eq!(trouble(world.open()).await, None, "STATUS came with 1.1.0");
    fs::write(world.path("conf/10.conflist"), "{").expect("written");
    let broken = trouble(world.open()).await.expect("broken");
    assert!(
        broken.starts_with("cni plugin not initialized: failed to load CNI config file"),
        "{broken}"
    );
}

#[tokio::test]
async fn gc_names_the_sandboxes_that_exist() {
    let world = World::new(&[("a", "exit 0"), ("b", "echo '{\"msg\":\"no\"}'; exit 1")]);
    world.network("1.0.0", &["a"]);
    world.open().gc(|| vec!["id1".into()]).await.expect("nothing to do");
    assert_eq!(world.calls(), Vec::<String>::new());
    world.network("1.1.0", &["b", "a"]);
    let error = world.open().gc(|| vec!["id1".into()]).await.expect_err("b fails").to_string();
    assert_eq!(error, "plugin type=\"b\" failed (gc): no");
    let calls = world.calls();
    assert_eq!(calls.len(), 2, "{calls:#?}");
    let existing = json!([{"containerID": "id1", "ifname": "eth0"}]);
    assert_eq!(configuration(&calls[1])["cni.dev/valid-attachments"], existing);
    assert_eq!(configuration(&calls[1])["cni.dev/attachments"], existing);
}

#[test]
fn the_directory_decides() {
    let world = World::new(&[]);
    let cni = world.open();
    let mut in_use = cni.in_use();
    assert!(matches!(cni.choice(), Choice::Own) && !*in_use.borrow_and_update());
    assert!(!cni.load(), "nothing new");
    world.network("1.0.0", &["a"]);
    assert!(cni.load() && *in_use.borrow_and_update());
    assert!(!cni.load(), "nothing new");
    assert!(matches!(cni.choice(), Choice::Plugins(network) if network.plugins[0].kind == "a"));
    world.network("1.0.0", &["b"]);
    assert!(cni.load());
    fs::write(world.path("conf/10.conflist"), "{").expect("written");
    assert!(cni.load() && *in_use.borrow_and_update(), "the node's own network does not step in");
    assert!(matches!(cni.choice(), Choice::Missing(_)));
    fs::remove_file(world.path("conf/10.conflist")).expect("removed");
    assert!(cni.load() && !*in_use.borrow_and_update());
    assert_eq!(cni.watched(), Some(world.path("conf").as_path()));
    fs::remove_dir(world.path("conf")).expect("removed");
    assert_eq!(cni.watched(), Some(world.directory.path()));
}
