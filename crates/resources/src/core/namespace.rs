//! Namespaces: deleted in two steps, the first of which marks them as terminating.

use apiserver::request::RequestContext;
use apiserver::resource::{Column, Strategy};
use k8s_openapi::api::core::v1::{Namespace, NamespaceSpec, NamespaceStatus};
use machinery::Object;
use serde_json::Value;

use crate::Row;
use crate::print::age;

/// In `spec.finalizers`; the namespace controller takes it away when the contents are gone.
const FINALIZER: &str = "kubernetes";
/// Upstream sets it on every namespace, so that selectors can name it.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

pub(crate) fn row() -> Row {
    use apiserver::resource::ALL_VERBS;
    let verbs = ALL_VERBS.iter().copied().filter(|verb| *verb != "deletecollection").collect();
    Row::new::<Namespace>(NamespaceStrategy).short(&["ns"]).status().verbs(verbs).sub(
        "finalize",
        None,
        &["update"],
        apiserver::resource::Behaviour::Part,
    )
}

struct NamespaceStrategy;

impl Strategy for NamespaceStrategy {
    crate::validate::checked!(Namespace);

    fn default(&self, object: &mut dyn Object) {
        let name = object.name().to_owned();
        if !name.is_empty() {
            object.meta_mut().labels.get_or_insert_default().insert(NAME_LABEL.into(), name);
        }
    }

    fn prepare_create(&self, _ctx: &RequestContext, object: &mut dyn Object) {
        let namespace = object.expect_mut::<Namespace>();
        let given = namespace.spec.take().and_then(|spec| spec.finalizers);
        let mut finalizers = given.unwrap_or_default();
        if !finalizers.iter().any(|one| one == FINALIZER) {
            finalizers.push(FINALIZER.into());
        }
        namespace.spec = Some(NamespaceSpec { finalizers: Some(finalizers) });
        namespace.status =
            Some(NamespaceStatus { phase: Some("Active".into()), ..NamespaceStatus::default() });
        let name = object.name().to_owned();
        object.meta_mut().labels.get_or_insert_default().insert(NAME_LABEL.into(), name);
    }

    fn prepare_update(&self, ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        let (namespace, old) = (object.expect_mut::<Namespace>(), old.expect::<Namespace>());
        if ctx.subresource != "status" {
            namespace.status = old.status.clone();
        }
        if ctx.subresource != "finalize" {
            namespace.spec = old.spec.clone();
        }
    }

    fn starts_deleting(&self, object: &mut dyn Object) {
        let status = object.expect_mut::<Namespace>().status.get_or_insert_default();
        status.phase = Some("Terminating".into());
        // Upstream's namespaces end by steps of their own, which know no period of grace.
        object.meta_mut().deletion_grace_period_seconds = None;
    }

    fn holds_back_removal(&self, object: &dyn Object) -> bool {
        let spec = object.expect::<Namespace>().spec.as_ref();
        spec.and_then(|spec| spec.finalizers.as_ref())
            .is_some_and(|finalizers| !finalizers.is_empty())
    }

    fn returns_deleted_object(&self) -> bool {
        true
    }

    fn selectable_names(&self) -> &'static [&'static str] {
        &["name", "status.phase"]
    }

    fn selectable_fields(&self, object: &dyn Object) -> Vec<(&'static str, String)> {
        let phase =
            object.expect::<Namespace>().status.as_ref().and_then(|status| status.phase.clone());
        vec![("name", object.name().to_owned()), ("status.phase", phase.unwrap_or_default())]
    }

    fn columns(&self) -> Vec<Column> {
        crate::columns::of::<Namespace>()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let phase =
            object.expect::<Namespace>().status.as_ref().and_then(|status| status.phase.clone());
        vec![object.name().into(), phase.into(), age(object)]
    }
}
