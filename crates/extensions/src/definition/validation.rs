//! Validates CustomResourceDefinitions, with upstream's messages in upstream's order.
//! Upstream: `apiextensions/validation`.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceConversion, CustomResourceDefinition, CustomResourceDefinitionNames,
    CustomResourceDefinitionSpec, CustomResourceDefinitionVersion, CustomResourceSubresources,
    JSONSchemaProps, WebhookClientConfig,
};
use machinery::field::{FieldErrors, Path};
use machinery::names;

use super::hoisted::{Hoisted, shown};
use super::{columns, conditions, defaults, rules, schemas, selectable, structural};

const APPROVED: &str = "api-approved.kubernetes.io";

/// The name follows from the spec.
pub fn name(crd: &CustomResourceDefinition, name: &str) -> Vec<String> {
    if name == format!("{}.{}", crd.spec.names.plural, crd.spec.group) {
        vec![]
    } else {
        vec![r#"must be spec.names.plural+"."+spec.group"#.into()]
    }
}

pub fn create(crd: &CustomResourceDefinition) -> FieldErrors {
    let mut errors = FieldErrors::default();
    check_spec(&crd.spec, true, &mut errors);
    check_status(crd, &mut errors);
    check_approval(crd, None, &mut errors);
    check_preserving(crd, None, &mut errors);
    errors
}

pub fn update(crd: &CustomResourceDefinition, old: &CustomResourceDefinition) -> FieldErrors {
    let mut errors = FieldErrors::default();
    let path = Path::new("spec");
    let is_established = conditions::is_true(old, "Established");
    check_spec(&crd.spec, !is_established, &mut errors);
    let (spec, before) = (&crd.spec, &old.spec);
    let mut immutable = |now: &str, then: &str, path: Path| {
        if now != then {
            errors.invalid(&path, now, "field is immutable");
        }
    };
    let names = path.child("names");
    if is_established {
        immutable(&spec.scope, &before.scope, path.child("scope"));
        immutable(&spec.names.kind, &before.names.kind, names.child("kind"));
    }
    immutable(&spec.group, &before.group, path.child("group"));
    immutable(&spec.names.plural, &before.names.plural, names.child("plural"));
    check_status(crd, &mut errors);
    check_approval(crd, Some(old), &mut errors);
    check_preserving(crd, Some(old), &mut errors);
    errors
}

pub fn status(crd: &CustomResourceDefinition) -> FieldErrors {
    let mut errors = FieldErrors::default();
    check_accepted(crd, &mut errors);
    errors
}

fn root(version: &CustomResourceDefinitionVersion) -> Option<&JSONSchemaProps> {
    version.schema.as_ref()?.open_api_v3_schema.as_ref()
}

fn check_spec(spec: &CustomResourceDefinitionSpec, any_bundle: bool, errors: &mut FieldErrors) {
    let path = Path::new("spec");
    let hoisted = Hoisted::of(spec);
    let group_path = path.child("group");
    let wrong = names::dns1123_subdomain(&spec.group);
    if spec.group.is_empty() {
        errors.required(&group_path, "");
    } else if !wrong.is_empty() {
        errors.invalid(&group_path, &spec.group, &wrong.join(","));
    } else if !spec.group.contains('.') {
        errors.invalid(&group_path, &spec.group, "should be a domain with at least one dot");
    }
    match spec.scope.as_str() {
        "" => errors.required(&path.child("scope"), ""),
        "Cluster" | "Namespaced" => {}
        other => errors.not_supported(&path.child("scope"), other, &["Cluster", "Namespaced"]),
    }
    for (index, version) in spec.versions.iter().enumerate() {
        if root(version).is_none() {
            let path = path.child("versions").index(index);
            errors.required(&path.child("schema").child("openAPIV3Schema"), "");
        }
    }
    check_versions(spec, hoisted, &path, errors);
    // Upstream has the first version's name twice.
    if let Some(first) = spec.versions.first() {
        let wrong = names::dns1035_label(&first.name);
        if !wrong.is_empty() {
            errors.invalid(&path.child("version"), &first.name, &wrong.join(","));
        }
    }
    let names = &spec.names;
    let text = |name: &Option<String>| name.clone().unwrap_or_default();
    let names_path = path.child("names");
    for (name, value) in [
        ("plural", &names.plural),
        ("singular", &text(&names.singular)),
        ("kind", &names.kind),
        ("listKind", &text(&names.list_kind)),
    ] {
        if value.is_empty() {
            errors.required(&names_path.child(name), "");
        }
    }
    check_names(names, &names_path, errors);
    check_shared(spec, hoisted, &path, errors);
    if let Some(conversion) = &spec.conversion {
        check_conversion(conversion, any_bundle, &path.child("conversion"), errors);
    }
}

fn check_versions(
    spec: &CustomResourceDefinitionSpec,
    hoisted: Hoisted,
    path: &Path,
    errors: &mut FieldErrors,
) {
    let path = path.child("versions");
    let mut seen: Vec<&str> = vec![];
    for (index, version) in spec.versions.iter().enumerate() {
        let path = path.index(index);
        let wrong = names::dns1035_label(&version.name);
        if !wrong.is_empty() {
            errors.invalid(&path.child("name"), &version.name, &wrong.join(","));
        }
        check_deprecation(version, &path.child("deprecationWarning"), errors);
        if !hoisted.schema {
            check_schema(version, has_status(version), &path.child("schema"), errors);
        }
        if let Some(subresources) = version.subresources.as_ref().filter(|_| !hoisted.subresources)
        {
            columns::check_subresources(subresources, &path.child("subresources"), errors);
        }
        if !hoisted.columns {
            check_columns(version, &path, errors);
        }
        if !hoisted.selectable {
            check_selectable(version, &path, errors);
        }
        seen.push(&version.name);
    }
    let count = seen.len();
    seen.sort_unstable();
    seen.dedup();
    if seen.len() != count {
        errors.invalid(&path, shown(spec, hoisted), "must contain unique version names");
    }
    if spec.versions.iter().filter(|version| version.storage).count() != 1 {
        let detail = "must have exactly one version marked as storage version";
        errors.invalid(&path, shown(spec, hoisted), detail);
    }
}

/// Fields that all versions share are checked once, at the path of the spec.
fn check_shared(
    spec: &CustomResourceDefinitionSpec,
    hoisted: Hoisted,
    path: &Path,
    errors: &mut FieldErrors,
) {
    let Some(version) = spec.versions.first() else { return };
    if hoisted.schema {
        let has_status = spec.versions.iter().any(has_status);
        check_schema(version, has_status, &path.child("validation"), errors);
    }
    if let Some(subresources) = version.subresources.as_ref().filter(|_| hoisted.subresources) {
        columns::check_subresources(subresources, &path.child("subresources"), errors);
    }
    if hoisted.columns {
        check_columns(version, path, errors);
    }
    if hoisted.selectable {
        check_selectable(version, path, errors);
    }
}

fn has_status(version: &CustomResourceDefinitionVersion) -> bool {
    let of = |subresources: &CustomResourceSubresources| subresources.status.is_some();
    version.subresources.as_ref().is_some_and(of)
}

fn check_columns(version: &CustomResourceDefinitionVersion, path: &Path, errors: &mut FieldErrors) {
    for (index, column) in version.additional_printer_columns.iter().flatten().enumerate() {
        let path = path.child("additionalPrinterColumns").index(index);
        columns::check_column(column, &path, errors);
    }
}

fn check_selectable(
    version: &CustomResourceDefinitionVersion,
    path: &Path,
    errors: &mut FieldErrors,
) {
    let fields = version.selectable_fields.as_deref().unwrap_or_default();
    if fields.is_empty() {
        return;
    }
    let path = path.child("selectableFields");
    match root(version) {
        Some(schema) => selectable::check(fields, schema, &path, errors),
        None => errors.invalid(&path, "", "may only be set when validations.schema is included"),
    }
}

fn check_deprecation(
    version: &CustomResourceDefinitionVersion,
    path: &Path,
    errors: &mut FieldErrors,
) {
    let Some(warning) = version.deprecation_warning.as_deref() else { return };
    if version.deprecated != Some(true) {
        return errors.invalid(path, warning, "can only be set for deprecated versions");
    }
    if warning.len() > 256 {
        errors.invalid(path, warning, "must be <= 256 characters long");
    }
    if warning.is_empty() {
        errors.invalid(path, warning, "must not be an empty string");
    }
    if let Some((at, _)) = warning.char_indices().find(|(_, c)| c.is_control()) {
        let detail = format!(
            "must only contain printable UTF-8 characters; non-printable character found at index {at}"
        );
        errors.invalid(path, warning, &detail);
    }
}

/// Keywords at the root that the server would not apply to the status alone.
const NOT_AT_ROOT: &[&str] = &[
    "default",
    "enum",
    "maxProperties",
    "minProperties",
    "allOf",
    "oneOf",
    "anyOf",
    "not",
    "additionalProperties",
    "patternProperties",
    "dependencies",
    "additionalItems",
    "definitions",
    "nullable",
    "id",
    "$schema",
    "$ref",
    "x-kubernetes-embedded-resource",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
    "x-kubernetes-map-type",
];
const AT_ROOT: &str = "[Description Type Format Title Maximum ExclusiveMaximum Minimum ExclusiveMinimum MaxLength MinLength Pattern MaxItems MinItems UniqueItems MultipleOf Required Items Properties ExternalDocs Example XPreserveUnknownFields XValidations]";

fn check_schema(
    version: &CustomResourceDefinitionVersion,
    has_status: bool,
    path: &Path,
    errors: &mut FieldErrors,
) {
    let Some(schema) = root(version) else { return };
    let path = path.child("openAPIV3Schema");
    let kind = schemas::kind(schema);
    if has_status {
        if !kind.is_empty() && kind != "object" {
            let detail = "only \"object\" is allowed as the type at the root of the schema if the status subresource is enabled";
            errors.invalid(&path.child("type"), kind, detail);
        }
        let json = serde_json::json!(schema);
        let is_set = |name: &&&str| json.get(**name).is_some_and(|value| *value != false);
        if NOT_AT_ROOT.iter().find(is_set).is_some() {
            let detail = format!(
                "only {AT_ROOT} fields are allowed at the root of the schema if the status subresource is enabled"
            );
            errors.invalid(&path, &json, &detail);
        }
    }
    if schemas::is(schema.nullable) {
        errors.forbidden(&path.child("nullable"), "nullable cannot be true at the root");
    }
    // Upstream makes no structural schema of one with such fields.
    let is_foreign = schemas::any(schema, &mut schemas::has_unsupported);
    let mut wrong =
        if is_foreign { FieldErrors::default() } else { structural::check(schema, &path) };
    if wrong.is_empty() {
        wrong = defaults::check(schema, &path);
    }
    wrong.append(schemas::check(schema, &path));
    // Errors of rules are reported only once the fields that they use are valid.
    if wrong.is_empty() {
        wrong = rules::check(schema, &path);
    }
    errors.append(wrong);
}

fn check_names(names: &CustomResourceDefinitionNames, path: &Path, errors: &mut FieldErrors) {
    let singular = names.singular.as_deref().unwrap_or_default();
    let list_kind = names.list_kind.as_deref().unwrap_or_default();
    let mut check = |path: Path, given: &str, text: &str, words: &str| {
        let wrong = names::dns1035_label(text);
        if !text.is_empty() && !wrong.is_empty() {
            errors.invalid(&path, given, &format!("{words}{}", wrong.join(",")));
        }
    };
    let mixed = "may have mixed case, but should otherwise match: ";
    check(path.child("plural"), &names.plural, &names.plural, "");
    check(path.child("singular"), singular, singular, "");
    check(path.child("kind"), &names.kind, &names.kind.to_lowercase(), mixed);
    check(path.child("listKind"), list_kind, &list_kind.to_lowercase(), mixed);
    for (index, name) in names.short_names.iter().flatten().enumerate() {
        check(path.child("shortNames").index(index), name, name, "");
    }
    for (index, name) in names.categories.iter().flatten().enumerate() {
        check(path.child("categories").index(index), name, name, "");
    }
    if !names.kind.is_empty() && names.kind == list_kind {
        let detail = "kind and listKind may not be the same";
        errors.invalid(&path.child("listKind"), list_kind, detail);
    }
}

fn check_conversion(
    conversion: &CustomResourceConversion,
    any_bundle: bool,
    path: &Path,
    errors: &mut FieldErrors,
) {
    match conversion.strategy.as_str() {
        "" => errors.required(&path.child("strategy"), ""),
        "None" | "Webhook" => {}
        other => errors.not_supported(&path.child("strategy"), other, &["None", "Webhook"]),
    }
    let webhook = conversion.webhook.as_ref();
    let client = webhook.and_then(|webhook| webhook.client_config.as_ref());
    let versions =
        webhook.map(|webhook| webhook.conversion_review_versions.as_slice()).unwrap_or_default();
    let (client_path, versions_path) =
        (path.child("webhookClientConfig"), path.child("conversionReviewVersions"));
    if conversion.strategy != "Webhook" {
        let detail = "should not be set when strategy is not set to Webhook";
        if client.is_some() {
            errors.forbidden(&client_path, detail);
        }
        if !versions.is_empty() {
            errors.forbidden(&versions_path, detail);
        }
        return;
    }
    match client {
        None => errors.required(&client_path, "required when strategy is set to Webhook"),
        Some(client) => check_client(client, any_bundle, &client_path, errors),
    }
    check_review_versions(versions, &versions_path, errors);
}

fn check_client(
    client: &WebhookClientConfig,
    any_bundle: bool,
    path: &Path,
    errors: &mut FieldErrors,
) {
    match (client.url.as_deref(), &client.service) {
        (Some(url), None) => check_url(url, &path.child("url"), errors),
        (None, Some(service)) => {
            let path = path.child("service");
            if service.name.is_empty() {
                errors.required(&path.child("name"), "service name is required");
            }
            if service.namespace.is_empty() {
                errors.required(&path.child("namespace"), "service namespace is required");
            }
            let port = service.port.unwrap_or(443);
            if !(1..=65535).contains(&port) {
                let detail = "port is not valid: must be between 1 and 65535, inclusive";
                errors.invalid(&path.child("port"), port, detail);
            }
            if let Some(text) = service.path.as_deref().filter(|text| !text.starts_with('/')) {
                errors.invalid(&path.child("path"), text, "must start with a '/'");
            }
        }
        _ => errors.required(path, "exactly one of url or service is required"),
    }
    let bundle = client.ca_bundle.as_ref().filter(|bundle| !bundle.0.is_empty());
    if let Some(bundle) = bundle.filter(|_| !any_bundle) {
        let is_pem = std::str::from_utf8(&bundle.0)
            .is_ok_and(|text| text.contains("-----BEGIN CERTIFICATE-----"));
        if !is_pem {
            let detail = "unable to load root certificates: unable to parse bytes as PEM block";
            errors.invalid(&path.child("caBundle"), bundle, detail);
        }
    }
}

/// Upstream: `apiserver/pkg/util/webhook.ValidateWebhookURL`.
fn check_url(url: &str, path: &Path, errors: &mut FieldErrors) {
    const FORM: &str = "; desired format: https://host[/path]";
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    if scheme != "https" {
        let detail = format!("'https' is the only allowed URL scheme{FORM}");
        errors.invalid(path, scheme, &detail);
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let authority = if scheme.is_empty() { "" } else { &rest[..end] };
    if authority.is_empty() {
        errors.invalid(path, authority, &format!("host must be specified{FORM}"));
    }
    if let Some((user, _)) = authority.split_once('@') {
        errors.invalid(path, user, "user information is not permitted in the URL");
    }
    if let Some((_, fragment)) = rest.split_once('#') {
        errors.invalid(path, fragment, "fragments are not permitted in the URL");
    }
    if let Some((_, query)) = rest.split_once('?') {
        errors.invalid(path, query, "query parameters are not permitted in the URL");
    }
}

fn check_review_versions(versions: &[String], path: &Path, errors: &mut FieldErrors) {
    if versions.is_empty() {
        return errors.required(path, "");
    }
    for (index, version) in versions.iter().enumerate() {
        if versions[..index].contains(version) {
            errors.invalid(&path.index(index), version, "duplicate version");
            continue;
        }
        for why in names::dns1035_label(version) {
            errors.invalid(&path.index(index), version, &why);
        }
    }
    if !versions.iter().any(|version| matches!(version.as_str(), "v1" | "v1beta1")) {
        errors.invalid(path, versions, "must include at least one of v1, v1beta1");
    }
}

fn check_accepted(crd: &CustomResourceDefinition, errors: &mut FieldErrors) {
    let names = crd.status.as_ref().and_then(|status| status.accepted_names.as_ref());
    if let Some(names) = names {
        check_names(names, &Path::new("status").child("acceptedNames"), errors);
    }
}

fn check_status(crd: &CustomResourceDefinition, errors: &mut FieldErrors) {
    check_accepted(crd, errors);
    let path = Path::new("status").child("storedVersions");
    let stored = crd.status.as_ref().and_then(|status| status.stored_versions.as_ref());
    let Some(stored) = stored.filter(|stored| !stored.is_empty()) else {
        return errors.invalid(&path, stored, "must have at least one stored version");
    };
    for version in crd.spec.versions.iter().filter(|version| version.storage) {
        if !stored.contains(&version.name) {
            let detail = format!("must have the storage version {}", version.name);
            errors.invalid(&path, stored, &detail);
        }
    }
    for (index, name) in stored.iter().enumerate() {
        if !crd.spec.versions.iter().any(|version| version.name == *name) {
            let detail = format!(
                "missing from spec.versions; {name} was previously a storage version, and must remain in spec.versions until a storage migration ensures no data remains persisted in {name} and removes {name} from status.storedVersions"
            );
            errors.invalid(&path.index(index), name, &detail);
        }
    }
}

/// The approval annotation of a group of the Kubernetes project.
#[derive(PartialEq, Eq)]
enum Approval {
    Missing,
    Invalid,
    Fine,
}

pub fn is_protected(group: &str) -> bool {
    ["k8s.io", "kubernetes.io"]
        .iter()
        .any(|root| group == *root || group.ends_with(&format!(".{root}")))
}

fn approval(crd: &CustomResourceDefinition) -> Approval {
    let text = crd.metadata.annotations.as_ref().and_then(|all| all.get(APPROVED));
    match text.map(String::as_str) {
        None | Some("") => Approval::Missing,
        Some(text) if text.starts_with("unapproved") => Approval::Fine,
        Some(text) => match text.split_once("://") {
            Some((scheme, rest)) if !scheme.is_empty() && !rest.is_empty() => Approval::Fine,
            _ => Approval::Invalid,
        },
    }
}

fn check_approval(
    crd: &CustomResourceDefinition,
    old: Option<&CustomResourceDefinition>,
    errors: &mut FieldErrors,
) {
    if !is_protected(&crd.spec.group) || old.is_some_and(|old| approval(old) == approval(crd)) {
        return;
    }
    let path = Path::new("metadata").child("annotations").key(APPROVED);
    match approval(crd) {
        Approval::Fine => {}
        Approval::Missing => {
            let detail = "protected groups must have approval annotation \"api-approved.kubernetes.io\", see https://github.com/kubernetes/enhancements/pull/1111";
            errors.required(&path, detail);
        }
        Approval::Invalid => {
            let text = crd.metadata.annotations.as_ref().and_then(|all| all.get(APPROVED));
            let detail = "protected groups must have approval annotation \"api-approved.kubernetes.io\" with either a URL or a reason starting with \"unapproved\", see https://github.com/kubernetes/enhancements/pull/1111";
            errors.invalid(&path, text, detail);
        }
    }
}

fn check_preserving(
    crd: &CustomResourceDefinition,
    old: Option<&CustomResourceDefinition>,
    errors: &mut FieldErrors,
) {
    let preserves = |crd: &CustomResourceDefinition| crd.spec.preserve_unknown_fields == Some(true);
    if !old.is_some_and(preserves) && preserves(crd) {
        let path = Path::new("spec").child("preserveUnknownFields");
        let detail = "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in spec.versions[*].schema instead";
        errors.invalid(&path, true, detail);
    }
}
