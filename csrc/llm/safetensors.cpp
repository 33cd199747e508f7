#include "llm/safetensors.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>

#include "h2o/json.h"

namespace h2o::llm {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeader = 100'000'000;  // bytes; the limit of the format's own library

struct Dtype {
  std::string_view name;
  uint64_t bits;
};
constexpr Dtype kDtypes[] = {
    {"BOOL", 8}, {"U8", 8},   {"I8", 8},      {"F8_E5M2", 8}, {"F8_E4M3", 8},
    {"I16", 16}, {"U16", 16}, {"F16", 16},    {"BF16", 16},   {"I32", 32},
    {"U32", 32}, {"F32", 32}, {"F64", 64},    {"I64", 64},    {"U64", 64},
    {"C64", 64}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F8_E8M0", 8},
};

std::optional<uint64_t> times(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// The members of one tensor's entry, each checked for its type.
class Entry {
 public:
  Entry(const std::string& file, const std::string& tensor, const Json& object)
      : who_(file + ": tensor " + in_quotes(tensor)), object_(object) {
    if (!object.is_object()) fail(" must be an object, got " + shown(object));
    for (const auto& [key, value] : object.items()) {
      if (key != "dtype" && key != "shape" && key != "data_offsets") {
        fail(" must have only dtype, shape and data_offsets, got " + in_quotes(key));
      }
    }
  }

  [[noreturn]] void fail(const std::string& message) const {
    throw std::invalid_argument(who_ + message);
  }

  const Dtype& dtype() const {
    const Json& value = member("dtype");
    const auto* found =
        std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const Dtype& dtype) {
          return value.is_string() && value.get_ref<const std::string&>() == dtype.name;
        });
    if (found == std::end(kDtypes))
      fail(": dtype must be one of the format's, got " + shown(value));
    return *found;
  }

  // Integers >= 0, which fit into int64_t.
  std::vector<int64_t> integers(const char* key) const {
    const Json& value = member(key);
    std::vector<int64_t> integers;
    bool valid = value.is_array();
    for (size_t i = 0; valid && i < value.size(); ++i) {
      valid = value[i].is_number_unsigned() &&
              value[i].get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()};
      if (valid) integers.push_back(value[i].get<int64_t>());
    }
    if (!valid)
      fail(std::string(": ") + key + " must be a list of integers >= 0, got " +
           shortened(value.dump()));
    return integers;
  }

 private:
  const Json& member(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) fail(std::string(" must have ") + key + ", got none");
    return *found;
  }

  std::string who_;
  const Json& object_;
};

uint64_t bytes_of(const Entry& entry, const Dtype& dtype, const std::vector<int64_t>& shape) {
  std::optional<uint64_t> bits = dtype.bits;
  for (const int64_t size : shape) {
    bits = times(*bits, static_cast<uint64_t>(size));
    if (!bits)
      entry.fail(": shape must be of less than 2^64 bits, got " + shortened(Json(shape).dump()));
  }
  if (*bits % 8 != 0)
    entry.fail(": shape must fill whole bytes, got " + shortened(Json(shape).dump()));
  return *bits / 8;
}

// `metadata` is text by text; nothing of it is used here.
void check_metadata(const std::string& file, const Json& metadata) {
  const bool valid =
      metadata.is_object() && std::all_of(metadata.begin(), metadata.end(),
                                          [](const Json& value) { return value.is_string(); });
  if (!valid) throw std::invalid_argument(file + ": __metadata__ must be an object of strings");
}

}  // namespace

std::map<std::string, StoredTensor> parse_safetensors(std::string_view file,
                                                      const std::string& name) {
  const auto fail = [&](const std::string& message) {
    throw std::invalid_argument(name + ": " + message);
  };
  if (file.size() < kLengthBytes) {
    fail("a .safetensors file must begin with 8 bytes of length, got " +
         std::to_string(file.size()) + " bytes");
  }
  uint64_t length = 0;
  for (uint64_t i = 0; i < kLengthBytes; ++i) {
    length |= uint64_t{static_cast<unsigned char>(file[i])} << (8 * i);
  }
  const uint64_t most = std::min<uint64_t>(kMaxHeader, file.size() - kLengthBytes);
  if (length > most) {
    fail("the header's length must be <= " + std::to_string(most) + " in a file of " +
         std::to_string(file.size()) + " bytes, got " + std::to_string(length) +
         ": the file is cut short or is no .safetensors");
  }
  const Json header = parse_json(file.substr(kLengthBytes, length), name);
  if (!header.is_object()) fail("the header must be an object, got " + shown(header));

  const uint64_t data = kLengthBytes + length;
  const uint64_t data_bytes = file.size() - data;
  std::map<std::string, StoredTensor> tensors;
  for (const auto& [tensor, value] : header.items()) {
    if (tensor == "__metadata__") {
      check_metadata(name, value);
      continue;
    }
    const Entry entry(name, tensor, value);
    const Dtype& dtype = entry.dtype();
    std::vector<int64_t> shape = entry.integers("shape");
    const std::vector<int64_t> offsets = entry.integers("data_offsets");
    const uint64_t bytes = bytes_of(entry, dtype, shape);
    if (offsets.size() != 2 || offsets[0] > offsets[1] || uint64_t(offsets[1]) > data_bytes) {
      entry.fail(": data_offsets must be [begin, end] within the " + std::to_string(data_bytes) +
                 " bytes after the header, got " + shortened(Json(offsets).dump()));
    }
    const auto begin = static_cast<uint64_t>(offsets[0]), end = static_cast<uint64_t>(offsets[1]);
    if (end - begin != bytes) {
      entry.fail(": data_offsets must span the " + std::to_string(bytes) +
                 " bytes of its shape, got " + shortened(Json(offsets).dump()));
    }
    tensors[tensor] = {std::string(dtype.name), std::move(shape), data + begin, data + end};
  }

  // One after another, without a gap: a file that was not written to its end does not pass.
  std::vector<const StoredTensor*> in_order;
  for (const auto& [tensor, stored] : tensors) in_order.push_back(&stored);
  std::sort(in_order.begin(), in_order.end(), [](const StoredTensor* a, const StoredTensor* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  uint64_t expected = data;
  for (const StoredTensor* stored : in_order) {
    if (stored->begin != expected) {
      fail("tensors must follow one another without gap or overlap, got one at byte " +
           std::to_string(stored->begin) + " where " + std::to_string(expected) + " is next");
    }
    expected = stored->end;
  }
  if (expected != file.size()) {
    fail("the tensors must end with the file's " + std::to_string(file.size()) + " bytes, got " +
         std::to_string(expected));
  }
  return tensors;
}

}  // namespace h2o::llm
