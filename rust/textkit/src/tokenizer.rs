//! A Hugging Face tokenizer with its pieces.

use tokenizers::Tokenizer;

use crate::failure::{Failure, Result};
use crate::pieces::Pieces;

pub struct TextTokenizer {
    tokenizer: Tokenizer,
    pub pieces: Pieces,
    pub vocab_size: usize,
}

impl TextTokenizer {
    pub fn new(json: &[u8]) -> Result<TextTokenizer> {
        let mut tokenizer =
            Tokenizer::from_bytes(json).map_err(|e| Failure::corrupt(format!("tokenizer does not parse: {e}")))?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| Failure::corrupt(e.to_string()))?;
        let pieces = Pieces::new(&tokenizer)?;
        let vocab_size = tokenizer.get_vocab_size(true);
        Ok(TextTokenizer { tokenizer, pieces, vocab_size })
    }

    pub fn encode(&self, text: &[u8], add_special_tokens: bool) -> Result<Vec<u32>> {
        let text = std::str::from_utf8(text)
            .map_err(|e| Failure::invalid(format!("text is not UTF-8 at byte {}", e.valid_up_to())))?;
        let encoding = self
            .tokenizer
            .encode_fast(text, add_special_tokens)
            .map_err(|e| Failure::invalid(format!("text cannot be encoded: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    pub fn token_to_id(&self, token: &[u8]) -> Option<u32> {
        self.tokenizer.token_to_id(std::str::from_utf8(token).ok()?)
    }
}
