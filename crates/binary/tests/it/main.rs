//! A control plane without a node, as an operator runs it: what it prints, what it refuses, what it
//! survives. Needs no root.

mod audit;
mod devices;
mod gates;
mod hostile;
mod keeping;
mod moving;
mod several;
mod standalone;
mod stopping;
mod support;
mod versions;
