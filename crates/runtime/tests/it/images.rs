//! Import, pull and removal of images, and their content in a container.

use std::path::Path;

use cri::*;
use decapod_runtime::ImageStore;
use decapod_runtime::images::import::import;
use decapod_runtime::images::pull::Puller;
use testkit::images::{Compression, Image, Layer, write_docker_archive, write_oci_layout};

use crate::world::{container, in_world};

const NAME: &str = "docker.io/library/layers:v1";

/// Three layers: the second deletes a file and replaces the content of a directory of the first.
fn image(busybox: &[u8]) -> Image {
    let mut first = Layer::new();
    for directory in ["data", "data/old", "proc", "dev", "sys", "etc", "bin"] {
        first.directory(directory, 0o755).expect("added");
    }
    first.file("data/gone", 0o644, b"1").expect("added");
    first.file("data/stays", 0o640, b"1").expect("added");
    first.hard_link("data/linked", "data/stays").expect("added");
    first.file("data/old/inner", 0o644, b"1").expect("added");
    let mut second = Layer::new();
    second.file("data/.wh.gone", 0o644, b"").expect("added");
    second.file("data/old/.wh..wh..opq", 0o644, b"").expect("added");
    second.file("data/old/new", 0o644, b"2").expect("added");
    Image::new(NAME).layer(programs(busybox)).layer(first).layer(second).command(&["sh"])
}

fn programs(busybox: &[u8]) -> Layer {
    let mut layer = Layer::new();
    layer.directory("bin", 0o755).expect("added");
    layer.file("bin/busybox", 0o755, busybox).expect("added");
    for applet in ["sh", "ls", "cat", "sleep", "stat"] {
        layer.symlink(&format!("bin/{applet}"), "busybox").expect("added");
    }
    layer
}

/// Fetched before a test leaves the network.
fn busybox() -> Option<Vec<u8>> {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: needs root");
        return None;
    }
    match testkit::images::unpack_packages(&["busybox-static"]) {
        Ok(packages) => std::fs::read(packages.path().join("bin/busybox")).ok(),
        Err(error) => {
            println!("skipped: no busybox: {error:#}");
            None
        }
    }
}

#[test]
fn archives_of_every_kind_become_the_same_image() {
    let Some(busybox) = busybox() else { return };
    let image = || image(&busybox);
    in_world(|world| async move {
        let store = world.runtime.images();
        let path = |name: &str| world.directory.join(name);
        let both = [("arm64", &image()), ("amd64", &image())];
        type Writer<'a> = (&'a str, &'a dyn Fn(&Path));
        let writers: [Writer<'_>; 4] = [
            ("plain.tar", &|p| write_oci_layout(p, &both[1..], Compression::Plain).expect("made")),
            ("gzip.tar", &|p| write_oci_layout(p, &both, Compression::Gzip).expect("made")),
            ("zstd.tar", &|p| write_oci_layout(p, &both, Compression::Zstd).expect("made")),
            ("docker.tar", &|p| write_docker_archive(p, &image()).expect("made")),
        ];
        for (name, write) in writers {
            write(&path(name));
            let imported = import(store, &path(name), None).expect(name);
            assert_eq!(imported.len(), 1, "{name}");
            assert_eq!(imported[0].tags, [NAME], "{name}");
            let spec = ImageSpec::named("layers:v1");
            let found = world.runtime.image_status(&spec).await.expect("asked").expect(name);
            assert_eq!(found.id, imported[0].id, "{name}");

            let config =
                ContainerConfig { image: Some(spec.clone()), ..container("c", "sleep 600") };
            let (sandbox, id) = world.run("layers", config).await;
            let (_, text) =
                world.exec(&id, "ls /data /data/old; stat -c '%h %a' /data/stays").await;
            assert_eq!(text, "/data:\nlinked\nold\nstays\n\n/data/old:\nnew\n2 640\n", "{name}");
            // After removal of the image, its layers stay while a container uses them.
            world.runtime.remove_image(&spec).await.expect("removed");
            let (_, text) = world.exec(&id, "cat /data/old/new").await;
            assert_eq!(text, "2", "{name}");
            world.runtime.remove_pod_sandbox(&sandbox).await.expect("removed");
            store.collect().expect("collected");
            assert_eq!(world.runtime.image_status(&spec).await.expect("asked"), None);
        }
        // Only busybox is left, complete.
        let left = std::fs::read_dir(world.config.data_dir.join("images/layers")).expect("listed");
        assert_eq!(left.count(), store.list().expect("listed")[0].layers.len());
        let (code, _) = {
            let (_, id) = world.run("still", container("c", "sleep 600")).await;
            world.exec(&id, "true").await
        };
        assert_eq!(code, 0);
        let wrong = world.directory.join("wrong.tar");
        std::fs::write(&wrong, b"this is no archive").expect("written");
        assert!(import(store, &wrong, None).is_err());
    });
}

#[test]
fn images_come_from_a_real_registry_through_a_mirror() {
    let Some(busybox) = busybox() else { return };
    let host = testkit::host::Host::new("pull").expect("a host");
    let registry = match testkit::registry::Registry::start(&host) {
        Ok(registry) => registry,
        Err(error) => return println!("skipped: no registry: {error:#}"),
    };
    let directory = host.directory().to_owned();
    let archive = directory.join("image.tar");
    let both = [("arm64", &image(&busybox)), ("amd64", &image(&busybox))];
    write_oci_layout(&archive, &both, Compression::Gzip).expect("made");
    registry.push(&host, &archive, "copies/layers", "v1").expect("pushed");
    let mirrors = directory.join("registries.yaml");
    let text = format!(
        "mirrors:\n  docker.io:\n    endpoint: [\"http://{}\"]\n    rewrite: {{\"^library/(.*)\": \"copies/$1\"}}\n",
        testkit::registry::ADDRESS
    );
    std::fs::write(&mirrors, text).expect("written");
    let network = host.network().expect("a network");
    let pulling = std::thread::spawn(move || {
        testkit::host::enter_network(&network).expect("entered");
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        runtime.expect("a runtime").block_on(pull_all(&directory.join("images"), &mirrors));
    });
    pulling.join().expect("the pulls went well");
}

async fn pull_all(root: &Path, mirrors: &Path) {
    let store = ImageStore::open(root).expect("opened");
    let puller = Puller::new(store.clone(), vec![mirrors.into()]);
    let (one, two) = tokio::join!(puller.pull("layers:v1", None), puller.pull("layers:v1", None));
    let record = one.expect("pulled");
    assert_eq!(record.id, two.expect("pulled at the same time").id);
    assert_eq!((record.tags.as_slice(), record.layers.len()), ([NAME.to_owned()].as_slice(), 3));
    assert!(record.layers.iter().all(|layer| store.layer(layer).is_dir()));
    let by_digest = puller.pull(&record.digests[0], None).await.expect("pulled by digest");
    assert_eq!(by_digest.id, record.id);
    let missing = puller.pull("layers:v2", None).await.expect_err("no such tag");
    assert!(missing.to_string().contains("failed to pull and unpack image"), "{missing}");
    assert!(store.remove("layers:v1").expect("removed"));
    assert!(store.list().expect("listed").is_empty());
    let left = std::fs::read_dir(store.layers_dir()).expect("listed").count();
    assert_eq!(left, 0);
}
