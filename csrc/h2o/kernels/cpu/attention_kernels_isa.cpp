// Compiled once per instruction set (CMakeLists.txt sets H2O_ISA and the compiler's flags).
// Whatever is emitted here may use instructions that the CPU lacks, so nothing with external
// linkage may be shared with other files: no standard containers or algorithms, everything in an
// unnamed namespace, one exported table.
#include "h2o/kernels/cpu/attention_kernels.h"
#include "h2o/kernels/gqa_reduce.h"

namespace h2o::cpu {
namespace {

constexpr int64_t kMaxHeadDim = 512;
constexpr int kMaxHeads = 8;           // query heads served per pass over the keys
constexpr int64_t kKeysPerBlock = 64;  // keys turned into a matrix at a time
template <typename A>
constexpr A kMinusInfinity = -static_cast<A>(__builtin_inf());

constexpr int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
template <typename A>
constexpr A larger(A a, A b) {
  return b > a ? b : a;  // a NaN in b is passed over: it shows in the sum
}

// An occupied slot's row, head_dim elements to `to`, padded with zeros to `padded`.
template <typename T>
void widen_row(const T* from, int64_t head_dim, int64_t padded, Accumulator<T>* to) {
  using A = Accumulator<T>;
  int64_t d = 0;
  for (; d + kLanes<A> <= head_dim; d += kLanes<A>) store<A>(to + d, load(from + d));
  if (d < padded) store<A>(to + d, load_first(from + d, head_dim - d));
}

// Rows are prefetched so many slots ahead, into the second-level cache: the processor itself does
// not look past a row's end.
constexpr int64_t kPrefetchSlots = 16;
template <typename T>
inline void prefetch(const T* from, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t d = 0; d < count; d += kLine) __builtin_prefetch(from + d, 0, 2);
}

// ---- One query per head over a range of slots
// -------------------------------------------------------------

// kSlots keys times kHeads queries; logits[head * stride + slot].
template <typename T, int kHeads, int kSlots>
void dot(const Accumulator<T>* query, int64_t padded, const T* const* keys, int64_t head_dim,
         Accumulator<T>* logits, int64_t stride) {
  using A = Accumulator<T>;
  Vector<A> sums[kHeads][kSlots] = {};
  const auto add = [&](const Vector<A>(&key)[kSlots], int64_t d) {
    H2O_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const Vector<A> of_head = load(query + h * padded + d);
      H2O_UNROLL
      for (int s = 0; s < kSlots; ++s) sums[h][s] += of_head * key[s];
    }
  };
  int64_t d = 0;
  for (; d + kLanes<A> <= head_dim; d += kLanes<A>) {
    Vector<A> key[kSlots];
    H2O_UNROLL
    for (int s = 0; s < kSlots; ++s) key[s] = load(keys[s] + d);
    add(key, d);
  }
  if (d < head_dim) {
    Vector<A> key[kSlots];
    H2O_UNROLL
    for (int s = 0; s < kSlots; ++s) key[s] = load_first(keys[s] + d, head_dim - d);
    add(key, d);
  }
  H2O_UNROLL
  for (int h = 0; h < kHeads; ++h) sum_lanes_of_each<A, kSlots>(sums[h], logits + h * stride);
}

// output[head, d...] = sum over slots of weight * v, kVectors vectors of d at a time.
template <typename T, int kHeads, int kVectors>
void weigh_columns(const Accumulator<T>* weights, int64_t weights_stride, const T* const* values,
                   int64_t count, int64_t d, Accumulator<T>* output, int64_t output_stride) {
  using A = Accumulator<T>;
  Vector<A> sums[kHeads][kVectors] = {};
  for (int64_t s = 0; s < count; ++s) {
    if (s + kPrefetchSlots < count) {
      prefetch(values[s + kPrefetchSlots] + d, kVectors * kLanes<A>);
    }
    Vector<A> value[kVectors];
    H2O_UNROLL
    for (int c = 0; c < kVectors; ++c) value[c] = load(values[s] + d + c * kLanes<A>);
    H2O_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const A weight = weights[h * weights_stride + s];
      H2O_UNROLL
      for (int c = 0; c < kVectors; ++c) sums[h][c] += value[c] * weight;
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int c = 0; c < kVectors; ++c) {
      store<A>(output + h * output_stride + d + c * kLanes<A>, sums[h][c]);
    }
  }
}

template <typename T, int kHeads>
void weigh(const Accumulator<T>* weights, int64_t weights_stride, const T* const* values,
           int64_t count, int64_t head_dim, Accumulator<T>* output, int64_t output_stride) {
  using A = Accumulator<T>;
  constexpr int kVectors = H2O_VECTOR_BYTES == 64 ? (kHeads <= 4 ? 4 : 2) : (kHeads <= 4 ? 2 : 1);
  int64_t d = 0;
  for (; d + kVectors * kLanes<A> <= head_dim; d += kVectors * kLanes<A>) {
    weigh_columns<T, kHeads, kVectors>(weights, weights_stride, values, count, d, output,
                                       output_stride);
  }
  for (; d + kLanes<A> <= head_dim; d += kLanes<A>) {
    weigh_columns<T, kHeads, 1>(weights, weights_stride, values, count, d, output, output_stride);
  }
  if (d == head_dim) return;
  for (int h = 0; h < kHeads; ++h) {
    Vector<A> sum = {};
    for (int64_t s = 0; s < count; ++s) {
      sum += load_first(values[s] + d, head_dim - d) * weights[h * weights_stride + s];
    }
    for (int64_t i = 0; d + i < head_dim; ++i) output[h * output_stride + d + i] = sum[i];
  }
}

template <typename T, int kHeads>
void attend_heads(const SlotRange<T>& range, int64_t first_head, const int32_t* slots,
                  int64_t count) {
  using A = Accumulator<T>;
  constexpr int kSlots = H2O_VECTOR_BYTES == 64 ? (kHeads <= 4 ? 4 : 2)
                                                : (kHeads <= 2   ? 4
                                                   : kHeads <= 4 ? 2
                                                                 : 1);
  const int64_t head_dim = range.head_dim;
  const int64_t padded = round_up(head_dim, kLanes<A>);
  A query[kHeads * kMaxHeadDim];
  for (int h = 0; h < kHeads; ++h) {
    widen_row(range.query[first_head + h], head_dim, padded, query + h * padded);
  }
  const T* rows[kSlotsPerRange];
  A weights[kHeads * kSlotsPerRange];
  for (int64_t s = 0; s < count; ++s) rows[s] = range.k[slots[s]];
  int64_t s = 0;
  for (; s + kSlots <= count; s += kSlots) {
    for (int64_t ahead = s + kPrefetchSlots; ahead < s + kPrefetchSlots + kSlots; ++ahead) {
      if (ahead < count) {
        prefetch(rows[ahead], head_dim);
      } else if (ahead < 2 * count) {
        prefetch(range.v[slots[ahead - count]], head_dim);
      }
    }
    dot<T, kHeads, kSlots>(query, padded, rows + s, head_dim, weights + s, kSlotsPerRange);
  }
  for (; s < count; ++s)
    dot<T, kHeads, 1>(query, padded, rows + s, head_dim, weights + s, kSlotsPerRange);
  for (int h = 0; h < kHeads; ++h) {
    A* const weight = weights + h * kSlotsPerRange;
    A maximum = kMinusInfinity<A>;
    for (int64_t i = 0; i < count; ++i) {
      weight[i] *= range.terms.scale;
      if (range.terms.alibi_slopes != nullptr) {
        const int64_t distance =
            int64_t{range.positions[slots[i] * range.positions_stride]} - range.query_position;
        weight[i] += range.terms.alibi_slopes[first_head + h] * static_cast<A>(distance);
      }
      maximum = larger(maximum, weight[i]);
    }
    range.maximum[first_head + h] = maximum;
    const A base = maximum == kMinusInfinity<A> ? A{0} : maximum;
    const int64_t whole = round_up(count, kLanes<A>);
    for (int64_t i = count; i < whole; ++i) weight[i] = kMinusInfinity<A>;
    Vector<A> sum = {};
    for (int64_t i = 0; i < whole; i += kLanes<A>) {
      const Vector<A> value = exponential(load(weight + i) - base);
      store<A>(weight + i, value);
      sum += value;
    }
    range.sum[first_head + h] = sum_lanes<A>(sum);
    A* const by_slot = range.weights + (first_head + h) * range.weights_stride;
    for (int64_t i = 0; i < count; ++i) by_slot[slots[i]] = weight[i];
  }
  for (int64_t i = 0; i < count; ++i) rows[i] = range.v[slots[i]];
  weigh<T, kHeads>(weights, kSlotsPerRange, rows, count, head_dim,
                   range.output + first_head * head_dim, head_dim);
}

template <typename T>
void attend_range(const SlotRange<T>& range) {
  using A = Accumulator<T>;
  int32_t slots[kSlotsPerRange];
  int64_t count = 0;
  for (int64_t s = range.begin; s < range.end; ++s) {
    if (range.positions[s * range.positions_stride] >= 0) slots[count++] = static_cast<int32_t>(s);
  }
  if (count == 0) {
    for (int64_t h = 0; h < range.group_size; ++h) {
      range.maximum[h] = kMinusInfinity<A>;
      range.sum[h] = 0;
      for (int64_t d = 0; d < range.head_dim; ++d) range.output[h * range.head_dim + d] = 0;
    }
    return;
  }
  for (int64_t h = 0; h < range.group_size; h += kMaxHeads) {
    switch (range.group_size - h) {
      case 1:
        attend_heads<T, 1>(range, h, slots, count);
        break;
      case 2:
        attend_heads<T, 2>(range, h, slots, count);
        break;
      case 3:
        attend_heads<T, 3>(range, h, slots, count);
        break;
      case 4:
        attend_heads<T, 4>(range, h, slots, count);
        break;
      case 5:
        attend_heads<T, 5>(range, h, slots, count);
        break;
      case 6:
        attend_heads<T, 6>(range, h, slots, count);
        break;
      case 7:
        attend_heads<T, 7>(range, h, slots, count);
        break;
      default:
        attend_heads<T, kMaxHeads>(range, h, slots, count);
        break;
    }
  }
}

// ---- The ranges and the new token together
// ------------------------------------------------------------------

template <typename T, typename Reduce>
void merge_step_with(StepMerge<T>& step) {
  using A = Accumulator<T>;
  const int64_t group_size = step.group_size, head_dim = step.head_dim;
  A* const factors =
      step.scratch;  // [num_ranges, group_size]: turns a range's weights into softmax weights
  A* const new_weights = factors + step.num_ranges * group_size;  // [group_size]
  A* const output = new_weights + group_size;                     // [head_dim]
  const int64_t padded = round_up(head_dim, kLanes<A>);
  A query[kMaxHeadDim];
  for (int64_t h = 0; h < group_size; ++h) {
    widen_row(step.query[h], head_dim, padded, query);
    const T* const key = step.k_new;
    A logit;
    dot<T, 1, 1>(query, padded, &key, head_dim, &logit, 1);
    logit *= step.terms.scale;  // its distance to itself is 0: no ALiBi
    A maximum = larger(kMinusInfinity<A>, logit);
    for (int64_t r = 0; r < step.num_ranges; ++r) {
      maximum = larger(maximum, step.maximum[r * group_size + h]);
    }
    A total = 0;
    for (int64_t r = 0; r < step.num_ranges; ++r) {
      // An empty range has a sum of 0, and so has one in which every logit is -inf.
      const A factor = exponential(step.maximum[r * group_size + h] - maximum);
      factors[r * group_size + h] = factor;
      total += step.sum[r * group_size + h] * factor;
    }
    new_weights[h] = exponential(logit - maximum);
    total += new_weights[h];
    for (int64_t r = 0; r < step.num_ranges; ++r) factors[r * group_size + h] /= total;
    new_weights[h] /= total;
    for (int64_t d = 0; d < head_dim; ++d) output[d] = 0;
    for (int64_t r = 0; r < step.num_ranges; ++r) {
      const A* const partial = step.partial + (r * group_size + h) * head_dim;
      const A factor = factors[r * group_size + h];
      if (step.sum[r * group_size + h] == 0) continue;
      for (int64_t d = 0; d < head_dim; ++d) output[d] += partial[d] * factor;
    }
    widen_row(step.v_new, head_dim, padded, query);
    for (int64_t d = 0; d < head_dim; ++d) {
      narrow(output[d] + query[d] * new_weights[h], step.output[h] + d);
    }
  }
  for (int64_t s = 0; s < step.capacity; ++s) {
    if (step.positions[s * step.positions_stride] < 0) continue;
    const A* const factor = factors + s / kSlotsPerRange * group_size;
    A mass = step.weights[s] * factor[0];
    for (int64_t h = 1; h < group_size; ++h) {
      mass = Reduce::combine(mass, step.weights[h * step.weights_stride + s] * factor[h]);
    }
    step.scores[s * step.scores_stride] += mass;
  }
  A mass = new_weights[0];
  for (int64_t h = 1; h < group_size; ++h) mass = Reduce::combine(mass, new_weights[h]);
  step.new_score = mass;
}

template <typename T>
void merge_step(StepMerge<T>& step) {
  step.gqa_reduce == GqaReduce::kSum ? merge_step_with<T, SumReduce>(step)
                                     : merge_step_with<T, MaxReduce>(step);
}

// ---- Tiles of queries
// ---------------------------------------------------------------------------------------

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
        sums[i][j] = Vector<A>{};
      }
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<A> right[kVectors];
    for (int j = 0; j < kVectors; ++j) right[j] = load(b + k * b_stride + j * kLanes<A>);
    for (int i = 0; i < kRows; ++i) {
      const A left = a[i * a_stride + k];
      for (int j = 0; j < kVectors; ++j) sums[i][j] += right[j] * left;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) store<A>(c + i * c_stride + j * kLanes<A>, sums[i][j]);
  }
}

template <typename A, int kVectors, bool kAdd>
void multiply_rows(const A* a, int64_t a_stride, const A* b, int64_t b_stride, A* c,
                   int64_t c_stride, int64_t rows, int64_t depth) {
  constexpr int kRows = H2O_VECTOR_BYTES == 16 ? 3 : 6;
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
  constexpr int kVectors = H2O_VECTOR_BYTES == 64 ? 4 : 2;
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
  const int64_t padded = round_up(head_dim, kLanes<A>);
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
                padded, query + (h * tile.count + i) * padded);
    }
  }
  for (int64_t key = 0; key < num_keys; key += kKeysPerBlock) {
    const int64_t count = num_keys - key < kKeysPerBlock ? num_keys - key : kKeysPerBlock;
    for (int64_t k = 0; k < kKeysPerBlock; ++k) {
      if (k < count) {
        widen_row(source(tile.k, tile.k_new, key + k), head_dim, padded, row);
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
      Vector<A> sums = {};
      for (int64_t k = 0; k < weights_stride; k += kLanes<A>) {
        const Vector<A> value = exponential(load(weight + k) - maximum);
        store<A>(weight + k, value);
        sums += value;
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
      widen_row(source(tile.v, tile.v_new, key + k), head_dim, padded, block + k * padded);
    }
    multiply<A, true>(weights + key, weights_stride, block, padded, output, padded, rows, padded,
                      count);
  }
  for (int64_t key = seen_by_all; key < num_keys; ++key) {
    widen_row(source(tile.v, tile.v_new, key), head_dim, padded, row);
    for (int64_t h = 0; h < group_size; ++h) {
      for (int64_t i = key - seen_by_all + 1; i < tile.count; ++i) {
        const A weight = weights[(h * tile.count + i) * weights_stride + key];
        A* const to = output + (h * tile.count + i) * padded;
        for (int64_t d = 0; d < padded; d += kLanes<A>) {
          store<A>(to + d, load(to + d) + load(row + d) * weight);
        }
      }
    }
  }
  for (int64_t h = 0; h < group_size; ++h) {
    for (int64_t i = 0; i < tile.count; ++i) {
      T* const to = tile.output[tile.columns[tile.first + i]] + h * tile.output_head_stride;
      for (int64_t d = 0; d < head_dim; ++d)
        narrow(output[(h * tile.count + i) * padded + d], to + d);
    }
  }
}

template <typename T>
void attend_tile(const QueryTile<T>& tile) {
  tile.gqa_reduce == GqaReduce::kSum ? attend_tile_with<T, SumReduce>(tile)
                                     : attend_tile_with<T, MaxReduce>(tile);
}

template <typename T>
constexpr AttentionKernels<T> kTable = {attend_range<T>, merge_step<T>, attend_tile<T>};

}  // namespace

// The only names that leave this file; H2O_ISA makes them distinct.
namespace H2O_ISA {
extern const AttentionKernels<float> float_kernels;
extern const AttentionKernels<double> double_kernels;
extern const AttentionKernels<Float16> float16_kernels;
extern const AttentionKernels<BFloat16> bfloat16_kernels;
const AttentionKernels<float> float_kernels = kTable<float>;
const AttentionKernels<double> double_kernels = kTable<double>;
const AttentionKernels<Float16> float16_kernels = kTable<Float16>;
const AttentionKernels<BFloat16> bfloat16_kernels = kTable<BFloat16>;
}  // namespace H2O_ISA

}  // namespace h2o::cpu
