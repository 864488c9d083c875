//! A stolen kubelet certificate: what it gives access to, with all authorizers of a usual cluster.
//! (The plugin NodeRestriction in crate `admission` limits what nodes may write into these objects.)

use auth::{Authorizers, Masters, UserInfo};

use super::*;

/// Requests that the node's own pods need: verb, resource, namespace, name.
const ALLOWED: &[&str] = &[
    "get secrets web mine-secret",
    "get secrets web mine-pull",
    "get configmaps web mine-env",
    "watch configmaps web mine-env",
    "get persistentvolumeclaims web mine-claim",
    "get persistentvolumes - mine-volume",
    "create serviceaccounts/token web mine-bot",
    "get nodes - n1",
    "patch nodes/status - n1",
    "get pods web mine",
    "delete pods web mine",
    "update coordination.k8s.io:leases kube-node-lease n1",
    "get storage.k8s.io:volumeattachments - mine-attachment",
    "create resource.k8s.io:resourceslices - -",
    "get resource.k8s.io:resourceslices - mine-slice",
    "patch resource.k8s.io:resourceslices - mine-slice",
    "create authorization.k8s.io:subjectaccessreviews - -",
];

const DENIED: &[&str] = &[
    "get secrets web other-secret",
    "get secrets web other-pull",
    "get secrets web unknown",
    "get secrets kube-system mine-secret",
    "list secrets web -",
    "list secrets - -",
    "watch secrets web -",
    "update secrets web mine-secret",
    "delete secrets web mine-secret",
    "create secrets web mine-secret",
    "get configmaps web other-env",
    "list configmaps - -",
    "update configmaps web mine-env",
    "get persistentvolumeclaims web other-claim",
    "update persistentvolumeclaims web mine-claim",
    "get persistentvolumes - other-volume",
    "get storage.k8s.io:volumeattachments - other-attachment",
    "list storage.k8s.io:volumeattachments - -",
    "update storage.k8s.io:volumeattachments - mine-attachment",
    "get resource.k8s.io:resourceslices - other-slice",
    "update resource.k8s.io:resourceslices - other-slice",
    "patch resource.k8s.io:resourceslices - other-slice",
    "delete resource.k8s.io:resourceslices - other-slice",
    "list resource.k8s.io:resourceslices - -",
    "deletecollection resource.k8s.io:resourceslices - -",
    "create serviceaccounts/token web other-bot",
    "create serviceaccounts/token kube-system admin",
    "create pods/exec web mine",
    "create pods/attach web mine",
    "create pods/portforward web mine",
    "get pods/log web other",
    "create nodes/proxy - n2",
    "get nodes/proxy - n1",
    "update coordination.k8s.io:leases kube-node-lease n2",
    "update coordination.k8s.io:leases kube-system kube-scheduler",
    "create namespaces - x",
    "create apps:deployments web x",
    "list apps:deployments web -",
    "create rbac.authorization.k8s.io:clusterrolebindings - x",
    "get rbac.authorization.k8s.io:clusterroles - admin",
    "escalate rbac.authorization.k8s.io:clusterroles - admin",
    "bind rbac.authorization.k8s.io:clusterroles - admin",
    "impersonate users - admin",
    "impersonate groups - system:masters",
    "impersonate serviceaccounts web other-bot",
    "approve certificates.k8s.io:signers - kubernetes.io/kube-apiserver-client",
    "update certificates.k8s.io:certificatesigningrequests/approval - x",
    "create admissionregistration.k8s.io:mutatingwebhookconfigurations - x",
    "create apiextensions.k8s.io:customresourcedefinitions - x",
];

async fn cluster(world: &World) -> Authorizers {
    auth::rbac::bootstrap::reconcile(&world.registry).await.expect("an empty cluster is filled");
    let pod = |node: &str, name: &str| {
        json!({"spec": {
            "nodeName": node, "serviceAccountName": format!("{name}-bot"),
            "imagePullSecrets": [{"name": format!("{name}-pull")}],
            "containers": [{"name": "c", "envFrom": [{"configMapRef": {"name": format!("{name}-env")}}]}],
            "volumes": [
                {"name": "s", "secret": {"secretName": format!("{name}-secret")}},
                {"name": "p", "persistentVolumeClaim": {"claimName": format!("{name}-claim")}},
            ],
        }})
    };
    world.create::<Pod>("web", "mine", pod("n1", "mine")).await;
    world.create::<Pod>("web", "other", pod("n2", "other")).await;
    let volume = |claim: &str| json!({"spec": {"claimRef": {"namespace": "web", "name": claim}}});
    world.create::<PersistentVolume>("", "mine-volume", volume("mine-claim")).await;
    world.create::<PersistentVolume>("", "other-volume", volume("other-claim")).await;
    for (node, name) in [("n1", "mine"), ("n2", "other")] {
        let slice = json!({"spec": {"driver": "d", "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}}});
        world.create::<ResourceSlice>("", &format!("{name}-slice"), slice).await;
        let attachment = json!({"spec": {"attacher": "d", "nodeName": node,
            "source": {"persistentVolumeName": format!("{name}-volume")}}});
        world.create::<VolumeAttachment>("", &format!("{name}-attachment"), attachment).await;
    }
    let node = auth::node::NodeAuthorizer::start(&world.registry, &world.tasks).await;
    let rbac = auth::Rbac::start(&world.registry, &world.tasks).await;
    Authorizers(vec![Arc::new(Masters), Arc::new(node), Arc::new(rbac)])
}

#[tokio::test]
async fn it_gives_access_to_its_own_node_only() {
    let world = World::start();
    let authorizers = cluster(&world).await;
    let thief = UserInfo::new("system:node:n1", &["system:nodes", "system:authenticated"]);
    let check = async |line: &str, expected: bool| {
        let [verb, resource, namespace, name] =
            line.split(' ').collect::<Vec<_>>().try_into().expect("four words");
        let empty = |word: &str| if word == "-" { String::new() } else { word.to_owned() };
        let asks = question(&thief, verb, resource, &empty(namespace), &empty(name));
        assert_eq!(may(&authorizers, &asks).await, expected, "{line}");
    };
    for allowed in ALLOWED {
        check(allowed, true).await;
    }
    for denied in DENIED {
        check(denied, false).await;
    }
    // The name alone is not enough, nor the group alone, nor another spelling.
    for (name, groups) in [
        ("system:node:n1", &["system:authenticated"][..]),
        ("system:node:", &["system:nodes"]),
        ("system:node:N1", &["system:nodes"]),
        ("node:n1", &["system:nodes"]),
    ] {
        let user = UserInfo::new(name, groups);
        let asks = question(&user, "get", "secrets", "web", "mine-secret");
        assert!(!may(&authorizers, &asks).await, "{name} {groups:?}");
    }
    world.shutdown().await;
}
