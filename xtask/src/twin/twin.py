"""Sends the same requests to upstream's API server and to ours, and reports each difference.

In: two kubeconfigs, a duration, a seed. Out: a line for each class of differences with the smallest case that
shows it, and a table of the sources. `cargo xtask twin` starts the servers and runs this program.

A case is a short sequence of requests to objects of its own. It ends at its first difference. A difference counts
if it shows three times in a row: upstream's own answers vary (the order of a map's keys, informers that lag).
Invariant: `--seed S --case N` repeats case N of a run with the seed S, whatever ran before it.
"""
import argparse
import copy
import json
import multiprocessing
import os
import random
import re
import sys
import time
import urllib.parse

import yaml

import definitions
import generate
import normal
import pair
import sources

HERE = os.path.dirname(os.path.abspath(__file__))
# The certificate signing request among the story's manifests.
KINDS = os.path.join(HERE, "../../../crates/binary/tests/e2e/manifests/kinds.yaml")
SHRINKS = 60
# Seconds that a watch waits for events that do not come.
WATCH_LIMIT = 3
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "widgets.example.com"},
    "spec": {"group": "example.com", "scope": "Namespaced", "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList", "shortNames": ["wd"]},
             "versions": [{"name": "v1", "served": True, "storage": True, "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}},
                           "additionalPrinterColumns": [{"name": "Size", "type": "integer", "jsonPath": ".spec.size"}, {"name": "When", "type": "date", "jsonPath": ".spec.when"}],
                           "selectableFields": [{"jsonPath": ".spec.colour"}],
                           "schema": {"openAPIV3Schema": {"type": "object", "required": ["spec"], "properties": {
                               "spec": {"type": "object", "x-kubernetes-validations": [{"rule": "!has(self.size) || self.size < 50 || self.colour == 'red'", "message": "large ones are red", "fieldPath": ".size"},
                                                                                     {"rule": "self.replicas >= oldSelf.replicas", "reason": "FieldValueForbidden"}],
                                        "properties": {"size": {"type": "integer", "minimum": 1, "maximum": 100, "default": 1, "format": "int32"}, "replicas": {"type": "integer", "default": 1},
                                                       "colour": {"type": "string", "enum": ["red", "green"], "default": "red", "maxLength": 10}, "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                                                       "port": {"x-kubernetes-int-or-string": True}, "when": {"type": "string", "format": "date-time"},
                                                       "list": {"type": "array", "maxItems": 3, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                                                                "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}, "value": {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": True, "minimum": 0}}}},
                                                       "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string", "pattern": "^a"}}, "map": {"type": "object", "maxProperties": 2, "additionalProperties": {"type": "string", "nullable": True}}}},
                               "status": {"type": "object", "properties": {"replicas": {"type": "integer"}}}}}}}]}}


class Twin:
    """One worker: a connection to each server, and namespaces of its own."""

    def __init__(self, options, worker):
        self.pair = pair.Pair(options.theirs, options.ours)
        self.worker, self.count = worker, 0
        self.spaces = {"NS": f"tw{worker}", "QUIET": f"tq{worker}"}
        with open(os.path.join(HERE, "seeds.yaml"), encoding="utf-8") as file:
            self.seeds = yaml.safe_load(file)
        with open(KINDS, encoding="utf-8") as file:
            self.request = next(it["spec"]["request"] for it in yaml.safe_load_all(file) if it["kind"] == "CertificateSigningRequest")

    def prepare(self, sources):
        for space in self.spaces.values():
            self.pair.both("POST", "/api/v1/namespaces", {"metadata": {"name": space}})
            self.pair.both("POST", f"/api/v1/namespaces/{space}/serviceaccounts", {"metadata": {"name": "default"}})
        made = [CRD] + (list(definitions.all_definitions()) if "definitions" in sources else [])
        if self.worker == 0:
            for body in made:
                self.pair.both("POST", definitions.DEFINITIONS, body)
        last = made[-1]["spec"]
        for side in self.pair.sides:
            self.until(side, "/openapi/v3/apis/example.com/v1")
            self.until(side, f"/apis/{last['group']}/v1/namespaces/{self.spaces['NS']}/{last['names']['plural']}")
        index = self.pair.theirs.call("GET", "/openapi/v3").json()
        documents = [self.pair.theirs.call("GET", it["serverRelativeURL"]).json() for it in index["paths"].values()]
        # The index may still name the group of a definition that is gone.
        self.schemas = generate.Schemas([it for it in documents if it])

    @staticmethod
    def until(side, path, holds=lambda answer: answer.status == 200, limit=60):
        end = time.time() + limit
        while time.time() < end and not holds(side.call("GET", path)):
            time.sleep(0.05)

    def fill(self, value, name):
        if isinstance(value, str):
            if value in self.spaces:
                return self.spaces[value]
            if value == "CSR":
                return self.request
            return value.replace("NAME", name).replace("namespace=NS", "namespace=" + self.spaces["NS"])
        if isinstance(value, list):
            return [self.fill(item, name) for item in value]
        if isinstance(value, dict):
            return {key.replace("NAME", name): self.fill(item, name) for key, item in value.items()}
        return value

    def path(self, path, name):
        parts = [self.spaces.get(part, part.replace("NAME", name)) for part in path.split("/")]
        return "/".join(urllib.parse.quote(part, safe=":@!$&'()*+,;=~") for part in parts)

    def request_of(self, step, name, side):
        target = self.path(step["path"], name)
        query = urllib.parse.urlencode([(key, self.fill(value, name)) for key, value in step.get("query", [])])
        headers = [(key, self.fill(value, name).replace(":NS", ":" + self.spaces["NS"])) for key, value in step.get("headers", [])]
        if not any(key == "Accept" for key, _ in headers):
            headers.append(("Accept", "application/json"))
        if step.get("as"):
            headers.append(("Impersonate-User", step["as"]))
        body = None
        if "raw" in step:
            body = self.fill(step["raw"], name).encode("utf-8", "surrogatepass")
        elif "of" in step:
            live = side.call("GET", self.path(step["of"], name)).json()
            body = compact(generate.changed(live, self.fill(step["edits"], name)))
        elif "body" in step:
            body = compact(generate.changed(self.fill(step["body"], name), self.fill(step.get("edits", []), name)))
        if body is not None and step.get("kind", "application/json"):
            headers.append(("Content-Type", step.get("kind", "application/json")))
        return step["method"], target + ("?" + query if query else ""), headers, body

    def run(self, steps):
        """The first difference that a case shows: step, class, both answers. None without one."""
        self.count += 1
        name = f"t{self.worker}x{self.count}"
        said = json.dumps(steps)
        named = set(normal.UID.findall(said)) | set(normal.SERVICE_IP.findall(said)) | set(re.findall(r"\b3[0-2]\d{3}\b", said))
        named |= {value for step in steps for key, value in step.get("query", []) if key == "resourceVersion"}
        prefixes = [prefix_in(self.fill(step.get("body"), name)) for step in steps]
        sides = [normal.Normal(named, prefixes), normal.Normal(named, prefixes)]
        made = []
        before = self.revisions() if any(step["method"] == "WATCH" for step in steps) else []
        try:
            for at, step in enumerate(steps):
                if step["method"] == "WATCH":
                    answers = self.watched(step, name, before)
                    seen = [side.tree(answer) for side, answer in zip(sides, answers)]
                    seen = [{"status": "watch", "body": it} for it in seen]
                else:
                    requests = [self.request_of(step, name, side) for side in self.pair.sides]
                    answers = self.pair.send(requests, step.get("anonymous", False))
                    self.settle(step, answers)
                    self.note(step, answers, made, name)
                    seen = [side.answer(answer) for side, answer in zip(sides, answers)]
                found = normal.difference(*seen)
                if found:
                    return {"step": at, "class": self.name_class(step, found, seen), "path": found[0], "theirs": shown(found[1]), "ours": shown(found[2]),
                            "answers": [normal.message(it) for it in seen]}
                if at == 0 and answers[0].status >= 400 and len(steps) > 1 if step["method"] != "WATCH" else False:
                    if steps[1]["path"].startswith(step["path"]) and step["method"] == "POST" and len(made) == 0 and "raw" not in step:
                        # Nothing was made: what follows would only say so.
                        return None
            return None
        finally:
            self.clean(made)

    def settle(self, step, answers):
        """A new definition's status is written by a controller of the server, at once."""
        if step["method"] == "DELETE" or not step["path"].startswith(definitions.DEFINITIONS) or ["dryRun", "All"] in step.get("query", []):
            return
        for side, answer in zip(self.pair.sides, answers):
            body = answer.json() if answer.status in (200, 201) else None
            if isinstance(body, dict) and body.get("kind") == "CustomResourceDefinition":
                self.until(side, f"{definitions.DEFINITIONS}/{body['metadata']['name']}", is_established, 2)

    def note(self, step, answers, made, name):
        if step["method"] not in ("POST", "PUT", "PATCH") or not any(answer.status in (200, 201) for answer in answers):
            return
        if any(key == "dryRun" for key, _ in step.get("query", [])):
            return
        for answer in answers:
            body = answer.json()
            own = body.get("metadata", {}).get("name") if isinstance(body, dict) and isinstance(body.get("metadata"), dict) else None
            path = self.path(step["path"], name)
            if step["method"] == "POST" and own and "review" not in path and not path.endswith(("/token", "/eviction", "/binding")):
                path = f"{path}/{urllib.parse.quote(own)}"
            elif step["method"] == "POST":
                continue
            path = re.sub(r"/(status|scale|ephemeralcontainers|resize|approval|finalize)$", "", path)
            if path not in made:
                made.append(path)

    def revisions(self):
        """Where each server's history is now."""
        path = f"/api/v1/namespaces/{self.spaces['NS']}/configmaps?limit=1"
        return [side.call("GET", path).json()["metadata"]["resourceVersion"] for side in self.pair.sides]

    def watched(self, step, name, before):
        """The events of a watch from where the history was before the case, unless the step says from where."""
        query = [(key, self.fill(value, name)) for key, value in step["query"]]
        asked = any(key in ("resourceVersion", "sendInitialEvents") for key, _ in query)
        accept = next((value for key, value in step.get("headers", []) if key == "Accept"), "application/json")
        answers = []
        for side, revision in zip(self.pair.sides, before):
            self.pair.sent += 1
            own = query if asked else query + [("resourceVersion", revision)]
            target = self.path(step["path"], name) + "?" + urllib.parse.urlencode(own)
            answers.append(side.watch(target, step["count"], WATCH_LIMIT, accept))
        return answers

    def clean(self, made):
        for path in made:
            for side, answer in zip(self.pair.sides, self.pair.both("DELETE", path + "?gracePeriodSeconds=0&propagationPolicy=Background")):
                body = answer.json() or {}
                meta = body.get("metadata", {}) if answer.status in (200, 202) else {}
                if meta.get("finalizers"):
                    side.call("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")
                if body.get("kind") == "Namespace":
                    side.call("PUT", path + "/finalize", body | {"spec": {"finalizers": []}})

    def name_class(self, step, found, seen):
        # The resource and subresource, or the start of any other path.
        parts = [part for part in step["path"].split("/") if part not in ("NS", "QUIET", "namespaces")]
        resource = "/".join(parts[3:] if parts[1:2] == ["api"] else parts[4:]) or step["path"]
        return f"{step['method']} {re.sub('NAME.*?(/|$)', '*' + chr(92) + '1', resource) or parts[-1]} {normal.class_of(found, *seen)}"

    def smaller(self, steps, wanted):
        """The smallest case with the same difference that a few tries find."""
        tries = 0
        progress = True
        while progress and tries < SHRINKS:
            progress = False
            for candidate in candidates(steps):
                tries += 1
                found = self.run(candidate)
                if found and alike(found, wanted):
                    steps, wanted, progress = candidate, found, True
                    break
                if tries >= SHRINKS:
                    break
        return steps, wanted


def compact(value):
    """Without spaces: upstream keeps the bytes of fields of any content, and compares them (docs/deviations.md)."""
    return json.dumps(value, separators=(",", ":")).encode()


def prefix_in(body):
    """The beginning of a name that a server shall make."""
    meta = body.get("metadata") if isinstance(body, dict) else None
    prefix = meta.get("generateName") if isinstance(meta, dict) else None
    return prefix[:58] if isinstance(prefix, str) else ""


def is_established(answer):
    status = (answer.json() or {}).get("status") or {}
    return any(it.get("type") == "Established" and it.get("status") == "True" for it in status.get("conditions") or [])


def alike(one, two):
    return one["class"] == two["class"]


def candidates(steps):
    for at in range(len(steps)):
        if len(steps) > 1:
            yield steps[:at] + steps[at + 1:]
    for at, step in enumerate(steps):
        def other(**changes):
            return steps[:at] + [{**step, **changes}] + steps[at + 1:]
        for which in range(len(step.get("edits", []))):
            if len(step["edits"]) > 1 or "of" in step:
                yield other(edits=step["edits"][:which] + step["edits"][which + 1:])
        if isinstance(step.get("body"), dict) and step.get("edits"):
            # Carried out, they can be made smaller with the rest.
            yield other(body=generate.changed(step["body"], step["edits"]), edits=[])
        for which in range(len(step.get("query", []))):
            yield other(query=step["query"][:which] + step["query"][which + 1:])
        if step.get("headers"):
            yield other(headers=[])
        if isinstance(step.get("body"), dict) and not step.get("edits"):
            for smaller in without(step["body"]):
                yield other(body=smaller)


def without(value, depth=0):
    """Trees with one branch less, large branches first."""
    if depth > 5:
        return
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    keys = [key for key in keys if depth or key not in ("apiVersion", "kind", "metadata")]
    keys = sorted(keys, key=lambda key: -len(json.dumps(value[key])))
    for key in keys:
        smaller = copy.copy(value)
        del smaller[key]
        yield smaller
    for key in keys:
        if isinstance(value[key], (dict, list)):
            for inner in without(value[key], depth + 1):
                smaller = copy.copy(value)
                smaller[key] = inner
                yield smaller


def shown(value):
    text = "(absent)" if value is ... else json.dumps(value, ensure_ascii=False)
    return text if len(text) < 600 else text[:600] + "…"


def work(options, worker, queue):
    twin = Twin(options, worker)
    if worker != 0:
        time.sleep(1)
    twin.prepare(options.sources.split(","))
    end = time.time() + options.seconds
    names = options.sources.split(",")
    known = {}
    number = worker
    stats = {name: {"cases": 0, "compared": 0, "differ": 0, "unstable": 0} for name in names}
    if options.case is not None:
        number = options.case
    iterators = sources.all(options, twin)
    while time.time() < end and (options.cases is None or number < options.cases):
        source = names[number % len(names)] if options.case is None else options.source
        steps = iterators[source](random.Random(f"{options.seed}/{source}/{number}"), number)
        if not steps:
            # A source without cases, or an object that neither server has a path for.
            if steps is None:
                names.remove(source)
            if not names:
                break
            number += options.workers
            continue
        before = twin.pair.sent
        found = twin.run(steps)
        stats[source]["cases"] += 1
        stats[source]["compared"] += twin.pair.sent - before
        if found and all(again and alike(again, found) or again and (found := again) for again in (twin.run(steps), twin.run(steps))):
            stats[source]["differ"] += 1
            if known.setdefault(found["class"], 0) < 1 and not options.no_shrink:
                first = found["class"]
                steps, found = twin.smaller(steps, found)
                known[first] += 1
            known[found["class"]] = known.get(found["class"], 0) + 1
            queue.put(("found", source, number, found, steps))
        elif found:
            stats[source]["unstable"] += 1
        if options.case is not None:
            print(json.dumps(steps, indent=1))
            break
        number += options.workers
    queue.put(("end", worker, stats))


def main():
    parser = argparse.ArgumentParser(description="compares two API servers")
    parser.add_argument("--theirs", required=True)
    parser.add_argument("--ours", required=True)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--case", type=int)
    parser.add_argument("--cases", type=int, help="only the first N cases")
    parser.add_argument("--source", default="schema", choices=sources.NAMES)
    parser.add_argument("--sources", default=",".join(sources.NAMES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tables", help="file of upstream's test objects, one JSON value a line")
    parser.add_argument("--out", default="twin.jsonl")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    if options.case is not None:
        options.workers = 1
    queue = multiprocessing.Queue()
    workers = [multiprocessing.Process(target=work, args=(options, worker, queue)) for worker in range(options.workers)]
    for worker in workers:
        worker.start()
    report(queue, options, workers)


def report(queue, options, workers):
    classes, stats, ended = {}, {}, 0
    with open(options.out, "w", encoding="utf-8") as file:
        while ended < len(workers):
            try:
                message = queue.get(timeout=5)
            except Exception:
                if not any(worker.is_alive() for worker in workers):
                    sys.exit("a worker ended early")
                continue
            if message[0] == "end":
                ended += 1
                for source, counts in message[2].items():
                    total = stats.setdefault(source, dict.fromkeys(counts, 0))
                    for key, count in counts.items():
                        total[key] += count
                continue
            _, source, number, found, steps = message
            entry = classes.setdefault(found["class"], {"count": 0, "source": source, "case": number})
            entry["count"] += 1
            file.write(json.dumps({"source": source, "case": number, **found, "steps": steps}) + "\n")
            file.flush()
    for name, entry in sorted(classes.items(), key=lambda it: -it[1]["count"]):
        print(f"DIFFERS {entry['count']:>4} {entry['source']} case {entry['case']}: {name}")
    print(f"{'source':<10} {'cases':>8} {'compared':>9} {'differ':>7} {'unstable':>8}  equal")
    stats["total"] = {key: sum(it[key] for it in stats.values()) for key in ("cases", "compared", "differ", "unstable")}
    for source, it in stats.items():
        share = 100 * (1 - it["differ"] / it["cases"]) if it["cases"] else 100
        print(f"{source:<10} {it['cases']:>8} {it['compared']:>9} {it['differ']:>7} {it['unstable']:>8}  {share:.2f} %")


if __name__ == "__main__":
    main()
