//! The admission chain on a real registry.

mod webhooks;
mod world;
