//! A client of logind over D-Bus: a lock that delays the machine's shutdown, and signals about it.
//!
//! In: the system bus's socket. Out: logind's maximum delay, a lock, signals.
//! It implements only the parts of D-Bus that this needs: authentication as this user, calls with string
//! arguments, signals, descriptors; little-endian messages only.
//! Upstream: `pkg/kubelet/nodeshutdown/systemd`.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::sys::socket::{ControlMessageOwned, MsgFlags, UnixAddr, recvmsg};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;

const BUS: Target = Target {
    name: "org.freedesktop.DBus",
    path: "/org/freedesktop/DBus",
    interface: "org.freedesktop.DBus",
};
const LOGIN: Target = Target {
    name: "org.freedesktop.login1",
    path: "/org/freedesktop/login1",
    interface: "org.freedesktop.login1.Manager",
};
const SIGNAL: &str = "PrepareForShutdown";
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// D-Bus allows more; messages of logind are smaller.
const LARGEST: usize = 1 << 20;

const CALL: u8 = 1;
const ERROR: u8 = 3;
const SIGNAL_KIND: u8 = 4;

struct Target {
    name: &'static str,
    path: &'static str,
    interface: &'static str,
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("D-Bus: {what}"))
}

/// Bytes with D-Bus's alignment.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn align(&mut self, to: usize) {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
    }

    fn number(&mut self, number: u32) {
        self.align(4);
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u32);
        self.0.extend_from_slice(text.as_bytes());
        self.0.push(0);
    }

    fn signature(&mut self, text: &str) {
        self.0.push(text.len() as u8);
        self.0.extend_from_slice(text.as_bytes());
        self.0.push(0);
    }

    /// A header field: a code and a variant.
    fn field(&mut self, code: u8, kind: &str, text: &str) {
        self.align(8);
        self.0.push(code);
        self.signature(kind);
        if kind == "g" { self.signature(text) } else { self.text(text) }
    }
}

/// A method call whose arguments are all strings.
fn encode_call(serial: u32, target: &Target, member: &str, arguments: &[&str]) -> Vec<u8> {
    let mut body = Writer::default();
    arguments.iter().for_each(|text| body.text(text));
    // The fields begin at byte 16, which has the alignment of byte 0.
    let mut fields = Writer::default();
    fields.field(1, "o", target.path);
    fields.field(2, "s", target.interface);
    fields.field(3, "s", member);
    fields.field(6, "s", target.name);
    if !arguments.is_empty() {
        fields.field(8, "g", &"s".repeat(arguments.len()));
    }
    let mut out = Writer(vec![b'l', CALL, 0, 1]);
    out.number(body.0.len() as u32);
    out.number(serial);
    out.number(fields.0.len() as u32);
    out.0.extend_from_slice(&fields.0);
    out.align(8);
    out.0.extend_from_slice(&body.0);
    out.0
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Message {
    kind: u8,
    member: String,
    reply_to: Option<u32>,
    body: Vec<u8>,
}

fn number_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn text_at(bytes: &[u8], at: usize) -> Option<(String, usize)> {
    let at = at.next_multiple_of(4);
    let end = (at + 4).checked_add(number_at(bytes, at)? as usize)?;
    let text = String::from_utf8_lossy(bytes.get(at + 4..end)?).into_owned();
    Some((text, end + 1))
}

/// The first message of `bytes` and its length; `None`: it is incomplete.
fn decode(bytes: &[u8]) -> io::Result<Option<(Message, usize)>> {
    let Some(head) = bytes.get(..16) else { return Ok(None) };
    if head[0] != b'l' {
        return Err(bad("a message that is not little-endian"));
    }
    let number = |at| number_at(head, at).unwrap_or(0) as usize;
    let (body, fields) = (number(4), number(12));
    if body > LARGEST || fields > LARGEST {
        return Err(bad("a message that is too large"));
    }
    let begin = (16 + fields).next_multiple_of(8);
    let Some(all) = bytes.get(..begin + body) else { return Ok(None) };
    let mut message = Message { kind: head[1], body: all[begin..].to_vec(), ..Message::default() };
    read_fields(&all[..16 + fields], &mut message).ok_or_else(|| bad("a damaged header"))?;
    Ok(Some((message, begin + body)))
}

fn read_fields(head: &[u8], message: &mut Message) -> Option<()> {
    let mut at = 16usize;
    while at < head.len() {
        at = at.next_multiple_of(8);
        let (code, length) = (*head.get(at)?, usize::from(*head.get(at + 1)?));
        let kind = *head.get(at + 2)?;
        at += 3 + length;
        match kind {
            b's' | b'o' => {
                let (text, end) = text_at(head, at)?;
                if code == 3 {
                    message.member = text;
                }
                at = end;
            }
            b'g' => at += usize::from(*head.get(at)?) + 2,
            b'u' => {
                at = at.next_multiple_of(4);
                if code == 5 {
                    message.reply_to = Some(number_at(head, at)?);
                }
                at += 4;
            }
            _ => return None,
        }
    }
    Some(())
}

/// A connection to the system bus.
pub struct Logind {
    stream: UnixStream,
    buffer: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
    serial: u32,
    /// Signals that arrived while the client waited for an answer.
    signals: VecDeque<bool>,
}

impl Logind {
    /// Connects, and subscribes to signals about shutdowns.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket).await?;
        let mut bus = Self {
            stream,
            buffer: vec![],
            descriptors: VecDeque::new(),
            serial: 0,
            signals: VecDeque::new(),
        };
        let user = nix::unistd::geteuid().to_string();
        let user: String = user.bytes().map(|byte| format!("{byte:02x}")).collect();
        bus.say(&format!("\0AUTH EXTERNAL {user}\r\n"), "OK ").await?;
        bus.say("NEGOTIATE_UNIX_FD\r\n", "AGREE_UNIX_FD").await?;
        bus.stream.write_all(b"BEGIN\r\n").await?;
        bus.call(&BUS, "Hello", &[]).await?;
        let rule = format!(
            "type='signal',interface='{}',member='{SIGNAL}',path='{}'",
            LOGIN.interface, LOGIN.path
        );
        bus.call(&BUS, "AddMatch", &[&rule]).await?;
        Ok(bus)
    }

    /// The maximum time that logind lets a lock delay a shutdown.
    pub async fn longest_delay(&mut self) -> io::Result<Duration> {
        let properties = Target { interface: "org.freedesktop.DBus.Properties", ..LOGIN };
        let asked = [LOGIN.interface, "InhibitDelayMaxUSec"];
        let answer = self.call(&properties, "Get", &asked).await?;
        // A variant: its signature, then the number at the next multiple of eight.
        let bytes = answer.body.get(8..16).filter(|_| answer.body.starts_with(b"\x01t"));
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        Ok(Duration::from_micros(u64::from_le_bytes(bytes.ok_or_else(|| bad("no number"))?)))
    }

    /// Takes a lock: the shutdown waits until it is closed, or until logind's maximum delay.
    pub async fn delay_shutdown(&mut self) -> io::Result<OwnedFd> {
        self.descriptors.clear();
        let arguments = ["shutdown", "kubelet", "Kubernetes operation", "delay"];
        self.call(&LOGIN, "Inhibit", &arguments).await?;
        self.descriptors.pop_front().ok_or_else(|| bad("an answer without its descriptor"))
    }

    /// The next signal: the shutdown starts (true), or was cancelled.
    pub async fn next(&mut self) -> io::Result<bool> {
        loop {
            if let Some(starts) = self.signals.pop_front() {
                return Ok(starts);
            }
            let message = self.message().await?;
            self.note(&message);
        }
    }

    fn note(&mut self, message: &Message) {
        if message.kind == SIGNAL_KIND && message.member == SIGNAL {
            self.signals.push_back(number_at(&message.body, 0).unwrap_or(0) != 0);
        }
    }

    async fn call(
        &mut self,
        target: &Target,
        member: &str,
        arguments: &[&str],
    ) -> io::Result<Message> {
        self.serial += 1;
        let serial = self.serial;
        self.stream.write_all(&encode_call(serial, target, member, arguments)).await?;
        let answer = async {
            loop {
                let message = self.message().await?;
                if message.reply_to == Some(serial) {
                    return Ok::<_, io::Error>(message);
                }
                self.note(&message);
            }
        };
        let answer = tokio::time::timeout(CALL_LIMIT, answer).await;
        let answer = answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        if answer.kind == ERROR {
            let why = text_at(&answer.body, 0).map_or_else(|| "refused".into(), |(text, _)| text);
            return Err(bad(&format!("{member}: {why}")));
        }
        Ok(answer)
    }

    /// Sends a line of the handshake, and checks the start of its answer.
    async fn say(&mut self, line: &str, expected: &str) -> io::Result<()> {
        self.stream.write_all(line.as_bytes()).await?;
        let end = loop {
            if let Some(at) = self.buffer.windows(2).position(|pair| pair == b"\r\n") {
                break at;
            }
            self.read().await?;
        };
        let answer: Vec<u8> = self.buffer.drain(..end + 2).collect();
        if answer.starts_with(expected.trim_end().as_bytes()) {
            return Ok(());
        }
        Err(bad(&format!("the bus answered {:?}", String::from_utf8_lossy(&answer))))
    }

    async fn message(&mut self) -> io::Result<Message> {
        loop {
            if let Some((message, length)) = decode(&self.buffer)? {
                self.buffer.drain(..length);
                return Ok(message);
            }
            self.read().await?;
        }
    }

    /// Reads more bytes, and the descriptors that come with them.
    async fn read(&mut self) -> io::Result<()> {
        let mut bytes = [0u8; 4096];
        let stream = &self.stream;
        let (length, descriptors) =
            stream.async_io(Interest::READABLE, || receive(stream.as_raw_fd(), &mut bytes)).await?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.buffer.extend_from_slice(&bytes[..length]);
        self.descriptors.extend(descriptors);
        Ok(())
    }
}

fn receive(socket: i32, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = nix::cmsg_space!([i32; 4]);
    let mut parts = [IoSliceMut::new(bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<UnixAddr>(socket, &mut parts, Some(&mut space), flags)?;
    let mut descriptors = vec![];
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel has just created these descriptors for us, and nothing else uses them.
            descriptors.extend(raw.into_iter().map(|raw| unsafe { OwnedFd::from_raw_fd(raw) }));
        }
    }
    Ok((message.bytes, descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_incomplete_calls() {
        let bytes = encode_call(7, &LOGIN, "Inhibit", &["shutdown", "a"]);
        let (message, length) = decode(&bytes).expect("well-formed").expect("whole");
        assert_eq!(length, bytes.len());
        assert_eq!((message.kind, message.member.as_str()), (CALL, "Inhibit"));
        let (first, end) = text_at(&message.body, 0).expect("a text");
        let (second, _) = text_at(&message.body, end).expect("a text");
        assert_eq!((first.as_str(), second.as_str()), ("shutdown", "a"));
        for short in [0, 15, 16, bytes.len() - 1] {
            assert_eq!(decode(&bytes[..short]).expect("nothing wrong"), None, "{short}");
        }
    }

    #[test]
    fn damaged_messages_are_errors() {
        let good = encode_call(1, &BUS, "Hello", &[]);
        let check = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            assert!(decode(&bytes).is_err(), "byte {at}");
        };
        check(0, b'B');
        check(7, 0x7f);
        check(15, 0x7f);
        // The type of the first header field.
        check(18, b'x');
    }
}
