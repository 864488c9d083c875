//! A control plane without a node, as an operator runs it: what it prints, what it refuses, what it
//! survives. Needs no root, but for one test that says so.

mod audit;
mod cis;
mod devices;
mod gates;
mod hostile;
mod keeping;
mod moving;
mod proxying;
mod scale;
mod several;
mod simulating;
mod standalone;
mod starting;
mod stopping;
mod support;
mod versions;
