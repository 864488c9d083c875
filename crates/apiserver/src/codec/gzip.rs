//! A body as a gzip stream, compressed in pieces while it is sent.

use std::io::Write;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures::StreamExt;
use http_body::Frame;
use http_body_util::{BodyExt, BodyStream, StreamBody};

use crate::resource::Body;

/// The fastest level, as upstream: the aim is less traffic, not the smallest size.
pub fn compress(body: Body) -> Body {
    let encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let frames = BodyStream::new(body);
    let stream = futures::stream::unfold(Some((frames, encoder)), |state| async move {
        let (mut frames, mut encoder) = state?;
        loop {
            match frames.next().await {
                None => {
                    let last = encoder.finish().unwrap_or_default();
                    return Some((Ok(Frame::data(Bytes::from(last))), None));
                }
                Some(Err(error)) => return Some((Err(error), None)),
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    if let Err(error) = encoder.write_all(&data) {
                        return Some((Err(error.into()), None));
                    }
                    let out = std::mem::take(encoder.get_mut());
                    if !out.is_empty() {
                        return Some((Ok(Frame::data(Bytes::from(out))), Some((frames, encoder))));
                    }
                }
            }
        }
    });
    StreamBody::new(stream).boxed_unsync()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[tokio::test]
    async fn compressed_bodies_decompress_to_the_same_bytes() {
        let text = "abc".repeat(100_000);
        let body = compress(crate::codec::full(text.clone()));
        let packed = body.collect().await.expect("no errors").to_bytes();
        assert!(packed.len() < text.len() / 50);
        let mut unpacked = String::new();
        flate2::read::GzDecoder::new(&packed[..]).read_to_string(&mut unpacked).expect("gzip");
        assert_eq!(unpacked, text);
    }
}
