//! `kubectl logs`: of a pod, of the pods of a workload, or of pods by selector.
//!
//! Upstream: `kubectl/pkg/cmd/logs`.

use std::time::Duration;

use futures::future::try_join_all;
use serde_json::Value;

use super::console::Console;
use super::pods;
use crate::cluster::{Cluster, with_query};
use crate::failure::{Failure, Result, own};

/// Upstream: the default number of lines per container with a selector.
const SELECTOR_TAIL: i64 = 10;

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Logs {
    /// POD or TYPE/NAME, and optionally CONTAINER
    pub target: Vec<String>,
    /// Print the logs of this container
    #[arg(short = 'c', long)]
    pub container: Option<String>,
    /// Get all containers' logs in the pod(s)
    #[arg(long)]
    pub all_containers: bool,
    /// Get logs from all pods of the workload
    #[arg(long)]
    pub all_pods: bool,
    /// Specify if the logs should be streamed
    #[arg(short = 'f', long)]
    pub follow: bool,
    /// Print the logs for the previous instance of the container
    #[arg(short = 'p', long)]
    pub previous: bool,
    /// Selector (label query) to filter on
    #[arg(short = 'l', long)]
    pub selector: Option<String>,
    /// Lines of recent log file to display; -1 shows all
    #[arg(long, default_value_t = -1, allow_hyphen_values = true)]
    pub tail: i64,
    /// Only return logs newer than a relative duration like 5s, 2m, or 3h
    #[arg(long, value_parser = crate::duration::parse)]
    pub since: Option<Duration>,
    /// Only return logs after a specific date (RFC3339)
    #[arg(long)]
    pub since_time: Option<String>,
    /// Include timestamps on each line in the log output
    #[arg(long)]
    pub timestamps: bool,
    /// Maximum bytes of logs to return
    #[arg(long, default_value_t = 0)]
    pub limit_bytes: u64,
    /// Prefix each log line with the log source (pod name and container name)
    #[arg(long)]
    pub prefix: bool,
    /// Maximum number of concurrent logs to follow when using a selector
    #[arg(long, default_value_t = 5)]
    pub max_log_requests: usize,
    /// If watching / following pod logs, allow for any errors that occur to be non-fatal
    #[arg(long)]
    pub ignore_errors: bool,
}

/// One log to print.
struct Source {
    path: String,
    prefix: String,
}

impl Logs {
    pub async fn run(self, cluster: &Cluster, console: &Console) -> Result<()> {
        let sources = self.sources(cluster, console).await?;
        if self.follow && sources.len() > self.max_log_requests {
            return Err(own(format!(
                "you are attempting to follow {} log streams, but maximum allowed concurrency is {}, use --max-log-requests to increase the limit",
                sources.len(),
                self.max_log_requests
            )));
        }
        if self.follow && sources.len() > 1 {
            let all = sources.iter().map(|source| self.copy(cluster, source, console));
            return try_join_all(all).await.map(drop);
        }
        for source in &sources {
            self.copy(cluster, source, console).await?;
        }
        Ok(())
    }

    async fn sources(&self, cluster: &Cluster, console: &Console) -> Result<Vec<Source>> {
        let (word, positional) = match (self.target.as_slice(), &self.selector) {
            ([], None) => {
                return Err(own(
                    "expected 'logs [-f] [-p] (POD | TYPE/NAME) [-c CONTAINER]'.\nPOD or TYPE/NAME is a required argument for the logs command",
                ));
            }
            ([], Some(_)) => (None, None),
            ([_, ..], Some(_)) => return Err(own("only a selector (-l) or a POD name is allowed")),
            ([word], None) => (Some(word), None),
            ([word, container], None) if self.container.is_none() => (Some(word), Some(container)),
            _ => return Err(own("only one of -c or an inline [CONTAINER] arg is allowed")),
        };
        let container = self.container.as_ref().or(positional);
        let mut found = match (word, &self.selector) {
            (Some(word), _) => pods::behind(cluster, word).await?,
            (None, Some(selector)) => pods::matching(cluster, selector).await?,
            (None, None) => vec![],
        };
        if found.is_empty() {
            console.note(format!("No resources found in {} namespace.", cluster.namespace));
        }
        if self.selector.is_none() && !self.all_pods && found.len() > 1 {
            let chosen = pods::name(&found[0]).to_owned();
            console.note(format!("Found {} pods, using pod/{chosen}", found.len()));
            found.truncate(1);
        }
        let mut sources = vec![];
        for pod in &found {
            let names = match container {
                Some(name) => {
                    pods::check_container(pod, name).map_err(|_| {
                        own(format!("container {name} is not valid for pod {}", pods::name(pod)))
                    })?;
                    vec![name.clone()]
                }
                None if self.all_containers => pods::containers(pod),
                None => vec![pods::default_container(pod, console, false)?],
            };
            sources.extend(names.iter().map(|name| self.source(cluster, pod, name)));
        }
        Ok(sources)
    }

    fn source(&self, cluster: &Cluster, pod: &Value, container: &str) -> Source {
        let number = |number: i64| if number < 0 { String::new() } else { number.to_string() };
        let flag = |flag: bool| if flag { "true".to_owned() } else { String::new() };
        let tail = match self.tail {
            -1 if self.selector.is_some() => SELECTOR_TAIL,
            tail => tail,
        };
        // Upstream: fractions of a second are rounded up.
        let since = self.since.map(|d| (d.as_millis().div_ceil(1000)).to_string());
        let limit =
            if self.limit_bytes == 0 { String::new() } else { self.limit_bytes.to_string() };
        let pod_name = pods::name(pod);
        let path = format!("{}/log", pods::path(&cluster.namespace, pod_name));
        let path = with_query(
            &path,
            &[
                ("container", container),
                ("follow", &flag(self.follow)),
                ("previous", &flag(self.previous)),
                ("tailLines", &number(tail)),
                ("sinceSeconds", &since.unwrap_or_default()),
                ("sinceTime", self.since_time.as_deref().unwrap_or_default()),
                ("timestamps", &flag(self.timestamps)),
                ("limitBytes", &limit),
            ],
        );
        let prefix =
            if self.prefix { format!("[pod/{pod_name}/{container}] ") } else { String::new() };
        Source { path, prefix }
    }

    async fn copy(&self, cluster: &Cluster, source: &Source, console: &Console) -> Result<()> {
        let outcome = self.stream(cluster, source, console).await;
        match outcome {
            Err(Failure::Output(error)) => Err(Failure::Output(error)),
            Err(error) if self.ignore_errors => {
                error.lines().iter().for_each(|line| console.note(line));
                Ok(())
            }
            other => other,
        }
    }

    async fn stream(&self, cluster: &Cluster, source: &Source, console: &Console) -> Result<()> {
        let mut lines = cluster.lines(&source.path, "*/*").await?;
        while let Some(line) = lines.next().await? {
            // One write per line, so that lines of several logs do not mix.
            console.print([source.prefix.as_bytes(), &line].concat())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_become_queries() {
        use clap::Parser;
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            logs: Logs,
        }
        let cluster = super::super::tests::cluster("http://127.0.0.1:1");
        let pod = serde_json::json!({"metadata":{"name":"p"}});
        let check = |line: &str, expected: &str| {
            let logs = Line::parse_from(line.split(' ')).logs;
            let source = logs.source(&cluster, &pod, "c");
            let query = source.path.split_once('?').map(|(_, query)| query);
            assert_eq!(query, Some(expected), "{line}");
        };
        check("logs p", "container=c");
        check(
            "logs p -f --tail=5 --timestamps",
            "container=c&follow=true&tailLines=5&timestamps=true",
        );
        check(
            "logs p -p --since=1500ms --limit-bytes=9",
            "container=c&previous=true&sinceSeconds=2&limitBytes=9",
        );
        check("logs -l a=b", "container=c&tailLines=10");
        check("logs p --tail=-1", "container=c");
    }
}
