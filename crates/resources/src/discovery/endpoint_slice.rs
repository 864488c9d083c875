//! EndpointSlice: some of the addresses behind a Service.

use k8s_openapi::api::discovery::v1::{EndpointPort, EndpointSlice};

use crate::defaults::fill;
use crate::kind::{Kind, Rules, age, field, name};
use crate::print::first_three;
use crate::validate::networking;

pub(crate) static KIND: Kind<EndpointSlice> = Kind {
    default: |slice| {
        for port in slice.ports.iter_mut().flatten() {
            fill(&mut port.protocol, "TCP");
            port.name.get_or_insert_default();
        }
    },
    generation: Some(|new, old| {
        (&new.endpoints, &new.ports, &new.metadata.labels)
            != (&old.endpoints, &old.ports, &old.metadata.labels)
    }),
    // A client that sends an empty list owns it, and nobody sees the list.
    gated: |new, _| {
        new.endpoints.take_if(|endpoints| endpoints.is_empty());
    },
    rules: Rules {
        create: networking::endpoint_slice,
        update: Some(networking::endpoint_slice_update),
        ..Rules::NONE
    },
    columns: &[
        name(),
        field("AddressType", "string", "api.discovery.v1.EndpointSlice.addressType", |slice| {
            slice.address_type.clone().into()
        }),
        field("Ports", "string", "api.discovery.v1.EndpointSlice.ports", |slice| {
            ports(slice).into()
        }),
        field("Endpoints", "string", "api.discovery.v1.EndpointSlice.endpoints", |slice| {
            addresses(slice).into()
        }),
        age(),
    ],
    ..Kind::BASE
};

fn ports(slice: &EndpointSlice) -> String {
    let Some(ports) = &slice.ports else { return "<unset>".into() };
    let number =
        |port: &EndpointPort| port.port.map_or("*".to_owned(), |number| number.to_string());
    first_three(ports.iter().map(number).collect())
}

fn addresses(slice: &EndpointSlice) -> String {
    let endpoints = slice.endpoints.iter().flatten();
    let all: Vec<String> = endpoints.flat_map(|one| one.addresses.clone()).collect();
    if all.is_empty() { "<unset>".into() } else { first_three(all) }
}
