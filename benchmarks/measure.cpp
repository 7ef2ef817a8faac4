#include "benchmarks/measure.h"

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "core/base/check.h"

namespace headrace::bench {
namespace {

/// Rows are compared with references and printed by report.h, all at the end.
class SilentReporter final : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& /*context*/) override { return true; }
  void ReportRuns(const std::vector<Run>& /*runs*/) override {}
};

}  // namespace

std::vector<std::vector<double>> interleave(const std::string& name, std::size_t rounds, std::span<const TimedWork> works) {
  HEADRACE_CHECK(rounds >= kRoundsMin, "a median needs rounds");
  fmt::print(stderr, "measuring {}\n", name);
  std::vector<std::vector<double>> seconds(works.size());
  std::exception_ptr failure;
  bool warm = false;
  // One iteration is one round. Google Benchmark would time one work after the other, each with as many iterations as it likes; the time
  // is taken by hand instead, because each round has to see all works once.
  const auto round = [&](benchmark::State& state) {
    for ([[maybe_unused]] auto iteration : state) {
      try {
        if (!warm)
          for (const TimedWork& work : works) work();
        warm = true;
        for (std::size_t w = 0; w < works.size(); ++w) seconds[w].push_back(works[w]());
        state.SetIterationTime(seconds.front().back());
      } catch (...) {
        failure = std::current_exception();
        state.SkipWithError("the work failed");
        break;
      }
    }
  };
  benchmark::ClearRegisteredBenchmarks();
  benchmark::RegisterBenchmark(name.c_str(), round)->UseManualTime()->Iterations(static_cast<benchmark::IterationCount>(rounds));
  SilentReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter, "all");
  benchmark::ClearRegisteredBenchmarks();
  if (failure) std::rethrow_exception(failure);
  for (const std::vector<double>& each : seconds) HEADRACE_CHECK(each.size() == rounds, "every round sees every work");
  return seconds;
}

}  // namespace headrace::bench
