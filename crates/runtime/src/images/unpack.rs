//! Unpacks a layer's archive into a directory for overlayfs.
//!
//! Whiteouts (`.wh.name`) become character devices 0:0. Opaque directories (`.wh..wh..opq`) get the
//! attribute `trusted.overlay.opaque`. Needs root.
//!
//! Invariant: an archive changes nothing outside of the directory; an archive that tries is refused as a
//! whole. The directory gets its name only when it is complete and its content has the expected hash.

use std::fs;
use std::io::{self, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, mknod};
use sha2::{Digest, Sha256};
use tar::{Archive, Entry, EntryType};

use super::{During, Error, Result};
use crate::layout::hex;

const WHITEOUT: &str = ".wh.";
const OPAQUE: &str = ".wh..wh..opq";

/// Unpacks `blob` (plain, gzip or zstd) to `target`, through a temporary sibling in `parent`.
pub fn layer(
    blob: impl Read + Send + 'static,
    diff_id: &str,
    parent: &Path,
    target: &Path,
) -> Result<()> {
    let partial = parent.join(format!(".{}", base::rng::alphanumeric(16)));
    fs::create_dir_all(&partial).during(|| format!("create {}", partial.display()))?;
    let done = unpack(blob, diff_id, &partial).and_then(|()| {
        match fs::rename(&partial, target) {
            // Another process unpacked the same layer first.
            Err(_) if target.is_dir() => Ok(()),
            other => other.during(|| format!("create {}", target.display())),
        }
    });
    if partial.exists() {
        let removed = fs::remove_dir_all(&partial);
        done.and(removed.during(|| format!("remove {}", partial.display())))
    } else {
        done
    }
}

fn unpack(blob: impl Read + Send + 'static, diff_id: &str, into: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(into, fs::Permissions::from_mode(0o755))
        .during(|| format!("set the mode of {}", into.display()))?;
    let mut hashed = Hashing { inner: decompress(blob)?, hash: Sha256::new() };
    let mut archive = Archive::new(&mut hashed);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    archive.set_preserve_mtime(true);
    archive.set_unpack_xattrs(true);
    archive.set_overwrite(true);
    for entry in archive.entries().during(|| "read a layer".into())? {
        let mut entry = entry.during(|| "read a layer".into())?;
        unpack_entry(&mut entry, into)?;
    }
    // The hash includes the bytes after the end marker.
    io::copy(&mut hashed, &mut io::sink()).during(|| "read a layer".into())?;
    let found = format!("sha256:{}", hex(&hashed.hash.finalize()));
    if found != diff_id {
        return Err(Error::Invalid(format!(
            "the layer's content has digest {found}, not {diff_id}"
        )));
    }
    Ok(())
}

fn unpack_entry<R: Read>(entry: &mut Entry<'_, R>, into: &Path) -> Result<()> {
    let path = entry.path().during(|| "read a layer".into())?.into_owned();
    let Some(relative) = inside(&path) else {
        return Err(Error::Invalid(format!("{} leads out of the layer", path.display())));
    };
    let during = || format!("unpack {}", path.display());
    let name = relative.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if name == OPAQUE {
        let directory = real_parent(&relative, into)?;
        return set_opaque(&directory).during(during);
    }
    if let Some(hidden) = name.strip_prefix(WHITEOUT) {
        let target = real_parent(&relative, into)?.join(hidden);
        let _ = fs::remove_file(&target);
        return mknod(&target, SFlag::S_IFCHR, Mode::empty(), 0)
            .map_err(io::Error::from)
            .during(during);
    }
    match entry.header().entry_type() {
        EntryType::Char | EntryType::Block | EntryType::Fifo => {
            let target =
                real_parent(&relative, into)?.join(relative.file_name().unwrap_or_default());
            make_node(entry, &target).during(during)
        }
        EntryType::XGlobalHeader => Ok(()),
        _ if relative.as_os_str().is_empty() => Ok(()),
        _ => match entry.unpack_in(into).during(during)? {
            true => Ok(()),
            false => Err(Error::Invalid(format!("{} leads out of the layer", path.display()))),
        },
    }
}

/// The path without roots and dots; `None` when it leads out of the directory.
fn inside(path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(clean)
}

/// The directory that holds `relative`, created if missing. Symbolic links in the path are refused.
fn real_parent(relative: &Path, into: &Path) -> Result<PathBuf> {
    let mut at = into.to_owned();
    for part in relative.parent().into_iter().flat_map(Path::components) {
        at.push(part);
        match fs::symlink_metadata(&at) {
            Ok(about) if about.is_dir() => {}
            Ok(_) => {
                return Err(Error::Invalid(format!(
                    "{} has a parent that is not a directory",
                    relative.display()
                )));
            }
            Err(_) => fs::create_dir(&at).during(|| format!("create {}", at.display()))?,
        }
    }
    Ok(at)
}

fn make_node<R: Read>(entry: &Entry<'_, R>, target: &Path) -> io::Result<()> {
    let header = entry.header();
    let numbers = || {
        Ok::<_, io::Error>((
            header.device_major()?.unwrap_or(0),
            header.device_minor()?.unwrap_or(0),
        ))
    };
    let (kind, (major, minor)) = match header.entry_type() {
        EntryType::Char => (SFlag::S_IFCHR, numbers()?),
        EntryType::Block => (SFlag::S_IFBLK, numbers()?),
        // A FIFO has no device number; the archive's numbers are ignored.
        _ => (SFlag::S_IFIFO, (0, 0)),
    };
    let mode = header.mode()? & 0o7777;
    let _ = fs::remove_file(target);
    mknod(target, kind, Mode::from_bits_truncate(mode), libc::makedev(major, minor))?;
    use std::os::unix::fs::PermissionsExt;
    std::os::unix::fs::lchown(target, Some(header.uid()? as u32), Some(header.gid()? as u32))?;
    fs::set_permissions(target, fs::Permissions::from_mode(mode))
}

fn set_opaque(directory: &Path) -> io::Result<()> {
    let path = std::ffi::CString::new(directory.as_os_str().as_bytes())?;
    let name = c"trusted.overlay.opaque";
    // SAFETY: the pointers are to strings and a byte that outlive the call.
    let result =
        unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), b"y".as_ptr().cast(), 1, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Detects the compression from the first bytes, not from the media type.
pub fn decompress(file: impl Read + Send + 'static) -> Result<Box<dyn Read + Send>> {
    let mut reader = BufReader::with_capacity(64 << 10, file);
    let start = io::BufRead::fill_buf(&mut reader).during(|| "read an archive".into())?;
    let (gzip, zstd) =
        (start.starts_with(&[0x1f, 0x8b]), start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]));
    if gzip {
        Ok(Box::new(flate2::bufread::MultiGzDecoder::new(reader)))
    } else if zstd {
        let decoder = zstd::stream::read::Decoder::with_buffer(reader);
        Ok(Box::new(decoder.during(|| "read an archive".into())?))
    } else {
        Ok(Box::new(reader))
    }
}

struct Hashing<R> {
    inner: R,
    hash: Sha256,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hash.update(&buffer[..n]);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileTypeExt, MetadataExt};

    use super::*;

    fn archive(fill: impl FnOnce(&mut tar::Builder<&mut Vec<u8>>)) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut builder = tar::Builder::new(&mut bytes);
        fill(&mut builder);
        builder.finish().expect("finished");
        drop(builder);
        bytes
    }

    fn file(builder: &mut tar::Builder<&mut Vec<u8>>, path: &str, kind: EntryType, link: &str) {
        let mut header = tar::Header::new_gnu();
        // Written raw, so that the path may be invalid.
        header.as_gnu_mut().expect("gnu").name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o640);
        header.set_uid(1000);
        header.set_gid(1000);
        header.set_size(0);
        if !link.is_empty() {
            header.set_link_name_literal(link).expect("fits");
        }
        header.set_cksum();
        builder.append(&header, io::empty()).expect("appended");
    }

    fn unpack_bytes(bytes: &[u8], diff_id: Option<&str>) -> (tempfile::TempDir, Result<()>) {
        let root = tempfile::tempdir().expect("a directory");
        let blob = root.path().join("blob");
        fs::write(&blob, bytes).expect("written");
        let own = format!("sha256:{}", hex(&Sha256::digest(bytes)));
        let result = layer(
            File::open(blob).expect("opened"),
            diff_id.unwrap_or(&own),
            root.path(),
            &root.path().join("layer"),
        );
        (root, result)
    }

    #[test]
    fn whiteouts_owners_and_links_are_kept() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let bytes = archive(|b| {
            file(b, "dir/", EntryType::Directory, "");
            file(b, "dir/file", EntryType::Regular, "");
            file(b, "dir/hard", EntryType::Link, "dir/file");
            file(b, "dir/.wh.gone", EntryType::Regular, "");
            file(b, "fifo", EntryType::Fifo, "");
        });
        let (root, result) = unpack_bytes(&bytes, None);
        result.expect("unpacked");
        let at =
            |path: &str| fs::symlink_metadata(root.path().join("layer").join(path)).expect(path);
        assert_eq!((at("dir/file").uid(), at("dir/file").mode() & 0o777), (1000, 0o640));
        assert_eq!(at("dir/hard").nlink(), 2);
        assert!(at("dir/gone").file_type().is_char_device() && at("dir/gone").rdev() == 0);
        assert!(at("fifo").file_type().is_fifo());
    }

    #[test]
    fn paths_that_lead_out_of_the_layer_are_refused() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let check = |fill: &dyn Fn(&mut tar::Builder<&mut Vec<u8>>)| {
            let (root, result) = unpack_bytes(&archive(fill), None);
            assert!(result.is_err());
            assert!(!root.path().join("layer").exists() && !root.path().join("evil").exists());
        };
        check(&|b| file(b, "../evil", EntryType::Regular, ""));
        check(&|b| {
            file(b, "out", EntryType::Symlink, "..");
            file(b, "out/evil", EntryType::Regular, "");
        });
        check(&|b| {
            file(b, "out", EntryType::Symlink, "..");
            file(b, "out/.wh.evil", EntryType::Regular, "");
        });
        check(&|b| file(b, "hard", EntryType::Link, "../blob"));
        let (root, result) =
            unpack_bytes(&archive(|b| file(b, "a", EntryType::Regular, "")), Some("sha256:0"));
        assert!(result.is_err() && !root.path().join("layer").exists());
    }
}
