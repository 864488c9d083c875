//! Latency of the registry's requests to the store. The names are those of etcd's metrics for every store,
//! because dashboards ask for them.
//! Upstream: `apiserver/pkg/storage/etcd3/metrics`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::future::Future;
use std::sync::Mutex;

use super::DURATIONS;
use super::text::{Histogram, Labels, family, histograms, labels, samples};
use crate::resource::Resource;

/// The store's disk. Upstream numbers its etcd clusters; a server here has one store.
pub(crate) fn encode_space(space: &store::Space, out: &mut String) {
    let name = "apiserver_storage_size_bytes";
    let help = "[STABLE] Size of the storage database file physically allocated in bytes.";
    family(out, name, "gauge", help);
    samples(out, name, [(&labels([("storage_cluster_id", "etcd-0")]), space.disk_bytes)]);
    let Some(reserve) = space.reserve_bytes else { return };
    let name = "decapod_store_reserve_bytes";
    let help = "[ALPHA] Bytes of the disk that the embedded store holds back for deletes.";
    family(out, name, "gauge", help);
    let _ = writeln!(out, "{name} {reserve}");
    let name = "decapod_store_low_on_space";
    let help = "[ALPHA] Whether the disk is full, so that the embedded store takes only deletes and small updates.";
    family(out, name, "gauge", help);
    let _ = writeln!(out, "{name} {}", u8::from(space.is_low));
}

#[derive(Default)]
pub(crate) struct StorageNumbers {
    /// Locked for a few additions.
    families: Mutex<Families>,
}

#[derive(Default)]
struct Families {
    seconds: BTreeMap<Labels, Histogram>,
    errors: BTreeMap<Labels, u64>,
}

impl StorageNumbers {
    /// Awaits a request to the store, and counts it.
    pub async fn timed<T>(
        &self,
        operation: &'static str,
        row: &Resource,
        request: impl Future<Output = store::Result<T>>,
    ) -> store::Result<T> {
        let started = tokio::time::Instant::now();
        let answer = request.await;
        let seconds = started.elapsed().as_secs_f64();
        let labels =
            labels([("group", &row.group), ("operation", operation), ("resource", &row.plural)]);
        let mut families = self.families.lock().expect("no panic under the lock");
        if answer.is_err() {
            *families.errors.entry(labels.clone()).or_default() += 1;
        }
        families
            .seconds
            .entry(labels)
            .or_insert_with(|| Histogram::new(DURATIONS))
            .observe(seconds);
        answer
    }

    pub fn encode(&self, out: &mut String) {
        let families = self.families.lock().expect("no panic under the lock");
        let name = "etcd_request_duration_seconds";
        let help = "[ALPHA] Etcd request latency in seconds for each operation and object type.";
        family(out, name, "histogram", help);
        histograms(out, name, &families.seconds);
        let name = "etcd_request_errors_total";
        let help = "[ALPHA] Etcd failed request counts for each operation and object type.";
        family(out, name, "counter", help);
        samples(out, name, &families.errors);
        let name = "etcd_requests_total";
        let help = "[ALPHA] Etcd request counts for each operation and object type.";
        family(out, name, "counter", help);
        samples(out, name, families.seconds.iter().map(|(labels, it)| (labels, it.count())));
    }
}
