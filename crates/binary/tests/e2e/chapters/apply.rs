//! A typical manifest, from `apply` to running containers. Leaves the Deployment `web` with three Ready
//! pods, and the pod `client`.

use anyhow::{Context, Result, ensure};

use crate::expect;
use crate::story::{LONG, Story, words};

const WEB: &str = include_str!("../manifests/web.yaml");
const CLIENT: &str = include_str!("../manifests/client.yaml");

pub fn ready(story: &mut Story) -> Result<()> {
    let printed = story.apply(WEB)?;
    expect::like(
        &printed,
        "configmap/web created\nsecret/web created\ndeployment.apps/web created\nservice/web created",
    )?;
    expect::like(&story.apply(CLIENT)?, "pod/client created")?;
    story.kubectl("rollout status deployment/web --timeout=90s")?;
    story.kubectl("wait --for=condition=Ready pod/client --timeout=90s")?;
    let pods = story.pods("app=web")?;
    ensure!(pods.len() == 3, "{pods:?}");
    let again = story.apply(WEB)?;
    expect::like(
        &again,
        "configmap/web unchanged\nsecret/web *\ndeployment.apps/web unchanged\nservice/web unchanged",
    )?;
    story.soon(LONG, "deployment web", ".status.readyReplicas", "3")
}

pub fn inside(story: &mut Story) -> Result<()> {
    let pod = story.first_pod("app=web")?;
    let address = story.value(&format!("pod {pod}"), ".status.podIP")?;
    let cases = [
        ("echo $COLOUR", "green".to_owned()),
        ("echo $PASSWORD", "s3cr3t".to_owned()),
        ("echo $GREETING", "hello green".to_owned()),
        ("echo $POD_IP", address),
        ("echo $KUBERNETES_SERVICE_HOST", "10.43.0.1".to_owned()),
        ("cat /files/config/motd", "welcome".to_owned()),
        ("cat /files/secret/password", "s3cr3t".to_owned()),
        ("cat /proc/1/comm", "nginx".to_owned()),
        ("hostname", pod.clone()),
    ];
    for (command, wanted) in cases {
        let printed = story.server.kubectl(&["exec", &pod, "--", "sh", "-c", command])?;
        ensure!(printed.trim() == wanted, "{command}: {printed:?}, wanted {wanted:?}");
    }
    let token = "cat /var/run/secrets/kubernetes.io/serviceaccount/namespace";
    let namespace = story.kubectl(&format!("exec {pod} -- {token}"))?;
    ensure!(namespace == "default", "{namespace:?}");
    limits(story, &pod)
}

/// The limit of 64Mi as the kernel shows it, on either cgroup version.
fn limits(story: &Story, pod: &str) -> Result<()> {
    let uid = story.value(&format!("pod {pod}"), ".metadata.uid")?;
    let process = crate::processes::named(&uid, "nginx")?;
    let cgroup = std::fs::read_to_string(format!("/proc/{}/cgroup", process.id))?;
    let line =
        cgroup.lines().find(|line| line.contains(":memory:") || line.starts_with("0::/kube"));
    let path = line.and_then(|line| line.rsplit(':').next()).context("a memory cgroup")?;
    let version1 = format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes");
    let version2 = format!("/sys/fs/cgroup{path}/memory.max");
    let limit = std::fs::read_to_string(&version1).or_else(|_| std::fs::read_to_string(&version2));
    let limit = limit.with_context(|| format!("{version1} or {version2}"))?;
    ensure!(limit.trim() == "67108864", "{limit}");
    Ok(())
}

pub fn events(story: &mut Story) -> Result<()> {
    let pod = story.first_pod("app=web")?;
    story.soon_has_events(&pod, &["Scheduled", "Pulled", "Created", "Started"])?;
    story.soon_has_events("web", &["ScalingReplicaSet"])?;
    let owner = story.value(&format!("pod {pod}"), ".metadata.ownerReferences[0].name")?;
    story.soon_has_events(&owner, &["SuccessfulCreate"])?;
    let line = format!("get events --field-selector involvedObject.name={pod},reason=Scheduled");
    let printed = story.server.kubectl(&words(&line))?;
    expect::like(
        &printed,
        &format!(
            "LAST SEEN TYPE REASON OBJECT MESSAGE\n\
             * Normal Scheduled pod/{pod} Successfully assigned default/{pod} to node1"
        ),
    )
}
