//! The arguments of a call.

use super::value::Value;
use crate::failure::{Failure, Result};

#[derive(Default)]
pub struct Args {
    pub positional: Vec<Value>,
    pub named: Vec<(String, Value)>,
}

impl Args {
    /// The argument of that name, or at that position.
    pub fn get(&self, at: usize, name: &str) -> Option<&Value> {
        self.named.iter().find(|(given, _)| given == name).map(|(_, value)| value).or_else(|| self.positional.get(at))
    }

    pub fn get_str(&self, at: usize, name: &str) -> Result<Option<&str>> {
        match self.get(at, name) {
            None | Some(Value::None | Value::Undefined) => Ok(None),
            Some(Value::Str(s)) => Ok(Some(s)),
            Some(other) => Err(Failure::invalid(format!("'{name}' must be str, not {}", other.type_name()))),
        }
    }

    pub fn get_int(&self, at: usize, name: &str) -> Result<Option<i128>> {
        match self.get(at, name) {
            None | Some(Value::None | Value::Undefined) => Ok(None),
            Some(value) => value
                .as_int()
                .map(Some)
                .ok_or_else(|| Failure::invalid(format!("'{name}' must be int, not {}", value.type_name()))),
        }
    }

    pub fn get_bool(&self, at: usize, name: &str) -> bool {
        self.get(at, name).is_some_and(Value::truthy)
    }

    /// The first argument, which must be there.
    pub fn first(&self) -> Result<&Value> {
        self.positional
            .first()
            .or(self.named.first().map(|(_, v)| v))
            .ok_or_else(|| Failure::invalid("argument missing"))
    }

    pub fn first_str(&self) -> Result<&str> {
        let value = self.first()?;
        value.as_str().ok_or_else(|| Failure::invalid(format!("argument must be str, not {}", value.type_name())))
    }
}
