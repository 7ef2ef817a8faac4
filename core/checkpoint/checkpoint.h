#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/checkpoint/json.h"
#include "core/checkpoint/safetensors.h"

namespace [[gnu::visibility("default")]] headrace {

/// A tensor of a checkpoint and the file it lies in.
struct CheckpointTensor : TensorInfo {
  std::size_t file = 0;  // into Checkpoint::files()
};

/// A folder of safetensors files, or one such file, opened and checked. Move-only. Any thread may call the const members.
class Checkpoint {
 public:
  /// With model.safetensors.index.json in the folder: exactly the files that it names, and index and headers must agree tensor by tensor.
  /// Without it: every *.safetensors of the folder, in natural order ("2" before "10"). A name that two files hold is refused.
  /// config.json is read from the same folder when it is there.
  static Result<Checkpoint> open(const std::filesystem::path& dir_or_file, ParseMode mode = ParseMode::kStrict,
                                 DataPart data = DataPart::kWhole);

  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  /// File after file, within a file by offset.
  const std::vector<CheckpointTensor>& tensors() const noexcept;
  const std::vector<SafetensorsFile>& files() const noexcept;
  const CheckpointTensor* find(std::string_view name) const;
  /// The tensor's bytes, in a private read-only mapping of its file that lives as long as this object. Fails when the file was cut or has
  /// grown since open(), and when it was opened with its data ignored. `tensor` is one of tensors().
  Result<std::span<const std::byte>> bytes(const CheckpointTensor& tensor) const;
  /// config.json; nullptr when the folder has none.
  const JsonValue* config() const noexcept;
  /// Sum over all tensors.
  std::int64_t total_bytes() const noexcept;

 private:
  struct State;
  explicit Checkpoint(std::unique_ptr<State> state) noexcept;

  std::unique_ptr<State> state_;
};

/// Whether `a` comes before `b` when runs of digits compare as numbers.
bool natural_less(std::string_view a, std::string_view b) noexcept;

/// The tensors by natural order of their names: layers and experts by their numbers, as a trainer would emit them. Headers list them
/// otherwise (by size and letters), and experts in order are what a receiver joins into long runs. Pointers into `checkpoint`.
std::vector<const CheckpointTensor*> natural_order(const Checkpoint& checkpoint);

}  // namespace headrace
