//! A Hugging Face tokenizer with its pieces.

use ahash::AHashMap;
use tokenizers::models::bpe::BPE;
use tokenizers::models::ModelWrapper;
use tokenizers::{AddedToken, Tokenizer};

use crate::failure::{Failure, Result};
use crate::pieces::Pieces;
use crate::sentencepiece::{self, SentencePiece};

/// A byte-pair vocabulary: the caller's bytes, not yet known to be UTF-8.
pub struct Vocabulary<'a> {
    pub tokens: Vec<&'a [u8]>,
    pub merges: Vec<(&'a [u8], &'a [u8])>,
    /// Ids, and whether they are special.
    pub added: Vec<(u32, bool)>,
}

fn utf8(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).map_err(|_| Failure::corrupt("GGUF tokenizer: a token or merge is not UTF-8"))
}

fn unparsed(error: impl std::fmt::Display) -> Failure {
    Failure::corrupt(format!("tokenizer does not parse: {error}"))
}

/// The options of `empty` with a vocabulary.
fn filled(empty: &BPE, vocabulary: &Vocabulary) -> Result<BPE> {
    let mut ids = AHashMap::with_capacity(vocabulary.tokens.len());
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        if let Some(other) = ids.insert(utf8(token)?.to_owned(), id as u32) {
            return Err(Failure::corrupt(format!("GGUF tokenizer: tokens {other} and {id} are spelled alike")));
        }
    }
    let mut merges = Vec::with_capacity(vocabulary.merges.len());
    for (left, right) in &vocabulary.merges {
        merges.push((utf8(left)?.to_owned(), utf8(right)?.to_owned()));
    }
    let mut builder = BPE::builder()
        .vocab_and_merges(ids, merges)
        .fuse_unk(empty.fuse_unk)
        .byte_fallback(empty.byte_fallback)
        .ignore_merges(empty.ignore_merges);
    if let Some(unknown) = &empty.unk_token {
        builder = builder.unk_token(unknown.clone());
    }
    builder.build().map_err(unparsed)
}

enum Encoder {
    /// The library's own.
    Library(Box<Tokenizer>),
    SentencePiece(SentencePiece),
}

pub struct TextTokenizer {
    encoder: Encoder,
    pub pieces: Pieces,
    pub vocab_size: usize,
}

impl TextTokenizer {
    pub fn new(json: &[u8]) -> Result<TextTokenizer> {
        let tokenizer = Tokenizer::from_bytes(json).map_err(unparsed)?;
        let vocab = tokenizer.get_vocab(true);
        let largest = vocab.values().copied().max().unwrap_or(0);
        TextTokenizer::from(tokenizer, largest, vocab.len())
    }

    pub fn from_bpe(json: &[u8], vocabulary: &Vocabulary) -> Result<TextTokenizer> {
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(unparsed)?;
        let ModelWrapper::BPE(empty) = tokenizer.get_model() else {
            return Err(Failure::invalid("the tokenizer's model must be a BPE"));
        };
        let model = filled(empty, vocabulary)?;
        tokenizer.with_model(model);
        let mut added = Vec::with_capacity(vocabulary.added.len());
        for (id, special) in &vocabulary.added {
            let token = vocabulary.tokens.get(*id as usize).ok_or_else(|| Failure::invalid("an added token's id"))?;
            added.push(AddedToken::from(utf8(token)?, *special).normalized(false));
        }
        tokenizer.add_tokens(&added);
        let size = vocabulary.tokens.len();
        TextTokenizer::from(tokenizer, size.saturating_sub(1) as u32, size)
    }

    fn from(mut tokenizer: Tokenizer, largest: u32, vocab_size: usize) -> Result<TextTokenizer> {
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| Failure::corrupt(e.to_string()))?;
        let pieces = Pieces::new(&tokenizer, largest)?;
        Ok(TextTokenizer { encoder: Encoder::Library(Box::new(tokenizer)), pieces, vocab_size })
    }

    pub fn from_sentencepiece(vocabulary: &sentencepiece::Vocabulary) -> Result<TextTokenizer> {
        let (model, pieces) = SentencePiece::new(vocabulary)?;
        Ok(TextTokenizer { encoder: Encoder::SentencePiece(model), pieces, vocab_size: vocabulary.tokens.len() })
    }

    pub fn encode(&self, text: &[u8], add_special_tokens: bool) -> Result<Vec<u32>> {
        let text = std::str::from_utf8(text)
            .map_err(|e| Failure::invalid(format!("text is not UTF-8 at byte {}", e.valid_up_to())))?;
        match &self.encoder {
            Encoder::SentencePiece(model) => Ok(model.encode(&self.pieces, text, add_special_tokens)),
            Encoder::Library(tokenizer) => {
                let encoding = tokenizer
                    .encode_fast(text, add_special_tokens)
                    .map_err(|e| Failure::invalid(format!("text cannot be encoded: {e}")))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    pub fn token_to_id(&self, token: &[u8]) -> Option<u32> {
        match &self.encoder {
            Encoder::SentencePiece(model) => model.token_to_id(&self.pieces, token),
            Encoder::Library(tokenizer) => tokenizer.token_to_id(std::str::from_utf8(token).ok()?),
        }
    }
}
