//! What can go wrong, and the wall that keeps panics inside the library.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Once;

/// Numbers as in textkit.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum Status {
    Ok = 0,
    InvalidArgument = 1,
    CorruptData = 2,
    Unsupported = 3,
    ResourceExhausted = 4,
    Internal = 5,
}

#[derive(Clone, Debug)]
pub struct Failure {
    /// The message names the template line already.
    pub located: bool,
    pub status: Status,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn new(status: Status, message: impl Into<String>) -> Failure {
        Failure { located: false, status, message: message.into() }
    }

    pub fn invalid(message: impl Into<String>) -> Failure {
        Failure::new(Status::InvalidArgument, message)
    }

    /// Names the template line, once: the innermost.
    pub fn at_line(mut self, line: impl std::fmt::Display) -> Failure {
        if !self.located {
            self.message = format!("template line {line}: {}", self.message);
            self.located = true;
        }
        self
    }

    pub fn corrupt(message: impl Into<String>) -> Failure {
        Failure::new(Status::CorruptData, message)
    }

    pub fn exhausted(message: impl Into<String>) -> Failure {
        Failure::new(Status::ResourceExhausted, message)
    }
}

/// Runs `body`; a panic becomes a failure. The panic hook is this library's own copy (a cdylib has its own standard
/// library), so silencing it touches nobody else.
pub fn contained<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    static SILENCE: Once = Once::new();
    SILENCE.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        Err(Failure::new(Status::Internal, format!("panic: {text}")))
    })
}
