//! The messages of plugin registration v1 and of CSI v1's Node service that a kubelet uses.
//! Field numbers are the protocols'; fields that are not listed here are skipped.
//!
//! Invariant: no message with secrets is ever logged.

base::messages! {
    /// An empty request or answer.
    message Nothing {}

    message PluginInfo {
        string kind = 1;
        string name = 2;
        string endpoint = 3;
        repeated string supported_versions = 4;
    }

    message RegistrationStatus {
        bool plugin_registered = 1;
        string error = 2;
    }

    message Topology {
        map<string, string> segments = 1;
    }

    message NodeInfo {
        string node_id = 1;
        int64 max_volumes_per_node = 2;
        Topology accessible_topology = 3;
    }

    message Capabilities {
        repeated Capability capabilities = 1;
    }

    message Capability {
        CapabilityRpc rpc = 1;
    }

    message CapabilityRpc {
        int32 kind = 1;
    }

    message VolumeCapability {
        Nothing block = 1;
        MountVolume mount = 2;
        AccessMode access_mode = 3;
    }

    message MountVolume {
        string fs_type = 1;
        repeated string mount_flags = 2;
        string volume_mount_group = 3;
    }

    message AccessMode {
        int32 mode = 1;
    }

    message StageRequest {
        string volume_id = 1;
        map<string, string> publish_context = 2;
        string staging_target_path = 3;
        VolumeCapability volume_capability = 4;
        map<string, string> secrets = 5;
        map<string, string> volume_context = 6;
    }

    message UnstageRequest {
        string volume_id = 1;
        string staging_target_path = 2;
    }

    message PublishRequest {
        string volume_id = 1;
        map<string, string> publish_context = 2;
        string staging_target_path = 3;
        string target_path = 4;
        VolumeCapability volume_capability = 5;
        bool readonly = 6;
        map<string, string> secrets = 7;
        map<string, string> volume_context = 8;
    }

    message UnpublishRequest {
        string volume_id = 1;
        string target_path = 2;
    }

    message CapacityRange {
        int64 required_bytes = 1;
        int64 limit_bytes = 2;
    }

    message ExpandRequest {
        string volume_id = 1;
        string volume_path = 2;
        CapacityRange capacity_range = 3;
        string staging_target_path = 4;
        VolumeCapability volume_capability = 5;
        map<string, string> secrets = 6;
    }

    message StatsRequest {
        string volume_id = 1;
        string volume_path = 2;
        string staging_target_path = 3;
    }

    message Stats {
        repeated VolumeUsage usage = 1;
    }

    message VolumeUsage {
        int64 available = 1;
        int64 total = 2;
        int64 used = 3;
        /// 1: bytes, 2: inodes.
        int32 unit = 4;
    }
}
