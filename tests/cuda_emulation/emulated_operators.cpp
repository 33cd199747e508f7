// torch.ops.h2o_emulated: the CUDA operators, bindings and all, on CPU tensors; and what sets the
// emulation up.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "emulator.h"
#include "h2o/ops/registration.h"

// Takes the place of csrc/h2o/ops/registration.cpp: every schema of torch.ops.h2o is registered in
// the other namespace, and what is meant for CUDA tensors for those of the CPU.
namespace h2o {

Registration::Registration(std::optional<c10::DispatchKey> key, void (*fill)(torch::Library&)) {
  if (key == c10::DispatchKey::CUDA) key = c10::DispatchKey::CPU;
  library_.emplace(key ? torch::Library::IMPL : torch::Library::DEF, "h2o_emulated", key, __FILE__,
                   __LINE__);
  fill(*library_);
}

}  // namespace h2o

namespace {

using cuda_emulation::AccessChecker;
using cuda_emulation::Traffic;

// Hands out the emulation's device memory, so that accesses beyond a tensor are found.
class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const memory = bytes > 0 ? cuda_emulation::allocate(bytes) : nullptr;
    return {memory, memory, &cuda_emulation::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &cuda_emulation::release; }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
};

void use_device_memory(bool on) {
  static DeviceMemory device_memory;
  static c10::Allocator* before = nullptr;
  constexpr uint8_t kPriority = 255;
  if (on && before == nullptr) {
    before = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&device_memory, kPriority);
  } else if (!on && before != nullptr) {
    c10::SetCPUAllocator(before, kPriority);
    before = nullptr;
  }
}

void set_device(int64_t multiprocessors, int64_t shared_bytes) {
  TORCH_CHECK_VALUE(multiprocessors >= 1, "set_device: multiprocessors must be >= 1, got ",
                    multiprocessors);
  TORCH_CHECK_VALUE(shared_bytes >= 0 && shared_bytes <= cuda_emulation::kMaxSharedBytes,
                    "set_device: shared_bytes must be in 0..", cuda_emulation::kMaxSharedBytes,
                    ", got ", shared_bytes);
  cuda_emulation::device = {static_cast<int>(multiprocessors), static_cast<int>(shared_bytes)};
}

AccessChecker& checker() {
  TORCH_CHECK(cuda_emulation::access_checker != nullptr,
              "h2o_emulated: only the checked build counts traffic");
  return *cuda_emulation::access_checker;
}

std::tuple<std::vector<std::string>, std::vector<int64_t>> launch_log() {
  std::tuple<std::vector<std::string>, std::vector<int64_t>> log;
  for (const cuda_emulation::Launched& launch : cuda_emulation::launch_log()) {
    std::get<0>(log).push_back(launch.kernel);
    for (const std::size_t number :
         {std::size_t{launch.blocks}, std::size_t{launch.threads}, launch.shared_bytes}) {
      std::get<1>(log).push_back(static_cast<int64_t>(number));
    }
  }
  return log;
}

c10::Dict<std::string, std::vector<int64_t>> traffic(bool writes) {
  c10::Dict<std::string, std::vector<int64_t>> lines;
  for (const auto& [line, of_line] : checker().traffic_by_line(writes)) {
    lines.insert(line, std::vector<int64_t>{static_cast<int64_t>(of_line.requests),
                                            static_cast<int64_t>(of_line.bytes),
                                            static_cast<int64_t>(of_line.sectors)});
  }
  return lines;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(h2o_emulated, m) {
  // The order in which threads and blocks run; 0 is in turn.
  m.def("set_seed(int seed) -> ()",
        [](int64_t seed) { cuda_emulation::set_seed(static_cast<uint64_t>(seed)); });
  // What the device says of itself; the defaults are an H100's.
  m.def("set_device(int multiprocessors=132, int shared_bytes=232448) -> ()", &set_device);
  // Whether CPU tensors that are made from now on lie in device memory, and so does what the
  // operators allocate. The checked build demands it of every tensor that a kernel touches.
  m.def("device_memory(bool on) -> ()", &use_device_memory);
  // Since the process began: kernels launched, threads resumed.
  m.def("launches() -> int", [] { return static_cast<int64_t>(cuda_emulation::launches()); });
  m.def("switches() -> int",
        [] { return static_cast<int64_t>(cuda_emulation::thread_switches()); });
  // Each launch since clear_launch_log(): the kernels' names, and blocks, threads and bytes of
  // dynamic shared memory of each.
  m.def("clear_launch_log() -> ()", [] { cuda_emulation::clear_launch_log(); });
  m.def("launch_log() -> (str[] kernels, int[] sizes)", &launch_log);
  // Whether this is the checked build, which has the rest.
  m.def("is_checked() -> bool", [] { return cuda_emulation::access_checker != nullptr; });
  m.def("clear_traffic() -> ()", [] { checker().clear_traffic(); });
  // "file:line" -> [requests, bytes, sectors] of device memory, since clear_traffic().
  m.def("traffic(bool writes) -> Dict(str, int[])", &traffic);
}
