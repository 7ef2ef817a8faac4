#include <gtest/gtest.h>

#include <filesystem>

#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

/// The code that README.md shows.
TEST(FirstUpdate, BringsTwoTensorsIntoOneParameterAndLeavesNothingBehind) {
  const PrivateRunDirectory run_directory;
  const Outcome outcome = run_program({"examples/headrace-first-update"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "run-1/1: 256 bytes applied, proven, live weights equal\n");
  const std::filesystem::path jobs = run_directory.scratch() / "headrace";
  EXPECT_TRUE(!std::filesystem::exists(jobs) || std::filesystem::is_empty(jobs));
}

}  // namespace
}  // namespace headrace::system_test
