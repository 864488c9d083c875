//! Replaces the authority that clients of a Unix socket send by one that the HTTP/2 server accepts.
//!
//! gRPC's clients for Go, C and Java send the socket's path as the `:authority` (`%2Frun%2Fx.sock`,
//! `/run/x.sock`) when they use their own dialer, as device plugins do. That is invalid by the RFC.
//! The HTTP/2 server would end such a stream with PROTOCOL_ERROR before the service sees it.
//!
//! ```text
//! bytes ─► preface? ─► frames ─► HEADERS: literals of :authority get the value "u" ─► the server
//!             │                  │       except plain ones that are valid
//!             └ no: HTTP/1, unchanged  └ others, and unreadable frames: unchanged
//! ```
//!
//! In: a connection. Out: the same bytes with other authorities, for the server to read.
//! Invariants: a literal keeps its kind, and its value gets no longer. So the server's header table
//! has the client's entries in the same order, and later references stay valid. Header blocks of
//! several frames (from 16 KiB on) are not changed.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// A frame's length, type, flags and stream.
const HEAD: usize = 9;
const HEADERS: u8 = 1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// The largest frame that a client may send without a setting.
const LARGEST: usize = 1 << 14;
/// The index of `:authority` in the static table of HPACK.
const AUTHORITY: usize = 1;
/// A one-byte HPACK string: no authority is shorter.
const VALUE: [u8; 2] = [1, b'u'];

enum State {
    Preface,
    /// At the start of a frame.
    Frame,
    /// This many bytes of a frame are passed on.
    Pass(usize),
    /// The connection is not HTTP/2.
    Other,
}

/// A connection whose incoming bytes are rewritten.
pub struct Renamed<S> {
    io: S,
    state: State,
    /// Bytes that are not examined yet.
    raw: BytesMut,
    ready: BytesMut,
}

impl<S> Renamed<S> {
    pub fn new(io: S) -> Self {
        Self { io, state: State::Preface, raw: BytesMut::new(), ready: BytesMut::new() }
    }

    /// Moves as many bytes as possible to `ready`.
    fn digest(&mut self) {
        loop {
            let Self { state, raw, ready, .. } = self;
            match state {
                State::Preface => {
                    let known = raw.len().min(PREFACE.len());
                    if raw[..known] != PREFACE[..known] {
                        *state = State::Other;
                    } else if known == PREFACE.len() {
                        *state = State::Pass(known);
                    } else {
                        return;
                    }
                }
                State::Frame => {
                    let Some(head) = raw.get(..HEAD) else { return };
                    let length = usize::from(head[0]) << 16
                        | usize::from(head[1]) << 8
                        | usize::from(head[2]);
                    let is_block = head[3] == HEADERS && head[4] & END_HEADERS != 0;
                    if !is_block || length > LARGEST {
                        *state = State::Pass(HEAD + length);
                    } else if raw.len() >= HEAD + length {
                        let frame = raw.split_to(HEAD + length);
                        match renamed(&frame) {
                            Some(frame) => ready.extend_from_slice(&frame),
                            None => ready.extend_from_slice(&frame),
                        }
                    } else {
                        return;
                    }
                }
                State::Pass(0) => *state = State::Frame,
                State::Pass(_) if raw.is_empty() => return,
                State::Pass(left) => {
                    let now = raw.len().min(*left);
                    ready.extend_from_slice(&raw.split_to(now));
                    *left -= now;
                }
                State::Other => {
                    ready.extend_from_slice(&raw.split());
                    return;
                }
            }
        }
    }
}

/// A whole HEADERS frame with another authority; `None` for an unreadable one.
fn renamed(frame: &[u8]) -> Option<Vec<u8>> {
    let (head, payload) = frame.split_at(HEAD);
    let is = |flag: u8| head[4] & flag != 0;
    let padding = if is(PADDED) { usize::from(*payload.first()?) } else { 0 };
    let start = usize::from(is(PADDED)) + if is(PRIORITY) { 5 } else { 0 };
    let end = payload.len().checked_sub(padding)?;
    let block = renamed_block(payload.get(start..end)?)?;
    let length = u32::try_from(start + block.len() + padding).ok()?.to_be_bytes();
    let all = [&length[1..], &head[3..], &payload[..start], &block, &payload[end..]];
    Some(all.concat())
}

fn renamed_block(block: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(block.len());
    let mut at = 0;
    while at < block.len() {
        let start = at;
        let bits = match block[at] {
            // An indexed header or a table size: no string follows.
            0x80.. => {
                integer(block, &mut at, 7)?;
                None
            }
            0x40.. => Some(6),
            0x20.. => {
                integer(block, &mut at, 5)?;
                None
            }
            _ => Some(4),
        };
        let Some(bits) = bits else {
            out.extend_from_slice(&block[start..at]);
            continue;
        };
        let is_authority = match integer(block, &mut at, bits)? {
            0 => &block[string(block, &mut at)?] == b":authority",
            index => index == AUTHORITY,
        };
        out.extend_from_slice(&block[start..at]);
        let value = at;
        let text = string(block, &mut at)?;
        match is_authority && !text.is_empty() && !is_valid(block[value], &block[text]) {
            true => out.extend_from_slice(&VALUE),
            false => out.extend_from_slice(&block[value..at]),
        }
    }
    Some(out)
}

/// Whether the server would accept this authority. Huffman-coded ones count as invalid, because
/// they are not decoded here.
fn is_valid(first: u8, text: &[u8]) -> bool {
    const CODED: u8 = 0x80;
    first & CODED == 0 && http::uri::Authority::try_from(text).is_ok()
}

/// An HPACK integer: in the low bits of the first byte, or in the following bytes.
fn integer(block: &[u8], at: &mut usize, bits: u32) -> Option<usize> {
    let most = (1_usize << bits) - 1;
    let mut value = usize::from(*block.get(*at)?) & most;
    *at += 1;
    if value < most {
        return Some(value);
    }
    for shift in [0, 7, 14] {
        let byte = usize::from(*block.get(*at)?);
        *at += 1;
        value += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// The range of a string's bytes, in any coding.
fn string(block: &[u8], at: &mut usize) -> Option<Range<usize>> {
    let length = integer(block, at, 7)?;
    let start = *at;
    *at = start + length;
    (*at <= block.len()).then_some(start..*at)
}

impl<S: AsyncRead + Unpin> AsyncRead for Renamed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.ready.is_empty() {
            let mut chunk = [0; 4096];
            let mut read = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut self.io).poll_read(context, &mut read))?;
            let is_end = read.filled().is_empty();
            self.raw.extend_from_slice(read.filled());
            if is_end {
                // The server will report the truncated input.
                self.ready = self.raw.split();
                break;
            }
            self.digest();
        }
        let count = self.ready.len().min(out.remaining());
        out.put_slice(&self.ready[..count]);
        self.ready.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Renamed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        all: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, all)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    #[test]
    fn authorities_get_another_value() {
        let check = |block: &[u8], expected: Option<&[u8]>| {
            assert_eq!(renamed_block(block).as_deref(), expected, "{block:x?}");
        };
        // The name from the static table, indexed or not, plain or coded; or the name in full.
        check(b"\x83\x41\x06/a/b.s\x86", Some(b"\x83\x41\x01u\x86"));
        check(b"\x01\x82\xff\xff", Some(b"\x01\x01u"));
        check(b"\x40\x0a:authority\x02/b", Some(b"\x40\x0a:authority\x01u"));
        check(b"\x41\x06%2Fa.s", Some(b"\x41\x01u"));
        // Valid authorities stay.
        check(b"\x41\x09localhost\x86", Some(b"\x41\x09localhost\x86"));
        // Other headers stay, and so does an empty authority.
        check(b"\x41\x00\x3f\x10\x44\x02/a", Some(b"\x41\x00\x3f\x10\x44\x02/a"));
        check(b"\x40\x01x\x02ab\xff\x00", Some(b"\x40\x01x\x02ab\xff\x00"));
        let long = [b"\x41\x7f\x80\x01".as_slice(), &[b'/'; 255], b"\x83"].concat();
        check(&long, Some(b"\x41\x01u\x83"));
        check(b"\x41\x05ab", None);
        check(b"\x41", None);
        check(b"\xff\x80\x80\x80\x80", None);
    }

    #[tokio::test]
    async fn frames_pass_in_chunks_of_any_size() {
        let settings = frame(4, 0, &[]);
        let data = frame(0, 1, b"\x41\x02ab");
        let cut = frame(HEADERS, 0, b"\x41\x02ab");
        let odd = frame(HEADERS, END_HEADERS, b"\x41\x09ab");
        let padded = |block: &[u8]| {
            let payload = [b"\x02".as_slice(), &[0; 5], block, b"\x00\x00"].concat();
            frame(HEADERS, END_HEADERS | PADDED | PRIORITY, &payload)
        };
        let sent = [PREFACE, &settings, &padded(b"\x83\x41\x02/b"), &data, &cut, &odd].concat();
        let expected = [PREFACE, &settings, &padded(b"\x83\x41\x01u"), &data, &cut, &odd].concat();
        let check = async |sent: &[u8], size: usize, expected: &[u8]| {
            let (mut client, server) = tokio::io::duplex(size);
            let mut server = Renamed::new(server);
            let mut got = vec![];
            let write = async {
                client.write_all(sent).await.expect("written");
                drop(client);
            };
            let (_, read) = tokio::join!(write, server.read_to_end(&mut got));
            read.expect("read");
            assert_eq!(got, expected, "{size}");
        };
        for size in [1, 7, 4096] {
            check(&sent, size, &expected).await;
            let old = b"PRI / HTTP/1.1\r\nHost: /a/b\r\n\r\n";
            check(old, size, old).await;
        }
        check(b"PRI * HT", 4096, b"PRI * HT").await;
        check(&[PREFACE, &data[..5]].concat(), 4096, &[PREFACE, &data[..5]].concat()).await;
    }
}
