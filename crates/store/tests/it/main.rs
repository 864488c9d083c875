//! The store's contract as cases that every backend must pass; and the embedded backend compared with the
//! naive one, with crashes.

extern crate decapod_store as store;

mod backends;
mod contract;
mod crash;
mod lab;
mod linear;
mod model;
