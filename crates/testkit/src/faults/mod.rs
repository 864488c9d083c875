//! Faults of a cluster of three servers under load: what its clients see, and whether anything is lost.
//!
//! In: a binary, the names of faults. Out: a table with a row for each, and what is wrong. One cluster plays all
//! scenes. A scene that fails is reported, and the next one begins when the cluster is whole again.
//!
//! ```text
//! scenes.rs harms ─► trio.rs (processes, network, disks)
//! load.rs writes, watches.rs watches, pods.rs runs pods, observer.rs reads Leases and /readyz
//! history.rs compares what they were told ─► stage.rs judges
//! ```

mod history;
mod link;
mod load;
mod observer;
mod pods;
mod scenes;
mod stage;
mod trio;
mod watches;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use link::Link;
use pods::Pods;
use scenes::{SCENES, Scene};
pub use stage::Amount;
use trio::Trio;

/// Plays the scenes that are named, or all. The table is printed as it grows.
pub fn run(binary: &Path, names: &[&str], amount: Amount) -> Result<()> {
    stage::check(binary)?;
    let chosen = chosen(names)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut trio = Trio::start(binary)?;
    println!("joined in {:.1?}", trio.joins);
    let links = base::task::Tasks::new("links of pods");
    let places = vec![trio.balanced(0)?, trio.balanced(1)?];
    let link = Link::new(&trio.api()?, places, &links);
    let pods = runtime.block_on(Pods::start(&link))?;
    let mut failed = 0;
    print!("{}", stage::HEADER);
    for scene in chosen {
        let verdict = stage::play(&runtime, &mut trio, &pods, scene, amount)
            .with_context(|| scene.name.to_owned())?;
        println!("{}", verdict.row);
        if scene.name == "failover" {
            println!("\n{}\n", quantiles(verdict.waits));
        }
        for line in &verdict.wrong {
            println!("  WRONG {}: {line}", scene.name);
        }
        for line in &verdict.late {
            println!("  LATE {}: {line}", scene.name);
        }
        let is_late = !verdict.late.is_empty() && !amount.is_lenient;
        failed += usize::from(!verdict.wrong.is_empty() || is_late);
    }
    for at in 0..3 {
        let (server, etcd) = trio.memory(at)?;
        println!("{}: {server} MiB, its etcd {etcd} MiB", trio::NAMES[at]);
    }
    runtime.block_on(links.shutdown(Duration::from_secs(5)));
    if failed > 0 {
        bail!("{failed} scenes went wrong");
    }
    Ok(())
}

fn chosen(names: &[&str]) -> Result<Vec<&'static Scene>> {
    if let Some(unknown) = names.iter().find(|name| SCENES.iter().all(|scene| scene.name != **name))
    {
        let all: Vec<&str> = SCENES.iter().map(|scene| scene.name).collect();
        bail!("no fault {unknown:?}; there are {}", all.join(", "));
    }
    let is_named = |scene: &&Scene| names.is_empty() || names.contains(&scene.name);
    Ok(SCENES.iter().filter(is_named).collect())
}

/// The waits of clients when the server in use died.
fn quantiles(mut waits: Vec<Duration>) -> String {
    waits.sort_unstable();
    let at = |part: f64| waits.get(((waits.len() as f64 - 1.0) * part).round() as usize);
    let show = |part| at(part).map_or_else(String::new, |wait| format!("{wait:.2?}"));
    format!("a client's wait: p50 {}, p99 {}, of {} waits", show(0.5), show(0.99), waits.len())
}
