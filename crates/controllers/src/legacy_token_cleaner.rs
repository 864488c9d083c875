//! Deletes generated token Secrets of ServiceAccounts that were unused for a long time. The first pass marks a
//! Secret as invalid; a later one deletes it after the same time again.
//!
//! In: token Secrets, ServiceAccounts, pods; the day since which the API server notes the use of tokens. Out: a label,
//! later a deletion. Upstream: `pkg/controller/serviceaccount/legacy_serviceaccount_token_cleaner.go`.
//!
//! Invariant: a Secret that was made by hand stays. A generated one is named by its account's `secrets`.
//! Cost: once a day a look at all token Secrets; the pods of a namespace only if one of its Secrets is unused.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use client::{
    Api, Client, DeleteParams, ErrorExt, Lister, Outcome, Patch, PatchParams, Preconditions, Result,
};
use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use k8s_openapi::api::core::v1::{ConfigMap, Container, Pod, Secret, ServiceAccount};
use machinery::selector::Selector;
use serde_json::json;

use crate::descriptor::{Descriptor, Row};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, ()> {
    name: "legacy-serviceaccount-token-cleaner-controller",
    account: "legacy-service-account-token-cleaner",
    component: "legacy-service-account-token-cleaner",
    queue: "legacy_service_account_token_cleaner",
    workers: 1,
    new: |setup| {
        setup.queue.add(());
        Some(Controller {
            client: setup.client.clone(),
            unused: setup.options.legacy_token_clean_up_period,
            secrets: setup.scoped(None, "type=kubernetes.io/service-account-token").lister(),
            accounts: setup.lister(),
            pods: setup.lister(),
        })
    },
    watches: &[],
    reconcile: |this, ()| Box::pin(async move { this.reconcile().await }),
};

const INTERVAL: Duration = Duration::from_secs(24 * 3600);
const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";
const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";
const ACCOUNT: &str = "kubernetes.io/service-account.name";
const ACCOUNT_UID: &str = "kubernetes.io/service-account.uid";
const TRACKING: &str = "kube-apiserver-legacy-service-account-token-tracking";

struct Controller {
    client: Client,
    unused: Duration,
    secrets: Lister<Secret>,
    accounts: Lister<ServiceAccount>,
    pods: Lister<Pod>,
}

/// The decision about a Secret that no pod mounts.
#[derive(Debug, PartialEq)]
enum Verdict {
    Keep,
    /// Label it with this day.
    Mark(Date),
    Delete,
}

/// The day in UTC.
fn day(time: Timestamp) -> Date {
    TimeZone::UTC.to_datetime(time).date()
}

/// A day as upstream writes it: `2026-01-31`, with leading zeros.
fn parse(text: &str) -> Option<Date> {
    text.parse().ok().filter(|_| text.len() == 10)
}

/// Pure.
fn verdict(secret: &Secret, now: Timestamp, unused: Duration) -> Verdict {
    let Ok(limit) = now.checked_sub(unused) else { return Verdict::Keep };
    let created = secret.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
    if created >= limit || secret.metadata.deletion_timestamp.is_some() {
        return Verdict::Keep;
    }
    let label = |name: &str| secret.metadata.labels.as_ref().and_then(|labels| labels.get(name));
    if let Some(used) = label(LAST_USED)
        && parse(used).is_none_or(|used| used >= day(limit))
    {
        return Verdict::Keep;
    }
    match label(INVALID_SINCE).and_then(|since| parse(since)) {
        None => Verdict::Mark(day(now)),
        Some(since) if since >= day(limit) => Verdict::Keep,
        Some(_) => Verdict::Delete,
    }
}

/// Whether the API server has noted the use of tokens for long enough. Pure.
fn is_tracked(map: &ConfigMap, now: Timestamp, unused: Duration) -> bool {
    let since = map.data.as_ref().and_then(|data| parse(data.get("since")?));
    let next = since.and_then(|since| since.checked_add(1.day()).ok());
    let start = next.and_then(|next| next.to_zoned(TimeZone::UTC).ok());
    let enough = start.and_then(|start| start.timestamp().checked_add(unused).ok());
    enough.is_some_and(|enough| now >= enough)
}

impl Controller {
    async fn reconcile(&self) -> Result<Outcome> {
        let now = base::clock::now();
        let maps: Api<ConfigMap> = self.client.api(Some("kube-system"));
        let Some(map) = maps.get_opt(TRACKING).await? else { return Ok(Outcome::Backoff) };
        if !is_tracked(&map, now, self.unused) {
            return Ok(Outcome::After(INTERVAL));
        }
        let mut mounted: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for secret in self.secrets.list(None, &Selector::everything()) {
            let step = verdict(&secret, now, self.unused);
            let namespace = secret.metadata.namespace.clone().unwrap_or_default();
            let name = secret.metadata.name.clone().unwrap_or_default();
            if step == Verdict::Keep || !self.is_generated(&namespace, &name, &secret) {
                continue;
            }
            let in_use = mounted.entry(namespace.clone()).or_insert_with(|| {
                let pods = self.pods.list(Some(&namespace), &Selector::everything());
                pods.iter().flat_map(|pod| secrets_of(pod)).collect()
            });
            if !in_use.contains(&name)
                && let Err(error) = self.carry_out(&namespace, &name, &secret, step).await
            {
                let error = error.text();
                tracing::warn!(namespace, name, error, "failed to clean up a token Secret");
            }
        }
        Ok(Outcome::After(INTERVAL))
    }

    /// Whether the Secret's account names it.
    fn is_generated(&self, namespace: &str, name: &str, secret: &Secret) -> bool {
        let annotation = |key: &str| {
            let all = secret.metadata.annotations.as_ref();
            all.and_then(|all| all.get(key)).filter(|value| !value.is_empty())
        };
        let account = annotation(ACCOUNT).and_then(|account| self.accounts.get(namespace, account));
        account.is_some_and(|account| {
            let uid = annotation(ACCOUNT_UID);
            let mut named = account.secrets.iter().flatten();
            (uid.is_none() || uid == account.metadata.uid.as_ref())
                && named.any(|one| one.name.as_deref() == Some(name))
        })
    }

    async fn carry_out(
        &self,
        namespace: &str,
        name: &str,
        secret: &Secret,
        step: Verdict,
    ) -> Result<()> {
        let api: Api<Secret> = self.client.api(Some(namespace));
        match step {
            Verdict::Keep => Ok(()),
            Verdict::Mark(day) => {
                tracing::info!(namespace, name, "an unused token Secret is marked as invalid");
                let labels = json!({INVALID_SINCE: day.to_string()});
                let patch = json!({"metadata": {"uid": secret.metadata.uid, "labels": labels}});
                let patch = Patch::Merge(&patch);
                api.patch(name, &PatchParams::default(), &patch).await.map(drop)
            }
            Verdict::Delete => {
                tracing::info!(namespace, name, "an unused token Secret is deleted");
                let resource_version = secret.metadata.resource_version.clone();
                let preconditions = Preconditions { uid: None, resource_version };
                let options = DeleteParams::default().preconditions(preconditions);
                match api.delete(name, &options).await {
                    Err(error) if error.is_conflict() || error.is_not_found() => Ok(()),
                    done => done.map(drop),
                }
            }
        }
    }
}

/// The Secrets of its namespace that a pod names. Upstream: `VisitPodSecretNames`.
fn secrets_of(pod: &Pod) -> BTreeSet<String> {
    let Some(spec) = &pod.spec else { return BTreeSet::new() };
    let pulls = spec.image_pull_secrets.iter().flatten().map(|one| one.name.clone());
    let mut all: BTreeSet<String> = pulls.collect();
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    all.extend(containers.flat_map(secrets_of_container));
    for volume in spec.volumes.iter().flatten() {
        all.extend(volume.secret.iter().filter_map(|one| one.secret_name.clone()));
        all.extend(volume.azure_file.iter().map(|one| one.secret_name.clone()));
        let sources = volume.projected.iter().flat_map(|one| one.sources.iter().flatten());
        all.extend(sources.filter_map(|one| Some(one.secret.as_ref()?.name.clone())));
        let references = [
            volume.cephfs.as_ref().and_then(|one| one.secret_ref.as_ref()),
            volume.csi.as_ref().and_then(|one| one.node_publish_secret_ref.as_ref()),
            volume.flex_volume.as_ref().and_then(|one| one.secret_ref.as_ref()),
            volume.iscsi.as_ref().and_then(|one| one.secret_ref.as_ref()),
            volume.rbd.as_ref().and_then(|one| one.secret_ref.as_ref()),
            volume.scale_io.as_ref().map(|one| &one.secret_ref),
            volume.storageos.as_ref().and_then(|one| one.secret_ref.as_ref()),
        ];
        all.extend(references.into_iter().flatten().map(|one| one.name.clone()));
    }
    all
}

fn secrets_of_container(container: &Container) -> impl Iterator<Item = String> {
    let whole = container.env_from.iter().flatten();
    let whole = whole.filter_map(|one| Some(one.secret_ref.as_ref()?.name.clone()));
    let keys = container.env.iter().flatten();
    let keys =
        keys.filter_map(|one| Some(one.value_from.as_ref()?.secret_key_ref.as_ref()?.name.clone()));
    whole.chain(keys)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value};

    use super::*;

    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

    #[test]
    fn an_unused_secret_is_marked_and_a_year_later_deleted() {
        let check = |created: &str, labels: Value, expected: Verdict| {
            let shown = format!("{created} {labels}");
            let metadata = json!({"creationTimestamp": created, "labels": labels});
            let secret = from_value(json!({"metadata": metadata})).expect("a Secret");
            let now = "2026-06-15T12:00:00Z".parse().expect("a time");
            assert_eq!(verdict(&secret, now, YEAR), expected, "{shown}");
        };
        let old = "2020-01-01T00:00:00Z";
        let today = Verdict::Mark("2026-06-15".parse().expect("a day"));
        check("2026-01-01T00:00:00Z", json!({}), Verdict::Keep);
        check(old, json!({LAST_USED: "2025-06-15"}), Verdict::Keep);
        check(old, json!({LAST_USED: "not a day"}), Verdict::Keep);
        check(old, json!({INVALID_SINCE: "2026-06-01"}), Verdict::Keep);
        check(old, json!({INVALID_SINCE: "2025-06-14"}), Verdict::Delete);
        check(old, json!({LAST_USED: "2026-06-14", INVALID_SINCE: "2025-06-14"}), Verdict::Keep);
        check(old, json!({INVALID_SINCE: "not a day"}), today);
    }

    #[test]
    fn nothing_is_judged_before_use_was_noted_for_long_enough() {
        let check = |since: &str, expected: bool| {
            let map = from_value(json!({"metadata": {}, "data": {"since": since}})).expect("a map");
            let now = "2026-06-15T12:00:00Z".parse().expect("a time");
            assert_eq!(is_tracked(&map, now, YEAR), expected, "{since}");
        };
        check("2025-06-14", true);
        check("2025-06-15", false);
        check("", false);
    }

    #[test]
    fn all_ways_to_name_a_secret_count() {
        let pod: Pod = from_value(json!({"metadata": {}, "spec": {
            "imagePullSecrets": [{"name": "pull"}],
            "initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "from"}}]}],
            "containers": [{"name": "c", "env": [{"name": "E", "valueFrom":
                {"secretKeyRef": {"name": "key", "key": "k"}}}]}],
            "volumes": [{"name": "a", "secret": {"secretName": "mounted"}},
                {"name": "b", "projected": {"sources": [{"secret": {"name": "projected"}}]}},
                {"name": "d", "csi": {"driver": "x", "nodePublishSecretRef": {"name": "csi"}}}]}}))
        .expect("a pod");
        let found = secrets_of(&pod);
        let expected = ["csi", "from", "key", "mounted", "projected", "pull"];
        assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    }
}
