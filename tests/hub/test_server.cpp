#include "tests/hub/test_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <stdexcept>

namespace reprise::test {

namespace {

ServerRequest parse(const std::string& head) {
  ServerRequest request;
  const auto space = head.find(' ');
  request.path = head.substr(space + 1, head.find(' ', space + 1) - space - 1);
  for (std::size_t at = head.find("\r\n"); at != std::string::npos && at + 2 < head.size();) {
    const auto end = head.find("\r\n", at + 2);
    const std::string line = head.substr(at + 2, end - at - 2);
    const auto colon = line.find(": ");
    if (colon == std::string::npos) break;
    std::string name = line.substr(0, colon);
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    request.headers[name] = line.substr(colon + 2);
    at = end;
  }
  return request;
}

void send_all(int connection, std::string_view bytes) {
  while (!bytes.empty()) {
    const auto sent = ::send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    bytes.remove_prefix(static_cast<std::size_t>(sent));
  }
}

}  // namespace

std::size_t ServerRequest::first_byte() const {
  const auto range = headers.find("range");
  return range == headers.end() ? 0 : std::strtoull(range->second.c_str() + sizeof("bytes=") - 1, nullptr, 10);
}

TestServer::TestServer(Handler handler) : handler_(std::move(handler)) {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(listener_, 16) != 0 ||
      ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw std::runtime_error("the test server cannot listen");
  }
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { serve(); });
}

TestServer::~TestServer() {
  stopping_ = true;
  thread_.join();
  ::close(listener_);
}

std::string TestServer::address() const { return "http://127.0.0.1:" + std::to_string(port_); }

std::vector<ServerRequest> TestServer::requests() const {
  const std::lock_guard lock(mutex_);
  return requests_;
}

void TestServer::serve() {
  while (!stopping_) {
    pollfd waiting = {listener_, POLLIN, 0};
    if (::poll(&waiting, 1, 20) <= 0) continue;
    const int connection = ::accept(listener_, nullptr, nullptr);
    if (connection < 0) continue;
    answer(connection);
    ::close(connection);
  }
}

void TestServer::answer(int connection) {
  std::string head;
  char buffer[4096];
  while (head.find("\r\n\r\n") == std::string::npos) {
    const auto got = ::recv(connection, buffer, sizeof buffer, 0);
    if (got <= 0) return;
    head.append(buffer, static_cast<std::size_t>(got));
  }
  const ServerRequest request = parse(head);
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back(request);
  }
  const ServerResponse response = handler_(request);
  std::string text = "HTTP/1.1 " + std::to_string(response.status) + " Status\r\nConnection: close\r\n";
  bool has_length = false;
  for (const std::string& header : response.headers) {
    text += header + "\r\n";
    has_length = has_length || header.starts_with("Content-Length:");
  }
  if (!has_length) text += "Content-Length: " + std::to_string(response.body.size()) + "\r\n";
  send_all(connection, text + "\r\n");
  // A client that has gone ends the stall.
  pollfd gone = {connection, POLLRDHUP, 0};
  for (int waited = 0; waited < response.stall_ms && !stopping_ && ::poll(&gone, 1, 20) == 0;) waited += 20;
  send_all(connection, std::string_view(response.body).substr(0, response.bytes_sent));
}

}  // namespace reprise::test
