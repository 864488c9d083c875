//! One machine under QEMU: starts it, runs scripts on it, cuts its power.
//!
//! In: an image, hardware. Out: what scripts print, or an error with their output. Root's shell is reached
//! over SSH on a port of the loopback address; a master connection makes a script cost some milliseconds.
//! The machine uses KVM where this host has it. If the host's KVM does not bring a machine up, or is
//! missing, QEMU translates (TCG), many times slower; limits grow with it.
//! Invariant: the machine ends with this process (`setpriv --pdeathsig`), and its files with [`Machine`].

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::image::Image;
use crate::sh::{self, Outcome};

/// A machine under KVM is reachable after five to fifteen seconds.
const BOOT: Duration = Duration::from_secs(60);
/// Times and limits with TCG, compared with KVM.
const SLOWER: u32 = 10;
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Lines of the console in an error.
const TAIL: usize = 25;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    Kvm,
    Tcg,
}

/// The parts of a machine that chapters choose.
#[derive(Clone, Debug)]
pub struct Hardware {
    pub name: &'static str,
    pub processors: u32,
    /// MiB.
    pub memory: u32,
    /// Further disks, as QEMU's `-drive` wants them.
    pub drives: Vec<String>,
    /// A network between machines, as QEMU's `-netdev` wants it; its interface is `eth1`.
    pub between: Option<String>,
    /// Further arguments of the kernel.
    pub kernel: &'static str,
}

impl Default for Hardware {
    fn default() -> Self {
        Self {
            name: "node1",
            processors: 2,
            memory: 2048,
            drives: Vec::new(),
            between: None,
            kernel: "",
        }
    }
}

pub struct Machine {
    image: Image,
    hardware: Hardware,
    accelerator: Accelerator,
    /// Overlay, console and sockets.
    directory: PathBuf,
    port: u16,
    process: Option<Child>,
}

#[expect(clippy::disallowed_methods, reason = "machines are waited for in real time")]
pub fn now() -> Instant {
    Instant::now()
}

#[expect(clippy::disallowed_methods, reason = "a pause between two looks at a condition")]
pub fn pause() {
    std::thread::sleep(LOOK_AGAIN);
}

impl Machine {
    /// A machine that is up. Its disk is an overlay over the image's.
    pub fn start(image: &Image, hardware: Hardware, accelerator: Accelerator) -> Outcome<Self> {
        let directory = sh::temporary_directory("vm")?;
        let mut machine = Self {
            image: image.clone(),
            hardware,
            accelerator,
            directory,
            port: free_port()?,
            process: None,
        };
        machine.make_overlay()?;
        machine.power_on()?;
        let up = machine.wait_for_boot();
        if up.is_err() && accelerator == Accelerator::Kvm {
            println!("no machine comes up with KVM here; trying again with TCG, which is slow");
            machine.cut();
            machine.accelerator = Accelerator::Tcg;
            machine.make_overlay()?;
            machine.power_on()?;
            machine.wait_for_boot()?;
            return Ok(machine);
        }
        up.map(|()| machine)
    }

    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A limit that suits the accelerator; `seconds` are those of KVM.
    pub fn limit(&self, seconds: u64) -> Duration {
        let factor = if self.accelerator == Accelerator::Tcg { SLOWER } else { 1 };
        Duration::from_secs(seconds) * factor
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn make_overlay(&self) -> Outcome {
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]);
        command.arg(&self.image.disk).arg(self.file("root.qcow2"));
        sh::capture(&mut command).map(drop)
    }

    /// Starts QEMU with the disk as it is.
    pub fn power_on(&mut self) -> Outcome {
        let Hardware { processors, memory, kernel, name, .. } = &self.hardware;
        let accelerator = match self.accelerator {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg,thread=multi",
        };
        let line = format!(
            "root=LABEL=root ro console=ttyS0 net.ifnames=0 systemd.hostname={name} {kernel}"
        );
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64", "-nographic", "-nodefaults"]);
        qemu.args(["-accel", accelerator, "-cpu", "max"]);
        qemu.args(["-smp", &processors.to_string(), "-m", &memory.to_string()]);
        qemu.arg("-kernel").arg(&self.image.kernel).arg("-initrd").arg(&self.image.initrd);
        qemu.args(["-append", line.trim()]);
        let root = format!("file={},if=virtio,format=qcow2", self.file("root.qcow2").display());
        for drive in [&root].into_iter().chain(&self.hardware.drives) {
            qemu.args(["-drive", drive]);
        }
        let user = format!("user,id=uplink,hostfwd=tcp:127.0.0.1:{}-:22", self.port);
        qemu.args(["-netdev", &user, "-device", "virtio-net-pci,netdev=uplink"]);
        if let Some(between) = &self.hardware.between {
            // The last byte tells machines of one network apart.
            let last = name.bytes().last().unwrap_or_default();
            let card = format!("virtio-net-pci,netdev=between,mac=52:54:00:0a:0a:{last:02x}");
            qemu.args(["-netdev", &format!("{between},id=between"), "-device", &card]);
        }
        qemu.args(["-device", "virtio-rng-pci"]);
        qemu.arg("-serial").arg(format!("file:{}", self.file("console").display()));
        let log = fs::File::create(self.file("qemu.log")).map_err(|error| error.to_string())?;
        qemu.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.process = Some(qemu.spawn().map_err(|error| format!("qemu: {error}"))?);
        Ok(())
    }

    /// Waits until root's shell answers.
    pub fn wait_for_boot(&mut self) -> Outcome {
        let (started, limit) = (now(), self.limit(BOOT.as_secs()));
        loop {
            if let Some(status) = self.process.as_mut().and_then(|qemu| qemu.try_wait().ok()?) {
                let told = fs::read_to_string(self.file("qemu.log")).unwrap_or_default();
                return Err(format!("qemu ended: {status}\n{told}"));
            }
            self.disconnect();
            let answer = sh::capture(self.ssh().args(["-o", "ConnectTimeout=2"]).arg("true"));
            match answer {
                Ok(_) => return Ok(()),
                Err(_) if started.elapsed() < limit => pause(),
                Err(error) => {
                    return Err(format!("the machine does not come up: {error}\n{}", self.tail()));
                }
            }
        }
    }

    /// The power cut: QEMU is killed, and what the machine had in memory is gone.
    pub fn cut(&mut self) {
        if let Some(mut qemu) = self.process.take() {
            // It may have ended by itself.
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
        self.disconnect();
    }

    /// Waits until the machine has switched itself off.
    pub fn wait_for_end(&mut self, seconds: u64) -> Outcome<Duration> {
        let (started, limit) = (now(), self.limit(seconds));
        loop {
            let qemu = self.process.as_mut().ok_or("the machine is off already")?;
            if qemu.try_wait().map_err(|error| error.to_string())?.is_some() {
                self.cut();
                return Ok(started.elapsed());
            }
            if started.elapsed() > limit {
                return Err(format!(
                    "the machine did not switch off in {limit:?}\n{}",
                    self.tail()
                ));
            }
            pause();
        }
    }

    /// Restarts the machine in an orderly way. Returns how long it took to go down and to come up.
    pub fn reboot(&mut self) -> Outcome<(Duration, Duration)> {
        let before = self.sh("cat /proc/sys/kernel/random/boot_id")?;
        let mut started = now();
        // `poweroff` and a new QEMU make the two halves visible.
        self.sh("systemd-run --quiet --on-active=0 systemctl poweroff")?;
        self.disconnect();
        self.wait_for_end(240)?;
        let down = started.elapsed();
        started = now();
        self.power_on()?;
        self.wait_for_boot()?;
        let after = self.sh("cat /proc/sys/kernel/random/boot_id")?;
        if before == after {
            return Err("the machine has the boot id of before".to_owned());
        }
        Ok((down, started.elapsed()))
    }

    fn ssh(&self) -> Command {
        let mut command = Command::new("ssh");
        self.options(&mut command);
        command.args(["-p", &self.port.to_string(), "root@127.0.0.1"]);
        command
    }

    fn options(&self, command: &mut Command) {
        command.arg("-i").arg(&self.image.key);
        command.arg("-o").arg(format!("ControlPath={}", self.file("ssh").display()));
        for option in [
            "ControlMaster=auto",
            "ControlPersist=60",
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
            "BatchMode=yes",
            "ServerAliveInterval=5",
        ] {
            command.args(["-o", option]);
        }
    }

    /// Ends the master connection, which would hang on a machine that is gone.
    fn disconnect(&self) {
        if self.file("ssh").exists() {
            // It may be gone already.
            let _ = sh::capture(self.ssh().args(["-O", "exit"]));
            let _ = fs::remove_file(self.file("ssh"));
        }
    }

    /// Runs a script of bash, which ends at the first failure. Returns its output, trimmed.
    pub fn sh(&self, script: &str) -> Outcome<String> {
        let printed = sh::capture(&mut self.command(script))
            .map_err(|error| format!("on {}: {error}", self.hardware.name))?;
        Ok(printed.trim().to_owned())
    }

    /// The command that runs a script on the machine.
    pub fn command(&self, script: &str) -> Command {
        let mut command = self.ssh();
        command.arg(format!("bash -eu -o pipefail -c {}", quoted(script)));
        command
    }

    /// Runs a script again and again until it succeeds. Returns its last output, and the time it took.
    pub fn until(&self, seconds: u64, what: &str, script: &str) -> Outcome<(String, Duration)> {
        let (started, limit) = (now(), self.limit(seconds));
        loop {
            match self.sh(script) {
                Ok(printed) => return Ok((printed, started.elapsed())),
                Err(_) if started.elapsed() < limit => pause(),
                Err(error) => return Err(format!("{what}: not within {limit:?}\n{error}")),
            }
        }
    }

    /// The console's last lines.
    pub fn tail(&self) -> String {
        let text = fs::read(self.file("console")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(TAIL)..].join("\n")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.cut();
        // A later run finds another name.
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A word for a shell, whatever it contains.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// A port that is free now. QEMU has no way to report one that the kernel chose.
fn free_port() -> Outcome<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    Ok(listener.local_addr().map_err(|error| error.to_string())?.port())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    #[test]
    fn quoted_words_survive_a_shell() {
        for text in ["a b", "it's", "$HOME `id` \"x\"", "'", ""] {
            let script = format!("printf %s {}", super::quoted(text));
            let output = Command::new("sh").args(["-c", &script]).output().expect("a shell");
            assert_eq!(String::from_utf8_lossy(&output.stdout), text);
        }
    }
}
