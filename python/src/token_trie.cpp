// A trie over token sequences for Python: reprise::PromptTrie with numbers as values, so that the walk over a long
// prompt is not Python's. What the numbers stand for is kept in Python, where the garbage collector sees it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "reprise/base/tokens.h"
#include "reprise/cache/prompt_trie.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace reprise::python {

namespace {

class TokenTrie {
 public:
  std::size_t size() const { return size_; }

  std::optional<std::int64_t> add(nb::handle tokens, std::int64_t value) {
    const auto replaced = trie_.add(kModel, ids_to_store(tokens), value);
    if (!replaced) ++size_;
    return replaced;
  }

  std::optional<std::int64_t> get(nb::handle tokens) {
    const std::int64_t* value = trie_.get(kModel, ids_of(tokens));
    return value ? std::optional(*value) : std::nullopt;
  }

  std::optional<std::int64_t> pop(nb::handle tokens) {
    const auto value = trie_.pop(kModel, ids_of(tokens));
    if (value) forget(1);
    return value;
  }

  std::vector<std::pair<std::size_t, std::int64_t>> pop_prefixes(nb::handle tokens, std::size_t min_length) {
    auto values = trie_.pop_prefixes(kModel, ids_of(tokens), min_length);
    forget(values.size());
    return values;
  }

  // (exact, length of `shorter` or None, `longer` as a list or None, common prefix)
  nb::tuple search(nb::handle tokens) const {
    const PromptTrieResult found = trie_.search(kModel, ids_of(tokens));
    const nb::object shorter = found.shorter ? nb::cast(found.shorter->size()) : nb::none();
    const nb::object longer = found.longer ? nb::object(tokens_of(*found.longer)) : nb::none();
    return nb::make_tuple(found.exact.has_value(), shorter, longer, found.common_prefix);
  }

 private:
  static constexpr const char* kModel = "";
  static constexpr TokenId kNotStored = std::numeric_limits<TokenId>::min();

  // A token that is no TokenId ≥ 0 (a hash that stands for an image, a word) has a negative id: −1 − its place in
  // others_.
  static std::optional<TokenId> plain_id(nb::handle token) {
    if (!PyIndex_Check(token.ptr())) return std::nullopt;
    const nb::object index = nb::steal(PyNumber_Index(token.ptr()));
    if (!index.is_valid()) nb::raise_python_error();
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow != 0 || number < 0 || number > std::numeric_limits<TokenId>::max()) return std::nullopt;
    return static_cast<TokenId>(number);
  }

  TokenId other_id(nb::handle token) const {
    const nb::object id = other_ids_.attr("get")(token, nb::none());
    return id.is_none() ? kNotStored : nb::cast<TokenId>(id);
  }

  Tokens ids_of(nb::handle tokens) const {
    Tokens ids;
    for (nb::handle token : nb::iter(tokens)) {
      const auto id = plain_id(token);
      ids.push_back(id ? *id : other_id(token));
    }
    return ids;
  }

  Tokens ids_to_store(nb::handle tokens) {
    Tokens ids;
    for (nb::handle token : nb::iter(tokens)) {
      TokenId id = plain_id(token).value_or(kNotStored);
      if (id == kNotStored) id = other_id(token);
      if (id == kNotStored) {
        id = static_cast<TokenId>(-1 - static_cast<std::int64_t>(nb::len(others_)));
        others_.append(token);
        other_ids_[token] = id;
      }
      ids.push_back(id);
    }
    return ids;
  }

  nb::list tokens_of(const Tokens& ids) const {
    nb::list tokens;
    for (const TokenId id : ids) {
      if (id >= 0) {
        tokens.append(id);
      } else {
        tokens.append(others_[static_cast<std::size_t>(-1 - static_cast<std::int64_t>(id))]);
      }
    }
    return tokens;
  }

  void forget(std::size_t values) {
    size_ -= values;
    if (size_ > 0) return;
    others_ = nb::list();
    other_ids_ = nb::dict();
  }

  PromptTrie<std::int64_t> trie_;
  std::size_t size_ = 0;
  nb::list others_;
  nb::dict other_ids_;  // token → id
};

}  // namespace

void bind_token_trie(nb::module_& m) {
  nb::class_<TokenTrie>(m, "TokenTrie",
                        "Integers stored under sequences of tokens (any hashable objects). A call costs what its "
                        "tokens are long, and search besides the nodes that it visits.")
      .def(nb::init<>())
      .def("__len__", &TokenTrie::size)
      .def("add", &TokenTrie::add, "tokens"_a, "value"_a, "Returns the value that it replaces, or None.",
           nb::sig("def add(self, tokens: collections.abc.Iterable, value: int) -> int | None"))
      .def("get", &TokenTrie::get, "tokens"_a, "The value stored under exactly these tokens, or None.",
           nb::sig("def get(self, tokens: collections.abc.Iterable) -> int | None"))
      .def("pop", &TokenTrie::pop, "tokens"_a, "As get, and takes it out.",
           nb::sig("def pop(self, tokens: collections.abc.Iterable) -> int | None"))
      .def("pop_prefixes", &TokenTrie::pop_prefixes, "tokens"_a, "min_length"_a = 0,
           "Takes out the values at proper prefixes of at least min_length tokens. Returns (length, value) pairs, "
           "shortest first.",
           nb::sig("def pop_prefixes(self, tokens: collections.abc.Iterable, min_length: int = 0) -> "
                   "list[tuple[int, int]]"))
      .def("search", &TokenTrie::search, "tokens"_a,
           "Returns (the tokens themselves are stored, length of the longest stored proper prefix or None, tokens of "
           "the shortest stored sequence that begins with what is shared or None, length of what is shared).",
           nb::sig("def search(self, tokens: collections.abc.Iterable) -> "
                   "tuple[bool, int | None, list | None, int]"));
}

}  // namespace reprise::python
