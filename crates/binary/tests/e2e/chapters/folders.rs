//! The directories of images and manifests: an archive and a manifest are put there, and a pod of both runs. Leaves
//! none.

use anyhow::{Result, ensure};
use testkit::images::{Image, write_docker_archive};
use testkit::wait;

use crate::story::{LONG, Story};

const IMAGE: &str = "example.com/of-a-folder:1";
const POD: &str = "\
apiVersion: v1
kind: Namespace
metadata: {name: folder}
---
apiVersion: v1
kind: Pod
metadata: {name: of-a-folder, namespace: folder}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {name: c, image: 'docker.io/library/busybox:1.35', imagePullPolicy: Never, command: [sleep, '3600']}
";

pub fn images_and_manifests(story: &mut Story) -> Result<()> {
    let data = story.server.data_directory();
    let (archives, manifests) = (data.join("images"), data.join("manifests"));
    write_docker_archive(&archives.join("own.tar"), &Image::new(IMAGE))?;
    wait::until(LONG, "the archive is imported", || {
        let list = story.server.decapod(&["images", "list"])?;
        ensure!(list.contains("of-a-folder"), "{list}");
        Ok(())
    })?;
    std::fs::write(manifests.join("pod.yaml"), POD)?;
    story.soon(LONG, "pod of-a-folder -n folder", ".status.phase", "Running")?;
    std::fs::remove_file(manifests.join("pod.yaml"))?;
    wait::until(LONG, "the namespace goes with its file", || {
        ensure!(story.kubectl("get namespace folder").is_err(), "it is there");
        Ok(())
    })?;
    std::fs::remove_file(archives.join("own.tar"))?;
    story.server.decapod(&["images", "remove", IMAGE])?;
    Ok(())
}
