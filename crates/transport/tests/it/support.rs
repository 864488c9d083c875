//! A server with its own authority on a free port of the loopback interface.

use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use decapod_transport::tls::{ClientCerts, Identity, ServerTls, server_config, server_tls};
use decapod_transport::{ClientOptions, ConnectionInfo, Limits, Listener, serve};
use pki::{Authority, Certificate, Profile};
use tokio::sync::Notify;

/// The state that the service of a [`World`] sees.
#[derive(Clone)]
pub struct Shared {
    pub tasks: Tasks,
    pub gate: Arc<Notify>,
    pub entered: Arc<Notify>,
}

pub struct World {
    authority: Authority,
    address: Option<std::net::SocketAddr>,
    tls: Option<ServerTls>,
    pub tasks: Tasks,
    pub gate: Arc<Notify>,
    pub entered: Arc<Notify>,
}

impl World {
    pub async fn start(clients: ClientCerts) -> Self {
        let authority = Authority::generate("test-ca").expect("keys can be made");
        Self::tls(authority, clients).await
    }

    pub async fn start_strict() -> Self {
        let authority = Authority::generate("test-ca").expect("keys can be made");
        let clients = ClientCerts::Verify(authority.cert_pem().to_owned());
        Self::tls(authority, clients).await
    }

    /// A server with limits short enough for a test.
    pub async fn limited(clients: ClientCerts, limits: Limits) -> Self {
        let authority = Authority::generate("test-ca").expect("keys can be made");
        Self::tls_limited(authority, clients, limits).await
    }

    pub fn address(&self) -> std::net::SocketAddr {
        self.address.expect("a TCP server")
    }

    async fn tls(authority: Authority, clients: ClientCerts) -> Self {
        Self::tls_limited(authority, clients, Limits::default()).await
    }

    async fn tls_limited(authority: Authority, clients: ClientCerts, limits: Limits) -> Self {
        let identity = server_identity(&authority);
        let tls = server_tls(&identity, &clients).expect("settings");
        let local = "127.0.0.1:0".parse().expect("an address");
        let listener = Listener::tcp(local).await.expect("binds");
        Self::with(authority, listener, Some(tls), limits).await
    }

    pub async fn plain(listener: Listener) -> Self {
        let authority = Authority::generate("test-ca").expect("keys can be made");
        Self::with(authority, listener, None, Limits::default()).await
    }

    async fn with(
        authority: Authority,
        listener: Listener,
        tls: Option<ServerTls>,
        limits: Limits,
    ) -> Self {
        let tasks = Tasks::new("test server");
        let address = listener.local_addr();
        let world =
            Self { authority, address, tls, tasks, gate: Arc::default(), entered: Arc::default() };
        let shared = Shared {
            tasks: world.tasks.clone(),
            gate: world.gate.clone(),
            entered: world.entered.clone(),
        };
        let service = tower::service_fn(move |request| crate::answer(request, shared.clone()));
        let stop = world.tasks.stop_signal();
        let served = serve(listener, world.tls.clone(), service, limits, stop);
        world.tasks.spawn_graceful("serve", served);
        world
    }

    /// A client's options that fit this server, with a certificate for `user` if wanted.
    pub fn options(&self, user: &str, with_certificate: bool) -> ClientOptions {
        let address = self.address.expect("a TCP server");
        let mut options = ClientOptions {
            server: format!("https://{address}"),
            ca_pem: Some(self.authority.cert_pem().to_owned()),
            ..ClientOptions::default()
        };
        if with_certificate {
            let issued = self.authority.issue(&Profile::client(user, &["dev"])).expect("signs");
            options.cert_pem = Some(issued.cert_pem);
            options.key_pem = Some(issued.key_pem);
        }
        options
    }

    /// Changes the server's certificate to one of an unknown authority.
    pub fn replace_authority(&self) {
        let other = Authority::generate("other-ca").expect("keys can be made");
        let config = server_config(&server_identity(&other), &ClientCerts::Request);
        self.tls.as_ref().expect("a TLS server").store(Arc::new(config.expect("settings")));
    }

    pub async fn shutdown(self) {
        self.tasks.shutdown(Duration::from_secs(10)).await;
    }
}

fn server_identity(authority: &Authority) -> Identity {
    let profile = Profile::server("server", vec![]).with_sans(["127.0.0.1", "localhost"]);
    let issued = authority.issue(&profile).expect("signs");
    Identity::from_pem(&issued.cert_pem, &issued.key_pem).expect("parses")
}

pub fn user(info: &ConnectionInfo) -> String {
    let Some(chain) = &info.peer_certificates else { return "nobody".to_owned() };
    Certificate::parse(&chain[0]).expect("a certificate").common_name
}
