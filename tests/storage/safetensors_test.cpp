#include "reprise/storage/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "mlx/mlx.h"
#include "tests/storage/test_files.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using testing::expect_error;
using testing::read_text;
using testing::TemporaryFolder;
using testing::write_text;
using Tensors = std::map<std::string, mx::array>;

const std::vector<ReadMode> kBothModes{ReadMode::copy, ReadMode::memory_map};

// Same dtype, shape and bits.
void expect_same(const mx::array& got, const mx::array& want, const std::string& name) {
  mx::array flat = mx::contiguous(want);
  flat.eval();
  EXPECT_EQ(got.dtype(), flat.dtype()) << name;
  ASSERT_EQ(got.shape(), flat.shape()) << name;
  ASSERT_TRUE(got.is_available()) << name;
  if (got.nbytes() == 0) return;
  EXPECT_EQ(std::memcmp(got.data<char>(), flat.data<char>(), flat.nbytes()), 0) << name;
}

void expect_same(const Tensors& got, const Tensors& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, array] : want) {
    ASSERT_TRUE(got.contains(name)) << name;
    expect_same(got.at(name), array, name);
  }
}

Tensors every_kind() {
  Tensors tensors;
  const mx::array numbers = mx::reshape(mx::arange(24.0f), {2, 3, 4});
  for (const auto& [name, dtype] : std::map<std::string, mx::Dtype>{{"u8", mx::uint8},
                                                                    {"i8", mx::int8},
                                                                    {"u16", mx::uint16},
                                                                    {"i16", mx::int16},
                                                                    {"f16", mx::float16},
                                                                    {"bf16", mx::bfloat16},
                                                                    {"u32", mx::uint32},
                                                                    {"i32", mx::int32},
                                                                    {"f32", mx::float32},
                                                                    {"u64", mx::uint64},
                                                                    {"i64", mx::int64},
                                                                    {"f64", mx::float64},
                                                                    {"c64", mx::complex64}}) {
    tensors.emplace(name, mx::astype(numbers, dtype, mx::Device::cpu));
  }
  tensors.emplace("bool", mx::array({true, false, true}));
  tensors.emplace("scalar", mx::array(7));
  tensors.emplace("empty", mx::zeros({0, 4}, mx::bfloat16));
  tensors.emplace("transposed", mx::transpose(numbers));
  tensors.emplace("sliced", mx::slice(numbers, {0, 1, 1}, {2, 3, 3}));
  tensors.emplace("strided", mx::slice(numbers, {0, 0, 0}, {2, 3, 4}, {1, 2, 2}));
  tensors.emplace("broadcast", mx::broadcast_to(mx::array({1.0f, 2.0f}), {3, 2}));
  tensors.emplace("name \"with\"\n\u00e9", mx::array({1}));
  return tensors;
}

const std::map<std::string, std::string> kMetadata{
    {"format", "mlx"}, {"", "empty key"}, {"x", ""}, {"\u00e9\n", "\"\\"}};

TEST(Safetensors, EveryKindOfArrayReturnsUnchanged) {
  TemporaryFolder folder;
  const Tensors tensors = every_kind();
  write_safetensors(folder / "file", tensors, kMetadata);
  for (const ReadMode mode : kBothModes) {
    const Safetensors read = read_safetensors(folder / "file", mode);
    expect_same(read.tensors, tensors);
    EXPECT_EQ(read.header.metadata, kMetadata);
  }
  const Safetensors parsed = parse_safetensors(read_text(folder / "file"));
  expect_same(parsed.tensors, tensors);
  EXPECT_EQ(parsed.header.metadata, kMetadata);
}

TEST(Safetensors, AnEmptyFileReturnsUnchanged) {
  TemporaryFolder folder;
  write_safetensors(folder / "file", {}, {});
  for (const ReadMode mode : kBothModes) EXPECT_TRUE(read_safetensors(folder / "file", mode).tensors.empty());
}

TEST(Safetensors, MlxReadsWhatWeWrite) {
  TemporaryFolder folder;
  Tensors tensors = every_kind();
  tensors.erase("f64");  // which MLX's reader does not know
  write_safetensors(folder / "file.safetensors", tensors, kMetadata);
  const auto [read, metadata] = mx::load_safetensors((folder / "file.safetensors").string());
  ASSERT_EQ(read.size(), tensors.size());
  for (auto [name, array] : read) {
    array.eval();
    expect_same(array, tensors.at(name), name);
  }
  EXPECT_EQ((std::map<std::string, std::string>(metadata.begin(), metadata.end())), kMetadata);
}

TEST(Safetensors, WeReadWhatMlxWrites) {
  TemporaryFolder folder;
  Tensors tensors = every_kind();
  tensors.erase("f64");
  mx::save_safetensors((folder / "file.safetensors").string(), {tensors.begin(), tensors.end()}, {{"k", "v"}});
  for (const ReadMode mode : kBothModes) {
    const Safetensors read = read_safetensors(folder / "file.safetensors", mode);
    expect_same(read.tensors, tensors);
    EXPECT_EQ(read.header.metadata.at("k"), "v");
  }
}

TEST(Safetensors, TheSameContentGivesTheSameBytes) {
  TemporaryFolder folder;
  write_safetensors(folder / "file", every_kind(), kMetadata);
  const std::string bytes = read_text(folder / "file");
  EXPECT_EQ(serialize_safetensors(every_kind(), kMetadata), bytes);
  EXPECT_EQ(testing::TemporaryFolder().names().size(), 0u);
}

TEST(Safetensors, DataIsAlignedToItsItemAndFreeOfGaps) {
  const Tensors tensors = every_kind();
  const std::string bytes = serialize_safetensors(tensors, kMetadata);
  const SafetensorsHeader header = parse_safetensors_header(std::as_bytes(std::span(bytes)), bytes.size());
  EXPECT_EQ(header.data_offset % 8, 0u);
  std::uint64_t total = 0;
  for (const TensorRecord& record : header.tensors) {
    const mx::array& array = tensors.at(record.name);
    EXPECT_EQ(record.begin % array.itemsize(), 0u) << record.name;
    total += record.end - record.begin;
  }
  EXPECT_EQ(header.data_offset + total, bytes.size());
}

TEST(Safetensors, ThePlanIsTheHeaderOfTheFile) {
  const std::string bytes = serialize_safetensors(every_kind(), kMetadata);
  const SafetensorsHeader plan = plan_safetensors(every_kind(), kMetadata);
  const SafetensorsHeader header = parse_safetensors_header(std::as_bytes(std::span(bytes)), bytes.size());
  EXPECT_EQ(plan.tensors, header.tensors);
  EXPECT_EQ(plan.metadata, header.metadata);
  EXPECT_EQ(plan.data_offset, header.data_offset);
}

TEST(Safetensors, AFailingDiskLeavesTheOldFile) {
  TemporaryFolder folder;
  expect_error(ErrorCode::not_found, "does not exist",
               [&] { write_safetensors(folder / "no/file", every_kind(), {}); });
  write_safetensors(folder / "file", {{"a", mx::array(1)}}, {});
  const std::string before = read_text(folder / "file");
  EXPECT_TRUE(testing::error_of([&] { write_safetensors(folder / "file", {{"__metadata__", mx::array(1)}}, {}); }));
  EXPECT_EQ(read_text(folder / "file"), before);
}

TEST(Safetensors, NamesMustBeUtf8AndNotReserved) {
  const mx::array one(1);
  expect_error(ErrorCode::invalid_argument, "__metadata__", [&] {
    serialize_safetensors({{"__metadata__", one}}, {});
  });
  expect_error(ErrorCode::invalid_argument, "UTF-8", [&] { serialize_safetensors({{"\xff", one}}, {}); });
  expect_error(ErrorCode::invalid_argument, "UTF-8", [&] { serialize_safetensors({}, {{"k", "\xc3"}}); });
}

TEST(Safetensors, MappedArraysLookIntoTheFileAndOutliveIt) {
  if (mx::is_available(mx::Device::gpu)) GTEST_SKIP() << "a GPU's allocator may copy";
  TemporaryFolder folder;
  const Tensors tensors{{"a", mx::arange(1000.0f)}, {"b", mx::arange(2000)}};
  write_safetensors(folder / "file", tensors, {});
  Tensors mapped = read_safetensors(folder / "file", ReadMode::memory_map).tensors;
  // In one mapping they are as far apart as in the file.
  EXPECT_EQ(mapped.at("b").data<char>() - mapped.at("a").data<char>(), 4000);
  std::filesystem::remove(folder / "file");
  expect_same(mapped, tensors);
  mapped.erase("a");
  expect_same(mapped.at("b"), tensors.at("b"), "b");
}

TEST(Safetensors, ComputingWithMappedArraysChangesNeitherThemNorTheFile) {
  TemporaryFolder folder;
  write_safetensors(folder / "file", {{"a", mx::arange(5000.0f)}}, {});
  const std::string before = read_text(folder / "file");
  const mx::array kept = read_safetensors(folder / "file", ReadMode::memory_map).tensors.at("a");
  {
    // The last handle of an array is what MLX would overwrite in place.
    mx::array sum = read_safetensors(folder / "file", ReadMode::memory_map).tensors.at("a") + mx::array(1.0f);
    sum = mx::slice_update(sum, mx::zeros({10}), mx::Shape{0}, mx::Shape{10});
    mx::array updated = mx::slice_update(read_safetensors(folder / "file", ReadMode::memory_map).tensors.at("a"),
                                         mx::zeros({10}), mx::Shape{0}, mx::Shape{10});
    mx::eval(sum, updated);
    EXPECT_EQ(sum.data<float>()[10], 11.0f);
    EXPECT_EQ(updated.data<float>()[3], 0.0f);
  }
  expect_same(kept, mx::arange(5000.0f), "a");
  EXPECT_EQ(read_text(folder / "file"), before);
}

TEST(Safetensors, CopiedArraysSurviveTheFileBeingOverwritten) {
  TemporaryFolder folder;
  write_safetensors(folder / "file", every_kind(), {});
  const Tensors read = read_safetensors(folder / "file").tensors;
  write_text(folder / "file", std::string(std::filesystem::file_size(folder / "file"), 'x'));
  expect_same(read, every_kind());
}

// A file made by hand, whose data need not be aligned.
std::string file_of(std::string json, const std::string& data, std::size_t header_bytes = 0) {
  while (json.size() < header_bytes) json += ' ';
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>((json.size() >> (8 * i)) & 0xff);
  return file + json + data;
}

TEST(Safetensors, MisalignedTensorsAreReadAll) {
  TemporaryFolder folder;
  const float values[2] = {1.5f, -2.0f};
  std::string data = "x";
  data.append(reinterpret_cast<const char*>(values), sizeof(values));
  const std::string json = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                           R"("f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})";
  for (std::size_t padding = 0; padding < 8; ++padding) {
    write_text(folder / "file", file_of(json, data, json.size() + padding));
    for (const ReadMode mode : kBothModes) {
      const Safetensors read = read_safetensors(folder / "file", mode);
      expect_same(read.tensors.at("f"), mx::array({1.5f, -2.0f}), "f");
      expect_same(read.tensors.at("b"), mx::array({120}, mx::uint8), "b");
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(read.tensors.at("f").data<char>()) % 4, 0u);
    }
    const mx::array parsed = parse_safetensors(file_of(json, data, json.size() + padding)).tensors.at("f");
    expect_same(parsed, mx::array({1.5f, -2.0f}), "f");
  }
}

TEST(Safetensors, AMissingFileIsNotFoundAndNamed) {
  TemporaryFolder folder;
  for (const ReadMode mode : kBothModes) {
    expect_error(ErrorCode::not_found, "nothing.safetensors",
                 [&] { read_safetensors(folder / "nothing.safetensors", mode); });
    expect_error(ErrorCode::invalid_argument, "regular file", [&] { read_safetensors(folder.path(), mode); });
  }
  expect_error(ErrorCode::not_found, "nothing", [&] { read_safetensors_header(folder / "nothing"); });
}

TEST(Safetensors, WhatMlxHasNotIsUnsupportedByName) {
  TemporaryFolder folder;
  write_text(folder / "f8", file_of(R"({"w":{"dtype":"F8_E5M2","shape":[2],"data_offsets":[0,2]}})", "xx"));
  write_text(folder / "long", file_of(R"({"w":{"dtype":"F32","shape":[0,4000000000],"data_offsets":[0,0]}})", ""));
  EXPECT_EQ(read_safetensors_header(folder / "f8").tensors.front().dtype, "F8_E5M2");
  for (const ReadMode mode : kBothModes) {
    expect_error(ErrorCode::unsupported, "F8_E5M2, which tensor \"w\"", [&] { read_safetensors(folder / "f8", mode); });
    expect_error(ErrorCode::unsupported, "4000000000", [&] { read_safetensors(folder / "long", mode); });
  }
}

TEST(Safetensors, EightBitFloatsThatMlxCanDecodeAreReadAsTheirBytes) {
  TemporaryFolder folder;
  write_text(folder / "f8", file_of(R"({"w":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}})", "\x38\xC0"));
  for (const ReadMode mode : kBothModes) {
    const auto bytes = read_safetensors(folder / "f8", mode).tensors.at("w");
    EXPECT_EQ(bytes.dtype(), mx::uint8);
    EXPECT_TRUE(mx::array_equal(mx::from_fp8(bytes, mx::float32), mx::array({1.0f, -2.0f})).item<bool>());
  }
}

TEST(Safetensors, ABoolMustBeZeroOrOne) {
  TemporaryFolder folder;
  write_text(folder / "file",
             file_of(R"({"w":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})", std::string("\0\1\2", 3)));
  for (const ReadMode mode : kBothModes) {
    expect_error(ErrorCode::corrupt_data, "0 and 1", [&] { read_safetensors(folder / "file", mode); });
  }
}

// Reads every byte of every array: a sanitizer, or the system, tells when one is not there.
std::uint64_t sum_of_bytes(const Tensors& tensors) {
  std::uint64_t sum = 0;
  for (const auto& [name, array] : tensors) {
    const auto* bytes = array.data<unsigned char>();
    for (std::size_t i = 0; i < array.nbytes(); ++i) sum += bytes[i];
  }
  return sum;
}

TEST(Safetensors, EveryTruncationIsAnErrorThatNamesTheFile) {
  TemporaryFolder folder;
  const std::string file =
      serialize_safetensors({{"a", mx::arange(20.0f)}, {"b", mx::array({true, false})}}, {{"k", "v"}});
  for (std::size_t length = 0; length < file.size(); ++length) {
    write_text(folder / "cut", file.substr(0, length));
    for (const ReadMode mode : kBothModes) {
      expect_error(ErrorCode::corrupt_data, "cut", [&] { read_safetensors(folder / "cut", mode); });
    }
    expect_error(ErrorCode::corrupt_data, "cut", [&] { parse_safetensors(file.substr(0, length), "cut"); });
  }
}

TEST(Safetensors, EveryFlippedByteGivesAnErrorOrWholeArrays) {
  TemporaryFolder folder;
  const std::string file =
      serialize_safetensors({{"a", mx::arange(20.0f)}, {"b", mx::array({true, false})}}, {{"k", "v"}});
  std::uint64_t sum = 0;
  int errors = 0;
  for (std::size_t at = 0; at < file.size(); ++at) {
    for (const int flip : {0x01, 0x02, 0x10, 0x80, 0xff}) {
      std::string damaged = file;
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      write_text(folder / "damaged", damaged);
      for (const ReadMode mode : kBothModes) {
        try {
          sum += sum_of_bytes(read_safetensors(folder / "damaged", mode).tensors);
        } catch (const Error& error) {
          EXPECT_TRUE(error.code() == ErrorCode::corrupt_data || error.code() == ErrorCode::unsupported)
              << error.what();
          ++errors;
        }
      }
    }
  }
  EXPECT_GT(sum, 0u);
  EXPECT_GT(errors, 1000);
}

}  // namespace
}  // namespace reprise
