//! The messages of the pod-resources API, v1. Those of v1alpha1 have fewer of the same fields; the others
//! are left empty for it.

base::messages! {
    /// The request of calls without parameters.
    message Everything {}

    message Listed {
        repeated PodResources pods = 1;
    }

    message GetRequest {
        string name = 1;
        string namespace = 2;
    }

    message Got {
        PodResources pod = 1;
    }

    message Allocatable {
        repeated ContainerDevices devices = 1;
        repeated int64 cpu_ids = 2;
        repeated ContainerMemory memory = 3;
    }

    message PodResources {
        string name = 1;
        string namespace = 2;
        repeated ContainerResources containers = 3;
    }

    message ContainerResources {
        string name = 1;
        repeated ContainerDevices devices = 2;
        repeated int64 cpu_ids = 3;
        repeated ContainerMemory memory = 4;
        repeated DynamicResource dynamic_resources = 5;
    }

    message ContainerMemory {
        string memory_type = 1;
        uint64 size = 2;
        Topology topology = 3;
    }

    message ContainerDevices {
        string resource_name = 1;
        repeated string device_ids = 2;
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

    message DynamicResource {
        string claim_name = 2;
        string claim_namespace = 3;
        repeated ClaimResource claim_resources = 4;
    }

    message ClaimResource {
        repeated CdiDevice cdi_devices = 1;
        string driver_name = 2;
        string pool_name = 3;
        string device_name = 4;
        optional string share_id = 5;
    }

    #[derive(Eq)]
    message CdiDevice {
        string name = 1;
    }
}
