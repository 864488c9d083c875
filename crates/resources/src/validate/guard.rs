//! Guards the field names that rules spell out.
//!
//! In: the name that a rule asks a place for. Out: nothing in the program; in tests, a failure with the
//! kind, the path and the name if the schema has no such field. A misspelt name would be `null`, and its
//! check would never fire.
//!
//! Invariant: a place in a built-in kind's object knows its definition in [`api::facts`]. A test that
//! runs a rule over an object of the right kind therefore tests each field name of the rule;
//! the tests of this module run all rules over objects with all fields.

#[cfg(test)]
mod schema;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use schema::Of;

/// Where in the schema a place is. The program has no use for it.
#[cfg(not(test))]
#[derive(Clone, Copy)]
pub(crate) struct Of;

#[cfg(not(test))]
impl Of {
    pub(crate) const ANY: Self = Self;

    pub(crate) const fn kind(_group: &str, _kind: &str) -> Self {
        Self
    }

    pub(super) const fn fields(self, _names: &str, _path: &machinery::field::Path) -> Self {
        Self
    }

    pub(super) const fn field(self, _name: &str, _path: &machinery::field::Path) -> Self {
        Self
    }

    pub(super) const fn shown(self, _names: &str, _path: &machinery::field::Path) {}

    pub(super) const fn named(self, _name: &str) -> Self {
        Self
    }

    pub(super) const fn element(self) -> Self {
        Self
    }
}
