//! Endpoints: the addresses behind a Service, all in one object.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::core::v1::Endpoints;

use crate::defaults::fill;
use crate::kind::{Kind, Rules, Updates, age, field, name};
use crate::print::{first_three, or_none};
use crate::validate::{core, warnings};

pub(crate) static KIND: Kind<Endpoints> = Kind {
    short: &["ep"],
    storage: Some("services/endpoints"),
    default: |endpoints| {
        let subsets = endpoints.subsets.iter_mut().flatten();
        for port in subsets.flat_map(|subset| subset.ports.iter_mut().flatten()) {
            fill(&mut port.protocol, "TCP");
        }
        endpoints.subsets.take_if(|subsets| subsets.is_empty());
    },
    rules: Rules {
        create: core::endpoints,
        update: Some(core::endpoints_update),
        create_on_update: true,
        metadata: MetadataRules::UPDATE_AND_WHOLE,
        ..Rules::NONE
    },
    deprecation: "v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice",
    warnings: Some(warnings::addresses::endpoints),
    warns_on_update: Updates::All,
    columns: &[
        name(),
        field("Endpoints", "string", "api.core.v1.Endpoints.subsets", |endpoints| {
            addresses(endpoints).into()
        }),
        age(),
    ],
    ..Kind::BASE
};

/// The first three addresses with ports, and how many more there are.
fn addresses(endpoints: &Endpoints) -> String {
    let mut all: Vec<String> = vec![];
    for subset in endpoints.subsets.iter().flatten() {
        for address in subset.addresses.iter().flatten() {
            match &subset.ports {
                Some(ports) if !ports.is_empty() => {
                    all.extend(ports.iter().map(|port| format!("{}:{}", address.ip, port.port)));
                }
                _ => all.push(address.ip.clone()),
            }
        }
    }
    or_none(first_three(all))
}
