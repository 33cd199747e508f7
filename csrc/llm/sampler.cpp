#include "llm/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <limits>
#include <tuple>

namespace h2o::llm {

Sampler::Sampler(double temperature, double top_p, uint64_t seed)
    : temperature_(temperature), top_p_(top_p), generator_(at::detail::createCPUGenerator(seed)) {}

int64_t Sampler::choose(const at::Tensor& logits) {
  if (temperature_ == 0) return logits.argmax().item<int64_t>();
  at::Tensor values = logits.to(at::kCPU, at::kFloat);
  // Below the smallest normal number the quotients would be 0 / 0; it is as good as greedy.
  const double temperature =
      std::max(temperature_, static_cast<double>(std::numeric_limits<float>::min()));
  values = (values - values.max()) / temperature;
  auto [probabilities, order] =
      at::softmax(values, -1).sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  // A token stays while those before it have not reached top_p; the first always does.
  at::Tensor leaves = probabilities.cumsum(-1) - probabilities >= top_p_;
  leaves[0].fill_(false);
  const at::Tensor place =
      at::multinomial(probabilities.masked_fill(leaves, 0), 1, false, generator_);
  return order[place.item<int64_t>()].item<int64_t>();
}

}  // namespace h2o::llm
