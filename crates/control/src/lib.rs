//! An API server's own work, and how the server is put together.
//!
//! In: a store, identities and settings. Out: a registry with all rows ([`assembly`]), the objects that
//! every cluster has and what keeps them right ([`first`]), and the ways to kubelets, pods and Services
//! ([`Kubelets`], which `resources` asks for by [`resources::Target`]). Flags and files are the
//! program's: nothing here reads them.

mod addresses;
pub mod assembly;
pub mod bootstrap;
pub mod endpoints;
mod fairness;
pub mod first;
mod identity;
pub mod joining;
mod kubelets;
mod log_options;
mod log_stream;
mod metrics;
mod proxy;
#[cfg(test)]
mod testing;
mod upkeep;

use std::sync::Arc;

use resources::{Connections, Target};

pub use kubelets::Kubelets;

/// The handlers of `pods/log`, `nodes/proxy` and similar subresources.
pub(crate) fn connections(kubelets: &Arc<Kubelets>) -> Box<Connections> {
    use kubelets::{What, stream};
    use proxy::{Of, to};
    let kubelets = kubelets.clone();
    Box::new(move |target| match target {
        Target::PodLog => stream(&kubelets, What::Log),
        Target::PodExec => stream(&kubelets, What::Exec),
        Target::PodAttach => stream(&kubelets, What::Attach),
        Target::PodPortForward => stream(&kubelets, What::PortForward),
        Target::PodProxy => to(&kubelets, Of::Pod),
        Target::ServiceProxy => to(&kubelets, Of::Service),
        Target::NodeProxy => to(&kubelets, Of::Node),
    })
}
