//! The admission chain with a real registry.

mod nodes;
mod plugins;
mod policies;
mod races;
mod webhooks;
mod world;
