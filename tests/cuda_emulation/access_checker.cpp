// Checks every access of a kernel to shared and device memory: bounds, alignment, uninitialised
// reads, races.
//
// Kernels compiled with -fsanitize=thread call the hooks at the end of this file on each access.
// They take the place of ThreadSanitizer's own runtime (no -fsanitize=thread when linking), and
// know what orders CUDA threads.
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "emulator.h"

namespace cuda_emulation {
namespace {

// One access to one byte, small enough to keep three for each.
struct Access {
  std::uint64_t launch : 12, block : 18, thread : 10, clock : 23, atomic : 1;
  bool any() const { return launch != 0; }
};
static_assert(sizeof(Access) == 8);
constexpr unsigned kLaunches = 1 << 12, kBlocks = 1 << 18;
constexpr Access kHostWrite = {
    .launch = kLaunches - 1, .block = 0, .thread = 0, .clock = 0, .atomic = 0};

struct Cell {
  Access write, reads[2];  // reads by two threads, of different warps where there are such
};

enum class Memory { kDevice, kShared };

struct Region {
  std::uintptr_t start;
  std::size_t bytes;
  Memory memory;
  bool released;
  bool written;  // every byte of it, by the host or a kernel
  std::unique_ptr<Cell[], decltype(&std::free)> cells;
};

// Gathers each warp's accesses by one instruction into the request that the hardware would make of
// them.
class TrafficCounter {
 public:
  bool on = false;

  void accessed(std::uintptr_t where, std::size_t bytes, bool write, const void* code) {
    const Thread& thread = *current_thread;
    // Which time it is that the thread gets here since its last warp operation, where its warp last
    // met.
    if (counts_.size() <= thread.id) counts_.resize(thread.id + 1);
    Counts& counts = counts_[thread.id];
    if (counts.operations != thread.operations) counts = {thread.operations, {}};
    Request& request = requests_[{code, thread.id / 32, thread.operations, counts.of_code[code]++}];
    request.write = write;
    request.bytes += bytes;
    for (std::uintptr_t sector = where / 32; sector <= (where + bytes - 1) / 32; ++sector)
      request.sectors.insert(sector);
  }
  void block_ends() {
    for (const auto& [key, request] : requests_) {
      Traffic& traffic = total_[request.write][std::get<0>(key)];
      ++traffic.requests;
      traffic.bytes += request.bytes;
      traffic.sectors += request.sectors.size();
    }
    requests_.clear();
    counts_.clear();
  }
  void clear() {
    on = true;
    total_[0].clear();
    total_[1].clear();
  }
  std::map<std::string, Traffic> by_line(bool write) const {
    std::map<std::string, Traffic> lines;
    for (const auto& [code, traffic] : total_[write]) {
      std::string line = describe_code(code);
      line = line.substr(line.rfind(" at ") + 4);
      Traffic& of_line = lines[line.substr(0, line.find(' '))];
      of_line.requests += traffic.requests;
      of_line.bytes += traffic.bytes;
      of_line.sectors += traffic.sectors;
    }
    return lines;
  }

 private:
  struct Counts {
    unsigned operations = 0;
    std::map<const void*, unsigned> of_code;
  };
  struct Request {
    bool write = false;
    std::uint64_t bytes = 0;
    std::set<std::uintptr_t> sectors;
  };
  std::vector<Counts> counts_;
  std::map<std::tuple<const void*, unsigned, unsigned, unsigned>, Request> requests_;
  std::map<const void*, Traffic> total_[2];
};

class Checker final : public AccessChecker {
 public:
  Checker() { access_checker = this; }

  void allocated(void* memory, std::size_t bytes) override {
    add(reinterpret_cast<std::uintptr_t>(memory), bytes, Memory::kDevice);
  }
  void released(void* memory) override {
    Region& region = regions_.at(reinterpret_cast<std::uintptr_t>(memory));
    region.released = true;
    region.cells.reset();
  }
  void host_wrote(const void* memory, std::size_t bytes) override {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    Region* const region = find(address);
    if (region == nullptr) return;
    for (std::size_t i = 0; i < bytes; ++i) {
      region->cells[address - region->start + i] = {kHostWrite, {}};
    }
  }
  void launch_begins(const Launch& launch) override {
    if (std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z > kBlocks) {
      fail("the access checker can number " + std::to_string(kBlocks) + " blocks");
    }
    if (++launch_ == kLaunches - 1) begin_anew();
    parameters_ = reinterpret_cast<std::uintptr_t>(launch.parameters);
    parameter_bytes_ = launch.parameter_bytes;
    find_host_writes();
    acquired_.assign(std::size_t{launch.grid.x} * launch.grid.y * launch.grid.z, {});
    released_.clear();
  }
  void block_begins(unsigned char* dynamic_shared, std::size_t bytes) override;
  void block_ends() override { traffic_.block_ends(); }
  void accessed(const void* address, std::size_t bytes, bool write, bool atomic,
                const void* code) override;

  void clear_traffic() override { traffic_.clear(); }
  std::map<std::string, Traffic> traffic_by_line(bool writes) const override {
    return traffic_.by_line(writes);
  }

  void misaligned(const void* address, std::size_t bytes, bool write, const void* code) {
    const auto where = reinterpret_cast<std::uintptr_t>(address);
    if (const Region* const region = find(where))
      report("misaligned", *region, where, bytes, write, code);
  }

 private:
  void add(std::uintptr_t start, std::size_t bytes, Memory memory) {
    Cell* const cells = static_cast<Cell*>(std::calloc(bytes + 1, sizeof(Cell)));  // lazily mapped
    regions_.insert_or_assign(start,
                              Region{start, bytes, memory, false, false, {cells, &std::free}});
    last_ = nullptr;
  }
  // The region whose bytes, or whose neighbouring pages, hold the address.
  Region* find(std::uintptr_t address) {
    if (last_ != nullptr && address - last_->start < last_->bytes) return last_;
    auto next = regions_.upper_bound(address);
    if (next != regions_.begin()) {
      Region& before = std::prev(next)->second;
      if (address - before.start < before.bytes + margin_after(before)) return last_ = &before;
    }
    if (next != regions_.end() && next->second.memory == Memory::kDevice &&
        next->first - address <= kPage) {
      return &next->second;
    }
    return nullptr;
  }
  static constexpr std::size_t kPage = 4096;
  static std::size_t margin_after(const Region& region) {
    return region.memory == Memory::kDevice ? kPage : kMaxSharedBytes - region.bytes;
  }
  bool ordered(const Access& earlier) const {
    if (!earlier.any() || earlier.launch != launch_) return true;
    if (earlier.block != current_thread->block)
      return acquired_[current_thread->block].count(earlier.block) != 0;
    return ordered_before_now(earlier.thread, earlier.clock);
  }
  // The host writes device memory in its own code (tensors are filled so, in tests), which calls no
  // hook: what is no longer as it was allocated has been written.
  void find_host_writes() {
    for (auto& [start, region] : regions_) {
      if (region.memory != Memory::kDevice || region.released || region.written) continue;
      const auto* const halves = reinterpret_cast<const std::uint16_t*>(start);
      const auto noted = [&region](std::size_t at) { return region.cells[at].write.any(); };
      constexpr auto kHalf = static_cast<std::uint16_t>(kPoison);
      region.written = true;
      for (std::size_t at = 0; at < region.bytes; at += sizeof kPoison) {
        const std::size_t end = std::min(at + sizeof kPoison, region.bytes);
        const bool first = halves[at / 2] != kHalf, second = halves[at / 2 + 1] != kHalf;
        // A number may have one half that looks like poison; half a kernel's number may be missing.
        const bool whole = !(noted(at) || noted(end - 1));
        for (std::size_t i = at; i < end; ++i) {
          if (noted(i)) continue;
          const bool written = whole ? first || second : i < at + 2 ? first : second;
          if (written) {
            region.cells[i] = {kHostWrite, {}};
          } else {
            region.written = false;
          }
        }
      }
    }
  }
  // A kernel may touch the memory of its own thread, its parameters, and the constants and
  // variables of the code it is part of (the emulation's threadIdx among them).
  bool is_host_memory(std::uintptr_t where) const {
    if (where - reinterpret_cast<std::uintptr_t>(current_thread->stack) < kStackBytes) return false;
    if (where - parameters_ < parameter_bytes_) return false;
    static const auto [first, end] = image();
    return where < first || where >= end;
  }
  // Where the program or library lies that this is linked into.
  static std::pair<std::uintptr_t, std::uintptr_t> image() {
    std::pair<std::uintptr_t, std::uintptr_t> found = {0, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* result) {
          std::uintptr_t first = UINTPTR_MAX, end = 0;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
            const std::uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            first = std::min(first, start);
            end = std::max(end, start + info->dlpi_phdr[i].p_memsz);
          }
          const auto own = reinterpret_cast<std::uintptr_t>(&access_checker);
          if (own < first || own >= end) return 0;
          *static_cast<std::pair<std::uintptr_t, std::uintptr_t>*>(result) = {first, end};
          return 1;
        },
        &found);
    return found;
  }
  // All that happened so far becomes the host's doing: launch numbers are used again.
  void begin_anew() {
    launch_ = 1;
    for (auto& [start, region] : regions_) {
      for (std::size_t i = 0; region.cells != nullptr && i < region.bytes; ++i) {
        if (region.cells[i].write.any()) region.cells[i] = {kHostWrite, {}};
      }
    }
  }
  [[noreturn]] void report(const std::string& what, const Region& region, std::uintptr_t where,
                           std::size_t bytes, bool write, const void* code) {
    static const char* const kNames[] = {"device", "shared"};
    fail(what + ": " + (write ? "write" : "read") + " of " + std::to_string(bytes) +
         " bytes at offset " + std::to_string(static_cast<std::intptr_t>(where - region.start)) +
         " of " + std::to_string(region.bytes) + " bytes of " +
         kNames[static_cast<int>(region.memory)] + " memory, in " + describe_code(code));
  }
  static std::string describe(const Access& access, bool write) {
    return std::string(write ? "the write" : "the read") + " by thread " +
           std::to_string(access.thread) + " of block " + std::to_string(access.block);
  }

  std::map<std::uintptr_t, Region> regions_;
  Region* last_ = nullptr;
  unsigned launch_ = 0;
  // Blocks are ordered by atomic accesses that follow a fence (the counter of the "last block"
  // pattern).
  std::map<const void*, std::set<unsigned>> released_;
  std::vector<std::set<unsigned>> acquired_;
  std::uintptr_t parameters_ = 0;
  std::size_t parameter_bytes_ = 0;
  TrafficCounter traffic_;
};

void Checker::block_begins(unsigned char* dynamic_shared, std::size_t bytes) {
  const auto start = reinterpret_cast<std::uintptr_t>(dynamic_shared);
  const auto region = regions_.find(start);
  if (region == regions_.end() || region->second.bytes != bytes)
    return add(start, bytes, Memory::kShared);
  std::memset(static_cast<void*>(region->second.cells.get()), 0, bytes * sizeof(Cell));
}

void Checker::accessed(const void* address, std::size_t bytes, bool write, bool atomic,
                       const void* code) {
  const auto where = reinterpret_cast<std::uintptr_t>(address);
  const Thread& thread = *current_thread;
  Region* const region = find(where);
  if (region == nullptr) {
    if (!is_host_memory(where)) return;
    fail(std::string("host memory: ") + (write ? "write" : "read") + " of " +
         std::to_string(bytes) + " bytes, in " + describe_code(code));
  }
  if (region->released) report("use of released memory", *region, where, bytes, write, code);
  if (where < region->start || where + bytes > region->start + region->bytes) {
    report("out of bounds", *region, where, bytes, write, code);
  }
  if (atomic && region->memory == Memory::kDevice) {
    auto& released = released_[address];
    auto& acquired = acquired_[thread.block];
    acquired.insert(released.begin(), released.end());
    if (thread.fenced) {
      released.insert(acquired.begin(), acquired.end());
      released.insert(thread.block);
    }
  }
  if (traffic_.on && region->memory == Memory::kDevice)
    traffic_.accessed(where, bytes, write, code);
  const Access now = {.launch = launch_,
                      .block = thread.block,
                      .thread = thread.id,
                      .clock = thread.clock,
                      .atomic = atomic};
  Cell* const cells = &region->cells[where - region->start];
  const auto check = [&](Cell& cell) {
    if ((!write || atomic) && !cell.write.any())
      report("uninitialised", *region, where, bytes, write, code);
    if (!ordered(cell.write) && !(atomic && cell.write.atomic)) {
      report("race with " + describe(cell.write, true), *region, where, bytes, write, code);
    }
    if (write) {
      for (const Access& read : cell.reads) {
        if (!ordered(read))
          report("race with " + describe(read, false), *region, where, bytes, write, code);
      }
      cell = {now, {}};
      return;
    }
    Access& read = cell.reads[0];
    if (ordered(read)) {
      read = now;
    } else if (read.block != now.block || read.thread / 32 != now.thread / 32) {
      cell.reads[1] = now;
    }
  };
  // Bytes of one number mostly have the same history.
  const Cell before = cells[0];
  check(cells[0]);
  for (std::size_t i = 1; i < bytes; ++i) {
    if (std::memcmp(&cells[i], &before, sizeof before) == 0) {
      cells[i] = cells[0];
    } else {
      check(cells[i]);
    }
  }
}

Checker checker;

}  // namespace

}  // namespace cuda_emulation

namespace {

using cuda_emulation::checker;

void accessed(const void* address, std::size_t bytes, bool write, std::size_t alignment,
              const void* code) {
  if (cuda_emulation::current_thread == nullptr || cuda_emulation::inside_emulation) return;
  const cuda_emulation::InsideEmulation inside;
  if (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) {
    checker.misaligned(address, bytes, write, code);
  }
  checker.accessed(address, bytes, write, false, code);
}

}  // namespace

// ---- The hooks, which g++ calls with -fsanitize=thread ------------------------------------------

#define HOOK(name, bytes, write, alignment)                                  \
  extern "C" void name(void* address) {                                      \
    accessed(address, bytes, write, alignment, __builtin_return_address(0)); \
  }
#define HOOKS(bytes)                                  \
  HOOK(__tsan_read##bytes, bytes, false, bytes)       \
  HOOK(__tsan_write##bytes, bytes, true, bytes)       \
  HOOK(__tsan_unaligned_read##bytes, bytes, false, 1) \
  HOOK(__tsan_unaligned_write##bytes, bytes, true, 1)

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

extern "C" {
void __tsan_read_range(void* address, std::size_t bytes) {
  accessed(address, bytes, false, 1, __builtin_return_address(0));
}
void __tsan_write_range(void* address, std::size_t bytes) {
  accessed(address, bytes, true, 1, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
