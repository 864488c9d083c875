//! The images of a node with another container runtime, over CRI.
//!
//! In: the runtime's endpoints from the data directory. Out: the same lines as for our own images. CRI can
//! list, pull and remove; it has no import.

use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use base::task::Tasks;
use cri::{ImageService, ImageSpec};
use runtime::backend::remote::{Endpoints, Remote};
use runtime::images::store::ImageRecord;

use super::{Command, table};

pub async fn run(endpoints: &Endpoints, command: Command) -> Result<ExitCode> {
    if let Command::Import(_) = command {
        bail!(
            "this node's images are in the runtime at {}, and CRI cannot import archives; use the \
             runtime's own tool: `ctr -n k8s.io images import FILE` for containerd, `skopeo copy \
             docker-archive:FILE containers-storage:NAME` for CRI-O",
            endpoints.runtime
        );
    }
    let tasks = Tasks::new("images");
    let remote =
        Remote::open(endpoints, tasks).await.context("cannot ask the container runtime")?;
    match command {
        Command::Import(_) => {}
        Command::List(list) => {
            let images = remote.list_images(None).await?;
            let records: Vec<ImageRecord> = images.into_iter().map(record).collect();
            print!("{}", table(&records, list.quiet));
        }
        Command::Pull(flags) => {
            for reference in &flags.references {
                let pulled = remote.pull_image(&ImageSpec::named(reference), None, None).await;
                pulled.map_err(|error| anyhow!("cannot pull {reference}: {error}"))?;
                println!("pulled {reference}");
            }
        }
        Command::Remove(flags) => {
            for reference in &flags.references {
                let spec = ImageSpec::named(reference);
                if remote.image_status(&spec).await?.is_none() {
                    bail!("no such image: {reference}");
                }
                remote.remove_image(&spec).await?;
                println!("removed {reference}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn record(image: cri::Image) -> ImageRecord {
    ImageRecord {
        id: image.id,
        tags: image.repo_tags,
        digests: image.repo_digests,
        size: image.size,
        ..ImageRecord::default()
    }
}
