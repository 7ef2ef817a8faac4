#include "receiver/models/deepseek_v4_vision.h"

#include <fmt/format.h>

namespace headrace {

void write_deepseek_v4_vision(const DeepseekV4Parts& parts, const DeepseekV4Vision& vision) {
  const std::int64_t hidden = parts.config().hidden;
  const std::int64_t width = vision.width;
  const auto bf16 = [&](const std::string& name, Shape shape) { parts.tensor(name, Dtype::kBF16, std::move(shape)); };
  const auto biased = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
    bf16(name + ".weight", {rows, columns});
    bf16(name + ".bias", {rows});
  };
  for (std::int64_t b = 0; b < vision.blocks; ++b) {
    const std::string block = fmt::format("vision.blocks.{}.", b);
    biased(block + "attn.wqkv", 3 * width, width);
    biased(block + "attn.wo", width, width);
    bf16(block + "mlp.w1.weight", {2 * vision.intermediate, width});
    bf16(block + "mlp.w2.weight", {width, vision.intermediate});
    bf16(block + "norm1.weight", {width});
    bf16(block + "norm2.weight", {width});
  }
  bf16("vision.norm.weight", {width});
  constexpr std::int64_t kColours = 3;
  biased("vision.patch_embed.proj", width, kColours * vision.patch * vision.patch);
  biased("aligner.w1", hidden, vision.downsample * vision.downsample * width);
  biased("aligner.w2", hidden, hidden);
  for (const std::string_view mark : {"image_start", "image_end", "image_newline"}) bf16(std::string(mark), {hidden});
}

}  // namespace headrace
