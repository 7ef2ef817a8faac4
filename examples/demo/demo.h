#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/checkpoint/json.h"
#include "examples/demo/child_process.h"
#include "examples/demo/demo_report.h"
#include "examples/demo/judge.h"
#include "examples/demo/make_checkpoint.h"

namespace headrace {

struct DemoOptions {
  std::filesystem::path programs;  // build folder with `headrace` and examples/
  std::filesystem::path work;      // where the checkpoint is cached
  std::string json;
  bool small = false;
  bool poke = false;        // flips a byte in a live rank before the second update is judged: the demo must fail
  bool registered = false;  // trainers keep their weights in memory that the ranks read in place
};

/// Four inference ranks, two trainers, three proven updates, a trainer that dies, and the way back. One thread.
class Demo {
 public:
  explicit Demo(DemoOptions options);
  /// Ends every process that still runs.
  ~Demo();
  Demo(const Demo&) = delete;
  Demo& operator=(const Demo&) = delete;
  /// Ok when the demo could run to its end; result() says what was found.
  Status run();
  const DemoResult& result() const noexcept { return result_; }

 private:
  static constexpr std::uint32_t kRanks = 4;
  static constexpr std::uint64_t kUpdates = 3;

  void choose_size();
  Status make_checkpoint();
  Status start_ranks();
  Result<ChildProcess> start_trainer(std::uint32_t index) const;
  Status start_trainers();
  Status update(std::uint64_t step);
  Status judge_step(DemoStep& step, std::uint64_t version);
  Status kill_a_trainer(std::uint64_t step);
  Status recover(std::uint64_t step);
  Status stop();

  Status send_step(std::uint64_t step);
  /// Waits for one event of both trainers ("synced" or "failed"), showing progress meanwhile.
  Status wait_for_trainers(std::uint64_t step, std::map<std::uint32_t, JsonValue>& events);
  Status wait_for_state(wire::SessionState state, std::int64_t timeout_ms);
  /// What a separate small process reads from the guard page.
  Result<bool> guard_is_open() const;
  void note_memory();
  void line(const std::string& label, const std::string& text) const;

  DemoOptions options_;
  DemoModel model_;
  std::filesystem::path checkpoint_;
  std::string job_;
  std::int64_t bucket_bytes_ = 0;
  std::uint64_t trainer_bytes_ = 0;
  std::uint64_t resident_bytes_max_ = 0;
  std::vector<ChildProcess> ranks_;
  std::vector<ChildProcess> trainers_;
  std::optional<Judge> judge_;
  DemoResult result_;
};

}  // namespace headrace
