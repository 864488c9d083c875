//! `cargo xtask vm`: Decapod on real machines: a distribution's kernel, systemd, cgroup v2, reboots, power
//! cuts.
//!
//! In: a binary, releases of Debian, names of chapters. Out: a line per chapter and a summary, in the form
//! of the end-to-end story; figures and other findings are lines below a chapter's.
//!
//! ```text
//!  image (once, cache) ─► machine (QEMU, SSH) ─► chapters, one after the other, on one machine
//!                          └ tools disk: the binary, a test image
//! ```
//!
//! Invariant: nothing of this host is changed; machines and their files end with this process.
//! Where QEMU or the packages cannot be had, the command prints a sentence and succeeds.

mod chapters;
mod disk;
mod image;
mod machine;
mod story;

use std::path::PathBuf;

use crate::sh::{self, Outcome};
use chapters::{CHAPTERS, Chapter};
use image::{Image, RELEASES, Release};
use machine::{Accelerator, now};
use story::Story;

const USAGE: &str = "\
usage: cargo xtask vm [--release 12|13] [--binary PATH] [--short] [--tcg] [--cuts N] [--seed N] [CHAPTER…]";

pub struct Options {
    releases: Vec<Release>,
    binary: Option<PathBuf>,
    /// Only the chapters that are quick and that everything rests on.
    short: bool,
    accelerator: Accelerator,
    /// How many power cuts, and what they start from.
    cuts: u64,
    seed: u64,
    names: Vec<String>,
}

pub fn run(arguments: &[String]) -> Outcome {
    let options = Options::parse(arguments)?;
    if let Some(obstacle) = image::obstacle() {
        println!("skipped: {obstacle}");
        return Ok(());
    }
    let mut failed = 0;
    for release in &options.releases {
        let image = match Image::of(*release) {
            Ok(image) => image,
            Err(error) => {
                println!("skipped: Debian {} cannot be had here: {error}", release.number);
                continue;
            }
        };
        failed += tell(&options, &image)?;
    }
    if failed == 0 { Ok(()) } else { Err("a chapter failed, see above".to_owned()) }
}

/// Tells the chapters on one release; returns how many failed.
fn tell(options: &Options, image: &Image) -> Outcome<usize> {
    let chosen: Vec<&Chapter> = CHAPTERS.iter().filter(|chapter| options.wants(chapter)).collect();
    println!("\nrunning {} tests on Debian {}", chosen.len(), image.release.number);
    let started = now();
    let mut story = Story::begin(options, image)?;
    let (mut passed, mut failed) = (0, 0);
    for chapter in &chosen {
        let begun = now();
        let outcome = (chapter.tell)(&mut story);
        let seconds = begun.elapsed().as_secs_f32();
        match outcome {
            Ok(()) => {
                passed += 1;
                println!("test {} ... ok ({seconds:.1} s)", chapter.name);
            }
            Err(error) => {
                failed += 1;
                println!("test {} ... FAILED ({seconds:.1} s)\n{error}", chapter.name);
                println!("{}", story.report());
            }
        }
        story.print_notes();
        if failed > 0 && chapter.needed_by_all {
            println!("the other chapters need this one");
            break;
        }
    }
    let ignored = CHAPTERS.len() - passed - failed;
    let word = if failed == 0 { "ok" } else { "FAILED" };
    println!("\nthe machine ran for {} s", started.elapsed().as_secs());
    println!(
        "test result: {word}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; 0 filtered out"
    );
    Ok(failed)
}

impl Options {
    fn parse(arguments: &[String]) -> Outcome<Self> {
        let mut options = Self {
            releases: Vec::new(),
            binary: None,
            short: false,
            accelerator: if std::fs::File::open("/dev/kvm").is_ok() {
                Accelerator::Kvm
            } else {
                Accelerator::Tcg
            },
            cuts: 3,
            seed: 1,
            names: Vec::new(),
        };
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value\n{USAGE}"));
            let number = |text: &String| text.parse().map_err(|_| format!("no number: {text}"));
            match word.as_str() {
                "--release" => {
                    let wanted = value()?;
                    let known = RELEASES.iter().find(|release| release.number == wanted);
                    options
                        .releases
                        .push(*known.ok_or(format!("no recipe for {wanted}\n{USAGE}"))?);
                }
                "--binary" => options.binary = Some(value()?.into()),
                "--short" => options.short = true,
                "--tcg" => options.accelerator = Accelerator::Tcg,
                "--cuts" => options.cuts = number(value()?)?,
                "--seed" => options.seed = number(value()?)?,
                flag if flag.starts_with('-') => return Err(USAGE.to_owned()),
                name => options.names.push(name.to_owned()),
            }
        }
        if options.releases.is_empty() {
            options.releases = RELEASES.to_vec();
        }
        Ok(options)
    }

    fn wants(&self, chapter: &Chapter) -> bool {
        let is_named = self.names.iter().any(|name| chapter.name.contains(name.as_str()));
        let is_asked = is_named || (self.names.is_empty() && (chapter.is_short || !self.short));
        chapter.needed_by_all || is_asked
    }

    /// The program for the machines: the given one, or a debug build.
    fn program(&self) -> Outcome<PathBuf> {
        match &self.binary {
            Some(path) => Ok(path.clone()),
            None => crate::wire::build(),
        }
    }
}

/// The archive of the test image: from the cache, or made by the test kit.
fn test_image() -> Outcome<PathBuf> {
    const ARCHIVE: &str = "busybox.oci.tar";
    let cache = sh::cache_directory()?;
    let entries = std::fs::read_dir(&cache).into_iter().flatten().flatten();
    let archives = entries.map(|entry| entry.path()).filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("images-"))
    });
    // The highest recipe.
    if let Some(found) = archives.map(|path| path.join(ARCHIVE)).filter(|path| path.is_file()).max()
    {
        return Ok(found);
    }
    crate::packages::ensure_lists()?;
    sh::run(sh::cargo().args(["build", "--quiet", "--package", "decapod-testkit"]))?;
    let kit = sh::target_directory().join("debug/decapod-testkit");
    let printed = sh::capture(std::process::Command::new(kit).arg("images"))?;
    let found = printed.lines().find(|line| line.ends_with(ARCHIVE));
    found.map(PathBuf::from).ok_or_else(|| "the test kit makes no busybox image".to_owned())
}
