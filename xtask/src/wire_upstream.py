"""Replays recorded interactions as `wire.py` of the corpus does, but takes out of both sides, the recorded
answers and ours, what either place has of its own: it is no behaviour of upstream's. `cargo xtask wire` runs it
with the corpus' folder on the path.

In: wire.py's arguments. Out: wire.py's report. Invariant: a rule names what is foreign and nothing else; what
remains is compared to the last byte.
"""
import re
import sys

import wire

# What the builder of the recorded server adds to every namespace, and projects into every pod.
SERVICE_CA = "openshift-service-ca.crt"
# What ours keeps for nodes that join, in kube-system.
CLUSTER_CONFIG = "decapod-cluster"
# The certificates of the clients differ, and who they say that their bearers are.
CLIENTS = ("admin", "kubernetes-admin")

# What the recorded server's builder lets everybody read.
WELL_KNOWN = ["/.well-known", "/.well-known/*"]
# What the controllers add to a new node as soon as they get to it: before or after a case's next request.
NODE_TTL = "node.alpha.kubernetes.io/ttl"

# In the text that tells what an update of a pod may not change: the projected source, and the lines that
# say where in that text a part of it stands.
SOURCE_SHOWN = re.compile(r'(,?)\n[-+ ] {5}\{\n[^{}]*"ConfigMap": \{\n[^{}]*"Name": "%s",\n[^{}]*\{[^{}]*\}[^{}]*\}[^{}]*\}' % re.escape(SERVICE_CA))
PLACE_SHOWN = re.compile(r"@@ -\d+(,\d+)? \+\d+(,\d+)? @@")
# The same where an object is shown as JSON, quoted once more.
SOURCE_QUOTED = re.compile(r',\{\\?"configMap\\?":\{\\?"name\\?":\\?"%s\\?".*?\]\}\}' % re.escape(SERVICE_CA))


def is_foreign(value):
    if isinstance(value, dict):
        if value.get("nonResourceURLs") == WELL_KNOWN:
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
    # The server's own Service leads to the port that it happened to get.
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
