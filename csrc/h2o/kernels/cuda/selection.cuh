#pragma once

#include "h2o/kernels/cuda/block.cuh"

// Who leaves when several tokens have joined, and where those that stay are stored.
namespace h2o::cuda {

// The candidates of one (row, KV head): slot i is candidate i, and the chunk's token i is candidate
// capacity + i.
template <typename A>
struct CandidateView {
  const A* scores;
  int64_t scores_stride;
  const int32_t* positions;
  int64_t positions_stride;
  int32_t capacity;
  const A* new_scores;  // by column
  int64_t new_scores_stride;
  const int32_t* new_columns;
  const int32_t* new_positions;
  int32_t num_new;
  NamedScoring scoring;

  __device__ int32_t count() const { return capacity + num_new; }
  __device__ int32_t position(int32_t i) const {
    return i < capacity ? positions[i * positions_stride] : new_positions[i - capacity];
  }
  // What it is ordered by.
  __device__ A order_key(int32_t i, int32_t newest) const {
    return scoring.order_key(score(i), position(i), newest);
  }
  __device__ A score(int32_t i) const {
    return i < capacity ? scores[i * scores_stride]
                        : new_scores[new_columns[i - capacity] * new_scores_stride];
  }
};

// Lists the real tokens among `num_new` of a row, in their order, and returns how many. By the
// block; a barrier must follow before the list is read.
__device__ inline int32_t list_row(const IndexView& position_new, int64_t row, int32_t num_new,
                                   int32_t* columns, int32_t* positions, BlockScratch& scratch) {
  int32_t count = 0;
  for (int32_t first = 0; first < num_new; first += blockDim.x) {
    const int32_t column = first + static_cast<int32_t>(threadIdx.x);
    const int32_t position = column < num_new ? position_new.at(row, column) : -1;
    const Rank rank = block_rank(position >= 0, scratch);
    if (position >= 0) {
      columns[count + rank.before] = column;
      positions[count + rank.before] = position;
    }
    count += rank.total;
  }
  return count;
}

// Puts entries[0 .. size), size a power of two, into the order of eviction: a bitonic sort by the
// block.
template <typename A>
__device__ void sort_candidates(Candidate<A>* entries, int32_t size) {
  for (int32_t length = 2; length <= size; length *= 2) {
    for (int32_t step = length / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int32_t pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const int32_t low = pair / step * 2 * step + pair % step, high = low + step;
        const Candidate<A> a = entries[low], b = entries[high];
        const bool ascending = (low & length) == 0;
        if (ascending ? goes_first(b, a) : goes_first(a, b)) {
          entries[low] = b;
          entries[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// Sets fate[i] to 1 where candidate i leaves and to 0 where it stays: the first in the order of
// eviction leave until `most` are left or `at_most` have left. Their positions go to `evicted` and
// their indices to `order`, where those are not null. Returns how many leave. By the block.
template <typename A>
__device__ int32_t choose_victims(const CandidateView<A>& candidates, const Budget& budget,
                                  int32_t newest, int64_t most, int32_t at_most,
                                  Candidate<A>* entries, int32_t* fate, int32_t* evicted,
                                  int32_t* order, BlockScratch& scratch) {
  const int32_t count = candidates.count();
  int32_t present = 0;
  for (int32_t i = threadIdx.x; i < count; i += blockDim.x) {
    fate[i] = 0;
    present += candidates.position(i) >= 0;
  }
  present = block_reduce(present, Sum(), scratch);
  if (present <= most) return 0;
  const int32_t excess = static_cast<int32_t>(Smallest()(present - most, int64_t{at_most}));

  int32_t size = 1;
  while (size < count) size *= 2;
  int32_t choosable = 0;
  for (int32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const int32_t position = i < count ? candidates.position(i) : -1;
    const bool may_leave = position >= 0 && !is_protected(position, newest, budget);
    entries[i] = may_leave ? Candidate<A>{candidates.order_key(i, newest), position, i}
                           : Candidate<A>{A{0}, -1, -1};
    choosable += may_leave;
  }
  choosable = block_reduce(choosable, Sum(), scratch);
  sort_candidates(entries, size);

  const int32_t leaving = Smallest()(excess, choosable);
  for (int32_t i = threadIdx.x; i < leaving; i += blockDim.x) {
    fate[entries[i].index] = 1;
    if (evicted != nullptr) evicted[i] = entries[i].position;
    if (order != nullptr) order[i] = entries[i].index;
  }
  __syncthreads();
  if (leaving < excess && threadIdx.x == 0) {
    // Sinks and recent tokens fit into the budget, so this takes positions that do not increase:
    // the newcomers give way, the last one first.
    int32_t left = leaving;
    for (int32_t i = count - 1; i >= 0 && left < excess; --i) {
      if (fate[i] != 0 || candidates.position(i) < 0) continue;
      fate[i] = 1;
      if (evicted != nullptr) evicted[left] = candidates.position(i);
      if (order != nullptr) order[left] = i;
      ++left;
    }
  }
  __syncthreads();
  return excess;
}

// One block per (row, KV head): decides, then writes. Tokens that stay take, in order of position,
// the slots that were freed, lowest first, then the empty ones.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 4)
    select_and_store(const __grid_constant__ Selection<T> p) {
  using A = Accumulator<T>;
  auto& scratch = dynamic_shared<BlockScratch>();
  const int64_t row_head = blockIdx.x;
  const int64_t row = row_head / p.sizes.num_kv_heads, head = row_head % p.sizes.num_kv_heads;
  const int32_t capacity = p.cache.capacity;

  CandidateView<A> candidates = {};
  candidates.scores = p.cache.scores.at(row, head);
  candidates.scores_stride = p.cache.scores.token_stride;
  candidates.positions = p.cache.positions.at(row, head);
  candidates.positions_stride = p.cache.positions.token_stride;
  candidates.capacity = capacity;
  candidates.scoring = p.scoring;
  candidates.new_scores = p.new_scores.at(row, head);
  candidates.new_scores_stride = p.new_scores.token_stride;

  // With to_budget, chunk.size is that of all of position_new.
  int32_t* const fate = p.work + row_head * selection_work(capacity, p.chunk.size);
  int32_t* const slots = fate + capacity + p.chunk.size;
  int32_t* const order = p.k_evicted.data == nullptr ? nullptr : slots + p.chunk.size;
  if (p.to_budget) {
    int32_t *const columns = slots + p.chunk.size, *const positions = columns + p.chunk.size;
    candidates.new_columns = columns;
    candidates.new_positions = positions;
    candidates.num_new = list_row(p.position_new, row, p.chunk.size, columns, positions, scratch);
    __syncthreads();
  } else {
    candidates.new_columns = p.tokens.columns(row) + p.chunk.first;
    candidates.new_positions = p.tokens.positions(row) + p.chunk.first;
    candidates.num_new = p.chunk.count(p.tokens, row);
    if (candidates.num_new == 0) return;
  }
  const int32_t num_new = candidates.num_new;

  const Budget budget = p.budget.at(row);
  // A row's own budget may not have been checked; more than the capacity can never stay.
  const int64_t most = Smallest()(budget.total(), int64_t{capacity});
  int32_t newest;
  if (p.to_budget) {
    newest = -1;
    for (int32_t i = threadIdx.x; i < candidates.count(); i += blockDim.x) {
      newest = Largest()(newest, candidates.position(i));
    }
    newest = block_reduce(newest, Largest(), scratch);
  } else {
    newest = candidates.new_positions[num_new - 1];
  }

  Candidate<A>* const entries =
      p.sorted == nullptr
          ? after<Candidate<A>>(scratch)
          : p.sorted + row_head * sorted_candidates(int64_t{capacity} + p.chunk.size);
  int32_t* const evicted =
      p.evicted + row_head * p.evicted_width + (p.to_budget ? 0 : candidates.new_columns[0]);
  const int32_t leaving = choose_victims(candidates, budget, newest, most,
                                         p.to_budget && !p.one_for_one ? INT32_MAX : num_new,
                                         entries, fate, evicted, order, scratch);
  if (p.to_budget) {
    for (int64_t i = leaving + int64_t{threadIdx.x}; i < p.evicted_width; i += blockDim.x) {
      evicted[i] = -1;
    }
  }

  const int32_t lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize,
                num_warps = blockDim.x / kWarpSize;
  for (int32_t i = warp; order != nullptr && i < leaving; i += num_warps) {
    if (order[i] >= capacity) continue;
    const T* const k = p.cache.k.at(row, head, order[i]);
    const T* const v = p.cache.v.at(row, head, order[i]);
    T* const k_evicted = p.k_evicted.at(row, head, candidates.new_columns[0] + i);
    T* const v_evicted = p.v_evicted.at(row, head, candidates.new_columns[0] + i);
    for (int32_t d = lane; d < p.sizes.head_dim; d += kWarpSize) {
      k_evicted[d] = k[d];
      v_evicted[d] = v[d];
    }
  }

  // From here on the cache is written. Slots for the tokens that stay, in the order in which they
  // are taken.
  int32_t staying = 0;
  for (int32_t i = threadIdx.x; i < num_new; i += blockDim.x) staying += fate[capacity + i] == 0;
  staying = block_reduce(staying, Sum(), scratch);
  int32_t found = 0;
  for (int32_t first = 0; first < capacity; first += blockDim.x) {
    const int32_t slot = first + static_cast<int32_t>(threadIdx.x);
    const bool freed = slot < capacity && fate[slot] != 0;
    const Rank rank = block_rank(freed, scratch);
    if (freed && found + rank.before < staying) {
      slots[found + rank.before] = slot;
    } else if (freed) {
      *p.cache.positions.at(row, head, slot) = -1;
      *p.cache.scores.at(row, head, slot) = 0;
    }
    found += rank.total;
  }
  for (int32_t first = 0; first < capacity && found < staying; first += blockDim.x) {
    const int32_t slot = first + static_cast<int32_t>(threadIdx.x);
    const bool empty = slot < capacity && candidates.position(slot) < 0;
    const Rank rank = block_rank(empty, scratch);
    if (empty && found + rank.before < staying) slots[found + rank.before] = slot;
    found += rank.total;
  }

  // fate of a new token becomes the slot that it takes, or -1.
  int32_t stored = 0;
  for (int32_t first = 0; first < num_new; first += blockDim.x) {
    const int32_t token = first + static_cast<int32_t>(threadIdx.x);
    const bool stays = token < num_new && fate[capacity + token] == 0;
    const Rank rank = block_rank(stays, scratch);
    const int32_t slot = stays && stored + rank.before < found ? slots[stored + rank.before] : -1;
    if (token < num_new) fate[capacity + token] = slot;
    if (slot >= 0) {
      *p.cache.positions.at(row, head, slot) = candidates.new_positions[token];
      *p.cache.scores.at(row, head, slot) = candidates.score(capacity + token);
    }
    stored += rank.total;
  }
  __syncthreads();
  for (int32_t token = warp; token < num_new; token += num_warps) {
    const int32_t slot = fate[capacity + token];
    if (slot < 0) continue;
    const int32_t column = candidates.new_columns[token];
    const T* const k_new = p.k_new.at(row, head, column);
    const T* const v_new = p.v_new.at(row, head, column);
    T* const k = p.cache.k.at(row, head, slot);
    T* const v = p.cache.v.at(row, head, slot);
    for (int32_t d = lane; d < p.sizes.head_dim; d += kWarpSize) {
      k[d] = k_new[d];
      v[d] = v_new[d];
    }
  }
}

// One block per (row, KV head).
template <typename A>
__global__ void __launch_bounds__(kMaxThreads, 4)
    pool_scores(const __grid_constant__ ScorePool<A> p) {
  const int64_t row_head = blockIdx.x, row = row_head / p.num_kv_heads;
  const int32_t count = p.chunk.count(p.tokens, row);
  if (count == 0) return;
  const int32_t* const columns = p.tokens.columns(row) + p.chunk.first;
  const int32_t* const positions = p.tokens.positions(row) + p.chunk.first;
  const int64_t oldest_recent = int64_t{positions[count - 1]} - p.budget.at(row).num_recent + 1;
  const A* const scores = p.scores + row_head * p.num_new;
  A* const pooled = p.pooled + row_head * p.num_new;
  for (int32_t i = threadIdx.x; i < count; i += blockDim.x) {
    if (count == 1 || positions[i] >= oldest_recent) {  // one that joins alone has no neighbours
      pooled[columns[i]] = scores[columns[i]];
      continue;
    }
    A sum = 0;
    const int32_t first = Largest()(0, i - p.pool / 2),
                  last = Smallest()(count - 1, i + p.pool / 2);
    for (int32_t j = first; j <= last && positions[j] < oldest_recent; ++j) {
      sum += scores[columns[j]];
    }
    pooled[columns[i]] = sum / static_cast<A>(p.pool);
  }
}

template <typename A>
cudaError_t launch_score_pool(const ScorePool<A>& pool, cudaStream_t stream) {
  return launch(pool_scores<A>, pool.batch * pool.num_kv_heads, threads_for(pool.chunk.size), 0,
                stream, pool);
}

// One block per (row, KV head).
template <typename A>
__global__ void __launch_bounds__(kMaxThreads, 4)
    select_from_prompt(const __grid_constant__ PromptSelection<A> p) {
  auto& scratch = dynamic_shared<BlockScratch>();
  const int64_t row_head = blockIdx.x, row = row_head / p.sizes.num_kv_heads;
  CandidateView<A> candidates = {};
  candidates.new_scores = p.scores + row_head * p.sizes.num_new;
  candidates.new_scores_stride = 1;
  candidates.new_columns = p.tokens.columns(row);
  candidates.new_positions = p.tokens.positions(row);
  const int32_t count = candidates.num_new = *p.tokens.count(row);

  int32_t* const fate = p.fate + row_head * p.sizes.num_new;
  const Budget budget = p.budget.at(row);
  Candidate<A>* const entries = p.sorted == nullptr
                                    ? after<Candidate<A>>(scratch)
                                    : p.sorted + row_head * sorted_candidates(p.sizes.num_new);
  choose_victims(candidates, budget, count == 0 ? -1 : candidates.new_positions[count - 1],
                 Smallest()(budget.total(), p.width), count, entries, fate, nullptr, nullptr,
                 scratch);

  int64_t* const selected = p.selected + row_head * p.width;
  A* const scores = p.selected_scores + row_head * p.width;
  int64_t stored = 0;
  for (int32_t first = 0; first < count; first += blockDim.x) {
    const int32_t token = first + static_cast<int32_t>(threadIdx.x);
    const bool stays = token < count && fate[token] == 0;
    const Rank rank = block_rank(stays, scratch);
    if (stays) {
      selected[stored + rank.before] = candidates.new_columns[token];
      scores[stored + rank.before] = candidates.score(token);
    }
    stored += rank.total;
  }
  for (int64_t i = stored + threadIdx.x; i < p.width; i += blockDim.x) {
    selected[i] = -1;
    scores[i] = 0;
  }
}

template <typename A>
int64_t selection_shared_bytes(int64_t count) {
  return static_cast<int64_t>(sizeof(BlockScratch)) +
         sorted_candidates(count) * static_cast<int64_t>(sizeof(Candidate<A>));
}

template <typename T>
cudaError_t launch_selection(const Selection<T>& selection, cudaStream_t stream) {
  const int64_t count = int64_t{selection.cache.capacity} + selection.chunk.size;
  const int64_t shared_bytes = selection.sorted == nullptr
                                   ? selection_shared_bytes<Accumulator<T>>(count)
                                   : static_cast<int64_t>(sizeof(BlockScratch));
  return launch(select_and_store<T>, selection.sizes.batch * selection.sizes.num_kv_heads,
                threads_for(count), shared_bytes, stream, selection);
}

template <typename A>
cudaError_t launch_prompt_selection(const PromptSelection<A>& selection, cudaStream_t stream) {
  const int64_t count = selection.sizes.num_new;
  const int64_t shared_bytes = selection.sorted == nullptr
                                   ? selection_shared_bytes<A>(count)
                                   : static_cast<int64_t>(sizeof(BlockScratch));
  return launch(select_from_prompt<A>, selection.sizes.batch * selection.sizes.num_kv_heads,
                threads_for(count), shared_bytes, stream, selection);
}

}  // namespace h2o::cuda
