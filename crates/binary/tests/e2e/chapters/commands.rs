//! Everyday kubectl commands and their output. Leaves everything as it was.

use anyhow::{Context, Result, ensure};
use testkit::{places, wait};

use crate::expect;
use crate::story::{LONG, Story};

/// Commands and patterns of their output.
const LISTS: &[(&str, &str)] = &[
    ("get deployments", "NAME READY UP-TO-DATE AVAILABLE AGE\nweb 3/3 3 3 *"),
    (
        "get deploy -o wide",
        "NAME READY UP-TO-DATE AVAILABLE AGE CONTAINERS IMAGES SELECTOR\nweb 3/3 3 3 * nginx nginx:1.22 app=web",
    ),
    ("get rs", "NAME DESIRED CURRENT READY AGE\nweb-* 3 3 3 *"),
    (
        "get pods -l app=web",
        "NAME READY STATUS RESTARTS AGE\nweb-* 1/1 Running 0 *\nweb-* 1/1 Running 0 *\nweb-* 1/1 Running 0 *",
    ),
    (
        "get po client -o wide",
        "NAME READY STATUS RESTARTS AGE IP NODE NOMINATED NODE READINESS GATES\n\
         client 1/1 Running 0 * 10.42.0.* node1 <none> <none>",
    ),
    (
        "get pod client --show-labels",
        "NAME READY STATUS RESTARTS AGE LABELS\nclient 1/1 Running 0 * <none>",
    ),
    (
        "get svc web -o wide",
        "NAME TYPE CLUSTER-IP EXTERNAL-IP PORT(S) AGE SELECTOR\nweb NodePort 10.43.* <none> 80:30080/TCP * app=web",
    ),
    ("get cm web", "NAME DATA AGE\nweb 2 *"),
    ("get secrets", "NAME TYPE DATA AGE\nweb Opaque 1 *"),
    (
        "get endpointslices -l kubernetes.io/service-name=web",
        "NAME ADDRESSTYPE PORTS ENDPOINTS AGE\nweb-* IPv4 80 10.42.0.*,10.42.0.*,10.42.0.* *",
    ),
    ("get pod client -o name", "pod/client"),
    (
        "get deploy web -o custom-columns=NAME:.metadata.name,WANTED:.spec.replicas",
        "NAME WANTED\nweb 3",
    ),
    ("get deploy web -o jsonpath={.spec.selector.matchLabels.app}", "web"),
    ("get deploy web -o go-template={{.spec.strategy.type}}", "RollingUpdate"),
    (
        "get cm web -o yaml",
        "apiVersion: v1\ndata:\n colour: green\n motd: |\n welcome\nkind: ConfigMap\nmetadata:\n...",
    ),
    (
        "get deploy,svc -l app=web",
        "NAME READY UP-TO-DATE AVAILABLE AGE\ndeployment.apps/web 3/3 3 3 *",
    ),
    ("get pods --field-selector spec.nodeName=node1,metadata.name=client -o name", "pod/client"),
    ("get pods --field-selector spec.nodeName=elsewhere -o name", ""),
    ("get pods -n kube-public", ""),
];

pub fn lists(story: &mut Story) -> Result<()> {
    for (line, pattern) in LISTS {
        story.soon_shows(LONG, line, pattern)?;
    }
    let error = story.kubectl("get pod nobody").expect_err("there is no such pod");
    ensure!(
        error.to_string().contains("Error from server (NotFound): pods \"nobody\" not found"),
        "{error:#}"
    );
    let error = story.kubectl("get nonsense").expect_err("there is no such resource");
    ensure!(
        error.to_string().contains("the server doesn't have a resource type \"nonsense\""),
        "{error:#}"
    );
    Ok(())
}

/// The machine's own kubectl, of any version, prints the same.
pub fn other_kubectl(story: &mut Story) -> Result<()> {
    let Some(other) = places::program("kubectl") else {
        println!("the machine has no kubectl of its own");
        return Ok(());
    };
    let ours = story.server.use_kubectl(other);
    let outcome =
        LISTS.iter().try_for_each(|(line, pattern)| story.soon_shows(LONG, line, pattern));
    story.server.use_kubectl(ours);
    outcome
}

const DEPLOYMENT: &str = "\
Name: web
Namespace: default
CreationTimestamp: *
Labels: app=web
Annotations: deployment.kubernetes.io/revision: 1
Selector: app=web
Replicas: 3 desired | 3 updated | 3 total | 3 available | 0 unavailable
StrategyType: RollingUpdate
MinReadySeconds: 0
RollingUpdateStrategy: 25% max unavailable, 25% max surge
Pod Template:
...
Conditions:
Type Status Reason
---- ------ ------
...
OldReplicaSets: <none>
NewReplicaSet: web-* (3/3 replicas created)
Events:
Type Reason Age From Message
---- ------ ---- ---- -------
Normal ScalingReplicaSet * deployment-controller Scaled up replica set web-* from 0 to 3";

const POD: &str = "\
Name: client
Namespace: default
Priority: 0
Service Account: default
Node: node1/*
Start Time: *
Labels: <none>
Annotations: <none>
Status: Running
IP: 10.42.0.*
IPs:
IP: 10.42.0.*
Containers:
shell:
Container ID: *
Image: busybox:1.35
Image ID: *
...
State: Running
Started: *
Ready: True
Restart Count: 0
...
QoS Class: BestEffort
...
Events:
...";

/// Events of the same second are not ordered.
const POD_EVENTS: &[&str] = &[
    "Normal Scheduled * default-scheduler Successfully assigned default/client to node1",
    "Normal Pulled * kubelet *",
    "Normal Created * kubelet *",
    "Normal Started * kubelet *",
];

pub fn describe(story: &mut Story) -> Result<()> {
    story.shows("describe deployment web", DEPLOYMENT)?;
    // The order of the two depends on which changed last.
    for condition in
        ["Available True MinimumReplicasAvailable", "Progressing True NewReplicaSetAvailable"]
    {
        story.shows("describe deployment web", &format!("...\n{condition}\n..."))?;
    }
    story.shows("describe pod client", POD)?;
    for event in POD_EVENTS {
        story.shows("describe pod client", &format!("...\n{event}\n..."))?;
    }
    story.shows(
        "describe service web",
        "Name: web\nNamespace: default\nLabels: <none>\nAnnotations: <none>\nSelector: app=web\n\
         Type: NodePort\nIP Family Policy: SingleStack\nIP Families: IPv4\nIP: 10.43.*\nIPs: 10.43.*\n\
         Port: http 80/TCP\nTargetPort: http/TCP\nNodePort: http 30080/TCP\nEndpoints: 10.42.0.*:80,*\n\
         Session Affinity: None\nExternal Traffic Policy: Cluster\nInternal Traffic Policy: Cluster\nEvents: <none>",
    )?;
    story.shows(
        "describe node node1",
        "Name: node1\n...\nConditions:\n...\nReady True * KubeletReady *\n...",
    )
}

pub fn streams(story: &mut Story) -> Result<()> {
    logs(story)?;
    exec(story)?;
    inline(story)?;
    copy(story)?;
    let pod = story.first_pod("app=web")?;
    for (number, what) in [("18080", format!("pod/{pod}")), ("18081", "service/web".to_owned())] {
        let ports = format!("{number}:80");
        let forward =
            story.server.kubectl_in_background("port-forward", &["port-forward", &what, &ports])?;
        let address = format!("127.0.0.1:{number}");
        // Several connections through one tunnel.
        for _ in 0..5 {
            let response = wait::until(LONG, "the forwarded port answers", || {
                story.get(&address, "/").with_context(|| forward.output().unwrap_or_default())
            })?;
            ensure!(response.status == 200, "{response:?}");
        }
    }
    Ok(())
}

fn logs(story: &Story) -> Result<()> {
    story.soon_shows(LONG, "logs client", "started\nline 0\n...")?;
    story.shows("logs client --tail=1", "line *")?;
    let timed = story.kubectl("logs client --timestamps --limit-bytes=60")?;
    expect::like(timed.lines().next().unwrap_or_default(), "20*-*-*T*Z started")?;
    let follow =
        story.server.kubectl_in_background("logs", &["logs", "-f", "client", "--tail=1"])?;
    wait::until(LONG, "logs -f goes on", || {
        let lines = follow.output()?.lines().count();
        ensure!(lines >= 4, "{lines} lines");
        Ok(())
    })
}

fn exec(story: &Story) -> Result<()> {
    let printed = story
        .server
        .kubectl_with(&["exec", "-i", "client", "--", "cat"], "through and through\n")?;
    ensure!(printed == "through and through\n", "{printed:?}");
    let error = story.kubectl("exec client -- false").expect_err("it fails");
    ensure!(error.to_string().contains("command terminated with exit code 1"), "{error:#}");
    let terminal = story.server.kubectl_in_terminal(&["exec", "-it", "client", "--", "tty"])?;
    ensure!(terminal.contains("/dev/pts/") || terminal.contains("/dev/console"), "{terminal:?}");
    let big = ["exec", "client", "--", "sh", "-c", "yes | head -c 3000000"];
    let length = story.server.kubectl(&big)?.len();
    ensure!(length == 3_000_000, "{length} bytes arrived");
    Ok(())
}

/// `kubectl run -i` ends with its input, whether the container's stdin closes with it (`stdinOnce`) or
/// stays open.
fn inline(story: &Story) -> Result<()> {
    let image = "--image=docker.io/library/busybox:1.35";
    let script = "echo read: && cat && echo closed";
    for (name, stays_open) in [("once", false), ("open", true)] {
        let leave = format!("--leave-stdin-open={stays_open}");
        let run = ["run", name, image, "--restart=Never", "--attach", "--stdin", &leave, "--quiet"];
        let command = ["--", "sh", "-c", script];
        story.server.kubectl_with(&[&run[..], &command].concat(), "typed\n")?;
        let wanted = if stays_open { "read:\ntyped" } else { "read:\ntyped\nclosed" };
        story.soon_shows(LONG, &format!("logs {name}"), wanted)?;
        let phase = if stays_open { "Running" } else { "Succeeded" };
        story.soon(LONG, &format!("pod {name}"), ".status.phase", phase)?;
        story.kubectl(&format!("delete pod {name} --grace-period=0 --force"))?;
    }
    Ok(())
}

fn copy(story: &Story) -> Result<()> {
    let here = story.server.host().directory().join("letter");
    let back = story.server.host().directory().join("letter-back");
    let text = "a letter\n".repeat(20_000);
    std::fs::write(&here, &text)?;
    story.kubectl(&format!("cp {} client:/tmp/letter", here.display()))?;
    story.kubectl(&format!("cp client:/tmp/letter {}", back.display()))?;
    ensure!(std::fs::read_to_string(&back)? == text, "the copy differs");
    Ok(())
}

pub fn changes(story: &mut Story) -> Result<()> {
    story.shows("scale deployment web --replicas=4", "deployment.apps/web scaled")?;
    story.soon(LONG, "deployment web", ".status.readyReplicas", "4")?;
    story.shows("scale deployment web --replicas=3", "deployment.apps/web scaled")?;
    wait::until(LONG, "the fourth pod is gone", || {
        story.shows("get pods -l app=web -o custom-columns=:.kind --no-headers", "Pod\nPod\nPod")
    })?;
    for (line, printed) in [
        ("label pod client tier=back", "pod/client labeled"),
        ("get pods -l tier=back -o name", "pod/client"),
        ("label pod client tier-", "pod/client unlabeled"),
        ("annotate pod client note=seen", "pod/client annotated"),
        ("get pod client -o jsonpath={.metadata.annotations.note}", "seen"),
        ("annotate pod client note-", "pod/client annotated"),
        ("patch configmap web -p {\"data\":{\"colour\":\"red\"}}", "configmap/web patched"),
        ("get cm web -o jsonpath={.data}", "{\"colour\":\"red\",\"motd\":\"welcome\\n\"}"),
        (
            "patch cm web --type=json -p [{\"op\":\"replace\",\"path\":\"/data/colour\",\"value\":\"blue\"}]",
            "configmap/web patched",
        ),
        ("create configmap other --from-literal=a=b", "configmap/other created"),
        ("delete configmap other", "configmap \"other\" deleted from default namespace"),
        ("create configmap none --from-literal=a=b --dry-run=server -o name", "configmap/none"),
    ] {
        story.shows(line, printed)?;
    }
    edit(story)
}

fn edit(story: &Story) -> Result<()> {
    let mut command = story.server.kubectl_command(&["edit", "configmap", "web"]);
    command.env("KUBE_EDITOR", "sed -i s/blue/green/");
    let output = story.server.host().output(&mut command)?;
    let printed = String::from_utf8_lossy(&output.stdout);
    ensure!(printed.trim() == "configmap/web edited", "{output:?}");
    story.shows("get cm web -o jsonpath={.data.colour}", "green")
}

pub fn watch(story: &mut Story) -> Result<()> {
    let arguments = [
        "get",
        "configmaps",
        "-w",
        "--no-headers",
        "-o",
        "custom-columns=N:.metadata.name,V:.data.v",
    ];
    let watch = story.server.kubectl_in_background("watch", &arguments)?;
    wait::until(LONG, "the watch lists", || {
        ensure!(watch.output()?.contains("web"), "{}", watch.output()?);
        Ok(())
    })?;
    story.kubectl("create configmap seen --from-literal=v=1")?;
    story.kubectl("patch configmap seen -p {\"data\":{\"v\":\"2\"}}")?;
    story.kubectl("delete configmap seen")?;
    wait::until(LONG, "the watch tells of three changes", || {
        let printed = watch.output()?;
        let told: Vec<&str> = printed.lines().filter(|line| line.starts_with("seen ")).collect();
        ensure!(told.len() == 3 && told[0].ends_with('1') && told[1].ends_with('2'), "{printed}");
        Ok(())
    })?;
    story.kubectl("run passing --image=busybox:1.35 --restart=Never -- sh -c exit")?;
    story.kubectl("wait --for=jsonpath={.status.phase}=Succeeded pod/passing --timeout=90s")?;
    story.shows("get pod passing", "NAME READY STATUS RESTARTS AGE\npassing 0/1 Completed 0 *")?;
    story.shows(
        "delete pod passing --wait=false",
        "pod \"passing\" deleted from default namespace",
    )?;
    story.kubectl("wait --for=delete pod/passing --timeout=30s").map(drop)
}

pub fn surface(story: &mut Story) -> Result<()> {
    story.shows(
        "explain deployment.spec",
        "GROUP: apps\nKIND: Deployment\nVERSION: v1\n\nFIELD: spec <DeploymentSpec>\n\n\nDESCRIPTION:\n...\nFIELDS:\n...\n\
         replicas <integer>\n...\nselector <LabelSelector> -required-\n...\ntemplate <PodTemplateSpec> -required-\n...",
    )?;
    story.shows(
        "api-resources --sort-by=name",
        "NAME SHORTNAMES APIVERSION NAMESPACED KIND\n...\nconfigmaps cm v1 true ConfigMap\n...\n\
         deployments deploy apps/v1 true Deployment\n...\nnamespaces ns v1 false Namespace\n...\npods po v1 true Pod\n...",
    )?;
    story.shows(
        "auth whoami",
        "ATTRIBUTE VALUE\nUsername *\nGroups [system:masters system:authenticated]\n...",
    )?;
    story.shows("auth can-i create pods", "yes")?;
    let error =
        story.kubectl("auth can-i create pods --as=somebody").expect_err("nobody knows somebody");
    ensure!(error.to_string().contains("no"), "{error:#}");
    story.shows("get --raw /healthz", "ok")?;
    story.shows("get --raw /readyz", "ok")?;
    story.shows("get --raw /readyz?verbose", "[+]ping ok\n...\nreadyz check passed")?;
    stranger(story)
}

/// A client without credentials may read health and version, but no objects.
fn stranger(story: &Story) -> Result<()> {
    let client = story.api()?.without_identity()?;
    let host = story.server.host();
    let ask = |path: &str| host.in_network(|| client.get(path, LONG));
    for (path, status) in [("/readyz", 200), ("/version", 200), ("/api/v1/pods", 403)] {
        let answer = ask(path)??;
        ensure!(answer.status == status, "{path}: {answer:?}");
        ensure!(status == 200 || answer.body.contains("system:anonymous"), "{path}: {answer:?}");
    }
    Ok(())
}
