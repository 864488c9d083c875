//! Protobuf's wire format: varints, tags, lengths.

use super::Error;

pub const VARINT: u8 = 0;
pub const FIXED64: u8 = 1;
pub const BYTES: u8 = 2;
const GROUP_START: u8 = 3;
const GROUP_END: u8 = 4;
const FIXED32: u8 = 5;

/// Reads a message front to back.
#[derive(Clone, Copy)]
pub struct Reader<'a>(pub &'a [u8]);

/// A field's content as the wire has it.
#[derive(Clone, Copy, Debug)]
pub enum Wire<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
    /// A wire type that no known field has; skipped.
    Other(u8),
}

impl Wire<'_> {
    pub fn wire_type(self) -> u8 {
        match self {
            Self::Varint(_) => VARINT,
            Self::Fixed64(_) => FIXED64,
            Self::Bytes(_) => BYTES,
            Self::Other(wire_type) => wire_type,
        }
    }
}

impl<'a> Reader<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next field; `None` at the end.
    pub fn field(&mut self) -> Result<Option<(u32, Wire<'a>)>, Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let key = self.varint()?;
        let wire_type = (key & 7) as u8;
        let number = match u32::try_from(key >> 3) {
            Ok(number) if number > 0 => number,
            _ => return Err(Error::IllegalTag(key >> 3, wire_type)),
        };
        let wire = match wire_type {
            VARINT => Wire::Varint(self.varint()?),
            FIXED64 => Wire::Fixed64(self.fixed64()?),
            BYTES => Wire::Bytes(self.bytes()?),
            GROUP_START => {
                self.skip_group()?;
                Wire::Other(wire_type)
            }
            FIXED32 => {
                self.take(4)?;
                Wire::Other(wire_type)
            }
            other => return Err(Error::IllegalWireType(other)),
        };
        Ok(Some((number, wire)))
    }

    pub fn varint(&mut self) -> Result<u64, Error> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Error::Overflow)
    }

    pub fn fixed64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("eight bytes were taken")))
    }

    fn bytes(&mut self) -> Result<&'a [u8], Error> {
        let length = usize::try_from(self.varint()?).map_err(|_| Error::Truncated)?;
        self.take(length)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Error> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Error::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    /// Up to the end of a group, with the groups in it.
    fn skip_group(&mut self) -> Result<(), Error> {
        let mut depth = 1_usize;
        while depth > 0 {
            match (self.varint()? & 7) as u8 {
                VARINT => _ = self.varint()?,
                FIXED64 => _ = self.take(8)?,
                BYTES => _ = self.bytes()?,
                GROUP_START => depth += 1,
                GROUP_END => depth -= 1,
                FIXED32 => _ = self.take(4)?,
                other => return Err(Error::IllegalWireType(other)),
            }
        }
        Ok(())
    }
}

pub fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

pub fn put_key(out: &mut Vec<u8>, number: u32, wire_type: u8) {
    put_varint(out, u64::from(number) << 3 | u64::from(wire_type));
}

pub fn put_bytes(out: &mut Vec<u8>, number: u32, bytes: &[u8]) {
    put_key(out, number, BYTES);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

pub fn put_number(out: &mut Vec<u8>, number: u32, value: i64) {
    put_key(out, number, VARINT);
    put_varint(out, value.cast_unsigned());
}

/// A field of what `write` appends. Its length goes in front; most lengths fit into the byte that is
/// kept free for it.
pub fn put_nested(
    out: &mut Vec<u8>,
    number: u32,
    write: impl FnOnce(&mut Vec<u8>) -> Result<(), Error>,
) -> Result<(), Error> {
    put_key(out, number, BYTES);
    let at = out.len();
    out.push(0);
    write(out)?;
    let length = out.len() - at - 1;
    if length < 0x80 {
        out[at] = length as u8;
    } else {
        let mut prefix = Vec::with_capacity(10);
        put_varint(&mut prefix, length as u64);
        out.splice(at..=at, prefix);
    }
    Ok(())
}
