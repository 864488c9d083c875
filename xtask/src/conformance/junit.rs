//! JUnit files: the suite's reports, and the one file that we make of them.
//!
//! In: the text of a report of `e2e.test`. Out: the specs that took part. The suite lists all of its
//! seven thousand specs in every report; those that its focus excluded are dropped here.

use std::fmt::Write as _;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    Failed,
    Skipped,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    pub name: String,
    pub outcome: Outcome,
    pub seconds: f64,
    /// The failure's message; empty for other outcomes.
    pub message: String,
}

impl Outcome {
    pub fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }

    pub fn from_word(word: &str) -> Option<Self> {
        [Self::Passed, Self::Failed, Self::Skipped].into_iter().find(|one| one.word() == word)
    }
}

impl Spec {
    /// The first line of the message.
    pub fn first_line(&self) -> &str {
        let mut lines = self.message.lines().map(str::trim).filter(|line| !line.is_empty());
        let line = lines.next().unwrap_or_default();
        line.strip_prefix("[FAILED] ").unwrap_or(line)
    }
}

/// The specs of a report, and the failures of the suite's setup and teardown.
pub fn parse(text: &str) -> (Vec<Spec>, Vec<Spec>) {
    let (mut specs, mut around) = (Vec::new(), Vec::new());
    for part in text.split("<testcase ").skip(1) {
        let part = part.split("</testcase>").next().unwrap_or(part);
        let head = part.split('>').next().unwrap_or(part);
        let Some(name) = attribute(head, "name") else { continue };
        let seconds = attribute(head, "time").and_then(|text| text.parse().ok()).unwrap_or(0.0);
        let outcome = match attribute(head, "status").as_deref() {
            Some("passed") => Outcome::Passed,
            Some("skipped") => Outcome::Skipped,
            _ => Outcome::Failed,
        };
        let message = match outcome {
            Outcome::Passed => String::new(),
            Outcome::Failed => {
                content(part, "failure").or_else(|| content(part, "error")).unwrap_or_default()
            }
            Outcome::Skipped => skip_reason(part),
        };
        match name.strip_prefix("[It] ") {
            Some(name) => specs.push(Spec { name: name.to_owned(), outcome, seconds, message }),
            None if outcome == Outcome::Failed => {
                around.push(Spec { name, outcome, seconds, message })
            }
            None => (),
        }
    }
    (specs, around)
}

/// One report of many specs.
pub fn write(specs: &[Spec]) -> String {
    let count = |wanted| specs.iter().filter(|spec| spec.outcome == wanted).count();
    let seconds: f64 = specs.iter().map(|spec| spec.seconds).sum();
    let (failed, skipped) = (count(Outcome::Failed), count(Outcome::Skipped));
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(
        text,
        "<testsuite name=\"conformance\" tests=\"{}\" failures=\"{failed}\" skipped=\"{skipped}\" time=\"{seconds:.3}\">",
        specs.len()
    );
    for spec in specs {
        let name = escape(&spec.name);
        let _ = write!(text, "  <testcase name=\"{name}\" time=\"{:.3}\"", spec.seconds);
        let message = escape(&spec.message);
        let _ = match spec.outcome {
            Outcome::Passed => writeln!(text, "/>"),
            Outcome::Failed => writeln!(text, "><failure>{message}</failure></testcase>"),
            Outcome::Skipped => writeln!(text, "><skipped message=\"{message}\"/></testcase>"),
        };
    }
    text.push_str("</testsuite>\n");
    text
}

/// The reason of a spec that skipped itself; empty for a spec that the focus excluded.
fn skip_reason(part: &str) -> String {
    let head = part.split_once("<skipped ").map_or("", |(_, rest)| rest);
    let head = head.split('>').next().unwrap_or(head);
    let message = attribute(head, "message").unwrap_or_default();
    message.strip_prefix("skipped - ").unwrap_or_default().to_owned()
}

fn attribute(head: &str, name: &str) -> Option<String> {
    let rest = head.split_once(&format!("{name}=\""))?.1;
    Some(unescape(rest.split_once('"')?.0))
}

fn content(part: &str, element: &str) -> Option<String> {
    let rest = part.split_once(&format!("<{element} "))?.1;
    let (_, rest) = rest.split_once('>')?;
    Some(unescape(rest.split_once(&format!("</{element}>"))?.0))
}

const ENTITIES: &[(&str, &str)] = &[
    ("&lt;", "<"),
    ("&gt;", ">"),
    ("&quot;", "\""),
    ("&#34;", "\""),
    ("&#39;", "'"),
    ("&apos;", "'"),
    ("&#x9;", "\t"),
    ("&#xA;", "\n"),
    ("&#xD;", "\r"),
    // Must be last: its results are not replaced again.
    ("&amp;", "&"),
];

fn unescape(text: &str) -> String {
    ENTITIES.iter().fold(text.to_owned(), |text, (entity, plain)| text.replace(entity, plain))
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\n', "&#xA;")
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "<testsuites><testsuite>\n\
        <testcase name=\"[SynchronizedBeforeSuite]\" status=\"passed\" time=\"0\"></testcase>\n\
        <testcase name=\"[It] [sig-a] left out\" status=\"skipped\" time=\"0\"><skipped message=\"skipped\"></skipped></testcase>\n\
        <testcase name=\"[It] [sig-a] can&#39;t\" status=\"skipped\" time=\"1\"><skipped message=\"skipped - one node\"></skipped></testcase>\n\
        <testcase name=\"[It] [sig-a] a &amp; b\" status=\"passed\" time=\"1.5\"></testcase>\n\
        <testcase name=\"[It] [sig-b] c\" status=\"failed\" time=\"2\"><failure message=\"\" type=\"failed\">[FAILED] no &lt;x&gt;&#xA;In [It]</failure><system-err>status=\"passed\"</system-err></testcase>\n\
        </testsuite></testsuites>";

    #[test]
    fn reads_the_suites_reports() {
        let (specs, around) = parse(REPORT);
        assert!(around.is_empty());
        let seen: Vec<(&str, &str, &str)> = specs
            .iter()
            .map(|spec| (spec.name.as_str(), spec.outcome.word(), spec.first_line()))
            .collect();
        assert_eq!(
            seen,
            [
                ("[sig-a] left out", "skipped", ""),
                ("[sig-a] can't", "skipped", "one node"),
                ("[sig-a] a & b", "passed", ""),
                ("[sig-b] c", "failed", "no <x>"),
            ]
        );
        assert!((specs[2].seconds - 1.5).abs() < f64::EPSILON);
    }

    #[test]
    fn writes_valid_junit() {
        let (specs, _) = parse(REPORT);
        let text = write(&specs);
        assert!(text.contains("tests=\"4\" failures=\"1\" skipped=\"2\""), "{text}");
        assert!(text.contains("a &amp; b"), "{text}");
    }
}
