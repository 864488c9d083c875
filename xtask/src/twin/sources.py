"""Where cases come from: schemas, upstream's test objects, expressions in CEL, texts of small languages.

In: a random series, a number. Out: the steps of a case; None when a source has no more.
"""
import copy
import json

import access
import definitions
import generate
import grid
import neighbours

NAMES = ["schema", "grid", "fields", "neighbours", "definitions", "access", "tables", "cel", "texts"]


def all(options, twin):
    tables = Tables(options.tables, twin)
    plain = generate.Generator(twin.schemas, twin.seeds, None)
    return {
        "schema": lambda rng, _: generate.Generator(twin.schemas, twin.seeds, rng).case(),
        "grid": grid.grid(plain).case,
        "fields": grid.each_field(plain).case,
        "neighbours": neighbours.source().case,
        "definitions": definitions.source().case,
        "access": access.source().case,
        "tables": tables.case,
        "cel": lambda rng, _: expression(rng),
        "texts": lambda rng, _: small_text(rng),
    }


# Kinds whose objects change how later requests are answered: only dry runs.
DRY = ("admissionregistration", "flowcontrol", "apiregistration", "PriorityClass", "apiextensions", "ServiceCIDR")


class Tables:
    """The objects of upstream's unit tests: created, and replaced by the newer one where a test has two."""

    def __init__(self, path, twin):
        self.lines, self.twin = [], twin
        if path:
            with open(path, encoding="utf-8") as file:
                self.lines = sorted(set(file))
        self.resources = None

    def case(self, rng, number):
        if not self.lines:
            return None
        if self.resources is None:
            self.resources = resources(self.twin.pair.theirs)
        objects = json.loads(rng.choice(self.lines))
        place = self.resources.get((objects[0].get("apiVersion"), objects[0].get("kind")))
        if place is None:
            return []
        path, namespaced = place
        new, old = [self.placed(it, namespaced) for it in (objects[0], objects[-1])]
        is_dry = any(word in path + new["kind"] for word in DRY)
        if len(objects) == 1 or is_dry or rng.random() < 0.2:
            return [{"method": "POST", "path": path, "query": [["dryRun", "All"]], "body": new, "edits": []}]
        name = old["metadata"].get("name", "NAME")
        new["metadata"]["name"] = name
        steps = [{"method": "POST", "path": path, "query": [], "body": old, "edits": []}]
        if "status" in old and rng.random() < 0.5:
            steps.append({"method": "PUT", "path": f"{path}/{name}/status", "query": [], "body": old, "edits": []})
        steps.append({"method": "PUT", "path": f"{path}/{name}" + rng.choice(["", "", "/status" if "status" in new else ""]), "query": [["dryRun", "All"]], "body": new, "edits": []})
        return steps

    @staticmethod
    def placed(given, namespaced):
        own = copy.deepcopy(given)
        meta = own.setdefault("metadata", {})
        for key in ("creationTimestamp", "resourceVersion", "uid"):
            meta.pop(key, None)
        if meta.get("name", "") in ("", "abc", "foo", "test", "valid", "a"):
            meta["name"] = "NAME"
        meta.pop("namespace", None)
        if namespaced:
            meta["namespace"] = "NS"
        return own


def resources(side):
    """The path of each kind's list."""
    found = {}
    groups = [("v1", "/api/v1")]
    for group in side.call("GET", "/apis").json()["groups"]:
        groups += [(it["groupVersion"], "/apis/" + it["groupVersion"]) for it in group["versions"]]
    for version, path in groups:
        for it in side.call("GET", path).json().get("resources", []):
            if "/" not in it["name"] and "create" in it["verbs"]:
                space = "/namespaces/NS" if it["namespaced"] else ""
                found[(version, it["kind"])] = (f"{path}{space}/{it['name']}", it["namespaced"])
    return found


# --- CEL ------------------------------------------------------------------------------------------------------------

LEAVES = {
    "int": ["0", "1", "-1", "2", "7", "self.n", "size(self.l)", "size(self.s)", "9223372036854775807", "-9223372036854775808", "int('5')", "int(2.9)", "int(-2.9)", "int('x')", "5u"],
    "double": ["0.0", "1.5", "-2.0", "1e308", "double(self.n)", "double('1.5')", "0.1", "1.0/0.0", "double('NaN')"],
    "bool": ["true", "false", "self.b", "has(self.o)", "has(self.s)"],
    "string": ["''", "'a'", "'abc'", "self.s", "'é'", "'😀b'", "\"a'b\"", "r'\\d'", "'a,b,c'", "string(self.n)", "b'abc'", "'A b'", "'10Gi'", "'1h'", "'\\u00e9'", "\"\"\"x\ny\"\"\""],
    "list": ["[]", "[1,2,3]", "self.l", "['b','a']", "[1,'a']", "[[1],[2]]", "[1,1,2]", "self.l + [4]"],
    "map": ["{}", "{'a': 1}", "self.m", "{1: 'a', 2: 'b'}", "{'a': {'b': 1}}"],
    "duration": ["duration('1h')", "duration('1h30m')", "duration('-5s')", "duration('1.5s')", "duration('1d')", "duration('')", "duration('100ms')", "duration('1us')"],
    "timestamp": ["timestamp('2026-01-02T03:04:05Z')", "timestamp('2026-01-02T03:04:05.123456789+02:00')", "timestamp('x')", "timestamp(0)", "timestamp('0001-01-01T00:00:00Z')", "timestamp('2024-02-29T23:59:59Z')"],
    "quantity": ["quantity('1Gi')", "quantity('100m')", "quantity('1.5')", "quantity('x')", "quantity('-1')", "quantity('1e3')", "quantity('0')"],
    "url": ["url('https://a.b:80/c?d=e&d=f#g')", "url('/a')", "url('x y')", "url('https://[::1]:8/')", "url('http://a')"],
    "ip": ["ip('1.2.3.4')", "ip('::1')", "ip('fe80::1')", "ip('x')", "ip('010.0.0.1')", "ip('::ffff:1.2.3.4')", "ip('224.0.0.1')"],
    "cidr": ["cidr('10.0.0.0/8')", "cidr('::/0')", "cidr('10.0.0.1/8')", "cidr('x')", "cidr('1.2.3.4/33')"],
    "semver": ["semver('1.2.3')", "semver('v1.2.3')", "semver('1.2')", "semver('1.2.3-a+b')", "semver('v1.0', true)"],
}
CALLS = {
    "int": ["({int} + {int})", "({int} - {int})", "({int} * {int})", "({int} / {int})", "({int} % {int})", "size({list})", "size({string})", "size({map})", "({bool} ? {int} : {int})", "{list}.size()", "{string}.indexOf({string})", "{string}.lastIndexOf({string})", "{string}.indexOf({string}, {int})",
            "{list}.sum()", "{list}.max()", "{list}.min()", "{list}.indexOf({int})", "{list}.lastIndexOf({int})", "{list}[{int}]", "-{int}", "{duration}.getHours()", "{duration}.getSeconds()", "{duration}.getMilliseconds()", "{duration}.getMinutes()", "{timestamp}.getFullYear()", "{timestamp}.getDayOfYear()", "{timestamp}.getDayOfWeek()", "{timestamp}.getHours('America/New_York')",
            "{timestamp}.getMonth()", "{timestamp}.getDate()", "{timestamp}.getHours('+01:30')", "{timestamp}.getMilliseconds()", "int({timestamp})", "{quantity}.asInteger()", "{quantity}.sign()", "{quantity}.compareTo({quantity})", "{ip}.family()", "{cidr}.prefixLength()", "{semver}.major()", "{semver}.minor()", "{semver}.compareTo({semver})", "int({double})", "int({string})"],
    "double": ["({double} + {double})", "({double} * {double})", "({double} / {double})", "{quantity}.asApproximateFloat()", "double({int})", "double({string})", "math.ceil({double})"],
    "bool": ["({bool} && {bool})", "({bool} || {bool})", "!{bool}", "({int} < {int})", "({int} == {int})", "({string} == {string})", "({string} < {string})", "({int} in {list})", "({string} in {map})", "{string}.contains({string})", "{string}.startsWith({string})", "{string}.endsWith({string})", "{string}.matches({string})", "{list}.all(x, x > {int})", "{list}.exists(x, x == {int})",
             "{list}.exists_one(x, x == {int})", "{map}.all(k, k != {string})", "{map}.exists(k, k == {string})", "({list} == {list})", "({map} == {map})", "({duration} < {duration})", "({timestamp} < {timestamp})", "({double} < {double})", "({int} == {double})", "({int} < {double})", "{quantity}.isGreaterThan({quantity})", "{quantity}.isLessThan({quantity})", "({quantity} == {quantity})", "isQuantity({string})", "isURL({string})",
             "({url} == {url})", "isIP({string})", "ip.isCanonical({string})", "{ip}.isLoopback()", "{ip}.isGlobalUnicast()", "{ip}.isLinkLocalMulticast()", "({ip} == {ip})", "isCIDR({string})", "{cidr}.containsIP({ip})", "{cidr}.containsIP({string})", "{cidr}.containsCIDR({cidr})", "({cidr} == {cidr})", "isSemver({string})", "{semver}.isLessThan({semver})", "{list}.isSorted()", "{quantity}.isInteger()",
             "format.dns1123Label().validate({string}).hasValue()", "optional.of({int}).hasValue()", "self.?o.hasValue()", "{map}[?{string}].hasValue()", "optional.none().hasValue()", "type({int}) == int", "{double}.isNaN()", "sets.contains({list}, {list})", "sets.intersects({list}, {list})", "sets.equivalent({list}, {list})", "bool({string})", "{list}.existsOne(i, v, i == v)", "{list}.all(i, v, i < v)", "({list}[{int}] == {int})"],
    "string": ["({string} + {string})", "string({int})", "string({double})", "string({bool})", "string({duration})", "string({timestamp})", "string({quantity})", "string({ip})", "string({cidr})", "string({url})", "string({list})", "{string}.lowerAscii()", "{string}.upperAscii()", "{string}.trim()", "{string}.replace({string}, {string})", "{string}.replace({string}, {string}, {int})", "{string}.substring({int})", "{string}.substring({int}, {int})",
               "{string}.charAt({int})", "{string}.find({string})", "{list}.map(x, string(x)).join(',')", "{string}.split({string}).join('|')", "{string}.findAll({string}).join('|')", "{string}.findAll({string}, {int}).join('|')", "({bool} ? {string} : {string})", "{url}.getHost()", "{url}.getHostname()", "{url}.getPort()", "{url}.getEscapedPath()", "{url}.getScheme()", "{map}[{string}]", "'%s %d %.2f'.format([{string}, {int}, {double}])", "'%s'.format([{list}])", "'%x %X %o %b'.format([{int}, {int}, {int}, {int}])",
               "'%e'.format([{double}])", "'%s'.format([{map}])", "'%s'.format([{duration}])", "'%s'.format([{timestamp}])", "'%d'.format([{string}])", "'%'.format([{int}])", "'%s'.format([])", "string({cidr}.ip())", "string({cidr}.masked())", "{string}.reverse()", "strings.quote({string})", "{string}.split({string}, {int}).join('|')", "base64.encode(b'ab')", "string({list}.map(x, x * 2))", "string(type({list}))", "{list}.map(x, 'a').join()", "optional.of({string}).orValue('x')", "self.?o.orValue('none')", "string(url({string}))", "cel.bind(x, {string}, x + x)"],
    "list": ["{list}.map(x, x)", "{list}.filter(x, x > {int})", "({list} + {list})", "{list}.map(x, x > 1, x * 2)", "{string}.split({string})", "({bool} ? {list} : {list})", "{list}.flatten()", "{list}.distinct()", "{list}.sort()", "{list}.reverse()", "{list}.slice({int}, {int})", "lists.range({int})", "{map}.map(k, k)", "{list}.transformList(i, v, i)"],
    "map": ["({bool} ? {map} : {map})", "{{{string}: {int}}}", "{map}.transformMap(k, v, v)"],
    "duration": ["({duration} + {duration})", "({timestamp} - {timestamp})", "duration({string})", "({duration} - {duration})"],
    "timestamp": ["({timestamp} + {duration})", "({timestamp} - {duration})", "timestamp({string})"],
    "quantity": ["{quantity}.add({quantity})", "{quantity}.sub({quantity})", "{quantity}.add({int})", "quantity({string})"],
    "url": ["url({string})"], "ip": ["ip({string})", "{cidr}.ip()"], "cidr": ["cidr({string})", "{cidr}.masked()"], "semver": ["semver({string})"],
}


class Expressions:
    def __init__(self, rng):
        self.rng = rng

    def of(self, kind, depth):
        rng = self.rng
        # Now and then a value of another type.
        if rng.random() < 0.03:
            kind = rng.choice(list(LEAVES))
        if depth <= 0 or rng.random() < 0.2:
            return rng.choice(LEAVES[kind])
        template = rng.choice(CALLS.get(kind) or LEAVES[kind])
        out, at = "", 0
        while at < len(template):
            end = template.find("}", at) if template[at] == "{" else -1
            if template.startswith("{{", at) or template.startswith("}}", at):
                out, at = out + template[at], at + 2
            elif end > 0 and template[at + 1:end] in LEAVES:
                out, at = out + self.of(template[at + 1:end], depth - 1), end + 1
            else:
                out, at = out + template[at], at + 1
        return out


def expression(rng):
    """A definition whose default breaks a rule: upstream evaluates the rule, and shows the message's value."""
    maker = Expressions(rng)
    depth = rng.choice([1, 2, 2, 3])
    if rng.random() < 0.5:
        rule = {"rule": "false", "messageExpression": maker.of("string", depth)}
    else:
        rule = {"rule": maker.of("bool", depth)}
    if rng.random() < 0.05:
        text = rule["rule"]
        at = rng.randrange(len(text))
        rule["rule"] = text[:at] + rng.choice("()[]{}.,'\"?:&|!+-*/%<>= \n\\x0") + text[at + rng.randrange(2):]
    limit = {} if rng.random() < 0.1 else {"maxItems": 5}
    size = {} if rng.random() < 0.1 else {"maxLength": 10}
    schema = {"type": "object", "properties": {"p": {
        "type": "object", "default": {"n": 5, "s": "abc", "b": True, "l": [3, 1, 2], "m": {"a": "x"}, "d": 1.5}, "x-kubernetes-validations": [rule],
        "properties": {"n": {"type": "integer"}, "s": {"type": "string", **size}, "b": {"type": "boolean"}, "o": {"type": "string", **size}, "d": {"type": "number"},
                       "l": {"type": "array", "items": {"type": "integer"}, **limit}, "m": {"type": "object", "maxProperties": 5, "additionalProperties": {"type": "string", **size}}}}}}
    body = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "gears.cel.example.com"},
            "spec": {"group": "cel.example.com", "scope": "Namespaced", "names": {"plural": "gears", "kind": "Gear"}, "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}]}}
    return [{"method": "POST", "path": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "query": [["dryRun", "All"]], "body": body, "edits": []}]


# --- Selectors, quantities, durations, times ------------------------------------------------------------------------

PIECES = {
    "labelSelector": ["a", "b", "a.b/c", "=", "==", "!=", "!", ",", " in ", " notin ", "(", ")", ">", "<", "1", "-1", " ", "x", "in", "notin", "exists", "A_b", "-", ".", "/", "é", '"', "'", "\t", "a b", ""],
    "fieldSelector": ["metadata.name", "metadata.namespace", "=", "==", "!=", ",", "a", "\\", "\\=", "\\,", " ", "spec.nodeName", "status.phase", "(", "!", "in", "", "spec.x", "metadata.labels"],
}
SHAPES = ["a=b", "a in (b,c)", "!a", "a!=b", "a notin (b)", "a>1", "a<2", "a,b", "a=b,c!=d,e", "metadata.name=a", "metadata.name!=a,metadata.namespace=b", "status.phase=Running"]
DIGITS = ["0", "1", "9", "12", "999", ".", "5", "e", "E", "+", "-", "i", "K", "k", "M", "m", "G", "u", "n", "P", "T", "Ki", "Mi", "Gi", "Ei", "3", "00", " ", "x", "123456789012345678901"]


def small_text(rng):
    kind = rng.random()
    if kind < 0.5:
        name = rng.choice(list(PIECES))
        text = rng.choice(SHAPES) if rng.random() < 0.6 else ""
        for _ in range(rng.choice([1, 1, 2, 3, 5])):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(PIECES[name]) + text[at + rng.randrange(2):]
        path = rng.choice(["/api/v1/namespaces/NS/pods", "/api/v1/namespaces/NS/configmaps", "/apis/example.com/v1/namespaces/NS/widgets", "/api/v1/namespaces/NS/events", "/apis/apps/v1/namespaces/NS/replicasets"])
        return [{"method": "GET", "path": path, "query": [[name, text]]}]
    if kind < 0.85:
        text = "".join(rng.choice(DIGITS) for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 6])))
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "NAME"}, "spec": {"containers": [{"name": "c", "image": "a", "resources": {"limits": {rng.choice(["memory", "cpu", "a.b/c", "ephemeral-storage", "hugepages-2Mi"]): text}}}]}}
        return [{"method": "POST", "path": "/api/v1/namespaces/NS/pods", "query": [["dryRun", "All"]], "body": body, "edits": []}]
    text = rng.choice(["2026-01-02T03:04:05", "2026-01-02T03:04:05.5", "2026-13-02T03:04:05", "2026-02-30T00:00:00", "2026-01-02 03:04:05", "2026-1-2T3:4:5", "0000-00-00T00:00:00", "10000-01-01T00:00:00", "2026-01-02T24:00:00", "2026-01-02T23:59:60"]) + rng.choice(["Z", "", "z", "+00:00", "+02:00", "-0000", "+24:00", " Z", "UTC", "+14:59"])
    if rng.random() < 0.5:
        body = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "NAME"}, "involvedObject": {"namespace": "NS"}, rng.choice(["firstTimestamp", "eventTime", "lastTimestamp"]): text}
        return [{"method": "POST", "path": "/api/v1/namespaces/NS/events", "query": [["dryRun", "All"]], "body": body, "edits": []}]
    body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "NAME"}, "spec": {"renewTime": text}}
    return [{"method": "POST", "path": "/apis/coordination.k8s.io/v1/namespaces/NS/leases", "query": [["dryRun", "All"]], "body": body, "edits": []}]
