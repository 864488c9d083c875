"""The rules by which answers of both servers are made comparable, and the comparison.

In: two answers. Out: the first difference, and its class: the words by which findings are counted and listed.
The same rules hold for both sides. Each removes a fact that no two servers share:

    uid             numbered in the order of appearance within a case
    time            of the last or next hour becomes <time>; any other stays
    revision        resourceVersion, continue tokens, and revisions in messages
    allocated       cluster IPs and node ports that no request named, numbered
    generated name  the five characters after a generateName
    age             in Tables
    token           of ServiceAccounts
    scheme          the place in upstream's source that an error for an unknown kind names
    address         of the server itself, in the documents of its issuer
    allowing role   of several that allow the same
    missing roles   that a refusal lists: bindings of other cases name them, in random order
    number          1 and 1.0 are the same JSON
    rules of a user in a review are sorted: upstream's order is that of a map
    several causes of one field are sorted: upstream reports those of a map in random order
"""
import json
import re
import time

import yaml

UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z| \+0000 UTC)(?: m=\+[\d.]+)?")
# The name of a registry of types is the place in the source that made it, as the program's build shows it.
SCHEME = re.compile(r'(in scheme \\*")[^"\\]*')
# Bindings of cases that just end name roles that are gone.
MISSING_ROLES = re.compile(r"(: |\n)RBAC: .*not found\]?")
# Fields of maps whose keys are names of resources.
AMOUNTS = re.compile(r"(\.(limits|requests|capacity|allocatable|hard|used|podFixed|default|defaultRequest|max|min|maxLimitRequestRatio))\..*")
OWN_ADDRESS = re.compile(r"https://(127\.0\.0\.1|10\.1\.2\.9):\d+")
ALLOWED = re.compile(r"RBAC: allowed by .*")
NODE_PORT = re.compile(r"\b3[0-2]\d{3}\b")
SERVICE_IP = re.compile(r"\b10\.43\.\d+\.\d+\b")
REVISIONS = [
    (re.compile(r"(resource version: \d+, current: )\d+"), r"\1<rv>"),
    (re.compile(r"(too old resource version: )\d+ \(\d+\)"), r"\1<rv>"),
    (re.compile(r'(resourceVersion\\*":\\*")\d+'), r"\1<rv>"),
    (re.compile(r"(ResourceVersion in precondition: \d+, ResourceVersion in object meta: )\d+"), r"\1<rv>"),
    (re.compile(r"(the ResourceVersion in the precondition \(\d+\) does not match the ResourceVersion in record \()\d+"), r"\1<rv>"),
]
HEADERS = ("content-type", "warning", "retry-after", "allow", "location", "cache-control", "www-authenticate",
           "content-encoding", "x-content-type-options")
AGE = re.compile(r"^\d+(s|m\d*s?|h|d)$")
SUFFIX = r"[bcdfghjklmnpqrstvwxz2456789]{5}\b"


class Normal:
    """The names of one side within one case."""

    def __init__(self, named, prefixes=()):
        self.named, self.uids, self.addresses, self.ports = named, {}, {}, {}
        # The volume of a pod's token has a generated name, too.
        self.prefixes = ["kube-api-access-", *filter(None, prefixes)]

    def uid(self, match):
        found = match.group(0)
        if found in self.named:
            return found
        return self.uids.setdefault(found, f"<uid {len(self.uids) + 1}>")

    def address(self, match):
        found = match.group(0)
        if found in self.named:
            return found
        return self.addresses.setdefault(found, f"<ip {len(self.addresses) + 1}>")

    def port(self, match):
        found = match.group(0)
        if found in self.named or not 30000 <= int(found) <= 32767:
            return found
        return self.ports.setdefault(found, f"<port {len(self.ports) + 1}>")

    @staticmethod
    def time(match):
        found = match.group(0)
        try:
            then = time.mktime(time.strptime(found[:19].replace(" ", "T"), "%Y-%m-%dT%H:%M:%S")) - time.timezone
        except ValueError:
            return found
        if abs(then - time.time()) > 3700:
            return found
        return "<microtime>" if "." in found else "<time>"

    def text(self, value):
        if len(value) > 18:
            value = TIME.sub(self.time, UID.sub(self.uid, value))
            for pattern, by in REVISIONS:
                value = pattern.sub(by, value)
            value = ALLOWED.sub("RBAC: allowed", OWN_ADDRESS.sub("<server>", value))
            value = MISSING_ROLES.sub("", SCHEME.sub(r"\1<scheme>", NODE_PORT.sub(self.port, value)))
        if "10.43." in value:
            value = SERVICE_IP.sub(self.address, value)
        for prefix in self.prefixes:
            if prefix in value:
                value = re.sub(re.escape(prefix) + SUFFIX, lambda _, prefix=prefix: prefix + "<name>", value)
        return value

    def tree(self, value, key=""):
        if isinstance(value, dict):
            generated = value.get("generateName")
            if isinstance(generated, str) and generated and generated not in self.prefixes:
                # The beginning of a long one.
                self.prefixes.append(generated[:58])
            # The name comes before uids that refer to it: upstream's order of fields.
            return {name: self.tree(item, name) for name, item in sorted(value.items())}
        if isinstance(value, list):
            out = [self.tree(item, key) for item in value]
            return sorted(out, key=json.dumps) if key in ("resourceRules", "nonResourceRules") and out and "verbs" in out[0] else out
        if isinstance(value, str):
            if key == "resourceVersion" and value not in ("", "0"):
                return "<rv>" if value not in self.named else value
            if key == "continue" and value:
                return "<continue>"
            if key == "token" and value.count(".") == 2:
                return "<token>"
            if key == "cells" and AGE.match(value):
                return "<age>"
            if key == "evaluationError":
                return MISSING_ROLES.sub("", f": RBAC: {value}")
            return self.text(value)
        if isinstance(value, int) and not isinstance(value, bool) and key in ("nodePort", "healthCheckNodePort"):
            return NODE_PORT.sub(self.port, str(value))
        return value

    def answer(self, answer):
        kept = {}
        for name, value in answer.headers:
            if name.lower() in HEADERS:
                kept.setdefault(name.lower(), []).append(self.text(value))
        body = answer.json()
        if body is None:
            kind = (kept.get("content-type") or [""])[0]
            text = answer.body.decode("utf-8", "replace")
            if "yaml" in kind:
                body = causes(self.tree(yaml.load(text, yaml.CBaseLoader)))
            else:
                body = self.text(text) if kind.startswith("text/") else "<%s>" % kind
        else:
            body = causes(self.tree(body))
        return {"status": answer.status, "body": body, "headers": kept}


def causes(body):
    """Causes of one field are sorted, and the message, which repeats them in the same order, is left to them."""
    if not isinstance(body, dict) or body.get("kind") != "Status":
        return body
    details = body.get("details")
    found = details.get("causes") if isinstance(details, dict) else None
    if not isinstance(found, list) or len(found) < 2:
        return body
    at, is_custom = 0, str(details.get("group", "")).endswith("example.com")
    while at < len(found):
        end = at
        while end < len(found) and field_of(found[end], is_custom) == field_of(found[at], is_custom):
            end += 1
        found[at:end] = sorted(found[at:end], key=lambda cause: json.dumps(cause, sort_keys=True))
        at = end
    if str(body.get("message", "")).count(": ["):
        body["message"] = body["message"].split(": [", 1)[0] + ": [<causes>]"
    return body


def field_of(cause, is_custom=False):
    # The keys of a map come in random order; properties of a custom resource are one.
    if is_custom:
        return ""
    field = cause.get("field", "") if isinstance(cause, dict) else ""
    return AMOUNTS.sub(r"\1", re.sub(r"\[(?!\d+\]).*", "", field))


def difference(theirs, ours, path=""):
    """The first difference of two trees: path, their value, our value; `...` stands for an absent one."""
    if type(theirs) is not type(ours) and not (is_number(theirs) and is_number(ours)):
        return path, theirs, ours
    if isinstance(theirs, dict):
        keys = list(theirs) + [key for key in ours if key not in theirs]
        for key in sorted(keys, key=lambda key: (key != "status", key != "code", key == "message", key == "managedFields")):
            if key not in theirs or key not in ours:
                return f"{path}.{key}", theirs.get(key, ...), ours.get(key, ...)
            found = difference(theirs[key], ours[key], f"{path}.{key}")
            if found:
                return found
        return None
    if isinstance(theirs, list):
        for at, (one, two) in enumerate(zip(theirs, ours)):
            found = difference(one, two, f"{path}[{at}]")
            if found:
                return found
        if len(theirs) != len(ours):
            at = min(len(theirs), len(ours))
            return (f"{path}[{at}]", theirs[at] if at < len(theirs) else ..., ours[at] if at < len(ours) else ...)
        return None
    return None if theirs == ours else (path, theirs, ours)


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def class_of(found, theirs, ours):
    """What findings of one kind have in common."""
    path, one, two = found
    path = re.sub(r"\[\d+\]", "[]", path)
    path = re.sub(r"\.(f|k|v):[^.]*", "", path)
    if theirs["status"] != ours["status"]:
        reason = f"{theirs['status']} {rough(message(theirs))} | {ours['status']} {rough(message(ours))}"
        return reason
    return f"{theirs['status']} {path}: {rough(one)} | {rough(two)}"


def message(answer):
    body = answer["body"]
    if isinstance(body, dict) and body.get("kind") == "Status":
        details = body.get("details") or {}
        found = details.get("causes") or []
        if found:
            return f"{found[0].get('field')}: {found[0].get('message')}"
        return body.get("message", "")
    return "" if isinstance(body, dict) else body


def rough(value):
    """A value without its numbers and quoted words."""
    if value is ...:
        return "absent"
    if isinstance(value, dict) and "message" in value and ("field" in value or "reason" in value):
        value = f"{value.get('field')}: {value['message']}"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text) if isinstance(value, str) else text
    text = re.sub(r"t\d+x[0-9a-z]+", "NAME", text)
    return re.sub(r"\d+", "0", text)[:110].replace("\n", " ")
