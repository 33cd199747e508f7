#include "llm/proc.h"

#include <fstream>

namespace h2o::llm {

std::optional<double> proc_bytes(const char* file, const std::string& field) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(field + ":")) return 1024 * std::stod(line.substr(field.size() + 1));
  }
  return std::nullopt;
}

}  // namespace h2o::llm
