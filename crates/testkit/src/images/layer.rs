//! One layer of an image: a reproducible tar archive, made entry by entry.

use anyhow::Result;
use tar::{EntryType, Header};

pub struct Layer(tar::Builder<Vec<u8>>);

impl Default for Layer {
    fn default() -> Self {
        Self::new()
    }
}

impl Layer {
    pub fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    pub fn directory(&mut self, name: &str, mode: u32) -> Result<()> {
        self.append(&format!("{name}/"), EntryType::Directory, mode, &[])
    }

    pub fn file(&mut self, name: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.append(name, EntryType::Regular, mode, content)
    }

    pub fn symlink(&mut self, name: &str, target: &str) -> Result<()> {
        self.link(name, EntryType::Symlink, target)
    }

    pub fn hard_link(&mut self, name: &str, target: &str) -> Result<()> {
        self.link(name, EntryType::Link, target)
    }

    /// The finished archive.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = self.0.get_ref().clone();
        // An archive ends with two empty blocks.
        bytes.resize(bytes.len() + 1024, 0);
        Ok(bytes)
    }

    fn append(&mut self, name: &str, kind: EntryType, mode: u32, content: &[u8]) -> Result<()> {
        let mut header = header(kind, mode);
        header.set_size(content.len() as u64);
        self.0.append_data(&mut header, name, content)?;
        Ok(())
    }

    fn link(&mut self, name: &str, kind: EntryType, target: &str) -> Result<()> {
        self.0.append_link(&mut header(kind, 0o777), name, target)?;
        Ok(())
    }
}

fn header(kind: EntryType, mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    header
}
