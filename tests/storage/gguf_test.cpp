#include "reprise/storage/gguf.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/storage/gguf_builder.h"
#include "tests/storage/test_files.h"

namespace reprise {
namespace {

using testing::expect_error;
using testing::GgufBuilder;

GgufHeader parse(const std::string& file) { return parse_gguf(std::as_bytes(std::span(file)), file.size()); }

template <typename T>
const T& get(const GgufHeader& header, const std::string& key) {
  return std::get<T>(header.metadata.at(key));
}

template <typename T>
const std::vector<T>& array(const GgufHeader& header, const std::string& key) {
  return std::get<std::vector<T>>(get<GgufArray>(header, key));
}

// A file with a value and an array of every type, and two tensors.
GgufBuilder full_file() {
  GgufBuilder file;
  file.add_raw("u8", 0, GgufBuilder::bytes_of<std::uint8_t>(200));
  file.add_raw("i8", 1, GgufBuilder::bytes_of<std::int8_t>(-3));
  file.add_raw("u16", 2, GgufBuilder::bytes_of<std::uint16_t>(60000));
  file.add_raw("i16", 3, GgufBuilder::bytes_of<std::int16_t>(-300));
  file.add_uint("u32", 4'000'000'000u);
  file.add_raw("i32", 5, GgufBuilder::bytes_of<std::int32_t>(-70000));
  file.add_float("f32", 0.5f);
  file.add_bool("bool", true);
  file.add_string("string", "text");
  file.add_raw("u64", 10, GgufBuilder::bytes_of(~std::uint64_t{0}));
  file.add_raw("i64", 11, GgufBuilder::bytes_of(std::numeric_limits<std::int64_t>::min()));
  file.add_raw("f64", 12, GgufBuilder::bytes_of(-1e300));
  file.add_strings("strings", {"a", "", "ccc"});
  file.add_array("floats", 6, 2, GgufBuilder::bytes_of(1.5f) + GgufBuilder::bytes_of(-2.0f));
  file.add_array("ints", 5, 2, GgufBuilder::bytes_of(7) + GgufBuilder::bytes_of(-8));
  file.add_array("bools", 7, 3, std::string("\1\0\1", 3));
  file.add_array("none", 4, 0, "");
  file.add_tensor("first", {3, 2}, 0, std::string(24, 'x'));
  file.add_tensor("second", {64}, 3, std::string(40, 'y'));
  return file;
}

TEST(ParseGguf, ReadsEveryTypeOfValue) {
  for (const std::uint32_t version : {2u, 3u}) {
    GgufBuilder file = full_file();
    file.version = version;
    const GgufHeader header = parse(file.build());
    EXPECT_EQ(header.version, version);
    EXPECT_EQ(get<std::uint64_t>(header, "u8"), 200u);
    EXPECT_EQ(get<std::int64_t>(header, "i8"), -3);
    EXPECT_EQ(get<std::uint64_t>(header, "u16"), 60000u);
    EXPECT_EQ(get<std::int64_t>(header, "i16"), -300);
    EXPECT_EQ(get<std::uint64_t>(header, "u32"), 4'000'000'000u);
    EXPECT_EQ(get<std::int64_t>(header, "i32"), -70000);
    EXPECT_EQ(get<double>(header, "f32"), 0.5);
    EXPECT_EQ(get<bool>(header, "bool"), true);
    EXPECT_EQ(get<std::string>(header, "string"), "text");
    EXPECT_EQ(get<std::uint64_t>(header, "u64"), ~std::uint64_t{0});
    EXPECT_EQ(get<std::int64_t>(header, "i64"), std::numeric_limits<std::int64_t>::min());
    EXPECT_EQ(get<double>(header, "f64"), -1e300);
    EXPECT_EQ(array<std::string>(header, "strings"), (std::vector<std::string>{"a", "", "ccc"}));
    EXPECT_EQ(array<double>(header, "floats"), (std::vector<double>{1.5, -2.0}));
    EXPECT_EQ(array<std::int64_t>(header, "ints"), (std::vector<std::int64_t>{7, -8}));
    EXPECT_EQ(array<bool>(header, "bools"), (std::vector<bool>{true, false, true}));
    EXPECT_TRUE(array<std::int64_t>(header, "none").empty());
  }
}

TEST(ParseGguf, TensorsAreDescribedOutermostFirst) {
  const std::string file = full_file().build();
  const GgufHeader header = parse(file);
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "first");
  EXPECT_EQ(header.tensors[0].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(header.tensors[0].offset, 0u);
  EXPECT_EQ(header.tensors[0].size_bytes, 24u);
  EXPECT_EQ(header.tensors[1].type, gguf_type::q4_1);
  EXPECT_EQ(header.tensors[1].offset, 32u);
  EXPECT_EQ(header.tensors[1].size_bytes, 40u);
  EXPECT_EQ(header.data_offset % 32, 0u);
  EXPECT_EQ(header.data_offset + 72, file.size());
}

TEST(ParseGguf, ObeysTheAlignmentOfTheFile) {
  GgufBuilder file;
  file.alignment = 256;
  file.add_uint("general.alignment", 256);
  file.add_tensor("a", {1}, 0, "aaaa");
  file.add_tensor("b", {1}, 0, "bbbb");
  const GgufHeader header = parse(file.build());
  EXPECT_EQ(header.data_offset % 256, 0u);
  EXPECT_EQ(header.tensors[1].offset, 256u);

  for (const std::uint32_t wrong : {0u, 3u, 48u}) {
    GgufBuilder bad;
    bad.add_uint("general.alignment", wrong);
    expect_error(ErrorCode::corrupt_data, "power of two", [&] { parse(bad.build()); });
  }
  GgufBuilder text;
  text.add_string("general.alignment", "32");
  expect_error(ErrorCode::corrupt_data, "general.alignment", [&] { parse(text.build()); });
}

TEST(ParseGguf, AFileWithoutTensorsMayEndUnpadded) {
  GgufBuilder file;
  file.alignment = 1;
  file.add_string("general.architecture", "x");
  EXPECT_TRUE(parse(file.build()).tensors.empty());
}

TEST(ParseGguf, OtherVersionsAreUnsupportedByName) {
  for (const std::uint32_t version : {0u, 1u, 4u}) {
    GgufBuilder file;
    file.version = version;
    expect_error(ErrorCode::unsupported, "version " + std::to_string(version), [&] { parse(file.build()); });
  }
  GgufBuilder swapped;
  swapped.version = 0x03000000u;
  expect_error(ErrorCode::unsupported, "big-endian", [&] { parse(swapped.build()); });
  expect_error(ErrorCode::corrupt_data, "GGUF", [&] { parse("GGML and more bytes behind it"); });
  expect_error(ErrorCode::corrupt_data, "GGUF", [&] { parse(""); });
}

TEST(ParseGguf, CountsAreCheckedBeforeMemoryIsAskedFor) {
  for (const std::uint64_t count : {std::uint64_t{3}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    for (const std::uint32_t type : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 10u, 11u, 12u}) {
      GgufBuilder file;
      file.alignment = 1;
      file.add_array("key", type, count, "x");
      expect_error(ErrorCode::corrupt_data, "does not fit", [&] { parse(file.build()); });
    }
    GgufBuilder long_string;
    long_string.alignment = 1;
    long_string.add_raw("key", 8, GgufBuilder::bytes_of(count) + "x");
    expect_error(ErrorCode::corrupt_data, "ends inside", [&] { parse(long_string.build()); });

    GgufBuilder entries = full_file();
    entries.extra_entries = count / 2;  // so that the sum does not wrap
    EXPECT_TRUE(testing::error_of([&] { parse(entries.build()); }));
    GgufBuilder tensors = full_file();
    tensors.extra_tensors = count / 2;
    EXPECT_TRUE(testing::error_of([&] { parse(tensors.build()); }));
  }
}

TEST(ParseGguf, WrongValuesAreRefused) {
  GgufBuilder twice;
  twice.add_uint("key", 1);
  twice.add_uint("key", 2);
  expect_error(ErrorCode::corrupt_data, "\"key\" twice", [&] { parse(twice.build()); });

  GgufBuilder empty;
  empty.add_uint("", 1);
  expect_error(ErrorCode::corrupt_data, "empty", [&] { parse(empty.build()); });

  GgufBuilder two;
  two.add_raw("key", 7, "\2");
  expect_error(ErrorCode::corrupt_data, "boolean", [&] { parse(two.build()); });

  GgufBuilder unknown;
  unknown.add_raw("key", 13, "xxxxxxxx");
  expect_error(ErrorCode::corrupt_data, "type 13", [&] { parse(unknown.build()); });

  GgufBuilder nested;
  nested.add_array("key", 9, 1, GgufBuilder::bytes_of(9u) + GgufBuilder::bytes_of<std::uint64_t>(0));
  expect_error(ErrorCode::unsupported, "arrays of arrays", [&] { parse(nested.build()); });

  GgufBuilder large;
  large.add_array("key", 10, 1, GgufBuilder::bytes_of(~std::uint64_t{0}));
  expect_error(ErrorCode::corrupt_data, "too large", [&] { parse(large.build()); });
}

TEST(ParseGguf, WrongTensorsAreRefused) {
  struct Case {
    const char* text;
    std::vector<std::uint64_t> dims;
    std::uint32_t type;
    std::uint64_t offset;
  };
  const std::uint64_t huge = std::uint64_t{1} << 62;
  for (const Case& wrong : std::vector<Case>{
           {"overflows", {huge, huge}, 0, 0},
           {"overflows", {~std::uint64_t{0}}, 24, 0},
           {"overflows", {huge, 1}, 0, 0},
           {"outside", {std::uint64_t{1} << 40}, 24, 0},
           {"outside", {8}, 0, 32},
           {"outside", {8}, 0, ~std::uint64_t{31}},
           {"aligned", {2}, 0, 4},
           {"extent of 0", {4, 0}, 0, 0},
           {"multiple of 32", {33}, 2, 0},
           {"multiple of 256", {32, 8}, 12, 0},
           {"5 dimensions", {1, 1, 1, 1, 1}, 0, 0},
       }) {
    GgufBuilder file;
    file.add_tensor("tensor", wrong.dims, wrong.type, std::string(32, 'x'), wrong.offset);
    expect_error(ErrorCode::corrupt_data, wrong.text, [&] { parse(file.build()); });
  }

  GgufBuilder twins;
  twins.add_tensor("twin", {1}, 0, "xxxx");
  twins.add_tensor("twin", {1}, 0, "yyyy");
  expect_error(ErrorCode::corrupt_data, "two tensors named \"twin\"", [&] { parse(twins.build()); });

  GgufBuilder overlap;
  overlap.add_tensor("long", {16}, 0, std::string(64, 'x'));
  overlap.add_tensor("inside", {1}, 0, "yyyy", 32);
  expect_error(ErrorCode::corrupt_data, "overlaps", [&] { parse(overlap.build()); });

  GgufBuilder unknown;
  unknown.add_tensor("strange", {1}, 99, "xxxx");
  expect_error(ErrorCode::unsupported, "\"strange\" has unknown type 99", [&] { parse(unknown.build()); });

  GgufBuilder nameless;
  nameless.add_tensor("", {1}, 0, "xxxx");
  expect_error(ErrorCode::corrupt_data, "without a name", [&] { parse(nameless.build()); });
}

TEST(ParseGguf, EveryTruncationIsAnError) {
  const std::string file = full_file().build();
  for (std::size_t length = 0; length < file.size(); ++length) {
    // An allocation of exactly this size, so that a sanitizer sees a read beyond it.
    const std::vector<char> cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_TRUE(testing::error_of([&] { parse_gguf(std::as_bytes(std::span(cut)), cut.size()); })) << length;
  }
}

TEST(ParseGguf, EveryFlippedByteGivesAnErrorOrTensorsInsideTheFile) {
  const std::string file = full_file().build();
  int errors = 0;
  for (std::size_t at = 0; at < file.size(); ++at) {
    for (const int flip : {0x01, 0x80, 0xff, 0x20}) {
      std::vector<char> damaged(file.begin(), file.end());
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      try {
        const GgufHeader header = parse_gguf(std::as_bytes(std::span(damaged)), damaged.size());
        for (const GgufTensor& tensor : header.tensors) {
          ASSERT_LE(header.data_offset + tensor.offset + tensor.size_bytes, file.size());
        }
      } catch (const Error&) {
        ++errors;
      }
    }
  }
  EXPECT_GT(errors, 500);
}

TEST(ParseGguf, TheHeadAloneIsEnough) {
  const std::string file = full_file().build();
  const GgufHeader whole = parse(file);
  const auto head = std::as_bytes(std::span(file)).first(whole.data_offset);
  EXPECT_EQ(parse_gguf(head, file.size()).tensors.size(), 2u);
  expect_error(ErrorCode::corrupt_data, "outside", [&] { parse_gguf(head, head.size()); });
}

TEST(GgufTypeName, NamesKnownAndUnknownTypes) {
  EXPECT_EQ(gguf_type_name(gguf_type::q4_1), "Q4_1");
  EXPECT_EQ(gguf_type_name(14), "Q6_K");
  EXPECT_EQ(gguf_type_name(99), "type 99");
}

}  // namespace
}  // namespace reprise
