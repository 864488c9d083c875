//! The project's own commands: `cargo xtask COMMAND`.
//!
//! In: the work tree and the machine's tools. Out: a running cluster, a test verdict, figures.
//! It uses the standard library only, so that it compiles in seconds after the clone.
//! Invariant: it installs nothing without a line that says so, and leaves nothing behind outside the
//! target directory and the cache directory.

mod component_flags;
mod conformance;
mod dist;
mod expected;
mod facts;
mod facts_go;
mod facts_internal;
mod facts_protobuf;
mod faults;
mod foreign;
mod fuzz;
mod images;
mod measure;
mod packages;
mod sh;
mod simulate;
mod supply;
mod test;
mod tidy;
mod twin;
mod up;
mod vm;
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
  simulate [--seed N] [--rounds N] [--scenario NAME] [--jobs N] [--twice] [--shrink] [--trace N]
               run the control plane in virtual time with faults, and check laws at each write
  faults [--rate N] [--watches N] [NAME…]
               harm three servers under load (as root): restarts, kills, partitions, full and slow
               disks, wrong clocks; check that no acknowledged write is lost and no pod runs twice
  twin [--seconds N] [--seed S] [--case N --source NAME]
               send the same requests to upstream's API server and to ours, and compare
  conformance [--suite NAME] [--focus TEXT] [--sig NAME] [--list smoke|control-plane] [--parallel N]
               run upstream's end-to-end suite against a new cluster
  vm [--release 12|13] [--binary PATH] [--short] [--tcg] [--cuts N] [CHAPTER…]
               boot Debian under QEMU and run Decapod as its service: systemd, cgroup v2, reboots,
               bad disks, power cuts, two machines
  dist [--binary FILE] [--output DIRECTORY]
               write the files of a release: .tar.gz, .deb, SBOM, checksums
  kubectl      build upstream's kubectl for the tests, once, and print its path
  helm, csi-driver, device-plugin, cbor-client  the same for helm, for the mock driver of upstream's
               suite, for its stub of a device plugin, and for Go's clients in CBOR; `foreign` builds
               all that the end-to-end story needs
  images DIRECTORY  write the images that `kubeadm init` asks for: the debug binary under four names, etcd
  kube-apiserver, etcd, kubeadm  build upstream's API server, etcd 3.6 with its tools, or kubeadm, for the
               tests that use them if they are in the cache
  flags [--upstream]  rewrite docs/flags.md from crates/binary/flags; or compare the tables with the
               flags that upstream's components register (built once from Go modules)
  facts [FILE] rewrite the field facts of crates/api from the published OpenAPI document
  facts-go     rewrite the fields of Kubernetes' Go types, as Go's errors name them
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
        "dist" => dist::run(&rest),
        "conformance" => conformance::run(&rest),
        "faults" => faults::run(&rest),
        "fuzz" => fuzz::run(&rest),
        "simulate" => simulate::run(&rest),
        "vm" => vm::run(&rest),
        "twin" => twin::run(&rest),
        "wire" => wire::run(&rest),
        "kubectl" => foreign::kubectl().map(|path| println!("{}", path.display())),
        "helm" => foreign::helm().map(|path| println!("{}", path.display())),
        "csi-driver" => foreign::csi_driver().map(|path| println!("{}", path.display())),
        "cbor-client" => foreign::cbor_client().map(|path| println!("{}", path.display())),
        "device-plugin" => foreign::device_plugin().map(|path| println!("{}", path.display())),
        "foreign" => foreign::of_the_story(),
        "kube-apiserver" => foreign::api_server().map(|path| println!("{}", path.display())),
        "kubeadm" => foreign::kubeadm().map(|path| println!("{}", path.display())),
        "images" => images::run(&rest),
        "etcd" => foreign::etcd().map(|path| println!("{}", path.display())),
        "flags" => component_flags::run(&rest),
        "facts" => facts::run(&rest),
        "facts-go" => facts_go::run(&rest),
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
