#include "reprise/hub/http.h"

#include <curl/curl.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <exception>
#include <mutex>

#include "reprise/base/error.h"
#include "reprise/hub/environment.h"

namespace reprise::internal {

struct HttpClient::Curl {
  CURL* easy = curl_easy_init();
  ~Curl() { curl_easy_cleanup(easy); }
};

namespace {

std::optional<std::uint64_t> number(std::string_view text) {
  std::uint64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) return {};
  return value;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

// "bytes 5-9/10", "bytes 5-9/*".
std::optional<HttpHead::Range> range_of(std::string_view value) {
  if (!value.starts_with("bytes ")) return {};
  value.remove_prefix(6);
  const auto dash = value.find('-');
  const auto slash = value.find('/');
  if (dash == std::string_view::npos || slash == std::string_view::npos || dash > slash) return {};
  const auto first = number(trimmed(value.substr(0, dash)));
  if (!first) return {};
  return HttpHead::Range{*first, number(trimmed(value.substr(slash + 1)))};
}

// One transfer's state, for the callbacks that libcurl makes. An exception must not pass through C: it waits here.
struct Transfer {
  const HttpHandlers& handlers;
  const std::stop_token& stop;
  HttpHead head = {};
  bool head_given = false;
  bool refused = false;
  std::exception_ptr thrown = {};

  bool wants_body() {
    if (head_given) return !refused;
    head_given = true;
    if (handlers.on_head) refused = !handlers.on_head(head);
    return !refused;
  }
};

std::size_t take_header(char* data, std::size_t size, std::size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const std::string_view line(data, size * count);
  if (line.starts_with("HTTP/")) {  // another response begins, after a redirection
    transfer.head = {};
    const auto space = line.find(' ');
    const auto status = space == std::string_view::npos ? std::nullopt : number(line.substr(space + 1, 3));
    transfer.head.status = static_cast<int>(status.value_or(0));
    return line.size();
  }
  const auto colon = line.find(':');
  if (colon == std::string_view::npos) return line.size();
  std::string name(line.substr(0, colon));
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  const std::string_view value = trimmed(line.substr(colon + 1));
  if (name == "content-length") transfer.head.content_length = number(value);
  if (name == "content-range") transfer.head.content_range = range_of(value);
  if (name == "retry-after") {
    if (const auto seconds = number(value)) {
      transfer.head.retry_after = std::chrono::seconds(std::min<std::uint64_t>(*seconds, 3600));
    }
  }
  return line.size();
}

std::size_t take_body(char* data, std::size_t size, std::size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  try {
    const std::string_view bytes(data, size * count);
    if (!transfer.wants_body()) return 0;
    if (!transfer.handlers.on_body || transfer.handlers.on_body(bytes)) return bytes.size();
    transfer.refused = true;
  } catch (...) {
    transfer.thrown = std::current_exception();
  }
  return 0;
}

int ask_whether_to_stop(void* user, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  return static_cast<Transfer*>(user)->stop.stop_requested() ? 1 : 0;
}

bool is_the_networks_fault(CURLcode code) {
  switch (code) {
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_PARTIAL_FILE:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM:
    case CURLE_WEIRD_SERVER_REPLY:
      return true;
    default:
      return false;
  }
}

}  // namespace

HttpClient::HttpClient(std::chrono::seconds stall) : stall_(stall) {
  static std::once_flag once;
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
  curl_ = std::make_unique<Curl>();
  if (curl_->easy == nullptr) throw Error(ErrorCode::internal, "[HttpClient] libcurl does not start");
}

HttpClient::~HttpClient() = default;

HttpResult HttpClient::get(const HttpRequest& request, const HttpHandlers& handlers, const std::stop_token& stop) {
  CURL* easy = curl_->easy;
  curl_easy_reset(easy);
  Transfer transfer{handlers, stop};
  char message[CURL_ERROR_SIZE] = "";
  curl_easy_setopt(easy, CURLOPT_URL, request.url.c_str());
  curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
  // What began encrypted stays so.
  curl_easy_setopt(easy, CURLOPT_REDIR_PROTOCOLS_STR, request.url.starts_with("https:") ? "https" : "http,https");
  curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 1L);
  curl_easy_setopt(easy, CURLOPT_MAXREDIRS, 10L);
  curl_easy_setopt(easy, CURLOPT_USERAGENT, "reprise");
  curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, static_cast<long>(stall_.count()));
  curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, static_cast<long>(stall_.count()));
  curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, message);
  curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, take_header);
  curl_easy_setopt(easy, CURLOPT_HEADERDATA, &transfer);
  curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, take_body);
  curl_easy_setopt(easy, CURLOPT_WRITEDATA, &transfer);
  curl_easy_setopt(easy, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(easy, CURLOPT_XFERINFOFUNCTION, ask_whether_to_stop);
  curl_easy_setopt(easy, CURLOPT_XFERINFODATA, &transfer);
  if (const std::string bundle = certificate_bundle(); !bundle.empty()) {
    curl_easy_setopt(easy, CURLOPT_CAINFO, bundle.c_str());
  }
  if (request.bearer_token) {
    curl_easy_setopt(easy, CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
    curl_easy_setopt(easy, CURLOPT_XOAUTH2_BEARER, request.bearer_token->c_str());
  }
  const std::string range = std::to_string(request.first_byte) + "-";
  if (request.first_byte > 0) curl_easy_setopt(easy, CURLOPT_RANGE, range.c_str());

  const CURLcode code = curl_easy_perform(easy);
  if (transfer.thrown) std::rethrow_exception(transfer.thrown);
  if (code == CURLE_ABORTED_BY_CALLBACK) throw Error(ErrorCode::cancelled, "[pull] stopped");
  HttpResult result{.head = transfer.head};
  if (transfer.refused) return result;
  if (code == CURLE_OK) {
    result.complete = transfer.wants_body();
    return result;
  }
  result.failure = message[0] != '\0' ? message : curl_easy_strerror(code);
  result.can_be_tried_again = is_the_networks_fault(code);
  return result;
}

}  // namespace reprise::internal
