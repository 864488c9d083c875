//! `decapod images`: the images in a data directory, with or without a running server.
//!
//! In: archives or names. Out: changes of the image store, which does its own locking, and printed lines.
//! The server is not needed: images can be imported before its first start.
//! A node with another runtime has its images there ([`foreign`]).

mod bar;
mod foreign;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail, ensure};
use runtime::ImageStore;
use runtime::images::import::import;
use runtime::images::pull::Puller;
use runtime::images::registries;
use runtime::images::store::ImageRecord;
use serde_json::Value;

use self::bar::Bar;
use crate::grid::Grid;

#[derive(clap::Args, Clone, Debug)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Images {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(clap::Subcommand, Clone, Debug)]
pub enum Command {
    /// Import images from archives (docker save, OCI layout), plain or compressed
    Import(Import),
    /// List the images
    #[command(visible_alias = "ls")]
    List(List),
    /// Pull images from their registries
    Pull(References),
    /// Remove images, by name or id
    #[command(visible_alias = "rm")]
    Remove(References),
}

#[derive(clap::Args, Clone, Debug)]
pub struct Import {
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// The image's name, for an archive that contains none
    #[arg(long)]
    pub name: Option<String>,
}

#[derive(clap::Args, Clone, Debug)]
pub struct List {
    /// Print ids only
    #[arg(short = 'q', long)]
    pub quiet: bool,
}

#[derive(clap::Args, Clone, Debug)]
pub struct References {
    #[arg(required = true, value_name = "REF")]
    pub references: Vec<String>,
    /// Remove it even if a container uses it
    #[arg(long, hide = true)]
    pub force: bool,
}

impl Images {
    pub async fn run(self, data_dir: &Path) -> Result<ExitCode> {
        check_allowed(data_dir)?;
        if let Some(endpoints) = runtime::backend::remote::Endpoints::of_cluster(data_dir)? {
            return foreign::run(&endpoints, self.command).await;
        }
        let home = data_dir.join("runtime");
        if let Command::List(list) = &self.command
            && !home.join("images").exists()
        {
            // Listing must not create anything.
            print!("{}", table(&[], list.quiet));
            return Ok(ExitCode::SUCCESS);
        }
        make_private(data_dir)?;
        let images = home.join("images");
        let store = ImageStore::open(images.clone())
            .with_context(|| format!("cannot open the images in {}", images.display()))?;
        match self.command {
            Command::Import(flags) => {
                let work = move || flags.run(&store);
                tokio::task::spawn_blocking(work).await??;
            }
            Command::List(list) => print!("{}", table(&store.list()?, list.quiet)),
            Command::Pull(flags) => pull(&store, data_dir, &flags.references).await?,
            Command::Remove(flags) => remove(&store, &home, &flags)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Fails if this user may not even see whether there is a data directory.
fn check_allowed(data_dir: &Path) -> Result<()> {
    match std::fs::read_dir(data_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => bail!(
            "cannot read the data directory {}: permission denied; use sudo, or name your own with --data-dir",
            data_dir.display()
        ),
        _ => Ok(()),
    }
}

/// Creates the data directory with access for its owner only, because it will contain keys.
fn make_private(data_dir: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(data_dir);
    made.with_context(|| {
        format!(
            "cannot make the data directory {}; choose another with --data-dir",
            data_dir.display()
        )
    })
}

impl Import {
    fn run(&self, store: &ImageStore) -> Result<()> {
        for file in &self.files {
            let bar = Bar::show(store.progress());
            let found = import(store, file, self.name.as_deref());
            drop(bar);
            let found =
                found.map_err(|error| anyhow!("cannot import {}: {error}", file.display()))?;
            for image in found {
                println!("imported {}", called(&image));
            }
        }
        Ok(())
    }
}

async fn pull(store: &ImageStore, data_dir: &Path, references: &[String]) -> Result<()> {
    let puller = Puller::new(store.clone(), registries::places(data_dir));
    for reference in references {
        let bar = Bar::show(store.progress());
        let pulled = puller.pull(reference, None).await;
        drop(bar);
        let image = pulled.map_err(|error| anyhow!("cannot pull {reference}: {error}"))?;
        println!("pulled {}", called(&image));
    }
    Ok(())
}

fn remove(store: &ImageStore, home: &Path, flags: &References) -> Result<()> {
    let used = used_images(&home.join("containers"));
    for reference in &flags.references {
        let Some(image) = store.find(reference)? else { bail!("no such image: {reference}") };
        ensure!(
            flags.force || !used.contains(&image.id),
            "{reference} is in use by a container; delete its pod first"
        );
        store.remove(reference)?;
        println!("removed {reference}");
    }
    Ok(())
}

/// The ids of images that containers use.
fn used_images(containers: &Path) -> BTreeSet<String> {
    let image = |entry: std::fs::DirEntry| -> Option<String> {
        let text = std::fs::read(entry.path().join("state.json")).ok()?;
        let state: Value = serde_json::from_slice(&text).ok()?;
        Some(state["image_id"].as_str()?.to_owned())
    };
    std::fs::read_dir(containers).into_iter().flatten().flatten().filter_map(image).collect()
}

/// The image's names, or its id if it has none.
fn called(image: &ImageRecord) -> String {
    match image.tags.as_slice() {
        [] => image.digests.first().unwrap_or(&image.id).clone(),
        tags => tags.join(", "),
    }
}

/// Upstream: `crictl images`.
fn table(images: &[ImageRecord], quiet: bool) -> String {
    if quiet {
        return images.iter().map(|image| format!("{}\n", image.id)).collect();
    }
    let mut rows: Vec<Vec<String>> = images.iter().flat_map(rows).collect();
    rows.sort_unstable();
    let headers = ["IMAGE", "TAG", "IMAGE ID", "SIZE"].map(str::to_owned).to_vec();
    rows.insert(0, headers);
    Grid::default().render(&rows)
}

/// One row per name.
fn rows(image: &ImageRecord) -> Vec<Vec<String>> {
    let id = image.id.trim_start_matches("sha256:").chars().take(13).collect::<String>();
    let row = |name: &str, tag: &str| {
        vec![name.to_owned(), tag.to_owned(), id.clone(), size_text(image.size)]
    };
    let split = |tag: &String| tag.rsplit_once(':').map(|(name, tag)| row(name, tag));
    match image.tags.as_slice() {
        [] => {
            let name = image.digests.first().and_then(|digest| digest.split('@').next());
            vec![row(name.unwrap_or("<none>"), "<none>")]
        }
        tags => tags.iter().filter_map(split).collect(),
    }
}

/// Formats a size with three digits and a decimal unit, like Go's units package.
#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
fn size_text(bytes: u64) -> String {
    let mut size = bytes as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if size < 1000.0 {
            let digits = if size >= 100.0 || unit == "B" {
                0
            } else if size >= 10.0 {
                1
            } else {
                2
            };
            let text = format!("{size:.digits$}");
            let text = if text.contains('.') {
                text.trim_end_matches('0').trim_end_matches('.')
            } else {
                &text
            };
            return format!("{text}{unit}");
        }
        size /= 1000.0;
    }
    format!("{size:.2}TB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_listed_by_name() {
        let image = ImageRecord {
            id: format!("sha256:{}", "ab".repeat(32)),
            tags: vec!["localhost:5000/app:v1".into(), "docker.io/library/app:latest".into()],
            size: 4_266_000,
            ..ImageRecord::default()
        };
        let nameless = ImageRecord {
            id: format!("sha256:{}", "cd".repeat(32)),
            size: 12,
            ..ImageRecord::default()
        };
        let expected = "\
IMAGE                   TAG      IMAGE ID        SIZE
<none>                  <none>   cdcdcdcdcdcdc   12B
docker.io/library/app   latest   ababababababa   4.27MB
localhost:5000/app      v1       ababababababa   4.27MB
";
        assert_eq!(table(&[image.clone(), nameless], false), expected);
        assert_eq!(table(&[image], true), format!("sha256:{}\n", "ab".repeat(32)));
    }

    #[test]
    fn sizes_have_three_digits() {
        for (bytes, expected) in [
            (0, "0B"),
            (999, "999B"),
            (1000, "1kB"),
            (15_300, "15.3kB"),
            (248_000_000, "248MB"),
            (1_500_000_000, "1.5GB"),
        ] {
            assert_eq!(size_text(bytes), expected);
        }
    }

    #[test]
    fn containers_keep_their_images() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let container = root.path().join("c1");
        std::fs::create_dir(&container).expect("creates");
        std::fs::write(container.join("state.json"), r#"{"image_id":"sha256:ab"}"#)
            .expect("writes");
        assert!(used_images(root.path()).contains("sha256:ab"));
        assert!(used_images(&root.path().join("none")).is_empty());
    }
}
