//! DeviceTaintRule: devices that get a taint.

use k8s_openapi::api::resource::v1alpha3::DeviceTaintRule;
use machinery::Time;

use super::{label, pool_name, taint};
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_bare_status};
use crate::print::since;
use crate::validate::at::At;
use crate::validate::shared::conditions;
use crate::validate::volumes::csi_driver_name;

pub(crate) static KIND: Kind<DeviceTaintRule> = Kind {
    optional: true,
    subresources: &[STATUS],
    default: |rule| {
        rule.spec.taint.time_added.get_or_insert_with(now);
    },
    parts: Some(spec_and_bare_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    gated: renew,
    rules: Rules {
        create: device_taint_rule,
        parts: &[("status", device_taint_status)],
        ..Rules::NONE
    },
    deprecation: "resource.k8s.io/v1alpha3 DeviceTaintRule is deprecated in v1.36+, unavailable in v1.39+",
    returns_deleted: true,
    columns: &[
        name(),
        field("Key", "string", "api.resource.v1.DeviceTaint.key", |rule| {
            rule.spec.taint.key.clone().into()
        }),
        field("Value", "string", "api.resource.v1.DeviceTaint.value", |rule| {
            rule.spec.taint.value.clone().unwrap_or_default().into()
        }),
        field("Effect", "string", "api.resource.v1.DeviceTaint.effect", |rule| {
            rule.spec.taint.effect.clone().into()
        }),
        field("TimeAdded", "string", "api.resource.v1.DeviceTaint.timeAdded", |rule| {
            let added = rule.spec.taint.time_added.as_ref();
            added.map_or(String::new(), |time| since(Some(time))).into()
        }),
        age(),
    ],
    ..Kind::BASE
};

fn now() -> Time {
    Time(base::clock::now_seconds())
}

/// Another effect is another taint, since now.
fn renew(rule: &mut DeviceTaintRule, old: Option<&DeviceTaintRule>) {
    let (taint, Some(old)) = (&mut rule.spec.taint, old) else { return };
    if taint.effect != old.spec.taint.effect && taint.time_added == old.spec.taint.time_added {
        taint.time_added = Some(now());
    }
}

fn device_taint_rule(at: &At<'_>) {
    let spec = at.get("spec");
    let [driver, pool, device] =
        ["driver", "pool", "device"].map(|field| spec.get("deviceSelector").get(field));
    if driver.is_set() {
        csi_driver_name(&driver);
    }
    if pool.is_set() {
        pool_name(&pool);
    }
    if device.is_set() {
        label(&device);
    }
    taint(&spec.get("taint"));
}

fn device_taint_status(at: &At<'_>, _old: &At<'_>) {
    const CONDITIONS: usize = 8;
    let list = at.get("status.conditions");
    conditions(&list);
    if list.len() > CONDITIONS {
        list.too_many(CONDITIONS);
    }
}
