//! Pod specs, in pods and in templates.
//! Upstream: `ValidatePodSpec`, `ValidatePodTemplateSpec`, `ValidatePodCreate`.

use std::collections::{HashMap, HashSet};

use k8s_openapi::api::core::v1::PodSpec;
use machinery::names;
use machinery::quantity::Amount;
use release::features::{self, Feature};
use serde_json::Value;

use super::at::At;
use super::container::{self, Scope};
use super::volumes::descending;
use super::{ip, quantity, volumes};
use crate::core::app_armor::PREFIX as APP_ARMOR;

/// A new pod.
pub(crate) fn create(at: &At<'_>) {
    whole(at);
    let spec = at.get("spec");
    container::restarts_of_all(&spec);
    if !spec.get("ephemeralContainers").is_empty() {
        spec.get("ephemeralContainers").forbidden("cannot be set on create");
    }
    if !spec.get("nodeName").is_empty() && !spec.get("schedulingGates").is_empty() {
        spec.get("nodeName").forbidden("cannot be set until all schedulingGates have been cleared");
    }
    profiles_match(&at.get("metadata.annotations"), &spec);
}

/// What pods must be, new or not.
pub(crate) fn whole(at: &At<'_>) {
    let spec = at.get("spec");
    annotations(&at.get("metadata.annotations"), &spec);
    pod_spec(&spec, at.get("metadata.name").str());
    if spec.get("serviceAccountName").is_empty() {
        for volume in spec.get("volumes").items() {
            for source in volume.get("projected.sources").items() {
                if source.has("serviceAccountToken") {
                    source
                        .get("serviceAccountToken")
                        .forbidden("must not be specified when serviceAccountName is not set");
                }
            }
        }
    }
    for list in ["containers", "initContainers"] {
        spec.get(list).items().for_each(|at| container::untrimmed_image(&at));
    }
}

/// A pod template, wherever it is.
pub(crate) fn template(at: &At<'_>) {
    // Upstream's paths leave `metadata` out here.
    at.get("metadata.labels").called(at.child_path("labels")).labels();
    let notes = at.get("metadata.annotations").called(at.child_path("annotations"));
    notes.annotations();
    let spec = at.get("spec");
    annotations(&notes, &spec);
    pod_spec(&spec, "");
    container::restarts_of_all(&spec);
    profiles_match(&notes, &spec);
    if !spec.get("ephemeralContainers").is_empty() {
        spec.get("ephemeralContainers")
            .forbidden("ephemeral containers not allowed in pod template");
    }
}

fn annotations(at: &At<'_>, spec: &At<'_>) {
    let mirror = at.key("kubernetes.io/config.mirror");
    if mirror.is_set() && spec.get("nodeName").is_empty() {
        mirror.invalid("must set spec.nodeName if mirror pod annotation is set");
    }
    // Tolerations of old versions, which nothing reads. Upstream checks them; here only that they are JSON.
    json_annotation(at, "scheduler.alpha.kubernetes.io/tolerations");
    let cost = at.key("controller.kubernetes.io/pod-deletion-cost");
    if cost.is_set() && features::enabled(Feature::PodDeletionCost) {
        let text = cost.str();
        let is_canonical = !text.starts_with('+')
            && (text == "0" || !text.trim_start_matches('-').starts_with('0'));
        if text.parse::<i32>().is_err() || !is_canonical {
            cost.invalid("must be a 32bit integer");
        }
    }
    seccomp_annotations(at);
    app_armor_annotations(at, spec);
}

/// An annotation that holds JSON, if it exists. Its errors name the path `notes`.
pub(crate) fn json_annotation(notes: &At<'_>, key: &str) {
    let text = notes.key(key);
    let text = text.str();
    if !text.is_empty()
        && let Err(why) = apiserver::codec::gojson::check(text.as_bytes())
    {
        notes.invalid_as(key, &why);
    }
}

const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
const SECCOMP_CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";

/// Every container, whatever its kind.
pub(crate) fn each_container<'a>(spec: &At<'a>) -> impl Iterator<Item = At<'a>> + use<'a> {
    let lists = ["initContainers", "containers", "ephemeralContainers"];
    lists.map(|list| spec.get(list)).into_iter().flat_map(|list| list.items())
}

/// Old annotations say what fields say today. Upstream: `ValidateSeccompPodAnnotations`.
fn seccomp_annotations(notes: &At<'_>) {
    let is_local = |path: &str| !path.starts_with('/') && !path.split('/').any(|one| one == "..");
    let of_pod = notes.entries().filter(|(key, _)| *key == SECCOMP_POD);
    let of_containers = notes.entries().filter(|(key, _)| key.starts_with(SECCOMP_CONTAINER));
    for (key, note) in of_pod.chain(of_containers) {
        let is_profile = matches!(note.str(), "runtime/default" | "docker/default" | "unconfined")
            || note.str().strip_prefix("localhost/").is_some_and(is_local);
        if !is_profile {
            note.called(notes.path.named(key)).invalid("must be a valid seccomp profile");
        }
    }
}

/// Upstream: `ValidateAppArmorPodAnnotations`.
fn app_armor_annotations(notes: &At<'_>, spec: &At<'_>) {
    for (key, note) in notes.entries() {
        let Some(name) = key.strip_prefix(APP_ARMOR) else { continue };
        if !each_container(spec).any(|at| at.get("name").is(name)) {
            note.invalid_as(name, "container not found");
        }
        let is_profile = matches!(note.str(), "" | "runtime/default" | "unconfined")
            || note.str().starts_with("localhost/");
        if !is_profile {
            note.invalid(&format!("invalid AppArmor profile name: {:?}", note.str()));
        }
    }
}

/// Old annotations and new fields must say the same.
fn profiles_match(notes: &At<'_>, spec: &At<'_>) {
    let seccomp = |key: &str, profile: &At<'_>| {
        let note = notes.key(key);
        if note.is_set() && profile.is_set() {
            let runtime = ["runtime/default", "docker/default"];
            match_profile(note.str(), profile, "seccomp", &runtime, "localhost/");
        }
    };
    seccomp(SECCOMP_POD, &spec.get("securityContext.seccompProfile"));
    for at in each_container(spec) {
        let key = format!("{SECCOMP_CONTAINER}{}", at.get("name").str());
        seccomp(&key, &at.get("securityContext.seccompProfile"));
    }
    if spec.get("os.name").is("windows") {
        return;
    }
    let of_pod = spec.get("securityContext.appArmorProfile");
    for at in each_container(spec) {
        let own = at.get("securityContext.appArmorProfile");
        let note = notes.key(&format!("{APP_ARMOR}{}", at.get("name").str()));
        let profile = if own.is_set() { own } else { of_pod.called(own.path) };
        if note.is_set() && profile.is_set() {
            match_profile(note.str(), &profile, "apparmor", &["runtime/default"], "localhost/");
        }
    }
}

fn match_profile(note: &str, at: &At<'_>, what: &str, runtime: &[&str], local: &str) {
    let matches = match at.get("type").str() {
        "Unconfined" => note == "unconfined",
        "RuntimeDefault" => runtime.contains(&note),
        "Localhost" => match note.strip_prefix(local) {
            None => false,
            Some(profile) if at.get("localhostProfile").is(profile) => true,
            Some(_) => {
                let detail = format!("{what} profile in annotation and field must match");
                return at.get("localhostProfile").forbidden(&detail);
            }
        },
        _ => true,
    };
    if !matches {
        at.get("type").forbidden(&format!("{what} type in annotation and field must match"));
    }
}

fn pod_spec(at: &At<'_>, pod_name: &str) {
    if !at.has("terminationGracePeriodSeconds") {
        at.get("terminationGracePeriodSeconds").required("");
    }
    let sound = volumes::volumes(at, pod_name);
    let claims = at.get("resourceClaims");
    resource_claims(&claims);
    let scope = Scope {
        spec: at.clone(),
        volumes: sound,
        claims: claims.items().map(|at| at.get("name").str()).filter(|n| !n.is_empty()).collect(),
    };
    container::regular(&scope);
    container::init(&scope);
    container::ephemeral(&scope);
    pod_resources(at);
    host_ports(at);
    choices(at);
    at.get("nodeSelector").labels();
    security_context(at);
    affinity(&at.get("affinity"));
    dns_config(at);
    for gate in at.get("readinessGates").items() {
        gate.get("conditionType").name(names::qualified_name);
    }
    scheduling_gates(&at.get("schedulingGates"));
    topology_spread(&at.get("topologySpreadConstraints"));
    host_process(at);
    host_users(at);
    host_name(at);
    simple_fields(at);
    tolerations(&at.get("tolerations"));
    for alias in at.get("hostAliases").items() {
        ip::legacy(&alias.get("ip"));
        alias.get("hostnames").items().for_each(|name| name.name(names::dns1123_subdomain));
    }
    at.get("priorityClassName").any_name(names::dns1123_subdomain);
    if at.has("runtimeClassName") {
        at.get("runtimeClassName").name(names::dns1123_subdomain);
    }
    preemption_policy(&at.get("preemptionPolicy"));
    overhead(&at.get("overhead"));
    os_fields(at);
    file_key_volumes(at);
}

fn choices(at: &At<'_>) {
    let restart = at.get("restartPolicy");
    if restart.need() {
        restart.one_of(&["Always", "OnFailure", "Never"]);
    }
    let dns = at.get("dnsPolicy");
    if dns.need() {
        dns.one_of(&["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"]);
    }
}

/// Upstream judges overhead as limits of a container.
pub(crate) fn overhead(at: &At<'_>) {
    for (name, amount) in at.entries() {
        let place = amount.called(at.child_path("limits").key(name));
        quantity::container_resource_name(name, &place);
        quantity::value(name, &place);
    }
}

pub(crate) fn preemption_policy(at: &At<'_>) {
    if at.is_set() && at.need() {
        at.one_of(&["PreemptLowerPriority", "Never"]);
    }
}

fn simple_fields(at: &At<'_>) {
    at.get("serviceAccountName").any_name(names::dns1123_subdomain);
    at.get("nodeName").any_name(names::dns1123_subdomain);
    let deadline = at.get("activeDeadlineSeconds");
    if deadline.number().is_some_and(|seconds| !(1..=i64::from(i32::MAX)).contains(&seconds)) {
        deadline.invalid("must be between 1 and 2147483647, inclusive");
    }
    at.get("hostname").any_name(names::dns1123_label);
    at.get("subdomain").any_name(names::dns1123_label);
}

fn resource_claims(list: &At<'_>) {
    let mut seen = HashSet::new();
    for claim in list.items() {
        let name = claim.get("name");
        if name.is_empty() {
            name.required("");
        } else if !seen.insert(name.str()) {
            name.duplicate();
        } else {
            name.name(names::dns1123_label);
        }
        let detail = match (claim.has("resourceClaimName"), claim.has("resourceClaimTemplateName"))
        {
            (true, true) => {
                "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified"
            }
            (false, false) => {
                "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`"
            }
            _ => "",
        };
        if !detail.is_empty() {
            let shown = super::internal::shown("PodResourceClaim", claim.value);
            claim.errors().invalid_shown(&claim.path, Some(&shown), detail);
        }
        for field in ["resourceClaimName", "resourceClaimTemplateName"] {
            if claim.has(field) {
                claim.get(field).name(names::dns1123_subdomain);
            }
        }
    }
}

/// Resources of the pod as a whole.
fn pod_resources(spec: &At<'_>) {
    let at = spec.get("resources");
    if !at.is_set() {
        return;
    }
    if spec.get("os.name").is("windows") {
        return at.forbidden("may not be set for a windows pod");
    }
    if at.has("claims") {
        at.get("claims").forbidden("claims may not be set for Resources at pod-level");
    }
    quantity::pod_requirements(&at);
    containers_within(spec, &at);
    for (index, container) in spec.get("containers").items().enumerate() {
        for (name, limit) in container.get("resources.limits").entries() {
            let of_pod = at.get("limits").key(name);
            if of_pod.is_set() && quantity::amount(&limit) > quantity::amount(&of_pod) {
                let path = at.child_path("containers").index(index).key(name).child("limits");
                let detail =
                    format!("must be less than or equal to pod limits of {}", of_pod.str());
                limit.called(path).invalid(&detail);
            }
        }
    }
}

/// What the containers need together fits into what the pod as a whole asks for.
fn containers_within(spec: &At<'_>, whole: &At<'_>) {
    // It was one before it became a tree.
    let Ok(typed) = serde_json::from_value::<PodSpec>(spec.value.clone()) else { return };
    let requests = ("requests", api::quota::container_requests(&typed));
    let mut limits = api::quota::container_limits(&typed);
    limits.retain(|name, _| quantity::is_huge_pages(name));
    for (list, needs) in [requests, ("limits", limits)] {
        for (name, need) in needs {
            let stated = whole.get(list).key(&name);
            let amount = Amount::parse(&need.0).unwrap_or_default();
            if stated.is_set() && amount > quantity::amount(&stated) {
                stated.invalid(&format!(
                    "must be greater than or equal to aggregate container {list} of {}",
                    need.0
                ));
            }
        }
    }
}

fn host_ports(at: &At<'_>) {
    if !at.get("hostNetwork").bool() {
        return;
    }
    for port in at.get("containers").items().flat_map(|at| at.get("ports").items()) {
        let (host, own) = (port.get("hostPort"), port.get("containerPort"));
        if host.int() != 0 && host.int() != own.int() {
            host.invalid("must match `containerPort` when `hostNetwork` is true");
        }
    }
}

pub(crate) fn id(at: &At<'_>) {
    if at.number().is_some_and(|id| !(0..=i64::from(i32::MAX)).contains(&id)) {
        at.invalid("must be between 0 and 2147483647, inclusive");
    }
}

fn security_context(spec: &At<'_>) {
    let at = spec.get("securityContext");
    for field in ["fsGroup", "runAsUser", "runAsGroup"] {
        id(&at.get(field));
    }
    at.get("supplementalGroups").items().for_each(|at| id(&at));
    let shares = spec.get("shareProcessNamespace");
    if shares.bool() && spec.get("hostPID").bool() {
        shares
            .called(at.child_path("shareProcessNamespace"))
            .invalid("ShareProcessNamespace and HostPID cannot both be enabled");
    }
    sysctls(&at.get("sysctls"), spec);
    at.get("fsGroupChangePolicy").any_of(&["Always", "OnRootMismatch"]);
    seccomp(&at.get("seccompProfile"));
    windows_options(&at.get("windowsOptions"));
    app_armor(&at.get("appArmorProfile"));
    at.get("supplementalGroupsPolicy").any_of(&["Merge", "Strict"]);
    at.get("seLinuxChangePolicy").any_of(&["Recursive"]);
}

fn sysctls(list: &At<'_>, spec: &At<'_>) {
    const NAME: &str = "must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";
    let segment = |text: &str| {
        let alnum = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        text.starts_with(alnum)
            && text.ends_with(alnum)
            && text.chars().all(|c| alnum(c) || c == '-' || c == '_')
    };
    let mut seen = HashSet::new();
    for one in list.items() {
        let name = one.get("name");
        if name.is_empty() {
            name.required("");
        } else if name.len() > 253 || !name.str().split(['.', '/']).all(segment) {
            name.invalid(NAME);
        } else if seen.contains(name.str()) {
            name.duplicate();
        }
        seen.insert(name.str());
        let starts = |prefixes: &[&str]| prefixes.iter().any(|one| name.str().starts_with(one));
        if spec.get("hostNetwork").bool() && starts(&["net.", "net/"]) {
            name.invalid("may not be specified when 'hostNetwork' is true");
        } else if spec.get("hostIPC").bool()
            && (starts(&["fs.mqueue.", "kernel.msg"]) || name.is("kernel.sem"))
        {
            name.invalid("may not be specified when 'hostIPC' is true");
        }
    }
}

pub(crate) fn seccomp(at: &At<'_>) {
    if !at.is_set() {
        return;
    }
    let kind = at.get("type");
    if kind.is_empty() {
        kind.required("type is required when seccompProfile is set");
    } else {
        kind.one_of(&["Localhost", "RuntimeDefault", "Unconfined"]);
    }
    let profile = at.get("localhostProfile");
    match (kind.is("Localhost"), profile.is_set()) {
        (true, false) => profile.required("must be set when seccomp type is Localhost"),
        (true, true) => descending(&profile),
        (false, true) => {
            let shown = super::internal::shown("SeccompProfile", at.value);
            let detail = "can only be set when seccomp type is Localhost";
            at.errors().invalid_shown(&profile.path, Some(&shown), detail);
        }
        (false, false) => {}
    }
}

pub(crate) fn app_armor(at: &At<'_>) {
    if !at.is_set() {
        return;
    }
    let (kind, profile) = (at.get("type"), at.get("localhostProfile"));
    match kind.str() {
        "Localhost" if !profile.is_set() => {
            profile.required("must be set when AppArmor type is Localhost");
        }
        "Localhost" => {
            if profile.str().trim() != profile.str() {
                profile.invalid("must not be padded with whitespace");
            } else if profile.is_empty() {
                profile.required("must be set when AppArmor type is Localhost");
            }
            if profile.len() > 4095 {
                profile.too_long(4095);
            }
        }
        "RuntimeDefault" | "Unconfined" => {
            if profile.is_set() {
                profile.invalid("can only be set when AppArmor type is Localhost");
            }
        }
        "" => kind.required("type is required when appArmorProfile is set"),
        _ => kind.unsupported(&["Localhost", "RuntimeDefault", "Unconfined"]),
    }
}

pub(crate) fn windows_options(at: &At<'_>) {
    let (name, spec, user) =
        (at.get("gmsaCredentialSpecName"), at.get("gmsaCredentialSpec"), at.get("runAsUserName"));
    if name.is_set() {
        name.name(names::dns1123_subdomain);
    }
    if spec.is_set() && spec.is_empty() {
        spec.invalid("gmsaCredentialSpec cannot be an empty string");
    }
    if spec.len() > 64 << 10 {
        spec.invalid("gmsaCredentialSpec size must be under 64 KiB");
    }
    if !user.is_set() {
        return;
    }
    let parts: Vec<&str> = user.str().split('\\').collect();
    let detail = if user.is_empty() {
        "runAsUserName cannot be an empty string"
    } else if user.str().chars().any(char::is_control) {
        "runAsUserName cannot contain control characters"
    } else if parts.len() > 2 {
        "runAsUserName cannot contain more than one backslash"
    } else {
        return windows_user(&user, parts);
    };
    user.invalid(detail);
}

fn windows_user(at: &At<'_>, parts: Vec<&str>) {
    let name = parts.last().copied().unwrap_or_default();
    if parts.len() == 2 && parts[0].len() >= 256 {
        at.invalid("runAsUserName's Domain length must be under 256 characters");
    }
    if name.is_empty() {
        at.invalid("runAsUserName's User cannot be empty");
    } else if name.len() > 104 {
        at.invalid("runAsUserName's User length must not be longer than 104 characters");
    }
    if !name.is_empty() && name.chars().all(|c| c == '.' || c == ' ') {
        at.invalid("runAsUserName's User cannot contain only periods or spaces");
    }
    if name.contains(|c| r#""/\:;|=,+*?<>@[]"#.contains(c)) {
        at.invalid(
            r#"runAsUserName's User cannot contain the following characters: "/\:;|=,+*?<>@[]"#,
        );
    }
}

/// HostProcess containers are all or none.
fn host_process(at: &At<'_>) {
    let of_pod = at.get("securityContext.windowsOptions.hostProcess");
    let (mut all, mut host) = (0, 0);
    for container in each_container(at) {
        all += 1;
        let own = container.get("securityContext.windowsOptions.hostProcess");
        if of_pod.is_set() && own.is_set() && of_pod.bool() != own.bool() {
            let detail = format!(
                "pod hostProcess value must be identical if both are specified, was {}",
                of_pod.bool()
            );
            own.invalid(&detail);
        }
        host += usize::from(if own.is_set() { own.bool() } else { of_pod.bool() });
    }
    if host == 0 {
        return;
    }
    if host != all {
        at.invalid_as("", "If pod contains any hostProcess containers then all containers must be HostProcess containers");
    }
    if !at.get("hostNetwork").bool() {
        at.get("hostNetwork").invalid_as(
            false,
            "hostNetwork must be true if pod contains any hostProcess containers",
        );
    }
    if !super::capabilities::allows_privileged() {
        at.forbidden("hostProcess containers are disallowed by cluster policy");
    }
}

fn host_users(at: &At<'_>) {
    if at.get("hostUsers").value != &Value::Bool(false) {
        return;
    }
    const WHEN: &str = "when `hostUsers` is false";
    for (field, label) in
        [("hostNetwork", "hostNetwork"), ("hostPID", "HostPID"), ("hostIPC", "HostIPC")]
    {
        if at.get(field).bool() {
            at.get(label).forbidden(WHEN);
        }
    }
    for container in each_container(at) {
        if !container.get("volumeDevices").is_empty() {
            container.get("volumeDevices").forbidden(WHEN);
        }
    }
}

fn host_name(at: &At<'_>) {
    let name = at.get("hostnameOverride");
    if !name.is_set() {
        return;
    }
    for (field, what) in
        [("setHostnameAsFQDN", "setHostnameAsFQDN"), ("hostNetwork", "hostNetwork")]
    {
        if at.get(field).bool() {
            name.forbidden(&format!("may not be specified when {what} is true"));
        }
    }
    if name.len() > 64 {
        name.too_long(64);
    }
    name.name(names::dns1123_subdomain);
}

fn dns_config(spec: &At<'_>) {
    let at = spec.get("dnsConfig");
    let servers = at.get("nameservers");
    if spec.get("dnsPolicy").is("None") {
        if !at.is_set() {
            return at.required("must provide `dnsConfig` when `dnsPolicy` is None");
        }
        if servers.is_empty() {
            return servers
                .required("must provide at least one DNS nameserver when `dnsPolicy` is None");
        }
    }
    if servers.len() > 3 {
        servers.invalid("must not have more than 3 nameservers");
    }
    servers.items().for_each(|server| ip::legacy(&server));
    let searches = at.get("searches");
    if searches.len() > 32 {
        searches.invalid("must not have more than 32 search paths");
    }
    if searches.strings().join(" ").len() > 2048 {
        searches.invalid(
            "must not have more than 2048 characters (including spaces) in the search list",
        );
    }
    for search in searches.items().filter(|search| !search.is(".")) {
        let name = search.str().strip_suffix('.').unwrap_or(search.str());
        for why in names::dns1123_subdomain_with_underscore(name) {
            search.invalid_as(name, &why);
        }
    }
    for option in at.get("options").items() {
        if option.get("name").is_empty() {
            option.required("must not be empty");
        }
    }
}

fn scheduling_gates(list: &At<'_>) {
    let mut seen = HashSet::new();
    for gate in list.items() {
        let name = gate.get("name").called(gate.path.clone());
        name.name(names::qualified_name);
        if !seen.insert(name.str()) {
            name.duplicate_text();
        }
    }
}

fn topology_spread(list: &At<'_>) {
    fn pair<'a>(at: &At<'a>) -> (&'a str, &'a str) {
        (at.get("topologyKey").str(), at.get("whenUnsatisfiable").str())
    }
    let last: HashMap<_, usize> =
        list.items().enumerate().map(|(index, at)| (pair(&at), index)).collect();
    for (index, at) in list.items().enumerate() {
        let (skew, key, action) =
            (at.get("maxSkew"), at.get("topologyKey"), at.get("whenUnsatisfiable"));
        if skew.int() <= 0 {
            skew.invalid_as(skew.int(), quantity::NOT_POSITIVE);
        }
        if key.is_empty() {
            key.required("can not be empty");
        }
        action.one_of(&["DoNotSchedule", "ScheduleAnyway"]);
        if last.get(&pair(&at)).is_some_and(|last| *last > index) {
            let path = at.child_path("{topologyKey, whenUnsatisfiable}");
            at.errors().duplicate(&path, format!("{{{}, {}}}", key.str(), action.str()));
        }
        let domains = at.get("minDomains");
        if domains.number().is_some_and(|number| number <= 0) {
            domains.invalid(quantity::NOT_POSITIVE);
        }
        if domains.is_set() && !action.is("DoNotSchedule") {
            let detail = format!(
                "can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {}",
                action.str()
            );
            domains.invalid(&detail);
        }
        for field in ["nodeAffinityPolicy", "nodeTaintsPolicy"] {
            at.get(field).any_of(&["Honor", "Ignore"]);
        }
        label_keys(&at);
        at.get("labelSelector").selector();
    }
}

/// `matchLabelKeys` and `mismatchLabelKeys` beside a selector.
fn label_keys(at: &At<'_>) {
    let selector = at.get("labelSelector");
    for field in ["matchLabelKeys", "mismatchLabelKeys"] {
        let keys = at.get(field);
        if keys.is_empty() {
            continue;
        }
        if !selector.is_set() {
            keys.forbidden("must not be specified when labelSelector is not set");
            continue;
        }
        keys.items().for_each(|key| key.name(names::qualified_name));
    }
    // What the pod itself says under these keys was merged into the selector before.
    let wanted = at.get("matchLabelKeys");
    let wanted: HashMap<&str, usize> =
        wanted.items().enumerate().map(|(index, key)| (key.str(), index)).collect();
    let mut known: HashSet<&str> =
        selector.get("matchLabels").entries().map(|(key, _)| key).collect();
    for term in selector.get("matchExpressions").items() {
        let key = term.get("key").str();
        if let Some(index) = wanted.get(key).filter(|_| known.contains(key)) {
            at.errors().invalid(
                &at.path.index(*index),
                key,
                "exists in both matchLabelKeys and labelSelector",
            );
        }
        known.insert(key);
    }
    let unwanted: HashSet<&str> = at.get("mismatchLabelKeys").strings().into_iter().collect();
    for key in at.get("matchLabelKeys").items().filter(|key| unwanted.contains(key.str())) {
        key.invalid("exists in both matchLabelKeys and mismatchLabelKeys");
    }
}

fn affinity(at: &At<'_>) {
    const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
    let weight = |term: &At<'_>| {
        let weight = term.get("weight");
        if !(1..=100).contains(&weight.int()) {
            weight.invalid_as(weight.int(), "must be in the range 1-100");
        }
    };
    let node = at.get("nodeAffinity");
    if node.has(REQUIRED) {
        node_selector(&node.get(REQUIRED));
    }
    for term in node.get(PREFERRED).items() {
        weight(&term);
        // Upstream lets label values be anything here.
        node_term(&term.get("preference"), false);
    }
    for kind in ["podAffinity", "podAntiAffinity"] {
        let at = at.get(kind);
        at.get(REQUIRED).items().for_each(|term| pod_term(&term));
        for term in at.get(PREFERRED).items() {
            weight(&term);
            pod_term(&term.get("podAffinityTerm"));
        }
    }
}

pub(crate) fn node_selector(at: &At<'_>) {
    let terms = at.get("nodeSelectorTerms");
    if terms.is_empty() {
        return terms.required("must have at least one node selector term");
    }
    terms.items().for_each(|term| node_term(&term, true));
}

fn node_term(at: &At<'_>, judges_values: bool) {
    for term in at.get("matchExpressions").items() {
        let values = term.get("values");
        match term.get("operator").str() {
            "In" | "NotIn" if values.is_empty() => {
                values.required("must be specified when `operator` is 'In' or 'NotIn'");
            }
            "In" | "NotIn" => {}
            "Exists" | "DoesNotExist" if !values.is_empty() => values
                .forbidden("may not be specified when `operator` is 'Exists' or 'DoesNotExist'"),
            "Exists" | "DoesNotExist" => {}
            "Gt" | "Lt" if values.len() != 1 => {
                values.required("must be specified single value when `operator` is 'Lt' or 'Gt'");
            }
            "Gt" | "Lt" => {}
            _ => term.get("operator").invalid_text("not a valid selector operator"),
        }
        term.get("key").name(names::qualified_name);
        if judges_values {
            values.items().for_each(|value| value.name(names::label_value));
        }
    }
    for term in at.get("matchFields").items() {
        let values = term.get("values");
        match term.get("operator").str() {
            "In" | "NotIn" if values.len() == 1 => {}
            "In" | "NotIn" => values.required(
                "must be only one value when `operator` is 'In' or 'NotIn' for node field selector",
            ),
            _ => term.get("operator").invalid_text("not a valid selector operator"),
        }
        if !term.get("key").is("metadata.name") {
            term.get("key").invalid_text("not a valid field selector key");
        } else {
            values.items().for_each(|value| value.name(names::dns1123_subdomain));
        }
    }
}

fn pod_term(at: &At<'_>) {
    at.get("labelSelector").selector();
    at.get("namespaceSelector").selector();
    for name in at.get("namespaces").items() {
        name.called(at.child_path("namespace")).name(names::dns1123_label);
    }
    label_keys(at);
    let key = at.get("topologyKey");
    if key.is_empty() {
        key.required("can not be empty");
    }
    key.name(names::qualified_name);
}

pub(crate) fn tolerations(list: &At<'_>) {
    let compares = features::enabled(Feature::TaintTolerationComparisonOperators);
    each_toleration(list, compares);
}

/// Those that know no comparison of numbers, whatever the gates say.
pub(crate) fn tolerations_of_old(list: &At<'_>) {
    each_toleration(list, false);
}

fn each_toleration(list: &At<'_>, compares: bool) {
    for at in list.items() {
        let (key, operator, value, effect) =
            (at.get("key"), at.get("operator"), at.get("value"), at.get("effect"));
        key.any_name(names::qualified_name);
        if key.is_empty() && !operator.is("Exists") {
            operator.invalid_text("operator must be Exists when `key` is empty, which means \"match all values and all keys\"");
        }
        if at.has("tolerationSeconds") && !effect.is("NoExecute") {
            effect.invalid_text("effect must be 'NoExecute' when `tolerationSeconds` is set");
        }
        match operator.str() {
            "" | "Equal" => {
                let wrong = names::label_value(value.str());
                if !wrong.is_empty() {
                    operator.invalid_as(value.str(), &wrong.join(";"));
                }
            }
            "Exists" if !value.is_empty() => {
                operator.invalid_as(value.str(), "value must be empty when `operator` is 'Exists'")
            }
            "Exists" => {}
            "Lt" | "Gt" if compares => compared_value(&value),
            "Lt" | "Gt" => operator.unsupported(&["Equal", "Exists", "Lt", "Gt"]),
            _ => operator.unsupported(&["Equal", "Exists"]),
        }
        if !effect.is_empty() {
            taint_effect(&effect);
        }
    }
}

/// What a taint's number is compared with.
fn compared_value(at: &At<'_>) {
    let text = at.str();
    if text.is_empty() {
        at.invalid_text("must be non-empty");
    } else if !api::taints::is_decimal(text) {
        at.invalid("must be a valid decimal integer in canonical form");
    }
    if text.parse::<i64>().is_err() {
        let is_number = !text.is_empty()
            && text.trim_start_matches(['-', '+']).bytes().all(|b| b.is_ascii_digit());
        let why = if is_number { "value out of range" } else { "invalid syntax" };
        at.invalid_text(&format!("strconv.ParseInt: parsing {text:?}: {why}"));
    }
}

pub(crate) fn taint_effect(at: &At<'_>) {
    if at.need() {
        at.one_of(&["NoSchedule", "PreferNoSchedule", "NoExecute"]);
    }
}

/// What a pod of one operating system may not have.
fn os_fields(at: &At<'_>) {
    let os = at.get("os");
    if !os.is_set() {
        return;
    }
    match os.get("name").str() {
        "" => os.get("name").required(""),
        "linux" => {
            const DETAIL: &str = "windows options cannot be set for a linux pod";
            let contexts = std::iter::once(at.clone()).chain(each_container(at));
            for place in contexts.map(|at| at.get("securityContext.windowsOptions")) {
                if place.is_set() {
                    place.forbidden(DETAIL);
                }
            }
        }
        "windows" => windows(at),
        name => os.errors().not_supported(&os.path, name, &["linux", "windows"]),
    }
}

fn windows(at: &At<'_>) {
    let refuse = |place: At<'_>| {
        if place.is_set() && !place.is_empty() && place.value != &Value::Bool(false) {
            place.forbidden("cannot be set for a windows pod");
        }
    };
    for field in [
        "securityContext.appArmorProfile",
        "securityContext.seLinuxOptions",
        "hostUsers",
        "hostPID",
        "hostIPC",
        "securityContext.seccompProfile",
        "securityContext.fsGroup",
        "securityContext.fsGroupChangePolicy",
        "securityContext.sysctls",
        "shareProcessNamespace",
        "securityContext.runAsUser",
        "securityContext.runAsGroup",
        "securityContext.supplementalGroups",
        "securityContext.supplementalGroupsPolicy",
        "securityContext.seLinuxChangePolicy",
    ] {
        refuse(at.get(field));
    }
    for container in each_container(at) {
        for field in [
            "appArmorProfile",
            "seLinuxOptions",
            "seccompProfile",
            "capabilities",
            "readOnlyRootFilesystem",
            "privileged",
            "allowPrivilegeEscalation",
            "procMount",
            "runAsUser",
            "runAsGroup",
        ] {
            refuse(container.get("securityContext").get(field));
        }
    }
}

/// Files with variables are in emptyDirs.
fn file_key_volumes(at: &At<'_>) {
    let mut volumes = HashMap::new();
    for volume in at.get("volumes").items() {
        volumes.entry(volume.get("name").str()).or_insert(volume);
    }
    for variable in each_container(at).flat_map(|at| at.get("env").items()) {
        let name = variable.get("valueFrom.fileKeyRef.volumeName");
        if !variable.get("valueFrom").has("fileKeyRef") {
            continue;
        }
        match volumes.get(name.str()) {
            None => name.errors().not_found(&name.path, name.str()),
            Some(volume) if volume.has("emptyDir") => {}
            Some(_) => name.invalid_text("referenced volume must be of type emptyDir"),
        }
    }
}
