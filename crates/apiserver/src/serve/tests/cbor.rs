//! The server with clients that use CBOR, with the gate on and off.

use machinery::cbor;
use release::features::{self, Feature, Gates};

use super::*;

const CBOR: &str = "application/cbor";
const BOTH: [(&str, &str); 2] = [("content-type", CBOR), ("accept", CBOR)];

fn shown(answer: &Answer) -> Value {
    assert_eq!(answer.header("content-type"), CBOR, "{:?}", answer.body);
    assert!(answer.body.starts_with(cbor::MAGIC), "{:?}", answer.body);
    serde_json::from_slice(&cbor::to_json(&answer.body).expect("CBOR")).expect("JSON")
}

fn body(tree: &Value) -> Vec<u8> {
    cbor::object(tree.to_string().as_bytes()).expect("JSON")
}

/// Gates are thread-local in tests, so the whole test runs on one thread.
fn with_open_gate(work: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let gates = Gates::DEFAULT.with(Feature::CBORServingAndStorage, true);
    features::scoped(gates, || runtime.expect("a runtime").block_on(work));
}

#[test]
fn objects_lists_and_options_are_cbor() {
    with_open_gate(async {
        let bench = Bench::new();
        let sent = json!({ "metadata": { "name": "x" }, "data": { "a": "b" } });
        let created = bench.ask_bytes(&format!("POST {MAPS}"), &BOTH, body(&sent)).await;
        assert_eq!((created.code, &shown(&created)["data"]), (201, &sent["data"]));
        let got = bench.ask_bytes(&format!("GET {MAPS}/x"), &BOTH, "").await;
        let json = bench.ask(&format!("GET {MAPS}/x"), Value::Null).await.json();
        assert_eq!(shown(&got), json);

        let configuration = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "x" }, "data": { "c": "d" } });
        let headers = [("content-type", "application/apply-patch+cbor"), ("accept", CBOR)];
        let line = format!("PATCH {MAPS}/x?fieldManager=m");
        let applied = bench.ask_bytes(&line, &headers, body(&configuration)).await;
        assert_eq!(shown(&applied)["data"], json!({ "a": "b", "c": "d" }));
        let broken = bench.ask_bytes(&line, &headers, "\u{1}").await;
        assert_eq!(broken.code, 400, "{:?}", shown(&broken));

        for index in 0..40 {
            let data = json!({ "metadata": { "name": format!("m{index:02}") }, "data": { "a": "x".repeat(20_000) } });
            assert_eq!(bench.ask(&format!("POST {MAPS}"), data).await.code, 201);
        }
        for query in ["", "?limit=1", "?labelSelector=none"] {
            let list = bench.ask_bytes(&format!("GET {MAPS}{query}"), &BOTH, "").await;
            let json = bench.ask(&format!("GET {MAPS}{query}"), Value::Null).await.json();
            assert_eq!(shown(&list)["items"], json["items"], "{query}");
        }
        let cut = format!("{CBOR};as=PartialObjectMetadata;g=meta.k8s.io;v=v1");
        let answer = bench.ask_bytes(&format!("GET {MAPS}/x"), &[("accept", &cut)], "").await;
        assert_eq!(shown(&answer)["kind"], "PartialObjectMetadata");
        // Errors for a client that requests another form are in the common form.
        let missing = bench.ask_bytes(&format!("GET {MAPS}/none"), &[("accept", &cut)], "").await;
        assert_eq!((missing.code, missing.header("content-type")), (404, "application/json"));
        let options = json!({ "preconditions": { "uid": "other" } });
        let refused = bench.ask_bytes(&format!("DELETE {MAPS}/x"), &BOTH, body(&options)).await;
        assert_eq!((refused.code, &shown(&refused)["reason"]), (409, &json!("Conflict")));
        bench.end().await;
    });
}

#[test]
fn watches_are_sequences() {
    with_open_gate(async {
        let bench = Bench::new();
        bench.create_config_map("x").await;
        let line = format!("GET {MAPS}?watch=1");
        let response = bench.send(&line, &[("accept", CBOR)], "").await;
        assert_eq!(response.headers()["content-type"], "application/cbor-seq");
        let frame = response.into_body().frame().await.expect("a frame").expect("no error");
        let frame = frame.into_data().expect("data");
        let event: Value =
            serde_json::from_slice(&cbor::to_json(&frame).expect("one item")).expect("JSON");
        assert_eq!(
            (&event["type"], &event["object"]["metadata"]["name"]),
            (&json!("ADDED"), &json!("x"))
        );
        let refused = bench.ask_with(&line, &[("accept", "application/yaml")], "").await;
        let why = "only the following media types are accepted: application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch, application/cbor-seq";
        assert!(String::from_utf8_lossy(&refused.body).contains(why), "{:?}", refused.body);
        bench.end().await;
    });
}

#[test]
fn invalid_objects_are_refused_in_upstreams_words() {
    with_open_gate(async {
        let bench = Bench::new();
        let check = async |body: Vec<u8>, expected: &str| {
            let headers = [("content-type", CBOR)];
            let answer = bench.ask_bytes(&format!("POST {MAPS}"), &headers, body).await;
            assert_eq!((answer.code, answer.message().as_str()), (400, expected));
        };
        check(vec![], "the object provided is unrecognized (must be of type ConfigMap): unable to determine group/version/kind: EOF (<empty>)").await;
        check(b"{}".to_vec(), "the object provided is unrecognized (must be of type ConfigMap): unable to determine group/version/kind: unexpected EOF ({})").await;
        check(body(&json!([])), "the object provided is unrecognized (must be of type ConfigMap): unable to determine group/version/kind: cbor: cannot unmarshal array into Go value of type v1.TypeMeta (cannot decode CBOR array to struct without toarray option) (d9d9f780)").await;
        check(body(&json!({ "kind": -7 })), "the object provided is unrecognized (must be of type ConfigMap): unable to determine group/version/kind: cbor: cannot unmarshal negative integer into Go struct field v1.TypeMeta.kind of type string (d9d9f7a1446b696e6426)").await;
        check([&[0xa2][..], b"\x41a\x01\x41a\x02"].concat(), "the object provided is unrecognized (must be of type ConfigMap): unable to determine group/version/kind: cbor: found duplicate map key \"a\" at map element index 1 (a2416101416102)").await;
        bench.end().await;
    });
}

#[tokio::test]
async fn cbor_is_not_served_while_the_gate_is_off() {
    let bench = Bench::new();
    let sent = body(&json!({ "metadata": { "name": "x" } }));
    let refused = bench.ask_bytes(&format!("POST {MAPS}"), &[("content-type", CBOR)], sent).await;
    assert_eq!(refused.code, 415, "{}", refused.message());
    let refused = bench.ask_bytes(&format!("GET {MAPS}"), &[("accept", CBOR)], "").await;
    assert_eq!(refused.code, 406, "{}", refused.message());
    bench.end().await;
}
