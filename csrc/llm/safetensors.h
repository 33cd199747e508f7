#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

// The header of a .safetensors file (huggingface.co/docs/safetensors): 8 bytes of its length,
// little endian, then JSON that says of each tensor its dtype, its shape and which bytes after the
// header are its elements.
namespace h2o::llm {

struct StoredTensor {
  std::string dtype;  // as the format writes it: "F32", "BF16", ...
  std::vector<int64_t> shape;
  size_t begin = 0, end = 0;  // bytes, counted from the file's first
};

// By name, of all of `file`'s bytes. Throws std::invalid_argument, which starts with `name`, where
// the file is cut short or is no safetensors, where a tensor has not the bytes that its shape
// needs, and where the tensors leave a gap, overlap or do not end with the file.
std::map<std::string, StoredTensor> parse_safetensors(std::string_view file,
                                                      const std::string& name);

}  // namespace h2o::llm
