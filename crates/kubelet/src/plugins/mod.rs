//! gRPC over Unix sockets, in both directions: calls to plugins ([`rpc`]), and services for them ([`serve`]).

pub mod rpc;
pub mod serve;
