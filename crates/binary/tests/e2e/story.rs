//! The cluster that the chapters share, and common helpers.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use testkit::cluster::Server;
use testkit::host::Host;
use testkit::http::{self, ApiClient, Response};
use testkit::nodes::Agent;
use testkit::switch::Switch;
use testkit::{images, wait};

use crate::expect;

pub use testkit::wait::LONG;

/// Limit of one request, so that a test that polls does not hang in one.
const REQUEST: Duration = Duration::from_secs(20);

/// Addresses of the switch's network for Services of type LoadBalancer.
const POOL: &str = "192.168.77.200-210";
/// Read when the server starts: images of one registry are pulled from another.
const REGISTRIES: &str = "mirrors:\n  registry.test:\n    endpoint:\n    - http://127.0.0.1:5000\n";

pub struct Story {
    // Must be dropped before the hosts, which are connected to it.
    pub switch: Switch,
    /// The second node, if it exists.
    pub agent: Option<Agent>,
    pub server: Server,
    pub binary: PathBuf,
    /// The node's address on the switch.
    pub address: String,
    pub static_manifests: PathBuf,
}

impl Story {
    /// Creates the host, the images and a server that is ready.
    pub fn begin() -> Result<Self> {
        images::all()?;
        let mut switch = Switch::new()?;
        let host = Host::new("node1")?;
        let address = switch.connect(&host)?;
        let static_manifests = host.directory().join("manifests");
        std::fs::create_dir(&static_manifests)?;
        let manifests = static_manifests.display().to_string();
        let named = ["--node-name", "node1", "--node-ip", &address];
        let arguments =
            [&named[..], &["--pod-manifest-path", &manifests], &["--load-balancer-pool", POOL]]
                .concat();
        let binary = std::env::var_os("DECAPOD_BINARY")
            .map_or_else(|| env!("CARGO_BIN_EXE_decapod").into(), PathBuf::from);
        let mut server = Server::new(host, &binary, &arguments)?;
        std::fs::create_dir(server.data_directory())?;
        std::fs::write(server.data_directory().join("registries.yaml"), REGISTRIES)?;
        if let Err(error) = server.start() {
            bail!("{error:#}\n{}", server.report());
        }
        Ok(Self { switch, agent: None, server, binary, address, static_manifests })
    }

    pub fn report(&self) -> String {
        let mut text = self.server.report();
        if let Some(agent) = &self.agent {
            text.push_str(&format!("--- the agent's log\n{}", agent.log()));
        }
        text
    }

    /// Runs kubectl; the line is split at spaces, so no word may contain one.
    pub fn kubectl(&self, line: &str) -> Result<String> {
        self.server.kubectl(&words(line))
    }

    pub fn apply(&self, manifest: &str) -> Result<String> {
        self.server.kubectl_with(&["apply", "-f", "-"], manifest)
    }

    /// Runs kubectl and compares its output with a pattern (see [`expect`]).
    pub fn shows(&self, line: &str, pattern: &str) -> Result<()> {
        let printed = self.kubectl(line)?;
        expect::like(&printed, pattern).with_context(|| format!("kubectl {line}"))
    }

    /// The same, repeated until it matches.
    pub fn soon_shows(&self, limit: Duration, line: &str, pattern: &str) -> Result<()> {
        wait::until(limit, &format!("kubectl {line}"), || self.shows(line, pattern))
    }

    pub fn json(&self, line: &str) -> Result<Value> {
        let printed = self.kubectl(&format!("{line} -o json"))?;
        serde_json::from_str(&printed).with_context(|| line.to_owned())
    }

    /// One value of an object, in the form of jsonpath.
    pub fn value(&self, what: &str, path: &str) -> Result<String> {
        self.server.kubectl(
            &[&["get"][..], &words(what), &["-o", &format!("jsonpath={{{path}}}")]].concat(),
        )
    }

    /// Waits until a value is as wanted.
    pub fn soon(&self, limit: Duration, what: &str, path: &str, wanted: &str) -> Result<()> {
        wait::until(limit, &format!("{what} {path} = {wanted}"), || {
            let found = self.value(what, path)?;
            ensure!(found == wanted, "it is {found:?}");
            Ok(())
        })
    }

    /// Names of the pods with a label that are not terminating.
    pub fn pods(&self, selector: &str) -> Result<Vec<String>> {
        let list = self.json(&format!("get pods -l {selector}"))?;
        let items = list["items"].as_array().context("a list has items")?;
        let alive = items.iter().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        Ok(alive.filter_map(|pod| Some(pod["metadata"]["name"].as_str()?.to_owned())).collect())
    }

    pub fn first_pod(&self, selector: &str) -> Result<String> {
        self.pods(selector)?.into_iter().min().with_context(|| format!("no pod with {selector}"))
    }

    /// One request from the node itself.
    pub fn get(&self, address: &str, path: &str) -> Result<Response> {
        http::get_from(&self.server.host().network()?, address, path, REQUEST)
    }

    /// The reasons of events about an object.
    pub fn events(&self, name: &str) -> Result<Vec<String>> {
        let list =
            self.json(&format!("get events -A --field-selector involvedObject.name={name}"))?;
        let items = list["items"].as_array().context("a list has items")?;
        Ok(items.iter().filter_map(|event| Some(event["reason"].as_str()?.to_owned())).collect())
    }

    pub fn soon_has_events(&self, name: &str, wanted: &[&str]) -> Result<()> {
        wait::until(LONG, &format!("events of {name}"), || {
            let found = self.events(name)?;
            let missing: Vec<_> =
                wanted.iter().filter(|reason| !found.iter().any(|f| f == **reason)).collect();
            ensure!(missing.is_empty(), "{missing:?} missing among {found:?}");
            Ok(())
        })
    }

    pub fn api(&self) -> Result<ApiClient> {
        self.server.api()
    }
}

pub fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}
