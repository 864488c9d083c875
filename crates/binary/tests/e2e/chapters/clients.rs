//! Unmodified client libraries of other languages, each in its own namespace. They leave nothing.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use testkit::{clients, places};

use super::stores::Lab;
use crate::story::Story;

/// The node has it since the images were imported.
const IMAGE: &str = "docker.io/library/busybox:1.35";

pub fn python(story: &mut Story) -> Result<()> {
    let Some(library) = clients::PYTHON.ensure()? else { return Ok(()) };
    let mut command = tool(story, "python3")?;
    command.arg(script("story.py")).arg(IMAGE).env("PYTHONPATH", library);
    let steps = "version namespace deployment apply pods forward dry-eviction token pages ending";
    run(story, command, steps)
}

pub fn python_operators(story: &mut Story) -> Result<()> {
    let Some(library) = clients::OPERATORS.ensure()? else { return Ok(()) };
    let mut command = tool(story, "python3")?;
    command.arg(script("operators.py")).arg(IMAGE).env("PYTHONPATH", library);
    run(story, command, "namespace forward operator ending")
}

pub fn ansible(story: &mut Story) -> Result<()> {
    let Some(library) = clients::ANSIBLE.ensure()? else { return Ok(()) };
    let mut command = tool(story, "python3")?;
    let home = story.server.host().directory().join("ansible");
    command.args(["-m", "ansible", "playbook", "-c", "local", "-i", "localhost,", "-e"]);
    command.arg(format!("image={IMAGE}")).arg("-e");
    command.arg("ansible_python_interpreter={{ ansible_playbook_python }}");
    command.arg(script("playbook.yaml")).env("PYTHONPATH", &library);
    command.env("ANSIBLE_COLLECTIONS_PATH", &library).env("ANSIBLE_HOME", home);
    command.env("LC_ALL", "C.UTF-8").env("ANSIBLE_LOCALHOST_WARNING", "false");
    let output = story.server.host().output(&mut command)?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{printed}{complaint}");
    Ok(())
}

pub fn fabric8(story: &mut Story) -> Result<()> {
    java(story, "Fabric8.java")
}

pub fn official_java(story: &mut Story) -> Result<()> {
    java(story, "Official.java")
}

/// A single file, which `java` compiles itself.
fn java(story: &Story, program: &str) -> Result<()> {
    let Some(library) = clients::JAVA.ensure()? else { return Ok(()) };
    let mut command = tool(story, "java")?;
    command.arg("-cp").arg(library.join("*")).arg(script(program)).arg(IMAGE);
    run(story, command, "namespace informer apply scale exec forward ending")
}

pub fn javascript(story: &mut Story) -> Result<()> {
    let Some(library) = clients::JAVASCRIPT.ensure()? else { return Ok(()) };
    let mut command = tool(story, "node")?;
    command.arg(script("story.mjs")).arg(IMAGE).arg(library);
    run(story, command, "namespace deployment apply pods forward informer ending")
}

/// On a separate API server, with the gate `CBORServingAndStorage`.
pub fn go_in_cbor(story: &mut Story) -> Result<()> {
    let Some(program) = places::cbor_client() else {
        println!("skipped: no client in the cache (`cargo xtask cbor-client` builds it)");
        return Ok(());
    };
    let lab = Lab::new(story, "cbor")?;
    let gate = "--feature-gates=CBORServingAndStorage=true";
    let mut api = lab.api_server("api", 6443, &[gate])?;
    lab.ready("api", &mut api)?;
    let mut command = lab.host.command(&program);
    command.arg(lab.kubeconfig("api").0);
    command.env("KUBE_FEATURE_ClientsAllowCBOR", "true");
    command.env("KUBE_FEATURE_ClientsPreferCBOR", "true");
    let output = lab.host.output(&mut command)?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && printed == "done\n", "{printed}{complaint}{}", api.log());
    Ok(())
}

fn tool(story: &Story, name: &str) -> Result<Command> {
    let program = places::program(name).with_context(|| format!("{name} was here a moment ago"))?;
    let mut command = story.server.host().command(program);
    command.env("KUBECONFIG", story.server.kubeconfig());
    Ok(command)
}

fn script(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/clients").join(name)
}

/// The script prints each finished step, and an error if it stopped.
fn run(story: &Story, mut command: Command, steps: &str) -> Result<()> {
    let output = story.server.host().output(&mut command)?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    let told: Vec<&str> = printed.lines().collect();
    let wanted: Vec<&str> = steps.split(' ').collect();
    ensure!(output.status.success() && told == wanted, "{printed}{complaint}");
    Ok(())
}
