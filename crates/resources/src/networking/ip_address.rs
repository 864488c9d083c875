//! IPAddress: an address that a Service has.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::networking::v1::IPAddress;
use machinery::field::Path;
use machinery::names;
use serde_json::Value;

use crate::kind::{Kind, Rules, field, name, without_header};
use crate::print;
use crate::validate::at::{At, judge};
use crate::validate::internal;
use crate::validate::ip;

pub(crate) static KIND: Kind<IPAddress> = Kind {
    short: &["ip"],
    storage: Some("ipaddresses"),
    rules: Rules {
        create: ip_address,
        update: Some(ip_address_update),
        name: ip_address_name,
        metadata: MetadataRules::WHOLE_AND_UPDATE,
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

fn ip_address(at: &At<'_>) {
    let parent = at.get("spec.parentRef");
    if ["group", "resource", "name", "namespace"].iter().all(|field| parent.get(field).is_empty()) {
        return parent.required("");
    }
    parent.get("group").any_name(names::dns1123_subdomain);
    parent.get("resource").need_name(names::path_segment);
    parent.get("name").need_name(names::path_segment);
    parent.get("namespace").any_name(names::path_segment);
}

fn ip_address_update(at: &At<'_>, old: &At<'_>) {
    ip_address(at);
    internal::unchanged(&at.get("spec.parentRef"), &old.get("spec.parentRef"), "ParentReference");
}

/// The name of an IPAddress is the address.
fn ip_address_name(name: &str) -> Vec<String> {
    let tree = Value::Null;
    let errors = judge(&tree, |at| ip::canonical(&Path::new("name"), name, at));
    let prefix = format!("Invalid value: {name:?}: ");
    let details = errors.0.into_iter().map(|error| error.message);
    details.map(|text| text.strip_prefix(&prefix).unwrap_or(&text).to_owned()).collect()
}
