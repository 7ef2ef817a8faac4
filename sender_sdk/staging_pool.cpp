#include "sender_sdk/staging_pool.h"

#include <algorithm>
#include <iterator>

namespace headrace {
namespace {

void drop(StagingPool::Slot& slot, std::vector<std::shared_ptr<ReleaseOnce>>& dropped) {
  std::move(slot.releases.begin(), slot.releases.end(), std::back_inserter(dropped));
  slot.releases.clear();
}

}  // namespace

bool StagingPool::has_free() const noexcept {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.filling && slot.holders == 0; });
}

std::optional<std::uint32_t> StagingPool::take() {
  for (std::uint32_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].filling || slots_[i].holders != 0) continue;
    slots_[i].filling = true;
    return i;
  }
  return std::nullopt;
}

void StagingPool::sent(std::uint32_t slot, std::uint32_t holders) {
  slots_[slot].filling = false;
  slots_[slot].holders = holders;
}

void StagingPool::consumed(std::uint32_t slot, std::vector<std::shared_ptr<ReleaseOnce>>& dropped) {
  if (slots_[slot].holders > 0) --slots_[slot].holders;
  if (slots_[slot].holders == 0) drop(slots_[slot], dropped);
}

void StagingPool::reset(std::vector<std::shared_ptr<ReleaseOnce>>& dropped) {
  for (Slot& slot : slots_) {
    slot.filling = false;
    slot.holders = 0;
    drop(slot, dropped);
  }
}

}  // namespace headrace
