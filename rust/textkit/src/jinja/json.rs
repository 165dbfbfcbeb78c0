//! `tojson`: Python's json.dumps with ensure_ascii off, as transformers gives it to templates.

use std::fmt::Write;

use super::args::Args;
use super::output::{collected, emit};
use super::value::{text, Value};
use super::{meter, python};
use crate::failure::{Failure, Result};

struct Style {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

pub fn tojson(value: &Value, args: &Args) -> Result<Value> {
    let indent = match args.get(1, "indent") {
        None | Some(Value::None | Value::Undefined) => None,
        Some(Value::Str(s)) => Some(s.to_string()),
        Some(other) => {
            let width = other.as_int().ok_or_else(|| Failure::invalid("indent must be a number or text"))?;
            let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
            meter::room(width)?;
            Some(" ".repeat(width))
        }
    };
    let mut style = Style {
        ensure_ascii: args.get_bool(0, "ensure_ascii"),
        item_separator: if indent.is_some() { "," } else { ", " }.to_owned(),
        indent,
        key_separator: ": ".to_owned(),
        sort_keys: args.get_bool(3, "sort_keys"),
    };
    if let Some(Value::List(separators)) = args.get(2, "separators") {
        let [Value::Str(item), Value::Str(key)] = &separators[..] else {
            return Err(Failure::invalid("separators must be two texts"));
        };
        style.item_separator = item.to_string();
        style.key_separator = key.to_string();
    }
    text(collected(|out| write(value, &style, 0, out))?)
}

fn newline(style: &Style, depth: usize, out: &mut String) -> Result<()> {
    if let Some(indent) = &style.indent {
        meter::room(indent.len().saturating_mul(depth))?;
        emit(out, "\n")?;
        emit(out, &indent.repeat(depth))?;
    }
    Ok(())
}

fn write(value: &Value, style: &Style, depth: usize, out: &mut String) -> Result<()> {
    meter::work(1)?;
    match value {
        Value::None => emit(out, "null")?,
        Value::Bool(b) => emit(out, if *b { "true" } else { "false" })?,
        Value::Int(i) => emit(out, &i.to_string())?,
        Value::Float(f) => emit(out, &number(*f))?,
        Value::Str(s) => write_text(s, style, out)?,
        Value::List(items) if items.is_empty() => emit(out, "[]")?,
        Value::List(items) => {
            emit(out, "[")?;
            for (i, item) in items.iter().enumerate() {
                separate(i, style, depth, out)?;
                write(item, style, depth + 1, out)?;
            }
            newline(style, depth, out)?;
            emit(out, "]")?;
        }
        Value::Dict(dict) if dict.entries().is_empty() => emit(out, "{}")?,
        Value::Dict(dict) => {
            let mut entries = Vec::with_capacity(dict.entries().len());
            for (key, value) in dict.entries() {
                entries.push((key_text(key)?, value));
            }
            if style.sort_keys {
                meter::work(entries.len() * 8)?;
                entries.sort_by(|a, b| a.0.cmp(&b.0));
            }
            emit(out, "{")?;
            for (i, (key, value)) in entries.iter().enumerate() {
                separate(i, style, depth, out)?;
                write_text(key, style, out)?;
                emit(out, &style.key_separator)?;
                write(value, style, depth + 1, out)?;
            }
            newline(style, depth, out)?;
            emit(out, "}")?;
        }
        other => {
            return Err(Failure::invalid(format!("object of type {} is not JSON serializable", other.type_name())))
        }
    }
    Ok(())
}

fn separate(i: usize, style: &Style, depth: usize, out: &mut String) -> Result<()> {
    if i > 0 {
        emit(out, &style.item_separator)?;
    }
    newline(style, depth + 1, out)
}

fn number(f: f64) -> String {
    match f {
        f if f.is_nan() => "NaN".to_owned(),
        f if f.is_infinite() => if f > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        f => python::float(f),
    }
}

fn key_text(key: &Value) -> Result<String> {
    Ok(match key {
        Value::Str(s) => {
            meter::room(s.len())?;
            s.to_string()
        }
        Value::None => "null".to_owned(),
        Value::Bool(b) => b.to_string(),
        Value::Float(f) => number(*f),
        other => python::to_text(other)?,
    })
}

fn write_text(s: &str, style: &Style, out: &mut String) -> Result<()> {
    meter::room(s.len().saturating_mul(6))?;
    let mut quoted = String::with_capacity(s.len() + 2);
    quoted.push('"');
    for c in s.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{c}' => quoted.push_str("\\f"),
            c if c < ' ' || (style.ensure_ascii && !c.is_ascii()) || (style.ensure_ascii && c == '\u{7f}') => {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    write!(quoted, "\\u{unit:04x}").expect("writing to a string");
                }
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    emit(out, &quoted)
}
