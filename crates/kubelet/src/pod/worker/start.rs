//! The part of the worker that starts things: volumes, sandbox, images, containers.
//!
//! In: a [`Plan`]. Out: its execution, and a waiting reason for each container that did not start.
//! Upstream: `kuberuntime_manager.go` SyncPod, `kuberuntime_container.go` startContainer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use client::{ErrorExt, EventType};
use cri::{ContainerConfig, PodSandboxConfig, UserNamespace};
use futures::future::{join, join_all};
use k8s_openapi::api::core::v1::{Container, ObjectReference, Pod, PodSpec, Secret, Volume};
use release::features::{self, Feature};

use super::error::{ConfigError, SandboxError};
use super::{Retry, Worker};
use crate::devices::device_plugins::Extras;
use crate::managers::cpuset::CpuSet;
use crate::names;
use crate::node::families;
use crate::pod::amounts::amounts;
use crate::pod::container::{NodeSettings, Prepared, container_config};
use crate::pod::downward::Addresses;
use crate::pod::env::{self, EnvError, FileValues, Sources, Surroundings};
use crate::pod::env_file;
use crate::pod::events::reference;
use crate::pod::handler::{self, Outcome};
use crate::pod::holds::NotStarted;
use crate::pod::hosts;
use crate::pod::input::told_to_stop;
use crate::pod::objects::ObjectError;
use crate::pod::observed::{Observed, Role, ephemeral_as_container};
use crate::pod::phase::RESTARTING;
use crate::pod::plan::Plan;
use crate::pod::sandbox::sandbox_config;
use crate::pod::users;
use crate::reason::Reason;
use crate::resources::{Cfs, is_sidecar};
use crate::volumes::plugin::References;
use crate::volumes::{self, Done, Mounted, Occasion, VolumeError, Wanted, claims};

const CRASH_LOOP: &str = "CrashLoopBackOff";

/// The sandbox of new containers.
struct Place {
    id: String,
    config: PodSandboxConfig,
    addresses: Addresses,
    volumes: BTreeMap<String, Mounted>,
    users: UserNamespace,
}

type Given = (Vec<(String, String)>, Vec<String>, Extras);
type Refs = (BTreeSet<(String, String)>, BTreeSet<(String, String)>);

impl Worker {
    /// Executes the plan. `Ok(None)`: something changed, observe again. `Ok(Some(wait))`: nothing can change
    /// before that time. `Err`: a failure to retry.
    pub(super) async fn act(
        &mut self,
        plan: Plan,
        observed: &Observed,
    ) -> Result<Option<Duration>, Retry> {
        let counted = plan.create_sandbox && self.has_own_users();
        let done = self.carry_out(plan, observed).await;
        if counted {
            self.context.starts.users.count_start(done.is_err() || !self.holds.waiting.is_empty());
        }
        done
    }

    async fn carry_out(
        &mut self,
        plan: Plan,
        observed: &Observed,
    ) -> Result<Option<Duration>, Retry> {
        let mut progress = false;
        if plan.kill_pod {
            match plan.create_sandbox {
                true => self.stop_everything(observed).await,
                // It will not run again.
                false => self.stop_containers().await.map_err(|_| Retry)?,
            }
            progress = true;
        }
        for kill in &plan.kill {
            self.stop_for_restart(observed, kill).await;
            progress = true;
        }
        if !plan.remove.is_empty() {
            self.remove_for_restart(&plan.remove).await?;
            progress = true;
        }
        if !plan.resize.is_empty() {
            self.resize(&plan.resize).await?;
            progress = true;
        }
        let starts = !(plan.start.is_empty()
            && plan.start_init.is_empty()
            && plan.start_ephemeral.is_empty());
        if !plan.create_sandbox && !starts {
            return Ok(if progress { None } else { Some(super::RELIST) });
        }
        let occasion = match plan.create_sandbox {
            true => Occasion::Sandbox,
            false => Occasion::Containers,
        };
        let volumes = self.prepare_volumes(occasion).await?;
        let place = match plan.create_sandbox {
            true => {
                self.context.figures.pod_starts();
                let made = self.create_sandbox(plan.attempt, observed, volumes).await;
                made.inspect_err(|Retry| self.context.figures.pod_not_started())?
            }
            false => self.existing_place(observed, volumes).await?,
        };
        // A sandbox whose containers ran before has its rules.
        if plan.create_sandbox || observed.containers.is_empty() {
            self.wait_for_policies(&place.addresses).await?;
        }
        progress |= plan.create_sandbox;
        let pod = self.pod.clone();
        let Some(spec) = &pod.spec else { return Ok(None) };
        let (started, wait) = self.start_all(in_order(&plan, spec), observed, &place).await;
        match wait {
            Some(wait) if !(progress || started) => Ok(Some(wait.max(Duration::from_millis(50)))),
            _ => Ok(None),
        }
    }

    /// Whether a container started, and when the first of the others is to be retried.
    async fn start_all(
        &mut self,
        queue: Vec<(Role, Container)>,
        observed: &Observed,
        place: &Place,
    ) -> (bool, Option<Duration>) {
        let (mut progress, mut wait) = (false, None);
        for (role, container) in queue {
            let done = match self.holds.get(&container.name) {
                Some(error) => Err(error),
                None => {
                    let done = self.start_container(role, &container, observed, place).await;
                    if let Err(error) = &done
                        && error.why.reason != CRASH_LOOP
                        && !error.is_stopping()
                    {
                        self.context.figures.container_not_started(role, &error.why.reason);
                    }
                    done
                }
            };
            let Err(error) = done else {
                self.holds.waiting.remove(&container.name);
                progress = true;
                continue;
            };
            let retry = error.retry_in.unwrap_or(super::RELIST);
            wait = Some(wait.map_or(retry, |w: Duration| w.min(retry)));
            self.holds.hold(&container.name, error, retry);
            // A failed init container blocks those after it.
            if role == Role::Init && !is_sidecar(&container) {
                break;
            }
        }
        (progress, wait)
    }

    fn addresses(&self, observed: &Observed) -> Addresses {
        Addresses { pod: self.pod_ips(observed), host: self.context.node.host_ips() }
    }

    fn sandbox_config(&self, attempt: u32, users: &UserNamespace) -> PodSandboxConfig {
        let context = &self.context;
        let parent = context.cgroups.pod_path(&self.pod);
        sandbox_config(
            &self.pod,
            attempt,
            &context.node.config,
            &context.starts.resolver,
            &parent,
            users,
        )
    }

    async fn existing_place(
        &self,
        observed: &Observed,
        volumes: BTreeMap<String, Mounted>,
    ) -> Result<Place, Retry> {
        let sandbox = observed.ready_sandbox().ok_or(Retry)?;
        let addresses = self.addresses(observed);
        let users = self.users().await.map_err(|error| {
            tracing::warn!(
                pod = names::full(&self.pod),
                %error,
                "failed to get the pod's user namespace"
            );
        })?;
        let config = self.sandbox_config(sandbox.attempt, &users);
        Ok(Place { id: sandbox.id.clone(), config, addresses, volumes, users })
    }

    fn has_own_users(&self) -> bool {
        self.pod.spec.as_ref().and_then(|spec| spec.host_users) == Some(false)
    }

    /// The user namespace of the pod. Upstream: GetOrCreateUserNamespaceMappings.
    async fn users(&self) -> Result<UserNamespace, SandboxError> {
        if !self.has_own_users() {
            return Ok(users::of_node());
        }
        let (known, uid) = (self.context.starts.users.clone(), self.uid.clone());
        Ok(tokio::task::spawn_blocking(move || known.of_pod(&uid)).await??)
    }

    /// Checks that the runtime supports `hostUsers: false`. Without support the pod must not run, because it
    /// would get more rights than it asked for. Upstream: HandlerSupportsUserNamespaces.
    async fn check_users(&self, handler: &str) -> Result<(), SandboxError> {
        if !self.has_own_users() {
            return Ok(());
        }
        let handler = handler.to_owned();
        let refused = SandboxError::NoUserNamespaces { handler: handler.clone() };
        let all = match self.context.runtime.status(false).await {
            Ok(status) => status.runtime_handlers,
            Err(why) => {
                let refused = Box::new(refused);
                return Err(SandboxError::UnknownUserNamespaces { refused, why });
            }
        };
        match all.iter().find(|known| known.name == handler) {
            Some(known) if known.features.as_ref().is_some_and(|f| f.user_namespaces) => Ok(()),
            None if !all.is_empty() => {
                Err(SandboxError::UnknownHandler { refused: Box::new(refused), handler })
            }
            _ => Err(refused),
        }
    }

    async fn create_sandbox(
        &mut self,
        attempt: u32,
        observed: &Observed,
        volumes: BTreeMap<String, Mounted>,
    ) -> Result<Place, Retry> {
        let context = self.context.clone();
        self.prepare_devices().await?;
        self.wait_for_network().await?;
        if attempt > 0 && !observed.sandboxes.is_empty() {
            let text = "Pod sandbox changed, it will be killed and re-created.";
            context.events.tell(&self.pod, EventType::Normal, "SandboxChanged", text);
        }
        context.cgroups.create_pod(&self.pod, self.pod_cfs());
        let refused = |error: SandboxError| {
            let text = format!("Failed to create pod sandbox: {error}");
            context.events.warn(&self.pod, "FailedCreatePodSandBox", text);
        };
        let handler = self.runtime_handler().await.map_err(refused)?;
        self.check_users(&handler).await.map_err(refused)?;
        let users = self.users().await.map_err(refused)?;
        let config = self.sandbox_config(attempt, &users);
        let logs = config.log_directory.clone();
        let created = async {
            std::fs::create_dir_all(&logs)?;
            context.runtime.run_pod_sandbox(config.clone(), &handler).await
        };
        let id = created.await.map_err(|error| {
            let text = format!(
                "Failed to create pod sandbox: rpc error: code = {} desc = {error}",
                error.code()
            );
            tracing::warn!(pod = names::full(&self.pod), %error, "failed to create the pod's sandbox");
            context.events.warn(&self.pod, "FailedCreatePodSandBox", text);
        })?;
        let now = crate::pod::runtime::observe(&*context.runtime, &self.uid).await.map_err(|error| {
            tracing::warn!(pod = names::full(&self.pod), %error, "failed to get the status of the new sandbox");
        })?;
        let addresses = self.addresses(&now);
        self.write_hosts(&addresses).map_err(|error| {
            tracing::warn!(pod = names::full(&self.pod), %error, "failed to write the pod's hosts file");
        })?;
        Ok(Place { id, config, addresses, volumes, users })
    }

    /// The node's settings for a container.
    pub(super) fn node_settings(&self, container: &str) -> NodeSettings {
        let node = &self.context.node;
        let has_own = !self.context.managers.exclusive(&self.uid, container).is_empty();
        NodeSettings {
            memory: node.machine.memory,
            cfs: self.cfs(has_own),
            seccomp_default: node.config.limits.seccomp_default,
        }
    }

    /// The quotas of the pod as a whole.
    pub(super) fn pod_cfs(&self) -> Cfs {
        self.cfs(self.context.managers.has_exclusive(&self.uid))
    }

    fn cfs(&self, has_own: bool) -> Cfs {
        let is_exclusive = has_own && features::enabled(Feature::DisableCPUQuotaWithExclusiveCPUs);
        Cfs { is_exclusive, ..self.context.node.config.limits.cfs }
    }

    /// Adds the CPUs and memory nodes that the container may use.
    fn pinned(&self, container: &Container, mut config: ContainerConfig) -> ContainerConfig {
        let managers = &self.context.managers;
        managers.started(&self.pod, container);
        let limits = config.linux.as_mut().and_then(|linux| linux.resources.as_mut());
        if let Some(limits) = limits {
            let cpus = managers.cpus(&self.uid, &container.name);
            limits.cpuset_cpus = cpus.map(|cpus| cpus.to_string()).unwrap_or_default();
            let nodes: CpuSet = managers.memory_nodes(&self.uid, &container.name).nodes().collect();
            limits.cpuset_mems = nodes.to_string();
        }
        config
    }

    async fn prepare_devices(&self) -> Result<(), Retry> {
        let context = &self.context;
        context.devices.prepare(&self.pod).await.map_err(|error| {
            let text = format!("Failed to prepare dynamic resources: {error}");
            let reason = "FailedPrepareDynamicResources";
            context.events.warn(&self.pod, reason, text);
            Retry
        })
    }

    /// The runtime handler of the pod's RuntimeClass; empty for the default.
    /// Upstream: LookupRuntimeHandler.
    async fn runtime_handler(&self) -> Result<String, SandboxError> {
        use k8s_openapi::api::node::v1::RuntimeClass;
        let class = self.pod.spec.as_ref().and_then(|spec| spec.runtime_class_name.as_deref());
        let Some(class) = class.filter(|name| !name.is_empty()) else { return Ok(String::new()) };
        match self.context.api.client.api::<RuntimeClass>(None).get(class).await {
            Ok(found) => Ok(found.handler),
            Err(error) if error.is_not_found() => {
                Err(SandboxError::NoRuntimeClass(class.to_owned()))
            }
            Err(error) => {
                Err(SandboxError::RuntimeClass { class: class.to_owned(), error: Box::new(error) })
            }
        }
    }

    async fn wait_for_network(&mut self) -> Result<(), Retry> {
        if self.pod.spec.as_ref().and_then(|s| s.host_network) == Some(true) {
            return Ok(());
        }
        let mut network = self.context.node.network.clone();
        let why = network.borrow_and_update().clone();
        if why.is_empty() {
            return Ok(());
        }
        let text = format!("network is not ready: container runtime network not ready: {why}");
        self.context.events.warn(&self.pod, "NetworkNotReady", text);
        let input = self.input.clone();
        tokio::select! {
            ready = network.wait_for(String::is_empty) => ready.map(drop).map_err(|_| Retry),
            () = told_to_stop(&input) => Err(Retry),
        }
    }

    /// Upstream: nothing; a network plugin that cares delays its own part of the sandbox.
    async fn wait_for_policies(&self, addresses: &Addresses) -> Result<(), Retry> {
        let Some(gate) = &self.context.node.config.network_gate else { return Ok(()) };
        gate.admit(&self.pod, &addresses.pod).await.map_err(|error| {
            tracing::warn!(
                pod = names::full(&self.pod),
                %error,
                "failed to start the pod's containers"
            );
            self.context.events.warn(&self.pod, "NetworkNotReady", error.to_string());
            Retry
        })
    }

    fn write_hosts(&self, addresses: &Addresses) -> std::io::Result<()> {
        let Some(spec) = &self.pod.spec else { return Ok(()) };
        let aliases = spec.host_aliases.as_deref().unwrap_or_default();
        let text = if spec.host_network == Some(true) {
            let own = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
            hosts::host_network_hosts_file(&own, aliases)
        } else {
            let (hostname, domain) = self.hostname();
            hosts::hosts_file(&addresses.pod, &hostname, &domain, aliases)
        };
        self.dir.create()?;
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(self.dir.hosts(), text)?;
        std::fs::set_permissions(self.dir.hosts(), std::fs::Permissions::from_mode(0o644))
    }

    /// Sets up the pod's volumes: containers need all of them.
    async fn prepare_volumes(
        &mut self,
        occasion: Occasion,
    ) -> Result<BTreeMap<String, Mounted>, Retry> {
        let (ready, _) = self.set_up_volumes(occasion).await;
        let volumes = self.pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let mut names = volumes.map(|volume| &volume.name);
        if names.all(|name| ready.contains_key(name)) { Ok(ready) } else { Err(Retry) }
    }

    /// Updates the volumes of a running pod; false if one could not be updated.
    pub(super) async fn refresh_volumes(&mut self) -> bool {
        self.set_up_volumes(Occasion::Running).await.1
    }

    /// Returns the mounted volumes, and whether all succeeded. Failures become events.
    async fn set_up_volumes(&mut self, occasion: Occasion) -> (BTreeMap<String, Mounted>, bool) {
        let (pod, context) = (self.pod.clone(), self.context.clone());
        let sources = self.sources(&volumes::references(&pod)).await;
        let ips = self.published.pod_ips.iter().flatten().filter_map(|ip| ip.ip.parse().ok());
        let is_on_host = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
        let host = context.node.host_ips();
        let addresses =
            Addresses { pod: if is_on_host { host.clone() } else { ips.collect() }, host };
        let allocatable = context.node.allocatable();
        let around =
            Surroundings { addresses: &addresses, allocatable: &allocatable, sources: &sources };
        let created = self.dir.create().map_err(VolumeError::io("mkdir"));
        let done = match created {
            Ok(()) => {
                let claims = claims::resolve(&context.api.client, &pod).await;
                let (dir, input) = (&self.dir, &self.input);
                let wanted = Wanted { pod: &pod, dir, claims, around: &around, input };
                volumes::set_up(&context.volumes, wanted, occasion).await
            }
            Err(error) => Done { failures: vec![(String::new(), error)], ..Done::default() },
        };
        self.refresh = done.again;
        self.claim_paths = paths_of_claims(&pod, &done.ready);
        let succeeded = done.failures.is_empty();
        for (volume, error) in done.failures {
            let Reason { reason, message } = error.about(&volume);
            context.events.warn(&pod, &reason, message);
        }
        (done.ready, succeeded)
    }

    /// The objects that exist, and those that could not be read. Waits for all concurrently.
    async fn sources(&self, wanted: &References) -> Sources {
        let (namespace, objects) = (names::namespace(&self.pod), &self.context.volumes.objects);
        let all = self.references();
        objects.keep(&self.uid, &all.0, &all.1);
        let maps = join_all(wanted.config_maps.iter().map(|name| async move {
            (name, objects.config_map(namespace, name, &self.uid, &self.objects_changed).await)
        }));
        let secrets = join_all(wanted.secrets.iter().map(|name| async move {
            (name, objects.secret(namespace, name, &self.uid, &self.objects_changed).await)
        }));
        let (maps, secrets) = join(maps, secrets).await;
        let mut out = Sources::default();
        sort(maps, &mut out.config_maps, &mut out.unknown.config_maps);
        sort(secrets, &mut out.secrets, &mut out.unknown.secrets);
        out
    }

    /// Every ConfigMap and Secret that the pod may need at any time, with its namespace.
    fn references(&self) -> Refs {
        let mut all = volumes::references(&self.pod);
        if let Some(spec) = &self.pod.spec {
            for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
                all.extend(env::references(container));
            }
            all.secrets.extend(spec.image_pull_secrets.iter().flatten().map(|r| r.name.clone()));
        }
        let home = names::namespace(&self.pod);
        let full = |set: BTreeSet<String>| set.into_iter().map(|n| (home.to_string(), n)).collect();
        (full(all.config_maps), full(all.secrets))
    }

    async fn start_container(
        &mut self,
        role: Role,
        container: &Container,
        observed: &Observed,
        place: &Place,
    ) -> Result<(), NotStarted> {
        self.hold_back(role, container, observed)?;
        self.context.figures.container_starts(role);
        let image = self.image(role, container, place).await?;
        let context = self.context.clone();
        let pod = self.pod.clone();
        let about = reference(&pod, Some((role, &container.name)));
        let tell = |kind, reason: &str, text: String| {
            context.events.about(about.clone(), kind, reason, text);
        };
        let failed = |reason: &'static str, message: String| {
            tell(EventType::Warning, "Failed", format!("Error: {message}"));
            NotStarted::new(reason, message)
        };
        let config_error = |message: String| failed("CreateContainerConfigError", message);
        let given = self.given(container, place).await;
        let given = given.map_err(|error| config_error(error.to_string()))?;
        let Some((env, devices, extras)) = given else { return Err(NotStarted::stopping()) };
        let images = self.image_volumes(container, place).await?;
        let attempt = self.next_attempt(&container.name, observed);
        let target = self.target_of(role, &container.name, observed);
        let prepared = Prepared {
            env,
            devices,
            extras: &extras,
            volumes: &place.volumes,
            images: &images,
            dir: &self.dir,
            attempt,
            image: &image,
            node: self.node_settings(&container.name),
            target,
            users: &place.users,
        };
        let config = container_config(&pod, role, container, &prepared)
            .map(|config| context.cgroups.with_limits(config, &pod, container))
            .map(|config| self.pinned(container, config))
            .map_err(|error| config_error(error.to_string()))?;
        let create_error =
            |error: std::io::Error| failed("CreateContainerError", error.to_string());
        let log = self.absolute_log(&config.log_path);
        if let Some(parent) = log.parent() {
            std::fs::create_dir_all(parent).map_err(create_error)?;
        }
        let runtime = &context.runtime;
        let id = runtime
            .create_container(&place.id, config, &place.config)
            .await
            .map_err(|error| failed("CreateContainerError", error.to_string()))?;
        tell(EventType::Normal, "Created", "Container created".into());
        if role != Role::Ephemeral {
            self.resizing.actuated.set(&container.name, amounts(&pod, container));
            self.resizing.actuated.write(&self.dir);
        }
        if let Err(error) = runtime.start_container(&id).await {
            forget_if_never_run(&**runtime, &id).await;
            failed("RunContainerError", error.to_string());
            return Err(NotStarted::after_creation("RunContainerError", error.to_string()));
        }
        tell(EventType::Normal, "Started", "Container started".into());
        context.node.config.log_links.add(&pod, &container.name, &id, &log);
        self.hooked.remove(&id);
        self.post_start(role, container, &id, place).await
    }

    /// CrashLoopBackOff: delays the restart of a container that has exited.
    fn hold_back(
        &mut self,
        role: Role,
        container: &Container,
        observed: &Observed,
    ) -> Result<(), NotStarted> {
        // The newest exited run: in this observation, a container that a probe just had killed still runs.
        let exited = observed.newest_exited(&container.name);
        let Some(ended) = exited.and_then(|c| c.finished_at.or(c.created_at)) else {
            return Ok(());
        };
        // A container resized in place gets a new back-off. Upstream: GetBackoffKey.
        let resources = serde_json::to_string(&container.resources).unwrap_or_default();
        let key = format!("{}/{}/{resources}", container.name, names::container_hash(container));
        let now = base::clock::now();
        if let Some(left) = self.crashes.remaining(&key, ended, now) {
            let full = names::full(&self.pod);
            let name = &container.name;
            let text = format!("Back-off restarting failed container {name} in pod {full}");
            let about = reference(&self.pod, Some((role, name)));
            self.context.events.about(about, EventType::Warning, "BackOff", text);
            let delay = base::duration::show(self.crashes.delay(&key));
            let message = format!("back-off {delay} restarting failed container={name} pod={full}");
            return Err(NotStarted::until(CRASH_LOOP, message, Some(left)));
        }
        self.crashes.step(&key, ended, now);
        Ok(())
    }

    async fn image(
        &self,
        role: Role,
        container: &Container,
        place: &Place,
    ) -> Result<cri::Image, NotStarted> {
        self.pulled(reference(&self.pod, Some((role, &container.name))), container, place).await
    }

    async fn pulled(
        &self,
        about: ObjectReference,
        container: &Container,
        place: &Place,
    ) -> Result<cri::Image, NotStarted> {
        let (events, failed) = (self.context.events.clone(), about.clone());
        let tell = move |kind: EventType, reason: &str, text: String| {
            events.about(about.clone(), kind, reason, text);
        };
        let secrets = self.pull_secrets().await;
        let pull =
            self.context.starts.images.ensure(&self.uid, container, &secrets, &place.config, &tell);
        let done = tokio::select! {
            done = pull => done,
            () = told_to_stop(&self.input) => Err(NotStarted::stopping()),
        };
        done.inspect_err(|error| {
            if !error.is_stopping() {
                let text = format!("Error: {}", error.why.reason);
                self.context.events.about(failed, EventType::Warning, "Failed", text);
            }
        })
    }

    /// The images that the container mounts as volumes, pulled by the volumes' policies.
    async fn image_volumes(
        &self,
        container: &Container,
        place: &Place,
    ) -> Result<BTreeMap<String, cri::ImageSpec>, NotStarted> {
        let mut out = BTreeMap::new();
        let volumes = self.pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
        let mounted = |name: &str| container.volume_mounts.iter().flatten().any(|m| m.name == name);
        for volume in volumes.filter(|volume| mounted(&volume.name)) {
            let Some(source) = &volume.image else { continue };
            let named = Container {
                image: source.reference.clone(),
                image_pull_policy: source.pull_policy.clone(),
                ..Container::default()
            };
            let about = reference(&self.pod, None);
            families::image_volume_requested();
            let image = self.pulled(about, &named, place).await;
            families::image_volume_mounted(image.is_ok());
            let image = image?;
            let spec = cri::ImageSpec {
                image: image.id,
                user_specified_image: source.reference.clone().unwrap_or_default(),
                ..cri::ImageSpec::default()
            };
            out.insert(volume.name.clone(), spec);
        }
        Ok(out)
    }

    async fn pull_secrets(&self) -> Vec<Arc<Secret>> {
        let mut out = vec![];
        let references = self.pod.spec.iter().flat_map(|s| s.image_pull_secrets.iter().flatten());
        for reference in references {
            let home = names::namespace(&self.pod);
            let found = self.context.volumes.objects.secret(
                home,
                &reference.name,
                &self.uid,
                &self.objects_changed,
            );
            match found.await {
                Ok(Some(secret)) => out.push(secret),
                Ok(None) | Err(_) => {
                    let text = format!(
                        "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
                        reference.name
                    );
                    self.context.events.warn(&self.pod, "FailedToRetrieveImagePullSecret", text);
                }
            }
        }
        out
    }

    /// Variables, CDI devices, and the other additions of device plugins; `None` if the pod must stop during
    /// the calls.
    async fn given(
        &self,
        container: &Container,
        place: &Place,
    ) -> Result<Option<Given>, ConfigError> {
        let extras = tokio::select! {
            biased;
            () = told_to_stop(&self.input) => return Ok(None),
            extras = self.context.device_plugins.extras(&self.pod, container) => extras?,
        };
        let own = self.environment(container, place).await?;
        let devices = self.context.devices.of(&self.pod, container)?;
        // Variables of the spec win.
        let env = [extras.envs.clone(), own].concat();
        Ok(Some((env, [devices, extras.cdi_devices.clone()].concat(), extras)))
    }

    async fn environment(
        &self,
        container: &Container,
        place: &Place,
    ) -> Result<Vec<(String, String)>, ConfigError> {
        let pod = &self.pod;
        if !names::is_static(pod) && !self.context.starts.services.has_synced() {
            let synced = self.context.starts.services.synced();
            if tokio::time::timeout(Duration::from_secs(5), synced).await.is_err() {
                return Err(ConfigError::NoServices);
            }
        }
        let sources = self.sources(&env::references(container)).await;
        if let Some(error) = sources.unknown.first() {
            return Err(error.clone().into());
        }
        let links = pod.spec.as_ref().and_then(|s| s.enable_service_links) != Some(false);
        let home = names::namespace(pod);
        let known = &self.context.starts.known_services;
        let mut services = if links { known.objects(Some(home)) } else { vec![] };
        services.extend(self.context.starts.services.lister().get("default", "kubernetes"));
        let variables = env::service_variables(services.iter().map(AsRef::as_ref), home, links);
        let allocatable = self.context.node.allocatable();
        let around = Surroundings {
            addresses: &place.addresses,
            allocatable: &allocatable,
            sources: &sources,
        };
        let files = self.file_values(container, place).await;
        Ok(env::environment(pod, container, &variables, &around, &files)?)
    }

    /// The values of the container's variables that come from files.
    async fn file_values(&self, container: &Container, place: &Place) -> FileValues {
        let mut out = FileValues::new();
        for from in env::file_references(container) {
            let Some(root) = place.volumes.get(&from.volume_name).map(|ready| ready.path.clone())
            else {
                continue;
            };
            let shown = root.join(from.path.trim_start_matches('/')).display().to_string();
            let wanted = from.clone();
            let read = move || env_file::read(&root, &wanted.path, &wanted.key);
            let done = tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string());
            let value = match done.and_then(|read| read.map_err(|error| error.to_string())) {
                Ok(value) => Ok((value, shown)),
                Err(error) => {
                    let pod = names::full(&self.pod);
                    tracing::warn!(pod, file = shown, error, "failed to read the environment file");
                    Err(EnvError::File)
                }
            };
            out.insert(env::file_key(from), value);
        }
        out
    }

    /// One more than the last known run.
    fn next_attempt(&self, name: &str, observed: &Observed) -> u32 {
        let seen = observed.container(name).map(|c| c.attempt + 1);
        let lists = [&self.published.init_container_statuses, &self.published.container_statuses];
        let mut statuses = lists.into_iter().flatten().flatten();
        let known = statuses.find(|s| s.name == name);
        let ended = |s: &k8s_openapi::api::core::v1::ContainerStatus| {
            let last = s.last_state.as_ref().and_then(|last| last.terminated.as_ref());
            // A run that was removed by a restart of all containers is counted already.
            last.is_some_and(|last| last.reason.as_deref() != Some(RESTARTING))
        };
        let ran =
            |s: &&k8s_openapi::api::core::v1::ContainerStatus| ended(s) || s.container_id.is_some();
        let told =
            known.map(|s| s.restart_count.max(0) as u32 + u32::from(ran(&s) && seen.is_none()));
        seen.unwrap_or(0).max(told.unwrap_or(0))
    }

    /// The target container of an ephemeral container.
    fn target_of(&self, role: Role, name: &str, observed: &Observed) -> Option<String> {
        if role != Role::Ephemeral {
            return None;
        }
        let spec = self.pod.spec.as_ref()?;
        let own = spec.ephemeral_containers.iter().flatten().find(|e| e.name == name)?;
        let target = own.target_container_name.as_deref().filter(|t| !t.is_empty())?;
        observed.container(target).map(|c| c.id.clone())
    }

    async fn post_start(
        &mut self,
        role: Role,
        container: &Container,
        id: &str,
        place: &Place,
    ) -> Result<(), NotStarted> {
        let Some(hook) = container.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()) else {
            return Ok(());
        };
        let input = self.input.clone();
        let run =
            run_hook(&*self.context.runtime, &self.pod, container, id, hook, &place.addresses);
        let outcome = tokio::select! {
            outcome = run => outcome,
            () = told_to_stop(&input) => Outcome::Success,
        };
        let (Outcome::Failure(text) | Outcome::Error(text)) = outcome else { return Ok(()) };
        let about = reference(&self.pod, Some((role, &container.name)));
        // Without the text, which may contain secrets.
        let told = "PostStartHook failed";
        self.context.events.about(about, EventType::Warning, "FailedPostStartHook", told);
        let grace = self.grace();
        let stopping = self.stopping();
        stopping.stop_container(role, container, id, "FailedPostStartHook", grace).await;
        Err(NotStarted::after_creation("PostStartHookError", text))
    }
}

/// Removes a container that was created and never started: nothing else would remove it, because the
/// next try creates another. A runtime records a failed start as an exit, which stays.
async fn forget_if_never_run(runtime: &dyn cri::Runtime, id: &str) {
    let status = runtime.container_status(id).await;
    if status.is_ok_and(|status| status.state() == cri::ContainerState::Created) {
        let _ = runtime.remove_container(id).await;
    }
}

/// The containers to start, in order.
fn in_order(plan: &Plan, spec: &PodSpec) -> Vec<(Role, Container)> {
    let ephemeral = spec.ephemeral_containers.as_deref().unwrap_or_default();
    let inits = spec.init_containers.as_deref().unwrap_or_default();
    let ephemeral = plan.start_ephemeral.iter().filter_map(|i| ephemeral.get(*i));
    let ephemeral = ephemeral.map(|e| (Role::Ephemeral, ephemeral_as_container(e)));
    let pick = |role: Role, list: &[Container], i: &usize| Some((role, list.get(*i)?.clone()));
    let inits = plan.start_init.iter().filter_map(|i| pick(Role::Init, inits, i));
    let main = plan.start.iter().filter_map(|i| pick(Role::Main, &spec.containers, i));
    ephemeral.chain(inits).chain(main).collect()
}

/// Runs a lifecycle hook. Only the caller limits its time.
pub(super) async fn run_hook(
    runtime: &dyn cri::Runtime,
    pod: &Pod,
    container: &Container,
    id: &str,
    hook: &k8s_openapi::api::core::v1::LifecycleHandler,
    addresses: &Addresses,
) -> Outcome {
    const FOREVER: Duration = Duration::from_secs(24 * 3600);
    if let Some(action) = &hook.exec {
        return match handler::exec(runtime, id, action, None).await {
            Outcome::Failure(output) => Outcome::Failure(format!(
                "Exec lifecycle hook ({:?}) for Container {:?} in Pod {:?} failed, message: {output:?}",
                action.command.clone().unwrap_or_default(),
                container.name,
                names::full(pod),
            )),
            other => other,
        };
    }
    if let Some(action) = &hook.http_get {
        let ip = addresses.pod.first().copied();
        return match handler::http_get(action, container, ip, FOREVER).await {
            // Upstream: any HTTP status counts as success.
            Outcome::Failure(text) if text.contains("statuscode") => Outcome::Success,
            other => other,
        };
    }
    if let Some(sleep) = &hook.sleep {
        tokio::time::sleep(Duration::from_secs(sleep.seconds.max(0) as u64)).await;
    }
    Outcome::Success
}

/// The directories of the pod's claims; block devices have none.
fn paths_of_claims(pod: &Pod, ready: &BTreeMap<String, Mounted>) -> BTreeMap<String, PathBuf> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let claims = volumes.filter(|v| v.persistent_volume_claim.is_some() || v.ephemeral.is_some());
    let place =
        |volume: &Volume| Some((volume.name.clone(), ready.get(&volume.name)?.path.clone()));
    claims.filter_map(place).filter(|(_, path)| path.is_dir()).collect()
}

type Answers<'a, T> = Vec<(&'a String, Result<Option<Arc<T>>, ObjectError>)>;

/// Separates the objects that exist from the errors.
fn sort<T>(
    answers: Answers<'_, T>,
    there: &mut BTreeMap<String, Arc<T>>,
    unknown: &mut BTreeMap<String, ObjectError>,
) {
    for (name, answer) in answers {
        match answer {
            Ok(found) => there.extend(found.map(|found| (name.clone(), found))),
            Err(error) => {
                unknown.insert(name.clone(), error);
            }
        }
    }
}
