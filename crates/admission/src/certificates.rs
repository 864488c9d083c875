//! Restrictions on certificate requests and trust bundles:
//! CertificateApproval, CertificateSigning, ClusterTrustBundleAttest, CertificateSubjectRestriction.

use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::authz::{self, Authorizer, Decision};
use apiserver::request::{RequestInfo, UserInfo};
use async_trait::async_trait;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use machinery::field::{FieldErrors, Path};

use crate::Row;

const GROUP: &str = "certificates.k8s.io";
const CLIENT_SIGNER: &str = "kubernetes.io/kube-apiserver-client";
const MASTERS: &str = "system:masters";

pub(crate) const CERTIFICATE_APPROVAL: Row = Row::enabled("CertificateApproval", |options| {
    let authorizer = options.authorizer("CertificateApproval")?;
    Ok(Box::new(SignerUse::approval(authorizer)))
});

pub(crate) const CERTIFICATE_SIGNING: Row = Row::enabled("CertificateSigning", |options| {
    let authorizer = options.authorizer("CertificateSigning")?;
    Ok(Box::new(SignerUse::signing(authorizer)))
});

pub(crate) const CLUSTER_TRUST_BUNDLE_ATTEST: Row =
    Row::enabled("ClusterTrustBundleAttest", |options| {
        let authorizer = options.authorizer("ClusterTrustBundleAttest")?;
        Ok(Box::new(SignerUse::attest(authorizer)))
    });

/// One of the three plugins that check whether the user may use a signer.
pub(crate) struct SignerUse {
    name: &'static str,
    resource: &'static str,
    subresource: &'static str,
    verb: &'static str,
    what: &'static str,
    authorizer: Arc<dyn Authorizer>,
}

impl SignerUse {
    pub fn approval(authorizer: Arc<dyn Authorizer>) -> Self {
        Self {
            name: "CertificateApproval",
            resource: "certificatesigningrequests",
            subresource: "approval",
            verb: "approve",
            what: "approve requests with",
            authorizer,
        }
    }

    pub fn signing(authorizer: Arc<dyn Authorizer>) -> Self {
        Self {
            name: "CertificateSigning",
            resource: "certificatesigningrequests",
            subresource: "status",
            verb: "sign",
            what: "sign requests with",
            authorizer,
        }
    }

    pub fn attest(authorizer: Arc<dyn Authorizer>) -> Self {
        Self {
            name: "ClusterTrustBundleAttest",
            resource: "clustertrustbundles",
            subresource: "",
            verb: "attest",
            what: "attest for",
            authorizer,
        }
    }

    /// The signer of the request; `None` if the plugin does not apply.
    fn signer(&self, attributes: &Attributes<'_>) -> Option<String> {
        let row = &attributes.ctx.resource;
        let mine = row.group == GROUP
            && row.plural == self.resource
            && attributes.ctx.subresource == self.subresource;
        if !mine {
            return None;
        }
        if self.resource == "clustertrustbundles" {
            let tree = attributes.object.as_deref()?.to_value();
            let old = attributes.old.map(machinery::Object::to_value);
            let unchanged = old.is_some_and(|old| old["spec"] == tree["spec"]);
            let signer = tree["spec"]["signerName"].as_str().unwrap_or_default();
            return (!signer.is_empty() && !unchanged).then(|| signer.to_owned());
        }
        let old = attributes.old_as::<CertificateSigningRequest>()?;
        if self.subresource == "status" {
            let new = attributes.object_as::<CertificateSigningRequest>()?;
            let facts = |csr: &CertificateSigningRequest| {
                let status = csr.status.clone().unwrap_or_default();
                (status.certificate, status.conditions.unwrap_or_default())
            };
            if facts(new) == facts(old) {
                return None;
            }
        }
        Some(old.spec.signer_name.clone())
    }
}

/// Whether the user may do this with the signer by its name, or with all signers of its domain.
async fn may(authorizer: &dyn Authorizer, user: &UserInfo, verb: &str, signer: &str) -> bool {
    let domain = signer.split('/').next().unwrap_or_default();
    for name in [signer.to_owned(), format!("{domain}/*")] {
        let request = RequestInfo {
            is_resource: true,
            verb: verb.into(),
            group: GROUP.into(),
            version: "*".into(),
            resource: "signers".into(),
            name,
            ..RequestInfo::default()
        };
        let question = authz::Attributes { user: user.clone(), request };
        if matches!(authorizer.authorize(&question).await, Decision::Allow { .. }) {
            return true;
        }
    }
    false
}

#[async_trait]
impl Plugin for SignerUse {
    fn name(&self) -> &'static str {
        self.name
    }

    fn handles(&self, operation: Operation) -> bool {
        let attest = self.subresource.is_empty();
        operation == Operation::Update || (attest && operation == Operation::Create)
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let Some(signer) = self.signer(attributes) else { return Ok(()) };
        if may(&*self.authorizer, &attributes.ctx.user, self.verb, &signer).await {
            return Ok(());
        }
        Err(attributes
            .forbidden(format!("user not permitted to {} signerName {signer:?}", self.what)))
    }
}

/// The writer of a PodCertificateRequest's status must be allowed to sign for its signer. Upstream checks
/// this in the kind's own validation, so it cannot be disabled.
pub struct PodCertificateSigning(pub Arc<dyn Authorizer>);

#[async_trait]
impl Plugin for PodCertificateSigning {
    fn name(&self) -> &'static str {
        "PodCertificateSigning"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let ctx = attributes.ctx;
        let old = attributes.old_as::<PodCertificateRequest>();
        let new = attributes.object_as::<PodCertificateRequest>();
        let (Some(old), Some(new)) = (old, new) else { return Ok(()) };
        if ctx.subresource != "status" || old.status == new.status {
            return Ok(());
        }
        let signer = &old.spec.signer_name;
        if may(&*self.0, &ctx.user, "sign", signer).await {
            return Ok(());
        }
        let mut errors = FieldErrors::default();
        let user = &ctx.user.name;
        let detail = format!("User {user:?} is not permitted to \"sign\" for signer {signer:?}");
        errors.forbidden(&Path::new("spec").child("signerName"), &detail);
        let name = old.metadata.name.as_deref().unwrap_or_default();
        Err(StatusError::invalid(GROUP, &ctx.resource.kind, name, errors))
    }
}

pub(crate) const CERTIFICATE_SUBJECT_RESTRICTION: Row =
    Row::enabled("CertificateSubjectRestriction", |_| Ok(Box::new(SubjectRestriction)));

pub(crate) struct SubjectRestriction;

#[async_trait]
impl Plugin for SubjectRestriction {
    fn name(&self) -> &'static str {
        "CertificateSubjectRestriction"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let Some(csr) = attributes.object_as::<CertificateSigningRequest>() else { return Ok(()) };
        if !attributes.ctx.subresource.is_empty() || csr.spec.signer_name != CLIENT_SIGNER {
            return Ok(());
        }
        let parsed = pki::Csr::parse(&csr.spec.request.0)
            .map_err(|error| attributes.forbidden(format!("failed to parse CSR: {error}")))?;
        if parsed.organizations.iter().any(|group| group == MASTERS) {
            return Err(attributes.forbidden(format!(
                "use of {CLIENT_SIGNER} signer with {MASTERS} group is not allowed"
            )));
        }
        Ok(())
    }
}
