//! The bootstrap objects, their upkeep, and what the server makes of them.

use apiserver::request::{RequestInfo, UserInfo};
use serde_json::Value;

use super::*;
use crate::testing::registry;

async fn schema(registry: &Registry, name: &str) -> FlowSchema {
    registry.find("", name).await.expect("readable").expect("there")
}

async fn change_schema(registry: &Registry, name: &str, change: fn(&mut FlowSchema)) {
    let ctx = registry.own_context::<FlowSchema>();
    let modify = move |object: &mut dyn Object| {
        change(object.expect_mut::<FlowSchema>());
        Ok(())
    };
    let intent = Intent::Modify(Box::new(modify));
    registry.write(&ctx, &Key::new("", name), intent).await.expect("written");
}

/// Waits until `is_true` holds, for a minute of the test's own time at most.
async fn until(mut is_true: impl AsyncFnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(120);
    while !is_true().await {
        assert!(Instant::now() < limit, "not in time");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn dangling(schema: &FlowSchema) -> Option<&str> {
    let conditions = schema.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|one| one.type_.as_deref() == Some("Dangling"))?.status.as_deref()
}

#[test]
fn objects_are_upstreams() {
    let names: Vec<String> =
        objects::schemas().iter().map(|schema| schema.name().to_owned()).collect();
    assert_eq!(names.len(), 11);
    let level = objects::levels().into_iter().find(|level| level.name() == "leader-election");
    let tree = serde_json::to_value(level.expect("there")).expect("serializes");
    let expected: Value = json!({
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "PriorityLevelConfiguration",
        "metadata": {
            "name": "leader-election",
            "annotations": { "apf.kubernetes.io/autoupdate-spec": "true" },
        },
        "spec": {
            "type": "Limited",
            "limited": {
                "nominalConcurrencyShares": 10,
                "lendablePercent": 0,
                "limitResponse": {
                    "type": "Queue",
                    "queuing": { "queues": 16, "handSize": 4, "queueLengthLimit": 50 },
                },
            },
        },
    });
    assert_eq!(tree, expected);
}

#[test]
fn upkeep_respects_what_operators_say() {
    let all = objects::schemas;
    let check =
        |name: &str, change: fn(&mut FlowSchema), expected: Option<(bool, Option<bool>)>| {
            let mut there = all();
            for schema in &mut there {
                schema.metadata.generation = Some(1);
            }
            let one = there.iter_mut().find(|schema| schema.name() == name).expect("there");
            change(one);
            let plan = plan(&there);
            let got = plan.first().map(|mend| match mend {
                Mend::Update { spec, annotation, .. } => (*spec, *annotation),
                other => panic!("{other:?}"),
            });
            assert_eq!((plan.len(), got), (usize::from(expected.is_some()), expected), "{name}");
        };
    let edit = |schema: &mut FlowSchema| {
        schema.spec.as_mut().expect("a spec").matching_precedence = Some(7);
        schema.metadata.generation = Some(2);
    };
    check("probes", |_| {}, None);
    check("probes", edit, Some((true, None)));
    let own = |schema: &mut FlowSchema| {
        schema.spec.as_mut().expect("a spec").matching_precedence = Some(7);
        schema.metadata.annotations =
            Some([(objects::AUTO_UPDATE.to_owned(), "false".to_owned())].into());
    };
    check("probes", own, None);
    check("catch-all", own, Some((true, Some(true))));
    // Silent ones: edited, they are the operator's; untouched, ours.
    let silent = |schema: &mut FlowSchema| {
        schema.spec.as_mut().expect("a spec").matching_precedence = Some(7);
        schema.metadata.generation = Some(2);
        schema.metadata.annotations = None;
    };
    check("probes", silent, Some((false, Some(false))));
    check("probes", |schema| schema.metadata.annotations = None, Some((false, Some(true))));
    // One of an older release goes.
    let mut old = all().remove(1);
    old.metadata.name = Some("system-of-old".into());
    let mut there = all();
    there.push(old);
    assert_eq!(plan(&there), [Mend::Delete("system-of-old".into())]);
}

#[tokio::test(start_paused = true)]
async fn objects_configure_the_server() {
    let tasks = Tasks::new("test");
    let registry = registry(&tasks);
    ensure(&registry).await.expect("written");
    ensure(&registry).await.expect("nothing to do");
    let fairness = Fairness::new(600, tasks.clone());
    start(&registry, Some(&fairness), &tasks);
    until(async || dangling(&schema(&registry, "system-nodes").await) == Some("False")).await;
    let uid = schema(&registry, "system-nodes").await.metadata.uid.expect("a uid");
    let info = RequestInfo {
        is_resource: true,
        verb: "list".into(),
        resource: "pods".into(),
        ..RequestInfo::default()
    };
    let node = UserInfo::new("system:node:n", &["system:nodes", "system:authenticated"]);
    until(async || fairness.classify(&info, &node).schema_uid() == uid).await;
    // A schema without its level serves no request, and its condition says so.
    change_schema(&registry, "system-nodes", |schema| {
        let spec = schema.spec.as_mut().expect("a spec");
        spec.priority_level_configuration.name = "nowhere".into();
    })
    .await;
    until(async || dangling(&schema(&registry, "system-nodes").await) == Some("True")).await;
    until(async || fairness.classify(&info, &node).schema_uid() != uid).await;
    let told = schema(&registry, "system-nodes").await.status.expect("a status");
    let message = told.conditions.expect("conditions").remove(0).message.expect("a message");
    assert_eq!(
        message,
        r#"This FlowSchema references the PriorityLevelConfiguration object named "nowhere" but there is no such object"#
    );
    // It is ours: a minute later it is as it was.
    until(async || dangling(&schema(&registry, "system-nodes").await) == Some("False")).await;
    tasks.shutdown(Duration::from_secs(5)).await;
}
