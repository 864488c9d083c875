//! What all programs here are: the target of that name, guided. Its seeds go where libFuzzer looks for
//! inputs, under names of their own, so that a second run does not double them.

use std::path::PathBuf;

/// Writes the seeds into the first directory that the command line names.
pub fn plant(seeds: Vec<Vec<u8>>) {
    let words = std::env::args().skip(1).filter(|word| !word.starts_with('-'));
    let Some(corpus) = words.map(PathBuf::from).find(|path| path.is_dir()) else { return };
    for (index, seed) in seeds.into_iter().enumerate() {
        let path = corpus.join(format!("seed-{index}"));
        std::fs::write(&path, seed).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

#[macro_export]
macro_rules! program {
    ($name:literal) => {
        libfuzzer_sys::fuzz_target!(
            init: program::plant((targets::target($name).seeds)()),
            |data: &[u8]| (targets::target($name).run)(data)
        );
    };
}
