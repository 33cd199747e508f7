#pragma once

#include <optional>
#include <string>

#include "h2o/config.h"

namespace h2o::llm {

// What h2o-generate is asked to do.
struct Arguments {
  std::string model;         // folder
  std::string tokens = "-";  // file; - is standard input
  Config config;             // of the policy file, with the options of the command line over it
  bool full = false;         // keep every token
  bool ignore_eos = false;
  bool logprobs = false;
  bool kept = false;
};

// What --help and --version print, for which there is nothing else to do, or the arguments. Throws
// std::invalid_argument where an option is unknown, has no value or a wrong one, and what
// load_config throws.
struct Parsed {
  std::optional<std::string> answer;
  Arguments arguments;
};
Parsed parse_arguments(int argc, char** argv);

}  // namespace h2o::llm
