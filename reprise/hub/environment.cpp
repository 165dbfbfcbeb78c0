#include "reprise/hub/environment.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>

namespace reprise::internal {

namespace fs = std::filesystem;

namespace {

std::string trimmed(std::string text) {
  const auto is_space = [](unsigned char c) { return std::isspace(c) != 0; };
  text.erase(text.begin(), std::find_if_not(text.begin(), text.end(), is_space));
  while (!text.empty() && is_space(static_cast<unsigned char>(text.back()))) text.pop_back();
  return text;
}

}  // namespace

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

fs::path hugging_face_home() {
  if (const auto home = environment("HF_HOME"); !home.empty()) return home;
  if (const auto cache = environment("XDG_CACHE_HOME"); !cache.empty()) return fs::path(cache) / "huggingface";
  return fs::path(environment("HOME")) / ".cache" / "huggingface";
}

std::optional<std::string> hub_token() {
  for (const char* name : {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}) {
    if (auto token = trimmed(environment(name)); !token.empty()) return token;
  }
  const auto named = environment("HF_TOKEN_PATH");
  std::string token;
  std::getline(std::ifstream(named.empty() ? hugging_face_home() / "token" : fs::path(named)), token);
  token = trimmed(token);
  return token.empty() ? std::nullopt : std::optional(token);
}

std::string hub_endpoint() {
  std::string endpoint = trimmed(environment("HF_ENDPOINT"));
  while (endpoint.ends_with('/')) endpoint.pop_back();
  return endpoint.empty() ? "https://huggingface.co" : endpoint;
}

bool hub_is_offline() {
  std::string value = trimmed(environment("HF_HUB_OFFLINE"));
  std::transform(value.begin(), value.end(), value.begin(), [](unsigned char c) { return std::toupper(c); });
  return value == "1" || value == "TRUE" || value == "YES" || value == "ON";
}

std::string certificate_bundle() {
  for (const char* name : {"SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE"}) {
    if (auto file = environment(name); !file.empty()) return file;
  }
  return "";
}

}  // namespace reprise::internal
