//! Pod sandboxes: isolation, names and addresses.

use super::*;

base::messages! {
    message DNSConfig {
        repeated string servers = 1;
        repeated string searches = 2;
        repeated string options = 3;
    }

    enum Protocol { Tcp = 0; Udp = 1; Sctp = 2; }

    message PortMapping {
        enum Protocol protocol = 1;
        int32 container_port = 2;
        int32 host_port = 3;
        string host_ip = 4;
    }

    message IDMapping {
        uint32 host_id = 1;
        uint32 container_id = 2;
        uint32 length = 3;
    }

    enum NamespaceMode { Pod = 0; Container = 1; Node = 2; Target = 3; }

    message UserNamespace {
        enum NamespaceMode mode = 1;
        repeated IDMapping uids = 2;
        repeated IDMapping gids = 3;
    }

    message NamespaceOption {
        enum NamespaceMode network = 1;
        enum NamespaceMode pid = 2;
        enum NamespaceMode ipc = 3;
        string target_id = 4;
        UserNamespace userns_options = 5;
    }

    enum SupplementalGroupsPolicy { Merge = 0; Strict = 1; }

    message Int64Value {
        int64 value = 1;
    }

    message LinuxSandboxSecurityContext {
        NamespaceOption namespace_options = 1;
        SELinuxOption selinux_options = 2;
        Int64Value run_as_user = 3;
        Int64Value run_as_group = 8;
        bool readonly_rootfs = 4;
        repeated int64 supplemental_groups = 5;
        enum SupplementalGroupsPolicy supplemental_groups_policy = 11;
        bool privileged = 6;
        SecurityProfile seccomp = 9;
        SecurityProfile apparmor = 10;
    }

    message SecurityProfile {
        enum ProfileType profile_type = 1;
        string localhost_ref = 2;
    }

    enum ProfileType { RuntimeDefault = 0; Unconfined = 1; Localhost = 2; }

    message LinuxPodSandboxConfig {
        string cgroup_parent = 1;
        LinuxSandboxSecurityContext security_context = 2;
        map<string, string> sysctls = 3;
        LinuxContainerResources overhead = 4;
        LinuxContainerResources resources = 5;
    }

    message PodSandboxMetadata {
        string name = 1;
        string uid = 2;
        string namespace = 3;
        uint32 attempt = 4;
    }

    message PodSandboxConfig {
        PodSandboxMetadata metadata = 1;
        string hostname = 2;
        string log_directory = 3;
        DNSConfig dns_config = 4;
        repeated PortMapping port_mappings = 5;
        map<string, string> labels = 6;
        map<string, string> annotations = 7;
        LinuxPodSandboxConfig linux = 8;
    }

    message RunPodSandboxRequest {
        PodSandboxConfig config = 1;
        string runtime_handler = 2;
    }

    message RunPodSandboxResponse {
        string pod_sandbox_id = 1;
    }

    message StopPodSandboxRequest {
        string pod_sandbox_id = 1;
    }

    message RemovePodSandboxRequest {
        string pod_sandbox_id = 1;
    }

    message PodSandboxStatusRequest {
        string pod_sandbox_id = 1;
        bool verbose = 2;
    }

    message PodIP {
        string ip = 1;
    }

    message PodSandboxNetworkStatus {
        string ip = 1;
        repeated PodIP additional_ips = 2;
    }

    message Namespace {
        NamespaceOption options = 2;
    }

    message LinuxPodSandboxStatus {
        Namespace namespaces = 1;
    }

    enum PodSandboxState { Ready = 0; NotReady = 1; }

    message PodSandboxStatus {
        string id = 1;
        PodSandboxMetadata metadata = 2;
        enum PodSandboxState state = 3;
        int64 created_at = 4;
        PodSandboxNetworkStatus network = 5;
        LinuxPodSandboxStatus linux = 6;
        map<string, string> labels = 7;
        map<string, string> annotations = 8;
        string runtime_handler = 9;
    }

    message PodSandboxStatusResponse {
        PodSandboxStatus status = 1;
        map<string, string> info = 2;
        repeated ContainerStatus containers_statuses = 3;
        int64 timestamp = 4;
    }

    message PodSandboxStateValue {
        enum PodSandboxState state = 1;
    }

    message PodSandboxFilter {
        string id = 1;
        PodSandboxStateValue state = 2;
        map<string, string> label_selector = 3;
    }

    message ListPodSandboxRequest {
        PodSandboxFilter filter = 1;
    }

    message PodSandbox {
        string id = 1;
        PodSandboxMetadata metadata = 2;
        enum PodSandboxState state = 3;
        int64 created_at = 4;
        map<string, string> labels = 5;
        map<string, string> annotations = 6;
        string runtime_handler = 7;
    }

    message ListPodSandboxResponse {
        repeated PodSandbox items = 1;
    }

    message PodSandboxAttributes {
        string id = 1;
        PodSandboxMetadata metadata = 2;
        map<string, string> labels = 3;
        map<string, string> annotations = 4;
    }

    message SELinuxOption {
        string user = 1;
        string role = 2;
        string r#type = 3;
        string level = 4;
    }

    message PortForwardRequest {
        string pod_sandbox_id = 1;
        repeated int32 port = 2;
    }

    message PortForwardResponse {
        string url = 1;
    }

    message UpdatePodSandboxResourcesRequest {
        string pod_sandbox_id = 1;
        LinuxContainerResources overhead = 2;
        LinuxContainerResources resources = 3;
    }
}
