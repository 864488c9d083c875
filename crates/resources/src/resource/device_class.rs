//! DeviceClass: a kind of device that claims ask for.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::resource::v1::DeviceClass;
use machinery::names;
use release::features::Feature;

use super::{MOST, configuration, list, selectors};
use crate::gated::{Gated, close, gated, taken};
use crate::kind::{Kind, Rules, age, name};
use crate::validate::at::At;

pub(crate) static KIND: Kind<DeviceClass> = Kind {
    generation: Some(|new, old| new.spec != old.spec),
    gated: |new, old| close(GATED, new, old),
    rules: Rules {
        create: class,
        metadata: MetadataRules { checks_prefix: false, ..MetadataRules::WHOLE_AND_UPDATE },
        ..Rules::NONE
    },
    returns_deleted: true,
    columns: &[name(), age()],
    ..Kind::BASE
};

const GATED: &[Gated<DeviceClass>] = &[gated(&[Feature::DRAExtendedResource], |class| {
    taken(&mut class.spec.extended_resource_name)
})];

fn class(at: &At<'_>) {
    let spec = at.get("spec");
    selectors(&spec.get("selectors"));
    list(&spec.get("config"), MOST, configuration, None);
    let name = spec.get("extendedResourceName");
    if name.is_set() && !is_extended_resource(name.str()) {
        name.invalid("must be a valid extended resource name");
    }
}

fn is_extended_resource(name: &str) -> bool {
    let is_native = !name.contains('/') || name.contains("kubernetes.io/");
    !is_native
        && !name.starts_with("requests.")
        && names::qualified_name(&format!("requests.{name}")).is_empty()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn closed_gates_take_their_fields() {
        check(
            KIND.gated,
            Feature::DRAExtendedResource,
            "/spec/extendedResourceName",
            json!({"metadata": {"name": "x"}, "spec": {"extendedResourceName": "a/b"}}),
        );
    }
}
