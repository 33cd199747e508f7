// Compiled once per instruction set, like decode_kernels_isa.cpp.
#include "h2o/kernels/cpu/chunk_kernels.h"

#include "h2o/kernels/cpu/vector.h"
#include "h2o/kernels/gqa_reduce.h"

namespace h2o::cpu {
namespace {

constexpr int64_t kKeysPerBlock = 64;  // keys turned into a matrix at a time

// A row, head_dim elements to `to`, filled up with zeros to a whole pair.
template <typename T>
void widen_row(const T* from, int64_t head_dim, Accumulator<T>* to) {
  using A = Accumulator<T>;
  for_each_pair(from, head_dim, [to](const Pair<A>& pair, int64_t d) {
    const Pair<A> numbers = in_order<T>(pair);
    store(to + d, numbers.first);
    store(to + d + kLanes<A>, numbers.second);
  });
}

// c[rows, columns] (+)= a[rows, depth] b[depth, columns], row-major; columns a multiple of kLanes.
template <typename A, int kRows, int kVectors, bool kAdd>
void multiply_block(const A* a, int64_t a_stride, const A* b, int64_t b_stride, A* c,
                    int64_t c_stride, int64_t depth) {
  Vector<A> sums[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kAdd) {
        sums[i][j] = load(c + i * c_stride + j * kLanes<A>);
      } else {
        sums[i][j] = Vector<A>(0);
      }
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<A> right[kVectors];
    for (int j = 0; j < kVectors; ++j) right[j] = load(b + k * b_stride + j * kLanes<A>);
    for (int i = 0; i < kRows; ++i) {
      const Vector<A> left(a[i * a_stride + k]);
      for (int j = 0; j < kVectors; ++j) sums[i][j] = at::vec::fmadd(right[j], left, sums[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) store<A>(c + i * c_stride + j * kLanes<A>, sums[i][j]);
  }
}

template <typename A, int kVectors, bool kAdd>
void multiply_rows(const A* a, int64_t a_stride, const A* b, int64_t b_stride, A* c,
                   int64_t c_stride, int64_t rows, int64_t depth) {
  constexpr int kRows = 6;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) {
    multiply_block<A, kRows, kVectors, kAdd>(a + i * a_stride, a_stride, b, b_stride,
                                             c + i * c_stride, c_stride, depth);
  }
  for (; i < rows; ++i) {
    multiply_block<A, 1, kVectors, kAdd>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride,
                                         c_stride, depth);
  }
}

template <typename A, bool kAdd>
void multiply(const A* a, int64_t a_stride, const A* b, int64_t b_stride, A* c, int64_t c_stride,
              int64_t rows, int64_t columns, int64_t depth) {
  constexpr int kVectors = kManyRegisters ? 4 : 2;
  int64_t j = 0;
  for (; j + kVectors * kLanes<A> <= columns; j += kVectors * kLanes<A>) {
    multiply_rows<A, kVectors, kAdd>(a, a_stride, b + j, b_stride, c + j, c_stride, rows, depth);
  }
  for (; j < columns; j += kLanes<A>) {
    multiply_rows<A, 1, kAdd>(a, a_stride, b + j, b_stride, c + j, c_stride, rows, depth);
  }
}

template <typename T, typename Reduce>
void attend_tile_with(const QueryTile<T>& tile) {
  using A = Accumulator<T>;
  const int64_t group_size = tile.group_size, head_dim = tile.head_dim;
  const int64_t padded = round_up(head_dim, kPairLanes<A>);
  const int64_t rows = group_size * tile.count;  // head-major: head * count + token
  const int64_t num_keys =
      tile.num_cached + tile.first + tile.count;  // that the tile's last token sees
  const int64_t weights_stride = round_up(num_keys, kKeysPerBlock);
  A* const query = tile.scratch;                  // [rows, padded]
  A* const output = query + rows * padded;        // [rows, padded]
  A* const block = output + rows * padded;        // keys [padded, 64] or values [64, padded]
  A* const row = block + padded * kKeysPerBlock;  // [padded]
  A* const weights = row + padded;                // [rows, weights_stride]
  const auto source = [&](const VectorRows<const T>& cached, const VectorRows<const T>& fresh,
                          int64_t key) {
    return key < tile.num_cached ? cached[tile.slots[key]]
                                 : fresh[tile.columns[key - tile.num_cached]];
  };

  for (int64_t h = 0; h < group_size; ++h) {
    for (int64_t i = 0; i < tile.count; ++i) {
      widen_row(tile.query[tile.columns[tile.first + i]] + h * tile.query_head_stride, head_dim,
                query + (h * tile.count + i) * padded);
    }
  }
  for (int64_t key = 0; key < num_keys; key += kKeysPerBlock) {
    const int64_t count = num_keys - key < kKeysPerBlock ? num_keys - key : kKeysPerBlock;
    for (int64_t k = 0; k < kKeysPerBlock; ++k) {
      if (k < count) {
        widen_row(source(tile.k, tile.k_new, key + k), head_dim, row);
        for (int64_t d = 0; d < head_dim; ++d) block[d * kKeysPerBlock + k] = row[d];
      } else {
        for (int64_t d = 0; d < head_dim; ++d) block[d * kKeysPerBlock + k] = 0;
      }
    }
    multiply<A, false>(query, padded, block, kKeysPerBlock, weights + key, weights_stride, rows,
                       kKeysPerBlock, head_dim);
  }
  for (int64_t h = 0; h < group_size; ++h) {
    for (int64_t i = 0; i < tile.count; ++i) {
      A* const weight = weights + (h * tile.count + i) * weights_stride;
      const int64_t visible = tile.num_cached + tile.first + i + 1;
      A maximum = kMinusInfinity<A>;
      if (tile.terms.alibi_slopes != nullptr) {
        const A slope = tile.terms.alibi_slopes[h];
        const int64_t position = tile.new_positions[tile.first + i];
        for (int64_t k = 0; k < visible; ++k) {
          const int64_t key_position = k < tile.num_cached
                                           ? tile.cached_positions[k]
                                           : tile.new_positions[k - tile.num_cached];
          weight[k] =
              weight[k] * tile.terms.scale + slope * static_cast<A>(key_position - position);
        }
      } else {
        for (int64_t k = 0; k < visible; ++k) weight[k] *= tile.terms.scale;
      }
      for (int64_t k = 0; k < visible; ++k) maximum = larger(maximum, weight[k]);
      for (int64_t k = visible; k < weights_stride; ++k) weight[k] = kMinusInfinity<A>;
      Vector<A> sums(0);
      for (int64_t k = 0; k < weights_stride; k += kLanes<A>) {
        const Vector<A> value = exponential(load(weight + k) - Vector<A>(maximum));
        store<A>(weight + k, value);
        sums = sums + value;
      }
      const A total = sum_lanes<A>(sums);
      for (int64_t k = 0; k < visible; ++k) weight[k] /= total;
      for (int64_t k = visible; k < weights_stride; ++k) weight[k] = 0;
    }
  }
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t visible = tile.num_cached + tile.first + i + 1;
    const A* const first_head = weights + i * weights_stride;
    for (int64_t k = 0; k < visible; ++k) {
      A mass = first_head[k];
      for (int64_t h = 1; h < group_size; ++h) {
        mass = Reduce::combine(mass, first_head[h * tile.count * weights_stride + k]);
      }
      tile.column_sums[k] += mass;
    }
  }
  if (tile.output.data == nullptr) return;
  for (int64_t i = 0; i < rows * padded; ++i) output[i] = 0;
  // The keys that every query sees go in blocks; of the others a query must not even see a NaN
  // times 0.
  const int64_t seen_by_all = tile.num_cached + tile.first + 1;
  for (int64_t key = 0; key < seen_by_all; key += kKeysPerBlock) {
    const int64_t count = seen_by_all - key < kKeysPerBlock ? seen_by_all - key : kKeysPerBlock;
    for (int64_t k = 0; k < count; ++k) {
      widen_row(source(tile.v, tile.v_new, key + k), head_dim, block + k * padded);
    }
    multiply<A, true>(weights + key, weights_stride, block, padded, output, padded, rows, padded,
                      count);
  }
  for (int64_t key = seen_by_all; key < num_keys; ++key) {
    widen_row(source(tile.v, tile.v_new, key), head_dim, row);
    for (int64_t h = 0; h < group_size; ++h) {
      for (int64_t i = key - seen_by_all + 1; i < tile.count; ++i) {
        const A weight = weights[(h * tile.count + i) * weights_stride + key];
        A* const to = output + (h * tile.count + i) * padded;
        for (int64_t d = 0; d < padded; d += kLanes<A>) {
          store<A>(to + d, at::vec::fmadd(load(row + d), Vector<A>(weight), load(to + d)));
        }
      }
    }
  }
  for (int64_t h = 0; h < group_size; ++h) {
    for (int64_t i = 0; i < tile.count; ++i) {
      T* const to = tile.output[tile.columns[tile.first + i]] + h * tile.output_head_stride;
      const A* const from = output + (h * tile.count + i) * padded;
      for (int64_t d = 0; d < head_dim; d += kPairLanes<A>) {
        store_first<T>(to + d, {load(from + d), load(from + d + kLanes<A>)},
                       head_dim - d < kPairLanes<A> ? head_dim - d : kPairLanes<A>);
      }
    }
  }
}

template <typename T>
void attend_tile(const QueryTile<T>& tile) {
  tile.gqa_reduce == GqaReduce::kSum ? attend_tile_with<T, SumReduce>(tile)
                                     : attend_tile_with<T, MaxReduce>(tile);
}

template <typename T>
constexpr ChunkKernels<T> kChunkKernels = {attend_tile<T>};

}  // namespace

namespace H2O_ISA {
template <typename T>
const ChunkKernels<T>& chunk_kernels();
template <>
const ChunkKernels<float>& chunk_kernels() {
  return kChunkKernels<float>;
}
template <>
const ChunkKernels<double>& chunk_kernels() {
  return kChunkKernels<double>;
}
template <>
const ChunkKernels<at::Half>& chunk_kernels() {
  return kChunkKernels<at::Half>;
}
template <>
const ChunkKernels<at::BFloat16>& chunk_kernels() {
  return kChunkKernels<at::BFloat16>;
}
}  // namespace H2O_ISA

}  // namespace h2o::cpu
