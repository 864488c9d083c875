//! nftables over netlink: a ruleset as plain data, and the difference of two as one atomic transaction.
//!
//! ```text
//!  caller ─► Ruleset (model) ─► diff(old, new) ─► Batch ─► Nft::apply ─► kernel, all or nothing
//!                  └► to_string(): the text that `nft list ruleset` would print (priorities as numbers)
//! ```
//!
//! The model covers only what Services and network policies need. Expressions are those that `nft`
//! itself would emit, so that its listing of our tables is readable.
//!
//! Invariant: a batch touches only tables that one of the two rulesets names. Other programs'
//! tables are neither read nor changed.

mod diff;
mod encode;
mod model;
mod socket;
mod text;
pub(crate) mod wire;

pub use diff::diff;
pub use model::{
    BaseChain, Chain, ChainKind, Element, Family, Field, Hook, Ip, Op, Policy, Proto, Rule,
    Ruleset, Set, Stmt, Table, Type, Value, Verdict, ct_state,
};
pub(crate) use socket::open_socket;
pub use socket::{Error, Failure, Nft};
pub use wire::Batch;
