//! State outside one running server: snapshots and history of the embedded store, several API servers on
//! one etcd, and upstream's API server on our etcd. The first chapter uses the story's own server and
//! leaves it as it was; the others have their own hosts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use testkit::daemon::Daemon;
use testkit::host::Host;
use testkit::{http, places, wait};

use crate::story::{LONG, Story};

const KINDS: &str = include_str!("../manifests/kinds.yaml");
const INTERVAL: Duration = Duration::from_secs(2);
const ETCD: &str = "http://127.0.0.1:2379";

/// An old version of an object, a snapshot, and another server restored from it.
pub fn past_and_snapshots(story: &mut Story) -> Result<()> {
    story.kubectl("create configmap past --from-literal=colour=green")?;
    let old = story.value("configmap past", ".metadata.resourceVersion")?;
    story.kubectl("patch configmap past -p {\"data\":{\"colour\":\"blue\"}}")?;
    let then = decapod(story, &format!("kubectl get configmap past --at-revision {old} -o yaml"))?;
    ensure!(then.contains("colour: green"), "{then}");
    let now = decapod(story, "kubectl get configmap past --at-time 0s -o yaml")?;
    ensure!(now.contains("colour: blue"), "{now}");
    let changes = changes(story, &old)?;
    ensure!(changes.contains("-  colour: green\n+  colour: blue"), "{changes}");
    let key = "/registry/configmaps/default/past";
    ensure!(decapod(story, &format!("store get {key}"))?.contains("blue"), "another value");
    ensure!(
        decapod(story, &format!("store get {key} --revision {old}"))?.contains("green"),
        "the same"
    );

    let status: Value = serde_json::from_str(&decapod(story, "store status -o json")?)?;
    ensure!(status["backend"] == "embedded" && status["keys"].as_u64() > Some(50), "{status}");
    let refused = decapod(story, "store verify").expect_err("a server has it open").to_string();
    ensure!(refused.contains("is in use by another process"), "{refused}");
    let file = story.server.host().directory().join("story.db").display().to_string();
    let said = decapod(story, &format!("snapshot save {file}"))?;
    ensure!(said.contains("revision") && said.contains("keys"), "{said}");
    let saved: Value =
        serde_json::from_str(&decapod(story, &format!("snapshot status {file} -o json"))?)?;
    decapod(story, "snapshot save")?;
    ensure!(decapod(story, "snapshot list")?.contains("decapod-snapshot-"), "not listed");
    restored(story, &file, saved["revision"].as_u64().context("a number")?)?;

    decapod(story, "store compact")?;
    let gone = decapod(story, &format!("store get {key} --revision {old}"));
    let gone = gone.expect_err("it is forgotten").to_string();
    ensure!(gone.contains("compacted"), "{gone}");
    let exact = format!("?resourceVersion={old}&resourceVersionMatch=Exact");
    let gone = story.kubectl(&format!("get --raw /api/v1/namespaces/default/configmaps{exact}"));
    let gone = gone.expect_err("it is forgotten").to_string();
    ensure!(gone.contains("too old"), "{gone}");
    story.kubectl("delete configmap past").map(drop)
}

fn decapod(story: &Story, line: &str) -> Result<String> {
    story.server.decapod(&crate::story::words(line))
}

/// The output of `diff` for an object that changed.
fn changes(story: &Story, from: &str) -> Result<String> {
    let host = story.server.host();
    let mut command = host.command(&story.binary);
    command.args(["kubectl", "diff", "configmap", "past", "--from-revision", from]);
    command.arg("--data-dir").arg(story.server.data_directory());
    let output = host.output(&mut command)?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1), "{}: {stderr}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A data directory restored from the file is complete, with revisions above all old ones, and valid.
fn restored(story: &mut Story, file: &str, revision: u64) -> Result<()> {
    let lab = Lab::new(story, "restored")?;
    let data = lab.path("api");
    let directory = data.display().to_string();
    lab.decapod(&["snapshot", "restore", file, "-d", &directory])?;
    lab.decapod(&["store", "verify", "-d", &directory])?;
    let mut api = lab.api_server("api", 6443, &[])?;
    lab.ready("api", &mut api)?;
    let map = lab.kubectl("api", "get configmap past -o json")?;
    let map: Value = serde_json::from_str(&map)?;
    ensure!(map["data"]["colour"] == "blue", "{map}");
    let list: Value = serde_json::from_str(&lab.kubectl("api", "get --raw /api/v1/configmaps")?)?;
    let at = list["metadata"]["resourceVersion"].as_str().and_then(|at| at.parse::<u64>().ok());
    ensure!(at > Some(revision + 1_000_000), "it goes on at {at:?}, the snapshot is of {revision}");
    let old =
        format!("get --raw /api/v1/configmaps?watch=1&timeoutSeconds=1&resourceVersion={revision}");
    let told = match lab.kubectl("api", &old) {
        Ok(events) => events,
        Err(error) => error.to_string(),
    };
    ensure!(told.contains("too old") || told.contains("Expired"), "an old watch goes on: {told}");
    Ok(())
}

/// Three API servers without their own state share one etcd.
pub fn several_api_servers(story: &mut Story) -> Result<()> {
    let Some(etcd) = places::cached("ETCD", "etcd-3.6/etcd") else {
        println!("skipped: no etcd in the cache (cargo xtask etcd), and ETCD does not name one");
        return Ok(());
    };
    let lab = Lab::new(story, "shared")?;
    let mut backend = lab.etcd(&etcd, "etcd", 2379)?;
    let interval = format!("--etcd-compaction-interval={}s", INTERVAL.as_secs());
    let servers = format!("--etcd-servers={ETCD}");
    let mut apis = vec![];
    for (name, port) in [("one", 6443), ("two", 6444), ("three", 6445)] {
        let mut api = lab.api_server(name, port, &[&servers, &interval])?;
        // The first one creates the certificates that all share.
        lab.ready(name, &mut api).with_context(|| api.log())?;
        apis.push(api);
    }
    told_by_others(&lab)?;
    one_compacts(&lab, &etcd)?;
    apis[0].kill()?;
    let before = rounds(&lab, &etcd)?;
    wait::until(LONG, "another compacts", || {
        ensure!(rounds(&lab, &etcd)? >= before + 2, "no server compacted");
        Ok(())
    })?;
    backend.kill()?;
    wait::until(LONG, "a server without etcd is not ready", || {
        ensure!(lab.kubectl("two", "get --raw /readyz").is_err(), "it says that it is");
        Ok(())
    })?;
    let mut backend = lab.etcd(&etcd, "etcd", 2379)?;
    for (name, api) in ["two", "three"].into_iter().zip(&mut apis[1..]) {
        lab.ready(name, api)?;
    }
    // An old watch may end with 410: history is a few seconds here, and etcd was away as long.
    lab.watch_configmaps("two")?;
    lab.kubectl("three", "create configmap after-all")?;
    lab.kubectl("two", "get configmap after-all").context("a list after etcd's return")?;
    lab.watch_has("two", "after-all")?;
    filled_from_another(&lab, &etcd)?;
    ensure!(backend.exit_status()?.is_none(), "etcd has ended: {}", backend.log());
    Ok(())
}

/// The other servers list and watch what one server writes, at once; each has one watch.
fn told_by_others(lab: &Lab) -> Result<()> {
    lab.watch_configmaps("two")?;
    lab.watch_configmaps("three")?;
    for (number, writer) in ["one", "two", "three", "one"].into_iter().enumerate() {
        let name = format!("by-{writer}-{number}");
        lab.kubectl(writer, &format!("create configmap {name}"))?;
        for reader in ["one", "two", "three"] {
            let shown = lab.kubectl(reader, "get configmaps")?;
            ensure!(shown.contains(&name), "{reader} does not know what {writer} wrote: {shown}");
        }
        lab.watch_has("two", &name)?;
        lab.watch_has("three", &name)?;
    }
    wait::until(LONG, "a watch for each server", || {
        let page = http::get_from(&lab.host.network()?, "127.0.0.1:2379", "/metrics", LONG)?;
        let line =
            page.body.lines().find(|line| line.starts_with("etcd_debugging_mvcc_watcher_total"));
        ensure!(line == Some("etcd_debugging_mvcc_watcher_total 3"), "{line:?}");
        Ok(())
    })
}

/// History ends one interval ago, and only one server compacts.
fn one_compacts(lab: &Lab, etcd: &Path) -> Result<()> {
    let list: Value = serde_json::from_str(&lab.kubectl("one", "get --raw /api/v1/configmaps")?)?;
    let old = list["metadata"]["resourceVersion"].as_str().context("a list's")?.to_owned();
    lab.kubectl("two", "create configmap later")?;
    let (started, before) = (wait::now(), rounds(lab, etcd)?);
    wait::until(LONG, "rounds of compaction", || {
        ensure!(rounds(lab, etcd)? >= before + 4, "not yet");
        Ok(())
    })?;
    // The first of the four may have been due at once. Three servers would need a third of the time.
    ensure!(started.elapsed() >= INTERVAL * 3 - INTERVAL / 4, "{:?}", started.elapsed());
    let exact = format!("/api/v1/configmaps?resourceVersion={old}&resourceVersionMatch=Exact");
    // The server that writes the round's key compacts next.
    wait::until(LONG, "the past is forgotten", || {
        match lab.kubectl("three", &format!("get --raw {exact}")) {
            Err(told) if told.to_string().contains("too old") => Ok(()),
            other => bail!("{other:?}"),
        }
    })
}

/// How often the key of upstream's compactor was written.
fn rounds(lab: &Lab, etcd: &Path) -> Result<u64> {
    let etcdctl = etcd.with_file_name("etcdctl").display().to_string();
    let text = lab.host.run(&etcdctl, &["get", "compact_rev_key", "--write-out=fields"])?;
    let version = text.lines().find_map(|line| line.strip_prefix("\"Version\" : "));
    version.and_then(|number| number.parse().ok()).context(text)
}

/// A snapshot of one etcd fills another running one, above the old revisions.
fn filled_from_another(lab: &Lab, etcd: &Path) -> Result<()> {
    let file = lab.path("etcd.db").display().to_string();
    lab.decapod(&["snapshot", "save", &file, "--datastore-endpoint", ETCD])?;
    let _second = lab.etcd(etcd, "second", 3379)?;
    const SECOND: &str = "http://127.0.0.1:3379";
    let restore = ["snapshot", "restore", &file, "--datastore-endpoint", SECOND];
    let said = wait::until(LONG, "the second etcd", || lab.decapod(&restore))?;
    ensure!(said.contains("etcd has all"), "{said}");
    let again = lab.decapod(&restore).expect_err("it is not empty any more").to_string();
    ensure!(again.contains("restore into an empty etcd"), "{again}");
    let revision = |endpoint| -> Result<u64> {
        let words = ["store", "status", "-o", "json", "--datastore-endpoint", endpoint];
        let status: Value = serde_json::from_str(&lab.decapod(&words)?)?;
        status["revision"].as_u64().context("a number")
    };
    let (first, second) = (revision(ETCD)?, revision(SECOND)?);
    ensure!(second > first, "{second} is not above {first}");
    let servers = format!("--etcd-servers={SECOND}");
    let mut api = lab.api_server("four", 6446, &[&servers])?;
    lab.ready("four", &mut api)?;
    lab.kubectl("four", "get configmap after-all").map(drop)
}

/// Upstream's API server runs on our etcd; each server reads the other's writes at once.
pub fn upstreams_api_server(story: &mut Story) -> Result<()> {
    let Some(upstream) = places::cached("DECAPOD_KUBE_APISERVER", &upstreams_place()?) else {
        println!("skipped: no kube-apiserver in the cache (cargo xtask kube-apiserver)");
        return Ok(());
    };
    let lab = Lab::new(story, "upstream")?;
    let data = lab.path("store").display().to_string();
    let urls =
        [&*format!("--listen-client-urls={ETCD}"), &format!("--advertise-client-urls={ETCD}")];
    let words = [&["etcd", "--data-dir", &data], &urls[..]].concat();
    let etcd = lab.daemon("decapod-etcd", &lab.binary, &words)?;
    let servers = format!("--etcd-servers={ETCD}");
    // Pods are created without the controllers that create service accounts.
    let without = "--disable-admission-plugins=ServiceAccount";
    let mut ours = lab.api_server("ours", 6444, &[&servers, without])?;
    lab.ready("ours", &mut ours).with_context(|| ours.log() + &etcd.log())?;
    let mut theirs = lab.upstreams(&upstream, &servers)?;
    lab.ready("theirs", &mut theirs).with_context(|| theirs.log() + &etcd.log())?;

    let written = [("theirs", KINDS.to_owned()), ("ours", KINDS.replace("shared", "mine"))];
    for (writer, manifest) in written {
        let manifest = match writer {
            "ours" => manifest.replace("widget", "gadget").replace("Widget", "Gadget"),
            _ => manifest,
        };
        lab.apply(writer, &manifest).with_context(|| format!("{writer}: {}", theirs.log()))?;
    }
    // Custom resources that a server knows through its own watch of definitions.
    for (writer, kind, place) in [("ours", "Widget", "shared"), ("theirs", "Gadget", "mine")] {
        let custom = format!(
            "apiVersion: example.com/v1\nkind: {kind}\nmetadata: {{name: w, namespace: {place}}}\nspec: {{size: 3}}\n"
        );
        wait::until(LONG, &format!("{writer} knows {kind}"), || lab.apply(writer, &custom))?;
    }
    same_everywhere(&lab)?;
    lab.watch_configmaps("ours")?;
    lab.kubectl("theirs", "create configmap news --from-literal=a=1")?;
    lab.watch_has("ours", "news")?;
    lab.watch_configmaps("theirs")?;
    lab.kubectl("ours", "create configmap more --from-literal=a=1")?;
    lab.watch_has("theirs", "more")?;
    lab.kubectl("theirs", "label configmap more of=theirs")?;
    let label = lab.kubectl("ours", "get configmap more -o jsonpath={.metadata.labels.of}")?;
    ensure!(label == "theirs", "{label:?}");
    lab.kubectl("ours", "delete configmap news more")?;
    lab.kubectl("theirs", "get configmap news").expect_err("it is deleted");
    theirs.stop(LONG)?;
    Ok(())
}

/// The path of xtask's build.
fn upstreams_place() -> Result<String> {
    let kubectl = places::kubectl()?;
    let directory = kubectl.parent().and_then(Path::file_name).context("it has a directory")?;
    Ok(format!("{}/kube-apiserver", directory.to_string_lossy()))
}

/// Every object of every kind that both serve, as each of them returns it.
fn same_everywhere(lab: &Lab) -> Result<()> {
    let names = lab.kubectl("theirs", "api-resources --verbs=list -o name")?;
    // Computed, not stored.
    let computed =
        |name: &&str| !name.starts_with("componentstatuses") && !name.contains("metrics");
    let names = names.lines().filter(computed).collect::<Vec<_>>().join(",");
    let list = |server: &str| -> Result<Vec<Value>> {
        let all = lab.kubectl(server, &format!("get {names} -A -o json"))?;
        let all: Value = serde_json::from_str(&all)?;
        let mut all = all["items"].as_array().context("a list has items")?.clone();
        let text = |item: &Value, path: &str| item.pointer(path).map(Value::to_string);
        all.sort_by_cached_key(|item| {
            ["/apiVersion", "/kind", "/metadata/namespace", "/metadata/name"]
                .map(|path| text(item, path))
        });
        Ok(all)
    };
    let count = wait::until(LONG, "both show the same", || {
        let (theirs, ours) = (list("theirs")?, list("ours")?);
        for (theirs, ours) in theirs.iter().zip(&ours) {
            ensure!(theirs == ours, "theirs:\n{theirs}\nours:\n{ours}");
        }
        ensure!(theirs.len() == ours.len(), "{} theirs, {} ours", theirs.len(), ours.len());
        Ok(theirs.len())
    })?;
    println!("{count} objects are the same to both");
    ensure!(count > 200, "only {count}");
    Ok(())
}

/// A host with API servers and their stores.
pub(super) struct Lab {
    watches: std::sync::Mutex<Vec<(String, Daemon)>>,
    pub(super) host: Host,
    binary: PathBuf,
    address: String,
}

impl Lab {
    pub(super) fn new(story: &mut Story, name: &str) -> Result<Self> {
        let host = Host::new(name)?;
        let address = story.switch.connect(&host)?;
        let binary = story.binary.clone();
        Ok(Self { watches: Default::default(), host, binary, address })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.host.directory().join(name)
    }

    fn daemon(&self, name: &str, program: &Path, words: &[&str]) -> Result<Daemon> {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        let mut daemon = Daemon::new(&self.host, name, program, words);
        daemon.launch(&self.host)?;
        Ok(daemon)
    }

    /// A real etcd. Its data are kept across restarts.
    fn etcd(&self, program: &Path, name: &str, port: u16) -> Result<Daemon> {
        let url = |port| format!("http://127.0.0.1:{port}");
        let (client, peer, data) =
            (url(port), url(port + 1), self.path(name).display().to_string());
        let cluster = format!("{name}={peer}");
        let words = [
            ["--name", name, "--data-dir", &data],
            ["--listen-client-urls", &client, "--advertise-client-urls", &client],
            ["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer],
            ["--initial-cluster", &cluster, "--unsafe-no-fsync", "--log-level=warn"],
        ];
        self.daemon(name, program, words.as_flattened())
    }

    /// Our API server, with the certificates that all on the host share.
    pub(super) fn api_server(&self, name: &str, port: u16, more: &[&str]) -> Result<Daemon> {
        let (data, pki) =
            (self.path(name).display().to_string(), self.path("pki").display().to_string());
        let port = format!("--secure-port={port}");
        let words = [
            &["kube-apiserver", "--data-dir", &data, "--cert-dir", &pki, &port][..],
            &["--advertise-address", &self.address, "--service-cluster-ip-range=10.43.0.0/16"],
            &["--authorization-mode=Node,RBAC"],
            more,
        ];
        self.daemon(name, &self.binary, &words.concat())
    }

    /// Upstream's API server with our certificates, named `theirs`.
    fn upstreams(&self, program: &Path, servers: &str) -> Result<Daemon> {
        let file = |name: &str| self.path("pki").join(name).display().to_string();
        let words = [
            servers.to_owned(),
            "--secure-port=6443".into(),
            format!("--advertise-address={}", self.address),
            "--service-cluster-ip-range=10.43.0.0/16".into(),
            "--authorization-mode=Node,RBAC".into(),
            "--disable-admission-plugins=ServiceAccount".into(),
            format!("--client-ca-file={}", file("ca.crt")),
            format!("--tls-cert-file={}", file("apiserver.crt")),
            format!("--tls-private-key-file={}", file("apiserver.key")),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
            format!("--service-account-key-file={}", file("sa.pub")),
            format!("--service-account-signing-key-file={}", file("sa.key")),
        ];
        let daemon = self.daemon("theirs", program, &words.each_ref().map(String::as_str))?;
        // The same administrator, at another port.
        let ours = std::fs::read_to_string(self.path("ours/kubeconfig"))?;
        std::fs::create_dir(self.path("theirs"))?;
        std::fs::write(self.path("theirs/kubeconfig"), ours.replace(":6444", ":6443"))?;
        Ok(daemon)
    }

    pub(super) fn ready(&self, name: &str, daemon: &mut Daemon) -> Result<()> {
        let ended = wait::until(LONG, &format!("{name} is ready"), || {
            if let Some(status) = daemon.exit_status()? {
                return Ok(Some(status));
            }
            self.kubectl(name, "get --raw /readyz").map(|_| None)
        })?;
        match ended {
            Some(status) => bail!("{name} has ended: {status}\n{}", daemon.log()),
            None => Ok(()),
        }
    }

    /// The kubeconfig and kubectl's cache directory for that server.
    pub(super) fn kubeconfig(&self, server: &str) -> (String, String) {
        let file = |name: &str| self.path(server).join(name).display().to_string();
        (file("kubeconfig"), file("discovery"))
    }

    fn kubectl(&self, server: &str, line: &str) -> Result<String> {
        let (kubeconfig, cache) = self.kubeconfig(server);
        let own = ["--kubeconfig", &kubeconfig, "--cache-dir", &cache];
        let words = [&own[..], &crate::story::words(line)].concat();
        self.host.run(&places::kubectl()?.display().to_string(), &words)
    }

    fn apply(&self, server: &str, manifest: &str) -> Result<()> {
        let path = self.path("manifest.yaml");
        std::fs::write(&path, manifest)?;
        self.kubectl(server, &format!("apply -f {}", path.display())).map(drop)
    }

    fn decapod(&self, words: &[&str]) -> Result<String> {
        self.host.run(&self.binary.display().to_string(), words)
    }

    fn watch_configmaps(&self, server: &str) -> Result<()> {
        let (kubeconfig, cache) = self.kubeconfig(server);
        let own = ["--kubeconfig", &kubeconfig, "--cache-dir", &cache];
        let words = [&own[..], &["get", "configmaps", "-w"]].concat();
        let watch = self.daemon(&format!("watch-{server}"), &places::kubectl()?, &words)?;
        self.watches.lock().expect("one thread").push((server.to_owned(), watch));
        Ok(())
    }

    fn watch_has(&self, server: &str, name: &str) -> Result<()> {
        wait::until(LONG, &format!("the watch of {server} shows {name}"), || {
            let watches = self.watches.lock().expect("one thread");
            let shown = watches.iter().find(|(of, _)| of == server).map(|(_, watch)| watch.log());
            ensure!(shown.as_ref().is_some_and(|shown| shown.contains(name)), "{shown:?}");
            Ok(())
        })
    }
}
