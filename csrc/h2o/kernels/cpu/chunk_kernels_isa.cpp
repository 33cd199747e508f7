// Compiled once per instruction set, like decode_kernels_isa.cpp.
#include "h2o/kernels/cpu/chunk_kernels.h"

#include "h2o/kernels/cpu/vector.h"
#include "h2o/kernels/gqa_reduce.h"

namespace h2o::cpu {
namespace {

// The queries of a tile are the lanes: a key's logits, one per query, lie side by side. So K and V
// are read as they are stored, a number at a time against vectors of queries; nothing is transposed
// but the tile itself, and maxima and sums over the keys need no reduction across lanes.

// Of a product's result, what stays in registers: rows (keys or dimensions) times vectors of
// queries. Compilers keep ATen's plain arrays in registers for a single row alone.
#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
constexpr int kMostRows = 6, kMostVectors = 4;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int kMostRows = 6, kMostVectors = 2;
#else
constexpr int kMostRows = 1, kMostVectors = 4;
#endif

// Calls body(first, n) for parts of `count`: n, a constant, is kMost as often as that fits, then
// what is left.
template <int kMost, typename Body>
inline void in_parts(int64_t count, const Body& body) {
  int64_t first = 0;
  for (; first + kMost <= count; first += kMost) body(first, std::integral_constant<int, kMost>{});
  if constexpr (kMost > 1) {
    if (first < count) {
      in_parts<kMost - 1>(count - first, [&](int64_t next, auto n) { body(first + next, n); });
    }
  }
}

// What one step of q . k takes of a key: a number,
template <typename A>
struct Number {
  using Stored = A;
  static constexpr int64_t kCount = 1;
  static Vector<A> spread(const A* from) { return Vector<A>(*from); }
  static Vector<A> add(const Vector<A>& key, const Vector<A>& query, const Vector<A>& sum) {
    return at::vec::fmadd(query, key, sum);
  }
};
#if defined(__AVX512BF16__)
// or two neighbours, whose products are added to a float32 sum. Subnormal numbers count as zero.
struct BFloat16Pair {
  using Stored = at::BFloat16;
  static constexpr int64_t kCount = 2;
  static Vector<float> spread(const at::BFloat16* from) {
    int32_t pair;
    __builtin_memcpy(&pair, from, sizeof(pair));
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
  }
  static Vector<float> add(const Vector<float>& key, const Vector<float>& query,
                           const Vector<float>& sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)(__m512)query, (__m512bh)(__m512)key);
  }
};
#endif

// logits[key, lane] = scale * sum over d of keys[key][d] * query[d, lane]
template <typename Step, int kKeys, int kVectors, typename A>
[[gnu::flatten]] void multiply_keys(const typename Step::Stored* const* keys, int64_t head_dim,
                                    const A* query, int64_t width, A scale, A* logits) {
  Vector<A> sums[kKeys][kVectors];
  const typename Step::Stored* rows[kKeys];
  H2O_UNROLL
  for (int i = 0; i < kKeys; ++i) {
    rows[i] = keys[i];
    H2O_UNROLL
    for (int j = 0; j < kVectors; ++j) sums[i][j] = Vector<A>(0);
  }
  for (int64_t d = 0; d < head_dim; d += Step::kCount, query += width) {
    H2O_UNROLL
    for (int i = 0; i < kKeys; ++i) {
      const Vector<A> key = Step::spread(rows[i] + d);
      H2O_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        sums[i][j] = Step::add(key, load(query + j * kLanes<A>), sums[i][j]);
      }
    }
  }
  H2O_UNROLL
  for (int i = 0; i < kKeys; ++i) {
    H2O_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      store(logits + i * width + j * kLanes<A>, sums[i][j] * Vector<A>(scale));
    }
  }
}

// output[i, lane] += sum over keys of values[key][d + i] * weights[key, lane], i < kDims
template <int kDims, int kVectors, typename A>
[[gnu::flatten]] void multiply_values(const A* const* values, int64_t d, int64_t count,
                                      const A* weights, int64_t width, A* output) {
  Vector<A> sums[kDims][kVectors];
  H2O_UNROLL
  for (int i = 0; i < kDims; ++i) {
    H2O_UNROLL
    for (int j = 0; j < kVectors; ++j) sums[i][j] = Vector<A>(0);
  }
  for (int64_t key = 0; key < count; ++key, weights += width) {
    const A* const row = values[key] + d;
    H2O_UNROLL
    for (int i = 0; i < kDims; ++i) {
      const Vector<A> value(row[i]);
      H2O_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        sums[i][j] = at::vec::fmadd(load(weights + j * kLanes<A>), value, sums[i][j]);
      }
    }
  }
  H2O_UNROLL
  for (int i = 0; i < kDims; ++i) {
    H2O_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      A* const to = output + i * width + j * kLanes<A>;
      store(to, load(to) + sums[i][j]);
    }
  }
}

// The keys are taken in blocks, for which the whole tile's logits stay in the first-level cache.
template <typename T>
class TileAttention {
 public:
  using A = Accumulator<T>;

  explicit TileAttention(const QueryTile<T>& tile)
      : tile_(tile),
        head_dim_(tile.head_dim),
        rows_(tile.group_size * tile.count),
        width_(round_up(rows_, kLanes<A>)),
        num_keys_(tile.num_cached + tile.first + tile.count),
        seen_by_all_(tile.num_cached + tile.first + 1),
        padded_(round_up(head_dim_, kPairLanes<A>)),
        query_(tile.scratch),
        output_(query_ + head_dim_ * width_),
        maximum_(output_ + head_dim_ * width_),
        sum_(maximum_ + width_),
        slope_(sum_ + width_),
        position_(slope_ + width_),
        block_(position_ + width_),
        zeros_(block_ + kKeysPerTileBlock * padded_),
        weights_(zeros_ + padded_) {}

  template <typename Reduce>
  void run() {
    const bool with_output = tile_.output.data != nullptr;
    spread_queries();
    for_each_block([this](int64_t key, int64_t count) {
      multiply_by_keys(key, count);
      if (tile_.terms.alibi_slopes != nullptr) add_alibi(key, count);
      hide(key, count);
      update_maximum(key, count);
    });
    if (with_output) fill(output_, head_dim_ * width_, 0);
    for_each_block([this, with_output](int64_t key, int64_t count) {
      exponentiate(key, count);
      if (with_output) multiply_by_values(key, count);
    });
    for (int64_t lane = 0; lane < width_; ++lane) sum_[lane] = lane < rows_ ? 1 / sum_[lane] : 0;
    if (with_output) write_output();
    if (tile_.row_factors != nullptr) scale_rows();
    add_column_sums<Reduce>();
  }

 private:
  static void fill(A* to, int64_t count, A value) {
    for (int64_t i = 0; i < count; ++i) to[i] = value;
  }
  A* weights(int64_t key) const { return weights_ + key * width_; }
  // The first of the tile's tokens that sees a key.
  int64_t first_to_see(int64_t key) const {
    return key < seen_by_all_ ? 0 : key - seen_by_all_ + 1;
  }

  // Blocks of keys that every query sees, then of the last tokens, which some queries do not see.
  template <typename Body>
  void for_each_block(const Body& body) const {
    for (int64_t key = 0; key < num_keys_;) {
      const int64_t end = key < seen_by_all_ ? seen_by_all_ : num_keys_;
      const int64_t count = smaller(end - key, kKeysPerTileBlock);
      body(key, count);
      key += count;
    }
  }

  const T* row_of(const VectorRows<const T>& cached, const VectorRows<const T>& fresh,
                  int64_t key) const {
    return key < tile_.num_cached ? cached[tile_.slots[key]]
                                  : fresh[tile_.columns[key - tile_.num_cached]];
  }
  // Filled up with zeros to a whole pair.
  [[gnu::flatten]] void widen_row(const T* from, A* to) const {
    for_each_pair(from, head_dim_,
                  [to](const Pair<A>& pair, int64_t d) { store_pair(to + d, in_order<T>(pair)); });
  }
  // The rows of `count` keys as numbers: where they are, or widened into block_.
  void read_rows(const VectorRows<const T>& cached, const VectorRows<const T>& fresh, int64_t key,
                 int64_t count, const A** rows) const {
    for (int64_t k = 0; k < count; ++k) {
      const T* const from = row_of(cached, fresh, key + k);
      if constexpr (kIsStoredWide<T>) {
        rows[k] = from;
      } else {
        rows[k] = block_ + k * padded_;
        widen_row(from, block_ + k * padded_);
      }
    }
  }

  bool takes_pairs() const {
#if defined(__AVX512BF16__)
    return std::is_same_v<T, at::BFloat16> && head_dim_ % 2 == 0;
#else
    return false;
#endif
  }

  // Lane h * count + i is head h of the tile's token i. Those after the last one repeat it: no NaN
  // joins a sum in which there is none.
  void spread_queries() const {
    for (int64_t lane = 0; lane < width_; ++lane) {
      const int64_t row = smaller(lane, rows_ - 1);
      const int64_t head = row / tile_.count, token = tile_.first + row % tile_.count;
      const T* const from = tile_.query[tile_.columns[token]] + head * tile_.query_head_stride;
      if (takes_pairs()) {
        for (int64_t i = 0; i < head_dim_ / 2; ++i) {
          __builtin_memcpy(query_ + i * width_ + lane, from + 2 * i, sizeof(A));
        }
      } else {
        widen_row(from, block_);
        for (int64_t d = 0; d < head_dim_; ++d) query_[d * width_ + lane] = block_[d];
      }
      maximum_[lane] = kMinusInfinity<A>;
      sum_[lane] = 0;
      if (tile_.terms.alibi_slopes != nullptr) {
        slope_[lane] = tile_.terms.alibi_slopes[head];
        position_[lane] = from_first_token(tile_.new_positions[token]);
      }
    }
  }
  A from_first_token(int32_t position) const {
    return static_cast<A>(int64_t{position} - tile_.new_positions[0]);
  }

  void multiply_by_keys(int64_t key, int64_t count) const {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      if (takes_pairs()) {
        const T* rows[kKeysPerTileBlock];
        for (int64_t k = 0; k < count; ++k) rows[k] = row_of(tile_.k, tile_.k_new, key + k);
        multiply_by_rows<BFloat16Pair>(rows, key, count);
        return;
      }
    }
#endif
    const A* rows[kKeysPerTileBlock];
    read_rows(tile_.k, tile_.k_new, key, count, rows);
    multiply_by_rows<Number<A>>(rows, key, count);
  }
  template <typename Step>
  void multiply_by_rows(const typename Step::Stored* const* rows, int64_t key,
                        int64_t count) const {
    in_parts<kMostVectors>(width_ / kLanes<A>, [&](int64_t vector, auto vectors) {
      const int64_t lane = vector * kLanes<A>;
      in_parts<kMostRows>(count, [&](int64_t k, auto keys) {
        multiply_keys<Step, keys(), vectors()>(rows + k, head_dim_, query_ + lane, width_,
                                               tile_.terms.scale, weights(key + k) + lane);
      });
    });
  }

  void add_alibi(int64_t key, int64_t count) const {
    for (int64_t k = key; k < key + count; ++k) {
      const Vector<A> position(from_first_token(k < tile_.num_cached
                                                    ? tile_.cached_positions[k]
                                                    : tile_.new_positions[k - tile_.num_cached]));
      for (int64_t lane = 0; lane < width_; lane += kLanes<A>) {
        A* const logit = weights(k) + lane;
        const Vector<A> distance = position - load(position_ + lane);
        store(logit, at::vec::fmadd(load(slope_ + lane), distance, load(logit)));
      }
    }
  }

  // Queries before a key do not see it.
  void hide(int64_t key, int64_t count) const {
    for (int64_t k = key; k < key + count; ++k) {
      for (int64_t h = 0; h < tile_.group_size; ++h) {
        fill(weights(k) + h * tile_.count, first_to_see(k), kMinusInfinity<A>);
      }
    }
  }

  void update_maximum(int64_t key, int64_t count) const {
    for (int64_t lane = 0; lane < width_; lane += kLanes<A>) {
      Vector<A> maximum = load(maximum_ + lane);
      for (int64_t k = key; k < key + count; ++k) {
        maximum = at::vec::clamp_min(maximum, load(weights(k) + lane));
      }
      store(maximum_ + lane, maximum);
    }
  }

  void exponentiate(int64_t key, int64_t count) const {
    for (int64_t lane = 0; lane < width_; lane += kLanes<A>) {
      const Vector<A> maximum = load(maximum_ + lane);
      Vector<A> sum = load(sum_ + lane);
      for (int64_t k = key; k < key + count; ++k) {
        const Vector<A> weight = exponential(load(weights(k) + lane) - maximum);
        store(weights(k) + lane, weight);
        sum = sum + weight;
      }
      store(sum_ + lane, sum);
    }
  }

  void multiply_by_values(int64_t key, int64_t count) const {
    const A* rows[kKeysPerTileBlock];
    read_rows(tile_.v, tile_.v_new, key, count, rows);
    if (key >= seen_by_all_) {
      // A query must not even see a later token's NaN times 0.
      fill(zeros_, padded_, 0);
      for (int64_t k = 0; k < count; ++k) {
        if (is_finite(rows[k])) continue;
        add_value(key + k, rows[k]);
        rows[k] = zeros_;
      }
    }
    in_parts<kMostVectors>(width_ / kLanes<A>, [&](int64_t vector, auto vectors) {
      const int64_t lane = vector * kLanes<A>;
      in_parts<kMostRows>(head_dim_, [&](int64_t d, auto dims) {
        multiply_values<dims(), vectors()>(rows, d, count, weights(key) + lane, width_,
                                           output_ + d * width_ + lane);
      });
    });
  }
  bool is_finite(const A* row) const {
    Vector<A> none(0);
    for_each_pair(row, head_dim_, [&none](const Pair<A>& pair, int64_t) {
      none = at::vec::fmadd(pair.first, Vector<A>(0), none);
      none = at::vec::fmadd(pair.second, Vector<A>(0), none);
    });
    return sum_lanes<A>(none) == 0;
  }
  // For the queries that see the key alone.
  void add_value(int64_t key, const A* value) const {
    for (int64_t h = 0; h < tile_.group_size; ++h) {
      for (int64_t i = first_to_see(key); i < tile_.count; ++i) {
        const int64_t lane = h * tile_.count + i;
        for (int64_t d = 0; d < head_dim_; ++d) {
          output_[d * width_ + lane] += value[d] * weights(key)[lane];
        }
      }
    }
  }

  // From here on sum_ is what a weight counts for in the sums.
  void scale_rows() const {
    for (int64_t lane = 0; lane < rows_; ++lane) {
      sum_[lane] *= tile_.row_factors[tile_.first + lane % tile_.count];
    }
  }

  // The sums of some keys that every query sees; a key's own does not depend on how many.
  template <int kKeys>
  void add_sums_of(int64_t key) const {
    Vector<A> masses[kKeys];
    for (int k = 0; k < kKeys; ++k) masses[k] = Vector<A>(0);
    for (int64_t lane = 0; lane < width_; lane += kLanes<A>) {
      const Vector<A> factor = load(sum_ + lane);
      for (int k = 0; k < kKeys; ++k) {
        masses[k] = at::vec::fmadd(load(weights(key + k) + lane), factor, masses[k]);
      }
    }
    A sums[kKeys];
    sum_lanes_of_each<A, kKeys>(masses, sums);
    for (int k = 0; k < kKeys; ++k) tile_.column_sums[key + k] += sums[k];
  }

  // sum_ holds what makes a weight a softmax weight.
  template <typename Reduce>
  void add_column_sums() const {
    int64_t key = 0;
    if constexpr (std::is_same_v<Reduce, SumReduce>) {
      for (; key + 8 <= seen_by_all_; key += 8) add_sums_of<8>(key);
      for (; key < seen_by_all_; ++key) add_sums_of<1>(key);
    }
    // One key at a time, of the queries that see it.
    for (; key < num_keys_; ++key) {
      Vector<A> mass(0);
      for (int64_t i = first_to_see(key); i < tile_.count; i += kLanes<A>) {
        const int64_t count = smaller(tile_.count - i, kLanes<A>);
        const auto softmax_weight = [&](int64_t head) {
          const int64_t lane = head * tile_.count + i;
          return Vector<A>::loadu(weights(key) + lane, count) *
                 Vector<A>::loadu(sum_ + lane, count);
        };
        Vector<A> of_tokens = softmax_weight(0);
        for (int64_t h = 1; h < tile_.group_size; ++h) {
          of_tokens = combine<Reduce>(of_tokens, softmax_weight(h));
        }
        mass = mass + of_tokens;
      }
      tile_.column_sums[key] += sum_lanes<A>(mass);
    }
  }

  void write_output() const {
    for (int64_t lane = 0; lane < rows_; ++lane) {
      for (int64_t d = 0; d < head_dim_; ++d) block_[d] = output_[d * width_ + lane] * sum_[lane];
      T* const to = tile_.output[tile_.columns[tile_.first + lane % tile_.count]] +
                    lane / tile_.count * tile_.output_head_stride;
      for (int64_t d = 0; d < head_dim_; d += kPairLanes<A>) {
        store_first<T>(to + d, load_pair(block_ + d), smaller(head_dim_ - d, kPairLanes<A>));
      }
    }
  }

  const QueryTile<T>& tile_;
  const int64_t head_dim_;
  const int64_t rows_, width_;  // lanes: of queries, and with those that fill up the last vector
  const int64_t num_keys_;      // that the tile's last token sees
  const int64_t seen_by_all_;   // of them, those that its first token sees
  const int64_t padded_;        // head_dim in whole pairs
  A* const query_;              // [head_dim, width], or half as many rows of pairs
  A* const output_;             // [head_dim, width]
  A* const maximum_;            // [width] of the logits
  A* const sum_;                // [width] of the weights
  A* const slope_;              // [width], with ALiBi
  A* const position_;           // [width], with ALiBi
  A* const block_;              // [kKeysPerTileBlock, padded]
  A* const zeros_;              // [padded]
  A* const weights_;            // [num_keys, width]: logits, then weights before normalisation
};

template <typename T>
void attend_tile(const QueryTile<T>& tile) {
  TileAttention<T> attention(tile);
  tile.gqa_reduce == GqaReduce::kSum ? attention.template run<SumReduce>()
                                     : attention.template run<MaxReduce>();
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
