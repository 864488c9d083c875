//! End-to-end tests: configuration files, stores with plain and sealed values, and a KMS plugin.

mod plugin;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use decapod_encryption as encryption;
use encryption::{Encryption, Names};
use store::{KeyRange, Op, RangeRequest, Store, Transformed, Txn, WatchItem, WatchRequest};

use plugin::Plugin;

const SECRET: &str = "/registry/secrets/default/s";
const CONFIG_MAP: &str = "/registry/configmaps/default/c";
const CUSTOM: &str = "/registry/example.com/crontabs/default/c";
const VALUE: &[u8] = b"{\"kind\":\"Secret\",\"data\":\"hunter2\"}";

fn names() -> Names {
    let place = |name: &str| (name.to_owned(), (String::new(), name.to_owned()));
    Names::new([place("secrets"), place("configmaps")])
}

fn key(byte: u8) -> String {
    STANDARD.encode([byte; 32])
}

fn rule(resources: &str, providers: &[String]) -> String {
    let providers: Vec<String> = providers.iter().map(|one| format!("  - {one}\n")).collect();
    format!("- resources: {resources}\n  providers:\n{}", providers.concat())
}

fn keys(kind: &str, keys: &[(&str, u8)]) -> String {
    let each = |(name, byte): &(&str, u8)| format!("{{name: {name}, secret: {}}}", key(*byte));
    format!("{kind}: {{keys: [{}]}}", keys.iter().map(each).collect::<Vec<_>>().join(", "))
}

fn identity() -> String {
    "identity: {}".into()
}

fn write(path: &Path, rules: &[String]) {
    let text = format!(
        "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n{}",
        rules.concat()
    );
    pki::write_private(path, text.as_bytes(), 0o600).expect("written");
}

struct Lab {
    directory: tempfile::TempDir,
    raw: Arc<dyn Store>,
    encryption: Arc<Encryption>,
    store: Arc<dyn Store>,
}

impl Lab {
    fn new() -> Self {
        let raw: Arc<dyn Store> = store::Sim::open();
        let encryption = Encryption::new(names());
        let store = Transformed::over(raw.clone(), encryption.clone());
        Self { directory: tempfile::tempdir().expect("a directory"), raw, encryption, store }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("config.yaml")
    }

    async fn load(&self, rules: &[String]) -> Result<(), encryption::Error> {
        write(&self.path(), rules);
        self.encryption.load(&self.path()).await
    }

    async fn put(&self, key: &str) {
        self.try_put(key).await.expect("written");
    }

    async fn try_put(&self, key: &str) -> store::Result<()> {
        let (key, value) = (Bytes::from(key.to_owned()), Bytes::from_static(VALUE));
        let success = vec![Op::Put { key, value, lease: 0 }];
        self.store.txn(Txn { success, ..Txn::default() }).await.map(|_| ())
    }

    async fn get(&self, key: &str) -> store::Result<Bytes> {
        read(&self.store, key).await
    }

    async fn prefix(&self, key: &str) -> String {
        let raw = read(&self.raw, key).await.expect("the raw store reads all");
        let text = String::from_utf8_lossy(&raw[..raw.len().min(40)]).into_owned();
        assert_eq!(raw == VALUE, !text.starts_with("k8s:enc:"), "{text}");
        text
    }

    async fn is_stale(&self, key: &str) -> bool {
        self.store.is_stale(&Bytes::from(key.to_owned())).await.expect("readable")
    }
}

async fn read(store: &Arc<dyn Store>, key: &str) -> store::Result<Bytes> {
    let found = store.range(RangeRequest::new(KeyRange::one(key.to_owned()))).await?;
    Ok(found.kvs[0].value.bytes())
}

#[tokio::test]
async fn resources_are_sealed_by_their_rules() {
    let lab = Lab::new();
    lab.load(&[
        rule("[secrets]", &[keys("secretbox", &[("k", 1)]), identity()]),
        rule("['*.']", &[keys("aesgcm", &[("g", 2)])]),
        rule("['*.*']", &[keys("aescbc", &[("c", 3)])]),
    ])
    .await
    .expect("a configuration");
    for (key, prefix) in [
        (SECRET, "k8s:enc:secretbox:v1:k:"),
        (CONFIG_MAP, "k8s:enc:aesgcm:v1:g:"),
        (CUSTOM, "k8s:enc:aescbc:v1:c:"),
    ] {
        lab.put(key).await;
        assert!(lab.prefix(key).await.starts_with(prefix), "{key}");
        assert_eq!(lab.get(key).await.expect("opened"), VALUE);
        assert!(!lab.is_stale(key).await);
    }
    let masked = lab.load(&[rule("['*.']", &[identity()]), rule("[secrets]", &[identity()])]).await;
    let told = masked.expect_err("masked").to_string();
    assert_eq!(told, "resource \"secrets\" is masked by earlier rule \"*.\"");
}

#[tokio::test]
async fn plain_and_sealed_values_coexist_until_rewritten() {
    let lab = Lab::new();
    lab.put(SECRET).await;
    lab.put(CONFIG_MAP).await;
    let own = rule("[secrets]", &[keys("aesgcm", &[("a", 1)]), identity()]);
    lab.load(&[own]).await.expect("a configuration");
    assert_eq!(lab.get(SECRET).await.expect("plain values are read"), VALUE);
    assert!(lab.is_stale(SECRET).await && !lab.is_stale(CONFIG_MAP).await);
    lab.put(SECRET).await;
    assert!(lab.prefix(SECRET).await.starts_with("k8s:enc:aesgcm:v1:a:"));
    assert!(!lab.is_stale(SECRET).await);
    // Without a configuration a sealed value is refused, not handed out.
    lab.encryption.unload();
    let error = lab.get(SECRET).await.expect_err("sealed");
    assert_eq!(error.to_string(), "identity transformer tried to read encrypted data");
}

#[tokio::test]
async fn a_tampered_or_moved_value_is_refused() {
    let lab = Lab::new();
    lab.load(&[rule("['*.']", &[keys("aesgcm", &[("a", 1)])])]).await.expect("a configuration");
    lab.put(SECRET).await;
    let sealed = read(&lab.raw, SECRET).await.expect("raw");
    let mut changed = sealed.to_vec();
    *changed.last_mut().expect("not empty") ^= 1;
    for (key, value) in [(SECRET, changed.into()), ("/registry/secrets/other/s", sealed)] {
        let put = Op::Put { key: Bytes::from(key.to_owned()), value, lease: 0 };
        lab.raw.txn(Txn { success: vec![put], ..Txn::default() }).await.expect("written");
        let error = lab.get(key).await.expect_err("refused");
        assert_eq!(error.to_string(), "cipher: message authentication failed");
    }
}

#[tokio::test]
async fn valid_changes_of_the_file_are_loaded() {
    let lab = Lab::new();
    write(&lab.path(), &[rule("[secrets]", &[keys("aesgcm", &[("one", 1)])])]);
    let tasks = base::task::Tasks::new("test");
    tasks.spawn("follow", lab.encryption.clone().follow(lab.path(), true));
    let reaches = async |expected: String| {
        let is_used = async || (lab.encryption.hash() == expected).then_some(());
        testkit::wait::found("loaded", is_used).await;
    };
    let present = || encryption::hash(&std::fs::read(lab.path()).expect("readable"));
    reaches(present()).await;
    lab.put(SECRET).await;
    let both = keys("aesgcm", &[("two", 2), ("one", 1)]);
    let first = present();
    write(&lab.path(), &[rule("[secrets]", &["nonsense: {}".into()])]);
    write(&lab.path(), &[rule("[secrets]", &[both])]);
    reaches(present()).await;
    assert_ne!(first, present());
    assert!(lab.is_stale(SECRET).await);
    assert_eq!(lab.get(SECRET).await.expect("the old key reads"), VALUE);
    lab.put(SECRET).await;
    assert!(lab.prefix(SECRET).await.starts_with("k8s:enc:aesgcm:v1:two:"));
    std::fs::remove_file(lab.path()).expect("removed");
    reaches(String::new()).await;
    tasks.shutdown(Duration::from_secs(5)).await;
}

fn kms(plugin: &Plugin) -> String {
    let endpoint = plugin.endpoint();
    format!("kms: {{apiVersion: v2, name: vault, endpoint: '{endpoint}', timeout: 90s}}")
}

#[tokio::test]
async fn a_kms_plugin_is_called_once_for_each_seed() {
    let lab = Lab::new();
    let plugin = Plugin::start(lab.directory.path(), "key-1").await;
    lab.load(&[rule("[secrets]", &[kms(&plugin), identity()])]).await.expect("a configuration");
    lab.encryption.check().await.expect("well");
    for name in 0..5 {
        lab.put(&format!("/registry/secrets/default/s{name}")).await;
    }
    assert!(lab.prefix("/registry/secrets/default/s0").await.starts_with("k8s:enc:kms:v2:vault:"));
    assert_eq!(plugin.counts(), (1, 0), "one seed sealed, none opened");
    // After a restart, or on another server: the seed is opened once, for lists and watches too.
    let other = Encryption::new(names());
    other.load(&lab.path()).await.expect("a configuration");
    let store = Transformed::over(lab.raw.clone(), other.clone());
    let all = RangeRequest::new(KeyRange::prefix("/registry/secrets/"));
    let list = store.range(all).await.expect("opened");
    assert!(list.kvs.len() == 5 && list.kvs.iter().all(|kv| kv.value == VALUE));
    assert_eq!(plugin.counts(), (2, 1));
    let range = KeyRange::prefix("/registry/secrets/");
    let start = Some(store::Revision(2));
    let mut watch = store.watch(WatchRequest { range, start }).await.expect("a watch");
    match watch.items.recv().await.expect("events") {
        WatchItem::Events(_, events) => assert_eq!(events[0].kv.value, VALUE),
        other => panic!("{other:?}"),
    }
    assert_eq!(plugin.counts(), (2, 1));
}

#[tokio::test]
async fn a_new_key_of_the_plugin_makes_values_stale() {
    let lab = Lab::new();
    let plugin = Plugin::start(lab.directory.path(), "key-1").await;
    let rules = [rule("[secrets]", &[kms(&plugin), identity()])];
    lab.load(&rules).await.expect("a configuration");
    lab.put(SECRET).await;
    assert!(!lab.is_stale(SECRET).await);
    plugin.set_key("key-2");
    // Loading calls the plugin at once; the periodic check would do so within a minute.
    lab.load(&rules).await.expect("a configuration");
    lab.get(SECRET).await.expect("the old key still opens");
    assert!(lab.is_stale(SECRET).await);
    lab.put(SECRET).await;
    assert!(!lab.is_stale(SECRET).await);
}

#[tokio::test]
async fn without_its_plugin_writes_fail_and_health_reports_it() {
    let lab = Lab::new();
    let plugin = Plugin::start(lab.directory.path(), "key-1").await;
    plugin.set_health("sealed");
    lab.load(&[rule("[secrets]", &[kms(&plugin)])]).await.expect("a plugin may come later");
    let error = lab.try_put(SECRET).await.expect_err("no seed");
    assert!(error.to_string().contains("nothing can be encrypted"), "{error}");
    assert_eq!(
        lab.encryption.check().await.expect_err("unwell"),
        "kms-provider-0: kmsv2 Provider vault is not healthy, error: got unexpected healthz status: sealed"
    );
}
