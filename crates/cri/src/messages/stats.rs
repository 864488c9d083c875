//! Statistics: CPU, memory, network, disk.

use super::*;

base::messages! {
    message PodSandboxStatsRequest {
        string pod_sandbox_id = 1;
    }

    message PodSandboxStatsResponse {
        PodSandboxStats stats = 1;
    }

    message PodSandboxStatsFilter {
        string id = 1;
        map<string, string> label_selector = 2;
    }

    message ListPodSandboxStatsRequest {
        PodSandboxStatsFilter filter = 1;
    }

    message ListPodSandboxStatsResponse {
        repeated PodSandboxStats stats = 1;
    }

    message PodSandboxStats {
        PodSandboxAttributes attributes = 1;
        LinuxPodSandboxStats linux = 2;
    }

    message LinuxPodSandboxStats {
        CpuUsage cpu = 1;
        MemoryUsage memory = 2;
        NetworkUsage network = 3;
        ProcessUsage process = 4;
        repeated ContainerStats containers = 5;
        IoUsage io = 6;
    }

    message NetworkUsage {
        int64 timestamp = 1;
        NetworkInterfaceUsage default_interface = 2;
        repeated NetworkInterfaceUsage interfaces = 3;
    }

    message NetworkInterfaceUsage {
        string name = 1;
        UInt64Value rx_bytes = 2;
        UInt64Value rx_errors = 3;
        UInt64Value tx_bytes = 4;
        UInt64Value tx_errors = 5;
    }

    message ProcessUsage {
        int64 timestamp = 1;
        UInt64Value process_count = 2;
    }

    message UInt64Value {
        uint64 value = 1;
    }

    message FilesystemIdentifier {
        string mountpoint = 1;
    }

    message FilesystemUsage {
        int64 timestamp = 1;
        FilesystemIdentifier fs_id = 2;
        UInt64Value used_bytes = 3;
        UInt64Value inodes_used = 4;
    }

    message ContainerStatsRequest {
        string container_id = 1;
    }

    message ContainerStatsResponse {
        ContainerStats stats = 1;
    }

    message ListContainerStatsRequest {
        ContainerStatsFilter filter = 1;
    }

    message ContainerStatsFilter {
        string id = 1;
        string pod_sandbox_id = 2;
        map<string, string> label_selector = 3;
    }

    message ListContainerStatsResponse {
        repeated ContainerStats stats = 1;
    }

    message ContainerStats {
        ContainerAttributes attributes = 1;
        CpuUsage cpu = 2;
        MemoryUsage memory = 3;
        FilesystemUsage writable_layer = 4;
        SwapUsage swap = 5;
        IoUsage io = 6;
    }

    message PsiStats {
        PsiData full = 1;
        PsiData some = 2;
    }

    message PsiData {
        uint64 total = 1;
        double avg10 = 2;
        double avg60 = 3;
        double avg300 = 4;
    }

    message CpuUsage {
        int64 timestamp = 1;
        UInt64Value usage_core_nano_seconds = 2;
        UInt64Value usage_nano_cores = 3;
        PsiStats psi = 4;
    }

    message MemoryUsage {
        int64 timestamp = 1;
        UInt64Value working_set_bytes = 2;
        UInt64Value available_bytes = 3;
        UInt64Value usage_bytes = 4;
        UInt64Value rss_bytes = 5;
        UInt64Value page_faults = 6;
        UInt64Value major_page_faults = 7;
        PsiStats psi = 8;
    }

    message IoUsage {
        int64 timestamp = 1;
        PsiStats psi = 2;
    }

    message SwapUsage {
        int64 timestamp = 1;
        UInt64Value swap_available_bytes = 2;
        UInt64Value swap_usage_bytes = 3;
    }

    message ListMetricDescriptorsResponse {
        repeated MetricDescriptor descriptors = 1;
    }

    message MetricDescriptor {
        string name = 1;
        string help = 2;
        repeated string label_keys = 3;
    }

    message ListPodSandboxMetricsResponse {
        repeated PodSandboxMetrics pod_metrics = 1;
    }

    message PodSandboxMetrics {
        string pod_sandbox_id = 1;
        repeated Metric metrics = 2;
        repeated ContainerMetrics container_metrics = 3;
    }

    message ContainerMetrics {
        string container_id = 1;
        repeated Metric metrics = 2;
    }

    enum MetricType { Counter = 0; Gauge = 1; }

    message Metric {
        string name = 1;
        int64 timestamp = 2;
        enum MetricType metric_type = 3;
        repeated string label_values = 4;
        UInt64Value value = 5;
    }
}
