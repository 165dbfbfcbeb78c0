// SQLite as this room uses it: one connection, statements prepared once, errors as exceptions. Private to tiers.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

struct sqlite3;
struct sqlite3_stmt;

namespace reprise::internal {

class SqliteError : public std::runtime_error {
 public:
  SqliteError(int code, const std::string& message) : std::runtime_error(message), code_(code) {}
  static SqliteError damage(const std::string& message);

  // The file is no database, is damaged, or has other tables than it must have.
  bool is_damage() const;
  // The file that is open is no longer the one of its name.
  bool is_moved() const;

 private:
  int code_;  // extended
};

class Database {
 public:
  enum class Mode {
    write,      // must exist
    read,       // must exist; others may write
    read_still  // in a folder that nobody writes: needs no files beside it
  };
  Database(const std::filesystem::path& file, Mode mode, std::chrono::milliseconds patience);

  void execute(const char* sql);
  // The first column of the first row.
  std::int64_t number(const char* sql);
  // Makes it an empty database, whatever it was, under the eyes of other connections.
  void reset();

 private:
  friend class Query;
  struct Close {
    void operator()(sqlite3* connection) const;
  };
  struct Finalize {
    void operator()(sqlite3_stmt* statement) const;
  };
  [[noreturn]] void fail(const char* action);

  std::unique_ptr<sqlite3, Close> connection_;
  std::map<const char*, std::unique_ptr<sqlite3_stmt, Finalize>> statements_;  // by the address of a literal
};

// One run of a statement. `sql` is a literal. Bind from left to right, then step.
class Query {
 public:
  Query(Database& database, const char* sql);
  ~Query();
  Query(const Query&) = delete;
  Query& operator=(const Query&) = delete;

  Query& bind(std::int64_t value);
  Query& bind(std::string_view blob);
  // Whether there is a row.
  bool step();
  void run() {
    while (step()) {
    }
  }
  std::int64_t integer(int column) const;
  std::string blob(int column) const;

 private:
  Database& database_;
  sqlite3_stmt* statement_;
  int bound_ = 0;
};

// Rolled back unless committed.
class Transaction {
 public:
  enum class Kind { read, write };
  Transaction(Database& database, Kind kind);
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;

  void commit();

 private:
  Database& database_;
  bool open_ = true;
};

}  // namespace reprise::internal
