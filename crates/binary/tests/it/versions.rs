//! Versions that are off by default, turned on: an object of each version is created, read in the others,
//! patched, watched and deleted.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testkit::http::{ApiClient, Connection};

use crate::support::{LONG, Server};

const JSON: (&str, &str) = ("Content-Type", "application/json");
const MERGE: (&str, &str) = ("Content-Type", "application/merge-patch+json");
const APPLY: (&str, &str) = ("Content-Type", "application/apply-patch+yaml");

/// A resource with its versions, and the content of one object.
struct Case {
    group: &'static str,
    versions: &'static [&'static str],
    resource: &'static str,
    kind: &'static str,
    /// Spec and other fields in each version (the last one is used for all later ones).
    bodies: fn() -> Vec<Value>,
    /// Fields that differ between versions: a pointer and a value.
    shows: &'static [(&'static str, &'static str, &'static str)],
}

const fn case(
    group: &'static str,
    versions: &'static [&'static str],
    resource: &'static str,
    kind: &'static str,
    bodies: fn() -> Vec<Value>,
) -> Case {
    Case { group, versions, resource, kind, bodies, shows: &[] }
}

const ADMISSION: &str = "admissionregistration.k8s.io";
const DEVICES: &str = "resource.k8s.io";
const NETWORKING: &str = "networking.k8s.io";

const CASES: &[Case] = &[
    case(
        ADMISSION,
        &["v1alpha1", "v1beta1", "v1"],
        "mutatingadmissionpolicies",
        "MutatingAdmissionPolicy",
        || {
            let rule = json!({"apiGroups": ["zz.example"], "apiVersions": ["v1"],
                "operations": ["CREATE"], "resources": ["things"]});
            vec![json!({"spec": {"reinvocationPolicy": "Never",
                "matchConstraints": {"resourceRules": [rule]},
                "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": "[]"}}]}})]
        },
    ),
    case(
        ADMISSION,
        &["v1beta1", "v1alpha1", "v1"],
        "mutatingadmissionpolicybindings",
        "MutatingAdmissionPolicyBinding",
        || vec![json!({"spec": {"policyName": "nobody"}})],
    ),
    case(NETWORKING, &["v1beta1", "v1"], "ipaddresses", "IPAddress", || {
        let parent = json!({"resource": "services", "namespace": "default", "name": "kubernetes"});
        vec![json!({"name": "10.43.77.7", "spec": {"parentRef": parent}})]
    }),
    case(NETWORKING, &["v1beta1", "v1"], "servicecidrs", "ServiceCIDR", || {
        vec![json!({"spec": {"cidrs": ["10.77.0.0/24"]}})]
    }),
    case(
        "storage.k8s.io",
        &["v1beta1", "v1"],
        "volumeattributesclasses",
        "VolumeAttributesClass",
        || vec![json!({"driverName": "d.example", "parameters": {"a": "b"}})],
    ),
    case(DEVICES, &["v1beta1", "v1beta2", "v1"], "deviceclasses", "DeviceClass", || {
        vec![json!({"spec": {"selectors": [{"cel": {"expression": "true"}}]}})]
    }),
    Case {
        shows: &[
            ("v1beta1", "/spec/devices/requests/0/count", "1"),
            ("v1beta2", "/spec/devices/requests/0/exactly/count", "1"),
            ("v1", "/spec/devices/requests/0/exactly/deviceClassName", "\"c\""),
        ],
        ..case(DEVICES, &["v1beta1", "v1beta2", "v1"], "resourceclaims", "ResourceClaim", || {
            let claim = |request: Value| json!({"spec": {"devices": {"requests": [request]}}});
            vec![
                claim(json!({"name": "r", "deviceClassName": "c"})),
                claim(json!({"name": "r", "exactly": {"deviceClassName": "c"}})),
            ]
        })
    },
    Case {
        shows: &[("v1beta1", "/spec/spec/devices/requests/0/deviceClassName", "\"c\"")],
        ..case(
            DEVICES,
            &["v1beta1", "v1beta2", "v1"],
            "resourceclaimtemplates",
            "ResourceClaimTemplate",
            || {
                let claim =
                    |one: Value| json!({"spec": {"spec": {"devices": {"requests": [one]}}}});
                vec![
                    claim(json!({"name": "r", "deviceClassName": "c"})),
                    claim(json!({"name": "r", "exactly": {"deviceClassName": "c"}})),
                ]
            },
        )
    },
    Case {
        shows: &[
            ("v1beta1", "/spec/devices/0/basic/attributes/a/int", "1"),
            ("v1beta2", "/spec/devices/0/attributes/a/int", "1"),
        ],
        ..case(DEVICES, &["v1beta1", "v1beta2", "v1"], "resourceslices", "ResourceSlice", || {
            let slice = |device: Value| {
                json!({"spec": {"driver": "d.example", "nodeName": "n", "devices": [device],
                    "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}}})
            };
            vec![
                slice(json!({"name": "d", "basic": {"attributes": {"a": {"int": 1}}}})),
                slice(json!({"name": "d", "attributes": {"a": {"int": 1}}})),
            ]
        })
    },
    case(
        "certificates.k8s.io",
        &["v1alpha1", "v1beta1"],
        "clustertrustbundles",
        "ClusterTrustBundle",
        || {
            vec![json!({"name": "e.example:one:x", "spec": {"signerName": "e.example/one",
            "trustBundle": anchor()}})]
        },
    ),
    case(
        "certificates.k8s.io",
        &["v1beta1"],
        "podcertificaterequests",
        "PodCertificateRequest",
        || {
            vec![json!({"spec": {"signerName": "e.example/one", "podName": "p", "podUID": "1",
                "serviceAccountName": "default", "serviceAccountUID": "2", "nodeName": "n",
                "nodeUID": "3", "stubPKCS10Request": request()}})]
        },
    ),
    case(
        "coordination.k8s.io",
        &["v1alpha2", "v1beta1"],
        "leasecandidates",
        "LeaseCandidate",
        || {
            vec![json!({"spec": {"leaseName": "l", "binaryVersion": "1.36.0",
                "emulationVersion": "1.36.0", "strategy": "OldestEmulationVersion"}})]
        },
    ),
    case("internal.apiserver.k8s.io", &["v1alpha1"], "storageversions", "StorageVersion", || {
        vec![json!({"name": "apps.deployments", "spec": {}})]
    }),
    case(DEVICES, &["v1alpha3", "v1beta2"], "devicetaintrules", "DeviceTaintRule", || {
        vec![json!({"spec": {"deviceSelector": {"driver": "d.example"},
            "taint": {"key": "e.example/k", "value": "v", "effect": "NoSchedule"}}})]
    }),
    case(DEVICES, &["v1alpha3"], "resourcepoolstatusrequests", "ResourcePoolStatusRequest", || {
        vec![json!({"spec": {"driver": "d.example"}})]
    }),
    case("scheduling.k8s.io", &["v1alpha2"], "workloads", "Workload", || {
        vec![json!({"spec": {"podGroupTemplates": [
            {"name": "a", "schedulingPolicy": {"gang": {"minCount": 2}}}]}})]
    }),
    case("scheduling.k8s.io", &["v1alpha2"], "podgroups", "PodGroup", || {
        vec![json!({"spec": {"schedulingPolicy": {"basic": {}}}})]
    }),
    case(
        "storagemigration.k8s.io",
        &["v1beta1"],
        "storageversionmigrations",
        "StorageVersionMigration",
        || vec![json!({"spec": {"resource": {"group": "", "resource": "things"}}})],
    ),
];

/// A trust anchor, PEM.
fn anchor() -> String {
    pki::Authority::generate("it").expect("keys can be made").cert_pem().to_owned()
}

/// A certificate request, in base64 as in JSON.
pub fn request() -> String {
    let profile = pki::Profile::client("it", &[]);
    let (pem, _) = pki::new_request(&profile).expect("keys can be made");
    pem.lines().filter(|line| !line.starts_with("-----")).collect()
}

/// One client of one server.
struct World {
    api: ApiClient,
    connection: Connection,
}

impl World {
    fn of(server: &Server) -> Result<Self> {
        let api = server.api()?;
        Ok(Self { connection: Connection::new(server.api()?, LONG), api })
    }

    fn send(
        &mut self,
        verb: &str,
        path: &str,
        kind: (&str, &str),
        body: &Value,
        expected: u16,
    ) -> Result<Value> {
        let headers = [("Accept", "application/json"), kind];
        let answer = self.connection.send(verb, path, &headers, body.to_string().as_bytes())?;
        ensure!(answer.status == expected, "{verb} {path}: {} {}", answer.status, answer.body);
        Ok(serde_json::from_str(&answer.body)?)
    }

    fn get(&mut self, path: &str) -> Result<Value> {
        self.send("GET", path, JSON, &Value::Null, 200)
    }
}

impl Case {
    fn is_namespaced(&self, world: &mut World, version: &str) -> Result<bool> {
        let list = world.get(&format!("/apis/{}/{version}", self.group))?;
        let all = list["resources"].as_array().context("a list of resources")?;
        let found = all
            .iter()
            .find(|one| one["name"] == self.resource)
            .with_context(|| format!("{} is not in {}/{version}", self.resource, self.group))?;
        ensure!(found["kind"] == self.kind, "{found}");
        Ok(found["namespaced"] == true)
    }

    fn run(&self, world: &mut World) -> Result<()> {
        let is_namespaced = self.is_namespaced(world, self.versions[0])?;
        let place = if is_namespaced { "/namespaces/default" } else { "" };
        let paths: Vec<String> = self
            .versions
            .iter()
            .map(|version| format!("/apis/{}/{version}{place}/{}", self.group, self.resource))
            .collect();
        let bodies = (self.bodies)();
        for (index, path) in paths.iter().enumerate() {
            let mut body = bodies.get(index).or(bodies.last()).context("a body")?.clone();
            let name = body.as_object_mut().and_then(|fields| fields.remove("name"));
            let name = name.and_then(|name| name.as_str().map(str::to_owned));
            let name = name.unwrap_or_else(|| "one".into());
            body["metadata"] = json!({"name": name, "labels": {"of": "it"}});
            self.live_once(world, &paths, index, path, body, &name)
                .with_context(|| format!("{} in {}", self.kind, self.versions[index]))?;
        }
        Ok(())
    }

    /// The life of one object, created in one version.
    fn live_once(
        &self,
        world: &mut World,
        paths: &[String],
        index: usize,
        path: &str,
        mut body: Value,
        name: &str,
    ) -> Result<()> {
        let api_version = |index: usize| format!("{}/{}", self.group, self.versions[index]);
        body["apiVersion"] = api_version(index).into();
        body["kind"] = self.kind.into();
        let strict = format!("{path}?fieldValidation=Strict");
        let made = world.send("POST", &strict, JSON, &body, 201)?;
        ensure!(made["apiVersion"] == api_version(index), "{made}");
        let revision = made["metadata"]["resourceVersion"].as_str().context("a revision")?;
        for (other, path) in paths.iter().enumerate() {
            let seen = world.get(&format!("{path}/{name}"))?;
            ensure!(
                seen["apiVersion"] == api_version(other) && seen["kind"] == self.kind,
                "{seen}"
            );
            ensure!(seen["metadata"]["uid"] == made["metadata"]["uid"], "{seen}");
            for (_, pointer, expected) in
                self.shows.iter().filter(|(version, ..)| *version == self.versions[other])
            {
                let expected: Value = serde_json::from_str(expected)?;
                ensure!(seen.pointer(pointer) == Some(&expected), "{pointer}: {seen}");
            }
            let patch = json!({"metadata": {"labels": {self.versions[other]: "patched"}}});
            let patched = world.send("PATCH", &format!("{path}/{name}"), MERGE, &patch, 200)?;
            ensure!(patched["apiVersion"] == api_version(other), "{patched}");
            let list = world.get(&format!("{path}?labelSelector=of%3Dit"))?;
            ensure!(list["kind"] == format!("{}List", self.kind), "{list}");
            ensure!(list["apiVersion"] == api_version(other), "{list}");
            ensure!(list["items"].as_array().map(Vec::len) == Some(1), "{list}");
            let applied = json!({"apiVersion": api_version(other), "kind": self.kind,
                "metadata": {"name": name, "annotations": {self.versions[other]: "applied"}}});
            let apply = format!("{path}/{name}?fieldManager=it-{}", self.versions[other]);
            world.send("PATCH", &apply, APPLY, &applied, 200)?;
        }
        world.send("DELETE", &format!("{path}/{name}"), JSON, &Value::Null, 200)?;
        self.see_events(world, paths, revision, &api_version)
    }

    /// The watches of all versions report the same changes, each in its own form.
    fn see_events(
        &self,
        world: &World,
        paths: &[String],
        revision: &str,
        api_version: &dyn Fn(usize) -> String,
    ) -> Result<()> {
        for (other, path) in paths.iter().enumerate() {
            let watch = format!(
                "{path}?watch=true&labelSelector=of%3Dit&timeoutSeconds=60&resourceVersion={revision}"
            );
            let mut count = 0;
            let mut wrong = None;
            world.api.stream(&watch, LONG, |line| {
                let event: Value = serde_json::from_str(line).unwrap_or_default();
                if event["object"]["apiVersion"] != api_version(other) {
                    wrong = Some(line.to_owned());
                }
                count += 1;
                event["type"] != "DELETED" && wrong.is_none()
            })?;
            ensure!(wrong.is_none(), "{wrong:?}");
            ensure!(count > paths.len(), "{path}: {count} events");
        }
        Ok(())
    }
}

#[test]
fn every_version_that_is_off_by_default_works_when_it_is_on() -> Result<()> {
    let gates = "ClusterTrustBundle=true,PodCertificateRequest=true,GenericWorkload=true,StorageVersionMigrator=true,CoordinatedLeaderElection=true";
    let server = Server::start(&["--runtime-config", "api/all=true", "--feature-gates", gates])?;
    let mut world = World::of(&server)?;
    for case in CASES {
        case.run(&mut world)?;
    }
    // No served version is missing above.
    let groups = world.get("/apis")?;
    let mut served: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for group in groups["groups"].as_array().into_iter().flatten() {
        let versions = group["versions"].as_array().into_iter().flatten();
        let versions = versions.filter_map(|one| one["version"].as_str().map(str::to_owned));
        served.insert(group["name"].as_str().unwrap_or_default().to_owned(), versions.collect());
    }
    for (group, versions) in &served {
        for version in versions.iter().filter(|one| one.contains("alpha") || one.contains("beta")) {
            let is_tried =
                |case: &Case| case.group == group && case.versions.contains(&version.as_str());
            let is_known = CASES.iter().any(is_tried) || group == "metrics.k8s.io";
            ensure!(is_known, "{group}/{version} is served and not tried");
        }
    }
    ensure!(served[DEVICES].iter().map(String::as_str).take(3).eq(["v1", "v1beta2", "v1beta1"]));
    let document = world.get(&format!("/openapi/v3/apis/{DEVICES}/v1beta1"))?;
    let basic = "/components/schemas/io.k8s.api.resource.v1beta1.Device/properties/basic";
    ensure!(document.pointer(basic).is_some(), "no schema of v1beta1");
    let table = world.connection.send(
        "GET",
        &format!("/apis/{DEVICES}/v1beta1/resourceslices"),
        &[("Accept", "application/json;as=Table;g=meta.k8s.io;v=v1")],
        b"",
    )?;
    ensure!(table.body.contains("\"Driver\""), "{}", table.body);
    Ok(())
}

#[test]
fn no_version_is_served_by_default() -> Result<()> {
    let server = Server::start(&["--runtime-config", "resource.k8s.io/v1beta2/deviceclasses"])?;
    let api = server.api()?;
    for case in CASES {
        for version in case.versions.iter().filter(|version| **version != "v1") {
            let is_on = case.resource == "deviceclasses" && *version == "v1beta2";
            let path = format!("/apis/{}/{version}/{}", case.group, case.resource);
            let answer = api.get(&path, LONG)?;
            ensure!(answer.status == if is_on { 200 } else { 404 }, "{path}: {}", answer.status);
        }
    }
    Ok(())
}
