//! An image as a volume. The runtime mounts it into each container; only the directory of upstream's
//! layout is made here.

use async_trait::async_trait;

use super::plugin::{Host, Mounted, Request, Source, VolumeError, VolumePlugin};

pub struct ImagePlugin;

#[async_trait]
impl VolumePlugin for ImagePlugin {
    fn name(&self) -> &'static str {
        "image"
    }

    fn supports(&self, source: &Source<'_>) -> bool {
        source.volume.image.is_some()
    }

    async fn set_up(&self, _host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError> {
        let path = request.dir.volume(self.name(), &request.source.volume.name);
        tokio::fs::create_dir_all(&path).await.map_err(VolumeError::io("mkdir"))?;
        Ok(Mounted::directory(path, true))
    }
}
