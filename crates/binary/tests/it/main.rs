//! A control plane without a node: its output, its errors, its behaviour after failures. Needs no root,
//! except for one test that says so.

mod audit;
mod cis;
mod cloud;
mod devices;
mod gates;
mod hostile;
mod installing;
mod joining;
mod keeping;
mod manifests;
mod metrics;
mod moving;
mod proxying;
mod settings;
mod several;
mod simulating;
mod standalone;
mod starting;
mod stopping;
mod support;
mod versions;
