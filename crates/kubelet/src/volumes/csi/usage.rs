//! The usage of CSI volumes, for `/stats/summary`.

use super::{Csi, place};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub available: u64,
    pub total: u64,
    pub used: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: Option<Amount>,
    pub inodes: Option<Amount>,
}

impl Csi {
    /// The driver's usage of a pod's volume, by its name in the pod. `None`: not a CSI volume, or the
    /// driver reports none.
    pub async fn usage(&self, pod_uid: &str, name: &str) -> Option<Usage> {
        let key = {
            let uses = self.uses();
            let mut own = uses.iter().filter(|((uid, _), one)| uid == pod_uid && one.name == name);
            own.next().map(|(key, _)| key.clone())?
        };
        let all = place::of_pod(&self.root, &self.root.join("pods").join(pod_uid));
        let (_, published, data) = all.into_iter().find(|(name, ..)| *name == key.1)?;
        let data = data.ok()??;
        let driver = self.driver(&data.driver_name).ok()?;
        if !driver.abilities().await.ok()?.counts() {
            return None;
        }
        let stats = driver.stats(&data.volume_handle, &published.path).await.ok()?;
        let mut out = Usage::default();
        for one in stats.usage {
            let number = |value: i64| u64::try_from(value).unwrap_or(0);
            let amount = Amount {
                available: number(one.available),
                total: number(one.total),
                used: number(one.used),
            };
            match one.unit {
                1 => out.bytes = Some(amount),
                2 => out.inodes = Some(amount),
                _ => {}
            }
        }
        Some(out)
    }
}
