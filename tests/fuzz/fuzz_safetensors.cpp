#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

#include "llm/safetensors.h"
#include "require.h"

// Any bytes are a .safetensors file or std::invalid_argument, and the tensors of a file lie one
// after another up to its end. The bytes are taken twice: as they are, and as a header up to the
// first line break with what follows as data, so that mutations do not all end at the length.
namespace {

void check_file(std::string_view file) {
  try {
    const auto tensors = h2o::llm::parse_safetensors(file, "fuzz.safetensors");
    std::multimap<size_t, size_t> spans;
    for (const auto& [name, tensor] : tensors) {
      require(tensor.begin <= tensor.end && tensor.end <= file.size(), "bytes outside the file");
      spans.emplace(tensor.begin, tensor.end);
      int64_t elements = 1;
      for (const int64_t size : tensor.shape) {
        require(size >= 0 && !__builtin_mul_overflow(elements, size, &elements), "a shape");
      }
      require(static_cast<size_t>(elements) / 2 <= tensor.end - tensor.begin,
              "more elements than bytes");
      require(elements == 0 ? tensor.begin == tensor.end
                            : (tensor.end - tensor.begin) / static_cast<size_t>(elements) <= 8,
              "more bytes than elements");
    }
    size_t next = spans.empty() ? file.size() : spans.begin()->first;
    for (const auto& [begin, end] : spans) {
      require(begin == next || begin == end, "a gap or an overlap");
      next = std::max(next, end);
    }
    require(next == file.size(), "bytes behind the last tensor");
  } catch (const std::invalid_argument& error) {
    require(std::string_view(error.what()).starts_with("fuzz.safetensors: "),
            "a message that does not open with the file");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  check_file(bytes);
  const std::string_view header = bytes.substr(0, bytes.find('\n'));
  const std::string_view rest = bytes.substr(std::min(size, header.size() + 1));
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(uint64_t{header.size()} >> (8 * i));
  check_file(file.append(header).append(rest));
  return 0;
}
