// h2o-generate: continues prompts with a language model and an H2O cache, without Python. Token ids
// in, JSON lines out as the tokens come.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <algorithm>
#include <array>
#include <chrono>
#include <iostream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "h2o/json.h"
#include "h2o/version.h"
#include "llm/arguments.h"
#include "llm/decoder.h"
#include "llm/decoder_config.h"
#include "llm/generate.h"
#include "llm/proc.h"
#include "llm/token_file.h"

namespace {

using Event = nlohmann::ordered_json;

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

constexpr std::array<std::pair<const char*, at::ScalarType>, 4> kDtypes = {
    {{"float32", at::kFloat},
     {"bfloat16", at::kBFloat16},
     {"float16", at::kHalf},
     {"float64", at::kDouble}}};

std::pair<const char*, at::ScalarType> parse_dtype(const std::string& name,
                                                   const h2o::llm::DecoderConfig& config) {
  const std::string& dtype = name == "auto" ? config.dtype : name;
  std::vector<std::string> names = {"auto"};
  for (const auto& known : kDtypes) {
    if (dtype == known.first) return known;
    names.emplace_back(known.first);
  }
  fail("--dtype must be one of " + h2o::list_in_quotes(names) + ", got " + h2o::in_quotes(dtype));
}

at::Device parse_device(const std::string& name) {
  const auto num_cuda = static_cast<int64_t>(at::getNumGPUs());
  if (name == "auto") return num_cuda > 0 ? at::kCUDA : at::kCPU;
  std::optional<at::Device> device;
  try {
    device.emplace(name);
  } catch (const c10::Error&) {
    // Said below.
  }
  if (!device || !(device->is_cpu() || device->is_cuda())) {
    fail(R"(--device must be "auto", "cpu", "cuda" or "cuda:<index>", got )" +
         h2o::in_quotes(name));
  }
  if (device->is_cuda() && std::max<int64_t>(device->index(), 0) >= num_cuda) {
    fail("--device must be one that PyTorch sees, got " + h2o::in_quotes(name) + " and " +
         std::to_string(num_cuda) + " CUDA devices");
  }
  return *device;
}

std::vector<std::vector<int64_t>> read_prompts(const std::string& file) {
  if (file != "-") return h2o::llm::parse_token_file(h2o::read_text_file(file), file);
  const std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  return h2o::llm::parse_token_file(text, "<stdin>");
}

// A figure of this process in MB (10^6 bytes), e.g. VmRSS; 0 where the system does not tell.
double memory_mb(const char* field) {
  return h2o::llm::proc_bytes("/proc/self/status", field).value_or(0) / 1e6;
}

// Quantiles of what was measured; nulls where nothing was.
Event summary(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto quantile = [&](double part) {
    if (values.empty()) return Event();
    return Event(values[static_cast<size_t>(part * static_cast<double>(values.size() - 1) + 0.5)]);
  };
  return {{"median", quantile(0.5)}, {"p10", quantile(0.1)}, {"p90", quantile(0.9)}};
}

// [layer][row][KV head][...]: the positions that are kept, ascending.
Event kept_positions(const h2o::llm::DecoderCache& cache) {
  Event layers = Event::array();
  for (const h2o::KVCache& layer : cache.layers()) {
    const at::Tensor sorted = std::get<0>(layer.positions.cpu().sort(-1));
    const auto positions = sorted.accessor<int32_t, 3>();
    Event rows = Event::array();
    for (int64_t row = 0; row < positions.size(0); ++row) {
      Event heads = Event::array();
      for (int64_t head = 0; head < positions.size(1); ++head) {
        Event kept = Event::array();
        for (int64_t slot = 0; slot < positions.size(2); ++slot) {
          if (positions[row][head][slot] >= 0) kept.push_back(positions[row][head][slot]);
        }
        heads.push_back(std::move(kept));
      }
      rows.push_back(std::move(heads));
    }
    layers.push_back(std::move(rows));
  }
  return layers;
}

void write_text(const std::string& text) {
  std::cout << text << std::flush;
  if (!std::cout) throw std::runtime_error("standard output cannot be written");
}

// One event a line, on its way before the next token is computed.
void write(const Event& event) {
  write_text(event.dump(-1, ' ', false, Event::error_handler_t::replace) + "\n");
}

h2o::llm::GenerateEvents written_events(bool kept) {
  h2o::llm::GenerateEvents events;
  events.prefill = [](int64_t tokens, int64_t of) {
    write({{"event", "prefill"}, {"tokens", tokens}, {"of", of}});
  };
  events.token = [](const h2o::llm::ChosenToken& token) {
    Event event = {
        {"event", "token"}, {"row", token.row}, {"index", token.index}, {"token", token.id}};
    if (token.logprob) event["logprob"] = *token.logprob;
    write(event);
  };
  events.end = [](int64_t row, h2o::llm::FinishReason reason) {
    write({{"event", "end"}, {"row", row}, {"reason", to_string(reason)}});
  };
  if (kept) {
    events.cache = [](const h2o::llm::DecoderCache& cache) {
      write({{"event", "kept"}, {"positions", kept_positions(cache)}});
    };
  }
  return events;
}

// A learned table of positions is generate()'s to refuse; angles go on, into what no training has
// seen.
void note_length(const h2o::llm::DecoderConfig& config,
                 const std::vector<std::vector<int64_t>>& prompts, int64_t max_new_tokens) {
  size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  const int64_t positions = static_cast<int64_t>(longest) + max_new_tokens - 1;
  if (config.architecture != h2o::llm::Architecture::kOpt && positions > config.max_positions) {
    std::cerr << "h2o-generate: note: up to " << positions
              << " positions, and the model was made for " << config.max_positions << '\n';
  }
}

void run(const h2o::llm::Arguments& arguments) {
  const h2o::RunConfig& run = arguments.config.run;
  if (run.threads) at::set_num_threads(static_cast<int>(*run.threads));
  const auto prompts = read_prompts(arguments.tokens);
  const auto start = std::chrono::steady_clock::now();
  const h2o::llm::DecoderConfig config = h2o::llm::load_decoder_config(arguments.model);
  const auto [dtype_name, dtype] = parse_dtype(arguments.config.model.dtype, config);
  const at::Device device = parse_device(run.device);
  h2o::llm::GenerateOptions options;
  if (!arguments.full) options.cache.policy = arguments.config.policy;
  options.cache.prefill = run.prefill;
  options.cache.prefill_chunk = run.prefill_chunk;
  options.max_new_tokens = run.max_new_tokens;
  options.temperature = run.temperature;
  options.top_p = run.top_p;
  options.seed = run.seed;
  options.ignore_eos = arguments.ignore_eos;
  options.logprobs = arguments.logprobs;
  h2o::llm::check_request(config, prompts, options);

  const auto decoder = h2o::llm::load_decoder(arguments.model, config, dtype, device);
#if defined(__GLIBC__)
  malloc_trim(0);  // what loading freed is more than a cache takes
#endif
  const std::chrono::duration<double> load = std::chrono::steady_clock::now() - start;

  note_length(config, prompts, run.max_new_tokens);
  std::vector<size_t> prompt_tokens, new_tokens;
  for (const auto& prompt : prompts) prompt_tokens.push_back(prompt.size());
  write({{"event", "start"},
         {"h2o", h2o::version()},
         {"model", arguments.model},
         {"dtype", dtype_name},
         {"device", device.str()},
         {"threads", at::get_num_threads()},
         {"policy", arguments.full ? Event() : Event(arguments.config.policy.to_string())},
         {"prefill", to_string(run.prefill)},
         {"prompt_tokens", prompt_tokens},
         {"load_s", load.count()}});
  const auto result =
      h2o::llm::generate(*decoder, config, prompts, options,
                         at::TensorOptions(dtype).device(device), written_events(arguments.kept));
  for (const auto& row : result.tokens) new_tokens.push_back(row.size());
  write({{"event", "done"},
         {"new_tokens", new_tokens},
         {"tokens_kept", result.tokens_kept},
         {"kv_bytes", result.kv_bytes},
         {"prefill_s", result.prefill_s},
         {"step_ms", summary(result.step_ms)},
         {"resident_mb", memory_mb("VmRSS")},
         {"peak_resident_mb", memory_mb("VmHWM")}});
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const h2o::llm::Parsed parsed = h2o::llm::parse_arguments(argc, argv);
    if (parsed.answer) {
      write_text(*parsed.answer);
    } else {
      run(parsed.arguments);
    }
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "h2o-generate: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "h2o-generate: " << error.what() << '\n';
  }
  return 2;
}
