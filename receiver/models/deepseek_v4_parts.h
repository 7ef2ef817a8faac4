#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "receiver/models/deepseek_v4_config.h"
#include "receiver/models/layout_writer.h"
#include "receiver/models/matrix_form.h"

namespace headrace {

/// How an engine keeps the scales of a linear whose blocks of rows and columns share one.
enum class ScaleForm : std::uint8_t {
  kBlocks,    // one for each block, as in the checkpoint
  kRows,      // one for each row and block of columns: each row of scales repeated
  kSwizzled,  // the same, in tiles of 128 rows and 4 columns
};

/// This rank's place among those that divide the dense tensors, and the form of their scales.
struct DeepseekV4Sharding {
  std::int64_t tp = 1;
  std::int64_t rank = 0;
  ScaleForm scales = ScaleForm::kBlocks;
};

/// How one linear differs from a whole copy in its loader's form.
struct LinearForm {
  enum class Cut : std::uint8_t { kNone, kRows, kColumns } cut = Cut::kNone;
  std::int64_t padded = 0;      // size of the cut dimension with zeros at its end, before it is cut; 0: as it is
  Permutation permutation{};    // of the rank's part
  bool rows_permuted = false;   // then blocks of rows come apart, and each row needs a scale of its own
  std::int64_t group_rows = 0;  // the scales are words in groups of so many rows; 0: the sharding's form
};

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

  DeepseekV4Parts(LayoutWriter& writer, const DeepseekV4Config& config, Rename rename, std::string scope, DeepseekV4Sharding sharding);

  const DeepseekV4Sharding& sharding() const noexcept { return sharding_; }
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
  /// A table of `rows` that the ranks divide, padded at its end with zeros so that it divides.
  void vocabulary(const std::string& name, Dtype dtype, std::int64_t rows, std::int64_t columns) const;
  /// A block-scaled matrix: "<name>.weight" and "<name>.scale". E8M0 scales live as bytes: a numeric conversion would destroy them.
  /// A cut that does not fall between blocks fails the writer.
  void linear(const std::string& name, std::int64_t rows, std::int64_t columns, const LinearForm& form = {}) const;
  /// Parts stacked by rows into one parameter, e.g. fused_wqa_wkv rows = [q_lora | head_dim].
  void stacked(const std::string& name, std::string_view leaf, const std::vector<Dtype>& dtypes, Dtype stored,
               std::span<const Stacked> parts, std::int64_t columns) const;
  /// Both of a block-scaled matrix. Each part is cut by itself.
  void stacked_linear(const std::string& name, std::span<const Stacked> parts, std::int64_t columns, const LinearForm& form = {}) const;

 private:
  struct NamedPart {
    std::string name;
    std::string shard;
    MatrixPart part;
  };
  static std::vector<NamedPart> with_leaf(std::vector<NamedPart> parts, std::string_view leaf);
  /// The rank's share of a dimension, which is cut when `cut`.
  Share share(std::int64_t size, bool cut, std::int64_t padded, const std::string& what) const;
  /// The same part in blocks of rows and columns.
  MatrixPart in_blocks(const MatrixPart& part, const std::string& what) const;
  void scales(const std::string& name, std::vector<NamedPart> parts, const LinearForm& form) const;
  /// A storage, the rules of its parts and its padding.
  void matrix(const std::string& name, Dtype stored, const std::vector<Dtype>& dtypes, MatrixLayout layout,
              std::span<const NamedPart> parts, const Permutation& permutation) const;
  /// A tensor that fills `dst` from byte `dst_offset` on, unchanged.
  void flat_rule(std::string name, std::string_view shard, std::vector<Dtype> dtypes, Shape shape, std::uint32_t dst,
                 std::int64_t dst_offset) const;

  LayoutWriter* writer_;
  const DeepseekV4Config* config_;
  Rename rename_;
  std::string scope_;
  DeepseekV4Sharding sharding_;
};

}  // namespace headrace
