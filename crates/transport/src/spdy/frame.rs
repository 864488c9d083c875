//! SPDY/3.1 frames.
//!
//! ```text
//! control  1|version 3 (15 bits) type (16) │ flags (8) length (24) │ payload
//! data     0|stream (31)                   │ flags (8) length (24) │ payload
//! ```

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::Error;
use super::headers::{Deflater, Headers, Inflater};

pub(super) const FIN: u8 = 1;

const VERSION: u16 = 0x8003;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const SETTINGS: u16 = 4;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;
const WINDOW_UPDATE: u16 = 9;

/// The limit on a control frame.
const CONTROL_BYTES: usize = 64 << 10;
/// Data is passed on in chunks of this size, independent of the frame's size.
pub(super) const PIECE: usize = 32 << 10;

pub(super) const PROTOCOL_ERROR: u32 = 1;
pub(super) const INVALID_STREAM: u32 = 2;
pub(super) const REFUSED_STREAM: u32 = 3;
pub(super) const CANCEL: u32 = 5;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    SynStream {
        stream: u32,
        headers: Headers,
        fin: bool,
    },
    SynReply {
        stream: u32,
        headers: Headers,
        fin: bool,
    },
    RstStream {
        stream: u32,
        status: u32,
    },
    Ping {
        id: u32,
    },
    GoAway {
        last: u32,
    },
    /// A chunk of a data frame; `fin` is set on the last chunk only.
    Data {
        stream: u32,
        data: Bytes,
        fin: bool,
    },
    /// Settings, window updates, later headers: read and ignored. Neither upstream's library nor
    /// this one sends windows; the stream's pipe is the flow control.
    Other,
}

/// Reads frames. Not cancel-safe: one task reads until the end.
pub(super) struct Reader<R> {
    io: R,
    inflater: Inflater,
    /// The current data frame: stream, bytes left, whether it ends the stream.
    data: Option<(u32, usize, bool)>,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    pub(super) fn new(io: R) -> Self {
        Self { io, inflater: Inflater::new(), data: None }
    }

    /// The next frame; `None` at a regular end.
    pub(super) async fn next(&mut self) -> Result<Option<Frame>, Error> {
        if let Some((stream, left, fin)) = self.data.take() {
            return self.piece(stream, left, fin).await.map(Some);
        }
        let mut head = [0; 8];
        if self.io.read(&mut head[..1]).await? == 0 {
            return Ok(None);
        }
        self.io.read_exact(&mut head[1..]).await?;
        let flags = head[4];
        let length = u32::from_be_bytes([0, head[5], head[6], head[7]]) as usize;
        if head[0] & 0x80 == 0 {
            let stream = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
            return self.piece(stream, length, flags & FIN != 0).await.map(Some);
        }
        if u16::from_be_bytes([head[0], head[1]]) != VERSION {
            return Err(Error::Protocol("not SPDY/3"));
        }
        if length > CONTROL_BYTES {
            return Err(Error::Protocol("a control frame is too long"));
        }
        let mut payload = vec![0; length];
        self.io.read_exact(&mut payload).await?;
        let kind = u16::from_be_bytes([head[2], head[3]]);
        self.control(kind, flags & FIN != 0, &payload).map(Some)
    }

    async fn piece(&mut self, stream: u32, left: usize, fin: bool) -> Result<Frame, Error> {
        let mut data = BytesMut::zeroed(left.min(PIECE));
        self.io.read_exact(&mut data).await?;
        let left = left - data.len();
        if left > 0 {
            self.data = Some((stream, left, fin));
        }
        Ok(Frame::Data { stream, data: data.freeze(), fin: fin && left == 0 })
    }

    fn control(&mut self, kind: u16, fin: bool, payload: &[u8]) -> Result<Frame, Error> {
        let number = |index: usize| -> Result<u32, Error> {
            let four = payload.get(index * 4..index * 4 + 4);
            let four = four.ok_or(Error::Protocol("a control frame ends early"))?;
            Ok(u32::from_be_bytes([four[0], four[1], four[2], four[3]]))
        };
        let stream = || number(0).map(|id| id & 0x7fff_ffff);
        let block = |from: usize| payload.get(from..).ok_or(Error::Protocol("no header block"));
        Ok(match kind {
            SYN_STREAM => {
                let headers = self.inflater.read(block(10)?)?;
                Frame::SynStream { stream: stream()?, headers, fin }
            }
            SYN_REPLY => {
                let headers = self.inflater.read(block(4)?)?;
                Frame::SynReply { stream: stream()?, headers, fin }
            }
            HEADERS => {
                // All header blocks of a connection are one zlib stream: this one must be inflated, too.
                self.inflater.read(block(4)?)?;
                Frame::Other
            }
            RST_STREAM => Frame::RstStream { stream: stream()?, status: number(1)? },
            PING => Frame::Ping { id: number(0)? },
            GOAWAY => Frame::GoAway { last: stream()? },
            SETTINGS | WINDOW_UPDATE => Frame::Other,
            _ => return Err(Error::Protocol("an unknown control frame")),
        })
    }
}

/// Encodes frames, in the order in which they are sent.
pub(super) struct Encoder {
    deflater: Deflater,
}

impl Encoder {
    pub(super) fn new() -> Self {
        Self { deflater: Deflater::new() }
    }

    pub(super) fn encode(&mut self, frame: &Frame, out: &mut BytesMut) {
        let flag = |fin: &bool| if *fin { FIN } else { 0 };
        match frame {
            Frame::SynStream { stream, headers, fin } => {
                let block = self.deflater.write(headers);
                control(out, SYN_STREAM, flag(fin), 10 + block.len());
                out.put_u32(*stream);
                // No associated stream, priority 0, no slot.
                out.put_u32(0);
                out.put_u16(0);
                out.put_slice(&block);
            }
            Frame::SynReply { stream, headers, fin } => {
                let block = self.deflater.write(headers);
                control(out, SYN_REPLY, flag(fin), 4 + block.len());
                out.put_u32(*stream);
                out.put_slice(&block);
            }
            Frame::RstStream { stream, status } => {
                control(out, RST_STREAM, 0, 8);
                out.put_u32(*stream);
                out.put_u32(*status);
            }
            Frame::Ping { id } => {
                control(out, PING, 0, 4);
                out.put_u32(*id);
            }
            Frame::GoAway { last } => {
                control(out, GOAWAY, 0, 8);
                out.put_u32(*last);
                out.put_u32(0);
            }
            Frame::Data { stream, data, fin } => {
                out.put_u32(*stream);
                out.put_u32(u32::from(flag(fin)) << 24 | data.len() as u32);
                out.put_slice(data);
            }
            Frame::Other => {}
        }
    }
}

fn control(out: &mut BytesMut, kind: u16, flags: u8, length: usize) {
    out.put_u16(VERSION);
    out.put_u16(kind);
    out.put_u32(u32::from(flags) << 24 | length as u32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_round_trip() {
        let headers = vec![("port".to_owned(), "80".to_owned())];
        let frames = [
            Frame::SynStream { stream: 1, headers: headers.clone(), fin: false },
            Frame::SynReply { stream: 1, headers, fin: true },
            Frame::Data { stream: 1, data: Bytes::from_static(b"abc"), fin: true },
            Frame::RstStream { stream: 3, status: CANCEL },
            Frame::Ping { id: 7 },
            Frame::GoAway { last: 3 },
        ];
        let (mut encoder, mut bytes) = (Encoder::new(), BytesMut::new());
        frames.iter().for_each(|frame| encoder.encode(frame, &mut bytes));
        let mut reader = Reader::new(&bytes[..]);
        for frame in frames {
            assert_eq!(reader.next().await.expect("reads"), Some(frame));
        }
        assert_eq!(reader.next().await.expect("a clean end"), None);
    }

    #[tokio::test]
    async fn long_data_comes_in_pieces_and_ends_once() {
        let data = Bytes::from(vec![7; PIECE * 2 + 5]);
        let (mut encoder, mut bytes) = (Encoder::new(), BytesMut::new());
        encoder.encode(&Frame::Data { stream: 1, data: data.clone(), fin: true }, &mut bytes);
        let mut reader = Reader::new(&bytes[..]);
        let (mut got, mut ends) = (vec![], vec![]);
        while let Some(Frame::Data { data, fin, .. }) = reader.next().await.expect("reads") {
            got.extend_from_slice(&data);
            ends.push(fin);
        }
        assert_eq!((got.as_slice(), ends), (&data[..], vec![false, false, true]));
    }

    #[tokio::test]
    async fn invalid_frames_are_errors() {
        let check = async |bytes: &[u8]| {
            assert!(Reader::new(bytes).next().await.is_err(), "{bytes:?}");
        };
        check(b"GET / HT").await;
        check(&[0x80, 2, 0, 1, 0, 0, 0, 0]).await;
        check(&[0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff]).await;
        check(&[0x80, 3, 0, 6, 0, 0, 0, 2, 1, 1]).await;
    }
}
