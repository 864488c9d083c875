//! Why a Service gets no address. The text becomes part of an event.

use std::net::IpAddr;

use client::ObjectKey;

use super::wish::Port;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("port {} of the nodes is used by Service {}", text(.0), name(.1))]
    Port(Port, ObjectKey),
    #[error("port {} is reserved on nodes; use another port, or a pool of addresses", text(.0))]
    Reserved(Port),
    #[error("the server has no --load-balancer-pool")]
    NoPool,
    #[error("no --load-balancer-pool has {} addresses", family(*.0))]
    NoFamily(bool),
    #[error("no free {} address in --load-balancer-pool", family(*.0))]
    Exhausted(bool),
    #[error("address {0} is outside of --load-balancer-pool")]
    Outside(IpAddr),
    #[error("address {} is used by Service {}", .0, name(.1))]
    Address(IpAddr, ObjectKey),
}

fn text((protocol, number): &Port) -> String {
    format!("{number}/{protocol}")
}

fn name(key: &ObjectKey) -> String {
    format!("{}/{}", key.namespace, key.name)
}

fn family(is_ipv4: bool) -> &'static str {
    if is_ipv4 { "IPv4" } else { "IPv6" }
}
