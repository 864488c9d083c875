//! The metrics that upstream promises (`release::stable_metrics`), on a running control plane: names, types,
//! labels. The kubelet's are compared in its own crate.
//!
//! Invariant: a promised family that is on no page has a reason here, and a reason whose family is there
//! fails the test.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testkit::wait;

use crate::support::{LONG, Server};

/// Families of other programs than the control plane.
const OF_NODES: &[&str] = &[
    "container_cpu_usage_seconds_total",
    "container_memory_working_set_bytes",
    "container_start_time_seconds",
    "kubelet_image_volume_mounted_errors_total",
    "kubelet_image_volume_mounted_succeed_total",
    "kubelet_image_volume_requested_total",
    "node_cpu_usage_seconds_total",
    "node_memory_working_set_bytes",
    "pod_cpu_usage_seconds_total",
    "pod_memory_working_set_bytes",
    "prober_probe_total",
    "resource_scrape_error",
];

#[test]
fn promised_metrics_are_served() -> Result<()> {
    let server = Server::start(&[])?;
    use_it(&server)?;
    let page = pages(&server)?;
    let mut wrong = vec![];
    for family in release::stable_metrics::all() {
        let is_elsewhere = OF_NODES.contains(&family.name);
        match family.judge(&page) {
            None if is_elsewhere => wrong.push(format!("{}: it is here, too", family.name)),
            Some(why) if !is_elsewhere => wrong.push(format!("{}: {why}", family.name)),
            _ => {}
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    has_counted(&page)
}

fn pages(server: &Server) -> Result<String> {
    let mut all = String::new();
    for path in ["/metrics", "/metrics/slis", "/metrics/resources"] {
        let answer = server.api()?.get(path, LONG)?;
        ensure!(answer.status == 200, "{path}: {}", answer.body);
        all += &answer.body;
    }
    Ok(all)
}

/// Makes families count that have labels.
fn use_it(server: &Server) -> Result<()> {
    let post = |path: &str, body: &serde_json::Value| -> Result<()> {
        let answer = server.api()?.post(path, &body.to_string(), LONG)?;
        ensure!(answer.status == 201, "{path}: {}", answer.body);
        Ok(())
    };
    server.api()?.get("/api/v1/componentstatuses", LONG)?;
    server.api()?.get("/healthz", LONG)?;
    let container = json!({"name": "c", "image": "none",
        "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "1Mi"}}});
    let template = json!({"metadata": {"labels": {"app": "a"}},
        "spec": {"restartPolicy": "Never", "containers": [container]}});
    let service = json!({"metadata": {"name": "a"},
        "spec": {"selector": {"app": "a"}, "ports": [{"port": 80}]}});
    post("/api/v1/namespaces/default/services", &service)?;
    let job = json!({"metadata": {"name": "a"}, "spec": {"template": template}});
    post("/apis/batch/v1/namespaces/default/jobs", &job)?;
    wait::until(LONG, "the Job's pod is rejected by the scheduler", || {
        let pods = server.api()?.get("/api/v1/namespaces/default/pods", LONG)?.body;
        ensure!(pods.contains("no nodes available"), "{pods}");
        Ok(())
    })
}

fn has_counted(page: &str) -> Result<()> {
    let value = |sample: &str| -> Result<f64> {
        let line = page.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        Ok(line.with_context(|| format!("no {sample}"))?.parse()?)
    };
    for sample in [
        "apiserver_admission_step_admission_duration_seconds_count{operation=\"CREATE\",rejected=\"false\",type=\"validate\"}",
        "apiserver_requested_deprecated_apis{group=\"\",removed_release=\"\",resource=\"componentstatuses\",subresource=\"\",version=\"v1\"}",
        "apiserver_storage_events_received_total{group=\"batch\",resource=\"jobs\"}",
        "apiserver_storage_size_bytes{storage_cluster_id=\"etcd-0\"}",
        "endpoint_slice_controller_num_endpoint_slices",
        "job_controller_job_syncs_total{action=\"pods_created\",completion_mode=\"NonIndexed\",result=\"success\"}",
        "running_managed_controllers{manager=\"kube-controller-manager\",name=\"job-controller\"}",
        "scheduler_queue_incoming_pods_total{event=\"UnschedulablePodAdd\",queue=\"active\"}",
        "registered_metrics_total{deprecated_version=\"\",stability_level=\"STABLE\"}",
        "decapod_store_reserve_bytes",
    ] {
        ensure!(value(sample)? > 0.0, "{sample} is 0");
    }
    // The memory's limit is its request, too.
    let is_of_job =
        |line: &&str| line.starts_with("kube_pod_resource_request{namespace=\"default\"");
    let count = page.lines().filter(is_of_job).count();
    ensure!(count == 2, "the pod requests {count} resources\n{page}");
    Ok(())
}
