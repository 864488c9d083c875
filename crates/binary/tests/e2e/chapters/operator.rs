//! An operator written with kube-rs, unmodified: a custom resource, a Controller that owns ConfigMaps,
//! a finalizer, a reflector, exec, port-forward. Leaves nothing.
//!
//! An `Echo` requires a ConfigMap with its text; the operator applies it, and updates the status.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    ApiResource, AttachParams, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams,
    PostParams,
};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::controller::Action;
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::{Controller, WatchStreamExt, finalizer, reflector, watcher};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::story::{LONG, Story};

const GROUP: &str = "clients.decapod.test";
const SPACE: &str = "default";
const POD: &str = "operated";
const SERVE: &str = "mkdir /www; echo here > /www/index.html; exec httpd -f -p 8080 -h /www";
/// The node has it since the images were imported.
const IMAGE: &str = "docker.io/library/busybox:1.35";

pub fn kube_rs(story: &mut Story) -> Result<()> {
    let kubeconfig = story.server.kubeconfig();
    let work = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let told = async { tokio::time::timeout(LONG, operate(&kubeconfig)).await };
        runtime.block_on(told).context("the operator's story takes too long")?
    };
    story.server.host().in_network(work)?
}

async fn operate(kubeconfig: &Path) -> Result<()> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let client = Client::try_from(config)?;
    exec(&client).await?;
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let name = format!("echoes.{GROUP}");
    let apply = PatchParams::apply("operator");
    let definition = definitions.patch(&name, &apply, &Patch::Apply(crd())).await?;
    await_condition(definitions.clone(), &name, conditions::is_crd_established()).await?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = controller(&client)
        .graceful_shutdown_on(async { stopped.await.unwrap_or_default() })
        .run(reconcile, |_, _, _| Action::requeue(Duration::from_secs(1)), Arc::new(client.clone()))
        .for_each(|_| async {});
    let told = async {
        let told = tell(&client).await;
        drop(stop);
        told
    };
    let (told, ()) = tokio::join!(told, running);
    let uid = definition.uid().unwrap_or_default();
    definitions.delete(&name, &DeleteParams::default()).await?;
    await_condition(definitions, &name, conditions::is_deleted(&uid)).await?;
    told
}

/// The operator, as its user sees it.
async fn tell(client: &Client) -> Result<()> {
    let (echoes, maps) = (echoes(client), maps(client));
    let (store, writer) = reflector::store::<ConfigMap>();
    let reflected = watcher(maps.clone(), watcher::Config::default().labels("echo=yes"));
    let mut reflected = Box::pin(reflected.default_backoff().reflect(writer).touched_objects());

    let echo = serde_json::from_value(json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": "Echo",
        "metadata": {"name": "first"}, "spec": {"text": "hello"},
    }))?;
    let echo: DynamicObject = echoes.create(&PostParams::default(), &echo).await?;
    let done =
        |echo: Option<&DynamicObject>| echo.is_some_and(|echo| echo.data["status"]["done"] == true);
    await_condition(echoes.clone(), "first", done).await?;
    let map = maps.get("first").await?;
    ensure!(map.data.as_ref().is_some_and(|data| data["text"] == "hello"), "{map:?}");
    // Existing objects are in the store after the first list; the stream does not return them.
    let reflecting = async {
        while reflected.try_next().await?.is_some() {}
        anyhow::Ok(())
    };
    tokio::select! {
        ready = store.wait_until_ready() => ready?,
        over = reflecting => bail!("the reflector ended: {over:?}"),
    }
    ensure!(store.state().len() == 1, "{:?}", store.state());

    // The operator creates its deleted ConfigMap again.
    maps.delete("first", &DeleteParams::default()).await?;
    let old = map.uid();
    let again = move |map: Option<&ConfigMap>| map.is_some_and(|map| map.uid() != old);
    await_condition(maps.clone(), "first", again).await?;

    // Its finalizer keeps the object until the operator has removed it; dependents are deleted, too.
    let uid = echo.uid().unwrap_or_default();
    echoes.delete("first", &DeleteParams::default()).await?;
    await_condition(echoes, "first", conditions::is_deleted(&uid)).await?;
    let map_gone = |map: Option<&ConfigMap>| map.is_none();
    await_condition(maps, "first", map_gone).await?;
    Ok(())
}

async fn exec(client: &Client) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), SPACE);
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": POD},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", SERVE]}],
        },
    }))?;
    pods.create(&PostParams::default(), &pod).await?;
    await_condition(pods.clone(), POD, conditions::is_pod_running()).await?;
    let mut process = pods.exec(POD, ["echo", "inside"], &AttachParams::default()).await?;
    let mut printed = String::new();
    let mut stdout = process.stdout().context("an output was asked for")?;
    stdout.read_to_string(&mut printed).await?;
    ensure!(printed == "inside\n", "{printed:?}");
    let status = process.take_status().context("a status was asked for")?.await;
    ensure!(status.as_ref().and_then(|it| it.status.as_deref()) == Some("Success"), "{status:?}");
    // Read to the end: the pod's server closes, and so does the stream.
    let mut forwarder = pods.portforward(POD, &[8080]).await?;
    let mut near = forwarder.take_stream(8080).context("a port was asked for")?;
    near.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
    let mut heard = String::new();
    near.read_to_string(&mut heard).await?;
    ensure!(heard.ends_with("\r\n\r\nhere\n"), "{heard:?}");
    // Not joined: the library reports a connection that the other side has closed as an error.
    forwarder.abort();
    pods.delete(POD, &DeleteParams::default()).await?;
    Ok(())
}

fn crd() -> Value {
    let text = json!({"type": "object", "properties": {"text": {"type": "string"}}});
    let status = json!({"type": "object", "properties": {"done": {"type": "boolean"}}});
    let schema = json!({"type": "object", "properties": {"spec": text, "status": status}});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("echoes.{GROUP}")},
        "spec": {
            "group": GROUP, "scope": "Namespaced",
            "names": {"plural": "echoes", "singular": "echo", "kind": "Echo"},
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": schema}, "subresources": {"status": {}},
            }],
        },
    })
}

fn kind() -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, "v1", "Echo"), "echoes")
}

fn echoes(client: &Client) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), SPACE, &kind())
}

fn maps(client: &Client) -> Api<ConfigMap> {
    Api::namespaced(client.clone(), SPACE)
}

fn controller(client: &Client) -> Controller<DynamicObject> {
    let owned = watcher::Config::default().labels("echo=yes");
    Controller::new_with(echoes(client), watcher::Config::default(), kind())
        .owns(maps(client), owned)
}

type Failed = finalizer::Error<kube::Error>;

async fn reconcile(echo: Arc<DynamicObject>, client: Arc<Client>) -> Result<Action, Failed> {
    let api = echoes(&client);
    let finalizer_name = format!("{GROUP}/goodbye");
    finalizer::finalizer(&api, &finalizer_name, echo, |event| async {
        if let finalizer::Event::Apply(echo) = event {
            apply(&client, &echo).await?;
        }
        Ok(Action::await_change())
    })
    .await
}

async fn apply(client: &Client, echo: &DynamicObject) -> Result<(), kube::Error> {
    let name = echo.name_any();
    let patch = PatchParams::apply("echo-operator").force();
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {
            "name": name, "labels": {"echo": "yes"},
            "ownerReferences": [{
                "apiVersion": format!("{GROUP}/v1"), "kind": "Echo", "name": name,
                "uid": echo.uid(), "controller": true,
            }],
        },
        "data": {"text": echo.data["spec"]["text"]},
    });
    maps(client).patch(&name, &patch, &Patch::Apply(map)).await?;
    let status = json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": "Echo", "status": {"done": true},
    });
    echoes(client).patch_status(&name, &patch, &Patch::Apply(status)).await?;
    Ok(())
}
