//! Netlink bytes: attributes, messages, batches. Numbers in attributes are big-endian, headers in
//! host byte order. The constants are those of `linux/netfilter/nf_tables.h`.

pub const SUBSYSTEM: u16 = 10;
pub const NLM_F_REQUEST: u16 = 1;
pub const NLM_F_ACK: u16 = 4;
pub const NLM_F_CREATE: u16 = 0x400;
pub const NLM_F_APPEND: u16 = 0x800;
const NLA_F_NESTED: u16 = 0x8000;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
pub const HEADER: usize = 16;
/// `nfgenmsg`: family, version, resource.
pub const GENERIC_HEADER: usize = 4;

/// One request of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub kind: u16,
    pub flags: u16,
    pub family: u8,
    pub body: Vec<u8>,
    /// A description for error messages.
    pub about: String,
}

/// A transaction: the kernel applies all of it or nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub(crate) messages: Vec<Message>,
}

impl Batch {
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The number of requests.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// A description of each request, for logs and tests.
    pub fn describe(&self) -> Vec<&str> {
        self.messages.iter().map(|message| message.about.as_str()).collect()
    }

    /// The bytes of the whole transaction. Message `i` has sequence number `i + 1`. The last one
    /// asks for an answer, so that a missing answer is not taken for success.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let size: usize = self.messages.iter().map(|m| m.body.len() + 24).sum();
        let mut out = Vec::with_capacity(size + 48);
        put_message(&mut out, (BATCH_BEGIN, NLM_F_REQUEST), 0, (0, SUBSYSTEM), &[]);
        for (index, message) in self.messages.iter().enumerate() {
            let last = index + 1 == self.messages.len();
            let flags = message.flags | NLM_F_REQUEST | if last { NLM_F_ACK } else { 0 };
            let kind = SUBSYSTEM << 8 | message.kind;
            let sequence = index as u32 + 1;
            put_message(&mut out, (kind, flags), sequence, (message.family, 0), &message.body);
        }
        let sequence = self.messages.len() as u32 + 1;
        put_message(&mut out, (BATCH_END, NLM_F_REQUEST), sequence, (0, SUBSYSTEM), &[]);
        out
    }
}

/// Appends a message with netfilter's own header: (kind, flags), then (family, resource).
pub fn put_message(
    out: &mut Vec<u8>,
    (kind, flags): (u16, u16),
    sequence: u32,
    (family, resource): (u8, u16),
    body: &[u8],
) {
    let length = HEADER + GENERIC_HEADER + body.len();
    out.extend_from_slice(&(length as u32).to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(&flags.to_ne_bytes());
    out.extend_from_slice(&sequence.to_ne_bytes());
    out.extend_from_slice(&0u32.to_ne_bytes());
    out.extend_from_slice(&[family, 0]);
    out.extend_from_slice(&resource.to_be_bytes());
    out.extend_from_slice(body);
    pad(out);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

/// A list of attributes under construction.
#[derive(Default)]
pub struct Attrs(pub Vec<u8>);

impl Attrs {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        self.put(kind, value);
        self
    }

    pub fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(kind, &bytes)
    }

    pub fn number(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub fn number64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub fn nest(self, kind: u16, inner: Attrs) -> Self {
        self.bytes(kind | NLA_F_NESTED, &inner.0)
    }

    fn put(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(value.len() + 4).expect("attributes are kept below 64 KiB");
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        pad(&mut self.0);
    }
}

/// The attributes in `bytes`, without the nesting bit; stops at the first malformed one.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & 0x3fff;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}
