//! Field numbers of the built-in kinds, for bodies and answers in protobuf.
//!
//! In: `facts/protobuf.tsv` (see `cargo xtask facts-protobuf`). Out: [`Descriptors`]. They are built
//! at the first request in protobuf. A cluster without typed Go clients never needs them.

use std::sync::LazyLock;

use machinery::protobuf::Descriptors;

/// The version whose kinds (options, `Status`) are part of every group.
const COMMON: &str = "meta.k8s.io/v1";

static DESCRIPTORS: LazyLock<Descriptors> =
    LazyLock::new(|| Descriptors::parse(include_str!("../facts/protobuf.tsv"), COMMON));

pub fn descriptors() -> &'static Descriptors {
    &DESCRIPTORS
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use serde_json::Value;

    use super::*;

    /// Upstream's round-trip data, if it is beside the repository.
    const FIXTURES: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../shared/spec/roundtrip-fixtures-v1.36.tar.gz"
    );

    /// Unpacks the fixtures into a directory of their own.
    fn unpack() -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let status = Command::new("tar").args(["-xzf", FIXTURES, "-C"]).arg(dir.path()).status();
        assert!(status.expect("tar runs").success(), "tar -xzf {FIXTURES}");
        dir
    }

    #[test]
    fn upstreams_fixtures_round_trip() {
        if !Path::new(FIXTURES).exists() {
            println!("skipped: no {FIXTURES}");
            return;
        }
        let dir = unpack();
        let mut checked = 0;
        let mut wrong = vec![];
        for entry in std::fs::read_dir(dir.path()).expect("the fixtures") {
            let path = entry.expect("an entry").path();
            if path.extension().is_none_or(|extension| extension != "pb") {
                continue;
            }
            let body = std::fs::read(&path).expect("a fixture");
            let json = std::fs::read(path.with_extension("json")).expect("its twin");
            let wanted: Value = serde_json::from_slice(&json).expect("JSON");
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            let Ok(found) = descriptors().unseal(&body) else {
                println!("not known: {name}");
                continue;
            };
            checked += 1;
            if Value::Object(found) != wanted {
                wrong.push(format!("{name}: decodes to something else"));
            }
            assert_no_panic(&body);
            match descriptors().seal(&wanted) {
                Ok(sealed) if sealed == body => {}
                Ok(_) => wrong.push(format!("{name}: encodes to something else")),
                Err(error) => wrong.push(format!("{name}: {error}")),
            }
        }
        assert!(wrong.is_empty(), "{} of {checked}: {wrong:#?}", wrong.len());
        assert!(checked > 100, "only {checked} fixtures were understood");
    }

    /// Truncated or changed bytes give an error or another object, but no panic.
    fn assert_no_panic(body: &[u8]) {
        for at in (0..body.len()).step_by((body.len() / 30).max(1)) {
            let _ = descriptors().unseal(&body[..at]);
            let mut changed = body.to_vec();
            changed[at] = changed[at].wrapping_add(0x7f);
            if let Ok(tree) = descriptors().unseal(&changed) {
                let _ = descriptors().seal(&Value::Object(tree));
            }
        }
    }

    #[test]
    fn every_group_has_its_options() {
        for (api_version, kind) in [
            ("apps/v1", "Deployment"),
            ("v1", "PodList"),
            ("apps/v1", "DeleteOptions"),
            ("v1", "Status"),
            ("meta.k8s.io/v1", "PartialObjectMetadataList"),
            ("apiextensions.k8s.io/v1", "CustomResourceDefinition"),
            ("apiregistration.k8s.io/v1", "APIService"),
        ] {
            assert!(descriptors().kind(api_version, kind).is_some(), "{api_version} {kind}");
        }
        assert!(descriptors().kind("v1", "Zebra").is_none());
    }
}
