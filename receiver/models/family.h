#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "core/base/status.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/json.h"
#include "kernels/strided_copy.h"
#include "receiver/expert_map.h"

namespace [[gnu::visibility("default")]] headrace {

/// How one engine's ranks divide the model. Written "ep4", "tp2" or "tp2,ep4"; "tp1" is a single rank.
struct ParallelLayout {
  std::int32_t tp = 1;
  std::int32_t ep = 1;
  /// Ranks of the engine: the larger of both (experts are spread over the same ranks as tensor parallelism).
  std::int32_t ranks() const noexcept { return tp > ep ? tp : ep; }
  std::string to_string() const;
};
Result<ParallelLayout> parse_layout(std::string_view text);

/// Where a tensor's bytes go. For experts: at local slot 0; slot s adds s * slot_stride to the destination.
struct Placement {
  std::uint32_t storage = 0;  // index into ModelLayout::storages
  Box box;                    // the part of the checkpoint tensor that this rank wants
  StridedCopy copy;           // source side: packed bytes of the whole checkpoint tensor; only bytes inside `box` are read
  std::int64_t slot_stride = 0;
};

/// Placement::storage of what is gathered in the scratch of a staged group.
inline constexpr std::uint32_t kScratchStorage = UINT32_MAX;

/// The scope of host-resident tables.
inline constexpr std::string_view kTablesScope = "tables";

/// What the family knows about one checkpoint tensor, or about one (layer, suffix) of all experts.
struct TensorRule {
  std::string param;          // the engine's runtime name of the parameter
  std::string shard;          // "w1", "w2", "w3", "0", "1"; empty when the tensor is the whole parameter
  std::vector<Dtype> dtypes;  // accepted as they are; the first is what storage holds and placements count their bytes in
  /// Accepted too, and converted to dtypes.front() on arrival: of F32, F16 and BF16. Their nest is the same one over elements: source steps
  /// grow or shrink with the width of an element, counts and destinations stay.
  std::vector<Dtype> casts{};
  Shape shape;  // of the checkpoint tensor
  std::string scope = "target";
  std::vector<Placement> placements;
  bool optional = false;    // coverage does not ask for it
  std::int32_t group = -1;  // index into ModelLayout::groups, whose scratch the placement lies in; place_groups() sets it
};

/// A tensor with a name of its own.
struct NamedRule {
  std::string name;  // checkpoint name
  TensorRule rule;
};

/// All experts of one (layer, suffix): names `<prefix><expert>.<suffix>`, e.g. prefix "layers.3.ffn.experts.", suffix "w1.weight".
struct ExpertRule {
  std::string prefix;
  std::string suffix;
  TensorRule rule;
  std::uint32_t map = 0;  // index into ModelLayout::experts: which slots hold the experts of this layer
};

struct StorageSpec {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Shape shape;
  std::vector<std::int64_t> strides;  // elements; empty for contiguous
  std::int64_t bytes = 0;
  std::vector<std::string> owners{"target"};
  bool optional = false;
  std::string alias_of{};  // the storage whose memory this one shares; empty for none
};

/// Bytes that no checkpoint tensor brings: zero pads and the like. Written at bind and after each discard.
struct ConstantRule {
  std::uint32_t storage = 0;
  StridedCopy copy;            // source strides all 0
  std::uint32_t constant = 0;  // 4-byte pattern
};

/// Global scales of which the engine keeps one for two tensors: expert by expert, the values of `<prefix><expert>.<first>` and
/// `<prefix><expert>.<second>` must be equal, each a number of the rule that has the name. Values travel in MANIFEST, since no single rank
/// need have the bytes of both before it accepts.
struct PairedValues {
  std::uint32_t map = 0;  // index into ModelLayout::experts
  std::string prefix;
  std::string first;
  std::string second;
  double tolerance = 0;  // of the greater one
};

/// A number that captured graphs have by value, so that an update must not change it: the greatest of the values of
/// `<prefix><expert>.<suffix>` over all experts of `map`, of all ranks. A reduction, never a copy.
struct LaunchConstant {
  std::string name;  // the engine's
  Dtype dtype = Dtype::kF32;
  Shape shape;
  std::uint32_t map = 0;  // index into ModelLayout::experts
  std::string prefix;
  std::string suffix;
  std::string scope = "target";
};

/// Tensors that land by computation instead of by a copy: they are gathered, packed, in a scratch of the receiver, and when all are there
/// the engine's hook makes the outputs of them. A sender brings them one after the other, with no other group in between.
struct StagedGroup {
  std::string name;                    // for messages
  std::string hook;                    // which of the engine's hooks
  std::vector<NamedRule> entries;      // no placement: the whole tensor is wanted; one placement: its box is
  std::vector<std::uint32_t> outputs;  // storages that the hook writes
  std::int64_t work_bytes = 0;         // scratch that the hook wants for itself
};

/// What the engine's own loader would do with a name: the parameter, shard and logical expert that it loads, that it drops the name, or
/// that it finds nothing for it.
struct ScanAnswer {
  enum class Kind : std::uint8_t { kUnknown, kDropped, kParam } kind = Kind::kUnknown;
  std::string param;
  std::string shard;
  std::int32_t expert = -1;
};
/// The last resort of the index, for names that are none of the rules. Any thread; time may grow with the name and the model.
using NameScan = std::function<ScanAnswer(std::string_view name)>;

/// A family's answer: everything that the rest of the receiver needs to know about a model on one rank. A value; built by a pure function.
struct ModelLayout {
  std::string family;
  std::string variant;
  ParallelLayout parallel;
  std::int32_t rank = 0;
  std::vector<ExpertMap> experts;  // one per MoE layer; empty: a dense model
  std::vector<StorageSpec> storages;
  std::vector<NamedRule> named;
  std::vector<ExpertRule> expert_rules;
  std::vector<ConstantRule> constants;
  std::vector<PairedValues> paired_values;
  std::vector<LaunchConstant> launch_constants;
  /// Checkpoint names of one tensor each, the one that is written first. An update may bring several of them, if they are equal: the others
  /// are compared by what MANIFEST says of them, and dropped.
  std::vector<std::vector<std::string>> tied;
  std::vector<StagedGroup> groups;
  NameScan scan;  // may be empty: names that are no rule are then unknown
};

struct ModelRequest {
  std::string family = "auto";  // auto | deepseek_v4 | fused_moe | dense
  /// The form that the engine keeps the weights in: words of the family, joined by '+', e.g. "padded" or "sglang+fused_shared".
  std::string variant = "plain";
  ParallelLayout parallel;
  std::int32_t rank = 0;
  std::int32_t redundant_experts = 0;         // physical experts beyond the logical ones, over all ranks
  std::vector<std::string> scopes{"target"};  // which models this engine holds: target, draft, vision
  std::optional<Dtype> dtype{};               // what floating-point tensors are kept as; none: as the checkpoint has them
};

/// The words of a variant. kUnsupported names one that is not in `known`, or one that is there twice.
Result<std::vector<std::string>> variant_words(std::string_view family, std::string_view variant, std::span<const std::string_view> known);

/// Builds the layout from config.json and, for families that take names from the checkpoint (dense), its headers.
/// kInvalidArgument: a missing or odd config value by its key, a division that leaves a rest by its two numbers; kUnsupported: a variant or
/// layout that the family has not, or a dtype where the family does not convert.
Result<ModelLayout> build_model(const ModelRequest& request, const JsonValue* config, std::span<const CheckpointTensor> tensors);

// One function per family, in a file of its own.
Result<ModelLayout> build_deepseek_v4(const ModelRequest& request, const JsonValue& config);
Result<ModelLayout> build_fused_moe(const ModelRequest& request, const JsonValue& config, std::span<const CheckpointTensor> tensors);
Result<ModelLayout> build_dense(const ModelRequest& request, const JsonValue* config, std::span<const CheckpointTensor> tensors);

}  // namespace headrace
