//! RuntimeClass: which handler of the container runtime runs a pod.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::node::v1::RuntimeClass;

use crate::kind::{Kind, Rules, age, name, text};
use crate::validate::policy;

pub(crate) static KIND: Kind<RuntimeClass> = Kind {
    rules: Rules {
        create: policy::runtime_class,
        update: Some(policy::runtime_class_update),
        metadata: MetadataRules::Plain,
        create_on_update: true,
        unconditional_update: false,
        ..Rules::NONE
    },
    columns: &[name(), text("Handler", "string", "", |class| class.handler.clone().into()), age()],
    ..Kind::BASE
};
