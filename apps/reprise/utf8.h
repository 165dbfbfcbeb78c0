// UTF-8, as far as the line editor and the reader of standard input need it.
// Threads: free functions.
#pragma once

#include <string_view>

namespace reprise::app {

// No stray or missing bytes, no surrogates, no overlong forms, nothing above U+10FFFF.
bool is_valid_utf8(std::string_view text);

// How many bytes a character takes that begins with `lead`; 1 for bytes that begin none.
int utf8_length(unsigned char lead);

}  // namespace reprise::app
