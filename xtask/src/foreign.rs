//! Upstream programs that the tests use, built once from their Go modules and cached.
//!
//! In: a version and a Go toolchain. Out: the path of a program in the cache directory.
//! `k8s.io/kubernetes` requires its staging modules at version 0.0.0 and replaces them by folders of its
//! own tree. Go ignores the replace lines of a dependency, so our module repeats them with the published
//! versions. The list is read from the module's own go.mod, not kept here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::sh::{self, Outcome};

/// The helm that installs a chart in the end-to-end story: the newest whose Kubernetes libraries are
/// not newer than those of kubectl, so that shared packages are compiled once.
const HELM: &str = "4.2.4";
/// The Kubernetes libraries of helm.
const HELM_LIBRARIES: &[&str] = &[
    "k8s.io/api",
    "k8s.io/apiextensions-apiserver",
    "k8s.io/apimachinery",
    "k8s.io/apiserver",
    "k8s.io/cli-runtime",
    "k8s.io/client-go",
    "k8s.io/component-base",
    "k8s.io/kubectl",
];

/// The upstream release that we are measured against.
pub const KUBERNETES: &str = release::KUBERNETES.full;
/// The etcd that API servers of several machines share.
const ETCD: &str = "3.6.5";

/// The real kubectl; builds it when the cache has none (about three minutes on two cores).
pub fn kubectl() -> Outcome<PathBuf> {
    program("kubectl", "k8s.io/kubernetes/cmd/kubectl")
}

/// An unmodified helm, with its Kubernetes libraries at our release; two minutes after kubectl is built.
pub fn helm() -> Outcome<PathBuf> {
    let directory = sh::cache_directory()?.join(format!("helm-v{HELM}"));
    let flags = format!("-s -w -X helm.sh/helm/v4/internal/version.version=v{HELM}");
    let libraries = release::KUBERNETES.libraries.trim_start_matches('v');
    build(&directory, "helm", "helm.sh/helm/v4/cmd/helm", &flags, |directory| {
        let mut modules = vec![("helm.sh/helm/v4", HELM)];
        modules.extend(HELM_LIBRARIES.iter().map(|name| (*name, libraries)));
        require(directory, &modules)
    })
}

/// The mock driver of the end-to-end suite, as a separate program (`csi_driver.go`) that also does the
/// registrar's work. Half a minute after kubectl is built.
pub fn csi_driver() -> Outcome<PathBuf> {
    own("csi-driver", include_str!("csi_driver.go"))
}

/// Upstream's stub of a device plugin, as a separate program.
pub fn device_plugin() -> Outcome<PathBuf> {
    own("device-plugin", include_str!("device_plugin.go"))
}

/// A program that uses upstream's Go clients in CBOR.
pub fn cbor_client() -> Outcome<PathBuf> {
    own("cbor-client", include_str!("cbor_client.go"))
}

/// The real kubeadm.
pub fn kubeadm() -> Outcome<PathBuf> {
    program("kubeadm", "k8s.io/kubernetes/cmd/kubeadm")
}

/// Prints the flags that upstream's components register; as long to build as kube-apiserver and kubelet.
pub fn component_flags() -> Outcome<PathBuf> {
    own("component-flags", include_str!("component_flags.go"))
}

/// A program with our own main file, built from upstream's packages.
fn own(name: &str, text: &str) -> Outcome<PathBuf> {
    let directory = directory()?;
    let folder = format!("{name}-source");
    let source = directory.join(&folder).join("main.go");
    let fail = |error: std::io::Error| format!("{}: {error}", source.display());
    if !fs::read_to_string(&source).is_ok_and(|old| old == text) {
        fs::create_dir_all(directory.join(&folder)).map_err(fail)?;
        // The cached program was built from another source.
        let _ = fs::remove_file(directory.join(name));
        fs::write(&source, text).map_err(fail)?;
    }
    program(name, &format!("./{folder}"))
}

/// Builds the programs of the end-to-end story one after the other: each build uses all cores.
pub fn of_the_story() -> Outcome {
    kubectl()?;
    // Without these, chapters print `skipped`: a module that cannot be fetched does not fail the run.
    for build in [csi_driver, device_plugin, cbor_client, helm] {
        if let Err(error) = build() {
            eprintln!("a chapter of the story will be skipped: {error}");
        }
    }
    Ok(())
}

/// Upstream's API server, which runs on our etcd in the end-to-end story.
pub fn api_server() -> Outcome<PathBuf> {
    program("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver")
}

/// A real etcd, with `etcdctl` and `etcdutl`, in the directory where the store's tests look for it.
pub fn etcd() -> Outcome<PathBuf> {
    let directory = sh::cache_directory()?.join("etcd-3.6");
    for (name, module) in [("etcd", "server"), ("etcdctl", "etcdctl"), ("etcdutl", "etcdutl")] {
        let package = format!("go.etcd.io/etcd/{module}/v3");
        build(&directory, name, &package, "-s -w", |directory| {
            require(directory, &[(&package, ETCD)])
        })?;
    }
    Ok(directory.join("etcd"))
}

/// The conformance suite: one large test binary (10 to 20 minutes on two cores).
pub fn end_to_end() -> Outcome<PathBuf> {
    program("e2e.test", "k8s.io/kubernetes/test/e2e")
}

/// Builds the programs of the suite's images; returns their directory.
pub fn suite_programs() -> Outcome<PathBuf> {
    program("agnhost", "k8s.io/kubernetes/test/images/agnhost")?;
    program("nnp", "k8s.io/kubernetes/test/images/nonewprivs")?;
    program("regression-issue-74839", "k8s.io/kubernetes/test/images/regression-issue-74839")?;
    program("sample-apiserver", "k8s.io/sample-apiserver")?;
    directory()
}

/// The directory of the source of `k8s.io/kubernetes` in Go's module cache.
pub fn module_source() -> Outcome<PathBuf> {
    let report = download(&directory()?)?;
    json_string(&report, "Dir").map(PathBuf::from).ok_or("go mod download named no Dir".to_owned())
}

/// The directory of a Go module that requires `k8s.io/kubernetes`.
pub fn kubernetes_module() -> Outcome<PathBuf> {
    let directory = directory()?;
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    write_module(&directory)?;
    Ok(directory)
}

/// etcd, if it is in the cache.
pub fn cached_etcd() -> Option<PathBuf> {
    let path = sh::cache_directory().ok()?.join("etcd-3.6/etcd");
    path.is_file().then_some(path)
}

pub fn has_go() -> bool {
    sh::exists("go")
}

/// Whether kubectl is in the cache.
pub fn has_kubectl() -> bool {
    has("kubectl")
}

/// Whether a program is in the cache.
pub fn has(name: &str) -> bool {
    directory().is_ok_and(|directory| directory.join(name).is_file())
}

fn directory() -> Outcome<PathBuf> {
    Ok(sh::cache_directory()?.join(format!("kubernetes-v{KUBERNETES}")))
}

fn program(name: &str, package: &str) -> Outcome<PathBuf> {
    build(&directory()?, name, package, &linker_flags(), write_module)
}

/// Builds a package of the module that `module` writes into a directory, unless it is built already.
fn build(
    directory: &Path,
    name: &str,
    package: &str,
    linker_flags: &str,
    module: impl Fn(&Path) -> Outcome,
) -> Outcome<PathBuf> {
    let binary = directory.join(name);
    if binary.is_file() {
        return Ok(binary);
    }
    if !has_go() {
        return Err(format!("no Go toolchain: cannot build {name}"));
    }
    eprintln!("building {package} from its Go module, once, into {}", directory.display());
    fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    module(directory)?;
    // Two runs may build at once: each writes its own file, and the last rename wins.
    let partial = directory.join(format!("{name}.{}", std::process::id()));
    let mut command = go(directory);
    // The go command prints each package that it compiles, so that a long build shows its progress.
    match name.strip_suffix(".test") {
        Some(_) => command.args(["test", "-c", "-vet=off"]),
        None => command.args(["build"]),
    };
    command.args(["-v", "-trimpath", "-ldflags", linker_flags, "-o"]);
    sh::run(command.arg(&partial).arg(package))?;
    fs::rename(&partial, &binary).map_err(|error| format!("{}: {error}", binary.display()))?;
    Ok(binary)
}

/// Writes a go.mod that requires `k8s.io/kubernetes`.
fn write_module(directory: &Path) -> Outcome {
    let report = download(directory)?;
    let go_mod = json_string(&report, "GoMod").ok_or("go mod download named no go.mod")?;
    let upstream = fs::read_to_string(&go_mod).map_err(|error| format!("{go_mod}: {error}"))?;
    let staging = release::KUBERNETES.libraries;
    let mut text = format!("module decapod.invalid/foreign\n\n{}\n\n", go_line(&upstream));
    text.push_str(&format!("require k8s.io/kubernetes v{KUBERNETES}\n\n"));
    for name in staging_modules(&upstream) {
        text.push_str(&format!("replace {name} => {name} {staging}\n"));
    }
    let path = directory.join("go.mod");
    if fs::read_to_string(&path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Writes a go.mod that requires modules at these versions.
fn require(directory: &Path, modules: &[(&str, &str)]) -> Outcome {
    let mut text = "module decapod.invalid/foreign\n\ngo 1.24.0\n\nrequire (\n".to_owned();
    for (module, version) in modules {
        text.push_str(&format!("\t{module} v{version}\n"));
    }
    text.push_str(")\n");
    let path = directory.join("go.mod");
    fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// The go command's report about the module, which it fetches if necessary.
fn download(directory: &Path) -> Outcome<String> {
    let module = format!("k8s.io/kubernetes@v{KUBERNETES}");
    let mut command = Command::new("go");
    sh::capture(command.current_dir(directory).args(["mod", "download", "-json", &module]))
}

/// Where Go keeps a module of Kubernetes' release, which is fetched if it is not there: the sources
/// that our tables of facts come from.
pub fn module(name: &str) -> Outcome<PathBuf> {
    let version = match name {
        "k8s.io/kubernetes" => release::KUBERNETES.tag,
        _ => release::KUBERNETES.libraries,
    };
    let wanted = format!("{name}@{version}");
    let output = Command::new("go")
        .args(["mod", "download", "-json", &wanted])
        .output()
        .map_err(|error| format!("go: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let dir = text.lines().find_map(|line| line.trim().strip_prefix("\"Dir\": \""));
    let dir = dir.and_then(|rest| rest.split('"').next());
    dir.map(PathBuf::from).ok_or_else(|| format!("go mod download {wanted}: {text}"))
}

/// The go command in a module's directory.
pub fn go(directory: &Path) -> Command {
    // Our own build has priority over this one.
    let mut command = Command::new("nice");
    command.args(["-n", "10", "go"]).current_dir(directory);
    command.env("GOFLAGS", "-mod=mod").env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "auto");
    command
}

fn linker_flags() -> String {
    let mut parts = KUBERNETES.split('.');
    let (major, minor) = (parts.next().unwrap_or("1"), parts.next().unwrap_or("0"));
    let set = |name: &str, value: &str| format!(" -X k8s.io/component-base/version.{name}={value}");
    [
        "-s -w".to_owned(),
        set("gitVersion", &format!("v{KUBERNETES}")),
        set("gitMajor", major),
        set("gitMinor", minor),
        set("gitTreeState", "clean"),
    ]
    .concat()
}

fn go_line(go_mod: &str) -> &str {
    go_mod.lines().find(|line| line.starts_with("go ")).unwrap_or("go 1.26.0")
}

/// Names on the left of `NAME => ./staging/src/NAME`.
fn staging_modules(go_mod: &str) -> Vec<&str> {
    let replaced = go_mod.lines().filter_map(|line| line.split_once(" => ./staging/"));
    replaced.filter_map(|(left, _)| left.split_whitespace().last()).collect()
}

/// The value of a plain string member; enough for what the go command prints.
fn json_string(text: &str, key: &str) -> Option<String> {
    let rest = text.split_once(&format!("\"{key}\": \""))?.1;
    Some(rest.split_once('"')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_upstreams_module_file() {
        let text =
            "go 1.26.0\nreplace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n\tx/y => x/z v1\n)\n";
        assert_eq!(staging_modules(text), ["k8s.io/api"]);
        assert_eq!(go_line(text), "go 1.26.0");
        assert_eq!(
            json_string("{\n\t\"GoMod\": \"/a/b.mod\",\n}", "GoMod").as_deref(),
            Some("/a/b.mod")
        );
    }
}
