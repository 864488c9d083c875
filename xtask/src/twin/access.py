"""Who may do what: impersonated users, service accounts and nodes, requests without a certificate, tokens, reviews.

In: a number. Out: the steps of a case. Each server decides by the roles that it made itself at its start; a case
makes what else it needs.
"""
RBAC = "/apis/rbac.authorization.k8s.io/v1"
REVIEWS = "/apis/authorization.k8s.io/v1"
USERS = {
    "mallory": [["Impersonate-User", "mallory"], ["Impersonate-Group", "system:authenticated"]],
    "alone": [["Impersonate-User", "mallory"]],
    "bot": [["Impersonate-User", "system:serviceaccount:NS:bot"], ["Impersonate-Group", "system:serviceaccounts"], ["Impersonate-Group", "system:serviceaccounts:NS"], ["Impersonate-Group", "system:authenticated"]],
    "short-bot": [["Impersonate-User", "system:serviceaccount:NS:default"]],
    "node": [["Impersonate-User", "system:node:n"], ["Impersonate-Group", "system:nodes"], ["Impersonate-Group", "system:authenticated"]],
    "node-alone": [["Impersonate-User", "system:node:n"]],
    "odd-node": [["Impersonate-User", "n"], ["Impersonate-Group", "system:nodes"]],
    "anonymous": [["Impersonate-User", "system:anonymous"]],
    "unauthenticated": [["Impersonate-User", "system:anonymous"], ["Impersonate-Group", "system:unauthenticated"]],
    "masters": [["Impersonate-User", "root"], ["Impersonate-Group", "system:masters"]],
    "controllers": [["Impersonate-User", "system:kube-controller-manager"]],
    "scheduler": [["Impersonate-User", "system:kube-scheduler"]],
    "proxy": [["Impersonate-User", "system:kube-proxy"]],
    "gc": [["Impersonate-User", "system:serviceaccount:kube-system:generic-garbage-collector"]],
    "extra": [["Impersonate-User", "e"], ["Impersonate-Extra-Scopes", "a"], ["Impersonate-Extra-a%2fb", "c"], ["Impersonate-Uid", "u"]],
    "only-group": [["Impersonate-Group", "a"]],
    "only-uid": [["Impersonate-Uid", "a"]],
    "only-extra": [["Impersonate-Extra-A", "a"]],
    "empty": [["Impersonate-User", ""]],
}
PATHS = ["/api", "/apis", "/api/v1", "/apis/apps/v1", "/version", "/healthz", "/livez", "/readyz", "/metrics", "/openapi/v2", "/openapi/v3", "/logs", "/", "/none", "/api/v1/nodes", "/api/v1/nodes/n", "/api/v1/nodes/other", "/api/v1/nodes/n/status", "/api/v1/nodes/n/proxy/a", "/api/v1/pods", "/api/v1/pods?watch=1", "/api/v1/pods?fieldSelector=spec.nodeName%3Dn",
         "/api/v1/pods?fieldSelector=spec.nodeName%3Dother", "/api/v1/namespaces", "/api/v1/namespaces/NS", "/api/v1/namespaces/NS/pods", "/api/v1/namespaces/NS/pods/x", "/api/v1/namespaces/NS/pods/x/log", "/api/v1/namespaces/NS/pods/x/exec", "/api/v1/namespaces/NS/services/x/proxy/a", "/api/v1/namespaces/NS/secrets", "/api/v1/namespaces/NS/secrets/x", "/api/v1/namespaces/NS/configmaps/x",
         "/api/v1/namespaces/NS/persistentvolumeclaims/x", "/api/v1/persistentvolumes/x", "/api/v1/replicationcontrollers", "/apis/apps/v1/namespaces/NS/deployments/x/scale", "/apis/apps/v1/namespaces/NS/deployments/x/status", "/apis/apps/v1/deployments", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/other", "/apis/storage.k8s.io/v1/csinodes/n", "/apis/storage.k8s.io/v1/csinodes/other",
         "/apis/storage.k8s.io/v1/volumeattachments/x", "/apis/resource.k8s.io/v1/namespaces/NS/resourceclaims/x", "/apis/resource.k8s.io/v1/resourceslices", "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3Dn", "/apis/certificates.k8s.io/v1/certificatesigningrequests", "/apis/none/v1/a", "/apis/example.com/v1/namespaces/NS/widgets", RBAC + "/clusterroles", RBAC + "/clusterroles/view", "/apis/node.k8s.io/v1/runtimeclasses/x", "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication",
         "/api/v1/namespaces/NS/serviceaccounts/default", "/apis/discovery.k8s.io/v1/endpointslices", "/.well-known/openid-configuration", "/openid/v1/jwks"]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def ask(method, path, headers, **more):
    target, _, query = path.partition("?")
    asked = [it.replace("%3D", "=").split("=", 1) for it in query.split("&") if it]
    # Some of these users may delete everything.
    asked += [["dryRun", "All"]] if method == "DELETE" else []
    step = {"method": method, "path": target, "query": asked, "headers": [list(it) for it in headers]} | more
    if method in ("POST", "PUT", "PATCH") and "body" not in step:
        step |= {"body": {}, "edits": []}
    if method == "PATCH":
        step["kind"] = "application/merge-patch+json"
    return step


def body(kind, version, name="NAME", **more):
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **more}


def cases():
    for who, headers in USERS.items():
        for path in PATHS:
            for method in METHODS if path.startswith("/api") and path.count("/") > 3 else ["GET", "POST"]:
                # Figures are each server's own; upstream waits for a node.
                if ("/proxy" in path or path == "/metrics") and who == "masters":
                    continue
                yield [ask(method, path, headers)]
        yield [ask("DELETE", "/api/v1/namespaces/NS/secrets", headers, body={}, edits=[])] if who != "masters" else []
        yield [ask("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", headers, body={"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}, edits=[])]
        for space in ("NS", "", "none-such", "kube-system"):
            yield [ask("POST", REVIEWS + "/selfsubjectrulesreviews", headers, body={"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": space}}, edits=[])]
        yield from asked(headers)
    for path in PATHS:
        for method in METHODS:
            yield [ask(method, path, [], anonymous=True)]
            yield [ask(method, path, [["Authorization", "Bearer abc"]], anonymous=True)]
    for value in ("Bearer", "Bearer ", "Basic YTpi", "Bearer a.b.c", "bearer abc", "abc", "", "Bearer a b"):
        yield [ask("GET", "/api/v1/namespaces/NS/pods", [["Authorization", value]], anonymous=True)]
        yield [ask("GET", "/api/v1/namespaces/NS/pods", [["Authorization", value]])]
    yield from roles()


def asked(headers):
    for spec in ({}, {"resourceAttributes": {}}, {"resourceAttributes": {"verb": "get", "resource": "pods", "namespace": "NS"}}, {"resourceAttributes": {"verb": "*", "resource": "*", "group": "*"}}, {"nonResourceAttributes": {"path": "/healthz", "verb": "get"}}, {"nonResourceAttributes": {}}, {"resourceAttributes": {"verb": "get", "resource": "pods"}, "nonResourceAttributes": {"path": "/", "verb": "get"}},
                 {"resourceAttributes": {"verb": "list", "resource": "pods", "fieldSelector": {"rawSelector": "a=b"}}}, {"resourceAttributes": {"verb": "list", "resource": "pods", "fieldSelector": {"rawSelector": "a=b", "requirements": []}}}, {"resourceAttributes": {"verb": "list", "resource": "pods", "labelSelector": {"requirements": [{"key": "", "operator": "In"}]}}}, {"resourceAttributes": {"verb": "list", "resource": "pods", "labelSelector": {"requirements": []}}}):
        yield [ask("POST", REVIEWS + "/selfsubjectaccessreviews", headers, body={"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}, edits=[])]


def roles():
    """Rules of privilege escalation, and what a role allows."""
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}
    for rules in ([rule], [{**rule, "resourceNames": ["a"]}], [{**rule, "verbs": ["*"]}, {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}], [{"nonResourceURLs": ["*"], "verbs": ["*"]}], [{"apiGroups": ["", "apps"], "resources": ["pods", "pods/log", "deployments"], "verbs": ["get", "list"]}], []):
        for who in ("mallory", "bot", "controllers", "node"):
            headers = USERS[who]
            # The user may write roles, but has none of their rules.
            grant = [ask("POST", RBAC + "/clusterroles", [], body=body("ClusterRole", "rbac.authorization.k8s.io/v1", rules=[{"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["*"], "verbs": ["create", "update", "patch", "get"]}]), edits=[]),
                     ask("POST", RBAC + "/clusterrolebindings", [], body=body("ClusterRoleBinding", "rbac.authorization.k8s.io/v1", roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "NAME"}, subjects=[{"kind": "User", "name": dict(map(tuple, headers))["Impersonate-User"], "apiGroup": "rbac.authorization.k8s.io"}]), edits=[])]
            role = body("Role", "rbac.authorization.k8s.io/v1", rules=rules)
            yield grant + [ask("POST", RBAC + "/namespaces/NS/roles", headers, body=role, edits=[])]
            yield grant + [ask("POST", RBAC + "/clusterroles", headers, body=body("ClusterRole", "rbac.authorization.k8s.io/v1", "NAMEx", rules=rules, aggregationRule={"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]}), edits=[])]
            yield grant + [ask("POST", RBAC + "/namespaces/NS/roles", [], body=role, edits=[]), ask("POST", RBAC + "/namespaces/NS/rolebindings", headers, body=body("RoleBinding", "rbac.authorization.k8s.io/v1", roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "NAME"}, subjects=[{"kind": "User", "name": "x"}]), edits=[])]
            yield grant + [ask("POST", RBAC + "/namespaces/NS/rolebindings", headers, body=body("RoleBinding", "rbac.authorization.k8s.io/v1", roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}, subjects=[]), edits=[])]
            yield grant + [ask("POST", RBAC + "/namespaces/NS/rolebindings", headers, body=body("RoleBinding", "rbac.authorization.k8s.io/v1", roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "none-such"}, subjects=[]), edits=[])]
            yield grant + [ask("POST", RBAC + "/namespaces/NS/roles", [], body=role, edits=[]), ask("PATCH", RBAC + "/namespaces/NS/roles/NAME", headers, body={"rules": [{**rule, "verbs": ["delete"]}]}, edits=[])]


def source():
    import grid
    return grid.Cases(lambda: (case for case in cases() if case))
