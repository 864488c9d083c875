//! What the kinds' defaults share. Upstream: `pkg/apis/*/v1/defaults.go`.

/// Sets a text that is absent or empty: in Go they are one.
pub(crate) fn fill(text: &mut Option<String>, default: &str) {
    if text.as_deref().is_none_or(str::is_empty) {
        *text = Some(default.into());
    }
}

/// As [`fill`], of numbers and 0.
pub(crate) fn fill_number(number: &mut Option<i32>, default: i32) {
    if number.is_none_or(|number| number == 0) {
        *number = Some(default);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::Value;

    pub(crate) fn defaulted<T>(default: fn(&mut T), object: Value) -> Value
    where
        T: serde::de::DeserializeOwned + serde::Serialize + Clone + PartialEq,
    {
        let mut object: T = serde_json::from_value(object).expect("an object of the kind");
        default(&mut object);
        let once = object.clone();
        default(&mut object);
        assert!(object == once, "defaulting twice changes nothing");
        serde_json::to_value(object).expect("objects encode")
    }
}
