//! The keys of a ConfigMap as files.

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Volume;

use super::files::{self, Medium};
use super::payload;
use super::plugin::{Host, Mounted, References, Request, Source, VolumeError, VolumePlugin};

pub struct ConfigMapPlugin;

const NAME: &str = "configmap";

#[async_trait]
impl VolumePlugin for ConfigMapPlugin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, source: &Source<'_>) -> bool {
        source.volume.config_map.is_some()
    }

    fn references(&self, volume: &Volume) -> References {
        let name = volume.config_map.iter().map(|source| source.name.clone());
        References { config_maps: name.collect(), ..References::default() }
    }

    fn refreshes(&self) -> bool {
        true
    }

    fn is_local_storage(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError> {
        let Some(source) = &request.source.volume.config_map else {
            return Err(VolumeError::Unsupported);
        };
        let map = request.around.sources.config_map(&source.name)?;
        let optional = source.optional == Some(true);
        let mode = payload::mode(source.default_mode, payload::DEFAULT_MODE);
        let files = payload::config_map(&source.name, map, source.items.as_ref(), optional, mode)?;
        files::write(host, request, NAME, Medium::Disk, files).await
    }
}
