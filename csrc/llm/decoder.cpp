#include "llm/decoder.h"

#include "llm/gpt_neox.h"
#include "llm/llama.h"
#include "llm/opt.h"

namespace h2o::llm {

std::unique_ptr<Decoder> load_decoder(const std::filesystem::path& folder,
                                      const DecoderConfig& config, at::ScalarType dtype,
                                      at::Device device) {
  const Weights weights(folder, dtype, device);
  switch (config.architecture) {
    case Architecture::kLlama:
      return std::make_unique<Llama>(config, weights);
    case Architecture::kOpt:
      return std::make_unique<Opt>(config, weights);
    case Architecture::kGptNeoX:
      return std::make_unique<GptNeoX>(config, weights);
  }
  TORCH_INTERNAL_ASSERT(false, "no such architecture");
}

}  // namespace h2o::llm
