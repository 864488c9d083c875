//! Priority and fairness as objects: the ones that every cluster has, their upkeep, and what of all
//! of them the server goes by.
//!
//! In: FlowSchemas and PriorityLevelConfigurations, from the watch cache. Out: the configuration of
//! [`Fairness`], `Dangling` conditions, and the bootstrap objects where they are missing or changed.
//! Objects whose annotation says `false` are left alone, but for the two mandatory ones.
//!
//! Upstream: `apf_controller.go`, `pkg/registry/flowcontrol/ensurer`. There a loop looks after the
//! bootstrap objects every minute; here, a minute after a change that calls for it.

mod objects;

use std::time::Duration;

use apiserver::Registry;
use apiserver::cacher::Cursor;
use apiserver::fairness::{
    Config, Distinguisher, Fairness, FlowSchema as Served, Handling, PathRule, PriorityLevel,
    ResourceRule, Rule, Subject,
};
use apiserver::registry::{DeleteOptions, Intent};
use apiserver::request::Key;
use base::task::Tasks;
use k8s_openapi::api::flowcontrol::v1::{
    self as flow, FlowSchema, PolicyRulesWithSubjects, PriorityLevelConfiguration,
};
use machinery::patch::PatchKind;
use machinery::status::Reason;
use machinery::{Object, ObjectMeta, StatusError};
use serde_json::json;
use tokio::time::Instant;

/// The field managers of the bootstrap objects and of the conditions.
const PRODUCER: &str = "api-priority-and-fairness-config-producer-v1";
const CONSUMER: &str = "api-priority-and-fairness-config-consumer-v1";
/// How long a changed bootstrap object stays changed.
const MENDING_DELAY: Duration = Duration::from_secs(60);
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Makes the bootstrap objects what they must be.
pub async fn ensure(registry: &Registry) -> Result<(), StatusError> {
    let (levels, schemas) = (present(registry).await?, present(registry).await?);
    let levels = mend_all::<PriorityLevelConfiguration>(registry, &levels);
    let schemas = mend_all::<FlowSchema>(registry, &schemas);
    // One transaction's wait for all of them.
    futures::future::try_join(levels, schemas).await.map(|_| ())
}

/// Follows the objects until the server ends. Without `fairness`, only the upkeep remains.
pub fn start(registry: &Registry, fairness: Option<&Fairness>, tasks: &Tasks) {
    let consumer = Consumer {
        registry: registry.clone(),
        fairness: fairness.cloned(),
        config: Config::default(),
        mend_at: None,
    };
    tasks.spawn("priority and fairness configuration", consumer.run());
}

struct Consumer {
    registry: Registry,
    fairness: Option<Fairness>,
    /// The objects that the server uses.
    config: Config,
    /// When changed bootstrap objects are changed back.
    mend_at: Option<Instant>,
}

impl Consumer {
    async fn run(mut self) {
        loop {
            let mut schemas = self.registry.follow::<FlowSchema>().await.1;
            let mut levels = self.registry.follow::<PriorityLevelConfiguration>().await.1;
            while let Ok(()) = self.step(&mut schemas, &mut levels).await {}
            // Too slow for the history, or the store is unavailable: start again.
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    /// Brings everything up to date, then waits for the next change.
    async fn step(&mut self, schemas: &mut Cursor, levels: &mut Cursor) -> Result<(), StatusError> {
        let retry = match self.sync().await {
            Ok(()) => None,
            Err(error) => {
                tracing::warn!(%error, "failed to update priority and fairness");
                Some(Instant::now() + RETRY_DELAY)
            }
        };
        let timer = [retry, self.mend_at].into_iter().flatten().min();
        let wait = async {
            match timer {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = change(schemas) => changed?,
            changed = change(levels) => changed?,
            () = wait => {}
        }
        if self.mend_at.is_some_and(|at| at <= Instant::now()) {
            self.mend_at = None;
            ensure(&self.registry).await?;
        }
        Ok(())
    }

    async fn sync(&mut self) -> Result<(), StatusError> {
        let schemas = present::<FlowSchema>(&self.registry).await?;
        let levels = present::<PriorityLevelConfiguration>(&self.registry).await?;
        if let Some(fairness) = &self.fairness {
            let config = Config {
                schemas: schemas.iter().filter_map(served_schema).collect(),
                levels: levels.iter().filter_map(served_level).collect(),
            };
            for schema in &schemas {
                self.tell(schema, &config).await?;
            }
            if config != self.config {
                fairness.configure(config.clone());
                self.config = config;
            }
        }
        let is_changed = !plan::<FlowSchema>(&schemas).is_empty()
            || !plan::<PriorityLevelConfiguration>(&levels).is_empty();
        match is_changed {
            true => _ = self.mend_at.get_or_insert_with(|| Instant::now() + MENDING_DELAY),
            false => self.mend_at = None,
        }
        Ok(())
    }

    /// Says in the schema's status whether its level is there.
    async fn tell(&self, schema: &FlowSchema, config: &Config) -> Result<(), StatusError> {
        let Some(condition) = wanted_condition(schema, config) else { return Ok(()) };
        let mut ctx = self.registry.own_context::<FlowSchema>();
        ctx.subresource = "status".into();
        ctx.field_manager = CONSUMER.into();
        let body = json!({
            "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
            "kind": "FlowSchema",
            "metadata": { "name": schema.name() },
            "status": { "conditions": [condition] },
        });
        let intent =
            Intent::Patch { kind: PatchKind::Apply { force: true }, body: body.to_string().into() };
        match self.registry.write(&ctx, &Key::new("", schema.name()), intent).await {
            Err(error) if !error.is(Reason::NotFound) => Err(error),
            _ => Ok(()),
        }
    }
}

/// Waits until something changed.
async fn change(cursor: &mut Cursor) -> Result<(), StatusError> {
    while cursor.next().await?.is_empty() {}
    Ok(())
}

/// The condition that a schema lacks.
fn wanted_condition(schema: &FlowSchema, config: &Config) -> Option<serde_json::Value> {
    let level = schema.spec.as_ref().map(|spec| spec.priority_level_configuration.name.as_str())?;
    let (status, reason, end) = match config.levels.iter().any(|one| one.name == level) {
        true => ("False", "Found", "and it exists"),
        false => ("True", "NotFound", "but there is no such object"),
    };
    let message = format!(
        "This FlowSchema references the PriorityLevelConfiguration object named {level:?} {end}"
    );
    let conditions = schema.status.as_ref().and_then(|status| status.conditions.as_deref());
    let is_there = conditions.unwrap_or_default().iter().any(|one| {
        one.type_.as_deref() == Some("Dangling")
            && one.status.as_deref() == Some(status)
            && one.reason.as_deref() == Some(reason)
            && one.message.as_deref() == Some(message.as_str())
    });
    (!is_there).then(|| {
        json!({
            "type": "Dangling",
            "status": status,
            "lastTransitionTime": base::clock::now_seconds().to_string(),
            "reason": reason,
            "message": message,
        })
    })
}

async fn present<T>(registry: &Registry) -> Result<Vec<T>, StatusError>
where
    T: k8s_openapi::Metadata<Ty = ObjectMeta> + Clone + 'static,
{
    registry.cached::<T>("").await
}

/// The difference of the two kinds.
trait Kind: Object + k8s_openapi::Metadata<Ty = ObjectMeta> + Clone {
    fn bootstrap() -> Vec<Self>;
    fn is_same(wanted: &Self, there: &Self) -> bool;
    fn take_spec(&mut self, from: &Self);
}

impl Kind for FlowSchema {
    fn bootstrap() -> Vec<Self> {
        objects::schemas()
    }

    fn is_same(wanted: &Self, there: &Self) -> bool {
        wanted.spec == there.spec
    }

    fn take_spec(&mut self, from: &Self) {
        self.spec.clone_from(&from.spec);
    }
}

impl Kind for PriorityLevelConfiguration {
    fn bootstrap() -> Vec<Self> {
        objects::levels()
    }

    /// The numbers of the exempt level are the operator's.
    fn is_same(wanted: &Self, there: &Self) -> bool {
        let is_exempt = |level: &Self| level.spec.as_ref().is_some_and(|one| one.exempt.is_some());
        if wanted.name() == apiserver::fairness::EXEMPT {
            return is_exempt(there);
        }
        wanted.spec == there.spec
    }

    fn take_spec(&mut self, from: &Self) {
        self.spec.clone_from(&from.spec);
    }
}

/// The action for one object.
#[derive(Debug, PartialEq)]
enum Mend<T> {
    Create(T),
    /// The object as it must be, and whether its spec is part of that.
    Update {
        wanted: T,
        spec: bool,
        annotation: Option<bool>,
    },
    /// One that says it is ours, and is not.
    Delete(String),
}

fn plan<T: Kind>(present: &[T]) -> Vec<Mend<T>> {
    let bootstrap = T::bootstrap();
    let mut plan = vec![];
    for there in present {
        let is_known = bootstrap.iter().any(|wanted| wanted.name() == there.name());
        if !is_known && auto_update(there) == Some(true) {
            plan.push(Mend::Delete(there.name().to_owned()));
        }
    }
    for wanted in bootstrap {
        let Some(there) = present.iter().find(|there| there.name() == wanted.name()) else {
            plan.push(Mend::Create(wanted));
            continue;
        };
        // Without the annotation, an object that was never changed is managed by the server.
        let unchanged = there.meta().generation == Some(1);
        let said = auto_update(there);
        let is_ours = objects::is_mandatory(wanted.name()) || said.unwrap_or(unchanged);
        let spec = is_ours && !T::is_same(&wanted, there);
        let annotation = (said != Some(is_ours)).then_some(is_ours);
        if spec || annotation.is_some() {
            plan.push(Mend::Update { wanted, spec, annotation });
        }
    }
    plan
}

/// The value of the annotation, if it is set.
fn auto_update(object: &impl Object) -> Option<bool> {
    let annotations = object.meta().annotations.as_ref();
    match annotations.and_then(|all| all.get(objects::AUTO_UPDATE))?.as_str() {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

async fn mend_all<T: Kind>(registry: &Registry, present: &[T]) -> Result<(), StatusError> {
    let mending = plan(present).into_iter().map(|one| mend(registry, one));
    futures::future::try_join_all(mending).await.map(|_| ())
}

async fn mend<T: Kind>(registry: &Registry, one: Mend<T>) -> Result<(), StatusError> {
    let mut ctx = registry.own_context::<T>();
    ctx.field_manager = PRODUCER.into();
    let (name, intent) = match one {
        Mend::Create(object) => {
            (object.name().to_owned(), Intent::Create { object: Box::new(object) })
        }
        Mend::Update { wanted, spec, annotation } => {
            let name = wanted.name().to_owned();
            let modify = move |there: &mut dyn Object| {
                let there = there.expect_mut::<T>();
                if spec {
                    there.take_spec(&wanted);
                }
                if let Some(annotation) = annotation {
                    let annotations = there.meta_mut().annotations.get_or_insert_default();
                    annotations.insert(objects::AUTO_UPDATE.into(), annotation.to_string());
                }
                Ok(())
            };
            (name, Intent::Modify(Box::new(modify)))
        }
        Mend::Delete(name) => (name, Intent::Delete { options: DeleteOptions::default() }),
    };
    match registry.write(&ctx, &Key::new("", name), intent).await {
        // Another server was faster: the next round reads the result.
        Err(error) if error.is(Reason::AlreadyExists) || error.is(Reason::NotFound) => Ok(()),
        outcome => outcome.map(|_| ()),
    }
}

fn served_schema(schema: &FlowSchema) -> Option<Served> {
    let spec = schema.spec.as_ref()?;
    let distinguisher = match spec.distinguisher_method.as_ref().map(|one| one.type_.as_str()) {
        None => Distinguisher::None,
        Some("ByUser") => Distinguisher::ByUser,
        Some("ByNamespace") => Distinguisher::ByNamespace,
        Some(_) => return None,
    };
    Some(Served {
        name: schema.name().to_owned(),
        uid: schema.meta().uid.clone().unwrap_or_default(),
        precedence: spec.matching_precedence.unwrap_or_default(),
        level: spec.priority_level_configuration.name.clone(),
        distinguisher,
        rules: spec.rules.iter().flatten().map(served_rule).collect(),
    })
}

fn served_rule(rule: &PolicyRulesWithSubjects) -> Rule {
    let resource = |rule: &flow::ResourcePolicyRule| ResourceRule {
        verbs: rule.verbs.clone(),
        groups: rule.api_groups.clone(),
        resources: rule.resources.clone(),
        cluster_scope: rule.cluster_scope.unwrap_or_default(),
        namespaces: rule.namespaces.clone().unwrap_or_default(),
    };
    let path = |rule: &flow::NonResourcePolicyRule| PathRule {
        verbs: rule.verbs.clone(),
        paths: rule.non_resource_urls.clone(),
    };
    Rule {
        subjects: rule.subjects.iter().filter_map(served_subject).collect(),
        resources: rule.resource_rules.iter().flatten().map(resource).collect(),
        paths: rule.non_resource_rules.iter().flatten().map(path).collect(),
    }
}

fn served_subject(subject: &flow::Subject) -> Option<Subject> {
    match subject.kind.as_str() {
        "User" => subject.user.as_ref().map(|user| Subject::User(user.name.clone())),
        "Group" => subject.group.as_ref().map(|group| Subject::Group(group.name.clone())),
        "ServiceAccount" => {
            let account = subject.service_account.as_ref()?;
            let (namespace, name) = (account.namespace.clone(), account.name.clone());
            Some(Subject::ServiceAccount { namespace, name })
        }
        _ => None,
    }
}

/// Nothing for levels that make no sense; validation lets none pass.
fn served_level(level: &PriorityLevelConfiguration) -> Option<PriorityLevel> {
    let spec = level.spec.as_ref()?;
    let number = |number: Option<i32>| number.and_then(|number| u32::try_from(number).ok());
    let mut served = PriorityLevel {
        name: level.name().to_owned(),
        uid: level.meta().uid.clone().unwrap_or_default(),
        handling: Handling::Exempt,
        shares: 0,
        lendable_percent: 0,
        borrowing_percent: None,
    };
    match (spec.type_.as_str(), &spec.exempt, &spec.limited) {
        ("Exempt", Some(exempt), None) => {
            served.shares = number(exempt.nominal_concurrency_shares)?;
            served.lendable_percent = number(exempt.lendable_percent)?;
        }
        ("Limited", None, Some(limited)) => {
            served.shares = number(limited.nominal_concurrency_shares)?;
            served.lendable_percent = number(limited.lendable_percent)?;
            served.borrowing_percent = number(limited.borrowing_limit_percent);
            let response = limited.limit_response.as_ref()?;
            served.handling = match (response.type_.as_str(), &response.queuing) {
                ("Reject", None) => Handling::Reject,
                ("Queue", Some(queuing)) => Handling::Queue {
                    queues: number(queuing.queues)?,
                    hand_size: number(queuing.hand_size)?,
                    length: number(queuing.queue_length_limit)? as usize,
                },
                _ => return None,
            };
        }
        _ => return None,
    }
    let is_exempt = served.handling == Handling::Exempt;
    (is_exempt == (served.name == apiserver::fairness::EXEMPT)).then_some(served)
}

#[cfg(test)]
mod tests;
