//! AlwaysPullImages: every pod pulls its images, so that it cannot run an image on the node without the
//! right to pull it.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;

use crate::Row;

const ALWAYS: &str = "Always";

pub(crate) const ROW: Row = Row::disabled("AlwaysPullImages", |_| Ok(Box::new(AlwaysPullImages)));

pub(crate) struct AlwaysPullImages;

#[async_trait]
impl Plugin for AlwaysPullImages {
    fn name(&self) -> &'static str {
        "AlwaysPullImages"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        let about_images = matches!(&*attributes.ctx.subresource, "" | "ephemeralcontainers");
        let Some(pod) = attributes.object_as_mut::<Pod>().filter(|_| about_images) else {
            return Ok(());
        };
        let Some(spec) = &mut pod.spec else { return Ok(()) };
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten())
        {
            container.image_pull_policy = Some(ALWAYS.into());
        }
        for container in spec.ephemeral_containers.iter_mut().flatten() {
            container.image_pull_policy = Some(ALWAYS.into());
        }
        for volume in spec.volumes.iter_mut().flatten() {
            if let Some(image) = &mut volume.image {
                image.pull_policy = Some(ALWAYS.into());
            }
        }
        Ok(())
    }
}
