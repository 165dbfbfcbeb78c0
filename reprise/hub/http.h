// GET over HTTP, streaming. Private to `hub`.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>

namespace reprise::internal {

struct HttpRequest {
  std::string url;
  std::optional<std::string> bearer_token = {};  // never sent to another host than the url's
  std::uint64_t first_byte = 0;                  // > 0: a range from there on
};

// Of the last response, after redirections.
struct HttpHead {
  int status = 0;
  std::optional<std::uint64_t> content_length = {};
  struct Range {
    std::uint64_t first = 0;
    std::optional<std::uint64_t> total = {};
  };
  std::optional<Range> content_range = {};
  std::optional<std::chrono::seconds> retry_after = {};
};

struct HttpResult {
  HttpHead head;          // status 0: no response
  bool complete = false;  // all that was announced has come
  // Why not, in a person's words. Empty: `on_head` or `on_body` did not want more.
  std::string failure = {};
  bool can_be_tried_again = false;  // the network's fault, not the request's
};

struct HttpHandlers {
  // Once, before the body; false: no body is wanted. May be null.
  std::function<bool(const HttpHead&)> on_head = {};
  // false: no more. May throw, which get then does.
  std::function<bool(std::string_view bytes)> on_body = {};
};

class HttpClient {
 public:
  // A transfer that brings nothing for `stall` has failed.
  explicit HttpClient(std::chrono::seconds stall);
  ~HttpClient();

  // Throws: cancelled, internal (libcurl does not start), and what handlers throw.
  HttpResult get(const HttpRequest& request, const HttpHandlers& handlers, const std::stop_token& stop);

 private:
  struct Curl;
  std::unique_ptr<Curl> curl_;  // keeps the connection
  std::chrono::seconds stall_;
};

}  // namespace reprise::internal
