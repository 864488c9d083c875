//! Removes unused images when the disk fills up.
//!
//! ```text
//!   100 % ┬
//!    85 % ┼ high: unused images go, the longest unused first ...
//!    80 % ┴ low:  ... until this much is in use
//! ```
//!
//! In: the disk, the runtime's images, their users. Out: removed images, and an event on the node if
//! they free too little.
//! Invariants: an image that a container or a pod's volume uses stays; so does an image that was first
//! seen less than two minutes ago (its pod may be about to start), and a pinned one. An image that was not
//! used for the maximum age goes, whatever the disk.
//! Cost: every five minutes a list of images and one of containers.
//! Upstream: `pkg/kubelet/images/image_gc_manager.go`; the eviction loop removes all unused images first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use client::EventType;
use cri::{Image, ImageSpec};
use jiff::Timestamp;

use crate::node::machine::Disk;
use crate::node::upkeep::Upkeep;

const PERIOD: Duration = Duration::from_secs(300);

/// Collects garbage; never returns.
pub async fn keep(own: Arc<Upkeep>) {
    loop {
        let config = &own.node.config;
        let now = base::clock::now();
        let wanted = Disk::of(&config.root_dir)
            .filter(|disk| disk.bytes > 0)
            .and_then(|disk| to_free(&disk, config.image_gc_high, config.image_gc_low));
        if let Err(error) = own.images.collect(&own, wanted, now).await {
            tracing::warn!(%error, "failed to collect unused images");
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// The bytes to free to reach `low` percent of usage, if usage is above `high` percent.
fn to_free(disk: &Disk, high: u64, low: u64) -> Option<u64> {
    let used = 100 - disk.free_bytes.saturating_mul(100) / disk.bytes.max(1);
    let goal = disk.bytes / 100 * (100 - low.min(100));
    (used >= high).then(|| goal.saturating_sub(disk.free_bytes))
}

/// By image id: (first seen, last used).
#[derive(Default)]
struct Records(BTreeMap<String, (Timestamp, Option<Timestamp>)>);

impl Records {
    fn note(&mut self, images: &[Image], used: &BTreeSet<String>, now: Timestamp) {
        self.0.retain(|id, _| images.iter().any(|image| image.id == *id));
        for image in images {
            let record = self.0.entry(image.id.clone()).or_insert((now, None));
            if used.contains(&image.id) {
                record.1 = Some(now);
            }
        }
    }

    /// When the image was last used; an image that was not, when it was first seen.
    fn unused_since(&self, image: &Image) -> Option<Timestamp> {
        self.0.get(&image.id).map(|(seen, used)| used.unwrap_or(*seen))
    }

    /// The images that may be removed, the longest unused first.
    fn candidates<'a>(
        &self,
        images: &'a [Image],
        used: &BTreeSet<String>,
        oldest: Timestamp,
    ) -> Vec<&'a Image> {
        let record = |image: &Image| self.0.get(&image.id).copied().unwrap_or((oldest, None));
        let mut out: Vec<&Image> = images
            .iter()
            .filter(|image| !image.pinned && !used.contains(&image.id))
            .filter(|image| record(image).0 <= oldest)
            .collect();
        out.sort_by_key(|image| (record(image).1, record(image).0));
        out
    }
}

/// Removes images; knows since when they are unused.
#[derive(Default)]
pub struct Collector {
    /// Held during a collection: two at once would count the same images.
    records: tokio::sync::Mutex<Records>,
    /// When the first collection ran: images are not older than that to this kubelet.
    started: std::sync::OnceLock<Timestamp>,
}

impl Collector {
    /// Removes all unused images, because the node lacks disk.
    pub async fn remove_unused(&self, own: &Upkeep) {
        if let Err(error) = self.collect(own, Some(u64::MAX), base::clock::now()).await {
            tracing::warn!(%error, "failed to remove unused images");
        }
    }

    async fn collect(&self, own: &Upkeep, wanted: Option<u64>, now: Timestamp) -> cri::Result<()> {
        let mut records = self.records.lock().await;
        let started = *self.started.get_or_init(|| now);
        let images = own.runtime.list_images(None).await?;
        let used = in_use(own, &images).await?;
        records.note(&images, &used, now);
        let (oldest, longest) =
            (now - own.node.config.image_min_age, own.node.config.image_max_age);
        let mut candidates = records.candidates(&images, &used, oldest);
        // A restarted kubelet does not know when images were used before.
        let since = now.checked_sub(longest).ok().filter(|_| !longest.is_zero());
        if let Some(since) = since.filter(|since| *since >= started) {
            let (old, young): (Vec<_>, Vec<_>) = candidates
                .into_iter()
                .partition(|image| records.unused_since(image) <= Some(since));
            for image in old {
                remove(own, image).await;
            }
            candidates = young;
        }
        let Some(wanted) = wanted else { return Ok(()) };
        let mut freed: u64 = 0;
        for image in candidates {
            if freed >= wanted {
                break;
            }
            freed = freed.saturating_add(remove(own, image).await);
        }
        if freed < wanted && wanted != u64::MAX {
            tell_failure(own, wanted, freed);
        }
        Ok(())
    }
}

fn tell_failure(own: &Upkeep, wanted: u64, freed: u64) {
    let text = format!(
        "Failed to garbage collect required amount of images. Attempted to free {wanted} bytes, \
         but only found {freed} bytes eligible to free."
    );
    own.events.about(own.node.reference(), EventType::Warning, "FreeDiskSpaceFailed", text);
}

/// The bytes that this freed.
async fn remove(own: &Upkeep, image: &Image) -> u64 {
    match own.runtime.remove_image(&ImageSpec::named(image.id.clone())).await {
        Ok(()) => image.size,
        Err(error) => {
            tracing::warn!(image = image.id, %error, "failed to remove the image");
            0
        }
    }
}

/// The ids of images of all containers, running or not, and of pods' image volumes.
async fn in_use(own: &Upkeep, images: &[Image]) -> cri::Result<BTreeSet<String>> {
    let mut out = BTreeSet::new();
    for container in own.runtime.list_containers(None).await? {
        let names = [
            Some(container.image_id),
            Some(container.image_ref),
            container.image.map(|image| image.image),
        ];
        let names: Vec<String> = names.into_iter().flatten().filter(|n| !n.is_empty()).collect();
        let is_named = |image: &&Image| {
            let mut own = image.repo_tags.iter().chain(&image.repo_digests).chain([&image.id]);
            own.any(|name| names.contains(name))
        };
        out.extend(images.iter().filter(is_named).map(|image| image.id.clone()));
    }
    for view in own.pods.views().into_iter().filter(|view| !view.stopped) {
        let spec = view.pod.as_ref().and_then(|pod| pod.spec.clone()).unwrap_or_default();
        let sources = spec.volumes.into_iter().flatten().filter_map(|volume| volume.image);
        for reference in sources.filter_map(|source| source.reference) {
            let named = ImageSpec::named(reference);
            out.extend(own.runtime.image_status(&named).await?.map(|image| image.id));
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_the_thresholds() {
        let check = |free: u64, expected: Option<u64>| {
            let disk = Disk { bytes: 1000, free_bytes: free, ..Disk::default() };
            assert_eq!(to_free(&disk, 85, 80), expected, "{free} free");
        };
        check(500, None);
        check(160, None);
        check(150, Some(50));
        check(0, Some(200));
    }

    #[test]
    fn the_longest_unused_go_first() {
        let at = |second| Timestamp::from_second(second).expect("in range");
        let image = |id: &str, pinned| Image { id: id.into(), pinned, ..Image::default() };
        let images = [
            image("young", false),
            image("pinned", true),
            image("used", false),
            image("late", false),
            image("early", false),
            image("never", false),
        ];
        let set = |ids: &[&str]| ids.iter().map(|id| id.to_string()).collect::<BTreeSet<_>>();
        let mut records = Records::default();
        records.note(&images[1..], &set(&["early", "late"]), at(10));
        records.note(&images[1..], &set(&["late"]), at(20));
        records.note(&images, &set(&["used"]), at(100));
        let candidates = records.candidates(&images, &set(&["used"]), at(50));
        let ids: Vec<&str> = candidates.iter().map(|image| image.id.as_str()).collect();
        assert_eq!(ids, ["never", "early", "late"]);
        let since = |index: usize| records.unused_since(&images[index]);
        assert_eq!((since(3), since(5)), (Some(at(20)), Some(at(10))), "late; never used");
        records.note(&images[..1], &set(&[]), at(110));
        assert_eq!(records.0.len(), 1, "removed images are forgotten");
    }
}
