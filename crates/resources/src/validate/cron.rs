//! Schedules of CronJobs: `*/5 0-6 * JAN mon`. Upstream's parser is `robfig/cron`'s.

/// A field: its range and the names of its values.
struct Field {
    least: u32,
    most: u32,
    names: &'static [&'static str],
}

const MONTHS: &[&str] =
    &["", "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const DAYS: &[&str] = &["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

const FIELDS: [Field; 5] = [
    Field { least: 0, most: 59, names: &[] },
    Field { least: 0, most: 23, names: &[] },
    Field { least: 1, most: 31, names: &[] },
    Field { least: 1, most: 12, names: MONTHS },
    Field { least: 0, most: 6, names: DAYS },
];

const DESCRIPTORS: &[&str] =
    &["@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"];

/// Why a text is no schedule.
pub(crate) fn check(text: &str) -> Result<(), String> {
    let mut text = text;
    if text.starts_with("TZ=") || text.starts_with("CRON_TZ=") {
        let (zone, rest) = text.split_once(' ').unwrap_or((text, ""));
        let zone = zone.split_once('=').map_or("", |(_, zone)| zone);
        if machinery::cron::time_zone(zone).is_none() {
            return Err(format!("provided bad location {zone}: unknown time zone {zone}"));
        }
        text = rest.trim();
    }
    if text.starts_with('@') {
        return descriptor(text);
    }
    let fields: Vec<&str> = text.split_whitespace().collect();
    if fields.len() != FIELDS.len() {
        return Err(format!(
            "expected exactly 5 fields, found {}: [{}]",
            fields.len(),
            fields.join(" ")
        ));
    }
    for (text, field) in fields.iter().zip(&FIELDS) {
        for part in text.split(',').filter(|part| !part.is_empty()) {
            range(part, field)?;
        }
    }
    Ok(())
}

fn descriptor(text: &str) -> Result<(), String> {
    if DESCRIPTORS.contains(&text) {
        return Ok(());
    }
    let Some(duration) = text.strip_prefix("@every ") else {
        return Err(format!("unrecognized descriptor: {text}"));
    };
    if is_duration(duration) {
        return Ok(());
    }
    Err(format!("failed to parse duration {text}: time: invalid duration {duration:?}"))
}

/// Go's `1h30m`.
fn is_duration(text: &str) -> bool {
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    if rest == "0" {
        return true;
    }
    let mut any = false;
    while !rest.is_empty() {
        let number = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        if number.len() == rest.len() {
            return false;
        }
        let units = ["ns", "us", "µs", "ms", "s", "m", "h"];
        let Some(unit) =
            units.iter().filter(|unit| number.starts_with(**unit)).max_by_key(|u| u.len())
        else {
            return false;
        };
        rest = &number[unit.len()..];
        any = true;
    }
    any
}

fn range(text: &str, field: &Field) -> Result<(), String> {
    let parts: Vec<&str> = text.split('/').collect();
    let limits: Vec<&str> = parts[0].split('-').collect();
    let (start, mut end) = match limits[0] {
        "*" | "?" => (field.least, field.most),
        first => {
            let start = value(first, field)?;
            match limits.len() {
                1 => (start, start),
                2 => (start, value(limits[1], field)?),
                _ => return Err(format!("too many hyphens: {text}")),
            }
        }
    };
    match parts.as_slice() {
        [_] => {}
        [_, step] => {
            let step = number(step)?;
            if limits.len() == 1 && !["*", "?"].contains(&limits[0]) {
                end = field.most;
            }
            if step == 0 {
                return Err(format!("step of range should be a positive number: {text}"));
            }
        }
        _ => return Err(format!("too many slashes: {text}")),
    }
    let (least, most) = (field.least, field.most);
    if start < least {
        return Err(format!("beginning of range ({start}) below minimum ({least}): {text}"));
    }
    if end > most {
        return Err(format!("end of range ({end}) above maximum ({most}): {text}"));
    }
    if start > end {
        return Err(format!("beginning of range ({start}) beyond end of range ({end}): {text}"));
    }
    Ok(())
}

fn value(text: &str, field: &Field) -> Result<u32, String> {
    let lower = text.to_lowercase();
    match field.names.iter().position(|name| !name.is_empty() && *name == lower) {
        Some(value) => Ok(value as u32),
        None => number(text),
    }
}

fn number(text: &str) -> Result<u32, String> {
    match text.parse::<i64>() {
        Err(_) => Err(format!(
            "failed to parse int from {text}: strconv.Atoi: parsing {text:?}: invalid syntax"
        )),
        Ok(number) if number < 0 => Err(format!("negative number ({number}) not allowed: {text}")),
        Ok(number) => Ok(u32::try_from(number).unwrap_or(u32::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_are_judged_as_upstream_does() {
        for good in
            ["* * * * *", "*/5 0-6 1,15 JAN mon-FRI", "@daily", "@every 1h30m", "0 0 30 2 ?"]
        {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for (bad, why) in [
            ("every day", "expected exactly 5 fields, found 2: [every day]"),
            ("61 * * * *", "end of range (61) above maximum (59): 61"),
            ("* * 0 * *", "beginning of range (0) below minimum (1): 0"),
            ("5-2 * * * *", "beginning of range (5) beyond end of range (2): 5-2"),
            ("*/0 * * * *", "step of range should be a positive number: */0"),
            ("1-2-3 * * * *", "too many hyphens: 1-2-3"),
            (
                "a * * * *",
                "failed to parse int from a: strconv.Atoi: parsing \"a\": invalid syntax",
            ),
            ("@sometimes", "unrecognized descriptor: @sometimes"),
        ] {
            assert_eq!(check(bad), Err(why.to_owned()), "{bad}");
        }
    }
}
