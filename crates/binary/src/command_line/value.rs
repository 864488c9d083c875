//! The types of flags: which values they take, and the error for others. Upstream: pflag's and
//! component-base's `Value.Set`, with Go's errors.

use base::duration;

/// A type by pflag's name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Type {
    Bool,
    /// Signed, of so many bits.
    Int(u32),
    Uint(u32),
    Float,
    Duration,
    Text,
    /// Values separated by commas; repeated flags add up.
    List,
    /// Repeated flags add up; a comma is part of the value.
    Array,
    Address,
    /// An address, or an address and a port.
    AddressPort,
    PortRange,
    /// `KEY=VALUE,…`; repeated flags add up.
    Map,
    BoolMap,
    /// `KEY:VALUE,…`
    ColonMap,
    /// `KEY<VALUE,…`
    Thresholds,
    CertKey,
    Taints,
    Version,
}

impl Type {
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "bool" => Self::Bool,
            "int" | "int64" => Self::Int(64),
            "int32" | "Level" => Self::Int(32),
            "uint" | "uint64" => Self::Uint(64),
            "uint16" => Self::Uint(16),
            "uint32" => Self::Uint(32),
            "float" | "float32" | "float64" => Self::Float,
            "duration" => Self::Duration,
            "string" | "quantity" | "ProxyMode" | "LocalMode" => Self::Text,
            "stringSlice" | "strings" | "intSlice" | "int32Slice" | "stringToString" => Self::List,
            "stringArray" | "pattern=N,..." | "reserved-memory" => Self::Array,
            "ip" => Self::Address,
            "ipport" => Self::AddressPort,
            "portRange" => Self::PortRange,
            "mapStringString" => Self::Map,
            "mapStringBool" => Self::BoolMap,
            "colonSeparatedMultimapStringString" => Self::ColonMap,
            "thresholds" => Self::Thresholds,
            "namedCertKey" => Self::CertKey,
            "[]v1.Taint" => Self::Taints,
            "version" => Self::Version,
            _ => return None,
        })
    }

    /// The value of the flag without one.
    pub fn bare(self) -> Option<&'static str> {
        matches!(self, Self::Bool | Self::Version).then_some("true")
    }

    /// Whether repeated flags add up; otherwise the last one wins.
    pub fn adds_up(self) -> bool {
        use Type::{Array, BoolMap, CertKey, ColonMap, List, Map, Taints, Thresholds};
        matches!(self, List | Array | Map | BoolMap | ColonMap | Thresholds | CertKey | Taints)
    }

    /// The value in one form: `true` for `T`, `16` for `0x10`.
    ///
    /// # Errors
    /// Upstream's, without the name of the flag.
    pub fn check(self, text: &str) -> Result<String, String> {
        let same = || Ok(text.to_owned());
        match self {
            Self::Bool => boolean(text).map(|it| it.to_string()),
            Self::Int(bits) => integer(text, bits).map(|it| it.to_string()),
            Self::Uint(bits) => unsigned(text, bits).map(|it| it.to_string()),
            Self::Float => match text.parse::<f64>() {
                Ok(_) => same(),
                Err(_) => Err(syntax("ParseFloat", text)),
            },
            Self::Duration => duration::nanos(text).map(|_| text.to_owned()),
            Self::Address => match text.trim().parse::<std::net::IpAddr>() {
                Ok(address) => Ok(address.to_string()),
                Err(_) if text.is_empty() => same(),
                Err(_) => Err(format!("failed to parse IP: {:?}", text.trim())),
            },
            Self::Map => {
                pairs(text, '=', "malformed pair, expect string=string").and_then(|_| same())
            }
            Self::Thresholds => {
                pairs(text, '<', "malformed pair, expect string<string").and_then(|_| same())
            }
            Self::BoolMap => {
                for (key, value) in pairs(text, '=', "malformed pair, expect string=bool")? {
                    boolean(value).map_err(|error| {
                        format!("invalid value of {key}: {value}, err: {error}")
                    })?;
                }
                same()
            }
            Self::CertKey => certificate_and_key(text).and_then(|()| same()),
            Self::Text | Self::List | Self::Array | Self::AddressPort => same(),
            Self::PortRange | Self::Taints | Self::Version | Self::ColonMap => same(),
        }
    }
}

fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err(syntax("ParseBool", text)),
    }
}

fn syntax(function: &str, text: &str) -> String {
    format!("strconv.{function}: parsing {text:?}: invalid syntax")
}

/// As Go reads integers: `0x` is hexadecimal, `0o` or a leading zero octal, `0b` binary.
fn digits(text: &str) -> (&str, u32) {
    let lower = text.get(..2).map(str::to_ascii_lowercase);
    match lower.as_deref() {
        Some("0x") => (&text[2..], 16),
        Some("0o") => (&text[2..], 8),
        Some("0b") => (&text[2..], 2),
        _ if text.len() > 1 && text.starts_with('0') => (&text[1..], 8),
        _ => (text, 10),
    }
}

fn integer(text: &str, bits: u32) -> Result<i64, String> {
    let (sign, rest) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let (digits, radix) = digits(rest);
    let value = match i128::from_str_radix(digits, radix) {
        Ok(value) if !digits.starts_with(['+', '-']) => sign * value,
        _ => return Err(syntax("ParseInt", text)),
    };
    let limit = 1_i128 << (bits - 1);
    i64::try_from(value)
        .ok()
        .filter(|_| (-limit..limit).contains(&value))
        .ok_or_else(|| format!("strconv.ParseInt: parsing {text:?}: value out of range"))
}

fn unsigned(text: &str, bits: u32) -> Result<u64, String> {
    let (digits, radix) = digits(text);
    let value = match u128::from_str_radix(digits, radix) {
        Ok(value) if !digits.starts_with('+') => value,
        _ => return Err(syntax("ParseUint", text)),
    };
    u64::try_from(value)
        .ok()
        .filter(|_| value < 1_u128 << bits)
        .ok_or_else(|| format!("strconv.ParseUint: parsing {text:?}: value out of range"))
}

fn pairs<'a>(text: &'a str, sign: char, error: &str) -> Result<Vec<(&'a str, &'a str)>, String> {
    let parts = text.split(',').filter(|part| !part.trim().is_empty());
    parts.map(|part| part.split_once(sign).ok_or_else(|| error.to_owned())).collect()
}

fn certificate_and_key(text: &str) -> Result<(), String> {
    let files = match text.split_once(':') {
        Some((_, names)) if names.trim().is_empty() => {
            return Err("empty names list is not allowed".to_owned());
        }
        Some((files, _)) => files,
        None => text,
    };
    match files.split(',').count() {
        2 => Ok(()),
        _ => Err("expected comma separated certificate and key file paths".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_go_reads_them() {
        let check = |kind: &str, text: &str, expected: Result<&str, &str>| {
            let found = Type::named(kind).expect("a type").check(text);
            let found = found.as_deref().map_err(String::as_str);
            assert_eq!(found, expected, "{kind} {text}");
        };
        check("bool", "T", Ok("true"));
        check("bool", "yes", Err("strconv.ParseBool: parsing \"yes\": invalid syntax"));
        check("int", "0x10", Ok("16"));
        check("int", "-5", Ok("-5"));
        check(
            "int32",
            "3000000000",
            Err("strconv.ParseInt: parsing \"3000000000\": value out of range"),
        );
        check("int", "a", Err("strconv.ParseInt: parsing \"a\": invalid syntax"));
        check("uint", "-1", Err("strconv.ParseUint: parsing \"-1\": invalid syntax"));
        check("float32", "0.55", Ok("0.55"));
        check("float32", "x", Err("strconv.ParseFloat: parsing \"x\": invalid syntax"));
        check("duration", "1h0m", Ok("1h0m"));
        check("duration", "5", Err("time: missing unit in duration \"5\""));
        check("ip", "::1", Ok("::1"));
        check("ip", "a", Err("failed to parse IP: \"a\""));
        check("mapStringString", "a=b,c=d", Ok("a=b,c=d"));
        check("mapStringString", "a", Err("malformed pair, expect string=string"));
        check("mapStringBool", "A=true,B=F", Ok("A=true,B=F"));
        check(
            "mapStringBool",
            "A=2",
            Err("invalid value of A: 2, err: strconv.ParseBool: parsing \"2\": invalid syntax"),
        );
        check("namedCertKey", "a.crt,a.key:x,y", Ok("a.crt,a.key:x,y"));
        check(
            "namedCertKey",
            "a.crt",
            Err("expected comma separated certificate and key file paths"),
        );
    }
}
