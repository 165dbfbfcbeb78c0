//! Jinja's filters.

use std::cmp::Ordering;

use super::args::Args;
use super::value::{list, text, tuple, Dict, Value};
use super::{json, meter, methods, operators, python, tests};
use crate::failure::{Failure, Result};

const NAMES: &[&str] = &[
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
];

pub fn exists(name: &str) -> bool {
    NAMES.contains(&name)
}

pub fn apply(name: &str, value: Value, args: &Args) -> Result<Value> {
    meter::work(1)?;
    match name {
        // Values as a whole.
        "safe" => match value {
            Value::Str(_) => Ok(value),
            other => text(python::to_text(&other)?),
        },
        "string" => text(python::to_text(&value)?),
        "pprint" => text(python::repr(&value)?),
        "tojson" => json::tojson(&value, args),
        "length" | "count" => value.len().map(|n| Value::Int(n as i128)),
        "default" | "d" => {
            let missing = matches!(value, Value::Undefined) || (args.get_bool(1, "boolean") && !value.truthy());
            if missing {
                return args.get(0, "default_value").cloned().map_or_else(|| text(""), Ok);
            }
            Ok(value)
        }
        "attr" => {
            let found = operators::attribute(&value, args.first_str()?)?;
            // Attributes only, never a dict's keys.
            Ok(match (&value, &found) {
                (Value::Dict(_), Value::Method(_)) => found,
                (Value::Dict(_), _) => Value::Undefined,
                _ => found,
            })
        }
        // Numbers.
        "abs" => match &value {
            Value::Float(f) => Ok(Value::Float(f.abs())),
            other => {
                let number = other.as_int().ok_or_else(|| Failure::invalid("abs needs a number"))?;
                number.checked_abs().map(Value::Int).ok_or_else(operators::overflow)
            }
        },
        "int" => to_int(&value, args),
        "float" => {
            let number = match &value {
                Value::Str(s) => s.trim().parse().ok(),
                other => other.as_float(),
            };
            Ok(number.map(Value::Float).unwrap_or_else(|| args.get(0, "default").cloned().unwrap_or(Value::Float(0.0))))
        }
        "round" => round(&value, args),
        // Texts.
        "upper" | "lower" | "capitalize" => methods::call(&text(python::to_text(&value)?)?, name, &Args::default()),
        "center" => {
            let width =
                Args { positional: vec![args.get(0, "width").cloned().unwrap_or(Value::Int(80))], named: vec![] };
            methods::call(&text(python::to_text(&value)?)?, name, &width)
        }
        "title" => title(&python::to_text(&value)?),
        "trim" => text(methods::strip(&python::to_text(&value)?, args.get_str(0, "chars")?, true, true)?),
        "replace" => {
            let (Some(old), Some(new)) = (args.get(0, "old"), args.get(1, "new")) else {
                return Err(Failure::invalid("replace needs two arguments"));
            };
            let (old, new) = (python::to_text(old)?, python::to_text(new)?);
            methods::replace(&python::to_text(&value)?, &old, &new, args.get_int(2, "count")?)
        }
        "format" => {
            let values = match &args.named[..] {
                [] => tuple(args.positional.clone())?,
                named => Value::Dict(Dict::new(
                    named.iter().map(|(k, v)| Ok((text(k.as_str())?, v.clone()))).collect::<Result<_>>()?,
                )?),
            };
            text(python::percent_format(&python::to_text(&value)?, &values)?)
        }
        "indent" => indent(&python::to_text(&value)?, args),
        "truncate" => truncate(&python::to_text(&value)?, args),
        "wordcount" => {
            let words = python::to_text(&value)?;
            let count = words.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty()).count();
            Ok(Value::Int(count as i128))
        }
        "escape" | "e" => escape(&python::to_text(&value)?),
        "urlencode" => urlencode(&value),
        // Sequences and mappings.
        "first" => match &value {
            Value::List(items) => Ok(items.first().cloned().unwrap_or(Value::Undefined)),
            other => Ok(other.items()?.into_iter().next().unwrap_or(Value::Undefined)),
        },
        "last" => match &value {
            Value::List(items) => Ok(items.last().cloned().unwrap_or(Value::Undefined)),
            other => Ok(other.items()?.pop().unwrap_or(Value::Undefined)),
        },
        "list" => list(value.items()?),
        "items" => match &value {
            Value::Undefined => list(vec![]),
            Value::Dict(_) => methods::call(&value, "items", &Args::default()),
            _ => Err(Failure::invalid("items needs a mapping")),
        },
        "reverse" => match &value {
            Value::Str(s) => text(s.chars().rev().collect::<String>()),
            other => {
                let mut items = other.items()?;
                items.reverse();
                list(items)
            }
        },
        "join" => join(&value, args),
        "sum" => {
            let mut total = args.get(1, "start").cloned().unwrap_or(Value::Int(0));
            for item in value.items()? {
                total = operators::add(&total, &member(&item, args.get(0, "attribute"))?)?;
            }
            Ok(total)
        }
        "min" | "max" => extreme(&value, name == "max", args),
        "sort" => sort(
            value.items()?,
            args.get(2, "attribute"),
            args.get_bool(0, "reverse"),
            args.get_bool(1, "case_sensitive"),
        ),
        "dictsort" => dictsort(&value, args),
        "unique" => unique(&value, args),
        "batch" => batch(&value, args),
        "slice" => slices(&value, args),
        "groupby" => groupby(&value, args),
        "map" => map(&value, args),
        "select" | "reject" => pick(&value, name == "select", None, &args.positional),
        "selectattr" | "rejectattr" => {
            let (attribute, test) =
                args.positional.split_first().ok_or_else(|| Failure::invalid(format!("{name} needs an attribute")))?;
            pick(&value, name == "selectattr", Some(attribute), test)
        }
        _ => Err(Failure::invalid(format!("no filter named '{name}'"))),
    }
}

/// The value at a dotted path; the value itself without one.
fn member(value: &Value, path: Option<&Value>) -> Result<Value> {
    match path {
        None | Some(Value::None | Value::Undefined) => Ok(value.clone()),
        Some(Value::Str(path)) => {
            let mut value = value.clone();
            for part in path.split('.') {
                let key = part.parse().map_or_else(|_| text(part), |at| Ok(Value::Int(at)))?;
                value = operators::item(&value, &key)?;
            }
            Ok(value)
        }
        Some(at) => operators::item(value, at),
    }
}

fn to_int(value: &Value, args: &Args) -> Result<Value> {
    let base =
        args.get_int(1, "base")?.and_then(|b| u32::try_from(b).ok()).filter(|b| (2..=36).contains(b)).unwrap_or(10);
    let whole = match value {
        Value::Float(f) if f.is_finite() && f.abs() < 1e36 => Some(*f as i128),
        Value::Str(s) => {
            let digits = s.trim().replace('_', "").to_ascii_lowercase();
            let marker = match base {
                16 => "0x",
                8 => "0o",
                2 => "0b",
                _ => "",
            };
            let digits = digits.strip_prefix(marker).unwrap_or(&digits);
            let parsed = i128::from_str_radix(digits, base).ok();
            parsed.or_else(|| digits.parse::<f64>().ok().filter(|f| f.abs() < 1e36).map(|f| f as i128))
        }
        other => other.as_int(),
    };
    Ok(whole.map(Value::Int).unwrap_or_else(|| args.get(0, "default").cloned().unwrap_or(Value::Int(0))))
}

fn round(value: &Value, args: &Args) -> Result<Value> {
    let number = value.as_float().ok_or_else(|| Failure::invalid("round needs a number"))?;
    let precision = i32::try_from(args.get_int(0, "precision")?.unwrap_or(0).clamp(-300, 300)).unwrap_or(0);
    let scale = 10f64.powi(precision);
    let rounded = match args.get_str(1, "method")?.unwrap_or("common") {
        "ceil" => (number * scale).ceil() / scale,
        "floor" => (number * scale).floor() / scale,
        // Rust's formatting rounds the exact value half to even, as Python does.
        "common" if precision >= 0 => format!("{number:.*}", precision as usize).parse().unwrap_or(number),
        "common" => (number * scale).round_ties_even() / scale,
        other => return Err(Failure::invalid(format!("round has no method '{other}'"))),
    };
    Ok(match value {
        Value::Float(_) => Value::Float(rounded),
        _ if args.get(1, "method").is_none() => value.clone(),
        _ => Value::Float(rounded),
    })
}

/// Jinja's own title: words start after blanks, hyphens and opening brackets.
fn title(s: &str) -> Result<Value> {
    meter::room(s.len().saturating_mul(3))?;
    let mut out = String::with_capacity(s.len());
    let mut starts = true;
    for c in s.chars() {
        if starts {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        starts = methods::is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    }
    text(out)
}

fn indent(s: &str, args: &Args) -> Result<Value> {
    let prefix = match args.get(0, "width") {
        Some(Value::Str(s)) => s.to_string(),
        Some(width) => {
            let width = width.as_int().ok_or_else(|| Failure::invalid("indent needs a number or text"))?;
            let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
            meter::room(width)?;
            " ".repeat(width)
        }
        None => "    ".to_owned(),
    };
    let (first, blank) = (args.get_bool(1, "first"), args.get_bool(2, "blank"));
    meter::room(s.len().saturating_add(prefix.len().saturating_mul(s.matches('\n').count() + 1)))?;
    let mut out = String::with_capacity(s.len());
    for (i, line) in s.split('\n').enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if (i > 0 && (blank || !line.is_empty())) || (i == 0 && first) {
            out.push_str(&prefix);
        }
        out.push_str(line);
    }
    text(out)
}

fn truncate(s: &str, args: &Args) -> Result<Value> {
    let length = args.get_int(0, "length")?.and_then(|n| usize::try_from(n).ok()).unwrap_or(255);
    let end = args.get_str(2, "end")?.unwrap_or("...");
    let leeway = args.get_int(3, "leeway")?.and_then(|n| usize::try_from(n).ok()).unwrap_or(5);
    if s.chars().count() <= length.saturating_add(leeway) {
        return text(s);
    }
    let kept: String = s.chars().take(length.saturating_sub(end.chars().count())).collect();
    let kept =
        if args.get_bool(1, "killwords") { &kept[..] } else { kept.rsplit_once(' ').map_or(&kept[..], |(k, _)| k) };
    meter::room(kept.len() + end.len())?;
    text(format!("{kept}{end}"))
}

fn escape(s: &str) -> Result<Value> {
    meter::room(s.len().saturating_mul(5))?;
    let escaped = s.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text(escaped.replace('"', "&#34;").replace('\'', "&#39;"))
}

fn urlencode(value: &Value) -> Result<Value> {
    let quote = |s: &str, safe_slash: bool| -> Result<String> {
        meter::room(s.len().saturating_mul(3))?;
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"_.-~".contains(&b) || (safe_slash && b == b'/');
        Ok(s.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect())
    };
    match value {
        Value::Dict(dict) => {
            let mut parts = Vec::new();
            for (key, value) in dict.entries() {
                parts.push(format!(
                    "{}={}",
                    quote(&python::to_text(key)?, false)?,
                    quote(&python::to_text(value)?, false)?
                ));
            }
            text(parts.join("&"))
        }
        other => text(quote(&python::to_text(other)?, true)?),
    }
}

fn join(value: &Value, args: &Args) -> Result<Value> {
    let separator = args.get(0, "d").map_or(Ok(String::new()), python::to_text)?;
    let mut parts = Vec::new();
    for item in value.items()? {
        let part = member(&item, args.get(1, "attribute"))?;
        parts.push(match part {
            Value::Str(_) => part,
            other => text(python::to_text(&other)?)?,
        });
    }
    methods::join(&separator, &list(parts)?)
}

/// What texts are compared by.
fn folded(value: Value, case_sensitive: bool) -> Result<Value> {
    match &value {
        Value::Str(s) if !case_sensitive => text(s.to_lowercase()),
        _ => Ok(value),
    }
}

fn extreme(value: &Value, largest: bool, args: &Args) -> Result<Value> {
    let case_sensitive = args.get_bool(0, "case_sensitive");
    let mut best: Option<(Value, Value)> = None;
    for item in value.items()? {
        let key = folded(member(&item, args.get(1, "attribute"))?, case_sensitive)?;
        let better = match &best {
            None => true,
            Some((_, held)) => {
                operators::compare("<", &key, held)? == Some(if largest { Ordering::Greater } else { Ordering::Less })
            }
        };
        if better {
            best = Some((item, key));
        }
    }
    Ok(best.map_or(Value::Undefined, |(item, _)| item))
}

/// Stable; errors of comparisons come out.
fn sort(items: Vec<Value>, attribute: Option<&Value>, reverse: bool, case_sensitive: bool) -> Result<Value> {
    let mut keyed = Vec::with_capacity(items.len());
    for item in items {
        keyed.push((folded(member(&item, attribute)?, case_sensitive)?, item));
    }
    let mut failure = None;
    keyed.sort_by(|a, b| {
        if failure.is_some() {
            return Ordering::Equal;
        }
        let order = operators::compare("<", &a.0, &b.0).unwrap_or_else(|f| {
            failure = Some(f);
            None
        });
        let order = order.unwrap_or(Ordering::Equal);
        if reverse {
            order.reverse()
        } else {
            order
        }
    });
    match failure {
        Some(failure) => Err(failure),
        None => list(keyed.into_iter().map(|(_, item)| item).collect()),
    }
}

fn dictsort(value: &Value, args: &Args) -> Result<Value> {
    let by = match args.get_str(1, "by")?.unwrap_or("key") {
        "key" => 0,
        "value" => 1,
        other => return Err(Failure::invalid(format!("dictsort cannot sort by '{other}'"))),
    };
    let pairs = methods::call(value, "items", &Args::default())?.items()?;
    sort(pairs, Some(&Value::Int(by)), args.get_bool(2, "reverse"), args.get_bool(0, "case_sensitive"))
}

fn unique(value: &Value, args: &Args) -> Result<Value> {
    let mut seen: Vec<Value> = Vec::new();
    let mut kept = Vec::new();
    for item in value.items()? {
        let key = folded(member(&item, args.get(1, "attribute"))?, args.get_bool(0, "case_sensitive"))?;
        let mut is_new = true;
        for old in &seen {
            is_new = is_new && !operators::equal(old, &key)?;
        }
        if is_new {
            seen.push(key);
            kept.push(item);
        }
    }
    list(kept)
}

fn count(args: &Args, name: &str) -> Result<usize> {
    let wanted = args.get_int(0, name)?.and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
    wanted.ok_or_else(|| Failure::invalid(format!("'{name}' must be a number above 0")))
}

fn batch(value: &Value, args: &Args) -> Result<Value> {
    let size = count(args, "linecount")?;
    let mut rows = Vec::new();
    for row in value.items()?.chunks(size) {
        let mut row = row.to_vec();
        if let Some(fill) = args.get(1, "fill_with") {
            meter::room(size.saturating_mul(size_of::<Value>()))?;
            row.resize(size, fill.clone());
        }
        rows.push(list(row)?);
    }
    list(rows)
}

fn slices(value: &Value, args: &Args) -> Result<Value> {
    let columns = count(args, "slices")?;
    meter::room(columns.saturating_mul(size_of::<Value>()))?;
    let items = value.items()?;
    let (each, more) = (items.len() / columns, items.len() % columns);
    let mut rest = &items[..];
    let mut out = Vec::new();
    for column in 0..columns {
        let (here, after) = rest.split_at(each + usize::from(column < more));
        let mut here = here.to_vec();
        if let Some(fill) = args.get(1, "fill_with").filter(|_| more > 0 && column >= more) {
            here.push(fill.clone());
        }
        out.push(list(here)?);
        rest = after;
    }
    list(out)
}

fn groupby(value: &Value, args: &Args) -> Result<Value> {
    let attribute = args.get(0, "attribute").ok_or_else(|| Failure::invalid("groupby needs an attribute"))?;
    let case_sensitive = args.get_bool(2, "case_sensitive");
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for item in sort(value.items()?, Some(attribute), false, case_sensitive)?.items()? {
        let key = folded(member(&item, Some(attribute))?, case_sensitive)?;
        match groups.last_mut() {
            Some((held, members)) if operators::equal(held, &key)? => members.push(item),
            _ => groups.push((key, vec![item])),
        }
    }
    let pairs = groups.into_iter().map(|(_, members)| {
        let key = member(&members[0], Some(attribute))?;
        tuple(vec![key, list(members)?])
    });
    list(pairs.collect::<Result<_>>()?)
}

fn map(value: &Value, args: &Args) -> Result<Value> {
    let mut out = Vec::new();
    if let Some((_, attribute)) = args.named.iter().find(|(name, _)| name == "attribute") {
        let default = args.named.iter().find(|(name, _)| name == "default").map(|(_, value)| value);
        for item in value.items()? {
            out.push(match member(&item, Some(attribute))? {
                Value::Undefined => default.cloned().unwrap_or(Value::Undefined),
                found => found,
            });
        }
        return list(out);
    }
    let Some((Value::Str(filter), rest)) = args.positional.split_first() else {
        return Err(Failure::invalid("map needs the name of a filter or an attribute"));
    };
    let rest = Args { positional: rest.to_vec(), named: args.named.clone() };
    for item in value.items()? {
        let _level = meter::deeper()?;
        out.push(apply(filter, item, &rest)?);
    }
    list(out)
}

fn pick(value: &Value, wanted: bool, attribute: Option<&Value>, test: &[Value]) -> Result<Value> {
    let mut kept = Vec::new();
    for item in value.items()? {
        let subject = member(&item, attribute)?;
        let holds = match test.split_first() {
            None => subject.truthy(),
            Some((name, args)) => {
                let name = name.as_str().ok_or_else(|| Failure::invalid("name of a test must be a string"))?;
                tests::apply(name, &subject, args)?
            }
        };
        if holds == wanted {
            kept.push(item);
        }
    }
    list(kept)
}
