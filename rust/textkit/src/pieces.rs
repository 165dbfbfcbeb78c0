//! What each id adds to decoded text, worked out once per tokenizer, so that decoding (whole or streaming) is a walk
//! over byte strings. Equal to the decoder's own answer wherever the bytes form whole characters; where they do not,
//! every maximal broken part becomes one U+FFFD (the decoder would turn a whole run of byte tokens into them).

use tokenizers::decoders::DecoderWrapper;
use tokenizers::{Decoder, Tokenizer};

use crate::failure::{Failure, Result, Status};

/// Ids index tables, so a huge one would cost memory for nothing.
const MAX_ID: u32 = 1 << 24;
const MAX_PIECE_BYTES: usize = 1 << 16;

/// Byte strings end to end; entry i lies between ends[i-1] and ends[i].
#[derive(Default)]
struct Strings {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Strings {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
    }

    fn get(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..self.ends[index]]
    }
}

#[derive(Clone, Copy, PartialEq)]
pub enum Use {
    Unused,
    Normal,
    Special,
}

pub struct Pieces {
    uses: Vec<Use>,
    tokens: Strings,
    later: Strings,
    /// None when the first token of a text is like any other.
    first: Option<Strings>,
    pub strip_left: usize,
}

/// Pieces of a vocabulary whose ids have no gaps, where the first token of a text is like any other.
pub struct PiecesBuilder(Pieces);

impl PiecesBuilder {
    pub fn new(size: usize, strip_left: usize) -> Result<PiecesBuilder> {
        if size > MAX_ID as usize {
            return Err(Failure::corrupt(format!("{size} tokens are beyond {MAX_ID}")));
        }
        Ok(PiecesBuilder(Pieces {
            uses: Vec::with_capacity(size),
            tokens: Strings::default(),
            later: Strings::default(),
            first: None,
            strip_left,
        }))
    }

    /// The next id's.
    pub fn push(&mut self, used: Use, token: &str, piece: &[u8]) {
        self.0.uses.push(used);
        self.0.tokens.push(token.as_bytes());
        self.0.later.push(piece);
    }

    pub fn finish(self) -> Pieces {
        self.0
    }
}

impl Pieces {
    /// `largest`: the largest id.
    pub fn new(tokenizer: &Tokenizer, largest: u32) -> Result<Pieces> {
        let plan = Plan::new(tokenizer.get_decoder())?;
        if largest >= MAX_ID {
            return Err(Failure::corrupt(format!("token id {largest} is beyond {MAX_ID}")));
        }
        let mut pieces = Pieces {
            uses: Vec::new(),
            tokens: Strings::default(),
            later: Strings::default(),
            first: plan.first_differs.then(Strings::default),
            strip_left: plan.strip_left,
        };
        for id in 0..=largest {
            let token = tokenizer.id_to_token(id);
            pieces.uses.push(match &token {
                None => Use::Unused,
                Some(token) if tokenizer.get_added_vocabulary().is_special_token(token) => Use::Special,
                Some(_) => Use::Normal,
            });
            let token = token.unwrap_or_default();
            pieces.tokens.push(token.as_bytes());
            pieces.later.push(&plan.piece(&token, false)?);
            if let Some(first) = &mut pieces.first {
                first.push(&plan.piece(&token, true)?);
            }
        }
        Ok(pieces)
    }

    pub fn contains(&self, id: u32) -> bool {
        self.uses.get(id as usize).is_some_and(|u| *u != Use::Unused)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.uses.get(id as usize) == Some(&Use::Special)
    }

    pub fn token(&self, id: u32) -> Option<&[u8]> {
        self.contains(id).then(|| self.tokens.get(id as usize))
    }

    pub fn piece(&self, id: u32, first: bool) -> Option<&[u8]> {
        let strings = match &self.first {
            Some(strings) if first => strings,
            _ => &self.later,
        };
        self.contains(id).then(|| strings.get(id as usize))
    }
}

/// The decoder, taken apart into what can be done token by token and what is done to the joined text.
struct Plan<'a> {
    /// Per-token steps, in order.
    steps: Vec<Step<'a>>,
    strip_left: usize,
    first_differs: bool,
}

enum Step<'a> {
    ByteLevel,
    ByteFallback,
    /// Joins tokens by spaces: what the library does without a decoder.
    Spaces,
    /// Maps each token to one token, whatever stands around it (but for the first).
    Decoder(&'a DecoderWrapper),
}

impl<'a> Plan<'a> {
    fn new(decoder: Option<&'a DecoderWrapper>) -> Result<Plan<'a>> {
        let mut plan = Plan { steps: Vec::new(), strip_left: 0, first_differs: false };
        match decoder {
            None => {
                plan.steps.push(Step::Spaces);
                plan.first_differs = true;
            }
            Some(decoder) => {
                let mut fused = false;
                plan.add(decoder, &mut fused)?;
            }
        }
        Ok(plan)
    }

    fn add(&mut self, decoder: &'a DecoderWrapper, fused: &mut bool) -> Result<()> {
        let unsupported = |what: &str| Err(Failure::new(Status::Unsupported, format!("decoder {what}")));
        match decoder {
            DecoderWrapper::Sequence(sequence) => {
                for part in sequence.get_decoders() {
                    self.add(part, fused)?;
                }
            }
            DecoderWrapper::Fuse(_) => *fused = true,
            DecoderWrapper::Strip(strip) if *fused => {
                if strip.content != ' ' || strip.stop != 0 {
                    return unsupported("Strip of anything but leading spaces after Fuse");
                }
                self.strip_left += strip.start;
            }
            _ if *fused => return unsupported("Fuse before anything but Strip"),
            DecoderWrapper::ByteLevel(_) => {
                self.steps.push(Step::ByteLevel);
                *fused = true;
            }
            DecoderWrapper::ByteFallback(_) => self.steps.push(Step::ByteFallback),
            DecoderWrapper::WordPiece(_) | DecoderWrapper::Metaspace(_) => {
                self.steps.push(Step::Decoder(decoder));
                self.first_differs = true;
            }
            DecoderWrapper::Replace(_) | DecoderWrapper::Strip(_) => self.steps.push(Step::Decoder(decoder)),
            DecoderWrapper::BPE(_) => return unsupported("BPEDecoder"),
            DecoderWrapper::CTC(_) => return unsupported("CTC"),
        }
        Ok(())
    }

    fn piece(&self, token: &str, first: bool) -> Result<Vec<u8>> {
        let mut text = token.to_owned();
        for step in &self.steps {
            match step {
                Step::ByteLevel => return Ok(byte_level(&text)),
                Step::ByteFallback => {
                    if let Some(byte) = fallback_byte(&text) {
                        return Ok(vec![byte]);
                    }
                }
                Step::Spaces => {
                    if !first {
                        text.insert(0, ' ');
                    }
                }
                Step::Decoder(decoder) => {
                    let mut chain = if first { vec![text] } else { vec!["x".to_owned(), text] };
                    chain = decoder
                        .decode_chain(chain)
                        .map_err(|e| Failure::corrupt(format!("decoder failed on token {token:?}: {e}")))?;
                    text = chain.pop().unwrap_or_default();
                    if text.len() > MAX_PIECE_BYTES {
                        return Err(Failure::corrupt(format!("token decodes to more than {MAX_PIECE_BYTES} bytes")));
                    }
                }
            }
        }
        Ok(text.into_bytes())
    }
}

pub fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 && hex.is_ascii() {
        u8::from_str_radix(hex, 16).ok()
    } else {
        None
    }
}

const fn is_plain(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The bytes that are not plain, in order: U+0100 and the characters after it stand for them.
const MOVED: [u8; 68] = {
    let mut moved = [0; 68];
    let (mut byte, mut count) = (0usize, 0);
    while byte < 256 {
        if !is_plain(byte as u8) {
            moved[count] = byte as u8;
            count += 1;
        }
        byte += 1;
    }
    moved
};

/// The byte that a character of the byte-level alphabet stands for: plain Latin-1 stands for itself.
fn byte_of(c: char) -> Option<u8> {
    match u8::try_from(u32::from(c)) {
        Ok(byte) => is_plain(byte).then_some(byte),
        Err(_) => MOVED.get(u32::from(c) as usize - 256).copied(),
    }
}

/// A token with any other character in it stands for its own UTF-8.
fn byte_level(token: &str) -> Vec<u8> {
    token.chars().map(byte_of).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
}
