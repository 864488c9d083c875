//! The server over loopback, beside other servers that answer, lie, hang, truncate and fail.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query as Question, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use proptest::prelude::*;

use super::*;
use crate::custom::User;
use crate::status::Report;
use crate::zone::tests::cluster;

fn name(text: &str) -> Name {
    Name::from_ascii(text).expect("a name")
}

fn query(text: &str, kind: RecordType) -> Message {
    let mut query = Message::new(77, MessageType::Query, OpCode::Query);
    query.metadata.recursion_desired = true;
    query.add_query(Question::query(name(text), kind));
    query
}

async fn send_udp(server: SocketAddr, query: &Message) -> Message {
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
    let query = query.to_vec().expect("bytes");
    testkit::wait::found("an answer", async || {
        // A datagram may be lost: asks again, like a resolver.
        socket.send_to(&query, server).await.expect("sent");
        let mut buffer = vec![0; 4096];
        let received = tokio::time::timeout(Duration::from_secs(8), socket.recv(&mut buffer));
        let length = received.await.ok()?.expect("received");
        Some(Message::from_vec(&buffer[..length]).expect("a message"))
    })
    .await
}

async fn ask_udp(server: SocketAddr, text: &str, kind: RecordType) -> Message {
    send_udp(server, &query(text, kind)).await
}

async fn ask_tcp(server: SocketAddr, queries: &[Message]) -> Vec<Message> {
    let mut stream = TcpStream::connect(server).await.expect("a connection");
    for query in queries {
        write_framed(&mut stream, &query.to_vec().expect("bytes")).await.expect("sent");
    }
    let mut out = vec![];
    for _ in queries {
        let reply = read_framed(&mut stream).await.expect("read").expect("an answer");
        out.push(Message::from_vec(&reply).expect("a message"));
    }
    out
}

fn data(message: &Message) -> Vec<String> {
    let mut all: Vec<String> = message.answers.iter().map(|r| r.data.to_string()).collect();
    all.sort();
    all
}

/// The same port by UDP and TCP must be free, so each server has its own loopback address.
fn place() -> SocketAddr {
    SocketAddr::from((testkit::places::own_loopback(), 15_353))
}

struct Server {
    at: SocketAddr,
    tasks: Tasks,
    shared: Arc<dyn User>,
    base: Base,
}

fn start(upstreams: &[SocketAddr]) -> Server {
    let config = Config {
        upstreams: Some(upstreams.to_vec()),
        per_client: 1_000_000,
        ..Config::new(vec![place()], "cluster.local")
    };
    let (bound, tasks) = (Bound::new(config).expect("sockets"), Tasks::new("test"));
    let at = bound.addresses()[0];
    let Follower { base, user, .. } = bound.serve(Arc::new(cluster()), &tasks);
    Server { at, tasks, shared: user, base }
}

impl Server {
    fn settings(&self, data: &[(&str, &str)]) {
        let data = data.iter().map(|(key, text)| (key.to_string(), text.to_string())).collect();
        let (plan, complaints) = Plan::new(&data, &self.base);
        assert!(complaints.is_empty(), "{complaints:?}");
        self.shared.use_plan(plan, false);
    }

    async fn stop(self) {
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}

/// How another server treats a query by UDP.
#[derive(Clone, Copy, PartialEq)]
enum Does {
    Answers,
    /// After so many milliseconds.
    Late(u64),
    Hangs,
    Fails,
    /// Answers another question first, then with another id, and never right.
    Lies,
    /// By UDP with TC and few addresses, by TCP with all.
    Truncates,
    /// Does not understand EDNS.
    IsOld,
}

struct Other {
    at: SocketAddr,
    asked: Arc<AtomicUsize>,
}

impl Other {
    fn start(does: Does, address: &str, tasks: &Tasks) -> Self {
        let at = place();
        let asked = Arc::new(AtomicUsize::new(0));
        let std = open(at, SockType::Datagram).expect("a socket");
        let socket = Arc::new(UdpSocket::from_std(std.into()).expect("a socket"));
        let (count, own, inner) = (asked.clone(), address.to_owned(), tasks.clone());
        tasks.spawn("other", async move {
            let mut buffer = vec![0; 4096];
            while let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
                count.fetch_add(1, Ordering::SeqCst);
                let query = Message::from_vec(&buffer[..length]).expect("a query");
                let replies = replies(does, &query, &own);
                let socket = socket.clone();
                inner.spawn("reply", async move {
                    if let Does::Late(milliseconds) = does {
                        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
                    }
                    for reply in replies {
                        let bytes = reply.to_vec().expect("bytes");
                        socket.send_to(&bytes, peer).await.expect("sent");
                    }
                });
            }
        });
        let listener = listener(at).expect("a listener");
        tasks.spawn("other-tcp", async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                while let Ok(Some(packet)) = read_framed(&mut stream).await {
                    let query = Message::from_vec(&packet).expect("a query");
                    let mut reply = reply_to(&query);
                    reply.answers = many(&query, 200);
                    let bytes = reply.to_vec().expect("bytes");
                    write_framed(&mut stream, &bytes).await.expect("sent");
                }
            }
        });
        Self { at, asked }
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn reply_to(query: &Message) -> Message {
    let mut reply = Message::response(query.metadata.id, OpCode::Query);
    reply.add_queries(query.queries.iter().cloned());
    reply
}

fn many(query: &Message, count: u32) -> Vec<Record> {
    let owner = query.queries[0].name();
    let record = |index| {
        let ip = std::net::Ipv4Addr::from(0xc612_0000 + index);
        Record::from_rdata(owner.clone(), 60, RData::A(ip.into()))
    };
    (0..count).map(record).collect()
}

fn replies(does: Does, query: &Message, address: &str) -> Vec<Message> {
    let mut reply = reply_to(query);
    let ip = RData::A(address.parse().expect("an address"));
    reply.add_answer(Record::from_rdata(query.queries[0].name().clone(), 60, ip));
    match does {
        Does::Answers | Does::Late(_) => vec![reply],
        Does::Hangs => vec![],
        Does::Fails => {
            reply.answers.clear();
            reply.metadata.response_code = ResponseCode::ServFail;
            vec![reply]
        }
        Does::Lies => {
            let mut other = reply.clone();
            other.queries = vec![Question::query(name("other.example."), RecordType::A)];
            reply.metadata.id ^= 1;
            vec![other, reply]
        }
        Does::Truncates => {
            reply.answers = many(query, 2);
            reply.metadata.truncation = true;
            vec![reply]
        }
        Does::IsOld if query.edns.is_some() => {
            let mut refused = Message::response(query.metadata.id, OpCode::Query);
            refused.metadata.response_code = ResponseCode::FormErr;
            vec![refused]
        }
        Does::IsOld => vec![reply],
    }
}

#[tokio::test]
async fn answers_by_udp_and_tcp() {
    let server = start(&[]);
    let answer = ask_udp(server.at, "web.ns.svc.cluster.local.", RecordType::A).await;
    assert_eq!(answer.metadata.id, 77);
    assert!(answer.metadata.authoritative && answer.metadata.recursion_available);
    assert_eq!(data(&answer), ["10.43.0.9"]);
    assert_eq!(answer.answers[0].ttl, 5);
    let cased = ask_udp(server.at, "WEB.ns.svc.cluster.Local.", RecordType::A).await;
    assert_eq!(cased.answers[0].name.to_ascii(), "WEB.ns.svc.cluster.Local.");

    let none = ask_udp(server.at, "none.ns.svc.cluster.local.", RecordType::A).await;
    assert_eq!(none.metadata.response_code, ResponseCode::NXDomain);
    assert_eq!(none.authorities.len(), 1, "the SOA says how long that holds");
    let nodata = ask_udp(server.at, "db.ns.svc.cluster.local.", RecordType::AAAA).await;
    assert_eq!(
        (nodata.metadata.response_code, nodata.authorities.len()),
        (ResponseCode::NoError, 1)
    );
    let outside = ask_udp(server.at, "example.com.", RecordType::A).await;
    assert_eq!(outside.metadata.response_code, ResponseCode::ServFail);

    // Several questions on one connection.
    let queries = [
        query("db.ns.svc.cluster.local.", RecordType::A),
        query("web.ns.svc.cluster.local.", RecordType::AAAA),
    ];
    let answers = ask_tcp(server.at, &queries).await;
    assert_eq!((answers[0].answers.len(), data(&answers[1])), (2, vec!["fd00::9".to_owned()]));
    server.stop().await;
}

#[tokio::test]
async fn what_is_not_served_is_refused() {
    let server = start(&[]);
    let mut new = query("web.ns.svc.cluster.local.", RecordType::A);
    let mut edns = Edns::new();
    edns.set_version(1);
    new.set_edns(edns);
    let answer = send_udp(server.at, &new).await;
    assert_eq!(answer.edns.as_ref().map(Edns::version), Some(0));
    assert_eq!(u16::from(answer.metadata.response_code), code::BAD_VERS);
    let mut chaos = query("version.bind.", RecordType::TXT);
    chaos.queries[0].set_query_class(DNSClass::CH);
    let transfer = query("cluster.local.", RecordType::AXFR);
    for refused in [chaos, transfer] {
        let answer = send_udp(server.at, &refused).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::Refused);
    }
    server.stop().await;
}

#[tokio::test]
async fn other_names_are_forwarded_once_and_cached() {
    let tasks = Tasks::new("others");
    let other = Other::start(Does::Late(200), "192.0.2.1", &tasks);
    let server = start(&[other.at]);
    // Equal questions wait for one answer.
    let asking = (0..40).map(|_| ask_udp(server.at, "Example.com.", RecordType::A));
    for answer in futures::future::join_all(asking).await {
        assert_eq!(data(&answer), ["192.0.2.1"]);
        assert_eq!(answer.answers[0].name.to_ascii(), "Example.com.");
        assert!(answer.answers[0].ttl <= 30, "CoreDNS' limit");
    }
    let again = ask_udp(server.at, "eXample.com.", RecordType::A).await;
    assert_eq!(again.answers[0].name.to_ascii(), "eXample.com.");
    assert_eq!(other.asked(), 1);
    // Another question, and the target of an ExternalName, which is cached already.
    ask_udp(server.at, "example.com.", RecordType::TXT).await;
    assert_eq!(other.asked(), 2);
    let alias = ask_udp(server.at, "out.ns.svc.cluster.local.", RecordType::A).await;
    assert_eq!(data(&alias), ["192.0.2.1", "example.com."]);
    assert_eq!(other.asked(), 2);
    let inside = ask_udp(server.at, "in.ns.svc.cluster.local.", RecordType::A).await;
    assert_eq!(data(&inside), ["10.43.0.9", "web.ns.svc.cluster.local."]);
    server.stop().await;
    tasks.shutdown(Duration::from_secs(5)).await;
}

/// Each of them used to cost the client seconds, or its answer.
#[tokio::test]
async fn bad_servers_do_not_keep_a_client_waiting() {
    let tasks = Tasks::new("others");
    let good = Other::start(Does::Answers, "192.0.2.1", &tasks);
    for does in [Does::Hangs, Does::Lies, Does::Fails, Does::Late(3000)] {
        let bad = Other::start(does, "192.0.2.66", &tasks);
        let server = start(&[bad.at, good.at]);
        let began = Instant::now();
        let answer = ask_udp(server.at, "example.com.", RecordType::A).await;
        assert_eq!(data(&answer), ["192.0.2.1"]);
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        assert!(bad.asked() > 0);
        server.stop().await;
    }
    // No server listens there.
    let server = start(&[place(), good.at]);
    assert_eq!(data(&ask_udp(server.at, "example.com.", RecordType::A).await), ["192.0.2.1"]);
    server.stop().await;
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_dead_server_is_asked_last_until_it_answers() {
    let tasks = Tasks::new("others");
    let dead = Other::start(Does::Fails, "192.0.2.66", &tasks);
    let good = Other::start(Does::Answers, "192.0.2.1", &tasks);
    let metrics = Metrics::new();
    let nobody = place();
    let forward = crate::forward::Forward::new(crate::forward::Settings {
        servers: vec![nobody, good.at],
        ..Default::default()
    });
    let asked = |text: &str| crate::cache::tests::asked(text);
    for index in 0..4 {
        let answer = forward.ask(&asked(&format!("n{index}.example")), &metrics).await;
        assert!(answer.expect("the good server's").is_useful());
    }
    let page = metrics.page(Default::default());
    let failures = format!(
        "coredns_proxy_healthcheck_failures_total{{proxy_name=\"forward\",to=\"{nobody}\"}} 2"
    );
    assert!(page.contains(&failures), "it rests after two failures: {page}");
    // SERVFAIL is an answer if there is no better one.
    let forward = crate::forward::Forward::new(crate::forward::Settings {
        servers: vec![dead.at],
        ..Default::default()
    });
    let answer = forward.ask(&asked("a.example"), &metrics).await.expect("an answer");
    assert_eq!(answer.code, code::SERV_FAIL);
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn large_answers_come_by_tcp() {
    let tasks = Tasks::new("others");
    let other = Other::start(Does::Truncates, "192.0.2.1", &tasks);
    let server = start(&[other.at]);
    let small = ask_udp(server.at, "example.com.", RecordType::A).await;
    assert!(small.metadata.truncation && small.answers.len() > 2 && small.answers.len() < 40);
    let full = ask_tcp(server.at, &[query("example.com.", RecordType::A)]).await;
    assert!(!full[0].metadata.truncation);
    assert_eq!(full[0].answers.len(), 200);
    assert_eq!(other.asked(), 1, "the whole answer is cached");
    server.stop().await;
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn servers_without_edns_are_asked_without_it() {
    let tasks = Tasks::new("others");
    let other = Other::start(Does::IsOld, "192.0.2.1", &tasks);
    let server = start(&[other.at]);
    for (text, asked) in [("a.example.", 2), ("b.example.", 3)] {
        assert_eq!(data(&ask_udp(server.at, text, RecordType::A).await), ["192.0.2.1"]);
        assert_eq!(other.asked(), asked, "it is remembered");
    }
    server.stop().await;
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn settings_give_zones_hosts_and_other_names() {
    let tasks = Tasks::new("others");
    let stub = Other::start(Does::Answers, "192.0.2.2", &tasks);
    let rest = Other::start(Does::Answers, "192.0.2.1", &tasks);
    let server = start(&[rest.at]);
    let corp = format!("corp.example:53 {{ forward . {} }}", stub.at);
    server.settings(&[
        ("corp.server", &corp),
        ("NodeHosts", "192.0.2.9 node-1\n"),
        (
            "names.override",
            "rewrite name shop.example web.ns.svc.cluster.local\nrewrite name old.example new.example",
        ),
    ]);
    let check = async |text: &str, kind: RecordType, expected: &[&str]| {
        let answer = ask_udp(server.at, text, kind).await;
        assert_eq!(data(&answer), expected, "{text}");
        let owner = answer.answers[0].name.to_ascii();
        assert_eq!(owner, text, "clients look for the name that they asked");
    };
    check("www.corp.example.", RecordType::A, &["192.0.2.2"]).await;
    check("stub.ns.svc.cluster.local.", RecordType::A, &["192.0.2.2", "db.corp.example."]).await;
    check("www.example.", RecordType::A, &["192.0.2.1"]).await;
    check("node-1.", RecordType::A, &["192.0.2.9"]).await;
    check("9.2.0.192.in-addr.arpa.", RecordType::PTR, &["node-1."]).await;
    check("Shop.example.", RecordType::A, &["10.43.0.9"]).await;
    check("old.example.", RecordType::A, &["192.0.2.1"]).await;
    check("web.ns.svc.cluster.local.", RecordType::A, &["10.43.0.9"]).await;
    assert_eq!(ask_udp(server.at, "node-1.", RecordType::AAAA).await.answers.len(), 0);
    // A reload keeps what others answered.
    let asked = rest.asked();
    server.settings(&[]);
    check("www.example.", RecordType::A, &["192.0.2.1"]).await;
    assert_eq!(rest.asked(), asked);
    check("www.corp.example.", RecordType::A, &["192.0.2.1"]).await;
    server.stop().await;
    tasks.shutdown(Duration::from_secs(5)).await;
}

/// Queries for names whose server hangs; the cluster's names and another zone answer at once.
#[tokio::test]
async fn slow_servers_do_not_delay_the_clusters_names() {
    let tasks = Tasks::new("others");
    let slow = Other::start(Does::Hangs, "192.0.2.66", &tasks);
    let good = Other::start(Does::Answers, "192.0.2.1", &tasks);
    let server = start(&[good.at]);
    let zone = format!("slow.example {{ forward . {} }}", slow.at);
    server.settings(&[("slow.server", &zone)]);
    let flood = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
    for index in 0..3000 {
        let bytes = query(&format!("n{index}.slow.example."), RecordType::A).to_vec();
        flood.send_to(&bytes.expect("bytes"), server.at).await.expect("sent");
        // One thread runs all: the server reads what its socket has room for.
        if index % 20 == 0 {
            tokio::task::yield_now().await;
        }
    }
    let began = Instant::now();
    let answer = ask_udp(server.at, "web.ns.svc.cluster.local.", RecordType::A).await;
    assert_eq!(data(&answer), ["10.43.0.9"]);
    // Another client's query to another zone.
    let other = UdpSocket::bind("127.0.0.2:0").await.expect("a socket");
    let bytes = query("www.example.", RecordType::A).to_vec().expect("bytes");
    let mut buffer = vec![0; 4096];
    let length = testkit::wait::found("an answer", async || {
        other.send_to(&bytes, server.at).await.expect("sent");
        let received = tokio::time::timeout(Duration::from_secs(5), other.recv(&mut buffer));
        received.await.ok()?.ok()
    });
    let length = length.await;
    let answer = Message::from_vec(&buffer[..length]).expect("a message");
    assert_eq!(data(&answer), ["192.0.2.1"]);
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    server.stop().await;
    tasks.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(start_paused = true)]
async fn stale_answers_are_served_when_no_server_answers() {
    use crate::cache::{Limits, tests as cached};
    use crate::resolve::{Quick, Source};
    let tasks = Tasks::new("test");
    let metrics = Metrics::new();
    let resolver = Resolver::new(metrics.clone(), tasks.clone());
    let nobody = crate::forward::Forward::new(Default::default());
    let source = Arc::new(Source::new(nobody, Limits::default()));
    let key = source.key(cached::asked("www.example"));
    let answer = Arc::new(cached::answer(&key.asked, 0, 1, 60));
    resolver.cache().put(&key, &answer, Limits::default());
    assert!(matches!(resolver.look(&source, &key), Quick::Fresh((_, 30))));
    tokio::time::advance(Duration::from_secs(31)).await;
    let Quick::Later(Some(stale)) = resolver.look(&source, &key) else { panic!("not stale") };
    let resolved = resolver.resolve(&source, &key, Some(stale)).await.expect("the stale answer");
    assert_eq!((&resolved.0, resolved.1), (&answer, 0));
    // The servers have failed a moment ago: nobody waits for them again.
    assert!(matches!(resolver.look(&source, &key), Quick::Fresh((_, 0))));
    assert!(metrics.page(Default::default()).contains(
        "coredns_cache_served_stale_total{server=\"dns://:53\",view=\"\",zones=\".\"} 2"
    ));
    tasks.shutdown(Duration::from_secs(5)).await;
}

/// Such a client used to hold a connection forever.
#[tokio::test]
async fn a_client_that_does_not_read_is_disconnected() {
    let tasks = Tasks::new("test");
    let shared = shared(1_000_000, &tasks);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
    let address = listener.local_addr().expect("an address");
    let mut client = TcpStream::connect(address).await.expect("a connection");
    let (stream, peer) = listener.accept().await.expect("accepted");
    tasks.spawn("client", async move {
        use tokio::io::AsyncWriteExt;
        let bytes = query("db.ns.svc.cluster.local.", RecordType::A).to_vec().expect("bytes");
        let framed = [&(bytes.len() as u16).to_be_bytes()[..], &bytes].concat();
        let many = framed.repeat(1000);
        // Writes until the server closes.
        while client.write_all(&many).await.is_ok() {}
    });
    let served = connection(&shared, stream, peer, Duration::from_millis(100));
    let ended = tokio::time::timeout(Duration::from_secs(90), served).await;
    let error = ended.expect("it does not wait for ever").expect_err("nobody reads");
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    tasks.shutdown(Duration::from_secs(5)).await;
}

fn shared(per_client: u32, tasks: &Tasks) -> Arc<Shared> {
    let zone = Zone::new("cluster.local", vec![]).expect("a zone");
    let base = Base { domain: "cluster.local".into(), servers: vec![], own: vec![] };
    Shared::new(zone, Arc::new(cluster()), &base, per_client, tasks)
}

#[tokio::test]
async fn a_flood_is_dropped_and_counted() {
    let tasks = Tasks::new("test");
    let shared = shared(100, &tasks);
    let peer = |text: &str| text.parse::<SocketAddr>().expect("an address");
    let bytes = query("web.ns.svc.cluster.local.", RecordType::A).to_vec().expect("bytes");
    let answered = |peer| {
        let taken = (0..5000).map(|_| shared.take(&bytes, peer, false));
        taken.filter(|taken| matches!(taken, Taken::Send(_))).count()
    };
    assert!(answered(peer("10.42.0.7:1")) < 5000);
    assert!(answered(peer("10.42.0.8:1")) >= 100);
    let page = shared.metrics();
    assert!(page.contains("decapod_dns_rate_limited_total ") && shared.is_ready());
    let requests = "coredns_dns_requests_total{family=\"1\",proto=\"udp\",server=\"dns://:53\",view=\"\",zone=\".\",type=\"A\"}";
    assert!(page.contains(requests), "{page}");
    tasks.shutdown(Duration::from_secs(5)).await;
}

/// Dashboards ask for these names.
#[test]
fn metrics_have_coredns_names() {
    let page = Metrics::new().page(Default::default());
    let families: HashSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    for family in [
        "coredns_build_info",
        "coredns_cache_entries",
        "coredns_cache_hits_total",
        "coredns_cache_misses_total",
        "coredns_cache_requests_total",
        "coredns_dns_request_duration_seconds",
        "coredns_dns_requests_total",
        "coredns_dns_responses_total",
        "coredns_dns_response_size_bytes",
        "coredns_forward_healthcheck_broken_total",
        "coredns_panics_total",
        "coredns_proxy_request_duration_seconds",
        "coredns_reload_failed_total",
    ] {
        assert!(families.contains(family), "{family}");
    }
    assert!(
        page.lines().all(|line| line.starts_with('#') || line.split(' ').count() == 2),
        "{page}"
    );
}

proptest! {
    /// Through parsing, settings, zone and encoding.
    #[test]
    fn no_packet_panics(
        noise in proptest::collection::vec(any::<u8>(), 0..80),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        which in 0..4_usize,
        by_tcp: bool,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let tasks = Tasks::new("test");
            let shared = shared(1_000_000, &tasks);
            let texts = [
                "_http._tcp.web.ns.svc.cluster.local.",
                "db.ns.svc.cluster.local.",
                "9.0.43.10.in-addr.arpa.",
                "out.ns.svc.cluster.local.",
            ];
            let mut bytes = query(texts[which], RecordType::SRV).to_vec().expect("bytes");
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes.extend_from_slice(&noise);
            let peer = "10.42.0.7:1".parse().expect("an address");
            let _ = shared.take(&bytes, peer, by_tcp);
            let _ = shared.take(&noise, peer, by_tcp);
        });
    }
}

/// For `dnsperf`: prints its address and answers names of the zone and cached ones on one core for the given seconds.
#[test]
#[ignore = "runs for as long as DECAPOD_DNS_LOAD_SECONDS says"]
fn serves_a_load_on_one_core() {
    let seconds = std::env::var("DECAPOD_DNS_LOAD_SECONDS").ok().and_then(|s| s.parse().ok());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let tasks = Tasks::new("others");
        let other = Other::start(Does::Answers, "192.0.2.1", &tasks);
        let server = start(&[other.at]);
        println!("serving {}", server.at);
        tokio::time::sleep(Duration::from_secs(seconds.unwrap_or(1))).await;
        let answer = ask_udp(server.at, "web.ns.svc.cluster.local.", RecordType::A).await;
        assert_eq!(data(&answer), ["10.43.0.9"]);
        server.stop().await;
        tasks.shutdown(Duration::from_secs(5)).await;
    });
}
