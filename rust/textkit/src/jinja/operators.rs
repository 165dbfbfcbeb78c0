//! Python's operators, subscripts and comparisons.

use std::cmp::Ordering;
use std::rc::Rc;

use minijinja::machinery::ast::BinOpKind;

use super::value::{list, text, tuple, Value};
use super::{meter, methods, python};
use crate::failure::{Failure, Result};

pub fn attribute(object: &Value, name: &str) -> Result<Value> {
    let method = || Ok(Value::Method(Rc::new((object.clone(), super::value::Str::new(name)))));
    match object {
        Value::Undefined => Err(Failure::invalid(format!("no attribute '{name}' of an undefined value"))),
        Value::Dict(_) if methods::DICT.contains(&name) => method(),
        Value::Dict(dict) => Ok(dict.get_str(name).cloned().unwrap_or(Value::Undefined)),
        Value::Str(_) if methods::STR.contains(&name) => method(),
        Value::List(_) if methods::LIST.contains(&name) => method(),
        Value::Namespace(namespace) => Ok(namespace.members.borrow().get(name).cloned().unwrap_or(Value::Undefined)),
        Value::Loop(state) => {
            let (at, length) = (state.at.get(), state.items.len());
            let number = |n: usize| Ok(Value::Int(n as i128));
            match name {
                "index" => number(at + 1),
                "index0" => number(at),
                "revindex" => number(length - at),
                "revindex0" => number(length - at - 1),
                "length" => number(length),
                "depth" => number(state.depth + 1),
                "depth0" => number(state.depth),
                "first" => Ok(Value::Bool(at == 0)),
                "last" => Ok(Value::Bool(at + 1 == length)),
                "previtem" => Ok(at.checked_sub(1).map_or(Value::Undefined, |at| state.items[at].clone())),
                "nextitem" => Ok(state.items.get(at + 1).cloned().unwrap_or(Value::Undefined)),
                "cycle" | "changed" => method(),
                _ => Ok(Value::Undefined),
            }
        }
        Value::Cycler(cycler) => match name {
            "current" => Ok(cycler.0[cycler.1.get()].clone()),
            "next" | "reset" => method(),
            _ => Ok(Value::Undefined),
        },
        _ => Ok(Value::Undefined),
    }
}

pub fn item(object: &Value, key: &Value) -> Result<Value> {
    match (object, key) {
        (Value::Undefined, _) => return Err(Failure::invalid("no item of an undefined value")),
        (Value::Dict(dict), _) => {
            if let Some(value) = dict.get(key)? {
                return Ok(value.clone());
            }
        }
        (Value::List(items), _) => {
            if let Some(at) = key.as_int() {
                return Ok(index(at, items.len()).map_or(Value::Undefined, |at| items[at].clone()));
            }
        }
        (Value::Str(s), _) => {
            if let Some(at) = key.as_int() {
                meter::work_bytes(s.len())?;
                let found = index(at, s.chars().count()).and_then(|at| s.chars().nth(at));
                return found.map_or(Ok(Value::Undefined), |c| text(c));
            }
        }
        _ => {}
    }
    match key {
        Value::Str(name) => attribute(object, name),
        _ => Ok(Value::Undefined),
    }
}

/// Counts from the end when negative.
fn index(at: i128, length: usize) -> Option<usize> {
    let at = if at < 0 { at + length as i128 } else { at };
    usize::try_from(at).ok().filter(|at| *at < length)
}

pub fn slice(object: &Value, bounds: [Value; 3]) -> Result<Value> {
    let mut numbers = [None; 3];
    for (number, bound) in numbers.iter_mut().zip(&bounds) {
        *number = match bound {
            Value::None => None,
            other => Some(other.as_int().ok_or_else(|| Failure::invalid("slice bounds must be whole numbers"))?),
        };
    }
    let step = numbers[2].unwrap_or(1);
    if step == 0 {
        return Err(Failure::invalid("slice step cannot be zero"));
    }
    let (characters, items);
    let length = match object {
        Value::Str(s) => {
            meter::room(s.len() * 4)?;
            characters = s.chars().collect::<Vec<_>>();
            items = None;
            characters.len()
        }
        Value::List(found) => {
            characters = Vec::new();
            items = Some(found);
            found.len()
        }
        Value::Undefined => return Err(Failure::invalid("no slice of an undefined value")),
        _ => return Ok(Value::Undefined),
    } as i128;
    // Python's rules: bounds are clamped to what the direction can reach.
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let clamp = |bound: Option<i128>, otherwise: i128| match bound {
        None => otherwise,
        Some(b) => (if b < 0 { b.saturating_add(length) } else { b }).clamp(low, high),
    };
    let (mut at, stop) = if step > 0 {
        (clamp(numbers[0], low), clamp(numbers[1], high))
    } else {
        (clamp(numbers[0], high), clamp(numbers[1], low))
    };
    let mut picked = Vec::new();
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        meter::work(1)?;
        picked.push(at as usize);
        at = at.saturating_add(step);
    }
    match items {
        Some(items) => {
            let picked = picked.into_iter().map(|at| items[at].clone()).collect();
            if items.is_tuple() {
                tuple(picked)
            } else {
                list(picked)
            }
        }
        None => text(picked.into_iter().map(|at| characters[at]).collect::<String>()),
    }
}

fn unsupported(symbol: &str, left: &Value, right: &Value) -> Failure {
    match (left, right) {
        (Value::Undefined, _) | (_, Value::Undefined) => Failure::invalid(format!("operand of {symbol} is undefined")),
        _ => Failure::invalid(format!(
            "unsupported operand types for {symbol}: '{}' and '{}'",
            left.type_name(),
            right.type_name()
        )),
    }
}

pub fn overflow() -> Failure {
    Failure::invalid("number is too large")
}

pub fn negate(value: &Value) -> Result<Value> {
    match value {
        Value::Float(f) => Ok(Value::Float(-f)),
        _ => match value.as_int() {
            Some(i) => i.checked_neg().map(Value::Int).ok_or_else(overflow),
            None => Err(Failure::invalid(format!("bad operand type for unary -: '{}'", value.type_name()))),
        },
    }
}

pub fn binary(op: BinOpKind, left: &Value, right: &Value) -> Result<Value> {
    match op {
        BinOpKind::Add => add(left, right),
        BinOpKind::Mul => multiply(left, right),
        BinOpKind::Rem => match left {
            Value::Str(format) => text(python::percent_format(format, right)?),
            _ => arithmetic(op, "%", left, right),
        },
        BinOpKind::Sub => arithmetic(op, "-", left, right),
        BinOpKind::Div => arithmetic(op, "/", left, right),
        BinOpKind::FloorDiv => arithmetic(op, "//", left, right),
        BinOpKind::Pow => arithmetic(op, "**", left, right),
        BinOpKind::Concat => {
            let mut joined = python::to_text(left)?;
            let right = python::to_text(right)?;
            meter::room(joined.len() + right.len())?;
            joined.push_str(&right);
            text(joined)
        }
        BinOpKind::Eq => equal(left, right).map(Value::Bool),
        BinOpKind::Ne => equal(left, right).map(|same| Value::Bool(!same)),
        BinOpKind::Lt => compare("<", left, right).map(|o| Value::Bool(o == Some(Ordering::Less))),
        BinOpKind::Gt => compare(">", left, right).map(|o| Value::Bool(o == Some(Ordering::Greater))),
        BinOpKind::Lte => compare("<=", left, right).map(|o| Value::Bool(o.is_some_and(Ordering::is_le))),
        BinOpKind::Gte => compare(">=", left, right).map(|o| Value::Bool(o.is_some_and(Ordering::is_ge))),
        BinOpKind::In => contains(right, left).map(Value::Bool),
        BinOpKind::ScAnd | BinOpKind::ScOr => unreachable!("the evaluator does these"),
    }
}

pub fn add(left: &Value, right: &Value) -> Result<Value> {
    match (left, right) {
        (Value::Str(a), Value::Str(b)) => {
            meter::room(a.len() + b.len())?;
            text([&**a, &**b].concat())
        }
        (Value::List(a), Value::List(b)) if a.is_tuple() == b.is_tuple() => {
            meter::room((a.len() + b.len()) * size_of::<Value>())?;
            let joined = [&**a, &**b].concat();
            if a.is_tuple() {
                tuple(joined)
            } else {
                list(joined)
            }
        }
        _ => arithmetic(BinOpKind::Add, "+", left, right),
    }
}

fn multiply(left: &Value, right: &Value) -> Result<Value> {
    let (sequence, count) = match (left, right) {
        (Value::Str(_) | Value::List(_), _) => (left, right),
        (_, Value::Str(_) | Value::List(_)) => (right, left),
        _ => return arithmetic(BinOpKind::Mul, "*", left, right),
    };
    let count = count.as_int().ok_or_else(|| unsupported("*", left, right))?;
    let count = usize::try_from(count.max(0)).map_err(|_| overflow())?;
    match sequence {
        Value::Str(s) => {
            meter::room(s.len().saturating_mul(count))?;
            text(s.repeat(count))
        }
        Value::List(items) => {
            meter::room(items.len().saturating_mul(count).saturating_mul(size_of::<Value>()))?;
            list(std::iter::repeat_n(&**items, count).flatten().cloned().collect())
        }
        _ => unreachable!(),
    }
}

fn arithmetic(op: BinOpKind, symbol: &str, left: &Value, right: &Value) -> Result<Value> {
    let zero = || Failure::invalid("division by zero");
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        let result = match op {
            BinOpKind::Add => a.checked_add(b),
            BinOpKind::Sub => a.checked_sub(b),
            BinOpKind::Mul => a.checked_mul(b),
            BinOpKind::Div | BinOpKind::FloorDiv | BinOpKind::Rem if b == 0 => return Err(zero()),
            BinOpKind::Div => return Ok(Value::Float(a as f64 / b as f64)),
            // Rust rounds towards zero, Python down.
            BinOpKind::FloorDiv => a.checked_div(b).map(|q| if a % b != 0 && (a < 0) != (b < 0) { q - 1 } else { q }),
            BinOpKind::Rem => a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r }),
            BinOpKind::Pow if b < 0 => return Ok(Value::Float((a as f64).powf(b as f64))),
            BinOpKind::Pow => a.checked_pow(u32::try_from(b).map_err(|_| overflow())?),
            _ => None,
        };
        return result.map(Value::Int).ok_or_else(overflow);
    }
    if let (Some(a), Some(b)) = (left.as_float(), right.as_float()) {
        if b == 0.0 && matches!(op, BinOpKind::Div | BinOpKind::FloorDiv | BinOpKind::Rem) {
            return Err(zero());
        }
        return Ok(Value::Float(match op {
            BinOpKind::Add => a + b,
            BinOpKind::Sub => a - b,
            BinOpKind::Mul => a * b,
            BinOpKind::Div => a / b,
            BinOpKind::FloorDiv => (a / b).floor(),
            BinOpKind::Rem => a - b * (a / b).floor(),
            BinOpKind::Pow => a.powf(b),
            _ => return Err(unsupported(symbol, left, right)),
        }));
    }
    Err(unsupported(symbol, left, right))
}

pub fn equal(left: &Value, right: &Value) -> Result<bool> {
    meter::work(1)?;
    Ok(match (left, right) {
        (Value::Str(a), Value::Str(b)) => {
            if a.len() == b.len() {
                meter::work_bytes(a.len())?;
            }
            **a == **b
        }
        (Value::List(a), Value::List(b)) => {
            if a.len() != b.len() || a.is_tuple() != b.is_tuple() {
                return Ok(false);
            }
            for (a, b) in a.iter().zip(b.iter()) {
                if !equal(a, b)? {
                    return Ok(false);
                }
            }
            true
        }
        (Value::Dict(a), Value::Dict(b)) => {
            if a.entries().len() != b.entries().len() {
                return Ok(false);
            }
            for (key, value) in a.entries() {
                match b.get(key)? {
                    Some(other) if equal(value, other)? => {}
                    _ => return Ok(false),
                }
            }
            true
        }
        _ => match (left.as_int(), right.as_int()) {
            (Some(a), Some(b)) => a == b,
            _ => match (left.as_float(), right.as_float()) {
                (Some(a), Some(b)) => a == b,
                _ => left.is_same(right),
            },
        },
    })
}

/// None for what has no order among numbers (NaN).
pub fn compare(symbol: &str, left: &Value, right: &Value) -> Result<Option<Ordering>> {
    meter::work(1)?;
    match (left, right) {
        (Value::Str(a), Value::Str(b)) => {
            meter::work_bytes(a.len().min(b.len()))?;
            Ok(Some((**a).cmp(&**b)))
        }
        (Value::List(a), Value::List(b)) if a.is_tuple() == b.is_tuple() => {
            for (a, b) in a.iter().zip(b.iter()) {
                if !equal(a, b)? {
                    return compare(symbol, a, b);
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        _ => match (left.as_int(), right.as_int(), left.as_float(), right.as_float()) {
            (Some(a), Some(b), _, _) => Ok(Some(a.cmp(&b))),
            (_, _, Some(a), Some(b)) => Ok(a.partial_cmp(&b)),
            _ => Err(unsupported(symbol, left, right)),
        },
    }
}

pub fn contains(container: &Value, wanted: &Value) -> Result<bool> {
    match container {
        Value::Undefined => Ok(false),
        Value::Str(s) => match wanted {
            Value::Str(part) => {
                meter::work_bytes(s.len())?;
                Ok(s.contains(&**part))
            }
            _ => Err(Failure::invalid(format!("'in <string>' needs a string, not {}", wanted.type_name()))),
        },
        Value::List(items) => {
            for item in items.iter() {
                if equal(item, wanted)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Value::Dict(dict) => Ok(dict.get(wanted)?.is_some()),
        _ => Err(Failure::invalid(format!("'{}' object is not iterable", container.type_name()))),
    }
}
