//! Source to syntax tree: minijinja's parser, with what Hugging Face's dialect adds and with bounds that keep the tree
//! shallow enough to walk and to drop.

use minijinja::machinery::ast::Stmt;
use minijinja::machinery::{parse, Token, Tokenizer, WhitespaceConfig};

use crate::failure::{Failure, Result};

/// Chains such as `a ~ a ~ a` nest without brackets, so a tag's length bounds its depth; `elif`s nest in each other.
const MAX_TAG_TOKENS: usize = 2000;
const MAX_TAGS: usize = 5000;
const MAX_SOURCE_BYTES: usize = 4 << 20;

/// A syntax tree together with the text that it points into.
pub struct Parsed {
    // Dropped before the source. The lifetime is a white lie: the tree never leaves this struct except by reference.
    tree: Stmt<'static>,
    source: Box<str>,
}

// As Jinja does by HF's settings: the newline after a block tag and the blanks before one on its line are dropped.
const WHITESPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };

impl Parsed {
    pub fn new(source: &[u8]) -> Result<Parsed> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(Failure::corrupt(format!("template is longer than {MAX_SOURCE_BYTES} bytes")));
        }
        let source = std::str::from_utf8(source).map_err(|_| Failure::corrupt("template is not UTF-8"))?;
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let source = plain_tags(&source)?.into_boxed_str();
        // SAFETY: the boxed text does not move when the box does, and it is dropped after the tree.
        let text: &'static str = unsafe { &*std::ptr::from_ref::<str>(&source) };
        let tree = parse(text, "chat_template", Default::default(), WHITESPACE)
            .map_err(|e| Failure::corrupt(format!("template does not parse: {e}")))?;
        Ok(Parsed { tree, source })
    }

    /// The tree and its source.
    ///
    /// # Safety
    /// Neither may be used after `self` is gone.
    pub unsafe fn tree(&self) -> (&'static Stmt<'static>, &'static str) {
        (&*std::ptr::from_ref(&self.tree), &*std::ptr::from_ref::<str>(&self.source))
    }
}

/// Turns `{% generation %}` blocks, which only mark text, into `{% with %}` blocks, and checks the bounds.
fn plain_tags(source: &str) -> Result<String> {
    let mut tokenizer = Tokenizer::new(source, "chat_template", false, Default::default(), WHITESPACE);
    let mut plain = String::with_capacity(source.len());
    let mut copied = 0;
    let (mut tags, mut tokens) = (0, 0);
    let mut starts_block = false;
    loop {
        let token = tokenizer.next_token().map_err(|e| Failure::corrupt(format!("template does not parse: {e}")))?;
        let Some((token, span)) = token else { break };
        tokens += 1;
        let mut started_block = false;
        match token {
            Token::BlockStart | Token::VariableStart => {
                started_block = matches!(token, Token::BlockStart);
                tags += 1;
                tokens = 0;
            }
            Token::Ident(name @ ("generation" | "endgeneration")) if starts_block => {
                plain.push_str(&source[copied..span.start_offset as usize]);
                plain.push_str(if name == "generation" { "with" } else { "endwith" });
                copied = span.end_offset as usize;
            }
            Token::TemplateData(_) => tokens = 0,
            _ => {}
        }
        starts_block = started_block;
        if tags > MAX_TAGS || tokens > MAX_TAG_TOKENS {
            return Err(Failure::corrupt(format!(
                "template has more than {MAX_TAGS} tags, or a tag of more than {MAX_TAG_TOKENS} tokens"
            )));
        }
    }
    plain.push_str(&source[copied..]);
    Ok(plain)
}
