//! Power cuts under writes, on a disk that forgets or tears what was not flushed.
//!
//! Each acknowledged write must be there afterwards, the store must verify, and the server and its pods
//! come back without a hand. The data directory is on the forgetful disk, the system is not.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use crate::sh::Outcome;
use crate::vm::disk::Disk;
use crate::vm::machine::{Machine, now, pause};
use crate::vm::story::{self, Story};

const DISK: u64 = 4 << 30;
/// Writers that write at once.
const WRITERS: u32 = 3;
/// A cut comes after so many acknowledged writes of a round, at the latest after [`PATIENCE`] seconds.
const WRITES: u64 = 40;
const PATIENCE: u64 = 20;

/// Creates ConfigMaps by the thousand and prints the names that the server acknowledged. One curl
/// for all, because a new process for each would be most of the work; it prints a line at once.
const WRITER: &str = r#"
cd /run; kc=/var/lib/decapod/kubeconfig
for part in certificate-authority client-certificate client-key; do
  awk -v key="$part-data:" '$1 == key {print $2}' $kc | base64 -d >/run/w-$part; done
for i in $(seq 5000); do
  echo "next"; echo 'url = "https://127.0.0.1:6443/api/v1/namespaces/default/configmaps"'
  echo 'cacert = "/run/w-certificate-authority"'; echo 'cert = "/run/w-client-certificate"'
  echo 'key = "/run/w-client-key"'; echo 'silent'; echo 'output = "/dev/null"'
  echo 'header = "Content-Type: application/json"'
  echo "write-out = \"%{stderr}%{http_code} ROUND-WRITER-$i\\n\""
  echo "data = \"{\\\"metadata\\\":{\\\"name\\\":\\\"ROUND-WRITER-$i\\\"},\\\"data\\\":{\\\"a\\\":\\\"$i\\\"}}\""
done | tail -n +2 >/run/w-WRITER.curl
exec curl -K /run/w-WRITER.curl 2>&1"#;

pub fn cuts(story: &mut Story) -> Outcome {
    let directory = story.machine.directory().with_extension("power");
    std::fs::create_dir(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let told = tell(story, &directory);
    // The machine is gone, and its disk with it.
    let _ = std::fs::remove_dir_all(&directory);
    told
}

fn tell(story: &mut Story, directory: &std::path::Path) -> Outcome {
    let disk = Disk::create(directory, DISK)?;
    let mut hardware = story.hardware();
    hardware.drives.push(disk.drive());
    let mut machine = Machine::start(&story.image, hardware, story.machine.accelerator())?;
    machine.sh("mkfs.ext4 -q -L data /dev/vdc
         echo 'LABEL=data /var/lib/decapod ext4 defaults 0 2' >>/etc/fstab
         mkdir -p /var/lib/decapod; mount /var/lib/decapod")?;
    story::install(&machine, "server")?;
    machine.sh("systemctl enable --now decapod")?;
    let ready = story::kubectl("get --raw /readyz");
    machine.until(90, "the API answers", &ready)?;
    story::import(&machine)?;
    let manifest = include_str!("main.yaml").replace("IMAGE", story::IMAGE);
    let manifest = crate::vm::machine::quoted(&manifest);
    machine.sh(&format!("printf %s {manifest} | {}; sync", story::kubectl("apply -f -")))?;
    let mut acknowledged = Vec::new();
    for round in 0..story.cuts {
        let fresh = write_until_cut(&mut machine, round)?;
        let lost = disk.cut(story.seed + round)?;
        story.note(format!(
            "cut {}: after {} acknowledged writes; of the disk's unflushed writes {} kept, {} lost, {} torn",
            round + 1, fresh.len(), lost.kept, lost.lost, lost.torn
        ));
        acknowledged.extend(fresh);
        machine.power_on()?;
        machine.wait_for_boot()?;
        check(&machine, &acknowledged, &ready).map_err(|error| {
            let log = "journalctl -u decapod -b --no-pager -o cat | tail -n 20; dmesg | tail -n 5";
            format!("{error}\n{}", machine.sh(log).unwrap_or_default())
        })?;
    }
    machine.sh("systemctl stop decapod")?;
    let verified = machine.sh("decapod store verify")?;
    story.note(format!(
        "{} acknowledged writes, none lost; store verify: {verified}",
        acknowledged.len()
    ));
    Ok(())
}

/// Starts the writers, cuts the power under them, and returns the names that were acknowledged.
fn write_until_cut(machine: &mut Machine, round: u64) -> Outcome<Vec<String>> {
    let writers: Vec<Child> = (0..WRITERS)
        .map(|writer| {
            let script = WRITER
                .replace("ROUND", &format!("r{round}"))
                .replace("WRITER", &format!("w{writer}"));
            let mut command = machine.command(&script);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
            command.spawn().map_err(|error| error.to_string())
        })
        .collect::<Outcome<_>>()?;
    let readers: Vec<_> = writers
        .into_iter()
        .map(|mut writer| {
            std::thread::spawn(move || {
                let out = BufReader::new(writer.stdout.take().expect("a pipe was asked for"));
                let names = out
                    .lines()
                    .map_while(Result::ok)
                    .filter_map(|line| Some(line.strip_prefix("201 ")?.trim().to_owned()));
                let names: Vec<String> = names.collect();
                let _ = writer.wait();
                names
            })
        })
        .collect();
    // The store is the witness of progress: the readers have their lines only at the end.
    let count = story::kubectl("get configmaps -o name");
    let (started, limit) = (now(), machine.limit(PATIENCE));
    let enough = format!("[[ $({count} | grep -c r{round}-) -ge {WRITES} ]]");
    while machine.sh(&enough).is_err() && started.elapsed() < limit {
        pause();
    }
    machine.cut();
    let names = readers.into_iter().map(|reader| reader.join().unwrap_or_default());
    Ok(names.flatten().collect())
}

fn check(machine: &Machine, acknowledged: &[String], ready: &str) -> Outcome {
    machine.until(90, "the API answers after a power cut", ready)?;
    let names = machine.sh(&story::kubectl("get configmaps -o name"))?;
    let there: std::collections::BTreeSet<&str> =
        names.lines().filter_map(|line| line.split_once('/').map(|(_, name)| name)).collect();
    let lost: Vec<&String> =
        acknowledged.iter().filter(|name| !there.contains(name.as_str())).collect();
    if !lost.is_empty() {
        return Err(format!(
            "{} of {} acknowledged writes are lost: {lost:?}",
            lost.len(),
            acknowledged.len()
        ));
    }
    let ready = "get deployment web -o jsonpath='{.status.readyReplicas}' | grep -x 2";
    let boot = "get node node1 -o jsonpath='{.status.nodeInfo.bootID}' | grep -x $(cat /proc/sys/kernel/random/boot_id)";
    machine.until(90, "the node is back", &story::kubectl(boot))?;
    machine.until(90, "the pods are back", &story::kubectl(ready)).map(drop)
}
