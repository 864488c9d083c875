//! The allocation of devices to claims.

use serde_json::{Value, from_value, json};

use super::*;

const DRIVER: &str = "gpu.example.com";

fn slice(name: &str, extra: Value) -> Value {
    let mut slice = json!({"metadata": {"name": name}, "spec": {"driver": DRIVER, "nodeName": "n1",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1}, "devices": []}});
    merge(&mut slice["spec"], extra);
    slice
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                match value {
                    Value::Null => drop(into.remove(&key)),
                    value => merge(into.entry(key).or_insert(Value::Null), value),
                }
            }
        }
        (into, from) => *into = from,
    }
}

/// A device with a model, an index and memory.
fn gpu(name: &str, model: &str, index: i64) -> Value {
    json!({"name": name, "attributes": {"model": {"string": model}, "index": {"int": index},
        "gpu.example.com/driverVersion": {"version": "1.2.3"}}, "capacity": {"memory": {"value": "40Gi"}}})
}

/// Two of one model, one of another.
fn three() -> Value {
    slice("s", json!({"devices": [gpu("g0", "A", 0), gpu("g1", "A", 1), gpu("g2", "B", 2)]}))
}

fn request(name: &str, extra: Value) -> Value {
    let mut exactly = json!({"deviceClassName": "gpu"});
    merge(&mut exactly, extra);
    json!({"name": name, "exactly": exactly})
}

fn claim(devices: Value) -> Value {
    json!({"metadata": {"name": "c", "namespace": "ns", "uid": "u"}, "spec": {"devices": devices}})
}

fn one(extra: Value) -> Value {
    claim(json!({"requests": [request("r", extra)]}))
}

fn select(expression: &str) -> Value {
    json!({"selectors": [{"cel": {"expression": expression}}]})
}

fn world(slices: &[Value], taken: &[&str]) -> World {
    let class = |name: &str, spec: Value| {
        let class = json!({"metadata": {"name": name}, "spec": spec});
        (name.to_owned(), Arc::new(from_value::<DeviceClass>(class).unwrap()))
    };
    let mut all = Taken::default();
    for device in taken {
        let result = json!({"devices": {"results": [{"request": "r", "driver": DRIVER, "pool": "n1",
            "device": device}]}});
        all.add(&from_value(result).unwrap());
    }
    World {
        slices: slices.iter().map(|one| Arc::new(from_value(one.clone()).unwrap())).collect(),
        classes: [
            class(
                "gpu",
                json!({"selectors": [{"cel": {"expression": "device.driver == 'gpu.example.com'"}}],
                    "config": [{"opaque": {"driver": DRIVER, "parameters": {"of": "class"}}}]}),
            ),
            class("b", select("device.attributes['gpu.example.com'].model == 'B'")),
        ]
        .into(),
        taken: all,
    }
}

fn allocated(world: &World, claims: &[Value]) -> Result<Option<Vec<AllocationResult>>, Failure> {
    allocated_within(world, claims, Limit::default())
}

fn allocated_within(
    world: &World,
    claims: &[Value],
    limit: Limit,
) -> Result<Option<Vec<AllocationResult>>, Failure> {
    let claims: Vec<Arc<ResourceClaim>> =
        claims.iter().map(|one| Arc::new(from_value(one.clone()).unwrap())).collect();
    let labels = BTreeMap::from([("zone".to_owned(), "z1".to_owned())]);
    allocate(world, Place { node: "n1", labels: &labels, limit }, &claims, &Selectors::default())
}

/// `request=device` of all claims in order, `none`, or the error.
fn found(world: &World, claims: &[Value]) -> String {
    match allocated(world, claims) {
        Ok(None) => "none".into(),
        Err(why) => why.to_string(),
        Ok(Some(all)) => {
            let results = all.iter().flat_map(|one| one.devices.as_ref().unwrap().results.iter());
            let shown = results.flatten().map(|one| format!("{}={}", one.request, one.device));
            shown.collect::<Vec<_>>().join(" ")
        }
    }
}

#[test]
fn the_first_devices_that_will_do_are_given() {
    let check = |what: &str, taken: &[&str], claims: &[Value], expected: &str| {
        assert_eq!(found(&world(&[three()], taken), claims), expected, "{what}");
    };
    check("one", &[], &[one(json!({}))], "r=g0");
    check("one that is free", &["g0"], &[one(json!({}))], "r=g1");
    check("none is free", &["g0", "g1", "g2"], &[one(json!({}))], "none");
    check("several", &[], &[one(json!({"count": 3}))], "r=g0 r=g1 r=g2");
    check("too many", &[], &[one(json!({"count": 4}))], "none");
    check("two claims", &[], &[one(json!({})), one(json!({}))], "r=g0 r=g1");
    check("all", &[], &[one(json!({"allocationMode": "All"}))], "r=g0 r=g1 r=g2");
    check("all are not free", &["g1"], &[one(json!({"allocationMode": "All"}))], "none");
    let model =
        |model: &str| select(&format!("device.attributes['gpu.example.com'].model == '{model}'"));
    check("a selector", &[], &[one(model("B"))], "r=g2");
    check("a class's", &[], &[one(json!({"deviceClassName": "b"}))], "r=g2");
    let mut all_a = model("A");
    all_a["allocationMode"] = "All".into();
    check("all of a model", &[], &[one(all_a)], "r=g0 r=g1");
    check("no such model", &[], &[one(model("C"))], "none");
    let big = select("device.capacity['gpu.example.com'].memory.compareTo(quantity('41Gi')) >= 0");
    check("too small", &[], &[one(big)], "none");
    // What the first request takes may be what the second needs.
    let choosy = claim(json!({"requests": [request("any", json!({})),
        request("a", model("A")), request("b", model("A"))]}));
    check("the first yields", &[], &[choosy], "any=g2 a=g0 b=g1");
    check("an administrator", &["g0"], &[one(json!({"adminAccess": true}))], "r=g0");
    let many = one(json!({"count": 33}));
    let why = "claim ns/c: number of requested devices 33 exceeds the claim limit of 32";
    check("more than fit into a claim", &[], &[many], why);
}

#[test]
fn what_is_wrong_is_said_as_upstream_says_it() {
    let check = |claim: Value, expected: &str| {
        assert_eq!(found(&world(&[three()], &[]), &[claim]), expected);
    };
    check(
        one(json!({"deviceClassName": "x"})),
        "claim ns/c, request r: could not retrieve device class x: deviceclass.resource.k8s.io \"x\" not found",
    );
    check(
        one(select("device.attributes['gpu.example.com'].nope == 1")),
        "claim ns/c: selector #0: CEL runtime error: no such key: nope",
    );
    check(
        one(json!({"allocationMode": "Some"})),
        "claim ns/c, request r: unsupported count mode Some",
    );
    check(
        claim(json!({"requests": [request("r", json!({"allocationMode": "All"}))],
            "constraints": [{"matchAttribute": "gpu.example.com/model"}]})),
        "claim ns/c, request r: cannot add device gpu.example.com/n1/g2 because a claim constraint would not be satisfied",
    );
    check(
        claim(json!({"requests": [request("r", json!({}))], "constraints": [{}]})),
        "claim ns/c, constraint #0: empty constraint (unsupported constraint type?)",
    );
}

#[test]
fn constraints_bind_devices_to_each_other() {
    let check = |count: i64, constraint: Value, expected: &str| {
        let claim = claim(json!({"requests": [request("r", json!({"count": count}))],
            "constraints": [constraint]}));
        assert_eq!(found(&world(&[three()], &["g0"]), &[claim]), expected);
    };
    check(2, json!({"matchAttribute": "gpu.example.com/driverVersion"}), "r=g1 r=g2");
    check(2, json!({"matchAttribute": "gpu.example.com/model"}), "none");
    check(2, json!({"matchAttribute": "gpu.example.com/model", "requests": ["x"]}), "r=g1 r=g2");
    check(1, json!({"matchAttribute": "gpu.example.com/nope"}), "none");
    check(2, json!({"distinctAttribute": "gpu.example.com/index"}), "r=g1 r=g2");
    check(2, json!({"distinctAttribute": "gpu.example.com/driverVersion"}), "none");
}

#[test]
fn alternatives_are_tried_in_their_order() {
    let sub = |name: &str, extra: Value| {
        let mut sub = json!({"name": name, "deviceClassName": "gpu"});
        merge(&mut sub, extra);
        sub
    };
    let best = sub("best", json!({"deviceClassName": "b", "count": 2}));
    let check = |subs: Value, config: Value, expected: &str| {
        let claim =
            claim(json!({"requests": [{"name": "r", "firstAvailable": subs}], "config": config}));
        let world = world(&[three()], &[]);
        assert_eq!(found(&world, std::slice::from_ref(&claim)), expected);
        let typed: ResourceClaim = from_value(claim.clone()).unwrap();
        (allocated(&world, &[claim]).unwrap().unwrap_or_default(), typed)
    };
    let two = json!([best, sub("good", json!({"count": 2}))]);
    let config = json!([{"requests": ["r/good"], "opaque": {"driver": DRIVER, "parameters": 1}},
        {"requests": ["r/best"], "opaque": {"driver": DRIVER, "parameters": 2}},
        {"requests": ["r"], "opaque": {"driver": DRIVER, "parameters": 3}}]);
    let (all, claim) = check(two, config, "r/good=g0 r/good=g1");
    assert_eq!(score(&claim, &all[0]), 7);
    let config = json!(all[0].devices.as_ref().unwrap().config);
    assert_eq!(
        config,
        json!([
            {"source": "FromClass", "requests": ["r/good"],
                "opaque": {"driver": DRIVER, "parameters": {"of": "class"}}},
            {"source": "FromClaim", "requests": ["r/good"], "opaque": {"driver": DRIVER, "parameters": 1}},
            {"source": "FromClaim", "requests": ["r"], "opaque": {"driver": DRIVER, "parameters": 3}},
        ])
    );
    let (all, claim) =
        check(json!([sub("a", json!({"deviceClassName": "b"}))]), json!([]), "r/a=g2");
    assert_eq!(score(&claim, &all[0]), 8);
    check(json!([sub("a", json!({"count": 4}))]), json!([]), "none");
    // More than a claim may have is no solution, but no end either.
    check(json!([sub("a", json!({"count": 40})), sub("b", json!({}))]), json!([]), "r/b=g0");
}

#[test]
fn taints_keep_devices_from_claims() {
    let tainted = |effect: &str| {
        let mut device = gpu("g0", "A", 0);
        device["taints"] = json!([{"key": "k", "value": "v", "effect": effect}]);
        slice("s", json!({"devices": [device]}))
    };
    let check = |effect: &str, tolerations: Value, expected: &str| {
        let claim = one(json!({"tolerations": tolerations}));
        assert_eq!(found(&world(&[tainted(effect)], &[]), &[claim]), expected);
    };
    check("NoSchedule", json!([]), "none");
    check("NoExecute", json!([{"key": "other", "operator": "Exists"}]), "none");
    check("NoSchedule", json!([{"operator": "Exists"}]), "r=g0");
    check("NoSchedule", json!([{"key": "k", "operator": "Equal", "value": "v"}]), "r=g0");
    check("NoSchedule", json!([{"key": "k", "value": "w"}]), "none");
    check("None", json!([]), "r=g0");
}

#[test]
fn only_whole_pools_of_the_node_are_given_away() {
    let check = |what: &str, slices: &[Value], extra: Value, expected: &str| {
        assert_eq!(found(&world(slices, &[]), &[one(extra)]), expected, "{what}");
    };
    let of = |name: &str, device: &str, extra: Value| {
        let mut slice = slice(name, json!({"devices": [gpu(device, "A", 0)]}));
        merge(&mut slice["spec"], extra);
        slice
    };
    let pool = |generation: i64, count: i64| json!({"pool": {"generation": generation, "resourceSliceCount": count}});
    check("another node's", &[of("s", "g", json!({"nodeName": "n2"}))], json!({}), "none");
    check(
        "all nodes'",
        &[of("s", "g", json!({"nodeName": null, "allNodes": true}))],
        json!({}),
        "r=g",
    );
    let zone = |zone: &str| {
        json!({"nodeName": null, "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions":
            [{"key": "zone", "operator": "In", "values": [zone]}]}]}})
    };
    check("the zone's", &[of("s", "g", zone("z1"))], json!({}), "r=g");
    check("another zone's", &[of("s", "g", zone("z2"))], json!({}), "none");
    check("incomplete", &[of("s", "g", pool(1, 2))], json!({}), "none");
    let all = json!({"allocationMode": "All"});
    let why = "claim ns/c, request r: asks for all devices, but resource pool gpu.example.com/n1 is currently being updated";
    check("all of what is incomplete", &[of("s", "g", pool(1, 2))], all.clone(), why);
    check("whole", &[of("t", "h", pool(1, 2)), of("s", "g", pool(1, 2))], all, "r=g r=h");
    check(
        "old and new",
        &[of("a", "old", pool(1, 1)), of("b", "new", pool(2, 1))],
        json!({}),
        "r=new",
    );
    check(
        "twice the same",
        &[of("a", "g", pool(1, 2)), of("b", "g", pool(1, 2))],
        json!({}),
        "invalid resource pools were encountered",
    );
    let each = json!({"nodeName": null, "perDeviceNodeSelection": true, "devices": [
        {"name": "far", "nodeName": "n2"}, {"name": "near", "nodeName": "n1"}]});
    check("each its own", &[slice("s", each)], json!({}), "r=near");
}

#[test]
fn allocations_say_where_they_can_be_used() {
    let check = |extra: Value, expected: Value| {
        let mut slice = slice("s", json!({"devices": [gpu("g", "A", 0)]}));
        merge(&mut slice["spec"], extra);
        let all = allocated(&world(&[slice], &[]), &[one(json!({}))]);
        assert_eq!(json!(all.unwrap().unwrap()[0].node_selector), expected);
    };
    let only = json!({"nodeSelectorTerms": [{"matchFields":
        [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]});
    check(json!({}), only.clone());
    check(json!({"nodeName": null, "allNodes": true}), json!(null));
    let zone = json!({"nodeSelectorTerms": [{"matchExpressions":
        [{"key": "zone", "operator": "Exists"}]}]});
    check(json!({"nodeName": null, "nodeSelector": zone}), zone);
    let bound = json!({"nodeName": null, "allNodes": true, "devices": [{"name": "g", "bindsToNode": true}]});
    check(bound, only);
}

#[test]
fn partitions_share_what_their_device_has() {
    let counter = |amount: &str| json!({"memory": {"value": amount}});
    let counters = slice(
        "c",
        json!({"sharedCounters": [{"name": "gpu0", "counters": counter("40Gi")}],
        "devices": null, "nodeName": null, "allNodes": true, "pool": {"resourceSliceCount": 2}}),
    );
    let part = |name: &str, amount: &str| json!({"name": name, "consumesCounters": [{"counterSet": "gpu0", "counters": counter(amount)}]});
    let parts = slice(
        "d",
        json!({"pool": {"resourceSliceCount": 2},
        "devices": [part("whole", "40Gi"), part("half-0", "20Gi"), part("half-1", "20Gi")]}),
    );
    let both = [counters.clone(), parts.clone()];
    let check = |taken: &[&str], count: i64, expected: &str| {
        assert_eq!(found(&world(&both, taken), &[one(json!({"count": count}))]), expected);
    };
    check(&[], 1, "r=whole");
    check(&[], 2, "r=half-0 r=half-1");
    check(&[], 3, "none");
    check(&["whole"], 1, "none");
    check(&["half-0"], 1, "r=half-1");
    let unknown = slice(
        "d",
        json!({"pool": {"resourceSliceCount": 2}, "devices": [
        {"name": "x", "consumesCounters": [{"counterSet": "gpu9", "counters": counter("1")}]}]}),
    );
    let why = "invalid resource pools were encountered";
    assert_eq!(found(&world(&[counters, unknown], &[]), &[one(json!({}))]), why);
}

#[test]
fn shared_devices_are_given_by_capacity() {
    let policy =
        json!({"default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi", "max": "8Gi"}});
    let shared = slice(
        "s",
        json!({"devices": [{"name": "nic", "allowMultipleAllocations": true,
        "capacity": {"memory": {"value": "10Gi", "requestPolicy": policy}}}]}),
    );
    let wants = |amount: &str| one(json!({"capacity": {"requests": {"memory": amount}}}));
    let check = |claims: &[Value], expected: &[&str]| {
        let all = allocated(&world(std::slice::from_ref(&shared), &[]), claims).unwrap();
        let all = all.unwrap_or_default();
        let results =
            all.iter().flat_map(|one| one.devices.as_ref().unwrap().results.iter().flatten());
        let consumed: Vec<_> = results
            .map(|one| {
                assert!(one.share_id.is_some());
                one.consumed_capacity.as_ref().unwrap()["memory"].0.clone()
            })
            .collect();
        assert_eq!(consumed, expected);
    };
    check(&[wants("4Gi"), wants("6Gi")], &["4Gi", "6Gi"]);
    check(&[wants("4Gi"), wants("7Gi")], &[]);
    check(&[wants("1500Mi")], &["2Gi"]);
    check(&[wants("10Mi")], &["1Gi"]);
    check(&[wants("9Gi")], &[]);
    check(&[one(json!({}))], &["1Gi"]);
    check(&[one(json!({"capacity": {"requests": {"other": "1"}}}))], &[]);
    // What others have of it counts.
    let mut world = world(&[shared], &[]);
    let result = json!({"devices": {"results": [{"request": "r", "driver": DRIVER, "pool": "n1",
        "device": "nic", "shareID": "s", "consumedCapacity": {"memory": "8Gi"}}]}});
    world.taken.add(&from_value(result).unwrap());
    assert_eq!(found(&world, &[wants("2Gi")]), "r=nic");
    assert_eq!(found(&world, &[wants("3Gi")]), "none");
}

#[test]
fn the_search_ends() {
    // Two requests take many of many devices before the third finds none for itself.
    let devices: Vec<Value> = (0..40).map(|at| gpu(&format!("g{at:02}"), "A", at)).collect();
    let hopeless = claim(json!({"requests": [request("a", json!({"count": 12})),
        request("b", json!({"count": 12})), request("c", json!({"deviceClassName": "b"}))]}));
    let world = world(&[slice("s", json!({"devices": devices}))], &[]);
    assert_eq!(found(&world, std::slice::from_ref(&hopeless)), Failure::Exhausted.to_string());
    // A file says for how long, and no more.
    let limit = Limit::of(Some(std::time::Duration::from_millis(5)));
    let late = allocated_within(&world, &[hopeless], limit);
    assert_eq!(late.expect_err("time is up"), Failure::Exhausted);
}
