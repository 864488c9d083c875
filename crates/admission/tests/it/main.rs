//! The admission chain on a real registry.

mod nodes;
mod plugins;
mod policies;
mod races;
mod webhooks;
mod world;
