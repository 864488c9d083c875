//! Flags about one API server among several: how it shows that it lives, and how it leaves.

use std::time::Duration;

use control::endpoints::Mode;

#[derive(clap::Args, Clone, Debug)]
pub struct PresenceFlags {
    /// How the endpoints of Service kubernetes are kept: lease (servers that live), master-count (servers
    /// that have started, see --apiserver-count), none (by another program)
    #[arg(long, default_value = "lease", value_parser = ["lease", "master-count", "none"],
        value_name = "TYPE")]
    endpoint_reconciler_type: String,
    /// Number of API servers, for --endpoint-reconciler-type=master-count
    #[arg(long, default_value_t = 1, hide = true, value_parser = count, value_name = "NUMBER")]
    apiserver_count: usize,
    /// At SIGTERM, how long the server serves on while /readyz fails, so that balancers see it in time
    #[arg(long, value_parser = cli::duration::parse, default_value = "0s", value_name = "DURATION")]
    pub shutdown_delay_duration: Duration,
}

fn count(text: &str) -> Result<usize, String> {
    let number: Option<usize> = text.parse().ok();
    number.filter(|number| *number > 0).ok_or_else(|| "should be a positive number".into())
}

impl PresenceFlags {
    pub fn mode(&self) -> Mode {
        match self.endpoint_reconciler_type.as_str() {
            "master-count" => Mode::MasterCount(self.apiserver_count),
            "none" => Mode::None,
            _ => Mode::Lease,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: PresenceFlags,
    }

    #[test]
    fn upstreams_types_are_known() {
        let mode = |words: &[&str]| {
            let line = Line::try_parse_from(["decapod"].iter().chain(words));
            line.ok().map(|line| line.flags.mode())
        };
        assert_eq!(mode(&[]), Some(Mode::Lease));
        assert_eq!(mode(&["--endpoint-reconciler-type=none"]), Some(Mode::None));
        let counted = &["--endpoint-reconciler-type=master-count", "--apiserver-count=3"];
        assert_eq!(mode(counted), Some(Mode::MasterCount(3)));
        assert_eq!(mode(&["--endpoint-reconciler-type=magic"]), None);
        assert_eq!(mode(&["--apiserver-count=0"]), None);
    }
}
