//! Encryption at rest: loads the configuration of a flag, or the one that `decapod secrets-encrypt` keeps
//! in the data directory, which is watched while the server runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use base::task::Tasks;
use encryption::{Encryption, Names};

#[derive(clap::Args, Clone, Debug, Default)]
pub struct EncryptionFlags {
    /// File with an EncryptionConfiguration [default: the one that `decapod secrets-encrypt` keeps]
    #[arg(long, value_name = "FILE")]
    pub encryption_provider_config: Option<PathBuf>,
    /// Watch that file and apply changes
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    pub encryption_provider_config_automatic_reload: bool,
}

impl EncryptionFlags {
    /// The store's transformation. Fails if the configuration cannot be used: the server must not silently
    /// write Secrets unencrypted.
    pub async fn start(&self, data_dir: &Path, tasks: &Tasks) -> anyhow::Result<Arc<Encryption>> {
        let encryption = Encryption::new(Names::new(resources::places()));
        let own = data_dir.join(cli::secrets_encrypt::FILE);
        let path = self.encryption_provider_config.clone().unwrap_or_else(|| own.clone());
        let is_own = path == own;
        if is_own {
            make_private(own.parent().unwrap_or(data_dir))?;
        }
        if !is_own || path.exists() {
            encryption
                .load(&path)
                .await
                .with_context(|| format!("--encryption-provider-config {}", path.display()))?;
        }
        if is_own || self.encryption_provider_config_automatic_reload {
            tasks.spawn("encryption configuration", encryption.clone().follow(path, is_own));
        }
        Ok(encryption)
    }

    /// Adds upstream's check, if the configuration has a KMS plugin or is reloaded.
    pub fn add_health(&self, health: &apiserver::health::Health, encryption: &Arc<Encryption>) {
        if !self.encryption_provider_config_automatic_reload && !encryption.has_plugins() {
            return;
        }
        let encryption = encryption.clone();
        health.add_async("kms-providers", move || {
            let encryption = encryption.clone();
            Box::pin(async move { encryption.check().await })
        });
    }
}

fn make_private(directory: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .with_context(|| format!("cannot make {}", directory.display()))
}
