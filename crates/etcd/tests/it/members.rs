//! A real etcd of three members with TLS client certificates and failures: members are killed one after
//! the other (the leader among them), one is frozen for a while, all of them stop and restart. The
//! clients' history must be linearizable, and a watch must miss nothing.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pki::{Authority, Profile, San};
use store::{KeyRange, Revision, Store, Watch, WatchItem, WatchRequest};
use testkit::places;
use testkit::wait::{found, soon};
use tokio::time::Instant;

use crate::{CLIENT_PORT, PEER_PORT, linear, program};

const MEMBERS: usize = 3;

struct Member {
    name: String,
    address: Ipv4Addr,
    running: Option<Child>,
}

impl Member {
    fn client_url(&self) -> String {
        format!("https://{}:{CLIENT_PORT}", self.address)
    }
}

/// Dropping it kills the members.
struct Cluster {
    dir: tempfile::TempDir,
    members: Vec<Member>,
    authority: Authority,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        (0..MEMBERS).for_each(|at| self.kill(at));
    }
}

impl Cluster {
    fn start() -> Self {
        let authority = Authority::generate("etcd").expect("an authority");
        let dir = tempfile::tempdir().expect("a directory");
        let member =
            |at| Member { name: format!("m{at}"), address: places::own_loopback(), running: None };
        let members: Vec<_> = (0..MEMBERS).map(member).collect();
        let sans = members.iter().map(|member| San::parse(&member.address.to_string())).collect();
        let served = authority.issue(&Profile::server("etcd", sans)).expect("a certificate");
        for (name, pem) in [
            ("ca.pem", authority.cert_pem()),
            ("cert.pem", served.cert_pem.as_str()),
            ("key.pem", served.key_pem.as_str()),
        ] {
            std::fs::write(dir.path().join(name), pem).expect("the directory is ours");
        }
        let mut cluster = Self { dir, members, authority };
        (0..MEMBERS).for_each(|at| cluster.run(at));
        cluster
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts a member, or restarts it with its data.
    fn run(&mut self, at: usize) {
        let peer_url = |member: &Member| format!("http://{}:{PEER_PORT}", member.address);
        let all = self.members.iter().map(|m| format!("{}={}", m.name, peer_url(m)));
        let all = all.collect::<Vec<_>>().join(",");
        let member = &self.members[at];
        let (client, peer) = (member.client_url(), peer_url(member));
        let mut command = Command::new(program().expect("asked before"));
        command
            .args(["--name", &member.name, "--initial-cluster", &all])
            .arg("--data-dir")
            .arg(self.file(&member.name))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--client-cert-auth", "--trusted-ca-file"])
            .arg(self.file("ca.pem"))
            .arg("--cert-file")
            .arg(self.file("cert.pem"))
            .arg("--key-file")
            .arg(self.file("key.pem"))
            .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = command.spawn().expect("etcd starts");
        self.members[at].running = Some(child);
    }

    /// SIGKILL: an unclean stop.
    fn kill(&mut self, at: usize) {
        if let Some(mut child) = self.members[at].running.take() {
            // An error means that it has already exited; wait for it anyway.
            let _ = child.kill();
            child.wait().expect("it ends");
        }
    }

    fn signal(&self, at: usize, signal: Signal) {
        let child = self.members[at].running.as_ref().expect("it runs");
        let pid = i32::try_from(child.id()).expect("a process id");
        kill(Pid::from_raw(pid), signal).expect("it is ours");
    }

    fn open(&self) -> Arc<dyn Store> {
        let client = Profile::client("apiserver", &[]);
        let client = self.authority.issue(&client).expect("a certificate");
        etcd::Etcd::open(&etcd::Options {
            endpoints: self.members.iter().map(Member::client_url).collect(),
            ca_pem: Some(self.authority.cert_pem().into()),
            identity_pem: Some((client.cert_pem.into(), client.key_pem.into())),
            ..Default::default()
        })
        .expect("endpoints and certificates")
    }
}

async fn works(store: &dyn Store) -> Revision {
    found("etcd answers", async || {
        // A call to a stopped member may wait for long; a second one reaches another member.
        let answer = tokio::time::timeout(Duration::from_secs(5), store.revision()).await;
        answer.ok()?.ok()
    })
    .await
}

async fn watch(store: &dyn Store, start: u64) -> Watch {
    let range = KeyRange::prefix(&b"/linear/"[..]);
    let request = WatchRequest { range, start: Some(Revision(start)) };
    store.watch(request).await.expect("it starts")
}

/// All events up to a revision, as text.
async fn follow(watch: &mut Watch, until: Revision) -> Vec<String> {
    let mut seen = vec![];
    loop {
        watch.request_progress();
        match soon("an item", watch.items.recv()).await {
            Some(WatchItem::Events(revision, events)) => {
                seen.extend(events.iter().map(|event| format!("{revision} {event:?}")));
            }
            Some(WatchItem::Progress(revision)) if revision >= until => return seen,
            Some(WatchItem::Progress(_)) => {}
            Some(WatchItem::Compacted(floor)) => panic!("compacted at {floor}"),
            None => panic!("the watch ended"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_members_with_failures_lose_nothing() {
    if program().is_none() {
        println!("skipped: no etcd on the path or in the cache, and ETCD does not name one");
        return;
    }
    let mut cluster = Cluster::start();
    let store = cluster.open();
    let begun = works(&*store).await;
    let mut live = watch(&*store, begun.0 + 1).await;
    let watching = tokio::task::JoinSet::from_iter([async move {
        let mut seen = vec![];
        // A last write marks the end.
        while !seen.iter().any(|event: &String| event.contains("the end")) {
            match live.items.recv().await {
                Some(WatchItem::Events(revision, events)) => {
                    seen.extend(events.iter().map(|event| format!("{revision} {event:?}")));
                }
                Some(WatchItem::Progress(_)) => {}
                other => panic!("the watch ended: {other:?}"),
            }
        }
        seen
    }]);
    let load = linear::Load { clients: 6, keys: 4, calls: 100 };
    for seed in 0..MEMBERS as u64 {
        let check = linear::check(&store, load, seed);
        let (found, ()) = tokio::join!(check, kill_and_restart(&mut cluster, seed as usize));
        println!("member {seed} killed: {found:?} calls, and of unknown fate");
    }
    cluster.signal(0, Signal::SIGSTOP);
    let cut = linear::check(&store, load, 10).await;
    cluster.signal(0, Signal::SIGCONT);
    println!("member 0 cut off: {cut:?}");
    (0..MEMBERS).for_each(|at| cluster.kill(at));
    let down = tokio::time::timeout(Duration::from_secs(10), store.revision()).await;
    assert!(!matches!(down, Ok(Ok(_))), "no member runs");
    (0..MEMBERS).for_each(|at| cluster.run(at));
    let back = works(&*store).await;
    assert!(back > begun);
    linear::check(&store, load, 11).await;
    let end = store::Op::Put { key: "/linear/end".into(), value: "the end".into(), lease: 0 };
    let end = store::Txn { success: vec![end], ..store::Txn::default() };
    let end = store.txn(end).await.expect("etcd works").revision;
    let seen = soon("the watch sees the end", watching.join_all()).await.remove(0);
    let truth = follow(&mut watch(&*store, begun.0 + 1).await, end).await;
    assert_eq!(seen.len(), truth.len());
    assert_eq!(seen, truth, "the live events equal the history");
    store.close().await;
}

/// Stops a member for a second while the others go on.
async fn kill_and_restart(cluster: &mut Cluster, at: usize) {
    tokio::time::sleep(Duration::from_millis(200)).await;
    cluster.kill(at);
    tokio::time::sleep(Duration::from_secs(1)).await;
    cluster.run(at);
}

/// The writers' results while a member is frozen.
struct Seen {
    written: usize,
    failed: usize,
    /// The longest time without an acknowledged write.
    pause: Duration,
}

const WRITERS: usize = 8;
/// Longer than the timeout of a call.
const FROZEN: Duration = Duration::from_secs(12);

/// Writes while a member is frozen, and for a moment after that.
async fn write_while_frozen(cluster: &Cluster, store: &Arc<dyn Store>, at: usize) -> Seen {
    let acknowledged = Arc::new(std::sync::Mutex::new(vec![Instant::now()]));
    let end = Instant::now() + FROZEN + Duration::from_secs(1);
    cluster.signal(at, Signal::SIGSTOP);
    let writer = async |number: usize| {
        let mut failed = 0;
        while Instant::now() < end {
            let key = format!("/frozen/{number}").into();
            let put = store::Op::Put { key, value: "1".into(), lease: 0 };
            match store.txn(store::Txn { success: vec![put], ..Default::default() }).await {
                Ok(_) => acknowledged.lock().expect("no panic").push(Instant::now()),
                Err(_) => failed += 1,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        failed
    };
    let thaw = async {
        tokio::time::sleep(FROZEN).await;
        cluster.signal(at, Signal::SIGCONT);
    };
    let writers = futures::future::join_all((0..WRITERS).map(writer));
    let (failed, ()) = tokio::join!(writers, thaw);
    let times = std::mem::take(&mut *acknowledged.lock().expect("no panic"));
    let pauses = times.windows(2).map(|pair| pair[1] - pair[0]);
    Seen {
        written: times.len() - 1,
        failed: failed.iter().sum(),
        pause: pauses.max().unwrap_or(FROZEN),
    }
}

/// Upstream's client sends every third write to a frozen member for 40 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_member_fails_only_its_pending_calls() {
    if program().is_none() {
        println!("skipped: no etcd on the path or in the cache, and ETCD does not name one");
        return;
    }
    let cluster = Cluster::start();
    let store = cluster.open();
    works(&*store).await;
    for at in 0..MEMBERS {
        let Seen { written, failed, pause } = write_while_frozen(&cluster, &store, at).await;
        println!("member {at} frozen: {written} written, {failed} failed, pause {pause:?}");
        // Each writer's calls that were pending at that member, or at a lost leader.
        assert!(failed <= 2 * WRITERS, "{failed} of {written} writes failed");
        assert!(pause < Duration::from_secs(8), "no write for {pause:?}");
        works(&*store).await;
    }
    store.close().await;
}
