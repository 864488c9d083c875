//! A CRD's life on a registry with a simulated store: named, served, changed, deleted.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use apiserver::admission::{Attributes, Chain, Operation, Plugin};
use apiserver::registry::{DeleteOptions, Intent, ListOptions};
use apiserver::request::{Key, RequestContext, UserInfo};
use apiserver::resource::{Resource, ResourceTable};
use apiserver::{Registry, StatusError};
use async_trait::async_trait;
use base::task::Tasks;
use decapod_extensions::{Extensions, Post, PostError, definition};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition as Crd;
use machinery::status::Reason;
use serde_json::{Value, json};

const NAME: &str = "tabs.stable.example.com";

struct Server {
    registry: Registry,
    tasks: Tasks,
}

/// Refuses the first statuses of definitions, as a webhook that is not up yet.
struct Refusing(AtomicUsize);

#[async_trait]
impl Plugin for Refusing {
    fn name(&self) -> &'static str {
        "Refusing"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let one_less = |left: usize| left.checked_sub(1);
        let refuses = attributes.ctx.subresource == "status"
            && self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok();
        if refuses { Err(StatusError::internal("not now")) } else { Ok(()) }
    }
}

impl Server {
    async fn start() -> Self {
        Self::start_with(Chain::default()).await
    }

    async fn start_with(chain: Chain) -> Self {
        let tasks = Tasks::new("test");
        let table = ResourceTable::new([definition::row(None)]);
        let registry = Registry::new(store::Sim::open(), table, chain, tasks.clone());
        let post: Post =
            Arc::new(|_, _, _| Box::pin(async { Err(PostError("nobody answers".into())) }));
        Extensions::new(post).start(&registry, &tasks).await;
        Self { registry, tasks }
    }

    async fn stop(self) {
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }

    async fn define(&self, crd: Value) {
        let ctx = self.registry.own_context::<Crd>();
        let object = ctx.resource.codec.decode_value(crd).expect("a definition").object;
        let key = Key::new("", object.name());
        let written = self.registry.write(&ctx, &key, Intent::Create { object }).await;
        written.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Waits for what the controller does.
    async fn until<T>(&self, mut look: impl AsyncFnMut(&Registry) -> Option<T>) -> T {
        testkit::wait::found("it happens", async || look(&self.registry).await).await
    }

    async fn established(&self) -> Crd {
        self.until(async |registry| {
            let crd = registry.find::<Crd>("", NAME).await.ok()??;
            definition::conditions::is_true(&crd, "Established").then_some(crd)
        })
        .await
    }

    async fn row(&self, version: &str) -> Arc<Resource> {
        self.until(async |registry| {
            registry.resources().get("stable.example.com", version, "tabs").cloned()
        })
        .await
    }

    fn context(&self, row: &Arc<Resource>) -> RequestContext {
        RequestContext::new(UserInfo::apiserver(), row.clone(), "")
    }

    async fn create(&self, row: &Arc<Resource>, spec: Value) -> Result<Value, String> {
        let tree = json!({
            "apiVersion": row.api_version(), "kind": "Tab", "metadata": { "name": "one" }, "spec": spec,
        });
        let object = row.codec.decode_value(tree).map_err(|error| error.to_string())?.object;
        let (ctx, key) = (self.context(row), Key::new("ns", "one"));
        let written = self.registry.write(&ctx, &key, Intent::Create { object }).await;
        let written = written.map_err(|error| error.to_string())?;
        Ok(serde_json::from_slice(&written.object.json()).expect("JSON"))
    }
}

fn version(name: &str, is_stored: bool, spec: Value) -> Value {
    json!({
        "name": name, "served": true, "storage": is_stored, "subresources": { "status": {} },
        "schema": { "openAPIV3Schema": { "type": "object", "properties": { "spec": spec } } },
    })
}

fn tabs(versions: &[Value]) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": NAME },
        "spec": {
            "group": "stable.example.com", "scope": "Namespaced",
            "names": { "plural": "tabs", "kind": "Tab" }, "versions": versions,
        },
    })
}

fn spec(default: &str) -> Value {
    json!({ "type": "object", "properties": {
        "name": { "type": "string", "default": default }, "size": { "type": "integer", "maximum": 9 } } })
}

#[tokio::test]
async fn instances_are_defaulted_pruned_and_validated() {
    let server = Server::start().await;
    server.define(tabs(&[version("v1", true, spec("x"))])).await;
    let row = server.row("v1").await;
    assert_eq!((row.singular.as_str(), row.custom), ("tab", true));
    let refused = server.create(&row, json!({ "size": 10 })).await.expect_err("too big");
    assert!(refused.contains("spec.size in body should be less than or equal to 9"), "{refused}");
    let made = server.create(&row, json!({ "size": 1, "unknown": true })).await.expect("made");
    assert_eq!(made["spec"], json!({ "name": "x", "size": 1 }));
    assert_eq!(made["metadata"]["generation"], 1);
    let crd = server.established().await;
    let names = crd.status.and_then(|status| status.accepted_names).expect("accepted");
    assert_eq!(names.list_kind.as_deref(), Some("TabList"));
    server.stop().await;
}

/// In upstream's order: the name first, then other metadata. A schema that has unsupported fields gets no
/// errors of its structure.
#[tokio::test]
async fn refused_definitions_name_upstreams_causes() {
    let server = Server::start().await;
    let refused = async |crd: Value| {
        let ctx = server.registry.own_context::<Crd>();
        let object = ctx.resource.codec.decode_value(crd).expect("a definition").object;
        let key = Key::new("", object.name());
        let written = server.registry.write(&ctx, &key, Intent::Create { object }).await;
        let error = written.err().expect("it is wrong");
        error.causes.iter().map(|cause| cause.field.clone()).collect::<Vec<_>>()
    };
    let mut crd = tabs(&[version("v1", true, spec("x"))]);
    crd["metadata"] = json!({ "name": "wrong", "labels": { "a b": "c" } });
    assert_eq!(refused(crd).await, ["metadata.name", "metadata.labels"]);
    let schema = "spec.validation.openAPIV3Schema.properties[spec]";
    let crd = tabs(&[version("v1", true, json!({ "$ref": "#/x" }))]);
    assert_eq!(refused(crd).await, [format!("{schema}.$ref")]);
    let no_factor = json!({ "type": "integer", "multipleOf": 0, "default": 3 });
    let crd = tabs(&[version("v1", true, no_factor)]);
    assert_eq!(refused(crd).await, [format!("{schema}.default")]);
    server.stop().await;
}

/// The writer of a status sets its observedGeneration. Writes of the definition and the controller
/// keep it.
#[tokio::test]
async fn generations_that_were_observed_are_kept() {
    let server = Server::start().await;
    server.define(tabs(&[version("v1", true, spec("x"))])).await;
    let established = server.established().await;
    let write = async |subresource: &str, change: &dyn Fn(&mut Crd)| {
        let mut ctx = server.registry.own_context::<Crd>();
        ctx.subresource = subresource.into();
        let mut crd = server.registry.find::<Crd>("", NAME).await.expect("reads").expect("some");
        change(&mut crd);
        let intent = Intent::Update { object: Box::new(crd) };
        let written = server.registry.write(&ctx, &Key::new("", NAME), intent).await;
        written.unwrap_or_else(|error| panic!("{error}"));
        let crd = server.registry.find::<Crd>("", NAME).await.expect("reads").expect("some");
        let status = crd.status.expect("has one");
        let conditions = status.conditions.into_iter().flatten();
        let of = conditions.map(|one| (one.type_, one.observed_generation)).collect::<Vec<_>>();
        (crd.metadata.generation, status.observed_generation, of)
    };
    assert_eq!(established.status.and_then(|status| status.observed_generation), None);
    let expected = |generation: i64| {
        let of = [("NamesAccepted", None), ("Established", Some(1))];
        let of = of.map(|(kind, generation)| (kind.to_owned(), generation)).to_vec();
        (Some(generation), Some(1), of)
    };
    let observe = |crd: &mut Crd| {
        let status = crd.status.as_mut().expect("has one");
        status.observed_generation = Some(1);
        for condition in status.conditions.iter_mut().flatten() {
            condition.observed_generation = (condition.type_ == "Established").then_some(1);
        }
    };
    assert_eq!(write("status", &observe).await, expected(1));
    let forget = |crd: &mut Crd| {
        crd.status = None;
        crd.spec.names.short_names = Some(vec!["tb".into()]);
    };
    assert_eq!(write("", &forget).await, expected(2));
    // The controller accepts the new name, and writes its condition again.
    let crd = server
        .until(async |registry| {
            let crd = registry.find::<Crd>("", NAME).await.ok()??;
            let status = crd.status.as_ref()?;
            let names = status.accepted_names.as_ref()?.short_names.as_ref();
            names.is_some_and(|names| names == &["tb"]).then_some(crd)
        })
        .await;
    let established = definition::conditions::find(&crd, "Established").expect("is there");
    assert_eq!(established.observed_generation, Some(1));
    assert_eq!(crd.status.and_then(|status| status.observed_generation), Some(1));
    server.stop().await;
}

/// One lost write, and a definition was never established.
#[tokio::test]
async fn a_status_that_was_refused_is_written_again() {
    let refusing = Refusing(AtomicUsize::new(2));
    let server = Server::start_with(Chain(vec![Box::new(refusing)])).await;
    server.define(tabs(&[version("v1", true, spec("x"))])).await;
    server.established().await;
    server.stop().await;
}

#[tokio::test]
async fn every_version_shows_the_same_object() {
    let server = Server::start().await;
    server.define(tabs(&[version("v1", false, spec("x")), version("v2", true, spec("y"))])).await;
    let (v1, v2) = (server.row("v1").await, server.row("v2").await);
    server.create(&v1, json!({})).await.expect("made");
    let key = Key::new("ns", "one");
    for (row, expected) in [(&v1, "stable.example.com/v1"), (&v2, "stable.example.com/v2")] {
        let stored = server.registry.get(row, &key, None).await.expect("found");
        let object = stored.object().expect("readable");
        assert_eq!(object.api_version(), expected);
        // The version that it was made in has filled in its default.
        assert_eq!(object.to_value()["spec"]["name"], "x");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_deleted_definition_takes_its_instances_along() {
    let server = Server::start().await;
    server.define(tabs(&[version("v1", true, spec("x"))])).await;
    let row = server.row("v1").await;
    server.create(&row, json!({})).await.expect("made");
    let ctx = server.registry.own_context::<Crd>();
    let delete = Intent::Delete { options: DeleteOptions::default() };
    server.registry.write(&ctx, &Key::new("", NAME), delete).await.expect("accepted");
    server
        .until(async |registry| registry.find::<Crd>("", NAME).await.ok()?.is_none().then_some(()))
        .await;
    assert!(server.registry.resources().get("stable.example.com", "v1", "tabs").is_none());
    // The same again starts with nothing.
    server.define(tabs(&[version("v1", true, spec("x"))])).await;
    let row = server.row("v1").await;
    let list = server.registry.list(&row, "", &ListOptions::default()).await.expect("a list");
    assert!(list.items.is_empty());
    let missing = server.registry.get(&row, &Key::new("ns", "one"), None).await;
    assert!(missing.is_err_and(|error| error.is(Reason::NotFound)));
    server.stop().await;
}
