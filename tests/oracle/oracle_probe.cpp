// What the comparison with the oracle asks of Reprise.
// usage: oracle_probe encode MODEL < TEXTS.jsonl       one JSON line {"ids": […], "decoded": …} per text, with BOS
//        oracle_probe top MODEL < LISTS.jsonl          {"ids": […], "prompt": how many are fed in one piece} a line;
//                                                      gives {"top": […]}, the likeliest next id after `prompt` and on
//        oracle_probe render MODEL < CASES.jsonl       one JSON line {"prompt": …, "ids": […]} or {"error": …} per case
//        oracle_probe logits MODEL LISTS.json OUT KV_DTYPE
//            LISTS: [{"ids": […], "prompt": how many of them are fed in one piece, the others one by one}, …]
//            OUT: safetensors, "<i>" = float32 [L, V]; KV_DTYPE: float32 or float16
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "mlx/mlx.h"
#include "reprise/generate/loaded_model.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/model_files.h"
#include "reprise/storage/safetensors.h"

namespace mx = mlx::core;
using Json = nlohmann::ordered_json;

namespace {

std::string text_or_empty(const Json& value) { return value.is_null() || value.empty() ? std::string() : value.dump(); }

void render(const std::string& path) {
  const auto files = reprise::read_model_files(path);
  const reprise::Tokenizer tokenizer(files.tokenizer);
  const auto chat_template = files.tokenizer.chat_template.empty()
                                 ? reprise::ChatTemplate::chatml(files.tokenizer.bos_token)
                                 : reprise::ChatTemplate(files.tokenizer);
  for (std::string line; std::getline(std::cin, line);) {
    Json out;
    try {
      const Json item = Json::parse(line);
      std::vector<reprise::ChatMessage> messages;
      for (Json message : item.at("messages")) {
        reprise::ChatMessage ours{message.at("role"), message.value("content", "")};
        message.erase("role");
        message.erase("content");
        ours.extra_json = text_or_empty(message);
        messages.push_back(ours);
      }
      const std::string prompt =
          chat_template.render(messages, {.add_generation_prompt = item.value("add_generation_prompt", false),
                                          .continue_final_message = item.value("continue_final_message", false),
                                          .tools_json = text_or_empty(item.value("tools", Json())),
                                          .kwargs_json = text_or_empty(item.value("kwargs", Json()))});
      out["prompt"] = prompt;
      out["ids"] = tokenizer.encode(prompt);
      out["decoded"] = tokenizer.decode(tokenizer.encode(prompt));
    } catch (const std::exception& error) {
      out["error"] = error.what();
    }
    std::cout << out.dump() << "\n";
  }
}

void encode(const std::string& path) {
  const reprise::Tokenizer tokenizer(reprise::read_model_files(path).tokenizer);
  for (std::string line; std::getline(std::cin, line);) {
    const auto ids = tokenizer.encode(Json::parse(line).get<std::string>(), {.add_special_tokens = true});
    std::cout << Json{{"ids", ids}, {"decoded", tokenizer.decode(ids)}}.dump() << "\n";
  }
}

void top(const std::string& path) {
  const auto model = reprise::make_model(reprise::read_model_files(path), {});
  for (std::string line; std::getline(std::cin, line);) {
    const Json list = Json::parse(line);
    const auto ids = list.at("ids").get<std::vector<int>>();
    const int prompt = list.at("prompt");
    auto cache = model->make_cache();
    std::vector<int> top;
    for (int at = 0; at < static_cast<int>(ids.size());) {
      const int n = at == 0 ? prompt : 1;
      const auto logits = model->forward(mx::array(ids.data() + at, {1, n}, mx::int32), cache);
      const auto last = mx::slice(logits, {0, n - 1, 0}, {1, n, logits.shape(2)});
      top.push_back(mx::argmax(mx::reshape(last, {-1})).item<int>());
      at += n;
    }
    std::cout << Json{{"top", top}}.dump() << std::endl;
  }
}

void logits(const std::string& path, const std::string& lists_file, const std::string& out_file,
            const std::string& kv_dtype) {
  const auto model = reprise::make_model(reprise::read_model_files(path),
                                         {.kv_dtype = kv_dtype == "float32" ? mx::float32 : mx::float16});
  const Json lists = Json::parse(reprise::read_file(lists_file));
  std::map<std::string, mx::array> out;
  for (std::size_t i = 0; i < lists.size(); ++i) {
    const auto ids = lists[i].at("ids").get<std::vector<int>>();
    const int prompt = lists[i].at("prompt");
    auto cache = model->make_cache();
    std::vector<mx::array> pieces;
    for (int at = 0; at < static_cast<int>(ids.size());) {
      const int n = at < prompt ? prompt : 1;
      pieces.push_back(mx::astype(model->forward(mx::array(ids.data() + at, {1, n}, mx::int32), cache), mx::float32));
      mx::eval(pieces.back());
      at += n;
    }
    out.insert({std::to_string(i), mx::squeeze(mx::concatenate(pieces, 1), 0)});
    mx::eval(out.at(std::to_string(i)));
    std::cerr << "logits " << i + 1 << "/" << lists.size() << "\n";
  }
  reprise::write_safetensors(out_file, out, {});
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() == 2 && args[0] == "encode") return encode(args[1]), 0;
    if (args.size() == 2 && args[0] == "top") return top(args[1]), 0;
    if (args.size() == 2 && args[0] == "render") return render(args[1]), 0;
    if (args.size() == 5 && args[0] == "logits") return logits(args[1], args[2], args[3], args[4]), 0;
    std::cerr << "usage: oracle_probe encode|top|render MODEL | oracle_probe logits MODEL LISTS.json OUT.safetensors "
                 "KV_DTYPE\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
