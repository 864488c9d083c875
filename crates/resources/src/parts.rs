//! The strategies that most kinds share: nothing special, or a spec and a status that are written
//! apart.

use std::marker::PhantomData;

use apiserver::request::RequestContext;
use apiserver::resource::{Column, Strategy};
use machinery::Object;
use serde_json::Value;

use crate::validate::checked;

/// A kind without status, defaults or generation.
pub(crate) struct Plain<T>(PhantomData<fn() -> T>);

impl<T> Plain<T> {
    pub(crate) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<T: Object + k8s_openapi::Resource> Strategy for Plain<T> {
    checked!(T);
}

/// Kinds whose deletes answer with the object. Upstream: `ReturnDeletedObject` of their stores.
const RETURNED_WHEN_DELETED: &[&str] = &[
    "CSIDriver",
    "CSINode",
    "DeviceClass",
    "DeviceTaintRule",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "PodTemplate",
    "ResourceClaim",
    "ResourceClaimTemplate",
    "ResourcePoolStatusRequest",
    "ResourceQuota",
    "ResourceSlice",
    "ServiceAccount",
    "StorageClass",
    "VolumeAttachment",
    "VolumeAttributesClass",
];

/// How to reach into a typed kind's two halves.
pub(crate) struct Parts<T> {
    pub(crate) clear_status: fn(&mut T),
    pub(crate) keep_status: fn(&mut T, &T),
    pub(crate) keep_spec: fn(&mut T, &T),
    pub(crate) spec_differs: fn(&T, &T) -> bool,
}

/// The [`Parts`] of a kind with the fields `spec` and `status`: closures over fields, which no
/// table can hold.
macro_rules! parts {
    ($kind:ty) => {
        $crate::parts::Parts::<$kind> {
            clear_status: |object| object.status = Default::default(),
            keep_status: |object, old| object.status = old.status.clone(),
            keep_spec: |object, old| object.spec = old.spec.clone(),
            spec_differs: |object, old| object.spec != old.spec,
        }
    };
}
pub(crate) use parts;

impl<T: Object> Parts<T> {
    pub(crate) fn prepare_create(&self, object: &mut dyn Object) {
        (self.clear_status)(object.expect_mut());
    }

    /// `status` changes the status alone, everything else all but the status.
    pub(crate) fn prepare_update(
        &self,
        ctx: &RequestContext,
        object: &mut dyn Object,
        old: &dyn Object,
    ) {
        let (object, old) = (object.expect_mut::<T>(), old.expect::<T>());
        if ctx.subresource == "status" {
            (self.keep_spec)(object, old);
        } else {
            (self.keep_status)(object, old);
        }
    }

    pub(crate) fn spec_differs(&self, object: &dyn Object, old: &dyn Object) -> bool {
        (self.spec_differs)(object.expect(), old.expect())
    }
}

/// A kind with spec and status; the rest is data.
pub(crate) struct SpecStatus<T: 'static> {
    pub(crate) parts: Parts<T>,
    pub(crate) generation: bool,
    orphans: bool,
    pub(crate) default: fn(&mut T),
    pub(crate) cells: fn(&T) -> Vec<Value>,
    /// Changes what is written, knowing what was there before; see [`crate::gated`].
    closed: fn(&mut T, Option<&T>),
    selectable_names: &'static [&'static str],
    selectable: Selectable<T>,
}

impl<T: Object> SpecStatus<T> {
    pub(crate) fn new(parts: Parts<T>) -> Self {
        Self {
            parts,
            generation: false,
            orphans: false,
            default: |_| {},
            cells: |object| crate::print::name_and_age_cells(object),
            closed: |_, _| {},
            selectable_names: &[],
            selectable: |_| vec![],
        }
    }

    /// Objects count the changes of their spec.
    pub(crate) fn generation(mut self) -> Self {
        self.generation = true;
        self
    }

    /// A delete that names no policy keeps the object's dependents.
    pub(crate) fn orphans(mut self) -> Self {
        self.orphans = true;
        self
    }

    pub(crate) fn default(mut self, default: fn(&mut T)) -> Self {
        self.default = default;
        self
    }

    pub(crate) fn closed(mut self, closed: fn(&mut T, Option<&T>)) -> Self {
        self.closed = closed;
        self
    }

    pub(crate) fn selectable(
        mut self,
        names: &'static [&'static str],
        selectable: Selectable<T>,
    ) -> Self {
        self.selectable_names = names;
        self.selectable = selectable;
        self
    }

    pub(crate) fn cells(mut self, cells: fn(&T) -> Vec<Value>) -> Self {
        self.cells = cells;
        self
    }
}

impl<T: Object + k8s_openapi::Resource> Strategy for SpecStatus<T> {
    checked!(T);

    fn default(&self, object: &mut dyn Object) {
        (self.default)(object.expect_mut());
    }

    fn prepare_create(&self, _ctx: &RequestContext, object: &mut dyn Object) {
        self.parts.prepare_create(object);
        (self.closed)(object.expect_mut(), None);
        // The cleared status has defaults, too.
        (self.default)(object.expect_mut());
    }

    fn prepare_update(&self, ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        self.parts.prepare_update(ctx, object, old);
        (self.closed)(object.expect_mut(), Some(old.expect()));
    }

    fn has_generation(&self) -> bool {
        self.generation
    }

    fn bumps_generation(&self, object: &dyn Object, old: &dyn Object) -> bool {
        self.generation && self.parts.spec_differs(object, old)
    }

    fn returns_deleted_object(&self) -> bool {
        RETURNED_WHEN_DELETED.contains(&T::KIND)
    }

    fn orphans_by_default(&self) -> bool {
        self.orphans
    }

    fn selectable_names(&self) -> &'static [&'static str] {
        self.selectable_names
    }

    fn selectable_fields(&self, object: &dyn Object) -> Vec<(&'static str, String)> {
        (self.selectable)(object.expect())
    }

    fn columns(&self) -> Vec<Column> {
        crate::columns::of::<T>()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        (self.cells)(object.expect())
    }
}

/// Fields for selectors, with their names.
type Selectable<T> = fn(&T) -> Vec<(&'static str, String)>;

/// A kind without status that has columns or defaults of its own.
pub(crate) struct Simple<T: 'static> {
    pub(crate) default: fn(&mut T),
    pub(crate) cells: fn(&T) -> Vec<Value>,
    /// Takes out fields behind closed gates, see [`crate::gated`].
    closed: fn(&mut T, Option<&T>),
    /// What counts as a new generation, where objects have one.
    differs: Option<fn(&T, &T) -> bool>,
    selectable_names: &'static [&'static str],
    selectable: Selectable<T>,
}

impl<T: Object> Simple<T> {
    pub(crate) fn new(cells: fn(&T) -> Vec<Value>) -> Self {
        Self {
            default: |_| {},
            cells,
            closed: |_, _| {},
            differs: None,
            selectable_names: &[],
            selectable: |_| vec![],
        }
    }

    pub(crate) fn default(mut self, default: fn(&mut T)) -> Self {
        self.default = default;
        self
    }

    pub(crate) fn closed(mut self, closed: fn(&mut T, Option<&T>)) -> Self {
        self.closed = closed;
        self
    }

    /// Objects count the changes that `differs` sees.
    pub(crate) fn generation(mut self, differs: fn(&T, &T) -> bool) -> Self {
        self.differs = Some(differs);
        self
    }

    pub(crate) fn selectable(
        mut self,
        names: &'static [&'static str],
        selectable: Selectable<T>,
    ) -> Self {
        self.selectable_names = names;
        self.selectable = selectable;
        self
    }
}

impl<T: Object + k8s_openapi::Resource> Strategy for Simple<T> {
    checked!(T);

    fn default(&self, object: &mut dyn Object) {
        (self.default)(object.expect_mut());
    }

    fn prepare_create(&self, _ctx: &RequestContext, object: &mut dyn Object) {
        (self.closed)(object.expect_mut(), None);
    }

    fn prepare_update(&self, _ctx: &RequestContext, object: &mut dyn Object, old: &dyn Object) {
        (self.closed)(object.expect_mut(), Some(old.expect()));
    }

    fn has_generation(&self) -> bool {
        self.differs.is_some()
    }

    fn bumps_generation(&self, object: &dyn Object, old: &dyn Object) -> bool {
        self.differs.is_some_and(|differs| differs(object.expect(), old.expect()))
    }

    fn selectable_names(&self) -> &'static [&'static str] {
        self.selectable_names
    }

    fn selectable_fields(&self, object: &dyn Object) -> Vec<(&'static str, String)> {
        (self.selectable)(object.expect())
    }

    fn unknown_field(&self, field: &str) -> String {
        // Kinds of devices say which they are.
        if T::GROUP == "resource.k8s.io" && self.has_selectable_fields() {
            return format!(
                "field label not supported for {}, Kind={}: {field}",
                T::API_VERSION,
                T::KIND
            );
        }
        apiserver::resource::unknown_field(self.has_selectable_fields(), field)
    }

    fn returns_deleted_object(&self) -> bool {
        RETURNED_WHEN_DELETED.contains(&T::KIND)
    }

    fn columns(&self) -> Vec<Column> {
        crate::columns::of::<T>()
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        (self.cells)(object.expect())
    }
}
