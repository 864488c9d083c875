//! A path of the node, checked by its type.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::PathBuf;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::HostPathVolumeSource;

use super::plugin::{Host, Mounted, Request, Source, VolumeError, VolumePlugin};

pub struct HostPathPlugin;

fn source_of<'a>(source: &'a Source<'_>) -> Option<&'a HostPathVolumeSource> {
    let own = source.volume.host_path.as_ref();
    own.or_else(|| source.persistent()?.host_path.as_ref()).filter(|_| !source.is_block())
}

#[async_trait]
impl VolumePlugin for HostPathPlugin {
    fn name(&self) -> &'static str {
        "host-path"
    }

    fn supports(&self, source: &Source<'_>) -> bool {
        source_of(source).is_some()
    }

    async fn set_up(&self, _host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError> {
        let source = source_of(&request.source).cloned().ok_or(VolumeError::Unsupported)?;
        let mounted = tokio::task::spawn_blocking(move || check(&source)).await??;
        Ok(Mounted { read_only: request.source.is_read_only(), ..mounted })
    }
}

fn check(source: &HostPathVolumeSource) -> Result<Mounted, VolumeError> {
    let path = PathBuf::from(&source.path);
    let shown = path.display();
    let failed = |what: &str| Err(VolumeError::HostPath(format!("{shown} is not {what}")));
    let kind = fs::metadata(&path).map(|meta| meta.file_type());
    match source.type_.as_deref().unwrap_or_default() {
        // Upstream leaves this to the runtime, which creates a directory if nothing exists.
        "" if kind.is_err() => fs::create_dir_all(&path).map_err(VolumeError::io("mkdir"))?,
        "DirectoryOrCreate" => match kind {
            Ok(kind) if kind.is_dir() => {}
            Ok(_) => return failed("a directory"),
            Err(_) => {
                fs::create_dir_all(&path).map_err(VolumeError::io("mkdir"))?;
                let mode = fs::Permissions::from_mode(0o755);
                fs::set_permissions(&path, mode).map_err(VolumeError::io("chmod"))?;
            }
        },
        "Directory" if !kind.as_ref().is_ok_and(|k| k.is_dir()) => return failed("a directory"),
        "FileOrCreate" => match kind {
            Ok(kind) if kind.is_file() => {}
            Ok(_) => return failed("a file"),
            Err(_) => {
                fs::write(&path, b"").map_err(VolumeError::io("create"))?;
                let mode = fs::Permissions::from_mode(0o644);
                fs::set_permissions(&path, mode).map_err(VolumeError::io("chmod"))?;
            }
        },
        "File" if !kind.as_ref().is_ok_and(|k| k.is_file()) => return failed("a file"),
        "Socket" if !kind.as_ref().is_ok_and(|k| k.is_socket()) => return failed("a socket file"),
        "CharDevice" if !kind.as_ref().is_ok_and(|k| k.is_char_device()) => {
            return failed("a character device");
        }
        "BlockDevice" if !kind.as_ref().is_ok_and(|k| k.is_block_device()) => {
            return failed("a block device");
        }
        _ => {}
    }
    Ok(Mounted::directory(path, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_path_types() {
        let root = tempfile::tempdir().expect("a directory");
        let check = |name: &str, kind: &str, ok: bool| {
            let path = root.path().join(name).display().to_string();
            let source = HostPathVolumeSource { path, type_: Some(kind.into()) };
            assert_eq!(super::check(&source).is_ok(), ok, "{name} {kind}");
        };
        check("d", "Directory", false);
        check("d", "DirectoryOrCreate", true);
        check("d", "Directory", true);
        check("d", "File", false);
        check("f", "File", false);
        check("f", "FileOrCreate", true);
        check("f", "File", true);
        check("f", "Socket", false);
        check("f", "Directory", false);
    }
}
