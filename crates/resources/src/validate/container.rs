//! Containers of every kind: regular, init, ephemeral.
//! Upstream: `validateContainerCommon` and what it calls.

use std::collections::{BTreeSet, HashMap, HashSet};

use machinery::names;
use release::features::{self, Feature};
use serde_json::Value;

use super::at::At;
use super::volumes::{descending, need, no_backsteps};
use super::{pod, quantity};

/// What containers refer to in their pod.
pub(crate) struct Scope<'a> {
    pub(crate) spec: At<'a>,
    /// The sound volumes, by name.
    pub(crate) volumes: HashMap<&'a str, At<'a>>,
    /// Names of the pod's resource claims.
    pub(crate) claims: BTreeSet<&'a str>,
}

impl Scope<'_> {
    fn grace(&self) -> Option<i64> {
        self.spec.get("terminationGracePeriodSeconds").number()
    }

    fn host_users(&self) -> bool {
        self.spec.get("hostUsers").value != &Value::Bool(false)
    }
}

/// The regular containers.
pub(crate) fn regular(scope: &Scope<'_>) {
    let list = scope.spec.get("containers");
    if list.is_empty() {
        return list.required("");
    }
    let mut seen = HashSet::new();
    for at in list.items() {
        common(&at, scope);
        let name = at.get("name");
        if !seen.insert(name.str()) {
            name.duplicate_text();
        }
        lifecycle_and_probes(&at, scope);
        restart_policy(&at);
    }
    host_port_conflicts(list.items());
}

pub(crate) fn init(scope: &Scope<'_>) {
    let list = scope.spec.get("initContainers");
    let mut seen: HashSet<&str> =
        scope.spec.get("containers").items().map(|at| at.get("name").str()).collect();
    for at in list.items() {
        common(&at, scope);
        let policy = at.get("restartPolicy");
        if !policy.is_set() {
            if !at.get("restartPolicyRules").is_empty() {
                policy.required("must specify restartPolicy when restart rules are used");
            }
        } else {
            restart_policy(&at);
        }
        let name = at.get("name");
        if seen.contains(name.str()) {
            name.duplicate_text();
        } else if !name.is_empty() {
            seen.insert(name.str());
        }
        // Upstream looks at each alone, as if it were the first.
        host_port_conflicts(std::iter::once(at.called(list.path.index(0))));
        let is_sidecar = policy.is("Always");
        if is_sidecar {
            lifecycle_and_probes(&at, scope);
        } else {
            for field in ["lifecycle", "livenessProbe", "readinessProbe", "startupProbe"] {
                if at.has(field) {
                    at.get(field).forbidden(
                        "may not be set for init containers without restartPolicy=Always",
                    );
                }
            }
            for rule in at.get("resizePolicy").items() {
                if rule.get("restartPolicy").is("RestartContainer") {
                    rule.get("restartPolicy").invalid(
                        "must not be set to 'RestartContainer' for non-sidecar initContainers",
                    );
                }
            }
        }
    }
}

pub(crate) fn ephemeral(scope: &Scope<'_>) {
    let of = |field: &'static str| scope.spec.get(field).items().map(|at| at.get("name").str());
    let others: HashSet<&str> = of("containers").chain(of("initContainers")).collect();
    let mut seen = others.clone();
    const UNSET: &str = "cannot be set for an Ephemeral Container";
    for at in scope.spec.get("ephemeralContainers").items() {
        common(&at, scope);
        untrimmed_image(&at);
        let name = at.get("name");
        if !seen.insert(name.str()) {
            name.duplicate_text();
        }
        let target = at.get("targetContainerName");
        if !target.is_empty() && !others.contains(target.str()) {
            target.not_found();
        }
        // A list is refused where it is there, a struct where it says something, a pointer always.
        for (field, is_pointer) in [
            ("ports", true),
            ("resources", false),
            ("resizePolicy", true),
            ("restartPolicy", true),
            ("restartPolicyRules", true),
            ("livenessProbe", true),
            ("readinessProbe", true),
            ("startupProbe", true),
            ("lifecycle", true),
        ] {
            let place = at.get(field);
            if !place.is_empty() || (is_pointer && place.is_set()) {
                place.forbidden(UNSET);
            }
        }
        for mount in at.get("volumeMounts").items() {
            for field in ["subPath", "subPathExpr"] {
                if !mount.get(field).is_empty() {
                    mount.get(field).forbidden(UNSET);
                }
            }
        }
    }
}

/// Images are not trimmed for anybody: said of pods, not of templates.
pub(crate) fn untrimmed_image(at: &At<'_>) {
    let image = at.get("image");
    if image.str().trim() != image.str() {
        image.invalid("must not have leading or trailing whitespace");
    }
}

fn common(at: &At<'_>, scope: &Scope<'_>) {
    at.get("name").need_name(names::dns1123_label);
    at.get("image").need();
    let policy = at.get("terminationMessagePolicy");
    if policy.need() {
        policy.one_of(&["File", "FallbackToLogsOnError"]);
    }
    ports(&at.get("ports"));
    env(&at.get("env"));
    env_from(&at.get("envFrom"));
    mounts(at, scope);
    devices(at, scope);
    pull_policy(&at.get("imagePullPolicy"));
    quantity::requirements(&at.get("resources"), &scope.claims);
    resize_policy(&at.get("resizePolicy"), scope.spec.get("restartPolicy").str());
    security_context(&at.get("securityContext"), scope.host_users());
}

pub(crate) fn pull_policy(at: &At<'_>) {
    if at.need() {
        at.one_of(&["Always", "IfNotPresent", "Never"]);
    }
}

const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];

pub(crate) fn protocol(at: &At<'_>) {
    if at.need() {
        at.one_of(PROTOCOLS);
    }
}

fn ports(at: &At<'_>) {
    let mut seen = HashSet::new();
    for port in at.items() {
        let name = port.get("name");
        if !name.is_empty() {
            let wrong = names::port_name(name.str());
            for why in &wrong {
                name.invalid(why);
            }
            if wrong.is_empty() && !seen.insert(name.str()) {
                name.duplicate();
            }
        }
        match port.get("containerPort").int() {
            0 => port.get("containerPort").required(""),
            _ => port.get("containerPort").port(),
        }
        if port.get("hostPort").int() != 0 {
            port.get("hostPort").port();
        }
        protocol(&port.get("protocol"));
    }
}

fn host_port_conflicts<'a>(containers: impl Iterator<Item = At<'a>>) {
    let mut seen = HashSet::new();
    for port in containers.flat_map(|at| at.get("ports").items()) {
        let host_port = port.get("hostPort");
        if host_port.int() == 0 {
            continue;
        }
        let key = (port.get("protocol").str(), port.get("hostIP").str(), host_port.int());
        if !seen.insert(key) {
            let shown = format!("{}/{}/{}", key.0, key.1, key.2);
            host_port.errors().duplicate(&host_port.path, &shown);
        }
    }
}

fn env(at: &At<'_>) {
    for variable in at.items() {
        variable.get("name").need_name(names::env_var_name);
        let from = variable.get("valueFrom");
        if from.is_set() {
            value_from(&from, &variable);
        }
    }
}

const ENV_FIELDS: &[&str] = &[
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

fn value_from(at: &At<'_>, variable: &At<'_>) {
    let mut sources = 0;
    let mut each = |name: &'static str, check: &dyn Fn(&At<'_>)| {
        if at.has(name) {
            sources += 1;
            check(&at.get(name));
        }
    };
    each("fieldRef", &|at| field_ref(at, ENV_FIELDS));
    each("resourceFieldRef", &|at| resource_field_ref(at, false));
    each("configMapKeyRef", &key_ref);
    each("secretKeyRef", &key_ref);
    each("fileKeyRef", &|at| {
        at.get("key").need_name(names::env_var_name);
        at.get("volumeName").need_name(names::dns1123_label);
        if at.get("path").need() {
            no_backsteps(&at.get("path"));
        }
    });
    if sources == 0 {
        at.invalid_as("", "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`");
    } else if !variable.get("value").is_empty() {
        at.invalid_as("", "may not be specified when `value` is not empty");
    } else if sources > 1 {
        at.invalid_as("", "may not have more than one field specified at a time");
    }
}

fn key_ref(at: &At<'_>) {
    at.get("name").name(names::dns1123_subdomain);
    at.get("key").need_name(names::config_map_key);
}

/// A field of the pod: `metadata.labels['app']`.
pub(crate) fn field_ref(at: &At<'_>, supported: &[&str]) {
    if !at.get("apiVersion").need() || !at.get("fieldPath").need() {
        return;
    }
    let path = at.get("fieldPath");
    if !at.get("apiVersion").is("v1") {
        let why = format!(
            "error converting fieldPath: unsupported pod version: {}",
            at.get("apiVersion").str()
        );
        return path.invalid(&why);
    }
    if let Some((name, subscript)) = path.str().split_once("['") {
        let Some(key) = subscript.strip_suffix("']") else { return path.unsupported(supported) };
        let (key, is_known) = match name {
            "metadata.annotations" => (key.to_lowercase(), true),
            "metadata.labels" => (key.to_owned(), true),
            _ => (String::new(), false),
        };
        if !is_known {
            path.invalid(&format!(
                "error converting fieldPath: field label does not support subscript: {}",
                path.str()
            ));
        }
        for why in names::qualified_name(&key).iter().filter(|_| is_known) {
            at.invalid_as(&key, why);
        }
        return;
    }
    const KNOWN: &[&str] = &[
        "metadata.annotations",
        "metadata.labels",
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.serviceAccountName",
        "spec.schedulerName",
        "status.phase",
        "status.hostIP",
        "status.hostIPs",
        "status.podIP",
        "status.podIPs",
    ];
    if !KNOWN.contains(&path.str()) && path.str() != "spec.host" {
        let why = format!("error converting fieldPath: field label not supported: {}", path.str());
        return path.invalid(&why);
    }
    path.one_of(supported);
}

pub(crate) fn resource_field_ref(at: &At<'_>, of_volume: bool) {
    const FIELDS: &[&str] = &[
        "limits.cpu",
        "limits.ephemeral-storage",
        "limits.memory",
        "requests.cpu",
        "requests.ephemeral-storage",
        "requests.memory",
    ];
    let resource = at.get("resource");
    let is_huge = ["requests.hugepages-", "limits.hugepages-"]
        .iter()
        .any(|prefix| resource.str().starts_with(prefix));
    if of_volume && at.get("containerName").is_empty() {
        at.get("containerName").required("");
    } else if resource.is_empty() {
        resource.required("");
    } else if !is_huge {
        resource.one_of(FIELDS);
    }
    let divisor = at.get("divisor");
    if quantity::amount(&divisor) == Default::default() {
        return;
    }
    const SIZES: &[&str] =
        &["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"];
    let (allowed, text, what): (&[&str], _, _) = match resource.str() {
        name if name.ends_with(".cpu") => (&["1m", "1"], "1m and 1".to_owned(), "cpu"),
        name if name.ends_with(".memory") => (SIZES, SIZES.join(", "), "memory"),
        name if name.ends_with(".ephemeral-storage") => {
            (SIZES, SIZES.join(", "), "local ephemeral storage")
        }
        _ if is_huge => (SIZES, SIZES.join(", "), "hugepages"),
        _ => return,
    };
    if !allowed.contains(&divisor.str()) {
        let detail = format!("only divisor's values {text} are supported with the {what} resource");
        divisor.invalid_as(resource.str(), &detail);
    }
}

fn env_from(at: &At<'_>) {
    for source in at.items() {
        source.get("prefix").any_name(names::env_var_name);
        let present: Vec<At<'_>> = ["configMapRef", "secretRef"]
            .into_iter()
            .filter(|name| source.has(name))
            .map(|name| source.get(name))
            .collect();
        for one in &present {
            one.get("name").need_name(names::dns1123_subdomain);
        }
        match present.len() {
            0 => at.invalid_as("", "must specify one of: `configMapRef` or `secretRef`"),
            1 => {}
            _ => at.invalid_as("", "may not have more than one field specified at a time"),
        }
    }
}

fn mounts(at: &At<'_>, scope: &Scope<'_>) {
    let list = at.get("volumeMounts");
    let devices = at.get("volumeDevices");
    let of = |field: &'static str| devices.items().map(move |one| one.get(field).str());
    let device = ["name", "devicePath"].map(|field| of(field).collect::<HashSet<_>>());
    let is_device = |which: usize, value: &str| !value.is_empty() && device[which].contains(value);
    let mut seen = HashSet::new();
    for mount in list.items() {
        let (name, path) = (mount.get("name"), mount.get("mountPath"));
        name.need();
        if !scope.volumes.contains_key(name.str()) {
            name.errors().not_found(&name.path, name.str());
        }
        path.need();
        if !seen.insert(path.str()) {
            path.invalid_text("must be unique");
        }
        if is_device(0, name.str()) {
            name.invalid("must not already exist in volumeDevices");
        }
        if is_device(1, path.str()) {
            path.invalid("must not already exist as a path in volumeDevices");
        }
        // Upstream's paths of what follows have no index.
        let field = |name: &'static str| mount.get(name).called(list.child_path(name));
        if !mount.get("subPath").is_empty() {
            descending(&field("subPath"));
        }
        if !mount.get("subPathExpr").is_empty() {
            if !mount.get("subPath").is_empty() {
                mount.get("subPathExpr").invalid("subPathExpr and subPath are mutually exclusive");
            }
            descending(&field("subPathExpr"));
        }
        propagation(&field("mountPropagation"), at);
        recursive_read_only(&mount, &field("recursiveReadOnly"));
    }
}

fn propagation(at: &At<'_>, container: &At<'_>) {
    at.any_of(&["Bidirectional", "HostToContainer", "None"]);
    if at.is("Bidirectional") && !container.get("securityContext.privileged").bool() {
        at.forbidden("Bidirectional mount propagation is available only to privileged containers");
    }
}

fn recursive_read_only(mount: &At<'_>, at: &At<'_>) {
    match at.str() {
        "" if !at.is_set() => {}
        "Disabled" => {}
        "Enabled" | "IfPossible" => {
            if !mount.get("readOnly").bool() {
                at.forbidden("may only be specified when readOnly is true");
            }
            let propagation = mount.get("mountPropagation");
            if propagation.is_set() && !propagation.is("None") {
                at.forbidden(
                    "may only be specified when mountPropagation is None or not specified",
                );
            }
        }
        _ => at.unsupported(&["Disabled", "Enabled", "IfPossible"]),
    }
}

fn devices(at: &At<'_>, scope: &Scope<'_>) {
    let mounts = at.get("volumeMounts");
    let of = |field: &'static str| mounts.items().map(move |one| one.get(field).str());
    let [mounted, mounted_at] =
        ["name", "mountPath"].map(|field| of(field).collect::<HashSet<_>>());
    let (mut names, mut paths) = (HashSet::new(), HashSet::new());
    for device in at.get("volumeDevices").items() {
        let (name, path) = (device.get("name"), device.get("devicePath"));
        name.need();
        if !names.insert(name.str()) {
            name.invalid("must be unique");
        }
        match scope.volumes.get(name.str()) {
            None => name.errors().not_found(&name.path, name.str()),
            Some(volume) if volume.has("persistentVolumeClaim") || volume.has("ephemeral") => {}
            Some(_) => name.invalid("can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode"),
        }
        path.need();
        if paths.contains(path.str()) {
            path.invalid_text("must be unique");
        }
        if path.str().split('/').any(|part| part == "..") {
            path.invalid("can not contain backsteps ('..')");
        } else {
            paths.insert(path.str());
        }
        if mounted.contains(name.str()) {
            name.invalid("must not already exist in volumeMounts");
        }
        if mounted_at.contains(path.str()) {
            path.invalid("must not already exist as a path in volumeMounts");
        }
    }
}

fn resize_policy(at: &At<'_>, pod_policy: &str) {
    let mut seen = HashSet::new();
    for (index, rule) in at.items().enumerate() {
        let (name, policy) = (rule.get("resourceName").str(), rule.get("restartPolicy").str());
        if !seen.insert(name) {
            at.errors().duplicate(&at.path.index(index), name);
        }
        for (value, known) in
            [(name, ["cpu", "memory"]), (policy, ["NotRequired", "RestartContainer"])]
        {
            if value.is_empty() {
                at.required("");
            } else if !known.contains(&value) {
                at.errors().not_supported(&at.path, value, &known);
            }
        }
        if pod_policy == "Never" && policy != "NotRequired" {
            at.invalid_as(policy, "must be 'NotRequired' when pod `restartPolicy` is 'Never'");
        }
    }
}

/// The action that has a gate of its own, and may stay in templates where it stood before. Of pods it is
/// asked when they are new.
pub(crate) fn restarts_of_all(spec: &At<'_>) {
    const TEMPLATES: &[&str] =
        &["/spec/template/spec", "/spec/jobTemplate/spec/template/spec", "/template/spec"];
    let is_open = features::enabled(Feature::RestartAllContainersOnContainerExits);
    let stood = |old: &Value| TEMPLATES.iter().filter_map(|at| old.pointer(at)).any(restarts_all);
    if is_open || spec.old().is_some_and(stood) {
        return;
    }
    for at in spec.get("containers").items() {
        restart_only(&at);
    }
    for at in spec.get("initContainers").items() {
        let rules = at.get("restartPolicyRules");
        if !at.get("restartPolicy").is("Always") {
            restart_only(&at);
        } else if !rules.is_empty() {
            rules.forbidden(
                "restartPolicyRules are not allowed for init containers with restart policy Always",
            );
        }
    }
}

/// Upstream: `restartAllContainersActionInUse`.
fn restarts_all(spec: &Value) -> bool {
    let of = |list: &str| spec.get(list).and_then(Value::as_array).into_iter().flatten();
    let rules = |container: &Value| {
        container.get("restartPolicyRules").and_then(Value::as_array).cloned().unwrap_or_default()
    };
    let names_all =
        |one: &Value| rules(one).iter().any(|rule| rule["action"] == "RestartAllContainers");
    // Rules of sidecars came with the same gate.
    let has_rules = |one: &Value| one["restartPolicy"] == "Always" && !rules(one).is_empty();
    of("containers").any(names_all)
        || of("initContainers").any(|one| names_all(one) || has_rules(one))
}

fn restart_only(at: &At<'_>) {
    for rule in at.get("restartPolicyRules").items() {
        let action = rule.get("action");
        if action.is("RestartAllContainers") {
            action.unsupported(&["Restart"]);
        }
    }
}

/// Upstream has rules for restarts of single containers behind a gate that is on by default.
fn restart_policy(at: &At<'_>) {
    let (policy, rules) = (at.get("restartPolicy"), at.get("restartPolicyRules"));
    if !policy.is_set() {
        if rules.is_empty() {
            return;
        }
        policy.required("must specify restartPolicy when restart rules are used");
    } else {
        policy.one_of(&["Always", "Never", "OnFailure"]);
    }
    if rules.len() > 20 {
        rules.too_many(20);
    }
    for rule in rules.items() {
        rule.get("action").one_of(&["Restart", "RestartAllContainers"]);
        let codes = rule.get("exitCodes");
        if !codes.is_set() {
            codes.required("must be specified");
            continue;
        }
        codes.get("operator").one_of(&["In", "NotIn"]);
        if codes.get("values").len() > 255 {
            codes.get("values").too_many(255);
        }
    }
}

fn lifecycle_and_probes(at: &At<'_>, scope: &Scope<'_>) {
    let lifecycle = at.get("lifecycle");
    for hook in ["postStart", "preStop"] {
        if lifecycle.has(hook) {
            handler(&lifecycle.get(hook), scope.grace());
        }
    }
    stop_signal(&lifecycle.get("stopSignal"), &scope.spec.get("os"));
    for name in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let at = at.get(name);
        if !at.is_set() {
            continue;
        }
        probe(&at);
        if name == "readinessProbe" {
            let grace = at.get("terminationGracePeriodSeconds");
            if grace.is_set() {
                grace.invalid("must not be set for readinessProbes");
            }
        } else if at.get("successThreshold").int() != 1 {
            at.get("successThreshold").invalid_as(at.get("successThreshold").int(), "must be 1");
        }
    }
}

/// Upstream's list, which is sorted as text.
const LINUX_SIGNALS: &[&str] = &[
    "SIGABRT",
    "SIGALRM",
    "SIGBUS",
    "SIGCHLD",
    "SIGCLD",
    "SIGCONT",
    "SIGFPE",
    "SIGHUP",
    "SIGILL",
    "SIGINT",
    "SIGIO",
    "SIGIOT",
    "SIGKILL",
    "SIGPIPE",
    "SIGPOLL",
    "SIGPROF",
    "SIGPWR",
    "SIGQUIT",
    "SIGRTMAX",
    "SIGRTMAX-1",
    "SIGRTMAX-10",
    "SIGRTMAX-11",
    "SIGRTMAX-12",
    "SIGRTMAX-13",
    "SIGRTMAX-14",
    "SIGRTMAX-2",
    "SIGRTMAX-3",
    "SIGRTMAX-4",
    "SIGRTMAX-5",
    "SIGRTMAX-6",
    "SIGRTMAX-7",
    "SIGRTMAX-8",
    "SIGRTMAX-9",
    "SIGRTMIN",
    "SIGRTMIN+1",
    "SIGRTMIN+10",
    "SIGRTMIN+11",
    "SIGRTMIN+12",
    "SIGRTMIN+13",
    "SIGRTMIN+14",
    "SIGRTMIN+15",
    "SIGRTMIN+2",
    "SIGRTMIN+3",
    "SIGRTMIN+4",
    "SIGRTMIN+5",
    "SIGRTMIN+6",
    "SIGRTMIN+7",
    "SIGRTMIN+8",
    "SIGRTMIN+9",
    "SIGSEGV",
    "SIGSTKFLT",
    "SIGSTOP",
    "SIGSYS",
    "SIGTERM",
    "SIGTRAP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGUSR1",
    "SIGUSR2",
    "SIGVTALRM",
    "SIGWINCH",
    "SIGXCPU",
    "SIGXFSZ",
];

/// What a signal means is a matter of the system that the pod asks for.
fn stop_signal(at: &At<'_>, os: &At<'_>) {
    if !at.is_set() {
        return;
    }
    match os.get("name").str() {
        _ if !os.is_set() => {
            at.forbidden("may not be set for containers with empty `spec.os.name`");
        }
        "windows" => at.one_of(&["SIGKILL", "SIGTERM"]),
        "linux" => at.one_of(LINUX_SIGNALS),
        _ => {}
    }
}

fn probe(at: &At<'_>) {
    handler(at, None);
    for field in [
        "initialDelaySeconds",
        "timeoutSeconds",
        "periodSeconds",
        "successThreshold",
        "failureThreshold",
    ] {
        at.get(field).not_negative();
    }
    let grace = at.get("terminationGracePeriodSeconds");
    if grace.number().is_some_and(|seconds| seconds <= 0) {
        grace.invalid("must be greater than 0");
    }
}

fn handler(at: &At<'_>, grace: Option<i64>) {
    let mut found = false;
    for name in ["exec", "httpGet", "tcpSocket", "grpc", "sleep"] {
        let place = at.get(name);
        if !place.is_set() {
            continue;
        }
        if std::mem::replace(&mut found, true) {
            place.forbidden("may not specify more than 1 handler type");
            continue;
        }
        match name {
            "exec" => need(&place, &["command"]),
            "httpGet" => http_get(&place),
            "tcpSocket" => port_or_name(&place.get("port")),
            "grpc" => place.get("port").port(),
            _ => {
                let seconds = place.get("seconds").int();
                if let Some(grace) = grace.filter(|grace| !(0..=*grace).contains(&seconds)) {
                    let detail = format!(
                        "must be non-negative and less than terminationGracePeriodSeconds ({grace})"
                    );
                    place.invalid_as(seconds, &detail);
                }
            }
        }
    }
    if !found {
        at.required("must specify a handler type");
    }
}

fn http_get(at: &At<'_>) {
    at.get("path").need();
    port_or_name(&at.get("port"));
    at.get("scheme").one_of(&["HTTP", "HTTPS"]);
    for header in at.get("httpHeaders").items() {
        let name = header.get("name").called(at.child_path("httpHeaders"));
        name.name(names::http_header_name);
    }
}

/// A number, or the name of a port.
pub(crate) fn port_or_name(at: &At<'_>) {
    match at.value {
        Value::String(_) => at.name(names::port_name),
        _ => at.port(),
    }
}

fn privileged(at: &At<'_>, is_allowed: bool) {
    if at.bool() && !is_allowed {
        at.forbidden("disallowed by cluster policy");
    }
}

/// Of one container.
fn security_context(at: &At<'_>, host_users: bool) {
    if !at.is_set() {
        return;
    }
    privileged(&at.get("privileged"), super::capabilities::allows_privileged());
    pod::id(&at.get("runAsUser"));
    pod::id(&at.get("runAsGroup"));
    let mount = at.get("procMount");
    if mount.is_set() {
        mount.one_of(&["Default", "Unmasked"]);
        if host_users && mount.is("Unmasked") {
            mount.invalid("`hostUsers` must be false to use `Unmasked`");
        }
    }
    pod::seccomp(&at.get("seccompProfile"));
    if at.get("allowPrivilegeEscalation").value == &Value::Bool(false) {
        let shown = super::internal::shown("SecurityContext", at.value);
        if at.get("privileged").bool() {
            at.errors().invalid_shown(
                &at.path,
                Some(&shown),
                "cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
            );
        }
        if at.get("capabilities.add").strings().contains(&"CAP_SYS_ADMIN") {
            at.errors().invalid_shown(&at.path, Some(&shown), "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN");
        }
    }
    pod::windows_options(&at.get("windowsOptions"));
    pod::app_armor(&at.get("appArmorProfile"));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::at::judge;
    use super::*;

    fn spec(container: Value, os: Value) -> Value {
        let mut container = container;
        container["name"] = "c".into();
        container["image"] = "i".into();
        container["imagePullPolicy"] = "Always".into();
        container["terminationMessagePolicy"] = "File".into();
        json!({"containers": [container], "os": os})
    }

    fn regular_errors(tree: &Value) -> Vec<String> {
        let check = |at: &At<'_>| {
            let scope =
                Scope { spec: at.clone(), volumes: HashMap::new(), claims: BTreeSet::new() };
            regular(&scope);
            restarts_of_all(at);
        };
        judge(tree, check).0.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn stop_signals_are_those_of_the_system() {
        let check = |os: Value, signal: &str, expected: Option<&str>| {
            let tree = spec(json!({"lifecycle": {"stopSignal": signal}}), os.clone());
            let got = regular_errors(&tree);
            let expected =
                expected.map(|text| format!("containers[0].lifecycle.stopSignal: {text}"));
            match expected {
                None => assert!(got.is_empty(), "{os} {signal}: {got:?}"),
                Some(text) => {
                    assert!(got.len() == 1 && got[0].starts_with(&text), "{os} {signal}: {got:?}")
                }
            }
        };
        let (linux, windows) = (json!({"name": "linux"}), json!({"name": "windows"}));
        check(linux.clone(), "SIGUSR1", None);
        check(linux.clone(), "SIGRTMIN+15", None);
        check(
            linux,
            "SIGRTMIN+16",
            Some(
                "Unsupported value: \"SIGRTMIN+16\": supported values: \"SIGABRT\", \"SIGALRM\", ",
            ),
        );
        check(windows.clone(), "SIGTERM", None);
        let two = "Unsupported value: \"SIGUSR1\": supported values: \"SIGKILL\", \"SIGTERM\"";
        check(windows, "SIGUSR1", Some(two));
        let no_os = "Forbidden: may not be set for containers with empty `spec.os.name`";
        check(json!(null), "SIGTERM", Some(no_os));
        assert!(LINUX_SIGNALS.is_sorted() && LINUX_SIGNALS.len() == 65);
    }

    #[test]
    fn rules_of_restarts() {
        let check = |container: Value, expected: &[&str]| {
            let got = regular_errors(&spec(container, json!(null)));
            let expected: Vec<String> =
                expected.iter().map(|text| format!("containers[0].{text}")).collect();
            assert_eq!(got, expected);
        };
        let rule = |action: &str, operator: &str| json!({"action": action, "exitCodes": {"operator": operator, "values": [42]}});
        let with = |policy: &str, rules: Value| json!({"restartPolicy": policy, "restartPolicyRules": rules});
        let good = json!([rule("Restart", "In"), rule("RestartAllContainers", "NotIn")]);
        check(with("Never", good.clone()), &[]);
        check(
            json!({"restartPolicyRules": good}),
            &[
                "restartPolicy: Required value: must specify restartPolicy when restart rules are used",
            ],
        );
        check(
            with("Maybe", json!([])),
            &[
                "restartPolicy: Unsupported value: \"Maybe\": supported values: \"Always\", \"Never\", \"OnFailure\"",
            ],
        );
        check(
            with("Never", json!([rule("Stop", "Maybe"), {"action": "Restart"}])),
            &[
                "restartPolicyRules[0].action: Unsupported value: \"Stop\": supported values: \"Restart\", \"RestartAllContainers\"",
                "restartPolicyRules[0].exitCodes.operator: Unsupported value: \"Maybe\": supported values: \"In\", \"NotIn\"",
                "restartPolicyRules[1].exitCodes: Required value: must be specified",
            ],
        );
        let many = vec![rule("Restart", "In"); 21];
        check(
            with("Never", json!(many)),
            &["restartPolicyRules: Too many: 21: must have at most 20 items"],
        );
        let gates = features::Gates::DEFAULT;
        features::scoped(gates.with(Feature::RestartAllContainersOnContainerExits, false), || {
            check(
                with("Never", good.clone()),
                &[
                    "restartPolicyRules[1].action: Unsupported value: \"RestartAllContainers\": supported values: \"Restart\"",
                ],
            );
        });
    }

    #[test]
    fn privileged_where_that_is_allowed() {
        for (value, is_allowed, expected) in [
            (json!(true), true, 0),
            (json!(true), false, 1),
            (json!(false), false, 0),
            (json!(null), false, 0),
        ] {
            let tree = json!({ "privileged": value });
            let errors = judge(&tree, |at| privileged(&at.get("privileged"), is_allowed));
            assert_eq!(errors.0.len(), expected, "{tree} {is_allowed}");
        }
    }
}
