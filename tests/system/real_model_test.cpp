#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

namespace fs = std::filesystem;

/// The model that `./run test` fetches; empty when it was not fetched.
fs::path minilm() {
  const char* file = std::getenv("HEADRACE_MINILM");
  const fs::path path = file != nullptr ? fs::path(file) : fs::path(HEADRACE_SOURCE_DIR) / "build/minilm/model.safetensors";
  return fs::exists(path) ? path.parent_path() : fs::path();
}

TEST(RealModel, GoesFromDiskIntoARunningRankAndAChangedTensorIsFoundByName) {
  const fs::path model = minilm();
  if (model.empty()) GTEST_SKIP() << "all-MiniLM-L6-v2 is not there: ./run test fetches it, or set HEADRACE_MINILM";
  const PrivateRunDirectory run_directory;
  Serve serve({"--job", "minilm", "--checkpoint", model.string(), "--family", "dense"});
  const JsonValue report = member(run_json({"push", model.string(), "--to", "minilm"}, 0), "report");
  EXPECT_EQ(member(report, "wire_bytes").as_int64(), 90'856'960);
  EXPECT_EQ(member(report, "proven").as_bool(), true);

  const Outcome disk = run_program({"headrace", "fingerprint", model.string()});
  const Outcome live = run_program({"headrace", "fingerprint", "minilm"});
  EXPECT_EQ(disk.code, 0) << disk.err;
  EXPECT_EQ(disk.out, live.out);
  run_json({"verify", model.string(), "minilm"}, 0);

  const ScratchDir changed;
  fs::copy_file(model / "model.safetensors", changed.path() / "model.safetensors");
  flip_byte(changed.path() / "model.safetensors", "encoder.layer.3.attention.self.query.weight", 100'003);
  const JsonValue verified = run_json({"verify", changed.path().string(), "minilm"}, 1);
  ASSERT_EQ(member(verified, "differences").as_array()->size(), 1u);
  const JsonValue& difference = member(verified, "differences").as_array()->at(0);
  EXPECT_EQ(text(difference, "name"), "encoder.layer.3.attention.self.query.weight");
  EXPECT_EQ(member(difference, "offset").as_int64(), 100'003);
  EXPECT_EQ(serve.stop(SIGTERM), 0);
}

}  // namespace
}  // namespace headrace::system_test
