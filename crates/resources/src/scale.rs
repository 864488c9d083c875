//! `/scale`: replicas of whatever has replicas, as one kind (autoscaling/v1 Scale).

use std::marker::PhantomData;
use std::sync::Arc;

use apiserver::resource::{Behaviour, View};
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::autoscaling::v1::Scale;
use k8s_openapi::api::core::v1::ReplicationController;
use machinery::object::{Codec, Typed};
use machinery::selector::Selector;
use machinery::{Object, StatusError};

use crate::kind::{Made, PART_VERBS, Sub};

/// A kind with replicas.
pub(crate) trait Scalable: Object {
    fn wanted(&self) -> i32;
    fn set_wanted(&mut self, replicas: i32);
    fn there(&self) -> i32;
    /// In the query's syntax.
    fn selector(&self) -> String;
}

pub(crate) const fn sub<T: Scalable>() -> Sub {
    let behaviour = || Behaviour::View(Arc::new(ScaleOf::<T>(PhantomData)));
    Sub {
        name: "scale",
        kind: Some(("autoscaling", "v1", "Scale")),
        verbs: PART_VERBS,
        behaviour: Made::Plain(behaviour),
    }
}

struct ScaleOf<T>(PhantomData<fn() -> T>);

static CODEC: Typed<Scale> = Typed::new();

impl<T: Scalable> View for ScaleOf<T> {
    fn codec(&self) -> &dyn Codec {
        &CODEC
    }

    fn view(&self, parent: &dyn Object) -> Result<Box<dyn Object>, StatusError> {
        let (of, meta) = (parent.expect::<T>(), parent.meta());
        Ok(Box::new(api::scale::of(meta, of.wanted(), of.there(), Some(of.selector()))))
    }

    fn merge(&self, view: &dyn Object, parent: &mut dyn Object) -> Result<(), StatusError> {
        parent.expect_mut::<T>().set_wanted(api::scale::replicas(view.expect())?);
        Ok(())
    }
}

/// The kinds differ in nothing but their type: spec.replicas, status.replicas, spec.selector.
macro_rules! scalable {
    ($kind:ty, $selector:expr) => {
        impl Scalable for $kind {
            fn wanted(&self) -> i32 {
                self.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or_default()
            }

            fn set_wanted(&mut self, replicas: i32) {
                self.spec.get_or_insert_default().replicas = Some(replicas);
            }

            fn there(&self) -> i32 {
                self.status
                    .as_ref()
                    .map(|status| i32::from_replicas(status.replicas))
                    .unwrap_or_default()
            }

            fn selector(&self) -> String {
                let select: fn(&$kind) -> Selector = $selector;
                select(self).to_string()
            }
        }
    };
}

/// `replicas` is required in some statuses and optional in others.
trait FromReplicas<T> {
    fn from_replicas(replicas: T) -> i32;
}

impl FromReplicas<i32> for i32 {
    fn from_replicas(replicas: i32) -> i32 {
        replicas
    }
}

impl FromReplicas<Option<i32>> for i32 {
    fn from_replicas(replicas: Option<i32>) -> i32 {
        replicas.unwrap_or_default()
    }
}

fn api_selector(selector: Option<&machinery::LabelSelector>) -> Selector {
    Selector::from_api(selector).unwrap_or_default()
}

scalable!(Deployment, |it| api_selector(it.spec.as_ref().map(|spec| &spec.selector)));
scalable!(ReplicaSet, |it| api_selector(it.spec.as_ref().map(|spec| &spec.selector)));
scalable!(StatefulSet, |it| api_selector(it.spec.as_ref().map(|spec| &spec.selector)));
scalable!(ReplicationController, |it| {
    it.spec
        .as_ref()
        .and_then(|spec| spec.selector.as_ref())
        .map(Selector::from_map)
        .unwrap_or_default()
});
