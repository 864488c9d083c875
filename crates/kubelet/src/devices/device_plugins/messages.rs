//! The messages of device plugins, v1beta1: registration, and the calls to a plugin. Field numbers
//! are the protocol's.

use std::collections::BTreeMap;

use prost::Message;

/// The health of a device that can be allocated; every other value is unhealthy.
pub const HEALTHY: &str = "Healthy";

#[derive(Clone, PartialEq, Eq, Message)]
pub struct Options {
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct RegisterRequest {
    #[prost(string, tag = "1")]
    pub version: String,
    /// A file name in the directory of sockets.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    #[prost(string, tag = "3")]
    pub resource_name: String,
    #[prost(message, optional, tag = "4")]
    pub options: Option<Options>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Listed {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Device {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub health: String,
    #[prost(message, optional, tag = "3")]
    pub topology: Option<Topology>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct Topology {
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NumaNode>,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct NumaNode {
    #[prost(int64, tag = "1")]
    pub id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct PreStartRequest {
    #[prost(string, repeated, tag = "1")]
    pub devices: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PreferredRequest {
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<ContainerPreferredRequest>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerPreferredRequest {
    #[prost(string, repeated, tag = "1")]
    pub available: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub must_include: Vec<String>,
    #[prost(int32, tag = "3")]
    pub size: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct PreferredAnswer {
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Ids>,
}

/// Devices of one container, in an allocation's request and answer.
#[derive(Clone, PartialEq, Message)]
pub struct Ids {
    #[prost(string, repeated, tag = "1")]
    pub devices: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct AllocateRequest {
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Ids>,
}

#[derive(Clone, PartialEq, Message)]
pub struct AllocateAnswer {
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Allocated>,
}

/// A container's settings for the use of its devices.
#[derive(Clone, PartialEq, Message)]
pub struct Allocated {
    #[prost(btree_map = "string, string", tag = "1")]
    pub envs: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<Mount>,
    #[prost(message, repeated, tag = "3")]
    pub devices: Vec<DeviceSpec>,
    #[prost(btree_map = "string, string", tag = "4")]
    pub annotations: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "5")]
    pub cdi_devices: Vec<CdiDevice>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct Mount {
    #[prost(string, tag = "1")]
    pub container_path: String,
    #[prost(string, tag = "2")]
    pub host_path: String,
    #[prost(bool, tag = "3")]
    pub read_only: bool,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct DeviceSpec {
    #[prost(string, tag = "1")]
    pub container_path: String,
    #[prost(string, tag = "2")]
    pub host_path: String,
    #[prost(string, tag = "3")]
    pub permissions: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct CdiDevice {
    #[prost(string, tag = "1")]
    pub name: String,
}
