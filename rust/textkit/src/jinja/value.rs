//! The values of a template: Python's, as far as chat templates see them. Containers are immutable and know their
//! depth, so no value nests deeper than MAX_NESTING and walking or dropping one cannot exhaust the stack.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Deref;
use std::rc::Rc;

use super::eval::{LoopState, Macro};
use super::meter;
use crate::failure::{Failure, Result};

const MAX_NESTING: u32 = 200;

#[derive(Clone)]
pub enum Value {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Str),
    List(List),
    Dict(Dict),
    Namespace(Rc<Namespace>),
    Function(Function),
    Macro(Rc<Macro>),
    Method(Rc<(Value, Str)>),
    Loop(Rc<LoopState>),
    Joiner(Rc<(Value, Cell<bool>)>),
    Cycler(Rc<(List, Cell<usize>)>),
}

/// The functions that every template finds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Function {
    Namespace,
    Dict,
    Range,
    RaiseException,
    StrftimeNow,
    Joiner,
    Cycler,
}

/// The one kind of value that changes. It may hold itself: the evaluator empties all of them at the end.
#[derive(Default)]
pub struct Namespace {
    pub members: RefCell<HashMap<String, Value>>,
}

/// What the shortest string costs.
const STR_BYTES: usize = 96;

struct StrData(String);

impl Drop for StrData {
    fn drop(&mut self) {
        meter::release(STR_BYTES + self.0.len());
    }
}

#[derive(Clone)]
pub struct Str(Rc<StrData>);

impl Deref for Str {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0 .0
    }
}

pub struct ListData {
    items: Vec<Value>,
    depth: u32,
    pub is_tuple: bool,
}

impl Drop for ListData {
    fn drop(&mut self) {
        meter::release(self.items.len() * size_of::<Value>());
    }
}

#[derive(Clone)]
pub struct List(Rc<ListData>);

impl Deref for List {
    type Target = [Value];

    fn deref(&self) -> &[Value] {
        &self.0.items
    }
}

/// What a dict's keys are compared by. As in Python, 1, 1.0 and True are one key.
#[derive(PartialEq, Eq, Hash)]
enum Key {
    None,
    Int(i128),
    Float(u64),
    Str(String),
}

struct DictData {
    entries: Vec<(Value, Value)>,
    index: HashMap<Key, usize>,
    depth: u32,
    bytes: usize,
}

impl Drop for DictData {
    fn drop(&mut self) {
        meter::release(self.bytes);
    }
}

/// Keeps its keys in order of insertion.
#[derive(Clone)]
pub struct Dict(Rc<DictData>);

pub fn text(text: impl Into<String>) -> Result<Value> {
    let text = text.into();
    meter::room(STR_BYTES + text.len())?;
    meter::take(STR_BYTES + text.len());
    Ok(Value::Str(Str(Rc::new(StrData(text)))))
}

fn made(items: Vec<Value>, is_tuple: bool) -> Result<Value> {
    let depth = 1 + items.iter().map(Value::depth).max().unwrap_or(0);
    check_depth(depth)?;
    let bytes = items.len() * size_of::<Value>();
    meter::room(bytes)?;
    meter::take(bytes);
    Ok(Value::List(List(Rc::new(ListData { items, depth, is_tuple }))))
}

pub fn list(items: Vec<Value>) -> Result<Value> {
    made(items, false)
}

pub fn tuple(items: Vec<Value>) -> Result<Value> {
    made(items, true)
}

fn check_depth(depth: u32) -> Result<()> {
    if depth > MAX_NESTING {
        return Err(Failure::exhausted(format!("template nests values more than {MAX_NESTING} deep")));
    }
    Ok(())
}

impl Str {
    /// For text whose size is known to be small.
    pub fn new(text: &str) -> Str {
        meter::take(STR_BYTES + text.len());
        Str(Rc::new(StrData(text.to_owned())))
    }
}

impl List {
    pub fn is_tuple(&self) -> bool {
        self.0.is_tuple
    }
}

impl Key {
    fn new(value: &Value) -> Result<Key> {
        Ok(match value {
            Value::None => Key::None,
            Value::Bool(b) => Key::Int(i128::from(*b)),
            Value::Int(i) => Key::Int(*i),
            Value::Float(f) if f.fract() == 0.0 && f.abs() < 1e18 => Key::Int(*f as i128),
            Value::Float(f) => Key::Float(f.to_bits()),
            Value::Str(s) => {
                meter::work_bytes(s.len())?;
                Key::Str(s.to_string())
            }
            _ => return Err(Failure::invalid(format!("unhashable type: '{}'", value.type_name()))),
        })
    }
}

impl Dict {
    pub fn new(pairs: Vec<(Value, Value)>) -> Result<Dict> {
        let mut data = DictData { entries: Vec::new(), index: HashMap::new(), depth: 1, bytes: 0 };
        for (key, value) in pairs {
            let bytes = 2 * size_of::<(Value, Value)>() + if let Value::Str(s) = &key { s.len() } else { 0 };
            meter::room(bytes)?;
            meter::take(bytes);
            data.bytes += bytes;
            data.depth = data.depth.max(1 + value.depth());
            let at = *data.index.entry(Key::new(&key)?).or_insert(data.entries.len());
            match data.entries.get_mut(at) {
                Some(entry) => entry.1 = value,
                None => data.entries.push((key, value)),
            }
        }
        check_depth(data.depth)?;
        Ok(Dict(Rc::new(data)))
    }

    pub fn get(&self, key: &Value) -> Result<Option<&Value>> {
        if matches!(key, Value::Undefined) {
            return Ok(None);
        }
        Ok(self.0.index.get(&Key::new(key)?).map(|at| &self.0.entries[*at].1))
    }

    pub fn get_str(&self, key: &str) -> Option<&Value> {
        self.0.index.get(&Key::Str(key.to_owned())).map(|at| &self.0.entries[*at].1)
    }

    pub fn entries(&self) -> &[(Value, Value)] {
        &self.0.entries
    }
}

impl Value {
    fn depth(&self) -> u32 {
        match self {
            Value::List(list) => list.0.depth,
            Value::Dict(dict) => dict.0.depth,
            // A bound method holds its object.
            Value::Method(method) => 1 + method.0.depth(),
            Value::Joiner(joiner) => 1 + joiner.0.depth(),
            Value::Cycler(cycler) => 1 + cycler.0 .0.depth,
            _ => 0,
        }
    }

    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Undefined => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "str",
            Value::List(list) if list.is_tuple() => "tuple",
            Value::List(_) => "list",
            Value::Dict(_) => "dict",
            Value::Namespace(_) => "Namespace",
            Value::Function(_) => "function",
            Value::Macro(_) => "Macro",
            Value::Method(_) => "method",
            Value::Loop(_) => "LoopContext",
            Value::Joiner(_) => "Joiner",
            Value::Cycler(_) => "Cycler",
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(s) => Some(s),
            _ => None,
        }
    }

    /// Whole numbers, True and False as 1 and 0.
    pub fn as_int(&self) -> Option<i128> {
        match self {
            Value::Bool(b) => Some(i128::from(*b)),
            Value::Int(i) => Some(*i),
            _ => None,
        }
    }

    pub fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(f) => Some(*f),
            _ => self.as_int().map(|i| i as f64),
        }
    }

    pub fn truthy(&self) -> bool {
        match self {
            Value::Undefined | Value::None => false,
            Value::Bool(b) => *b,
            Value::Int(i) => *i != 0,
            Value::Float(f) => *f != 0.0,
            Value::Str(s) => !s.is_empty(),
            Value::List(list) => !list.is_empty(),
            Value::Dict(dict) => !dict.entries().is_empty(),
            _ => true,
        }
    }

    /// Python's len(); characters for a string.
    pub fn len(&self) -> Result<usize> {
        match self {
            Value::Undefined => Ok(0),
            Value::Str(s) => {
                meter::work_bytes(s.len())?;
                Ok(s.chars().count())
            }
            Value::List(list) => Ok(list.len()),
            Value::Dict(dict) => Ok(dict.entries().len()),
            Value::Loop(state) => Ok(state.items.len()),
            _ => Err(Failure::invalid(format!("object of type '{}' has no len()", self.type_name()))),
        }
    }

    /// Python's iter(), all at once: characters of a string, keys of a dict.
    pub fn items(&self) -> Result<Vec<Value>> {
        match self {
            Value::Undefined => Ok(Vec::new()),
            Value::Str(s) => {
                meter::room(s.len() * size_of::<Value>())?;
                let mut buffer = [0; 4];
                s.chars().map(|c| text(&*c.encode_utf8(&mut buffer))).collect()
            }
            Value::List(list) => {
                meter::room(list.len() * size_of::<Value>())?;
                Ok(list.to_vec())
            }
            Value::Dict(dict) => {
                meter::room(dict.entries().len() * size_of::<Value>())?;
                Ok(dict.entries().iter().map(|(key, _)| key.clone()).collect())
            }
            _ => Err(Failure::invalid(format!("'{}' object is not iterable", self.type_name()))),
        }
    }

    pub fn is_same(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::Undefined, Value::Undefined) | (Value::None, Value::None) => true,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::Int(a), Value::Int(b)) => a == b,
            (Value::Float(a), Value::Float(b)) => a == b,
            (Value::Str(a), Value::Str(b)) => Rc::ptr_eq(&a.0, &b.0) || **a == **b,
            (Value::List(a), Value::List(b)) => Rc::ptr_eq(&a.0, &b.0),
            (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(&a.0, &b.0),
            (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
            _ => false,
        }
    }
}
