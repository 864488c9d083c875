//! Values of Kubernetes' libraries: quantities, URLs, addresses, versions, named formats.
//! Upstream: `apiserver/pkg/cel/library`.

use std::any::Any;
use std::net::IpAddr;
use std::sync::Arc;

use super::Answer;
use crate::value::{Host, Value};

pub fn call(name: &str, of: &[Value]) -> Answer {
    if let ("format.named", [Value::String(name)]) = (name, of) {
        let known = FORMATS.iter().find(|(known, _)| *known == &**name);
        return Some(Ok(Value::Optional(known.map(|row| Arc::new(Value::host(Format(row)))))));
    }
    if let (Some(format), []) = (name.strip_prefix("format."), of) {
        let known = FORMATS.iter().find(|(known, _)| *known == format);
        return known.map(|row| Ok(Value::host(Format(row))));
    }
    let text = match of.first()? {
        Value::String(text) => &**text,
        _ => return None,
    };
    let is = |found: bool| Some(Ok(Value::Bool(found)));
    fn made<T: Host + 'static>(made: Result<T, String>) -> Answer {
        Some(made.map(Value::host))
    }
    match name {
        "quantity" => made(Quantity::parse(text)),
        "isQuantity" => is(Quantity::parse(text).is_ok()),
        "url" => made(Url::parse(text)),
        "isURL" => is(Url::parse(text).is_ok()),
        "ip" => made(Ip::parse(text)),
        "isIP" => is(Ip::parse(text).is_ok()),
        "ip.isCanonical" => Some(Ip::parse(text).map(|ip| Value::Bool(ip.0.to_string() == text))),
        "cidr" => made(Cidr::parse(text)),
        "isCIDR" => is(Cidr::parse(text).is_ok()),
        "semver" | "isSemver" => {
            let lenient = matches!(of.get(1), Some(Value::Bool(true)));
            let version = Semver::parse(text, lenient);
            if name == "semver" { made(version) } else { is(version.is_ok()) }
        }
        _ => None,
    }
}

fn same<T: Host + PartialEq + 'static>(one: &T, other: &dyn Host) -> bool {
    other.as_any().downcast_ref::<T>() == Some(one)
}

fn host_of<T: 'static>(value: &Value) -> Option<&T> {
    match value {
        Value::Host(host) => host.as_any().downcast_ref(),
        _ => None,
    }
}

/// In units of 10⁻⁹, upstream's smallest.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
struct Quantity(i128);

const UNIT: i128 = 1_000_000_000;

impl Quantity {
    fn parse(text: &str) -> Result<Self, String> {
        let bad = || {
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'".to_owned()
        };
        let end = text
            .char_indices()
            .find(|(at, c)| !(c.is_ascii_digit() || *c == '.' || (*at == 0 && "+-".contains(*c))))
            .map_or(text.len(), |(at, _)| at);
        let (number, suffix) = text.split_at(end);
        let (sign, digits) = match number.strip_prefix('-') {
            Some(rest) => (-1, rest),
            None => (1, number.strip_prefix('+').unwrap_or(number)),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || digits.len() > 25
        {
            return Err(bad());
        }
        let (times, over) = scale(suffix).ok_or_else(bad)?;
        let mut value = 0i128;
        for digit in whole.chars().chain(fraction.chars()) {
            value = value * 10 + i128::from(digit.to_digit(10).ok_or_else(bad)?);
        }
        let divisor = 10i128.pow(fraction.len() as u32).checked_mul(over).ok_or_else(bad)?;
        let scaled = value.checked_mul(UNIT).and_then(|value| value.checked_mul(times));
        // Like upstream, rounds up smaller digits.
        let value = scaled.map_or(i128::MAX, |scaled| {
            scaled.div_euclid(divisor) + i128::from(scaled % divisor != 0)
        });
        Ok(Self(sign * value))
    }

    fn whole(self) -> Option<i64> {
        (self.0 % UNIT == 0).then(|| i64::try_from(self.0 / UNIT).ok()).flatten()
    }
}

/// The factor and divisor of a suffix.
fn scale(suffix: &str) -> Option<(i128, i128)> {
    let binary = |power: u32| Some((1i128 << (10 * power), 1));
    let decimal = |power: u32| Some((10i128.pow(power), 1));
    match suffix {
        "" => Some((1, 1)),
        "n" => Some((1, UNIT)),
        "u" => Some((1, 1_000_000)),
        "m" => Some((1, 1000)),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        other => {
            let exponent: i32 = other.strip_prefix(['e', 'E'])?.parse().ok()?;
            let power = 10i128.checked_pow(exponent.unsigned_abs().min(18))?;
            Some(if exponent < 0 { (1, power) } else { (power, 1) })
        }
    }
}

impl Host for Quantity {
    fn type_name(&self) -> &'static str {
        "kubernetes.Quantity"
    }

    fn call(&self, method: &str, arguments: &[Value]) -> Answer {
        let other = || match arguments {
            [Value::Int(number)] => Some(Self(i128::from(*number) * UNIT)),
            [value] => host_of::<Self>(value).copied(),
            _ => None,
        };
        let value = match method {
            "isInteger" => Value::Bool(self.whole().is_some()),
            "asInteger" => match self.whole() {
                Some(whole) => Value::Int(whole),
                None => return Some(Err("cannot convert value to integer".into())),
            },
            "asApproximateFloat" => Value::Double(self.0 as f64 / UNIT as f64),
            "sign" => Value::Int(self.0.signum() as i64),
            "isLessThan" => Value::Bool(*self < other()?),
            "isGreaterThan" => Value::Bool(*self > other()?),
            "compareTo" => Value::Int(match self.partial_cmp(&other()?)? {
                std::cmp::Ordering::Less => -1,
                std::cmp::Ordering::Equal => 0,
                std::cmp::Ordering::Greater => 1,
            }),
            "add" => Value::host(Self(self.0.saturating_add(other()?.0))),
            "sub" => Value::host(Self(self.0.saturating_sub(other()?.0))),
            _ => return None,
        };
        Some(Ok(value))
    }

    fn equals(&self, other: &dyn Host) -> bool {
        same(self, other)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Url {
    text: String,
    scheme: String,
    host: String,
    path: String,
    query: String,
}

impl Url {
    fn parse(text: &str) -> Result<Self, String> {
        let error = |why: &str| {
            format!("URL parse error during conversion from string: parse {text:?}: {why}")
        };
        if text.is_empty() {
            return Err(error("empty url"));
        }
        if text.chars().any(|c| c.is_control()) {
            return Err(error("net/url: invalid control character in URL"));
        }
        if text.starts_with(':') {
            return Err(error("missing protocol scheme"));
        }
        let colon = text.find(':').filter(|at| {
            text[..*at].chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
        });
        let (scheme, rest) = match colon {
            Some(at) if text.starts_with(|c: char| c.is_ascii_alphabetic()) => {
                (text[..at].to_lowercase(), &text[at + 1..])
            }
            _ => (String::new(), text),
        };
        if scheme.is_empty() && !rest.starts_with('/') {
            return Err(error("invalid URI for request"));
        }
        let (rest, _) = rest.split_once('#').unwrap_or((rest, ""));
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, path) = match rest.strip_prefix("//") {
            Some(rest) => {
                let end = rest.find('/').unwrap_or(rest.len());
                (&rest[..end], &rest[end..])
            }
            None => ("", rest),
        };
        let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
        if host.contains(' ') {
            return Err(error(r#"invalid character " " in host name"#));
        }
        if let Some((_, port)) = host.rsplit_once(':').filter(|_| !host.ends_with(']'))
            && !port.chars().all(|c| c.is_ascii_digit())
        {
            return Err(error(&format!("invalid port {:?} after host", format!(":{port}"))));
        }
        Ok(Self {
            text: text.into(),
            scheme,
            host: host.into(),
            path: path.replace(' ', "%20"),
            query: query.into(),
        })
    }

    /// Host and port.
    fn parts(&self) -> (&str, &str) {
        if let Some(rest) = self.host.strip_prefix('[')
            && let Some((address, rest)) = rest.split_once(']')
        {
            return (address, rest.strip_prefix(':').unwrap_or_default());
        }
        self.host.rsplit_once(':').unwrap_or((&self.host, ""))
    }
}

impl Host for Url {
    fn type_name(&self) -> &'static str {
        "kubernetes.URL"
    }

    fn call(&self, method: &str, _: &[Value]) -> Answer {
        let text = match method {
            "getScheme" => &self.scheme,
            "getHost" => &self.host,
            "getHostname" => self.parts().0,
            "getPort" => self.parts().1,
            "getEscapedPath" => &self.path,
            "getQuery" => return Some(Ok(query(&self.query))),
            _ => return None,
        };
        Some(Ok(Value::string(text)))
    }

    fn equals(&self, other: &dyn Host) -> bool {
        same(self, other)
    }

    fn text(&self) -> Option<String> {
        Some(self.text.clone())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn query(text: &str) -> Value {
    let mut all: Vec<(String, Vec<Value>)> = vec![];
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let (name, value) = (decoded(name), Value::string(decoded(value)));
        match all.iter_mut().find(|(known, _)| *known == name) {
            Some((_, values)) => values.push(value),
            None => all.push((name, vec![value])),
        }
    }
    Value::map(all.into_iter().map(|(name, values)| (name, Value::list(values))))
}

fn decoded(text: &str) -> String {
    let mut bytes = vec![];
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits: Vec<u8> = rest.by_ref().take(2).collect();
                let hex = std::str::from_utf8(&digits).ok();
                hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()).unwrap_or(b'?')
            }
            byte => byte,
        });
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Ip(IpAddr);

impl Ip {
    fn parse(text: &str) -> Result<Self, String> {
        let parsed: Result<IpAddr, _> = text.parse();
        match parsed {
            Ok(IpAddr::V6(address)) if address.to_ipv4_mapped().is_some() => {
                Err(format!("IPv4-mapped IPv6 address {text:?} is not allowed"))
            }
            Ok(address) => Ok(Self(address)),
            Err(_) => Err(format!(
                "IP Address {text:?} parse error during conversion from string: ParseAddr({text:?}): unable to parse IP"
            )),
        }
    }
}

impl Host for Ip {
    fn type_name(&self) -> &'static str {
        "net.IP"
    }

    fn call(&self, method: &str, _: &[Value]) -> Answer {
        let flag = match (method, self.0) {
            ("family", address) => {
                return Some(Ok(Value::Int(if address.is_ipv4() { 4 } else { 6 })));
            }
            ("isUnspecified", address) => address.is_unspecified(),
            ("isLoopback", address) => address.is_loopback(),
            ("isLinkLocalMulticast", IpAddr::V4(address)) => address.octets()[..3] == [224, 0, 0],
            ("isLinkLocalMulticast", IpAddr::V6(address)) => {
                address.segments()[0] & 0xff0f == 0xff02
            }
            ("isLinkLocalUnicast", IpAddr::V4(address)) => address.is_link_local(),
            ("isLinkLocalUnicast", IpAddr::V6(address)) => address.is_unicast_link_local(),
            ("isGlobalUnicast", IpAddr::V4(address)) => {
                !(address.is_broadcast()
                    || address.is_unspecified()
                    || address.is_loopback()
                    || address.is_multicast()
                    || address.is_link_local())
            }
            ("isGlobalUnicast", IpAddr::V6(address)) => {
                !(address.is_unspecified()
                    || address.is_loopback()
                    || address.is_multicast()
                    || address.is_unicast_link_local())
            }
            _ => return None,
        };
        Some(Ok(Value::Bool(flag)))
    }

    fn equals(&self, other: &dyn Host) -> bool {
        same(self, other)
    }

    fn text(&self) -> Option<String> {
        Some(self.0.to_string())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Cidr {
    address: IpAddr,
    length: u8,
}

impl Cidr {
    fn parse(text: &str) -> Result<Self, String> {
        let error = || {
            format!(
                "network address parse error during conversion from string: netip.ParsePrefix({text:?}): no '/'"
            )
        };
        let (address, length) = text.split_once('/').ok_or_else(error)?;
        let address = Ip::parse(address)?.0;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let parsed = length
            .parse()
            .ok()
            .filter(|parsed: &u8| *parsed <= most && parsed.to_string() == length);
        let length = parsed.ok_or_else(|| {
            format!("network address parse error during conversion from string: netip.ParsePrefix({text:?}): prefix length out of range")
        })?;
        Ok(Self { address, length })
    }

    fn bits(address: IpAddr, length: u8) -> u128 {
        let (bits, width) = match address {
            IpAddr::V4(address) => (u128::from(u32::from(address)), 32u8),
            IpAddr::V6(address) => (u128::from(address), 128),
        };
        let drop = u32::from(width - length);
        bits.checked_shr(drop).unwrap_or(0)
    }

    fn has(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.address.is_ipv4()
            && Self::bits(address, self.length) == Self::bits(self.address, self.length)
    }

    fn masked(&self) -> Self {
        let bits = Self::bits(self.address, self.length);
        let address = match self.address {
            IpAddr::V4(_) => {
                let shifted = bits.checked_shl(u32::from(32 - self.length)).unwrap_or(0);
                IpAddr::V4((shifted as u32).into())
            }
            IpAddr::V6(_) => {
                IpAddr::V6(bits.checked_shl(u32::from(128 - self.length)).unwrap_or(0).into())
            }
        };
        Self { address, length: self.length }
    }
}

impl Host for Cidr {
    fn type_name(&self) -> &'static str {
        "net.CIDR"
    }

    fn call(&self, method: &str, arguments: &[Value]) -> Answer {
        let value = match (method, arguments) {
            ("ip", []) => Value::host(Ip(self.address)),
            ("masked", []) => Value::host(self.masked()),
            ("prefixLength", []) => Value::Int(self.length.into()),
            ("containsIP", [Value::String(text)]) => match Ip::parse(text) {
                Ok(ip) => Value::Bool(self.has(ip.0)),
                Err(why) => return Some(Err(why)),
            },
            ("containsIP", [value]) => Value::Bool(self.has(host_of::<Ip>(value)?.0)),
            ("containsCIDR", [value]) => {
                let other = match value {
                    Value::String(text) => match Self::parse(text) {
                        Ok(other) => other,
                        Err(why) => return Some(Err(why)),
                    },
                    value => *host_of::<Self>(value)?,
                };
                Value::Bool(other.length >= self.length && self.has(other.address))
            }
            _ => return None,
        };
        Some(Ok(value))
    }

    fn equals(&self, other: &dyn Host) -> bool {
        same(self, other)
    }

    fn text(&self) -> Option<String> {
        Some(format!("{}/{}", self.address, self.length))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Semver {
    numbers: [u64; 3],
    /// A release is newer than its prereleases.
    is_release: bool,
    preview: Vec<Part>,
}

/// Numbers sort before words.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Number(u64),
    Word(String),
}

impl Semver {
    fn parse(text: &str, lenient: bool) -> Result<Self, String> {
        let bad = |why: &str| format!("parse error on {text:?}: {why}");
        let text_of = if lenient { text.strip_prefix('v').unwrap_or(text) } else { text };
        let (text_of, _) = text_of.split_once('+').unwrap_or((text_of, ""));
        let (core, preview) = match text_of.split_once('-') {
            Some((core, preview)) => (core, Some(preview)),
            None => (text_of, None),
        };
        let mut numbers = [0; 3];
        let parts: Vec<&str> = core.split('.').collect();
        if parts.len() > 3 || (parts.len() < 3 && !lenient) {
            return Err(bad("No Major.Minor.Patch elements found"));
        }
        for (at, part) in parts.iter().enumerate() {
            if part.len() > 1 && part.starts_with('0') && !lenient {
                return Err(bad("number must not contain leading zeroes"));
            }
            numbers[at] = part.parse().map_err(|_| bad("Invalid character(s) found in number"))?;
        }
        let part = |part: &str| match part.parse() {
            Ok(number) => Part::Number(number),
            Err(_) => Part::Word(part.into()),
        };
        if preview.is_some_and(|preview| preview.split('.').any(str::is_empty)) {
            return Err(bad("Prerelease is empty"));
        }
        let preview_parts = preview.map(|all| all.split('.').map(part).collect());
        Ok(Self {
            numbers,
            is_release: preview.is_none(),
            preview: preview_parts.unwrap_or_default(),
        })
    }
}

impl Host for Semver {
    fn type_name(&self) -> &'static str {
        "kubernetes.Semver"
    }

    fn call(&self, method: &str, arguments: &[Value]) -> Answer {
        let other = || arguments.first().and_then(host_of::<Self>);
        Some(Ok(match method {
            "major" => Value::Int(self.numbers[0] as i64),
            "minor" => Value::Int(self.numbers[1] as i64),
            "patch" => Value::Int(self.numbers[2] as i64),
            "isLessThan" => Value::Bool(self < other()?),
            "isGreaterThan" => Value::Bool(self > other()?),
            "compareTo" => Value::Int(self.cmp(other()?) as i64),
            _ => return None,
        }))
    }

    fn equals(&self, other: &dyn Host) -> bool {
        same(self, other)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

type FormatRow = (&'static str, fn(&str) -> Vec<String>);

/// Formats by name; each returns the errors of a text.
const FORMATS: &[FormatRow] = &[
    ("dns1123Label", |text| dns("a lowercase RFC 1123 label", text, false, true)),
    ("dns1123Subdomain", |text| dns("a lowercase RFC 1123 subdomain", text, true, true)),
    ("dns1035Label", |text| dns("a DNS-1035 label", text, false, false)),
    ("qualifiedName", |text| {
        let name = text.rsplit_once('/').map_or(text, |(_, name)| name);
        label(name, false)
    }),
    ("labelValue", |text| label(text, true)),
    ("uri", |text| Url::parse(text).err().into_iter().collect()),
    ("uuid", |text| {
        shape(
            r"^[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}$",
            text,
            "does not match the UUID format",
        )
    }),
    ("byte", |text| {
        shape(
            "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
            text,
            "invalid base64",
        )
    }),
    ("date", |text| match text.parse::<jiff::civil::Date>() {
        Ok(_) if text.len() == 10 => vec![],
        _ => vec!["invalid date".into()],
    }),
    ("datetime", |text| match text.parse::<jiff::Timestamp>() {
        Ok(_) => vec![],
        Err(_) => vec!["invalid datetime".into()],
    }),
];

fn shape(pattern: &str, text: &str, why: &str) -> Vec<String> {
    let fits = regex_lite::Regex::new(pattern).is_ok_and(|regex| regex.is_match(text));
    if fits { vec![] } else { vec![why.into()] }
}

fn dns(what: &str, text: &str, dots: bool, digit_first: bool) -> Vec<String> {
    let is_label = |label: &str| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let first = |c: char| c.is_ascii_lowercase() || (digit_first && c.is_ascii_digit());
        label.starts_with(first) && !label.ends_with('-') && label.chars().all(inner)
    };
    let limit = if dots { 253 } else { 63 };
    let fits = if dots { text.split('.').all(is_label) } else { is_label(text) };
    let mut wrong = vec![];
    if text.len() > limit {
        wrong.push(format!("must be no more than {limit} bytes"));
    }
    if !fits {
        wrong.push(format!("{what} must consist of lower case alphanumeric characters or '-'"));
    }
    wrong
}

fn label(text: &str, may_be_empty: bool) -> Vec<String> {
    let outer = |c: char| c.is_ascii_alphanumeric();
    let inner = |c: char| outer(c) || "-_.".contains(c);
    let fits = (text.is_empty() && may_be_empty)
        || (text.starts_with(outer)
            && text.ends_with(outer)
            && text.chars().all(inner)
            && text.len() <= 63);
    if fits {
        vec![]
    } else {
        vec!["must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character".into()]
    }
}

struct Format(&'static FormatRow);

impl Host for Format {
    fn type_name(&self) -> &'static str {
        "kubernetes.NamedFormat"
    }

    fn call(&self, method: &str, arguments: &[Value]) -> Answer {
        let ("validate", [Value::String(text)]) = (method, arguments) else { return None };
        let wrong: Vec<Value> = (self.0.1)(text).into_iter().map(Value::string).collect();
        let found = (!wrong.is_empty()).then(|| Arc::new(Value::list(wrong)));
        Some(Ok(Value::Optional(found)))
    }

    fn equals(&self, other: &dyn Host) -> bool {
        other.as_any().downcast_ref::<Self>().is_some_and(|other| other.0.0 == self.0.0)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
