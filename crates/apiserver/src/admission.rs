//! The admission chain: plugins that may change an object (`admit`), then plugins that may refuse
//! it (`validate`). The plugins live in crate `admission`; their table's order is the order here.
//!
//! A mutating plugin may request ([`Reinvocation::ask`]) that the whole mutating chain runs once more on
//! the changed object. Upstream: `k8s.io/apiserver/pkg/admission/{chain,reinvocation}.go`.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use base::metrics::Timer;
use machinery::{Object, ObjectMeta};
use serde_json::Value;
use store::{Compare, Revision};

use crate::metrics::families;
use crate::registry::store_key;
use crate::request::{Key, RequestContext};
use crate::{Registry, StatusError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Create,
    Update,
    Delete,
    /// exec, attach, portforward, proxy.
    Connect,
}

impl Operation {
    /// As in webhook rules and AdmissionReviews.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
            Self::Connect => "CONNECT",
        }
    }
}

/// A plugin's view of a request. Upstream: `admission.Attributes`.
pub struct Attributes<'a> {
    pub ctx: &'a RequestContext,
    pub registry: &'a Registry,
    pub operation: Operation,
    pub key: &'a Key,
    /// The new state, `None` for deletes. For create-subresources (eviction, binding) it is the body, for
    /// connections their options (`PodExecOptions`).
    pub object: Option<&'a mut Box<dyn Object>>,
    /// The stored state, `None` for creates.
    pub old: Option<&'a dyn Object>,
    /// CreateOptions, UpdateOptions, PatchOptions or DeleteOptions as a tree.
    pub options: &'a Value,
    pub reinvocation: Reinvocation,
    /// See [`Attributes::rely_on`]. Locked for a push.
    relied: Mutex<Vec<Compare>>,
}

impl<'a> Attributes<'a> {
    pub fn new(
        ctx: &'a RequestContext,
        registry: &'a Registry,
        operation: Operation,
        key: &'a Key,
        object: Option<&'a mut Box<dyn Object>>,
        old: Option<&'a dyn Object>,
        options: &'a Value,
    ) -> Self {
        let reinvocation = Reinvocation::default();
        let relied = Mutex::default();
        Self { ctx, registry, operation, key, object, old, options, reinvocation, relied }
    }

    /// Makes a decision on a create depend on an object that the plugin has read from the registry: the final
    /// write has the condition that this object is unchanged; otherwise admission runs again.
    pub fn rely_on<T>(&self, object: &T)
    where
        T: k8s_openapi::Metadata<Ty = ObjectMeta>,
    {
        let meta = object.metadata();
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let key = Key::new(text(&meta.namespace), text(&meta.name));
        let revision = meta.resource_version.as_deref().and_then(|version| version.parse().ok());
        let path = store_key(&self.registry.row_of::<T>(), &key);
        let seen = Revision(revision.expect("what was read has a revision"));
        let mut relied = self.relied.lock().expect("no panic under the lock");
        relied.push(Compare::ModRevision(path.into(), seen));
    }

    /// The conditions of the decisions.
    pub(crate) fn relied(self) -> Vec<Compare> {
        self.relied.into_inner().expect("no panic under the lock")
    }

    /// Whether this is the built-in resource itself (no subresource).
    pub fn is_resource(&self, group: &str, resource: &str) -> bool {
        let row = &self.ctx.resource;
        self.ctx.subresource.is_empty() && row.group == group && row.plural == resource
    }

    /// The new state, typed, for a plugin that knows the kind.
    pub fn object_as<T: 'static>(&self) -> Option<&T> {
        self.object.as_deref().and_then(|object| object.downcast())
    }

    pub fn object_as_mut<T: 'static>(&mut self) -> Option<&mut T> {
        self.object.as_mut().and_then(|object| object.downcast_mut())
    }

    pub fn old_as<T: 'static>(&self) -> Option<&T> {
        self.old.and_then(|old| old.downcast())
    }

    /// 403 about the requested object. Upstream: `admission.NewForbidden`.
    pub fn forbidden(&self, why: impl std::fmt::Display) -> StatusError {
        let row = &self.ctx.resource;
        StatusError::forbidden(&row.group, &row.plural, self.shown_name(), why)
    }

    /// The object's name. While plugins may still change the object, a generated name is shown as its
    /// prefix.
    pub fn shown_name(&self) -> &str {
        let prefix = || self.object.as_deref().and_then(|o| o.meta().generate_name.as_deref());
        if self.reinvocation.admitting && self.operation == Operation::Create {
            return prefix().filter(|prefix| !prefix.is_empty()).unwrap_or(&self.key.name);
        }
        &self.key.name
    }
}

/// The second round of the mutating plugins of one request, and their memory.
#[derive(Default)]
pub struct Reinvocation {
    admitting: bool,
    again: bool,
    asked: bool,
    memory: HashMap<&'static str, Box<dyn Any + Send + Sync>>,
}

impl Reinvocation {
    /// Whether this is the second round.
    pub fn is_again(&self) -> bool {
        self.again
    }

    /// Requests a second round, because the change may concern earlier plugins.
    pub fn ask(&mut self) {
        self.asked = true;
    }

    /// A plugin's data between the rounds.
    pub fn memory<T: Any + Default + Send + Sync>(&mut self, plugin: &'static str) -> &mut T {
        let slot = self.memory.entry(plugin).or_insert_with(|| Box::new(T::default()));
        slot.downcast_mut().expect("a plugin keeps one type")
    }
}

#[async_trait]
pub trait Plugin: Send + Sync {
    fn name(&self) -> &'static str;

    fn handles(&self, operation: Operation) -> bool;

    async fn admit(&self, _attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        Ok(())
    }

    async fn validate(&self, _attributes: &Attributes<'_>) -> Result<(), StatusError> {
        Ok(())
    }
}

/// The enabled plugins, in order.
#[derive(Default)]
pub struct Chain(pub Vec<Box<dyn Plugin>>);

impl Chain {
    pub async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        attributes.reinvocation.admitting = true;
        let timer = Timer::start();
        let mut outcome = self.round(attributes).await;
        if outcome.is_ok() && attributes.reinvocation.asked {
            attributes.reinvocation.again = true;
            outcome = self.round(attributes).await;
        }
        step_took(ADMIT, attributes.operation, &outcome, timer);
        outcome
    }

    async fn round(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        let operation = attributes.operation;
        let mut timer = Timer::start();
        for plugin in self.0.iter().filter(|plugin| plugin.handles(operation)) {
            let outcome = plugin.admit(attributes).await;
            plugin_took(ADMIT, &**plugin, operation, &outcome, timer.lap());
            outcome?;
        }
        Ok(())
    }

    pub async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let timer = Timer::start();
        let outcome = self.validated(attributes).await;
        step_took(VALIDATE, attributes.operation, &outcome, timer);
        outcome
    }

    async fn validated(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let operation = attributes.operation;
        let mut timer = Timer::start();
        for plugin in self.0.iter().filter(|plugin| plugin.handles(operation)) {
            let outcome = plugin.validate(attributes).await;
            plugin_took(VALIDATE, &**plugin, operation, &outcome, timer.lap());
            outcome?;
        }
        Ok(())
    }
}

/// The types of the metrics' steps.
const ADMIT: &str = "admit";
const VALIDATE: &str = "validate";

fn step_took(step: &str, operation: Operation, outcome: &Result<(), StatusError>, timer: Timer) {
    let labels = [operation.as_str(), rejected(outcome), step];
    families::ADMISSION_STEP.took(&labels, timer.elapsed());
}

fn plugin_took(
    step: &str,
    plugin: &dyn Plugin,
    operation: Operation,
    outcome: &Result<(), StatusError>,
    time: Duration,
) {
    let labels = [plugin.name(), operation.as_str(), rejected(outcome), step];
    families::ADMISSION_PLUGIN.took(&labels, time);
}

fn rejected(outcome: &Result<(), StatusError>) -> &'static str {
    if outcome.is_err() { "true" } else { "false" }
}
