//! The user commands: `decapod kubectl`, and those for a data directory.
//!
//! In: parsed flags and a data directory. Out: text like upstream's, and an exit code. Commands use a
//! running cluster through its API with the credentials of a kubeconfig; only
//! `images`, `secrets-encrypt`, `certificate`, `snapshot`, `store` and `uninstall` access the data
//! directory itself.
//!
//! Each command is a `clap` type with a `run`. An error is one clear line: [`kubectl`] prints its own
//! errors in kubectl's words, because the prefix depends on the cause.

pub mod certificate;
pub mod check_config;
pub mod cluster;
pub mod duration;
pub mod failure;
mod grid;
pub mod images;
pub mod install;
pub mod kubectl;
pub mod node_places;
pub mod secrets_encrypt;
pub mod snapshot;
pub mod store;
pub mod token;
pub mod uninstall;
