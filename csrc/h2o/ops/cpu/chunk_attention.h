#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "h2o/kernels/cpu/chunk_kernels.h"
#include "h2o/ops/cpu/share_out.h"

// Several new tokens of each row attend causally, over the row's cache and themselves, and their
// weights are summed by column: the shared heart of one-shot prefill, streaming chunks and
// h2o_prefill_select.
namespace h2o::cpu {

// The chunk of one (row, KV head).
template <typename T>
struct HeadChunk {
  int64_t row = 0, head = 0;
  QueryTile<T> tile;  // everything but first, count, scratch and column_sums
  int64_t num_tokens = 0;
  std::vector<int32_t> slots, cached_positions;  // the occupied slots; the tile points here
  std::vector<Accumulator<T>> row_factors;       // likewise, empty where all are 1

  int64_t num_keys() const { return tile.num_cached + num_tokens; }
  int64_t num_tiles() const {
    const int64_t per_tile = tokens_per_tile(tile.group_size);
    return (num_tokens + per_tile - 1) / per_tile;
  }
};

// Attends all chunks and hands each one's column sums, [cached in the order of its slots, then its
// tokens], to `finish(chunk, sums)`, which may write to the chunk's (row, head) and nowhere else.
// The queries are split into tiles and the tiles dealt to a fixed number of groups whose sums are
// joined in order, so that neither the number of threads nor the rest of the batch changes a bit.
template <typename T, typename Finish>
void attend_chunks(std::vector<HeadChunk<T>>& chunks, const Finish& finish) {
  using A = Accumulator<T>;
  constexpr int64_t kGroups = 8;
  constexpr int64_t kSumsAtOnce = int64_t{1}
                                  << 23;  // elements: bounds the memory for a large batch
  size_t begin = 0;
  while (begin < chunks.size()) {
    struct Part {
      size_t chunk;
      int64_t group;
    };
    std::vector<Part> parts;
    std::vector<int64_t> offsets;  // of each chunk's sums, [groups, num_keys]
    int64_t total = 0, most_keys = 0;
    size_t end = begin;
    while (end < chunks.size() && (end == begin || total < kSumsAtOnce)) {
      const HeadChunk<T>& chunk = chunks[end];
      const int64_t groups = std::min(kGroups, chunk.num_tiles());
      offsets.push_back(total);
      for (int64_t group = 0; group < groups; ++group) parts.push_back({end, group});
      total += groups * chunk.num_keys();
      most_keys = std::max(most_keys, chunk.num_keys());
      ++end;
    }
    std::vector<A> sums(static_cast<size_t>(total), A{0});
    const size_t scratch_bytes =
        sizeof(A) * static_cast<size_t>(tile_scratch_size(chunks[begin].tile.group_size,
                                                          chunks[begin].tile.head_dim, most_keys));
    const int64_t num_parts = static_cast<int64_t>(parts.size());
    const int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_parts);
    share_out(num_parts, 1, num_threads, [&] {
      return [&, scratch = c10::GetCPUAllocator()->allocate(scratch_bytes)](int64_t p, int64_t) {
        const Part& part = parts[static_cast<size_t>(p)];
        const HeadChunk<T>& chunk = chunks[part.chunk];
        const int64_t per_tile = tokens_per_tile(chunk.tile.group_size);
        QueryTile<T> tile = chunk.tile;
        tile.scratch = static_cast<A*>(scratch.get());
        tile.column_sums =
            sums.data() + offsets[part.chunk - begin] + part.group * chunk.num_keys();
        for (int64_t t = part.group; t < chunk.num_tiles(); t += kGroups) {
          tile.first = t * per_tile;
          tile.count = std::min(per_tile, chunk.num_tokens - tile.first);
          chunk_kernels<T>().attend_tile(tile);
        }
      };
    });
    at::parallel_for(static_cast<int64_t>(begin), static_cast<int64_t>(end), 1,
                     [&](int64_t first, int64_t last) {
                       for (int64_t c = first; c < last; ++c) {
                         const HeadChunk<T>& chunk = chunks[static_cast<size_t>(c)];
                         A* const joined = sums.data() + offsets[static_cast<size_t>(c) - begin];
                         const int64_t groups = std::min(kGroups, chunk.num_tiles());
                         for (int64_t group = 1; group < groups; ++group) {
                           for (int64_t k = 0; k < chunk.num_keys(); ++k)
                             joined[k] += joined[group * chunk.num_keys() + k];
                         }
                         finish(chunk, joined);
                       }
                     });
    begin = end;
  }
}

}  // namespace h2o::cpu
