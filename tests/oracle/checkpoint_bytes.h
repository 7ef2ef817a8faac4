#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// A second, naive reading of the project's formats, to judge the first one by. It shares no code with what it judges and throws
/// std::runtime_error where something is not as expected.
namespace headrace::oracle {

/// The tensors of a folder of safetensors files as plain bytes. Read-only after construction, any thread.
class CheckpointBytes {
 public:
  struct Tensor {
    std::string name;
    std::string dtype;
    std::vector<std::uint64_t> shape;
    std::span<const std::uint8_t> bytes;
  };

  /// Maps every *.safetensors file of the folder.
  explicit CheckpointBytes(const std::filesystem::path& dir);

  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  /// Throws when there is no such tensor.
  const Tensor& at(const std::string& name) const;
  const std::filesystem::path& dir() const { return dir_; }

 private:
  void read_file(const std::filesystem::path& path);

  std::filesystem::path dir_;
  std::vector<std::shared_ptr<const void>> mappings_;  // shared: each carries its own munmap
  std::map<std::string, Tensor> tensors_;
};

/// The demo's rule for weight versions: byte `offset` of the tensor `name`, whose byte in the checkpoint is `base`, at `version`.
std::uint8_t version_byte(const std::string& name, std::uint64_t version, std::uint64_t offset, std::uint8_t base);
/// All bytes of a tensor at `version`.
std::vector<std::uint8_t> version_bytes(const CheckpointBytes::Tensor& tensor, std::uint64_t version);

}  // namespace headrace::oracle
