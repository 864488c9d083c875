//! The images of upstream's end-to-end suite, made here because there is no registry to pull them from.
//!
//! In: the names that `e2e.test --list-images` prints, the suite's Go programs, its module's source.
//! Out: a registry's data directory with every image of the conformance specs, under exactly these names
//! and tags. Images that exist already are not made again.
//!
//! Deviation: upstream's images are based on Alpine and Debian; these are based on a static busybox and
//! Debian's programs, with the files, users, entry points and commands that the specs rely on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::{Compression, Image, Layer, busybox_layer, debian, nginx_layer, write_oci_layout};
use crate::host::Host;
use crate::registry::Registry;

/// Increase it when a recipe changes.
const RECIPES: u32 = 7;

/// The registry in all their names.
const REGISTRY: &str = "registry.k8s.io/";

/// Inputs of the recipes.
pub struct Sources {
    /// Directory of the suite's programs: `agnhost`, `nnp`, `sample-apiserver`,
    /// `regression-issue-74839`.
    pub programs: PathBuf,
    /// The source of the module `k8s.io/kubernetes`.
    pub module: PathBuf,
}

struct Recipe {
    /// Without registry and tag; every tag in the suite's list is made.
    repository: &'static str,
    make: fn(&Sources, &str) -> Result<Image>,
}

const IMAGES: &[Recipe] = &[
    Recipe { repository: "e2e-test-images/agnhost", make: agnhost },
    Recipe { repository: "e2e-test-images/busybox", make: busybox },
    Recipe { repository: "e2e-test-images/nginx", make: nginx },
    Recipe { repository: "pause", make: pause },
    Recipe { repository: "e2e-test-images/nonewprivs", make: no_new_privileges },
    Recipe { repository: "e2e-test-images/nonroot", make: nonroot },
    Recipe { repository: "e2e-test-images/nautilus", make: nautilus },
    Recipe { repository: "e2e-test-images/kitten", make: kitten },
    Recipe { repository: "e2e-test-images/glibc-dns-testing", make: dns_testing },
    Recipe { repository: "e2e-test-images/sample-apiserver", make: sample_apiserver },
    Recipe { repository: "etcd", make: etcd },
    Recipe { repository: "e2e-test-images/regression-issue-74839", make: stray_packets },
    Recipe { repository: "build-image/distroless-iptables", make: connection_tools },
];

/// The data directory of a registry with all images; makes missing ones.
pub fn registry(sources: &Sources, names: &[String]) -> Result<PathBuf> {
    let directory = crate::places::cache()?.join(format!("suite-images-{RECIPES}"));
    fs::create_dir_all(&directory).with_context(|| format!("{}", directory.display()))?;
    let wanted = wanted(names)?;
    let missing: Vec<_> =
        wanted.into_iter().filter(|(_, path, tag)| !is_there(&directory, path, tag)).collect();
    if missing.is_empty() {
        return Ok(directory);
    }
    let host = Host::new("images")?;
    let registry = Registry::start_at(&host, &directory)?;
    let mut failures = Vec::new();
    for (recipe, repository, tag) in missing {
        let name = format!("{REGISTRY}{repository}:{tag}");
        eprintln!("making the image {name}");
        let made = (recipe.make)(sources, &name).and_then(|image| {
            let archive = host.directory().join("image.tar");
            write_oci_layout(&archive, &[("amd64", &image)], Compression::Gzip)?;
            registry.push(&host, &archive, repository, tag)
        });
        if let Err(error) = made {
            failures.push(format!("{name}: {error:#}"));
        }
    }
    ensure!(failures.is_empty(), "these images could not be made:\n{}", failures.join("\n"));
    Ok(directory)
}

/// Recipe, repository and tag of each image; an error names repositories that the suite does not list.
fn wanted(names: &[String]) -> Result<Vec<(&'static Recipe, &'static str, &str)>> {
    let mut wanted = Vec::new();
    let mut unknown = Vec::new();
    for recipe in IMAGES {
        let before = wanted.len();
        for name in names {
            let Some((repository, tag)) =
                name.strip_prefix(REGISTRY).and_then(|rest| rest.split_once(':'))
            else {
                continue;
            };
            if repository == recipe.repository {
                wanted.push((recipe, recipe.repository, tag));
            }
        }
        if wanted.len() == before {
            unknown.push(recipe.repository);
        }
    }
    if !unknown.is_empty() {
        bail!("the suite names no image of {}: its list has changed", unknown.join(", "));
    }
    Ok(wanted)
}

fn is_there(directory: &Path, repository: &str, tag: &str) -> bool {
    let repositories = directory.join("docker/registry/v2/repositories");
    repositories.join(repository).join("_manifests/tags").join(tag).join("current/link").is_file()
}

fn agnhost(sources: &Sources, name: &str) -> Result<Image> {
    let mut own = Layer::new();
    own.file("agnhost", 0o755, &program(sources, "agnhost")?)?;
    own.symlink("agnhost-2", "agnhost")?;
    own.directory("uploads", 0o755)?;
    for file in ["localhost.crt", "localhost.key"] {
        let path = sources.module.join("test/images/agnhost/porter").join(file);
        own.file(file, 0o644, &read(&path)?)?;
    }
    own.file(
        "etc/passwd",
        0o644,
        b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n\
          user-defined-in-image:x:1000:1000::/home/user-defined-in-image:/bin/sh\n",
    )?;
    own.file(
        "etc/group",
        0o644,
        b"root:x:0:\nnogroup:x:65534:\nuser-defined-in-image:x:1000:\n\
          group-defined-in-image:x:50000:user-defined-in-image\n",
    )?;
    // Same as in the base of upstream's image; the suite reads it.
    own.file("etc/os-release", 0o644, b"NAME=\"Alpine Linux\"\nID=alpine\n")?;
    Ok(network_tools(name)?.layer(own).entrypoint(&["/agnhost"]).command(&["pause"]))
}

/// A busybox and bash, which is called `place`. Upstream's newer busybox passes on environment variables
/// that are not identifiers, Debian's drops them. Debian's always uses its own `nc`, whatever `PATH`
/// contains.
fn shell(name: &str, place: &str) -> Result<Image> {
    let packages = debian::unpack(&["bash-static"])?;
    let mut layer = Layer::new();
    layer.file("bin/bash", 0o755, &read(&packages.path().join("bin/bash-static"))?)?;
    layer.symlink(place, "/bin/bash")?;
    Ok(Image::new(name).layer(busybox_layer()?).layer(layer))
}

/// A shell, and the programs that specs call in it: curl, dig, nc, getent, printenv, wget. The wget of
/// Debian's static busybox crashes with a time limit. The other wget tries twenty times by default.
fn network_tools(name: &str) -> Result<Image> {
    let tools = [
        ("usr/bin/curl", "usr/bin/curl"),
        ("usr/bin/dig", "usr/bin/dig"),
        ("usr/bin/getent", "usr/bin/getent"),
        ("usr/bin/printenv", "usr/bin/printenv"),
        ("bin/nc.openbsd", "usr/bin/nc"),
        ("usr/bin/wget", "usr/bin/wget"),
    ];
    let packages = ["curl", "bind9-dnsutils", "coreutils", "libc-bin", "netcat-openbsd", "wget"];
    let mut layer = programs_layer(&packages, &tools)?;
    layer.file("etc/wgetrc", 0o644, b"tries = 1\n")?;
    Ok(shell(name, "bin/sh")?.layer(layer))
}

/// Programs of packages, and the libraries that they need.
fn programs_layer(packages: &[&str], programs: &[(&str, &str)]) -> Result<Layer> {
    let names = debian::with_dependencies(packages)?;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let tree = debian::unpack(&names)?;
    let mut layer = Layer::new();
    let mut seen = std::collections::BTreeSet::new();
    for (from, to) in programs {
        layer.file(to, 0o755, &read(&tree.path().join(from))?)?;
        for library in debian::libraries(tree.path(), from)? {
            if seen.insert(library.name.clone()) {
                layer.file(&library.name, 0o755, &read(&library.file)?)?;
            }
        }
    }
    Ok(layer)
}

fn busybox(_: &Sources, name: &str) -> Result<Image> {
    // `sh` is found here first. Specs that call `/bin/sh` compare busybox's own error messages.
    Ok(shell(name, "usr/bin/sh")?.command(&["sh"]))
}

fn nginx(_: &Sources, name: &str) -> Result<Image> {
    let image = Image::new(name).layer(busybox_layer()?).layer(nginx_layer("suite")?);
    Ok(image.command(super::NGINX_COMMAND))
}

/// The only program that upstream writes in C, linked statically.
fn pause(sources: &Sources, name: &str) -> Result<Image> {
    let directory = tempfile::tempdir()?;
    let program = directory.path().join("pause");
    let source = sources.module.join("build/pause/linux/pause.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-Os", "-static", "-o"]).arg(&program).arg(&source);
    let output = compiler.output().context("starting cc")?;
    ensure!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    let mut layer = Layer::new();
    layer.file("pause", 0o755, &read(&program)?)?;
    Ok(Image::new(name).layer(layer).user("65535:65535").entrypoint(&["/pause"]))
}

fn no_new_privileges(sources: &Sources, name: &str) -> Result<Image> {
    let mut layer = Layer::new();
    layer.directory("usr/local/bin", 0o755)?;
    layer.file("usr/local/bin/nnp", 0o6755, &program(sources, "nnp")?)?;
    Ok(Image::new(name).layer(busybox_layer()?).layer(layer).command(&["nnp"]))
}

fn nonroot(_: &Sources, name: &str) -> Result<Image> {
    Ok(Image::new(name).layer(busybox_layer()?).user("1234").command(&["sh"]))
}

fn nautilus(sources: &Sources, name: &str) -> Result<Image> {
    pet(sources, name, "nautilus")
}

fn kitten(sources: &Sources, name: &str) -> Result<Image> {
    pet(sources, name, "kitten")
}

/// A web server with a picture and a file that names it.
fn pet(sources: &Sources, name: &str, kind: &str) -> Result<Image> {
    let mut layer = Layer::new();
    for file in [format!("{kind}.jpg"), "data.json".to_owned()] {
        let path = sources.module.join("test/images").join(kind).join("html").join(&file);
        layer.file(&file, 0o644, &read(&path)?)?;
    }
    Ok(agnhost(sources, name)?.layer(layer).command(&["test-webserver"]))
}

fn dns_testing(_: &Sources, name: &str) -> Result<Image> {
    Ok(network_tools(name)?.command(&["bash"]))
}

fn sample_apiserver(sources: &Sources, name: &str) -> Result<Image> {
    let mut layer = Layer::new();
    layer.directory("tmp", 0o1777)?;
    layer.file("sample-apiserver", 0o755, &program(sources, "sample-apiserver")?)?;
    Ok(Image::new(name).layer(layer).entrypoint(&["/sample-apiserver"]))
}

fn etcd(_: &Sources, name: &str) -> Result<Image> {
    let layer = programs_layer(&["etcd-server"], &[("usr/bin/etcd", "usr/local/bin/etcd")])?;
    Ok(Image::new(name).layer(busybox_layer()?).layer(layer))
}

/// A server that sends packets that belong to no connection.
fn stray_packets(sources: &Sources, name: &str) -> Result<Image> {
    let mut layer = Layer::new();
    layer.file("regression-issue-74839", 0o755, &program(sources, "regression-issue-74839")?)?;
    Ok(Image::new(name).layer(layer).entrypoint(&["/regression-issue-74839"]))
}

fn connection_tools(_: &Sources, name: &str) -> Result<Image> {
    let layer = programs_layer(&["conntrack"], &[("usr/sbin/conntrack", "usr/sbin/conntrack")])?;
    Ok(shell(name, "bin/sh")?.layer(layer))
}

fn program(sources: &Sources, name: &str) -> Result<Vec<u8>> {
    read(&sources.programs.join(name))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("{}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tag_is_made_and_a_changed_list_is_an_error() {
        let mut names: Vec<String> =
            IMAGES.iter().map(|recipe| format!("{REGISTRY}{}:1", recipe.repository)).collect();
        names.push(format!("{REGISTRY}e2e-test-images/agnhost:2"));
        names.push("gcr.io/k8s-authenticated-test/agnhost:2.6".to_owned());
        assert_eq!(wanted(&names).expect("all are named").len(), IMAGES.len() + 1);
        let error = wanted(&names[1..]).err().map(|error| error.to_string());
        assert_eq!(error, None, "the second tag still names agnhost");
        names.retain(|name| !name.contains("pause"));
        let error = wanted(&names).err().expect("pause is gone").to_string();
        assert!(error.contains("pause"), "{error}");
    }
}
