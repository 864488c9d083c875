//! The output streams: standard output and standard error, or a test's buffers.

use std::io::Write;
use std::sync::{Arc, Mutex};

use crate::failure::Result;

/// Cheap to clone; clones write to the same streams.
#[derive(Clone)]
pub struct Console {
    /// Locked for one write at a time.
    out: Arc<Mutex<dyn Write + Send>>,
    err: Arc<Mutex<dyn Write + Send>>,
}

impl Console {
    pub fn standard() -> Self {
        Self::new(std::io::stdout(), std::io::stderr())
    }

    pub fn new(out: impl Write + Send + 'static, err: impl Write + Send + 'static) -> Self {
        Self { out: Arc::new(Mutex::new(out)), err: Arc::new(Mutex::new(err)) }
    }

    pub fn print(&self, text: impl AsRef<[u8]>) -> Result<()> {
        Ok(write(&self.out, text.as_ref())?)
    }

    pub fn line(&self, text: impl AsRef<str>) -> Result<()> {
        self.print(format!("{}\n", text.as_ref()))
    }

    /// Prints a message for users, separate from the output.
    pub fn note(&self, text: impl AsRef<str>) {
        // A failure to write to standard error cannot be reported.
        let _ = write(&self.err, format!("{}\n", text.as_ref()).as_bytes());
    }

    pub fn error(&self, bytes: &[u8]) -> Result<()> {
        Ok(write(&self.err, bytes)?)
    }
}

fn write(to: &Mutex<dyn Write + Send>, bytes: &[u8]) -> std::io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let mut to = to.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    to.write_all(bytes)?;
    to.flush()
}
