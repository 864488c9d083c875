//! Keeps the kernel's tables equal to the model.
//!
//! In: a model, another program's changes. Out: transactions: the difference, or everything where the kernel's
//! state is not known, as at the start of a process. The old tables stay until then, so that a restart opens
//! nothing.
//!
//! Invariant: without policies there are no tables, and no packet is looked at.

use std::path::Path;

use net::monitor::{Change, Monitor};
use net::nft::{self, Nft, Ruleset, Table, diff};
use net::watch::Watch;

use crate::model::Model;
use crate::rules::{FAMILIES, TABLE};

pub struct Kernel {
    nft: Nft,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// What an earlier process or another program left.
    Unknown,
    NoTables,
    /// As in the model at its last transaction.
    Applied,
}

impl Kernel {
    pub fn open(netns: Option<&Path>) -> Result<Self, nft::Error> {
        let nft = match netns {
            Some(path) => Nft::open_in(path)?,
            None => Nft::open()?,
        };
        Ok(Self { nft, state: State::Unknown })
    }

    pub fn watch(&self, netns: Option<&Path>) -> Result<Watch, nft::Error> {
        Ok(Watch::new(Monitor::of_rules(netns, &self.nft)?))
    }

    /// Whether another program's change is one of our tables, while there are any.
    pub fn is_own(&self, change: Change<'_>) -> bool {
        matches!(change, Change::Rules { table, .. } if table == TABLE)
            && self.state == State::Applied
    }

    /// The next transaction replaces the tables.
    pub fn forget(&mut self) {
        self.state = State::Unknown;
    }

    /// Returns the number of requests.
    pub fn apply(&mut self, model: &mut Model) -> Result<usize, nft::Error> {
        let has_policies = model.has_policies();
        let batch = match (has_policies, self.state) {
            (true, State::Applied) => model.live().take(),
            (true, _) => model.live().take_all(),
            (false, State::NoTables) => return Ok(0),
            (false, _) => none(),
        };
        // Refused or not answered, the kernel's state is not the model's.
        self.state = State::Unknown;
        self.nft.apply(&batch)?;
        self.state = if has_policies { State::Applied } else { State::NoTables };
        Ok(batch.len())
    }
}

/// The transaction that removes our tables, if there are any.
pub fn none() -> nft::Batch {
    let empty = |ip: nft::Ip| ((ip.family(), TABLE.to_owned()), Table::default());
    diff(&Ruleset { tables: FAMILIES.map(empty).into() }, &Ruleset::default())
}
