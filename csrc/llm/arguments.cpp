#include "llm/arguments.h"

#include <getopt.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "h2o/json.h"
#include "h2o/version.h"

namespace h2o::llm {
namespace {

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
  --logprobs            also the natural logarithm of each token's probability
  --kept                also, after the prompt and after every token, the positions that each layer
                        keeps: [layer][row][KV head][...], ascending
  --device DEVICE       cpu, cuda, cuda:<index>, or auto (default): CUDA where there is one
  --threads N           CPU threads; default: PyTorch's choice
  --help, --version
)";

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

// The rules are those of the same keys in a config.
template <typename Number, typename Valid>
Number parse_number(const std::string& name, const std::string& text, const std::string& rule,
                    Valid valid) {
  Number number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || !valid(number)) {
    fail("--" + name + " must be " + rule + ", got " + in_quotes(text));
  }
  return number;
}

Prefill parse_prefill(const std::string& name, const std::string& text) {
  for (const Prefill prefill : {Prefill::kOneShot, Prefill::kStreaming}) {
    if (text == to_string(prefill)) return prefill;
  }
  fail("--" + name + " must be one of " +
       list_in_quotes(std::array{to_string(Prefill::kOneShot), to_string(Prefill::kStreaming)}) +
       ", got " + in_quotes(text));
}

// An option, and what it does to the arguments; one that is a flag gets an empty text.
struct Option {
  const char* name;
  bool has_value;
  std::function<void(Arguments&, const std::string& name, const std::string& text)> apply;
};

const std::vector<Option>& options() {
  using Text = const std::string&;
  const auto count = [](int64_t lowest, int64_t highest, auto RunConfig::* member) {
    return [=](Arguments& a, Text name, Text text) {
      a.config.run.*member = parse_number<int64_t>(
          name, text,
          "an integer from " + std::to_string(lowest) + " to " + std::to_string(highest),
          [=](int64_t value) { return value >= lowest && value <= highest; });
    };
  };
  const auto temperature = [](Arguments& a, Text name, Text text) {
    a.config.run.temperature = parse_number<double>(name, text, "a number >= 0", [](double value) {
      return value >= 0 && std::isfinite(value);
    });
  };
  const auto top_p = [](Arguments& a, Text name, Text text) {
    a.config.run.top_p = parse_number<double>(name, text, "a number > 0 and <= 1",
                                              [](double value) { return value > 0 && value <= 1; });
  };
  const auto flag = [](bool Arguments::* member) {
    return [=](Arguments& a, Text, Text) { a.*member = true; };
  };
  static const std::vector<Option> all = {
      {"model", true, [](Arguments& a, Text, Text text) { a.model = text; }},
      {"tokens", true, [](Arguments& a, Text, Text text) { a.tokens = text; }},
      {"full", false, flag(&Arguments::full)},
      {"ignore-eos", false, flag(&Arguments::ignore_eos)},
      {"logprobs", false, flag(&Arguments::logprobs)},
      {"kept", false, flag(&Arguments::kept)},
      {"max-new-tokens", true, count(1, kMaxTokens, &RunConfig::max_new_tokens)},
      {"prefill", true,
       [](Arguments& a, Text name, Text text) {
         a.config.run.prefill = parse_prefill(name, text);
       }},
      {"prefill-chunk", true, count(1, kMaxTokens, &RunConfig::prefill_chunk)},
      {"temperature", true, temperature},
      {"top-p", true, top_p},
      {"seed", true, count(0, std::numeric_limits<int64_t>::max(), &RunConfig::seed)},
      {"dtype", true, [](Arguments& a, Text, Text text) { a.config.model.dtype = text; }},
      {"device", true, [](Arguments& a, Text, Text text) { a.config.run.device = text; }},
      {"threads", true, count(1, kMaxThreads, &RunConfig::threads)},
  };
  return all;
}

}  // namespace

Parsed parse_arguments(int argc, char** argv) {
  enum Code { kHelp = 1000, kVersion, kPolicy };
  std::vector<option> known = {{"help", no_argument, nullptr, kHelp},
                               {"version", no_argument, nullptr, kVersion},
                               {"policy", required_argument, nullptr, kPolicy}};
  for (size_t i = 0; i < options().size(); ++i) {
    const Option& one = options()[i];
    known.push_back(
        {one.name, one.has_value ? required_argument : no_argument, nullptr, static_cast<int>(i)});
  }
  known.push_back({nullptr, 0, nullptr, 0});

  std::optional<std::string> policy;
  std::vector<std::pair<const Option*, std::string>> given;
  opterr = 0;  // the messages are ours
  optind = 1;
  int code = 0;
  while ((code = getopt_long(argc, argv, ":", known.data(), nullptr)) != -1) {
    if (code == kHelp) return {kUsage, {}};
    if (code == kVersion) return {std::string("h2o-generate ") + version() + "\n", {}};
    if (code == '?' || code == ':') {
      // Of letters behind one dash, argv's index does not say which it was.
      const bool is_letter = code == '?' && std::isgraph(optopt) != 0;
      const std::string name =
          is_letter ? std::string("-") + static_cast<char>(optopt) : argv[optind - 1];
      fail(in_quotes(name) + (code == ':' ? " needs a value" : " is no option") +
           "; --help lists them");
    }
    const std::string text = optarg == nullptr ? "" : optarg;
    if (code == kPolicy) {
      policy = text;
    } else {
      given.emplace_back(&options()[static_cast<size_t>(code)], text);
    }
  }
  if (optind < argc) {
    fail("there are options only, got the argument " + in_quotes(argv[optind]) +
         "; --help lists them");
  }

  // The file first, wherever it was named: options override it.
  Arguments arguments;
  if (policy) arguments.config = load_config(*policy);
  arguments.model = arguments.config.model.name.value_or("");
  for (const auto& [option, text] : given) option->apply(arguments, option->name, text);
  if (arguments.model.empty()) {
    fail("--model must be given, or model.name of the policy file; --help says more");
  }
  return {std::nullopt, arguments};
}

}  // namespace h2o::llm
