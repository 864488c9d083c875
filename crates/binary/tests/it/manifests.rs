//! The directory of manifests: applied, followed, pruned, also over restarts.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use testkit::wait;

use crate::support::{LONG, Server};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn map(name: &str, value: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata: {{value: {value}}}\n---\n"
    )
}

struct Folder<'s>(&'s Server);

impl Folder<'_> {
    fn path(&self) -> PathBuf {
        self.0.data().join("manifests")
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        fs::create_dir_all(self.path())?;
        Ok(fs::write(self.path().join(name), text)?)
    }

    fn remove(&self, name: &str) -> Result<()> {
        Ok(fs::remove_file(self.path().join(name))?)
    }
}

/// Waits until the object has this text; `None`: until it is gone.
fn becomes(server: &Server, path: &str, part: Option<&str>) -> Result<()> {
    wait::until(LONG, path, || {
        let answer = server.api()?.get(path, LONG)?;
        match part {
            Some(part) => ensure!(
                answer.status == 200 && answer.body.contains(part),
                "{} {}\n{}",
                answer.status,
                answer.body,
                server.log()
            ),
            None => ensure!(answer.status == 404, "{}\n{}", answer.body, server.log()),
        }
        Ok(())
    })
}

#[test]
fn files_are_applied_followed_and_pruned() -> Result<()> {
    let mut server = Server::prepared()?;
    Folder(&server).write("a.yaml", &format!("{}{}", map("one", "first"), map("two", "first")))?;
    Folder(&server).write("skipped.yaml", &map("skipped", "x"))?;
    Folder(&server).write("skipped.yaml.skip", "")?;
    server.launch()?;
    let folder = Folder(&server);
    let (one, two) = (format!("{MAPS}/one"), format!("{MAPS}/two"));
    becomes(&server, &one, Some("\"value\":\"first\""))?;
    becomes(&server, &two, Some("decapod-manifests"))?;
    // An object that leaves its file is deleted, one that changes is changed.
    folder.write("a.yaml", &map("one", "second"))?;
    becomes(&server, &one, Some("\"value\":\"second\""))?;
    becomes(&server, &two, None)?;
    // A file that cannot be parsed prunes nothing, and says so.
    folder.write("a.yaml", "kind: [")?;
    let events = "/api/v1/namespaces/kube-system/events";
    becomes(&server, events, Some("ParseManifestFailed"))?;
    becomes(&server, &one, Some("\"value\":\"second\""))?;
    becomes(&server, &format!("{MAPS}/skipped"), None)?;
    // What is removed while the server is away is pruned at its next start.
    folder.write("b.yaml", &map("three", "x"))?;
    becomes(&server, &format!("{MAPS}/three"), Some("three"))?;
    let label =
        "/api/v1/namespaces/kube-system/configmaps?labelSelector=decapod.io/manifest-server";
    becomes(&server, label, Some("v1 ConfigMap three"))?;
    server.stop()?;
    Folder(&server).remove("b.yaml")?;
    server.launch()?;
    becomes(&server, &format!("{MAPS}/three"), None)?;
    becomes(&server, &one, Some("\"value\":\"second\""))?;
    Folder(&server).remove("a.yaml")?;
    becomes(&server, &one, None)?;
    server.stop()?;
    Ok(())
}

#[test]
fn a_definition_and_its_objects_are_in_one_file() -> Result<()> {
    let server = Server::start(&[])?;
    let text = "\
apiVersion: example.com/v1
kind: Widget
metadata: {name: w, namespace: later}
spec: {size: 3}
---
apiVersion: v1
kind: Namespace
metadata: {name: later}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: widgets, kind: Widget}
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties: {spec: {type: object, properties: {size: {type: integer}}}}
";
    Folder(&server).write("widgets.yaml", text)?;
    let widget = "/apis/example.com/v1/namespaces/later/widgets/w";
    becomes(&server, widget, Some("\"size\":3"))?;
    // An object that another manager has taken over stays.
    let path = format!("{MAPS}/taken");
    Folder(&server).write("taken.yaml", &map("taken", "x"))?;
    becomes(&server, &path, Some("taken"))?;
    let mut object: serde_json::Value =
        serde_json::from_str(&server.api()?.get(&path, LONG)?.body).context("JSON")?;
    object["metadata"]["managedFields"] = serde_json::json!([{}]);
    let mut connection = testkit::http::Connection::new(server.api()?, LONG);
    let json = [("content-type", "application/json")];
    let put = connection.send("PUT", &path, &json, object.to_string().as_bytes())?;
    ensure!(put.status == 200, "{}", put.body);
    Folder(&server).remove("taken.yaml")?;
    Folder(&server).remove("widgets.yaml")?;
    // It has nothing but a name.
    becomes(&server, "/api/v1/namespaces/later", None)?;
    becomes(&server, &path, Some("taken"))?;
    Ok(())
}
