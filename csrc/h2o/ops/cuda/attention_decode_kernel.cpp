#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "h2o/kernels/cuda/kernels.h"
#include "h2o/ops/checks.h"
#include "h2o/ops/cuda/backend.h"
#include "h2o/ops/cuda/tensors.h"
#include "h2o/ops/registration.h"
#include "h2o/ops/rolling.h"
#include "h2o/ops/sparse_reading.h"

namespace h2o {
namespace cuda {
namespace {

constexpr const char* kOp = "h2o_attention_decode";

// The call's tensors as kernels can read them.
struct Inputs {
  at::Tensor query, k_new, v_new, position_new;
  std::optional<at::Tensor> alibi_slopes, row_budget, score_new;
  Sizes sizes;

  explicit Inputs(const DecodeCall& call) {
    const KVCache& cache = call.cache;
    query = call.readable(call.query);
    k_new = call.readable(call.k_new);
    v_new = call.readable(call.v_new);
    position_new = call.readable(call.position_new);
    if (call.alibi_slopes) alibi_slopes = call.readable(*call.alibi_slopes);
    if (call.row_budget) row_budget = call.readable(*call.row_budget);
    if (call.score_new) score_new = call.readable(*call.score_new);
    sizes.batch = cache.batch();
    sizes.num_kv_heads = cache.num_kv_heads();
    check_candidates(kOp, "num_q_heads / num_kv_heads", query.size(1) / sizes.num_kv_heads);
    sizes.group_size = static_cast<int32_t>(query.size(1) / sizes.num_kv_heads);
    sizes.head_dim = static_cast<int32_t>(cache.head_dim());
    sizes.num_new = static_cast<int32_t>(k_new.size(2));
  }
};

// Sets how many blocks share a (row, KV head): one, unless that leaves multiprocessors idle or the
// weights do not fit into shared memory; then so many that two blocks fit at once, if they can.
// Returns false where they fit in no way.
template <typename T>
bool choose_splits(DecodeStep<T>& step) {
  DeviceLimits limits;
  C10_CUDA_CHECK(device_limits(&limits));
  const int64_t ranges = slot_ranges(step.cache.capacity);
  const auto shared_bytes = [&](int64_t ranges_per_split) {
    step.splits = ranges == 0 ? 1 : static_cast<int32_t>((ranges - 1) / ranges_per_split + 1);
    return decode_step_shared_bytes(step);
  };
  const int64_t blocks = step.sizes.batch * step.sizes.num_kv_heads;
  const int64_t wanted = std::max<int64_t>(1, 2 * int64_t{limits.multiprocessors} / blocks);
  int64_t ranges_per_split = std::max<int64_t>(1, (ranges + wanted - 1) / wanted);
  if (shared_bytes(ranges_per_split) <= limits.shared_bytes) return true;
  while (ranges_per_split > 1 && shared_bytes(ranges_per_split) > limits.shared_bytes / 2) {
    ranges_per_split = (ranges_per_split + 1) / 2;
  }
  return shared_bytes(ranges_per_split) <= limits.shared_bytes;
}

// One token at a time, a launch each.
template <typename T>
void decode_steps(const DecodeCall& call, DecodeStep<T>& step) {
  using A = Accumulator<T>;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  at::Tensor parts, arrivals;
  if (step.splits > 1) {
    const int64_t heads = step.sizes.batch * step.sizes.num_kv_heads,
                  of_group = heads * step.sizes.group_size,
                  ranges = slot_ranges(step.cache.capacity);
    const int64_t weights = of_group * ranges * kSlotRange;
    parts = workspace(call.cache.scores, weights + of_group * ranges * (2 + step.sizes.head_dim),
                      call.cache.scores.scalar_type());
    arrivals = at::zeros({heads}, call.cache.positions.options());
    step.parts.weights = parts.mutable_data_ptr<A>();
    step.parts.maximum = step.parts.weights + weights;
    step.parts.sum = step.parts.maximum + of_group * ranges;
    step.parts.output = step.parts.sum + of_group * ranges;
    step.parts.arrivals = reinterpret_cast<unsigned*>(arrivals.mutable_data_ptr<int32_t>());
  }
  for (; step.column < step.sizes.num_new; ++step.column) {
    C10_CUDA_CHECK(launch_decode_step(step, stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

template <typename T>
DecodeStep<T> decode_step(const DecodeCall& call, const Inputs& inputs, const at::Tensor& output,
                          const at::Tensor& evicted) {
  DecodeStep<T> step = {};
  step.sizes = inputs.sizes;
  step.cache = cache_view<T>(call.cache);
  step.query = read<T>(inputs.query);
  step.k_new = read<T>(inputs.k_new);
  step.v_new = read<T>(inputs.v_new);
  step.position_new = indices(inputs.position_new);
  step.budget = budgets(call.budget, inputs.row_budget);
  step.gqa_reduce = call.gqa_reduce;
  step.terms = logit_terms<Accumulator<T>>(call.scale, inputs.alibi_slopes);
  step.scoring = {call.scoring};
  if (inputs.score_new) step.score_new = read<Accumulator<T>>(*inputs.score_new);
  step.aligned = is_aligned(call.cache.k_cache) && is_aligned(call.cache.v_cache);
  step.output = written<T>(output);
  step.output_dim_stride = output.stride(3);
  step.evicted = evicted.mutable_data_ptr<int32_t>();
  if (call.k_evicted) {
    step.k_evicted = written<T>(*call.k_evicted);
    step.v_evicted = written<T>(*call.v_evicted);
  }
  return step;
}

// What the weights of a chunk's queries count for, by how many come after; undefined where that is
// 1.
at::Tensor row_factors(const DecodeCall& call, int64_t chunk_size) {
  const Scoring& scoring = call.scoring;
  const bool decays = scoring.rule == ScoreRule::kDecay && scoring.decay != 1;
  if (!decays && scoring.num_queries == 0) return {};
  const at::Tensor after = at::arange(chunk_size, call.cache.scores.options());
  at::Tensor factors = decays ? at::pow(scoring.decay, after) : at::ones_like(after);
  if (scoring.num_queries > 0) factors.masked_fill_(after.ge(scoring.num_queries), 0);
  return factors;
}

// Several tokens join together: three launches for each chunk of the longest row that there could
// be. Which columns a chunk has in a row, if any, only the device knows.
template <typename T>
void decode_chunks(const DecodeCall& call, const Inputs& inputs, const at::Tensor& output,
                   const at::Tensor& evicted) {
  using A = Accumulator<T>;
  const Sizes& sizes = inputs.sizes;
  const int64_t heads = sizes.batch * sizes.num_kv_heads, capacity = call.cache.capacity();
  const auto chunk_size = static_cast<int32_t>(std::min<int64_t>(call.chunk, sizes.num_new));
  check_candidates(kOp, "chunk * group_size", int64_t{chunk_size} * sizes.group_size);

  const at::ScalarType score_type = call.cache.scores.scalar_type();
  const at::Tensor listed = token_list(inputs.position_new);
  const at::Tensor statistics =
      workspace(call.cache.scores, 2 * heads * chunk_size * sizes.group_size, score_type);
  const at::Tensor new_scores =
      at::empty({sizes.batch, sizes.num_kv_heads, sizes.num_new}, call.cache.scores.options());
  const at::Tensor work =
      workspace(call.cache.positions, heads * selection_work(capacity, chunk_size), at::kInt);
  DeviceLimits limits;
  C10_CUDA_CHECK(device_limits(&limits));
  at::Tensor sorted;
  if (selection_shared_bytes<A>(capacity + chunk_size) > limits.shared_bytes) {
    sorted = workspace(call.cache.scores,
                       heads * sorted_candidates(capacity + chunk_size) *
                           static_cast<int64_t>(sizeof(Candidate<A>)),
                       at::kByte);
  }

  ChunkAttention<T> attention = {};
  attention.sizes = sizes;
  attention.cache = cache_view<T>(call.cache);
  attention.query = read<T>(inputs.query);
  attention.k_new = read<T>(inputs.k_new);
  attention.v_new = read<T>(inputs.v_new);
  attention.tokens = {listed.mutable_data_ptr<int32_t>(), sizes.num_new};
  attention.gqa_reduce = call.gqa_reduce;
  attention.terms = logit_terms<A>(call.scale, inputs.alibi_slopes);
  attention.scoring = {call.scoring};
  if (inputs.score_new) attention.score_new = read<A>(*inputs.score_new);
  const at::Tensor factors = row_factors(call, chunk_size);
  if (factors.defined()) attention.row_factors = factors.const_data_ptr<A>();
  attention.maximum = statistics.mutable_data_ptr<A>();
  attention.sum = attention.maximum + statistics.numel() / 2;
  attention.output = written<T>(output);
  attention.output_dim_stride = output.stride(3);
  attention.new_scores = new_scores.mutable_data_ptr<A>();

  Selection<T> selection = {};
  selection.sizes = sizes;
  selection.cache = attention.cache;
  selection.k_new = attention.k_new;
  selection.v_new = attention.v_new;
  selection.new_scores = read<A>(new_scores);
  selection.tokens = attention.tokens;
  selection.budget = budgets(call.budget, inputs.row_budget);
  selection.scoring = attention.scoring;
  selection.work = work.mutable_data_ptr<int32_t>();
  if (sorted.defined()) selection.sorted = static_cast<Candidate<A>*>(sorted.mutable_data_ptr());
  selection.evicted = evicted.mutable_data_ptr<int32_t>();
  selection.evicted_width = sizes.num_new;
  if (call.k_evicted) {
    selection.k_evicted = written<T>(*call.k_evicted);
    selection.v_evicted = written<T>(*call.v_evicted);
  }

  ScorePool<A> pool = {};
  pool.batch = sizes.batch;
  pool.num_kv_heads = sizes.num_kv_heads;
  pool.num_new = sizes.num_new;
  at::Tensor pooled;
  if (call.scoring.pool > 1) {
    pooled = at::empty_like(new_scores);
    pool.pool = static_cast<int32_t>(std::min<int64_t>(call.scoring.pool, INT32_MAX));
    pool.tokens = attention.tokens;
    pool.budget = selection.budget;
    pool.scores = attention.new_scores;
    pool.pooled = pooled.mutable_data_ptr<A>();
    selection.new_scores = read<A>(pooled);
  }

  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(
      launch_list_tokens(indices(inputs.position_new), sizes.batch, attention.tokens, stream));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  for (int64_t first = 0; first < sizes.num_new; first += chunk_size) {
    attention.chunk = selection.chunk = pool.chunk = {static_cast<int32_t>(first), chunk_size};
    C10_CUDA_CHECK(launch_chunk_attention(attention, stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    C10_CUDA_CHECK(launch_chunk_scores(attention, stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (pooled.defined()) {
      C10_CUDA_CHECK(launch_score_pool(pool, stream));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    C10_CUDA_CHECK(launch_selection(selection, stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

}  // namespace

DecodeOutputs attention_decode(const DecodeCall& call) {
  if (call.rope_cos)
    return decode_rolling(call, {attention_decode, rank_by_sorting, rotate, /*on_host=*/false});
  const c10::cuda::OptionalCUDAGuard guard(call.query.device());
  check_candidates(kOp, "capacity + num_new", call.cache.capacity() + call.k_new.size(2));
  if (reads_sparsely(call)) return decode_sparsely(call, evict);
  const Inputs inputs(call);
  const Sizes& sizes = inputs.sizes;
  const at::Tensor output = empty_output(call.query);
  at::Tensor evicted =
      at::empty({sizes.batch, sizes.num_kv_heads, sizes.num_new}, call.cache.positions.options());
  if (sizes.batch == 0 || sizes.num_new == 0) return {output, evicted};
  with_storage_type(call.query.scalar_type(), [&]<typename T>(T) {
    if (call.chunk == 1) {
      DecodeStep<T> step = decode_step<T>(call, inputs, output, evicted);
      if (choose_splits(step)) return decode_steps(call, step);
    }
    output.zero_();  // rows of padding
    evicted.fill_(-1);
    decode_chunks<T>(call, inputs, output, evicted);
  });
  return {output, evicted};
}

}  // namespace cuda

static const Registration registration(c10::DispatchKey::CUDA, [](torch::Library& m) {
  m.impl("h2o_attention_decode", &decode_entry<cuda::attention_decode>);
});

}  // namespace h2o
