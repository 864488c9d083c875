//! How every kind behaves: the [`Strategy`] of a [`Kind`].
//!
//! In: a kind's entries, and its hooks. Out: what the registry asks for. What only one kind does is a
//! hook of its file; hooks get typed objects.

use std::borrow::Cow;
use std::sync::Arc;

use apiserver::Registry;
use apiserver::request::{Key, RequestContext};
use apiserver::resource::{Column, Created, Examined, Grace, MetadataRules, Strategy};
use async_trait::async_trait;
use machinery::field::FieldErrors;
use machinery::{Object, StatusError};
use serde_json::Value;

use crate::kind::{Fields, Kind, Updates};
use crate::validate::at::judged;
use crate::validate::guard::Of;

/// What only one kind does. Every method has a default: most kinds need none.
#[async_trait]
pub(crate) trait Hooks<T: Object>: Send + Sync {
    /// After the status was cleared and gated fields were taken out.
    fn prepare_create(&self, _ctx: &RequestContext, _object: &mut T) {}

    /// After the other part was kept, and before gated fields are taken out.
    fn prepare_update(&self, _ctx: &RequestContext, _object: &mut T, _old: &T) {}

    /// See [`Strategy::own_name_errors`].
    fn own_name_errors(&self, _object: &T, _name: &str) -> Vec<String> {
        vec![]
    }

    /// See [`Strategy::grace`].
    fn grace(&self, _object: &T, _requested: Option<i64>) -> Grace {
        Grace::None
    }

    /// See [`Strategy::starts_deleting`].
    fn starts_deleting(&self, _object: &mut T) {}

    /// See [`Strategy::holds_back_removal`].
    fn holds_back_removal(&self, _object: &T) -> bool {
        false
    }

    /// See [`Strategy::ttl_seconds`].
    fn ttl_seconds(&self) -> Option<i64> {
        None
    }

    /// See [`Strategy::settle`].
    async fn settle(
        &self,
        _registry: &Registry,
        _ctx: &RequestContext,
        _object: &mut T,
        _old: Option<&T>,
    ) -> Result<(), StatusError> {
        Ok(())
    }

    /// See [`Strategy::allocate`].
    async fn allocate(
        &self,
        _registry: &Registry,
        _ctx: &RequestContext,
        _object: &mut T,
        _old: Option<&T>,
    ) -> Result<(), StatusError> {
        Ok(())
    }

    /// See [`Strategy::release`].
    async fn release(&self, _registry: &Registry, _had: &T, _now: Option<&T>) {}

    /// See [`Strategy::abandoned`].
    async fn abandoned(&self, _registry: &Registry, _object: &T) {}

    /// See [`Strategy::computed`].
    async fn computed(
        &self,
        _registry: &Registry,
        _wanted: &Key,
    ) -> Result<Vec<Box<dyn Object>>, StatusError> {
        Ok(vec![])
    }

    /// See [`Strategy::review`].
    async fn review(
        &self,
        _registry: &Registry,
        ctx: &RequestContext,
        _object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        Err(StatusError::method_not_allowed(&ctx.resource.group, &ctx.resource.plural, "create"))
    }
}

pub(crate) struct NoHooks;

impl<T: Object> Hooks<T> for NoHooks {}

pub(crate) struct Generic<T: 'static> {
    pub(crate) kind: &'static Kind<T>,
    pub(crate) hooks: Arc<dyn Hooks<T>>,
}

/// The parts of objects that warnings are about: what leaves them as they are is not warned of again.
const BODIES: &[&str] = &["allowedTopologies", "data", "spec", "template", "type"];

impl<T: Object> Generic<T> {
    fn table(&self) -> impl Iterator<Item = &'static crate::kind::Column<T>> {
        self.kind.columns.iter()
    }
}

#[async_trait]
impl<T: Object + k8s_openapi::Resource> Strategy for Generic<T> {
    fn default(&self, object: &mut dyn Object) {
        (self.kind.default)(object.expect_mut());
    }

    fn prepare_create(&self, ctx: &RequestContext, object: &mut dyn Object) {
        let object = object.expect_mut::<T>();
        if let Some(parts) = &self.kind.parts {
            (parts.clear_status)(object);
        }
        (self.kind.gated)(object, None);
        self.hooks.prepare_create(ctx, object);
        // The cleared status has defaults, too.
        if self.kind.parts.is_some() {
            (self.kind.default)(object);
        }
    }

    fn prepare_update(&self, ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        let (object, old) = (object.expect_mut::<T>(), old.expect::<T>());
        if let Some(parts) = &self.kind.parts {
            parts.prepare_update(ctx, object, old);
        }
        self.hooks.prepare_update(ctx, object, old);
        (self.kind.gated)(object, Some(old));
    }

    fn annotation_of_whole_objects(&self) -> Option<&'static str> {
        self.kind.annotation_of_whole_objects
    }

    fn has_generation(&self) -> bool {
        self.kind.generation.is_some()
    }

    fn bumps_generation(&self, object: &dyn Object, old: &dyn Object) -> bool {
        self.kind.generation.is_some_and(|differs| differs(object.expect(), old.expect()))
    }

    fn error_group<'a>(&self, group: &'a str) -> &'a str {
        self.kind.error_group.unwrap_or(group)
    }

    fn validate(&self, object: &Examined<'_>) -> FieldErrors {
        match self.kind.rules.typed {
            Some(check) => check(object, ""),
            None => {
                let check = self.kind.rules.create;
                judged(Of::kind(T::GROUP, T::KIND), object.tree(), None, |new, _| check(new))
            }
        }
    }

    fn validate_update(
        &self,
        ctx: &RequestContext,
        object: &Examined<'_>,
        old: &Examined<'_>,
    ) -> FieldErrors {
        let rules = &self.kind.rules;
        if let Some(check) = rules.typed {
            return check(object, &ctx.subresource);
        }
        let check = match ctx.subresource.as_str() {
            "" | "scale" => rules.update,
            part => match rules.parts.iter().find(|(name, _)| *name == part) {
                Some((_, check)) => Some(*check),
                None => return FieldErrors::default(),
            },
        };
        let of = Of::kind(T::GROUP, T::KIND);
        match check {
            Some(check) => judged(of, object.tree(), Some(old.tree()), check),
            None => judged(of, object.tree(), Some(old.tree()), |new, _| (rules.create)(new)),
        }
    }

    fn name_errors(&self, name: &str) -> Vec<String> {
        (self.kind.rules.name)(name)
    }

    fn own_name_errors(&self, object: &dyn Object, name: &str) -> Vec<String> {
        self.hooks.own_name_errors(object.expect(), name)
    }

    fn metadata_rules(&self) -> MetadataRules {
        self.kind.rules.metadata
    }

    fn warnings(&self, object: &Examined<'_>, old: Option<&Examined<'_>>) -> Vec<String> {
        if self.kind.warnings.is_none() && self.kind.status_warnings.is_none() {
            return vec![];
        }
        let (tree, old) = (object.tree(), old.map(Examined::tree));
        let differs = |field: &str| old.is_some_and(|old| old.get(field) != tree.get(field));
        let is_status = differs("status");
        let warns = match self.kind.warns_on_update {
            _ if old.is_none() || is_status => true,
            Updates::None => false,
            Updates::OfBody => BODIES.iter().any(|body| differs(body)),
            Updates::All => true,
        };
        let warn = if is_status { self.kind.status_warnings } else { self.kind.warnings };
        let Some(warn) = warn.filter(|_| warns) else { return vec![] };
        let mut all = vec![];
        judged(Of::kind(T::GROUP, T::KIND), tree, old, |at, _| warn(at, &mut all));
        all
    }

    fn create_on_update(&self) -> bool {
        self.kind.rules.create_on_update
    }

    fn unconditional_update(&self) -> bool {
        self.kind.rules.unconditional_update
    }

    fn grace(&self, object: &dyn Object, requested: Option<i64>) -> Grace {
        self.hooks.grace(object.expect(), requested)
    }

    fn starts_deleting(&self, object: &mut dyn Object) {
        self.hooks.starts_deleting(object.expect_mut());
    }

    fn holds_back_removal(&self, object: &dyn Object) -> bool {
        self.hooks.holds_back_removal(object.expect())
    }

    fn returns_deleted_object(&self) -> bool {
        self.kind.returns_deleted
    }

    fn orphans_by_default(&self) -> bool {
        self.kind.orphans
    }

    fn delete_warning(&self) -> Option<&'static str> {
        self.kind.delete_warning
    }

    fn is_selectable(&self, name: &str) -> bool {
        self.kind.fields.contains(name)
    }

    fn has_selectable_fields(&self) -> bool {
        !self.kind.fields.is_empty()
    }

    fn field_values(&self, object: &dyn Object) -> Vec<(Cow<'static, str>, String)> {
        let fields: Vec<(&'static str, String)> = match &self.kind.fields {
            Fields::Of(fields) => {
                fields.iter().map(|(name, value)| (*name, value(object.expect()))).collect()
            }
            Fields::InBytes(_, read) => read(&object.encode()).unwrap_or_default(),
        };
        fields.into_iter().map(|(name, value)| (Cow::Borrowed(name), value)).collect()
    }

    fn fields_in(&self, json: &[u8]) -> Option<serde_json::Result<Vec<(&'static str, String)>>> {
        match &self.kind.fields {
            Fields::Of(_) => None,
            Fields::InBytes(_, read) => Some(read(json)),
        }
    }

    fn unknown_field(&self, field: &str) -> String {
        match self.kind.unknown_field {
            Some(told) => told(field),
            None => apiserver::resource::unknown_field(self.has_selectable_fields(), field),
        }
    }

    fn deprecation(&self) -> Option<&'static str> {
        Some(self.kind.deprecation).filter(|text| !text.is_empty())
    }

    fn ttl_seconds(&self, _object: &dyn Object) -> Option<i64> {
        self.hooks.ttl_seconds()
    }

    async fn settle(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        object: &mut dyn Object,
        old: Option<&dyn Object>,
    ) -> Result<(), StatusError> {
        let old = old.map(|old| old.expect::<T>());
        self.hooks.settle(registry, ctx, object.expect_mut(), old).await
    }

    async fn allocate(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        object: &mut dyn Object,
        old: Option<&dyn Object>,
    ) -> Result<(), StatusError> {
        let old = old.map(|old| old.expect::<T>());
        self.hooks.allocate(registry, ctx, object.expect_mut(), old).await
    }

    async fn release(&self, registry: &Registry, had: &dyn Object, now: Option<&dyn Object>) {
        let now = now.map(|now| now.expect::<T>());
        self.hooks.release(registry, had.expect(), now).await;
    }

    async fn abandoned(&self, registry: &Registry, object: &dyn Object) {
        self.hooks.abandoned(registry, object.expect()).await;
    }

    async fn computed(
        &self,
        registry: &Registry,
        wanted: &Key,
    ) -> Result<Vec<Box<dyn Object>>, StatusError> {
        self.hooks.computed(registry, wanted).await
    }

    async fn review(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        self.hooks.review(registry, ctx, object).await
    }

    fn columns(&self) -> Vec<Column> {
        self.table().filter_map(crate::kind::Column::header).collect()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let object = object.expect::<T>();
        self.table().map(|column| (column.cell)(object)).collect()
    }

    fn row_conditions(&self, object: &dyn Object) -> Vec<Value> {
        (self.kind.row_conditions)(object.expect())
    }
}
