#include "receiver/plain_calls.h"

#include <algorithm>
#include <utility>

namespace headrace {
namespace {

bool is_of(const wire::ManifestEntry& entry, const NamedView& view) {
  return entry.name == view.name && entry.dtype == view.dtype &&
         std::equal(entry.shape.begin(), entry.shape.end(), view.shape.begin(), view.shape.end());
}

}  // namespace

void PlainCalls::begin(const Digest& experts) {
  if (experts != experts_) {
    calls_.clear();
    whole_ = nullptr;
  }
  experts_ = experts;
  taken_ = 0;
}

std::shared_ptr<const SyncPlan> PlainCalls::known(std::span<const NamedView> tensors) const {
  if (taken_ == calls_.size()) return nullptr;
  const std::vector<wire::ManifestEntry>& entries = calls_[taken_]->parts().front().entries;
  return std::equal(entries.begin(), entries.end(), tensors.begin(), tensors.end(), is_of) ? calls_[taken_] : nullptr;
}

void PlainCalls::take(std::shared_ptr<const SyncPlan> plan) {
  if (taken_ == calls_.size()) {
    whole_ = nullptr;
    calls_.push_back(std::move(plan));
  } else if (calls_[taken_] != plan) {
    // Where one call differs the next ones are seldom the same, and two models' plans are not kept for it.
    whole_ = nullptr;
    calls_.resize(taken_);
    calls_.push_back(std::move(plan));
  }
  ++taken_;
}

std::shared_ptr<const SyncPlan> PlainCalls::whole() const {
  return taken_ == calls_.size() ? whole_ : nullptr;
}

void PlainCalls::keep_whole(std::shared_ptr<const SyncPlan> plan) {
  calls_.resize(taken_);
  whole_ = std::move(plan);
}

std::vector<wire::ManifestEntry> PlainCalls::entries() const {
  std::vector<wire::ManifestEntry> entries;
  for (std::size_t c = 0; c < taken_; ++c) {
    const std::vector<wire::ManifestEntry>& call = calls_[c]->parts().front().entries;
    entries.insert(entries.end(), call.begin(), call.end());
  }
  return entries;
}

}  // namespace headrace
