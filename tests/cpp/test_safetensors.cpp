#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "llm/safetensors.h"
#include "test_helpers.h"

namespace {

using h2o::llm::parse_safetensors;

// A file with this header and `data_bytes` zeros behind it.
std::string file_of(const std::string& header, size_t data_bytes) {
  std::string file;
  for (size_t i = 0; i < 8; ++i) file += static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  return file + header + std::string(data_bytes, '\0');
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype": ")" + dtype + R"(", "shape": )" + shape + R"(, "data_offsets": )" + offsets +
         "}";
}

void check_refused(const std::string& file, const std::string& message) {
  CAPTURE(message);
  CHECK_THROWS_AS(parse_safetensors(file, "w"), std::invalid_argument);
  CHECK_THROWS_WITH(parse_safetensors(file, "w"), "w: " + message);
}

// A header with the one tensor "a" in 8 bytes of data.
void check_tensor_refused(const std::string& body, const std::string& message) {
  check_refused(file_of(R"({"a": )" + body + "}", 8), "tensor \"a\"" + message);
}

// What is said of a file that is refused.
std::string message_of(const std::string& file) {
  try {
    parse_safetensors(file, "w");
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a safetensors header says where each tensor lies", "[safetensors]") {
  const std::string header =
      R"({"__metadata__": {"format": "pt"}, "b": )" + entry("F32", "[2, 3]", "[4, 28]") +
      R"(, "a": )" + entry("BF16", "[2]", "[0, 4]") + R"(, "empty": )" +
      entry("F64", "[0, 5]", "[28, 28]") + R"(, "scalar": )" + entry("I64", "[]", "[28, 36]") + "}";
  const auto tensors = parse_safetensors(file_of(header, 36), "w");
  const size_t data = 8 + header.size();
  REQUIRE(tensors.size() == 4);
  CHECK(tensors.at("a").dtype == "BF16");
  CHECK(tensors.at("a").shape == std::vector<int64_t>{2});
  CHECK(tensors.at("a").begin == data);
  CHECK(tensors.at("b").shape == std::vector<int64_t>{2, 3});
  CHECK(tensors.at("b").begin == data + 4);
  CHECK(tensors.at("b").end == data + 28);
  CHECK(tensors.at("empty").begin == tensors.at("empty").end);
  CHECK(tensors.at("scalar").shape.empty());
  CHECK(parse_safetensors(file_of("{}", 0), "w").empty());
}

TEST_CASE("a file that is cut short or is no safetensors is refused", "[safetensors]") {
  check_refused("", "a .safetensors file must begin with 8 bytes of length, got 0 bytes");
  check_refused("1234567", "a .safetensors file must begin with 8 bytes of length, got 7 bytes");
  check_refused(file_of("{}", 0).substr(0, 9),
                "the header's length must be <= 1 in a file of 9 bytes, got 2: the file is cut "
                "short or is no "
                ".safetensors");
  check_refused(std::string(8, '\xFF'),
                "the header's length must be <= 0 in a file of 8 bytes, got 18446744073709551615: "
                "the file is cut "
                "short or is no .safetensors");
  check_refused(file_of("[]", 0), "the header must be an object, got an array");
  CHECK_THROWS_AS(parse_safetensors(file_of("{", 0), "w"), std::invalid_argument);
  CHECK_THROWS_WITH(parse_safetensors(file_of(R"({"a": 1, "a": 2})", 0), "w"),
                    "w: a must be given once, got it twice");
  check_refused(file_of(R"({"__metadata__": {"format": 1}})", 0),
                "__metadata__ must be an object of strings");
  const std::string whole = file_of(R"({"a": )" + entry("F32", "[2]", "[0, 8]") + "}", 8);
  CHECK_NOTHROW(parse_safetensors(whole, "w"));
  for (size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    CHECK_THROWS_AS(parse_safetensors(whole.substr(0, size), "w"), std::invalid_argument);
  }
}

TEST_CASE("a tensor without the bytes that its shape needs is refused", "[safetensors]") {
  check_tensor_refused("3", " must be an object, got 3");
  check_tensor_refused(R"({"shape": [2], "data_offsets": [0, 8]})", " must have dtype, got none");
  check_tensor_refused(R"({"dtype": "F32", "data_offsets": [0, 8]})", " must have shape, got none");
  check_tensor_refused(R"({"dtype": "F32", "shape": [2]})", " must have data_offsets, got none");
  check_tensor_refused(R"({"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "x": 1})",
                       R"( must have only dtype, shape and data_offsets, got "x")");
  check_tensor_refused(entry("F33", "[2]", "[0, 8]"),
                       R"(: dtype must be one of the format's, got "F33")");
  check_tensor_refused(entry("F32", "2", "[0, 8]"),
                       ": shape must be a list of integers >= 0, got 2");
  check_tensor_refused(entry("F32", "[-2]", "[0, 8]"),
                       ": shape must be a list of integers >= 0, got [-2]");
  check_tensor_refused(entry("F32", "[2.0]", "[0, 8]"),
                       ": shape must be a list of integers >= 0, got [2.0]");
  check_tensor_refused(entry("F32", "[9223372036854775808]", "[0, 8]"),
                       ": shape must be a list of integers >= 0, got [9223372036854775808]");
  check_tensor_refused(entry("F32", "[4294967296, 4294967296]", "[0, 8]"),
                       ": shape must be of less than 2^64 bits, got [4294967296,4294967296]");
  check_tensor_refused(entry("F4", "[15]", "[0, 8]"), ": shape must fill whole bytes, got [15]");
  check_tensor_refused(entry("F32", "[3]", "[0, 8]"),
                       ": data_offsets must span the 12 bytes of its shape, got [0,8]");
  for (const char* offsets : {"[0]", "[0,8,8]", "[8,0]", "[0,9]"}) {
    check_tensor_refused(
        entry("F32", "[2]", offsets),
        std::string(
            ": data_offsets must be [begin, end] within the 8 bytes after the header, got ") +
            offsets);
  }
}

TEST_CASE("tensors follow one another to the end of the file", "[safetensors]") {
  const auto two = [](const std::string& first, const std::string& second, size_t bytes) {
    return file_of(
        R"({"a": )" + entry("U8", "[4]", first) + R"(, "b": )" + entry("U8", "[4]", second) + "}",
        bytes);
  };
  CHECK_NOTHROW(parse_safetensors(two("[0, 4]", "[4, 8]", 8), "w"));
  CHECK_NOTHROW(parse_safetensors(two("[4, 8]", "[0, 4]", 8), "w"));
  for (const std::string& file : {two("[0, 4]", "[3, 7]", 8), two("[0, 4]", "[5, 9]", 9),
                                  two("[1, 5]", "[5, 9]", 9), two("[0, 4]", "[0, 4]", 8)}) {
    CHECK(message_of(file).find("without gap or overlap") != std::string::npos);
  }
  CHECK(message_of(two("[0, 4]", "[4, 8]", 9)).find("must end with the file's") !=
        std::string::npos);
}
