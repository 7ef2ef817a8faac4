#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "cli/commands.h"
#include "cli/model_options.h"
#include "cli/output.h"
#include "cli/update_forecast.h"
#include "sender_sdk/report_json.h"

namespace headrace::cli {
namespace {

constexpr std::size_t kIgnoredPrinted = 10;

/// -1 for "all".
Result<std::int32_t> shown_rank(const std::string& text, std::int32_t ranks) {
  if (text == "all") return -1;
  std::int32_t rank = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (error == std::errc() && end == text.data() + text.size() && rank >= 0 && rank < ranks) return rank;
  return Status(Code::kInvalidArgument, fmt::format("rank '{}': expected all, or 0 to {}", text, ranks - 1));
}

double experts_per_run(const wire::Receipt& receipt) {
  return receipt.runs == 0 ? 0.0 : static_cast<double>(receipt.run_experts) / static_cast<double>(receipt.runs);
}

JsonValue rank_json(const RankForecast& rank) {
  JsonObject object;
  object.set("rank", rank.receipt.rank)
      .set("storages", rank.storages)
      .set("storage_bytes", rank.storage_bytes)
      .set("padding_bytes", rank.padding_bytes)
      .set("groups", rank.groups)
      .set("converted", rank.converted);
  return add_counts(object, rank.receipt).done();
}

void print_forecast(const UpdateForecast& forecast, const PlanOptions& options) {
  fmt::print("{}, {}, {}: {} tensors, {} on the wire in {} buckets of at most {}, {} applied by {} rank{}\n", forecast.family,
             options.model.variant, options.model.layout, forecast.tensors, human_bytes(forecast.wire_bytes), forecast.buckets,
             human_bytes(static_cast<std::uint64_t>(forecast.bucket_bytes)), human_bytes(forecast.applied_bytes), forecast.ranks.size(),
             forecast.ranks.size() == 1 ? "" : "s");
  fmt::print("{:>5} {:>10} {:>10} {:>8} {:>9} {:>8} {:>8} {:>8} {:>8} {:>12} {:>10} {:>10}\n", "rank", "wire", "applied", "tensors",
             "converted", "experts", "batches", "copies", "runs", "experts/run", "padding", "storage");
}

void print_rank(const RankForecast& rank) {
  const wire::Receipt& receipt = rank.receipt;
  fmt::print("{:>5} {:>10} {:>10} {:>8} {:>9} {:>8} {:>8} {:>8} {:>8} {:>12.1f} {:>10} {:>10}\n", receipt.rank,
             human_bytes(receipt.wire_bytes), human_bytes(receipt.applied_bytes), receipt.tensors, rank.converted, receipt.expert_tensors,
             receipt.batches, receipt.copies, receipt.runs, experts_per_run(receipt), human_bytes(rank.padding_bytes),
             human_bytes(rank.storage_bytes));
}

void print_groups(const UpdateForecast& forecast) {
  std::uint64_t groups = 0;
  for (const RankForecast& rank : forecast.ranks) groups += rank.groups;
  if (groups != 0) fmt::print("{} staged groups over all ranks are computed by hooks of the engine\n", groups);
}

void print_ignored(const std::vector<std::string>& ignored) {
  if (ignored.empty()) return;
  fmt::print("{} name{} that the engine drops:", ignored.size(), ignored.size() == 1 ? "" : "s");
  for (std::size_t i = 0; i < std::min(ignored.size(), kIgnoredPrinted); ++i) fmt::print(" {}", ignored[i]);
  fmt::print("{}\n", ignored.size() > kIgnoredPrinted ? " ..." : "");
}

Result<UpdateForecast> forecast(const PlanOptions& options, const ModelSource& source, const ModelRequest& request) {
  ForecastInput input;
  input.request = request;
  input.config = source.config();
  input.model = source.tensors();
  if (source.checkpoint) {
    std::vector<CheckpointTensor>& brought = input.brought.emplace();
    for (const CheckpointTensor* tensor : natural_order(*source.checkpoint)) brought.push_back(*tensor);
  }
  input.scopes = options.model.scopes;
  input.optional_names = options.optional_names;
  input.bucket_bytes = options.bucket_bytes;
  return forecast_update(input);
}

}  // namespace

ExitCode plan(const PlanOptions& options) {
  const JsonOutput json(options.json, "plan");
  const Result<ModelRequest> request = model_request(options.model, 0);
  if (!request.ok()) return finish_failed(request.status(), json);
  const Result<std::int32_t> shown = shown_rank(options.rank, request.value().parallel.ranks());
  if (!shown.ok()) return finish_failed(shown.status(), json);
  const Result<ModelSource> source = open_model_source(options.checkpoint);
  if (!source.ok()) return finish_failed(source.status(), json);
  const Result<UpdateForecast> forecast_made = forecast(options, source.value(), request.value());
  if (!forecast_made.ok()) return finish_failed(forecast_made.status(), json);
  const UpdateForecast& update = forecast_made.value();

  JsonValue::Array ranks;
  JsonValue::Array shares;  // of the one sender
  if (json.text_allowed()) print_forecast(update, options);
  for (const RankForecast& rank : update.ranks) {
    if (shown.value() >= 0 && rank.receipt.rank != static_cast<std::uint32_t>(shown.value())) continue;
    ranks.push_back(rank_json(rank));
    shares.push_back(to_json(rank.receipt.wire_bytes));
    if (json.text_allowed()) print_rank(rank);
  }
  if (json.text_allowed()) {
    print_groups(update);
    if (update.values != 0) fmt::print("{} values are told before the first byte\n", update.values);
    print_ignored(update.ignored);
  }
  return finish_done(json, json.document()
                               .set("family", update.family)
                               .set("variant", options.model.variant)
                               .set("layout", request.value().parallel.to_string())
                               .set("dtype", options.model.dtype)
                               .set("scopes", json_array(options.model.scopes))
                               .set("tensors", update.tensors)
                               .set("wire_bytes", update.wire_bytes)
                               .set("applied_bytes", update.applied_bytes)
                               .set("buckets", update.buckets)
                               .set("bucket_bytes", update.bucket_bytes)
                               .set("values", update.values)
                               .set("ignored", json_array(update.ignored))
                               .set("senders", JsonValue::Array{JsonObject().set("name", "sender").set("wire_bytes", shares).done()})
                               .set("ranks", ranks));
}

}  // namespace headrace::cli
