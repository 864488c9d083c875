//! How far an import or a pull is, for the one who waits for it.
//!
//! In: steps with their sizes, and bytes as they pass. Out: the current step. Each [`super::ImageStore`]
//! has one, which its clones share, so it says something only where one import or pull runs at a time: in
//! `decapod images`, not in a node. A byte costs nothing, a chunk one atomic addition.

use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<State>);

#[derive(Debug, Default)]
struct State {
    step: Mutex<String>,
    done: AtomicU64,
    total: AtomicU64,
}

/// The current step and its bytes. `total` is 0 when the size is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub name: String,
    pub done: u64,
    pub total: u64,
}

impl Progress {
    pub fn begin(&self, name: String, total: u64) {
        let mut step = self.0.step.lock().expect("no panic while a step is named");
        *step = name;
        self.0.done.store(0, Ordering::Relaxed);
        self.0.total.store(total, Ordering::Relaxed);
    }

    pub fn add(&self, bytes: usize) {
        self.0.done.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// `None` before the first step.
    pub fn now(&self) -> Option<Step> {
        let step = self.0.step.lock().expect("no panic while a step is named");
        let (done, total) =
            (self.0.done.load(Ordering::Relaxed), self.0.total.load(Ordering::Relaxed));
        (!step.is_empty()).then(|| Step { name: step.clone(), done, total })
    }

    /// A reader whose bytes count for the current step.
    pub fn counted<R: Read>(&self, inner: R) -> Counted<R> {
        Counted { inner, progress: self.clone() }
    }
}

pub struct Counted<R> {
    inner: R,
    progress: Progress,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.progress.add(n);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_counts_its_own_bytes() {
        let progress = Progress::default();
        assert_eq!(progress.now(), None);
        for size in [5, 3] {
            progress.begin(format!("step of {size}"), size);
            let read = io::copy(&mut progress.counted(io::repeat(0).take(size)), &mut io::sink());
            assert_eq!(read.expect("no error"), size);
            let name = format!("step of {size}");
            assert_eq!(progress.now(), Some(Step { name, done: size, total: size }));
        }
    }
}
