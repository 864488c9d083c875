//! What a server hands to clients of its own process instead of bytes: the objects that it keeps anyway.
//!
//! In: a request for a list or a watch with [`Wanted`] among its extensions, which no network can set. Out: an
//! answer with [`Given`] among its extensions and an empty body. The client is authenticated and authorized, and its
//! request counted, as for any other: only the form of the answer differs. A server may ignore the wish.
//!
//! Invariant: an object is one state of something, and never changes.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use futures::stream::BoxStream;

/// In a request: the client can take objects as they are.
#[derive(Clone, Copy, Debug)]
pub struct Wanted;

/// An object at a revision, as the server keeps it.
pub trait Object: Send + Sync {
    fn revision(&self) -> u64;

    /// The whole object, with its resourceVersion.
    fn json(&self) -> Bytes;

    /// A slot for a value that is derived from the object once and shared by all its readers.
    fn note(&self) -> &OnceLock<Arc<dyn Any + Send + Sync>>;
}

pub struct List {
    pub objects: Vec<Arc<dyn Object>>,
    /// Of which all of them are the state.
    pub revision: u64,
}

pub enum Change {
    /// It came, or is another.
    Applied(Arc<dyn Object>),
    /// Its last state, at that state's own revision. It may be one that the reader never saw.
    Deleted(Arc<dyn Object>),
    /// All up to this revision was told.
    Reached(u64),
    /// The revision to start at is gone: the reader has to list again.
    Expired(String),
}

/// Changes as they come, some at a time. The newest state of an object comes always, older ones may be left
/// out.
pub type Changes = BoxStream<'static, Vec<Change>>;

pub enum Objects {
    List(List),
    Changes(Changes),
}

/// The objects of an answer. The first reader takes them.
#[derive(Clone)]
pub struct Given(
    /// Extensions can be cloned, streams cannot. Held to take them out.
    Arc<Mutex<Option<Objects>>>,
);

impl Given {
    pub fn new(objects: Objects) -> Self {
        Self(Arc::new(Mutex::new(Some(objects))))
    }

    pub fn take(&self) -> Option<Objects> {
        self.0.lock().expect("no panic while held").take()
    }
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Given")
    }
}
