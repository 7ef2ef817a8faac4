#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/unique_fd.h"
#include "core/checkpoint/safetensors.h"
#include "receiver/models/family.h"
#include "receiver/weight_index.h"
#include "tests/receiver/deepseek_inventory.h"
#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

namespace fs = std::filesystem;

const std::string kExperts = "layers.0.ffn.experts.";
const std::string kChanged =
    "launch constant model.layers.0.ffn.experts.l2_activation_scale: captured graphs have another value than the greatest of "
    "layers.0.ffn.experts.*.w2.input_scale; an update that changes it is taken after the engine said that it captures its graphs again "
    "(EngineEvent::kRecapture)";

/// One layer of DeepSeek-V4.1 with four NVFP4 experts on two ranks, which expert parallelism divides. Expert 2, of rank 1, has the greatest
/// input scale.
class GlobalValuesOfNvfp4 : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string config = testing::replaced(testing::v41_tiny_config(128, 128, 4), "\"fp4\"", "\"fp4\",\"moe_quant_algo\":\"NVFP4\"");
    std::map<std::string, MadeTensor> tensors;
    for (std::int32_t rank = 0; rank < 2; ++rank) {
      ModelRequest request;
      request.parallel.ep = 2;
      request.rank = rank;
      const WeightIndex index(build_deepseek_v4(request, testing::json(config)).value_or_throw());
      for (const WeightIndex::Needed& needed : index.needed(index.scopes())) {
        const TensorRule& rule = index.rule(needed.rule);
        tensors[needed.name] = {needed.name, rule.dtypes.front(), rule.shape};
      }
    }
    std::vector<MadeTensor> list;
    for (const auto& [name, tensor] : tensors) list.push_back(tensor);
    fs::create_directories(weights());
    write_checkpoint(weights(), list, 3);
    std::ofstream(fs::path(weights()) / "config.json") << config;
    for (int expert = 0; expert < 4; ++expert) {
      for (const char* matrix : {"w1", "w2", "w3"}) set(expert, std::string(matrix) + ".weight_scale_2", 0.5F);
      set(expert, "w2.input_scale", expert == 2 ? 0.75F : 0.25F);
    }
    for (const char* rank : {"0", "1"}) {
      ranks_.push_back(std::make_unique<Serve>(
          std::vector<std::string>{"--job", "nvfp4", "--checkpoint", weights(), "--layout", "ep2", "--rank", rank}));
    }
  }

  std::string weights() const { return (files_.path() / "weights").string(); }
  void set(int expert, const std::string& leaf, float number) {
    const fs::path path = fs::path(weights()) / "model.safetensors";
    const std::string name = kExperts + std::to_string(expert) + "." + leaf;
    std::int64_t at = 0;
    {
      const SafetensorsFile file = SafetensorsFile::open(path).value_or_throw();
      const TensorInfo* info = file.find(name);
      if (info == nullptr) throw std::runtime_error("no tensor " + name);
      at = info->begin;
    }
    const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (::pwrite(fd.get(), &number, sizeof(number), at) != sizeof(number)) throw std::runtime_error("write " + path.string());
  }
  Outcome push(const std::string& version) const {
    return run_program({"headrace", "push", weights(), "--to", "nvfp4", "--version", version});
  }
  static void expect_served(const std::string& version) {
    const Outcome status = run_program({"headrace", "status", "nvfp4"});
    EXPECT_EQ(status.code, 0);
    EXPECT_NE(status.out.find(version), std::string::npos) << status.out;
    EXPECT_EQ(status.out.find("torn"), std::string::npos) << status.out;
  }
  /// Both ranks refuse for this and nothing else.
  static void expect_refused(const Outcome& outcome, const std::string& why) {
    EXPECT_EQ(outcome.code, 3) << outcome.err;
    EXPECT_NE(outcome.err.find("2 defects, nothing was written"), std::string::npos) << outcome.err;
    for (const char* rank : {"0", "1"}) {
      const std::string line = std::string("engine-0 rank ") + rank + ", manifest: " + why;
      EXPECT_NE(outcome.err.find(line), std::string::npos) << outcome.err;
    }
  }

  PrivateRunDirectory run_directory_;
  ScratchDir files_;
  std::vector<std::unique_ptr<Serve>> ranks_;
};

TEST_F(GlobalValuesOfNvfp4, ThatStayAreTakenAndThoseThatChangeAConstantAreRefusedBeforeTheFirstByte) {
  const Outcome first = push("run/1");
  ASSERT_EQ(first.code, 0) << first.err;
  set(0, "w2.input_scale", 0.75F);
  set(2, "w2.input_scale", 0.5F);
  for (const char* matrix : {"w1", "w3"}) set(1, std::string(matrix) + ".weight_scale_2", 0.125F);
  const Outcome same = push("run/2");
  ASSERT_EQ(same.code, 0) << same.err;
  run_json({"verify", weights(), "nvfp4"}, 0);
  set(3, "w2.input_scale", 1.5F);
  expect_refused(push("run/3"), kChanged + " (expected 0.75, got 1.5)");
  expect_served("run/2");
  const JsonValue planned = run_json({"plan", weights(), "--layout", "ep2"}, 0);
  EXPECT_EQ(number(planned, "values"), 12);
}

TEST_F(GlobalValuesOfNvfp4, ThatMakeAPairMustBeEqual) {
  set(3, "w3.weight_scale_2", 0.50001F);
  expect_refused(
      push("run/1"),
      "layers.0.ffn.experts.3.w3.weight_scale_2: not the value of layers.0.ffn.experts.3.w1.weight_scale_2; the engine keeps one "
      "number for both, they may differ by 1e-05 of the greater (expected 0.5, got 0.50001)");
  set(3, "w3.weight_scale_2", 0.500004F);
  EXPECT_EQ(push("run/1").code, 0);
}

/// The same from the program that is written from docs/protocol.md alone.
class GlobalValuesFromPython : public GlobalValuesOfNvfp4 {
 protected:
  void SetUp() override {
    if (!fs::exists(kPython) || run_program({kPython, "-B", "-c", "import zmq, msgpack"}).code != 0) {
      GTEST_SKIP() << "python3-zmq and python3-msgpack are not installed";
    }
    GlobalValuesOfNvfp4::SetUp();
  }
  /// With a statement run before it, which may change its parts.
  Outcome send(const std::string& version, const std::string& statement = "") const {
    return run_program({kPython, "-B", "-c",
                        "import sys\nsys.path.insert(0, '" + std::string(HEADRACE_SOURCE_DIR) +
                            "/examples')\nimport python_sender as sender\n" + statement + "\nsys.exit(sender.main())",
                        weights(), "--job", "nvfp4", "--version", version});
  }
  /// Debian's own interpreter: it sees Debian's packages, whatever else comes first in PATH.
  const std::string kPython = "/usr/bin/python3";
};

TEST_F(GlobalValuesFromPython, AreToldAndChecked) {
  const Outcome first = send("run/1");
  ASSERT_EQ(first.code, 0) << first.err;
  run_json({"verify", weights(), "nvfp4"}, 0);
  set(2, "w2.input_scale", 0.5F);
  const Outcome changed = send("run/2");
  EXPECT_EQ(changed.code, 3);
  EXPECT_NE(changed.err.find(kChanged + " (expected 0.75, actual 0.5)"), std::string::npos) << changed.err;
  expect_served("run/1");
}

TEST_F(GlobalValuesFromPython, ThatAreNotToldOrNotTrueAreFoundByName) {
  const Outcome silent = send("run/1", "sender.value_asked = lambda rules, name: False");
  EXPECT_EQ(silent.code, 3);
  EXPECT_NE(silent.err.find("layers.0.ffn.experts.0.w1.weight_scale_2: WELCOME asks for its value, MANIFEST of sender python-0 has none"),
            std::string::npos)
      << silent.err;
  const Outcome lying = send("run/1",
                             "true = sender.Update.asked_values\n"
                             "def told(update, welcomes):\n"
                             "  return [[e, b'\\0\\0\\0\\x3f' if update.tensors[e].name.endswith('.1.w2.input_scale') else v]\n"
                             "          for e, v in true(update, welcomes)]\n"
                             "sender.Update.asked_values = told");
  EXPECT_EQ(lying.code, 3);
  EXPECT_NE(lying.err.find("layers.0.ffn.experts.1.w2.input_scale: MANIFEST said that it holds the bytes 0000003f, others were sent"),
            std::string::npos)
      << lying.err;
  EXPECT_EQ(send("run/1").code, 0);
}

}  // namespace
}  // namespace headrace::system_test
