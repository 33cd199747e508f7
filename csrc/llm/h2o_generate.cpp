// h2o-generate: continues prompts with a language model and an H2O cache, without Python. Token ids
// in, JSON lines out as the tokens come.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <getopt.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "h2o/config.h"
#include "h2o/json.h"
#include "h2o/version.h"
#include "llm/decoder.h"
#include "llm/decoder_config.h"
#include "llm/generate.h"
#include "llm/token_file.h"

namespace {

using h2o::Json;

constexpr const char* kUsage =
    R"(usage: h2o-generate --model DIR [--policy FILE] [--tokens FILE] [options]

Continues prompts with a LLaMA, OPT or GPT-NeoX model in a Hugging Face folder (config.json and
.safetensors files) and a KV cache of fixed size. Token ids in, JSON lines out as the tokens come;
`h2o-kv tokenize` and `h2o-kv detokenize` make ids of text and text of the lines.

  --model DIR           model folder; default: model.name of the policy file
  --policy FILE         config file (docs/config.md): its policy, and its run and model.dtype as
                        defaults of what follows; without it a tenth of the prompt is kept for its
                        attention and a tenth because it is recent
  --full                keep every token instead
  --tokens FILE         {"tokens": [[id, ...], ...]}, one list a row; - is standard input (default)
  --max-new-tokens N    tokens of each row, default 128
  --ignore-eos          go on after an end-of-text token
  --prefill one_shot|streaming   full attention over the prompt and one selection, or chunks that
                        are evicted as they come
  --prefill-chunk N     tokens of such a chunk, default 64
  --temperature T       0 (default) is greedy
  --top-p P             nucleus sampling: 0 < P <= 1, default 1
  --seed N              of row 0; row r draws from N + r
  --dtype TYPE          float32 (default), bfloat16, float16, float64, or auto: the model's own
  --device DEVICE       cpu, cuda, cuda:<index>, or auto (default): CUDA where there is one
  --threads N           CPU threads; default: PyTorch's choice
  --help, --version
)";

// What is wrong with the command line or with what it names; one line.
[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

template <typename Number>
Number parse_number(const char* option, const std::string& text, Number lowest, Number highest) {
  Number number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || !(number >= lowest && number <= highest)) {
    fail(std::string("--") + option + " must be a number from " + Json(lowest).dump() + " to " +
         Json(highest).dump() + ", got " + h2o::in_quotes(text));
  }
  return number;
}

struct Settings {
  std::string model;
  std::string tokens = "-";
  h2o::Config config;
  bool full = false;
  bool ignore_eos = false;
};

struct Given {
  const char* option;
  std::string value;
};

Settings parse_arguments(int argc, char** argv) {
  constexpr int kFlag = 1;
  const std::vector<option> options = {{"model", required_argument, nullptr, 0},
                                       {"policy", required_argument, nullptr, 0},
                                       {"full", no_argument, nullptr, kFlag},
                                       {"tokens", required_argument, nullptr, 0},
                                       {"max-new-tokens", required_argument, nullptr, 0},
                                       {"ignore-eos", no_argument, nullptr, kFlag},
                                       {"prefill", required_argument, nullptr, 0},
                                       {"prefill-chunk", required_argument, nullptr, 0},
                                       {"temperature", required_argument, nullptr, 0},
                                       {"top-p", required_argument, nullptr, 0},
                                       {"seed", required_argument, nullptr, 0},
                                       {"dtype", required_argument, nullptr, 0},
                                       {"device", required_argument, nullptr, 0},
                                       {"threads", required_argument, nullptr, 0},
                                       {"help", no_argument, nullptr, kFlag},
                                       {"version", no_argument, nullptr, kFlag},
                                       {nullptr, 0, nullptr, 0}};
  Settings settings;
  std::vector<Given> given;
  std::string policy;
  int index = 0;
  int code = 0;
  opterr = 0;
  while ((code = getopt_long(argc, argv, ":", options.data(), &index)) != -1) {
    if (code == '?' || code == ':') {
      fail(std::string(argv[optind - 1]) + (code == ':' ? " needs a value" : " is no option") +
           "; --help lists them");
    }
    const std::string name = options[index].name;
    if (name == "help") {
      std::cout << kUsage;
      std::exit(0);
    } else if (name == "version") {
      std::cout << "h2o-generate " << h2o::version() << '\n';
      std::exit(0);
    } else if (name == "full") {
      settings.full = true;
    } else if (name == "ignore-eos") {
      settings.ignore_eos = true;
    } else if (name == "policy") {
      policy = optarg;
    } else {
      given.push_back({options[index].name, optarg});
    }
  }
  if (optind < argc) fail(std::string(argv[optind]) + " is no option; --help lists them");

  // The file first, whatever the order: options override it.
  if (!policy.empty()) settings.config = h2o::load_config(policy);
  h2o::RunConfig& run = settings.config.run;
  settings.model = settings.config.model.name.value_or("");
  for (const auto& [option, value] : given) {
    const std::string name = option;
    if (name == "model") settings.model = value;
    if (name == "tokens") settings.tokens = value;
    if (name == "dtype") settings.config.model.dtype = value;
    if (name == "device") run.device = value;
    if (name == "max-new-tokens")
      run.max_new_tokens = parse_number<int64_t>(option, value, 1, h2o::kMaxTokens);
    if (name == "prefill-chunk")
      run.prefill_chunk = parse_number<int64_t>(option, value, 1, h2o::kMaxTokens);
    if (name == "seed") run.seed = parse_number<int64_t>(option, value, 0, INT64_MAX);
    if (name == "threads") run.threads = parse_number<int64_t>(option, value, 1, 1024);
    if (name == "temperature") run.temperature = parse_number<double>(option, value, 0.0, 1e9);
    if (name == "top-p")
      run.top_p = parse_number<double>(option, value, std::numeric_limits<double>::min(), 1.0);
    if (name == "prefill") {
      if (value == h2o::to_string(h2o::Prefill::kOneShot)) {
        run.prefill = h2o::Prefill::kOneShot;
      } else if (value == h2o::to_string(h2o::Prefill::kStreaming)) {
        run.prefill = h2o::Prefill::kStreaming;
      } else {
        fail(R"(--prefill must be one of "one_shot", "streaming", got )" + h2o::in_quotes(value));
      }
    }
  }
  if (settings.model.empty())
    fail("--model must be given, or model.name of the policy file; --help says more");
  return settings;
}

constexpr std::array<std::pair<const char*, at::ScalarType>, 4> kDtypes = {
    {{"float32", at::kFloat},
     {"bfloat16", at::kBFloat16},
     {"float16", at::kHalf},
     {"float64", at::kDouble}}};

at::ScalarType parse_dtype(const std::string& name, const h2o::llm::DecoderConfig& config) {
  const std::string& dtype = name == "auto" ? config.dtype : name;
  std::vector<std::string> names = {"auto"};
  for (const auto& [known, type] : kDtypes) {
    if (dtype == known) return type;
    names.push_back(known);
  }
  fail("--dtype must be one of " + h2o::list_in_quotes(names) + ", got " + h2o::in_quotes(dtype));
}

const char* config_name(at::ScalarType dtype) {
  const auto* found = std::find_if(kDtypes.begin(), kDtypes.end(),
                                   [&](const auto& known) { return known.second == dtype; });
  return found->first;
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
double memory_mb(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0)
      return std::stod(line.substr(field.size() + 1)) * 1024 / 1e6;
  }
  return 0.0;
}

// Quantiles of what was measured, or nulls.
Json summary(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double part) {
    return values.empty() ? Json()
                          : Json(values[static_cast<size_t>(
                                part * static_cast<double>(values.size() - 1) + 0.5)]);
  };
  return {{"median", at(0.5)}, {"p10", at(0.1)}, {"p90", at(0.9)}};
}

// One event a line, on its way before the next token is computed.
void write(const Json& event) {
  std::cout << event.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
  // The reader has gone.
  if (!std::cout) std::exit(1);
}

void run(const Settings& settings) {
  const h2o::RunConfig& run = settings.config.run;
  if (run.threads) at::set_num_threads(static_cast<int>(*run.threads));
  const auto prompts = read_prompts(settings.tokens);
  const auto start = std::chrono::steady_clock::now();
  const h2o::llm::DecoderConfig config = h2o::llm::load_decoder_config(settings.model);
  const at::ScalarType dtype = parse_dtype(settings.config.model.dtype, config);
  const at::Device device = parse_device(run.device);
  const auto decoder = h2o::llm::load_decoder(settings.model, config, dtype, device);
  const std::chrono::duration<double> load = std::chrono::steady_clock::now() - start;

  h2o::llm::GenerateOptions options{
      .cache = {.prefill = run.prefill, .prefill_chunk = run.prefill_chunk},
      .max_new_tokens = run.max_new_tokens,
      .temperature = run.temperature,
      .top_p = run.top_p,
      .seed = run.seed,
      .ignore_eos = settings.ignore_eos};
  if (!settings.full) options.cache.policy = settings.config.policy;

  Json prompt_tokens = Json::array();
  for (const auto& prompt : prompts) prompt_tokens.push_back(prompt.size());
  write({{"event", "start"},
         {"h2o", h2o::version()},
         {"model", settings.model},
         {"dtype", config_name(dtype)},
         {"device", device.str()},
         {"threads", at::get_num_threads()},
         {"policy", settings.full ? Json() : Json(settings.config.policy.to_string())},
         {"prefill", to_string(run.prefill)},
         {"prompt_tokens", prompt_tokens},
         {"load_s", load.count()}});
  const h2o::llm::GenerateEvents events{
      .prefill = [](int64_t tokens,
                    int64_t of) { write({{"event", "prefill"}, {"tokens", tokens}, {"of", of}}); },
      .token =
          [](int64_t row, int64_t index, int64_t token) {
            write({{"event", "token"}, {"row", row}, {"index", index}, {"token", token}});
          },
      .end =
          [](int64_t row, h2o::llm::FinishReason reason) {
            write({{"event", "end"}, {"row", row}, {"reason", to_string(reason)}});
          }};
  const auto result = h2o::llm::generate(*decoder, config, prompts, options,
                                         at::TensorOptions(dtype).device(device), events);
  Json new_tokens = Json::array();
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
    run(parse_arguments(argc, argv));
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "h2o-generate: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "h2o-generate: " << error.what() << '\n';
  }
  return 2;
}
