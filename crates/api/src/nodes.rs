//! What the server itself says of nodes and of their requests, under names that nodes cannot write.
//!
//! Invariants: NodeRestriction keeps nodes from the annotations; only the server's strategy of
//! CertificateSigningRequests writes the key of `spec.extra`.

/// An annotation of a Node: addresses, separated by commas, that an administrator vouches for. The
/// node's serving certificate may name them although its requests come from others.
pub const SERVING_ADDRESSES: &str = "decapod.io/serving-addresses";

/// An annotation of a Node: the credential that registered it, as in `credential-id`; empty for a
/// node in the server's own process.
pub const REGISTERED_BY: &str = "decapod.io/registered-by";

/// A key of `spec.extra` of a request for a serving certificate: the address that the request came
/// from, by the server's word.
pub const SOURCE_ADDRESS: &str = "decapod.io/source-address";

/// The key of a user's extra fields that names the credential. Upstream: `CredentialIDKey`.
pub const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";

/// The group of a user with the certificate of a deleted Node. The user may see which pods are left on
/// that node, so that its kubelet ends them, and nothing else.
pub const RETIRED_NODES: &str = "decapod:retired-nodes";
