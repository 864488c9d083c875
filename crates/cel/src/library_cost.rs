//! The maximum costs of functions of Kubernetes and of the language, for texts and lists.
//! Upstream: `k8s.io/apiserver/pkg/cel/library/cost.go`. One function with a match by name, because each
//! cost is one line.

use cel_parser::common::ast::{Expr, IdedExpr, LiteralValue};

use crate::cost::{Call, Coster, PATTERN, Range, TEXT};
use crate::types::Type;

const ONE: Range = Range { min: 1, max: 1 };
/// The cost of an authorization check: an expression can afford two.
const CHECK: u64 = 350_000;
/// The size of the patterns of named formats.
const FORMAT_PATTERN: f64 = 128.0;
/// The size of an address in bytes.
const ADDRESS: Range = Range { min: 4, max: 16 };

/// `None`: a function with the default cost.
pub(crate) fn call(
    coster: &mut Coster<'_>,
    name: &str,
    target: Option<&IdedExpr>,
    args: &[IdedExpr],
) -> Option<Call> {
    let plain = |cost: Range| Some((cost, None));
    match (name, target, args) {
        ("check", Some(_), _) => plain(Range::fixed(CHECK)),
        ("fieldSelector" | "labelSelector", _, [text]) => {
            plain(coster.size(text).scaled(TEXT * 4.0))
        }
        ("isSorted" | "sum" | "max" | "min" | "indexOf" | "lastIndexOf", Some(target), _) => {
            plain(walked(coster, target))
        }
        ("url" | "jsonpatch.escapeKey", _, [text]) => {
            let size = coster.size(text);
            Some((size.scaled(TEXT), Some(size)))
        }
        ("ip", Some(_), _) => plain(ONE),
        (
            "cidr" | "isIP" | "isCIDR" | "ip" | "quantity" | "isQuantity" | "semver" | "isSemver",
            None,
            [text, ..],
        ) => plain(coster.size(text).scaled(TEXT)),
        ("ip.isCanonical", _, [text, ..]) => plain(coster.size(text).scaled(2.0 * TEXT)),
        ("containsIP" | "containsCIDR", Some(_), [other, ..]) => {
            plain(contained(coster, name, other))
        }
        ("validate", _, [text, ..]) => {
            plain(coster.size(text).scaled(TEXT).scaled(FORMAT_PATTERN * PATTERN))
        }
        ("sets.contains" | "sets.intersects", _, [a, b]) => {
            plain(coster.size(a).by(coster.size(b)).plus(ONE))
        }
        ("sets.equivalent", _, [a, b]) => {
            plain(coster.size(a).by(coster.size(b)).scaled(2.0).plus(ONE))
        }
        _ => texts(coster, name, target, args),
    }
}

/// Functions on texts, and on lists of texts.
fn texts(
    coster: &mut Coster<'_>,
    name: &str,
    target: Option<&IdedExpr>,
    args: &[IdedExpr],
) -> Option<Call> {
    let plain = |cost: Range| Some((cost, None));
    match (name, target, args) {
        ("lowerAscii" | "upperAscii" | "substring" | "trim", Some(text), _) => {
            let size = coster.size(text);
            Some((size.scaled(TEXT), Some(size)))
        }
        ("replace", Some(text), [from, to, ..]) => {
            let size = coster.size(text);
            let result = replaced(size, coster.size(from), coster.size(to));
            Some((size.scaled(2.0 * TEXT), Some(result)))
        }
        ("split", Some(text), _) => {
            let size = coster.size(text);
            let most = match args.get(1).map(|one| &one.expr) {
                Some(Expr::Literal(LiteralValue::Int(most))) => *most.inner() as u64,
                _ => size.max,
            };
            Some((size.scaled(2.0 * TEXT), Some(Range { min: 0, max: most })))
        }
        ("join", Some(list), _) => {
            let size = joined(coster, list, args.first());
            Some((size.scaled(TEXT), Some(size)))
        }
        ("find" | "findAll", Some(text), [pattern, ..]) => {
            let size = coster.size(text);
            let cost = matched(coster, text, pattern);
            Some((cost, Some(Range { min: 0, max: size.max })))
        }
        ("matches", _, _) => match (target, args) {
            (Some(text), [pattern]) | (None, [text, pattern]) => {
                plain(matched(coster, text, pattern))
            }
            _ => None,
        },
        ("contains", Some(text), [part]) => {
            plain(coster.size(text).scaled(TEXT).by(coster.size(part).scaled(TEXT)))
        }
        ("startsWith" | "endsWith", Some(_), [part]) => plain(coster.size(part).scaled(TEXT)),
        ("format", Some(text), _) => plain(coster.size(text).scaled(TEXT)),
        ("string" | "bytes", None, [value]) => converted(coster, name, value),
        ("strings.quote", _, [text]) => {
            let size = coster.size(text);
            let result = size.by(Range { min: 1, max: 2 }).plus(Range::fixed(2));
            Some((size.scaled(TEXT), Some(result)))
        }
        _ => None,
    }
}

/// The cost of reading each element, and texts completely.
fn walked(coster: &mut Coster<'_>, target: &IdedExpr) -> Range {
    let size = coster.size(target);
    match coster.kind(target).clone() {
        Type::List(of, _) => {
            let mut each = ONE;
            if matches!(*of, Type::String | Type::Bytes) {
                each = each.plus(coster.item_size(target).scaled(TEXT));
            }
            size.by(each)
        }
        _ => size.scaled(TEXT),
    }
}

/// The length of a text after `replace`.
fn replaced(size: Range, from: Range, to: Range) -> Range {
    let (mut count, mut kept) = (Range::fixed(0), Range::fixed(0));
    let quotient = |a: u64, b: u64| (a as f64 / b as f64).ceil() as u64;
    // The maximum: each shortest match becomes the longest replacement, as often as possible.
    if from.min == 0 {
        count.max = size.max.saturating_add(1);
        kept.max = size.max;
    } else if to.max <= from.min {
        kept.max = size.max;
    } else {
        count.max = quotient(size.max, from.min);
    }
    // The minimum: each longest match becomes the shortest replacement.
    if from.max == 0 {
        count.min = size.min.saturating_add(1);
        kept.min = size.min;
    } else if from.max <= to.min {
        kept.min = size.min;
    } else {
        count.min = quotient(size.min, from.max);
    }
    count.by(to).plus(kept)
}

fn joined(coster: &mut Coster<'_>, list: &IdedExpr, between: Option<&IdedExpr>) -> Range {
    let count = coster.size(list);
    let mut size = match coster.kind(list) {
        Type::List(..) => count.by(coster.item_size(list)),
        _ => Range::fixed(0),
    };
    if let Some(between) = between {
        let gaps = Range { min: count.min.saturating_sub(1), max: count.max.saturating_sub(1) };
        size = size.plus(coster.size(between).by(gaps));
    }
    size
}

fn matched(coster: &mut Coster<'_>, text: &IdedExpr, pattern: &IdedExpr) -> Range {
    // One more: otherwise, with an empty text, every pattern would be free.
    let text = coster.size(text).plus(ONE).scaled(TEXT);
    text.by(coster.size(pattern).scaled(PATTERN))
}

fn converted(coster: &mut Coster<'_>, name: &str, value: &IdedExpr) -> Option<Call> {
    let size = coster.size(value);
    let result = match name {
        "string" => Range { min: size.min / 4, max: size.max },
        _ => Range { min: size.min, max: size.max.saturating_mul(4) },
    };
    let cost = size.scaled(TEXT);
    match (name, coster.kind(value)) {
        ("string", Type::Bytes) | ("bytes", Type::String) => Some((cost, Some(result))),
        (_, Type::Dyn) => Some((cost.or(ONE), Some(result))),
        _ => None,
    }
}

fn contained(coster: &mut Coster<'_>, name: &str, other: &IdedExpr) -> Range {
    let mut cost = ADDRESS.plus(ADDRESS).scaled(TEXT);
    if name == "containsCIDR" {
        cost = cost.plus(ADDRESS.scaled(TEXT)).plus(ONE);
    }
    let is_text = matches!(coster.kind(other), Type::String | Type::Dyn);
    if is_text { cost.plus(coster.size(other).scaled(TEXT)) } else { cost }
}
