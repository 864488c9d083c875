//! The server as readers of its own process see it: objects that are not encoded.

use std::collections::BTreeMap;

use futures::StreamExt;
use transport::local::{Change, Changes, Given, Object, Objects, Wanted};

use super::*;

/// More than the watch cache remembers.
const WRITES: usize = 1200;
const NAMES: [&str; 4] = ["a", "b", "c", "gone"];

async fn ask(bench: &Bench, user: Option<&str>, query: &str) -> Response<Body> {
    let uri = format!("{MAPS}{query}");
    let request = Request::builder().uri(uri).header("user", "admin").extension(Wanted);
    let request = request.body(Full::new(bytes::Bytes::new())).expect("a request");
    let service = match user {
        Some(user) => bench.server.local(UserInfo::new(user, &[])),
        None => bench.server.service(),
    };
    service.oneshot(request).await.expect("infallible")
}

async fn given(bench: &Bench, query: &str) -> Objects {
    let mut response = ask(bench, Some("admin"), query).await;
    assert_eq!(response.status(), 200);
    let given = response.extensions_mut().remove::<Given>().expect("objects");
    given.take().expect("they are there once")
}

async fn watch(bench: &Bench, query: &str) -> (u64, Changes) {
    let Objects::List(list) = given(bench, "").await else { panic!("not a list") };
    let query = format!("?watch=true&resourceVersion={}{query}", list.revision);
    let Objects::Changes(changes) = given(bench, &query).await else { panic!("not a watch") };
    (list.revision, changes)
}

fn json_of(object: &dyn Object) -> Value {
    serde_json::from_slice(&object.json()).expect("JSON")
}

fn name_of(object: &dyn Object) -> String {
    json_of(object)["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn readers_in_the_process_get_what_they_may_read() {
    let bench = Bench::new();
    let created = bench.create_config_map("x").await;
    let Objects::List(list) = given(&bench, "?limit=1").await else { panic!("not a list") };
    let objects: Vec<Value> = list.objects.iter().map(|one| json_of(&**one)).collect();
    assert_eq!(objects, std::slice::from_ref(&created));
    let revision = created["metadata"]["resourceVersion"].as_str().and_then(|one| one.parse().ok());
    assert_eq!(Some(list.objects[0].revision()), revision);
    for query in ["", "?watch=true&resourceVersion=1"] {
        // The reader may get single objects.
        let refused = ask(&bench, Some("reader"), query).await;
        assert_eq!(refused.status(), 403, "{query}");
        assert!(refused.extensions().get::<Given>().is_none(), "{query}");
    }
    let foreign = ask(&bench, None, "").await;
    assert_eq!(foreign.status(), 200);
    assert!(foreign.extensions().get::<Given>().is_none(), "from the network");
    bench.end().await;
}

#[tokio::test]
async fn a_slow_reader_catches_up_with_the_newest_states() {
    let bench = Bench::new();
    for name in NAMES {
        bench.create_config_map(name).await;
    }
    let (_, mut all) = watch(&bench, "").await;
    let (_, mut selected) = watch(&bench, "&labelSelector=k%3Dv").await;
    // Both readers sleep, while more is written than the cache remembers.
    let mut last = 0;
    for round in 0..WRITES {
        let patch = match (round, NAMES[round % 3]) {
            // It ceases to match, long before its newest state.
            (1, _) => json!({ "metadata": { "labels": { "k": "w" } } }),
            _ => json!({ "data": { "a": round.to_string() } }),
        };
        let line = format!("PATCH {MAPS}/{}", NAMES[round % 3]);
        let answer = bench.ask(&line, patch).await;
        assert_eq!(answer.code, 200, "{}", answer.message());
        let version = answer.json()["metadata"]["resourceVersion"].clone();
        last = version.as_str().and_then(|text| text.parse().ok()).expect("a revision");
    }
    assert_eq!(bench.ask(&format!("DELETE {MAPS}/gone"), Value::Null).await.code, 200);
    let newest = |name: &str| (WRITES - 3..WRITES).find(|round| NAMES[round % 3] == name);
    for (changes, sees_b) in [(&mut all, true), (&mut selected, false)] {
        let mut known: BTreeMap<String, Value> = BTreeMap::new();
        let (mut count, mut deleted, mut reached) = (0, vec![], 0);
        while reached <= last {
            let more = changes.next().await.expect("the watch lasts");
            for change in more {
                count += 1;
                match change {
                    Change::Applied(object) => {
                        known.insert(name_of(&*object), json_of(&*object)["data"]["a"].clone());
                    }
                    Change::Deleted(object) => deleted.push(name_of(&*object)),
                    Change::Reached(revision) => {
                        (count, reached) = (count - 1, revision);
                    }
                    Change::Expired(why) => panic!("{why}"),
                }
            }
        }
        let expected = ["a", "b", "c"].into_iter().filter(|name| sees_b || *name != "b");
        let expected: BTreeMap<String, Value> = expected
            .map(|name| (name.to_owned(), newest(name).expect("a round").to_string().into()))
            .collect();
        assert_eq!(known, expected);
        assert!(deleted.contains(&"gone".to_owned()), "{deleted:?}");
        assert_eq!(deleted.contains(&"b".to_owned()), !sees_b, "{deleted:?}");
        assert!(count < WRITES / 10, "{count} changes for {WRITES} writes of three objects");
    }
    bench.end().await;
}
