//! Custom resources: the registrations of a CRD's versions.
//!
//! In: a CRD whose names are accepted. Out: one row per served version, on the same write path as
//! any other ([`apiserver::resource::Resource`] with `custom`): the codec prunes, the strategy
//! defaults and validates, and objects are converted when they are stored and read.
//!
//! Invariant: nothing here holds the CRD itself. A [`Family`] has only what its registrations need.

mod codec;
mod conversion;
pub mod jsonpath;
mod ownership;
mod print;
mod scale;
mod strategy;
mod webhook;

use std::sync::Arc;

use apiserver::discovery::version_rank;
use apiserver::resource::{
    ALL_VERBS, Behaviour, Column, Resource, Settings, Storage, Subresource, SubresourceKind,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionSpec, CustomResourceDefinitionVersion,
};

use crate::definition;
use crate::openapi::definition_name;
use crate::schema::{Schema, rules};
use jsonpath::JsonPath;
use ownership::Ownership;
use scale::Scaling;
use webhook::Webhook;
pub use webhook::{Post, PostError};

/// The fields that all versions of a custom kind share.
pub struct Family {
    pub group: String,
    pub kind: String,
    pub list_kind: String,
    pub namespaced: bool,
    /// The storage version, such as `example.com/v1`.
    pub stored: String,
    pub versions: Vec<Version>,
    pub webhook: Option<Webhook>,
    /// Reports whether stored bytes can be served unchanged: only if the CRD has not changed since they
    /// were stored.
    pub is_settled: bool,
}

/// One version of a custom kind.
pub struct Version {
    pub name: String,
    /// `example.com/v1`
    pub api_version: String,
    /// `None` if all fields are kept.
    pub schema: Option<Schema>,
    pub has_rules: bool,
    /// The warning for requests of a deprecated version.
    pub deprecation: Option<Box<str>>,
    pub has_status: bool,
    pub scaling: Option<Scaling>,
    pub columns: Vec<PrintedColumn>,
    pub selectable: Vec<Selectable>,
}

/// A column of `kubectl get`.
pub struct PrintedColumn {
    pub column: Column,
    pub path: JsonPath,
}

/// A selectable field, without its leading dot.
pub struct Selectable {
    pub name: String,
    pub path: JsonPath,
}

impl Family {
    pub fn of(crd: &CustomResourceDefinition, post: &Post) -> Self {
        let spec = &crd.spec;
        let preserves = spec.preserve_unknown_fields == Some(true);
        let api_version = |version: &str| format!("{}/{version}", spec.group);
        let stored = definition::storage_version(spec).unwrap_or_default();
        let version = |version: &CustomResourceDefinitionVersion| Version {
            deprecation: deprecation(version, spec),
            ..Version::of(version, api_version(&version.name), preserves)
        };
        Self {
            group: spec.group.clone(),
            kind: spec.names.kind.clone(),
            list_kind: spec.names.list_kind.clone().unwrap_or_default(),
            namespaced: spec.scope != "Cluster",
            stored: api_version(stored),
            versions: spec.versions.iter().map(version).collect(),
            webhook: Webhook::of(crd, post),
            is_settled: crd.metadata.generation == Some(1) && spec.versions.len() == 1,
        }
    }

    pub fn version(&self, api_version: &str) -> Option<&Version> {
        self.versions.iter().find(|version| version.api_version == api_version)
    }
}

/// Names the best version that is not deprecated, if there is one.
fn deprecation(
    version: &CustomResourceDefinitionVersion,
    spec: &CustomResourceDefinitionSpec,
) -> Option<Box<str>> {
    if version.deprecated != Some(true) {
        return None;
    }
    if let Some(text) = &version.deprecation_warning {
        return Some(text.as_str().into());
    }
    let (group, kind) = (&spec.group, &spec.names.kind);
    let newer = spec
        .versions
        .iter()
        .filter(|one| one.served && one.deprecated != Some(true))
        .filter(|one| version_rank(&one.name) < version_rank(&version.name))
        .min_by_key(|one| version_rank(&one.name));
    let hint = newer.map(|newer| format!("; use {group}/{} {kind}", newer.name));
    let text = format!("{group}/{} {kind} is deprecated{}", version.name, hint.unwrap_or_default());
    Some(text.into())
}

impl Version {
    fn of(from: &CustomResourceDefinitionVersion, api_version: String, preserves: bool) -> Self {
        let root = from.schema.as_ref().and_then(|schema| schema.open_api_v3_schema.as_ref());
        let subresources = from.subresources.as_ref();
        let columns = from.additional_printer_columns.as_deref().unwrap_or_default();
        let selectable = from.selectable_fields.iter().flatten().map(|field| Selectable {
            name: field.json_path.trim_start_matches('.').into(),
            path: JsonPath::parse(&field.json_path),
        });
        let schema = root.filter(|_| !preserves).map(Schema::new);
        Self {
            name: from.name.clone(),
            api_version,
            deprecation: None,
            has_rules: schema.as_ref().is_some_and(rules::has_rules),
            schema,
            has_status: subresources.is_some_and(|one| one.status.is_some()),
            scaling: subresources.and_then(|one| one.scale.as_ref()).map(Scaling::of),
            columns: print::columns(columns),
            selectable: selectable.collect(),
        }
    }
}

/// Prepares a CRD's spec for serving. Registrations share strategies: a watch cache sees by the same
/// strategy that its kind has not changed.
pub struct Kinds {
    family: Arc<Family>,
    strategies: Vec<Arc<strategy::Custom>>,
}

impl Kinds {
    pub fn of(crd: &CustomResourceDefinition, post: &Post) -> Self {
        let family = Arc::new(Family::of(crd, post));
        let strategy = |index| Arc::new(strategy::Custom { family: family.clone(), index });
        let strategies = (0..family.versions.len()).map(strategy).collect();
        Self { family, strategies }
    }

    /// The registrations of served versions. A terminating CRD only allows reads and deletes.
    pub fn rows(&self, crd: &CustomResourceDefinition, is_terminating: bool) -> Vec<Resource> {
        let served = |index: &usize| crd.spec.versions[*index].served;
        let indexes = (0..self.family.versions.len()).filter(served);
        indexes.map(|index| self.row(crd, index, is_terminating)).collect()
    }

    /// The registration of the storage version, served or not. The deletion of all instances uses it.
    pub fn stored_row(&self, crd: &CustomResourceDefinition) -> Option<Resource> {
        let family = &self.family;
        let index = family.versions.iter().position(|one| one.api_version == family.stored)?;
        Some(self.row(crd, index, true))
    }

    fn row(&self, crd: &CustomResourceDefinition, index: usize, is_terminating: bool) -> Resource {
        const TERMINATING: &[&str] = &["delete", "deletecollection", "get", "list", "watch"];
        let family = &self.family;
        let names = crd.status.as_ref().and_then(|status| status.accepted_names.as_ref());
        let names = names.unwrap_or(&crd.spec.names);
        let version = &family.versions[index];
        let plural = crd.spec.names.plural.clone();
        Resource {
            group: family.group.clone(),
            version: version.name.clone(),
            kind: family.kind.clone(),
            list_kind: family.list_kind.clone(),
            singular: names.singular.clone().unwrap_or_default(),
            short_names: names.short_names.clone().unwrap_or_default(),
            categories: names.categories.clone().unwrap_or_default(),
            namespaced: family.namespaced,
            verbs: if is_terminating { TERMINATING } else { ALL_VERBS }.to_vec(),
            storage: Storage::Stored(format!("{}/{plural}", family.group)),
            plural,
            codec: Arc::new(codec::Custom { family: family.clone(), index }),
            conversion: conversion::of(family, index),
            strategy: self.strategies[index].clone(),
            settings: Settings {
                has_generation: true,
                unconditional_update: false,
                ..Settings::DEFAULT
            },
            allocator: None,
            fields: strategy::fields(family, index),
            table: self.strategies[index].clone(),
            subresources: subresources(family, index),
            deprecation: version.deprecation.as_deref().map(|text| text.to_owned().into()),
            custom: true,
            definition: definition_name(&family.group, &version.name, &family.kind),
            schema: Some(Arc::new(Ownership::new(family.clone(), index))),
        }
    }
}

fn subresources(family: &Arc<Family>, index: usize) -> Vec<Subresource> {
    const VERBS: &[&str] = &["get", "patch", "update"];
    let version = &family.versions[index];
    let mut all = vec![];
    if version.scaling.is_some() {
        all.push(Subresource {
            name: "scale",
            kind: Some(SubresourceKind { group: "autoscaling", version: "v1", kind: "Scale" }),
            verbs: VERBS,
            behaviour: Behaviour::View(Arc::new(scale::ScaleOf { family: family.clone(), index })),
        });
    }
    if version.has_status {
        let behaviour = Behaviour::Part;
        all.push(Subresource { name: "status", kind: None, verbs: VERBS, behaviour });
    }
    all
}
