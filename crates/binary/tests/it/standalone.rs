//! A controller manager and a scheduler that run alone: the pages of their secure port, and access to
//! them.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use testkit::http::{ApiClient, Connection, Response};
use testkit::{places, wait};

use crate::support::{LONG, Server};

/// The port of both; each has its own address.
const PORT: u16 = 18_443;

const METRICS: [(&str, &[&str]); 2] = [
    ("kube-controller-manager", &["workqueue_adds_total{name=\"deployment\"}"]),
    ("kube-scheduler", &["scheduler_pending_pods{queue=\"active\"}"]),
];

#[test]
fn single_components_serve_health_and_metrics_to_authorized_users() -> Result<()> {
    let server = Server::start(&["--disable", "kube-scheduler,kube-controller-manager"])?;
    let token = monitor(&server)?;
    for (name, figures) in METRICS {
        let mut component = Component::start(&server, name)?;
        let asked = questions(&component, &token, figures);
        asked.with_context(|| component.log())?;
        component.stop()?;
    }
    Ok(())
}

fn questions(component: &Component, token: &str, figures: &[&str]) -> Result<()> {
    let (admin, name) = (component.client()?, component.name);
    let anybody = admin.without_identity()?;
    let get = |client: &ApiClient, path: &str| client.get(path, LONG);
    let expect = |answer: Response, status: u16, text: &str| {
        ensure!(answer.status == status && answer.body.contains(text), "{name}: {answer:?}");
        Ok(())
    };
    expect(get(&anybody, "/healthz")?, 200, "ok")?;
    expect(get(&anybody, "/livez?verbose")?, 200, "[+]ping ok\nlivez check passed\n")?;
    wait::until(LONG, "it is ready", || {
        expect(get(&anybody, "/readyz?verbose")?, 200, "[+]leaderElection ok\n")
    })?;
    let refused = "forbidden: User \\\"system:anonymous\\\" cannot get path \\\"/metrics\\\"";
    expect(get(&anybody, "/metrics")?, 403, refused)?;
    // Subpaths are not always allowed.
    expect(get(&anybody, "/healthz/leaderElection")?, 403, "cannot get path")?;
    wait::until(LONG, "the administrator is known by the certificate, and it leads", || {
        let leads = format!("leader_election_master_status{{name=\"{name}\"}} 1\n");
        let answer = get(&admin, "/metrics")?;
        ensure!(figures.iter().all(|figure| answer.body.contains(figure)), "{answer:?}");
        expect(answer, 200, &leads)
    })?;
    expect(get(&admin, "/metrics")?, 200, "rest_client_requests_total{code=\"200\"")?;
    expect(get(&admin, "/healthz/leaderElection")?, 200, "ok")?;
    expect(get(&admin, "/version")?, 200, "\"gitVersion\":\"v1.36.2")?;
    expect(get(&admin, "/nothing")?, 404, "404 page not found")?;
    let configz: Value = serde_json::from_str(&get(&admin, "/configz")?.body)?;
    let election = match name {
        "kube-scheduler" => &configz["componentconfig"]["leaderElection"],
        _ => &configz["kubecontrollermanager.config.k8s.io"]["Generic"]["LeaderElection"],
    };
    ensure!(election["resourceName"] == name && election["leaderElect"] == true, "{configz}");
    // Tokens: one with the right to metrics reads only metrics; unknown tokens are refused.
    let with = |token: &str, path: &str| {
        let bearer = format!("Bearer {token}");
        let mut connection = Connection::new(anybody.clone(), LONG);
        connection.send("GET", path, &[("authorization", &bearer)], b"")
    };
    wait::until(LONG, "the right of the account is known", || {
        expect(with(token, "/metrics")?, 200, "process_start_time_seconds")
    })?;
    let refused = "User \\\"system:serviceaccount:default:monitor\\\" cannot get path";
    expect(with(token, "/configz")?, 403, refused)?;
    expect(with("nonsense", "/metrics")?, 401, "Unauthorized")
}

/// The token of a service account that may read metrics.
fn monitor(server: &Server) -> Result<String> {
    let api = server.api()?;
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "monitor"}});
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": "monitor"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
            "name": "system:monitoring"},
        "subjects": [{"kind": "ServiceAccount", "namespace": "default", "name": "monitor"}]});
    let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": {}});
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    let bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
    let tokens = format!("{accounts}/monitor/token");
    let mut last = String::new();
    for (path, object) in [(accounts, &account), (bindings, &binding), (tokens.as_str(), &request)]
    {
        let answer = api.post(path, &object.to_string(), LONG)?;
        ensure!(answer.status == 201, "{path}: {}", answer.body);
        last = answer.body;
    }
    let answer: Value = serde_json::from_str(&last)?;
    Ok(answer["status"]["token"].as_str().context("a token")?.to_owned())
}

/// One of the two components, at its own loopback address. Killed on drop.
struct Component {
    name: &'static str,
    process: Child,
    address: String,
    directory: PathBuf,
    /// The administrator's certificate and key.
    identity: (String, String),
}

impl Component {
    fn start(server: &Server, name: &'static str) -> Result<Self> {
        let kubeconfig = server.data().join("kubeconfig");
        let address = places::own_loopback();
        let directory = server.data().join(format!("alone-{name}"));
        fs::create_dir(&directory)?;
        let log = File::create(directory.join("log"))?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_decapod"));
        command.arg(name).arg(format!("--bind-address={address}"));
        command.arg(format!("--secure-port={PORT}")).arg("--cert-dir").arg(&directory);
        for flag in ["--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig"] {
            command.arg(flag).arg(&kubeconfig);
        }
        command.env("NO_COLOR", "1").env_remove("DECAPOD_LOG");
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let config: Value = serde_saphyr::from_str(&fs::read_to_string(&kubeconfig)?)?;
        let pem = |key: &str| -> Result<String> {
            let text = config["users"][0]["user"][key].as_str().context("a user")?;
            Ok(String::from_utf8(STANDARD.decode(text)?)?)
        };
        let identity = (pem("client-certificate-data")?, pem("client-key-data")?);
        let process = command.spawn()?;
        let address = format!("{address}:{PORT}");
        let mut component = Self { name, process, address, directory, identity };
        let answers = wait::until(LONG, "its port answers", || {
            if let Some(status) = component.process.try_wait()? {
                return Ok(Err(status));
            }
            component.client()?.without_identity()?.get("/livez", LONG)?;
            Ok(Ok(()))
        })?;
        answers.map_err(|status| anyhow::anyhow!("{name} ended: {status}\n{}", component.log()))?;
        Ok(component)
    }

    /// The administrator, with a client that trusts the generated certificate.
    fn client(&self) -> Result<ApiClient> {
        let made = fs::read_to_string(self.directory.join(format!("{}.crt", self.name)))?;
        let (cert, key) = &self.identity;
        ApiClient::new(&self.address, &made, cert, key)
    }

    /// Sends SIGTERM, as a service manager does, and expects a clean end.
    fn stop(&mut self) -> Result<()> {
        kill(Pid::from_raw(self.process.id().cast_signed()), Signal::SIGTERM)?;
        let status = wait::until(LONG, "it has ended", || {
            self.process.try_wait()?.context("it still runs")
        })?;
        ensure!(status.success(), "{}: {status}\n{}", self.name, self.log());
        Ok(())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap_or_else(|error| error.to_string())
    }
}

impl Drop for Component {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
