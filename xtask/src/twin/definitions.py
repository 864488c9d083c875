"""Custom resources: schemas with values that they take, default, prune or refuse, and definitions that are refused.

In: a number. Out: the steps of a case. The definitions of `SCHEMAS` are made once, before the first case, and stay.
"""
import copy

GROUP = "defs.example.com"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DRY = ["dryRun", "All"]
MERGE, APPLY = "application/merge-patch+json", "application/apply-patch+yaml"
TEXTS = ["a", "", "abc", "aé", "é😀", "a" * 20, "A b", 5, None, [], {}, True, "1"]
NUMBERS = [0, 1, -1, 5, 10, 11, 1.5, 1.0, 3000000000, 9223372036854775807, 9223372036854775808, 1e30, -0.0, "5", None, True, [], {}]
LISTS = [[], ["a"], ["a", "b"], ["a", "a"], ["a", "b", "c", "d"], [None], [1], [{}], "a", None, {}, [["a"]], [""]]
MAPS = [{}, {"a": "b"}, {"a": 1}, {"a": None}, {"a": "b", "c": "d", "e": "f"}, {"a": {"b": "c"}}, {"": ""}, [], "a", None, {"A b": "x"}]
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
OBJECT = {"type": "object"}


def rule(schema, text, **more):
    return {**schema, "x-kubernetes-validations": [{"rule": text, **more}]}


def formats():
    words = ["", "a", "A b", "2020-01-01", "2020-01-01T00:00:00Z", "2020-13-01", "12:30:00Z", "1h", "1d", "-1", "10.0.0.1", "::1", "10.0.0.0/8", "fd00::/64", "a@b.c", "a.b", "-a", "http://a/b", "/a", "YWJj", "YWJj!", "#fff", "rgb(1,2,3)", "4111111111111111",
             "123-45-6789", "0-306-40615-2", "978-0-306-40615-7", "507f1f77bcf86cd799439011", "01:23:45:67:89:ab", "123e4567-e89b-12d3-a456-426614174000", "123E4567-E89B-42D3-A456-426614174000", "aaaaaaaa-aaaa-3aaa-aaaa-aaaaaaaaaaaa", 5, None]
    for name in ("date", "date-time", "datetime", "duration", "time", "ipv4", "ipv6", "cidr", "email", "hostname", "uri", "byte", "binary", "hexcolor", "rgbcolor", "creditcard", "ssn", "isbn", "isbn10", "isbn13", "bsonobjectid", "mac", "uuid", "uuid3", "uuid4", "uuid5", "password", "int64", "odd", "ulid", "k8s-short-name", "k8s-long-name"):
        yield {"type": "string", "format": name}, words


def schemas():
    """A property's schema, and values for it."""
    yield STRING, TEXTS
    yield {"type": "string", "minLength": 2, "maxLength": 3}, TEXTS
    yield {"type": "string", "pattern": "^a.*[bé]$"}, TEXTS + ["ab", "aé"]
    yield {"type": "string", "enum": ["a", "abc", ""]}, TEXTS
    yield {"type": "string", "nullable": True, "default": "d"}, TEXTS
    yield {"type": "string", "default": "d"}, TEXTS
    yield {"type": "string", "nullable": True}, TEXTS
    yield INTEGER, NUMBERS
    for form in ("int32", "int64"):
        yield {"type": "integer", "format": form}, NUMBERS
    for form in ("float", "double"):
        yield {"type": "number", "format": form}, NUMBERS + [1e39, 3.5e38]
    yield {"type": "integer", "minimum": 1, "maximum": 10}, NUMBERS
    yield {"type": "integer", "minimum": 1, "maximum": 10, "exclusiveMinimum": True, "exclusiveMaximum": True}, NUMBERS
    yield {"type": "integer", "multipleOf": 5}, NUMBERS
    yield {"type": "number", "multipleOf": 0.1}, NUMBERS + [0.3, 0.25, 0.7]
    yield {"type": "number", "minimum": 0.5, "maximum": 1.5}, NUMBERS
    yield {"type": "integer", "enum": [1, 5]}, NUMBERS
    yield {"type": "number", "enum": [1.5, 1]}, NUMBERS
    yield {"type": "boolean"}, [True, False, "true", 1, None, [], {}]
    yield {"type": "boolean", "default": False, "nullable": True}, [True, None, "x"]
    yield {"type": "array", "items": STRING}, LISTS
    yield {"type": "array", "items": STRING, "minItems": 1, "maxItems": 3}, LISTS
    yield {"type": "array", "items": STRING, "x-kubernetes-list-type": "set"}, LISTS
    yield {"type": "array", "items": {"type": "string", "nullable": True}}, LISTS
    yield {"type": "array", "items": {"type": "object", "properties": {"k": STRING, "v": INTEGER}, "required": ["k"]}, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"]}, [[], [{}], [{"k": "a"}], [{"k": "a"}, {"k": "a"}], [{"k": "a", "v": "x"}], [{"k": "a", "z": 1}], [{"k": None}], [{"k": "a"}, {"k": "b"}, {"k": "a", "v": 1}], "x", None, [5]]
    yield {"type": "array", "items": {"type": "object", "properties": {"k": {"type": "string", "default": "x"}, "p": {"type": "integer", "default": 1}, "v": INTEGER}}, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k", "p"]}, [[{}], [{}, {}], [{"k": "x"}, {"p": 1}], [{"k": "y"}, {"p": 2, "z": 1}]]
    yield {"type": "array", "items": {"type": "array", "items": INTEGER, "maxItems": 2}}, [[[1]], [[1, 2, 3]], [["a"]], [[]], [1], [None]]
    yield OBJECT, MAPS
    yield {"type": "object", "properties": {"a": STRING, "b": {"type": "integer", "default": 3}}, "required": ["a"]}, MAPS + [{"a": "x", "b": "y"}, {"b": 1}, {"a": "x", "z": 1}, {"a": None}, {"a": "x", "b": None}]
    yield {"type": "object", "default": {}, "properties": {"a": {"type": "string", "default": "x"}}}, MAPS
    yield {"type": "object", "additionalProperties": STRING}, MAPS
    yield {"type": "object", "additionalProperties": STRING, "minProperties": 1, "maxProperties": 2}, MAPS
    yield {"type": "object", "additionalProperties": {"type": "object", "properties": {"x": INTEGER}, "required": ["x"]}}, [{"a": {}}, {"a": {"x": 1, "y": 2}}, {"a": {"x": "1"}}, {"a": None}, {"a b": {"x": "y"}}]
    yield {"type": "object", "additionalProperties": True}, MAPS
    yield {"type": "object", "additionalProperties": {"type": "integer", "nullable": True, "default": 1}}, MAPS
    yield {"type": "object", "x-kubernetes-preserve-unknown-fields": True}, MAPS
    yield {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {"a": {"type": "object", "properties": {"b": STRING}}}}, MAPS + [{"a": {"b": "c", "d": 1}, "z": {"y": [None]}}, {"a": {"b": 1}}]
    yield {"x-kubernetes-preserve-unknown-fields": True}, MAPS + [5, "x", [1, {"a": None}], True]
    yield {"x-kubernetes-int-or-string": True}, [1, "a", 1.5, True, None, "", [], {}, 9223372036854775808, -1]
    yield {"x-kubernetes-int-or-string": True, "pattern": "^[0-9]+%?$", "maxLength": 4}, [1, "5%", "x", "12345", 12345]
    yield {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}], "minimum": 2}, [1, 3, "1", "x"]
    yield {"type": "object", "x-kubernetes-embedded-resource": True, "x-kubernetes-preserve-unknown-fields": True}, [
        {}, {"apiVersion": "v1", "kind": "Pod"}, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "bogus": 1}, "x": 1}, {"apiVersion": "v1"}, {"kind": "Pod"}, {"apiVersion": "a/b/c", "kind": "Pod", "metadata": {"name": "A b"}}, {"apiVersion": "v1", "kind": "a b", "metadata": {"labels": {"a": 1}}}, {"apiVersion": "v1", "kind": "Pod", "metadata": "x"}, {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": {"a b": "c"}, "finalizers": ["x"], "creationTimestamp": "z"}}, None, "x"]
    yield {"type": "object", "x-kubernetes-embedded-resource": True, "properties": {"spec": {"type": "object", "properties": {"a": STRING}}, "metadata": {"type": "object", "properties": {"name": {"type": "string", "pattern": "^b"}}}}}, [{"apiVersion": "v1", "kind": "Pod", "spec": {"a": 1}}, {"apiVersion": "v1", "kind": "Pod", "spec": {"a": "1", "b": 1}, "x": 1, "metadata": {"name": "a"}}, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "b", "labels": {"a": "b"}, "z": 1}}]
    yield {"type": "object", "properties": {"a": STRING, "b": STRING, "c": INTEGER}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{}, {"a": "x"}, {"a": "x", "b": "y"}, {"a": 5}, {"c": "x"}]
    yield {"type": "object", "properties": {"a": STRING, "b": STRING}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {"enum": ["x"]}}, "required": ["b"]}]}, [{}, {"a": "x"}, {"b": "x"}, {"b": "y"}, {"a": "x", "b": "y"}]
    yield {"type": "object", "properties": {"a": STRING, "b": STRING}, "allOf": [{"required": ["a"]}, {"properties": {"b": {"minLength": 2}}}, {"maxProperties": 1}]}, [{}, {"a": "x"}, {"b": "y"}, {"a": "x", "b": "y"}]
    yield {"type": "object", "properties": {"a": {"type": "string", "not": {"enum": ["x"]}}, "b": {"type": "integer", "not": {"minimum": 5}}}}, [{"a": "x"}, {"a": "y"}, {"b": 5}, {"b": 4}, {"a": "x", "b": 9}]
    yield {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ["a", "b", "ab", "c", 5]
    yield from ruled()
    yield from formats()


def ruled():
    for text, more in (("self == 'a'", {}), ("self.size() < 3", {"message": "short ones only"}), ("self.matches('^a')", {"messageExpression": "'not a: ' + self"}), ("self.startsWith('a')", {"reason": "FieldValueForbidden"}), ("self != 'abc'", {"reason": "FieldValueDuplicate"}), ("self.size() > 0", {"reason": "FieldValueRequired"}), ("isQuantity(self) && quantity(self).isLessThan(quantity('1Gi'))", {}), ("isURL(self) && url(self).getScheme() == 'https'", {}), ("isIP(self)", {}), ("isCIDR(self)", {}),
                       ("self.lowerAscii() == self", {"message": "lower case", "reason": "FieldValueInvalid"}), ("duration(self) < duration('1h')", {}), ("timestamp(self) > timestamp('2020-01-01T00:00:00Z')", {}), ("self.charAt(5) == 'a'", {}), ("int(self) > 1", {}), ("self.split(',').all(x, x.size() > 0)", {}), ("format.dns1123Label().validate(self).hasValue() == false", {}), ("!format.named('uuid').hasValue() || true", {}), ("isSemver(self)", {}), ("self == oldSelf", {"message": "immutable"}), ("self.find('[0-9]+') != ''", {}), ("self.trim().size() == self.size()", {"messageExpression": "self.trim()"}), ("self.replace('a', 'b') != 'b'", {}), ("false", {"messageExpression": "''"}), ("false", {"messageExpression": "'a\\nb'"}), ("false", {"messageExpression": "self.charAt(50)", "message": "fallback"}), ("false", {"message": "a message", "messageExpression": "'x' + string(1/0)"})):
        yield rule({"type": "string", "maxLength": 40}, text, **more), ["a", "", "abc", "A", "1Mi", "2Gi", "https://a.b/c", "http://a", "10.0.0.1", "10.0.0.0/8", "5", "1h", "30m", "2021-01-01T00:00:00Z", "a,,b", "1.2.3", " a", "é"]
    for text, more in (("self >= 1 && self <= 5", {}), ("self % 2 == 0", {"message": "even"}), ("10 / self > 1", {}), ("self + 9223372036854775800 > 0", {}), ("self >= oldSelf", {}), ("!oldSelf.hasValue() || self >= oldSelf.value()", {"optionalOldSelf": True}), ("self in [1, 2, 3]", {"reason": "FieldValueInvalid", "message": "small"}), ("string(self) == '5'", {"messageExpression": "'is ' + string(self)"})):
        yield rule(INTEGER, text, **more), [0, 1, 5, 6, -2, 2, 9223372036854775807]
    for text, more in (("self.all(x, x.startsWith('a'))", {}), ("self.exists(x, x == 'a')", {}), ("self.exists_one(x, x == 'a')", {}), ("self.size() < 3", {}), ("self.isSorted()", {}), ("self.indexOf('a') == 0", {}), ("self[0] == 'a'", {}), ("self == oldSelf", {}), ("sets.contains(self, ['a'])", {}), ("self.filter(x, x == 'a').size() > 0", {}), ("self.map(x, x.size()).sum() < 4", {}), ("self.max() == 'b'", {}), ("self.all(i, x, x.size() > i)", {})):
        yield rule({"type": "array", "maxItems": 10, "items": {"type": "string", "maxLength": 5}}, text, **more), [[], ["a"], ["b", "a"], ["a", "b"], ["a", "a"], ["abc", "ab", "a"]]
    for text, more in (("has(self.a)", {}), ("!has(self.b) || self.b < 5", {"fieldPath": ".b"}), ("self.a == 'x'", {}), ("has(self.a) != has(self.b)", {"message": "one of them"}), ("self.?b.orValue(1) > 1", {}), ("self.m.all(k, self.m[k] == 'v')", {}), ("'k' in self.m", {"fieldPath": ".m"}), ("self.l.all(x, x.n != '')", {"fieldPath": ".l"}), ("self.o.p == 1", {}), ("self.__namespace__ == 'x'", {}), ("self.a__dash__b == 'x'", {"fieldPath": "['a-b']"}), ("self.ip == 5 || self.ip == 'x'", {}), ("type(self.ip) == int", {}), ("self == oldSelf", {}), ("self.b <= oldSelf.b", {"reason": "FieldValueForbidden", "fieldPath": ".b"}), ("self.set == ['a','b']", {}), ("self.map1 == oldSelf.map1", {}), ("self.any1.x == 1", {}), ("self.t > timestamp('2020-01-01T00:00:00Z')", {}), ("self.d < duration('1h')", {}), ("self.y == b'abc'", {})):
        inner = {"a": {"type": "string", "maxLength": 10}, "b": INTEGER, "m": {"type": "object", "maxProperties": 5, "additionalProperties": {"type": "string", "maxLength": 10}}, "l": {"type": "array", "maxItems": 5, "items": {"type": "object", "properties": {"n": {"type": "string", "maxLength": 10}}}}, "o": {"type": "object", "properties": {"p": INTEGER}}, "namespace": {"type": "string", "maxLength": 5}, "a-b": {"type": "string", "maxLength": 5}, "ip": {"x-kubernetes-int-or-string": True}, "set": {"type": "array", "maxItems": 5, "x-kubernetes-list-type": "set", "items": {"type": "string", "maxLength": 5}},
                 "map1": {"type": "array", "maxItems": 5, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"], "items": {"type": "object", "required": ["k"], "properties": {"k": {"type": "string", "maxLength": 5}, "v": INTEGER}}}, "any1": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}, "t": {"type": "string", "format": "date-time"}, "d": {"type": "string", "format": "duration"}, "y": {"type": "string", "format": "byte", "maxLength": 10}}
        yield rule({"type": "object", "properties": inner}, text, **more), [{}, {"a": "x"}, {"b": 7}, {"a": "x", "b": 1}, {"m": {"k": "v"}, "l": [{"n": ""}, {}], "o": {"p": 1}}, {"namespace": "x", "a-b": "y", "ip": 5}, {"ip": "x", "set": ["b", "a"], "map1": [{"k": "b"}, {"k": "a", "v": 1}]}, {"any1": {"x": 1}, "t": "2021-01-01T00:00:00Z", "d": "30m", "y": "YWJj"}, {"any1": 5, "t": "x", "d": "x", "y": "!"}]


SCHEMAS = list(schemas())


def definition(plural, kind, schema, **version):
    return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": f"{plural}.{GROUP}"},
            "spec": {"group": GROUP, "scope": "Namespaced", "names": {"plural": plural, "kind": kind},
                     "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}, **version}]}}


def all_definitions():
    """What must be there before the first case. One with several properties at once, beside those of each schema."""
    for number, (schema, _) in enumerate(SCHEMAS):
        yield definition(f"things{number}", f"Thing{number}", {"type": "object", "properties": {"f": schema}})


def cases():
    yield from of_values()
    yield from of_definitions()


def of_values():
    for number, (schema, values) in enumerate(SCHEMAS):
        path = f"/apis/{GROUP}/v1/namespaces/NS/things{number}"
        own = {"apiVersion": f"{GROUP}/v1", "kind": f"Thing{number}", "metadata": {"name": "NAME"}}
        for value in values:
            body = {**own, "f": value}
            for query in ([DRY], [DRY, ["fieldValidation", "Strict"]]):
                yield [{"method": "POST", "path": path, "query": query, "body": body, "edits": []}]
            yield [{"method": "PATCH", "path": f"{path}/NAME", "query": [["fieldManager", "m"]], "body": body, "edits": [], "kind": APPLY}, {"method": "GET", "path": f"{path}/NAME", "query": []}]
            for other in (values[0], values[-1], values[len(values) // 2]):
                yield [{"method": "POST", "path": path, "query": [], "body": body, "edits": []}, {"method": "PATCH", "path": f"{path}/NAME", "query": [], "body": {"f": other}, "edits": [], "kind": MERGE}]
        yield [{"method": "POST", "path": path, "query": [], "body": own, "edits": []}, {"method": "PATCH", "path": f"{path}/NAME", "query": [], "body": {"f": values[0]}, "edits": [], "kind": MERGE}]


def of_definitions():
    """Schemas and definitions with one thing wrong, or unusual."""
    bad = [{}, {"type": "odd"}, {"type": ""}, {"type": "object", "properties": {"a": {}}}, {"type": "array"}, {"type": "array", "items": {}}, {"type": "array", "items": [STRING]}, {"type": "string", "items": STRING}, {"type": "string", "default": 5}, {"type": "integer", "default": 1.5}, {"type": "string", "default": None}, {"type": "object", "default": {"x": 1}}, {"type": "object", "default": {"a": 1}, "properties": {"a": STRING}}, {"type": "string", "enum": []}, {"type": "string", "enum": ["a", "a"]}, {"type": "string", "enum": [1]}, {"type": "string", "pattern": "("}, {"type": "string", "pattern": "a{99999}"}, {"type": "string", "format": "odd"}, {"type": "string", "minLength": -1}, {"type": "string", "minLength": 5, "maxLength": 1}, {"type": "integer", "multipleOf": 0}, {"type": "integer", "multipleOf": -1}, {"type": "integer", "minimum": 5, "maximum": 1}, {"type": "integer", "exclusiveMinimum": True},
           {"$ref": "#/a"}, {"type": "string", "$ref": "x"}, {"type": "string", "$schema": "x"}, {"type": "string", "id": "x"}, {"type": "object", "definitions": {"a": STRING}}, {"type": "object", "dependencies": {"a": ["b"]}}, {"type": "object", "patternProperties": {"a": STRING}}, {"type": "object", "additionalProperties": False}, {"type": "object", "additionalProperties": STRING, "properties": {"a": STRING}}, {"type": "object", "additionalItems": True}, {"type": "array", "items": STRING, "additionalItems": False}, {"type": "array", "items": STRING, "uniqueItems": True}, {"type": "array", "items": STRING, "x-kubernetes-list-type": "map"}, {"type": "array", "items": STRING, "x-kubernetes-list-type": "odd"}, {"type": "array", "items": OBJECT, "x-kubernetes-list-type": "set"}, {"type": "array", "items": OBJECT, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["a"]}, {"type": "array", "items": {"type": "object", "properties": {"a": STRING}}, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["a"]}, {"type": "array", "items": {"type": "object", "properties": {"a": STRING}, "required": ["a"]}, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["a", "a"]}, {"type": "array", "items": STRING, "x-kubernetes-list-map-keys": ["a"]}, {"type": "string", "x-kubernetes-list-type": "set"}, {"type": "object", "x-kubernetes-map-type": "odd"}, {"type": "string", "x-kubernetes-map-type": "atomic"},
           {"type": "string", "x-kubernetes-int-or-string": True}, {"type": "object", "x-kubernetes-preserve-unknown-fields": False}, {"type": "string", "x-kubernetes-preserve-unknown-fields": True}, {"type": "object", "x-kubernetes-embedded-resource": True}, {"type": "string", "x-kubernetes-embedded-resource": True}, {"type": "object", "oneOf": [{"type": "object"}]}, {"type": "object", "oneOf": [{"properties": {"a": STRING}}]}, {"type": "object", "oneOf": [{"properties": {"a": {"default": 1}}}], "properties": {"a": INTEGER}}, {"type": "object", "anyOf": [{"description": "x"}]}, {"type": "object", "not": {"properties": {"b": {}}}}, {"type": "object", "allOf": [{"nullable": True}]}, {"type": "object", "allOf": [{"x-kubernetes-preserve-unknown-fields": True}]}, {"type": "object", "nullable": True, "default": None}, {"type": "object", "required": ["zz"]}, {"type": "object", "required": [""]}, {"type": "object", "title": "t", "description": "d", "example": {"a": 1}, "externalDocs": {"url": "u"}}, {"type": "object", "bogus": 1}, {"type": "object", "properties": {"metadata": {"type": "object", "properties": {"name": STRING}}}},
           {"type": "object", "properties": {"": STRING}}, {"type": "object", "properties": {"a b": STRING}}, {"type": "object", "minProperties": -1}, {"type": "array", "items": STRING, "minItems": 3, "maxItems": 1}, {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": STRING}}}, {"type": "integer", "format": "int16"}, {"type": "string", "maxLength": 1, "default": "abc"}, {"type": "array", "items": {"type": "string", "default": "x"}}, {"type": "object", "properties": {"a": {"type": "string", "default": "x"}}, "additionalProperties": True}, {"type": "object", "additionalProperties": {"type": "string", "default": "x"}},
           rule(STRING, "self =="), rule(STRING, ""), rule(STRING, " "), rule(STRING, "self"), rule(STRING, "self == 1"), rule(STRING, "self.a"), rule(STRING, "nope(self)"), rule(STRING, "self.matches('(')"), rule(STRING, "self == 'a'", message="a\nb"), rule(STRING, "self == 'a'", message=" "), rule(STRING, "self == 'a'", message="a" * 3000), rule(STRING, "self == 'a'", messageExpression="1"), rule(STRING, "self == 'a'", messageExpression="self +"), rule(STRING, "self == 'a'", messageExpression=""), rule(STRING, "self == 'a'", reason="Odd"), rule(STRING, "self == 'a'", fieldPath=".a"), rule(STRING, "self == 'a'", optionalOldSelf=True), rule(STRING, "self == oldSelf", optionalOldSelf=True), rule({"type": "object", "properties": {"a": STRING}}, "self.a == 'a'", fieldPath=".b"), rule({"type": "object", "properties": {"a": STRING}}, "self.a == 'a'", fieldPath="a"), rule({"type": "object", "properties": {"a": STRING}}, "self.a == 'a'", fieldPath=".a[0]"), rule({"type": "object", "properties": {"a": STRING}}, "self.a == 'a'", fieldPath=""), rule({"type": "object", "properties": {"a": STRING}}, "self.b == 'a'"), rule({"type": "object", "properties": {"a": STRING}}, "self.a == 'a' && self.a.b"), rule({"type": "array", "items": STRING}, "self.all(x, self.all(y, x == y))"), rule({"type": "array", "items": STRING}, "self.all(x, x == oldSelf[0])"), {"type": "array", "items": rule(STRING, "self == oldSelf")}, {"type": "array", "items": rule({"type": "string"}, "self.matches('a+')")}, {"type": "object", "additionalProperties": rule(STRING, "self.contains('a')")}, {"type": "array", "items": {"type": "array", "items": rule(STRING, "self.matches('a+')")}}, rule({"type": "object", "properties": {"a": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}, "self.a.b == 1"), rule({"type": "array", "items": {"type": "array", "items": {"type": "array", "items": STRING}}}, "self.all(x, x.all(y, y.all(z, z.contains('a'))))"), rule(OBJECT, "self.metadata.name == 'a'"), rule({"x-kubernetes-preserve-unknown-fields": True}, "self == 1"), rule({"x-kubernetes-int-or-string": True}, "self == 1"), rule(STRING, "self.size() > 2 ? true : 'x'"), rule(STRING, "[1, 2].sort() == [1]"), rule(STRING, "self == 'a' || has(self)"), rule(STRING, "self.startsWith(1)"), rule(STRING, "self[0] == 'a'"), rule(INTEGER, "self == 1.0"), rule(INTEGER, "self + 1.0 > 2"), rule(INTEGER, "self > '1'"), rule(STRING, "'" + "a" * 2000 + "' == self")]
    for schema in bad:
        yield [{"method": "POST", "path": DEFINITIONS, "query": [DRY], "body": definition("odds", "Odd", {"type": "object", "properties": {"f": schema}}), "edits": []}]
        yield [{"method": "POST", "path": DEFINITIONS, "query": [DRY], "body": definition("odds", "Odd", schema), "edits": []}]
    for schema, _ in SCHEMAS:
        yield [{"method": "POST", "path": DEFINITIONS, "query": [DRY], "body": definition("odds", "Odd", {"type": "object", "properties": {"f": schema}}), "edits": []}]
        yield [{"method": "POST", "path": DEFINITIONS, "query": [DRY], "body": definition("odds", "Odd", {"type": "object", "properties": {"f": {"type": "array", "items": schema}}}), "edits": []}]
    good = definition("odds", "Odd", {"type": "object"})
    for edits in whole():
        body = copy.deepcopy(good)
        yield [{"method": "POST", "path": DEFINITIONS, "query": [DRY], "body": body, "edits": edits}]
    for which in range(0, len(SCHEMAS), 3):
        # Changes of a definition that is there.
        at = f"{DEFINITIONS}/things{which}.{GROUP}"
        for edits in list(whole())[which % 7::7]:
            yield [{"method": "PUT", "path": at, "query": [DRY], "of": at, "edits": edits}]


def whole():
    spec, version = ["spec"], ["spec", "versions", 0]
    changes = [(["metadata", "name"], name) for name in ("odds", "odds.other", "Odds." + GROUP, "", "x." + GROUP)]
    changes += [(spec + ["group"], group) for group in ("", "a", "A.b", "a.k8s.io", "x.kubernetes.io", "a b", "other.example.com")]
    changes += [(spec + ["scope"], scope) for scope in ("", "Cluster", "Odd", None)]
    for field, values in {"plural": ["", "Odds", "a.b", "x" * 64], "singular": ["", "Odd", "a b", "odd"], "kind": ["", "odd", "O d", "ConfigMap", "1x"], "listKind": ["", "Odd", "oddlist", "OddList"], "shortNames": [[""], ["A"], ["o", "o"], ["a b"], []], "categories": [[""], ["A"], ["all", "all"], ["a b"]]}.items():
        changes += [(spec + ["names", field], value) for value in values]
    changes += [(spec + ["names"], {}), (spec + ["names"], None), (spec + ["versions"], []), (spec + ["versions"], None), (spec + ["versions"], [{}]), (spec + ["preserveUnknownFields"], True), (spec + ["preserveUnknownFields"], False), (spec + ["conversion"], {}), (spec + ["conversion"], {"strategy": "Odd"}), (spec + ["conversion"], {"strategy": "Webhook"}), (spec + ["conversion"], {"strategy": "None", "webhook": {"conversionReviewVersions": ["v1"]}}), (spec + ["conversion"], {"strategy": "Webhook", "webhook": {"conversionReviewVersions": [], "clientConfig": {}}}), (spec + ["conversion"], {"strategy": "Webhook", "webhook": {"conversionReviewVersions": ["v9"], "clientConfig": {"url": "http://a"}}}), (spec + ["conversion"], {"strategy": "Webhook", "webhook": {"conversionReviewVersions": ["v1"], "clientConfig": {"service": {"name": "", "namespace": ""}}}}), (spec + ["conversion"], {"strategy": "Webhook", "webhook": {"conversionReviewVersions": ["v1", "v1"], "clientConfig": {"service": {"name": "a", "namespace": "b", "port": 0, "path": "x"}, "caBundle": "eA=="}}})]
    changes += [(version + ["name"], name) for name in ("", "V1", "v1.0", "x" * 64, "v1beta1")]
    changes += [(version + ["served"], False), (version + ["storage"], False), (version + ["served"], None), (version + ["schema"], None), (version + ["schema"], {}), (version + ["deprecated"], True), (version + ["deprecationWarning"], "x"), (version + ["deprecationWarning"], ""), (version + ["subresources"], {}), (version + ["subresources"], {"status": {}}), (version + ["subresources"], {"scale": {}}), (version + ["subresources"], {"scale": {"specReplicasPath": "spec.replicas", "statusReplicasPath": ".status"}}), (version + ["subresources"], {"scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas", "labelSelectorPath": ".x"}}), (version + ["subresources"], {"scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas", "labelSelectorPath": ""}})]
    changes += [(version + ["additionalPrinterColumns"], value) for value in ([], [{}], [{"name": "a", "type": "string", "jsonPath": ".a"}] * 2, [{"name": "", "type": "odd", "jsonPath": "x"}], [{"name": "a", "type": "string", "jsonPath": "{.a}"}], [{"name": "a", "type": "string", "jsonPath": ".a[", "format": "odd"}], [{"name": "a", "type": "string"}], [{"name": "a", "type": "date", "jsonPath": ".metadata.creationTimestamp", "priority": -1}], [{"name": "a", "type": "integer", "jsonPath": ".a", "format": "int128"}])]
    changes += [(version + ["selectableFields"], value) for value in ([], [{}], [{"jsonPath": ".a"}], [{"jsonPath": "a"}], [{"jsonPath": ".metadata.name"}], [{"jsonPath": ".a"}] * 2, [{"jsonPath": ".a[0]"}])]
    second = {"name": "v2", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
    changes += [(spec + ["versions", "-"], value) for value in (second, {**second, "storage": False}, {**second, "name": "v1", "storage": False}, {"name": "v2"}, {**second, "storage": False, "schema": {"openAPIV3Schema": {"type": "object", "properties": {"a": {"type": "odd"}}}}}, {**second, "storage": False, "subresources": {"status": {}}})]
    for place, value in changes:
        yield [[place, "set", value]]
        if value != "":
            yield [[place, "remove", None]]


def source():
    import grid
    return grid.Cases(cases)
