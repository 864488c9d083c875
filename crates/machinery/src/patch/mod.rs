//! The four patch formats: JSON patch (RFC 6902), merge patch (RFC 7386), strategic merge, and
//! server-side apply. All work on value trees; the schema facts come from the caller as a
//! [`Schema`].
