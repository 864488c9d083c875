//! Subresources of pods that are created: binding and eviction.

use std::sync::Arc;

use apiserver::Registry;
use apiserver::registry::{DeleteOptions, Intent, Stored};
use apiserver::request::{Key, RequestContext};
use apiserver::resource::{Behaviour, CreateHandler, Created};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Binding, Pod, PodCondition};
use k8s_openapi::api::policy::v1::{Eviction, PodDisruptionBudget};
use machinery::field::{FieldErrors, Path};
use machinery::object::{Codec, Typed};
use machinery::selector::Selector;
use machinery::status::Reason;
use machinery::{Object, StatusError, Time};

pub(super) fn binding() -> Behaviour {
    Behaviour::Create(Arc::new(Bind))
}

pub(super) fn eviction() -> Behaviour {
    Behaviour::Create(Arc::new(Evict))
}

pub(crate) struct Bind;

static BINDING: Typed<Binding> = Typed::new();

#[async_trait]
impl CreateHandler for Bind {
    fn codec(&self) -> &dyn Codec {
        &BINDING
    }

    async fn create(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        key: &Key,
        body: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let binding = body.expect::<Binding>().clone();
        if binding.name() != key.name {
            return Err(StatusError::bad_request(
                "name in URL does not match name in Binding object",
            ));
        }
        check_target(&binding)?;
        let node = binding.target.name.clone().unwrap_or_default();
        let place = key.clone();
        let modify = move |object: &mut dyn Object| {
            bind(object, &binding, &node).map_err(|why| why.conflict(&place))
        };
        let mut inner = ctx.clone();
        // Part "binding": neither the spec's immutability nor the status' separation applies.
        inner.subresource = "binding".into();
        registry.write(&inner, key, Intent::Modify(Box::new(modify))).await?;
        Ok(Created::Success)
    }
}

/// Upstream gives these errors no reason and no causes: to it they are the server's.
fn check_target(binding: &Binding) -> Result<(), StatusError> {
    let mut errors = FieldErrors::default();
    let target = Path::new("target");
    let kind = binding.target.kind.as_deref().unwrap_or_default();
    if !matches!(kind, "" | "Node") {
        errors.not_supported(&target.child("kind"), kind, &["Node", "<empty>"]);
    }
    if binding.target.name.as_deref().unwrap_or_default().is_empty() {
        errors.required(&target.child("name"), "");
    }
    match errors.is_empty() {
        true => Ok(()),
        false => Err(StatusError::new(Reason::Unknown, errors.summary()).without_details()),
    }
}

/// Why a pod cannot be bound, in upstream's words.
#[derive(Debug, thiserror::Error)]
enum Unbound {
    #[error("Precondition failed: UID in precondition: {wanted}, UID in object meta: {found}")]
    OtherUid { wanted: String, found: String },
    #[error(
        "Precondition failed: ResourceVersion in precondition: {wanted}, ResourceVersion in object meta: {found}"
    )]
    OtherVersion { wanted: String, found: String },
    #[error("pod {0} is being deleted, cannot be assigned to a host")]
    Deleted(String),
    #[error("pod {0} is already assigned to node {1:?}")]
    Assigned(String, String),
    #[error("pod {0} has non-empty .spec.schedulingGates")]
    Gated(String),
}

impl Unbound {
    /// Upstream's storage checks the preconditions, everything else is the binding's own.
    fn conflict(&self, key: &Key) -> StatusError {
        match self {
            Self::OtherUid { .. } | Self::OtherVersion { .. } => {
                let place = format!("/pods/{}/{}", key.namespace, key.name);
                let why = format!(
                    "StorageError: invalid object, Code: 4, Key: {place}, ResourceVersion: 0, AdditionalErrorMsg: {self}"
                );
                StatusError::conflict("", "pods", &key.name, why)
            }
            _ => StatusError::conflict("", "pods/binding", &key.name, self.to_string()),
        }
    }
}

/// Assigns the pod to the node, if it is the pod that the binding means and has none.
fn bind(object: &mut dyn Object, binding: &Binding, node: &str) -> Result<(), Unbound> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let (name, found) = (object.name().to_owned(), object.uid().to_owned());
    if let Some(wanted) = given(&binding.metadata.uid).filter(|wanted| *wanted != found) {
        return Err(Unbound::OtherUid { wanted, found });
    }
    let found = object.meta().resource_version.clone().unwrap_or_default();
    if let Some(wanted) = given(&binding.metadata.resource_version).filter(|one| *one != found) {
        return Err(Unbound::OtherVersion { wanted, found });
    }
    let pod = object.expect_mut::<Pod>();
    if pod.metadata.deletion_timestamp.is_some() {
        return Err(Unbound::Deleted(name));
    }
    let spec = pod.spec.get_or_insert_default();
    if let Some(there) = given(&spec.node_name) {
        return Err(Unbound::Assigned(name, there));
    }
    if spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty()) {
        return Err(Unbound::Gated(name));
    }
    spec.node_name = Some(node.to_owned());
    for (key, value) in binding.metadata.annotations.iter().flatten() {
        pod.metadata.annotations.get_or_insert_default().insert(key.clone(), value.clone());
    }
    // Admission puts the node's zone and region there.
    for (key, value) in binding.metadata.labels.iter().flatten() {
        pod.metadata.labels.get_or_insert_default().insert(key.clone(), value.clone());
    }
    set_scheduled(pod);
    Ok(())
}

fn set_scheduled(pod: &mut Pod) {
    let status = pod.status.get_or_insert_default();
    let conditions = status.conditions.get_or_insert_default();
    let scheduled = PodCondition {
        type_: "PodScheduled".into(),
        status: "True".into(),
        last_transition_time: Some(Time(base::clock::now_seconds())),
        ..PodCondition::default()
    };
    match conditions.iter_mut().find(|condition| condition.type_ == "PodScheduled") {
        Some(there) => *there = scheduled,
        None => conditions.push(scheduled),
    }
}

struct Evict;

static EVICTION: Typed<Eviction> = Typed::new();

#[async_trait]
impl CreateHandler for Evict {
    fn codec(&self) -> &dyn Codec {
        &EVICTION
    }

    async fn create(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        key: &Key,
        body: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let eviction = body.expect::<Eviction>();
        if eviction.name() != key.name {
            return Err(StatusError::bad_request(
                "name in URL does not match name in Eviction object",
            ));
        }
        let (mut delete, dry_run) = eviction_options(ctx, eviction)?;
        let mut ctx = ctx.clone();
        ctx.dry_run = dry_run;
        let found = registry.find::<Pod>(&key.namespace, &key.name).await?;
        let pod = found.ok_or_else(|| StatusError::not_found("", "pods", &key.name))?;
        if counts_against_budgets(&pod) {
            take_disruption(registry, &pod, ctx.dry_run).await?;
        }
        delete.precondition_uid = delete.precondition_uid.or(pod.metadata.uid.clone());
        if !ctx.dry_run {
            let marked = mark_disrupted(registry, &ctx, key, &delete).await?;
            // The mark itself made a new version of the pod.
            if let Some(version) = &mut delete.precondition_resource_version {
                *version = marked.revision().to_string();
            }
        }
        ctx.subresource = String::new();
        registry.write(&ctx, key, Intent::Delete { options: delete }).await?;
        Ok(Created::Success)
    }
}

/// How the pod is to be deleted, and whether the eviction is a dry run: its body may say so as well
/// as its query. Upstream: `propagateDryRun`.
fn eviction_options(
    ctx: &RequestContext,
    eviction: &Eviction,
) -> Result<(DeleteOptions, bool), StatusError> {
    let options = eviction.delete_options.clone().unwrap_or_default();
    if options.ignore_store_read_error_with_cluster_breaking_potential == Some(true) {
        let mut errors = FieldErrors::default();
        errors.invalid(
            &Path::new("deleteOptions").child("ignoreStoreReadErrorWithClusterBreakingPotential"),
            true,
            "can not be set for pod eviction, try after removing the option",
        );
        return Err(StatusError::invalid("policy", "Eviction", eviction.name(), errors));
    }
    let in_body = options.dry_run.unwrap_or_default();
    if ctx.dry_run && !in_body.is_empty() && in_body != ["All"] {
        return Err(StatusError::new(
            Reason::Unknown,
            format!(
                "Non-matching dry-run options in request and content: [All] and [{}]",
                in_body.join(" ")
            ),
        )
        .without_details());
    }
    check_delete_options(options.propagation_policy.as_deref(), options.orphan_dependents)?;
    let preconditions = options.preconditions.unwrap_or_default();
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let delete = DeleteOptions {
        grace_period_seconds: options.grace_period_seconds,
        propagation_policy: options.propagation_policy,
        orphan_dependents: options.orphan_dependents,
        precondition_uid: given(preconditions.uid),
        precondition_resource_version: given(preconditions.resource_version),
    };
    Ok((delete, ctx.dry_run || !in_body.is_empty()))
}

/// Upstream: `ValidateDeleteOptions`.
fn check_delete_options(policy: Option<&str>, orphans: Option<bool>) -> Result<(), StatusError> {
    let Some(policy) = policy else { return Ok(()) };
    let mut errors = FieldErrors::default();
    let path = Path::new("propagationPolicy");
    if orphans.is_some() {
        let detail = "orphanDependents and deletionPropagation cannot be both set";
        errors.invalid(&path, policy, detail);
    }
    if !matches!(policy, "Foreground" | "Background" | "Orphan") {
        errors.not_supported(&path, policy, &["Foreground", "Background", "Orphan", "nil"]);
    }
    match errors.is_empty() {
        true => Ok(()),
        false => Err(StatusError::invalid("meta.k8s.io", "DeleteOptions", "", errors)),
    }
}

/// Says in the pod's status what ends it.
async fn mark_disrupted(
    registry: &Registry,
    ctx: &RequestContext,
    key: &Key,
    wanted: &DeleteOptions,
) -> Result<Stored, StatusError> {
    let mut inner = ctx.clone();
    inner.subresource = "status".into();
    let wanted = wanted.clone();
    let modify = move |object: &mut dyn Object| {
        check_preconditions(object, &wanted)?;
        let pod = object.expect_mut::<Pod>();
        let observed = pod.metadata.generation;
        let conditions = pod.status.get_or_insert_default().conditions.get_or_insert_default();
        let known = conditions.iter().position(|one| one.type_ == "DisruptionTarget");
        let since = known.filter(|at| conditions[*at].status == "True");
        let since = since.and_then(|at| conditions[at].last_transition_time.clone());
        let target = PodCondition {
            type_: "DisruptionTarget".into(),
            status: "True".into(),
            reason: Some("EvictionByEvictionAPI".into()),
            message: Some("Eviction API: evicting".into()),
            last_transition_time: since.or_else(|| Some(Time(base::clock::now_seconds()))),
            observed_generation: observed,
            ..PodCondition::default()
        };
        match known {
            Some(at) => conditions[at] = target,
            None => conditions.push(target),
        }
        Ok(())
    };
    let written = registry.write(&inner, key, Intent::Modify(Box::new(modify))).await?;
    Ok(written.object)
}

/// Is it the pod, and the version of it, that the eviction means?
fn check_preconditions(object: &dyn Object, wanted: &DeleteOptions) -> Result<(), StatusError> {
    let conflict = |why: String| Err(StatusError::conflict("", "Pod", object.name(), why));
    if let Some(uid) = wanted.precondition_uid.as_deref().filter(|uid| *uid != object.uid()) {
        return conflict(format!(
            "the UID in the precondition ({uid}) does not match the UID in record ({}). The object might have been deleted and then recreated",
            object.uid()
        ));
    }
    let version = object.meta().resource_version.as_deref().unwrap_or_default();
    let wanted = wanted.precondition_resource_version.as_deref();
    if let Some(wanted) = wanted.filter(|wanted| *wanted != version) {
        return conflict(format!(
            "the ResourceVersion in the precondition ({wanted}) does not match the ResourceVersion in record ({version}). The object might have been modified"
        ));
    }
    Ok(())
}

const REFUSED: &str = "Cannot evict pod as it would violate the pod's disruption budget.";
/// Evictions that the controller has not seen yet.
const MAX_DISRUPTED: usize = 2000;

fn still_processed(name: &str) -> StatusError {
    let detail = format!("The disruption budget {name} is still being processed by the server.");
    StatusError::new(Reason::TooManyRequests, REFUSED).retry_after(10).cause(
        "DisruptionBudget",
        "",
        detail,
    )
}

/// The eviction of pods that have ended or never started is no disruption.
fn counts_against_budgets(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_none()
        && !matches!(phase, Some("Succeeded" | "Failed" | "Pending"))
}

async fn take_disruption(registry: &Registry, pod: &Pod, dry_run: bool) -> Result<(), StatusError> {
    let all = registry.cached::<PodDisruptionBudget>(pod.namespace()).await?;
    let covers = |budget: &PodDisruptionBudget| {
        let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        Selector::from_api(selector)
            .is_ok_and(|selector| selector.matches(pod.metadata.labels.as_ref()))
    };
    let budgets: Vec<PodDisruptionBudget> = all.into_iter().filter(covers).collect();
    let budget = match budgets.as_slice() {
        [] => return Ok(()),
        [one] => one,
        _ => {
            return Err(StatusError::internal(
                "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
            ));
        }
    };
    if !is_ready(pod) && lets_unhealthy_go(budget) {
        // It is not ready: its eviction is no disruption.
        return Ok(());
    }
    let mut ctx = registry.own_context::<PodDisruptionBudget>();
    ctx.subresource = "status".into();
    ctx.dry_run = dry_run;
    let pod_name = pod.name().to_owned();
    let modify = move |object: &mut dyn Object| {
        let budget = object.expect_mut::<PodDisruptionBudget>();
        check_budget(budget)?;
        let status = budget.status.get_or_insert_default();
        status.disruptions_allowed = status.disruptions_allowed.map(|allowed| allowed - 1);
        let now = Time(base::clock::now_seconds());
        status.disrupted_pods.get_or_insert_default().insert(pod_name.clone(), now);
        Ok(())
    };
    let key = Key::new(budget.namespace(), budget.name());
    registry.write(&ctx, &key, Intent::Modify(Box::new(modify))).await.map(|_| ())
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
}

fn lets_unhealthy_go(budget: &PodDisruptionBudget) -> bool {
    let policy =
        budget.spec.as_ref().and_then(|spec| spec.unhealthy_pod_eviction_policy.as_deref());
    let enough = budget.status.as_ref().is_some_and(|status| {
        status.desired_healthy.unwrap_or(0) > 0 && status.current_healthy >= status.desired_healthy
    });
    policy == Some("AlwaysAllow") || enough
}

/// Whether one more pod may go.
fn check_budget(budget: &PodDisruptionBudget) -> Result<(), StatusError> {
    let name = budget.name();
    let status = budget.status.clone().unwrap_or_default();
    if status.observed_generation.unwrap_or(0) < budget.metadata.generation.unwrap_or(0) {
        return Err(still_processed(name));
    }
    let forbidden = |why: &str| StatusError::forbidden("policy", "poddisruptionbudget", name, why);
    let allowed = status.disruptions_allowed.unwrap_or(0);
    if allowed < 0 {
        return Err(forbidden("pdb disruptions allowed is negative"));
    }
    if status.disrupted_pods.as_ref().is_some_and(|all| all.len() > MAX_DISRUPTED) {
        let why = "DisruptedPods map too big - too many evictions not confirmed by PDB controller";
        return Err(forbidden(why));
    }
    if allowed > 0 {
        return Ok(());
    }
    let conditions = status.conditions.unwrap_or_default();
    let refusal = conditions.iter().find(|one| {
        one.type_ == "DisruptionAllowed" && one.status == "False" && !one.message.is_empty()
    });
    let healthy = status.current_healthy.unwrap_or(0);
    let desired = status.desired_healthy.unwrap_or(0);
    let detail = match refusal {
        Some(why) if why.reason == "SyncFailed" => format!(
            "The disruption budget {name} does not allow evicting pods currently because it failed sync: {}",
            why.message
        ),
        _ if healthy <= desired => format!(
            "The disruption budget {name} needs {desired} healthy pods and has {healthy} currently"
        ),
        Some(why) => format!(
            "The disruption budget {name} does not allow evicting pods currently ({}): {}",
            why.reason, why.message
        ),
        None => format!("The disruption budget {name} does not allow evicting pods currently"),
    };
    Err(StatusError::new(Reason::TooManyRequests, REFUSED).cause("DisruptionBudget", "", detail))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;
    use crate::core::service::tests::registry_of;

    /// Does the pod stay, after an eviction with these options?
    async fn evicted(query_is_dry: bool, name: &str, options: Value) -> Result<bool, String> {
        let registry = registry_of(&["pods", "poddisruptionbudgets"]).await;
        let ctx = registry.own_context::<Pod>();
        let pod = json!({"metadata": {"name": "p", "namespace": "ns"},
            "spec": {"containers": [{"name": "c", "image": "i"}]}});
        let pod: Pod = from_value(pod).expect("a pod");
        let key = Key::new("ns", "p");
        let intent = Intent::Create { object: Box::new(pod) };
        let made = registry.write(&ctx, &key, intent).await.expect("written");
        let made = made.object.object().expect("a pod");
        let version = made.meta().resource_version.clone().unwrap_or_default();
        let options = options.to_string().replace("UID", made.uid()).replace("VERSION", &version);
        let options: Value = k8s_openapi::serde_json::from_str(&options).expect("JSON");
        let body = json!({"metadata": {"name": name}, "deleteOptions": options});
        let body: Eviction = from_value(body).expect("an eviction");
        let mut ctx = ctx.clone();
        ctx.subresource = "eviction".into();
        ctx.dry_run = query_is_dry;
        let answer = Evict.create(&registry, &ctx, &key, Box::new(body)).await;
        let left = registry.find::<Pod>("ns", "p").await.expect("readable");
        let is_marked = left.iter().any(|pod| {
            let status = pod.status.clone().unwrap_or_default();
            status.conditions.iter().flatten().any(|one| one.type_ == "DisruptionTarget")
        });
        let stays = left.is_some_and(|pod| pod.metadata.deletion_timestamp.is_none());
        assert!(!(stays && is_marked), "a pod that stays is not marked");
        answer.map(|_| stays).map_err(|error| format!("{} {}", error.code, error.message))
    }

    #[test]
    fn refusals_have_upstreams_words() {
        let of = |error: StatusError| error.message.clone();
        let other = Unbound::OtherUid { wanted: "a".into(), found: "b".into() };
        assert_eq!(
            of(other.conflict(&Key::new("ns", "p"))),
            "Operation cannot be fulfilled on pods \"p\": StorageError: invalid object, Code: 4, Key: /pods/ns/p, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: a, UID in object meta: b"
        );
        let gated = Unbound::Gated("p".into()).conflict(&Key::new("ns", "p"));
        assert!(of(gated).starts_with("Operation cannot be fulfilled on pods/binding"));
        let odd = check_delete_options(Some("Odd"), None).err().map(of);
        assert_eq!(
            odd.as_deref(),
            Some(
                "DeleteOptions.meta.k8s.io \"\" is invalid: propagationPolicy: Unsupported value: \"Odd\": supported values: \"Foreground\", \"Background\", \"Orphan\", \"nil\""
            )
        );
    }

    /// The body's options count as the query's do. Upstream: `propagateDryRun`.
    #[tokio::test]
    async fn evictions_obey_the_options_in_their_body() {
        for (query_is_dry, options, stays) in [
            (false, json!(null), false),
            (false, json!({}), false),
            (true, json!(null), true),
            (true, json!({}), true),
            (false, json!({"dryRun": ["All"]}), true),
            (true, json!({"dryRun": ["All"]}), true),
            (false, json!({"preconditions": {"uid": "UID", "resourceVersion": "VERSION"}}), false),
        ] {
            let left = evicted(query_is_dry, "p", options.clone()).await;
            assert_eq!(left, Ok(stays), "{query_is_dry} {options}");
        }
        for (query_is_dry, name, options, expected) in [
            (false, "other", json!({}), "400 name in URL does not match name in Eviction object"),
            (
                true,
                "p",
                json!({"dryRun": ["None"]}),
                "500 Non-matching dry-run options in request and content: [All] and [None]",
            ),
            (
                false,
                "p",
                json!({"preconditions": {"uid": "other"}}),
                "409 Operation cannot be fulfilled on Pod \"p\": the UID in the precondition (other)",
            ),
            (
                false,
                "p",
                json!({"preconditions": {"resourceVersion": "9999"}}),
                "409 Operation cannot be fulfilled on Pod \"p\": the ResourceVersion in the precondition (9999)",
            ),
            (
                false,
                "p",
                json!({"ignoreStoreReadErrorWithClusterBreakingPotential": true}),
                "422 Eviction.policy \"p\" is invalid: deleteOptions.ignoreStoreReadErrorWithClusterBreakingPotential: Invalid value: true: can not be set for pod eviction, try after removing the option",
            ),
        ] {
            let why = evicted(query_is_dry, name, options.clone()).await.expect_err("refused");
            assert!(why.starts_with(expected), "{options}: {why}");
        }
    }

    #[test]
    fn budgets_refuse_in_upstreams_words() {
        let check = |status: Value, code: u16, detail: &str| {
            let mut all = json!({"currentHealthy": 2, "desiredHealthy": 2, "expectedPods": 3,
                "disruptionsAllowed": 0, "observedGeneration": 1});
            for (key, value) in status.as_object().unwrap() {
                all[key] = value.clone();
            }
            let budget = from_value(json!({"metadata": {"name": "b", "generation": 1},
                "status": all}))
            .unwrap();
            let error = check_budget(&budget).expect_err("refused");
            let text = format!("{error:?}");
            assert!(text.contains(detail) && text.contains(&code.to_string()), "{text}");
        };
        check(json!({}), 429, "The disruption budget b needs 2 healthy pods and has 2 currently");
        check(json!({"observedGeneration": 0}), 429, "is still being processed by the server.");
        check(json!({"disruptionsAllowed": -1}), 403, "pdb disruptions allowed is negative");
        let failed = json!({"conditions": [{"type": "DisruptionAllowed", "status": "False",
            "reason": "SyncFailed", "message": "why", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
        check(failed, 429, "because it failed sync: why");
    }
}
