#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "receiver/models/deepseek_v4_config.h"
#include "receiver/models/layout_writer.h"

namespace headrace {

/// What the parts of one DeepSeek-V4 model (the text model, or its draft) write themselves down with: a part names tensors as the
/// checkpoint does, and the model says how the engine spells them and whose scope they are. Refers to writer and config. One thread.
class DeepseekV4Parts {
 public:
  /// The engine's name of a tensor with this checkpoint name.
  using Rename = std::function<std::string(std::string_view)>;
  /// One part of a stacked parameter.
  struct Stacked {
    std::string name;  // checkpoint name without its leaf
    std::int64_t rows = 0;
  };

  DeepseekV4Parts(LayoutWriter& writer, const DeepseekV4Config& config, Rename rename, std::string scope);

  const DeepseekV4Config& config() const noexcept { return *config_; }
  LayoutWriter& writer() const noexcept { return *writer_; }
  const std::string& scope() const noexcept { return scope_; }
  std::string param_of(std::string_view checkpoint_name) const { return rename_(checkpoint_name); }

  /// A storage of the model, named as the engine spells `checkpoint_name`.
  std::uint32_t storage(std::string_view checkpoint_name, Dtype dtype, Shape shape, std::vector<std::int64_t> strides = {}) const;
  /// The rule of a tensor of `shape` that is shard `shard` of `dst`, without placements so far.
  TensorRule rule(std::uint32_t dst, std::string_view shard, std::vector<Dtype> dtypes, Shape shape) const;

  /// A tensor with a storage of its own, unchanged.
  void tensor(const std::string& name, Dtype dtype, Shape shape) const;
  /// A block-scaled matrix: "<name>.weight" and "<name>.scale". E8M0 scales live as bytes: a numeric conversion would destroy them.
  void linear(const std::string& name, std::int64_t rows, std::int64_t columns) const;
  /// Parts stacked by rows into one parameter, e.g. fused_wqa_wkv rows = [q_lora | head_dim].
  void stacked(const std::string& name, std::string_view leaf, const std::vector<Dtype>& dtypes, Dtype stored,
               std::span<const Stacked> parts, std::int64_t columns) const;
  /// Both of a block-scaled matrix.
  void stacked_linear(const std::string& name, std::vector<Stacked> parts, std::int64_t columns) const;

 private:
  /// A tensor that fills `dst` from byte `dst_offset` on, unchanged.
  void flat_rule(std::string name, std::string_view shard, std::vector<Dtype> dtypes, Shape shape, std::uint32_t dst,
                 std::int64_t dst_offset) const;

  LayoutWriter* writer_;
  const DeepseekV4Config* config_;
  Rename rename_;
  std::string scope_;
};

}  // namespace headrace
