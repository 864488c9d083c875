//! The messages of device plugins, v1beta1: registration, and the calls to a plugin. Field numbers
//! are the protocol's.

/// The health of a device that can be allocated; every other value is unhealthy.
pub const HEALTHY: &str = "Healthy";

base::messages! {
    #[derive(Eq)]
    message Options {
        bool pre_start_required = 1;
        bool get_preferred_allocation_available = 2;
    }

    message RegisterRequest {
        string version = 1;
        /// A file name in the directory of sockets.
        string endpoint = 2;
        string resource_name = 3;
        Options options = 4;
    }

    message Listed {
        repeated Device devices = 1;
    }

    message Device {
        string id = 1;
        string health = 2;
        Topology topology = 3;
    }

    #[derive(Eq)]
    message Topology {
        repeated NumaNode nodes = 1;
    }

    #[derive(Copy, Eq)]
    message NumaNode {
        int64 id = 1;
    }

    message PreStartRequest {
        repeated string devices = 1;
    }

    message PreferredRequest {
        repeated ContainerPreferredRequest containers = 1;
    }

    message ContainerPreferredRequest {
        repeated string available = 1;
        repeated string must_include = 2;
        int32 size = 3;
    }

    message PreferredAnswer {
        repeated Ids containers = 1;
    }

    /// Devices of one container, in an allocation's request and answer.
    message Ids {
        repeated string devices = 1;
    }

    message AllocateRequest {
        repeated Ids containers = 1;
    }

    message AllocateAnswer {
        repeated Allocated containers = 1;
    }

    /// A container's settings for the use of its devices.
    message Allocated {
        map<string, string> envs = 1;
        repeated Mount mounts = 2;
        repeated DeviceSpec devices = 3;
        map<string, string> annotations = 4;
        repeated CdiDevice cdi_devices = 5;
    }

    #[derive(Eq)]
    message Mount {
        string container_path = 1;
        string host_path = 2;
        bool read_only = 3;
    }

    #[derive(Eq)]
    message DeviceSpec {
        string container_path = 1;
        string host_path = 2;
        string permissions = 3;
    }

    #[derive(Eq)]
    message CdiDevice {
        string name = 1;
    }
}
