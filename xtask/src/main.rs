//! The project's own commands: `cargo xtask COMMAND`.
//!
//! In: the work tree and the machine's tools. Out: a running cluster, a test verdict, figures.
//! It uses the standard library only, so that it compiles in seconds after the clone.
//! Invariant: it installs nothing without a line that says so, and leaves nothing behind outside the
//! target directory and the cache directory.

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
  tidy         check the house rules (lengths, headers, crate edges, banned calls)
  supply       check licences, sources and advisories of the packages in Cargo.lock (deny.toml)
  advisories DIR  rewrite the table of advisories from a checkout of the RustSec database
  wire [--area A,B] [--case RE] [--accept]
               replay upstream's recorded interactions against a new server
  fuzz [--seconds N] [--seed N]
               send a new server valid and invalid requests made from its schemas
  conformance [--suite NAME] [--focus TEXT] [--sig NAME] [--list smoke|control-plane] [--parallel N]
               run upstream's end-to-end suite against a new cluster
  kubectl      build upstream's kubectl for the tests, once, and print its path
  helm, csi-driver, device-plugin, cbor-client  the same for helm, for the mock driver of upstream's
               suite, for its stub of a device plugin, and for Go's clients in CBOR; `foreign` builds
               all that the end-to-end story needs
  kube-apiserver, etcd  build upstream's API server, or etcd 3.6 with its tools, for the
               tests that use them if they are in the cache
  facts [FILE] rewrite the field facts of crates/api from the published OpenAPI document
  facts-internal  rewrite the fields of Kubernetes' internal types, which some errors show
  facts-protobuf  rewrite the protobuf field numbers of crates/api from Kubernetes' Go modules
  measure      print the figures of docs/performance.md
  measure throughput [--small] [requests|lists|watches|memory…]
               print the figures of a control plane under load
  measure fleet [--no-churn] [--pods-per-node N] [NODES…]
               print what simulated nodes and their pods cost the control plane, for 100, 1000 and
               5000 nodes or the sizes that are named, and the ratios between sizes";

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
