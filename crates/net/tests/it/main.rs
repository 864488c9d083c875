//! Tests against the real kernel, each in its own network namespaces. They need root; without root
//! they print a message and pass.

extern crate decapod_net as net;

mod host_ports;
mod lab;
mod links;
mod monitor;
mod neighbours;
mod nft;
mod shaping;
