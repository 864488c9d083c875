//! RuntimeClass: which handler of the container runtime runs a pod.

use std::collections::HashSet;

use apiserver::resource::MetadataRules;
use k8s_openapi::api::node::v1::RuntimeClass;
use machinery::names;

use crate::kind::{Kind, Rules, Updates, age, name, text};
use crate::validate::at::At;
use crate::validate::{internal, pod, warnings};

pub(crate) static KIND: Kind<RuntimeClass> = Kind {
    rules: Rules {
        create: runtime_class,
        update: Some(runtime_class_update),
        metadata: MetadataRules { needs_domains: false, ..MetadataRules::WHOLE_AND_UPDATE },
        create_on_update: true,
        unconditional_update: false,
        ..Rules::NONE
    },
    warnings: Some(warnings::kinds::runtime_class),
    warns_on_update: Updates::All,
    columns: &[name(), text("Handler", "string", "", |class| class.handler.clone().into()), age()],
    ..Kind::BASE
};

fn runtime_class(at: &At<'_>) {
    at.get("handler").need_name(names::dns1123_label);
    let fixed = at.get("overhead.podFixed").called(at.child_path("overhead"));
    pod::overhead(&fixed);
    let scheduling = at.get("scheduling");
    scheduling.get("nodeSelector").labels();
    let tolerations = scheduling.get("tolerations");
    pod::tolerations_of_old(&tolerations);
    let mut seen = HashSet::new();
    for one in tolerations.items() {
        let key = ["key", "operator", "value", "effect"].map(|field| one.get(field).str());
        if !seen.insert(key) {
            let shown = internal::shown("Toleration", one.value);
            one.errors().duplicate_shown(&one.path, &shown, "");
        }
    }
}

fn runtime_class_update(at: &At<'_>, old: &At<'_>) {
    runtime_class(at);
    at.get("handler").unchanged(&old.get("handler"));
}
