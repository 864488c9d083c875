//! Tests with real containers, and with a simulated runtime, as root in mount and network
//! namespaces of their own. Without root each test prints a message and passes.

mod containers;
mod hostile;
mod images;
mod remote;
mod restart;
mod security;
mod served;
mod streams;
mod users;
mod volumes;
mod world;
