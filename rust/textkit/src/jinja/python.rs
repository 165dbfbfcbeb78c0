//! How Python writes values down: str(), repr(), floats, and `%` formatting.

use std::fmt::Write;

use super::meter;
use super::output::{collected, emit};
use super::value::{Dict, List, Value};
use crate::failure::{Failure, Result};

/// What `{{ value }}` writes.
pub fn print(value: &Value, out: &mut String) -> Result<()> {
    match value {
        Value::Str(s) => emit(out, s),
        _ => emit(out, &to_text(value)?),
    }
}

/// Python's str(); empty for an undefined value.
pub fn to_text(value: &Value) -> Result<String> {
    match value {
        Value::Str(s) => {
            meter::room(s.len())?;
            Ok(s.to_string())
        }
        Value::Undefined => Ok(String::new()),
        _ => repr(value),
    }
}

pub fn repr(value: &Value) -> Result<String> {
    collected(|out| write_repr(value, out))
}

fn write_repr(value: &Value, out: &mut String) -> Result<()> {
    meter::work(1)?;
    match value {
        Value::Undefined => emit(out, "Undefined"),
        Value::None => emit(out, "None"),
        Value::Bool(true) => emit(out, "True"),
        Value::Bool(false) => emit(out, "False"),
        Value::Int(i) => emit(out, &i.to_string()),
        Value::Float(f) => emit(out, &float(*f)),
        Value::Str(s) => write_quoted(s, out),
        Value::List(items) => write_list(items, out),
        Value::Dict(dict) => write_dict(dict, out),
        other => emit(out, &format!("<{}>", other.type_name())),
    }
}

fn write_list(items: &List, out: &mut String) -> Result<()> {
    let (open, close) = if items.is_tuple() { ("(", ")") } else { ("[", "]") };
    emit(out, open)?;
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            emit(out, ", ")?;
        }
        write_repr(item, out)?;
    }
    if items.is_tuple() && items.len() == 1 {
        emit(out, ",")?;
    }
    emit(out, close)
}

fn write_dict(dict: &Dict, out: &mut String) -> Result<()> {
    emit(out, "{")?;
    for (i, (key, value)) in dict.entries().iter().enumerate() {
        if i > 0 {
            emit(out, ", ")?;
        }
        write_repr(key, out)?;
        emit(out, ": ")?;
        write_repr(value, out)?;
    }
    emit(out, "}")
}

/// Characters that repr() escapes although they are neither controls nor ASCII.
fn is_hidden(c: char) -> bool {
    (c.is_whitespace() && c != ' ')
        || matches!(u32::from(c), 0xAD | 0x600..=0x605 | 0x61C | 0x6DD | 0x70F | 0x180E | 0x200B..=0x200F
            | 0x202A..=0x202E | 0x2060..=0x206F | 0xE000..=0xF8FF | 0xFEFF | 0xFFF0..=0xFFFB | 0xFFFE..=0xFFFF
            | 0xE0000..=0x10FFFF)
}

fn write_quoted(s: &str, out: &mut String) -> Result<()> {
    meter::room(s.len().saturating_mul(4))?;
    let mut quoted = String::with_capacity(s.len() + 2);
    let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    quoted.push(quote);
    for c in s.chars() {
        match c {
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            c if c == quote => {
                quoted.push('\\');
                quoted.push(c);
            }
            c if c.is_control() || is_hidden(c) => match u32::from(c) {
                code @ 0..=0xFF => write!(quoted, "\\x{code:02x}").expect("writing to a string"),
                code @ 0x100..=0xFFFF => write!(quoted, "\\u{code:04x}").expect("writing to a string"),
                code => write!(quoted, "\\U{code:08x}").expect("writing to a string"),
            },
            c => quoted.push(c),
        }
    }
    quoted.push(quote);
    emit(out, &quoted)
}

/// The shortest text that reads back as the same number, laid out as Python does.
pub fn float(f: f64) -> String {
    if f.is_nan() {
        return "nan".to_owned();
    }
    if f.is_infinite() {
        return if f > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{f:e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("{:e} writes an exponent");
    let exponent: i32 = exponent.parse().expect("{:e} writes a number");
    if (-4..16).contains(&exponent) {
        let plain = format!("{f}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    format!("{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// One `%` directive.
#[derive(Default)]
struct Directive {
    left: bool,
    plus: bool,
    space: bool,
    zero: bool,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
}

/// `format % values`: a tuple gives several values, a dict gives named ones.
pub fn percent_format(format: &str, values: &Value) -> Result<String> {
    let mut rest = match values {
        Value::List(list) if list.is_tuple() => list.to_vec(),
        other => vec![other.clone()],
    }
    .into_iter();
    let mut chars = format.chars().peekable();
    collected(|out| {
        while let Some(c) = chars.next() {
            if c != '%' {
                emit(out, c.encode_utf8(&mut [0; 4]))?;
                continue;
            }
            let named = if chars.next_if_eq(&'(').is_some() {
                let name: String = chars.by_ref().take_while(|c| *c != ')').collect();
                let Value::Dict(dict) = values else { return Err(Failure::invalid("format requires a mapping")) };
                let found = dict.get_str(&name).cloned();
                Some(found.ok_or_else(|| Failure::invalid(format!("format key '{name}' is missing")))?)
            } else {
                None
            };
            let directive = Directive::read(&mut chars);
            let conversion = chars.next().ok_or_else(|| Failure::invalid("incomplete format"))?;
            if conversion == '%' {
                emit(out, "%")?;
                continue;
            }
            let value = named.or_else(|| rest.next());
            let value = value.ok_or_else(|| Failure::invalid("not enough arguments for format"))?;
            meter::room(directive.width.max(directive.precision.unwrap_or(0)))?;
            emit(out, &convert(&directive, conversion, &value)?)?;
        }
        if !matches!(values, Value::Dict(_)) && rest.next().is_some() {
            return Err(Failure::invalid("not all arguments converted during formatting"));
        }
        Ok(())
    })
}

impl Directive {
    /// Flags, width and precision.
    fn read(chars: &mut std::iter::Peekable<std::str::Chars>) -> Directive {
        let mut directive = Directive::default();
        while let Some(flag) = chars.next_if(|c| "-+ 0#".contains(*c)) {
            match flag {
                '-' => directive.left = true,
                '+' => directive.plus = true,
                ' ' => directive.space = true,
                '0' => directive.zero = true,
                _ => directive.alternate = true,
            }
        }
        let mut number = || {
            let digits: String = std::iter::from_fn(|| chars.next_if(char::is_ascii_digit)).collect();
            digits.parse::<usize>().unwrap_or(if digits.is_empty() { 0 } else { usize::MAX })
        };
        directive.width = number();
        if chars.next_if_eq(&'.').is_some() {
            let digits: String = std::iter::from_fn(|| chars.next_if(char::is_ascii_digit)).collect();
            directive.precision = Some(digits.parse().unwrap_or(if digits.is_empty() { 0 } else { usize::MAX }));
        }
        directive
    }
}

fn convert(directive: &Directive, conversion: char, value: &Value) -> Result<String> {
    let wrong = || Failure::invalid(format!("%{conversion} needs a number, not {}", value.type_name()));
    let (negative, mut body) = match conversion {
        's' | 'r' => {
            let body = if conversion == 's' { to_text(value)? } else { repr(value)? };
            let body = directive.precision.map_or(body.clone(), |n| body.chars().take(n).collect());
            (false, body)
        }
        'c' => (false, to_text(value)?),
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            let whole = match value {
                Value::Float(f) if "diu".contains(conversion) && f.abs() < 1e36 => *f as i128,
                _ => value.as_int().ok_or_else(wrong)?,
            };
            let size = whole.unsigned_abs();
            let body = match conversion {
                'x' => format!("{}{size:x}", if directive.alternate { "0x" } else { "" }),
                'X' => format!("{}{size:X}", if directive.alternate { "0X" } else { "" }),
                'o' => format!("{}{size:o}", if directive.alternate { "0o" } else { "" }),
                _ => size.to_string(),
            };
            (whole < 0, body)
        }
        'f' | 'F' | 'e' | 'E' | 'g' | 'G' => {
            let number = value.as_float().ok_or_else(wrong)?;
            let precision = directive.precision.unwrap_or(6);
            if precision > 1000 {
                return Err(Failure::invalid("format precision is too large"));
            }
            (number.is_sign_negative(), fixed_or_scientific(number.abs(), conversion, precision))
        }
        _ => return Err(Failure::invalid(format!("unsupported format character '{conversion}'"))),
    };
    let numeric = !"src".contains(conversion);
    let sign = match (numeric, negative) {
        (true, true) => "-",
        (true, false) if directive.plus => "+",
        (true, false) if directive.space => " ",
        _ => "",
    };
    let missing = directive.width.saturating_sub(sign.len() + body.chars().count());
    if directive.left {
        body.push_str(&" ".repeat(missing));
        return Ok(format!("{sign}{body}"));
    }
    if directive.zero && numeric {
        return Ok(format!("{sign}{}{body}", "0".repeat(missing)));
    }
    Ok(format!("{}{sign}{body}", " ".repeat(missing)))
}

fn fixed_or_scientific(number: f64, conversion: char, precision: usize) -> String {
    let scientific = |precision: usize| {
        let text = format!("{number:.precision$e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        (mantissa.to_owned(), exponent)
    };
    let written = |(mantissa, exponent): (String, i32)| {
        format!("{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
    };
    let trimmed = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    let text = if !number.is_finite() {
        float(number)
    } else {
        match conversion.to_ascii_lowercase() {
            'f' => format!("{number:.precision$}"),
            'e' => written(scientific(precision)),
            _ => {
                let digits = precision.max(1);
                let (mantissa, exponent) = scientific(digits - 1);
                if exponent < -4 || exponent >= digits as i32 {
                    written((trimmed(&mantissa), exponent))
                } else {
                    trimmed(&format!("{number:.*}", (digits as i32 - 1 - exponent) as usize))
                }
            }
        }
    };
    if conversion.is_ascii_uppercase() {
        text.to_uppercase()
    } else {
        text
    }
}
