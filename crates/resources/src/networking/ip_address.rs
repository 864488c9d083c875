//! IPAddress: an address that a Service has.

use k8s_openapi::api::networking::v1::IPAddress;

use crate::kind::{Kind, Rules, field, name, without_header};
use crate::print;
use crate::validate::networking;

pub(crate) static KIND: Kind<IPAddress> = Kind {
    short: &["ip"],
    storage: Some("ipaddresses"),
    rules: Rules {
        create: networking::ip_address,
        update: Some(networking::ip_address_update),
        name: networking::ip_address_name,
        ..Rules::NONE
    },
    columns: &[
        name(),
        field("ParentRef", "string", "api.networking.v1.IPAddressSpec.parentRef", |address| {
            parent(address).into()
        }),
        // Upstream's rows have an age that the header lacks.
        without_header(|address| print::age(address)),
    ],
    ..Kind::BASE
};

fn parent(address: &IPAddress) -> String {
    let parent = &address.spec.parent_ref;
    let given = |part: &Option<String>| part.clone().filter(|text| !text.is_empty());
    let resource = match given(&parent.group) {
        Some(group) => format!("{}.{group}", parent.resource),
        None => parent.resource.clone(),
    };
    let namespace = given(&parent.namespace).map(|name| format!("/{name}")).unwrap_or_default();
    format!("{}{namespace}/{}", resource.to_lowercase(), parent.name)
}
