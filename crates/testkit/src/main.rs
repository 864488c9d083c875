//! The test kit's own program: test images, test hosts, clusters, performance figures.
//!
//! In: `images`, `kubeadm-images BINARY ETCD TAG ETCDTAG DIRECTORY`, `suite PROGRAMS MODULE NODES BINARY PROGRAM [ARGS…]` (reads image names from standard
//! input, makes the images, runs a program beside a cluster that can pull them), `host PROGRAM [ARGS…]`
//! (runs a program on a new host with an address on a switch), `cluster BINARY PROGRAM [ARGS…]` (runs a
//! program on the first node of a cluster of two, with KUBECONFIG), `fuzz BINARY SECONDS [SEED]` (sends a
//! control plane valid and invalid requests), `faults BINARY [--rate N] [--watches N] [--lenient] [NAME…]` (harms a cluster of
//! three servers under load and judges what clients saw), `throughput BINARY [--small] [PART…]` (loads a control plane
//! and prints figures), `fleet BINARY [--no-churn] [NODES…]` (the same with simulated nodes), or
//! `measure BINARY [RUNS] [--starts-only]`. Out: paths of archives, the program's output, findings, or
//! markdown.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use decapod_testkit::faults::{self, Amount};
use decapod_testkit::host::Host;
use decapod_testkit::switch::Switch;
use decapod_testkit::throughput::hollow::{self, Depth, Plan};
use decapod_testkit::throughput::{self, Scale};
use decapod_testkit::{fuzz, images, measure, nodes, suite};

const USAGE: &str = "usage: decapod-testkit images | kubeadm-images BINARY ETCD TAG ETCDTAG DIRECTORY | suite PROGRAMS MODULE NODES BINARY PROGRAM [ARGS…] \
     | host PROGRAM [ARGS…] | cluster BINARY PROGRAM [ARGS…] | fuzz BINARY SECONDS [SEED] \
     | faults BINARY [--rate N] [--watches N] [--lenient] [NAME…] \
     | fleet BINARY [--no-churn] [--pods-per-node N] [NODES…] | throughput BINARY [--small] [requests|lists|watches|memory|nodes…] | measure BINARY [RUNS] [--starts-only]";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["images"] => {
            for path in images::all()? {
                println!("{}", path.display());
            }
            Ok(())
        }
        ["kubeadm-images", binary, etcd, tag, etcd_tag, directory] => {
            let paths = [binary, etcd, directory].map(Path::new);
            let made = images::kubeadm::archives(paths[0], paths[1], tag, etcd_tag, paths[2])?;
            made.iter().for_each(|path| println!("{}", path.display()));
            Ok(())
        }
        ["suite", programs, module, nodes, binary, program, rest @ ..] => {
            let sources =
                images::suite::Sources { programs: programs.into(), module: module.into() };
            let names: Vec<String> = std::io::stdin().lines().collect::<Result<_, _>>()?;
            let registry = images::suite::registry(&sources, &names)?;
            suite::run(Path::new(binary), nodes.parse()?, &registry, program, rest)
        }
        ["host", program, rest @ ..] => run_on_host(program, rest),
        ["cluster", binary, program, rest @ ..] => run_in_cluster(binary, program, rest),
        ["fuzz", binary, seconds, rest @ ..] => {
            let seed = rest.first().map_or(Ok(1), |seed| seed.parse())?;
            fuzz::run(&std::path::absolute(binary)?, seconds.parse()?, seed)
        }
        ["throughput", binary, rest @ ..] => {
            let scale = if rest.contains(&"--small") { Scale::SMALL } else { Scale::FULL };
            let parts: Vec<&str> =
                rest.iter().copied().filter(|word| !word.starts_with("--")).collect();
            print!("{}", throughput::report(&std::path::absolute(binary)?, scale, &parts)?);
            Ok(())
        }
        ["fleet", binary, rest @ ..] => {
            print!("{}", hollow::report(&std::path::absolute(binary)?, &plans(rest)?)?);
            Ok(())
        }
        ["faults", binary, rest @ ..] => {
            let (amount, names) = amount(rest)?;
            faults::run(&std::path::absolute(binary)?, &names, amount)
        }
        ["measure", binary, rest @ ..] => {
            let idle = !rest.contains(&"--starts-only");
            let runs = rest.iter().find(|word| !word.starts_with("--")).copied().unwrap_or("5");
            print!("{}", measure::report(Path::new(binary), runs.parse()?, idle)?);
            Ok(())
        }
        _ => anyhow::bail!(USAGE),
    }
}

/// The amount of load, and the names of faults.
fn amount<'a>(words: &[&'a str]) -> Result<(Amount, Vec<&'a str>)> {
    let (mut amount, mut names) =
        (Amount { rate: 200, watches: 200, is_lenient: false }, Vec::new());
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match *word {
            "--rate" => amount.rate = words.next().context("--rate needs a number")?.parse()?,
            "--watches" => {
                amount.watches = words.next().context("--watches needs a number")?.parse()?;
            }
            "--lenient" => amount.is_lenient = true,
            name => names.push(name),
        }
    }
    ensure!(amount.rate > 0 && amount.watches > 0, "there must be writes and watches");
    Ok((amount, names))
}

/// The sizes that are named, or those of docs/performance.md.
fn plans(words: &[&str]) -> Result<Vec<Plan>> {
    let mut words = words.iter();
    let (mut sizes, mut depth, mut pods_per_node) = (Vec::new(), Depth::Churn, 5_usize);
    while let Some(word) = words.next() {
        match *word {
            "--no-churn" => depth = Depth::Calm,
            "--pods-per-node" => {
                pods_per_node = words.next().context("--pods-per-node needs a number")?.parse()?;
            }
            number => sizes.push(number.parse().with_context(|| format!("no size: {number}"))?),
        }
    }
    if sizes.is_empty() {
        sizes = vec![100, 1000, 5000];
    }
    ensure!(!sizes.contains(&0) && pods_per_node > 0, "there must be nodes and pods");
    Ok(sizes.into_iter().map(|nodes| Plan { nodes, pods: nodes * pods_per_node, depth }).collect())
}

fn run_on_host(program: &str, arguments: &[&str]) -> Result<()> {
    let mut switch = Switch::new()?;
    let host = Host::new("node1")?;
    let address = switch.connect(&host)?;
    eprintln!("host node1, address {address}, files in {}", host.directory().display());
    let mut command = host.command(program);
    let status =
        host.spawn(command.args(arguments).env("HOST_DIRECTORY", host.directory()))?.wait()?;
    ensure!(status.success(), "{program}: {status}");
    Ok(())
}

fn run_in_cluster(binary: &str, program: &str, arguments: &[&str]) -> Result<()> {
    let cluster = nodes::two_nodes(&std::path::absolute(binary)?, &[])?;
    for archive in images::all()? {
        cluster.server.decapod(&["images", "import", &archive.display().to_string()])?;
    }
    cluster.agent.import_images()?;
    let (first, second) = (cluster.server.host(), cluster.agent.host());
    eprintln!("node1 {}, files in {}", cluster.address, first.directory().display());
    eprintln!("node2 {}, files in {}", cluster.agent.address(), second.directory().display());
    let mut command = first.command(program);
    command.args(arguments).env("KUBECONFIG", cluster.server.kubeconfig());
    let status = first.spawn(&mut command)?.wait()?;
    ensure!(status.success(), "{program}: {status}");
    Ok(())
}
