// A layer of 8 KV heads decodes 100 tokens into a cache of 32 slots.
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <h2o/h2o.h>

#include <iostream>

int main() {
  const h2o::EvictionPolicy policy({.num_heavy = 16, .num_recent = 12, .num_sink = 4});
  const auto cache =
      h2o::KVCache::allocate(/*batch=*/1, /*num_kv_heads=*/8, policy.budget().total(),
                             /*head_dim=*/64, at::kFloat);
  for (int64_t position = 0; position < 100; ++position) {
    const at::Tensor query = at::randn({1, 32, 1, 64});  // what a model's projections give
    const at::Tensor key = at::randn({1, 8, 1, 64}), value = at::randn({1, 8, 1, 64});
    const auto step = h2o::attention_decode(query, cache, key, value,
                                            at::full({1, 1}, position, at::kLong), policy);
    if (position % 20 == 19) {
      std::cout << "token " << position << ": head 0 holds "
                << cache.cache_len()[0][0].item<int64_t>() << " of " << cache.capacity()
                << " slots and evicts " << step.evicted[0][0][0].item<int64_t>() << '\n';
    }
  }
}
