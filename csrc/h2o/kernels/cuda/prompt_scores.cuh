#pragma once

#include "h2o/kernels/cuda/block.cuh"
#include "h2o/kernels/cuda/matrix.cuh"
#include "h2o/kernels/gqa_reduce.h"

// Scores of a prompt's tokens from 16-bit queries and keys, by tensor cores: what
// chunk_attention.cuh does for any type, in tiles of 64 queries and 64 keys. Logits are computed
// twice, once for each query's maximum and sum and once for the scores, and never stored.
namespace h2o::cuda {

inline constexpr int kPromptTile = 64;
inline constexpr int kPromptThreads = 256;
inline constexpr int kThreadsPerRow = kPromptThreads / kPromptTile;

// A query of a tile is one head of the group for one token; a tile holds whole tokens only.
// Followed by the tile of queries and the tile of keys, [kPromptTile][head_dim + kRowPadding] each.
struct alignas(32) PromptShared {
  float logits[kPromptTile][kPromptTile + 4];
  float maximum[kPromptTile], inverse_sum[kPromptTile];
  int32_t query_tokens[kPromptTile];  // -1: none
  int32_t query_positions[kPromptTile];
  int32_t key_positions[kPromptTile];
};

// One (row, KV head) of a prompt.
template <typename T>
struct PromptBlock {
  const ChunkAttention<T>& p;
  PromptShared& shared;
  int64_t row, head;
  int32_t num_tokens, tokens_per_tile;

  __device__ PromptBlock(const ChunkAttention<T>& attention, int64_t row_head)
      : p(attention),
        shared(dynamic_shared<PromptShared>()),
        row(row_head / p.sizes.num_kv_heads),
        head(row_head % p.sizes.num_kv_heads),
        num_tokens(*p.tokens.count(row)),
        tokens_per_tile(kPromptTile / p.sizes.group_size) {}

  __device__ int32_t stride() const { return p.sizes.head_dim + kRowPadding; }
  __device__ T* queries() const { return after<T>(shared); }
  __device__ T* keys() const { return queries() + kPromptTile * stride(); }
  __device__ int64_t q_head(int32_t query) const {
    return head * p.sizes.group_size + query % p.sizes.group_size;
  }
  // Where maximum and sum of a token's first query are.
  __device__ int64_t statistic(int32_t token) const {
    return ((row * p.sizes.num_kv_heads + head) * p.sizes.num_new + token) * p.sizes.group_size;
  }

  // Copies the rows that from(row of the tile) gives, 0 where that is null, to a tile. As all that
  // follows: by all threads, and a barrier must follow before what it writes is read.
  template <typename From>
  __device__ void load_tile(T* tile, From from) const {
    const int32_t vectors = p.sizes.head_dim / kVectorSize<T>;
    for (int32_t i = threadIdx.x; i < kPromptTile * vectors; i += kPromptThreads) {
      const int32_t tile_row = i / vectors, d = i % vectors * kVectorSize<T>;
      using Loaded = Vector<T, kVectorSize<T>>;
      const T* const source = from(tile_row);
      Loaded loaded = {};
      if (source != nullptr) load_vector(loaded, source + d, p.aligned, kVectorSize<T>);
      *reinterpret_cast<Loaded*>(tile + tile_row * stride() + d) = loaded;
    }
  }
  __device__ void load_queries(int32_t first_token) const {
    const auto token_of = [&](int32_t query) {
      const int32_t within = query / p.sizes.group_size, token = first_token + within;
      return within < tokens_per_tile && token < num_tokens ? token : -1;
    };
    load_tile(queries(), [&](int32_t query) -> const T* {
      const int32_t token = token_of(query);
      return token < 0 ? nullptr : p.query.at(row, q_head(query), p.tokens.columns(row)[token]);
    });
    if (threadIdx.x >= kPromptTile) return;
    const int32_t token = token_of(threadIdx.x);
    shared.query_tokens[threadIdx.x] = token;
    shared.query_positions[threadIdx.x] = token < 0 ? -1 : p.tokens.positions(row)[token];
  }
  __device__ void load_keys(int32_t first_token) const {
    load_tile(keys(), [&](int32_t key) -> const T* {
      const int32_t token = first_token + key;
      return token < num_tokens ? p.k_new.at(row, head, p.tokens.columns(row)[token]) : nullptr;
    });
    if (threadIdx.x >= kPromptTile) return;
    const int32_t token = first_token + static_cast<int32_t>(threadIdx.x);
    shared.key_positions[threadIdx.x] = token < num_tokens ? p.tokens.positions(row)[token] : -1;
  }

  // shared.logits = queries times keys: two warp matrices side by side for each warp.
  __device__ void multiply() const {
    namespace wmma = nvcuda::wmma;
    const int32_t warp = threadIdx.x / kWarpSize;
    const int32_t first_query = warp / 2 * kMatrix, first_key = warp % 2 * 2 * kMatrix;
    const auto* const of_queries = matrix_elements(queries() + first_query * stride());
    const auto* const of_keys = matrix_elements(keys() + first_key * stride());
    MatrixSum product[2];
    wmma::fill_fragment(product[0], 0.0f);
    wmma::fill_fragment(product[1], 0.0f);
    for (int32_t d = 0; d < p.sizes.head_dim; d += kMatrix) {
      MatrixA<T> a;
      wmma::load_matrix_sync(a, of_queries + d, stride());
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        MatrixB<T, wmma::col_major> b;
        wmma::load_matrix_sync(b, of_keys + i * kMatrix * stride() + d, stride());
        wmma::mma_sync(product[i], a, b, product[i]);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      wmma::store_matrix_sync(&shared.logits[first_query][first_key + i * kMatrix], product[i],
                              kPromptTile + 4, wmma::mem_row_major);
    }
  }
  __device__ float logit(int32_t query, int32_t key) const {
    return p.terms.logit(shared.logits[query][key], q_head(query), shared.key_positions[key],
                         shared.query_positions[query]);
  }
};

// One block per (row, KV head) and tile of queries: maximum and sum of each query, over a tile of
// keys at a time. Four neighbouring lanes share a query.
template <typename T>
__global__ void __launch_bounds__(kPromptThreads, 2)
    prompt_statistics(const __grid_constant__ ChunkAttention<T> p, int64_t query_tiles) {
  const PromptBlock<T> block(p, blockIdx.x / query_tiles);
  // The last tiles see the most keys: they begin first.
  const auto tile = static_cast<int32_t>(query_tiles - 1 - blockIdx.x % query_tiles);
  const int32_t first_token = tile * block.tokens_per_tile;
  if (first_token >= block.num_tokens) return;
  const int32_t query = threadIdx.x / kThreadsPerRow, lane_of_row = threadIdx.x % kThreadsPerRow;
  const int32_t last_token = Smallest()(first_token + block.tokens_per_tile, block.num_tokens) - 1;
  constexpr int kKeys = kPromptTile / kThreadsPerRow;

  float maximum = -std::numeric_limits<float>::infinity(), sum = 0;
  block.load_queries(first_token);
  for (int32_t first_key = 0; first_key <= last_token; first_key += kPromptTile) {
    block.load_keys(first_key);
    __syncthreads();
    block.multiply();
    __syncthreads();
    const int32_t seen = block.shared.query_tokens[query] - first_key;  // keys 0 .. seen
    float logits[kKeys];
    float tile_maximum = -std::numeric_limits<float>::infinity();
#pragma unroll
    for (int32_t j = 0; j < kKeys; ++j) {
      const int32_t key = lane_of_row + j * kThreadsPerRow;
      if (key > seen) continue;
      logits[j] = block.logit(query, key);
      tile_maximum = Largest()(tile_maximum, logits[j]);
    }
    const float larger = Largest()(maximum, warp_reduce<kThreadsPerRow>(tile_maximum, Largest()));
    const float subtracted = finite_or_zero(larger);
    float tile_sum = 0;
#pragma unroll
    for (int32_t j = 0; j < kKeys; ++j) {
      const int32_t key = lane_of_row + j * kThreadsPerRow;
      if (key <= seen) tile_sum += exponential(logits[j] - subtracted);
    }
    sum = sum * exponential(maximum - subtracted) + warp_reduce<kThreadsPerRow>(tile_sum, Sum());
    maximum = larger;
    __syncthreads();
  }
  const int32_t token = block.shared.query_tokens[query];
  if (token < 0 || lane_of_row != 0) return;
  const int64_t i = block.statistic(token) + query % p.sizes.group_size;
  p.maximum[i] = finite_or_zero(maximum);
  p.sum[i] = sum;
}

// One block per (row, KV head) and tile of keys: the score of each key, over a tile of the queries
// that see it at a time. All heads of a group pass through one block, because the maximum over them
// is taken before the sum over tokens. Four threads share a key and divide the tokens of a tile.
template <typename T, typename Reduce>
__global__ void __launch_bounds__(kPromptThreads, 2)
    prompt_scores(const __grid_constant__ ChunkAttention<T> p, int64_t key_tiles) {
  const PromptBlock<T> block(p, blockIdx.x / key_tiles);
  PromptShared& shared = block.shared;
  const int32_t first_key = static_cast<int32_t>(blockIdx.x % key_tiles) * kPromptTile;
  if (first_key >= block.num_tokens) return;
  const int32_t group_size = p.sizes.group_size;
  const int32_t key = threadIdx.x % kPromptTile, part = threadIdx.x / kPromptTile;

  float mass = 0;
  block.load_keys(first_key);
  for (int32_t first_token = first_key / block.tokens_per_tile * block.tokens_per_tile;
       first_token < block.num_tokens; first_token += block.tokens_per_tile) {
    block.load_queries(first_token);
    if (threadIdx.x < kPromptTile) {
      const int32_t i = threadIdx.x, token = first_token + i / group_size;
      if (i < block.tokens_per_tile * group_size && token < block.num_tokens) {
        const int64_t statistic = block.statistic(token) + i % group_size;
        shared.maximum[i] = p.maximum[statistic];
        shared.inverse_sum[i] = 1.0f / p.sum[statistic];
      }
    }
    __syncthreads();
    block.multiply();
    __syncthreads();
    float of_tile = 0;  // so that a long sum is one of short sums
    for (int32_t within = part; within < block.tokens_per_tile; within += kThreadsPerRow) {
      const int32_t token = first_token + within;
      if (token >= block.num_tokens || first_key + key > token) continue;
      float of_token = 0;
      for (int32_t g = 0; g < group_size; ++g) {
        const int32_t query = within * group_size + g;
        const float weight = exponential(block.logit(query, key) - shared.maximum[query]) *
                             shared.inverse_sum[query];
        of_token = g == 0 ? weight : Reduce::combine(of_token, weight);
      }
      of_tile += of_token;
    }
    mass += of_tile;
    __syncthreads();
  }

  shared.logits[part][key] = mass;
  __syncthreads();
  if (part != 0 || first_key + key >= block.num_tokens) return;
  for (int32_t other = 1; other < kThreadsPerRow; ++other) mass += shared.logits[other][key];
  const int64_t row_head = block.row * p.sizes.num_kv_heads + block.head;
  p.new_scores[row_head * p.sizes.num_new + p.tokens.columns(block.row)[first_key + key]] = mass;
}

template <typename T>
int64_t prompt_scores_shared_bytes(const Sizes& sizes) {
  return static_cast<int64_t>(sizeof(PromptShared)) + 2 * kPromptTile *
                                                          (int64_t{sizes.head_dim} + kRowPadding) *
                                                          static_cast<int64_t>(sizeof(T));
}

template <typename T>
bool has_prompt_scores(const Sizes& sizes, int64_t shared_limit) {
  return sizes.group_size <= kPromptTile && sizes.head_dim % kMatrix == 0 &&
         prompt_scores_shared_bytes<T>(sizes) <= shared_limit;
}

template <typename T>
cudaError_t launch_prompt_statistics(const ChunkAttention<T>& attention, cudaStream_t stream) {
  const Sizes& sizes = attention.sizes;
  const int64_t tokens_per_tile = kPromptTile / sizes.group_size;
  const int64_t query_tiles = (sizes.num_new + tokens_per_tile - 1) / tokens_per_tile;
  return launch(prompt_statistics<T>, sizes.batch * sizes.num_kv_heads * query_tiles,
                kPromptThreads, prompt_scores_shared_bytes<T>(sizes), stream, attention,
                query_tiles);
}

template <typename T>
cudaError_t launch_prompt_scores(const ChunkAttention<T>& attention, cudaStream_t stream) {
  const Sizes& sizes = attention.sizes;
  const auto kernel = attention.gqa_reduce == GqaReduce::kSum ? prompt_scores<T, SumReduce>
                                                              : prompt_scores<T, MaxReduce>;
  const int64_t key_tiles = (int64_t{sizes.num_new} + kPromptTile - 1) / kPromptTile;
  return launch(kernel, sizes.batch * sizes.num_kv_heads * key_tiles, kPromptThreads,
                prompt_scores_shared_bytes<T>(sizes), stream, attention, key_tiles);
}

}  // namespace h2o::cuda
