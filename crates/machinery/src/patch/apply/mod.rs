//! Server-side apply: who owns which fields, and merging by it.
//!
//! In: values, as [`Node`]s, and their [`types::Type`]. Out: merged trees, sets of fields, and the entries of
//! `metadata.managedFields`. Upstream: `sigs.k8s.io/structured-merge-diff` and
//! `k8s.io/apimachinery/pkg/util/managedfields`, whose behaviour this mirrors, oddities included.
//!
//! Nothing here knows HTTP, storage, or a kind. Where versions differ, the caller converts
//! ([`managed::Versions`]).

mod error;
pub mod fieldset;
pub mod managed;
pub mod managers;
mod merge;
mod node;
pub mod path;
pub mod types;
mod validate;
mod walk;

pub use error::FieldsError;
pub use fieldset::Set;
pub use managed::{Applied, ApplyError, Versions, Write, described};
pub use node::Node;
pub use walk::Comparison;

/// The fields of a write that get no owner, because the server resets them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resets {
    /// These, and all below them.
    pub excluded: &'static [&'static [&'static str]],
    /// If not empty: all fields except these and those below them; `*` is any element.
    pub only: &'static [&'static [&'static str]],
}

impl Resets {
    pub const NOTHING: Self = Self { excluded: &[], only: &[] };

    /// The rule that most kinds with a status follow: the object's own writes leave the status, those
    /// to `status` leave `kept`.
    pub fn of_subresources(subresource: &str, kept: &'static [&'static [&'static str]]) -> Self {
        match subresource {
            "" => Self { excluded: &[&["status"]], only: &[] },
            "status" => Self { excluded: kept, only: &[] },
            _ => Self::NOTHING,
        }
    }

    pub(crate) fn apply_to(self, set: Set) -> Set {
        if self.excluded.is_empty() && self.only.is_empty() {
            return set;
        }
        let excluded = self.excluded.iter().map(|path| Set::of_fields(path));
        let set = set.without(&excluded.fold(Set::EMPTY, Set::union));
        if self.only.is_empty() { set } else { set.only(self.only) }
    }
}

#[cfg(test)]
mod tests;
