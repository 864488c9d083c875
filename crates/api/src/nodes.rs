//! Names of annotations and extra fields in which the server records facts about nodes. Nodes cannot
//! write them.
//!
//! Invariants: NodeRestriction keeps nodes from the annotations; only the server's strategy of
//! CertificateSigningRequests writes the key of `spec.extra`.

/// An annotation of a Node: addresses, separated by commas, that an administrator has approved. The
/// node's serving certificate may name them even if its requests come from other addresses.
pub const SERVING_ADDRESSES: &str = "decapod.io/serving-addresses";

/// An annotation of a Node: the credential that registered it, as in `credential-id`; empty for a
/// node in the server's own process.
pub const REGISTERED_BY: &str = "decapod.io/registered-by";

/// A key of `spec.extra` of a CertificateSigningRequest for a serving certificate: the source address of
/// the request, set by the server.
pub const SOURCE_ADDRESS: &str = "decapod.io/source-address";

/// The key of a user's extra fields that names the credential. Upstream: `CredentialIDKey`.
pub const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";

/// The group of a user with the certificate of a deleted Node. The user may see which pods are left on
/// that node, so that its kubelet ends them, and nothing else.
pub const RETIRED_NODES: &str = "decapod:retired-nodes";
