#include "llm/weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "h2o/json.h"
#include "llm/safetensors.h"

namespace h2o::llm {

// A whole file in memory, never written to.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path) {
    const auto fail = [&] {
      throw std::system_error(errno, std::generic_category(), path.string());
    };
    if (std::filesystem::exists(path) && !std::filesystem::is_regular_file(path)) {
      throw std::invalid_argument(path.string() + ": must be a file");  // a pipe would wait forever
    }
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) fail();
    struct stat status = {};
    const bool known = ::fstat(file, &status) == 0;
    size_ = static_cast<size_t>(status.st_size);
    if (known && size_ > 0) {
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    }
    const int error = errno;
    ::close(file);
    errno = error;
    if (!known || data_ == MAP_FAILED) fail();
  }
  ~MappedFile() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  void drop_pages() const {
    if (data_ != nullptr) ::madvise(data_, size_, MADV_DONTNEED);
  }
  std::string_view bytes() const { return {data(), size_}; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

namespace {

// None for what no layer here is made of: such tensors may lie in the file.
std::optional<at::ScalarType> scalar_type(std::string_view dtype) {
  constexpr std::array<std::pair<std::string_view, at::ScalarType>, 4> kTypes = {
      {{"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16}, {"F64", at::kDouble}}};
  for (const auto& [name, type] : kTypes) {
    if (name == dtype) return type;
  }
  return std::nullopt;
}

at::Tensor on_mapped(const std::shared_ptr<MappedFile>& file, const StoredTensor& stored,
                     at::ScalarType type) {
  char* data = file->data() + stored.begin;
  if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(type) == 0) {
    return at::from_blob(data, stored.shape, [file](void*) {}, type);
  }
  // The format does not promise alignment.
  at::Tensor copy = at::empty(stored.shape, type);
  if (stored.end > stored.begin) std::memcpy(copy.data_ptr(), data, stored.end - stored.begin);
  return copy;
}

// File by tensor, out of model.safetensors.index.json.
std::map<std::string, std::string> read_index(const std::filesystem::path& path) {
  const std::string name = path.string();
  const Json root = parse_json(read_text_file(path), name);
  const auto found = root.is_object() ? root.find("weight_map") : root.end();
  std::map<std::string, std::string> files;
  if (found == root.end() || !found->is_object()) {
    throw std::invalid_argument(name + ": weight_map must be an object, got " +
                                (found == root.end() ? "none" : shown(*found)));
  }
  for (const auto& [tensor, file] : found->items()) {
    // A name and no path, so that an index cannot lead out of its folder.
    if (!file.is_string() || file.get_ref<const std::string&>().empty() ||
        file.get_ref<const std::string&>().find('/') != std::string::npos) {
      throw std::invalid_argument(name + ": weight_map of " + in_quotes(tensor) +
                                  " must be the name of a file in the folder, got " + shown(file));
    }
    files[tensor] = file.get<std::string>();
  }
  return files;
}

}  // namespace

Weights::Weights(const std::filesystem::path& folder, at::ScalarType dtype, at::Device device)
    : folder_(folder), dtype_(dtype), device_(device) {
  const auto read = [&](const std::string& name) {
    const std::filesystem::path path = folder / name;
    const auto file = files_.emplace_back(std::make_shared<MappedFile>(path));
    for (const auto& [tensor, stored] : parse_safetensors(file->bytes(), path.string())) {
      const auto type = scalar_type(stored.dtype);
      if (type) tensors_[tensor] = on_mapped(file, stored, *type);
    }
  };
  const std::filesystem::path index = folder / "model.safetensors.index.json";
  // An index beside the whole file is left from an earlier save; transformers passes it over too.
  if (std::filesystem::exists(folder / "model.safetensors") || !std::filesystem::exists(index)) {
    read("model.safetensors");
    return;
  }
  const auto files = read_index(index);
  std::set<std::string> names;
  for (const auto& [tensor, file] : files) names.insert(file);
  for (const std::string& name : names) read(name);
}

at::Tensor Weights::take(const std::string& name, at::IntArrayRef shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    throw std::invalid_argument(folder_.string() + ": the weights must have " + name +
                                ", in floating point, got none");
  }
  const at::Tensor& tensor = found->second;
  if (tensor.sizes() != shape) {
    throw std::invalid_argument(folder_.string() + ": " + name + " must be " +
                                Json(shape.vec()).dump() + " by config.json, got " +
                                Json(tensor.sizes().vec()).dump());
  }
  return tensor.to(device_, dtype_);
}

void Weights::drop_pages() const {
  for (const auto& file : files_) file->drop_pages();
}

}  // namespace h2o::llm
