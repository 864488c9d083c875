//! A disk that forgets at a power cut what was not flushed, served to QEMU by the NBD protocol.
//!
//! In: requests on a Unix socket, a power cut. Out: a file with exactly the bytes that a real disk may
//! still have afterwards.
//! A killed QEMU loses the machine's memory, but the host's page cache keeps every write: such a cut never
//! tests whether a program flushes. Here writes stay in a list until a flush. At [`Disk::cut`] each of
//! them is kept, lost, or torn between two sectors, by a seeded choice, and in that order.
//!
//! ```text
//!  write ──► unflushed list ──flush, FUA──► file        read = file, then the list over it
//!                  └──────cut: kept | lost | torn──► file
//! ```
//!
//! The part of the protocol that QEMU needs: fixed newstyle negotiation, `GO`, simple replies.
//! Upstream: https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::sh::Outcome;

const SECTOR: usize = 512;
/// Bytes of the list; the oldest writes go to the file beyond it, as in a disk with a small cache.
const CACHE: usize = 64 << 20;
/// QEMU sends at most 32 MiB at once.
const LARGEST: u32 = 64 << 20;

const MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
/// Fixed newstyle, no zeroes.
const HANDSHAKE: u16 = 3;
/// Has flags, sends flush, sends FUA.
const TRANSMISSION: u16 = 1 | 4 | 8;
const FUA: u16 = 1;
const EINVAL: u32 = 22;

/// The disk, shared with the threads that serve it.
pub struct Disk {
    state: Arc<Mutex<State>>,
    socket: PathBuf,
}

struct State {
    file: File,
    size: u64,
    /// Writes since the last flush, oldest first.
    unflushed: Vec<(u64, Vec<u8>)>,
    bytes: usize,
    /// Counts cuts: connections of a machine without power have no effect.
    power: u64,
}

/// What a cut did with the writes that were not flushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    pub kept: usize,
    pub lost: usize,
    pub torn: usize,
}

impl Disk {
    /// Serves a new, empty disk.
    pub fn create(directory: &Path, bytes: u64) -> Outcome<Self> {
        let told = |error: io::Error| format!("the disk in {}: {error}", directory.display());
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = options.open(directory.join("forgetful.raw")).map_err(told)?;
        file.set_len(bytes).map_err(told)?;
        let state = State { file, size: bytes, unflushed: Vec::new(), bytes: 0, power: 0 };
        let state = Arc::new(Mutex::new(state));
        let socket = directory.join("nbd");
        let listener = UnixListener::bind(&socket).map_err(told)?;
        let shared = state.clone();
        // Ends with the process: it holds nothing that outlives it.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = shared.clone();
                std::thread::spawn(move || serve(stream, &shared));
            }
        });
        Ok(Self { state, socket })
    }

    /// The disk for [`super::machine::Hardware::drives`].
    pub fn drive(&self) -> String {
        format!(
            "file=nbd+unix:///?socket={},if=virtio,format=raw,cache=none",
            self.socket.display()
        )
    }

    /// Decides about every write that was not flushed. Call it when the machine is dead.
    pub fn cut(&self, seed: u64) -> Outcome<Lost> {
        let mut state = self.state.lock().expect("no panic while held");
        state.power += 1;
        state.cut(seed).map_err(|error| format!("the forgetful disk: {error}"))
    }
}

impl State {
    fn cut(&mut self, seed: u64) -> io::Result<Lost> {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut lost = Lost::default();
        for (at, data) in std::mem::take(&mut self.unflushed) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let sectors = data.len() / SECTOR;
            match random % 3 {
                0 => lost.lost += 1,
                1 if sectors > 1 => {
                    let kept = 1 + (random >> 8) as usize % (sectors - 1);
                    self.file.write_all_at(&data[..kept * SECTOR], at)?;
                    lost.torn += 1;
                }
                _ => {
                    self.file.write_all_at(&data, at)?;
                    lost.kept += 1;
                }
            }
        }
        self.bytes = 0;
        Ok(lost)
    }

    fn flush(&mut self) -> io::Result<()> {
        for (at, data) in self.unflushed.drain(..) {
            self.file.write_all_at(&data, at)?;
        }
        self.bytes = 0;
        Ok(())
    }

    fn write(&mut self, at: u64, data: Vec<u8>) -> io::Result<()> {
        self.bytes += data.len();
        self.unflushed.push((at, data));
        let mut first = 0;
        while self.bytes > CACHE {
            let (at, data) = &self.unflushed[first];
            self.file.write_all_at(data, *at)?;
            self.bytes -= data.len();
            first += 1;
        }
        self.unflushed.drain(..first);
        Ok(())
    }

    fn read(&self, at: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(data, at)?;
        let end = at + data.len() as u64;
        for (start, written) in &self.unflushed {
            let stop = start + written.len() as u64;
            let (from, to) = ((*start).max(at), stop.min(end));
            if from < to {
                let into = (from - at) as usize..(to - at) as usize;
                let out_of = (from - start) as usize..(to - start) as usize;
                data[into].copy_from_slice(&written[out_of]);
            }
        }
        Ok(())
    }
}

fn serve(mut stream: UnixStream, state: &Mutex<State>) {
    let (size, power) = {
        let state = state.lock().expect("no panic while held");
        (state.size, state.power)
    };
    let ended = negotiate(&mut stream, size).and_then(|goes| match goes {
        true => transmit(&mut stream, state, power),
        false => Ok(()),
    });
    if let Err(error) = ended
        && error.kind() != io::ErrorKind::UnexpectedEof
    {
        println!("the forgetful disk lost its machine: {error}");
    }
}

/// False: the client left.
fn negotiate(stream: &mut UnixStream, size: u64) -> io::Result<bool> {
    const EXPORT_NAME: u32 = 1;
    const ABORT: u32 = 2;
    const INFO: u32 = 6;
    const GO: u32 = 7;
    const ACKNOWLEDGED: u32 = 1;
    const IS_INFO: u32 = 3;
    const UNSUPPORTED: u32 = (1 << 31) + 1;
    stream.write_all(&MAGIC.to_be_bytes())?;
    stream.write_all(&OPTION_MAGIC.to_be_bytes())?;
    stream.write_all(&HANDSHAKE.to_be_bytes())?;
    number(stream)?;
    loop {
        let mut magic = [0; 8];
        stream.read_exact(&mut magic)?;
        let (option, length) = (number(stream)?, number(stream)?);
        if u64::from_be_bytes(magic) != OPTION_MAGIC || length > LARGEST {
            return Err(io::Error::other("no option of NBD"));
        }
        io::copy(&mut Read::by_ref(stream).take(length.into()), &mut io::sink())?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut out = OPTION_REPLY.to_be_bytes().to_vec();
            for part in [option, kind, data.len() as u32] {
                out.extend(part.to_be_bytes());
            }
            out.extend(data);
            stream.write_all(&out)
        };
        match option {
            INFO | GO => {
                let mut export = 0_u16.to_be_bytes().to_vec();
                export.extend(size.to_be_bytes());
                export.extend(TRANSMISSION.to_be_bytes());
                reply(IS_INFO, &export)?;
                reply(ACKNOWLEDGED, &[])?;
                if option == GO {
                    return Ok(true);
                }
            }
            EXPORT_NAME => {
                stream.write_all(&size.to_be_bytes())?;
                stream.write_all(&TRANSMISSION.to_be_bytes())?;
                return Ok(true);
            }
            ABORT => {
                reply(ACKNOWLEDGED, &[])?;
                return Ok(false);
            }
            _ => reply(UNSUPPORTED, &[])?,
        }
    }
}

fn transmit(stream: &mut UnixStream, state: &Mutex<State>, power: u64) -> io::Result<()> {
    const READ: u16 = 0;
    const WRITE: u16 = 1;
    const DISCONNECT: u16 = 2;
    const FLUSH: u16 = 3;
    loop {
        let mut head = [0; 28];
        stream.read_exact(&mut head)?;
        let short = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let magic = u32::from_be_bytes(head[..4].try_into().expect("four bytes"));
        let at = u64::from_be_bytes(head[16..24].try_into().expect("eight bytes"));
        let length = u32::from_be_bytes(head[24..].try_into().expect("four bytes"));
        let (flags, kind) = (short(4), short(6));
        if magic != REQUEST || length > LARGEST {
            return Err(io::Error::other("no request of NBD"));
        }
        let mut data = vec![0; if kind == READ || kind == WRITE { length as usize } else { 0 }];
        if kind == WRITE {
            stream.read_exact(&mut data)?;
        }
        let mut state = state.lock().expect("no panic while held");
        if kind == DISCONNECT || state.power != power {
            return Ok(());
        }
        let inside = at.checked_add(length.into()).is_some_and(|end| end <= state.size);
        let error = match kind {
            READ | WRITE if !inside => EINVAL,
            READ => code(state.read(at, &mut data)),
            WRITE => {
                let written = state.write(at, std::mem::take(&mut data));
                code(written.and_then(|()| if flags & FUA == 0 { Ok(()) } else { state.flush() }))
            }
            FLUSH => code(state.flush()),
            _ => EINVAL,
        };
        drop(state);
        stream.write_all(&REPLY.to_be_bytes())?;
        stream.write_all(&error.to_be_bytes())?;
        stream.write_all(&head[8..16])?;
        if error == 0 {
            stream.write_all(&data)?;
        }
    }
}

/// An error's number in a reply: 0 for success, EIO for the rest.
fn code(outcome: io::Result<()>) -> u32 {
    const EIO: u32 = 5;
    outcome.map_or(EIO, |()| 0)
}

fn number(stream: &mut UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_disk(test: impl FnOnce(&Disk, &Path)) {
        let directory = crate::sh::temporary_directory("disk").expect("a directory");
        let disk = Disk::create(&directory, 1 << 20).expect("a disk");
        test(&disk, &directory);
        std::fs::remove_dir_all(directory).expect("removed");
    }

    #[test]
    fn flushed_bytes_survive_every_cut_and_others_do_not() {
        with_disk(|disk, _| {
            let mut changed = 0;
            for seed in 0..64 {
                let mut state = disk.state.lock().expect("held by nobody");
                state.write(0, vec![1; 4096]).expect("written");
                state.flush().expect("flushed");
                state.write(4096, vec![seed as u8 + 1; 4096]).expect("written");
                state.write(0, vec![2; SECTOR]).expect("written");
                let mut seen = vec![0; 4096];
                state.read(0, &mut seen).expect("read");
                assert_eq!((seen[0], seen[SECTOR]), (2, 1), "the newest bytes are read");
                state.cut(seed).expect("cut");
                state.read(0, &mut seen).expect("read");
                assert!(seen[SECTOR..].iter().all(|byte| *byte == 1), "flushed bytes stay");
                changed += usize::from(seen[0] == 1);
            }
            assert!((8..56).contains(&changed), "{changed} of 64 writes were lost");
        });
    }

    /// The same conversation as QEMU's, over the socket.
    #[test]
    fn a_client_reads_its_writes_and_loses_them_at_a_cut() {
        with_disk(|disk, directory| {
            let mut stream = UnixStream::connect(directory.join("nbd")).expect("connected");
            let mut hello = [0; 18];
            stream.read_exact(&mut hello).expect("a greeting");
            stream.write_all(&3_u32.to_be_bytes()).expect("flags");
            let mut go = OPTION_MAGIC.to_be_bytes().to_vec();
            go.extend([7_u32, 6].iter().flat_map(|part| part.to_be_bytes()));
            go.extend([0; 6]);
            stream.write_all(&go).expect("go");
            let mut replies = [0; 20 + 12 + 20];
            stream.read_exact(&mut replies).expect("an export and an acknowledgement");
            assert_eq!(replies[22..30], (1_u64 << 20).to_be_bytes());
            let mut ask = |kind: u16, at: u64, length: u32, data: &[u8], answer: usize| {
                let mut out = REQUEST.to_be_bytes().to_vec();
                out.extend([0, 0]);
                out.extend(kind.to_be_bytes());
                out.extend(7_u64.to_be_bytes());
                out.extend(at.to_be_bytes());
                out.extend(length.to_be_bytes());
                out.extend(data);
                stream.write_all(&out).expect("sent");
                let mut back = vec![0; 16 + answer];
                stream.read_exact(&mut back).expect("answered");
                (u32::from_be_bytes([back[4], back[5], back[6], back[7]]), back[16..].to_vec())
            };
            assert_eq!(ask(1, 512, 512, &[9; 512], 0).0, 0);
            assert_eq!(ask(0, 512, 512, &[], 512), (0, vec![9; 512]));
            assert_eq!(ask(3, 0, 0, &[], 0).0, 0, "flushed");
            assert_eq!(ask(1, 1 << 20, 512, &[9; 512], 0).0, EINVAL, "beyond the end");
            assert_eq!(disk.cut(1).expect("cut"), Lost::default(), "all was flushed");
        });
    }
}
