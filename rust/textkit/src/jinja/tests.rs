//! `is` tests.

use super::value::Value;
use super::{filters, operators};
use crate::failure::{Failure, Result};

pub fn exists(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "boolean",
        "callable",
        "defined",
        "divisibleby",
        "eq",
        "equalto",
        "==",
        "escaped",
        "even",
        "false",
        "filter",
        "float",
        "ge",
        ">=",
        "greaterthan",
        "gt",
        ">",
        "in",
        "integer",
        "iterable",
        "le",
        "<=",
        "lessthan",
        "lower",
        "lt",
        "<",
        "mapping",
        "ne",
        "!=",
        "none",
        "number",
        "odd",
        "sameas",
        "sequence",
        "string",
        "test",
        "true",
        "undefined",
        "upper",
    ];
    NAMES.contains(&name)
}

pub fn apply(name: &str, value: &Value, args: &[Value]) -> Result<bool> {
    use minijinja::machinery::ast::BinOpKind;
    let argument = || args.first().ok_or_else(|| Failure::invalid(format!("test '{name}' needs an argument")));
    let compared = |op| Ok(operators::binary(op, value, argument()?)?.truthy());
    let whole = || value.as_int().ok_or_else(|| Failure::invalid(format!("test '{name}' needs a whole number")));
    Ok(match name {
        "defined" => !matches!(value, Value::Undefined),
        "undefined" => matches!(value, Value::Undefined),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => matches!(value, Value::Bool(_) | Value::Int(_) | Value::Float(_)),
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "sequence" => matches!(value, Value::Str(_) | Value::List(_) | Value::Dict(_)),
        "iterable" => {
            matches!(value, Value::Str(_) | Value::List(_) | Value::Dict(_) | Value::Undefined | Value::Loop(_))
        }
        "callable" => {
            matches!(value, Value::Function(_) | Value::Macro(_) | Value::Method(_) | Value::Joiner(_) | Value::Loop(_))
        }
        "escaped" => false,
        "even" => whole()? % 2 == 0,
        "odd" => whole()? % 2 != 0,
        "divisibleby" => {
            let by = argument()?.as_int().filter(|by| *by != 0);
            whole()? % by.ok_or_else(|| Failure::invalid("divisibleby needs a number other than 0"))? == 0
        }
        "lower" => cased(value, char::is_uppercase),
        "upper" => cased(value, char::is_lowercase),
        "eq" | "equalto" | "==" => compared(BinOpKind::Eq)?,
        "ne" | "!=" => compared(BinOpKind::Ne)?,
        "lt" | "lessthan" | "<" => compared(BinOpKind::Lt)?,
        "le" | "<=" => compared(BinOpKind::Lte)?,
        "gt" | "greaterthan" | ">" => compared(BinOpKind::Gt)?,
        "ge" | ">=" => compared(BinOpKind::Gte)?,
        "in" => operators::contains(argument()?, value)?,
        "sameas" => value.is_same(argument()?),
        "filter" => value.as_str().is_some_and(filters::exists),
        "test" => value.as_str().is_some_and(exists),
        _ => return Err(Failure::invalid(format!("no test named '{name}'"))),
    })
}

/// Python's islower and isupper: some letter with case, and none of the other case.
fn cased(value: &Value, other: fn(char) -> bool) -> bool {
    value.as_str().is_some_and(|s| s.chars().any(|c| c.is_lowercase() || c.is_uppercase()) && !s.chars().any(other))
}
