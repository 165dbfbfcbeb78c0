#include "reprise/prefix/tiers/sqlite_database.h"

#include <sqlite3.h>

namespace reprise::internal {
namespace {

// A path as SQLite's URIs have it.
std::string uri_of(const std::filesystem::path& file, const char* parameters) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string uri = "file:";
  for (const char c : std::filesystem::absolute(file).string()) {
    if (c == '%' || c == '?' || c == '#') {
      const auto byte = static_cast<unsigned char>(c);
      uri += {'%', kDigits[byte >> 4U], kDigits[byte & 15U]};
    } else {
      uri += c;
    }
  }
  return uri + parameters;
}

}  // namespace

SqliteError SqliteError::damage(const std::string& message) { return {SQLITE_CORRUPT, message}; }

bool SqliteError::is_damage() const {
  const int primary = code_ & 0xff;
  return primary == SQLITE_CORRUPT || primary == SQLITE_NOTADB || primary == SQLITE_FORMAT || primary == SQLITE_ERROR ||
         primary == SQLITE_SCHEMA;
}

bool SqliteError::is_moved() const { return code_ == SQLITE_READONLY_DBMOVED; }

void Database::Close::operator()(sqlite3* connection) const { sqlite3_close_v2(connection); }
void Database::Finalize::operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }

Database::Database(const std::filesystem::path& file, Mode mode, std::chrono::milliseconds patience) {
  sqlite3* connection = nullptr;
  const int flags = SQLITE_OPEN_URI | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE |
                    (mode == Mode::write ? SQLITE_OPEN_READWRITE : SQLITE_OPEN_READONLY);
  const std::string uri = uri_of(file, mode == Mode::read_still ? "?immutable=1" : "");
  const int status = sqlite3_open_v2(uri.c_str(), &connection, flags, nullptr);
  connection_.reset(connection);
  if (status != SQLITE_OK) fail("open");
  sqlite3_busy_timeout(connection, static_cast<int>(patience.count()));
}

void Database::fail(const char* action) {
  const int code = connection_ ? sqlite3_extended_errcode(connection_.get()) : SQLITE_NOMEM;
  const std::string text = connection_ ? sqlite3_errmsg(connection_.get()) : "out of memory";
  throw SqliteError(code, std::string("[DiskTier] cannot ") + action + " the index: " + text);
}

void Database::execute(const char* sql) {
  if (sqlite3_exec(connection_.get(), sql, nullptr, nullptr, nullptr) != SQLITE_OK) fail("change");
}

std::int64_t Database::number(const char* sql) {
  Query query(*this, sql);
  return query.step() ? query.integer(0) : 0;
}

void Database::reset() {
  statements_.clear();
  // A connection that has not looked at the file takes it for one without a log, and would need it for itself.
  sqlite3_exec(connection_.get(), "SELECT count(*) FROM sqlite_schema", nullptr, nullptr, nullptr);
  sqlite3_db_config(connection_.get(), SQLITE_DBCONFIG_RESET_DATABASE, 1, nullptr);
  const int status = sqlite3_exec(connection_.get(), "VACUUM", nullptr, nullptr, nullptr);
  sqlite3_db_config(connection_.get(), SQLITE_DBCONFIG_RESET_DATABASE, 0, nullptr);
  if (status != SQLITE_OK) fail("empty");
}

Query::Query(Database& database, const char* sql) : database_(database) {
  auto& statement = database.statements_[sql];
  if (!statement) {
    sqlite3_stmt* made = nullptr;
    if (sqlite3_prepare_v3(database.connection_.get(), sql, -1, SQLITE_PREPARE_PERSISTENT, &made, nullptr) !=
        SQLITE_OK) {
      database.fail("ask");
    }
    statement.reset(made);
  }
  statement_ = statement.get();
}

Query::~Query() {
  sqlite3_reset(statement_);
  sqlite3_clear_bindings(statement_);
}

Query& Query::bind(std::int64_t value) {
  if (sqlite3_bind_int64(statement_, ++bound_, value) != SQLITE_OK) database_.fail("ask");
  return *this;
}

Query& Query::bind(std::string_view blob) {
  // A null pointer would be NULL, not an empty blob.
  const char* data = blob.empty() ? "" : blob.data();
  if (sqlite3_bind_blob64(statement_, ++bound_, data, blob.size(), SQLITE_TRANSIENT) != SQLITE_OK) {
    database_.fail("ask");
  }
  return *this;
}

bool Query::step() {
  const int status = sqlite3_step(statement_);
  if (status == SQLITE_ROW) return true;
  if (status != SQLITE_DONE) database_.fail("use");
  return false;
}

std::int64_t Query::integer(int column) const { return sqlite3_column_int64(statement_, column); }

std::string Query::blob(int column) const {
  const void* data = sqlite3_column_blob(statement_, column);
  const int size = sqlite3_column_bytes(statement_, column);
  return data == nullptr ? std::string() : std::string(static_cast<const char*>(data), static_cast<std::size_t>(size));
}

Transaction::Transaction(Database& database, Kind kind) : database_(database) {
  database.execute(kind == Kind::write ? "BEGIN IMMEDIATE" : "BEGIN");
}

Transaction::~Transaction() {
  if (!open_) return;
  try {
    database_.execute("ROLLBACK");
  } catch (const SqliteError&) {  // some failures have rolled it back already
  }
}

void Transaction::commit() {
  database_.execute("COMMIT");
  open_ = false;
}

}  // namespace reprise::internal
