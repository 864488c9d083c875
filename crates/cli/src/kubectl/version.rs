//! `kubectl version`.

use serde_json::{Value, json};

use super::console::Console;
use super::print::yaml;
use crate::cluster::Cluster;
use crate::failure::{Failure, Result, own};

/// The API version that this kubectl was made for.
const GIT_VERSION: &str = release::KUBERNETES.build;

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Version {
    /// If true, shows client version only (no server required)
    #[arg(long)]
    pub client: bool,
    /// One of 'yaml' or 'json'
    #[arg(short = 'o', long)]
    pub output: Option<String>,
}

impl Version {
    pub async fn run(
        self,
        cluster: impl FnOnce() -> Result<Cluster>,
        console: &Console,
    ) -> Result<()> {
        let (mut server, mut failures) = (None, vec![]);
        if !self.client {
            match async { cluster()?.get("/version").await }.await {
                Ok(version) => server = Some(version),
                Err(error) => failures.push(error),
            }
        }
        console.print(self.text(server.as_ref())?)?;
        Failure::collect(failures)
    }

    fn text(&self, server: Option<&Value>) -> Result<String> {
        let mut all = json!({ "clientVersion": {
            "major": "1",
            "minor": "36",
            "gitVersion": GIT_VERSION,
            "platform": base::platform::platform(),
        }});
        if let Some(server) = server {
            all["serverVersion"] = server.clone();
        }
        match self.output.as_deref() {
            None => {
                let version = |side: &str| all[side]["gitVersion"].as_str().map(str::to_owned);
                let client = version("clientVersion").unwrap_or_default();
                let server =
                    version("serverVersion").map(|text| format!("Server Version: {text}\n"));
                Ok(format!("Client Version: {client}\n{}", server.unwrap_or_default()))
            }
            Some("json") => Ok(yaml::to_json(&all) + "\n"),
            Some("yaml") => Ok(yaml::to_yaml(&all)),
            Some(_) => Err(own("--output must be 'yaml' or 'json'")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_printed() {
        let plain = Version::default();
        let server = json!({"gitVersion":"v1.30.1"});
        let got = plain.text(Some(&server)).expect("prints");
        assert_eq!(got, format!("Client Version: {GIT_VERSION}\nServer Version: v1.30.1\n"));
        assert_eq!(plain.text(None).expect("prints").lines().count(), 1);
        let odd = Version { output: Some("toml".into()), ..plain };
        assert!(odd.text(None).is_err());
    }
}
