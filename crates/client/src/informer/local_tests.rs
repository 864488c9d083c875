//! Informers beside their server: objects are shared, not copied.

use std::any::Any;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http::{Request, Response};
use http_body_util::BodyExt;
use http_body_util::{Empty, combinators::UnsyncBoxBody};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::client::Body;
use serde_json::json;
use tokio::sync::mpsc;
use transport::local::{self, Given, Object, Objects, Wanted};

use super::*;

/// An object as a server keeps it.
struct Kept {
    revision: u64,
    json: String,
    /// How often it was read as a whole.
    reads: AtomicUsize,
    note: OnceLock<Arc<dyn Any + Send + Sync>>,
}

impl Kept {
    fn new(name: &str, revision: u64) -> Arc<Self> {
        let owners = json!([{"manager": "m", "fieldsV1": {"f:data": {}}}]);
        let json = json!({"metadata": {"name": name, "namespace": "ns", "uid": name,
            "resourceVersion": revision.to_string(), "managedFields": owners},
            "data": {"v": revision.to_string()}});
        let (json, reads) = (json.to_string(), AtomicUsize::new(0));
        Arc::new(Self { revision, json, reads, note: OnceLock::new() })
    }
}

impl Object for Kept {
    fn revision(&self) -> u64 {
        self.revision
    }

    fn json(&self) -> Bytes {
        self.reads.fetch_add(1, Ordering::Relaxed);
        Bytes::copy_from_slice(self.json.as_bytes())
    }

    fn note(&self) -> &OnceLock<Arc<dyn Any + Send + Sync>> {
        &self.note
    }
}

#[derive(Clone, Default)]
struct Server(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Arc<Kept>>,
    watches: Vec<mpsc::Sender<Vec<local::Change>>>,
    lists: usize,
}

impl Server {
    fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let answer = server.answer(&request);
            async move { Ok::<_, Infallible>(answer) }
        });
        Client::new(service, "test")
    }

    fn answer(&self, request: &Request<Body>) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
        assert!(request.extensions().get::<Wanted>().is_some(), "{}", request.uri());
        let mut state = self.0.lock().unwrap();
        let objects = if request.uri().query().unwrap_or_default().contains("watch=true") {
            let (sender, receiver) = mpsc::channel(1024);
            state.watches.push(sender);
            Objects::Changes(Box::pin(stream::unfold(receiver, async |mut receiver| {
                Some((receiver.recv().await?, receiver))
            })))
        } else {
            state.lists += 1;
            let objects = state.objects.values().map(|one| one.clone() as Arc<dyn Object>);
            Objects::List(local::List { objects: objects.collect(), revision: 9 })
        };
        let mut response = Response::new(Empty::new().boxed_unsync());
        response.extensions_mut().insert(Given::new(objects));
        response
    }

    fn tell(&self, changes: impl Fn() -> Vec<local::Change>) {
        let mut state = self.0.lock().unwrap();
        state.watches.retain(|watch| watch.try_send(changes()).is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn objects_of_a_server_in_this_process_are_shared() {
    let server = Server::default();
    let [first, gone] = [Kept::new("first", 5), Kept::new("gone", 6)];
    for one in [&first, &gone] {
        let name = one.json.clone();
        server.0.lock().unwrap().objects.insert(name, one.clone());
    }
    let tasks = Tasks::new("test");
    let informers = [(); 2].map(|()| Informers::new(server.client(), tasks.clone()));
    let maps = informers.each_ref().map(Informers::of::<ConfigMap>);
    let metadata = informers[1].metadata(&Gvr::new("", "v1", "configmaps"));
    for informer in &maps {
        informer.synced().await;
    }
    let key = ObjectKey::new("ns", "first");
    let entries = maps.each_ref().map(|informer| informer.lister().entry(&key).expect("an entry"));
    assert!(Arc::ptr_eq(&entries[0].header, &entries[1].header), "one header for both");
    assert!(metadata.get(&key).is_some(), "shares the informer of the kind");
    assert_eq!(first.reads.load(Ordering::Relaxed), 1, "for the header");
    let object = maps[0].lister().get_key(&key).expect("an object");
    assert_eq!(object.data.as_ref().map(|data| &*data["v"]), Some("5"));
    assert_eq!(object.metadata.managed_fields, None);

    let newer = Kept::new("first", 10);
    server.tell(|| {
        let applied = local::Change::Applied(newer.clone());
        vec![applied, local::Change::Deleted(gone.clone()), local::Change::Reached(11)]
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    for informer in &maps {
        assert_eq!(informer.lister().len(), 1);
        let version = informer.lister().entry(&key).map(|one| one.header.resource_version.clone());
        assert_eq!(version.as_deref(), Some("10"));
    }
    assert_eq!(server.0.lock().unwrap().lists, 2, "no list but the first of each");

    // The watch's revision is compacted: the list shows the present objects.
    server.0.lock().unwrap().objects.insert("new".into(), Kept::new("new", 12));
    server.tell(|| vec![local::Change::Expired("too old".into())]);
    tokio::time::sleep(Duration::from_secs(5)).await;
    for informer in &maps {
        assert!(informer.lister().get("ns", "new").is_some());
    }
    tasks.shutdown(Duration::from_secs(1)).await;
}
