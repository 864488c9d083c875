//! Where the state is kept: the embedded store, or a real etcd when one is named.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use apiserver::codec::at_rest::{self, MediaType};
use apiserver::codec::protobuf::Protobuf;
use base::task::Tasks;
use clap::{Args, ValueEnum};
use store::Store;

/// How long an etcd may take to answer at the start.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Args, Clone, Debug, Default)]
pub struct Datastore {
    /// Keep the state in this etcd cluster (https://HOST:2379,...) instead of the embedded store
    #[arg(long = "datastore-endpoint", value_delimiter = ',', value_name = "URL")]
    pub endpoints: Vec<String>,
    /// CA certificates that etcd's certificates are checked against
    #[arg(long = "datastore-cafile", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Client certificate for etcd
    #[arg(long = "datastore-certfile", value_name = "FILE", requires = "key_file")]
    pub cert_file: Option<PathBuf>,
    /// Key of the client certificate for etcd
    #[arg(long = "datastore-keyfile", value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,
    /// How built-in kinds are written to etcd; both are read
    #[arg(long, value_enum, default_value = "application/vnd.kubernetes.protobuf")]
    pub storage_media_type: StorageMediaType,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default)]
pub enum StorageMediaType {
    #[value(name = "application/json")]
    Json,
    #[default]
    #[value(name = "application/vnd.kubernetes.protobuf")]
    Protobuf,
}

/// Opens the store; an etcd is asked once, so that a wrong endpoint is told at the start.
pub async fn open(
    flags: &Datastore,
    data_dir: &Path,
    tasks: &Tasks,
) -> anyhow::Result<Arc<dyn Store>> {
    if flags.endpoints.is_empty() {
        let directory = data_dir.join("store");
        let options = store::backend::embedded::Options::default();
        return store::backend::embedded::Embedded::open(&directory, options)
            .with_context(|| format!("cannot open the state store in {}", directory.display()));
    }
    for endpoint in &flags.endpoints {
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            bail!(
                "--datastore-endpoint {endpoint}: the embedded store and etcd (https://HOST:2379) are supported, databases are not"
            );
        }
    }
    let read = |file: &Option<PathBuf>| match file {
        None => Ok(None),
        Some(path) => {
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display())).map(Some)
        }
    };
    let options = etcd::Options {
        endpoints: flags.endpoints.clone(),
        ca_pem: read(&flags.ca_file)?,
        identity_pem: read(&flags.cert_file)?.zip(read(&flags.key_file)?),
    };
    let remote = etcd::Etcd::open(&options)?;
    let named = || format!("--datastore-endpoint {}", flags.endpoints.join(","));
    match tokio::time::timeout(PATIENCE, remote.revision()).await {
        Ok(answer) => answer.with_context(named)?,
        Err(_) => bail!("{}: no answer within {} seconds", named(), PATIENCE.as_secs()),
    };
    let compacted = remote.clone();
    tasks.spawn(
        "etcd compactor",
        etcd::compactor::run(compacted, etcd::compactor::DEFAULT_INTERVAL),
    );
    let writes = match flags.storage_media_type {
        StorageMediaType::Json => MediaType::Json,
        StorageMediaType::Protobuf => MediaType::Protobuf,
    };
    Ok(at_rest::like_upstream(remote, Protobuf(api::protobuf::descriptors), writes))
}
