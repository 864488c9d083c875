//! The commands that people type: `decapod kubectl`, and those that work on a data directory.
//!
//! In: parsed flags and a data directory. Out: text like upstream's, and an exit code. Everything
//! about a running cluster goes through its API with the credentials of a kubeconfig; only
//! `images`, `secrets-encrypt`, `certificate`, `snapshot`, `store` and `uninstall` touch the data
//! directory itself.
//!
//! Each command is a `clap` type with a `run`. Errors are one clear line: [`kubectl`] prints its
//! own, in kubectl's words, because their first words depend on who failed.

pub mod certificate;
pub mod cluster;
pub mod duration;
pub mod failure;
mod grid;
pub mod images;
pub mod kubectl;
pub mod secrets_encrypt;
pub mod snapshot;
pub mod store;
pub mod token;
pub mod uninstall;
