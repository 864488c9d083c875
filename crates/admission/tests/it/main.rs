//! The admission chain on a real registry.

mod plugins;
mod webhooks;
mod world;
