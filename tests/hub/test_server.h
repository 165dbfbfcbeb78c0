// An HTTP server on the loopback that behaves as a test tells it to: it writes whatever bytes the handler makes and may
// close the connection in the middle. One connection at a time.
// Threads: the handler runs on the server's own thread.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace reprise::test {

struct ServerRequest {
  std::string path;                            // with the query
  std::map<std::string, std::string> headers;  // names in lower case

  // N of "range: bytes=N-", else 0.
  std::size_t first_byte() const;
};

struct ServerResponse {
  int status = 200;
  std::vector<std::string> headers = {};  // "Name: value"; Content-Length is added unless one is there
  std::string body = {};
  std::size_t bytes_sent = std::string::npos;  // of the body, then the connection is closed
  int stall_ms = 0;                            // before the body
};

class TestServer {
 public:
  using Handler = std::function<ServerResponse(const ServerRequest&)>;

  explicit TestServer(Handler handler);
  ~TestServer();

  std::string address() const;  // "http://127.0.0.1:PORT"
  std::vector<ServerRequest> requests() const;

 private:
  void serve();
  void answer(int connection);

  Handler handler_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> stopping_ = false;
  mutable std::mutex mutex_;
  std::vector<ServerRequest> requests_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace reprise::test
