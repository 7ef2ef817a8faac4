#include "core/base/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace headrace {
namespace {

TEST(WorkerPool, CallsTheBodyOnceForEachIndex) {
  for (const std::size_t threads : {1U, 2U, 5U}) {
    WorkerPool pool(threads);
    for (int round = 0; round < 100; ++round) {
      std::vector<std::atomic<int>> calls(37);
      pool.run(calls.size(), [&](std::size_t i) { calls[i].fetch_add(1); });
      for (const auto& call : calls) EXPECT_EQ(call.load(), 1);
    }
  }
}

TEST(WorkerPool, DoesNothingForAnEmptyLoop) {
  WorkerPool pool(2);
  pool.run(0, [](std::size_t) { FAIL(); });
}

}  // namespace
}  // namespace headrace
