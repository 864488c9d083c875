//! Registration of device plugins: on the kubelet's own socket, or by a socket in `plugins_registry`.
//!
//! In: `v1beta1.Registration/Register`, or a plugin's `GetInfo`. Out: a connected plugin.
//! Plugins watch the directory: when the kubelet's socket is recreated, they register again.
//! Upstream: `plugin/v1beta1/server.go`, `handler.go`, `CleanupPluginDirectory`.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use base::task::Stop;
use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use transport::{Incoming, Listener};

use super::messages::RegisterRequest;
use super::plugin::Plugin;
use super::{DevicePluginError, DevicePlugins};
use crate::plugins::serve as grpc;
use crate::resources::is_extended;
use crate::volumes::csi::messages::{Nothing, PluginInfo};

pub const VERSION: &str = "v1beta1";
const SOCKET: &str = "kubelet.sock";

/// A plugin that registered through `plugins_registry`.
pub struct Registered {
    resource: String,
    plugin: Arc<Plugin>,
}

/// Serves registrations until `stop`.
pub async fn serve(plugins: Arc<DevicePlugins>, stop: Stop) {
    let listener = match open(&plugins.dir) {
        Ok(listener) => listener,
        Err(error) => {
            let dir = plugins.dir.display();
            tracing::error!(%dir, %error, "failed to serve the registration of device plugins");
            return;
        }
    };
    grpc::serve(listener, move |request| answer(plugins.clone(), request), stop).await;
}

fn open(dir: &Path) -> io::Result<Listener> {
    DirBuilder::new().recursive(true).mode(0o750).create(dir)?;
    for entry in fs::read_dir(dir)?.flatten() {
        if fs::metadata(entry.path()).is_ok_and(|about| about.file_type().is_socket()) {
            fs::remove_file(entry.path())?;
        }
    }
    Listener::unix(&dir.join(SOCKET))
}

async fn answer(plugins: Arc<DevicePlugins>, request: Request<Incoming>) -> Response<Body> {
    match request.uri().path() {
        "/v1beta1.Registration/Register" => {
            let register = move |asked| register(plugins.clone(), asked);
            grpc::unary(request, register).await
        }
        other => grpc::unknown(other),
    }
}

async fn register(plugins: Arc<DevicePlugins>, asked: RegisterRequest) -> Result<Nothing, Status> {
    let resource = &asked.resource_name;
    plugins.counts.registered(resource);
    let done = async {
        check_version(&asked.version)?;
        check_name(resource)?;
        plugins.connect(resource, plugins.dir.join(socket(&asked.endpoint)?)).await
    };
    match done.await {
        Ok(_) => Ok(Nothing {}),
        Err(why) => {
            tracing::warn!(resource, error = %why, "failed to register the device plugin");
            Err(Status::unknown(why.to_string()))
        }
    }
}

fn check_version(version: &str) -> Result<(), DevicePluginError> {
    if version == VERSION {
        return Ok(());
    }
    Err(DevicePluginError::Version(version.to_owned()))
}

/// The path of a plugin's socket, which must lie below the directory of all plugins.
fn socket(endpoint: &str) -> Result<&Path, DevicePluginError> {
    let path = Path::new(endpoint.trim_start_matches('/'));
    let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
    match is_below && path.components().next().is_some() {
        true => Ok(path),
        false => Err(DevicePluginError::Endpoint(endpoint.to_owned())),
    }
}

fn check_name(name: &str) -> Result<(), DevicePluginError> {
    match is_extended(name) {
        true => Ok(()),
        false => Err(DevicePluginError::Name(name.to_owned())),
    }
}

fn check(info: &PluginInfo) -> Result<(), DevicePluginError> {
    let versions = &info.supported_versions;
    if !versions.iter().any(|version| version == VERSION) {
        return Err(DevicePluginError::Versions(versions.join(" ")));
    }
    check_name(&info.name).map_err(|why| DevicePluginError::SocketName(Box::new(why)))
}

impl DevicePlugins {
    /// Registers a plugin whose socket appeared in `plugins_registry`.
    pub async fn register(
        self: &Arc<Self>,
        info: &PluginInfo,
        socket: &Path,
    ) -> Result<Registered, DevicePluginError> {
        check(info).map_err(|why| DevicePluginError::Validation(Box::new(why)))?;
        let endpoint = match info.endpoint.as_str() {
            "" => socket.to_owned(),
            endpoint => PathBuf::from(endpoint),
        };
        let plugin = self.connect(&info.name, endpoint).await;
        let plugin = plugin.map_err(|why| DevicePluginError::Registration(Box::new(why)))?;
        Ok(Registered { resource: info.name.clone(), plugin })
    }

    pub fn unregister(&self, registered: &Registered) {
        tracing::info!(resource = registered.resource, "unregistered the device plugin");
        self.disconnect(&registered.resource, &registered.plugin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_lie_below_the_directory() {
        for (endpoint, expected) in [
            ("x.sock", Some("x.sock")),
            ("/x.sock", Some("x.sock")),
            ("a/x.sock", Some("a/x.sock")),
            ("../x.sock", None),
            ("a/../../x.sock", None),
            ("/..", None),
            ("", None),
        ] {
            assert_eq!(socket(endpoint).ok(), expected.map(Path::new), "{endpoint}");
        }
    }

    #[test]
    fn which_registrations_are_accepted() {
        let check = |version: &str, name: &str, expected: Result<(), &str>| {
            let found = check_version(version).and_then(|()| check_name(name));
            assert_eq!(found.map_err(|why| why.to_string()), expected.map_err(str::to_owned));
        };
        check("v1beta1", "example.com/dongle", Ok(()));
        check(
            "v1alpha",
            "example.com/dongle",
            Err(
                "requested API version \"v1alpha\" is not supported by kubelet. Supported version is [\"v1beta1\"]",
            ),
        );
        for name in
            ["dongle", "kubernetes.io/dongle", "requests.example.com/d", "example.com/", "a/b c"]
        {
            check("v1beta1", name, Err(&format!("the ResourceName {name:?} is invalid")));
        }
    }

    #[test]
    fn plugin_info_is_validated() {
        let check = |name: &str, versions: &[&str], expected: Result<(), &str>| {
            let info = PluginInfo {
                kind: "DevicePlugin".into(),
                name: name.into(),
                endpoint: String::new(),
                supported_versions: versions.iter().map(|text| text.to_string()).collect(),
            };
            let found = super::check(&info).map_err(|why| why.to_string());
            assert_eq!(found, expected.map_err(str::to_owned));
        };
        check("example.com/d", &["v1", "v1beta1"], Ok(()));
        check(
            "example.com/d",
            &["v1", "v2"],
            Err("manager version, v1beta1, is not among plugin supported versions [v1 v2]"),
        );
        check(
            "d",
            &["v1beta1"],
            Err("invalid name of device plugin socket: the ResourceName \"d\" is invalid"),
        );
    }

    #[tokio::test]
    async fn old_sockets_are_removed_and_other_files_stay() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = root.path().join("device-plugins");
        fs::create_dir(&dir).expect("made");
        let _old = std::os::unix::net::UnixListener::bind(dir.join("old.sock")).expect("bound");
        fs::write(dir.join("record"), "x").expect("written");
        let _listener = open(&dir).expect("it listens");
        let names = fs::read_dir(&dir).expect("a directory").flatten();
        let mut names: Vec<_> = names.map(|one| one.file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, [SOCKET, "record"]);
    }
}
