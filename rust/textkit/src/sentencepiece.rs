//! SentencePiece's byte-pair vocabularies as GGUF files hold them: tokens with scores. Of two neighbours in a text, those
//! are joined first whose joint token scores best (Sennrich et al., https://arxiv.org/abs/1508.07909); what is no token
//! becomes its bytes' tokens.
//!
//! The library's BPE takes merges instead of scores. Working them out, and building it of them, costs a second for a
//! vocabulary of 262,144; and among equal scores, or with a character that is no token itself, it joins otherwise.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use ahash::RandomState;
use aho_corasick::{AhoCorasick, MatchKind};

use crate::failure::{Failure, Result};
use crate::pieces::{fallback_byte, Pieces, PiecesBuilder, Use};

/// SentencePiece's space, U+2581.
const SPACE: &str = "\u{2581}";

/// Numbers as in textkit.h.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Normal,
    /// Stands for itself wherever it is spelled out.
    Added {
        special: bool,
        /// Blanks behind it belong to it.
        strips: bool,
    },
    Byte,
}

/// The caller's vocabulary: bytes that are not yet known to be UTF-8.
pub struct Vocabulary<'a> {
    /// Spelling, score and kind of each id.
    pub tokens: Vec<(&'a [u8], f32, Kind)>,
    pub unknown: Option<u32>,
    /// What add_special_tokens puts around a text.
    pub before: Vec<u32>,
    pub after: Vec<u32>,
    /// A text begins with a space that is not written.
    pub space_prefix: bool,
}

/// Ids by spelling: a table of ids, at most half full, in which a spelling is looked for from its hash on.
struct Index {
    ids: Vec<u32>,
    hash: RandomState,
}

const EMPTY: u32 = u32::MAX;

impl Index {
    fn new(size: usize) -> Index {
        Index { ids: vec![EMPTY; (2 * size).next_power_of_two()], hash: RandomState::new() }
    }

    /// Where `spelling` is or would be.
    fn place(&self, pieces: &Pieces, spelling: &[u8]) -> usize {
        let mask = self.ids.len() - 1;
        let mut place = self.hash.hash_one(spelling) as usize & mask;
        while self.ids[place] != EMPTY && pieces.token(self.ids[place]) != Some(spelling) {
            place = (place + 1) & mask;
        }
        place
    }

    fn find(&self, pieces: &Pieces, spelling: &[u8]) -> Option<u32> {
        let id = self.ids[self.place(pieces, spelling)];
        (id != EMPTY).then_some(id)
    }
}

/// Tokens that stand for themselves.
struct Added {
    finder: AhoCorasick,
    /// Id of each pattern, and whether it strips.
    tokens: Vec<(u32, bool)>,
}

impl Added {
    fn new(vocabulary: &Vocabulary) -> Result<Option<Added>> {
        let mut spellings = Vec::new();
        let mut tokens = Vec::new();
        for (id, (spelling, _, kind)) in vocabulary.tokens.iter().enumerate() {
            if let (Kind::Added { strips, .. }, false) = (kind, spelling.is_empty()) {
                spellings.push(*spelling);
                tokens.push((id as u32, *strips));
            }
        }
        if tokens.is_empty() {
            return Ok(None);
        }
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(spellings)
            .map_err(|e| Failure::corrupt(format!("GGUF tokenizer: added tokens: {e}")))?;
        Ok(Some(Added { finder, tokens }))
    }
}

pub struct SentencePiece {
    index: Index,
    scores: Vec<f32>,
    bytes: [Option<u32>; 256],
    added: Option<Added>,
    unknown: Option<u32>,
    before: Vec<u32>,
    after: Vec<u32>,
    space_prefix: bool,
}

/// A part of the text between two joints. A joined part has no bytes.
struct Part {
    start: usize,
    size: usize,
    previous: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

/// Two neighbours that would make a token. Best first: the higher score, then the one further left.
#[derive(PartialEq)]
struct Pair {
    score: f32,
    left: Reverse<usize>,
    right: usize,
    size: usize,
}

impl Eq for Pair {}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Pair) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Pair {
    fn cmp(&self, other: &Pair) -> Ordering {
        self.score.total_cmp(&other.score).then(self.left.cmp(&other.left))
    }
}

impl SentencePiece {
    pub fn new(vocabulary: &Vocabulary) -> Result<(SentencePiece, Pieces)> {
        let size = vocabulary.tokens.len();
        if vocabulary.before.iter().chain(&vocabulary.after).chain(&vocabulary.unknown).any(|id| *id as usize >= size) {
            return Err(Failure::invalid("a special token's id is outside the vocabulary"));
        }
        let mut pieces = PiecesBuilder::new(size, usize::from(vocabulary.space_prefix))?;
        let mut bytes = [None; 256];
        for (id, (spelling, _, kind)) in vocabulary.tokens.iter().enumerate() {
            let text = std::str::from_utf8(spelling)
                .map_err(|_| Failure::corrupt("GGUF tokenizer: a token or merge is not UTF-8"))?;
            match (kind, fallback_byte(text)) {
                (Kind::Byte, Some(byte)) => {
                    bytes[usize::from(byte)] = Some(id as u32);
                    pieces.push(Use::Normal, text, &[byte]);
                }
                (Kind::Added { special, .. }, _) => {
                    pieces.push(if *special { Use::Special } else { Use::Normal }, text, text.as_bytes());
                }
                _ if text.contains(SPACE) => pieces.push(Use::Normal, text, text.replace(SPACE, " ").as_bytes()),
                _ => pieces.push(Use::Normal, text, text.as_bytes()),
            }
        }
        let pieces = pieces.finish();
        let mut index = Index::new(size.max(1));
        for (id, (spelling, ..)) in vocabulary.tokens.iter().enumerate().filter(|(_, token)| !token.0.is_empty()) {
            let place = index.place(&pieces, spelling);
            if index.ids[place] != EMPTY {
                let other = index.ids[place];
                return Err(Failure::corrupt(format!("GGUF tokenizer: tokens {other} and {id} are spelled alike")));
            }
            index.ids[place] = id as u32;
        }
        let made = SentencePiece {
            index,
            // Without negative zeros, which are no less than others.
            scores: vocabulary.tokens.iter().map(|token| token.1 + 0.0).collect(),
            bytes,
            added: Added::new(vocabulary)?,
            unknown: vocabulary.unknown,
            before: vocabulary.before.clone(),
            after: vocabulary.after.clone(),
            space_prefix: vocabulary.space_prefix,
        };
        Ok((made, pieces))
    }

    pub fn token_to_id(&self, pieces: &Pieces, spelling: &[u8]) -> Option<u32> {
        self.index.find(pieces, spelling)
    }

    pub fn encode(&self, pieces: &Pieces, text: &str, add_special_tokens: bool) -> Vec<u32> {
        let mut ids = if add_special_tokens { self.before.clone() } else { Vec::new() };
        let mut start = 0;
        if let Some(added) = &self.added {
            while let Some(found) = added.finder.find(&text.as_bytes()[start..]) {
                self.encode_plain(pieces, &text[start..start + found.start()], &mut ids);
                let (id, strips) = added.tokens[found.pattern().as_usize()];
                ids.push(id);
                start += found.end();
                if strips {
                    start =
                        text.len() - text[start..].trim_start_matches([' ', '\t', '\n', '\r', '\x0b', '\x0c']).len();
                }
            }
        }
        self.encode_plain(pieces, &text[start..], &mut ids);
        if add_special_tokens {
            ids.extend(&self.after);
        }
        ids
    }

    /// A text without added tokens.
    fn encode_plain(&self, pieces: &Pieces, text: &str, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        let mut spelled = String::with_capacity(text.len() + 3);
        if self.space_prefix {
            spelled.push_str(SPACE);
        }
        for c in text.chars() {
            if c == ' ' {
                spelled.push_str(SPACE);
            } else {
                spelled.push(c);
            }
        }
        let mut unknown_before = false;
        for part in self.joined(pieces, &spelled) {
            let part = part.as_bytes();
            if let Some(id) = self.index.find(pieces, part) {
                ids.push(id);
                unknown_before = false;
                continue;
            }
            let bytes: Option<Vec<u32>> = part.iter().map(|byte| self.bytes[usize::from(*byte)]).collect();
            match (bytes, self.unknown) {
                (Some(bytes), _) => {
                    ids.extend(bytes);
                    unknown_before = false;
                }
                (None, Some(unknown)) if !unknown_before => {
                    ids.push(unknown);
                    unknown_before = true;
                }
                _ => {}
            }
        }
    }

    /// The text cut into tokens, and characters that are none.
    fn joined<'t>(&self, pieces: &Pieces, text: &'t str) -> impl Iterator<Item = &'t str> {
        let mut parts: Vec<Part> = text
            .char_indices()
            .enumerate()
            .map(|(i, (start, c))| Part {
                start,
                size: c.len_utf8(),
                previous: i.checked_sub(1).unwrap_or(NONE),
                next: i + 1,
            })
            .collect();
        if let Some(last) = parts.last_mut() {
            last.next = NONE;
        }
        let mut pairs = BinaryHeap::new();
        let add = |parts: &[Part], pairs: &mut BinaryHeap<Pair>, left: usize, right: usize| {
            if left == NONE || right == NONE {
                return;
            }
            let size = parts[left].size + parts[right].size;
            let start = parts[left].start;
            if let Some(id) = self.index.find(pieces, &text.as_bytes()[start..start + size]) {
                pairs.push(Pair { score: self.scores[id as usize], left: Reverse(left), right, size });
            }
        };
        for right in 1..parts.len() {
            add(&parts, &mut pairs, right - 1, right);
        }
        while let Some(Pair { left: Reverse(left), right, size, .. }) = pairs.pop() {
            // Either of them may have been joined to another meanwhile.
            if parts[left].size == 0 || parts[right].size == 0 || parts[left].size + parts[right].size != size {
                continue;
            }
            let next = parts[right].next;
            parts[left].size = size;
            parts[left].next = next;
            parts[right].size = 0;
            if next != NONE {
                parts[next].previous = left;
            }
            let previous = parts[left].previous;
            add(&parts, &mut pairs, previous, left);
            add(&parts, &mut pairs, left, next);
        }
        parts.into_iter().filter(|part| part.size != 0).map(|part| &text[part.start..part.start + part.size])
    }
}
