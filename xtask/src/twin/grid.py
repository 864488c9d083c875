"""Cases that hold for every kind: each template of requests with each seed, and each field with each odd value.

In: the seeds, upstream's schemas, a number. Out: the steps of a case, as `generate.py` has them. A `WATCH` step reads
`count` events from the revision that the list at its path had before the case.

Invariant: a number stands for the same pair of a kind and a template in each run with the same seeds.
"""
import copy

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
OLD_TABLE = "application/json;as=Table;v=v1beta1;g=meta.k8s.io"
PARTIAL = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
PARTIALS = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
JSON_PATCH, APPLY = "application/json-patch+json", "application/apply-patch+yaml"
DRY = ["dryRun", "All"]
# Other things of these kinds change later answers for some time, or are changed by the server itself.
NEVER_MADE = ("CustomResourceDefinition", "APIService", "ServiceCIDR", "FlowSchema", "PriorityLevelConfiguration")
SUBRESOURCES = ["status", "scale", "bogus", "log", "exec", "attach", "portforward", "proxy", "eviction", "binding", "token", "approval",
                "finalize", "ephemeralcontainers", "resize"]
BAD_NAMES = ["Bad_Name!", "a/b", "..", ".", "", "a%b", "a" * 64, "a" * 254, "a.b", "a..b", "-a", "a-", "A", "1", "a b", "é", "system:x", "10.0.0.1", "a_b", "a:b"]
BAD_METADATA = [
    "x", [], 5, None, {}, {"name": 5}, {"name": 5, "labels": []}, {"name": None}, {"labels": "x"}, {"labels": {"a": 1}}, {"labels": {"a": None}},
    {"annotations": {"a": True}}, {"annotations": []}, {"finalizers": "x"}, {"finalizers": [1]}, {"finalizers": [None]}, {"ownerReferences": {}},
    {"ownerReferences": [{}]}, {"ownerReferences": [None]}, {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "", "uid": ""}]},
    {"ownerReferences": [{"apiVersion": "v1", "kind": "Event", "name": "a", "uid": "u"}]},
    {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "u", "controller": True}, {"apiVersion": "v1", "kind": "Pod", "name": "b", "uid": "w", "controller": True}]},
    {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "u"}, {"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "u"}]},
    {"ownerReferences": [{"apiVersion": "a/b/c", "kind": "", "name": "a", "uid": "u", "blockOwnerDeletion": True}]},
    {"creationTimestamp": "x"}, {"creationTimestamp": "2020-01-01T00:00:00Z"}, {"creationTimestamp": 5}, {"deletionTimestamp": "2020-01-01T00:00:00Z"},
    {"generation": "1"}, {"generation": 7}, {"generation": -1}, {"uid": "x"}, {"uid": 5}, {"resourceVersion": "1"}, {"resourceVersion": "0"}, {"resourceVersion": 5},
    {"resourceVersion": "x"}, {"selfLink": "/a"}, {"deletionGracePeriodSeconds": -1}, {"deletionGracePeriodSeconds": 5}, {"managedFields": [{}]}, {"managedFields": [{"manager": "m", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": {"f:x": {}}}]},
    {"managedFields": [{"manager": "m", "operation": "Odd", "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": {}}]}, {"managedFields": "x"}, {"managedFields": []},
    {"generateName": "a b"}, {"generateName": "NAME-"}, {"generateName": "A"}, {"generateName": "a" * 300}, {"generateName": ""}, {"generateName": 5}, {"namespace": "elsewhere"}, {"namespace": ""}, {"namespace": "A b"}, {"namespace": 5},
    {"labels": {"bad key": "v", "ok": "bad value!"}, "annotations": {"also bad": "x"}, "finalizers": ["nodomain"], "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "", "uid": ""}]},
    {"labels": {"a/b/c": "v"}}, {"labels": {"": "v"}}, {"labels": {"A.b/c": "v"}}, {"labels": {"a": "a" * 64}}, {"labels": {"a" * 64: "a"}}, {"labels": {"a": "-"}}, {"labels": {"a": "é"}}, {"labels": {"/a": "b"}}, {"labels": {"a/": "b"}},
    {"annotations": {"": "v"}}, {"annotations": {"A.B/c": "v"}}, {"annotations": {"a b": "v"}}, {"annotations": {"a": "x" * 262145}}, {"annotations": {"a/b/c": ""}},
    {"finalizers": [""]}, {"finalizers": ["a b/c"]}, {"finalizers": ["nodomain"]}, {"finalizers": ["orphan", "foregroundDeletion"]}, {"finalizers": ["example.com/a", "example.com/a"]}, {"finalizers": ["kubernetes"]}, {"finalizers": ["kubernetes.io/x"]},
    {"bogus": 1}, {"clusterName": "a"}, {"Name": "a"},
]


def post(path, body, query=(), headers=(), **more):
    return {"method": "POST", "path": path, "query": list(query), "headers": [list(it) for it in headers], "body": body, "edits": []} | more


def get(path, query=(), accept=None, method="GET"):
    return {"method": method, "path": path, "query": list(query), "headers": [["Accept", accept]] if accept else []}


def put(path, of, edits=(), query=(), **more):
    step = {"method": "PUT", "path": path, "query": list(query), "edits": list(edits)}
    return step | ({"of": of} if of else {}) | more


def patch(path, kind, body, query=(), **more):
    return {"method": "PATCH", "path": path, "query": list(query), "body": body, "edits": [], "kind": kind} | more


def delete(path, query=(), body=None):
    step = {"method": "DELETE", "path": path, "query": list(query)}
    return step | {"body": body, "edits": []} if body is not None else step


def meta(body, **fields):
    out = copy.deepcopy(body)
    out["metadata"] = {**out["metadata"], **fields}
    return out


class Kind:
    """A seed, and what its requests have in common."""

    def __init__(self, path, seed, body):
        self.path, self.seed, self.body = path, seed, body
        self.name = body["metadata"].get("name", "NAME")
        self.at = f"{path}/{self.name}"
        self.minimal = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": {"name": self.name}}
        self.is_review = bool(seed.get("review"))
        self.is_made = body["kind"] not in NEVER_MADE and not self.is_review
        self.group = body["apiVersion"]

    def labelled(self, **labels):
        return meta(self.body, labels={**self.body["metadata"].get("labels", {}), **labels})

    def own_list(self):
        return ["fieldSelector", f"metadata.name={self.name}"]


def templates(kind):
    """All cases of a kind."""
    yield from refused(kind)
    yield from methods(kind)
    if kind.is_review:
        return
    yield from lists(kind)
    if kind.is_made:
        yield from lives(kind)
        yield from applied(kind)
        yield from shown(kind)
        yield from watched(kind)
        yield from deleted(kind)
        yield from parts(kind)


def refused(k):
    for name in [] if k.is_review else BAD_NAMES:
        yield [post(k.path, meta(k.body, name=name), [DRY])]
    for value in BAD_METADATA:
        body = copy.deepcopy(k.body)
        body["metadata"] = {**body["metadata"], **value} if isinstance(value, dict) and value else value
        yield [post(k.path, body, [DRY])]
        if isinstance(value, dict) and "generateName" in value and not k.is_review:
            yield [post(k.path, meta({**body, "metadata": value}), [DRY])]
        if isinstance(value, dict) and value:
            yield [post(k.path, {**k.minimal, "metadata": {**k.minimal["metadata"], **value}}, [DRY])]
    yield [post(k.path, {key: value for key, value in k.body.items() if key != "metadata"}, [DRY])]
    yield [post(k.path, {**k.minimal, "metadata": {}}, [DRY])]
    yield [post(k.path, k.minimal, [DRY])]
    for field in [key for key in k.body if key not in ("apiVersion", "kind", "metadata")]:
        for value in ({}, None, "x", [], 5, True, [None], [{}]):
            yield [post(k.path, {**k.minimal, field: value}, [DRY])]
    for value in ({}, None, "x", [], {"bogus": 1}, {"conditions": [{}]}, {"conditions": None}):
        yield [post(k.path, {**k.body, "status": value}, [DRY])]
    for mode in ("Strict", "Warn", "Ignore"):
        for body in ({**k.minimal, "zzz": {"a": [1]}}, meta({**k.body, "zzz": 1}, bogus=1), {**k.minimal, "metadata": {**k.minimal["metadata"], "bogus": 1}, "spec": {"nope": True}, "zzz": 1}):
            yield [post(k.path, body, [DRY, ["fieldValidation", mode]])]
    for changes in ({"kind": "Wrong"}, {"apiVersion": "bogus/v9"}, {"apiVersion": "v1", "kind": "ConfigMap"}, {"apiVersion": ""}, {"kind": ""}, {"apiVersion": None, "kind": None}, {"kind": k.body["kind"] + "List"}, {"kind": 5}, {"apiVersion": "a/b/c"},
                    {"apiVersion": "v1", "kind": "List", "items": []}, {"apiVersion": "v1", "kind": "Status"}, {"apiVersion": "meta.k8s.io/v1", "kind": "DeleteOptions"}, {"apiVersion": "v1", "kind": k.body["kind"]}):
        yield [post(k.path, {**k.body, **changes}, [DRY])]
    yield [post(k.path, {key: value for key, value in k.body.items() if key not in ("apiVersion", "kind")}, [DRY])]
    if "/NS/" in k.path or "/QUIET/" in k.path:
        for space in ("none-such", "Bad_Name", "a.b"):
            yield [post(k.path.replace("NS", space).replace("QUIET", space), k.body)]
            yield [post(k.path.replace("NS", space).replace("QUIET", space), meta(k.body, namespace="NS"))]


def methods(k):
    body = k.body
    none = f"{k.path}/none"
    yield [post(none, body), {**put(k.path, None), "body": body}, patch(k.path, MERGE, {}), get(none, method="HEAD"), get(k.path, method="OPTIONS"),
           get(k.path + "/", [["labelSelector", "none"]]), get(none + "/bogus"), get(k.path, method="BOGUS")]
    for sub in SUBRESOURCES:
        for method in ("GET", "PUT", "POST", "PATCH", "DELETE"):
            step = {"method": method, "path": f"{none}/{sub}", "query": []}
            if method in ("PUT", "POST", "PATCH"):
                step |= {"body": k.minimal, "edits": [], "kind": MERGE if method == "PATCH" else "application/json"}
            yield [step]
    yield [get(none), delete(none), {**put(none, None), "body": meta(body, name="none")}, patch(none, MERGE, {"metadata": {"labels": {"a": "b"}}})]
    yield [patch(none, STRATEGIC, {"metadata": {"labels": {"a": "b"}}})]
    yield [patch(none, JSON_PATCH, [{"op": "add", "path": "/metadata/labels", "value": {}}])]
    yield [patch(none, APPLY, {**k.minimal, "metadata": {"name": "none"}}, [["fieldManager", "m"], DRY])]
    yield [patch(f"{none}/status", APPLY, {**k.minimal, "metadata": {"name": "none"}}, [["fieldManager", "m"], DRY])]
    yield [{**put(f"{none}/status", None), "body": meta(body, name="none")}]
    yield [{**put(f"{k.path}/{k.name}", None, (), [DRY]), "body": body}]
    yield [delete(k.path, [["labelSelector", "none=none"]])]
    yield [delete(k.path, [["labelSelector", "a in"]])]
    yield [delete(k.path, [["fieldSelector", "metadata.name=none-such"], DRY])]


def lists(k):
    yield [get(k.path, [["labelSelector", "none=none"]])]
    for accept in (TABLE, OLD_TABLE, PARTIALS, PARTIAL, "application/yaml", TABLE + ",application/json"):
        yield [get(k.path, [["labelSelector", "none=none"]], accept)]
    for field in ("spec.bogus=x", "metadata.labels=a", "status.phase=a", "spec.nodeName=a", "type=a", "metadata.name", "metadata.name=", "metadata.name=a,metadata.name=b",
                  "metadata.name!=a,metadata.name=b", "metadata.namespace=none", "metadata.name==none", "spec.replicas=1", "reason=a", "status.successful=1", "a>b", "=", "a=b=c"):
        yield [get(k.path, [["fieldSelector", field]])]
    for query in ([["limit", "0"]], [["limit", "-1"]], [["limit", "x"]], [["continue", "x"]], [["resourceVersion", "0"], ["resourceVersionMatch", "Exact"]], [["resourceVersionMatch", "Exact"]], [["resourceVersion", "x"]],
                  [["resourceVersion", "9999999999"]], [["resourceVersion", "9999999999"], ["resourceVersionMatch", "NotOlderThan"]], [["sendInitialEvents", "true"]], [["watch", "x"]], [["watch", "true"], ["resourceVersion", "x"]],
                  [["watch", "true"], ["resourceVersionMatch", "NotOlderThan"]], [["watch", "true"], ["sendInitialEvents", "true"]], [["watch", "true"], ["sendInitialEvents", "true"], ["resourceVersionMatch", "Exact"]], [["watch", "true"], ["continue", "a"]], [["timeoutSeconds", "x"]]):
        yield [get(k.path, [["labelSelector", "none=none"], *query])]


def lives(k):
    """One object from creation to its end, with each kind of write."""
    label = {"metadata": {"labels": {"l": "v"}, "annotations": {"n": "w"}}}
    yield [post(k.path, k.body, [DRY]), get(k.at), post(k.path, k.body), post(k.path, k.body), get(k.at),
           patch(k.at, MERGE, label, [["fieldManager", "m"]]), get(k.at),
           patch(k.at, STRATEGIC, {"metadata": {"labels": {"l": None, "k": "u"}}}),
           patch(k.at, JSON_PATCH, [{"op": "test", "path": "/metadata/labels/k", "value": "u"}, {"op": "replace", "path": "/metadata/labels/k", "value": "t"}]),
           get(k.path, [["labelSelector", "k=t"], k.own_list()]), delete(k.at, [DRY]), get(k.at), delete(k.at), get(k.at)]
    yield [post(k.path, k.body), put(k.at, k.at), get(k.at), put(k.at, k.at, [[["metadata", "labels"], "set", {"x": "y"}]], [["fieldManager", "other"]]),
           put(k.at, k.at, [[["metadata", "resourceVersion"], "remove", None]]), put(k.at, k.at, [[["metadata", "resourceVersion"], "set", "1"]])]
    for field, value in (("resourceVersion", "0"), ("resourceVersion", "x"), ("uid", "other"), ("uid", ""), ("name", "other"), ("name", ""), ("namespace", "other"), ("namespace", ""), ("creationTimestamp", "2020-01-01T00:00:00Z"), ("creationTimestamp", None),
                         ("generation", 9), ("deletionTimestamp", "2020-01-01T00:00:00Z"), ("deletionGracePeriodSeconds", 5), ("managedFields", []), ("managedFields", [{}]), ("managedFields", None), ("selfLink", "/x"), ("generateName", "a-"), ("finalizers", ["a.b/c"]), ("finalizers", ["x"]), ("ownerReferences", [{}]), ("labels", {"a b": "c"}), ("annotations", {"a b": "c"}), ("labels", None)):
        yield [post(k.path, k.body), put(k.at, k.at, [[["metadata", field], "set", value]]), get(k.at)]
        yield [post(k.path, k.body), patch(k.at, MERGE, {"metadata": {field: value}}), get(k.at)]
    yield [post(k.path, k.body), {**put(k.at, None), "body": k.body}, get(k.at)]
    yield [post(k.path, k.body), {**put(k.at, None), "body": k.minimal}]
    yield [post(k.path, k.body), {**put(k.at, None), "body": {**k.body, "kind": "Wrong"}}]
    yield [post(k.path, k.body), {**put(k.at, None), "body": {**k.body, "apiVersion": "x/y"}}]
    yield [{**put(k.at, None), "body": k.body}, get(k.at)]
    yield [post(k.path, k.body, [["fieldManager", "first"]]), patch(k.at, MERGE, label, [["fieldManager", "second"]]), put(k.at, k.at, [[["metadata", "labels", "third"], "set", "3"]], [["fieldManager", "third"]]),
           patch(k.at, JSON_PATCH, [{"op": "remove", "path": "/metadata/annotations/n"}], [["fieldManager", "second"]]), get(k.at)]
    for which, text in ((JSON_PATCH, [{"op": "test", "path": "/metadata/name", "value": "other"}]), (JSON_PATCH, [{"op": "remove", "path": "/none"}]), (JSON_PATCH, {}), (JSON_PATCH, [{"op": "replace", "path": "/none/x", "value": 1}]), (JSON_PATCH, [{"op": "replace", "path": "/kind", "value": "Other"}]), (JSON_PATCH, [{"op": "replace", "path": "/apiVersion", "value": "x/v1"}]),
                        (JSON_PATCH, []), (JSON_PATCH, [{"op": "add", "path": "/bogus", "value": 1}]), (JSON_PATCH, [{"op": "remove", "path": "/metadata/name"}]), (JSON_PATCH, [{"op": "copy", "from": "/metadata/name", "path": "/metadata/labels"}]), (JSON_PATCH, [{"op": "add", "path": "/metadata/labels", "value": "x"}]), (JSON_PATCH, [{"op": "remove", "path": "/spec"}]), (JSON_PATCH, [{"op": "remove", "path": "/metadata"}]), (JSON_PATCH, [{"op": "bogus", "path": "/a"}]),
                        (MERGE, {}), (MERGE, []), (MERGE, {"kind": "Other"}), (MERGE, {"apiVersion": "x/v1"}), (MERGE, {"kind": None}), (MERGE, {"metadata": None}), (MERGE, {"spec": None}), (MERGE, {"spec": "x"}), (MERGE, {"bogus": 1}), (MERGE, {"metadata": {"labels": {"a": 5}}}), (MERGE, {"metadata": "x"}), (MERGE, {"status": {}}), (MERGE, {"status": None}),
                        (STRATEGIC, {}), (STRATEGIC, []), (STRATEGIC, {"kind": "Other"}), (STRATEGIC, {"metadata": None}), (STRATEGIC, {"spec": None}), (STRATEGIC, {"bogus": 1}), (STRATEGIC, {"$patch": "replace"}), (STRATEGIC, {"metadata": {"$patch": "delete"}}), (STRATEGIC, {"metadata": {"labels": {"$patch": "replace", "x": "y"}}}), (STRATEGIC, {"metadata": {"$retainKeys": ["name"]}}), (STRATEGIC, {"metadata": {"finalizers": ["a.b/c"]}}), (STRATEGIC, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a.b/c"]}}), (STRATEGIC, {"metadata": {"labels": {"a": 5}}}), (STRATEGIC, {"spec": {"$patch": "odd"}}),
                        ("application/json", {}), ("text/plain", {}), ("application/apply-patch+json", {}), ("application/merge-patch+json; charset=utf-8", {})):
        yield [post(k.path, k.body), patch(k.at, which, text)]
        if which != "application/json" and isinstance(text, dict):
            yield [post(k.path, k.body), patch(k.at, which, text, [["fieldValidation", "Strict"], ["fieldManager", "m"]]), get(k.at)]
    for query in ([["fieldManager", "x" * 129]], [["fieldManager", "a\x01"]], [["fieldManager", "é"]], [["dryRun", "Some"]], [["dryRun", ""]], [["fieldValidation", "Odd"]], [["force", "true"]], [["dryRun", "All"], ["dryRun", "All"]]):
        yield [post(k.path, k.body, query)]
        yield [post(k.path, k.body), put(k.at, k.at, [], query)]
        yield [post(k.path, k.body), patch(k.at, MERGE, {}, query)]


def applied(k):
    m, n = ["fieldManager", "m"], ["fieldManager", "n"]
    force = ["force", "true"]
    small = {**k.minimal, "metadata": {"name": k.name, "labels": {"own": "1"}}}
    yield [patch(k.at, APPLY, k.body, [m]), get(k.at), patch(k.at, APPLY, k.body, [m]), patch(k.at, APPLY, small, [n]), get(k.at),
           patch(k.at, APPLY, {**small, "metadata": {"name": k.name, "labels": {"own": "2"}}}, [m]), patch(k.at, APPLY, {**small, "metadata": {"name": k.name, "labels": {"own": "2"}}}, [m, force]), get(k.at),
           patch(k.at, APPLY, small, [m, force]), patch(k.at, APPLY, k.minimal, [n]), get(k.at)]
    yield [post(k.path, k.body, [["fieldManager", "first"]]), patch(k.at, APPLY, k.body, [m]), get(k.at), patch(k.at, APPLY, k.body, [m, force])]
    yield [post(k.path, k.body), patch(k.at, APPLY, small, [m]), put(k.at, k.at, [[["metadata", "labels", "own"], "set", "2"]], [["fieldManager", "u"]]), patch(k.at, APPLY, small, [m]), get(k.at), patch(k.at, MERGE, {"metadata": {"managedFields": [{}]}}), get(k.at)]
    yield [patch(k.at, APPLY, k.body, [m, DRY]), get(k.at)]
    for query in ([], [["fieldManager", ""]], [m, ["force", "x"]], [m, ["fieldValidation", "Strict"]], [m, ["dryRun", "x"]], [["fieldManager", "x" * 129]]):
        yield [patch(k.at, APPLY, k.body, query)]
    for changes in ({"kind": "Other"}, {"apiVersion": "x/v1"}, {"kind": None}, {"apiVersion": None}, {"bogus": 1}, {"status": {}}, {"status": None}, {"metadata": {}}, {"metadata": {"name": "other"}}, {"metadata": {"name": k.name, "namespace": "other"}}, {"metadata": {"name": k.name, "managedFields": [{}]}}, {"metadata": {"name": k.name, "managedFields": []}},
                    {"metadata": {"name": k.name, "uid": "x"}}, {"metadata": {"name": k.name, "resourceVersion": "1"}}, {"metadata": {"name": k.name, "generation": 5}}, {"metadata": {"name": k.name, "creationTimestamp": None}}, {"metadata": {"name": k.name, "labels": None}}, {"metadata": {"name": k.name, "labels": {"a": None}}}, {"metadata": {"name": k.name, "finalizers": ["a.b/c", "a.b/c"]}}, {"metadata": {"name": k.name, "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "u"}]}}, {"metadata": "x"}, {"metadata": None}):
        yield [patch(k.at, APPLY, {key: value for key, value in {**k.body, **changes}.items() if value is not None or key in ("metadata", "status")}, [m]), get(k.at)]
        yield [post(k.path, k.body), patch(k.at, APPLY, {**k.minimal, **changes}, [m]), get(k.at)]
    for field in [key for key in k.body if key not in ("apiVersion", "kind", "metadata")]:
        yield [patch(k.at, APPLY, k.body, [m]), patch(k.at, APPLY, {**k.minimal, field: {}}, [m]), get(k.at)]
        yield [patch(k.at, APPLY, {**k.minimal, field: None}, [m]), get(k.at)]


def shown(k):
    yield [post(k.path, k.body, (), [["Accept", TABLE]])]
    for mode in ("Object", "Metadata", "None"):
        yield [post(k.path, k.body), get(k.at, [["includeObject", mode]], TABLE + ",application/json"), get(k.path, [k.own_list(), ["includeObject", mode]], TABLE)]
    for accept in (TABLE, OLD_TABLE, PARTIAL, "application/yaml", "application/vnd.kubernetes.protobuf", TABLE.replace("json", "yaml", 1), "application/json;as=PartialObjectMetadata;v=v1beta1;g=meta.k8s.io", "text/html", "application/json;as=Table;v=v2;g=meta.k8s.io", "application/json;pretty=1", "*/*"):
        yield [post(k.path, k.body), get(k.at, (), accept), get(k.path, [k.own_list()], accept)]
        yield [post(k.path, k.body, [DRY], [["Accept", accept]])]
    yield [post(k.path, k.body), get(k.path, [k.own_list()], PARTIALS), patch(k.at, MERGE, {"metadata": {"labels": {"a": "z"}}}, (), headers=[["Accept", TABLE]]), delete(k.at)]
    for query in ([["resourceVersion", "0"]], [["resourceVersion", "x"]], [["resourceVersion", "9999999999"]], [["pretty", "true"]], [["watch", "true"]], [["export", "true"]]):
        yield [post(k.path, k.body), get(k.at, query)]
    if k.minimal.keys() != k.body.keys():
        yield [post(k.path, k.minimal), get(k.at, (), TABLE), get(k.path, [k.own_list()], TABLE)]


def watched(k):
    marked = k.labelled(w="NAME")
    change, drop = {"metadata": {"annotations": {"x": "y"}}}, {"metadata": {"labels": {"w": None}}}
    select = ["labelSelector", "w=NAME"]

    def watch(count, *query, accept=None, path=k.path):
        return {"method": "WATCH", "path": path, "query": [["watch", "true"], *query], "headers": [["Accept", accept]] if accept else [], "count": count}
    yield [post(k.path, marked), delete(k.at, [["gracePeriodSeconds", "0"]]), watch(2, select)]
    yield [post(k.path, marked), patch(k.at, MERGE, change), patch(k.at, MERGE, drop), patch(k.at, MERGE, {"metadata": {"labels": {"w": "NAME"}}}), delete(k.at, [["gracePeriodSeconds", "0"]]), watch(5, select), watch(5, k.own_list()), watch(3, select, accept=TABLE), watch(3, select, accept=PARTIAL), watch(3, select, accept="application/yaml")]
    yield [post(k.path, marked), watch(2, select, ["sendInitialEvents", "true"], ["resourceVersionMatch", "NotOlderThan"], ["allowWatchBookmarks", "true"]), watch(2, select, ["sendInitialEvents", "true"], ["resourceVersionMatch", "NotOlderThan"], ["allowWatchBookmarks", "true"], accept=TABLE), watch(1, select, ["resourceVersion", "0"]), watch(1, select, ["resourceVersion", "0"], accept=TABLE + ",application/json")]
    yield [post(k.path, marked), patch(k.at, MERGE, change), watch(2, accept=TABLE, path=k.at), watch(2, path=k.at)]


def deleted(k):
    finalized = meta(k.body, finalizers=["example.com/a"])
    for query, body in (([["propagationPolicy", "Foreground"]], None), ([["propagationPolicy", "Orphan"]], None), ([["propagationPolicy", "Background"]], None), ([["orphanDependents", "true"]], None), ([["orphanDependents", "false"]], None), ([["propagationPolicy", "Odd"]], None),
                        ([["propagationPolicy", "Orphan"], ["orphanDependents", "true"]], None), ([["gracePeriodSeconds", "-1"]], None), ([["gracePeriodSeconds", "5"]], None), ([["gracePeriodSeconds", "x"]], None), ([["gracePeriodSeconds", "0"]], None), ([["dryRun", "x"]], None), ([], {}), ([], {"kind": "DeleteOptions", "apiVersion": "v1"}),
                        ([], {"preconditions": {"uid": "x"}}), ([], {"preconditions": {"resourceVersion": "1"}}), ([], {"preconditions": {"uid": "x", "resourceVersion": "1"}}), ([], {"kind": "Odd", "apiVersion": "v1"}), ([], {"unknown": 1}), ([], {"gracePeriodSeconds": -5}), ([], {"propagationPolicy": "Odd"}), ([], {"dryRun": ["All"]}), ([], {"dryRun": ["x"]}), ([], {"orphanDependents": True, "propagationPolicy": "Orphan"}), ([["dryRun", "All"]], {"gracePeriodSeconds": 0}),
                        ([], {"kind": "DeleteOptions", "apiVersion": "apps/v1"}), ([], {"kind": "DeleteOptions", "apiVersion": k.group}), ([], [])):
        yield [post(k.path, k.body), delete(k.at, query, body), get(k.at)]
        if query or body:
            yield [post(k.path, finalized), delete(k.at, query, body), get(k.at), delete(k.at, query, body), patch(k.at, MERGE, {"metadata": {"labels": {"late": "1"}}}), patch(k.at, MERGE, {"metadata": {"finalizers": ["example.com/a", "example.com/b"]}}), patch(k.at, MERGE, {"metadata": {"finalizers": None}}), get(k.at)]
    yield [post(k.path, finalized), delete(k.at), get(k.at, (), TABLE), post(k.path, k.body), put(k.at, k.at, [[["metadata", "finalizers"], "set", []]]), get(k.at)]
    yield [post(k.path, k.body), delete(k.path, [k.own_list(), DRY]), get(k.at), delete(k.path, [k.own_list()]), get(k.at)]
    yield [post(k.path, k.labelled(d="NAME")), delete(k.path, [["labelSelector", "d=NAME"]], {"propagationPolicy": "Foreground"}), get(k.at)]
    for accept in (TABLE, PARTIAL, "application/yaml"):
        yield [post(k.path, k.body), {**delete(k.at), "headers": [["Accept", accept]]}]


def parts(k):
    body, at = k.body, k.at
    for sub in dict.fromkeys(["status", *k.seed.get("subresources", [])]):
        there = f"{at}/{sub}"
        yield [post(k.path, body), get(there), get(there, (), TABLE), get(there, (), PARTIAL), put(there, at), put(there, at, [[["metadata", "labels"], "set", {"x": "y"}], [["spec"], "remove", None], [["status"], "set", {}]]), get(at)]
        for kind in (MERGE, STRATEGIC):
            yield [post(k.path, body), patch(there, kind, {"metadata": {"labels": {"s": "1"}, "annotations": {"s": "1"}, "finalizers": ["a.b/c"]}}), patch(there, kind, {"status": {"conditions": [{"type": "A", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z", "reason": "R", "message": "m"}]}}), patch(there, kind, {"status": {"bogus": 1}}), patch(there, kind, {"status": None}), get(at)]
        yield [post(k.path, body), patch(there, APPLY, {**k.minimal, "status": {"conditions": [{"type": "A", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z", "reason": "R", "message": "m"}]}}, [["fieldManager", "s"]]), patch(there, APPLY, {**k.minimal, "status": {}}, [["fieldManager", "s"]]), get(at)]
        for method in ("POST", "DELETE"):
            yield [post(k.path, body), {"method": method, "path": there, "query": [], "body": body, "edits": []}]
        yield [post(k.path, body), put(there, at, [[["metadata", "resourceVersion"], "set", "1"]]), put(there, at, [[["metadata", "name"], "set", "other"]]), put(there, at, [[["kind"], "set", "Other"]])]
    if "scale" in k.seed.get("subresources", []):
        yield from scaled(k)


def scaled(k):
    there = f"{k.at}/scale"
    scale = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": k.name}, "spec": {"replicas": 3}}
    yield [post(k.path, k.body), get(there), get(there, (), TABLE), get(there, (), PARTIAL), {**put(there, None), "body": scale}, get(k.at), put(there, there, [[["spec", "replicas"], "set", 4]]), get(k.at)]
    for spec in ({"replicas": -1}, {"replicas": "x"}, {}, None, {"replicas": None}, {"replicas": 2147483648}, {"replicas": 1.5}, {"bogus": 1}):
        yield [post(k.path, k.body), {**put(there, None), "body": {**scale, "spec": spec}}, patch(there, MERGE, {"spec": spec}), get(k.at)]
    for changes in ({"kind": "Other"}, {"apiVersion": "v1"}, {"metadata": {"name": "other"}}, {"metadata": {}}, {"metadata": {"name": k.name, "uid": "x"}}, {"metadata": {"name": k.name, "resourceVersion": "1"}}, {"status": {"replicas": 5}}, {"apiVersion": "apps/v1beta1"}, {"apiVersion": "extensions/v1beta1"}):
        yield [post(k.path, k.body), {**put(there, None), "body": {**scale, **changes}}]
    for kind in (MERGE, STRATEGIC):
        yield [post(k.path, k.body), patch(there, kind, {"spec": {"replicas": 5}}, [["fieldManager", "p"]]), get(k.at), patch(there, kind, {"spec": {"replicas": 6}}, [DRY]), get(there)]
    yield [post(k.path, k.body), patch(there, JSON_PATCH, [{"op": "replace", "path": "/spec/replicas", "value": 7}]), patch(there, JSON_PATCH, [{"op": "remove", "path": "/spec/replicas"}]), get(k.at)]
    yield [post(k.path, k.body), patch(there, APPLY, scale, [["fieldManager", "s"]]), patch(there, APPLY, scale, [["fieldManager", "s"], ["force", "true"]]), get(k.at), patch(k.at, APPLY, k.body, [["fieldManager", "t"]])]


# --- Each field, with each odd value --------------------------------------------------------------------------------

ODD_TEXT = ["", "A b!", "a" * 300, "a.b/c", "-1", "é", 5, None, [], {}, True]
ODD_NUMBER = [-1, 0, 1, 65536, 2147483648, "x", "5", 1.5, None, [], True]
ODD = {str: ODD_TEXT, int: ODD_NUMBER, float: ODD_NUMBER, bool: [False, True, "x", 1, None, "true"],
       list: [[], None, {}, "x", [None], [{}], [""], ["a", "a"], [5]], dict: [{}, None, [], "x", {"bogus": 1}, {"": ""}, {"a b": "c"}]}


def places(value, pointer=()):
    if pointer:
        yield pointer, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if pointer or key not in ("apiVersion", "kind", "metadata"):
            yield from places(inner, pointer + (key,))


def fields(k, schemas):
    """Each place of the seed removed or with another value, and each field that the seed lacks."""
    for pointer, value in places(k.body):
        for edit in changes_of(pointer, value):
            yield from written(k, edit)
    schema = schemas.kinds.get((k.body["apiVersion"], k.body["kind"]))
    if schema:
        for pointer, inner, key in lacking(schemas, schema, k.body):
            for value in values_of(schemas, inner):
                yield from written(k, [list(pointer) + [key], "set", value])


def written(k, edit):
    yield [{**post(k.path, k.body, [DRY]), "edits": [edit]}]
    if k.is_made:
        yield [post(k.path, k.body), put(k.at, k.at, [edit], [DRY])]
        yield [post(k.path, k.body), put(k.at, k.at, [edit]), get(k.at)]


def changes_of(pointer, value):
    place = list(pointer)
    yield [place, "remove", None]
    for odd in ODD.get(type(value), []):
        if odd != value or type(odd) is not type(value):
            yield [place, "set", odd]
    if isinstance(value, list) and value:
        yield [place + ["-"], "set", copy.deepcopy(value[0])]
        yield [place + ["-"], "set", copy.deepcopy(value[-1])]
    if isinstance(value, str):
        yield [place, "set", value + "x"]
        yield [place, "set", value.upper()]


def lacking(schemas, schema, value, pointer=()):
    """Fields of the schema that a tree has not, with the place of their parent."""
    schema = schemas.resolve(schema)
    if isinstance(value, dict) and schema.get("properties"):
        for key, inner in schema["properties"].items():
            if not pointer and key in ("apiVersion", "kind", "metadata", "status"):
                continue
            if key in value:
                yield from lacking(schemas, inner, value[key], pointer + (key,))
            else:
                yield pointer, inner, key
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from lacking(schemas, schema.get("items", {}), item, pointer + (at,))
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        for key, item in value.items():
            yield from lacking(schemas, schema["additionalProperties"], item, pointer + (key,))


def values_of(schemas, reference):
    schema = schemas.resolve(reference)
    if schema.get("properties"):
        yield {}
        whole = {key: first(schemas, inner) for key, inner in schema["properties"].items() if key in schema.get("required", [])}
        yield whole
        for key, inner in schema["properties"].items():
            yield {**whole, key: first(schemas, inner)}
    elif schema.get("type") == "array":
        yield []
        yield [first(schemas, schema.get("items", {}))]
        yield [first(schemas, schema.get("items", {}))] * 2
    elif schema.get("type") == "object":
        yield {}
        yield {"a": first(schemas, schema.get("additionalProperties") or {})}
        yield {"A b!": first(schemas, schema.get("additionalProperties") or {})}
    elif schema.get("type") == "boolean":
        yield from (True, False)
    elif schema.get("type") in ("integer", "number"):
        yield from (-1, 0, 1, 100000)
    else:
        about = reference.get("description") or schema.get("description") or ""
        yield from ("a", "", "A b!", "a.b/c")
        yield from dict.fromkeys(word for word in about.replace("`", '"').split('"')[1::2] if 0 < len(word) < 30)


def first(schemas, reference, depth=3):
    schema = schemas.resolve(reference)
    if schema.get("properties"):
        return {key: first(schemas, schema["properties"][key], depth - 1) for key in schema.get("required", []) if key in schema["properties"]} if depth else {}
    kind = schema.get("type")
    if kind == "array":
        return [first(schemas, schema.get("items", {}), depth - 1)] if depth else []
    return {"object": {}, "boolean": True, "integer": 1, "number": 1}.get(kind, "a")


# --- Both as sources ------------------------------------------------------------------------------------------------

# The number of a case goes round in steps of this prime, so that a short run sees all kinds.
STRIDE = 7919


class Cases:
    """All cases of one list, made when they are first asked for."""

    def __init__(self, make):
        self.make, self.all = make, None

    def case(self, _, number):
        if self.all is None:
            self.all = list(self.make())
        return self.all[number * STRIDE % len(self.all)]


def kinds(generator):
    for key, seed in generator.seeds.items():
        path = key.split("#")[0]
        yield Kind(path, seed, generator.body(path, seed))


def grid(generator):
    return Cases(lambda: (case for kind in kinds(generator) for case in templates(kind)))


def each_field(generator):
    return Cases(lambda: (case for kind in kinds(generator) for case in fields(kind, generator.schemas)))
