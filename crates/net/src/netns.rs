//! Network namespaces pinned to files, and work inside them.
//!
//! A namespace belongs to a thread, and tokio's threads are shared. So every function here starts a
//! thread, which enters the namespace and ends there. A socket keeps the namespace in which it was
//! created, whichever thread uses it later. [`tcp_socket`] and similar functions rely on that and
//! return sockets to the caller's runtime.
//!
//! Pinning is a bind mount of `/proc/thread-self/ns/net`, so it happens in the caller's mount
//! namespace and outlives the process.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{FsType, statfs};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::sync::oneshot;

use crate::error::{During, Error};

/// The file system type of namespace files.
const NSFS: FsType = FsType(0x6e73_6673);

/// Creates a new network namespace (loopback down, otherwise empty) and pins it to `path`. Creates
/// the directory if missing. Fails with EEXIST when a namespace is already pinned there.
pub fn create(path: &Path) -> Result<(), Error> {
    if is_pinned(path) {
        let source = io::Error::from_raw_os_error(libc::EEXIST);
        return Err(Error::System { action: format!("pin netns at {}", path.display()), source });
    }
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).during(|| format!("create {}", directory.display()))?;
    }
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .during(|| format!("create {}", path.display()))?;
    let made = on_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).during(|| "unshare network namespace".into())?;
        let own = Path::new("/proc/thread-self/ns/net");
        mount(Some(own), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .during(|| format!("pin netns at {}", path.display()))
    });
    if made.is_err() {
        // Best effort: the first error is the one to report.
        let _ = fs::remove_file(path);
    }
    made
}

/// Unpins the namespace and removes the file; both may be gone already. The kernel frees the
/// namespace with its last process and socket.
pub fn remove(path: &Path) -> Result<(), Error> {
    // The file may have several mounts; `is_pinned` is false after the last unmount.
    while is_pinned(path) {
        umount2(path, MntFlags::MNT_DETACH).during(|| format!("unmount {}", path.display()))?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).during(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Whether a namespace is pinned at `path`.
pub fn is_pinned(path: &Path) -> bool {
    statfs(path).is_ok_and(|stat| stat.filesystem_type() == NSFS)
}

/// Runs `work` on a thread inside the namespace at `path` and waits for it. Blocks.
pub fn run<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    on_thread(|| {
        join(path)?;
        Ok(work())
    })
}

/// Like [`run`], without blocking the runtime's threads. The thread has entered the runtime, so
/// that `work` may create tokio sockets.
pub async fn enter<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let path = PathBuf::from(path);
    let runtime = tokio::runtime::Handle::current();
    let (done, result) = oneshot::channel();
    std::thread::Builder::new()
        .name("netns".into())
        .spawn(move || {
            let _entered = runtime.enter();
            // The receiver is gone when the caller was cancelled.
            let _ = done.send(join(&path).map(|()| work()));
        })
        .during(|| "start a thread".into())?;
    result.await.unwrap_or(Err(Error::Worker))
}

/// Like [`enter`] if `path` is set; otherwise runs `work` in the process's namespace.
pub async fn enter_or_here<T: Send + 'static>(
    path: Option<&Path>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    match path {
        Some(path) => enter(path, work).await,
        None => Ok(work()),
    }
}

/// A TCP socket in the namespace at `path`, not yet bound or connected.
pub async fn tcp_socket(path: &Path, family: &IpAddr) -> Result<TcpSocket, Error> {
    let v4 = family.is_ipv4();
    enter(path, move || if v4 { TcpSocket::new_v4() } else { TcpSocket::new_v6() })
        .await?
        .during(|| format!("socket in {}", path.display()))
}

/// Connects from inside the namespace, like a process in the pod (probes, port-forward).
pub async fn connect(path: &Path, to: SocketAddr) -> Result<TcpStream, Error> {
    let socket = tcp_socket(path, &to.ip()).await?;
    socket.connect(to).await.during(|| format!("connect to {to} in {}", path.display()))
}

/// Listens inside the namespace.
pub async fn listen(path: &Path, at: SocketAddr) -> Result<TcpListener, Error> {
    let socket = tcp_socket(path, &at.ip()).await?;
    let listen = || {
        socket.set_reuseaddr(true)?;
        socket.bind(at)?;
        socket.listen(1024)
    };
    listen().during(|| format!("listen on {at} in {}", path.display()))
}

/// A UDP socket bound inside the namespace.
pub async fn udp(path: &Path, at: SocketAddr) -> Result<UdpSocket, Error> {
    enter(path, move || {
        let socket = std::net::UdpSocket::bind(at)?;
        socket.set_nonblocking(true)?;
        UdpSocket::from_std(socket)
    })
    .await?
    .during(|| format!("bind {at} in {}", path.display()))
}

fn join(path: &Path) -> Result<(), Error> {
    let namespace = File::open(path).during(|| format!("open netns {}", path.display()))?;
    setns(namespace, CloneFlags::CLONE_NEWNET).during(|| format!("enter {}", path.display()))
}

fn on_thread<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("netns".into())
            .spawn_scoped(scope, work)
            .during(|| "start a thread".into())?;
        thread.join().unwrap_or(Err(Error::Worker))
    })
}
