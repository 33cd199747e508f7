// h2o_kv._C: what is plain values (the policy, configs, the version). Tensors go through
// torch.ops.h2o, so no torch header is included here. python/h2o_kv/_C.pyi has the types.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "h2o/config.h"
#include "h2o/eviction_policy.h"
#include "h2o/version.h"

namespace py = pybind11;

namespace {

// pybind11's own casters take True for 1 and list every signature when a type is wrong. These take
// what Python means by an integer (__index__) and by a number, refuse bool, and name the argument.
[[noreturn]] void fail_type(const std::string& who, const std::string& name,
                            const std::string& rule, py::handle value) {
  throw py::type_error(who + ": " + name + " must be " + rule + ", got " +
                       std::string(py::repr(value)) + " (" + Py_TYPE(value.ptr())->tp_name + ")");
}

int64_t to_count(const std::string& who, const std::string& name, py::handle value) {
  if (PyBool_Check(value.ptr()) || PyIndex_Check(value.ptr()) == 0) {
    fail_type(who, name, "an integer", value);
  }
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!number) throw py::error_already_set();
  int overflow = 0;
  const int64_t count = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) {
    throw std::invalid_argument(
        who + ": " + name + " must be " +
        (overflow > 0 ? "<= " + std::to_string(h2o::kMaxTokens) : std::string(">= 0")) + ", got " +
        std::string(py::str(number)));
  }
  return count;
}

double to_number(const std::string& who, const std::string& name, py::handle value) {
  if (PyBool_Check(value.ptr())) fail_type(who, name, "a number", value);
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    fail_type(who, name, "a number", value);
  }
  return number;
}

// The values of a call's arguments in the order of `defaults`, each by its name or left out.
std::vector<py::object> by_keyword(
    const std::string& who, const py::args& args, const py::kwargs& kwargs,
    const std::vector<std::pair<const char*, py::object>>& defaults) {
  if (!args.empty()) {
    throw py::type_error(who + ": arguments must be given by keyword, as in " +
                         defaults.begin()->first + "=..., got " + std::to_string(args.size()) +
                         " without one");
  }
  py::dict known;
  std::string names;
  std::vector<py::object> values;
  for (const auto& [name, value] : defaults) {
    known[name] = value;
    if (!names.empty()) names += ", ";
    names += name;
    values.push_back(kwargs.contains(name) ? py::object(kwargs[name]) : value);
  }
  for (const auto& argument : kwargs) {
    if (known.contains(argument.first)) continue;
    const py::list nearest = py::module_::import("difflib").attr("get_close_matches")(
        argument.first, known, /*n=*/1, /*cutoff=*/0.4);
    throw py::type_error(
        who + ": keywords must be among " + names + ", got " +
        std::string(py::str(argument.first)) +
        (nearest.empty() ? "" : "; did you mean " + std::string(py::str(nearest[0])) + "?"));
  }
  return values;
}

constexpr const char* kPolicy = "EvictionPolicy";

// The arguments of EvictionPolicy in Python, with their defaults: in this order a pickle holds
// them.
std::vector<std::pair<const char*, py::object>> policy_arguments() {
  return {{"num_heavy", py::none()},        {"num_recent", py::none()},
          {"num_sink", py::int_(0)},        {"heavy_ratio", py::none()},
          {"recent_ratio", py::none()},     {"gqa_reduce", py::str("sum")},
          {"score_rule", py::str("sum")},   {"score_decay", py::float_(1.0)},
          {"score_seed", py::int_(0)},      {"score_queries", py::int_(0)},
          {"score_pool", py::int_(1)},      {"pattern_stride", py::int_(0)},
          {"pattern_columns", py::int_(0)}, {"read_slots", py::int_(0)},
          {"read_page", py::int_(1)}};
}

// From their values, in that order.
h2o::EvictionPolicy make_policy(const std::vector<py::object>& values) {
  auto next = values.begin();
  const auto arguments = policy_arguments();
  auto argument = arguments.begin();
  // Each takes the next argument.
  const auto count = [&] { return to_count(kPolicy, (argument++)->first, *next++); };
  const auto number = [&] { return to_number(kPolicy, (argument++)->first, *next++); };
  const auto text = [&] {
    if (!py::isinstance<py::str>(*next)) fail_type(kPolicy, argument->first, "a string", *next);
    ++argument;
    return (next++)->cast<std::string>();
  };
  const auto if_given = [&](auto& option, const auto& read) {
    if (next->is_none()) {
      ++next, ++argument;
    } else {
      option = read();
    }
  };
  h2o::EvictionPolicyOptions options;
  if_given(options.num_heavy, count);
  if_given(options.num_recent, count);
  options.num_sink = count();
  if_given(options.heavy_ratio, number);
  if_given(options.recent_ratio, number);
  options.gqa_reduce = h2o::parse_gqa_reduce(kPolicy, text());
  h2o::Scoring& scoring = options.scoring;
  scoring.rule = h2o::parse_score_rule(kPolicy, text());
  scoring.decay = number();
  scoring.seed = count();
  scoring.num_queries = count();
  scoring.pool = count();
  scoring.pattern_stride = count();
  scoring.pattern_columns = count();
  options.reading.slots = count();
  options.reading.page = count();
  return h2o::EvictionPolicy(options);
}

// What a pickle holds and the hash covers.
py::tuple policy_state(const h2o::EvictionPolicy& policy) {
  const h2o::EvictionPolicyOptions& options = policy.options();
  const h2o::Scoring& scoring = options.scoring;
  return py::make_tuple(options.num_heavy, options.num_recent, options.num_sink,
                        options.heavy_ratio, options.recent_ratio, to_string(options.gqa_reduce),
                        to_string(scoring.rule), scoring.decay, scoring.seed, scoring.num_queries,
                        scoring.pool, scoring.pattern_stride, scoring.pattern_columns,
                        options.reading.slots, options.reading.page);
}

py::dict policy_by_name(const h2o::EvictionPolicy& policy) {
  py::dict named;
  const py::tuple state = policy_state(policy);
  size_t i = 0;
  for (const auto& argument : policy_arguments()) named[argument.first] = py::object(state[i++]);
  return named;
}

h2o::EvictionPolicy policy_by_keyword(const py::args& args, const py::kwargs& kwargs) {
  return make_policy(by_keyword(kPolicy, args, kwargs, policy_arguments()));
}

h2o::EvictionPolicy replaced_policy(const h2o::EvictionPolicy& policy, const py::kwargs& changes) {
  const py::dict named = policy_by_name(policy);
  for (const auto& [count, ratio] :
       {std::pair("num_heavy", "heavy_ratio"), std::pair("num_recent", "recent_ratio")}) {
    if (changes.contains(count) || changes.contains(ratio)) {
      named[count] = py::none();
      named[ratio] = py::none();
    }
  }
  py::kwargs all(named);
  for (const auto& change : changes) all[change.first] = change.second;
  return policy_by_keyword({}, all);
}

h2o::Budget make_budget(py::handle num_sink, py::handle num_heavy, py::handle num_recent) {
  const auto count = [](const char* name, py::handle value) {
    const int64_t number = to_count("Budget", name, value);
    if (number < 0) {
      throw std::invalid_argument("Budget: " + std::string(name) + " must be >= 0, got " +
                                  std::to_string(number));
    }
    return number;
  };
  return {.num_sink = count("num_sink", num_sink),
          .num_heavy = count("num_heavy", num_heavy),
          .num_recent = count("num_recent", num_recent)};
}

h2o::Budget budget_by_keyword(const py::args& args, const py::kwargs& kwargs) {
  const auto values = by_keyword(
      "Budget", args, kwargs,
      {{"num_sink", py::int_(0)}, {"num_heavy", py::int_(0)}, {"num_recent", py::int_(0)}});
  return make_budget(values[0], values[1], values[2]);
}

py::tuple budget_state(const h2o::Budget& budget) {
  return py::make_tuple(budget.num_sink, budget.num_heavy, budget.num_recent);
}

// A pickle is checked as every other way of making the value is.
void check_state(const char* who, const py::tuple& state, size_t size) {
  if (state.size() != size) {
    throw std::invalid_argument(std::string(who) + ": a pickled state must have " +
                                std::to_string(size) + " items, got " +
                                std::to_string(state.size()));
  }
}

void bind_policy(py::module_& module) {
  py::class_<h2o::Budget>(
      module, "Budget", py::is_final(),
      R"(How many tokens of one row and KV head stay, by the reason for which they stay.

Budget(*, num_sink=0, num_heavy=0, num_recent=0)

Unpacks into the three counts, in the order in which the operators take them:
``num_sink, num_heavy, num_recent = policy.resolve(prompt_len)``.

Attributes
----------
num_sink : int
    Tokens; the first positions of the sequence, never evicted.
num_heavy : int
    Tokens kept for their score.
num_recent : int
    Tokens; the newest positions, never evicted.
total : int
    Their sum: the slots that a cache needs.)")
      .def(py::init(&budget_by_keyword))
      .def_readonly("num_sink", &h2o::Budget::num_sink)
      .def_readonly("num_heavy", &h2o::Budget::num_heavy)
      .def_readonly("num_recent", &h2o::Budget::num_recent)
      .def_property_readonly("total", &h2o::Budget::total)
      .def("__iter__", [](const h2o::Budget& self) { return py::iter(budget_state(self)); })
      .def("__len__", [](const h2o::Budget& /*self*/) { return 3; })
      .def(py::self == py::self)
      .def("__hash__", [](const h2o::Budget& self) { return py::hash(budget_state(self)); })
      .def("__repr__",
           [](const h2o::Budget& self) {
             return "Budget(num_sink=" + std::to_string(self.num_sink) +
                    ", num_heavy=" + std::to_string(self.num_heavy) +
                    ", num_recent=" + std::to_string(self.num_recent) + ")";
           })
      .def(py::pickle(&budget_state, [](const py::tuple& state) {
        check_state("Budget", state, 3);
        return make_budget(state[0], state[1], state[2]);
      }));

  py::class_<h2o::EvictionPolicy> policy(
      module, "EvictionPolicy", py::is_final(),
      R"(Which tokens stay in the cache: sinks, heavy hitters and recent ones.

EvictionPolicy(*, num_heavy=None, num_recent=None, num_sink=0, heavy_ratio=None,
               recent_ratio=None, gqa_reduce="sum", score_rule="sum", score_decay=1.0,
               score_seed=0, score_queries=0, score_pool=1, pattern_stride=0, pattern_columns=0,
               read_slots=0, read_page=1)

Immutable, hashable and checked when made. Exactly one of ``num_heavy`` and ``heavy_ratio`` must be
given, and exactly one of ``num_recent`` and ``recent_ratio``.

Parameters
----------
num_heavy : int, optional
    Tokens kept for the attention they received so far; 0 is a sliding window ("local").
num_recent : int, optional
    Newest tokens, never evicted; 0 keeps by score alone.
num_sink : int
    First tokens of the sequence, never evicted. Counted inside the budget.
heavy_ratio, recent_ratio : float, optional
    The same as a part of the prompt's real tokens, 0 < ratio <= 1.
gqa_reduce : {"sum", "max"}
    How the weights of the query heads that share a KV head become one score.
score_rule : {"sum", "decay", "mean", "value", "misses", "prompt", "random", "given"}
    What the score is made of; "sum", of the softmax weights that a token received, is H2O. The
    others are other policies: see docs/policies.md.
score_decay : float
    With "decay": factor on the scores, per query; 0 < score_decay <= 1.
score_seed : int
    With "random".
score_queries : int
    Of tokens that join together, as those of a one-shot prefill, only the last so many score; 0 =
    all of them.
score_pool : int
    Odd. The first scores of tokens that join together are means over so many neighbours.
pattern_stride, pattern_columns : int
    Tokens at the last pattern_columns of every pattern_stride positions leave after all others.
read_slots, read_page : int
    Where read_slots > 0, a token of a chunk of 1 attends to itself and to so many slots: of the
    highest logits, or, with read_page > 1, of the pages with the highest bound.

Raises
------
TypeError
    If an argument has the wrong type (``True`` is no integer here), is unknown, or comes without
    its keyword.
ValueError
    If a value is out of range, if a count and its ratio are given both or neither, or if every
    count is 0.

Notes
-----
H2O (arXiv 2306.14048), Algorithm 1. Differs: sinks, which are StreamingLLM's (arXiv 2309.17453);
a ratio gives at least one token.

Examples
--------
>>> from h2o_kv import EvictionPolicy
>>> policy = EvictionPolicy(heavy_ratio=0.1, recent_ratio=0.1, num_sink=4)
>>> policy.resolve(1500)
Budget(num_sink=4, num_heavy=150, num_recent=150))");
  policy.def(py::init(&policy_by_keyword))
      .def_property_readonly(
          "num_heavy", [](const h2o::EvictionPolicy& self) { return self.options().num_heavy; },
          "int or None: heavy hitters, in tokens; None if a ratio was given.")
      .def_property_readonly(
          "num_recent", [](const h2o::EvictionPolicy& self) { return self.options().num_recent; },
          "int or None: recent tokens; None if a ratio was given.")
      .def_property_readonly(
          "num_sink", [](const h2o::EvictionPolicy& self) { return self.options().num_sink; },
          "int: first tokens, never evicted.")
      .def_property_readonly(
          "heavy_ratio", [](const h2o::EvictionPolicy& self) { return self.options().heavy_ratio; },
          "float or None: heavy hitters as a part of the prompt.")
      .def_property_readonly(
          "recent_ratio",
          [](const h2o::EvictionPolicy& self) { return self.options().recent_ratio; },
          "float or None: recent tokens as a part of the prompt.")
      .def_property_readonly(
          "gqa_reduce",
          [](const h2o::EvictionPolicy& self) { return to_string(self.gqa_reduce()); },
          "\"sum\" or \"max\".")
      .def_property_readonly(
          "score_rule",
          [](const h2o::EvictionPolicy& self) { return to_string(self.scoring().rule); },
          "str: what the score is made of.")
      .def_property_readonly("arguments", &policy_by_name,
                             "dict: what the policy was made from, by name.")
      .def(
          "replace", &replaced_policy,
          R"(The policy with other arguments; a count takes the place of its ratio, and the reverse.

Parameters
----------
**changes
    As for EvictionPolicy.

Returns
-------
EvictionPolicy)")
      .def("layer_seed", &h2o::EvictionPolicy::layer_seed, py::arg("layer"),
           "int: the score_seed of a layer, so that layers draw different numbers.")
      .def_property_readonly("has_ratio", &h2o::EvictionPolicy::has_ratio,
                             "bool: whether the counts depend on the prompt's length.")
      .def(
          "resolve",
          [](const h2o::EvictionPolicy& self, py::handle prompt_len) {
            return self.resolve(to_count(kPolicy, "prompt_len", prompt_len));
          },
          py::arg("prompt_len"),
          R"(The counts for a prompt of ``prompt_len`` real (unpadded) tokens.

A ratio gives ``max(1, floor(ratio * prompt_len + 1e-9))``: 0.57 of 100 is 57, although 0.57 * 100
is a little less in binary. Counts do not depend on the prompt.

Parameters
----------
prompt_len : int
    Tokens, >= 0.

Returns
-------
Budget

Raises
------
ValueError
    If ``prompt_len`` is negative.)")
      .def("budget", &h2o::EvictionPolicy::budget,
           R"(The counts of a policy without ratios.

Returns
-------
Budget

Raises
------
ValueError
    If the policy has a ratio; ``resolve`` gives its counts.)")
      .def(py::self == py::self)
      .def("__hash__", [](const h2o::EvictionPolicy& self) { return py::hash(policy_state(self)); })
      .def("__repr__", &h2o::EvictionPolicy::to_string)
      .def(py::pickle(&policy_state, [](const py::tuple& state) {
        check_state(kPolicy, state, policy_arguments().size());
        std::vector<py::object> values;
        for (const py::handle value : state) {
          values.push_back(py::reinterpret_borrow<py::object>(value));
        }
        return make_policy(values);
      }));
  // Its public place, which is also the name under which pickles find it.
  policy.attr("__module__") = "h2o_kv";
}

// Raises ValueError. The message begins with the name of a file, which may be no UTF-8.
[[noreturn]] void fail_value(const std::invalid_argument& error) {
  const std::string message = error.what();
  const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
      message.data(), static_cast<Py_ssize_t>(message.size()), "backslashreplace"));
  if (text) PyErr_SetObject(PyExc_ValueError, text.ptr());
  throw py::error_already_set();
}

void bind_config(py::module_& module) {
  py::class_<h2o::ModelConfig>(module, "ModelConfig", py::is_final(),
                               "The \"model\" part of a config, read-only.")
      .def_readonly("name", &h2o::ModelConfig::name)
      .def_readonly("dtype", &h2o::ModelConfig::dtype);
  py::class_<h2o::RunConfig>(module, "RunConfig", py::is_final(),
                             "The \"run\" part of a config, read-only.")
      .def_property_readonly("prefill",
                             [](const h2o::RunConfig& self) { return to_string(self.prefill); })
      .def_readonly("prefill_chunk", &h2o::RunConfig::prefill_chunk)
      .def_readonly("max_new_tokens", &h2o::RunConfig::max_new_tokens)
      .def_readonly("seed", &h2o::RunConfig::seed)
      .def_readonly("temperature", &h2o::RunConfig::temperature)
      .def_readonly("top_p", &h2o::RunConfig::top_p)
      .def_readonly("device", &h2o::RunConfig::device)
      .def_readonly("threads", &h2o::RunConfig::threads);
  py::class_<h2o::Config>(module, "Config", py::is_final(),
                          "What a config file says, defaults filled in, read-only.")
      .def_readonly("model", &h2o::Config::model)
      .def_readonly("policy", &h2o::Config::policy)
      .def_readonly("run", &h2o::Config::run);

  module.def(
      "load_config",
      [](const std::filesystem::path& path) {
        try {
          return h2o::load_config(path);
        } catch (const std::invalid_argument& error) {
          fail_value(error);
        } catch (const std::system_error& error) {
          errno = error.code().value();  // FileNotFoundError, IsADirectoryError, ...
          PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
          throw py::error_already_set();
        }
      },
      py::arg("path"), "Read a JSON file; see h2o_kv.config.load_config.");
  module.def("parse_config", &h2o::parse_config, py::arg("text"), py::arg("name"),
             "Read JSON text; see h2o_kv.config.parse_config.");
  module.def("known_config_keys", &h2o::known_config_keys,
             "The dotted path of every key that a config may have.");
}

py::dict build_info() {
  py::dict info;
  info["version"] = h2o::version();
#if defined(H2O_BUILD_COMPILER)
  info["compiler"] = H2O_BUILD_COMPILER;
#elif defined(__clang__)
  info["compiler"] = "Clang " __clang_version__;
#elif defined(__GNUC__)
  info["compiler"] = "GCC " __VERSION__;
#else
  info["compiler"] = "unknown";
#endif
#if defined(H2O_BUILD_TYPE)
  info["build_type"] = H2O_BUILD_TYPE;
#elif defined(NDEBUG)
  info["build_type"] = "Release";
#else
  info["build_type"] = "Debug";
#endif
#if defined(H2O_BUILD_TORCH_VERSION)
  info["torch"] = H2O_BUILD_TORCH_VERSION;
#endif
#if defined(H2O_BUILD_CUDA_VERSION)
  info["cuda"] = H2O_BUILD_CUDA_VERSION;
#endif
#if defined(H2O_BUILD_CUDA_ARCHITECTURES)
  info["cuda_architectures"] = H2O_BUILD_CUDA_ARCHITECTURES;
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The parts of h2o_kv that are plain values: policy, configs, version.";
  py::options options;
  options.disable_function_signatures();  // they would say "object" for every checked argument
  bind_policy(module);
  bind_config(module);
  module.def("version", &h2o::version, "The version of the library, \"major.minor.patch\".");
  module.def("build_info", &build_info,
             R"(What was built, and with what.

Returns
-------
dict of str to str
    "version", "compiler", "build_type" and, as the build knows them, "torch" (the version built
    against), "cuda" (its version, "" = CPU only) and "cuda_architectures".)");
}
