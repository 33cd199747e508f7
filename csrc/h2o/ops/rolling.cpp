#include "h2o/ops/rolling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/take_along_dim.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "h2o/ops/checks.h"

namespace h2o {
namespace {

// Columns of [batch, heads, num_new, ...] in the order that `order`, [batch, num_new], gives a row.
at::Tensor reordered(const at::Tensor& tensor, const at::Tensor& order) {
  return at::take_along_dim(
      tensor, tensor.dim() == 4 ? order.unsqueeze(1).unsqueeze(3) : order.unsqueeze(1), 2);
}

// How many ranks a row takes that keeps `kept` tokens while `num_new` join, `chunk` at a time.
int64_t ranks_needed(int64_t kept, int64_t num_new, int64_t chunk, int64_t capacity) {
  int64_t needed = 0;
  for (int64_t i = 0; i < num_new; i += std::min(chunk, num_new)) {
    needed = std::max(needed, std::min(kept + i, capacity) + std::min(chunk, num_new - i));
  }
  return needed;
}

// Refuses ranks that have no angles, where the host can look.
void check_ranks(const DecodeCall& call) {
  const at::Tensor kept = call.cache.positions.ge(0).sum(-1).amax(1),
                   num_new = call.position_new.ge(0).sum(1);
  const int64_t there = call.rope_cos->size(0);
  for (int64_t row = 0; row < kept.size(0); ++row) {
    const auto before = kept[row].item<int64_t>(), joining = num_new[row].item<int64_t>();
    const int64_t needed = ranks_needed(before, joining, call.chunk, call.cache.capacity());
    TORCH_CHECK(needed <= there,
                "h2o_attention_decode: rope_cos must have an angle for each rank, ", "got ", there,
                " rows for ", before, " tokens kept and ", joining, " new ones in row ", row,
                ", chunk=", call.chunk);
  }
}

// What a chunk sees of the cache before it joins.
struct Before {
  at::Tensor positions, rank;
};

// Puts the keys that left into their columns, if they were in a slot.
void hand_out_keys(const at::Tensor& k_evicted, const at::Tensor& evicted, const Before& before,
                   const at::Tensor& k_cache) {
  const auto [ordered, slots] = before.positions.sort(-1);
  const at::Tensor at =
      at::searchsorted(ordered, evicted.contiguous()).clamp_max(ordered.size(2) - 1);
  const at::Tensor left = evicted.ge(0).logical_and(ordered.gather(-1, at).eq(evicted));
  const at::Tensor keys = at::take_along_dim(k_cache, slots.gather(-1, at).unsqueeze(3), 2);
  k_evicted.copy_(at::where(left.unsqueeze(3), keys, k_evicted));
}

// Writes new keys into the slots that hold another position than before.
void store_keys(const DecodeCall& call, const at::Tensor& before) {
  const at::Tensor &keys = call.cache.k_cache, &positions = call.cache.positions;
  const at::Tensor changed = positions.ne(before);
  if (call.k_new.size(2) == 1) {  // At most one slot of a head: the others are not touched.
    const at::Tensor slot = changed.to(at::kByte).argmax(-1);
    const at::Tensor there = at::take_along_dim(keys, slot.unsqueeze(2).unsqueeze(3), 2);
    const at::Tensor written = changed.any(-1).unsqueeze(2).unsqueeze(3);
    const at::Tensor rows = at::arange(keys.size(0), slot.options()).unsqueeze(1),
                     heads = at::arange(keys.size(1), slot.options()).unsqueeze(0);
    // Bit for bit, which scatter_() is not.
    keys.index_put_({rows, heads, slot}, at::where(written, call.k_new, there).squeeze(2));
    return;
  }
  // Padding stands between: the first column whose position is as large.
  const at::Tensor so_far = std::get<0>(call.position_new.cummax(1)).contiguous();
  const at::Tensor column =
      at::searchsorted(so_far, positions.flatten(1).to(so_far.scalar_type()).contiguous())
          .clamp_max(call.k_new.size(2) - 1)
          .view(positions.sizes());
  const at::Tensor arrived = at::take_along_dim(call.k_new, column.unsqueeze(3), 2);
  keys.copy_(at::where(changed.unsqueeze(3), arrived, keys));
}

// Lets all new tokens of the call join together.
DecodeOutputs join(const DecodeCall& call, const RollingKernels& kernels) {
  const Before before{call.cache.positions.clone(at::MemoryFormat::Contiguous),
                      kernels.rank(call.cache.positions)};
  const at::Tensor kept = before.positions.ge(0).sum(-1, /*keepdim=*/true);
  const at::Tensor real = call.position_new.ge(0);
  const at::Tensor order = (real.cumsum(1) - 1).unsqueeze(1);
  const at::Tensor rank_new = at::where(real.unsqueeze(1), kept + order, -1).to(at::kInt);
  const int64_t group_size = call.query.size(1) / call.k_new.size(1);
  const auto rotated = [&](const at::Tensor& vectors, const at::Tensor& rank) {
    return kernels.rotate({vectors, rank, *call.rope_cos, *call.rope_sin});
  };
  DecodeCall step = call;
  step.rope_cos.reset();
  step.rope_sin.reset();
  step.chunk = std::max<int64_t>(call.k_new.size(2), 1);
  if (call.chunk > 1) step.reading = {};  // a token left alone is not a chunk of 1
  step.query = rotated(call.query, rank_new.repeat_interleave(group_size, 1));
  step.k_new = rotated(call.k_new, rank_new);
  step.cache.k_cache = rotated(call.cache.k_cache, before.rank);
  DecodeOutputs outputs = kernels.decode(step);
  if (call.k_evicted) {
    hand_out_keys(*call.k_evicted, std::get<1>(outputs), before, call.cache.k_cache);
  }
  store_keys(call, before.positions);
  return outputs;
}

// Columns `begin` to `begin + count` of the new tokens.
DecodeCall columns_of(const DecodeCall& call, int64_t begin, int64_t count) {
  DecodeCall part = call;
  for (at::Tensor* tensor : {&part.query, &part.k_new, &part.v_new}) {
    *tensor = tensor->narrow(2, begin, count);
  }
  part.position_new = call.position_new.narrow(1, begin, count);
  if (call.score_new) part.score_new = call.score_new->narrow(2, begin, count);
  if (call.k_evicted) {
    part.k_evicted = call.k_evicted->narrow(2, begin, count);
    part.v_evicted = call.v_evicted->narrow(2, begin, count);
  }
  return part;
}

// Chunk after chunk, where no padding stands between the tokens of a row.
DecodeOutputs join_in_chunks(const DecodeCall& call, const RollingKernels& kernels) {
  const int64_t num_new = call.k_new.size(2);
  if (num_new <= call.chunk) return join(call, kernels);
  std::vector<at::Tensor> outputs, evicted;
  for (int64_t i = 0; i < num_new; i += call.chunk) {
    auto [output, left] = join(columns_of(call, i, std::min(call.chunk, num_new - i)), kernels);
    outputs.push_back(std::move(output));
    evicted.push_back(std::move(left));
  }
  return {at::cat(outputs, 2), at::cat(evicted, 2)};
}

// Padding, which may stand anywhere, does not count for chunks or ranks.
DecodeOutputs join_rows(const DecodeCall& call, const RollingKernels& kernels) {
  if (kernels.on_host) check_ranks(call);
  const bool in_chunks = call.k_new.size(2) > call.chunk;
  if (!in_chunks || (kernels.on_host && call.position_new.ge(0).all().item<bool>())) {
    return join_in_chunks(call, kernels);
  }
  // A chunk is `chunk` of the row's own tokens: padding goes to the end, and comes back.
  const int64_t num_new = call.k_new.size(2);
  const at::Tensor order = call.position_new.lt(0).to(at::kByte).argsort(/*stable=*/true, 1);
  // What leaves with a chunk is told from the column of its first token on.
  const at::Tensor columns = at::arange(num_new, order.options());
  const at::Tensor in_chunk = columns.remainder(call.chunk);
  const at::Tensor told = (order.index_select(1, columns - in_chunk) + in_chunk).unsqueeze(1);
  DecodeCall ordered = call;
  for (at::Tensor* tensor : {&ordered.query, &ordered.k_new, &ordered.v_new}) {
    *tensor = reordered(*tensor, order);
  }
  ordered.position_new = call.position_new.gather(1, order);
  if (call.score_new) ordered.score_new = reordered(*call.score_new, order);
  for (auto* room : {&ordered.k_evicted, &ordered.v_evicted}) {
    if (*room) *room = at::take_along_dim(**room, told.clamp_max(num_new - 1).unsqueeze(3), 2);
  }
  auto [output, left] = join_in_chunks(ordered, kernels);
  // Where nobody left there is nothing to tell: those go to a column too many.
  const at::Tensor to = at::where(left.ge(0), told, num_new);
  at::Tensor evicted = left.new_full({left.size(0), left.size(1), num_new + 1}, -1);
  evicted = evicted.scatter_(2, to, left).narrow(2, 0, num_new);
  for (auto [room, ordered_room] :
       {std::pair(&call.k_evicted, &ordered.k_evicted), {&call.v_evicted, &ordered.v_evicted}}) {
    if (!*room) continue;
    const at::Tensor one_more = at::cat({**room, (*room)->narrow(2, 0, 1)}, 2);
    one_more.scatter_(2, to.unsqueeze(3).expand_as(**ordered_room), **ordered_room);
    (*room)->copy_(one_more.narrow(2, 0, num_new));
  }
  return {reordered(output, order.argsort(/*stable=*/false, 1)), evicted.contiguous()};
}

}  // namespace

DecodeOutputs decode_rolling(const DecodeCall& call, const RollingKernels& kernels) {
  DecodeCall whole = call;
  if (call.k_new.size(2) == 0) {
    whole.rope_cos.reset();
    whole.rope_sin.reset();
    return kernels.decode(whole);
  }
  for (at::Tensor* tensor : {&whole.query, &whole.k_new, &whole.v_new, &whole.position_new}) {
    *tensor = call.readable(*tensor);
  }
  for (std::optional<at::Tensor>* tensor : {&whole.row_budget, &whole.score_new}) {
    if (*tensor) *tensor = call.readable(**tensor);
  }
  auto [output, evicted] = join_rows(whole, kernels);
  at::Tensor laid_out = empty_output(call.query);
  if (laid_out.strides() != output.strides()) output = laid_out.copy_(output);
  return {std::move(output), std::move(evicted)};
}

at::Tensor rank_by_sorting(const at::Tensor& all) {
  const at::Tensor positions = all.contiguous(), ordered = std::get<0>(positions.sort(-1));
  const at::Tensor empty = positions.lt(0);
  const at::Tensor rank = at::searchsorted(ordered, positions) - empty.sum(-1, true);
  return rank.masked_fill(empty, -1).to(at::kInt);
}

at::Tensor rotate_by_gathering(const RotateCall& call) {
  const at::ScalarType dtype = call.cos.scalar_type();
  const int64_t pairs = call.cos.size(1);
  // On a device nobody looks at the numbers, so none may lead out of the angles.
  const at::Tensor index = call.index.clamp(0, call.cos.size(0) - 1).to(at::kLong);
  const auto angles = [&](const at::Tensor& table) {
    return table.index_select(0, index.flatten())
        .view({index.size(0), index.size(1), index.size(2), pairs});
  };
  const at::Tensor cos = angles(call.cos), sin = angles(call.sin), wide = call.input.to(dtype);
  const at::Tensor x = wide.narrow(3, 0, pairs), y = wide.narrow(3, pairs, pairs);
  const at::Tensor rest = wide.narrow(3, 2 * pairs, wide.size(3) - 2 * pairs);
  const at::Tensor rotated = at::cat({x * cos - y * sin, y * cos + x * sin, rest}, 3);
  return rotated.masked_fill(call.index.lt(0).unsqueeze(3), 0).to(call.input.scalar_type());
}

}  // namespace h2o
