#include "h2o/config.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <set>
#include <stdexcept>
#include <string>

#include "h2o/json.h"

namespace h2o {
namespace {

constexpr std::array<std::string_view, 5> kDtypes = {"auto", "float32", "float16", "bfloat16",
                                                     "float64"};

// One object of the file. The keys it may have are given once, when it is made: others are refused
// there, and known_config_keys() is the record of what was given.
class Section {
 public:
  // `object` is null where the file leaves the section out: then it has no key.
  Section(const std::string& file, const std::string& path, const Json* object,
          std::initializer_list<std::string> keys, std::vector<std::string>* known)
      : file_(file), path_(path), object_(object), keys_(keys), known_(known) {
    if (object_ != nullptr && !object_->is_object()) {
      throw std::invalid_argument(file_ + ": " + (path_.empty() ? "the top level" : path_) +
                                  " must be an object, got " + shown(*object_));
    }
    if (known_ != nullptr) {
      for (const auto& key : keys_) known_->push_back(joined(path_, key));
    }
    if (object_ == nullptr) return;
    for (const auto& [key, value] : object_->items()) {
      if (keys_.count(key) != 0) continue;
      throw std::invalid_argument(file_ + ": " + (path_.empty() ? "the top level" : path_) +
                                  " must have only the keys " + list_in_quotes(keys) + ", got " +
                                  shown(key) + ": " + shown(value));
    }
  }

  Section section(const std::string& key, std::initializer_list<std::string> keys) const {
    return {file_, joined(path_, key), find(key), keys, known_};
  }

  // What messages call it.
  std::string name() const { return file_ + ": " + path_; }
  bool exists() const { return object_ != nullptr; }
  bool has(const std::string& key) const { return find(key) != nullptr; }

  [[noreturn]] void fail(const std::string& message) const {
    throw std::invalid_argument(name() + message);
  }

  // The readers below return false, and leave `result` as it is, where the key is left out.

  template <typename Integer>  // int64_t or std::optional<int64_t>
  bool integer(const std::string& key, Integer& result, int64_t lowest, int64_t highest) const {
    const Json* value = find(key);
    if (value == nullptr) return false;
    // An integer above INT64_MAX wraps to a negative one, which no `lowest` (>= 0) lets through.
    const int64_t number = value->is_number_integer() ? value->get<int64_t>() : -1;
    if (number < lowest || number > highest) {
      fail_value(key,
                 "an integer from " + std::to_string(lowest) + " to " + std::to_string(highest),
                 *value);
    }
    result = number;
    return true;
  }

  template <typename Number>  // double or std::optional<double>
  bool fraction(const std::string& key, Number& result) const {
    const Json* value = find(key);
    if (value == nullptr) return false;
    const double number = value->is_number() ? value->get<double>() : 0.0;
    if (!(number > 0.0 && number <= 1.0)) fail_value(key, "a number > 0 and <= 1", *value);
    result = number;
    return true;
  }

  bool non_negative(const std::string& key, double& result) const {
    const Json* value = find(key);
    if (value == nullptr) return false;
    const double number = value->is_number() ? value->get<double>() : -1.0;
    if (!(number >= 0.0)) fail_value(key, "a number >= 0", *value);
    result = number;
    return true;
  }

  // `valid` says which strings will do, `rule` says it in words.
  template <typename Valid>
  bool text(const std::string& key, std::string& result, const std::string& rule,
            Valid valid) const {
    const Json* value = find(key);
    if (value == nullptr) return false;
    if (!value->is_string() || !valid(value->get_ref<const std::string&>())) {
      fail_value(key, rule, *value);
    }
    result = value->get<std::string>();
    return true;
  }

  template <typename Names>
  bool choice(const std::string& key, std::string& result, const Names& names) const {
    return text(key, result, "one of " + list_in_quotes(names), [&](std::string_view name) {
      return std::find(std::begin(names), std::end(names), name) != std::end(names);
    });
  }

  bool is_null(const std::string& key) const {
    const Json* value = find(key);
    return value != nullptr && value->is_null();
  }

 private:
  const Json* find(const std::string& key) const {
    if (keys_.count(key) == 0) throw std::logic_error(path_ + " does not declare " + key);
    if (object_ == nullptr) return nullptr;
    const auto found = object_->find(key);
    return found == object_->end() ? nullptr : &*found;
  }

  [[noreturn]] void fail_value(const std::string& key, const std::string& rule,
                               const Json& value) const {
    throw std::invalid_argument(file_ + ": " + joined(path_, key) + " must be " + rule + ", got " +
                                shown(value));
  }

  const std::string& file_;
  std::string path_;
  const Json* object_;
  std::set<std::string> keys_;
  std::vector<std::string>* known_;
};

void read_model(const Section& model, ModelConfig& result) {
  std::string name;
  if (!model.is_null("name") && model.text("name", name, "null or a string that is not empty",
                                           [](const std::string& text) { return !text.empty(); })) {
    result.name = name;
  }
  model.choice("dtype", result.dtype, kDtypes);
}

// {"size": slots} or {"ratio": part of the prompt}.
void read_size_or_ratio(const Section& section, std::optional<int64_t>& size,
                        std::optional<double>& ratio) {
  const bool has_size = section.integer("size", size, 0, kMaxTokens);
  const bool has_ratio = section.fraction("ratio", ratio);
  if (section.exists() && has_size == has_ratio) {
    section.fail(std::string(R"( must have exactly one of "size", "ratio", got )") +
                 (has_size ? "both" : "neither"));
  }
}

void read_scoring(const Section& policy, Scoring& scoring, Reading& reading) {
  std::string rule(to_string(scoring.rule));
  policy.choice("score_rule", rule,
                std::array{to_string(ScoreRule::kSum), to_string(ScoreRule::kDecay),
                           to_string(ScoreRule::kMean), to_string(ScoreRule::kValue),
                           to_string(ScoreRule::kMisses), to_string(ScoreRule::kPrompt),
                           to_string(ScoreRule::kRandom), to_string(ScoreRule::kGiven)});
  scoring.rule = parse_score_rule("policy", rule);
  policy.fraction("score_decay", scoring.decay);
  policy.integer("score_seed", scoring.seed, 0, kMaxTokens);
  policy.integer("score_queries", scoring.num_queries, 0, kMaxTokens);
  policy.integer("score_pool", scoring.pool, 1, kMaxTokens);
  policy.integer("pattern_stride", scoring.pattern_stride, 0, kMaxTokens);
  policy.integer("pattern_columns", scoring.pattern_columns, 0, kMaxTokens);
  policy.integer("read_slots", reading.slots, 0, kMaxTokens);
  policy.integer("read_page", reading.page, 1, kMaxTokens);
  if (!policy.exists()) return;
  check_scoring(policy.name() + ".", scoring);
  check_reading(policy.name() + ".", reading, scoring);
}

void read_policy(const Section& policy, EvictionPolicy& result) {
  EvictionPolicyOptions options;
  const std::initializer_list<std::string> size_or_ratio = {"size", "ratio"};
  read_size_or_ratio(policy.section("heavy", size_or_ratio), options.num_heavy,
                     options.heavy_ratio);
  read_size_or_ratio(policy.section("recent", size_or_ratio), options.num_recent,
                     options.recent_ratio);
  policy.integer("num_sink", options.num_sink, 0, kMaxTokens);
  std::string gqa_reduce(to_string(options.gqa_reduce));
  policy.choice("gqa_reduce", gqa_reduce,
                std::array{to_string(GqaReduce::kSum), to_string(GqaReduce::kMax)});
  options.gqa_reduce = parse_gqa_reduce("policy", gqa_reduce);
  read_scoring(policy, options.scoring, options.reading);
  if (!policy.exists()) return;
  // One of them left out could mean 0 or the default; the file has to say.
  for (const auto* key : {"heavy", "recent"}) {
    if (!policy.has(key)) {
      policy.fail(std::string(R"( must have both "heavy" and "recent", got no )") + in_quotes(key));
    }
  }
  if (!options.heavy_ratio && !options.recent_ratio &&
      options.num_sink + *options.num_heavy + *options.num_recent == 0) {
    policy.fail(": num_sink + heavy.size + recent.size must be >= 1, got 0");
  }
  result = EvictionPolicy(options);
}

bool is_device(std::string_view name) {
  constexpr std::string_view kCuda = "cuda:";
  if (name == "auto" || name == "cpu" || name == "cuda") return true;
  if (name.substr(0, kCuda.size()) != kCuda) return false;
  const std::string_view index = name.substr(kCuda.size());
  return (index.size() == 1 || index.size() == 2) &&
         index.find_first_not_of("0123456789") == std::string_view::npos;
}

void read_run(const Section& run, RunConfig& result) {
  std::string prefill(to_string(result.prefill));
  run.choice("prefill", prefill,
             std::array{to_string(Prefill::kOneShot), to_string(Prefill::kStreaming)});
  result.prefill =
      prefill == to_string(Prefill::kStreaming) ? Prefill::kStreaming : Prefill::kOneShot;
  run.integer("prefill_chunk", result.prefill_chunk, 1, kMaxTokens);
  run.integer("max_new_tokens", result.max_new_tokens, 1, kMaxTokens);
  run.integer("seed", result.seed, 0, INT64_MAX);
  run.non_negative("temperature", result.temperature);
  run.fraction("top_p", result.top_p);
  run.text("device", result.device, R"("auto", "cpu", "cuda" or "cuda:<index>")", is_device);
  if (!run.is_null("threads")) run.integer("threads", result.threads, 1, kMaxThreads);
}

// Every key is read here, whether the file has it or not, so that `known` gets all of them.
Config read_config(const Json& root, const std::string& file, std::vector<std::string>* known) {
  Config config;
  const Section top(file, "", &root, {"$schema", "model", "policy", "run"}, known);
  std::string schema;
  top.text("$schema", schema, "a string", [](std::string_view) { return true; });
  read_model(top.section("model", {"name", "dtype"}), config.model);
  read_policy(
      top.section("policy", {"num_sink", "heavy", "recent", "gqa_reduce", "score_rule",
                             "score_decay", "score_seed", "score_queries", "score_pool",
                             "pattern_stride", "pattern_columns", "read_slots", "read_page"}),
      config.policy);
  read_run(top.section("run", {"prefill", "prefill_chunk", "max_new_tokens", "seed", "temperature",
                               "top_p", "device", "threads"}),
           config.run);
  return config;
}

}  // namespace

std::string_view to_string(Prefill prefill) {
  return prefill == Prefill::kOneShot ? "one_shot" : "streaming";
}

Config parse_config(std::string_view text, const std::string& name) {
  return read_config(parse_json(text, name), name, nullptr);
}

Config load_config(const std::filesystem::path& path) {
  return parse_config(read_text_file(path), path.string());
}

std::vector<std::string> known_config_keys() {
  std::vector<std::string> keys;
  read_config(Json::object(), "known_config_keys", &keys);
  return keys;
}

}  // namespace h2o
