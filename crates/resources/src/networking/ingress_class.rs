//! IngressClass: which controller is in charge of an Ingress.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::networking::v1::IngressClass;
use machinery::{Object, names};

use super::typed_reference;
use crate::kind::{Kind, Rules, age, named, text};
use crate::validate::at::At;
use crate::validate::batch;

const IS_DEFAULT: &str = "ingressclass.kubernetes.io/is-default-class";

pub(crate) static KIND: Kind<IngressClass> = Kind {
    default: |class| {
        if let Some(parameters) = class.spec.as_mut().and_then(|spec| spec.parameters.as_mut()) {
            parameters.scope.get_or_insert_with(|| "Cluster".into());
        }
    },
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules {
        create: ingress_class,
        update: Some(ingress_class_update),
        metadata: MetadataRules::UPDATE_AND_WHOLE,
        ..Rules::NONE
    },
    columns: &[
        named(|class| {
            let note = class.metadata.annotations.as_ref().and_then(|map| map.get(IS_DEFAULT));
            let is_default = note.is_some_and(|value| value == "true");
            format!("{}{}", class.name(), if is_default { " (default)" } else { "" }).into()
        }),
        text(
            "Controller",
            "string",
            "Controller that is responsible for handling this class",
            |class| {
                let spec = class.spec.as_ref();
                spec.and_then(|spec| spec.controller.clone()).unwrap_or_default().into()
            },
        ),
        text(
            "Parameters",
            "string",
            "A reference to a resource with additional parameters",
            |class| parameters(class).into(),
        ),
        age(),
    ],
    ..Kind::BASE
};

fn parameters(class: &IngressClass) -> String {
    let parameters = class.spec.as_ref().and_then(|spec| spec.parameters.as_ref());
    let Some(parameters) = parameters else { return "<none>".into() };
    let group = parameters.api_group.as_ref().map(|group| format!(".{group}"));
    format!("{}{}/{}", parameters.kind, group.unwrap_or_default(), parameters.name)
}

fn ingress_class(at: &At<'_>) {
    let spec = at.get("spec");
    let controller = spec.get("controller");
    if controller.len() > 250 {
        controller.too_long(250);
    }
    batch::domain_prefixed_path(&controller);
    let parameters = spec.get("parameters");
    if !parameters.is_set() {
        return;
    }
    typed_reference(&parameters);
    let (scope, namespace) = (parameters.get("scope"), parameters.get("namespace"));
    match scope.str() {
        _ if !scope.is_set() => scope.required(""),
        "Namespace" if !namespace.is_set() => {
            namespace.required("`parameters.scope` is set to 'Namespace'");
        }
        "Namespace" => namespace.name(names::dns1123_label),
        "Cluster" if namespace.is_set() => {
            namespace.forbidden("`parameters.scope` is set to 'Cluster'");
        }
        "Cluster" => {}
        _ => scope.unsupported(&["Cluster", "Namespace"]),
    }
}

fn ingress_class_update(at: &At<'_>, old: &At<'_>) {
    at.get("spec.controller").unchanged_text(&old.get("spec.controller"));
    ingress_class(at);
}
