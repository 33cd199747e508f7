#include "llm/token_file.h"

#include <limits>
#include <stdexcept>

#include "h2o/json.h"

namespace h2o::llm {
namespace {

std::vector<int64_t> parse_row(const Json& row, const std::string& who) {
  if (!row.is_array() || row.empty()) {
    throw std::invalid_argument(who + " must be a list of token ids, at least one, got " +
                                (row.is_array() ? "none" : shown(row)));
  }
  std::vector<int64_t> ids;
  for (size_t i = 0; i < row.size(); ++i) {
    if (!row[i].is_number_unsigned() ||
        row[i].get<uint64_t>() > uint64_t{std::numeric_limits<int32_t>::max()}) {
      throw std::invalid_argument(who + "[" + std::to_string(i) +
                                  "] must be a token id, an integer >= 0, got " + shown(row[i]));
    }
    ids.push_back(row[i].get<int64_t>());
  }
  return ids;
}

}  // namespace

std::vector<std::vector<int64_t>> parse_token_file(std::string_view text, const std::string& name) {
  const Json root = parse_json(text, name);
  const Json* rows = &root;
  if (root.is_object()) {
    const auto found = root.find("tokens");
    if (found == root.end())
      throw std::invalid_argument(name + R"(: the object must have "tokens", got none)");
    rows = &*found;
  }
  const std::string who = name + ": tokens";
  if (!rows->is_array() || rows->empty()) {
    throw std::invalid_argument(who + " must be a list that is not empty, got " +
                                (rows->is_array() ? "an empty one" : shown(*rows)));
  }
  if (!rows->front().is_array()) return {parse_row(*rows, who)};
  std::vector<std::vector<int64_t>> prompts;
  for (size_t i = 0; i < rows->size(); ++i) {
    prompts.push_back(parse_row((*rows)[i], who + "[" + std::to_string(i) + "]"));
  }
  return prompts;
}

}  // namespace h2o::llm
