#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace h2o::llm {

// Chooses the tokens of one row: the likeliest, or nucleus sampling (Holtzman et al., arXiv
// 1904.09751). Draws on the CPU, so that one seed gives the same tokens on every device, and the
// same that `h2o-kv generate` draws.
class Sampler {
 public:
  //   temperature  >= 0; 0 = greedy
  //   top_p        0 < top_p <= 1: of the probability, from the likeliest token down
  Sampler(double temperature, double top_p, uint64_t seed);

  // Out of logits [vocab_size].
  int64_t choose(const at::Tensor& logits);

 private:
  double temperature_, top_p_;
  at::Generator generator_;
};

}  // namespace h2o::llm
