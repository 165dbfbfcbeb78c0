//! The functions that every template finds.

use std::cell::Cell;
use std::ffi::CString;
use std::rc::Rc;

use super::args::Args;
use super::eval::Interpreter;
use super::value::{list, text, Dict, Function, Namespace, Value};
use super::{meter, python};
use crate::failure::{Failure, Result};

/// As Jinja's sandbox has it.
const MAX_RANGE: i128 = 100_000;

pub fn find(name: &str) -> Option<Function> {
    Some(match name {
        "namespace" => Function::Namespace,
        "dict" => Function::Dict,
        "range" => Function::Range,
        "raise_exception" => Function::RaiseException,
        "strftime_now" => Function::StrftimeNow,
        "joiner" => Function::Joiner,
        "cycler" => Function::Cycler,
        _ => return None,
    })
}

pub fn call(interpreter: &Interpreter, function: Function, args: &Args) -> Result<Value> {
    match function {
        Function::Namespace => {
            let namespace = Rc::new(Namespace::default());
            for (key, value) in pairs(args)? {
                let Value::Str(name) = key else { return Err(Failure::invalid("namespace names must be strings")) };
                set_member(&namespace, &name, value)?;
            }
            interpreter.keep(namespace)
        }
        Function::Dict => Dict::new(pairs(args)?).map(Value::Dict),
        Function::Range => range(args),
        Function::RaiseException => Err(Failure::invalid(python::to_text(args.first()?)?)),
        Function::StrftimeNow => strftime_now(args.first_str()?),
        Function::Joiner => {
            let separator = args.get(0, "sep").cloned().map_or_else(|| text(", "), Ok)?;
            Ok(Value::Joiner(Rc::new((separator, Cell::new(false)))))
        }
        Function::Cycler => match list(args.positional.clone())? {
            Value::List(items) if !items.is_empty() => Ok(Value::Cycler(Rc::new((items, Cell::new(0))))),
            _ => Err(Failure::invalid("cycler needs at least one item")),
        },
    }
}

/// What dict() and namespace() are made of: a mapping or pairs, then keywords.
fn pairs(args: &Args) -> Result<Vec<(Value, Value)>> {
    let mut pairs = Vec::new();
    match args.positional.first() {
        None => {}
        Some(Value::Dict(dict)) => {
            meter::room(dict.entries().len() * 2 * size_of::<Value>())?;
            pairs.extend(dict.entries().iter().cloned());
        }
        Some(other) => {
            for pair in other.items()? {
                let mut pair = pair.items()?.into_iter();
                match (pair.next(), pair.next(), pair.next()) {
                    (Some(key), Some(value), None) => pairs.push((key, value)),
                    _ => return Err(Failure::invalid("dict() needs pairs")),
                }
            }
        }
    }
    for (name, value) in &args.named {
        pairs.push((text(name.as_str())?, value.clone()));
    }
    Ok(pairs)
}

pub fn set_member(namespace: &Namespace, name: &str, value: Value) -> Result<()> {
    if name.starts_with('_') {
        return Err(Failure::invalid(format!("namespace attribute '{name}' starts with an underscore")));
    }
    if !namespace.members.borrow().contains_key(name) {
        meter::room(name.len() + 100)?;
        meter::take(name.len() + 100);
    }
    // The old value is dropped after the borrow has ended.
    let _old = namespace.members.borrow_mut().insert(name.to_owned(), value);
    Ok(())
}

fn range(args: &Args) -> Result<Value> {
    let mut numbers = Vec::new();
    for value in args.positional.iter().take(4) {
        numbers.push(value.as_int().ok_or_else(|| Failure::invalid("range() needs whole numbers"))?);
    }
    let (start, stop, step) = match numbers[..] {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step] if step != 0 => (start, stop, step),
        _ => return Err(Failure::invalid("range() needs one to three numbers and a step other than 0")),
    };
    let span = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
    let step_size = step.unsigned_abs() as i128;
    let length = if span <= 0 { 0 } else { (span - 1) / step_size.max(1) + 1 };
    if length > MAX_RANGE {
        return Err(Failure::exhausted(format!("range of {length} numbers is larger than {MAX_RANGE}")));
    }
    meter::room(length as usize * size_of::<Value>())?;
    list((0..length).map(|i| Value::Int(start + i * step)).collect())
}

/// Local time by the C library, as Python does it.
fn strftime_now(format: &str) -> Result<Value> {
    if format.len() > 1000 {
        return Err(Failure::invalid("time format is longer than 1000 bytes"));
    }
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    // %f is Python's own: microseconds.
    let format = format.replace("%f", &format!("{:06}", since_epoch.subsec_micros()));
    if format.is_empty() {
        return text("");
    }
    let format = CString::new(format).map_err(|_| Failure::invalid("time format holds a zero byte"))?;
    let now = since_epoch.as_secs() as libc::time_t;
    let mut buffer = vec![0u8; 64 * 1024];
    // SAFETY: both structs are the C library's own, and strftime is told the buffer's size.
    let length = unsafe {
        let mut broken_down: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&now, &mut broken_down).is_null() {
            return Err(Failure::invalid("no local time"));
        }
        libc::strftime(buffer.as_mut_ptr().cast(), buffer.len(), format.as_ptr(), &broken_down)
    };
    text(String::from_utf8_lossy(&buffer[..length]).into_owned())
}
