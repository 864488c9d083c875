//! Ingress: which hosts and paths from outside lead to which Services.

use std::collections::BTreeSet;

use apiserver::resource::MetadataRules;
use k8s_openapi::api::networking::v1::{Ingress, IngressRule};
use machinery::field::Path;
use machinery::names;
use serde_json::Value;

use super::typed_reference;
use crate::kind::{Kind, Rules, STATUS, Updates, age, name, spec_and_status, text};
use crate::validate::at::At;
use crate::validate::{ip, status, warnings};

pub(crate) static KIND: Kind<Ingress> = Kind {
    short: &["ing"],
    storage: Some("ingress"),
    subresources: &[STATUS],
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules {
        create: ingress,
        update: Some(ingress_update),
        parts: &[("status", status::ingress)],
        metadata: MetadataRules::UPDATE_AND_WHOLE,
        ..Rules::NONE
    },
    warnings: Some(warnings::ingress),
    status_warnings: Some(warnings::addresses::load_balancer),
    warns_on_update: Updates::None,
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

fn ingress(at: &At<'_>) {
    ingress_rules(at);
    let note = at.get("metadata.annotations").key("kubernetes.io/ingress.class");
    let class = at.get("spec.ingressClassName");
    if note.is_set() && class.is_set() && note.str() != class.str() {
        // Upstream's path leaves `metadata` out.
        let path = Path::new("annotations").child("kubernetes.io/ingress.class");
        note.called(path).invalid("must match `ingressClassName` when both are specified");
    }
}

fn ingress_update(at: &At<'_>, _old: &At<'_>) {
    ingress_rules(at);
}

fn ingress_rules(at: &At<'_>) {
    let spec = at.get("spec");
    let (rules, backend) = (spec.get("rules"), spec.get("defaultBackend"));
    if rules.is_empty() && !backend.is_set() {
        spec.invalid_as(Value::Null, "either `defaultBackend` or `rules` must be specified");
    }
    if backend.is_set() {
        ingress_backend(&backend);
    }
    for rule in rules.items() {
        let host = rule.get("host");
        if !host.is_empty() {
            if ip::sloppy(host.str()).is_some() {
                host.invalid("must be a DNS name, not an IP address");
            }
            host_name(&host);
        }
        if rule.has("http") {
            let paths = rule.get("http.paths");
            paths.need();
            paths.items().for_each(|path| ingress_path(&path));
        }
    }
    for tls in spec.get("tls").items() {
        tls.get("hosts").items().for_each(|host| host_name(&host));
        tls.get("secretName").any_name(names::dns1123_subdomain);
    }
    if spec.has("ingressClassName") {
        spec.get("ingressClassName").name(names::dns1123_subdomain);
    }
}

fn host_name(at: &At<'_>) {
    match at.str().contains('*') {
        true => at.name(names::wildcard_subdomain),
        false => at.name(names::dns1123_subdomain),
    }
}

fn ingress_path(at: &At<'_>) {
    let (path, kind) = (at.get("path"), at.get("pathType"));
    const ABSOLUTE: &str = "must be an absolute path";
    match kind.str() {
        "" => kind.required("pathType must be specified"),
        "Exact" | "Prefix" => {
            if !path.str().starts_with('/') {
                path.invalid_text(ABSOLUTE);
            }
            for part in ["//", "/./", "/../", "%2f", "%2F"] {
                if path.str().contains(part) {
                    path.invalid(&format!("must not contain '{part}'"));
                }
            }
            for end in ["/..", "/."] {
                if path.str().ends_with(end) {
                    path.invalid(&format!("cannot end with '{end}'"));
                }
            }
        }
        "ImplementationSpecific" => {
            if !path.is_empty() && !path.str().starts_with('/') {
                path.invalid(ABSOLUTE);
            }
        }
        _ => kind.unsupported(&["Exact", "ImplementationSpecific", "Prefix"]),
    }
    ingress_backend(&at.get("backend"));
}

fn ingress_backend(at: &At<'_>) {
    match (at.has("resource"), at.has("service")) {
        (true, true) => at.invalid_as("", "cannot set both resource and service backends"),
        (false, false) => at.invalid_as("", "resource or service backend is required"),
        (true, false) => typed_reference(&at.get("resource")),
        (false, true) => {
            at.get("service.name").need_name(crate::validate::service::name);
            let (name, number) = (at.get("service.port.name"), at.get("service.port.number"));
            match (name.is_empty(), number.int() == 0) {
                (false, false) => at.invalid_as("", "cannot set both port name & port number"),
                (false, true) => name.name(names::port_name),
                (true, false) => number.port(),
                (true, true) => at.required("port name or number is required"),
            }
        }
    }
}
