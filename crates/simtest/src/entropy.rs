//! The order of hash maps, and of the branches of `select!`, as the seed has them.
//!
//! The standard library and tokio take their keys from the system's `getrandom`, which a program may define
//! itself: the standard library's symbol is weak for that purpose. Here a thread that was seeded gets a stream
//! of its own, and any other thread what the kernel gives.
//!
//! Invariant: a seeded thread asks the kernel for nothing. Tokio also counts its runtimes in the process:
//! each seed runs in a process of its own ([`crate::rounds`]).

use std::cell::Cell;
use std::ffi::{c_long, c_uint, c_void};

thread_local! {
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// From now on this thread's randomness derives from `seed`. Call it before the thread makes its first map.
pub fn seed(seed: u64) {
    STATE.set(Some(seed));
}

/// The C library's function of this name, for the whole program.
///
/// # Safety
/// `buffer` has room for `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut c_void, length: usize, flags: c_uint) -> isize {
    let Ok(Some(state)) = STATE.try_with(Cell::get) else {
        // SAFETY: the caller's buffer, as the caller gave it.
        let got =
            unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, c_long::from(flags)) };
        return isize::try_from(got).unwrap_or(-1);
    };
    // SAFETY: the caller's buffer has room for so many bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length) };
    let mut state = state;
    for chunk in bytes.chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        chunk.copy_from_slice(&mixed(state).to_le_bytes()[..chunk.len()]);
    }
    STATE.set(Some(state));
    isize::try_from(length).unwrap_or(isize::MAX)
}

/// SplitMix64's output function.
fn mixed(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    fn order(seed: u64) -> Vec<u32> {
        let run = move || {
            super::seed(seed);
            (0..50).collect::<HashSet<u32>>().into_iter().collect()
        };
        std::thread::spawn(run).join().expect("no panic")
    }

    #[test]
    fn a_seed_gives_maps_one_order() {
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }
}
