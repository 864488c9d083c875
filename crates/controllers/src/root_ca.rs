//! Publishes the cluster's CA in every namespace, as ConfigMap `kube-root-ca.crt`.
//!
//! In: namespaces and those ConfigMaps. Out: creations and repairs.
//! Upstream: `pkg/controller/certificates/rootcacertpublisher`.

use std::collections::BTreeMap;
use std::sync::Arc;

use client::{Api, Client, ErrorExt, Lister, Outcome, PostParams, Result};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use machinery::ObjectMeta;

use crate::descriptor::{Descriptor, Row, on_metadata, own};
use crate::serviceaccount::is_active;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: "root-ca-certificate-publisher-controller",
    account: "root-ca-cert-publisher",
    component: "root-ca-cert-publisher",
    queue: "root_ca_cert_publisher",
    workers: 1,
    new: |setup| {
        let Some(root) = setup.options.root_ca.clone() else {
            tracing::info!("no root CA is given: none is published");
            return None;
        };
        Some(Controller {
            client: setup.client.clone(),
            root,
            namespaces: setup.lister(),
            maps: setup.scoped(None, MAPS).lister(),
        })
    },
    watches: &[
        &own::<Namespace>(),
        &on_metadata::<ConfigMap, _, _>(|_: &Controller, queue, event| {
            queue.add(event.entry().header.key.namespace.clone());
        })
        .within(None, MAPS),
    ],
    reconcile: |this, namespace| {
        Box::pin(async move {
            let known = this.namespaces.get("", &namespace);
            let map = this.maps.get(&namespace, NAME);
            let write = known.filter(|one| is_active(one));
            let write = write.and_then(|_| plan(map.as_deref(), &namespace, &this.root));
            let done = carry_out(&this.client.api(Some(&namespace)), write).await;
            done.map(|()| Outcome::Done)
        })
    },
};

const NAME: &str = "kube-root-ca.crt";
const DESCRIPTION: &str = "kubernetes.io/description";
const DESCRIPTION_TEXT: &str = "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints such as the internal service IP or kubernetes.default.svc. No other usage is guaranteed across distributions of Kubernetes clusters.";

/// The published maps of all namespaces.
const MAPS: &str = "metadata.name=kube-root-ca.crt";

struct Controller {
    client: Client,
    root: String,
    namespaces: Lister<Namespace>,
    maps: Lister<ConfigMap>,
}

/// The ConfigMap to write, if the existing one is not correct. Pure.
fn plan(known: Option<&ConfigMap>, namespace: &str, root: &str) -> Option<ConfigMap> {
    let data = BTreeMap::from([("ca.crt".to_owned(), root.to_owned())]);
    let described = |meta: &ObjectMeta| {
        let text = meta.annotations.as_ref().and_then(|all| all.get(DESCRIPTION));
        text.is_some_and(|text| text == DESCRIPTION_TEXT)
    };
    if known.is_some_and(|known| known.data.as_ref() == Some(&data) && described(&known.metadata)) {
        return None;
    }
    let mut map = known.cloned().unwrap_or_default();
    map.metadata.name = Some(NAME.into());
    map.metadata.namespace = Some(namespace.into());
    let annotations = map.metadata.annotations.get_or_insert_default();
    annotations.insert(DESCRIPTION.into(), DESCRIPTION_TEXT.into());
    map.data = Some(data);
    Some(map)
}

async fn carry_out(api: &Api<ConfigMap>, write: Option<ConfigMap>) -> Result<()> {
    let Some(map) = write else {
        return Ok(());
    };
    let done = if map.metadata.resource_version.is_some() {
        api.replace(NAME, &PostParams::default(), &map).await
    } else {
        api.create(&PostParams::default(), &map).await
    };
    match done {
        Err(error) if error.is_namespace_terminating() || error.is_not_found() => Ok(()),
        done => done.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_map_is_repaired_and_a_right_one_left_alone() {
        let made = plan(None, "default", "pem").expect("none is there");
        assert_eq!(plan(Some(&made), "default", "pem"), None);
        let repaired = plan(Some(&made), "default", "other").expect("another CA");
        assert_eq!(repaired.data.unwrap()["ca.crt"], "other");
    }
}
