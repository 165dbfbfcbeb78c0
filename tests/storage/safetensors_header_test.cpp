#include <gtest/gtest.h>

#include "reprise/storage/safetensors.h"
#include "tests/storage/test_files.h"

namespace reprise {
namespace {

using testing::expect_error;

std::string file_of(const std::string& json, std::size_t data_bytes) {
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>((json.size() >> (8 * i)) & 0xff);
  return file + json + std::string(data_bytes, 'd');
}

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors_header(std::as_bytes(std::span(file)), file.size(), "the file");
}

TEST(SafetensorsHeader, ReadsTensorsAndMetadata) {
  const SafetensorsHeader header = parse(
      file_of(R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},)"
              R"("a":{"shape":[],"data_offsets":[0,4],"dtype":"I32"},)"
              R"("__metadata__":{"format":"pt","":""},"z":{"dtype":"F16","shape":[3,0],"data_offsets":[12,12]}}    )",
              12));
  EXPECT_EQ(header.metadata, (std::map<std::string, std::string>{{"format", "pt"}, {"", ""}}));
  EXPECT_EQ(header.tensors, (std::vector<TensorRecord>{
                                {"a", "I32", {}, 0, 4}, {"b", "F32", {2}, 4, 12}, {"z", "F16", {3, 0}, 12, 12}}));
}

TEST(SafetensorsHeader, AcceptsAFileWithoutTensors) {
  EXPECT_TRUE(parse(file_of("{}", 0)).tensors.empty());
  EXPECT_TRUE(parse(file_of(R"({"__metadata__":{}})", 0)).metadata.empty());
  EXPECT_TRUE(parse(file_of(R"({"__metadata__":null})", 0)).metadata.empty());  // as MLX writes it
}

TEST(SafetensorsHeader, RefusesWhatTheFormatHasNoPlaceFor) {
  const std::string good = R"("dtype":"F32","shape":[1],"data_offsets":[0,4])";
  struct Case {
    const char* message;
    std::string json;
    std::size_t data_bytes = 4;
  };
  for (const Case& wrong : std::vector<Case>{
           {"begin with '{'", ""},
           {"begin with '{'", " {}"},
           {"begin with '{'", "[]"},
           {"no JSON", "{"},
           {"no JSON", R"({"a":{)" + good + "}"},
           {"no JSON", R"({"a":{)" + good + "}}x"},
           {"no JSON", std::string("{}\0", 3), 0},
           {"no JSON", "{\"\xff\":{" + good + "}}"},
           {"two tensors named \"a\"", R"({"a":{)" + good + R"(},"a":{)" + good + "}}"},
           {"\"dtype\" twice", R"({"a":{"dtype":"F32",)" + good + "}}"},
           {"unknown member \"extra\"", R"({"a":{"extra":1,)" + good + "}}"},
           {"lacks dtype", R"({"a":{"shape":[1],"data_offsets":[0,4]}})"},
           {"lacks shape", R"({"a":{"dtype":"F32","data_offsets":[0,4]}})"},
           {"lacks data_offsets", R"({"a":{"dtype":"F32","shape":[1]}})"},
           {"two data_offsets", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})"},
           {"unexpected 9", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,9]}})"},
           {"unexpected -1", R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})"},
           {"unexpected 1.0", R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})"},
           {"unexpected 4e0", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4e0]}})"},
           {"unexpected 18446744073709551616",
            R"({"a":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}})"},
           {"unexpected 9223372036854775808",
            R"({"a":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]}})"},
           {"unexpected a string", R"({"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}})"},
           {"unexpected an array", R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})"},
           {"unexpected null", R"({"a":{"dtype":null,"shape":[1],"data_offsets":[0,4]}})"},
           {"unexpected a boolean", R"({"a":true})"},
           {"unexpected 3", R"({"a":3})"},
           {"unexpected an array", R"({"a":[]})"},
           {"unexpected an object", R"({"a":{"dtype":{},"shape":[1],"data_offsets":[0,4]}})"},
           {"unexpected 1 for \"k\"", R"({"__metadata__":{"k":1}})", 0},
           {"two __metadata__", R"({"__metadata__":{},"__metadata__":null})", 0},
           {"unexpected an object", R"({"__metadata__":{"k":{}}})", 0},
           {"\"k\" twice", R"({"__metadata__":{"k":"1","k":"2"}})", 0},
           {"two __metadata__", R"({"__metadata__":{},"__metadata__":{}})", 0},
           {"unknown dtype \"F33\"", R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})"},
           {"needs 8 bytes", R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})"},
           {"overflows", R"({"a":{"dtype":"F32","shape":[9223372036854775807,3],"data_offsets":[0,4]}})"},
           {"overflows", R"({"a":{"dtype":"F32","shape":[0,9223372036854775807,3],"data_offsets":[0,0]}})", 0},
           {"ends inside a byte", R"({"a":{"dtype":"F4","shape":[1],"data_offsets":[0,4]}})"},
           {"outside", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})"},
           {"outside", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})"},
           {"outside", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,0]}})"},
           {"gap", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8},
           {"end at byte 4", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 5},
           {"end at byte 0", "{}", 1},
           {"overlap", R"({"a":{)" + good + R"(},"b":{)" + good + "}}"},
       }) {
    SCOPED_TRACE(wrong.json);
    expect_error(ErrorCode::corrupt_data, wrong.message, [&] { parse(file_of(wrong.json, wrong.data_bytes)); });
  }
}

TEST(SafetensorsHeader, ALengthBeyondTheFileOrTheLimitIsRefused) {
  for (const std::uint64_t length : {std::uint64_t{3}, std::uint64_t{100'000'001}, ~std::uint64_t{0}}) {
    std::string file(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>((length >> (8 * i)) & 0xff);
    file += "{}";
    expect_error(ErrorCode::corrupt_data, "the file", [&] { parse(file); });
    // Whatever size the file is said to have.
    EXPECT_TRUE(testing::error_of(
        [&] { parse_safetensors_header(std::as_bytes(std::span(file)), ~std::uint64_t{0}, "the file"); }));
  }
  expect_error(ErrorCode::corrupt_data, "only 3 bytes", [&] { parse("abc"); });
}

TEST(SafetensorsHeader, DeepNestingIsRefusedWithoutRecursion) {
  expect_error(ErrorCode::corrupt_data, "unexpected an array",
               [&] { parse(file_of("{\"a\":" + std::string(1'000'000, '['), 0)); });
}

TEST(SafetensorsHeader, NamesInMessagesAreEscapedAndCut) {
  const auto error =
      testing::error_of([&] { parse(file_of(R"({"\u001b[31m)" + std::string(5000, 'n') + R"(":3})", 0)); });
  ASSERT_TRUE(error);
  const std::string text = error->what();
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_NE(text.find("\\x1b[31m"), std::string::npos);
  EXPECT_LT(text.size(), 400u);
}

TEST(SafetensorsHeader, EveryTruncationIsAnError) {
  const std::string file = file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
  for (std::size_t length = 0; length < file.size(); ++length) {
    const std::vector<char> cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_TRUE(testing::error_of([&] { parse_safetensors_header(std::as_bytes(std::span(cut)), cut.size()); }))
        << length;
  }
}

TEST(SafetensorsHeader, EveryFlippedByteGivesAnErrorOrTensorsInsideTheFile) {
  const std::string file = file_of(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                   R"("b":{"dtype":"U8","shape":[2,2],"data_offsets":[8,12]}})",
                                   12);
  int errors = 0;
  for (std::size_t at = 0; at < file.size(); ++at) {
    for (int flip = 1; flip < 256; ++flip) {
      std::vector<char> damaged(file.begin(), file.end());
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      try {
        const auto header = parse_safetensors_header(std::as_bytes(std::span(damaged)), damaged.size());
        for (const TensorRecord& record : header.tensors) {
          ASSERT_LE(record.begin, record.end);
          ASSERT_LE(header.data_offset + record.end, file.size());
        }
      } catch (const Error&) {
        ++errors;
      }
    }
  }
  EXPECT_GT(errors, 20'000);
}

}  // namespace
}  // namespace reprise
