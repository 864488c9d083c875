//! Makes and removes pods for an owner, with the events that upstream's `PodControl` records.

use client::{
    Api, Client, DeleteParams, ErrorExt, EventRecorder, EventType, Kind, PostParams, Result,
};
use k8s_openapi::api::core::v1::Pod;

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

    /// That the pod is gone already is an error of kind not-found, and told to nobody.
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
}
