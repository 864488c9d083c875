//! The options of writes: `dryRun`, `fieldManager`, `fieldValidation`, `force`.
//! Upstream: `k8s.io/apimachinery/pkg/apis/meta/v1/validation`.

use machinery::StatusError;
use machinery::field::{FieldError, FieldErrors, Path};

use crate::query::Query;
use crate::request::{FieldValidation, RequestContext};

/// The kind in error messages.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OptionsKind {
    Create,
    Update,
    Patch,
    /// Server-side apply.
    Apply,
}

impl OptionsKind {
    fn name(self) -> &'static str {
        match self {
            Self::Create => "CreateOptions",
            Self::Update => "UpdateOptions",
            Self::Patch | Self::Apply => "PatchOptions",
        }
    }
}

/// Sets the options in the context; returns true if `force` is set.
pub fn read(
    kind: OptionsKind,
    query: &Query,
    ctx: &mut RequestContext,
) -> Result<bool, StatusError> {
    let mut errors = FieldErrors::default();
    let force = query
        .optional_flag("force")
        .filter(|_| matches!(kind, OptionsKind::Patch | OptionsKind::Apply));
    let manager = query.first("fieldManager").unwrap_or_default();
    if kind == OptionsKind::Apply && manager.is_empty() {
        errors.required(&Path::new("fieldManager"), "is required for apply patch");
    }
    if kind == OptionsKind::Patch && force.is_some() {
        errors.forbidden(&Path::new("force"), "may not be specified for non-apply patch");
    }
    check_manager(manager, &mut errors);
    let dry_run: Vec<&str> = query.all("dryRun").collect();
    check_dry_run(&dry_run, &mut errors);
    let validation = query.first("fieldValidation").unwrap_or_default();
    ctx.field_validation = match validation {
        "Ignore" => FieldValidation::Ignore,
        "Strict" => FieldValidation::Strict,
        "" | "Warn" => FieldValidation::Warn,
        other => {
            let path = Path::new("fieldValidation");
            errors.not_supported(&path, other, &["", "Ignore", "Strict", "Warn"]);
            FieldValidation::Warn
        }
    };
    ctx.dry_run = !dry_run.is_empty();
    if !manager.is_empty() {
        ctx.field_manager = manager.to_owned();
    }
    finish(kind.name(), errors)?;
    Ok(force == Some(true))
}

fn check_manager(manager: &str, errors: &mut FieldErrors) {
    const LONGEST: usize = 128;
    let path = Path::new("fieldManager");
    if manager.len() > LONGEST {
        errors.too_long(&path, LONGEST);
    }
    for (at, c) in manager.char_indices().filter(|(_, c)| !is_printable(*c)) {
        let detail = format!("invalid character U+{:04X} (at position {at})", u32::from(c));
        errors.invalid(&path, manager, &detail);
    }
}

/// Go's `unicode.IsPrint`: the only printable white space is the ASCII space.
fn is_printable(c: char) -> bool {
    let is_escaped = !c.is_alphanumeric() && c.escape_debug().len() > 1;
    matches!(c, ' ' | '"' | '\'' | '\\') || !(c.is_control() || c.is_whitespace() || is_escaped)
}

/// `All` is the only valid value.
pub fn check_dry_run(values: &[&str], errors: &mut FieldErrors) {
    if values.iter().all(|value| *value == "All") {
        return;
    }
    let shown: Vec<String> = values.iter().map(|value| format!("{value:?}")).collect();
    errors.0.push(FieldError {
        reason: "FieldValueNotSupported",
        field: "dryRun".into(),
        message: format!("Unsupported value: [{}]: supported values: \"All\"", shown.join(",")),
    });
}

pub fn finish(kind: &str, errors: FieldErrors) -> Result<(), StatusError> {
    if errors.is_empty() {
        Ok(())
    } else {
        Err(StatusError::invalid("meta.k8s.io", kind, "", errors))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_character_that_is_not_printable_is_named() {
        for (manager, expected) in [
            ("kubectl a-b\"'\\é", vec![]),
            ("a\u{1}\u{a0}", vec!["U+0001 (at position 1)", "U+00A0 (at position 2)"]),
        ] {
            let mut errors = FieldErrors::default();
            check_manager(manager, &mut errors);
            let found: Vec<&str> = errors
                .0
                .iter()
                .filter_map(|error| error.message.split_once("invalid character "))
                .map(|(_, found)| found)
                .collect();
            assert_eq!(found, expected, "{manager:?}");
        }
    }
}
