//! The metadata of every kind: the server sets, keeps and validates it.
//! Upstream: `k8s.io/apimachinery/pkg/api/validation`, `k8s.io/apiserver/pkg/registry/rest`.

use machinery::field::{FieldErrors, Path};
use machinery::names;
use machinery::status::Reason;
use machinery::{Object, ObjectMeta, OwnerReference, Time};
use serde_json::Value;

use super::store_key;
use crate::StatusError;
use crate::query::parse_unsigned;
use crate::request::{Key, RequestContext};
use crate::resource::{MetadataPass, Resource};

/// Maximum size of all annotations of an object. Upstream: 256 KiB.
const ANNOTATIONS_LIMIT: usize = 256 << 10;
/// `generateName` may be this long: five random characters follow.
const GENERATED_PREFIX_LIMIT: usize = 58;

/// Clears the fields that a creator cannot set.
pub(super) fn wipe_system_fields(meta: &mut ObjectMeta) {
    meta.uid = None;
    meta.creation_timestamp = None;
    meta.deletion_timestamp = None;
    meta.deletion_grace_period_seconds = None;
    meta.self_link = None;
}

/// Sets the fields of a new object, whatever its creator wrote.
pub(super) fn fill_new(row: &Resource, key: &Key, object: &mut dyn Object) {
    let generation = row.settings.has_generation.then_some(1);
    let meta = object.meta_mut();
    if row.namespaced {
        meta.namespace = Some(key.namespace.clone());
    } else {
        meta.namespace = None;
    }
    if meta.name.as_deref().unwrap_or_default().is_empty() {
        meta.name =
            meta.generate_name.as_deref().filter(|prefix| !prefix.is_empty()).map(generated_name);
    }
    meta.uid = Some(base::rng::uuid());
    meta.creation_timestamp = Some(Time(base::clock::now_seconds()));
    // Kinds without a generation keep the given value.
    meta.generation = generation.or(meta.generation);
    tidy(meta);
}

fn generated_name(prefix: &str) -> String {
    let end =
        prefix.char_indices().map(|(at, _)| at).nth(GENERATED_PREFIX_LIMIT).unwrap_or(prefix.len());
    format!("{}{}", &prefix[..end], base::rng::alphanumeric(5))
}

/// Removes empty maps and lists, as Go does; otherwise equal objects would differ.
fn tidy(meta: &mut ObjectMeta) {
    meta.labels.take_if(|labels| labels.is_empty());
    meta.annotations.take_if(|annotations| annotations.is_empty());
    meta.finalizers.take_if(|finalizers| finalizers.is_empty());
    meta.owner_references.take_if(|owners| owners.is_empty());
    meta.generate_name.take_if(|prefix| prefix.is_empty());
    meta.managed_fields.take_if(|fields| fields.is_empty());
}

/// For [`drop_repeated_owners`]: owners that admission added.
pub(super) const AFTER_ADMISSION: &str = " after mutating admission happens";

/// Drops owners that are listed twice, with a warning.
pub(super) fn drop_repeated_owners(ctx: &RequestContext, meta: &mut ObjectMeta, when: &str) {
    let Some(owners) = meta.owner_references.as_mut().filter(|owners| owners.len() > 1) else {
        return;
    };
    let mut kept: Vec<OwnerReference> = vec![];
    let mut repeated = vec![];
    for owner in owners.drain(..) {
        if kept.contains(&owner) {
            repeated.push(owner.uid);
        } else {
            kept.push(owner);
        }
    }
    *owners = kept;
    if !repeated.is_empty() {
        ctx.warn(format!(
            ".metadata.ownerReferences contains duplicate entries{when}; API server dedups owner references in 1.20+, \
             and may reject such requests as early as 1.24; please fix your requests; duplicate UID(s) observed: {}",
            repeated.join(", ")
        ));
    }
}

/// A patch of a custom resource keeps its kind and version.
pub(super) fn check_custom_type(
    row: &Resource,
    patched: &Value,
    shown: &dyn Object,
) -> Result<(), StatusError> {
    let mut errors = FieldErrors::default();
    for (field, own) in [("kind", shown.kind()), ("apiVersion", shown.api_version())] {
        let given = patched[field].as_str().unwrap_or(own);
        if row.custom && given != own {
            errors.invalid(&Path::new(field), given, &format!("must be {own}"));
        }
    }
    match errors.is_empty() {
        true => Ok(()),
        false => {
            // Upstream's error is about the kind that the patch names.
            let kind = patched["kind"].as_str().unwrap_or(&row.kind);
            Err(StatusError::invalid(&row.group, kind, shown.name(), errors))
        }
    }
}

/// Copies the fields that an update cannot change from the old state.
pub(super) fn carry_over(object: &mut dyn Object, old: &dyn Object) {
    let (meta, before) = (object.meta_mut(), old.meta());
    meta.uid = before.uid.clone();
    meta.creation_timestamp = before.creation_timestamp.clone();
    // Only validation refuses an update that begins a deletion, or changes its grace period.
    if before.deletion_timestamp.is_some() {
        meta.deletion_timestamp = before.deletion_timestamp.clone();
    }
    meta.deletion_grace_period_seconds =
        meta.deletion_grace_period_seconds.or(before.deletion_grace_period_seconds);
    meta.generation = before.generation;
    meta.self_link = None;
    if meta.generate_name.is_none() {
        meta.generate_name = before.generate_name.clone();
    }
    tidy(meta);
}

/// Refuses a patch that changes name, namespace or uid; the uid with validation's error.
pub(super) fn check_patched(
    row: &Resource,
    key: &Key,
    object: &mut dyn Object,
    old: &dyn Object,
) -> Result<(), StatusError> {
    check_place(row, key, object)?;
    let uid = object.meta().uid.as_deref().unwrap_or_default();
    if uid.is_empty() || uid == old.uid() {
        return Ok(());
    }
    let mut errors = FieldErrors::default();
    // Once for all kinds, and in the kind's own validation.
    let passes = row.settings.metadata_rules.update;
    let updates = passes.iter().filter(|pass| **pass == MetadataPass::Update).count();
    for _ in 0..=updates {
        errors.invalid(&Path::new("metadata").child("uid"), uid, "field is immutable");
    }
    Err(StatusError::invalid(&row.group, &row.kind, &key.name, errors))
}

/// Checks that a patched object matches the request's name and namespace; missing values are set.
pub(super) fn check_place(
    row: &Resource,
    key: &Key,
    object: &mut dyn Object,
) -> Result<(), StatusError> {
    let namespace = object.namespace();
    if row.namespaced && !namespace.is_empty() && namespace != key.namespace {
        return Err(StatusError::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    object.meta_mut().namespace = row.namespaced.then(|| key.namespace.clone());
    match object.name() {
        "" => Err(StatusError::bad_request(format!(
            "the name of the object ({} based on URL) was undeterminable: name must be provided",
            key.name
        ))),
        name if name == key.name => Ok(()),
        name => Err(StatusError::bad_request(other_name(name, &key.name))),
    }
}

pub(super) fn other_name(found: &str, wanted: &str) -> String {
    format!("the name of the object ({found}) does not match the name on the URL ({wanted})")
}

/// The uid and resourceVersion in an update are preconditions.
pub(super) fn check_preconditions(
    row: &Resource,
    object: &dyn Object,
    old: &dyn Object,
) -> Result<(), StatusError> {
    let (meta, before) = (object.meta(), old.meta());
    let name = old.name();
    match named_revision(meta) {
        None if row.settings.unconditional_update => {}
        None => {
            let mut errors = FieldErrors::default();
            errors.invalid(
                &Path::new("metadata").child("resourceVersion"),
                0,
                "must be specified for an update",
            );
            return Err(StatusError::invalid(&row.group, &row.plural, name, errors));
        }
        version if version == before.resource_version.as_deref() => {}
        Some(version) => return Err(other_version(row, name, version)),
    }
    if let Some(uid) =
        meta.uid.as_deref().filter(|uid| !uid.is_empty() && Some(*uid) != before.uid.as_deref())
    {
        let key = Key::new(old.namespace(), name);
        let why = other_uid(row, &key, uid, before.uid.as_deref().unwrap_or_default());
        return Err(StatusError::conflict(&row.group, &row.plural, name, why));
    }
    Ok(())
}

/// An update's uid is not the object's. Upstream: the store's own error, with the storage key.
pub(super) fn other_uid(row: &Resource, key: &Key, wanted: &str, found: &str) -> String {
    let key = store_key(row, key);
    format!(
        "StorageError: invalid object, Code: 4, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: \
         Precondition failed: UID in precondition: {wanted}, UID in object meta: {found}"
    )
}

/// The revision that an update is for. To upstream's storage, zero is none.
pub(super) fn named_revision(meta: &ObjectMeta) -> Option<&str> {
    let is_one = |version: &&str| !version.is_empty() && parse_unsigned(version) != Ok(0);
    meta.resource_version.as_deref().filter(is_one)
}

/// An update names another revision, or none.
fn other_version(row: &Resource, name: &str, version: &str) -> StatusError {
    match parse_unsigned(version) {
        Ok(_) => modified(row, name),
        Err(why) => StatusError::new(Reason::Unknown, why).with_code(500),
    }
}

/// The conflict of optimistic locking.
pub(super) fn modified(row: &Resource, name: &str) -> StatusError {
    let why = "the object has been modified; please apply your changes to the latest version and try again";
    StatusError::conflict(&row.group, &row.plural, name, why)
}

/// The errors in the metadata of a new object.
pub(super) fn validate_new(row: &Resource, object: &dyn Object) -> FieldErrors {
    let mut errors = FieldErrors::default();
    let path = Path::new("metadata");
    let meta = object.meta();
    validate_prefix(row, object, &path, &mut errors);
    match object.name() {
        "" => errors.required(&path.child("name"), "name or generateName is required"),
        name => {
            let own = row.strategy.own_name_errors(object, name);
            for why in (row.settings.name_errors)(name).into_iter().chain(own) {
                errors.invalid(&path.child("name"), name, &why);
            }
        }
    }
    if row.namespaced && object.namespace().is_empty() {
        errors.required(&path.child("namespace"), "");
    }
    validate_common(row, meta, &path, &mut errors);
    errors
}

fn validate_prefix(row: &Resource, object: &dyn Object, path: &Path, errors: &mut FieldErrors) {
    let prefix = object.meta().generate_name.as_deref().unwrap_or_default();
    if prefix.is_empty() || !row.settings.metadata_rules.checks_prefix {
        return;
    }
    let own = row.strategy.own_name_errors(object, prefix);
    for why in (row.settings.name_errors)(&masked(prefix)).into_iter().chain(own) {
        errors.invalid(&path.child("generateName"), prefix, &why);
    }
}

/// A prefix is validated like a whole name: the last dash is replaced, because other characters follow it.
fn masked(prefix: &str) -> String {
    match prefix.strip_suffix('-') {
        Some(rest) if !rest.is_empty() => format!("{rest}a"),
        _ => prefix.into(),
    }
}

/// Standard finalizers need no domain.
const STANDARD_FINALIZERS: &[&str] = &["kubernetes", "orphan", "foregroundDeletion"];

fn validate_common(row: &Resource, meta: &ObjectMeta, path: &Path, errors: &mut FieldErrors) {
    if let Some(generation) = meta.generation.filter(|generation| *generation < 0) {
        let detail = "must be greater than or equal to 0";
        errors.invalid(&path.child("generation"), generation, detail);
    }
    validate_maps(meta, path, errors);
    validate_owners(meta, path, errors);
    validate_finalizers(meta, path, errors);
    validate_domains(row, meta, path, errors);
}

/// Finalizers without a domain.
fn validate_domains(row: &Resource, meta: &ObjectMeta, path: &Path, errors: &mut FieldErrors) {
    if row.custom || !row.settings.metadata_rules.needs_domains {
        return;
    }
    for (index, name) in meta.finalizers.iter().flatten().enumerate() {
        if !name.contains('/') && !STANDARD_FINALIZERS.contains(&name.as_str()) {
            let detail = "name is neither a standard finalizer name nor is it fully qualified";
            errors.invalid(&path.child("finalizers").index(index), name, detail);
        }
    }
}

/// The errors in the metadata after an update: those that are reported for all kinds, then those of the kind.
pub(super) fn validate_update(
    row: &Resource,
    subresource: &str,
    object: &dyn Object,
    old: &dyn Object,
) -> FieldErrors {
    let mut errors = FieldErrors::default();
    let path = Path::new("metadata");
    let meta = object.meta();
    validate_maps(meta, &path, &mut errors);
    validate_owners(meta, &path, &mut errors);
    validate_finalizers(meta, &path, &mut errors);
    validate_change(meta, old.meta(), &path, &mut errors);
    let rules = row.settings.metadata_rules;
    let passes = if subresource.is_empty() { rules.update } else { rules.part };
    for pass in passes {
        match pass {
            MetadataPass::Whole => {
                validate_prefix(row, object, &path, &mut errors);
                validate_common(row, meta, &path, &mut errors);
            }
            MetadataPass::Update => {
                validate_change(meta, old.meta(), &path, &mut errors);
                validate_domains(row, meta, &path, &mut errors);
            }
        }
    }
    errors
}

/// Upstream: `ValidateObjectMetaAccessorUpdate`.
fn validate_change(meta: &ObjectMeta, before: &ObjectMeta, path: &Path, errors: &mut FieldErrors) {
    if before.deletion_timestamp.is_some() {
        let had = before.finalizers.as_deref().unwrap_or_default();
        let has = meta.finalizers.as_deref().unwrap_or_default();
        let mut added: Vec<&String> = has.iter().filter(|one| !had.contains(one)).collect();
        added.sort_unstable();
        added.dedup();
        if !added.is_empty() {
            let detail = format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers {}",
                go_strings(&added)
            );
            errors.forbidden(&path.child("finalizers"), &detail);
        }
    }
    for (name, now, then) in
        [("name", &meta.name, &before.name), ("namespace", &meta.namespace, &before.namespace)]
    {
        if now != then {
            errors.invalid(&path.child(name), now, "field is immutable");
        }
    }
    if meta.deletion_timestamp != before.deletion_timestamp {
        let at = path.child("deletionTimestamp");
        errors.invalid(&at, &meta.deletion_timestamp, "field is immutable");
    }
    if meta.deletion_grace_period_seconds != before.deletion_grace_period_seconds {
        let at = path.child("deletionGracePeriodSeconds");
        errors.invalid(&at, meta.deletion_grace_period_seconds, "field is immutable");
    }
    validate_maps(meta, path, errors);
    validate_owners(meta, path, errors);
}

/// `[]string{"a", "b"}`, upstream's format of lists.
fn go_strings(texts: &[&String]) -> String {
    let quoted: Vec<String> = texts.iter().map(|text| format!("{text:?}")).collect();
    format!("[]string{{{}}}", quoted.join(", "))
}

fn validate_maps(meta: &ObjectMeta, path: &Path, errors: &mut FieldErrors) {
    for (key, value) in meta.labels.iter().flatten() {
        let path = path.child("labels");
        for why in names::qualified_name(key) {
            errors.invalid(&path, key, &why);
        }
        for why in names::label_value(value) {
            errors.invalid(&path, value, &why);
        }
    }
    let mut size = 0;
    for (key, value) in meta.annotations.iter().flatten() {
        for why in names::qualified_name(&key.to_lowercase()) {
            errors.invalid(&path.child("annotations"), key, &why);
        }
        size += key.len() + value.len();
    }
    if size > ANNOTATIONS_LIMIT {
        errors.too_long(&path.child("annotations"), ANNOTATIONS_LIMIT);
    }
}

fn validate_finalizers(meta: &ObjectMeta, path: &Path, errors: &mut FieldErrors) {
    for finalizer in meta.finalizers.iter().flatten() {
        for why in names::qualified_name(finalizer) {
            errors.invalid(&path.child("finalizers"), finalizer, &why);
        }
    }
    let has = |name: &str| meta.finalizers.iter().flatten().any(|one| one == name);
    if has("orphan") && has("foregroundDeletion") {
        errors.invalid(
            &path.child("finalizers"),
            &meta.finalizers,
            "finalizer orphan and foregroundDeletion cannot be both set",
        );
    }
}

fn validate_owners(meta: &ObjectMeta, path: &Path, errors: &mut FieldErrors) {
    let mut controller: Option<String> = None;
    // Upstream's path has no index.
    let at = path.child("ownerReferences");
    for owner in meta.owner_references.iter().flatten() {
        if version_of(&owner.api_version).is_empty() {
            errors.invalid(
                &at.child("apiVersion"),
                &owner.api_version,
                "version must not be empty",
            );
        }
        for (name, value) in [("kind", &owner.kind), ("name", &owner.name), ("uid", &owner.uid)] {
            if value.is_empty() {
                errors.invalid(&at.child(name), value, "must not be empty");
            }
        }
        if owner.api_version == "v1" && owner.kind == "Event" {
            errors.invalid(
                &at,
                Shown::of(owner),
                "/v1, Kind=Event is disallowed from being an owner",
            );
        }
        if owner.controller == Some(true) {
            let name = format!("{}/{}", owner.kind, owner.name);
            match &controller {
                None => controller = Some(name),
                Some(first) => {
                    let detail = format!(
                        "Only one reference can have Controller set to true. Found \"true\" in references for {first} and {name}"
                    );
                    let all: Vec<Shown> =
                        meta.owner_references.iter().flatten().map(Shown::of).collect();
                    errors.invalid(&at, all, &detail);
                }
            }
        }
    }
}

/// The version of `group/version`; empty if that is not how the text is written. Upstream: `ParseGroupVersion`.
fn version_of(api_version: &str) -> &str {
    match api_version.split_once('/') {
        None => api_version,
        Some((_, version)) if !version.contains('/') => version,
        Some(_) => "",
    }
}

/// An owner as errors show it: in the order of upstream's fields.
#[derive(serde::Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown<'a> {
    api_version: &'a str,
    kind: &'a str,
    name: &'a str,
    uid: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    controller: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_owner_deletion: Option<bool>,
}

impl<'a> Shown<'a> {
    fn of(owner: &'a OwnerReference) -> Self {
        Self {
            api_version: &owner.api_version,
            kind: &owner.kind,
            name: &owner.name,
            uid: &owner.uid,
            controller: owner.controller,
            block_owner_deletion: owner.block_owner_deletion,
        }
    }
}

/// A new object must have no resourceVersion. Upstream's storage parses it: `0` and text that is not a
/// number count as none.
pub(super) fn check_new_version(object: &dyn Object) -> Result<(), StatusError> {
    let version = object.meta().resource_version.as_deref().unwrap_or_default();
    match version.parse::<u64>() {
        Ok(0) | Err(_) => Ok(()),
        Ok(_) => Err(StatusError::new(
            Reason::Unknown,
            "resourceVersion should not be set on objects to be created",
        )
        .without_details()),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;
    use crate::request::UserInfo;
    use crate::resource::MetadataRules;

    /// L: labels, A: annotations, F: finalizers, d: a finalizer without a domain, N: a new finalizer.
    fn reported(rules: MetadataRules, subresource: &str, deletes: bool) -> String {
        let mut row = crate::testing::row::<ConfigMap>("configmaps", &[], true);
        row.settings.metadata_rules = rules;
        let mut old = ConfigMap::default();
        old.metadata.name = Some("a".into());
        old.metadata.deletion_timestamp = deletes.then(|| Time(base::clock::now_seconds()));
        let mut new = old.clone();
        let bad = || Some([("a b".to_owned(), "c".to_owned())].into());
        (new.metadata.labels, new.metadata.annotations) = (bad(), bad());
        new.metadata.finalizers = Some(vec!["a.b/c d".into(), "plain".into()]);
        let errors = validate_update(&row, subresource, &new, &old);
        let letter = |error: &machinery::field::FieldError| match &*error.field {
            "metadata.labels" => 'L',
            "metadata.annotations" => 'A',
            "metadata.finalizers" if error.message.starts_with("Forbidden") => 'N',
            "metadata.finalizers" => 'F',
            "metadata.finalizers[1]" => 'd',
            other => panic!("{other}"),
        };
        errors.0.iter().map(letter).collect()
    }

    #[test]
    fn updates_neither_begin_a_deletion_nor_change_its_grace_period() {
        let row = crate::testing::row::<ConfigMap>("configmaps", &[], true);
        let mut old = ConfigMap::default();
        old.metadata.name = Some("a".into());
        let mut new = old.clone();
        new.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
        new.metadata.deletion_grace_period_seconds = Some(5);
        let check = |new: &ConfigMap, old: &ConfigMap, expected: &[&str]| {
            let mut new = new.clone();
            carry_over(&mut new, old);
            let errors = validate_update(&row, "", &new, old);
            let texts: Vec<String> = errors.0.iter().take(2).map(ToString::to_string).collect();
            assert_eq!(texts, expected);
        };
        let begun = "metadata.deletionTimestamp: Invalid value: \"1970-01-01T00:00:00Z\": field is immutable";
        let grace = "metadata.deletionGracePeriodSeconds: Invalid value: 5: field is immutable";
        check(&new, &old, &[begun, grace]);
        check(&old, &new, &[]);
        check(&new, &new, &[]);
    }

    #[test]
    fn updates_report_errors_as_often_as_upstream() {
        for (rules, expected) in [
            (MetadataRules::FULL, "LAFLALAd"),
            (MetadataRules::PLAIN, "LAFLALA"),
            (MetadataRules::NONE, "LAFLA"),
            (MetadataRules::WHOLE, "LAFLALAFd"),
            (MetadataRules::WHOLE_AND_UPDATE, "LAFLALAFdLAd"),
            (MetadataRules::UPDATE_AND_WHOLE, "LAFLALAdLAFd"),
        ] {
            assert_eq!(reported(rules, "", false), expected, "{rules:?}");
        }
        assert_eq!(reported(MetadataRules::WHOLE, "status", false), "LAFLALAd");
        assert_eq!(reported(MetadataRules::FULL, "", true), "LAFNLANLAd");
    }

    #[test]
    fn repeated_owners_are_dropped_with_a_warning() {
        let row = crate::testing::row::<ConfigMap>("configmaps", &[], true);
        let ctx = RequestContext::new(UserInfo::default(), row.into(), "");
        let owner = |uid: &str, name: &str| OwnerReference {
            uid: uid.into(),
            name: name.into(),
            ..OwnerReference::default()
        };
        let mut meta = ObjectMeta {
            owner_references: Some(vec![owner("u", "a"), owner("u", "b"), owner("u", "a")]),
            ..ObjectMeta::default()
        };
        drop_repeated_owners(&ctx, &mut meta, "");
        assert_eq!(meta.owner_references.as_deref(), Some(&[owner("u", "a"), owner("u", "b")][..]));
        let warnings = ctx.take_warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].ends_with("duplicate UID(s) observed: u"), "{warnings:?}");
        drop_repeated_owners(&ctx, &mut meta, AFTER_ADMISSION);
        assert!(ctx.take_warnings().is_empty());
    }

    #[test]
    fn a_patch_keeps_the_type_of_a_custom_resource() {
        let mut row = crate::testing::row::<ConfigMap>("configmaps", &[], true);
        row.custom = true;
        let shown = ConfigMap::default();
        let check = |patched: Value| check_custom_type(&row, &patched, &shown);
        assert!(check(serde_json::json!({ "kind": "ConfigMap", "apiVersion": "v1" })).is_ok());
        let error = check(serde_json::json!({ "kind": "Other", "apiVersion": "v1" }));
        let error = error.expect_err("another kind");
        assert_eq!(error.code, 422);
        assert!(error.message.ends_with("kind: Invalid value: \"Other\": must be ConfigMap"));
    }

    #[test]
    fn generations_are_not_negative_and_some_prefixes_are_unchecked() {
        let mut row = crate::testing::row::<ConfigMap>("configmaps", &[], true);
        let mut object = ConfigMap::default();
        object.metadata.name = Some("a".into());
        object.metadata.namespace = Some("b".into());
        object.metadata.generation = Some(-1);
        object.metadata.generate_name = Some("A b".into());
        let fields = |row: &Resource| -> Vec<String> {
            validate_new(row, &object).0.iter().map(|error| error.field.clone()).collect()
        };
        row.settings.name_errors = names::dns1123_subdomain;
        assert_eq!(fields(&row), ["metadata.generateName", "metadata.generation"]);
        row.settings.metadata_rules.checks_prefix = false;
        assert_eq!(fields(&row), ["metadata.generation"]);
    }
}
