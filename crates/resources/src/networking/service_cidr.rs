//! ServiceCIDR: a range that Services get their addresses from.

use k8s_openapi::api::networking::v1::ServiceCIDR;

use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_status};
use crate::validate::networking;

pub(crate) static KIND: Kind<ServiceCIDR> = Kind {
    subresources: &[STATUS],
    parts: Some(spec_and_status!()),
    rules: Rules {
        create: networking::service_cidr,
        update: Some(networking::service_cidr_update),
        ..Rules::NONE
    },
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
