#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace h2o::llm {

class MappedFile;

// The tensors of a model folder: model.safetensors, or without it the files that
// model.safetensors.index.json names. The files are mapped into memory and read as the tensors are
// used; other processes with the same model share the pages.
class Weights {
 public:
  // What take() gives is `dtype` on `device`: the mapped bytes themselves where the file holds that
  // dtype and the device is the CPU, else a copy. Throws std::system_error where a file cannot be
  // read, std::invalid_argument where one is damaged or the index and the files disagree.
  Weights(const std::filesystem::path& folder, at::ScalarType dtype, at::Device device);

  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  // A tensor that must be there with this shape; else throws std::invalid_argument, which names it.
  at::Tensor take(const std::string& name, at::IntArrayRef shape) const;
  // Gives the mapped memory that has been read back to the system. What is used again is read
  // again.
  void drop_pages() const;

 private:
  std::filesystem::path folder_;
  at::ScalarType dtype_;
  at::Device device_;
  std::vector<std::shared_ptr<MappedFile>> files_;
  std::map<std::string, at::Tensor> tensors_;  // in the file's dtype, on mapped memory
};

}  // namespace h2o::llm
