//! Functions and operators, by name: the language's own, and Kubernetes' libraries.
//!
//! A function inspects its arguments' values; overloads are arms of a match. [`TABLE`] has the result
//! types, for the checker.

mod hosts;
mod lists;
mod operators;
mod strings;
pub mod times;

use crate::types::Type;
use crate::value::Value;

pub(crate) use strings::count_matches;

type Answer = Option<Result<Value, String>>;

/// Name, whether it is a method (`None`: both forms), and the result type.
type Row = (&'static str, Option<bool>, fn() -> Type);

/// All functions. A library's methods are in its own file; this table has their result types.
const TABLE: &[Row] = &[
    ("size", None, || Type::Int),
    ("type", Some(false), || Type::Type),
    ("dyn", Some(false), || Type::Dyn),
    ("bool", Some(false), || Type::Bool),
    ("int", Some(false), || Type::Int),
    ("uint", Some(false), || Type::Uint),
    ("double", Some(false), || Type::Double),
    ("string", Some(false), || Type::String),
    ("bytes", Some(false), || Type::Bytes),
    ("timestamp", Some(false), || Type::Timestamp),
    ("duration", Some(false), || Type::Duration),
    // Strings.
    ("contains", Some(true), || Type::Bool),
    ("startsWith", Some(true), || Type::Bool),
    ("endsWith", Some(true), || Type::Bool),
    ("matches", None, || Type::Bool),
    ("charAt", Some(true), || Type::String),
    ("indexOf", Some(true), || Type::Int),
    ("lastIndexOf", Some(true), || Type::Int),
    ("join", Some(true), || Type::String),
    ("lowerAscii", Some(true), || Type::String),
    ("upperAscii", Some(true), || Type::String),
    ("replace", Some(true), || Type::String),
    ("split", Some(true), || Type::list(Type::String)),
    ("substring", Some(true), || Type::String),
    ("trim", Some(true), || Type::String),
    ("reverse", Some(true), || Type::Dyn),
    ("format", Some(true), || Type::String),
    ("find", Some(true), || Type::String),
    ("findAll", Some(true), || Type::list(Type::String)),
    ("strings.quote", Some(false), || Type::String),
    ("base64.encode", Some(false), || Type::String),
    ("base64.decode", Some(false), || Type::Bytes),
    // Lists and sets.
    ("isSorted", Some(true), || Type::Bool),
    ("sum", Some(true), || Type::Dyn),
    ("min", Some(true), || Type::Dyn),
    ("max", Some(true), || Type::Dyn),
    ("sort", Some(true), || Type::Dyn),
    ("distinct", Some(true), || Type::Dyn),
    ("flatten", Some(true), || Type::list(Type::Dyn)),
    ("slice", Some(true), || Type::Dyn),
    ("first", Some(true), || Type::optional(Type::Dyn)),
    ("last", Some(true), || Type::optional(Type::Dyn)),
    ("lists.range", Some(false), || Type::list(Type::Int)),
    ("sets.contains", Some(false), || Type::Bool),
    ("sets.equivalent", Some(false), || Type::Bool),
    ("sets.intersects", Some(false), || Type::Bool),
    // Optionals.
    ("optional.of", Some(false), || Type::optional(Type::Dyn)),
    ("optional.none", Some(false), || Type::optional(Type::Dyn)),
    ("optional.ofNonZeroValue", Some(false), || Type::optional(Type::Dyn)),
    ("hasValue", Some(true), || Type::Bool),
    ("value", Some(true), || Type::Dyn),
    // Times.
    ("getFullYear", Some(true), || Type::Int),
    ("getMonth", Some(true), || Type::Int),
    ("getDate", Some(true), || Type::Int),
    ("getDayOfMonth", Some(true), || Type::Int),
    ("getDayOfWeek", Some(true), || Type::Int),
    ("getDayOfYear", Some(true), || Type::Int),
    ("getHours", Some(true), || Type::Int),
    ("getMinutes", Some(true), || Type::Int),
    ("getSeconds", Some(true), || Type::Int),
    ("getMilliseconds", Some(true), || Type::Int),
    // Quantities.
    ("quantity", Some(false), || Type::Opaque("kubernetes.Quantity")),
    ("isQuantity", Some(false), || Type::Bool),
    ("isInteger", Some(true), || Type::Bool),
    ("asInteger", Some(true), || Type::Int),
    ("asApproximateFloat", Some(true), || Type::Double),
    ("sign", Some(true), || Type::Int),
    ("add", Some(true), || Type::Opaque("kubernetes.Quantity")),
    ("sub", Some(true), || Type::Opaque("kubernetes.Quantity")),
    ("isLessThan", Some(true), || Type::Bool),
    ("isGreaterThan", Some(true), || Type::Bool),
    ("compareTo", Some(true), || Type::Int),
    // URLs.
    ("url", Some(false), || Type::Opaque("kubernetes.URL")),
    ("isURL", Some(false), || Type::Bool),
    ("getScheme", Some(true), || Type::String),
    ("getHost", Some(true), || Type::String),
    ("getHostname", Some(true), || Type::String),
    ("getPort", Some(true), || Type::String),
    ("getEscapedPath", Some(true), || Type::String),
    ("getQuery", Some(true), || Type::Map(std::sync::Arc::new(Type::list(Type::String)))),
    // Addresses.
    ("ip", None, || Type::Opaque("net.IP")),
    ("isIP", Some(false), || Type::Bool),
    ("ip.isCanonical", Some(false), || Type::Bool),
    ("family", Some(true), || Type::Int),
    ("isUnspecified", Some(true), || Type::Bool),
    ("isLoopback", Some(true), || Type::Bool),
    ("isLinkLocalMulticast", Some(true), || Type::Bool),
    ("isLinkLocalUnicast", Some(true), || Type::Bool),
    ("isGlobalUnicast", Some(true), || Type::Bool),
    ("cidr", Some(false), || Type::Opaque("net.CIDR")),
    ("isCIDR", Some(false), || Type::Bool),
    ("containsIP", Some(true), || Type::Bool),
    ("containsCIDR", Some(true), || Type::Bool),
    ("masked", Some(true), || Type::Opaque("net.CIDR")),
    ("prefixLength", Some(true), || Type::Int),
    // Versions.
    ("semver", Some(false), || Type::Opaque("kubernetes.Semver")),
    ("isSemver", Some(false), || Type::Bool),
    ("major", Some(true), || Type::Int),
    ("minor", Some(true), || Type::Int),
    ("patch", Some(true), || Type::Int),
    // Formats.
    ("format.named", Some(false), || Type::optional(Type::Opaque("kubernetes.NamedFormat"))),
    ("format.dns1123Label", Some(false), named_format),
    ("format.dns1123Subdomain", Some(false), named_format),
    ("format.dns1035Label", Some(false), named_format),
    ("format.qualifiedName", Some(false), named_format),
    ("format.labelValue", Some(false), named_format),
    ("format.uri", Some(false), named_format),
    ("format.uuid", Some(false), named_format),
    ("format.byte", Some(false), named_format),
    ("format.date", Some(false), named_format),
    ("format.datetime", Some(false), named_format),
    ("validate", Some(true), || Type::optional(Type::list(Type::String))),
    // Paths of JSON patches.
    ("jsonpatch.escapeKey", Some(false), || Type::String),
];

fn named_format() -> Type {
    Type::Opaque("kubernetes.NamedFormat")
}

/// The result type of a function; `None`: there is no such function.
pub fn result_of(name: &str, is_method: bool) -> Option<Type> {
    let row = TABLE.iter().find(|(known, method, _)| {
        *known == name && method.is_none_or(|method| method == is_method)
    });
    row.map(|(_, _, kind)| kind())
}

/// Words before a dot that belong to a function's name.
pub fn is_namespace(word: &str) -> bool {
    matches!(
        word,
        "optional"
            | "sets"
            | "base64"
            | "strings"
            | "lists"
            | "format"
            | "jsonpatch"
            | "ip"
            | "math"
    )
}

/// Types whose methods are defined outside of this crate.
pub fn is_external(name: &str) -> bool {
    name.starts_with("kubernetes.authorization.")
}

/// Whether the function accepts these types. Functions not listed here are checked when called.
pub fn accepts(name: &str, of: &[&Type]) -> bool {
    let is = |at: usize, kinds: &[Type]| {
        of.get(at).is_none_or(|kind| **kind == Type::Dyn || kinds.contains(kind))
    };
    match name {
        "startsWith" | "endsWith" | "matches" | "contains" => {
            is(0, &[Type::String]) && is(1, &[Type::String])
        }
        "lowerAscii" | "upperAscii" | "trim" | "split" | "substring" | "charAt" | "replace"
        | "find" | "findAll" => is(0, &[Type::String]),
        "quantity" | "isQuantity" | "url" | "isURL" | "isIP" | "cidr" | "isCIDR" | "semver"
        | "isSemver" => is(0, &[Type::String]),
        "size" => !matches!(
            of.first(),
            Some(
                Type::Int
                    | Type::Uint
                    | Type::Double
                    | Type::Bool
                    | Type::Timestamp
                    | Type::Duration
                    | Type::Object(_)
            )
        ),
        "isSorted" | "sum" | "min" | "max" | "sort" | "distinct" | "flatten" | "slice" | "join" => {
            matches!(of.first(), Some(Type::Dyn | Type::List(..)))
        }
        _ => true,
    }
}

pub fn type_named(name: &str) -> Option<Value> {
    const TYPES: &[&str] = &[
        "bool",
        "int",
        "uint",
        "double",
        "string",
        "bytes",
        "list",
        "map",
        "null_type",
        "type",
        "optional_type",
        "google.protobuf.Timestamp",
        "google.protobuf.Duration",
        "net.IP",
        "net.CIDR",
        "kubernetes.URL",
        "kubernetes.Quantity",
        "kubernetes.Semver",
    ];
    TYPES.iter().find(|known| **known == name).map(|known| Value::Type(known))
}

/// `None`: no function of this name accepts such values.
pub fn call(name: &str, target: Option<&Value>, arguments: &[Value]) -> Answer {
    if let Some(Value::Host(host)) = target
        && let Some(answer) = host.call(name, arguments)
    {
        return Some(answer);
    }
    // A method's target is its first argument.
    let all: Vec<Value> = target.into_iter().chain(arguments).cloned().collect();
    operators::call(name, &all)
        .or_else(|| strings::call(name, &all))
        .or_else(|| lists::call(name, &all))
        .or_else(|| times::call(name, &all))
        .or_else(|| hosts::call(name, &all))
}
