#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/base/ids.h"
#include "sender_sdk/release_once.h"

namespace headrace {

/// Which staging buffers are filled, on the way, or free. A slot carries one bucket at a time; its memory is there once the sender has
/// announced it, and stays for all later updates. The owner serialises the calls.
class StagingPool {
 public:
  struct Slot {
    MemoryId memory;
    std::span<std::byte> bytes;  // empty: not allocated yet
    bool filling = false;
    std::uint32_t holders = 0;                           // receivers that have not consumed it yet
    std::vector<std::shared_ptr<ReleaseOnce>> releases;  // of what its bucket reads in place
  };

  explicit StagingPool(std::uint32_t slots) : slots_(slots) {}

  std::vector<Slot>& slots() noexcept { return slots_; }
  bool has_free() const noexcept;
  /// Takes a free slot for filling.
  std::optional<std::uint32_t> take();
  /// Its bucket is on the way to this many receivers.
  void sent(std::uint32_t slot, std::uint32_t holders);
  /// One receiver has consumed the slot's bucket. What nobody reads any more is moved to `dropped`.
  void consumed(std::uint32_t slot, std::vector<std::shared_ptr<ReleaseOnce>>& dropped);
  /// All slots are free again.
  void reset(std::vector<std::shared_ptr<ReleaseOnce>>& dropped);

 private:
  std::vector<Slot> slots_;
};

}  // namespace headrace
