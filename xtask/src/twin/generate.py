"""Cases of requests, made from schemas: nearly right objects, sequences of writes to one object, odd parameters.

In: upstream's OpenAPI documents, the seeds of `seeds.yaml`, random numbers. Out: a case, which is a list of steps.
A step names everything that is sent, so that a case can be repeated and made smaller:

    method, path, query, headers     NAME, NS and QUIET stand for names of the run
    body, or raw                     a JSON value, or text
    edits                            of `body`, or of the object that each server has at `of`

Invariant: the same random numbers give the same case.
"""
import copy
import json

USUAL = """a b default x-1 app nginx:1 1 0 2 80 http 100m 1Gi 1Mi 10% TCP UDP Always Never true false 10.0.0.1 10.0.0.0/24
fd00::1 fd00::/64 example.com example.com/name a=b /healthz /tmp 1h 5s YQ== v1 apps/v1 In Exists NotIn Gt DoesNotExist
DoNotSchedule RollingUpdate Recreate OnDelete IPv4 IPv6 node1 {.a} $(A) spec.a .spec.replicas Pod pods * NoExecute
2026-01-02T03:04:05Z 2026-01-02T03:04:05.000006Z kubernetes.io/tls system:masters kubernetes.io/hostname Delete Retain
NodePort ClusterIP LoadBalancer ExternalName None Cluster Local web c i http2 dns TCP,UDP Utilization Value AverageValue
ReadWriteMany ReadWriteOncePod Block Filesystem Immediate Equal Lt Percent rbac.authorization.k8s.io ServiceAccount
Node User Group Indexed NonIndexed Complete FailIndex Count true== == cpu memory hugepages-2Mi ephemeral-storage
pods/log deployments.apps kubernetes.io/arch Localhost Unconfined RuntimeDefault HTTP HTTPS MinAvailable OnFailure""".split()
NASTY = ["", " ", "\n", "a b", "a\tb", "é", "😀", "..", ".", "../a", "a/../b", "a/b/c", "%", "-1", "+1", "01", "1.5",
         "9223372036854775808", "1e3", "1E", "1e308", "-0", "NaN", "0x10", "1EEi", "99999999999999999999Ei", "1.0000000001",
         "9999-99-99T99:99:99Z", "2026-01-02 03:04:05", "10.0.0.256", "010.0.0.1", "0.0.0.0/0", "10.0.0.1/8", "::/0",
         "::ffff:1.2.3.4", "1:2:3:4:5:6:7:8:9", "a,b,,=", "((", "[[", "{{}}", "$(", "'", "\"", "\\", "* * * * * *", "@daily",
         "@every 1h", "60 24 32 13 8", "TZ=UTC * * * * *", "a.b.c/d/e", "-a-", "a-", "A_B", "A", "a..b", "_a", "a" * 64,
         "a" * 254, "a." * 130 + "a", "a{99999}", "(a", "1d", "-5s", "1.5h", "127.0.0.1", "169.254.1.1", "224.0.0.1", "ff02::1",
         "localhost", "http://a", "https://a/b?c#d", "https://u@a", "a:b", ":", "a:", "~", "a=b", "!a", "a:80", "C:\\a", "//a"]
NUMBERS = [0, 1, 2, 3, 10, 80, 100, 443, 1000, -1, -2, 65535, 65536, 2147483647, 2147483648, -2147483649, 86400, 100000,
           9223372036854775807, 9223372036854775808, 0.5, 1.0, 1e3, 31, 420, 511, 512, 30080, 3599, 600]
QUANTITIES = ["1", "0", "-1", "1Gi", "100m", "0.5", "1e3", "1E", "1k", "1.5Gi", "1u", "1n", "0.1n", "+1", "1Ki1", "abc", "", 5, 1.5,
              "1000000000000000000000", "9223372036854775807", "1Ei", "8Ei", "12E", "1e-3", ".5", "5.", "1 ", "1Mi", "0.1Mi", "1m", "1.0"]
METADATA = ["name", "namespace", "labels", "annotations", "finalizers", "ownerReferences", "generateName", "uid",
            "resourceVersion", "creationTimestamp", "deletionTimestamp", "generation", "managedFields",
            "deletionGracePeriodSeconds", "selfLink"]
ANNOTATIONS = ["kubectl.kubernetes.io/last-applied-configuration", "container.apparmor.security.beta.kubernetes.io/c",
               "kubernetes.io/config.mirror", "scheduler.alpha.kubernetes.io/defaultTolerations", "example.com/a",
               "deprecated.daemonset.template.generation", "seccomp.security.alpha.kubernetes.io/pod",
               "service.kubernetes.io/topology-mode", "endpoints.kubernetes.io/over-capacity",
               "volume.beta.kubernetes.io/storage-class", "kubernetes.io/ingress.class", "a b", "A/b", "",
               "controller.kubernetes.io/pod-deletion-cost", "batch.kubernetes.io/job-tracking",
               "scheduler.alpha.kubernetes.io/tolerations", "api-approved.kubernetes.io"]


class Schemas:
    def __init__(self, documents):
        self.all, self.kinds = {}, {}
        for document in documents:
            self.all.update(document.get("components", {}).get("schemas", {}))
        for schema in self.all.values():
            for kind in schema.get("x-kubernetes-group-version-kind", []):
                group = f"{kind['group']}/" if kind.get("group") else ""
                self.kinds.setdefault((f"{group}{kind['version']}", kind["kind"]), schema)

    def resolve(self, schema):
        while True:
            target = schema.get("$ref") or (schema.get("allOf") or [{}])[0].get("$ref")
            if not target:
                return schema
            schema = self.all.get(target.rsplit("/", 1)[1], {})


def anything(rng, depth=2):
    return rng.choice([None, True, False, 0, 1, -1, 1.5, "", "a", [], {}, ["a"], {"a": "b"}, [None], {"a": None}, [{}], [[]]])


def text(rng):
    return rng.choice(USUAL) if rng.random() < 0.6 else rng.choice(NASTY)


class Maker:
    """Values and edits by a schema."""

    def __init__(self, schemas, rng):
        self.schemas, self.rng = schemas, rng

    def scalar(self, reference, name):
        rng, schema = self.rng, self.schemas.resolve(reference)
        if rng.random() < 0.06:
            return anything(rng)
        about = reference.get("description") or schema.get("description") or ""
        kind, form = schema.get("type"), schema.get("format")
        if "Quantity" in json.dumps(reference.get("$ref") or reference.get("allOf") or "") or "oneOf" in schema and form is None:
            return rng.choice(QUANTITIES)
        if form == "int-or-string" or "x-kubernetes-int-or-string" in schema:
            return rng.choice(NUMBERS + ["10%", "0%", "100%", "101%", "-1%", "a", "1", "", "http", "1.5%", "a--b", "1a", "%"])
        if kind in ("integer", "number"):
            return rng.choice(NUMBERS[:9]) if rng.random() < 0.6 else rng.choice(NUMBERS)
        if kind == "boolean":
            return rng.random() < 0.5
        if schema.get("enum") and rng.random() < 0.8:
            return rng.choice(schema["enum"])
        if form == "date-time" and rng.random() < 0.8:
            return rng.choice(["2026-01-02T03:04:05Z", "2020-01-01T00:00:00.123456Z", "2020-01-01T00:00:00+02:00", "2020-01-01", "",
                               "2020-01-01T00:00:00.123456789Z", "2020-01-01 00:00:00Z", "2020-01-01t00:00:00z"])
        if form == "byte" and rng.random() < 0.7:
            return rng.choice(["YWJj", "", "YQ", "YQ==", "Y W", "!", "YWJj\n", "_-8="])
        words = [word for word in about.replace("`", '"').split('"')[1::2] if 0 < len(word) < 40]
        if words and rng.random() < 0.5:
            return rng.choice(words)
        return text(rng)

    def value(self, reference, name, depth):
        """A small value that is mostly valid."""
        rng, schema = self.rng, self.schemas.resolve(reference)
        if schema.get("properties"):
            required, out = schema.get("required", []), {}
            share = rng.choice([0.0, 0.1, 0.3])
            for key, inner in schema["properties"].items():
                if key in required and rng.random() < 0.95 or depth > 0 and rng.random() < share:
                    out[key] = self.value(inner, key, depth - 1)
            return out
        if schema.get("type") == "array":
            return [self.value(schema.get("items", {}), name, depth - 1) for _ in range(rng.choice([0, 1, 1, 2]))]
        if schema.get("type") == "object":
            inner = schema.get("additionalProperties") or {}
            return {text(rng): self.value(inner if isinstance(inner, dict) else {}, name, depth - 1) for _ in range(rng.choice([0, 1, 1, 2]))}
        return self.scalar(reference, name)

    def edit(self, schema, value, pointer=(), depth=0):
        """One change somewhere in a tree: [pointer, operation, value]."""
        rng, reference = self.rng, schema
        schema = self.schemas.resolve(schema)
        name = pointer[-1] if pointer else ""
        if depth > 0 and rng.random() < 0.05:
            return [list(pointer), "set", anything(rng)]
        if depth > 0 and rng.random() < 0.06:
            return [list(pointer), "remove", None]
        if schema.get("properties"):
            properties = list(schema["properties"])
            if depth == 0:
                properties = [key for key in properties if key not in ("status", "apiVersion", "kind") or rng.random() < 0.02]
                if "spec" in properties and rng.random() < 0.6:
                    properties = ["spec"]
            if pointer == ("metadata",):
                properties = METADATA
            present = [key for key in properties if isinstance(value, dict) and key in value]
            if rng.random() < 0.01:
                return [list(pointer) + [rng.choice(["unknown", "Name", "a.b", ""])], "set", anything(rng)]
            key = rng.choice(present) if present and rng.random() < 0.6 else rng.choice(properties)
            inner = schema["properties"].get(key, {"type": "string"})
            if isinstance(value, dict) and key in value:
                return self.edit(inner, value[key], pointer + (key,), depth + 1)
            return [list(pointer) + [key], "set", self.value(inner, key, 2)]
        if schema.get("type") == "array" and isinstance(value, list):
            items = schema.get("items", {})
            if value and rng.random() < 0.65:
                at = rng.randrange(len(value))
                return self.edit(items, value[at], pointer + (at,), depth + 1)
            if value and rng.random() < 0.4:
                return [list(pointer) + ["-"], "set", copy.deepcopy(rng.choice(value))]
            return [list(pointer) + ["-"], "set", self.value(items, name, 2)]
        if schema.get("type") == "object" and isinstance(value, dict):
            inner = schema.get("additionalProperties")
            inner = inner if isinstance(inner, dict) else {}
            if value and rng.random() < 0.6:
                key = rng.choice(list(value))
                return self.edit(inner, value[key], pointer + (key,), depth + 1)
            key = rng.choice(ANNOTATIONS) if name == "annotations" else text(rng)
            return [list(pointer) + [key], "set", self.value(inner, key, 2)]
        return [list(pointer), "set", self.scalar(reference, name)]


def changed(value, edits):
    """A copy of a tree with edits carried out; an edit whose place is gone is left out."""
    value = copy.deepcopy(value)
    for pointer, operation, new in edits:
        here = value
        for part in pointer[:-1]:
            try:
                here = here[part]
            except (KeyError, IndexError, TypeError):
                here = None
                break
        if not pointer:
            value = copy.deepcopy(new) if operation == "set" else None
            continue
        last = pointer[-1]
        try:
            if isinstance(here, list) and last == "-":
                here.append(copy.deepcopy(new))
            elif operation == "remove":
                del here[last]
            elif isinstance(here, (dict, list)):
                here[last] = copy.deepcopy(new)
        except (KeyError, IndexError, TypeError):
            pass
    return value


def patch_of(edits):
    """A merge patch that carries out edits whose path has no index."""
    out = {}
    for pointer, operation, new in edits:
        here = out
        for part in pointer[:-1]:
            if isinstance(part, int) or part == "-":
                return None
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                return None
        if not pointer or isinstance(pointer[-1], int) or pointer[-1] == "-":
            return None
        here[pointer[-1]] = None if operation == "remove" else new
    return out


def json_patch(edits, rng):
    out = []
    for pointer, operation, new in edits:
        path = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in pointer)
        word = "remove" if operation == "remove" else rng.choice(["add", "replace"])
        out.append({"op": word, "path": path} | ({} if operation == "remove" else {"value": new}))
    odd = rng.random()
    if odd < 0.1:
        out.insert(0, {"op": "test", "path": "/metadata/name", "value": rng.choice(["NAME", "other", None])})
    elif odd < 0.2:
        out.append(rng.choice([{"op": "move", "from": "/metadata/labels", "path": "/metadata/annotations"}, {"op": "copy", "from": "/spec", "path": "/a"},
                               {"op": "remove", "path": "/metadata/none"}, {"op": "odd", "path": "/a"}, {"path": "/a"}, {"op": "add", "path": "a", "value": 1},
                               {"op": "remove", "path": "/spec/none/deeper"}, {"op": "add", "path": "", "value": {}}]))
    return out


class Generator:
    def __init__(self, schemas, seeds, rng):
        self.schemas, self.seeds, self.rng = schemas, seeds, rng
        self.maker = Maker(schemas, rng)

    def seed(self):
        path = self.rng.choice(list(self.seeds))
        return path.split("#")[0], self.seeds[path]

    def body(self, path, seed):
        parts = path.split("/")
        version = parts[2] if parts[1] == "api" else f"{parts[2]}/{parts[3]}"
        body = {"apiVersion": version, "kind": seed["kind"], "metadata": {"name": seed.get("name", "NAME")}}
        for key, value in copy.deepcopy(seed["object"]).items():
            body[key] = {**body["metadata"], **value} if key == "metadata" else value
        if seed.get("review"):
            body["metadata"] = {}
        return body

    def edits(self, body, count=None):
        schema = self.schemas.kinds.get((body["apiVersion"], body["kind"]))
        if not schema:
            return []
        count = count or self.rng.choice([1, 1, 1, 2, 2, 3])
        return [self.maker.edit(schema, body) for _ in range(count)]

    def write_query(self, dry):
        rng, query = self.rng, []
        if dry:
            query.append(["dryRun", "All"])
        if rng.random() < 0.25:
            query.append(["fieldValidation", rng.choice(["Strict", "Warn", "Ignore", "Odd"])])
        if rng.random() < 0.1:
            query.append(["fieldManager", rng.choice(["m", "a b", "", "é", "x" * 129, "a\x01"])])
        if rng.random() < 0.04:
            query.append(rng.choice([["dryRun", "Some"], ["force", "true"], ["pretty", "true"], ["dryRun", ""], ["odd", "1"], ["fieldValidation", ""]]))
        return query

    def case(self):
        path, seed = self.seed()
        kind = self.rng.random()
        if seed.get("review"):
            return self.create(path, seed, False)
        if kind < 0.40:
            return self.create(path, seed, self.rng.random() < 0.7)
        if kind < 0.60:
            return self.update(path, seed)
        if kind < 0.82:
            return self.patch(path, seed)
        if kind < 0.90:
            return self.read(path, seed)
        if kind < 0.95:
            return self.delete(path, seed)
        return self.odd(path, seed)

    def create(self, path, seed, dry):
        body = self.body(path, seed)
        dry = (dry or seed.get("dry", False)) and not seed.get("review")
        post = {"method": "POST", "path": path, "query": self.write_query(dry), "body": body, "edits": self.edits(body)}
        if self.rng.random() < 0.05:
            post["headers"] = [["Accept", self.accept()]]
        if self.rng.random() < 0.03:
            post["as"] = self.rng.choice(["system:anonymous", "system:serviceaccount:default:default", "system:node:n"])
        steps = [post]
        if not dry and not seed.get("review") and self.rng.random() < 0.3:
            steps.append({"method": "GET", "path": f"{path}/{body['metadata']['name']}", "query": []})
        return steps

    def first(self, path, seed):
        """The step that makes the object, without a change."""
        return {"method": "POST", "path": path, "query": [], "body": self.body(path, seed), "edits": []}

    def target(self, path, seed):
        name = seed.get("name", "NAME")
        return f"{path}/{name}"

    def update(self, path, seed):
        steps, target = [self.first(path, seed)], self.target(path, seed)
        body = steps[0]["body"]
        for _ in range(self.rng.choice([1, 1, 2])):
            sub = ""
            if "status" in seed.get("subresources", []) and self.rng.random() < 0.3:
                sub = "/status"
            edits = self.status_edits(body) if sub and self.rng.random() < 0.8 else self.edits(body)
            if self.rng.random() < 0.1:
                edits.append([["metadata", "resourceVersion"], "remove", None])
            query = self.write_query(seed.get("dry") or self.rng.random() < 0.3)
            steps.append({"method": "PUT", "path": target + sub, "query": query, "of": target, "edits": edits})
        return steps

    def status_edits(self, body):
        schema = self.schemas.kinds.get((body["apiVersion"], body["kind"]), {})
        status = schema.get("properties", {}).get("status")
        if not status:
            return self.edits(body)
        value = self.maker.value(status, "status", 3)
        return [[["status"], "set", value]]

    def patch(self, path, seed):
        rng = self.rng
        steps, target = [self.first(path, seed)], self.target(path, seed)
        body = steps[0]["body"]
        for _ in range(rng.choice([1, 1, 2])):
            sub = "/status" if "status" in seed.get("subresources", []) and rng.random() < 0.2 else ""
            if "scale" in seed.get("subresources", []) and rng.random() < 0.1:
                sub = "/scale"
            edits = self.status_edits(body) if sub == "/status" else self.edits(body)
            if sub == "/scale":
                edits = [[["spec", "replicas"], "set", self.maker.scalar({"type": "integer"}, "replicas")]]
            query = self.write_query(seed.get("dry") or rng.random() < 0.3)
            steps.append(self.patch_step(target + sub, body, edits, query))
        return steps

    def patch_step(self, target, body, edits, query):
        rng, kind = self.rng, self.rng.choice(["json", "merge", "strategic", "strategic", "apply", "apply"])
        step = {"method": "PATCH", "path": target, "query": query}
        merge = patch_of(edits)
        if kind == "apply":
            own = changed(body, edits)
            if target.endswith("/scale"):
                own = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "NAME"}, "spec": {"replicas": edits[0][2]}}
            elif isinstance(own, dict) and rng.random() < 0.5 and merge is not None:
                own = {key: body[key] for key in ("apiVersion", "kind")} | {"metadata": {"name": body["metadata"]["name"]}} | merge
            query.append(["fieldManager", rng.choice(["m", "m", "other", ""])])
            if rng.random() < 0.5:
                query.append(["force", "true"])
            return step | {"body": own, "edits": [], "kind": "application/apply-patch+yaml"}
        if kind == "json" or merge is None and kind == "merge":
            return step | {"body": json_patch(edits, rng), "edits": [], "kind": "application/json-patch+json"}
        if kind == "merge":
            return step | {"body": merge, "edits": [], "kind": "application/merge-patch+json"}
        own = merge if merge is not None else self.strategic(body, edits)
        return step | {"body": own, "edits": [], "kind": "application/strategic-merge-patch+json"}

    def strategic(self, body, edits):
        """Lists are given with the items that the edits change, and now and then with a directive."""
        rng, out, whole = self.rng, {}, changed(body, edits)
        for pointer, _, _ in edits:
            here, place = whole, out
            for part in pointer:
                if not isinstance(here, dict) or part not in here:
                    break
                here = here[part]
                if isinstance(here, dict) and part != pointer[-1]:
                    place = place.setdefault(part, {})
                    if not isinstance(place, dict):
                        break
                else:
                    place[part] = copy.deepcopy(here)
                    break
        if rng.random() < 0.3:
            for key, value in list(out.get("spec", {}).items() if isinstance(out.get("spec"), dict) else []):
                if isinstance(value, list) and value and isinstance(value[0], dict):
                    value[0]["$patch"] = rng.choice(["delete", "replace", "merge", "odd"])
                elif rng.random() < 0.5:
                    out["spec"]["$" + rng.choice(["setElementOrder/", "deleteFromPrimitiveList/", "retainKeys", "patch"]) + key] = rng.choice([[], ["a"], "replace"])
        return out

    def accept(self):
        return self.rng.choice([
            "application/json;as=Table;v=v1;g=meta.k8s.io,application/json", "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
            "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io", "application/yaml", "application/json;as=Odd;v=v1;g=meta.k8s.io",
            "text/html", "*/*", "application/json;q=0.1,application/yaml", "application/*", "", "application/json;as=Table;v=v2;g=meta.k8s.io",
            "application/json;as=Table;v=v1beta1;g=meta.k8s.io", "application/vnd.kubernetes.protobuf", "application/json;pretty=1", "text/plain,application/json"])

    def read(self, path, seed):
        rng, steps, target = self.rng, [self.first(path, seed)], self.target(path, seed)
        if seed.get("dry"):
            steps[0]["query"] = [["dryRun", "All"]]
        namespaced = "/namespaces/" in path
        for _ in range(rng.choice([1, 2, 3])):
            of_list = rng.random() < 0.5
            step = {"method": "GET", "path": target, "query": [], "headers": [["Accept", self.accept()]] if rng.random() < 0.6 else []}
            if of_list:
                step["path"] = path
                # Other cases' objects may still be ending; a name makes the list this case's own.
                step["query"].append(["fieldSelector", "metadata.name=" + seed.get("name", "NAME")])
                step["query"] += self.list_query(namespaced)
            elif rng.random() < 0.3:
                step["query"].append(rng.choice([["resourceVersion", "0"], ["resourceVersion", "x"], ["pretty", "1"], ["resourceVersion", "99999999"], ["includeObject", "None"], ["exact", "true"]]))
            if rng.random() < 0.05:
                step["method"] = rng.choice(["HEAD", "OPTIONS", "TRACE", "POST", "PUT", "DELETEX"])
            steps.append(step)
        return steps

    def list_query(self, namespaced):
        rng = self.rng
        options = [["labelSelector", rng.choice(["a=b", "a", "!a", "a in (b,c)", "a notin (b)", "a=b,", "a==", "a>1", "a<x", "a in b", "a=b c", "(", "a in ()", "=", "-a", "a=é", "app=web,!x", "a!=b"])],
                   ["limit", rng.choice(["1", "0", "-1", "x", "500", "99999999999999999999"])], ["continue", rng.choice(["x", "", "eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiJhIn0"])],
                   ["resourceVersion", rng.choice(["0", "1", "x", "", "99999999", "-1"])], ["resourceVersionMatch", rng.choice(["Exact", "NotOlderThan", "Odd", ""])],
                   ["timeoutSeconds", rng.choice(["1", "0", "-1", "x"])], ["includeObject", rng.choice(["None", "Metadata", "Object", "Odd"])], ["fieldSelector", rng.choice(["metadata.namespace=NS", "spec.x=1", "metadata.name", "a=b=c", "metadata.name!=a,metadata.name=NAME", "status.phase=Running"])],
                   ["pretty", "true"], ["sendInitialEvents", rng.choice(["true", "false"])], ["allowWatchBookmarks", "true"]]
        out = []
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            option = rng.choice(options)
            out = [it for it in out if it[0] != option[0]] + [option]
        return out

    def delete(self, path, seed):
        rng, steps, target = self.rng, [self.first(path, seed)], self.target(path, seed)
        if rng.random() < 0.4 and not seed.get("dry"):
            steps[0]["edits"] = [[["metadata", "finalizers"], "set", rng.choice([["example.com/a"], ["foregroundDeletion"], ["orphan"], ["example.com/a", "orphan"]])]]
        query, options = [], {}
        for place in ("query", "body"):
            if rng.random() < 0.4:
                option = rng.choice([["gracePeriodSeconds", rng.choice(["0", "5", "-1", "x"])], ["propagationPolicy", rng.choice(["Foreground", "Background", "Orphan", "Odd"])],
                                     ["orphanDependents", rng.choice(["true", "false", "x"])], ["dryRun", "All"], ["dryRun", "Odd"], ["ignoreStoreReadErrorWithClusterBreakingPotential", "true"]])
                if place == "query":
                    query.append(option)
                else:
                    name, value = option
                    options[name] = {"gracePeriodSeconds": lambda: int(value) if value != "x" else "x", "orphanDependents": lambda: value == "true",
                                     "dryRun": lambda: [value], "ignoreStoreReadErrorWithClusterBreakingPotential": lambda: True}.get(name, lambda: value)()
        if rng.random() < 0.2:
            options["preconditions"] = rng.choice([{"uid": "x"}, {"resourceVersion": "1"}, {"uid": ""}, {}])
        if rng.random() < 0.2:
            options |= rng.choice([{"kind": "DeleteOptions", "apiVersion": "v1"}, {"kind": "Odd", "apiVersion": "v1"}, {"unknown": 1}, {"kind": "DeleteOptions", "apiVersion": "odd/v1"}])
        step = {"method": "DELETE", "path": target, "query": query}
        if options:
            step |= {"body": options, "edits": []}
        steps.append(step)
        if rng.random() < 0.6:
            steps.append({"method": "GET", "path": target, "query": []})
        if rng.random() < 0.3:
            steps.append({"method": "DELETE", "path": target, "query": []})
        return steps

    def odd(self, path, seed):
        """Wrong methods, bytes, types of content and subresources."""
        rng, target = self.rng, self.target(path, seed)
        body = self.body(path, seed)
        whole = json.dumps(body)
        kind = rng.random()
        step = {"method": "POST", "path": path, "query": [["dryRun", "All"]]}
        if kind < 0.35:
            at = rng.randrange(len(whole))
            text = rng.choice([whole[:at], whole[:at] + rng.choice("{}[],:\"x1\\") + whole[at:], whole + "{}", whole + "\n---\n" + whole, "", "null", "[]", "1", '"a"', "{}",
                               whole.replace('"metadata"', '"metadata": {}, "metadata"', 1), whole.replace('"kind"', '"Kind"', 1), whole.replace('"apiVersion": "', '"apiVersion": "x', 1),
                               whole.replace('"kind": "', '"kind": "X', 1)])
            return [step | {"raw": text, "kind": rng.choice(["application/json", "application/json", "application/yaml", "application/yaml", "", "text/plain", "application/json;charset=utf-8", "application/vnd.kubernetes.protobuf"])}]
        if kind < 0.5:
            steps = [self.first(path, seed)] if rng.random() < 0.7 and not seed.get("dry") else []
            text = rng.choice(["", "{", "[]", "null", "{}", "1", "[1]", '[{"op":"add"}]', '[{"op":"add","path":"/x","value":1}]', '{"metadata":null}', '{"spec":null}', "a: b", "apiVersion: v1", '{"metadata":{"labels":[]}}', '{"metadata":{"name":"other"}}', '{"kind":"Other"}'])
            return steps + [{"method": "PATCH", "path": target, "query": rng.choice([[], [["fieldManager", "m"]], [["force", "true"]]]), "raw": text,
                     "kind": rng.choice(["application/json-patch+json", "application/merge-patch+json", "application/strategic-merge-patch+json", "application/apply-patch+yaml", "application/json", "", "text/plain", "application/apply-patch+cbor"])}]
        if kind < 0.75:
            steps = [self.first(path, seed)] if rng.random() < 0.7 and not seed.get("dry") else []
            sub = rng.choice((seed.get("subresources") or []) + ["status", "scale", "none", "eviction", "binding", "token", "approval", "finalize", "ephemeralcontainers", "resize"])
            own = {"eviction": {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": rng.choice(["NAME", "other", ""])}}, "binding": {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "NAME"}, "target": rng.choice([{"kind": "Node", "name": "n"}, {"kind": "Pod", "name": "n"}, {"name": "n"}, {}, {"kind": "Node"}])},
                   "token": {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": rng.choice([{}, {"audiences": ["a"]}, {"expirationSeconds": 1}, {"expirationSeconds": 5000000000}, {"boundObjectRef": None}, {"boundObjectRef": {}}, {"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "x"}}, {"audiences": [""], "boundObjectRef": {"kind": "Odd"}}])},
                   "scale": {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "NAME"}, "spec": {"replicas": rng.choice([1, -1, 0, "x"])}}}.get(sub, body)
            method = rng.choice(["GET", "PUT", "POST", "PUT", "POST", "DELETE", "PATCH"])
            final = {"method": method, "path": f"{target}/{sub}", "query": []}
            if method in ("PUT", "POST", "PATCH"):
                final |= {"body": own, "edits": self.edits(own, 1) if own is body and rng.random() < 0.5 else []}
                if method == "PATCH":
                    final["kind"] = "application/merge-patch+json"
            if sub == "log" and method == "GET":
                final["query"] = [rng.choice([["tailLines", "-1"], ["sinceSeconds", "0"], ["limitBytes", "0"], ["container", "none"], ["follow", "x"], ["sinceTime", "x"], ["stream", "Odd"], ["tailLines", "x"]])]
            return steps + [final]
        place = rng.choice(["/", "/api", "/apis", "/api/v1", "/api/v2", "/apis/apps", "/apis/none", "/apis/apps/v1", "/apis/apps/v1beta1", "/none", "/apis/apps/v1/none", "/api/v1/none", path + "/", target + "/", path + "/NAME/x/y", "/api/v1/namespaces/none/pods",
                            "/apis/apps/", "/api/", "/api/v1/watch/namespaces/NS/pods/NAME/x", "//api/v1/nodes", "/api/v1//nodes", "/apis/none/v1/a/b", "/healthz", "/livez", "/readyz/none", "/livez?exclude=x", "/healthz/ping", "/version/", "/swagger", "/openapi/v3/none", "/logs", "/metrics/none", "/apis/example.com/v1", "/apis/example.com", "/apis/example.com/v2/namespaces/NS/widgets", "/.well-known/openid-configuration", "/openid/v1/jwks/"])
        return [{"method": rng.choice(["GET", "GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]), "path": place, "query": [], "headers": [["Accept", self.accept()]] if rng.random() < 0.3 else []}]
