//! StorageVersion: in which version each server stores a resource.

use std::collections::{HashMap, HashSet};

use k8s_openapi::api::apiserverinternal::v1alpha1::StorageVersion;
use machinery::names;

use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_bare_status};
use crate::validate::at::{At, NameCheck};
use crate::validate::core;

pub(crate) static KIND: Kind<StorageVersion> = Kind {
    optional: true,
    subresources: &[STATUS],
    parts: Some(spec_and_bare_status!()),
    rules: Rules {
        create: storage_version,
        update: Some(core::unchecked),
        parts: &[("status", storage_version_status)],
        name: storage_version_name,
        unconditional_update: false,
        ..Rules::NONE
    },
    columns: &[
        name(),
        field(
            "CommonEncodingVersion",
            "string",
            "api.apiserverinternal.v1alpha1.StorageVersionStatus.commonEncodingVersion",
            |version| {
                let status = version.status.as_ref();
                let common = status.and_then(|status| status.common_encoding_version.as_deref());
                common.unwrap_or("<unset>").into()
            },
        ),
        field(
            "StorageVersions",
            "string",
            "api.apiserverinternal.v1alpha1.StorageVersionStatus.storageVersions",
            |version| servers(version).into(),
        ),
        age(),
    ],
    ..Kind::BASE
};

fn servers(version: &StorageVersion) -> String {
    let status = version.status.as_ref();
    let all = status.and_then(|status| status.storage_versions.as_deref()).unwrap_or_default();
    let shown = all.iter().map(|one| format!("{}={}", one.api_server_id, one.encoding_version));
    if all.is_empty() { "<unset>".into() } else { crate::print::first_three(shown.collect()) }
}

/// `GROUP.RESOURCE`
fn storage_version_name(name: &str) -> Vec<String> {
    let Some((group, resource)) = name.rsplit_once('.') else {
        return vec!["name must be in the form of <group>.<resource>".into()];
    };
    let of = |part: &str, wrong: Vec<String>| -> Vec<String> {
        wrong.into_iter().map(|why| format!("the {part} segment {why}")).collect()
    };
    let mut wrong = of("group", names::dns1123_subdomain(group));
    wrong.extend(of("resource", names::dns1035_label(resource)));
    wrong
}

fn storage_version(at: &At<'_>) {
    let status = at.get("status");
    let servers = status.get("storageVersions");
    servers.unique(|one| one.get("apiServerID").str().to_owned(), |one| one.get("apiServerID"));
    servers.items().for_each(|one| server_version(&one));
    let mut encodings = servers.items().map(|one| one.get("encodingVersion").str());
    let first = encodings.next();
    let common = first.filter(|first| encodings.all(|one| one == *first));
    let told = status.get("commonEncodingVersion");
    match (common, told.value.as_str()) {
        (None, Some(_)) => told.invalid("should be nil if servers do not agree on the same encoding version, or if there is no server reporting the supported versions yet"),
        (Some(common), None) => {
            told.invalid(&format!("the common encoding version is {common}"));
        }
        (Some(common), Some(told_version)) if common != told_version => {
            told.invalid(&format!("the actual common encoding version is {common}"));
        }
        _ => {}
    }
    let mut seen = HashMap::new();
    for (index, one) in status.get("conditions").items().enumerate() {
        // Upstream's paths leave the list's name out.
        let one = one.called(status.path.index(index));
        let kind = one.get("type");
        let first = *seen.entry(kind.str()).or_insert(index);
        if first < index {
            kind.invalid(&format!(
                "the type of the condition is not unique, it also appears in conditions[{first}]"
            ));
        }
        kind.name(names::qualified_name);
        one.get("status").name(names::qualified_name);
        one.get("reason").need();
        one.get("message").need();
    }
}

fn storage_version_status(at: &At<'_>, _old: &At<'_>) {
    storage_version(at);
}

fn server_version(at: &At<'_>) {
    at.get("apiServerID").name(names::dns1123_subdomain);
    let encoding = at.get("encodingVersion");
    let wrong = api_version(encoding.str());
    if !wrong.is_empty() {
        encoding.invalid_text(&wrong.join(","));
    }
    let [decodable, served] = ["decodableVersions", "servedVersions"].map(|field| at.get(field));
    let known: HashSet<&str> = decodable.strings().into_iter().collect();
    for one in decodable.items().chain(served.items()) {
        let wrong = api_version(one.str());
        if !wrong.is_empty() {
            one.invalid(&wrong.join(","));
        }
    }
    if !known.contains(encoding.str()) {
        let why = format!("decodableVersions must include encodingVersion {}", encoding.str());
        decodable.invalid(&why);
    }
    for one in served.items().filter(|one| !known.contains(one.str())) {
        let listed = decodable.strings().join(" ");
        one.invalid(&format!(
            "individual served version : {} must be included in decodableVersions : [{listed}]",
            one.str()
        ));
    }
}

/// `v1`, `apps/v1`
fn api_version(text: &str) -> Vec<String> {
    const FORM: &str = "an apiVersion is a DNS-1035 label, which must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyVersion')";
    let part = |name: &str, text: &str, check: NameCheck| -> Vec<String> {
        let wrong = if text.is_empty() { vec!["must be non-empty".into()] } else { check(text) };
        wrong.into_iter().map(|why| format!("{name} part: {why}")).collect()
    };
    match text.split('/').collect::<Vec<_>>()[..] {
        [version] => part("version", version, names::dns1035_label),
        [group, version] => {
            let mut wrong = part("group", group, names::dns1123_subdomain);
            wrong.extend(part("version", version, names::dns1035_label));
            wrong
        }
        _ => vec![FORM.into()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_versions_have_names() {
        assert!(storage_version_name("apps.deployments").is_empty());
        assert_eq!(storage_version_name("pods").len(), 1);
        assert_eq!(storage_version_name("Apps.Pods").len(), 2);
    }
}
