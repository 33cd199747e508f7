#include "h2o/json.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <set>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace h2o {
namespace {

// The library copies and writes a value by recursion, which a hostile file could drive through the
// stack.
constexpr int kMaxDepth = 100;

// Sees the file while it is parsed: where the parser is, how deep, and that no object repeats a key
// (the parser itself would keep the last one and say nothing).
class KeyTracker {
 public:
  explicit KeyTracker(const std::string& file) : file_(file) {}

  bool operator()(int depth, Json::parse_event_t event, const Json& parsed) {
    using Event = Json::parse_event_t;
    if ((event == Event::object_start || event == Event::array_start) && depth >= kMaxDepth) {
      throw std::invalid_argument(file_ + ": " + (objects_.empty() ? "the top level" : path()) +
                                  " must be nested at most " + std::to_string(kMaxDepth) +
                                  " deep, got more");
    }
    if (event == Event::object_start) {
      objects_.emplace_back();
    } else if (event == Event::object_end) {
      objects_.pop_back();
    } else if (event == Event::key) {
      Object& object = objects_.back();
      object.current = parsed.get<std::string>();
      if (!object.keys.insert(object.current).second) {
        throw std::invalid_argument(file_ + ": " + path() + " must be given once, got it twice");
      }
    }
    return true;
  }

  std::string path() const {
    std::string path;
    for (const Object& object : objects_) path = joined(path, object.current);
    return shortened(path);
  }

 private:
  struct Object {
    std::string current;
    std::set<std::string> keys;
  };

  const std::string& file_;
  std::vector<Object> objects_;  // those that are open, outermost first
};

// The parser's message after the first `start`, with bytes above ASCII escaped, since it may quote
// a piece of a broken UTF-8 sequence, and with what it quotes cut short.
std::string parser_message(const std::string& what, const std::string& start) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string message;
  for (const char c : what.substr(what.find(start) + start.size())) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) {
      message += c;
    } else {
      message += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  const size_t open = message.find('\''), close = message.rfind('\'');
  if (open == std::string::npos) return message;
  const size_t quoted = open + 1;
  return message.substr(0, quoted) + shortened(message.substr(quoted, close - quoted)) +
         message.substr(close);
}

// Where the parser stopped, both counted from 1. Its own message counts a line break as column 0 of
// the next line, which is not where a reader would look.
std::string line_and_column(std::string_view text, size_t bytes_read) {
  const std::string_view before = text.substr(0, bytes_read == 0 ? 0 : bytes_read - 1);
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
  return "line " + std::to_string(line) + ", column " +
         std::to_string(before.size() - line_start + 1);
}

}  // namespace

Json parse_json(std::string_view text, const std::string& file) {
  KeyTracker tracker(file);
  const size_t nul = text.find('\0');  // which the parser takes for the end of the text
  try {
    Json root = Json::parse(text.begin(), text.end(),
                            [&](int depth, Json::parse_event_t event, const Json& parsed) {
                              return tracker(depth, event, parsed);
                            });
    if (nul == std::string_view::npos) return root;
  } catch (const Json::parse_error& error) {
    if (error.byte <= nul) {
      throw std::invalid_argument(file + ": " + line_and_column(text, error.byte) + ": " +
                                  parser_message(error.what(), ": "));
    }
  } catch (const Json::out_of_range& error) {  // a number that no double can hold
    throw std::invalid_argument(file + ": " + tracker.path() + ": " +
                                parser_message(error.what(), "] "));
  }
  throw std::invalid_argument(file + ": " + line_and_column(text, nul + 1) +
                              ": syntax error - a NUL byte");
}

std::string read_text_file(const std::filesystem::path& path) {
  const auto fail = [&](int code) {
    throw std::system_error(code, std::generic_category(), path.string());
  };
  // Opening a folder succeeds on Linux; only reading it fails.
  if (std::filesystem::is_directory(path)) fail(EISDIR);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(errno != 0 ? errno : EIO);
  std::string text;
  std::array<char, 4096> block;
  // Read by read(), which tells an error from the end; operator<< of the buffer does not.
  do {
    file.read(block.data(), block.size());
    text.append(block.data(), static_cast<size_t>(file.gcount()));
  } while (file);
  if (file.bad()) fail(errno != 0 ? errno : EIO);
  return text;
}

std::string shortened(const std::string& text) {
  constexpr size_t kMaxBytes = 80;
  if (text.size() <= kMaxBytes) return text;
  size_t end = kMaxBytes;
  while ((text[end] & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

std::string shown(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  return shortened(value.dump());
}

std::string in_quotes(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string joined(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

}  // namespace h2o
