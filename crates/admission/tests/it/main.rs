//! The admission chain on a real registry.

mod plugins;
mod policies;
mod webhooks;
mod world;
