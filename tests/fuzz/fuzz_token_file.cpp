#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "llm/token_file.h"
#include "require.h"

// Any bytes are prompts or std::invalid_argument; what is read has rows, and rows have tokens.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto prompts = h2o::llm::parse_token_file(text, "fuzz.json");
    require(!prompts.empty(), "no rows");
    for (const auto& prompt : prompts) {
      require(!prompt.empty(), "a row without tokens");
      for (const int64_t id : prompt) {
        require(id >= 0 && id <= std::numeric_limits<int32_t>::max(), "a token out of range");
      }
    }
  } catch (const std::invalid_argument& error) {
    require(std::string_view(error.what()).starts_with("fuzz.json: "),
            "a message that does not open with the file");
  }
  return 0;
}
