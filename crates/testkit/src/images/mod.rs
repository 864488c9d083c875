//! Container images made on the spot, without a registry.
//!
//! In: a few Debian packages, downloaded by apt. Out: image archives in the cache directory, in the
//! formats that users have: OCI layouts and docker archives, plain, gzip and zstd layers, one platform
//! or several, whiteouts. They are made once, and again when [`RECIPES`] increases.

mod archive;
mod debian;
pub mod kubeadm;
mod layer;
pub mod suite;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

pub use archive::{Compression, Image, write_docker_archive, write_oci_layout};
pub use debian::unpack as unpack_packages;
pub use layer::Layer;

/// Increase it when a recipe changes, so that cached archives are made again.
const RECIPES: u32 = 1;

/// A static busybox with links for its applets, and a shell as the command. OCI layout, gzip.
pub const BUSYBOX: &str = "docker.io/library/busybox:1.35";
/// nginx that answers with its host name and the word `one`. Docker archive, plain layers.
pub const NGINX_ONE: &str = "docker.io/library/nginx:1.22";
/// The same with the word `two`: a third layer with whiteouts. OCI layout with an index of two platforms,
/// zstd.
pub const NGINX_TWO: &str = "docker.io/library/nginx:1.23";

/// An image that does nothing, for runtimes that hold a pod's namespaces with a process. OCI layout, gzip.
pub const PAUSE: &str = "decapod.test/pause:1";

/// The archive of [`PAUSE`].
pub fn pause() -> Result<PathBuf> {
    let directory = crate::places::cache()?.join(format!("images-{RECIPES}"));
    fs::create_dir_all(&directory).with_context(|| format!("{}", directory.display()))?;
    cached(&directory, "pause.oci.tar", |path| {
        let image = Image::new(PAUSE).layer(busybox_layer()?).command(&["sleep", "2147483647"]);
        write_oci_layout(path, &[("amd64", &image)], Compression::Gzip)
    })
}

/// The archives, in the order of the constants above.
pub fn all() -> Result<Vec<PathBuf>> {
    let directory = crate::places::cache()?.join(format!("images-{RECIPES}"));
    fs::create_dir_all(&directory).with_context(|| format!("{}", directory.display()))?;
    Ok(vec![
        cached(&directory, "busybox.oci.tar", busybox)?,
        cached(&directory, "nginx-one.docker.tar", nginx_one)?,
        cached(&directory, "nginx-two.oci.tar", nginx_two)?,
    ])
}

/// Makes a file if it is missing. If two runs make it at once, the last rename wins.
fn cached(directory: &Path, name: &str, make: fn(&Path) -> Result<()>) -> Result<PathBuf> {
    let path = directory.join(name);
    if path.is_file() {
        return Ok(path);
    }
    let partial = directory.join(format!("{name}.{}", std::process::id()));
    make(&partial).with_context(|| format!("making the image {name}"))?;
    fs::rename(&partial, &path)?;
    Ok(path)
}

fn busybox(path: &Path) -> Result<()> {
    let image = Image::new(BUSYBOX).layer(busybox_layer()?).command(&["sh"]);
    write_oci_layout(path, &[("amd64", &image)], Compression::Gzip)
}

fn busybox_layer() -> Result<Layer> {
    let packages = debian::unpack(&["busybox-static"])?;
    let program = fs::read(packages.path().join("bin/busybox"))?;
    let applets = debian::output(&packages.path().join("bin/busybox"), &["--list"])?;
    let mut layer = base_layer()?;
    layer.file("bin/busybox", 0o755, &program)?;
    for applet in applets.lines().filter(|name| *name != "busybox") {
        layer.symlink(&format!("bin/{applet}"), "/bin/busybox")?;
    }
    Ok(layer)
}

/// The files of every root file system.
fn base_layer() -> Result<Layer> {
    let mut layer = Layer::new();
    for directory in
        ["bin", "dev", "etc", "proc", "root", "sys", "usr", "usr/bin", "var", "var/log"]
    {
        layer.directory(directory, 0o755)?;
    }
    layer.directory("tmp", 0o1777)?;
    layer.file(
        "etc/passwd",
        0o644,
        b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    )?;
    layer.file("etc/group", 0o644, b"root:x:0:\nnogroup:x:65534:\n")?;
    layer.file("etc/nsswitch.conf", 0o644, b"hosts: files dns\n")?;
    Ok(layer)
}

const NGINX_COMMAND: &[&str] = &["/usr/sbin/nginx", "-g", "daemon off;"];

fn nginx_one(path: &Path) -> Result<()> {
    let image = Image::new(NGINX_ONE)
        .layer(busybox_layer()?)
        .layer(nginx_layer("one")?)
        .command(NGINX_COMMAND);
    write_docker_archive(path, &image)
}

fn nginx_two(path: &Path) -> Result<()> {
    let mut changes = Layer::new();
    changes.file("etc/nginx/nginx.conf", 0o644, nginx_conf("two").as_bytes())?;
    changes.file("usr/share/nginx/.wh.only-in-one", 0o644, b"")?;
    changes.file("usr/share/nginx/old/.wh..wh..opq", 0o644, b"")?;
    changes.file("usr/share/nginx/old/new", 0o644, b"new\n")?;
    let image = Image::new(NGINX_TWO)
        .layer(busybox_layer()?)
        .layer(nginx_layer("one")?)
        .layer(changes)
        .command(NGINX_COMMAND);
    // The other platform's image must never be chosen: it contains no program.
    let other = Image::new(NGINX_TWO).layer(base_layer()?).command(&["/none"]);
    write_oci_layout(path, &[("arm64", &other), ("amd64", &image)], Compression::Zstd)
}

fn nginx_layer(version: &str) -> Result<Layer> {
    let packages =
        debian::unpack(&["nginx", "libpcre2-8-0", "libssl3", "zlib1g", "libcrypt1", "libc6"])?;
    let mut layer = Layer::new();
    for directory in
        ["etc/nginx", "var/lib", "var/lib/nginx", "var/log/nginx", "usr/sbin", "usr/share/nginx"]
    {
        layer.directory(directory, 0o755)?;
    }
    layer.file("usr/sbin/nginx", 0o755, &fs::read(packages.path().join("usr/sbin/nginx"))?)?;
    for library in debian::libraries(packages.path(), "usr/sbin/nginx")? {
        layer.file(&library.name, 0o755, &fs::read(&library.file)?)?;
    }
    layer.file("etc/nginx/nginx.conf", 0o644, nginx_conf(version).as_bytes())?;
    layer.file("usr/share/nginx/only-in-one", 0o644, b"one\n")?;
    layer.directory("usr/share/nginx/old", 0o755)?;
    layer.file("usr/share/nginx/old/old", 0o644, b"old\n")?;
    Ok(layer)
}

/// `/` returns pod and version; `/ready` depends on a file, so that a test can turn it off; `/files/`
/// returns mounted files.
fn nginx_conf(version: &str) -> String {
    format!(
        "user root;\nworker_processes 1;\npid /tmp/nginx.pid;\nerror_log stderr notice;\n\
         events {{ worker_connections 256; }}\n\
         http {{\n  access_log /dev/stdout;\n  default_type text/plain;\n\
         \x20 server {{\n    listen 80;\n\
         \x20   location = / {{ return 200 \"$hostname {version}\\n\"; }}\n\
         \x20   location = /live {{ if (-f /tmp/dead) {{ return 500; }} return 200 \"live\\n\"; }}\n\
         \x20   location = /ready {{ if (-f /tmp/busy) {{ return 503; }} return 200 \"ready\\n\"; }}\n\
         \x20   location /files/ {{ alias /files/; autoindex on; }}\n  }}\n}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn makes_every_image() {
        if !crate::places::is_root_or_says_skipped() {
            return;
        }
        for path in all().expect("apt and dpkg are there (see docs/testing.md)") {
            let size = fs::metadata(&path).expect("the archive was made").len();
            assert!(size > 500_000, "{} has only {size} bytes", path.display());
        }
    }
}
