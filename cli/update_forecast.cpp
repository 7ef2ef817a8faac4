#include "cli/update_forecast.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/base/clock.h"
#include "core/base/mapped_region.h"
#include "core/wire/limits.h"
#include "receiver/applier.h"
#include "receiver/expert_runs.h"
#include "receiver/global_values.h"
#include "receiver/host_storage.h"
#include "receiver/staged_groups.h"
#include "receiver/sync_plan.h"
#include "receiver/update_session.h"
#include "receiver/weight_index.h"
#include "sender_sdk/bucket_filler.h"
#include "sender_sdk/bucket_plan.h"
#include "sender_sdk/entry_table.h"

namespace headrace::cli {
namespace {

constexpr std::size_t kDefectsTold = 50;
constexpr MemoryId kStaging{1};
const std::string kSenderName = "plan";

/// One rank: its model on reserved addresses, and the update as its session would see it.
struct Rank {
  explicit Rank(ModelLayout layout, HostStorage reserved) : index(std::move(layout)), storage(std::move(reserved)) {}

  WeightIndex index;
  HostStorage storage;
  PlanGeometry geometry;
  std::unique_ptr<UpdateSession> session;
  ExpertRuns runs;
};

/// What the ranks would refuse. What several of them say in the same words is told once.
class Defects {
 public:
  void add(std::size_t rank, const SyncPlan::Outcome& outcome) {
    total_ += outcome.defects_total;
    for (const wire::Failure& defect : outcome.defects) {
      const auto [found, added] = by_message_.try_emplace(defect.message, lines_.size());
      if (added) lines_.push_back({defect.message, {}});
      lines_[found->second].ranks.push_back(rank);
      ++listed_;
    }
  }
  Status status(std::size_t ranks) const {
    if (total_ == 0) return ok_status();
    std::string text;
    for (const Line& line : std::span(lines_).first(std::min(lines_.size(), kDefectsTold))) {
      const bool all = ranks > 1 && line.ranks.size() == ranks;
      text += all ? fmt::format("\n  all {} ranks: {}", ranks, line.message)
                  : fmt::format("\n  rank {}: {}", fmt::join(line.ranks, ", "), line.message);
    }
    const bool more = lines_.size() > kDefectsTold || listed_ < total_;
    return Status(Code::kInvalidArgument, fmt::format("the ranks would refuse this: {} defects{}{}", total_, text, more ? "\n  ..." : ""));
  }

 private:
  struct Line {
    std::string message;
    std::vector<std::size_t> ranks;
  };
  std::vector<Line> lines_;
  std::unordered_map<std::string, std::size_t> by_message_;  // place in lines_
  std::uint64_t total_ = 0;
  std::uint64_t listed_ = 0;
};

class Forecaster {
 public:
  explicit Forecaster(const ForecastInput& input) : input_(input) {
    result_.bucket_bytes = input.bucket_bytes != 0 ? input.bucket_bytes : limits::kBucketBytesDefault;
  }

  Result<UpdateForecast> run() {
    for (std::int32_t rank = 0; rank < input_.request.parallel.ranks(); ++rank) HEADRACE_RETURN_IF_ERROR(add_rank(rank));
    HEADRACE_RETURN_IF_ERROR(entries_.assign(brought()));
    HEADRACE_RETURN_IF_ERROR(agree());
    Result<MappedRegion> staging = reserve_addresses(static_cast<std::size_t>(result_.bucket_bytes));
    if (!staging.ok()) return staging.status();
    staging_ = std::move(staging).value();
    HEADRACE_RETURN_IF_ERROR(transfer());
    report();
    return std::move(result_);
  }

 private:
  Status add_rank(std::int32_t number) {
    ModelRequest request = input_.request;
    request.rank = number;
    Result<ModelLayout> layout = build_model(request, input_.config, input_.model);
    if (!layout.ok()) return layout.status();
    HEADRACE_RETURN_IF_ERROR(place_groups(layout.value()));
    Result<HostStorage> storage = HostStorage::reserve(layout.value());
    if (!storage.ok()) return storage.status();
    auto rank = std::make_unique<Rank>(std::move(layout).value(), std::move(storage).value());
    Result<PlanGeometry> geometry = PlanGeometry::build(rank->index, rank->storage.table());
    if (!geometry.ok()) return geometry.status();
    rank->geometry = std::move(geometry).value();
    ranks_.push_back(std::move(rank));
    return ok_status();
  }

  std::vector<SenderEntry> brought() const {
    std::vector<SenderEntry> entries;
    if (input_.brought) {
      for (const CheckpointTensor& tensor : *input_.brought) entries.push_back({tensor.name, tensor.dtype, tensor.shape, std::nullopt});
      return entries;
    }
    std::unordered_set<std::string> seen;
    for (const auto& rank : ranks_) {
      for (const WeightIndex::Needed& needed : rank->index.needed(input_.scopes)) {
        if (!seen.insert(needed.name).second) continue;
        const TensorRule& rule = rank->index.rule(needed.rule);
        entries.push_back({needed.name, rule.dtypes.front(), rule.shape, std::nullopt});
      }
    }
    std::sort(entries.begin(), entries.end(), [](const SenderEntry& a, const SenderEntry& b) { return natural_less(a.name, b.name); });
    return entries;
  }

  /// MANIFEST and ACCEPT of every rank, then the sender's plan.
  Status agree() {
    PlanOptions options;
    options.scopes = input_.scopes;
    options.optional_names = input_.optional_names;
    Defects defects;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = *ranks_[r];
      std::vector<SenderPart> parts(1);
      parts[0] = {kSenderName, entries_.digest(), {entries_.entries().begin(), entries_.entries().end()}};
      const Result<GlobalValues> values = GlobalValues::build(rank.index);
      if (!values.ok()) return values.status();
      result_.values = std::max<std::uint64_t>(result_.values, values.value().asked(parts, input_.scopes).size());
      SyncPlan::Outcome outcome = SyncPlan::compile(rank.index, rank.geometry, rank.storage.table().digest(), std::move(parts), options);
      defects.add(r, outcome);
      if (!outcome.plan) continue;
      wanted_.push_back(outcome.plan->accept_for(0).wanted);
      rank.session = std::make_unique<UpdateSession>(SessionId{1}, WeightVersion{kSenderName, 1}, clock_, limits::kDeadlineMsDefault);
      rank.session->senders.push_back(SessionSender{.name = kSenderName, .peer = {}, .part = {}});
      rank.session->adopt(std::move(outcome.plan));
    }
    HEADRACE_RETURN_IF_ERROR(defects.status(ranks_.size()));
    const std::vector<std::span<const wire::Wanted>> wanted(wanted_.begin(), wanted_.end());
    std::vector<std::string> names;
    for (std::size_t r = 0; r < ranks_.size(); ++r) names.push_back(fmt::format("rank {}", r));
    Result<BucketPlan> plan = make_bucket_plan({entries_.entries(), wanted, names, result_.bucket_bytes, Unwanted::kRefuse});
    if (!plan.ok()) return plan.status();
    plan_ = std::move(plan).value();
    return ok_status();
  }

  Status transfer() {
    filler_.begin_update(plan_, wanted_, result_.bucket_bytes);
    for (std::uint32_t e = 0; e < entries_.entries().size(); ++e) {
      for (const Cell& cell : plan_.cells_of(e)) {
        const std::int64_t bytes = cell.box.elements() * dtype_bytes(entries_.entries()[e].dtype);
        if (filler_.open() && !filler_.fits(bytes)) HEADRACE_RETURN_IF_ERROR(take_bucket());
        if (!filler_.open()) filler_.begin_bucket(0);
        const std::int64_t offset = filler_.reserve(bytes);
        filler_.add_packed(e, cell, bytes, kStaging, offset, FingerprintSum{});
      }
    }
    return filler_.open() ? take_bucket() : ok_status();
  }

  Status take_bucket() {
    std::vector<std::vector<wire::Extent>> extents = filler_.close_unsent();
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (!extents[r].empty()) HEADRACE_RETURN_IF_ERROR(take_bucket(*ranks_[r], std::move(extents[r])));
    }
    return ok_status();
  }

  Status take_bucket(Rank& rank, std::vector<wire::Extent> extents) {
    SessionSender& sender = rank.session->senders.front();
    work_ = {};
    batch_.clear();
    wire::Failure failure;
    const auto resolve = [&](MemoryId) { return Result<std::span<const std::byte>>(staging_.bytes()); };
    HEADRACE_RETURN_IF_ERROR(rank.session->check_bucket(sender, {sender.buckets, std::move(extents)}, 1, resolve, work_, failure));
    sender.consumed = sender.buckets;
    const ApplyStats stats = make_batch(work_.jobs, rank.runs, batch_);
    wire::Receipt& receipt = rank.session->receipt;
    ++receipt.batches;
    receipt.copies += batch_.size();
    receipt.runs += stats.runs;
    receipt.run_experts += stats.run_experts;
    for (const CopyJob& job : batch_) receipt.applied_bytes += static_cast<std::uint64_t>(job.copy.dst_bytes());
    return ok_status();
  }

  void report() {
    result_.family = ranks_.front()->index.layout().family;
    result_.tensors = entries_.entries().size();
    result_.wire_bytes = filler_.wire_bytes();
    result_.buckets = filler_.buckets();
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const Rank& rank = *ranks_[r];
      RankForecast& forecast = result_.ranks.emplace_back();
      forecast.receipt = rank.session->receipt;
      forecast.receipt.rank = static_cast<std::uint32_t>(r);
      const std::span<const PlanTensor> tensors = rank.session->plan->tensors();
      forecast.converted =
          static_cast<std::uint64_t>(std::count_if(tensors.begin(), tensors.end(), [](const PlanTensor& t) { return !t.cast.none(); }));
      forecast.groups = rank.session->plan->groups(0).size();
      forecast.storages = rank.storage.table().size();
      forecast.storage_bytes = static_cast<std::uint64_t>(rank.storage.table().total_bytes());
      for (const ConstantRule& constant : rank.index.layout().constants) {
        forecast.padding_bytes += static_cast<std::uint64_t>(constant.copy.dst_bytes());
      }
      result_.applied_bytes += forecast.receipt.applied_bytes;
    }
    for (std::size_t e = 0; e < entries_.entries().size(); ++e) {
      if (wanted_.front()[e].ignored) result_.ignored.push_back(entries_.entries()[e].name);
    }
  }

  const ForecastInput& input_;
  const SteadyClock clock_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  EntryTable entries_;
  BucketFiller::WantedLists wanted_;
  BucketPlan plan_;
  BucketFiller filler_;
  MappedRegion staging_;
  ApplyWork work_;
  std::vector<CopyJob> batch_;
  UpdateForecast result_;
};

}  // namespace

Result<UpdateForecast> forecast_update(const ForecastInput& input) {
  return Forecaster(input).run();
}

}  // namespace headrace::cli
