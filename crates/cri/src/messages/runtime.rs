//! The runtime itself: version, conditions, features, events.

use super::*;

base::messages! {
    message VersionRequest {
        string version = 1;
    }

    message VersionResponse {
        string version = 1;
        string runtime_name = 2;
        string runtime_version = 3;
        string runtime_api_version = 4;
    }

    message NetworkConfig {
        string pod_cidr = 1;
    }

    message RuntimeConfig {
        NetworkConfig network_config = 1;
    }

    message UpdateRuntimeConfigRequest {
        RuntimeConfig runtime_config = 1;
    }

    message RuntimeCondition {
        string r#type = 1;
        bool status = 2;
        string reason = 3;
        string message = 4;
    }

    message RuntimeStatus {
        repeated RuntimeCondition conditions = 1;
    }

    message StatusRequest {
        bool verbose = 1;
    }

    message RuntimeHandlerFeatures {
        bool recursive_read_only_mounts = 1;
        bool user_namespaces = 2;
    }

    message RuntimeHandler {
        string name = 1;
        RuntimeHandlerFeatures features = 2;
    }

    message RuntimeFeatures {
        bool supplemental_groups_policy = 1;
        bool user_namespaces_host_network = 2;
    }

    message StatusResponse {
        RuntimeStatus status = 1;
        map<string, string> info = 2;
        repeated RuntimeHandler runtime_handlers = 3;
        RuntimeFeatures features = 4;
    }

    message GetEventsRequest {}

    message ContainerEventResponse {
        string container_id = 1;
        enum ContainerEventType container_event_type = 2;
        int64 created_at = 3;
        PodSandboxStatus pod_sandbox_status = 4;
        repeated ContainerStatus containers_statuses = 5;
    }

    enum ContainerEventType { Created = 0; Started = 1; Stopped = 2; Deleted = 3; }

    message RuntimeConfigRequest {}

    message RuntimeConfigResponse {
        LinuxRuntimeConfiguration linux = 1;
    }

    message LinuxRuntimeConfiguration {
        enum CgroupDriver cgroup_driver = 1;
    }

    enum CgroupDriver { Systemd = 0; Cgroupfs = 1; }
}
