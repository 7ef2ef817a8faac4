#include "receiver/models/deepseek_v4_attention.h"

#include <fmt/format.h>

#include <array>

namespace headrace {
namespace {

// Features of a head that the fused kernel takes at a time: of queries, and of outputs. Scales are of 32 rows and columns, so wkv's rows
// show that a head's features divide by either.
constexpr std::int64_t kQueryTurn = 16;
constexpr std::int64_t kOutputTurn = 32;

constexpr std::uint32_t kMinusInfinity = 0xFF800000;

/// Row d of head h goes to row (d / 16) * 16 * heads + h * 16 + d % 16.
StridedCopy query_turns(std::int64_t heads, std::int64_t head_dim, std::int64_t row_bytes) {
  const std::int64_t turn = kQueryTurn * row_bytes;
  return nest_of(0, 0, turn, {{heads, head_dim * row_bytes, turn}, {head_dim / kQueryTurn, turn, heads * turn}});
}

/// In each row, what 32 features of a head have goes behind that of the heads before it; `row_bytes` are those of all features of `heads`.
StridedCopy output_turns(std::int64_t heads, std::int64_t head_dim, std::int64_t rows, std::int64_t row_bytes) {
  const std::int64_t turns = head_dim / kOutputTurn;
  const std::int64_t turn = row_bytes / (heads * turns);
  return nest_of(0, 0, turn, {{rows, row_bytes, row_bytes}, {heads, turns * turn, turn}, {turns, turn, heads * turn}});
}

LinearForm queries(const DeepseekV4Parts& parts, std::int64_t heads, bool mega) {
  LinearForm form{.cut = LinearForm::Cut::kRows};
  if (!mega) return form;
  const std::int64_t head_dim = parts.config().head_dim;
  form.rows_permuted = true;
  form.permutation = [heads, head_dim](std::int64_t, std::int64_t row_bytes) { return query_turns(heads, head_dim, row_bytes); };
  return form;
}

LinearForm outputs(const DeepseekV4Parts& parts, const DeepseekV4AttentionForm& attention) {
  const DeepseekV4Config& c = parts.config();
  LinearForm form{.cut = LinearForm::Cut::kRows};
  if (attention.grouped_wo_a) form.group_rows = c.o_lora;
  if (!attention.mega) return form;
  const std::int64_t heads = parts.writer().divide(c.heads, c.o_groups, "num_attention_heads");
  form.permutation = [heads, head_dim = c.head_dim](std::int64_t rows, std::int64_t row_bytes) {
    return output_turns(heads, head_dim, rows, row_bytes);
  };
  return form;
}

/// The rank's sinks at the start of as many as the kernel takes; one of minus infinity has no effect.
void sinks(const DeepseekV4Parts& parts, const std::string& name, std::int64_t heads) {
  constexpr std::array<std::int64_t, 2> kKernelHeads{64, 128};
  if (heads > kKernelHeads.back()) {
    return parts.writer().fail(
        Status(Code::kUnsupported, fmt::format("layout of deepseek_v4: {} heads on one of {} ranks, the kernels take {}", heads,
                                               parts.sharding().tp, kKernelHeads.back())));
  }
  const std::int64_t padded = heads <= kKernelHeads.front() ? kKernelHeads.front() : kKernelHeads.back();
  const std::int64_t bytes = dtype_bytes(Dtype::kF32);
  const std::uint32_t dst = parts.storage(name, Dtype::kF32, {padded});
  TensorRule rule = parts.rule(dst, "", {Dtype::kF32}, {parts.config().heads});
  const std::int64_t first = parts.sharding().rank * heads;
  rule.placements.push_back(
      {.storage = dst, .box = {{first}, {first + heads}}, .copy = StridedCopy::flat(first * bytes, 0, heads * bytes)});
  parts.writer().named(name, std::move(rule));
  if (padded > heads) parts.writer().constant(dst, nest_of(0, heads * bytes, bytes, {{padded - heads, 0, bytes}}), kMinusInfinity);
}

}  // namespace

void write_deepseek_v4_attention(const DeepseekV4Parts& parts, const std::string& block, const DeepseekV4AttentionForm& form) {
  const DeepseekV4Config& c = parts.config();
  const std::string attn = block + "attn.";
  const std::int64_t heads = parts.writer().divide(c.heads, parts.sharding().tp, "num_attention_heads");
  parts.writer().divide(c.o_groups, parts.sharding().tp, "o_groups");
  const std::array<DeepseekV4Parts::Stacked, 2> low_rank{{{attn + "wq_a", c.q_lora}, {attn + "wkv", c.head_dim}}};
  parts.stacked_linear(attn + "fused_wqa_wkv", low_rank, c.hidden);
  parts.linear(attn + "wq_b", c.heads * c.head_dim, c.q_lora, queries(parts, heads, form.mega));
  parts.linear(attn + "wo_a", c.o_groups * c.o_lora, c.heads * c.head_dim / c.o_groups, outputs(parts, form));
  parts.linear(attn + "wo_b", c.hidden, c.o_groups * c.o_lora, {.cut = LinearForm::Cut::kColumns});
  sinks(parts, attn + "attn_sink", heads);
  parts.tensor(attn + "q_norm.weight", Dtype::kBF16, {c.q_lora});
  parts.tensor(attn + "kv_norm.weight", Dtype::kBF16, {c.head_dim});
  parts.tensor(block + "attn_norm.weight", Dtype::kBF16, {c.hidden});
  parts.tensor(block + "ffn_norm.weight", Dtype::kBF16, {c.hidden});
}

}  // namespace headrace
