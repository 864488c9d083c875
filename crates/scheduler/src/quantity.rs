//! Quantities as the scheduler counts them: whole units, or thousandths for CPU, rounded up.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// In thousandths.
pub fn milli(quantity: &Quantity) -> i64 {
    scaled(&quantity.0, 1000.0)
}

/// In whole units.
pub fn units(quantity: &Quantity) -> i64 {
    scaled(&quantity.0, 1.0)
}

/// What cannot be read counts nothing: the API server has validated it.
fn scaled(text: &str, factor: f64) -> i64 {
    let end = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-'))).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let multiplier = match suffix {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1_048_576.0,
        "Gi" => 1_073_741_824.0,
        "Ti" => 1_099_511_627_776.0,
        "Pi" => 1_125_899_906_842_624.0,
        "Ei" => 1_152_921_504_606_846_976.0,
        exponent => match exponent[1..].parse::<i32>() {
            Ok(power) => 10f64.powi(power),
            Err(_) => return 0,
        },
    };
    if let (Ok(whole), true) = (number.parse::<i64>(), multiplier >= 1.0 && factor == 1.0) {
        return whole.saturating_mul(multiplier as i64);
    }
    let value = number.parse::<f64>().unwrap_or(0.0) * multiplier * factor;
    // 0.1 * 1000 is a hair more than 100: that is not a reason to round up.
    (value - 1e-6).ceil() as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_upstreams_forms() {
        let check = |text: &str, thousandths: i64, whole: i64| {
            let quantity = Quantity(text.into());
            assert_eq!((milli(&quantity), units(&quantity)), (thousandths, whole), "{text}");
        };
        check("100m", 100, 1);
        check("0.1", 100, 1);
        check("2", 2000, 2);
        check("1.5", 1500, 2);
        check("128Mi", 134_217_728_000, 134_217_728);
        check("1e3", 1_000_000, 1000);
        check("1G", 1_000_000_000_000, 1_000_000_000);
    }
}
