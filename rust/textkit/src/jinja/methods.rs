//! Python's methods of strings, lists and dicts, as far as they do not change their object.

use std::rc::Rc;

use super::args::Args;
use super::eval::LoopState;
use super::operators::{equal, item};
use super::value::{list, text, tuple, Dict, Value};
use super::{meter, python};
use crate::failure::{Failure, Result};

pub const DICT: &[&str] =
    &["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];
pub const LIST: &[&str] =
    &["append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"];
pub const STR: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "islower",
    "isnumeric",
    "isspace",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];

pub fn call(object: &Value, name: &str, args: &Args) -> Result<Value> {
    match object {
        Value::Str(s) => call_str(s, name, args),
        Value::Dict(dict) => call_dict(dict, name, args),
        Value::List(items) => match name {
            "copy" => Ok(object.clone()),
            "count" => {
                let mut count = 0;
                for item in items.iter() {
                    count += i128::from(equal(item, args.first()?)?);
                }
                Ok(Value::Int(count))
            }
            "index" => {
                for (at, item) in items.iter().enumerate() {
                    if equal(item, args.first()?)? {
                        return Ok(Value::Int(at as i128));
                    }
                }
                Err(Failure::invalid("value is not in list"))
            }
            _ => Err(unsafe_method(name)),
        },
        Value::Cycler(cycler) => {
            let at = if name == "reset" { 0 } else { cycler.1.get() };
            cycler.1.set(if name == "reset" { 0 } else { (at + 1) % cycler.0.len() });
            Ok(if name == "reset" { Value::None } else { cycler.0[at].clone() })
        }
        _ => Err(Failure::invalid(format!("'{}' has no method '{name}'", object.type_name()))),
    }
}

fn unsafe_method(name: &str) -> Failure {
    Failure::invalid(format!("method '{name}' changes its object, which templates may not do"))
}

pub fn call_loop(state: &Rc<LoopState>, name: &str, args: &Args) -> Result<Value> {
    if name == "cycle" {
        if args.positional.is_empty() {
            return Err(Failure::invalid("no items for cycling given"));
        }
        return Ok(args.positional[state.at.get() % args.positional.len()].clone());
    }
    let now = args.positional.clone();
    let before = state.changed.replace(Some(now.clone()));
    Ok(Value::Bool(match before {
        Some(before) if before.len() == now.len() => {
            let mut same = true;
            for (a, b) in before.iter().zip(&now) {
                same = same && equal(a, b)?;
            }
            !same
        }
        _ => true,
    }))
}

fn call_dict(dict: &Dict, name: &str, args: &Args) -> Result<Value> {
    let entries = dict.entries();
    match name {
        "copy" => Ok(Value::Dict(dict.clone())),
        "get" => {
            let default = args.positional.get(1).cloned().unwrap_or(Value::None);
            Ok(dict.get(args.first()?)?.cloned().unwrap_or(default))
        }
        "keys" => {
            meter::room(entries.len() * size_of::<Value>())?;
            list(entries.iter().map(|(key, _)| key.clone()).collect())
        }
        "values" => {
            meter::room(entries.len() * size_of::<Value>())?;
            list(entries.iter().map(|(_, value)| value.clone()).collect())
        }
        "items" => {
            meter::room(entries.len() * 4 * size_of::<Value>())?;
            list(entries.iter().map(|(k, v)| tuple(vec![k.clone(), v.clone()])).collect::<Result<_>>()?)
        }
        _ => Err(unsafe_method(name)),
    }
}

/// What Python calls white space in strings.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

fn call_str(s: &str, name: &str, args: &Args) -> Result<Value> {
    meter::work_bytes(s.len())?;
    let all = |test: &dyn Fn(char) -> bool| Ok(Value::Bool(!s.is_empty() && s.chars().all(test)));
    let some_cased = || s.chars().any(|c| c.is_lowercase() || c.is_uppercase());
    let characters_before = |at: usize| Value::Int(s[..at].chars().count() as i128);
    match name {
        "upper" => growing(s, || s.to_uppercase()),
        "lower" | "casefold" => growing(s, || s.to_lowercase()),
        "capitalize" => growing(s, || capitalize(s)),
        "title" => growing(s, || title(s)),
        "swapcase" => growing(s, || {
            s.chars()
                .flat_map(|c| {
                    if c.is_uppercase() {
                        c.to_lowercase().collect::<Vec<_>>()
                    } else {
                        c.to_uppercase().collect()
                    }
                })
                .collect()
        }),
        "isalnum" => all(&char::is_alphanumeric),
        "isalpha" => all(&char::is_alphabetic),
        "isascii" => Ok(Value::Bool(s.is_ascii())),
        "isdecimal" | "isdigit" | "isnumeric" => all(&char::is_numeric),
        "isspace" => all(&is_space),
        "islower" => Ok(Value::Bool(some_cased() && !s.chars().any(char::is_uppercase))),
        "isupper" => Ok(Value::Bool(some_cased() && !s.chars().any(char::is_lowercase))),
        "strip" => text(strip(s, args.get_str(0, "chars")?, true, true)?),
        "lstrip" => text(strip(s, args.get_str(0, "chars")?, true, false)?),
        "rstrip" => text(strip(s, args.get_str(0, "chars")?, false, true)?),
        "startswith" => affix(args, |part| s.starts_with(part)),
        "endswith" => affix(args, |part| s.ends_with(part)),
        "removeprefix" => text(s.strip_prefix(args.first_str()?).unwrap_or(s)),
        "removesuffix" => text(s.strip_suffix(args.first_str()?).unwrap_or(s)),
        "find" => Ok(s.find(args.first_str()?).map_or(Value::Int(-1), characters_before)),
        "rfind" => Ok(s.rfind(args.first_str()?).map_or(Value::Int(-1), characters_before)),
        "index" => {
            s.find(args.first_str()?).map(characters_before).ok_or_else(|| Failure::invalid("substring not found"))
        }
        "rindex" => {
            s.rfind(args.first_str()?).map(characters_before).ok_or_else(|| Failure::invalid("substring not found"))
        }
        "count" => {
            let part = args.first_str()?;
            let count = if part.is_empty() { s.chars().count() + 1 } else { s.matches(part).count() };
            Ok(Value::Int(count as i128))
        }
        "replace" => {
            let [Value::Str(old), Value::Str(new), ..] = &args.positional[..] else {
                return Err(Failure::invalid("replace() needs two strings"));
            };
            replace(s, old, new, args.get_int(2, "count")?)
        }
        "join" => join(s, args.first()?),
        "split" => split(s, args.get_str(0, "sep")?, args.get_int(1, "maxsplit")?),
        "rsplit" => rsplit(s, args.get_str(0, "sep")?, args.get_int(1, "maxsplit")?),
        "splitlines" => splitlines(s, args.get_bool(0, "keepends")),
        "partition" => partition(s, s.split_once(args.first_str()?), args.first_str()?, true),
        "rpartition" => partition(s, s.rsplit_once(args.first_str()?), args.first_str()?, false),
        "center" => pad(s, args, |missing| missing / 2 + (missing & args_width(args) & 1)),
        "ljust" => pad(s, args, |_| 0),
        "rjust" => pad(s, args, |missing| missing),
        "zfill" => {
            let width = args.get_int(0, "width")?.unwrap_or(0);
            let missing = usize::try_from(width).unwrap_or(0).saturating_sub(s.chars().count());
            meter::room(missing)?;
            let (sign, digits) = s.split_at(usize::from(s.starts_with(['+', '-'])));
            text(format!("{sign}{}{digits}", "0".repeat(missing)))
        }
        "format" => str_format(s, args),
        _ => Err(Failure::invalid(format!("'str' has no method '{name}'"))),
    }
}

/// Case mapping may make text longer, three times at most.
fn growing(s: &str, map: impl FnOnce() -> String) -> Result<Value> {
    meter::room(s.len().saturating_mul(3))?;
    text(map())
}

pub fn capitalize(s: &str) -> String {
    let mut chars = s.chars();
    chars
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(chars.as_str().to_lowercase().chars()).collect())
}

/// str.title(): every run of letters starts with a capital.
fn title(s: &str) -> String {
    let mut inside = false;
    let mut out = String::with_capacity(s.len());
    for c in s.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside = c.is_alphabetic();
    }
    out
}

pub fn strip<'a>(s: &'a str, chars: Option<&str>, left: bool, right: bool) -> Result<&'a str> {
    let wanted = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    meter::work_bytes(s.len().saturating_mul(chars.map_or(1, str::len)))?;
    let s = if left { s.trim_start_matches(wanted) } else { s };
    Ok(if right { s.trim_end_matches(wanted) } else { s })
}

fn affix(args: &Args, test: impl Fn(&str) -> bool) -> Result<Value> {
    match args.first()? {
        Value::List(parts) => {
            for part in parts.iter() {
                meter::work(1)?;
                if part.as_str().is_some_and(&test) {
                    return Ok(Value::Bool(true));
                }
            }
            Ok(Value::Bool(false))
        }
        _ => Ok(Value::Bool(test(args.first_str()?))),
    }
}

pub fn replace(s: &str, old: &str, new: &str, count: Option<i128>) -> Result<Value> {
    let matches = if old.is_empty() { s.chars().count() + 1 } else { s.matches(old).count() };
    let count = count.and_then(|c| usize::try_from(c).ok()).unwrap_or(usize::MAX).min(matches);
    meter::room(s.len().saturating_add(new.len().saturating_mul(count)))?;
    text(s.replacen(old, new, count))
}

pub fn join(separator: &str, items: &Value) -> Result<Value> {
    let items = items.items()?;
    let mut parts = Vec::with_capacity(items.len());
    let mut size = separator.len().saturating_mul(items.len());
    for item in &items {
        let part = item
            .as_str()
            .ok_or_else(|| Failure::invalid(format!("join() needs strings, but found {}", item.type_name())))?;
        size = size.saturating_add(part.len());
        parts.push(part);
    }
    meter::room(size)?;
    text(parts.join(separator))
}

fn limit(maxsplit: Option<i128>) -> usize {
    maxsplit.and_then(|n| usize::try_from(n).ok()).map_or(usize::MAX, |n| n.saturating_add(1))
}

fn texts<'a>(s: &str, parts: impl Iterator<Item = &'a str>) -> Result<Vec<Value>> {
    meter::room(s.len())?;
    parts.map(text).collect()
}

pub fn split(s: &str, separator: Option<&str>, maxsplit: Option<i128>) -> Result<Value> {
    match separator {
        Some("") => Err(Failure::invalid("empty separator")),
        Some(separator) => list(texts(s, s.splitn(limit(maxsplit), separator))?),
        None => {
            let mut parts = Vec::new();
            let mut rest = s.trim_start_matches(is_space);
            while !rest.is_empty() {
                if parts.len() + 1 == limit(maxsplit) {
                    parts.push(text(rest)?);
                    break;
                }
                let end = rest.find(is_space).unwrap_or(rest.len());
                parts.push(text(&rest[..end])?);
                rest = rest[end..].trim_start_matches(is_space);
            }
            list(parts)
        }
    }
}

fn rsplit(s: &str, separator: Option<&str>, maxsplit: Option<i128>) -> Result<Value> {
    let mut parts = match separator {
        Some("") => return Err(Failure::invalid("empty separator")),
        Some(separator) => texts(s, s.rsplitn(limit(maxsplit), separator))?,
        None => {
            let mut parts = Vec::new();
            let mut rest = s.trim_end_matches(is_space);
            while !rest.is_empty() {
                if parts.len() + 1 == limit(maxsplit) {
                    parts.push(text(rest)?);
                    break;
                }
                let start =
                    rest.char_indices().rev().find(|(_, c)| is_space(*c)).map_or(0, |(at, c)| at + c.len_utf8());
                parts.push(text(&rest[start..])?);
                rest = rest[..start].trim_end_matches(is_space);
            }
            parts
        }
    };
    parts.reverse();
    list(parts)
}

fn splitlines(s: &str, keep_ends: bool) -> Result<Value> {
    let mut lines = Vec::new();
    let mut rest = s;
    while !rest.is_empty() {
        let breaks = |c: char| {
            matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
        };
        let (end, next) = match rest.char_indices().find(|(_, c)| breaks(*c)) {
            None => (rest.len(), rest.len()),
            Some((at, '\r')) if rest[at..].starts_with("\r\n") => (at, at + 2),
            Some((at, c)) => (at, at + c.len_utf8()),
        };
        lines.push(text(&rest[..if keep_ends { next } else { end }])?);
        rest = &rest[next..];
    }
    list(lines)
}

fn partition(s: &str, found: Option<(&str, &str)>, separator: &str, first: bool) -> Result<Value> {
    if separator.is_empty() {
        return Err(Failure::invalid("empty separator"));
    }
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if first => [s, "", ""],
        None => ["", "", s],
    };
    tuple(parts.into_iter().map(text).collect::<Result<_>>()?)
}

fn args_width(args: &Args) -> usize {
    args.get(0, "width").and_then(Value::as_int).and_then(|w| usize::try_from(w).ok()).unwrap_or(0)
}

/// `left` says how much of the missing width goes to the left.
fn pad(s: &str, args: &Args, left: impl Fn(usize) -> usize) -> Result<Value> {
    let fill = args.get_str(1, "fillchar")?.unwrap_or(" ");
    if fill.chars().count() != 1 {
        return Err(Failure::invalid("the fill character must be exactly one character long"));
    }
    let missing = args_width(args).saturating_sub(s.chars().count());
    meter::room(missing.saturating_mul(fill.len()))?;
    let left = left(missing);
    text(format!("{}{s}{}", fill.repeat(left), fill.repeat(missing - left)))
}

/// str.format() with plain fields: {}, {0}, {name}, {name.member}, {{ and }}.
fn str_format(s: &str, args: &Args) -> Result<Value> {
    let mut automatic = 0;
    let formatted = super::output::collected(|out| {
        let mut rest = s;
        while let Some(at) = rest.find(['{', '}']) {
            super::output::emit(out, &rest[..at])?;
            rest = &rest[at..];
            if rest.starts_with("{{") || rest.starts_with("}}") {
                super::output::emit(out, &rest[..1])?;
                rest = &rest[2..];
                continue;
            }
            let end = rest.find('}').filter(|end| *end > 0);
            let end = end.ok_or_else(|| Failure::invalid("single brace in format string"))?;
            let field = &rest[1..end];
            rest = &rest[end + 1..];
            if field.contains([':', '!', '[', '{']) {
                return Err(Failure::invalid(format!("format field '{field}' is not supported")));
            }
            let mut path = field.split('.');
            let name = path.next().unwrap_or_default();
            let position = if name.is_empty() { Some(automatic) } else { name.parse().ok() };
            automatic += usize::from(name.is_empty());
            let value = match position {
                Some(position) => args.positional.get(position),
                None => args.get(usize::MAX, name),
            };
            let mut value =
                value.cloned().ok_or_else(|| Failure::invalid(format!("format field '{field}' is missing")))?;
            for part in path {
                value = item(&value, &text(part)?)?;
            }
            python::print(&value, out)?;
        }
        super::output::emit(out, rest)
    })?;
    text(formatted)
}
