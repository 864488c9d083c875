//! Test hosts, seen from outside: what they contain, what they hide, and that nothing is left.

use std::path::Path;

use decapod_testkit::host::Host;
use decapod_testkit::load::Hammer;
use decapod_testkit::registry::{ADDRESS, Registry};
use decapod_testkit::switch::Switch;
use decapod_testkit::wait::LONG;
use decapod_testkit::{http, images, places, wait};

#[test]
fn a_host_has_its_own_namespaces_and_files() {
    if !places::is_root_or_says_skipped() {
        return;
    }
    let host = Host::new("alone").expect("a host can be made");
    let run = |line: &str| host.run("sh", &["-c", line]).expect(line);
    assert_eq!(run("hostname"), "alone\n");
    assert_eq!(run("ip -o link | wc -l"), "1\n", "only lo");
    assert_eq!(run("ls -A /run /var/log | tr -d '\\n'"), "/run:/var/log:");
    assert_eq!(run("findmnt -no PROPAGATION /"), "shared\n");
    assert_eq!(
        run("cat /proc/self/cgroup | cut -d: -f3 | grep -vx / | grep -vx /host | wc -l"),
        "0\n"
    );
    assert_eq!(run("cat /proc/1/comm | wc -l"), "1\n");
    // Process 1 of the host reaps a grandchild without a parent; it ends with the host.
    run("sleep 4711 >/dev/null 2>&1 & mkdir /sys/fs/cgroup/*/made; mkdir -p /run/netns");
    let directory = host.directory().to_owned();
    let cgroups = host.cgroups();
    assert!(!cgroups.is_empty());
    drop(host);
    assert!(!directory.exists());
    assert!(cgroups.iter().all(|path| !path.exists()), "{cgroups:?}");
    assert!(!Path::new("/run/netns/made").exists());
}

#[test]
fn hosts_on_a_switch_reach_each_other() {
    if !places::is_root_or_says_skipped() {
        return;
    }
    let mut switch = Switch::new().expect("a switch can be made");
    let one = Host::new("one").expect("a host can be made");
    let two = Host::new("two").expect("a host can be made");
    let address = switch.connect(&one).expect("a host can be connected");
    switch.connect(&two).expect("a host can be connected");
    let listener = one.in_network(|| std::net::TcpListener::bind((address.as_str(), 80)));
    let listener = listener.expect("the network can be entered").expect("the port is free");
    let server = std::thread::spawn(move || answer_once(&listener));
    let network = two.network().expect("a file can be cloned");
    let response = wait::until(LONG, "an answer", || {
        http::get_from(&network, &format!("{address}:80"), "/", LONG)
    });
    assert_eq!(response.expect("the other host answers").body, "hi");
    server.join().expect("the server does not panic");
}

fn answer_once(listener: &std::net::TcpListener) {
    use std::io::{BufRead, BufReader, Write};
    let (stream, _) = listener.accept().expect("a connection comes");
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while reader.read_line(&mut line).expect("a request comes") > 2 {
        line.clear();
    }
    reader
        .get_mut()
        .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        .expect("it takes the answer");
}

#[test]
fn a_registry_takes_an_index_and_a_manifest() {
    if !places::is_root_or_says_skipped() {
        return;
    }
    let archives = images::all().expect("images can be made");
    let host = Host::new("registry").expect("a host can be made");
    let registry = Registry::start(&host).expect("a registry starts");
    registry.push(&host, &archives[0], "library/busybox", "1.35").expect("one platform");
    registry.push(&host, &archives[2], "library/nginx", "1.23").expect("two platforms");
    let network = host.network().expect("a file can be cloned");
    let tags = http::get_from(&network, ADDRESS, "/v2/library/nginx/tags/list", LONG);
    assert!(tags.expect("the registry answers").body.contains("1.23"));
}

#[test]
fn a_hammer_counts_and_keeps_failures() {
    if !places::is_root_or_says_skipped() {
        return;
    }
    let host = Host::new("hammered").expect("a host can be made");
    let bind = || std::net::TcpListener::bind("127.0.0.1:80");
    let listener = host.in_network(bind).expect("a network").expect("the port is free");
    let network = || host.network().expect("a file can be cloned");
    let hammer = Hammer::get(network(), "127.0.0.1:80", "/");
    answer_once(&listener);
    answer_once(&listener);
    drop(listener);
    let refused = http::get_from(&network(), "127.0.0.1:80", "/", LONG);
    assert!(refused.is_err(), "the listener is gone: {refused:?}");
    // The second request was sent when no listener existed any more.
    let enough = || {
        let failed = hammer.failed();
        anyhow::ensure!(failed > 2, "{failed} failed");
        Ok(())
    };
    wait::until(LONG, "it is refused", enough).expect("it asks on");
    let report = hammer.stop();
    assert!(report.count > 2, "{report:?}");
    assert!(!report.failures.is_empty(), "{report:?}");
}
