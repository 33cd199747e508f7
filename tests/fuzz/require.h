#pragma once

#include <cstdio>
#include <cstdlib>
#include <string_view>

// Ends the program where `holds` is false: to the fuzzer that is a finding.
inline void require(bool holds, std::string_view what) {
  if (holds) return;
  std::fprintf(stderr, "finding: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}
