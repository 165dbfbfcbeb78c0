// model_pages DIR [--only NAME…] [--part K/N] [--known] [--verbose]: runs tiny models over caches in pages beside their
// own ones, alone and in batches of unequal rows. Exit status: as model_replay's.
#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/paged_batch.h"
#include "reprise/cache/paged_kv_cache.h"
#include "tests/models/replay_program.h"

namespace {

using namespace reprise;
using namespace reprise::test;
namespace fs = std::filesystem;
namespace mx = mlx::core;

constexpr double kTolerance = 1e-5;

std::vector<int> random_ids(const LanguageModel& model, int count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int> ids;
  for (int i = 0; i < count; ++i)
    ids.push_back(static_cast<int>(random() % static_cast<unsigned>(model.info().vocab_size)));
  return ids;
}

// The attention caches of a layer, and its other ones.
void visit(LayerCache& layer, const std::function<void(LayerCache&)>& call) {
  auto* list = dynamic_cast<CacheList*>(&layer);
  if (list == nullptr) return call(layer);
  for (std::size_t i = 0; i < list->num_children(); ++i) visit(list->child(i), call);
}

void drop_unseen(PromptCache& cache) {
  for (std::size_t i = 0; i < cache.size(); ++i) {
    visit(cache[i], [](LayerCache& layer) {
      if (auto* paged = dynamic_cast<PagedKVCache*>(&layer)) paged->drop_unseen();
    });
  }
}

std::unique_ptr<LayerCache> batch_of(const std::vector<LayerCache*>& rows) {
  if (const auto* first = dynamic_cast<CacheList*>(rows.front())) {
    CacheList::Children children;
    for (std::size_t i = 0; i < first->num_children(); ++i) {
      std::vector<LayerCache*> column;
      for (LayerCache* row : rows) column.push_back(&dynamic_cast<CacheList&>(*row).child(i));
      children.push_back(batch_of(column));
    }
    return std::make_unique<CacheList>(std::move(children));
  }
  if (dynamic_cast<PagedKVCache*>(rows.front()) != nullptr) {
    std::vector<PagedKVCache*> paged;
    for (LayerCache* row : rows) paged.push_back(dynamic_cast<PagedKVCache*>(row));
    return std::make_unique<PagedBatch>(std::move(paged));
  }
  return merge_caches(std::vector<const LayerCache*>(rows.begin(), rows.end()));
}

PromptCache batch_of(std::vector<PromptCache>& rows) {
  PromptCache batch;
  for (std::size_t i = 0; i < rows.front().size(); ++i) {
    std::vector<LayerCache*> column;
    for (PromptCache& row : rows) column.push_back(&row[i]);
    batch.push_back(batch_of(column));
  }
  return batch;
}

// What of a batch is not in its rows' own caches goes back to them.
void take_back(LayerCache& batch, LayerCache& row, int index,
               const std::function<void(std::unique_ptr<LayerCache>)>& put) {
  if (auto* list = dynamic_cast<CacheList*>(&batch)) {
    auto& own = dynamic_cast<CacheList&>(row);
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      take_back(list->child(i), own.child(i), index,
                [&](std::unique_ptr<LayerCache> cache) { own.replace(i, std::move(cache)); });
    }
  } else if (const BatchedCache* merged = batched(batch)) {
    put(merged->extract(index));
  }
}

class PagesCheck {
 public:
  PagesCheck(const LanguageModel& model, double tolerance, const ReportOutcome& report)
      : model_(model), tolerance_(tolerance), report_(report), pool_(PagePool::make()) {}

  void run() {
    for (const int piece : {5, 64}) {
      attempt("pieces of " + std::to_string(piece), [&](KitOutcome& outcome) { check_alone(piece, outcome); });
    }
    attempt("batch", [&](KitOutcome& outcome) { check_batch(outcome); });
    KitOutcome outcome{"pages go back", "", 0};
    if (pool_->nbytes() != 0) outcome.failure = std::to_string(pool_->nbytes()) + " bytes are still held";
    report_(outcome);
  }

 private:
  void attempt(const std::string& name, const std::function<void(KitOutcome&)>& check) {
    KitOutcome outcome{name, "", 0};
    try {
      check(outcome);
    } catch (const std::exception& error) {
      outcome.failure = error.what();
    }
    report_(outcome);
  }

  PromptCache paged_cache() const { return make_paged_prompt_cache(model_.make_cache(), pool_); }

  void compare(const std::string& what, const mx::array& got, const mx::array& want, KitOutcome& outcome) const {
    if (outcome.failure.empty()) outcome.failure = difference(what, got, want, tolerance_, &outcome.error);
  }

  void check_alone(int piece, KitOutcome& outcome) {
    const std::vector<int> ids = random_ids(model_, 170, 1);
    const int prompt = 150;
    PromptCache own = model_.make_cache(), paged = paged_cache();
    for (int at = 0, end = 0; at < static_cast<int>(ids.size()); at = end) {
      end = at < prompt ? std::min(prompt, at + piece) : at + 1;
      const std::vector<std::vector<int>> rows = {{ids.begin() + at, ids.begin() + end}};
      compare("tokens " + std::to_string(at) + " to " + std::to_string(end), feed(model_, rows, paged),
              feed(model_, rows, own), outcome);
      if (end % 3 == 0) drop_unseen(paged);
      check_prompt_cache(paged, own.size() > 0 && own[0].position() ? std::optional(end) : std::nullopt);
    }
    // Files get what the model's own caches hold.
    PromptCache plain = make_plain_prompt_cache(paged);
    compare("the plain caches", feed(model_, {{ids[0]}}, plain), feed(model_, {{ids[0]}}, own), outcome);
  }

  void check_batch(KitOutcome& outcome) {
    const std::vector<int> lengths = {3, 70, 1, 130};
    std::vector<PromptCache> rows, alone;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      PromptCache cache = paged_cache();
      feed(model_, {random_ids(model_, lengths[b], static_cast<unsigned>(b))}, cache);
      cache.eval();
      alone.push_back(cache.fork());
      rows.push_back(std::move(cache));
    }
    PromptCache batch = batch_of(rows);
    const auto step_alone = [&](std::vector<PromptCache>& caches, std::size_t b, int id) {
      return feed(model_, {{id}}, caches[b]);
    };
    for (unsigned step = 0; step < 6; ++step) {
      const std::vector<int> ids = random_ids(model_, static_cast<int>(lengths.size()), 100 + step);
      std::vector<std::vector<int>> tokens;
      for (const int id : ids) tokens.push_back({id});
      std::optional<mx::array> together;
      try {
        together = feed(model_, tokens, batch);
      } catch (const Error& error) {
        // Attention that is not the cache's own knows one block of keys only: such models run row by row.
        if (error.code() != ErrorCode::unsupported || model_.info().model_type != "deepseek_v3" || step > 0) throw;
        for (std::size_t b = 0; b < lengths.size(); ++b) check_prompt_cache(rows[b], lengths[b]);
        return;
      }
      for (std::size_t b = 0; b < lengths.size(); ++b) {
        const int at = static_cast<int>(b);
        const mx::array got = mx::slice(*together, {at, 0, 0}, {at + 1, 1, together->shape(2)});
        compare("row " + std::to_string(b) + ", step " + std::to_string(step), got, step_alone(alone, b, ids[b]),
                outcome);
      }
    }
    // A row leaves and goes on alone.
    for (std::size_t i = 0; i < batch.size(); ++i) {
      take_back(batch[i], rows[1][i], 1,
                [&](std::unique_ptr<LayerCache> cache) { rows[1].replace(i, std::move(cache)); });
    }
    compare("a row that has left", step_alone(rows, 1, 1), step_alone(alone, 1, 1), outcome);
  }

  const LanguageModel& model_;
  double tolerance_;
  const ReportOutcome& report_;
  std::shared_ptr<PagePool> pool_;
};

void check_folder(const fs::path& folder, const ReportOutcome& report) {
  const KitModel kit = read_kit(folder);
  const KitMode mode{KitMode::Kind::kernels, "kernels"};
  const auto model = make_kit_model(folder, kit, mode);
  PagesCheck(*model, allowed(kTolerance, mode, *model), report).run();
}

}  // namespace

int main(int argc, char** argv) {
  return replay_folders("model_pages", std::vector<std::string>(argv + 1, argv + argc), check_folder);
}
