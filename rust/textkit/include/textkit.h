// The whole interface of libtextkit, the Rust library behind reprise/text: tokenizers and chat templates.
// Threads: a tokenizer or template is immutable once made; any thread may use it. Freeing it ends all use.
// Errors: no function aborts or lets a panic out. On failure a function returns a status other than textkit_ok, leaves
// its output empty and puts a message for people into *error (free it with textkit_text_free).
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum textkit_status {
  textkit_ok = 0,
  textkit_invalid_argument = 1,    // the caller's text or JSON; also what a template itself refuses
  textkit_corrupt_data = 2,        // a tokenizer or template that does not parse
  textkit_unsupported = 3,         // understood, but not handled here (named in the message)
  textkit_resource_exhausted = 4,  // a template that runs too long, too deep or too large
  textkit_internal = 5,            // a panic inside the library
} textkit_status;

typedef struct textkit_tokenizer textkit_tokenizer;
typedef struct textkit_template textkit_template;

// Bytes that the library owns. Not ended by a zero byte.
typedef struct textkit_text {
  char* data;
  size_t size;
} textkit_text;

// Token ids that the library owns.
typedef struct textkit_ids {
  uint32_t* data;
  size_t size;
} textkit_ids;

// Free what was filled in above; an empty one may be freed too, and is empty afterwards.
void textkit_text_free(textkit_text* text);
void textkit_ids_free(textkit_ids* ids);

// ---- tokenizers ----

// From the text of a Hugging Face tokenizer.json. Its truncation and padding are switched off.
textkit_status textkit_tokenizer_new(const char* json, size_t size, textkit_tokenizer** tokenizer, textkit_text* error);

// Bytes of the caller's, for the time of the call.
typedef struct textkit_slice {
  const char* data;
  size_t size;
} textkit_slice;

// A byte-pair vocabulary without the way over JSON, which takes several times as long.
typedef struct textkit_bpe {
  const textkit_slice* tokens;  // id i is tokens[i]
  size_t num_tokens;
  const textkit_slice* merges;  // left and right of each, best first: 2 * num_merges
  size_t num_merges;
  const uint32_t* added;  // ids of the tokens that stand for themselves wherever they are spelled out
  const uint8_t* added_is_special;
  size_t num_added;
} textkit_bpe;

// From a tokenizer.json whose "model" is a BPE without vocabulary and merges, and which has no added tokens.
textkit_status textkit_tokenizer_new_bpe(const char* json, size_t size, const textkit_bpe* bpe,
                                         textkit_tokenizer** tokenizer, textkit_text* error);

// What a token of a SentencePiece vocabulary is.
typedef enum textkit_kind {
  textkit_kind_normal = 0,
  textkit_kind_user_defined = 1,    // stands for itself wherever it is spelled out
  textkit_kind_special = 2,         // the same, and left out where special tokens are skipped
  textkit_kind_special_strips = 3,  // the same; blanks behind it belong to it
  textkit_kind_byte = 4,            // "<0x0A>"
} textkit_kind;

// A vocabulary of tokens with scores, in which neighbours are joined by the score of what they make.
typedef struct textkit_sentencepiece {
  const textkit_slice* tokens;  // id i is tokens[i]; U+2581 stands for a space
  const float* scores;          // finite
  const uint8_t* kinds;
  size_t num_tokens;
  const uint32_t* unknown;  // null: what the vocabulary cannot spell is left out
  const uint32_t* before;   // what add_special_tokens puts around a text
  size_t num_before;
  const uint32_t* after;
  size_t num_after;
  int space_prefix;  // a text begins with a space that is not written
} textkit_sentencepiece;

textkit_status textkit_tokenizer_new_sentencepiece(const textkit_sentencepiece* vocabulary,
                                                   textkit_tokenizer** tokenizer, textkit_text* error);
void textkit_tokenizer_free(textkit_tokenizer* tokenizer);

// `text` must be UTF-8. Special tokens spelled out in it become their ids.
textkit_status textkit_tokenizer_encode(const textkit_tokenizer* tokenizer, const char* text, size_t size,
                                        int add_special_tokens, textkit_ids* ids, textkit_text* error);

// Number of ids, added tokens included. Ids need not be without gaps.
size_t textkit_tokenizer_vocab_size(const textkit_tokenizer* tokenizer);

// 1 and the id when `text` is one token's spelling, else 0.
int textkit_tokenizer_token_to_id(const textkit_tokenizer* tokenizer, const char* text, size_t size, uint32_t* id);

// 1 and the token's spelling, 0 for an id that is not in use. The bytes belong to the tokenizer.
int textkit_tokenizer_token(const textkit_tokenizer* tokenizer, uint32_t id, const char** data, size_t* size);

// 1 for special tokens (what skip_special_tokens leaves out).
int textkit_tokenizer_is_special(const textkit_tokenizer* tokenizer, uint32_t id);

// The bytes that the id adds to decoded text: as the first token of the text or as a later one. 1, or 0 for an id that
// is not in use. Bytes may be part of a character. They belong to the tokenizer.
int textkit_tokenizer_piece(const textkit_tokenizer* tokenizer, uint32_t id, int first, const char** data,
                            size_t* size);

// How many spaces the decoder takes off the start of a whole text.
size_t textkit_tokenizer_strip_left(const textkit_tokenizer* tokenizer);

// ---- chat templates ----

// Parses a Jinja template in Hugging Face's dialect.
textkit_status textkit_template_new(const char* source, size_t size, textkit_template** chat_template,
                                    textkit_text* error);
void textkit_template_free(textkit_template* chat_template);

// Renders with the members of `variables_json`, a JSON object, as variables. Steps, depth and bytes are bounded.
textkit_status textkit_template_render(const textkit_template* chat_template, const char* variables_json, size_t size,
                                       textkit_text* output, textkit_text* error);

#ifdef __cplusplus
}  // extern "C"
#endif
