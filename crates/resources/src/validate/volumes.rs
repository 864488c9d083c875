//! Volumes of pods, and the sources that they share with PersistentVolumes.
//! Upstream: `validateVolumeSource`, `ValidatePersistentVolumeSpec`.

use std::collections::{HashMap, HashSet};

use machinery::names;
use serde_json::Value;

use super::at::At;
use super::{quantity, storage};

/// A volume source: its field, its name in paths, its rule.
pub(crate) struct Source {
    pub(crate) field: &'static str,
    /// Upstream's word for it in "may not specify more than 1 volume type".
    second: &'static str,
    label: &'static str,
    check: fn(&At<'_>),
}

const fn source(field: &'static str, check: fn(&At<'_>)) -> Source {
    Source { field, second: field, label: field, check }
}

/// As [`source`], where upstream's paths call it otherwise.
const fn renamed(
    field: &'static str,
    second: &'static str,
    label: &'static str,
    check: fn(&At<'_>),
) -> Source {
    Source { field, second, label, check }
}

/// In upstream's order: the first that is there is the volume.
const POD_SOURCES: &[Source] = &[
    source("emptyDir", empty_dir),
    source("hostPath", host_path),
    source("gitRepo", git_repo),
    renamed("gcePersistentDisk", "gcePersistentDisk", "persistentDisk", |at| disk(at, "pdName")),
    source("awsElasticBlockStore", |at| disk(at, "volumeID")),
    source("secret", |at| keys(at, "secretName")),
    source("nfs", nfs),
    source("iscsi", iscsi),
    source("glusterfs", |at| need(at, &["endpoints", "path"])),
    source("flocker", flocker),
    source("persistentVolumeClaim", |at| need(at, &["claimName"])),
    source("rbd", |at| need(at, &["monitors", "image"])),
    source("cinder", |at| named_secret(at, "volumeID")),
    renamed("cephfs", "cephFS", "cephfs", |at| need(at, &["monitors"])),
    source("quobyte", quobyte),
    renamed("downwardAPI", "downwarAPI", "downwardAPI", downward_api),
    source("fc", fc),
    source("flexVolume", flex),
    source("configMap", |at| keys(at, "name")),
    source("azureFile", |at| need(at, &["secretName", "shareName"])),
    source("vsphereVolume", |at| need(at, &["volumePath"])),
    source("photonPersistentDisk", |at| need(at, &["pdID"])),
    source("portworxVolume", |at| need(at, &["volumeID"])),
    source("azureDisk", azure_disk),
    source("storageos", storage_os),
    source("projected", projected),
    source("scaleIO", |at| need(at, &["gateway", "system", "volumeName"])),
    source("csi", csi),
    source("ephemeral", ephemeral),
    source("image", image),
];

/// The sources of PersistentVolumes.
const PV_SOURCES: &[Source] = &[
    source("hostPath", host_path),
    renamed("gcePersistentDisk", "gcePersistentDisk", "persistentDisk", |at| disk(at, "pdName")),
    source("awsElasticBlockStore", |at| disk(at, "volumeID")),
    source("glusterfs", |at| need(at, &["endpoints", "path"])),
    source("flocker", flocker),
    source("nfs", nfs),
    source("rbd", |at| need(at, &["monitors", "image"])),
    source("quobyte", quobyte),
    renamed("cephfs", "cephFS", "cephfs", |at| need(at, &["monitors"])),
    source("iscsi", |at| {
        iscsi(at);
        if at.has("secretRef") {
            need(&at.get("secretRef"), &["name"]);
        }
    }),
    source("cinder", |at| {
        need(at, &["volumeID"]);
        if at.has("secretRef") {
            need(&at.get("secretRef"), &["name", "namespace"]);
        }
    }),
    source("fc", fc),
    source("flexVolume", flex),
    source("azureFile", |at| need(at, &["secretName", "shareName"])),
    source("vsphereVolume", |at| need(at, &["volumePath"])),
    source("photonPersistentDisk", |at| need(at, &["pdID"])),
    source("portworxVolume", |at| need(at, &["volumeID"])),
    source("azureDisk", azure_disk),
    source("scaleIO", |at| need(at, &["gateway", "system", "volumeName"])),
    source("local", |at| {
        if at.get("path").need() {
            no_backsteps(&at.get("path"));
        }
    }),
    source("storageos", storage_os),
    source("csi", persistent_csi),
];

/// Checks that there is just one source, and that it is sound. Says which there is.
fn one_source(at: &At<'_>, sources: &'static [Source]) -> Option<&'static str> {
    let mut found = None;
    for source in sources.iter().filter(|source| at.has(source.field)) {
        if found.is_some() {
            let place = at.get(source.field).called(at.child_path(source.second));
            place.forbidden("may not specify more than 1 volume type");
            continue;
        }
        found = Some(source.field);
        (source.check)(&at.get(source.field).called(at.child_path(source.label)));
    }
    if found.is_none() {
        at.required("must specify a volume type");
    }
    found
}

pub(crate) fn persistent_source(spec: &At<'_>) -> Option<&'static str> {
    one_source(spec, PV_SOURCES)
}

/// The part of a PersistentVolume's spec that is its source.
pub(crate) fn source_part(spec: &Value) -> Value {
    let part = |source: &Source| {
        spec.get(source.field).map(|value| (source.field.to_owned(), value.clone()))
    };
    Value::Object(PV_SOURCES.iter().filter_map(part).collect())
}

/// The volumes of a pod; answers those that are sound, by name.
pub(crate) fn volumes<'a>(spec: &At<'a>, pod_name: &str) -> HashMap<&'a str, At<'a>> {
    let list = spec.get("volumes");
    let created: HashSet<String> = list
        .items()
        .filter(|volume| volume.has("ephemeral") && !pod_name.is_empty())
        .map(|volume| format!("{pod_name}-{}", volume.get("name").str()))
        .collect();
    let mut sound: HashMap<&str, At<'_>> = HashMap::new();
    for volume in list.items() {
        let before = volume.errors().0.len();
        let found = one_source(&volume, POD_SOURCES);
        let name = volume.get("name");
        if found == Some("ephemeral") && !pod_name.is_empty() && !name.is_empty() {
            let claim = format!("{pod_name}-{}", name.str());
            for why in names::dns1123_subdomain(&claim) {
                name.invalid_text(&format!("PVC name {claim:?}: {why}"));
            }
        }
        name.need_name(names::dns1123_label);
        if sound.contains_key(name.str()) {
            name.duplicate();
        }
        let claim = volume.get("persistentVolumeClaim.claimName");
        if volume.errors().0.len() == before {
            sound.insert(name.str(), volume);
        }
        if created.contains(claim.str()) {
            claim.invalid("must not reference a PVC that gets created for an ephemeral volume");
        }
    }
    sound
}

pub(crate) fn need(at: &At<'_>, fields: &[&'static str]) {
    for field in fields {
        at.get(field).need();
    }
}

fn empty_dir(at: &At<'_>) {
    let limit = at.get("sizeLimit");
    if limit.is_set() && quantity::is_negative(&limit) {
        limit.forbidden("SizeLimit field must be a valid resource quantity");
    }
}

fn host_path(at: &At<'_>) {
    if at.get("path").need() {
        no_backsteps(&at.get("path"));
        at.get("type").any_of(&[
            "",
            "BlockDevice",
            "CharDevice",
            "Directory",
            "DirectoryOrCreate",
            "File",
            "FileOrCreate",
            "Socket",
        ]);
    }
}

fn git_repo(at: &At<'_>) {
    at.get("repository").need();
    descending(&at.get("directory"));
}

fn disk(at: &At<'_>, id: &'static str) {
    at.get(id).need();
    let partition = at.get("partition");
    if !(0..=255).contains(&partition.int()) {
        partition.invalid("must be between 0 and 255, inclusive");
    }
}

fn nfs(at: &At<'_>) {
    need(at, &["server", "path"]);
    if !at.get("path").str().starts_with('/') {
        at.get("path").invalid_text("must be an absolute path");
    }
}

fn named_secret(at: &At<'_>, id: &'static str) {
    at.get(id).need();
    if at.has("secretRef") {
        need(&at.get("secretRef"), &["name"]);
    }
}

fn iscsi(at: &At<'_>) {
    need(at, &["targetPortal"]);
    let iqn = at.get("iqn");
    if iqn.need() {
        qualified_iscsi_name(&iqn);
    }
    let lun = at.get("lun");
    if !(0..=255).contains(&lun.int()) {
        lun.invalid("must be between 0 and 255, inclusive");
    }
    let has_chap = at.get("chapAuthDiscovery").bool() || at.get("chapAuthSession").bool();
    if has_chap && !at.has("secretRef") {
        at.get("secretRef").required("");
    }
    if at.has("initiatorName") {
        let name = at.get("initiatorName");
        qualified_iscsi_name(&name.called(at.child_path("initiatorname")));
    }
}

/// `iqn.2001-04.com.example:storage`, `eui.` and 16 hex digits, `naa.` and 16 or 32.
fn qualified_iscsi_name(at: &At<'_>) {
    let text = at.str();
    let Some((kind, rest)) = ["iqn", "eui", "naa"]
        .iter()
        .find_map(|kind| text.strip_prefix(kind).map(|rest| (*kind, rest)))
    else {
        return at.invalid("must be valid format starting with iqn, eui, or naa");
    };
    let hex = |text: &str, lengths: &[usize]| {
        lengths.contains(&text.len()) && text.chars().all(|c| c.is_ascii_hexdigit())
    };
    let is_sound = match (kind, rest.strip_prefix('.')) {
        ("iqn", Some(rest)) => {
            let (date, rest) = rest.split_at(rest.find('.').unwrap_or(rest.len()));
            date.len() == 7
                && date.bytes().enumerate().all(|(at, byte)| match at {
                    4 => byte == b'-',
                    _ => byte.is_ascii_digit(),
                })
                && rest.len() > 1
                && !rest.contains(char::is_whitespace)
        }
        ("eui", Some(rest)) => hex(rest, &[16]),
        ("naa", Some(rest)) => hex(rest, &[16, 32]),
        _ => false,
    };
    if !is_sound {
        at.invalid("must be valid format");
    }
}

fn flocker(at: &At<'_>) {
    match (at.get("datasetName").is_empty(), at.get("datasetUUID").is_empty()) {
        (true, true) => at.required("one of datasetName and datasetUUID is required"),
        (false, false) => at.invalid_as(
            "resource",
            "datasetName and datasetUUID can not be specified simultaneously",
        ),
        _ => {}
    }
    if at.get("datasetName").str().contains('/') {
        at.get("datasetName").invalid("must not contain '/'");
    }
}

fn quobyte(at: &At<'_>) {
    const PAIRS: &str = "must be a host:port pair or multiple pairs separated by commas";
    let registry = at.get("registry");
    if registry.is_empty() {
        registry.required(PAIRS);
    } else if at.get("tenant").len() >= 65 {
        at.get("tenant").required("must be a UUID and may not exceed a length of 64 characters");
    } else {
        let is_pair = |pair: &str| pair.rsplit_once(':').is_some();
        for _ in registry.str().split(',').filter(|pair| !is_pair(pair)) {
            registry.invalid(PAIRS);
        }
    }
    at.get("volume").need();
}

fn fc(at: &At<'_>) {
    let (names, ids) = (at.get("targetWWNs"), at.get("wwids"));
    if names.is_empty() && ids.is_empty() {
        names.required("must specify either targetWWNs or wwids, but not both");
    }
    if !names.is_empty() && !ids.is_empty() {
        names.invalid("targetWWNs and wwids can not be specified simultaneously");
    }
    if !names.is_empty() {
        match at.get("lun").number() {
            None => at.get("lun").required("lun is required if targetWWNs is specified"),
            Some(0..=255) => {}
            Some(_) => at.get("lun").invalid("must be between 0 and 255, inclusive"),
        }
    }
}

fn flex(at: &At<'_>) {
    at.get("driver").need();
    for (key, option) in at.get("options").entries() {
        let namespace = format!(".{}", key.split('/').next().unwrap_or_default().to_lowercase());
        if namespace.ends_with(".kubernetes.io") || namespace.ends_with(".k8s.io") {
            option.invalid_as(key, "kubernetes.io and k8s.io namespaces are reserved");
        }
    }
}

fn azure_disk(at: &At<'_>) {
    need(at, &["diskName", "diskURI"]);
    at.get("cachingMode").any_of(&["None", "ReadOnly", "ReadWrite"]);
    at.get("kind").any_of(&["Dedicated", "Managed", "Shared"]);
    let uri = at.get("diskURI");
    match at.get("kind").str() {
        "" => {}
        "Managed" if !uri.str().starts_with("/subscriptions/") => uri.unsupported(&[
            "/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}",
        ]),
        "Managed" => {}
        _ if !uri.str().starts_with("https://") => uri.unsupported(&[
            "https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd",
        ]),
        _ => {}
    }
}

fn storage_os(at: &At<'_>) {
    at.get("volumeName").need_name(names::dns1123_label);
    at.get("volumeNamespace").any_name(names::dns1123_label);
    if at.has("secretRef") {
        need(&at.get("secretRef"), &["name"]);
    }
}

pub(crate) fn csi_driver_name(at: &At<'_>) {
    if !at.need() {
        return;
    }
    if at.len() > 63 {
        at.too_long(63);
    }
    for why in names::dns1123_subdomain(&at.str().to_lowercase()) {
        at.invalid(&why);
    }
}

fn csi(at: &At<'_>) {
    csi_driver_name(&at.get("driver"));
    if at.has("nodePublishSecretRef") {
        let name = at.get("nodePublishSecretRef.name");
        if name.need() {
            name.called(at.child_path("name")).name(names::dns1123_subdomain);
        }
    }
}

fn persistent_csi(at: &At<'_>) {
    csi_driver_name(&at.get("driver"));
    at.get("volumeHandle").need();
    for field in [
        "controllerPublishSecretRef",
        "controllerExpandSecretRef",
        "nodePublishSecretRef",
        "nodeExpandSecretRef",
    ] {
        if at.has(field) {
            at.get(field).get("name").need_name(names::dns1123_subdomain);
            at.get(field).get("namespace").need_name(names::dns1123_label);
        }
    }
}

fn ephemeral(at: &At<'_>) {
    let template = at.get("volumeClaimTemplate");
    if !template.is_set() {
        return template.required("");
    }
    template.get("metadata.annotations").annotations();
    template.get("metadata.labels").labels();
    for (key, _) in template.get("metadata").entries() {
        if !["annotations", "labels"].contains(&key) {
            template.get("metadata").named(key).forbidden("cannot be set");
        }
    }
    storage::claim_spec(&template.get("spec"));
}

fn image(at: &At<'_>) {
    // A template may leave it to an overlay; upstream asks for it in pods only.
    if !at.path.to_string().contains("template") {
        at.get("reference").need();
    }
    super::container::pull_policy(&at.get("pullPolicy"));
}

const MODE: &str = "must be a number between 0 and 0777 (octal), both inclusive";

fn mode(at: &At<'_>) {
    if at.number().is_some_and(|mode| !(0..=0o777).contains(&mode)) {
        at.invalid(MODE);
    }
}

/// A Secret or ConfigMap whose keys become files.
fn keys(at: &At<'_>, name: &'static str) {
    at.get(name).need();
    mode(&at.get("defaultMode"));
    at.get("items").items().for_each(|item| key_to_path(&item));
}

fn key_to_path(at: &At<'_>) {
    need(at, &["key", "path"]);
    local_path(&at.get("path"));
    mode(&at.get("mode"));
}

fn downward_api(at: &At<'_>) {
    mode(&at.get("defaultMode"));
    for file in at.get("items").items() {
        // Upstream's path has no index.
        downward_file(&file.called(at.path.clone()));
    }
}

fn downward_file(at: &At<'_>) {
    at.get("path").need();
    local_path(&at.get("path"));
    const FIELDS: &[&str] = &[
        "metadata.annotations",
        "metadata.labels",
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
    ];
    if at.has("fieldRef") {
        super::container::field_ref(&at.get("fieldRef"), FIELDS);
        if at.has("resourceFieldRef") {
            at.invalid_as(
                "resource",
                "fieldRef and resourceFieldRef can not be specified simultaneously",
            );
        }
    } else if at.has("resourceFieldRef") {
        super::container::resource_field_ref(&at.get("resourceFieldRef"), true);
    } else {
        at.required("one of fieldRef and resourceFieldRef is required");
    }
    mode(&at.get("mode"));
}

fn projected(at: &At<'_>) {
    mode(&at.get("defaultMode"));
    let mut paths: HashSet<String> = HashSet::new();
    let mut take = |path: &str, shown: &str| {
        if !paths.insert(path.into()) {
            at.invalid_as(shown, "conflicting duplicate paths");
        }
    };
    for source in at.get("sources").items() {
        for kind in ["secret", "configMap"] {
            let place = source.get(kind);
            if !place.is_set() {
                continue;
            }
            place.get("name").need();
            for item in place.get("items").items() {
                key_to_path(&item);
                if !item.get("path").is_empty() {
                    take(item.get("path").str(), place.get("name").str());
                }
            }
        }
        for file in source.get("downwardAPI.items").items() {
            downward_file(&file.called(source.child_path("downwardAPI")));
            if !file.get("path").is_empty() {
                take(file.get("path").str(), file.get("path").str());
            }
        }
        if source.has("serviceAccountToken") {
            projected_token(at, &source.get("serviceAccountToken"));
        }
        if source.has("clusterTrustBundle") {
            let bundle = source.get("clusterTrustBundle");
            trust_bundle(&bundle);
            take(bundle.get("path").str(), bundle.get("path").str());
        }
        let kinds = source.entries().filter(|(_, place)| place.is_set()).count();
        if kinds > 1 {
            source.forbidden("may not specify more than 1 volume type per source");
        }
    }
}

fn projected_token(volume: &At<'_>, at: &At<'_>) {
    let seconds = at.get("expirationSeconds");
    if seconds.int() < 600 {
        seconds.invalid("may not specify a duration less than 10 minutes");
    }
    if seconds.int() > 1 << 32 {
        seconds.invalid("may not specify a duration larger than 2^32 seconds");
    }
    let path = at.get("path").called(volume.child_path("path"));
    if path.need() {
        local_path(&path);
    }
}

fn trust_bundle(at: &At<'_>) {
    match (at.has("name"), at.has("signerName")) {
        (true, true) => at.invalid("only one of name and signerName may be used"),
        (false, false) => at.required("either name or signerName must be specified"),
        (true, false) => {
            if at.get("name").is_empty() {
                at.get("name").required("must be a valid object name");
            }
            if at.has("labelSelector") {
                at.get("labelSelector").invalid("labelSelector must be unset if name is specified");
            }
        }
        (false, true) => {
            if at.get("signerName").is_empty() {
                at.get("signerName").required("must be a valid signer name");
            }
            at.get("labelSelector").selector();
        }
    }
    at.get("path").need();
    local_path(&at.get("path"));
}

pub(crate) fn no_backsteps(at: &At<'_>) {
    if at.str().split('/').any(|part| part == "..") {
        at.invalid("must not contain '..'");
    }
}

/// Relative, and never up.
pub(crate) fn descending(at: &At<'_>) {
    if at.str().starts_with('/') {
        at.invalid("must be a relative path");
    }
    no_backsteps(at);
}

fn local_path(at: &At<'_>) {
    descending(at);
    if at.str().starts_with("..") && !at.str().starts_with("../") {
        at.invalid("must not start with '..'");
    }
}
