//! The proxy from outside: goldens of its rules, and real traffic through a real kernel in
//! namespaces of its own (that part needs root).

extern crate decapod_proxy as proxy;

mod api;
mod fixtures;
mod goldens;
mod lab;
mod routes;
mod run;
mod traffic;
