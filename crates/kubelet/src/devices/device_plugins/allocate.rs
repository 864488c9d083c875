//! Devices for the containers of a pod: allocated before the pod starts, passed to the runtime when a
//! container starts.
//!
//! In: pods, and the plugins' answers. Out: the table's entries; [`Extras`] for a container.
//! Upstream: `allocateContainerResources`, `GetDeviceRunContainerOptions`, `deviceRunContainerOptions`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::time::{Instant, timeout_at};

use super::messages::{Allocated, ContainerPreferredRequest};
use super::plugin::Plugin;
use super::table::Room;
use super::{DevicePluginError, DevicePlugins, State};
use crate::managers::hints::{Hint, Hints, Mask};
use crate::managers::{HintProvider, Refusal};
use crate::names;
use crate::resources::units;

/// How long a pod waits for the devices of pods that are terminating.
const ENDING_LIMIT: Duration = Duration::from_secs(60);

/// The plugins' additions to a container's spec.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extras {
    pub envs: Vec<(String, String)>,
    pub mounts: Vec<cri::Mount>,
    pub devices: Vec<cri::Device>,
    pub annotations: Vec<(String, String)>,
    pub cdi_devices: Vec<String>,
}

impl Extras {
    /// The first value of a name wins.
    fn add(&mut self, answer: &Allocated) {
        let add = |all: &mut Vec<(String, String)>, key: &String, value: &String| {
            if !all.iter().any(|(known, _)| known == key) {
                all.push((key.clone(), value.clone()));
            }
        };
        answer.envs.iter().for_each(|(key, value)| add(&mut self.envs, key, value));
        answer.annotations.iter().for_each(|(key, value)| add(&mut self.annotations, key, value));
        for device in &answer.devices {
            if !self.devices.iter().any(|known| known.container_path == device.container_path) {
                self.devices.push(cri::Device {
                    container_path: device.container_path.clone(),
                    host_path: device.host_path.clone(),
                    permissions: device.permissions.clone(),
                });
            }
        }
        for mount in &answer.mounts {
            if !self.mounts.iter().any(|known| known.container_path == mount.container_path) {
                self.mounts.push(cri::Mount {
                    container_path: mount.container_path.clone(),
                    host_path: mount.host_path.clone(),
                    readonly: mount.read_only,
                    ..cri::Mount::default()
                });
            }
        }
        for device in &answer.cdi_devices {
            if !self.cdi_devices.contains(&device.name) {
                self.cdi_devices.push(device.name.clone());
            }
        }
    }
}

/// Whether a resource claim of the pod provides this resource to the container.
fn is_of_a_claim(pod: &Pod, container: &str, resource: &str) -> bool {
    let status = pod.status.as_ref().and_then(|one| one.extended_resource_claim_status.as_ref());
    status.is_some_and(|status| {
        let mut all = status.request_mappings.iter();
        all.any(|map| map.container_name == container && map.resource_name == resource)
    })
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

impl State {
    /// The container's requests of plugin resources. For extended resources, limits equal requests.
    fn asked(&self, pod: &Pod, container: &Container) -> Vec<(String, usize)> {
        let limits = container.resources.iter().flat_map(|all| all.limits.iter().flatten());
        let is_ours = |resource: &str| {
            self.table.is_known(resource) && !is_of_a_claim(pod, &container.name, resource)
        };
        let ours = limits.filter(|(resource, _)| is_ours(resource));
        ours.map(|(resource, amount)| {
            (resource.clone(), usize::try_from(units(amount)).unwrap_or_default())
        })
        .collect()
    }

    pub fn has_all(&self, pod: &Pod) -> bool {
        let uid = names::uid(pod);
        containers(pod).all(|container| {
            let asked = self.asked(pod, container);
            let mut asked = asked.iter().filter(|(_, required)| *required > 0);
            asked.all(|(resource, _)| self.table.has(uid, &container.name, resource))
        })
    }

    /// Whether terminating pods hold devices that the container lacks.
    fn can_wait(&self, pod: &Pod, container: &Container) -> bool {
        let name = &container.name;
        self.asked(pod, container).iter().any(|(resource, required)| {
            let later = self.table.room_without(pod, name, resource, *required, &self.unwanted);
            self.table.room(pod, name, resource, *required).is_err() && later.is_ok()
        })
    }

    /// The plugin of a resource.
    fn plugin(&self, resource: &str) -> Result<Arc<Plugin>, DevicePluginError> {
        let known = self.plugins.get(resource);
        let known = known.ok_or_else(|| DevicePluginError::Unknown(resource.to_owned()))?;
        match self.table.is_stopped(resource) {
            true => Err(DevicePluginError::Stopped(resource.to_owned())),
            false => Ok(known.clone()),
        }
    }
}

impl DevicePlugins {
    /// Whether the pod requests resources of device plugins.
    pub fn concerns(&self, pod: &Pod) -> bool {
        let state = self.state();
        containers(pod).any(|container| !state.asked(pod, container).is_empty())
    }

    /// Waits while terminating pods may free the devices that the containers lack.
    async fn wait_for(&self, pod: &Pod, containers: &[&Container]) {
        let deadline = Instant::now() + ENDING_LIMIT;
        let mut freed = self.freed.subscribe();
        while containers.iter().any(|container| self.state().can_wait(pod, container)) {
            if timeout_at(deadline, freed.changed()).await.is_err() {
                return;
            }
        }
    }

    /// Allocates the container's devices, near these NUMA nodes if that is possible.
    async fn allocate_near(
        &self,
        pod: &Pod,
        container: &Container,
        affinity: Option<Mask>,
    ) -> Result<(), DevicePluginError> {
        let asked = self.state().asked(pod, container);
        let (mut is_news, mut done) = (false, Ok(()));
        for (resource, required) in asked {
            let one = self.allocate_one(pod, &container.name, (&resource, required), affinity);
            match one.await {
                Ok(got) => is_news |= got,
                Err(why) => {
                    done = Err(why);
                    break;
                }
            }
        }
        // The container keeps the devices that it did get, though others are missing.
        if is_news {
            self.save(&self.state());
        }
        done
    }

    /// True if the container got any device.
    async fn allocate_one(
        &self,
        pod: &Pod,
        container: &str,
        (resource, required): (&str, usize),
        affinity: Option<Mask>,
    ) -> Result<bool, DevicePluginError> {
        let room = self.state().table.room(pod, container, resource, required)?;
        let Some(mut room) = room else { return Ok(false) };
        let near = self.state().table.near(resource, &room.free, affinity);
        if near.len() + room.reused.len() >= required {
            room.free = near.iter().cloned().collect();
        }
        let mut preferred = self.preferred(resource, room).await?;
        preferred.extend(near);
        let (plugin, taken) = {
            let mut state = self.state();
            let plugin = state.plugin(resource)?;
            (plugin, state.table.take(pod, container, resource, required, &preferred)?)
        };
        let started = Instant::now();
        let answer = plugin.allocate(taken).await;
        self.counts.allocated(resource, started.elapsed());
        let (answer, refused) = match answer {
            Ok(answer) => (Some(answer), None),
            Err(why) => (None, Some(why)),
        };
        self.state().table.answered(names::uid(pod), container, resource, answer);
        refused.map_or(Ok(true), Err)
    }

    /// The plugin's preferred devices, if it offers GetPreferredAllocation.
    async fn preferred(
        &self,
        resource: &str,
        room: Room,
    ) -> Result<Vec<String>, DevicePluginError> {
        if room.reused.len() == room.required {
            return Ok(vec![]);
        }
        let plugin = {
            let state = self.state();
            match state.plugins.get(resource) {
                Some(known) if known.options.get_preferred_allocation_available => {
                    state.plugin(resource)?
                }
                _ => return Ok(vec![]),
            }
        };
        let asked = ContainerPreferredRequest {
            available: room.free.union(&room.reused).cloned().collect(),
            must_include: room.reused.into_iter().collect(),
            size: i32::try_from(room.required).unwrap_or(i32::MAX),
        };
        plugin.preferred(asked).await
    }

    /// The additions for a container that is about to start.
    pub async fn extras(
        &self,
        pod: &Pod,
        container: &Container,
    ) -> Result<Extras, DevicePluginError> {
        let uid = names::uid(pod);
        let asked = self.state().asked(pod, container);
        let mut is_missing = false;
        for (resource, _) in asked.iter().filter(|(_, required)| *required > 0) {
            self.pre_start(uid, &container.name, resource).await?;
            is_missing |= self.state().table.ids(uid, &container.name, resource).is_none();
        }
        if is_missing {
            self.allocate_near(pod, container, None).await?;
        }
        let mut extras = Extras::default();
        let state = self.state();
        for (_, given) in state.table.of_container(uid, &container.name) {
            given.answer.iter().for_each(|answer| extras.add(answer));
        }
        Ok(extras)
    }

    async fn pre_start(
        &self,
        pod: &str,
        container: &str,
        resource: &str,
    ) -> Result<(), DevicePluginError> {
        let (plugin, ids): (_, BTreeSet<String>) = {
            let state = self.state();
            match state.plugins.get(resource) {
                Some(known) if known.options.pre_start_required => {}
                // Only an earlier kubelet knew whether this plugin requires PreStartContainer.
                None if !state.table.counts(resource) => {
                    return Err(DevicePluginError::NoEndpoint(resource.to_owned()));
                }
                _ => return Ok(()),
            }
            let ids = state.table.ids(pod, container, resource);
            let ids = ids.ok_or_else(|| DevicePluginError::NotAllocated {
                pod: pod.to_owned(),
                container: container.to_owned(),
                resource: resource.to_owned(),
            })?;
            let plugin = state.plugin(resource);
            (plugin.map_err(|why| DevicePluginError::PreStart(Box::new(why)))?, ids)
        };
        plugin.pre_start(ids.into_iter().collect()).await
    }
}

#[async_trait]
impl HintProvider for DevicePlugins {
    fn hints(&self, pod: &Pod, container: &Container) -> Hints {
        let state = self.state();
        let asked = state.asked(pod, container);
        state.table.hints(&self.nodes, pod, Some(&container.name), &asked)
    }

    fn pod_hints(&self, pod: &Pod) -> Hints {
        let state = self.state();
        let mut sums: BTreeMap<String, usize> = BTreeMap::new();
        for (resource, required) in containers(pod).flat_map(|one| state.asked(pod, one)) {
            *sums.entry(resource).or_default() += required;
        }
        let asked: Vec<(String, usize)> = sums.into_iter().collect();
        state.table.hints(&self.nodes, pod, None, &asked)
    }

    async fn wait_for_room(&self, pod: &Pod) {
        self.wait_for(pod, &containers(pod).collect::<Vec<_>>()).await;
    }

    async fn allocate(&self, pod: &Pod, container: &Container, hint: Hint) -> Result<(), Refusal> {
        if hint == Hint::NONE {
            self.wait_for(pod, &[container]).await;
        }
        let done = self.allocate_near(pod, container, hint.affinity).await;
        done.map_err(Refusal::unexpected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::device_plugins::messages::{CdiDevice, DeviceSpec, Mount};

    #[test]
    fn answers_of_two_plugins_are_merged() {
        let answer = |value: &str, path: &str| Allocated {
            envs: [("KEY".to_owned(), value.to_owned())].into(),
            annotations: [(format!("a-{value}"), value.to_owned())].into(),
            mounts: vec![Mount {
                container_path: "/lib/x".into(),
                host_path: path.into(),
                read_only: true,
            }],
            devices: vec![DeviceSpec {
                container_path: path.into(),
                host_path: path.into(),
                permissions: "rw".into(),
            }],
            cdi_devices: vec![CdiDevice { name: "example.com/d=1".into() }],
        };
        let mut extras = Extras::default();
        extras.add(&answer("1", "/dev/one"));
        extras.add(&answer("2", "/dev/two"));
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(extras.envs, [pair("KEY", "1")]);
        assert_eq!(extras.annotations, [pair("a-1", "1"), pair("a-2", "2")]);
        assert_eq!(extras.cdi_devices, ["example.com/d=1"]);
        assert_eq!(extras.mounts.len(), 1);
        assert!(extras.mounts[0].readonly && extras.mounts[0].host_path == "/dev/one");
        let paths: Vec<_> = extras.devices.iter().map(|one| one.host_path.as_str()).collect();
        assert_eq!(paths, ["/dev/one", "/dev/two"]);
    }
}
