//! A chart with an unmodified helm: install, upgrade, rollback, test, uninstall. Leaves nothing.
//!
//! The chart is `charts/menu`: a definition in `crds/`, an object of that kind, hooks before and a test
//! after, values with a schema, `lookup` and capabilities. helm waits with watches. Version 4 uses
//! server-side apply, version 3 patches; both read the schemas of `/openapi`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use testkit::{places, wait};

use crate::expect;
use crate::story::{LONG, Story, words};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/charts/menu");
/// The namespace, which helm creates.
const SPACE: &str = "kitchen";
/// Kinds that must not remain in the namespace; helm never deletes cluster-wide definitions.
const KINDS: &str = "deployments,replicasets,pods,services,configmaps,secrets,jobs,dishes";

struct Helm<'a> {
    story: &'a Story,
    program: PathBuf,
    /// helm's own files, in the host's directory.
    home: PathBuf,
}

pub fn chart(story: &mut Story) -> Result<()> {
    let Some(program) = places::helm() else {
        println!("skipped: no helm in the cache (`cargo xtask helm` builds it)");
        return Ok(());
    };
    let home = story.server.host().directory().join("helm");
    std::fs::create_dir(&home)?;
    let helm = Helm { story, program, home };
    let archive = helm.packed()?;
    helm.installed(&archive)?;
    helm.upgraded(&archive)?;
    helm.taken_back()?;
    helm.tested()?;
    helm.failed(&archive)?;
    helm.gone()
}

impl Helm<'_> {
    /// Runs helm in the namespace; the line is split at spaces, so no word may contain one.
    fn run(&self, line: &str) -> Result<String> {
        let host = self.story.server.host();
        let mut command = host.command(&self.program);
        command.args(words(line)).args(["--namespace", SPACE]);
        command.env("KUBECONFIG", self.story.server.kubeconfig()).env("HOME", &self.home);
        command.env("TZ", "UTC").env_remove("XDG_CONFIG_HOME").env_remove("XDG_CACHE_HOME");
        let output = host.output(&mut command).with_context(|| format!("helm {line}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("helm {line}: {}\n{text}{}", output.status, stderr.trim_end());
        }
        Ok(text)
    }

    fn prints(&self, line: &str, pattern: &str) -> Result<()> {
        let printed = self.run(line)?;
        expect::like(&printed, pattern).with_context(|| format!("helm {line}"))
    }

    fn served(&self, wanted: &str) -> Result<()> {
        let service = format!("service -n {SPACE} lunch-menu");
        let address = format!("{}:80", self.story.value(&service, ".spec.clusterIP")?);
        let page = wait::until(LONG, "the page", || {
            let page = self.story.get(&address, "/")?;
            // Pods of the previous release end a moment after helm's wait.
            ensure!(page.status == 200 && page.body.trim() == wanted, "{page:?}");
            Ok(page)
        })?;
        ensure!(page.status == 200, "{page:?}");
        Ok(())
    }

    /// The chart as a packed file, as in a repository.
    fn packed(&self) -> Result<PathBuf> {
        self.prints(&format!("lint {CHART}"), "...\n1 chart(s) linted, 0 chart(s) failed")?;
        self.run(&format!("package {CHART} --destination {}", self.home.display()))?;
        Ok(self.home.join("menu-0.1.0.tgz"))
    }

    fn installed(&self, archive: &Path) -> Result<()> {
        let archive = archive.display();
        let refused = self.run(&format!("install lunch {archive} --set replicas=many"));
        let refused = format!("{:#}", refused.expect_err("the values have a schema"));
        ensure!(refused.contains("/replicas"), "{refused}");
        let shown =
            self.run(&format!("install lunch {archive} --create-namespace --wait --timeout 60s"))?;
        let status = "...\nNAMESPACE: kitchen\nSTATUS: deployed\nREVISION: 1\n...";
        expect::like(&shown, status)?;
        ensure!(shown.contains("soup is served at lunch-menu.kitchen:80, release 1."), "{shown}");
        self.served("today: soup")?;
        // Values that the chart read from the cluster, and defaults that the definition adds to its object.
        let map = format!("configmap -n {SPACE} lunch-menu");
        ensure!(self.story.value(&map, ".data.home")? == "kube-system");
        let version = self.story.value(&map, ".data.cluster")?;
        ensure!(version.starts_with("v1.36."), "{version}");
        let dish = format!("dish -n {SPACE} lunch-menu");
        ensure!(self.story.value(&dish, ".spec.portions")? == "1");
        self.story.shows(&format!("logs -n {SPACE} job/lunch-menu-prepare"), "cooking soup")?;
        self.prints(
            "list",
            "NAME NAMESPACE REVISION UPDATED STATUS CHART APP VERSION\n\
             lunch kitchen 1 * deployed menu-0.1.0 1.35",
        )?;
        let status: Value = serde_json::from_str(&self.run("status lunch -o json")?)?;
        ensure!(status["info"]["status"] == "deployed", "{status}");
        Ok(())
    }

    fn upgraded(&self, archive: &Path) -> Result<()> {
        let values = "--set dish=stew --set replicas=2";
        let archive = archive.display();
        self.run(&format!("upgrade --install lunch {archive} {values} --wait --timeout 60s"))?;
        let deployment = format!("deployment -n {SPACE} lunch-menu");
        ensure!(self.story.value(&deployment, ".status.updatedReplicas")? == "2");
        ensure!(self.story.value(&deployment, ".status.availableReplicas")? == "2");
        self.served("today: stew")?;
        self.prints("get values lunch", "USER-SUPPLIED VALUES:\ndish: stew\nreplicas: 2")?;
        self.prints(
            "history lunch",
            "REVISION UPDATED STATUS CHART APP VERSION DESCRIPTION\n\
             1 * superseded menu-0.1.0 1.35 Install complete\n\
             2 * deployed menu-0.1.0 1.35 Upgrade complete",
        )
    }

    fn taken_back(&self) -> Result<()> {
        self.prints(
            "rollback lunch 1 --wait --timeout 60s",
            "Rollback was a success! Happy Helming!",
        )?;
        self.served("today: soup")?;
        self.prints("history lunch --max 1", "REVISION *\n3 * deployed * Rollback to 1")
    }

    fn tested(&self) -> Result<()> {
        let shown = self.run("test lunch --timeout 60s")?;
        ensure!(shown.contains("Phase:") && shown.contains("Succeeded"), "{shown}");
        Ok(())
    }

    /// An upgrade that never becomes ready fails, and the previous pods continue to serve.
    fn failed(&self, archive: &Path) -> Result<()> {
        let line = format!(
            "upgrade lunch {} --set image.tag=none --no-hooks --wait --timeout 3s",
            archive.display()
        );
        let error = self.run(&line).expect_err("there is no such image");
        let status: Value = serde_json::from_str(&self.run("status lunch -o json")?)?;
        ensure!(status["info"]["status"] == "failed", "{error:#}\n{status}");
        self.served("today: soup")
    }

    fn gone(&self) -> Result<()> {
        self.prints("uninstall lunch --wait --timeout 60s", "release \"lunch\" uninstalled")?;
        // Hooks that their policy keeps have no owner: helm does not delete them.
        self.story.kubectl(&format!("delete job -n {SPACE} lunch-menu-prepare"))?;
        self.prints("list", "NAME NAMESPACE REVISION UPDATED STATUS CHART APP VERSION")?;
        wait::until(LONG, "nothing is left of the release", || {
            let rest = self.story.kubectl(&format!("get {KINDS} -n {SPACE} -o name"))?;
            ensure!(rest.trim() == "configmap/kube-root-ca.crt", "{rest}");
            Ok(())
        })?;
        self.story.kubectl("delete crd dishes.menu.decapod.test")?;
        self.story.kubectl(&format!("delete namespace {SPACE} --timeout=90s")).map(drop)
    }
}
