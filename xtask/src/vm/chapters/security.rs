//! AppArmor profiles and user namespaces, on kernels that have both. Leaves nothing.

use crate::sh::Outcome;
use crate::vm::story::Story;

const PROFILES: &str = include_str!("profiles.yaml");
const MAPPED: &str = include_str!("mapped.yaml");
/// A profile of the administrator: nothing may be written below /tmp.
const LOCAL: &str = "profile no-tmp flags=(attach_disconnected) { file, capability, signal, network, \
                     deny /tmp/** w, }";

pub fn apparmor(story: &mut Story) -> Outcome {
    story.machine.sh(&format!("echo '{LOCAL}' | apparmor_parser -r"))?;
    story.apply(PROFILES)?;
    let check = |pod: &str, script: &str, expected: &str| -> Outcome {
        let line = format!("exec {pod} -- sh -c {}", crate::vm::machine::quoted(script));
        story.soon(60, &line, &format!("'{expected}'")).map(drop)
    };
    let profile = "cat /proc/self/attr/current";
    let told = check("plain", profile, "decapod-default (enforce)")
        .and_then(|()| check("runtime-default", profile, "decapod-default (enforce)"))
        .and_then(|()| check("unconfined", profile, "unconfined"))
        .and_then(|()| check("privileged", profile, "unconfined"))
        .and_then(|()| check("local", profile, "no-tmp (enforce)"))
        .and_then(|()| {
            let script = "touch /tmp/x 2>/dev/null && echo wrote || echo refused";
            check("local", script, "refused")?;
            check("plain", script, "wrote")
        })
        .and_then(|()| {
            let reason = "{.status.containerStatuses[0].state.waiting.reason}";
            story.soon_field(30, "pod absent", reason, "CreateContainerError")?;
            let message = "{.status.containerStatuses[0].state.waiting.message}";
            let message = story.field("pod absent", message)?;
            let is_told = message.contains("is not loaded");
            if is_told { Ok(()) } else { Err(format!("a profile that is not loaded: {message}")) }
        });
    story.kubectl("delete pod plain runtime-default unconfined privileged local absent")?;
    story.machine.sh(&format!("echo '{LOCAL}' | apparmor_parser -R"))?;
    told
}

/// Linux 6.3 has what `hostUsers: false` needs. Older kernels refuse the pod with upstream's words.
pub fn users(story: &mut Story) -> Outcome {
    story.apply(MAPPED)?;
    let has_them = story.image.release.number != "12";
    let told = if has_them {
        let line = "exec mapped -- awk '{print ($1 == 0 && $2 >= 65536 && $3 == 65536)}' /proc/self/uid_map";
        story.soon(60, line, "1").map(drop)
    } else {
        let line = "get events --field-selector involvedObject.name=mapped -o jsonpath='{.items[*].message}' \
             | grep -c 'runtime does not support user namespaces'";
        story.soon(60, line, "1").map(drop)
    };
    story.kubectl("delete pod mapped")?;
    told
}
