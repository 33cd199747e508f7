#pragma once

#include <optional>
#include <string>

namespace h2o::llm {

// A figure of a file in /proc that has lines like "VmRSS:  123 kB", in bytes; none where the system
// does not tell.
std::optional<double> proc_bytes(const char* file, const std::string& field);

}  // namespace h2o::llm
