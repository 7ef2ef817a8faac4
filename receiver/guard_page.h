#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/base/mapped_region.h"
#include "core/base/status.h"
#include "core/base/unique_fd.h"
#include "core/base/weight_version.h"

namespace [[gnu::visibility("default")]] headrace {

/// What a rank says of itself on the guard page. Numbers of the page's layout (docs/protocol.md).
enum class SlotState : std::uint32_t {
  kNone = 0,       // nothing was ever committed in this life
  kCommitted = 1,  // the slot's version is whole and proven
  kApplying = 2,   // bytes are being written
  kPrepared = 3,   // written and proven, not yet committed
  kTorn = 4,
  kInDoubt = 5,
};
std::string_view slot_state_name(SlotState state) noexcept;

/// One rank's slot, read consistently.
struct GuardSlot {
  SlotState state = SlotState::kNone;
  std::uint64_t session = 0;
  std::uint64_t run = 0;  // run_number() of the version's run
  std::uint64_t step = 0;
};

/// The whole page as a scheduler sees it: open iff every slot is kCommitted with the same run and step.
struct GuardView {
  std::string engine;
  std::vector<GuardSlot> slots;
  bool open() const noexcept;
};

/// The serving guard of one engine on one host: a page of shared memory in the run directory with one slot per rank. A rank writes its own
/// slot only; readers need no lock and no system call. Any one thread writes; readers are in any process.
class GuardPage {
 public:
  /// Creates the page or joins the one that other ranks of the engine made. kFailedPrecondition when it is for another number of ranks.
  /// Resets our slot.
  static Result<GuardPage> create(const std::filesystem::path& path, const std::string& engine, std::uint32_t ranks, std::uint32_t rank);

  /// Publishes a state of this rank. For kPrepared and kCommitted `version` is what was prepared or committed; otherwise the slot keeps no
  /// version. Cannot fail: two plain stores to the slot's spare bank and one atomic store of its word.
  void publish(SlotState state, std::uint64_t session, const WeightVersion& version) noexcept;
  GuardView view() const;

  /// Maps a page read-only and reads it. For tools, schedulers and tests.
  static Result<GuardView> read(const std::filesystem::path& path);

 private:
  GuardPage(MappedRegion region, std::uint32_t rank) : region_(std::move(region)), rank_(rank) {}
  MappedRegion region_;
  std::uint32_t rank_ = 0;
};

}  // namespace headrace
