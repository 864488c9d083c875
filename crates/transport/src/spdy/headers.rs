//! Header blocks of SPDY/3: name-value pairs, compressed by one zlib stream per direction that
//! starts from a dictionary both sides know.
//!
//! Reading inflates with that dictionary. Writing uses stored blocks, which any inflater can read:
//! a tunnel's few headers are not worth a compressor's memory.

use bytes::{BufMut, BytesMut};
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_HAS_MORE_INPUT;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

use super::Error;

/// Names are lower-case.
pub type Headers = Vec<(String, String)>;

/// The value of the first header called `name`, ignoring case.
pub fn find<'h>(headers: &'h Headers, name: &str) -> Option<&'h str> {
    let found = headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
    found.map(|(_, value)| value.as_str())
}

/// The limit on an inflated block.
const BLOCK_BYTES: usize = 256 << 10;
/// DEFLATE's window: matches reach back this far.
const WINDOW: usize = 32 << 10;
/// The zlib flag for a preset dictionary.
const HAS_DICTIONARY: u8 = 0x20;

/// The first part of the dictionary: texts with a length prefix, as in header blocks.
const WORDS: &[&str] = &[
    "options",
    "head",
    "post",
    "put",
    "delete",
    "trace",
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "accept-ranges",
    "age",
    "allow",
    "authorization",
    "cache-control",
    "connection",
    "content-base",
    "content-encoding",
    "content-language",
    "content-length",
    "content-location",
    "content-md5",
    "content-range",
    "content-type",
    "date",
    "etag",
    "expect",
    "expires",
    "from",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "last-modified",
    "location",
    "max-forwards",
    "pragma",
    "proxy-authenticate",
    "proxy-authorization",
    "range",
    "referer",
    "retry-after",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "vary",
    "via",
    "warning",
    "www-authenticate",
    "method",
    "get",
    "status",
    "200 OK",
    "version",
    "HTTP/1.1",
    "url",
    "public",
    "set-cookie",
    "keep-alive",
    "origin",
];

/// The second part of the dictionary, plain.
const TAIL: &str = concat!(
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505",
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request",
    "401 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented",
    "503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 ",
    "Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,",
    "application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=",
    "gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.",
);

fn dictionary() -> Vec<u8> {
    let mut bytes = vec![];
    for word in WORDS {
        bytes.put_u32(word.len() as u32);
        bytes.put_slice(word.as_bytes());
    }
    bytes.put_slice(TAIL.as_bytes());
    bytes
}

/// Inflates the peer's blocks, in order.
pub(super) struct Inflater {
    state: Box<DecompressorOxide>,
    /// The last 32 KiB of output, as a ring.
    window: Vec<u8>,
    position: usize,
    /// The zlib header precedes only the first block.
    is_started: bool,
}

impl Inflater {
    pub(super) fn new() -> Self {
        let window = vec![0; WINDOW];
        Self { state: Box::default(), window, position: 0, is_started: false }
    }

    pub(super) fn read(&mut self, block: &[u8]) -> Result<Headers, Error> {
        let mut input = block;
        if !self.is_started {
            input = self.start(block)?;
        }
        let mut plain = vec![];
        loop {
            let (status, read, written) = decompress(
                &mut self.state,
                input,
                &mut self.window,
                self.position,
                TINFL_FLAG_HAS_MORE_INPUT,
            );
            plain.extend_from_slice(&self.window[self.position..self.position + written]);
            self.position = (self.position + written) % WINDOW;
            input = &input[read..];
            match status {
                _ if plain.len() > BLOCK_BYTES => {
                    return Err(Error::Protocol("a header block is too long"));
                }
                TINFLStatus::HasMoreOutput => {}
                TINFLStatus::NeedsMoreInput if input.is_empty() => return parse(&plain),
                _ => return Err(Error::Protocol("a header block cannot be inflated")),
            }
        }
    }

    /// Removes the zlib header; if it asks for the dictionary, puts that into the window.
    fn start<'b>(&mut self, block: &'b [u8]) -> Result<&'b [u8], Error> {
        let (header, rest) = block.split_at_checked(2).ok_or(Error::Protocol("no zlib header"))?;
        self.is_started = true;
        if header[0] & 0x0f != 8 {
            return Err(Error::Protocol("no zlib header"));
        }
        if header[1] & HAS_DICTIONARY == 0 {
            return Ok(rest);
        }
        let dictionary = dictionary();
        self.window[..dictionary.len()].copy_from_slice(&dictionary);
        self.position = dictionary.len();
        // Four bytes identify the dictionary; SPDY/3 has only one.
        rest.get(4..).ok_or(Error::Protocol("no dictionary id"))
    }
}

fn parse(mut plain: &[u8]) -> Result<Headers, Error> {
    let short = || Error::Protocol("a header block ends early");
    let number = |plain: &mut &[u8]| -> Result<usize, Error> {
        let (four, rest) = plain.split_first_chunk::<4>().ok_or_else(short)?;
        *plain = rest;
        Ok(u32::from_be_bytes(*four) as usize)
    };
    let count = number(&mut plain)?;
    let mut headers = vec![];
    for _ in 0..count {
        let mut text = || -> Result<String, Error> {
            let length = number(&mut plain)?;
            let (text, rest) = plain.split_at_checked(length).ok_or_else(short)?;
            plain = rest;
            Ok(String::from_utf8_lossy(text).into_owned())
        };
        let (name, values) = (text()?, text()?);
        // NUL separates several values of one name.
        headers.extend(values.split('\0').map(|value| (name.clone(), value.to_owned())));
    }
    Ok(headers)
}

/// Writes our blocks, in order.
pub(super) struct Deflater {
    is_started: bool,
}

impl Deflater {
    pub(super) fn new() -> Self {
        Self { is_started: false }
    }

    pub(super) fn write(&mut self, headers: &Headers) -> Vec<u8> {
        let mut plain = vec![];
        plain.put_u32(headers.len() as u32);
        for (name, value) in headers {
            for text in [&name.to_ascii_lowercase(), value] {
                plain.put_u32(text.len() as u32);
                plain.put_slice(text.as_bytes());
            }
        }
        let mut out = BytesMut::new();
        if !self.is_started {
            self.is_started = true;
            // DEFLATE, 32 KiB window, no dictionary, fastest.
            out.put_slice(&[0x78, 0x01]);
        }
        for chunk in plain.chunks(usize::from(u16::MAX)) {
            let length = chunk.len() as u16;
            out.put_u8(0);
            out.put_u16_le(length);
            out.put_u16_le(!length);
            out.put_slice(chunk);
        }
        // An empty stored block: Go's inflater returns its output only there.
        out.put_slice(&[0, 0, 0, 0xff, 0xff]);
        out.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dictionary_matches_the_standard() {
        let bytes = dictionary();
        assert_eq!(bytes.len(), 1423);
        let (mut a, mut b) = (1u32, 0u32);
        for byte in bytes {
            a = (a + u32::from(byte)) % 65521;
            b = (b + a) % 65521;
        }
        // The dictionary id at the start of SPDY/3 streams.
        assert_eq!(b << 16 | a, 0xe3c6_a7c2);
    }

    #[test]
    fn blocks_round_trip() {
        let (mut deflater, mut inflater) = (Deflater::new(), Inflater::new());
        for round in 0..2000 {
            let headers = vec![
                ("streamtype".to_owned(), "data".to_owned()),
                ("requestid".to_owned(), round.to_string()),
                ("long".to_owned(), "x".repeat(round * 40)),
            ];
            assert_eq!(inflater.read(&deflater.write(&headers)).expect("reads"), headers);
        }
    }

    #[test]
    fn blocks_of_a_compressor_with_dictionary_are_read() {
        // zlib, level 6, the dictionary, sync-flushed: {streamtype: error}, {streamtype: stdin}.
        let first: &[u8] = b"\x78\xbb\xe3\xc6\xa7\xc2\x02\xa6\x23\x46\x70\x3a\x2b\x29\x4a\x4d\xcc\x85\x16\x25\xac\xa9\xa0\x80\x06\x00\x00\x00\xff\xff";
        let second: &[u8] = b"\xc2\x2e\x55\x5c\x02\xcc\x2e\x00\x00\x00\x00\xff\xff";
        let mut inflater = Inflater::new();
        let one = inflater.read(first).expect("reads");
        assert_eq!(find(&one, "streamType"), Some("error"));
        let two = inflater.read(second).expect("reads");
        assert_eq!(find(&two, "streamType"), Some("stdin"));
    }

    #[test]
    fn invalid_blocks_are_refused() {
        assert!(Inflater::new().read(b"").is_err());
        assert!(Inflater::new().read(b"\x78\x01\xff\xff\xff\xff").is_err());
        assert!(Inflater::new().read(b"\x78\xbb\xe3").is_err());
    }
}
