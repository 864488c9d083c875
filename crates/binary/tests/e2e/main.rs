//! The end-to-end story: one cluster, real containers, the real kubectl, chapter after chapter.
//!
//! In: the built binary, a root shell, a kubectl in the cache; `cargo xtask test` provides them and sets
//! `DECAPOD_E2E`. Out: a line per chapter and a summary, in the form of the usual test runner. The chapters
//! share one cluster, as users do, which also saves time; each leaves behind what its comment says. A
//! failed chapter prints objects, events and logs. After the last one the machine's own files must be
//! unchanged: containers and clusters must not touch them.
//!
//! `cargo xtask test` runs all. `DECAPOD_E2E=1 cargo test --test e2e service` runs the first chapters,
//! which all others need, and those whose name contains `service`.

mod chapters;
mod expect;
mod processes;
mod story;

use std::process::ExitCode;

use chapters::CHAPTERS;
use story::Story;
use testkit::host_files::HostFiles;

fn main() -> ExitCode {
    let filters: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let asked = std::env::var_os("DECAPOD_E2E").is_some();
    if std::env::args().any(|word| word == "--list") {
        return ExitCode::SUCCESS;
    }
    if !asked || !testkit::places::is_root_or_says_skipped() {
        println!("skipped: the story is run by `cargo xtask test`");
        summary(true, 0, 0, CHAPTERS.len());
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", CHAPTERS.len() + 1);
    let started = testkit::wait::now();
    let before = HostFiles::look();
    let mut story = match Story::begin() {
        Ok(story) => story,
        Err(error) => {
            println!("test the cluster starts ... FAILED\n{error:#}");
            summary(false, 0, 1, CHAPTERS.len());
            return ExitCode::FAILURE;
        }
    };
    let (mut passed, mut failed, left_out) = tell(&mut story, &filters);
    drop(story);
    let changes = before.changes(&HostFiles::look());
    if changes.is_empty() {
        passed += 1;
        println!("test the machine's own files are untouched ... ok");
    } else {
        failed += 1;
        println!("test the machine's own files are untouched ... FAILED\n{}", changes.join("\n"));
    }
    println!("\nthe story took {} s", started.elapsed().as_secs());
    summary(failed == 0, passed, failed, left_out);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn tell(story: &mut Story, filters: &[String]) -> (usize, usize, usize) {
    let (mut passed, mut failed, mut left_out) = (0, 0, 0);
    for chapter in CHAPTERS {
        let asked = filters.is_empty()
            || filters.iter().any(|filter| chapter.name.contains(filter.as_str()));
        if !asked && !chapter.needed_by_all {
            left_out += 1;
            continue;
        }
        let started = testkit::wait::now();
        let outcome = (chapter.tell)(story);
        let seconds = started.elapsed().as_secs_f32();
        match outcome {
            Ok(()) => {
                passed += 1;
                println!("test {} ... ok ({seconds:.1} s)", chapter.name);
            }
            Err(error) => {
                failed += 1;
                println!(
                    "test {} ... FAILED ({seconds:.1} s)\n{error:?}\n{}",
                    chapter.name,
                    story.report()
                );
                if chapter.needed_by_all {
                    println!("the other chapters need this one");
                    break;
                }
            }
        }
    }
    (passed, failed, left_out)
}

/// The last line, in the form of the usual test runner.
fn summary(ok: bool, passed: usize, failed: usize, ignored: usize) {
    let word = if ok { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {word}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; 0 filtered out"
    );
}
