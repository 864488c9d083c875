//! Tests of the whole proxy: golden files of its rules, and real traffic through a real kernel in
//! network namespaces (that part needs root).

extern crate decapod_proxy as proxy;

mod announce;
mod api;
mod fixtures;
mod goldens;
mod lab;
mod routes;
mod run;
mod traffic;
