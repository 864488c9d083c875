//! ClusterTrustBundle: certificates to trust, for pods to mount.

use base::pem::{self, Block};
use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use machinery::names;
use release::features::Feature;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::{CERTIFICATE, signer_name};
use crate::kind::{Fields, Kind, Rules, field, name};
use crate::print::or_none;
use crate::validate::at::At;

pub(crate) static KIND: Kind<ClusterTrustBundle> = Kind {
    optional: true,
    gate: Some(Feature::ClusterTrustBundle),
    rules: Rules {
        create: bundle,
        update: Some(bundle_update),
        name: names::path_segment,
        unconditional_update: false,
        ..Rules::NONE
    },
    columns: &[
        name(),
        field(
            "SignerName",
            "string",
            "api.certificates.v1beta1.ClusterTrustBundleSpec.signerName",
            |bundle| or_none(signer(bundle)).into(),
        ),
    ],
    fields: Fields::Of(&[("spec.signerName", signer)]),
    ..Kind::BASE
};

fn signer(bundle: &ClusterTrustBundle) -> String {
    bundle.spec.signer_name.clone().unwrap_or_default()
}

fn bundle(at: &At<'_>) {
    bundle_name(at);
    anchors(&at.get("spec.trustBundle"));
}

/// Anchors that stay are not read again.
fn bundle_update(at: &At<'_>, old: &At<'_>) {
    bundle_name(at);
    let anchors_now = at.get("spec.trustBundle");
    if anchors_now.value != old.get("spec.trustBundle").value {
        anchors(&anchors_now);
    }
    at.get("spec.signerName").unchanged(&old.get("spec.signerName"));
}

/// The name begins with the signer's.
fn bundle_name(at: &At<'_>) {
    let (name, signer) = (at.get("metadata.name"), at.get("spec.signerName"));
    let prefix = format!("{}:", signer.str().replace('/', ":"));
    match name.str().strip_prefix(&prefix) {
        _ if name.is_empty() => {}
        _ if signer.is_empty() && name.str().contains(':') => {
            name.invalid(r#"ClusterTrustBundle without signer name must not have ":" in its name"#)
        }
        _ if signer.is_empty() => name.name(names::dns1123_subdomain),
        None => name.invalid(&format!(
            "ClusterTrustBundle for signerName {} must be named with prefix {prefix}",
            signer.str()
        )),
        Some(rest) => names::dns1123_subdomain(rest).iter().for_each(|why| name.invalid(why)),
    }
    if !signer.is_empty() {
        signer_name(&signer);
    }
}

fn anchors(at: &At<'_>) {
    const LONGEST: usize = 1 << 20;
    const OMITTED: &str = "<value omitted>";
    if at.len() > LONGEST {
        return at.too_long(LONGEST);
    }
    let blocks: Vec<Block> = pem::blocks(at.str().as_bytes()).collect();
    let mut is_sound = true;
    for (index, block) in blocks.iter().enumerate() {
        if let Some(why) = no_anchor(block) {
            at.invalid_as(OMITTED, &format!("entry {index} {why}"));
            is_sound = false;
        }
    }
    if is_sound && blocks.is_empty() {
        at.invalid_as(OMITTED, "at least one trust anchor must be provided");
    }
    let same = |index: usize| -> Vec<String> {
        let one = &blocks[index].bytes;
        let twins = blocks.iter().enumerate().filter(|(_, other)| other.bytes == *one);
        twins.map(|(index, _)| index.to_string()).collect()
    };
    for index in 0..if is_sound { blocks.len() } else { 0 } {
        let twins = same(index);
        if twins.len() > 1 && twins[0] == index.to_string() {
            let listed = twins.join(" ");
            at.invalid_as(OMITTED, &format!("duplicate trust anchor (indices [{listed}])"));
        }
    }
}

fn no_anchor(block: &Block) -> Option<String> {
    if block.label != CERTIFICATE {
        return Some(format!("has bad block type: {}", block.label));
    }
    if block.has_headers {
        return Some("has PEM block headers".into());
    }
    let Ok((_, certificate)) = X509Certificate::from_der(&block.bytes) else {
        return Some("does not parse as X.509".into());
    };
    (!certificate.is_ca()).then(|| "does not have the CA bit set".into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::validate::at::judge;

    /// A self-signed authority (P-256).
    const ANCHOR: &str = "MIIBeDCCAR+gAwIBAgIUYTzQjI8ya7aMXM44e4nUxPQUx1MwCgYIKoZIzj0EAwIwETEPMA0GA1UEAwwGYW5jaG9yMCAXDTI2MTEyMjAzNTU1MFoYDzIxMjYxMDI5MDM1NTUwWjARMQ8wDQYDVQQDDAZhbmNob3IwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAShkX5EP12aRn3UAgTlZ+tVtcgMMnKwR3hEsyKs6E3zf0ILDHi/EBMClsNerVr+pBmYpPbUChKTvYoxs5GjY24No1MwUTAdBgNVHQ4EFgQUn+6xvFyyJxrhVzA6rEYmtGrquCcwHwYDVR0jBBgwFoAUn+6xvFyyJxrhVzA6rEYmtGrquCcwDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNHADBEAiAQ4P1XBHJImgp802gUqlotg1u6ZhBbFUYDt88a6EB3CgIgdGBqzhN3uW5U2N2od5Ip9gHRQYyJmNtaavpazMswI5M=";

    fn anchor() -> String {
        format!("-----BEGIN CERTIFICATE-----\n{ANCHOR}\n-----END CERTIFICATE-----\n")
    }

    #[test]
    fn bundles_hold_anchors() {
        let check = |name: &str, bundle: String, expected: &[&str]| {
            let tree = json!({"metadata": {"name": name},
                "spec": {"signerName": "a.example/b", "trustBundle": bundle}});
            let errors = judge(&tree, super::bundle);
            let found: Vec<String> = errors
                .0
                .iter()
                .map(|error| format!("{}: {}", error.field, error.message))
                .collect();
            assert_eq!(found.len(), expected.len(), "{found:?}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.contains(expected), "{found}");
            }
        };
        let twice = anchor() + "text between\n" + &anchor();
        check("a.example:b:c", anchor(), &[]);
        check("c", anchor(), &["must be named with prefix a.example:b:"]);
        check("a.example:b:c", String::new(), &["at least one trust anchor must be provided"]);
        check("a.example:b:c", twice, &["duplicate trust anchor (indices [0 1])"]);
        check(
            "a.example:b:c",
            anchor().replace("CERTIFICATE", "OTHER"),
            &["entry 0 has bad block type: OTHER"],
        );
        check(
            "a.example:b:c",
            anchor().replace(ANCHOR, "MAA="),
            &["entry 0 does not parse as X.509"],
        );
    }
}
