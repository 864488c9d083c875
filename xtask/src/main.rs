//! The project's own commands: `cargo xtask COMMAND`.
//!
//! In: the work tree and what the machine has. Out: a running cluster, a test verdict, figures.
//! It uses the standard library only, so that the first answer comes seconds after the clone.
//! Invariant: nothing is installed without a line that says so, and nothing outside the target
//! directory and the cache directory is left behind.

mod conformance;
mod expected;
mod facts;
mod facts_internal;
mod facts_protobuf;
mod foreign;
mod fuzz;
mod measure;
mod packages;
mod sh;
mod supply;
mod test;
mod tidy;
mod up;
mod wire;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  up [ARGS…]   build the release binary and run a single-node cluster (as root);
               ARGS go to `decapod server`
  test         install what the tests need, then run all of them: format, lints, tidy,
               unit and integration tests, the end-to-end story
  tidy         check the house rules that the compiler does not know
  supply       check licences, sources and known holes of the packages that the build takes (deny.toml)
  advisories DIR  rewrite the table of known holes from a checkout of the RustSec database
  wire [--area A,B] [--case RE] [--accept]
               replay upstream's recorded interactions against a fresh server
  fuzz [--seconds N] [--seed N]
               send a fresh server whatever its schemas allow, and what they do not
  conformance [--focus TEXT] [--sig NAME] [--list smoke|control-plane] [--parallel N] [--nodes N]
               run upstream's end-to-end suite against a cluster of our own
  kubectl      build the foreign kubectl that the tests use, once, and print its path
  helm, csi-driver, device-plugin, cbor-client  the same for helm, for the mock driver of upstream's
               suite, for its stub of a device plugin, and for Go's clients in CBOR; `foreign` does
               all that the end-to-end story runs
  kube-apiserver, etcd  build upstream's API server, and an etcd 3.6 with its tools, for the
               tests that use them where they are in the cache
  facts FILE   rewrite the field facts of crates/api from the published OpenAPI document
  facts-internal  rewrite the fields of internal types that errors show
  facts-protobuf  rewrite its protobuf field numbers from Kubernetes' Go modules
  measure      print the figures of docs/performance.md
  measure throughput [--small] [requests|lists|watches|memory…]
               print those of a control plane under load
  measure fleet [--no-churn] [--pods-per-node N] [NODES…]
               print what simulated nodes and pods on them cost it, for 100, 1000 and 5000 nodes
               or the sizes named, and how sizes compare";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let rest: Vec<String> = args.collect();
    let outcome = match command.as_str() {
        "up" => up::run(&rest),
        "test" => test::run(),
        "tidy" => tidy::run(),
        "supply" => supply::run(),
        "advisories" => supply::rewrite(&rest),
        "conformance" => conformance::run(&rest),
        "fuzz" => fuzz::run(&rest),
        "wire" => wire::run(&rest),
        "kubectl" => foreign::kubectl().map(|path| println!("{}", path.display())),
        "helm" => foreign::helm().map(|path| println!("{}", path.display())),
        "csi-driver" => foreign::csi_driver().map(|path| println!("{}", path.display())),
        "cbor-client" => foreign::cbor_client().map(|path| println!("{}", path.display())),
        "device-plugin" => foreign::device_plugin().map(|path| println!("{}", path.display())),
        "foreign" => foreign::of_the_story(),
        "kube-apiserver" => foreign::api_server().map(|path| println!("{}", path.display())),
        "etcd" => foreign::etcd().map(|path| println!("{}", path.display())),
        "facts" => facts::run(&rest),
        "facts-internal" => facts_internal::run(&rest),
        "facts-protobuf" => facts_protobuf::run(&rest),
        "measure" => measure::run(&rest),
        _ => Err(USAGE.to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
