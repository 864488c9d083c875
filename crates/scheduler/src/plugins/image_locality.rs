//! Prefers nodes that have the images, the more so the larger they are.

use std::sync::Arc;

use crate::cluster::Cluster;
use crate::framework::{CycleState, ExtensionPoints, MAX_SCORE, Row, Score};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "ImageLocality",
    weight: 1,
    build: |_| ExtensionPoints { score: Some(Arc::new(ImageLocality)), ..Default::default() },
    hint: super::hints::never,
};

const MB: i64 = 1024 * 1024;
const LEAST: i64 = 23 * MB;
const MOST_PER_CONTAINER: i64 = 1000 * MB;

struct ImageLocality;

impl Score for ImageLocality {
    /// An image counts by its size times the share of nodes that have it, so that one warm node
    /// does not draw all pods.
    fn score(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo, cluster: &Cluster) -> i64 {
        let total = cluster.count().max(1) as f64;
        let present = pod.images.iter().filter_map(|image| Some((image, *node.images.get(image)?)));
        let sum: i64 = present
            .map(|(image, size)| {
                (size as f64 * cluster.nodes_with_image(image) as f64 / total) as i64
            })
            .sum();
        let most = MOST_PER_CONTAINER * pod.images.len().max(1) as i64;
        MAX_SCORE * (sum.clamp(LEAST, most) - LEAST) / (most - LEAST)
    }
}
