//! Publishes the CA of the API servers' serving certificates as a ClusterTrustBundle of the signer
//! `kubernetes.io/kube-apiserver-serving`.
//!
//! In: the root CA, the signer's bundles. Out: one bundle whose name has the hash of its content; others of the
//! signer are deleted once it is there. Upstream: `pkg/controller/certificates/clustertrustbundlepublisher`.
//! Cost: a change of a bundle of the signer decodes that signer's bundles, of which there is one.

use client::{Api, Client, DeleteParams, ErrorExt, Lister, Outcome, PostParams, Result};
use k8s_openapi::api::certificates::v1beta1::{ClusterTrustBundle, ClusterTrustBundleSpec};
use machinery::ObjectMeta;
use machinery::selector::Selector;
use sha2::{Digest, Sha256};

use crate::descriptor::{Descriptor, Row, own};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, ()> {
    name: "kube-apiserver-serving-clustertrustbundle-publisher-controller",
    account: "kube-apiserver-serving-clustertrustbundle-publisher",
    component: "kube-apiserver-serving-clustertrustbundle-publisher",
    queue: "ca_cert_publisher_cluster_trust_bundles",
    workers: 1,
    new: |setup| {
        // The first bundle follows from no event.
        setup.queue.add(());
        Some(Controller {
            client: setup.client.clone(),
            wanted: bundle(setup.options.root_ca.clone().filter(|root| !root.is_empty())?),
            bundles: setup.scoped(None, OF_SIGNER).lister(),
        })
    },
    watches: &[&own::<ClusterTrustBundle>().within(None, OF_SIGNER).if_served()],
    reconcile: |this, ()| Box::pin(async move { this.reconcile().await }),
};

const SIGNER: &str = "kubernetes.io/kube-apiserver-serving";
const OF_SIGNER: &str = "spec.signerName=kubernetes.io/kube-apiserver-serving";
/// Bytes of the hash in the name.
const HASHED: usize = 12;

struct Controller {
    client: Client,
    wanted: ClusterTrustBundle,
    bundles: Lister<ClusterTrustBundle>,
}

impl Controller {
    async fn reconcile(&self) -> Result<Outcome> {
        let api: Api<ClusterTrustBundle> = self.client.api(None);
        let name = self.wanted.metadata.name.as_deref().unwrap_or_default();
        match self.bundles.get("", name) {
            None => drop(api.create(&PostParams::default(), &self.wanted).await?),
            Some(known) if known.spec.trust_bundle != self.wanted.spec.trust_bundle => {
                let mut mended = (*known).clone();
                mended.spec.trust_bundle = self.wanted.spec.trust_bundle.clone();
                api.replace(name, &PostParams::default(), &mended).await?;
            }
            Some(_) => {}
        }
        for old in self.bundles.entries(None, &Selector::everything()) {
            let old = &*old.header.key.name;
            if old == name {
                continue;
            }
            match api.delete(old, &DeleteParams::default()).await {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        Ok(Outcome::Done)
    }
}

/// The bundle of a CA. Pure.
fn bundle(root_ca: String) -> ClusterTrustBundle {
    let hash = Sha256::digest(root_ca.as_bytes());
    let hash: String = hash.iter().take(HASHED).map(|byte| format!("{byte:02x}")).collect();
    let name = format!("{}:{hash}", SIGNER.replace('/', ":"));
    ClusterTrustBundle {
        metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
        spec: ClusterTrustBundleSpec { signer_name: Some(SIGNER.into()), trust_bundle: root_ca },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundles_name_has_its_signer_and_the_hash_of_its_content() {
        let check = |root: &str, expected: &str| {
            let made = bundle(root.into());
            assert_eq!(made.metadata.name.as_deref(), Some(expected));
            assert_eq!(made.spec.trust_bundle, root);
        };
        let name = "kubernetes.io:kube-apiserver-serving:";
        check("abc", &format!("{name}ba7816bf8f01cfea414140de"));
        check("", &format!("{name}e3b0c44298fc1c149afbf4c8"));
    }
}
