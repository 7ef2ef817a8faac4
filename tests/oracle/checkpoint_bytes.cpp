#include "tests/oracle/checkpoint_bytes.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <stdexcept>

namespace headrace::oracle {
namespace {

/// Maps a whole file; the mapping goes with the last copy of the pointer.
std::pair<std::shared_ptr<const void>, std::size_t> map_file(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw std::runtime_error("cannot open " + path.string());
  struct stat info{};
  const bool known = ::fstat(fd, &info) == 0;
  const auto bytes = known ? static_cast<std::size_t>(info.st_size) : 0;
  void* address = bytes >= 8 ? ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
  ::close(fd);
  if (address == MAP_FAILED) throw std::runtime_error("cannot map " + path.string());
  return {std::shared_ptr<const void>(address, [bytes](const void* p) { ::munmap(const_cast<void*>(p), bytes); }), bytes};
}

std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBu;
  x ^= x >> 31;
  return x;
}

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;

std::uint64_t stream_of(const std::string& name, std::uint64_t version) {
  std::uint64_t fnv = 0xCBF29CE484222325u;
  for (const char c : name) {
    fnv ^= static_cast<std::uint8_t>(c);
    fnv *= 0x100000001B3u;
  }
  return mix(mix(fnv) ^ (version * kGolden));
}

/// Byte k of a word's mask: six random bits, and below them version % 3 + 1.
std::uint8_t mask_byte(std::uint64_t random_word, std::uint64_t version, std::uint64_t k) {
  return static_cast<std::uint8_t>(((random_word >> (8 * k)) & 0xFC) | (version % 3 + 1));
}

}  // namespace

CheckpointBytes::CheckpointBytes(const std::filesystem::path& dir) : dir_(dir) {
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    if (entry.path().extension() == ".safetensors") read_file(entry.path());
  }
  if (tensors_.empty()) throw std::runtime_error("no tensors in " + dir.string());
}

void CheckpointBytes::read_file(const std::filesystem::path& path) {
  const auto [mapping, file_bytes] = map_file(path);
  mappings_.push_back(mapping);
  const auto* file = static_cast<const std::uint8_t*>(mapping.get());
  std::uint64_t header_bytes = 0;
  for (std::uint64_t i = 0; i < 8; ++i) header_bytes |= static_cast<std::uint64_t>(file[i]) << (8 * i);
  if (header_bytes > file_bytes - 8) throw std::runtime_error("header of " + path.string() + " is longer than the file");
  const std::uint64_t data = 8 + header_bytes;
  const nlohmann::json header = nlohmann::json::parse(file + 8, file + data);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto begin = entry.at("data_offsets").at(0).get<std::uint64_t>();
    const auto end = entry.at("data_offsets").at(1).get<std::uint64_t>();
    if (begin > end || end > file_bytes - data) throw std::runtime_error(name + " lies outside " + path.string());
    Tensor tensor{name, entry.at("dtype").get<std::string>(), entry.at("shape").get<std::vector<std::uint64_t>>(), {}};
    tensor.bytes = std::span(file + data + begin, end - begin);
    if (!tensors_.emplace(name, std::move(tensor)).second) throw std::runtime_error(name + " stands in two files");
  }
}

const CheckpointBytes::Tensor& CheckpointBytes::at(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw std::runtime_error("no tensor " + name + " in " + dir_.string());
  return found->second;
}

std::uint8_t version_byte(const std::string& name, std::uint64_t version, std::uint64_t offset, std::uint8_t base) {
  if (version == 0) return base;
  const std::uint64_t random_word = mix(stream_of(name, version) + offset / 8 * kGolden);
  return static_cast<std::uint8_t>(base ^ mask_byte(random_word, version, offset % 8));
}

std::vector<std::uint8_t> version_bytes(const CheckpointBytes::Tensor& tensor, std::uint64_t version) {
  std::vector<std::uint8_t> bytes(tensor.bytes.begin(), tensor.bytes.end());
  if (version == 0) return bytes;
  const std::uint64_t stream = stream_of(tensor.name, version);
  std::uint64_t whole_words = bytes.size() / 8;
  for (std::uint64_t word = 0; word < whole_words; ++word) {
    const std::uint64_t random_word = mix(stream + word * kGolden);
    for (std::uint64_t k = 0; k < 8; ++k) bytes[8 * word + k] ^= mask_byte(random_word, version, k);
  }
  for (std::uint64_t o = 8 * whole_words; o < bytes.size(); ++o) bytes[o] = version_byte(tensor.name, version, o, bytes[o]);
  return bytes;
}

}  // namespace headrace::oracle
