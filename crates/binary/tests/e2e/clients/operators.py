"""kr8s and kopf at work: a port-forward without a subprotocol, an operator with its finalizer.

In: a kubeconfig by KUBECONFIG; the name of an image that is on the node. Out: a line a step; the
exit code is 1, with a trace, at the first thing that is not as a user would expect. It works in a
namespace of its own and leaves nothing.
"""

import asyncio
import sys
import threading

import httpx
import kopf
import kr8s
from kr8s.objects import ConfigMap, Namespace, Pod

IMAGE = sys.argv[1]
SPACE = "client-operators"
LIMIT = 60
SERVE = "mkdir /www; echo here > /www/index.html; exec httpd -f -p 8080 -h /www"


def namespace():
    Namespace({"metadata": {"name": SPACE}}).create()


def forward():
    container = {"name": "main", "image": IMAGE, "command": ["sh", "-c", SERVE]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    # Pods need the service account, which a controller creates.
    for attempt in range(LIMIT):
        try:
            pod = Pod({"metadata": {"name": "web", "namespace": SPACE}, "spec": spec})
            pod.create()
            break
        except kr8s.ServerError:
            if attempt == LIMIT - 1:
                raise
            threading.Event().wait(1)
    pod.wait("condition=Ready", timeout=LIMIT)
    with pod.portforward(remote_port=8080) as port:
        for _ in range(2):
            answer = httpx.get(f"http://127.0.0.1:{port}/", timeout=LIMIT)
            assert (answer.status_code, answer.text) == (200, "here\n"), answer


def operator():
    seen = []
    said = threading.Condition()

    def say(what):
        with said:
            seen.append(what)
            said.notify_all()

    def heard(what):
        with said:
            assert said.wait_for(lambda: what in seen, LIMIT), f"{what} is missing in {seen}"

    selected = {"labels": {"operated": kopf.PRESENT}}

    @kopf.on.create("v1", "configmaps", **selected)
    def made(patch, **_):
        patch.metadata.annotations["made"] = "yes"
        say("made")

    @kopf.on.update("v1", "configmaps", field="data", **selected)
    def changed(**_):
        say("changed")

    @kopf.on.delete("v1", "configmaps", **selected)
    def gone(**_):
        say("gone")

    stop, ready = threading.Event(), threading.Event()
    running = kopf.operator(namespaces=[SPACE], standalone=True, stop_flag=stop, ready_flag=ready)
    thread = threading.Thread(target=lambda: asyncio.run(running))
    thread.start()
    try:
        assert ready.wait(LIMIT), "the operator does not start"
        metadata = {"name": "operated", "namespace": SPACE, "labels": {"operated": "yes"}}
        settings = ConfigMap({"metadata": metadata, "data": {"a": "1"}})
        settings.create()
        heard("made")
        for _ in range(LIMIT):
            settings.refresh()
            if settings.annotations.get("made") == "yes":
                break
            threading.Event().wait(1)
        assert settings.annotations.made == "yes", settings.raw
        settings.patch({"data": {"a": "2"}})
        heard("changed")
        settings.delete()
        heard("gone")
        settings.wait("delete", timeout=LIMIT)
    finally:
        stop.set()
        thread.join()


def ending():
    space = Namespace.get(SPACE)
    space.delete()
    space.wait("delete", timeout=LIMIT)


def main():
    for step in [namespace, forward, operator, ending]:
        step()
        print(step.__name__, flush=True)


main()
