#include "core/base/worker_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
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

TEST(WorkerPool, HasTheThreadsThatItIsToldOrOneForEachUsableCoreUpToFour) {
  for (const std::uint32_t threads : {1U, 3U, 4U, 5U, 64U}) EXPECT_EQ(thread_count(threads), threads);
  std::thread([] {
    cpu_set_t all;
    ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
    EXPECT_EQ(thread_count(0), static_cast<std::uint32_t>(std::min(CPU_COUNT(&all), 4)));
    cpu_set_t one;
    CPU_ZERO(&one);
    std::size_t core = 0;
    while (!CPU_ISSET(core, &all)) ++core;
    CPU_SET(core, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(thread_count(0), 1U) << "the others are somebody else's";
  }).join();
}

#ifndef HEADRACE_SANITIZED
TEST(WorkerPool, WorksWithAsManyThreadsAsTheSystemGives) {
  const pid_t child = ::fork();
  if (child == 0) {
    // Enough for what there is and a few stacks.
    const struct rlimit limit = {std::size_t{512} << 20, std::size_t{512} << 20};
    if (::setrlimit(RLIMIT_AS, &limit) != 0) ::_exit(1);
    WorkerPool pool(500);
    std::atomic<int> calls{0};
    pool.run(1'000, [&](std::size_t) { ++calls; });
    ::_exit(calls == 1'000 && pool.threads() > 1 && pool.threads() < 500 ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}
#endif

TEST(WorkerPool, DoesNothingForAnEmptyLoop) {
  WorkerPool pool(2);
  pool.run(0, [](std::size_t) { FAIL(); });
}

}  // namespace
}  // namespace headrace
