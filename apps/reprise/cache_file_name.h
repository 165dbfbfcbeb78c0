// Names of prompt-cache files, as a person types them.
// Threads: free functions.
#pragma once

#include <string>

namespace reprise::app {

// `text` with `.safetensors` behind it where it is not there yet. `what` opens the message ("/save").
// Throws: UsageError for what can be no file's name: empty but for that ending, `.`, `..`, `-`, a folder's (a slash at
// its end), a NUL in it.
std::string cache_file_name(const std::string& what, const std::string& text);

}  // namespace reprise::app
