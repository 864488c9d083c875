"""Replays recorded interactions as `wire.py` of the corpus does, but removes from both sides, the recorded
answers and ours, the facts of either environment, which are not behaviour of upstream. `cargo xtask wire` runs
it with the corpus' folder on the path.

In: wire.py's arguments. Out: wire.py's report. Invariant: a rule removes only facts of an environment; the rest
is compared byte by byte.
"""
import re
import sys

import wire

# A ConfigMap that the recorded cluster has in every namespace, and projects into every pod.
SERVICE_CA = "openshift-service-ca.crt"
# Our ConfigMap for joining nodes, in kube-system.
CLUSTER_CONFIG = "decapod-cluster"
# The clients' certificates differ, and the users in them.
CLIENTS = ("admin", "kubernetes-admin")

# Paths that everybody may read in the recorded cluster.
WELL_KNOWN = ["/.well-known", "/.well-known/*"]
# An annotation that a controller adds to a new node: before or after a case's next request.
NODE_TTL = "node.alpha.kubernetes.io/ttl"
# What the ReplicaSet controller owns in a new ReplicaSet without pods. It writes before or after a case's next request.
FIRST_STATUS = {"f:status": {"f:observedGeneration": {}, "f:terminatingReplicas": {}}}

# In the error of a forbidden update of a pod: the projected source, and the line numbers of its diff.
SOURCE_SHOWN = re.compile(r'(,?)\n[-+ ] {5}\{\n[^{}]*"ConfigMap": \{\n[^{}]*"Name": "%s",\n[^{}]*\{[^{}]*\}[^{}]*\}[^{}]*\}' % re.escape(SERVICE_CA))
PLACE_SHOWN = re.compile(r"@@ -\d+(,\d+)? \+\d+(,\d+)? @@")
# The same in an object that is shown as quoted JSON.
SOURCE_QUOTED = re.compile(r',\{\\?"configMap\\?":\{\\?"name\\?":\\?"%s\\?".*?\]\}\}' % re.escape(SERVICE_CA))


def is_foreign(value):
    if isinstance(value, dict):
        if value.get("nonResourceURLs") == WELL_KNOWN:
            return True
        if value.get("subresource") == "status" and value.get("fieldsV1") == FIRST_STATUS:
            return True
        names = [value.get("metadata"), value.get("configMap")]
        return any(isinstance(name, dict) and name.get("name") == SERVICE_CA for name in names)
    return value in (SERVICE_CA, CLUSTER_CONFIG)


def text(value):
    if SERVICE_CA in value or "@@ -" in value:
        value = SOURCE_QUOTED.sub("", PLACE_SHOWN.sub("@@", SOURCE_SHOWN.sub("", value)))
    return re.sub(r"X509SHA256=[0-9a-f]{64}", "X509SHA256=<hash>", value)


def upstream(value):
    """What is left of a value when what is foreign is gone."""
    if isinstance(value, list):
        return [upstream(item) for item in value if not is_foreign(item)]
    if isinstance(value, str):
        return text(value)
    if not isinstance(value, dict):
        return value
    out = {key: upstream(item) for key, item in value.items()}
    if out.get("username") in CLIENTS:
        out["username"] = "<client>"
    annotations = out.get("annotations")
    if isinstance(annotations, dict) and annotations.pop(NODE_TTL, None) is not None and not annotations:
        del out["annotations"]
    if str(out.get("ca.crt", "")).startswith("-----BEGIN CERTIFICATE-----"):
        out["ca.crt"] = "<authority>"
    # The server's own Service has a random target port.
    if isinstance(out.get("metadata"), dict) and out["metadata"].get("labels", {}).get("provider") == "kubernetes":
        for port in (out.get("spec") or {}).get("ports") or []:
            if isinstance(port.get("targetPort"), int):
                port["targetPort"] = "<port>"
    return out


def main():
    load, replay = wire.load_answers, wire.Runner.all
    wire.load_answers = lambda folder: {name: upstream(steps) for name, steps in load(folder).items()}
    wire.Runner.all = lambda self, *rest: {name: upstream(steps) for name, steps in replay(self, *rest).items()}
    return wire.main()


if __name__ == "__main__":
    sys.exit(main())
