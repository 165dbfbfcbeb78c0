#include "reprise/storage/gguf_model.h"

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/base/sha256.h"
#include "reprise/storage/gguf.h"
#include "reprise/storage/gguf_architecture.h"
#include "reprise/storage/gguf_config.h"
#include "reprise/storage/gguf_metadata.h"
#include "reprise/storage/gguf_tokenizer_data.h"
#include "reprise/storage/gguf_weights.h"
#include "reprise/storage/mapped_file.h"

namespace reprise::internal {
namespace {

// Work on a thread of its own, where there is one to be had.
class Beside {
 public:
  explicit Beside(std::function<void()> work) {
    const auto guarded = [this, does = std::move(work)] {
      try {
        does();
      } catch (...) {
        failure_ = std::current_exception();
      }
    };
    try {
      thread_ = std::thread(guarded);
    } catch (const std::system_error&) {
      guarded();
    }
  }
  ~Beside() { join(); }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

  // Throws: what the work threw.
  void finish() {
    join();
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void join() {
    if (thread_.joinable()) thread_.join();
  }

  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace

ModelFiles read_gguf_model(const std::filesystem::path& file,
                           const std::function<void(const TokenizerData&)>& beside_weights) {
  const std::shared_ptr<MappedFile> mapping = MappedFile::open(file, "read_model_files");
  ModelFiles files;
  std::optional<Beside> beside;
  try {
    const GgufHeader header = parse_gguf(mapping->bytes(), mapping->bytes().size());
    const GgufMetadata metadata(header);
    const GgufModelView view{header, mapping->bytes(), metadata,
                             find_gguf_architecture(metadata.string("general.architecture").value_or(""))};
    refuse_gguf_variants(view);
    const GgufHeads heads = gguf_heads(view);

    std::vector<GgufConversion> conversions;
    for (const GgufTensor& tensor : header.tensors) {
      if (auto conversion = gguf_conversion(tensor, view.architecture, heads)) {
        conversions.push_back(std::move(*conversion));
      }
    }
    files.path = file;
    files.config_json = gguf_config(view, heads, conversions);
    files.tokenizer = gguf_tokenizer_data(metadata);
    if (beside_weights) {
      beside.emplace([&] {
        beside_weights(files.tokenizer);
        sha256_hex("");  // OpenSSL starts in milliseconds: now, and not when the fingerprint is made
      });
    }
    files.weights = convert_gguf_tensors(conversions, header.data_offset, mapping, beside.has_value());
  } catch (const Error& error) {
    throw Error(error.code(), std::string(error.what()) + " (in " + file.string() + ")");
  }
  if (beside) beside->finish();
  return files;
}

}  // namespace reprise::internal
