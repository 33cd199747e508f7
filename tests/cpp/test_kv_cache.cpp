#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "h2o/kv_cache.h"
#include "tensors.h"
#include "test_helpers.h"

namespace {

using h2o::KVCache;

at::Tensor floats(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::zeros(sizes, dtype);
}

// Four good tensors of [2, 3, 6, 8], for one of them to be spoilt.
struct Parts {
  at::Tensor k_cache = floats({2, 3, 6, 8});
  at::Tensor v_cache = floats({2, 3, 6, 8});
  at::Tensor scores = floats({2, 3, 6});
  at::Tensor positions = at::full({2, 3, 6}, -1, at::kInt);

  KVCache make() const { return KVCache::from("h2o_evict", k_cache, v_cache, scores, positions); }
  std::string refusal() const {
    return ::refusal([this] { make(); });
  }
};

}  // namespace

TEST_CASE("a new cache is empty", "[kv_cache][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16, at::kDouble);
  const KVCache cache = KVCache::allocate(2, 3, 6, 8, dtype);
  CHECK(cache.batch() == 2);
  CHECK(cache.num_kv_heads() == 3);
  CHECK(cache.capacity() == 6);
  CHECK(cache.head_dim() == 8);
  CHECK(cache.k_cache.sizes() == at::IntArrayRef({2, 3, 6, 8}));
  CHECK(cache.v_cache.sizes() == at::IntArrayRef({2, 3, 6, 8}));
  CHECK(cache.k_cache.scalar_type() == dtype);
  CHECK(cache.v_cache.scalar_type() == dtype);
  CHECK(same_bits(cache.positions, at::full({2, 3, 6}, -1, at::kInt)));
  CHECK(same_bits(cache.scores,
                  at::zeros({2, 3, 6}, dtype == at::kDouble ? at::kDouble : at::kFloat)));
  CHECK(same_bits(cache.cache_len(), at::zeros({2, 3}, at::kLong)));
}

TEST_CASE("a cache may have no rows and no slots", "[kv_cache][cpu]") {
  const int64_t batch = GENERATE(0, 2), capacity = GENERATE(0, 6);
  CAPTURE(batch, capacity);
  const KVCache cache = KVCache::allocate(batch, 3, capacity, 8, at::kFloat);
  CHECK(cache.batch() == batch);
  CHECK(cache.capacity() == capacity);
  CHECK(same_bits(cache.cache_len(), at::zeros({batch, 3}, at::kLong)));
}

TEST_CASE("the occupancy is what the positions say", "[kv_cache][cpu]") {
  Parts parts;
  parts.positions = integers({-1, -1, 0, -1, 7, -1, 0, 1, 2, 3, 4, 5}, {2, 1, 6});
  parts.k_cache = parts.v_cache = floats({2, 1, 6, 8});
  parts.v_cache = floats({2, 1, 6, 8});
  parts.scores = floats({2, 1, 6});
  const KVCache cache = parts.make();
  CHECK(int64s(cache.cache_len()) == std::vector<int64_t>{2, 6});
  cache.positions.fill_(-1);
  CHECK(int64s(cache.cache_len()) == std::vector<int64_t>{0, 0});  // computed each time
}

TEST_CASE("a cache shares the tensors it is made from", "[kv_cache][cpu]") {
  const Parts parts;
  const KVCache cache = parts.make(), copy = cache;
  CHECK(cache.k_cache.is_same(parts.k_cache));
  CHECK(cache.v_cache.is_same(parts.v_cache));
  CHECK(cache.scores.is_same(parts.scores));
  CHECK(cache.positions.is_same(parts.positions));
  CHECK(copy.positions.is_same(parts.positions));
}

TEST_CASE("strided views that can be written in place are accepted", "[kv_cache][cpu]") {
  Parts parts;
  SECTION("heads after slots, as [batch, capacity, num_kv_heads, head_dim]") {
    parts.k_cache = floats({2, 6, 3, 8}).transpose(1, 2);
    parts.positions = at::full({2, 6, 3}, -1, at::kInt).transpose(1, 2);
  }
  SECTION("a slice of slots") {
    parts.k_cache = floats({2, 3, 10, 8}).narrow(2, 2, 6);
    parts.scores = floats({2, 3, 10}).narrow(2, 2, 6);
    parts.positions = at::full({2, 3, 10}, -1, at::kInt).narrow(2, 2, 6);
  }
  SECTION("every second slot") {
    parts.v_cache = floats({2, 3, 12, 8}).slice(2, 0, 12, 2);
    parts.scores = floats({2, 3, 12}).slice(2, 1, 12, 2);
  }
  SECTION("K and V side by side in one tensor") {
    const at::Tensor both = floats({2, 3, 6, 16});
    parts.k_cache = both.narrow(3, 0, 8);
    parts.v_cache = both.narrow(3, 8, 8);
  }
  SECTION("K and V after each other in one tensor") {
    const at::Tensor both = floats({2, 2, 3, 6, 8});
    parts.k_cache = both.select(0, 0);
    parts.v_cache = both.select(0, 1);
  }
  SECTION("a single element of head_dim, whatever its stride") {
    parts.k_cache = floats({2, 3, 6, 8}).slice(3, 0, 8, 8);
    parts.v_cache = floats({2, 3, 6, 1});
  }
  SECTION("one row, expanded to one") {
    parts.k_cache = floats({3, 6, 8}).expand({1, 3, 6, 8});
    parts.v_cache = floats({1, 3, 6, 8});
    parts.scores = floats({1, 3, 6});
    parts.positions = at::full({1, 3, 6}, -1, at::kInt);
  }
  CHECK_NOTHROW(parts.make());
}

TEST_CASE("shapes that do not fit are refused by name", "[kv_cache][cpu]") {
  Parts parts;
  std::string message;
  SECTION("k_cache without a batch") {
    parts.k_cache = floats({3, 6, 8});
    message = "k_cache must be [batch, num_kv_heads, capacity, head_dim], got [3, 6, 8]";
  }
  SECTION("another head_dim in v_cache") {
    parts.v_cache = floats({2, 3, 6, 4});
    message =
        "v_cache must be [batch, num_kv_heads, capacity, head_dim] = [2, 3, 6, 8], got [2, 3, 6, "
        "4]";
  }
  SECTION("v_cache without a batch") {
    parts.v_cache = floats({3, 6, 8});
    message =
        "v_cache must be [batch, num_kv_heads, capacity, head_dim] = [2, 3, 6, 8], got [3, 6, 8]";
  }
  SECTION("scores with a batch of 1, which is not broadcast") {
    parts.scores = floats({1, 3, 6});
    message = "scores must be [batch, num_kv_heads, capacity] = [2, 3, 6], got [1, 3, 6]";
  }
  SECTION("another number of heads in positions") {
    parts.positions = at::full({2, 1, 6}, -1, at::kInt);
    message = "positions must be [batch, num_kv_heads, capacity] = [2, 3, 6], got [2, 1, 6]";
  }
  SECTION("one slot fewer in positions") {
    parts.positions = at::full({2, 3, 5}, -1, at::kInt);
    message = "positions must be [batch, num_kv_heads, capacity] = [2, 3, 6], got [2, 3, 5]";
  }
  CHECK(parts.refusal() == "Error: h2o_evict: " + message);
}

TEST_CASE("sizes out of range are refused with their value", "[kv_cache][cpu]") {
  const auto refused = [](int64_t heads, int64_t head_dim) {
    return refusal([=] { KVCache::allocate(2, heads, 4, head_dim, at::kFloat); });
  };
  CHECK(refused(3, 0) == "Error: KVCache::allocate: head_dim must be in 1..512, got 0");
  CHECK(refused(3, 513) == "Error: KVCache::allocate: head_dim must be in 1..512, got 513");
  CHECK(refused(0, 8) == "Error: KVCache::allocate: num_kv_heads must be >= 1, got 0");
  CHECK(refused(-1, 8) == "Error: KVCache::allocate: num_kv_heads must be >= 0, got -1");
  CHECK(refused(3, -8) == "Error: KVCache::allocate: head_dim must be >= 0, got -8");
  CHECK(refusal([] { KVCache::allocate(-2, 3, 4, 8, at::kFloat); }) ==
        "Error: KVCache::allocate: batch must be >= 0, got -2");
  CHECK(refusal([] { KVCache::allocate(2, 3, -4, 8, at::kFloat); }) ==
        "Error: KVCache::allocate: capacity must be >= 0, got -4");
  CHECK_NOTHROW(KVCache::allocate(2, 1, 4, 512, at::kFloat));
  // 2^31 slots of one row that lies on a single element: only the size matters.
  const int64_t too_many = int64_t{1} << 31;
  CHECK(refusal([&] {
          KVCache::from("h2o_evict", floats({1, 1, 1, 1}).expand({1, 1, too_many, 1}),
                        floats({1, 1, 1, 1}).expand({1, 1, too_many, 1}),
                        floats({1, 1, 1}).expand({1, 1, too_many}),
                        at::full({1, 1, 1}, -1, at::kInt).expand({1, 1, too_many}));
        }) == "Error: h2o_evict: capacity must be <= 2147483647, got 2147483648");
}

TEST_CASE("dtypes that do not fit are refused by name", "[kv_cache][cpu]") {
  Parts parts;
  std::string message;
  SECTION("an integer cache") {
    parts.k_cache = parts.k_cache.to(at::kInt);
    message = "k_cache must be float32, float16, bfloat16 or float64, got Int";
  }
  SECTION("a float8 cache") {
    parts.k_cache = at::empty({2, 3, 6, 8}, at::kFloat8_e4m3fn);
    message = "k_cache must be float32, float16, bfloat16 or float64, got Float8_e4m3fn";
  }
  SECTION("a complex cache") {
    parts.k_cache = parts.k_cache.to(at::kComplexFloat);
    message = "k_cache must be float32, float16, bfloat16 or float64, got ComplexFloat";
  }
  SECTION("V of another dtype than K") {
    parts.v_cache = parts.v_cache.to(at::kHalf);
    message = "v_cache must be float32, got Half";
  }
  SECTION("V of another 16-bit dtype than K") {
    parts.k_cache = parts.k_cache.to(at::kBFloat16);
    parts.v_cache = parts.v_cache.to(at::kHalf);
    message = "v_cache must be BFloat16, got Half";
  }
  SECTION("float64 scores beside a float32 cache") {
    parts.scores = parts.scores.to(at::kDouble);
    message = "scores must be float32, got Double";
  }
  SECTION("16-bit scores beside a 16-bit cache") {
    parts.k_cache = parts.k_cache.to(at::kHalf);
    parts.v_cache = parts.v_cache.to(at::kHalf);
    parts.scores = parts.scores.to(at::kHalf);
    message = "scores must be float32, got Half";
  }
  SECTION("float32 scores beside a float64 cache") {
    parts.k_cache = parts.k_cache.to(at::kDouble);
    parts.v_cache = parts.v_cache.to(at::kDouble);
    message = "scores must be float64, got Float";
  }
  SECTION("int64 positions") {
    parts.positions = parts.positions.to(at::kLong);
    message = "positions must be int32, got Long";
  }
  CHECK(parts.refusal() == "Error: h2o_evict: " + message);
  CHECK_THROWS_AS(parts.make(), c10::Error);
}

TEST_CASE("a cache that cannot be allocated says why", "[kv_cache][cpu]") {
  CHECK(refusal([] { KVCache::allocate(2, 3, 6, 8, at::kInt); }) ==
        "Error: KVCache::allocate: k_cache must be float32, float16, bfloat16 or float64, got Int");
}

TEST_CASE("tensors of another device are refused by name", "[kv_cache][cpu]") {
  Parts parts;
  std::string name;
  SECTION("v_cache") {
    parts.v_cache = parts.v_cache.to(at::kMeta);
    name = "v_cache";
  }
  SECTION("scores") {
    parts.scores = parts.scores.to(at::kMeta);
    name = "scores";
  }
  SECTION("positions") {
    parts.positions = parts.positions.to(at::kMeta);
    name = "positions";
  }
  CHECK(parts.refusal() ==
        "Error: h2o_evict: " + name + " must be on the device of k_cache, got meta and cpu");
}

TEST_CASE("a view that cannot be written in place is refused", "[kv_cache][cpu]") {
  Parts parts;
  std::string message;
  SECTION("every second element of head_dim") {
    parts.k_cache = floats({2, 3, 6, 16}).slice(3, 0, 16, 2);
    message =
        "k_cache must have stride 1 in head_dim, since it is written in place, got strides [288, "
        "96, 16, 2]";
  }
  SECTION("head_dim before capacity") {
    parts.v_cache = floats({2, 3, 8, 6}).transpose(2, 3);
    message =
        "v_cache must have stride 1 in head_dim, since it is written in place, got strides [144, "
        "48, 1, 6]";
  }
  SECTION("a row that stands for two") {
    parts.k_cache = floats({1, 3, 6, 8}).expand({2, 3, 6, 8});
    message =
        "k_cache must not overlap itself, since it is written in place, got sizes [2, 3, 6, 8] and "
        "strides "
        "[0, 48, 8, 1]";
  }
  SECTION("a head that stands for three") {
    parts.v_cache = floats({2, 1, 6, 8}).expand({2, 3, 6, 8});
    message =
        "v_cache must not overlap itself, since it is written in place, got sizes [2, 3, 6, 8] and "
        "strides "
        "[48, 0, 8, 1]";
  }
  SECTION("scores of one row for two") {
    parts.scores = floats({1, 3, 6}).expand({2, 3, 6});
    message =
        "scores must not overlap itself, since it is written in place, got sizes [2, 3, 6] and "
        "strides [0, 6, 1]";
  }
  SECTION("rows of positions that run into each other") {
    parts.positions = at::full({100}, -1, at::kInt).as_strided({2, 3, 6}, {17, 6, 1});
    message =
        "positions must not overlap itself, since it is written in place, got sizes [2, 3, 6] and "
        "strides [17, 6, 1]";
  }
  CHECK(parts.refusal() == "Error: h2o_evict: " + message);
}

TEST_CASE("parts that share memory are refused by name", "[kv_cache][cpu]") {
  Parts parts;
  std::string names;
  SECTION("K and V are one tensor") {
    parts.v_cache = parts.k_cache;
    names = "k_cache and v_cache";
  }
  SECTION("V starts inside K") {
    const at::Tensor both = floats({3, 3, 6, 8});
    parts.k_cache = both.narrow(0, 0, 2);
    parts.v_cache = both.narrow(0, 1, 2);
    names = "k_cache and v_cache";
  }
  SECTION("scores are elements of K") {
    parts.k_cache = floats({2, 3, 6, 8});
    parts.scores = parts.k_cache.view({-1}).narrow(0, 0, 36).view({2, 3, 6});
    names = "scores and k_cache";
  }
  SECTION("scores are elements of V") {
    parts.scores = parts.v_cache.view({-1}).narrow(0, 0, 36).view({2, 3, 6});
    names = "scores and v_cache";
  }
  SECTION("positions are the bits of scores") {
    parts.positions = parts.scores.view(at::kInt);
    names = "positions and scores";
  }
  SECTION("positions are bits of K") {
    parts.positions = parts.k_cache.view({-1}).narrow(0, 0, 36).view({2, 3, 6}).view(at::kInt);
    names = "positions and k_cache";
  }
  SECTION("positions are bits of V") {
    parts.positions = parts.v_cache.view({-1}).narrow(0, 0, 36).view({2, 3, 6}).view(at::kInt);
    names = "positions and v_cache";
  }
  CHECK(parts.refusal() ==
        "Error: h2o_evict: " + names + " must not share memory, since both are written in place");
}

TEST_CASE("a tensor that is not there is refused by name", "[kv_cache][cpu]") {
  Parts parts;
  std::string name;
  SECTION("k_cache") {
    parts.k_cache = at::Tensor();
    name = "k_cache";
  }
  SECTION("v_cache") {
    parts.v_cache = at::Tensor();
    name = "v_cache";
  }
  SECTION("scores") {
    parts.scores = at::Tensor();
    name = "scores";
  }
  SECTION("positions") {
    parts.positions = at::Tensor();
    name = "positions";
  }
  CHECK_THAT(parts.refusal(),
             Catch::Matchers::StartsWith("Error: h2o_evict: " + name + " must be "));
}

TEST_CASE("a sparse tensor is refused by name", "[kv_cache][cpu]") {
  Parts parts;
  parts.k_cache = parts.k_cache.to_sparse();
  CHECK_THAT(parts.refusal(), Catch::Matchers::StartsWith("Error: h2o_evict: k_cache must "));
}

TEST_CASE("a cache of the meta device has sizes alone", "[kv_cache][meta]") {
  const KVCache cache =
      KVCache::allocate(2, 3, 6, 8, at::TensorOptions(at::kHalf).device(at::kMeta));
  CHECK(cache.capacity() == 6);
  CHECK(cache.scores.scalar_type() == at::kFloat);
  CHECK(cache.positions.device() == at::Device(at::kMeta));
}
