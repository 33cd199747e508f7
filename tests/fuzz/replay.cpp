#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

// Stands in for libFuzzer, which only clang has, with the arguments that CTest gives: the files of
// -seed_inputs=a,b,... and inputs made from them, -runs=N in all. What is made depends on nothing
// but the files.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

std::mt19937 engine(1);

size_t below(size_t bound) { return bound == 0 ? 0 : engine() % bound; }

std::string piece_of(const std::string& text) {
  const size_t first = below(text.size() + 1);
  return text.substr(first, below(text.size() - first + 1));
}

std::string mutated(const std::vector<std::string>& corpus) {
  std::string text = corpus[below(corpus.size())];
  for (size_t change = 0; change <= below(4); ++change) {
    const size_t at = below(text.size() + 1);
    switch (below(4)) {
      case 0:
        text.insert(at, 1, static_cast<char>(engine()));
        break;
      case 1:
        text.erase(at, below(8));
        break;
      case 2:
        text.insert(at, piece_of(corpus[below(corpus.size())]));
        break;
      default:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
    }
  }
  return text;
}

void run(const std::string& text) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

// What stands behind `name` in one of the arguments.
std::string option(const std::vector<std::string>& arguments, std::string_view name) {
  for (const std::string& argument : arguments) {
    if (argument.starts_with(name)) return argument.substr(name.size());
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  std::vector<std::string> corpus = {""};
  std::istringstream paths(option(arguments, "-seed_inputs="));
  for (std::string path; std::getline(paths, path, ',');) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + " cannot be read");
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  for (const std::string& text : corpus) run(text);
  const size_t runs = std::stoul(option(arguments, "-runs="));
  for (size_t i = corpus.size(); i < runs; ++i) run(mutated(corpus));
  std::printf("%zu inputs of %zu files\n", runs, corpus.size() - 1);
}
