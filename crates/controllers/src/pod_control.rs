//! Makes and removes pods for an owner, with the events that upstream's `PodControl` records.

use client::{
    Api, Client, DeleteParams, ErrorExt, EventRecorder, EventType, Kind, ObjectKey, PostParams,
    Result,
};
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;

use crate::expectations::Expectations;

/// Writes pods in the name of one owner.
pub struct PodControl<'a, T> {
    pub client: &'a Client,
    pub events: &'a EventRecorder,
    pub owner: &'a T,
}

impl<T: Kind> PodControl<'_, T> {
    fn api(&self) -> Api<Pod> {
        self.client.api(self.owner.metadata().namespace.as_deref())
    }

    pub async fn create(&self, pod: &Pod) -> Result<Pod> {
        let created = self.api().create(&PostParams::default(), pod).await;
        match &created {
            Ok(pod) => {
                let name = pod.metadata.name.as_deref().unwrap_or_default();
                let message = format!("Created pod: {name}");
                self.events.event(self.owner, EventType::Normal, "SuccessfulCreate", message);
            }
            Err(error) if error.is_namespace_terminating() => {}
            Err(error) => {
                let message = format!("Error creating: {}", error.text());
                self.events.event(self.owner, EventType::Warning, "FailedCreate", message);
            }
        }
        created
    }

    /// If the pod no longer exists, the error is not-found, and there is no event.
    pub async fn delete(&self, name: &str) -> Result<()> {
        match self.api().delete(name, &DeleteParams::default()).await {
            Ok(_) => {
                let message = format!("Deleted pod: {name}");
                self.events.event(self.owner, EventType::Normal, "SuccessfulDelete", message);
                Ok(())
            }
            Err(error) => {
                if !error.is_not_found() {
                    let message = format!("Error deleting: {}", error.text());
                    self.events.event(self.owner, EventType::Warning, "FailedDelete", message);
                }
                Err(error)
            }
        }
    }

    /// Creates pods in batches of 1, 2, 4, …, so that an error costs one try: the rest is not tried after it.
    /// An expected pod that never comes is taken off. Upstream: `slowStartBatch`.
    pub async fn create_all(&self, expectations: &Expectations, pods: &[Pod]) -> Result<()> {
        let key = ObjectKey::of(self.owner.metadata());
        let (mut rest, mut batch) = (pods, 1);
        while !rest.is_empty() {
            let (now, later) = rest.split_at(batch.min(rest.len()));
            let results = join_all(now.iter().map(|pod| self.create(pod))).await;
            let failed = results.iter().filter(|one| one.is_err()).count();
            if let Some(error) = results.into_iter().find_map(Result::err) {
                (0..failed + later.len()).for_each(|_| expectations.created(&key));
                // The namespace goes and takes the owner along.
                return if error.is_namespace_terminating() { Ok(()) } else { Err(error) };
            }
            rest = later;
            batch *= 2;
        }
        Ok(())
    }

    /// Deletes pods at once. An expected deletion that fails is taken off.
    pub async fn delete_all(
        &self,
        expectations: &Expectations,
        victims: &[ObjectKey],
    ) -> Result<()> {
        let key = ObjectKey::of(self.owner.metadata());
        let one = async |victim: &ObjectKey| match self.delete(&victim.name).await {
            Ok(()) => Ok(()),
            Err(error) => {
                expectations.deleted(&key, victim);
                if error.is_not_found() { Ok(()) } else { Err(error) }
            }
        };
        join_all(victims.iter().map(one)).await.into_iter().collect()
    }
}
