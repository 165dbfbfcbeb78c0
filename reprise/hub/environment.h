// What the environment says about the hub, by huggingface_hub's names. Private to `hub`.
// Threads: free functions; they read the environment.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace reprise::internal {

std::string environment(const char* name);  // empty: not set

// $HF_HOME, else $XDG_CACHE_HOME/huggingface, else ~/.cache/huggingface.
std::filesystem::path hugging_face_home();

// $HF_TOKEN, $HUGGING_FACE_HUB_TOKEN, else the file $HF_TOKEN_PATH or $HF_HOME/token; none.
std::optional<std::string> hub_token();

// $HF_ENDPOINT without a slash at its end, else the hub's own address.
std::string hub_endpoint();

// $HF_HUB_OFFLINE is set to something like true.
bool hub_is_offline();

// $SSL_CERT_FILE, $CURL_CA_BUNDLE or $REQUESTS_CA_BUNDLE: certificates to trust in place of the system's; empty: none.
std::string certificate_bundle();

}  // namespace reprise::internal
