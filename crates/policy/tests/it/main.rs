//! Network policies against an evaluator that follows the API's words, as rules and as packets of a real
//! kernel (that part needs root).

extern crate decapod_policy as policy;

mod kernel;
mod machine;
mod naive;
mod packets;
mod scale;
mod semantics;
mod world;
