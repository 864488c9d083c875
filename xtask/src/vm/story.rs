//! What the chapters of a machine share: the machine, its tools, and a cluster's words.
//!
//! In: options, an image. Out: a machine that is up, with the binary on a disk of its own, and helpers
//! that run kubectl there and wait for what it shows.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::image::Image;
use super::machine::{Hardware, Machine};
use super::{Options, test_image};
use crate::sh::{self, Outcome};

/// The image that all pods of the chapters run.
pub const IMAGE: &str = "docker.io/library/busybox:1.35";
/// Where a machine mounts the disk with the binary.
const TOOLS: &str = "/mnt/tools";

pub struct Story {
    pub image: Image,
    pub machine: Machine,
    pub cuts: u64,
    pub seed: u64,
    /// The disk with the binary and the test image.
    tools: PathBuf,
    scratch: PathBuf,
    notes: Vec<String>,
}

impl Story {
    pub fn begin(options: &Options, image: &Image) -> Outcome<Self> {
        let scratch = sh::temporary_directory("vm-tools")?;
        let tools = make_tools(&options.program()?, &test_image()?, &scratch);
        let machine = tools.and_then(|tools| {
            let hardware = Hardware { drives: vec![drive(&tools)], ..Hardware::default() };
            Ok((Machine::start(image, hardware, options.accelerator)?, tools))
        });
        let (machine, tools) = machine.inspect_err(|_| {
            // The error is the news.
            let _ = fs::remove_dir_all(&scratch);
        })?;
        let (cuts, seed) = (options.cuts, options.seed);
        Ok(Self { image: image.clone(), machine, cuts, seed, tools, scratch, notes: Vec::new() })
    }

    /// Hardware of another machine, with the tools on its second disk.
    pub fn hardware(&self) -> Hardware {
        Hardware { drives: vec![drive(&self.tools)], ..Hardware::default() }
    }

    /// A figure or a fact that is printed below the chapter's line.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    pub fn print_notes(&mut self) {
        for note in self.notes.drain(..) {
            println!("     {note}");
        }
    }

    pub fn kubectl(&self, line: &str) -> Outcome<String> {
        self.machine.sh(&kubectl(line))
    }

    /// Waits until kubectl prints this.
    pub fn soon(&self, seconds: u64, line: &str, expected: &str) -> Outcome<Duration> {
        let script = format!(
            "seen=$({}); [[ $seen == {expected} ]] || {{ echo \"$seen\" >&2; exit 1; }}",
            kubectl(line)
        );
        let what = format!("kubectl {line} does not print {expected}");
        Ok(self.machine.until(seconds, &what, &script)?.1)
    }

    /// One field of an object, as jsonpath.
    pub fn field(&self, object: &str, path: &str) -> Outcome<String> {
        self.kubectl(&field(object, path))
    }

    pub fn soon_field(&self, seconds: u64, object: &str, path: &str, value: &str) -> Outcome {
        self.soon(seconds, &field(object, path), value).map(drop)
    }

    pub fn apply(&self, manifest: &str) -> Outcome {
        let manifest = manifest.replace("IMAGE", IMAGE);
        let quoted = super::machine::quoted(&manifest);
        self.machine.sh(&format!("printf %s {quoted} | {}", kubectl("apply -f -"))).map(drop)
    }

    /// Waits until the node is Ready and the Deployment's pods are.
    pub fn settled(&self) -> Outcome<Duration> {
        let ready = field("node node1", "{.status.conditions[?(@.type=='Ready')].status}");
        let first = self.soon(60, &ready, "True")?;
        Ok(first + self.soon(90, &field("deployment web", "{.status.readyReplicas}"), "2")?)
    }

    /// Where a failed chapter left the cluster.
    pub fn report(&self) -> String {
        let scripts = [
            kubectl("get nodes,pods -A -o wide"),
            kubectl("get events -A --sort-by=.lastTimestamp | tail -n 15"),
            "journalctl -u decapod --no-pager -o cat | grep -v 'slow request' | tail -n 20"
                .to_owned(),
        ];
        let told: Vec<String> = scripts
            .iter()
            .map(|script| self.machine.sh(script).unwrap_or_else(|error| error))
            .collect();
        format!("{}\nconsole:\n{}", told.join("\n\n"), self.machine.tail())
    }
}

impl Drop for Story {
    fn drop(&mut self) {
        // The machine may still have it open; the kernel keeps it until then.
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

/// A line of shell that runs kubectl as the administrator.
pub fn kubectl(line: &str) -> String {
    format!("KUBECONFIG=/var/lib/decapod/kubeconfig decapod kubectl {line}")
}

fn field(object: &str, path: &str) -> String {
    format!("get {object} -o jsonpath={}", super::machine::quoted(path))
}

fn drive(tools: &Path) -> String {
    format!("file={},if=virtio,format=raw,readonly=on", tools.display())
}

/// A disk with the program, without its debug information, and the test image.
fn make_tools(binary: &Path, archive: &Path, scratch: &Path) -> Outcome<PathBuf> {
    let root = scratch.join("root");
    let copied = fs::create_dir(&root)
        .and_then(|()| fs::copy(archive, root.join("image.tar")))
        .and_then(|_| fs::copy(binary, root.join("decapod")));
    copied.map_err(|error| format!("{}: {error}", root.display()))?;
    if sh::exists("strip") {
        sh::run(Command::new("strip").arg(root.join("decapod")))?;
    }
    let bytes: u64 = ["decapod", "image.tar"]
        .iter()
        .filter_map(|name| Some(fs::metadata(root.join(name)).ok()?.len()))
        .sum();
    let disk = scratch.join("tools.raw");
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-O", "^has_journal", "-L", "tools", "-d"]);
    mke2fs.arg(&root).arg(&disk).arg(format!("{}M", (bytes >> 20) * 11 / 10 + 32));
    sh::capture(&mut mke2fs)?;
    fs::remove_dir_all(&root).map_err(|error| format!("{}: {error}", root.display()))?;
    Ok(disk)
}

/// Copies the binary and the unit onto a machine. The unit is not started.
pub fn install(machine: &Machine, command: &str) -> Outcome {
    let unit = include_str!("decapod.service").replace("COMMAND", command);
    let unit = super::machine::quoted(&unit);
    machine.sh(&format!(
        "mkdir -p {TOOLS}; mountpoint -q {TOOLS} || mount -o ro LABEL=tools {TOOLS}
         install {TOOLS}/decapod /usr/local/bin/decapod
         printf %s {unit} >/etc/systemd/system/decapod.service
         systemctl daemon-reload"
    ))?;
    Ok(())
}

/// Imports the test image on a machine.
pub fn import(machine: &Machine) -> Outcome {
    machine.sh(&format!(
        "mountpoint -q {TOOLS} || mount -o ro LABEL=tools {TOOLS}
                         decapod images import {TOOLS}/image.tar"
    ))?;
    Ok(())
}
