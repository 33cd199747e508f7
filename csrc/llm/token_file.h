#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace h2o::llm {

// Prompts as token ids: {"tokens": [[...], ...]}, as `h2o-kv tokenize` writes it, the list of lists
// alone, or one list of ids. Throws std::invalid_argument, which starts with `name`, where it is
// none of those.
std::vector<std::vector<int64_t>> parse_token_file(std::string_view text, const std::string& name);

}  // namespace h2o::llm
