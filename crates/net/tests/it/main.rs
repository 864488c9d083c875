//! Tests against the real kernel, each in network namespaces of its own. They need root; without
//! it they say so and pass.

extern crate decapod_net as net;

mod host_ports;
mod lab;
mod links;
mod monitor;
mod nft;
