//! Objects that plugins relied on change while a slow plugin still handles the request.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::registry::{DeleteOptions, Intent};
use apiserver::request::Key;
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use machinery::status::Reason;
use serde_json::{Value, json};

use crate::world::{World, chain, row};

#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    Deleted,
    Terminating,
    Labelled,
    /// Another client creates the object first.
    Taken,
}

/// Simulates a slow webhook: during each call, the next of these events happens.
struct Slow(Arc<Mutex<VecDeque<Meanwhile>>>);

#[async_trait]
impl Plugin for Slow {
    fn name(&self) -> &'static str {
        "Slow"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "configmaps") {
            return Ok(());
        }
        let Some(next) = self.0.lock().expect("the test's").pop_front() else { return Ok(()) };
        let registry = attributes.registry;
        let ctx = registry.own_context::<Namespace>();
        let key = Key::new("", attributes.key.namespace.clone());
        let intent = match next {
            Meanwhile::Deleted => Intent::Delete { options: DeleteOptions::default() },
            Meanwhile::Terminating => Intent::Modify(Box::new(|object| {
                let namespace = object.expect_mut::<Namespace>();
                namespace.status.get_or_insert_default().phase = Some("Terminating".into());
                Ok(())
            })),
            Meanwhile::Labelled => Intent::Modify(Box::new(|object| {
                let labels = object.meta_mut().labels.get_or_insert_default();
                labels.insert(format!("l{}", labels.len()), String::new());
                Ok(())
            })),
            Meanwhile::Taken => {
                let ctx = registry.own_context::<ConfigMap>();
                let mut object = ConfigMap::default();
                object.metadata.name = Some(attributes.key.name.clone());
                object.metadata.namespace = Some(attributes.key.namespace.clone());
                let intent = Intent::Create { object: Box::new(object) };
                return registry.write(&ctx, attributes.key, intent).await.map(|_| ());
            }
        };
        registry.write(&ctx, &key, intent).await.map(|_| ())
    }
}

#[tokio::test]
async fn nothing_is_created_in_a_namespace_deleted_meanwhile() {
    use Meanwhile::*;
    let rows = vec![
        row::<ConfigMap>(),
        row::<Namespace>(),
        row::<k8s_openapi::api::core::v1::LimitRange>(),
        row::<k8s_openapi::api::core::v1::ResourceQuota>(),
        row::<k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicy>(),
        row::<k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy>(),
        row::<k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration>(),
        row::<k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration>(),
    ];
    let world = World::start(rows, &[]);
    let script = Arc::<Mutex<VecDeque<Meanwhile>>>::default();
    let mut chain = chain(&[]);
    chain.0.push(Box::new(Slow(script.clone())));
    world.registry.set_admission(chain);
    let check = async |namespace: &str, meta: Value, meanwhile: &[Meanwhile], refused: &str| {
        world.namespace(namespace, json!({})).await;
        script.lock().expect("the test's").extend(meanwhile);
        let mut map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta});
        map["metadata"]["namespace"] = namespace.into();
        let ctx = world.context("v1", "ConfigMap");
        let object = ctx.resource.codec.decode_value(map).expect("decodes").object;
        let key = Key::new(namespace, object.name());
        let written = world.registry.write(&ctx, &key, Intent::Create { object }).await;
        let why = written.as_ref().err().map(|error| error.message.clone()).unwrap_or_default();
        assert_eq!(why, refused, "{meanwhile:?}");
        assert!(script.lock().expect("the test's").is_empty(), "{meanwhile:?}");
        let there = world.registry.cached::<ConfigMap>(namespace).await.expect("is read").len();
        assert_eq!(there, usize::from(written.is_ok() || matches!(meanwhile, [.., Taken])));
        written.err().map(|error| error.reason)
    };
    let named = || json!({"name": "x"});
    let gone = check("a", named(), &[Deleted], r#"namespaces "a" not found"#).await;
    assert_eq!(gone, Some(Reason::NotFound));
    let prefix = json!({"generateName": "x-"});
    let gone = check("b", prefix, &[Labelled, Deleted], r#"namespaces "b" not found"#).await;
    assert_eq!(gone, Some(Reason::NotFound));
    let terminating = r#"configmaps "x" is forbidden: unable to create new content in namespace c because it is being terminated"#;
    let going = check("c", named(), &[Terminating], terminating).await;
    assert_eq!(going, Some(Reason::Forbidden));
    // Irrelevant changes are no reason to refuse.
    check("d", named(), &[], "").await;
    check("e", named(), &[Labelled, Labelled, Labelled], "").await;
    let taken = check("f", named(), &[Taken], r#"configmaps "x" already exists"#).await;
    assert_eq!(taken, Some(Reason::AlreadyExists));
    world.shutdown().await;
}
