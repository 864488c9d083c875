//! Metrics of pods for clients of CRI, with cAdvisor's names.
//!
//! In: the statistics of all pods. Out: descriptors and samples, from one table: a sample has the labels of
//! its descriptor. Upstream: KEP 2371. Deviation: only the families that the statistics can fill; a value is
//! an integer in this protocol, so CPU time is in whole seconds.

use crate::*;

const NANOS: u64 = 1_000_000_000;
const OF_CONTAINER: &[&str] = &["id", "name"];
const OF_INTERFACE: &[&str] = &["id", "interface"];

type Reading<T> = fn(&T) -> Option<u64>;

struct Family<T> {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    read: Reading<T>,
}

const CONTAINERS: &[Family<ContainerStats>] = &[
    Family {
        name: "container_cpu_usage_seconds_total",
        help: "Cumulative cpu time consumed in seconds.",
        kind: MetricType::Counter,
        read: |of| Some(of.cpu.as_ref()?.usage_core_nano_seconds.as_ref()?.value / NANOS),
    },
    Family {
        name: "container_memory_usage_bytes",
        help: "Current memory usage in bytes, including all memory regardless of when it was accessed.",
        kind: MetricType::Gauge,
        read: |of| Some(of.memory.as_ref()?.usage_bytes.as_ref()?.value),
    },
    Family {
        name: "container_memory_working_set_bytes",
        help: "Current working set in bytes.",
        kind: MetricType::Gauge,
        read: |of| Some(of.memory.as_ref()?.working_set_bytes.as_ref()?.value),
    },
    Family {
        name: "container_memory_rss",
        help: "Size of RSS in bytes.",
        kind: MetricType::Gauge,
        read: |of| Some(of.memory.as_ref()?.rss_bytes.as_ref()?.value),
    },
    Family {
        name: "container_memory_swap",
        help: "Container swap usage in bytes.",
        kind: MetricType::Gauge,
        read: |of| Some(of.swap.as_ref()?.swap_usage_bytes.as_ref()?.value),
    },
    Family {
        name: "container_fs_usage_bytes",
        help: "Number of bytes that are consumed by the container on this filesystem.",
        kind: MetricType::Gauge,
        read: |of| Some(of.writable_layer.as_ref()?.used_bytes.as_ref()?.value),
    },
];

const INTERFACES: &[Family<NetworkInterfaceUsage>] = &[
    Family {
        name: "container_network_receive_bytes_total",
        help: "Cumulative count of bytes received.",
        kind: MetricType::Counter,
        read: |of| Some(of.rx_bytes.as_ref()?.value),
    },
    Family {
        name: "container_network_receive_errors_total",
        help: "Cumulative count of errors encountered while receiving.",
        kind: MetricType::Counter,
        read: |of| Some(of.rx_errors.as_ref()?.value),
    },
    Family {
        name: "container_network_transmit_bytes_total",
        help: "Cumulative count of bytes transmitted.",
        kind: MetricType::Counter,
        read: |of| Some(of.tx_bytes.as_ref()?.value),
    },
    Family {
        name: "container_network_transmit_errors_total",
        help: "Cumulative count of errors encountered while transmitting.",
        kind: MetricType::Counter,
        read: |of| Some(of.tx_errors.as_ref()?.value),
    },
];

impl<T> Family<T> {
    fn describe(&self, labels: &[&str]) -> MetricDescriptor {
        MetricDescriptor {
            name: self.name.into(),
            help: self.help.into(),
            label_keys: labels.iter().map(ToString::to_string).collect(),
        }
    }

    fn sample(&self, from: &T, timestamp: i64, labels: &[String]) -> Option<Metric> {
        Some(Metric {
            name: self.name.into(),
            timestamp,
            metric_type: self.kind as i32,
            label_values: labels.to_vec(),
            value: Some((self.read)(from)?.into()),
        })
    }
}

pub(super) fn descriptors() -> ListMetricDescriptorsResponse {
    let containers = CONTAINERS.iter().map(|family| family.describe(OF_CONTAINER));
    let interfaces = INTERFACES.iter().map(|family| family.describe(OF_INTERFACE));
    ListMetricDescriptorsResponse { descriptors: containers.chain(interfaces).collect() }
}

pub(super) fn of(pods: &[PodSandboxStats]) -> ListPodSandboxMetricsResponse {
    ListPodSandboxMetricsResponse { pod_metrics: pods.iter().map(of_pod).collect() }
}

fn of_pod(pod: &PodSandboxStats) -> PodSandboxMetrics {
    let id = pod.attributes.as_ref().map(|about| about.id.clone()).unwrap_or_default();
    let linux = pod.linux.clone().unwrap_or_default();
    let network = linux.network.unwrap_or_default();
    let interfaces = network.interfaces.iter().flat_map(|interface| {
        let labels = [id.clone(), interface.name.clone()];
        let at = network.timestamp;
        INTERFACES.iter().filter_map(move |family| family.sample(interface, at, &labels))
    });
    PodSandboxMetrics {
        metrics: interfaces.collect(),
        container_metrics: linux.containers.iter().map(of_container).collect(),
        pod_sandbox_id: id,
    }
}

fn of_container(stats: &ContainerStats) -> ContainerMetrics {
    let about = stats.attributes.clone().unwrap_or_default();
    let name = about.metadata.map(|metadata| metadata.name).unwrap_or_default();
    let labels = [about.id.clone(), name];
    let at = stats.cpu.as_ref().map_or(0, |cpu| cpu.timestamp);
    let samples = CONTAINERS.iter().filter_map(|family| family.sample(stats, at, &labels));
    ContainerMetrics { metrics: samples.collect(), container_id: about.id }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_the_labels_of_their_descriptors() {
        let stats = ContainerStats {
            attributes: Some(ContainerAttributes { id: "c".into(), ..Default::default() }),
            cpu: Some(CpuUsage {
                usage_core_nano_seconds: Some((3 * NANOS).into()),
                ..Default::default()
            }),
            ..Default::default()
        };
        let interface = NetworkInterfaceUsage {
            name: "eth0".into(),
            rx_bytes: Some(7.into()),
            ..Default::default()
        };
        let linux = LinuxPodSandboxStats {
            containers: vec![stats],
            network: Some(NetworkUsage { interfaces: vec![interface], ..Default::default() }),
            ..Default::default()
        };
        let told = of(&[PodSandboxStats { attributes: None, linux: Some(linux) }]);
        let pod = &told.pod_metrics[0];
        let all = pod.metrics.iter().chain(&pod.container_metrics[0].metrics);
        let known = descriptors().descriptors;
        let values: Vec<_> = all
            .map(|sample| {
                let family = known.iter().find(|family| family.name == sample.name);
                let labels = family.expect("described").label_keys.len();
                assert_eq!(sample.label_values.len(), labels, "{}", sample.name);
                (sample.name.as_str(), sample.value.as_ref().expect("a value").value)
            })
            .collect();
        let expected = [
            ("container_network_receive_bytes_total", 7),
            ("container_cpu_usage_seconds_total", 3),
        ];
        assert_eq!(values, expected);
    }
}
