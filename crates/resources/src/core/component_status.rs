//! ComponentStatus: the health of the control plane's components, computed for each request.
//!
//! Nothing is stored. The store answers for `etcd-0`; controllers and scheduler are healthy while
//! their Leases have a holder.

use std::sync::Arc;

use apiserver::Registry;
use apiserver::request::Key;
use apiserver::resource::{Computed, Storage};
use async_trait::async_trait;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ComponentCondition, ComponentStatus};
use machinery::{Object, ObjectMeta, StatusError};

use crate::kind::{Kind, name, text};

pub(crate) static KIND: Kind<ComponentStatus> = Kind {
    short: &["cs"],
    unstored: Some(|| Storage::Computed(Arc::new(Components))),
    verbs: &["get", "list"],
    deprecation: "v1 ComponentStatus is deprecated in v1.19+",
    columns: &[
        name(),
        text("Status", "string", "Status of the component conditions", |component| {
            match health(component).map(|health| health.status.as_str()) {
                None => "Unknown",
                Some("True") => "Healthy",
                Some(_) => "Unhealthy",
            }
            .into()
        }),
        text("Message", "string", "Message of the component conditions", |component| {
            health(component).and_then(|health| health.message.clone()).unwrap_or_default().into()
        }),
        text("Error", "string", "Error of the component conditions", |component| {
            health(component).and_then(|health| health.error.clone()).unwrap_or_default().into()
        }),
    ],
    ..Kind::BASE
};

fn health(component: &ComponentStatus) -> Option<&ComponentCondition> {
    component.conditions.iter().flatten().find(|condition| condition.type_ == "Healthy")
}

struct Components;

#[async_trait]
impl Computed for Components {
    async fn computed(
        &self,
        registry: &Registry,
        _wanted: &Key,
    ) -> Result<Vec<Box<dyn Object>>, StatusError> {
        let mut all: Vec<Box<dyn Object>> = vec![];
        for (name, lease) in
            [("controller-manager", "kube-controller-manager"), ("scheduler", "kube-scheduler")]
        {
            let health = led(registry, lease).await;
            all.push(Box::new(component(name, health)));
        }
        let health = registry.revision().await.map(|_| ()).map_err(|error| error.to_string());
        all.push(Box::new(component("etcd-0", health)));
        Ok(all)
    }
}

/// Whether a component's Lease has a holder.
async fn led(registry: &Registry, lease: &str) -> Result<(), String> {
    let found = registry.find::<Lease>("kube-system", lease).await;
    let holder = match found {
        Ok(lease) => lease.and_then(|lease| lease.spec?.holder_identity),
        Err(error) => return Err(error.to_string()),
    };
    match holder.filter(|holder| !holder.is_empty()) {
        Some(_) => Ok(()),
        None => Err(format!("nobody holds the lease kube-system/{lease}")),
    }
}

fn component(name: &str, health: Result<(), String>) -> ComponentStatus {
    let (status, message) = match health {
        Ok(()) => ("True", "ok".to_owned()),
        Err(why) => ("False", why),
    };
    ComponentStatus {
        metadata: ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() },
        conditions: Some(vec![ComponentCondition {
            type_: "Healthy".into(),
            status: status.into(),
            message: Some(message),
            error: None,
        }]),
    }
}
