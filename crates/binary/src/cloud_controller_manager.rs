//! `decapod cloud-controller-manager`: upstream's command line, without a provider.
//!
//! In: upstream's flags. Out: upstream's error for a provider that the program does not contain. A program
//! with a cloud's provider works on this API server without changes; nodes wait for it with
//! `kubelet --cloud-provider=external`. Upstream: `cloud-provider/app`, `cmd/cloud-controller-manager`.

#[derive(clap::Args, Clone, Debug)]
pub struct CloudControllerManager {
    /// Name of the provider; none is built in
    #[arg(long, value_name = "NAME")]
    cloud_provider: Option<String>,
}

pub fn run(flags: &CloudControllerManager) -> anyhow::Result<()> {
    match flags.cloud_provider.as_deref() {
        None | Some("") => anyhow::bail!("--cloud-provider cannot be empty"),
        Some(name) => anyhow::bail!(
            "Cloud provider could not be initialized: unknown cloud provider {name:?}; use the cloud's own cloud-controller-manager"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_provider_is_built_in() {
        let run = |name: Option<&str>| {
            let flags = CloudControllerManager { cloud_provider: name.map(str::to_owned) };
            super::run(&flags).expect_err("no provider").to_string()
        };
        assert_eq!(run(None), "--cloud-provider cannot be empty");
        assert!(run(Some("aws")).contains("unknown cloud provider \"aws\""));
    }
}
