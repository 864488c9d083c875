//! How every kind behaves: the [`Strategy`] of a [`Kind`], and its Tables.
//!
//! In: a kind's entries, and its hooks. Out: what the registry asks for. What only one kind does is a
//! hook of its file; hooks get typed objects.

use apiserver::request::RequestContext;
use apiserver::resource::{Column, Examined, Grace, Strategy, TableConvertor};
use machinery::Object;
use machinery::field::FieldErrors;
use serde_json::Value;

use crate::kind::Kind;
use crate::validate::at::judged;
use crate::validate::guard::Of;

/// What only one kind does. Every method has a default: most kinds need none.
pub(crate) trait Hooks<T>: Sync {
    /// After the status was cleared and gated fields were taken out.
    fn prepare_create(&self, _ctx: &RequestContext, _object: &mut T) {}

    /// After the other part was kept, and before gated fields are taken out.
    fn prepare_update(&self, _ctx: &RequestContext, _object: &mut T, _old: &T) {}

    /// See [`Strategy::own_name_errors`].
    fn own_name_errors(&self, _object: &T) -> Vec<String> {
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
}

pub(crate) struct NoHooks;

impl<T> Hooks<T> for NoHooks {}

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

    fn own_name_errors(&self, object: &dyn Object) -> Vec<String> {
        self.0.hooks.own_name_errors(object.expect())
    }

    fn warnings(&self, object: &Examined<'_>, old: Option<&Examined<'_>>) -> Vec<String> {
        let Some(warn) = self.0.warnings else { return vec![] };
        let tree = object.tree();
        if let Some(old) = old.map(Examined::tree)
            && BODIES.iter().all(|body| old.get(body) == tree.get(body))
        {
            return vec![];
        }
        let mut all = vec![];
        judged(Of::kind(T::GROUP, T::KIND), tree, None, |at, _| warn(at, &mut all));
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
