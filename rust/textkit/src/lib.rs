//! The entries of textkit.h. Everything unsafe about the C interface is here.

mod failure;
mod jinja;
mod pieces;
mod sentencepiece;
mod tokenizer;

use std::ffi::{c_char, c_int};
use std::ptr;

use failure::{contained, Failure, Result, Status};
use jinja::Template;
use tokenizer::{TextTokenizer, Vocabulary};

#[repr(C)]
pub struct Text {
    data: *mut c_char,
    size: usize,
}

#[repr(C)]
pub struct Ids {
    data: *mut u32,
    size: usize,
}

#[repr(C)]
pub struct Slice {
    data: *const c_char,
    size: usize,
}

#[repr(C)]
pub struct Bpe {
    tokens: *const Slice,
    num_tokens: usize,
    merges: *const Slice,
    num_merges: usize,
    added: *const u32,
    added_is_special: *const u8,
    num_added: usize,
}

#[repr(C)]
pub struct SentencePieceVocabulary {
    tokens: *const Slice,
    scores: *const f32,
    kinds: *const u8,
    num_tokens: usize,
    unknown: *const u32,
    before: *const u32,
    num_before: usize,
    after: *const u32,
    num_after: usize,
    space_prefix: c_int,
}

/// The caller's items. A null pointer is an empty list.
unsafe fn items<'a, T>(data: *const T, size: usize) -> &'a [T] {
    if data.is_null() || size == 0 {
        &[]
    } else {
        std::slice::from_raw_parts(data, size)
    }
}

unsafe fn vocabulary(bpe: &Bpe) -> Vocabulary<'_> {
    let texts = |data, size| items::<Slice>(data, size).iter().map(|slice| bytes(slice.data, slice.size));
    let merges: Vec<&[u8]> = texts(bpe.merges, 2 * bpe.num_merges).collect();
    Vocabulary {
        tokens: texts(bpe.tokens, bpe.num_tokens).collect(),
        merges: merges.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(),
        added: items(bpe.added, bpe.num_added)
            .iter()
            .zip(items(bpe.added_is_special, bpe.num_added))
            .map(|(id, special)| (*id, *special != 0))
            .collect(),
    }
}

unsafe fn sentencepiece_vocabulary(given: &SentencePieceVocabulary) -> Result<sentencepiece::Vocabulary<'_>> {
    let slices = items(given.tokens, given.num_tokens);
    let scores = items(given.scores, given.num_tokens);
    let kinds = items(given.kinds, given.num_tokens);
    let mut tokens = Vec::with_capacity(slices.len());
    for ((slice, score), kind) in slices.iter().zip(scores).zip(kinds) {
        let kind = match kind {
            0 => sentencepiece::Kind::Normal,
            1 => sentencepiece::Kind::Added { special: false, strips: false },
            2 => sentencepiece::Kind::Added { special: true, strips: false },
            3 => sentencepiece::Kind::Added { special: true, strips: true },
            4 => sentencepiece::Kind::Byte,
            _ => return Err(Failure::invalid(format!("a token's kind {kind}"))),
        };
        tokens.push((bytes(slice.data, slice.size), *score, kind));
    }
    Ok(sentencepiece::Vocabulary {
        tokens,
        unknown: given.unknown.as_ref().copied(),
        before: items(given.before, given.num_before).to_vec(),
        after: items(given.after, given.num_after).to_vec(),
        space_prefix: given.space_prefix != 0,
    })
}

/// The caller's bytes. A null pointer is an empty text.
unsafe fn bytes<'a>(data: *const c_char, size: usize) -> &'a [u8] {
    items(data.cast(), size)
}

/// Hands a boxed slice to the caller.
fn leak<T>(values: Vec<T>) -> (*mut T, usize) {
    let boxed = values.into_boxed_slice();
    let size = boxed.len();
    (if size == 0 { ptr::null_mut() } else { Box::into_raw(boxed).cast() }, size)
}

unsafe fn unleak<T>(data: *mut T, size: usize) {
    if !data.is_null() {
        drop(Box::from_raw(ptr::slice_from_raw_parts_mut(data, size)));
    }
}

unsafe fn put_text(text: *mut Text, bytes: Vec<u8>) {
    if let Some(text) = text.as_mut() {
        let (data, size) = leak(bytes);
        *text = Text { data: data.cast(), size };
    }
}

/// Runs `body`, gives its result to `put` or its message to `error`.
unsafe fn entry<T>(error: *mut Text, body: impl FnOnce() -> Result<T>, put: impl FnOnce(T)) -> Status {
    match contained(body) {
        Ok(value) => {
            put(value);
            Status::Ok
        }
        Err(Failure { status, message, .. }) => {
            put_text(error, message.into_bytes());
            status
        }
    }
}

/// Lends bytes to the caller: 1, or 0 for none.
unsafe fn lend(found: Option<&[u8]>, data: *mut *const c_char, size: *mut usize) -> c_int {
    match found {
        Some(found) => {
            *data = found.as_ptr().cast();
            *size = found.len();
            1
        }
        None => 0,
    }
}

/// # Safety
/// As textkit.h says; so for every function below.
#[no_mangle]
pub unsafe extern "C" fn textkit_text_free(text: *mut Text) {
    if let Some(text) = text.as_mut() {
        unleak(text.data.cast::<u8>(), text.size);
        *text = Text { data: ptr::null_mut(), size: 0 };
    }
}

#[no_mangle]
pub unsafe extern "C" fn textkit_ids_free(ids: *mut Ids) {
    if let Some(ids) = ids.as_mut() {
        unleak(ids.data, ids.size);
        *ids = Ids { data: ptr::null_mut(), size: 0 };
    }
}

#[no_mangle]
pub unsafe extern "C" fn textkit_tokenizer_new(
    json: *const c_char,
    size: usize,
    tokenizer: *mut *mut TextTokenizer,
    error: *mut Text,
) -> Status {
    entry(error, || TextTokenizer::new(bytes(json, size)), |made| *tokenizer = Box::into_raw(Box::new(made)))
}

#[no_mangle]
pub unsafe extern "C" fn textkit_tokenizer_new_bpe(
    json: *const c_char,
    size: usize,
    bpe: &Bpe,
    tokenizer: *mut *mut TextTokenizer,
    error: *mut Text,
) -> Status {
    entry(
        error,
        || TextTokenizer::from_bpe(bytes(json, size), &vocabulary(bpe)),
        |made| *tokenizer = Box::into_raw(Box::new(made)),
    )
}

#[no_mangle]
pub unsafe extern "C" fn textkit_tokenizer_new_sentencepiece(
    vocabulary: &SentencePieceVocabulary,
    tokenizer: *mut *mut TextTokenizer,
    error: *mut Text,
) -> Status {
    entry(
        error,
        || TextTokenizer::from_sentencepiece(&sentencepiece_vocabulary(vocabulary)?),
        |made| *tokenizer = Box::into_raw(Box::new(made)),
    )
}

#[no_mangle]
pub unsafe extern "C" fn textkit_tokenizer_free(tokenizer: *mut TextTokenizer) {
    if !tokenizer.is_null() {
        let _ = contained(|| {
            drop(Box::from_raw(tokenizer));
            Ok(())
        });
    }
}

#[no_mangle]
pub unsafe extern "C" fn textkit_tokenizer_encode(
    tokenizer: &TextTokenizer,
    text: *const c_char,
    size: usize,
    add_special_tokens: c_int,
    ids: *mut Ids,
    error: *mut Text,
) -> Status {
    entry(
        error,
        || tokenizer.encode(bytes(text, size), add_special_tokens != 0),
        |encoded| {
            let (data, size) = leak(encoded);
            *ids = Ids { data, size };
        },
    )
}

#[no_mangle]
pub extern "C" fn textkit_tokenizer_vocab_size(tokenizer: &TextTokenizer) -> usize {
    tokenizer.vocab_size
}

#[no_mangle]
pub unsafe extern "C" fn textkit_tokenizer_token_to_id(
    tokenizer: &TextTokenizer,
    text: *const c_char,
    size: usize,
    id: *mut u32,
) -> c_int {
    match contained(|| Ok(tokenizer.token_to_id(bytes(text, size)))) {
        Ok(Some(found)) => {
            *id = found;
            1
        }
        _ => 0,
    }
}

#[no_mangle]
pub unsafe extern "C" fn textkit_tokenizer_token(
    tokenizer: &TextTokenizer,
    id: u32,
    data: *mut *const c_char,
    size: *mut usize,
) -> c_int {
    lend(tokenizer.pieces.token(id), data, size)
}

#[no_mangle]
pub extern "C" fn textkit_tokenizer_is_special(tokenizer: &TextTokenizer, id: u32) -> c_int {
    c_int::from(tokenizer.pieces.is_special(id))
}

#[no_mangle]
pub unsafe extern "C" fn textkit_tokenizer_piece(
    tokenizer: &TextTokenizer,
    id: u32,
    first: c_int,
    data: *mut *const c_char,
    size: *mut usize,
) -> c_int {
    lend(tokenizer.pieces.piece(id, first != 0), data, size)
}

#[no_mangle]
pub extern "C" fn textkit_tokenizer_strip_left(tokenizer: &TextTokenizer) -> usize {
    tokenizer.pieces.strip_left
}

#[no_mangle]
pub unsafe extern "C" fn textkit_template_new(
    source: *const c_char,
    size: usize,
    chat_template: *mut *mut Template,
    error: *mut Text,
) -> Status {
    entry(error, || Template::new(bytes(source, size)), |made| *chat_template = Box::into_raw(Box::new(made)))
}

#[no_mangle]
pub unsafe extern "C" fn textkit_template_free(chat_template: *mut Template) {
    if !chat_template.is_null() {
        let _ = contained(|| {
            drop(Box::from_raw(chat_template));
            Ok(())
        });
    }
}

#[no_mangle]
pub unsafe extern "C" fn textkit_template_render(
    chat_template: &Template,
    variables_json: *const c_char,
    size: usize,
    output: *mut Text,
    error: *mut Text,
) -> Status {
    entry(
        error,
        || chat_template.render(bytes(variables_json, size)),
        |rendered| put_text(output, rendered.into_bytes()),
    )
}
