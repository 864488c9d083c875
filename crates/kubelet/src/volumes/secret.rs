//! The keys of a Secret as files in memory.

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Volume;

use super::files::{self, Medium};
use super::payload;
use super::plugin::{Host, Mounted, References, Request, Source, VolumeError, VolumePlugin};

pub struct SecretPlugin;

const NAME: &str = "secret";

#[async_trait]
impl VolumePlugin for SecretPlugin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, source: &Source<'_>) -> bool {
        source.volume.secret.is_some()
    }

    fn references(&self, volume: &Volume) -> References {
        let name = volume.secret.iter().filter_map(|source| source.secret_name.clone());
        References { secrets: name.collect(), ..References::default() }
    }

    fn refreshes(&self) -> bool {
        true
    }

    fn is_local_storage(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError> {
        let Some(source) = &request.source.volume.secret else {
            return Err(VolumeError::Unsupported);
        };
        let name = source.secret_name.as_deref().unwrap_or_default();
        let secret = request.around.sources.secret(name)?;
        let optional = source.optional == Some(true);
        let mode = payload::mode(source.default_mode, payload::DEFAULT_MODE);
        let files = payload::secret(name, secret, source.items.as_ref(), optional, mode)?;
        files::write(host, request, NAME, Medium::Memory, files).await
    }
}
