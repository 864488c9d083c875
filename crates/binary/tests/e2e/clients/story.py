"""The Python client at work: create, apply, watch, patch, exec, logs, port-forward, delete.

In: a kubeconfig by KUBECONFIG; the name of an image that is on the node. Out: a line a step; the
exit code is 1, with a trace, at the first thing that is not as a user would expect. It works in a
namespace of its own and leaves nothing.
"""

import base64
import sys

from kubernetes import client, config, dynamic, utils, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import portforward, stream

IMAGE = sys.argv[1]
SPACE = "client-python"
LIMIT = 60
SERVE = "mkdir /www; echo here > /www/index.html; echo hello; exec httpd -f -p 8080 -h /www"


def manifest(replicas):
    labels = {"app": "py"}
    container = {"name": "main", "image": IMAGE, "command": ["sh", "-c", SERVE]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "py", "namespace": SPACE},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
            },
        },
    }


def until(events, wanted):
    """The first object of a watch that matches; the watch itself has a timeout."""
    for event in events:
        if wanted(event):
            return event["object"]
    raise AssertionError("the watch ended first")


def fails(status, reason, call):
    try:
        call()
    except ApiException as error:
        assert (error.status, error.reason) == (status, reason), (error.status, error.reason)
        return error
    raise AssertionError(f"{status} was expected")


def namespace(core):
    core.create_namespace({"metadata": {"name": SPACE}})
    fails(409, "Conflict", lambda: core.create_namespace({"metadata": {"name": SPACE}}))
    wait = watch.Watch()
    accounts = wait.stream(core.list_namespaced_service_account, SPACE, timeout_seconds=LIMIT)
    until(accounts, lambda event: event["object"].metadata.name == "default")
    wait.stop()


def ready(apps, count):
    wait = watch.Watch()
    rollout = wait.stream(apps.list_namespaced_deployment, SPACE, timeout_seconds=LIMIT)
    until(rollout, lambda event: event["object"].status.ready_replicas == count)
    wait.stop()


def deployment(api, apps):
    utils.create_from_dict(api, manifest(1))
    ready(apps, 1)
    apps.patch_namespaced_deployment_scale("py", SPACE, {"spec": {"replicas": 2}})
    ready(apps, 2)
    scale = apps.read_namespaced_deployment_scale("py", SPACE)
    assert scale.spec.replicas == 2, scale
    seen = apps.read_namespaced_deployment("py", SPACE)
    seen.spec.replicas = 1
    seen.metadata.resource_version = "1"
    stale = fails(409, "Conflict", lambda: apps.replace_namespaced_deployment("py", SPACE, seen))
    assert "the object has been modified" in stale.body, stale.body


def server_side_apply(api):
    maps = dynamic.DynamicClient(api).resources.get(api_version="v1", kind="ConfigMap")
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a": "1"}}
    maps.server_side_apply(body=body, namespace=SPACE, field_manager="one")
    body["data"]["a"] = "2"
    error = None
    try:
        maps.server_side_apply(body=body, namespace=SPACE, field_manager="two")
    except dynamic.exceptions.ConflictError as conflict:
        error = conflict
    assert error is not None and 'conflict with \\"one\\"' in str(error.body), error
    forced = maps.server_side_apply(body=body, namespace=SPACE, field_manager="two", force_conflicts=True)
    assert forced.data.a == "2", forced


def pods(core):
    pod = core.list_namespaced_pod(SPACE, label_selector="app=py").items[0].metadata.name
    printed = stream(
        core.connect_get_namespaced_pod_exec, pod, SPACE, command=["echo", "from", "inside"],
        stderr=True, stdin=False, stdout=True, tty=False,
    )
    assert printed == "from inside\n", printed
    log = core.read_namespaced_pod_log(pod, SPACE, _preload_content=False).data
    assert log == b"hello\n", log
    typed = stream(
        core.connect_get_namespaced_pod_exec, pod, SPACE, command=["sh", "-c", "read x; echo got $x; exit 3"],
        stderr=True, stdin=True, stdout=True, tty=False, _preload_content=False,
    )
    typed.write_stdin("it\n")
    typed.run_forever(timeout=LIMIT)
    assert typed.read_stdout() == "got it\n"
    assert typed.returncode == 3, typed.returncode
    note = [{"op": "add", "path": "/metadata/annotations", "value": {"note": "seen"}}]
    assert core.patch_namespaced_pod(pod, SPACE, note).metadata.annotations["note"] == "seen"


def forward(core):
    """Reads a forwarded port to its end: the pod's server closes, and so does the socket."""
    pod = core.list_namespaced_pod(SPACE, label_selector="app=py").items[0].metadata.name
    forwarded = portforward(core.connect_get_namespaced_pod_portforward, pod, SPACE, ports="8080")
    near = forwarded.socket(8080)
    near.settimeout(LIMIT)
    near.sendall(b"GET / HTTP/1.0\r\n\r\n")
    heard = b""
    while data := near.recv(4096):
        heard += data
    assert heard.endswith(b"\r\n\r\nhere\n"), heard
    assert forwarded.error(8080) is None


def dry_eviction(core):
    """`kubectl drain --dry-run=server` has the option in the body."""
    pod = core.list_namespaced_pod(SPACE, label_selector="app=py").items[0].metadata
    body = {"metadata": {"name": pod.name, "namespace": SPACE}, "deleteOptions": {"dryRun": ["All"]}}
    core.create_namespaced_pod_eviction(pod.name, SPACE, body)
    assert core.read_namespaced_pod(pod.name, SPACE).metadata.deletion_timestamp is None


def token(core):
    """A service account's token Secret is filled, and deleted with the account."""
    core.create_namespaced_service_account(SPACE, {"metadata": {"name": "bot"}})
    annotations = {"kubernetes.io/service-account.name": "bot"}
    secret = {"metadata": {"name": "bot", "annotations": annotations}, "type": "kubernetes.io/service-account-token"}
    wait = watch.Watch()
    core.create_namespaced_secret(SPACE, secret)
    secrets = wait.stream(core.list_namespaced_secret, SPACE, timeout_seconds=LIMIT)
    made = until(secrets, lambda event: "token" in (event["object"].data or {}))
    assert sorted(made.data) == ["ca.crt", "namespace", "token"], made.data
    settings = client.Configuration.get_default_copy()
    settings.api_key = {"authorization": "Bearer " + base64.b64decode(made.data["token"]).decode()}
    settings.cert_file = settings.key_file = None
    review = client.AuthenticationV1Api(client.ApiClient(settings)).create_self_subject_review({})
    assert review.status.user_info.username == f"system:serviceaccount:{SPACE}:bot", review
    core.delete_namespaced_service_account("bot", SPACE)
    until(secrets, lambda event: event["type"] == "DELETED")
    wait.stop()


def pages(core):
    for number in range(7):
        core.create_namespaced_config_map(SPACE, {"metadata": {"name": f"page-{number}"}})
    found, token = [], None
    while token != "":
        page = core.list_namespaced_config_map(SPACE, limit=3, _continue=token)
        assert len(page.items) <= 3
        found += [item.metadata.name for item in page.items]
        token = page.metadata._continue or ""
    assert [name for name in found if name.startswith("page-")] == [f"page-{n}" for n in range(7)], found


def ending(core):
    fails(404, "Not Found", lambda: core.read_namespaced_pod("nobody", SPACE))
    wait = watch.Watch()
    gone = wait.stream(core.list_namespace, field_selector=f"metadata.name={SPACE}", timeout_seconds=LIMIT)
    core.delete_namespace(SPACE)
    until(gone, lambda event: event["type"] == "DELETED")
    wait.stop()


def main():
    config.load_kube_config()
    api = client.ApiClient()
    core, apps = client.CoreV1Api(api), client.AppsV1Api(api)
    steps = [
        ("version", lambda: client.VersionApi(api).get_code()),
        ("namespace", lambda: namespace(core)),
        ("deployment", lambda: deployment(api, apps)),
        ("apply", lambda: server_side_apply(api)),
        ("pods", lambda: pods(core)),
        ("forward", lambda: forward(core)),
        ("dry-eviction", lambda: dry_eviction(core)),
        ("token", lambda: token(core)),
        ("pages", lambda: pages(core)),
        ("ending", lambda: ending(core)),
    ]
    for name, step in steps:
        step()
        print(name)


main()
