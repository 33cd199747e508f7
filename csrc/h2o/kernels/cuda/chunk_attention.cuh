#pragma once

#include "h2o/kernels/cuda/block.cuh"
#include "h2o/kernels/gqa_reduce.h"

// Causal attention and scores of several tokens that join together, by tiles of 32 queries and 32
// keys. Nothing of the size queries x keys is stored: logits are computed once for the outputs and
// once more for the scores.
namespace h2o::cuda {

inline constexpr int kTile = 32;
inline constexpr int kTileThreads = 256;
inline constexpr int kThreadsPerQuery = kTileThreads / kTile;  // neighbouring lanes
inline constexpr int kPerThread = kTile / kThreadsPerQuery;    // keys, or elements of a slice
inline constexpr int kOutputSlices = 4;  // of kTile elements, in a thread's registers
static_assert(kTileThreads / kWarpSize * kPerThread == kTile && kTile == kWarpSize);

// A query of a tile is one head of the group for one token: number token * group_size + head, so
// that a tile's queries share their keys and a token's heads follow each other.
template <typename T>
struct ChunkShared {
  using A = Accumulator<T>;
  // Slices of kTile elements of head_dim, one vector a row; the odd stride keeps columns off one
  // bank.
  A queries[kTile][kTile + 1];
  A keys[kTile][kTile + 1];  // or values
  A weights[kTile][kTile + 1];
  A maximum[kTile], sum[kTile];
  const T* query_rows[kTile];  // null past the last
  const T* key_rows[kTile];    // null where there is none
  const T* value_rows[kTile];
  int32_t query_positions[kTile];
  int32_t key_positions[kTile];  // -1 where there is none
  int32_t query_tokens[kTile];   // within the chunk, -1 past the last
  int32_t key_tokens[kTile];     // within the chunk, -1 in a slot: seen by every query
};

// One (row, KV head) of a chunk.
template <typename T>
struct ChunkHead {
  const ChunkAttention<T>& p;
  int64_t row, head;
  int32_t num_tokens;   // of the chunk
  int32_t num_queries;  // num_tokens * group_size

  __device__ ChunkHead(const ChunkAttention<T>& attention, int64_t row, int64_t head)
      : p(attention),
        row(row),
        head(head),
        num_tokens(p.chunk.count(p.tokens, row)),
        num_queries(num_tokens * p.sizes.group_size) {}

  __device__ int32_t column(int32_t token) const {
    return p.tokens.columns(row)[p.chunk.first + token];
  }
  __device__ int32_t position(int32_t token) const {
    return p.tokens.positions(row)[p.chunk.first + token];
  }
  // Where maximum and sum of a query are.
  __device__ int64_t statistic(int32_t query) const {
    return (row * p.sizes.num_kv_heads + head) * p.chunk.size * p.sizes.group_size + query;
  }

  // Each of these is called by all threads; a barrier must follow before the tile is read.
  __device__ void load_queries(ChunkShared<T>& shared, int32_t first) const {
    const int32_t query = first + static_cast<int32_t>(threadIdx.x);
    if (threadIdx.x >= kTile) return;
    const int32_t token = query < num_queries ? query / p.sizes.group_size : -1;
    shared.query_tokens[threadIdx.x] = token;
    shared.query_rows[threadIdx.x] = nullptr;
    if (token < 0) return;
    const int64_t q_head = head * p.sizes.group_size + query % p.sizes.group_size;
    shared.query_rows[threadIdx.x] = p.query.at(row, q_head, column(token));
    shared.query_positions[threadIdx.x] = position(token);
  }
  // Returns whether the tile has a key.
  __device__ bool load_slots(ChunkShared<T>& shared, int32_t first) const {
    bool used = false;
    if (threadIdx.x < kTile) {
      const int32_t slot = first + static_cast<int32_t>(threadIdx.x);
      const int32_t position =
          slot < p.cache.capacity ? *p.cache.positions.at(row, head, slot) : -1;
      used = position >= 0;
      shared.key_positions[threadIdx.x] = position;
      shared.key_tokens[threadIdx.x] = -1;
      shared.key_rows[threadIdx.x] = used ? p.cache.k.at(row, head, slot) : nullptr;
      shared.value_rows[threadIdx.x] = used ? p.cache.v.at(row, head, slot) : nullptr;
    }
    return __syncthreads_or(used);
  }
  __device__ void load_new_tokens(ChunkShared<T>& shared, int32_t first) const {
    if (threadIdx.x >= kTile) return;
    const int32_t token = first + static_cast<int32_t>(threadIdx.x);
    const bool used = token < num_tokens;
    shared.key_positions[threadIdx.x] = used ? position(token) : -1;
    shared.key_tokens[threadIdx.x] = token;
    shared.key_rows[threadIdx.x] = used ? p.k_new.at(row, head, column(token)) : nullptr;
    shared.value_rows[threadIdx.x] =
        used && p.output.data != nullptr ? p.v_new.at(row, head, column(token)) : nullptr;
  }
};

template <typename T>
__device__ __forceinline__ bool sees(const ChunkShared<T>& shared, int32_t query, int32_t key) {
  return shared.query_tokens[query] >= 0 && shared.key_positions[key] >= 0 &&
         shared.key_tokens[key] <= shared.query_tokens[query];
}

// Elements first .. first + kTile of each row, 0 where there is none.
template <typename T, typename A>
__device__ __forceinline__ void load_slice(A (&slice)[kTile][kTile + 1],
                                           const T* const (&rows)[kTile], int32_t first,
                                           int32_t head_dim) {
  const int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int32_t j = 0; j < kPerThread; ++j) {
    const int32_t i = threadIdx.x / kWarpSize + j * (kTileThreads / kWarpSize);
    const bool present = rows[i] != nullptr && first + lane < head_dim;
    slice[i][lane] = present ? static_cast<A>(rows[i][first + lane]) : A{0};
  }
}

// The thread's part of the tile's logits: query threadIdx.x / 8 with keys threadIdx.x % 8, + 8, +
// 16, + 24. Begins with a barrier.
template <typename T, typename A>
__device__ __forceinline__ void tile_logits(const ChunkHead<T>& chunk, ChunkShared<T>& shared,
                                            A (&logits)[kPerThread]) {
  const int32_t query = threadIdx.x / kThreadsPerQuery, first_key = threadIdx.x % kThreadsPerQuery;
  const int32_t head_dim = chunk.p.sizes.head_dim;
#pragma unroll
  for (int32_t j = 0; j < kPerThread; ++j) logits[j] = 0;
  for (int32_t first = 0; first < head_dim; first += kTile) {
    __syncthreads();
    load_slice(shared.queries, shared.query_rows, first, head_dim);
    load_slice(shared.keys, shared.key_rows, first, head_dim);
    __syncthreads();
    A of_slice[kPerThread] = {};  // so that a long sum is one of short sums
#pragma unroll 8
    for (int32_t d = 0; d < kTile; ++d) {
      const A element = shared.queries[query][d];
#pragma unroll
      for (int32_t j = 0; j < kPerThread; ++j) {
        of_slice[j] += element * shared.keys[first_key + j * kThreadsPerQuery][d];
      }
    }
#pragma unroll
    for (int32_t j = 0; j < kPerThread; ++j) logits[j] += of_slice[j];
  }
}

// The head of a tile's query among all query heads.
template <typename T>
__device__ __forceinline__ int64_t query_head(const ChunkHead<T>& chunk, int32_t query) {
  return chunk.head * chunk.p.sizes.group_size + query % chunk.p.sizes.group_size;
}

// One block per (row, KV head), tile of queries and kOutputSlices slices of the output. It goes
// over the slots and then over the chunk's tokens, a tile at a time, with a running maximum. Eight
// neighbouring lanes share a query.
template <typename T>
__global__ void __launch_bounds__(kTileThreads, 2)
    chunk_attention(const __grid_constant__ ChunkAttention<T> p, int64_t query_tiles,
                    int64_t dim_tiles) {
  using A = Accumulator<T>;
  auto& shared = dynamic_shared<ChunkShared<T>>();
  const int64_t dim_tile = blockIdx.x % dim_tiles,
                query_tile = blockIdx.x / dim_tiles % query_tiles;
  const int64_t row_head = blockIdx.x / dim_tiles / query_tiles;
  const ChunkHead<T> chunk(p, row_head / p.sizes.num_kv_heads, row_head % p.sizes.num_kv_heads);
  const int32_t first_query = static_cast<int32_t>(query_tile) * kTile;
  if (first_query >= chunk.num_queries) return;
  const int32_t first_dim = static_cast<int32_t>(dim_tile) * kOutputSlices * kTile;
  const int32_t query = threadIdx.x / kThreadsPerQuery,
                lane_of_query = threadIdx.x % kThreadsPerQuery;
  const bool wants_output = p.output.data != nullptr;

  A maximum = -std::numeric_limits<A>::infinity(), sum = 0;
  A output[kOutputSlices][kPerThread] = {};
  chunk.load_queries(shared, first_query);

  const auto attend_tile = [&] {
    A logits[kPerThread];
    tile_logits(chunk, shared, logits);
    A tile_maximum = -std::numeric_limits<A>::infinity();
#pragma unroll
    for (int32_t j = 0; j < kPerThread; ++j) {
      const int32_t key = lane_of_query + j * kThreadsPerQuery;
      if (!sees(shared, query, key)) continue;
      logits[j] = p.terms.logit(logits[j], query_head(chunk, first_query + query),
                                shared.key_positions[key], shared.query_positions[query]);
      tile_maximum = Largest()(tile_maximum, logits[j]);
    }
    const A larger = Largest()(maximum, warp_reduce<kThreadsPerQuery>(tile_maximum, Largest()));
    const A subtracted = finite_or_zero(larger);
    const A shrink = exponential(maximum - subtracted);
    A tile_sum = 0;
#pragma unroll
    for (int32_t j = 0; j < kPerThread; ++j) {
      const int32_t key = lane_of_query + j * kThreadsPerQuery;
      const A weight = sees(shared, query, key) ? exponential(logits[j] - subtracted) : A{0};
      shared.weights[query][key] = weight;
      tile_sum += weight;
    }
    sum = sum * shrink + warp_reduce<kThreadsPerQuery>(tile_sum, Sum());
    maximum = larger;
    if (!wants_output) return;
#pragma unroll
    for (int32_t slice = 0; slice < kOutputSlices; ++slice) {
      const int32_t first = first_dim + slice * kTile;
      if (first >= p.sizes.head_dim) continue;
      __syncthreads();
      load_slice(shared.keys, shared.value_rows, first, p.sizes.head_dim);
      __syncthreads();
#pragma unroll
      for (int32_t j = 0; j < kPerThread; ++j) output[slice][j] *= shrink;
      for (int32_t key = 0; key < kTile; ++key) {
        // The value of a token that is not seen may be anything, also NaN.
        if (!sees(shared, query, key)) continue;
        const A weight = shared.weights[query][key];
#pragma unroll
        for (int32_t j = 0; j < kPerThread; ++j) {
          output[slice][j] += weight * shared.keys[key][lane_of_query + j * kThreadsPerQuery];
        }
      }
    }
  };

  for (int32_t first = 0; first < p.cache.capacity; first += kTile) {
    if (chunk.load_slots(shared, first)) attend_tile();
    __syncthreads();
  }
  const int32_t last_query = Smallest()(first_query + kTile, chunk.num_queries) - 1;
  for (int32_t first = 0; first <= last_query / p.sizes.group_size; first += kTile) {
    chunk.load_new_tokens(shared, first);
    attend_tile();
    __syncthreads();
  }

  if (first_query + query >= chunk.num_queries) return;
  if (dim_tile == 0 && lane_of_query == 0) {
    p.maximum[chunk.statistic(first_query + query)] = finite_or_zero(maximum);
    p.sum[chunk.statistic(first_query + query)] = sum;
  }
  if (!wants_output) return;
  T* const to = p.output.at(chunk.row, query_head(chunk, first_query + query),
                            chunk.column(shared.query_tokens[query]));
#pragma unroll
  for (int32_t slice = 0; slice < kOutputSlices; ++slice) {
#pragma unroll
    for (int32_t j = 0; j < kPerThread; ++j) {
      const int32_t d = first_dim + slice * kTile + lane_of_query + j * kThreadsPerQuery;
      if (d < p.sizes.head_dim)
        to[d * p.output_dim_stride] = static_cast<T>(output[slice][j] / sum);
    }
  }
}

// One block per (row, KV head) and tile of keys, slots first. It goes over the queries that see
// them a tile at a time; one warp then adds up, one key a lane, in order of token and head. All
// heads of a group pass through one block, because the maximum over them is taken before the sum
// over tokens.
template <typename T, typename Reduce>
__global__ void __launch_bounds__(kTileThreads, 4)
    chunk_scores(const __grid_constant__ ChunkAttention<T> p, int64_t slot_tiles,
                 int64_t new_tiles) {
  using A = Accumulator<T>;
  auto& shared = dynamic_shared<ChunkShared<T>>();
  const int64_t key_tile = blockIdx.x % (slot_tiles + new_tiles),
                row_head = blockIdx.x / (slot_tiles + new_tiles);
  const ChunkHead<T> chunk(p, row_head / p.sizes.num_kv_heads, row_head % p.sizes.num_kv_heads);
  const bool of_slots = key_tile < slot_tiles;
  const int32_t first_key =
      static_cast<int32_t>(of_slots ? key_tile : key_tile - slot_tiles) * kTile;
  const int32_t query = threadIdx.x / kThreadsPerQuery,
                lane_of_query = threadIdx.x % kThreadsPerQuery;
  const int32_t group_size = p.sizes.group_size;
  if (chunk.num_tokens == 0) return;
  if (of_slots) {
    if (!chunk.load_slots(shared, first_key)) return;
  } else {
    if (first_key >= chunk.num_tokens) return;
    chunk.load_new_tokens(shared, first_key);
  }

  // The first query that sees a key of the tile, at the start of a tile of queries.
  const int64_t first_seeing = of_slots ? 0 : int64_t{first_key} * group_size / kTile * kTile;
  A mass = 0, of_token = 0;
  for (int32_t first = static_cast<int32_t>(first_seeing); first < chunk.num_queries;
       first += kTile) {
    chunk.load_queries(shared, first);
    if (threadIdx.x < kTile && first + static_cast<int32_t>(threadIdx.x) < chunk.num_queries) {
      shared.maximum[threadIdx.x] = p.maximum[chunk.statistic(first + threadIdx.x)];
      shared.sum[threadIdx.x] = p.sum[chunk.statistic(first + threadIdx.x)];
    }
    A logits[kPerThread];
    tile_logits(chunk, shared, logits);
#pragma unroll
    for (int32_t j = 0; j < kPerThread; ++j) {
      const int32_t key = lane_of_query + j * kThreadsPerQuery;
      A weight = 0;
      if (sees(shared, query, key)) {
        const A logit = p.terms.logit(logits[j], query_head(chunk, first + query),
                                      shared.key_positions[key], shared.query_positions[query]);
        weight = exponential(logit - shared.maximum[query]) / shared.sum[query];
        if (p.row_factors != nullptr) {
          weight *= p.row_factors[chunk.num_tokens - 1 - (first + query) / group_size];
        }
      }
      shared.weights[query][key] = weight;
    }
    __syncthreads();
    if (threadIdx.x < kTile) {
      A of_tile = 0;  // so that a long sum is one of short sums
      const int32_t queries = Smallest()(kTile, chunk.num_queries - first);
      for (int32_t i = 0; i < queries; ++i) {
        const int32_t g = (first + i) % group_size;
        const A weight = shared.weights[i][threadIdx.x];
        of_token = g == 0 ? weight : Reduce::combine(of_token, weight);
        if (g == group_size - 1) of_tile += of_token;
      }
      mass += of_tile;
    }
  }

  if (threadIdx.x >= kTile || shared.key_positions[threadIdx.x] < 0) return;
  const int32_t key = first_key + static_cast<int32_t>(threadIdx.x);
  Received<A> received;
  received.mass = mass;
  received.together = chunk.num_tokens > 1;
  if (of_slots) {
    if (p.scoring.reads_values()) {
      received.value_norm =
          value_norm_of<A>(p.cache.v.at(chunk.row, chunk.head, key), p.sizes.head_dim);
    }
    const A kept = p.scoring.template kept<A>();
    for (int32_t i = 0; kept != 1 && i < chunk.num_tokens; ++i) received.kept *= kept;
    A* const score = p.cache.scores.at(chunk.row, chunk.head, key);
    *score = p.scoring.grown(*score, received);
    return;
  }
  const int32_t column = chunk.column(key);
  if (p.scoring.reads_values()) {
    received.value_norm =
        value_norm_of<A>(p.v_new.at(chunk.row, chunk.head, column), p.sizes.head_dim);
  }
  A score = p.scoring.first(received, chunk.head, shared.key_positions[threadIdx.x]);
  if (p.score_new.data != nullptr) score += *p.score_new.at(chunk.row, chunk.head, column);
  p.new_scores[row_head * p.sizes.num_new + column] = score;
}

inline int64_t tiles(int64_t count) { return (count + kTile - 1) / kTile; }

template <typename T>
cudaError_t launch_chunk_attention(const ChunkAttention<T>& attention, cudaStream_t stream) {
  const Sizes& sizes = attention.sizes;
  const int64_t query_tiles = tiles(int64_t{attention.chunk.size} * sizes.group_size);
  const int64_t slices = attention.output.data == nullptr ? 1 : tiles(sizes.head_dim);
  const int64_t dim_tiles = (slices + kOutputSlices - 1) / kOutputSlices;
  return launch(chunk_attention<T>, sizes.batch * sizes.num_kv_heads * query_tiles * dim_tiles,
                kTileThreads, sizeof(ChunkShared<T>), stream, attention, query_tiles, dim_tiles);
}

template <typename T>
cudaError_t launch_chunk_scores(const ChunkAttention<T>& attention, cudaStream_t stream) {
  const Sizes& sizes = attention.sizes;
  const auto kernel = attention.gqa_reduce == GqaReduce::kSum ? chunk_scores<T, SumReduce>
                                                              : chunk_scores<T, MaxReduce>;
  const int64_t slot_tiles = tiles(attention.cache.capacity),
                new_tiles = tiles(attention.chunk.size);
  return launch(kernel, sizes.batch * sizes.num_kv_heads * (slot_tiles + new_tiles), kTileThreads,
                sizeof(ChunkShared<T>), stream, attention, slot_tiles, new_tiles);
}

}  // namespace h2o::cuda
