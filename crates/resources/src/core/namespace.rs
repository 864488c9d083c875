//! Namespaces: deleted in two steps, the first of which marks them as terminating.

use apiserver::request::RequestContext;
use apiserver::resource::{Behaviour, Grace, MetadataRules};
use k8s_openapi::api::core::v1::{Namespace, NamespaceSpec, NamespaceStatus};
use machinery::{Object, names};

use crate::kind::{Fields, Hooks, Kind, Made, Rules, STATUS, Sub, age, name, text};
use crate::validate::{core, status};

/// In `spec.finalizers`; the namespace controller takes it away when the contents are gone.
const FINALIZER: &str = "kubernetes";
/// Upstream sets it on every namespace, so that selectors can name it.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

pub(crate) static KIND: Kind<Namespace> = Kind {
    short: &["ns"],
    // All but deletecollection.
    verbs: &["create", "delete", "get", "list", "patch", "update", "watch"],
    subresources: &[
        STATUS,
        Sub {
            name: "finalize",
            kind: None,
            verbs: &["update"],
            behaviour: Made::Plain(|| Behaviour::Part),
        },
    ],
    default: |namespace| {
        let name = namespace.name().to_owned();
        if !name.is_empty() {
            let labels = namespace.metadata.labels.get_or_insert_default();
            labels.insert(NAME_LABEL.into(), name);
        }
    },
    rules: Rules {
        create: core::namespace,
        update: Some(core::unchecked),
        parts: &[("finalize", core::namespace_finalize), ("status", status::namespace)],
        name: names::dns1123_label,
        metadata: MetadataRules::WHOLE_AND_UPDATE,
        ..Rules::NONE
    },
    returns_deleted: true,
    columns: &[
        name(),
        text("Status", "string", "The status of the namespace", |namespace| {
            namespace.status.as_ref().and_then(|status| status.phase.clone()).into()
        }),
        age(),
    ],
    fields: Fields::Of(&[
        ("name", |namespace| namespace.name().to_owned()),
        ("status.phase", |namespace| {
            let status = namespace.status.as_ref();
            status.and_then(|status| status.phase.clone()).unwrap_or_default()
        }),
    ]),
    hooks: &Life,
    ..Kind::BASE
};

struct Life;

impl Hooks<Namespace> for Life {
    fn prepare_create(&self, _ctx: &RequestContext, namespace: &mut Namespace) {
        let given = namespace.spec.take().and_then(|spec| spec.finalizers);
        let mut finalizers = given.unwrap_or_default();
        if !finalizers.iter().any(|one| one == FINALIZER) {
            finalizers.push(FINALIZER.into());
        }
        namespace.spec = Some(NamespaceSpec { finalizers: Some(finalizers) });
        namespace.status =
            Some(NamespaceStatus { phase: Some("Active".into()), ..NamespaceStatus::default() });
        let name = namespace.name().to_owned();
        namespace.metadata.labels.get_or_insert_default().insert(NAME_LABEL.into(), name);
    }

    fn prepare_update(&self, ctx: &RequestContext, namespace: &mut Namespace, old: &Namespace) {
        if ctx.subresource != "status" {
            namespace.status = old.status.clone();
        }
        if ctx.subresource != "finalize" {
            namespace.spec = old.spec.clone();
        }
    }

    fn starts_deleting(&self, namespace: &mut Namespace) {
        let status = namespace.status.get_or_insert_default();
        status.phase = Some("Terminating".into());
        // Upstream's namespaces end by steps of their own, which know no period of grace.
        namespace.metadata.deletion_grace_period_seconds = None;
    }

    fn grace(&self, _: &Namespace, _: Option<i64>) -> Grace {
        Grace::Contents
    }

    fn holds_back_removal(&self, namespace: &Namespace) -> bool {
        let spec = namespace.spec.as_ref();
        spec.and_then(|spec| spec.finalizers.as_ref())
            .is_some_and(|finalizers| !finalizers.is_empty())
    }
}
