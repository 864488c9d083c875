//! How every kind behaves: the row of a [`Kind`], its [`Strategy`] and its Tables.
//!
//! In: a kind's entries, and its hooks. Out: what the registry asks for. What only one kind does is a
//! hook of its file; hooks get typed objects.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::sync::Arc;

use apiserver::request::RequestContext;
use apiserver::resource::{
    Column, Conversion, Examined, Grace, Resource, Settings, Storage, Strategy, TableConvertor,
};
use k8s_openapi::Metadata;
use machinery::field::FieldErrors;
use machinery::{Object, ObjectMeta};
use serde_json::Value;

use crate::Wiring;
use crate::kind::{Kind, Made, Updates};
#[cfg(test)]
use crate::kind::{Rules, Warn};
use crate::row::Row;
use crate::validate::at::judged;
use crate::validate::guard::Of;

pub(crate) struct Generic<T: 'static>(pub(crate) &'static Kind<T>);

/// The parts of objects that warnings are about: what leaves them as they are is not warned of again.
const BODIES: &[&str] = &["allowedTopologies", "data", "spec", "template", "type"];

impl<T: Object + k8s_openapi::Resource> Strategy for Generic<T> {
    fn default(&self, object: &mut dyn Object) {
        (self.0.default)(object.expect_mut());
    }

    fn prepare_create(&self, ctx: &RequestContext, object: &mut dyn Object) {
        let object = object.expect_mut::<T>();
        if let Some(parts) = &self.0.parts {
            (parts.clear_status)(object);
        }
        (self.0.gated)(object, None);
        self.0.hooks.prepare_create(ctx, object);
        // The cleared status has defaults, too.
        if self.0.parts.is_some() {
            (self.0.default)(object);
        }
    }

    fn prepare_update(&self, ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        let (object, old) = (object.expect_mut::<T>(), old.expect::<T>());
        if let Some(parts) = &self.0.parts {
            parts.prepare_update(ctx, object, old);
        }
        self.0.hooks.prepare_update(ctx, object, old);
        (self.0.gated)(object, Some(old));
    }

    fn bumps_generation(&self, object: &dyn Object, old: &dyn Object) -> bool {
        self.0.generation.is_some_and(|differs| differs(object.expect(), old.expect()))
    }

    fn validate(&self, object: &Examined<'_>) -> FieldErrors {
        match self.0.rules.typed {
            Some(check) => check(object, ""),
            None => {
                let check = self.0.rules.create;
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
        let rules = &self.0.rules;
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

    fn own_name_errors(&self, object: &dyn Object, name: &str) -> Vec<String> {
        self.0.hooks.own_name_errors(object.expect(), name)
    }

    fn warnings(&self, object: &Examined<'_>, old: Option<&Examined<'_>>) -> Vec<String> {
        if self.0.warnings.is_none() && self.0.status_warnings.is_none() {
            return vec![];
        }
        let (tree, old) = (object.tree(), old.map(Examined::tree));
        let differs = |field: &str| old.is_some_and(|old| old.get(field) != tree.get(field));
        let is_status = differs("status");
        let warns = match self.0.warns_on_update {
            _ if old.is_none() || is_status => true,
            Updates::None => false,
            Updates::OfBody => BODIES.iter().any(|body| differs(body)),
            Updates::All => true,
        };
        let warn = if is_status { self.0.status_warnings } else { self.0.warnings };
        let Some(warn) = warn.filter(|_| warns) else { return vec![] };
        let mut all = vec![];
        judged(Of::kind(T::GROUP, T::KIND), tree, old, |at, _| warn(at, &mut all));
        all
    }

    fn grace(&self, object: &dyn Object, requested: Option<i64>) -> Grace {
        self.0.hooks.grace(object.expect(), requested)
    }

    fn starts_deleting(&self, object: &mut dyn Object) {
        self.0.hooks.starts_deleting(object.expect_mut());
    }

    fn holds_back_removal(&self, object: &dyn Object) -> bool {
        self.0.hooks.holds_back_removal(object.expect())
    }
}

impl<T: Object> TableConvertor for Generic<T> {
    fn columns(&self) -> Vec<Column> {
        self.0.columns.iter().filter_map(crate::kind::Column::header).collect()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let object = object.expect::<T>();
        self.0.columns.iter().map(|column| (column.cell)(object)).collect()
    }

    fn row_conditions(&self, object: &dyn Object) -> Vec<Value> {
        (self.0.row_conditions)(object.expect())
    }
}

/// A kind of any type: a line of the table.
pub(crate) trait AnyKind: Sync + 'static {
    /// The kind's row; without `wiring`, one that says where objects are and how they are defaulted.
    fn row(&'static self, wiring: Option<&Wiring>) -> Row;
    fn is_optional(&self) -> bool;
    /// Whether the kind needs the parts of a running server.
    fn is_wired(&self) -> bool;
    #[cfg(test)]
    fn rules(&self) -> &Rules;
    #[cfg(test)]
    fn warnings(&self) -> Option<Warn>;
}

impl<T: Metadata<Ty = ObjectMeta> + Object> AnyKind for Kind<T> {
    fn row(&'static self, wiring: Option<&Wiring>) -> Row {
        self.row_of::<T>(wiring)
    }

    fn is_optional(&self) -> bool {
        self.optional
    }

    fn is_wired(&self) -> bool {
        self.subresources.iter().any(|sub| matches!(sub.behaviour, Made::Wired(_)))
    }

    #[cfg(test)]
    fn rules(&self) -> &Rules {
        &self.rules
    }

    #[cfg(test)]
    fn warnings(&self) -> Option<Warn> {
        self.warnings
    }
}

impl<T: Metadata<Ty = ObjectMeta> + Object> Kind<T> {
    /// The row that serves the kind as `V`, which is mostly the kind itself.
    fn row_of<V: Metadata<Ty = ObjectMeta> + 'static>(
        &'static self,
        wiring: Option<&Wiring>,
    ) -> Row {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let generic = Arc::new(Generic(self));
        let row = Row::new::<V>();
        let prefix = self.storage.map(|prefix| Storage::Stored(prefix.into()));
        let storage = self.unstored.map(|unstored| unstored()).or(prefix);
        row.gate(self.gate).with(|row| Resource {
            short_names: owned(self.short),
            categories: owned(self.categories),
            verbs: self.verbs.to_vec(),
            storage: storage.unwrap_or(row.storage),
            strategy: generic.clone(),
            settings: self.settings(),
            allocator: self.allocator.map(|allocator| allocator(wiring)),
            fields: self.fields.selectable(self.unknown_field),
            table: generic,
            deprecation: Some(self.deprecation.into())
                .filter(|text: &Cow<'_, str>| !text.is_empty()),
            subresources: self.subresources.iter().filter_map(|sub| sub.made(wiring)).collect(),
            ..row
        })
    }

    fn settings(&self) -> Settings {
        Settings {
            name_errors: self.rules.name,
            metadata_rules: self.rules.metadata,
            has_generation: self.generation.is_some(),
            create_on_update: self.rules.create_on_update,
            unconditional_update: self.rules.unconditional_update,
            returns_deleted_object: self.returns_deleted,
            orphans_by_default: self.orphans,
            delete_warning: self.delete_warning,
            error_group: self.error_group,
            annotation_of_whole_objects: self.annotation_of_whole_objects,
            ttl_seconds: self.ttl_seconds,
        }
    }
}

/// Another form of a kind: served as `V`, stored as `T`.
pub(crate) struct Form<T: 'static, V> {
    pub(crate) kind: Kind<T>,
    pub(crate) conversion: fn() -> Arc<dyn Conversion>,
    pub(crate) form: PhantomData<fn() -> V>,
}

impl<T, V> AnyKind for Form<T, V>
where
    T: Metadata<Ty = ObjectMeta> + Object,
    V: Metadata<Ty = ObjectMeta> + Object,
{
    fn row(&'static self, wiring: Option<&Wiring>) -> Row {
        self.kind.row_of::<V>(wiring).converted_by((self.conversion)())
    }

    fn is_optional(&self) -> bool {
        self.kind.optional
    }

    fn is_wired(&self) -> bool {
        self.kind.is_wired()
    }

    #[cfg(test)]
    fn rules(&self) -> &Rules {
        &self.kind.rules
    }

    #[cfg(test)]
    fn warnings(&self) -> Option<Warn> {
        self.kind.warnings
    }
}
