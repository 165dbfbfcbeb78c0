//! Chat templates: Jinja as Hugging Face's transformers runs it. minijinja parses; the evaluator is our own, because
//! every step of it has to be metered (minijinja's own virtual machine bounds its steps, but not what one step may
//! copy or how deep it nests values) and because prompts must come out as Python prints them.

mod args;
mod eval;
mod filters;
mod functions;
mod json;
mod meter;
mod methods;
mod operators;
mod output;
mod parse;
mod python;
mod tests;
mod value;
mod variables;

use crate::failure::{contained, Failure, Result};

/// Enough for MAX_DEPTH levels of evaluation (meter.rs) and for the parser at the bounds of parse.rs.
const STACK_BYTES: usize = 64 << 20;

pub struct Template {
    parsed: Option<parse::Parsed>,
}

impl Template {
    pub fn new(source: &[u8]) -> Result<Template> {
        on_own_thread(|| Ok(Template { parsed: Some(parse::Parsed::new(source)?) }))
    }

    pub fn render(&self, variables_json: &[u8]) -> Result<String> {
        on_own_thread(|| {
            let variables = match variables::from_json(variables_json)? {
                value::Value::Dict(variables) => variables,
                other => return Err(Failure::invalid(format!("template variables are {}", other.type_name()))),
            };
            let parsed = self.parsed.as_ref().expect("only drop takes it");
            // SAFETY: `self` outlives this call, and only text leaves the evaluator.
            eval::render(unsafe { parsed.tree() }, variables)
        })
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        let parsed = self.parsed.take();
        let _ = on_own_thread(|| {
            drop(parsed);
            Ok(())
        });
    }
}

/// The caller's stack may be small, and the meter wants a fresh thread.
fn on_own_thread<T: Send>(body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("chat_template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || contained(body))
            .map_err(|e| Failure::exhausted(format!("no thread for a template: {e}")))?;
        thread.join().unwrap_or_else(|_| Err(Failure::new(crate::failure::Status::Internal, "template thread died")))
    })
}
