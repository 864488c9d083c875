//! ServiceCIDR: a range that Services get their addresses from.

use k8s_openapi::api::networking::v1::ServiceCIDR;
use serde_json::json;

use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_bare_status};
use crate::validate::at::At;
use crate::validate::ip;

pub(crate) static KIND: Kind<ServiceCIDR> = Kind {
    subresources: &[STATUS],
    parts: Some(spec_and_bare_status!()),
    rules: Rules { create: service_cidr, update: Some(service_cidr_update), ..Rules::NONE },
    columns: &[
        name(),
        field("CIDRs", "string", "api.networking.v1.ServiceCIDRSpec.cidrs", |cidr| {
            let ranges = cidr.spec.as_ref().and_then(|spec| spec.cidrs.as_deref());
            ranges.unwrap_or_default().join(",").into()
        }),
        age(),
    ],
    ..Kind::BASE
};

fn service_cidr(at: &At<'_>) {
    let list = at.get("spec.cidrs");
    if list.is_empty() {
        return list.required("at least one CIDR required");
    }
    if list.len() > 2 {
        return list.invalid_as(json!({ "CIDRs": list.value }), "may only hold up to 2 values");
    }
    list.items().for_each(|cidr| ip::canonical_cidr(&cidr));
    let families: Vec<bool> = list
        .strings()
        .iter()
        .filter_map(|text| ip::cidr_of(text))
        .map(|net| net.addr().is_ipv6())
        .collect();
    if families.len() == 2 && families[0] == families[1] {
        list.invalid("may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64");
    }
}

fn service_cidr_update(at: &At<'_>, old: &At<'_>) {
    let (list, before) = (at.get("spec.cidrs"), old.get("spec.cidrs").strings());
    match (before.len(), list.len()) {
        (1, 2) => {
            if let Some(first) = list.items().next().filter(|first| !first.is(before[0])) {
                first.invalid("field is immutable");
            }
            service_cidr(at);
        }
        (was, now) if was == now => {
            for (new, old) in list.items().zip(before) {
                if !new.is(old) {
                    new.invalid("field is immutable");
                }
            }
        }
        _ => list.invalid("field is immutable"),
    }
}
