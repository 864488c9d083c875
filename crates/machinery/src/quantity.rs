//! Quantities: `100m`, `1.5Gi`, `2e3`. Exact, in billionths, rounded up as upstream rounds.
//! Upstream: `k8s.io/apimachinery/pkg/api/resource`.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Billionths per unit: finer than this upstream does not count.
const NANO: i128 = 1_000_000_000;

/// The value of a quantity, in billionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Amount(i128);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    #[error(
        "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
    )]
    Format,
    #[error("unable to parse numeric part of quantity")]
    Number,
    #[error("unable to parse quantity's suffix")]
    Suffix,
}

/// A quantity's text, taken apart. Zeros before the number are left out.
struct Text<'a> {
    is_negative: bool,
    whole: &'a str,
    fraction: &'a str,
    suffix: &'a str,
}

/// Upstream: `parseQuantityString`, which takes a sign alone for 0.
fn split(text: &str) -> Result<Text<'_>, ParseError> {
    const SUFFIX: &str = "eEinumkKMGTP";
    let not_digit = |c: char| !c.is_ascii_digit();
    if text.is_empty() {
        return Err(ParseError::Format);
    }
    let is_negative = text.starts_with('-');
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text).trim_start_matches('0');
    let (whole, rest) = digits.split_at(digits.find(not_digit).unwrap_or(digits.len()));
    let (fraction, suffix) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(rest.find(not_digit).unwrap_or(rest.len())),
        None => ("", rest),
    };
    let behind = suffix.trim_start_matches(|c| SUFFIX.contains(c));
    let exponent = behind.strip_prefix(['-', '+']).unwrap_or(behind);
    if exponent.contains(not_digit) {
        return Err(ParseError::Format);
    }
    Ok(Text { is_negative, whole, fraction, suffix })
}

/// A value of more digits is out of every range that anybody counts in.
const DIGITS: usize = 30;

impl Amount {
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let Text { is_negative: negative, whole, fraction, suffix } = split(text)?;
        // A long fraction is cut to the digits that are left. A cut fraction rounds up.
        let (fraction, rest) =
            fraction.split_at(fraction.len().min(DIGITS.saturating_sub(whole.len())));
        let mantissa = format!("{whole}{fraction}");
        let mantissa: i128 = match mantissa.trim_start_matches('0') {
            "" => 0,
            digits if digits.len() <= DIGITS => digits.parse().map_err(|_| ParseError::Number)?,
            _ => 10i128.pow(DIGITS as u32),
        };
        let mantissa = mantissa + i128::from(rest.bytes().any(|byte| byte != b'0'));
        let magnitude = scale(mantissa, suffix, fraction.len() as i32)?;
        Ok(Self(if negative { -magnitude } else { magnitude }))
    }

    /// In thousandths, rounded up.
    pub fn milli(self) -> i64 {
        self.rounded_up(NANO / 1000)
    }

    /// Has it a fraction, as Go finds out by way of thousandths in 64 bits? Those that do not fit
    /// are 0, or their low bits where whole units do not fit either.
    pub fn is_fractional(self) -> bool {
        let milli =
            self.0.div_euclid(NANO / 1000) + i128::from(self.0.rem_euclid(NANO / 1000) != 0);
        let milli = match i64::try_from(milli) {
            Ok(milli) => milli,
            Err(_) if i64::try_from(self.0 / NANO).is_ok() => 0,
            Err(_) => milli as i64,
        };
        milli % 1000 != 0
    }

    /// In whole units, rounded up.
    pub fn units(self) -> i64 {
        self.rounded_up(NANO)
    }

    pub fn is_zero(self) -> bool {
        self.0 == 0
    }

    pub fn is_negative(self) -> bool {
        self.0 < 0
    }

    /// The value as a float; large values lose their last digits.
    pub fn to_f64(self) -> f64 {
        self.0 as f64 / NANO as f64
    }

    /// As upstream writes it: the largest suffix that needs no fraction. `1.5Gi` is `1536Mi`.
    pub fn canonical(self, format: Format) -> String {
        let whole = self.0 % NANO == 0;
        let is_small = self.0.abs() < 1024 * NANO;
        if format == Format::Binary && whole && !is_small {
            return binary(self.0 / NANO);
        }
        let (mut mantissa, mut power) = (self.0, -9i32);
        while mantissa != 0 && mantissa % 1000 == 0 && power < 18 {
            mantissa /= 1000;
            power += 3;
        }
        if mantissa == 0 {
            return "0".into();
        }
        let suffix = match (format, power) {
            (Format::Exponent, 0) => String::new(),
            (Format::Exponent, power) => format!("e{power}"),
            (_, power) => ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"]
                [usize::try_from((power + 9) / 3).unwrap_or_default()]
            .to_owned(),
        };
        format!("{mantissa}{suffix}")
    }

    fn rounded_up(self, step: i128) -> i64 {
        let up = self.0.div_euclid(step) + i128::from(self.0.rem_euclid(step) != 0);
        i64::try_from(up).unwrap_or(if up < 0 { i64::MIN } else { i64::MAX })
    }
}

impl std::ops::Add for Amount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl std::ops::Sub for Amount {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl From<i64> for Amount {
    fn from(units: i64) -> Self {
        Self(i128::from(units) * NANO)
    }
}

/// How a quantity was written, which sums keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// `100m`, `2k`
    #[default]
    Decimal,
    /// `1Gi`
    Binary,
    /// `1e3`
    Exponent,
}

impl Format {
    pub fn of(text: &str) -> Self {
        let suffix =
            text.trim_start_matches(|c: char| c.is_ascii_digit() || matches!(c, '.' | '+' | '-'));
        match suffix.as_bytes() {
            [_, b'i'] => Self::Binary,
            [b'e' | b'E', _, ..] => Self::Exponent,
            _ => Self::Decimal,
        }
    }
}

fn binary(mut whole: i128) -> String {
    const SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut at = 0;
    while whole % 1024 == 0 && at + 1 < SUFFIXES.len() {
        whole /= 1024;
        at += 1;
    }
    format!("{whole}{}", SUFFIXES[at])
}

/// `mantissa × multiplier of suffix ÷ 10^places`, in billionths, rounded up.
fn scale(mantissa: i128, suffix: &str, places: i32) -> Result<i128, ParseError> {
    const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    const DECIMAL: [(&str, i32); 10] = [
        ("", 0),
        ("n", -9),
        ("u", -6),
        ("m", -3),
        ("k", 3),
        ("M", 6),
        ("G", 9),
        ("T", 12),
        ("P", 15),
        ("E", 18),
    ];
    let binary = BINARY.iter().position(|one| *one == suffix).map(|at| 10 * (at as u32 + 1));
    let power = match (binary, DECIMAL.iter().find(|(one, _)| *one == suffix)) {
        (Some(_), _) => 0,
        (None, Some((_, power))) => *power,
        (None, None) => exponent(suffix)?,
    };
    let shifted = mantissa.saturating_mul(1i128 << binary.unwrap_or(0));
    let power = power - places + 9;
    Ok(match u32::try_from(power) {
        Ok(power) => shifted.saturating_mul(10i128.checked_pow(power).unwrap_or(i128::MAX)),
        Err(_) => {
            let divisor = 10i128.checked_pow(power.unsigned_abs()).unwrap_or(i128::MAX);
            shifted / divisor + i128::from(shifted % divisor != 0)
        }
    })
}

/// `e3`, `E-2`
fn exponent(suffix: &str) -> Result<i32, ParseError> {
    let digits = suffix.strip_prefix(['e', 'E']).ok_or(ParseError::Suffix)?;
    digits.parse().ok().filter(|power: &i32| power.abs() <= 30).ok_or(ParseError::Suffix)
}

/// The form in which upstream writes a quantity: `1000m` is `1`, `1024Mi` is `1Gi`, `0.5` is `500m`.
/// A number outside the range of `i128` stays unchanged.
pub fn canonical(text: &str) -> Result<String, ParseError> {
    let Amount(value) = Amount::parse(text)?;
    if is_canonical(text)? {
        return Ok(text.into());
    }
    if value == 0 {
        return Ok("0".into());
    }
    if value.unsigned_abs() > NANO.unsigned_abs() * 10u128.pow(27) {
        return Ok(text.into());
    }
    const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    const SI: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
    let units = value / NANO;
    if text.ends_with('i') && value % NANO == 0 && units.abs() >= 1024 {
        let (mut number, mut power) = (units, 0);
        while number % 1024 == 0 && power < BINARY.len() - 1 {
            (number, power) = (number / 1024, power + 1);
        }
        return Ok(format!("{number}{}", BINARY[power]));
    }
    let (mut number, mut power) = (value, 0);
    while number % 1000 == 0 && power < SI.len() - 1 {
        (number, power) = (number / 1000, power + 1);
    }
    let exponent = 3 * power as i32 - 9;
    let has_exponent = text.trim_end_matches(|c: char| c.is_ascii_digit() || "+-".contains(c));
    let by_exponent =
        text.ends_with(|c: char| c.is_ascii_digit()) && has_exponent.ends_with(['e', 'E']);
    Ok(match (by_exponent, exponent) {
        (false, _) => format!("{number}{}", SI[power]),
        (true, 0) => number.to_string(),
        (true, exponent) => format!("{number}e{exponent}"),
    })
}

/// Whether upstream treats the text as canonical and keeps it unchanged: `+1` and `1E3`, too.
fn is_canonical(text: &str) -> Result<bool, ParseError> {
    /// So many digits fit into 64 bits.
    const FIT: usize = 18;
    const BINARY_FIT: usize = 14;
    let Text { whole, fraction, suffix, .. } = split(text)?;
    let digits = format!("{}{fraction}", if whole.is_empty() { "0" } else { whole });
    if let Some(at) = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].iter().position(|one| *one == suffix) {
        let digits_of_suffix = (10 * (at + 1)) * 3 / 10;
        let fits = whole.len().max(1) + digits_of_suffix <= BINARY_FIT;
        let number = digits.parse::<u64>().unwrap_or_default();
        return Ok(fraction.is_empty() && fits && number & 7 != 0);
    }
    let power = match suffix {
        "n" => -9,
        "u" => -6,
        "m" => -3,
        "" | "k" | "M" | "G" | "T" | "P" | "E" => 0,
        suffix => exponent(suffix)?,
    };
    let scale = power - fraction.len() as i32;
    let is_whole = digits.len() <= FIT && scale >= -9 && scale % 3 == 0;
    Ok(is_whole && !digits.ends_with("000") && !digits.starts_with('0'))
}

/// Cut to thousandths, rounded up, as upstream keeps the resources of pods. Nothing where that
/// changes nothing.
pub fn rounded_to_milli(quantity: &Quantity) -> Option<Quantity> {
    let Amount(value) = Amount::parse(&quantity.0).ok()?;
    let step = NANO / 1000;
    let over = value.rem_euclid(step);
    let up = Amount(value.saturating_sub(over).saturating_add(step));
    (over != 0).then(|| Quantity(up.canonical(Format::of(&quantity.0))))
}

/// In thousandths; what cannot be read counts nothing.
pub fn milli(quantity: &Quantity) -> i64 {
    Amount::parse(&quantity.0).unwrap_or_default().milli()
}

/// In whole units; what cannot be read counts nothing.
pub fn units(quantity: &Quantity) -> i64 {
    Amount::parse(&quantity.0).unwrap_or_default().units()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_are_what_go_takes_for_them() {
        let check = |text: &str, expected| {
            let amount = Amount::parse(text).expect("a quantity");
            assert_eq!(amount.is_fractional(), expected, "{text}");
        };
        check("1", false);
        check("1m", true);
        check("1500m", true);
        check("1E", false);
        check("9223372036854775808", false);
        check("123456789012345678901234567890", true);
    }

    #[test]
    fn resources_are_rounded_up_to_thousandths() {
        let check = |text: &str, expected: Option<&str>| {
            let rounded = rounded_to_milli(&Quantity(text.into()));
            assert_eq!(rounded.map(|rounded| rounded.0).as_deref(), expected, "{text}");
        };
        check("1n", Some("1m"));
        check("1.0005", Some("1001m"));
        check("0.0001Ki", Some("103m"));
        check("100m", None);
        check("1Gi", None);
    }

    /// Upstream: `TestQuantityParseNonNumericPanic` and its neighbours.
    #[test]
    fn canonical_texts_stay_as_they_were_written() {
        for (text, expected) in [
            ("+1", Ok("+1")),
            ("1E3", Ok("1E3")),
            ("1e+3", Ok("1e+3")),
            ("01", Ok("01")),
            ("1.", Ok("1.")),
            ("1.500", Ok("1.500")),
            ("0.5", Ok("500m")),
            ("1000m", Ok("1")),
            ("1.5", Ok("1500m")),
            ("1024Mi", Ok("1Gi")),
            ("12Mi", Ok("12Mi")),
            ("16Mi", Ok("16Mi")),
            ("1e19", Ok("10e18")),
            ("+", Ok("0")),
            (".", Ok("0")),
            ("-", Ok("0")),
            ("", Err(ParseError::Format)),
            ("1x", Err(ParseError::Format)),
            ("1 k", Err(ParseError::Format)),
            ("1e", Err(ParseError::Suffix)),
            ("1mi", Err(ParseError::Suffix)),
            ("1i", Err(ParseError::Suffix)),
            ("1k1", Err(ParseError::Suffix)),
        ] {
            assert_eq!(canonical(text).as_deref(), expected.as_ref().copied(), "{text}");
        }
    }

    /// Ten thousand digits panicked once, and a long fraction made a value another.
    #[test]
    fn long_ones_are_read() {
        let check = |text: &str, milli: i64| {
            let amount = Amount::parse(text).expect("a quantity");
            assert_eq!(amount.milli(), milli, "{text}");
            assert!(canonical(text).is_ok(), "{text}");
            rounded_to_milli(&Quantity(text.into()));
        };
        for suffix in ["", "Ki", "E", "e30", "n"] {
            for digit in ["9", "1"] {
                let text = digit.repeat(10_000) + suffix;
                assert!(Amount::parse(&text).expect("a quantity").milli() > 0);
                rounded_to_milli(&Quantity(text.clone()));
                rounded_to_milli(&Quantity(format!("-{text}")));
            }
        }
        check(&format!("1.{}", "0".repeat(60)), 1000);
        check(&format!("2.{}1", "0".repeat(60)), 2001);
        check(&format!("0.{}1", "0".repeat(60)), 1);
        check(&format!("1{}.5", "0".repeat(40)), i64::MAX);
    }

    #[test]
    fn reads_upstreams_forms() {
        for (text, thousandths, whole) in [
            ("100m", 100, 1),
            ("0.1", 100, 1),
            ("1.5", 1500, 2),
            ("2e3", 2_000_000, 2000),
            ("1Ki", 1_024_000, 1024),
            ("1.5Gi", 1_610_612_736_000, 1_610_612_736),
            ("64Mi", 67_108_864_000, 67_108_864),
            ("3k", 3_000_000, 3000),
            ("1n", 1, 1),
            ("-2", -2000, -2),
            (".5", 500, 1),
            ("5.", 5000, 5),
            ("0", 0, 0),
            ("8E", i64::MAX, 8_000_000_000_000_000_000),
            ("99999999999999999999999999999999", i64::MAX, i64::MAX),
        ] {
            let amount = Amount::parse(text).unwrap_or_else(|_| panic!("{text}"));
            assert_eq!((amount.milli(), amount.units()), (thousandths, whole), "{text}");
        }
    }

    #[test]
    fn sums_are_written_as_upstream_writes_them() {
        let check = |all: &[&str], expected: &str| {
            let parse = |text: &&str| Amount::parse(text).expect("a quantity");
            let sum = all.iter().map(parse).fold(Amount::default(), |sum, one| sum + one);
            assert_eq!(sum.canonical(Format::of(all[0])), expected, "{all:?}");
        };
        check(&["100m", "0.9"], "1");
        check(&["1.5"], "1500m");
        check(&["64Mi", "1Gi"], "1088Mi");
        check(&["1.5Gi"], "1536Mi");
        check(&["500"], "500");
        check(&["2000"], "2k");
        check(&["1Ki", "-24"], "1k");
        check(&["512Ki", "1"], "524289");
        check(&["1e3", "500"], "1500");
        check(&["5e3"], "5e3");
        check(&["0"], "0");
    }

    #[test]
    fn writes_the_canonical_form() {
        for (text, expected) in [
            ("1000m", "1"),
            ("0.5", "500m"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("0.5Ki", "512"),
            ("1536Mi", "1536Mi"),
            ("5000", "5k"),
            ("1e3", "1e3"),
            ("2e4", "20e3"),
            ("1E", "1E"),
            ("-1", "-1"),
            ("-1024Mi", "-1Gi"),
            ("0.1n", "1n"),
            ("0.0", "0"),
            ("100Ki", "100Ki"),
            ("1.0", "1"),
        ] {
            assert_eq!(canonical(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn refuses_what_upstream_refuses() {
        for (text, expected) in [
            ("", ParseError::Format),
            ("1µ", ParseError::Format),
            ("1 Gi", ParseError::Format),
            ("1.2.3", ParseError::Format),
            ("1x", ParseError::Format),
            ("--1", ParseError::Suffix),
            ("1e", ParseError::Suffix),
            ("1ee3", ParseError::Suffix),
        ] {
            assert_eq!(Amount::parse(text), Err(expected), "{text}");
        }
        // A suffix alone is one of nothing.
        for text in ["m", "Gi", ".", "-"] {
            assert_eq!(Amount::parse(text), Ok(Amount(0)), "{text}");
        }
    }
}
