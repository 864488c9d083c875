//! Rows that are off by default: further versions of served kinds, and kinds of which no version
//! is served by default. Upstream: `--runtime-config`.
//!
//! In: [`api::versions`], which knows versions and their fields, and rows. Out: [`rows`], all of them,
//! of which the table takes those that are on; and [`known`], what may be named without being served.

use std::collections::BTreeSet;
use std::sync::Arc;

use api::versions::{self, Version};
use apiserver::resource::{Conversion, Resource};
use machinery::object::Codec;
use machinery::{Object, StatusError};

use crate::generic::AnyKind;
use crate::{RESOURCES, Row};

/// Versions that upstream's scheme has and none of its servers of this release serves: naming them
/// is no mistake.
const EMPTY: &[&str] = &[
    "admission.k8s.io/v1",
    "admission.k8s.io/v1beta1",
    "apps/v1beta1",
    "apps/v1beta2",
    "authentication.k8s.io/v1alpha1",
    "authentication.k8s.io/v1beta1",
    "authorization.k8s.io/v1beta1",
    "batch/v1beta1",
    "discovery.k8s.io/v1beta1",
    "events.k8s.io/v1beta1",
    "extensions/v1beta1",
    "flowcontrol.apiserver.k8s.io/v1beta1",
    "flowcontrol.apiserver.k8s.io/v1beta2",
    "flowcontrol.apiserver.k8s.io/v1beta3",
    "imagepolicy.k8s.io/v1alpha1",
    "node.k8s.io/v1alpha1",
    "node.k8s.io/v1beta1",
    "policy/v1beta1",
    "rbac.authorization.k8s.io/v1alpha1",
    "rbac.authorization.k8s.io/v1beta1",
    "scheduling.k8s.io/v1beta1",
    "storage.k8s.io/v1alpha1",
];

/// All rows that are off by default.
pub(crate) fn rows() -> impl Iterator<Item = Row> {
    let further = RESOURCES.iter().flat_map(|kind| further(*kind));
    let optional = RESOURCES.iter().filter(|kind| kind.is_optional()).map(|kind| kind.row(None));
    further.chain(optional)
}

/// A kind's row in the versions that it has besides the stored one.
fn further(kind: &'static dyn AnyKind) -> impl Iterator<Item = Row> {
    let stored = kind.row(None);
    let is_of = move |version: &Version| {
        let resource = stored.resource();
        version.kind == resource.kind && version.stored() == resource.api_version()
    };
    versions::all().filter(is_of).map(move |version| in_version(kind.row(None), version))
}

/// The row of the stored version, served in another version.
fn in_version(row: Row, version: Version) -> Row {
    let codec = version.codec().expect("api knows the kind of every further version");
    let row = row.with(|row| Resource {
        version: version.version().into(),
        codec,
        deprecation: version.deprecation().map(Into::into),
        ..row
    });
    row.converted_by(Arc::new(Renamed::new(version)))
}

/// Groups and versions that may be named whether they are served or not.
pub fn known() -> BTreeSet<(String, String)> {
    let pair = |text: &str| {
        let (group, version) = text.split_once('/')?;
        Some((group.to_owned(), version.to_owned()))
    };
    let optional = rows().map(|row| row.resource().api_version());
    let empty = EMPTY.iter().map(|text| (*text).to_owned());
    optional.chain(empty).filter_map(|text| pair(&text)).collect()
}

/// Between the stored version and a view of it.
pub(crate) struct Renamed {
    version: Version,
    stored: Arc<dyn Codec>,
}

impl Renamed {
    pub(crate) fn new(version: Version) -> Self {
        let stored = api::kinds::codec(version.stored(), version.kind);
        let stored = stored.expect("api knows what every version is stored as");
        Self { version, stored }
    }
}

impl Conversion for Renamed {
    fn to_stored(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        Ok(versions::stored(object))
    }

    fn to_served(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        Ok(self.version.show(object))
    }

    fn stored_codec(&self) -> &dyn Codec {
        &*self.stored
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What v1.36 has and does not serve by default: versions with resources and their subresources.
    const EXPECTED: &[(&str, &str)] = &[
        (
            "admissionregistration.k8s.io/v1alpha1",
            "mutatingadmissionpolicies mutatingadmissionpolicybindings",
        ),
        (
            "admissionregistration.k8s.io/v1beta1",
            "mutatingadmissionpolicies mutatingadmissionpolicybindings",
        ),
        ("certificates.k8s.io/v1alpha1", "clustertrustbundles"),
        (
            "certificates.k8s.io/v1beta1",
            "clustertrustbundles podcertificaterequests podcertificaterequests/status",
        ),
        ("coordination.k8s.io/v1alpha2", "leasecandidates"),
        ("coordination.k8s.io/v1beta1", "leasecandidates"),
        ("internal.apiserver.k8s.io/v1alpha1", "storageversions storageversions/status"),
        ("networking.k8s.io/v1beta1", "ipaddresses servicecidrs servicecidrs/status"),
        (
            "resource.k8s.io/v1alpha3",
            "devicetaintrules devicetaintrules/status resourcepoolstatusrequests resourcepoolstatusrequests/status",
        ),
        (
            "resource.k8s.io/v1beta1",
            "deviceclasses resourceclaims resourceclaims/status resourceclaimtemplates resourceslices",
        ),
        (
            "resource.k8s.io/v1beta2",
            "deviceclasses devicetaintrules devicetaintrules/status resourceclaims resourceclaims/status resourceclaimtemplates resourceslices",
        ),
        ("scheduling.k8s.io/v1alpha2", "podgroups podgroups/status workloads"),
        ("storage.k8s.io/v1beta1", "volumeattributesclasses"),
        (
            "storagemigration.k8s.io/v1beta1",
            "storageversionmigrations storageversionmigrations/status",
        ),
    ];

    #[test]
    fn rows_are_upstreams() {
        let mut found = std::collections::BTreeMap::<String, BTreeSet<String>>::new();
        for row in rows() {
            let row = row.build(None);
            let names = found.entry(row.api_version()).or_default();
            names.extend(row.subresources.iter().map(|sub| format!("{}/{}", row.plural, sub.name)));
            names.insert(row.plural);
        }
        let found: Vec<(String, String)> = found
            .into_iter()
            .map(|(version, names)| (version, names.into_iter().collect::<Vec<_>>().join(" ")))
            .collect();
        let expected: Vec<(String, String)> =
            EXPECTED.iter().map(|(version, names)| ((*version).into(), (*names).into())).collect();
        assert_eq!(found, expected);
    }
}
