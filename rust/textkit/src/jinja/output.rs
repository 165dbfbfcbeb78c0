//! Output that is booked with the meter while it grows.

use super::meter;
use crate::failure::Result;

/// Appends to an output. What `out` holds stays booked until `collected` or the end of the rendering.
pub fn emit(out: &mut String, piece: &str) -> Result<()> {
    meter::room(piece.len())?;
    meter::take(piece.len());
    out.push_str(piece);
    Ok(())
}

/// Runs `body` on an output of its own.
pub fn collected(body: impl FnOnce(&mut String) -> Result<()>) -> Result<String> {
    let mut out = String::new();
    let result = body(&mut out);
    meter::release(out.len());
    result.map(|()| out)
}
