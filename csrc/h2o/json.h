#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

// What every reader of JSON here shares: the parser, the words of its errors, and the file.
namespace h2o {

using Json = nlohmann::json;

// `text` parsed; `name` (a file's, as a rule) opens every message. Throws std::invalid_argument on
// a syntax error, with its line and column, where an object repeats a key, and where more than 100
// objects and arrays lie in one another.
Json parse_json(std::string_view text, const std::string& name);

// All of a file; one that cannot be read throws std::system_error.
std::string read_text_file(const std::filesystem::path& path);

// Text as a message quotes it: the start of a long one, not cut inside a UTF-8 sequence.
std::string shortened(const std::string& text);
// A value as a message shows it: containers by their kind, long text cut short.
std::string shown(const Json& value);
// As JSON writes it; bytes that are no UTF-8 are replaced.
std::string in_quotes(std::string_view text);
// The dotted path of a key inside the object at `path`.
std::string joined(const std::string& path, const std::string& key);

template <typename Names>
std::string list_in_quotes(const Names& names) {
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "" : ", ") + in_quotes(name);
  return list;
}

}  // namespace h2o
