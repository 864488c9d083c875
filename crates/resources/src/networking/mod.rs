//! networking.k8s.io: ways into the cluster, what may talk to what, and Services' addresses.

use machinery::names;

use crate::validate::at::At;

pub(crate) mod ingress;
pub(crate) mod ingress_class;
pub(crate) mod ip_address;
pub(crate) mod network_policy;
pub(crate) mod service_cidr;

fn typed_reference(at: &At<'_>) {
    if at.has("apiGroup") {
        at.get("apiGroup").name(names::dns1123_subdomain);
    }
    at.get("kind").need_name(names::path_segment);
    at.get("name").need_name(names::path_segment);
}
