//! Encryption at rest, wired: the configuration that a flag names, or the one that
//! `decapod secrets-encrypt` keeps in the data directory, which is followed while the server runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use base::task::Tasks;
use encryption::{Encryption, Names};

#[derive(clap::Args, Clone, Debug, Default)]
pub struct EncryptionFlags {
    /// EncryptionConfiguration of what is kept encrypted [default: what `decapod secrets-encrypt`
    /// has set up]
    #[arg(long, value_name = "FILE")]
    pub encryption_provider_config: Option<PathBuf>,
    /// Take changes of that file into use while running
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    pub encryption_provider_config_automatic_reload: bool,
}

impl EncryptionFlags {
    /// The store's transformation. Fails where the configuration cannot be used: a server that
    /// silently wrote in the clear would be worse than none.
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

    /// Upstream has the check where there is something to check.
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
