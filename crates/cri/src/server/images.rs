//! The methods of `runtime.v1.ImageService`. A method that streams a list sends it as one message, which
//! has the same fields as the answer of the plain list.

use bytes::Bytes;

use super::{Server, done, read, reply, required};
use crate::{
    ImageStatusRequest, ImageStatusResponse, ListImagesRequest, ListImagesResponse,
    PullImageRequest, PullImageResponse, RemoveImageRequest, Result,
};

impl Server {
    /// `None`: no such method.
    pub(super) async fn images(&self, method: &str, body: Bytes) -> Result<Option<Bytes>> {
        let runtime = &self.runtime;
        match method {
            "ListImages" | "StreamImages" => {
                let ask: ListImagesRequest = read(body)?;
                reply(&ListImagesResponse { images: runtime.list_images(ask.filter).await? })
            }
            "ImageStatus" => {
                let ask: ImageStatusRequest = read(body)?;
                let image = runtime.image_status(&required(ask.image, "image")?).await?;
                reply(&ImageStatusResponse { image, ..Default::default() })
            }
            "PullImage" => {
                let ask: PullImageRequest = read(body)?;
                let image = required(ask.image, "image")?;
                let pulled = runtime.pull_image(&image, ask.auth, ask.sandbox_config.as_ref());
                reply(&PullImageResponse { image_ref: pulled.await? })
            }
            "RemoveImage" => {
                let ask: RemoveImageRequest = read(body)?;
                runtime.remove_image(&required(ask.image, "image")?).await?;
                done()
            }
            "ImageFsInfo" => reply(&runtime.image_fs_info().await?),
            _ => Ok(None),
        }
    }
}
