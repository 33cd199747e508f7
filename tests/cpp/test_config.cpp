#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "h2o/config.h"
#include "test_helpers.h"

namespace {

using h2o::Config;
using h2o::EvictionPolicy;
using h2o::parse_config;

Config parse(const std::string& text) { return parse_config(text, "test.json"); }

void check_refused(const std::string& text, const std::string& message) {
  CAPTURE(text, message);
  CHECK_THROWS_AS(parse(text), std::invalid_argument);
  CHECK_THROWS_WITH(parse(text), "test.json: " + message);
}

std::string policy(const std::string& body) { return R"({"policy": {)" + body + "}}"; }
std::string run(const std::string& body) { return R"({"run": {)" + body + "}}"; }

// A file that is gone when the test is over.
class TemporaryFile {
 public:
  TemporaryFile(const std::string& name, const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("h2o_test_config_" + std::to_string(getpid()) + "_" + name + ".json")) {
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace

TEST_CASE("an empty config has every default", "[config]") {
  const std::string text = GENERATE("{}", R"({"model": {}, "run": {}})", " {\n}\n");
  CAPTURE(text);
  const Config config = parse(text);
  CHECK(config == Config{});
  CHECK_FALSE(config.model.name);
  CHECK(config.model.dtype == "float32");
  CHECK(config.policy == EvictionPolicy({.heavy_ratio = 0.1, .recent_ratio = 0.1}));
  CHECK(config.run.prefill == h2o::Prefill::kOneShot);
  CHECK(config.run.prefill_chunk == 64);
  CHECK(config.run.max_new_tokens == 128);
  CHECK(config.run.seed == 0);
  CHECK(config.run.temperature == 0.0);
  CHECK(config.run.top_p == 1.0);
  CHECK(config.run.device == "auto");
  CHECK_FALSE(config.run.threads);
}

TEST_CASE("every key of a config arrives in its field", "[config]") {
  const Config config = parse(R"({
    "$schema": "./schema.json",
    "model": {"name": "facebook/opt-125m", "dtype": "bfloat16"},
    "policy": {"num_sink": 4, "heavy": {"size": 60}, "recent": {"ratio": 0.25},
               "gqa_reduce": "max"},
    "run": {"prefill": "streaming", "prefill_chunk": 32, "max_new_tokens": 7, "seed": 9,
            "temperature": 0.75, "top_p": 0.5, "device": "cuda:1", "threads": 2}
  })");
  CHECK(config.model.name == "facebook/opt-125m");
  CHECK(config.model.dtype == "bfloat16");
  CHECK(config.policy == EvictionPolicy({.num_heavy = 60,
                                         .num_sink = 4,
                                         .recent_ratio = 0.25,
                                         .gqa_reduce = h2o::GqaReduce::kMax}));
  CHECK(config.run.prefill == h2o::Prefill::kStreaming);
  CHECK(config.run.prefill_chunk == 32);
  CHECK(config.run.max_new_tokens == 7);
  CHECK(config.run.seed == 9);
  CHECK(config.run.temperature == 0.75);
  CHECK(config.run.top_p == 0.5);
  CHECK(config.run.device == "cuda:1");
  CHECK(config.run.threads == 2);
}

TEST_CASE("null stands for the default where there is no other word for it", "[config]") {
  const Config config = parse(R"({"model": {"name": null}, "run": {"threads": null}})");
  CHECK(config == Config{});
}

TEST_CASE("values at the edge of their range are taken", "[config]") {
  CHECK(parse(run(R"("seed": 9223372036854775807)")).run.seed == INT64_MAX);
  CHECK(parse(run(R"("threads": 1)")).run.threads == 1);
  CHECK(parse(run(R"("threads": 1024)")).run.threads == 1024);
  CHECK(parse(run(R"("top_p": 1)")).run.top_p == 1.0);
  CHECK(parse(run(R"("temperature": 0)")).run.temperature == 0.0);
  CHECK(parse(run(R"("device": "cuda:12")")).run.device == "cuda:12");
  const Config wide = parse(policy(R"("heavy": {"size": 2147483647}, "recent": {"ratio": 1})"));
  CHECK(wide.policy == EvictionPolicy({.num_heavy = h2o::kMaxTokens, .recent_ratio = 1.0}));
  const Config sink =
      parse(policy(R"("heavy": {"size": 0}, "recent": {"size": 0}, "num_sink": 1)"));
  CHECK(sink.policy == EvictionPolicy({.num_heavy = 0, .num_recent = 0, .num_sink = 1}));
}

TEST_CASE("an unknown key is refused with the keys that are known", "[config]") {
  check_refused(R"({"polcy": {}})",
                R"(the top level must have only the keys "$schema", "model", "policy", "run", )"
                R"(got "polcy": an object)");
  check_refused(R"({"model": {"$schema": "x"}})",
                R"(model must have only the keys "name", "dtype", got "$schema": "x")");
  check_refused(policy(R"("num_heavy": 64)"),
                R"(policy must have only the keys "num_sink", "heavy", "recent", "gqa_reduce", )"
                R"("score_rule", "score_decay", "score_seed", "score_queries", "score_pool", )"
                R"("pattern_stride", "pattern_columns", "read_slots", "read_page", )"
                R"(got "num_heavy": 64)");
  check_refused(policy(R"("heavy": {"count": 64}, "recent": {"size": 1})"),
                R"(policy.heavy must have only the keys "size", "ratio", got "count": 64)");
  check_refused(
      run(R"("threads": 1, "se\u0000ed": [1, 2])"),
      R"(run must have only the keys "prefill", "prefill_chunk", "max_new_tokens", )"
      R"("seed", "temperature", "top_p", "device", "threads", got "se\u0000ed": an array)");
}

TEST_CASE("how tokens are scored and read is read under the operators' names", "[config]") {
  const std::string counts = R"("heavy": {"size": 4}, "recent": {"size": 2}, )";
  const EvictionPolicy read = parse(policy(counts + R"("score_rule": "decay", "score_decay": 0.5,
      "score_queries": 3, "score_pool": 5, "pattern_stride": 8, "pattern_columns": 2)"))
                                  .policy;
  CHECK(read == EvictionPolicy({.num_heavy = 4,
                                .num_recent = 2,
                                .scoring = {.rule = h2o::ScoreRule::kDecay,
                                            .decay = 0.5,
                                            .num_queries = 3,
                                            .pool = 5,
                                            .pattern_stride = 8,
                                            .pattern_columns = 2}}));
  CHECK(parse(policy(counts + R"("read_slots": 6, "read_page": 3)")).policy.reading() ==
        h2o::Reading{.slots = 6, .page = 3});
  check_refused(policy(counts + R"("score_rule": "best")"),
                R"(policy.score_rule must be one of "sum", "decay", "mean", "value", "misses", )"
                R"("prompt", "random", "given", got "best")");
  check_refused(policy(counts + R"("score_decay": 0.5)"),
                R"(policy.score_decay must be 1 unless score_rule is "decay", got 0.5 with "sum")");
  check_refused(policy(counts + R"("score_pool": 4)"),
                "policy.score_pool must be odd and >= 1, got 4");
  check_refused(policy(counts + R"("read_slots": 1, "score_rule": "mean")"),
                R"(policy.score_rule must be "sum" with read_slots, got "mean")");
}

TEST_CASE("a key that is given twice is refused", "[config]") {
  check_refused(run(R"("seed": 1, "top_p": 1, "seed": 1)"),
                "run.seed must be given once, got it twice");
  check_refused(R"({"model": {}, "run": {}, "model": {}})",
                "model must be given once, got it twice");
  check_refused(policy(R"("heavy": {"size": 1}, "recent": {"size": 1, "size": 2})"),
                "policy.recent.size must be given once, got it twice");
  // The same key in two objects is no repetition.
  CHECK_NOTHROW(parse(policy(R"("heavy": {"size": 1}, "recent": {"size": 1})")));
}

TEST_CASE("heavy and recent take exactly one of size and ratio", "[config]") {
  check_refused(policy(R"("heavy": {"size": 1, "ratio": 0.1}, "recent": {"size": 1})"),
                R"(policy.heavy must have exactly one of "size", "ratio", got both)");
  check_refused(policy(R"("heavy": {"size": 1}, "recent": {})"),
                R"(policy.recent must have exactly one of "size", "ratio", got neither)");
  check_refused(policy(R"("heavy": {"size": 1})"),
                R"(policy must have both "heavy" and "recent", got no "recent")");
  check_refused(policy(R"("recent": {"size": 1})"),
                R"(policy must have both "heavy" and "recent", got no "heavy")");
  check_refused(policy(""), R"(policy must have both "heavy" and "recent", got no "heavy")");
}

TEST_CASE("a budget of nothing is refused", "[config]") {
  check_refused(policy(R"("heavy": {"size": 0}, "recent": {"size": 0})"),
                "policy: num_sink + heavy.size + recent.size must be >= 1, got 0");
}

TEST_CASE("a wrong type is refused with the key and the value", "[config]") {
  check_refused("[]", "the top level must be an object, got an array");
  check_refused("null", "the top level must be an object, got null");
  check_refused(R"({"$schema": 1})", "$schema must be a string, got 1");
  check_refused(R"({"model": "opt"})", R"(model must be an object, got "opt")");
  check_refused(R"({"policy": null})", "policy must be an object, got null");
  check_refused(policy(R"("heavy": 0.1, "recent": {"size": 1})"),
                "policy.heavy must be an object, got 0.1");
  check_refused(R"({"model": {"name": 1}})",
                "model.name must be null or a string that is not empty, got 1");
  check_refused(R"({"model": {"name": ""}})",
                R"(model.name must be null or a string that is not empty, got "")");
  const std::string seed = "run.seed must be an integer from 0 to 9223372036854775807, got ";
  check_refused(run(R"("seed": "0")"), seed + R"("0")");
  check_refused(run(R"("seed": 4.0)"), seed + "4.0");
  check_refused(run(R"("seed": true)"), seed + "true");
  check_refused(run(R"("seed": null)"), seed + "null");
  check_refused(run(R"("seed": {})"), seed + "an object");
  check_refused(run(R"("seed": [0])"), seed + "an array");
  check_refused(run(R"("temperature": "hot")"),
                R"(run.temperature must be a number >= 0, got "hot")");
  check_refused(run(R"("top_p": true)"), "run.top_p must be a number > 0 and <= 1, got true");
  check_refused(run(R"("prefill": 1)"),
                R"(run.prefill must be one of "one_shot", "streaming", got 1)");
}

TEST_CASE("a value out of range is refused with the key and the value", "[config]") {
  const std::string count = " must be an integer from 0 to 2147483647, got ";
  check_refused(policy(R"("heavy": {"size": -1}, "recent": {"size": 1})"),
                "policy.heavy.size" + count + "-1");
  check_refused(policy(R"("heavy": {"size": 1}, "recent": {"size": 2147483648})"),
                "policy.recent.size" + count + "2147483648");
  check_refused(policy(R"("heavy": {"size": 1}, "recent": {"size": 1}, "num_sink": -4)"),
                "policy.num_sink" + count + "-4");
  check_refused(policy(R"("heavy": {"ratio": 0}, "recent": {"size": 1})"),
                "policy.heavy.ratio must be a number > 0 and <= 1, got 0");
  check_refused(policy(R"("heavy": {"size": 1}, "recent": {"ratio": 1.01})"),
                "policy.recent.ratio must be a number > 0 and <= 1, got 1.01");
  check_refused(policy(R"("heavy": {"size": 1}, "recent": {"size": 1}, "gqa_reduce": "mean")"),
                R"(policy.gqa_reduce must be one of "sum", "max", got "mean")");
  check_refused(
      R"({"model": {"dtype": "int8"}})",
      R"(model.dtype must be one of "auto", "float32", "float16", "bfloat16", "float64", )"
      R"(got "int8")");
  check_refused(run(R"("prefill": "chunked")"),
                R"(run.prefill must be one of "one_shot", "streaming", got "chunked")");
  check_refused(run(R"("prefill_chunk": 0)"),
                "run.prefill_chunk must be an integer from 1 to 2147483647, got 0");
  check_refused(run(R"("max_new_tokens": 0)"),
                "run.max_new_tokens must be an integer from 1 to 2147483647, got 0");
  check_refused(run(R"("seed": -1)"),
                "run.seed must be an integer from 0 to 9223372036854775807, got -1");
  check_refused(
      run(R"("seed": 9223372036854775808)"),
      "run.seed must be an integer from 0 to 9223372036854775807, got 9223372036854775808");
  check_refused(run(R"("temperature": -0.5)"), "run.temperature must be a number >= 0, got -0.5");
  check_refused(run(R"("temperature": 1e999)"), "run.temperature: number overflow parsing '1e999'");
  check_refused(run(R"("top_p": 0)"), "run.top_p must be a number > 0 and <= 1, got 0");
  check_refused(run(R"("top_p": 1.5)"), "run.top_p must be a number > 0 and <= 1, got 1.5");
  check_refused(run(R"("threads": 0)"), "run.threads must be an integer from 1 to 1024, got 0");
  check_refused(run(R"("threads": 1025)"),
                "run.threads must be an integer from 1 to 1024, got 1025");
  const std::string device = GENERATE("gpu", "", "cuda:", "cuda:x", "cuda:100", "cuda:-1", "CPU");
  check_refused(
      run(R"("device": ")" + device + "\""),
      R"(run.device must be "auto", "cpu", "cuda" or "cuda:<index>", got ")" + device + "\"");
}

TEST_CASE("a long value is cut between characters", "[config]") {
  // 79 bytes with the opening quote; the two-byte letter would be split at 80.
  const std::string start = "\"" + std::string(78, 'x');
  check_refused(R"({"run": )" + start + "\u00e9\u00e9\"}",
                "run must be an object, got " + start + "...");
  check_refused(R"({"run": )" + start + "y\"}", "run must be an object, got " + start + "y...");
}

TEST_CASE("a long key or number is cut as a long value is", "[config]") {
  const std::string letters(1000, 'k'), digits(100'000, '9');
  const std::string start = "\"" + std::string(79, 'k') + "...";
  check_refused(
      "{\"" + letters + "\": 1}",
      R"(the top level must have only the keys "$schema", "model", "policy", "run", got )" + start +
          ": 1");
  check_refused("{\"" + letters + "\": 1, \"" + letters + "\": 1}",
                std::string(80, 'k') + "... must be given once, got it twice");
  check_refused(run("\"seed\": " + digits),
                "run.seed: number overflow parsing '" + std::string(80, '9') + "...'");
  const std::string unquoted = "{\"run\": \"" + letters;
  CHECK_THROWS_WITH(parse(unquoted),
                    Catch::Matchers::StartsWith("test.json: line 1, column 1010") &&
                        Catch::Matchers::EndsWith("kkk...'"));
}

TEST_CASE("a hundred objects and arrays may lie in one another, no more", "[config]") {
  // Two are those around the array.
  const auto nested = [](size_t arrays) {
    return run(R"("seed": )" + std::string(arrays, '[') + std::string(arrays, ']'));
  };
  check_refused(nested(98),
                "run.seed must be an integer from 0 to 9223372036854775807, got an array");
  check_refused(nested(99), "run.seed must be nested at most 100 deep, got more");
  check_refused(nested(1'000'000), "run.seed must be nested at most 100 deep, got more");
  check_refused(std::string(101, '['), "the top level must be nested at most 100 deep, got more");
}

TEST_CASE("a NUL byte is a syntax error, not the end of the text", "[config]") {
  const auto text = [](const char* before, const char* after) {
    return std::string(before) + '\0' + after;
  };
  struct Case {
    std::string text, start;
  };
  const Case c = GENERATE_COPY(
      Case{text(R"({"run": {"seed": 7}})", " no JSON {{{"),
           "line 1, column 21: syntax error - a NUL byte"},
      Case{text("{}\n", ""), "line 2, column 1: syntax error - a NUL byte"},
      Case{text("", ""), "line 1, column 1: syntax error - a NUL byte"},
      Case{text(R"({"run": {"seed": 7)", "}}"), "line 1, column 19: syntax error - a NUL byte"},
      Case{text(R"({"model": {"name": "a)", "b\"}}"),
           "line 1, column 22: syntax error - a NUL byte"},
      Case{text("{]", ""), "line 1, column 2: syntax error while parsing object"});
  CAPTURE(c.text);
  CHECK_THROWS_WITH(parse(c.text), Catch::Matchers::StartsWith("test.json: " + c.start));
}

TEST_CASE("a syntax error is reported with line and column", "[config]") {
  struct Case {
    std::string text, start;  // what follows `start` is the JSON parser's own sentence
  };
  const Case c =
      GENERATE(Case{"", "line 1, column 1: attempting to parse an empty input"},
               Case{"{\n  \"run\": {\n    \"seed\": 1,\n  }\n}", "line 4, column 3: syntax error"},
               Case{"{\n  \"run\": {\n    \"seed\": 1\n", "line 4, column 1: syntax error"},
               // The parser reads on to the line break before it gives up.
               Case{"{\n  \"run\": tru\n}", "line 2, column 13: syntax error"},
               Case{"{} 1", "line 1, column 4: syntax error"},
               Case{"{\"run\": // no comments\n{}}", "line 1, column 9: syntax error"},
               Case{"{\"run\": NaN}", "line 1, column 9: syntax error"},
               Case{"{\"run\": \"\xff\"}", "line 1, column 10: syntax error"});
  CAPTURE(c.text);
  CHECK_THROWS_AS(parse(c.text), std::invalid_argument);
  CHECK_THROWS_WITH(parse(c.text), Catch::Matchers::StartsWith("test.json: " + c.start));
}

TEST_CASE("a message about broken UTF-8 is ASCII", "[config]") {
  std::string message;
  try {
    parse("{\"run\": \"\xff\"}");
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK(message.find("\\xff") != std::string::npos);
  CHECK(std::all_of(message.begin(), message.end(), [](unsigned char c) { return c < 0x80; }));
}

TEST_CASE("a message opens with the path of the file", "[config]") {
  const TemporaryFile good("good", R"({"run": {"seed": 5}})");
  CHECK(h2o::load_config(good.path()).run.seed == 5);
  const TemporaryFile bad("bad", R"({"run": {"seed": -5}})");
  CHECK_THROWS_WITH(
      h2o::load_config(bad.path()),
      bad.path().string() + ": run.seed must be an integer from 0 to 9223372036854775807, got -5");
}

TEST_CASE("a file that cannot be read is a system error with its path", "[config]") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path();
  const std::filesystem::path missing = folder / "h2o_test_config_no_such_file.json";
  const auto code_of = [](const std::filesystem::path& path) {
    try {
      h2o::load_config(path);
    } catch (const std::system_error& error) {
      CHECK(std::string(error.what()).find(path.string() + ": ") == 0);
      return error.code().value();
    }
    return 0;
  };
  CHECK(code_of(missing) == ENOENT);
  CHECK(code_of(folder) == EISDIR);
  // Opens, but nothing is mapped where reading begins.
  const std::filesystem::path unreadable = "/proc/self/mem";
  if (std::filesystem::exists(unreadable)) CHECK(code_of(unreadable) == EIO);
}

TEST_CASE("a file longer than what is read at once is read whole", "[config]") {
  const TemporaryFile file("long", std::string(10'000, ' ') + R"({"run": {"seed": 5}})");
  CHECK(h2o::load_config(file.path()).run.seed == 5);
}

TEST_CASE("the known keys are those that the parser takes", "[config]") {
  std::vector<std::string> keys = h2o::known_config_keys();
  std::sort(keys.begin(), keys.end());
  CHECK(keys == std::vector<std::string>{"$schema",
                                         "model",
                                         "model.dtype",
                                         "model.name",
                                         "policy",
                                         "policy.gqa_reduce",
                                         "policy.heavy",
                                         "policy.heavy.ratio",
                                         "policy.heavy.size",
                                         "policy.num_sink",
                                         "policy.pattern_columns",
                                         "policy.pattern_stride",
                                         "policy.read_page",
                                         "policy.read_slots",
                                         "policy.recent",
                                         "policy.recent.ratio",
                                         "policy.recent.size",
                                         "policy.score_decay",
                                         "policy.score_pool",
                                         "policy.score_queries",
                                         "policy.score_rule",
                                         "policy.score_seed",
                                         "run",
                                         "run.device",
                                         "run.max_new_tokens",
                                         "run.prefill",
                                         "run.prefill_chunk",
                                         "run.seed",
                                         "run.temperature",
                                         "run.threads",
                                         "run.top_p"});
}
