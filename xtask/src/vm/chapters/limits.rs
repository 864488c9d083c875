//! Limits of cgroup v2: memory, swap, weights. Leaves nothing.

use crate::sh::Outcome;
use crate::vm::story::Story;

const GREEDY: &str = include_str!("greedy.yaml");
const POD: &str = "/sys/fs/cgroup/kubepods/burstable/pod*/";

/// The pods' cgroups have their limits, and systemd leaves them alone.
pub fn cgroups(story: &mut Story) -> Outcome {
    let files = "cd /sys/fs/cgroup/kubepods; head -n 1 memory.max cpu.weight burstable/cpu.weight \
         besteffort/cpu.weight burstable/pod*/cpu.weight burstable/pod*/memory.max \
         burstable/pod*/*/{memory.max,memory.swap.max,memory.oom.group,cpu.weight} \
         | grep -v '^$' | paste -d ' ' - - | sort -u";
    let before = story.machine.sh(files)?;
    let capacity = story.field("node node1", "{.status.allocatable.memory}")?;
    let checks = format!(
        "cd /sys/fs/cgroup/kubepods
         # The node's capacity; allocatable is that minus the eviction threshold (100 Mi).
         [[ $(cat memory.max) -gt $(({} * 1024)) && $(cat memory.max) -le $(awk '/MemTotal/{{print $2 * 1024}}' /proc/meminfo) ]]
         [[ $(cat cpu.weight) == 79 ]] # 2 processors
         [[ $(cat burstable/cpu.weight) == 4 ]] # 2 pods of 50m
         [[ $(cat besteffort/cpu.weight) == 1 ]]
         for pod in {POD}; do
           [[ $(cat $pod/memory.max) == 33554432 ]]
           [[ $(cat $pod/*/memory.swap.max) == 0 && $(cat $pod/*/memory.oom.group) == 1 ]]
         done",
        capacity.trim_end_matches("Ki")
    );
    story.machine.sh(&checks).map_err(|error| format!("{error}\n{before}"))?;
    story.machine.sh("systemctl daemon-reload; systemctl daemon-reexec; udevadm settle")?;
    let after = story.machine.sh(files)?;
    if before != after {
        return Err(format!("systemd changed the pods' cgroups:\n{before}\nthen:\n{after}"));
    }
    // A pod that has ended has no cgroup.
    story.apply(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: short}\nspec:\n  restartPolicy: Never\n  \
         containers: [{name: short, image: 'IMAGE', command: ['true']}]\n",
    )?;
    story.soon_field(60, "pod short", "{.status.phase}", "Succeeded")?;
    let uid = story.field("pod short", "{.metadata.uid}")?;
    let gone = format!("! ls -d /sys/fs/cgroup/kubepods/*/pod{uid} 2>/dev/null");
    story.machine.until(10, "the cgroup of a pod that has ended is gone", &gone)?;
    story.kubectl("delete pod short").map(drop)
}

/// The OOM killer ends the whole container, and the status says why.
pub fn out_of_memory(story: &mut Story) -> Outcome {
    greedy(story)
}

/// With swap on, a container does not get more memory than its limit.
pub fn swap(story: &mut Story) -> Outcome {
    story
        .machine
        .sh("test -e /swap || { fallocate -l 256M /swap; chmod 600 /swap; mkswap -q /swap; }
         swapon /swap; systemctl restart decapod")?;
    story.settled()?;
    let told = greedy(story);
    let used = story.machine.sh("cat /sys/fs/cgroup/kubepods/memory.swap.current")?;
    story.note(format!("bytes of pods in swap: {used}"));
    story.machine.sh("swapoff /swap; rm /swap; systemctl restart decapod")?;
    story.settled()?;
    told?;
    match used.as_str() {
        "0" => Ok(()),
        _ => Err(format!("pods have {used} bytes in swap")),
    }
}

fn greedy(story: &Story) -> Outcome {
    story.apply(GREEDY)?;
    let state = "{.status.containerStatuses[0].state.terminated.reason} {.status.containerStatuses[0].state.terminated.exitCode}";
    let told = story.soon_field(90, "pod greedy", state, "'OOMKilled 137'");
    story.kubectl("delete pod greedy")?;
    told
}
