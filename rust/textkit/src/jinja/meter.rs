//! What one rendering may use. A rendering has a thread of its own (see mod.rs), so its meter is thread-local and
//! starts at zero. Everything that grows with the data asks here first: work before it is done, memory before it is
//! taken. That is what makes a hostile template end with an error.

use std::cell::Cell;

use crate::failure::{Failure, Result};

/// Units of work: one is about one node evaluated, or WORK_BYTES bytes copied or looked at.
const MAX_WORK: u64 = 20_000_000;
const WORK_BYTES: usize = 64;
/// Bytes of values and output alive at one time.
const MAX_LIVE_BYTES: usize = 256 << 20;
/// Expressions, statements and macro calls inside each other.
const MAX_DEPTH: usize = 4000;

thread_local! {
    static WORK: Cell<u64> = const { Cell::new(0) };
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

pub fn work(units: usize) -> Result<()> {
    let total = WORK.get().saturating_add(units as u64);
    WORK.set(total);
    if total > MAX_WORK {
        return Err(Failure::exhausted(format!("template runs too long: more than {MAX_WORK} steps")));
    }
    Ok(())
}

/// Asks for work on so many bytes.
pub fn work_bytes(bytes: usize) -> Result<()> {
    work(bytes / WORK_BYTES)
}

/// Asks whether so many bytes more may be alive, and for the work of filling them.
pub fn room(bytes: usize) -> Result<()> {
    if LIVE.get().saturating_add(bytes) > MAX_LIVE_BYTES {
        return Err(Failure::exhausted(format!("template needs more than {MAX_LIVE_BYTES} bytes")));
    }
    work_bytes(bytes)
}

/// Books bytes that are alive from now on.
pub fn take(bytes: usize) {
    LIVE.set(LIVE.get().saturating_add(bytes));
}

pub fn release(bytes: usize) {
    LIVE.set(LIVE.get().saturating_sub(bytes));
}

/// One level deeper, until it is dropped.
pub struct Level(());

pub fn deeper() -> Result<Level> {
    work(1)?;
    let depth = DEPTH.get() + 1;
    if depth > MAX_DEPTH {
        return Err(Failure::exhausted(format!("template goes more than {MAX_DEPTH} levels deep")));
    }
    DEPTH.set(depth);
    Ok(Level(()))
}

impl Drop for Level {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}
