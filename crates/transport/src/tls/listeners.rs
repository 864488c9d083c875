//! Settings of all TLS listeners of this process, and certificates by server name.
//!
//! In: upstream's `--tls-min-version`, `--tls-cipher-suites` and `--tls-sni-cert-key`. Out: versions, a
//! provider and a resolver for [`super::server_config`]. Upstream's flags are of a process, too.
//!
//! Deviation: TLS 1.0 and 1.1, and suites without forward secrecy or with CBC, are not offered: a minimum
//! below 1.2 means 1.2, and such suites of the list are left out. Upstream: `component-base/cli/flag`.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{CipherSuite, SupportedProtocolVersion};

use super::{Identity, TlsError, provider};

static LISTENERS: OnceLock<Listeners> = OnceLock::new();

/// Both versions, oldest first.
const VERSIONS: &[&SupportedProtocolVersion] = &[&rustls::version::TLS12, &rustls::version::TLS13];

/// Suites of Go's names that are not offered here.
const OLD_SUITES: &[&str] = &[
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_RSA_WITH_RC4_128_SHA",
];

/// What listeners offer; by default both versions and all suites.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listeners {
    only_newest: bool,
    /// Suites of TLS 1.2; empty: all. Those of TLS 1.3 cannot be chosen, as in Go.
    suites: Vec<CipherSuite>,
}

impl Listeners {
    /// From the values of the flags; an empty version is the default.
    ///
    /// # Errors
    /// Upstream's; also if no suite is left.
    pub fn new(min_version: &str, suites: &[String]) -> Result<Self, String> {
        let only_newest = match min_version {
            "" | "VersionTLS10" | "VersionTLS11" | "VersionTLS12" => false,
            "VersionTLS13" => true,
            other => return Err(format!("unknown tls version {other:?}")),
        };
        let mut known = vec![];
        for name in suites {
            match suite(name) {
                Some(suite) => known.push(suite),
                None if OLD_SUITES.contains(&name.as_str()) => {}
                None => return Err(format!("Cipher suite {name} not supported or doesn't exist")),
            }
        }
        if known.is_empty() && !suites.is_empty() && !only_newest {
            return Err(
                "--tls-cipher-suites names no suite with forward secrecy and without CBC".into()
            );
        }
        Ok(Self { only_newest, suites: known })
    }

    /// Sets them for the process, once, before anything listens.
    pub fn install(self) {
        // A second call is of a test's second server.
        let _ = LISTENERS.set(self);
    }

    fn versions(&self) -> &'static [&'static SupportedProtocolVersion] {
        if self.only_newest { &VERSIONS[1..] } else { VERSIONS }
    }

    fn provider(&self) -> CryptoProvider {
        let mut all = (*provider()).clone();
        if !self.suites.is_empty() {
            let newest = &rustls::version::TLS13;
            all.cipher_suites
                .retain(|one| one.version() == newest || self.suites.contains(&one.suite()));
        }
        all
    }
}

/// What the process' listeners offer.
pub(super) fn of_process() -> (Arc<CryptoProvider>, &'static [&'static SupportedProtocolVersion]) {
    let listeners = LISTENERS.get().cloned().unwrap_or_default();
    (Arc::new(listeners.provider()), listeners.versions())
}

/// A suite by Go's name.
fn suite(name: &str) -> Option<CipherSuite> {
    // Two suites have an older name, too.
    let name = match name {
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305" => "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305" => "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
        name => name,
    };
    let all = provider().cipher_suites.clone();
    let name_of = |one: CipherSuite| format!("{one:?}").replace("TLS13_", "TLS_");
    all.into_iter().map(|one| one.suite()).find(|one| name_of(*one) == name)
}

/// Certificates by the name that the client asks for.
#[derive(Debug)]
pub(super) struct Named {
    usual: Arc<CertifiedKey>,
    /// By name or `*.DOMAIN`, in lower case.
    named: HashMap<String, Arc<CertifiedKey>>,
}

impl Named {
    pub fn new(usual: &Identity, named: &[(Vec<String>, Identity)]) -> Result<Self, TlsError> {
        let certified = |one: &Identity| -> Result<_, TlsError> {
            let key = CertifiedKey::from_der(one.chain.clone(), one.key.clone_key(), &provider())?;
            Ok(Arc::new(key))
        };
        let mut by_name = HashMap::new();
        for (names, identity) in named {
            let key = certified(identity)?;
            for name in names {
                // Of two certificates for a name the first one counts.
                by_name.entry(name.to_ascii_lowercase()).or_insert_with(|| key.clone());
            }
        }
        Ok(Self { usual: certified(usual)?, named: by_name })
    }

    fn find(&self, name: Option<&str>) -> Arc<CertifiedKey> {
        let exact = name.and_then(|name| self.named.get(&name.to_ascii_lowercase()));
        let wild = || {
            let (_, domain) = name?.split_once('.')?;
            self.named.get(&format!("*.{}", domain.to_ascii_lowercase()))
        };
        exact.or_else(wild).unwrap_or(&self.usual).clone()
    }
}

impl ResolvesServerCert for Named {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.find(hello.server_name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(version: &str, suites: &[&str]) -> Result<Listeners, String> {
        let suites: Vec<String> = suites.iter().map(|one| (*one).to_owned()).collect();
        Listeners::new(version, &suites)
    }

    #[test]
    fn versions_and_suites_are_chosen_by_gos_names() {
        let check = |version: &str, suites: &[&str], versions: usize, left: usize| {
            let listeners = settings(version, suites).expect("valid");
            assert_eq!(listeners.versions().len(), versions, "{version}");
            let old = listeners.provider().cipher_suites.into_iter();
            let old = old.filter(|one| one.version() != &rustls::version::TLS13);
            assert_eq!(old.count(), left, "{suites:?}");
        };
        check("", &[], 2, 6);
        check("VersionTLS10", &[], 2, 6);
        check("VersionTLS13", &[], 1, 6);
        let suites = ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_RSA_WITH_AES_128_CBC_SHA"];
        check("VersionTLS12", &suites, 2, 1);
        check("", &["TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305", "TLS_AES_128_GCM_SHA256"], 2, 1);
    }

    #[test]
    fn unknown_names_are_upstreams_errors() {
        assert_eq!(settings("TLS12", &[]), Err("unknown tls version \"TLS12\"".into()));
        let error = Err("Cipher suite X not supported or doesn't exist".into());
        assert_eq!(settings("", &["X"]), error);
        assert!(settings("", &["TLS_RSA_WITH_RC4_128_SHA"]).is_err());
    }
}
