//! Fields of the pod as files.

use async_trait::async_trait;

use super::files::{self, Medium};
use super::payload;
use super::plugin::{Host, Mounted, Request, Source, VolumeError, VolumePlugin};

pub struct DownwardApiPlugin;

const NAME: &str = "downward-api";

#[async_trait]
impl VolumePlugin for DownwardApiPlugin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, source: &Source<'_>) -> bool {
        source.volume.downward_api.is_some()
    }

    fn refreshes(&self) -> bool {
        true
    }

    fn is_local_storage(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError> {
        let Some(source) = &request.source.volume.downward_api else {
            return Err(VolumeError::Unsupported);
        };
        let items = source.items.as_deref().unwrap_or_default();
        let mode = payload::mode(source.default_mode, payload::DEFAULT_MODE);
        let files = payload::downward_api(request.pod, items, request.around, mode)?;
        files::write(host, request, NAME, Medium::Memory, files).await
    }
}
