//! Ingress: which hosts and paths from outside lead to which Services.

use std::collections::BTreeSet;

use k8s_openapi::api::networking::v1::{Ingress, IngressRule};

use crate::kind::{Kind, Rules, STATUS, age, name, spec_and_status, text};
use crate::validate::{networking, warnings};

pub(crate) static KIND: Kind<Ingress> = Kind {
    short: &["ing"],
    storage: Some("ingress"),
    subresources: &[STATUS],
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules {
        create: networking::ingress,
        update: Some(networking::ingress_update),
        ..Rules::NONE
    },
    warnings: Some(warnings::ingress),
    columns: &[
        name(),
        text(
            "Class",
            "string",
            "The name of the IngressClass resource that should be used for additional configuration",
            |ingress| {
                let spec = ingress.spec.as_ref();
                let class = spec.and_then(|spec| spec.ingress_class_name.as_deref());
                class.unwrap_or("<none>").into()
            },
        ),
        text(
            "Hosts",
            "string",
            "Hosts that incoming requests are matched against before the ingress rule",
            |ingress| {
                let rules = ingress.spec.as_ref().and_then(|spec| spec.rules.as_deref());
                hosts(rules.unwrap_or_default()).into()
            },
        ),
        text(
            "Address",
            "string",
            "Address is a list containing ingress points for the load-balancer",
            |ingress| addresses(ingress).into(),
        ),
        text("Ports", "string", "Ports of TLS configurations that open", |ingress| {
            let tls = ingress.spec.as_ref().and_then(|spec| spec.tls.as_ref());
            if tls.is_some_and(|tls| !tls.is_empty()) { "80, 443" } else { "80" }.into()
        }),
        age(),
    ],
    ..Kind::BASE
};

fn hosts(rules: &[IngressRule]) -> String {
    const SHOWN: usize = 3;
    let mut shown: Vec<&str> = vec![];
    let mut is_full = false;
    for rule in rules {
        is_full |= shown.len() == SHOWN;
        if let Some(host) = rule.host.as_deref().filter(|host| !is_full && !host.is_empty()) {
            shown.push(host);
        }
    }
    match (shown.is_empty(), is_full) {
        (true, _) => "*".into(),
        (false, false) => shown.join(","),
        (false, true) => format!("{} + {} more...", shown.join(","), rules.len() - SHOWN),
    }
}

/// Where a load balancer answers, sorted.
fn addresses(ingress: &Ingress) -> String {
    let balancer = ingress.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let points = balancer.into_iter().flat_map(|balancer| balancer.ingress.iter().flatten());
    let all: BTreeSet<&str> = points
        .filter_map(|point| {
            let ip = point.ip.as_deref().filter(|ip| !ip.is_empty());
            ip.or(point.hostname.as_deref())
        })
        .filter(|address| !address.is_empty())
        .collect();
    all.into_iter().collect::<Vec<_>>().join(",")
}
