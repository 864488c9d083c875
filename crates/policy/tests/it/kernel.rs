//! What the kernel holds after many small transactions is what it holds after one of everything.

use std::path::{Path, PathBuf};
use std::process::Command;

use net::netns;
use net::nft::Nft;
use policy::model::Model;

use crate::world::World;

pub struct Netns {
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Netns {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("netns");
        netns::create(&path).expect("a new network namespace");
        Self { path, _directory: directory }
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        netns::remove(&self.path).expect("the namespace goes away");
    }
}

pub fn skipped() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    !root
}

/// The words of the listing in order: the kernel has its own order of sets, chains and elements.
fn listing(at: &Path) -> Option<Vec<String>> {
    let list = || Command::new("nft").args(["-y", "list", "ruleset"]).output();
    match netns::run(at, list).expect("enter") {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let text = String::from_utf8(output.stdout).expect("text");
            let mut words: Vec<String> =
                text.split_whitespace().map(|word| word.trim_matches(',').to_owned()).collect();
            words.retain(|word| !word.is_empty());
            words.sort_unstable();
            Some(words)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: no nft program to compare with");
            None
        }
        Err(error) => panic!("nft: {error}"),
    }
}

#[test]
fn small_transactions_add_up() {
    if skipped() {
        return;
    }
    let (changed, replaced) = (Netns::new(), Netns::new());
    let mut small = Nft::open_in(&changed.path).expect("a socket");
    let mut large = Nft::open_in(&replaced.path).expect("a socket");
    let (mut world, mut model) = (World::default(), Model::default());
    small.apply(&model.live().take_all()).expect("the frame");
    for round in 0..120 {
        for _ in 0..1 + round % 3 {
            let change = world.change();
            world.tell(&mut model, &change);
        }
        let batch = model.live().take();
        small.apply(&batch).unwrap_or_else(|error| panic!("{error}\n{:#?}", batch.describe()));
        if round % 10 == 9 {
            large.apply(&world.fresh().live().take_all()).expect("everything");
            assert_eq!(listing(&changed.path), listing(&replaced.path), "round {round}");
        }
    }
}
