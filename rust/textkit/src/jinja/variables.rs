//! A template's variables: JSON read straight into values, members in their order.

use super::value::{list, text, Dict, Value};
use crate::failure::{Failure, Result};

struct FromJson;

impl<'de> serde::de::DeserializeSeed<'de> for FromJson {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

fn custom<E: serde::de::Error>(failure: Failure) -> E {
    E::custom(failure.message)
}

impl<'de> serde::de::Visitor<'de> for FromJson {
    type Value = Value;

    fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E: serde::de::Error>(self) -> std::result::Result<Value, E> {
        Ok(Value::None)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> std::result::Result<Value, E> {
        Ok(Value::Int(i128::from(value)))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> std::result::Result<Value, E> {
        Ok(Value::Int(i128::from(value)))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> std::result::Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> std::result::Result<Value, E> {
        text(value).map_err(custom)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut access: A) -> std::result::Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(FromJson)? {
            items.push(item);
        }
        list(items).map_err(custom)
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut access: A) -> std::result::Result<Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(key) = access.next_key::<String>()? {
            pairs.push((text(key).map_err(custom)?, access.next_value_seed(FromJson)?));
        }
        Dict::new(pairs).map(Value::Dict).map_err(custom)
    }
}

pub fn from_json(json: &[u8]) -> Result<Value> {
    use serde::de::DeserializeSeed;
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let value = FromJson.deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    value.map_err(|e| Failure::invalid(format!("template variables are not JSON: {e}")))
}
