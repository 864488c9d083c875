//! nftables by netlink: a ruleset as plain data, the difference of two as one atomic transaction.
//!
//! ```text
//!  caller ─► Ruleset (model) ─► diff(old, new) ─► Batch ─► Nft::apply ─► kernel, all or nothing
//!                  └► to_string(): the text that `nft list ruleset` would print (priorities as numbers)
//! ```
//!
//! The model covers what services and network policies need, no more. Expressions are those that
//! `nft` itself would emit, so that its listing of our tables reads naturally.
//!
//! Invariant: a batch touches only tables that are named in one of the two rulesets. What other
//! programs have in the kernel is neither read nor changed.

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
