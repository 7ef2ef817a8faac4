#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "examples/demo/make_checkpoint.h"
#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

namespace fs = std::filesystem;

const std::vector<MadeTensor>& small_model() {
  static const std::vector<MadeTensor> kModel{{"encoder.0.weight", Dtype::kF32, {96, 64}},
                                              {"encoder.0.bias", Dtype::kBF16, {96}},
                                              {"encoder.10.weight", Dtype::kF8E4M3, {130, 77}},
                                              {"ids", Dtype::kI64, {1, 33}},
                                              {"scale", Dtype::kF32, {}}};
  return kModel;
}

/// A dense model of a few tensors, served by one rank of job "job".
class DenseJob : public ::testing::Test {
 protected:
  void SetUp() override {
    write_checkpoint(old_weights(), small_model(), 1);
    write_checkpoint(new_weights(), small_model(), 2);
  }

  std::string old_weights() const { return (files_.path() / "old").string(); }
  std::string new_weights() const { return (files_.path() / "new").string(); }
  std::vector<std::string> serve_words() const { return {"--job", "job", "--checkpoint", old_weights(), "--family", "dense"}; }

  PrivateRunDirectory run_directory_;
  ScratchDir files_;
};

TEST_F(DenseJob, IsUpdatedAndServesExactlyTheNewBytes) {
  Serve serve(serve_words());
  const JsonValue pushed = run_json({"push", new_weights(), "--to", "job", "--version", "run-7/3"}, 0);
  const JsonValue& report = member(pushed, "report");
  EXPECT_EQ(text(report, "version"), "run-7/3");
  EXPECT_EQ(member(report, "proven").as_bool(), true);
  EXPECT_EQ(text(report, "data_path"), "shm");
  const std::int64_t bytes = 96 * 64 * 4 + 96 * 2 + 130 * 77 + 33 * 8 + 4;
  EXPECT_EQ(member(report, "wire_bytes").as_int64(), bytes);
  EXPECT_EQ(member(report, "applied_bytes").as_int64(), bytes);

  const Outcome disk = run_program({"headrace", "fingerprint", new_weights()});
  const Outcome live = run_program({"headrace", "fingerprint", "job"});
  EXPECT_EQ(disk.code, 0) << disk.err;
  EXPECT_EQ(live.code, 0) << live.err;
  EXPECT_EQ(disk.out, live.out);
  EXPECT_NE(disk.out, run_program({"headrace", "fingerprint", old_weights()}).out);
  run_json({"verify", new_weights(), "job"}, 0);

  const JsonValue status = run_json({"status", "job"}, 0);
  const JsonValue& rank = member(status, "ranks").as_array()->at(0);
  EXPECT_EQ(text(rank, "version"), "run-7/3");
  EXPECT_EQ(text(rank, "state"), "idle");
  EXPECT_EQ(member(rank, "serving").as_bool(), true);
  EXPECT_EQ(member(member(status, "guards").as_array()->at(0), "open").as_bool(), true);
  EXPECT_EQ(serve.stop(SIGTERM), 0);
}

TEST_F(DenseJob, TakesTheNextStepWhenNoVersionIsGiven) {
  const Serve serve(serve_words());
  EXPECT_EQ(text(member(run_json({"push", new_weights(), "--to", "job"}, 0), "report"), "version"), "push/1");
  EXPECT_EQ(text(member(run_json({"push", old_weights(), "--to", "job"}, 0), "report"), "version"), "push/2");
  run_json({"push", new_weights(), "--to", "job", "--version", "push/2"}, 3);
  run_json({"verify", old_weights(), "job"}, 0);
}

TEST_F(DenseJob, FindsAChangedTensorByNameAndByte) {
  const Serve serve(serve_words());
  run_json({"push", new_weights(), "--to", "job"}, 0);
  flip_byte(fs::path(new_weights()) / "model.safetensors", "encoder.10.weight", 4'321);
  const JsonValue verified = run_json({"verify", new_weights(), "job"}, 1);
  const JsonValue::Array& differences = *member(verified, "differences").as_array();
  ASSERT_EQ(differences.size(), 1u);
  EXPECT_EQ(text(differences[0], "name"), "encoder.10.weight");
  EXPECT_EQ(member(differences[0], "offset").as_int64(), 4'321);
  EXPECT_EQ(member(verified, "equal").as_int64(), 4);
}

TEST_F(DenseJob, IsReachedOverLoopbackTcpAndInline) {
  std::vector<std::string> words = serve_words();
  words.insert(words.end(), {"--endpoint", "tcp://127.0.0.1:0"});
  const Serve serve(words);
  ASSERT_TRUE(serve.endpoint().starts_with("tcp://127.0.0.1:")) << serve.ready_line();
  const JsonValue pushed = run_json({"push", new_weights(), "--to", serve.endpoint(), "--job", "job", "--data-path", "inline"}, 0);
  EXPECT_EQ(text(member(pushed, "report"), "data_path"), "inline");
  run_json({"verify", new_weights(), serve.endpoint(), "--job", "job"}, 0);
}

TEST_F(DenseJob, IsNotOfferedBeyondThisHost) {
  std::vector<std::string> words{"headrace", "serve"};
  for (const std::string& word : serve_words()) words.push_back(word);
  words.insert(words.end(), {"--endpoint", "tcp://0.0.0.0:0"});
  const Outcome outcome = run_program(words);
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_NE(outcome.err.find("0.0.0.0"), std::string::npos) << outcome.err;
}

TEST_F(DenseJob, LoadsACheckpointBeforeItServes) {
  std::vector<std::string> words = serve_words();
  words.insert(words.end(), {"--load", new_weights()});
  const Serve serve(words);
  run_json({"verify", new_weights(), "job"}, 0);
  const JsonValue status = run_json({"status", "job"}, 0);
  const std::string version = text(member(status, "ranks").as_array()->at(0), "version");
  EXPECT_EQ(version.size(), 34u) << version;
  EXPECT_TRUE(version.ends_with("/0")) << version;
}

TEST_F(DenseJob, RefusesASecondReceiverOfTheSameRank) {
  const Serve serve(serve_words());
  std::vector<std::string> words{"headrace", "serve"};
  for (const std::string& word : serve_words()) words.push_back(word);
  const Outcome second = run_program(words);
  EXPECT_EQ(second.code, 3) << second.err;
  EXPECT_NE(second.err.find("engine-0-0"), std::string::npos) << second.err;
  run_json({"push", new_weights(), "--to", "job"}, 0);
}

TEST_F(DenseJob, RefusesWrongShapesAndUnknownNamesWithoutWritingAByte) {
  const Serve serve(serve_words());
  run_json({"push", old_weights(), "--to", "job"}, 0);
  const std::string wrong = (files_.path() / "wrong").string();
  std::vector<MadeTensor> tensors = small_model();
  tensors[0].shape = {64, 96};
  tensors.push_back({"stranger", Dtype::kF32, {2}});
  write_checkpoint(wrong, tensors, 3);
  const JsonValue refused = run_json({"push", wrong, "--to", "job"}, 3);
  const std::string message = text(member(refused, "error"), "message");
  for (const char* part : {"encoder.0.weight", "[64,96]", "[96,64]", "stranger"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
  run_json({"verify", old_weights(), "job"}, 0);
}

TEST_F(DenseJob, LeavesNothingBehindWhenItIsToldToStop) {
  Serve serve(serve_words());
  run_json({"push", new_weights(), "--to", "job"}, 0);
  EXPECT_EQ(serve.stop(SIGINT), 0);
  EXPECT_FALSE(fs::exists(run_directory_.job("job")));
}

TEST_F(DenseJob, IsCleanedUpAfterByDoctorWhenItWasKilled) {
  Serve serve(serve_words());
  EXPECT_EQ(serve.stop(SIGKILL), -SIGKILL);
  EXPECT_TRUE(fs::exists(run_directory_.job("job")));
  EXPECT_FALSE(member(run_json({"doctor"}, 1), "leftovers").as_array()->empty());
  EXPECT_FALSE(member(run_json({"doctor", "--clean"}, 0), "leftovers").as_array()->empty());
  EXPECT_FALSE(fs::exists(run_directory_.job("job")));
  EXPECT_TRUE(member(run_json({"doctor"}, 0), "leftovers").as_array()->empty());
}

TEST_F(DenseJob, StartsAgainWhereAKilledOneWas) {
  Serve first(serve_words());
  first.stop(SIGKILL);
  const Serve second(serve_words());
  run_json({"push", new_weights(), "--to", "job"}, 0);
  run_json({"verify", new_weights(), "job"}, 0);
}

TEST_F(DenseJob, IsAnUnreachablePeerOnceItIsGone) {
  Serve serve(serve_words());
  const std::string endpoint = serve.endpoint();
  serve.stop(SIGKILL);
  run_json({"push", new_weights(), "--to", endpoint}, 4);
  run_json({"push", new_weights(), "--to", "job"}, 4);
  run_json({"verify", new_weights(), "job"}, 4);
  const JsonValue status = run_json({"status", "job"}, 0);
  EXPECT_EQ(member(member(status, "ranks").as_array()->at(0), "alive").as_bool(), false);
}

TEST(Commands, TellUsageErrorsFromRefusedInput) {
  const PrivateRunDirectory run_directory;
  EXPECT_EQ(run_program({"headrace"}).code, 2);
  EXPECT_EQ(run_program({"headrace", "no-such-verb"}).code, 2);
  EXPECT_EQ(run_program({"headrace", "push", "somewhere"}).code, 2);
  EXPECT_EQ(run_program({"headrace", "serve", "--job", "j", "--rank", "x"}).code, 2);
  EXPECT_EQ(run_program({"headrace", "--help"}).code, 0);
  run_json({"serve", "--job", "j", "--config", "/nonexistent"}, 3);
  run_json({"push", "/nonexistent", "--to", "job"}, 3);
  run_json({"fingerprint", "/nonexistent/x"}, 3);
  run_json({"fingerprint", "no-such-job"}, 4);
  run_json({"status", "no-such-job"}, 4);
  run_json({"status"}, 0);
}

/// The model of the demo, small: four layers' names and structure with few experts.
DemoModel tiny_model() {
  DemoModel model = demo_model(true);
  model.layers = 2;
  model.experts = 16;
  model.vocab = 256;
  return model;
}

class ExpertJob : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(make_demo_checkpoint(checkpoint(), tiny_model()).ok());
    fs::create_directories(config());
    fs::copy_file(checkpoint() / "config.json", config() / "config.json");
  }

  fs::path checkpoint() const { return files_.path() / "checkpoint"; }
  fs::path config() const { return files_.path() / "config"; }
  std::vector<std::string> serve_words(int rank) const {
    return {"--job", "experts", "--config", config().string(), "--variant", "padded", "--layout", "ep2", "--rank", std::to_string(rank)};
  }

  PrivateRunDirectory run_directory_;
  ScratchDir files_;
};

TEST_F(ExpertJob, IsUpdatedOverAllRanksAndAddsUpToTheCheckpoint) {
  const Serve first(serve_words(0));
  const Serve second(serve_words(1));
  const JsonValue report = member(run_json({"push", checkpoint().string(), "--to", "experts"}, 0), "report");
  EXPECT_EQ(member(report, "receipts").as_array()->size(), 2u);
  EXPECT_GT(*member(report, "applied_bytes").as_int64(), *member(report, "wire_bytes").as_int64());
  const Outcome disk = run_program({"headrace", "fingerprint", checkpoint().string()});
  const Outcome live = run_program({"headrace", "fingerprint", "experts"});
  EXPECT_EQ(live.code, 0) << live.err;
  EXPECT_EQ(disk.out, live.out);
  run_json({"verify", checkpoint().string(), "experts"}, 0);
}

TEST_F(ExpertJob, FindsAChangedExpertByNameAndByte) {
  const Serve first(serve_words(0));
  const Serve second(serve_words(1));
  run_json({"push", checkpoint().string(), "--to", "experts"}, 0);
  const std::string name = "layers.1.ffn.experts.13.w2.weight";
  for (const auto& entry : fs::directory_iterator(checkpoint())) {
    if (entry.path().extension() != ".safetensors") continue;
    if (Result<SafetensorsFile> file = SafetensorsFile::open(entry.path()); file.ok() && file.value().find(name) != nullptr) {
      flip_byte(entry.path(), name, 12'345);
    }
  }
  const JsonValue verified = run_json({"verify", checkpoint().string(), "experts"}, 1);
  ASSERT_EQ(member(verified, "differences").as_array()->size(), 1u);
  const JsonValue& difference = member(verified, "differences").as_array()->at(0);
  EXPECT_EQ(text(difference, "name"), name);
  EXPECT_EQ(member(difference, "offset").as_int64(), 12'345) << text(difference, "what");
}

TEST_F(ExpertJob, IsNotUpdatedInPartWhenARankIsLost) {
  const Serve first(serve_words(0));
  Serve second(serve_words(1));
  run_json({"push", checkpoint().string(), "--to", "experts"}, 0);
  second.stop(SIGKILL);
  const JsonValue refused = run_json({"push", checkpoint().string(), "--to", "experts", "--connect-timeout-ms", "500"}, 3);
  EXPECT_NE(text(member(refused, "error"), "message").find("1 of 2 ranks"), std::string::npos);
  const JsonValue status = run_json({"status", "experts"}, 0);
  EXPECT_EQ(text(member(status, "ranks").as_array()->at(0), "version"), "push/1");
  const JsonValue& guard = member(status, "guards").as_array()->at(0);
  EXPECT_EQ(text(guard, "state"), "open on its page, but rank 1 is dead");
}

TEST_F(ExpertJob, IsNotUpdatedWhenARankDoesNotAnswer) {
  const Serve first(serve_words(0));
  Serve second(serve_words(1));
  run_json({"push", checkpoint().string(), "--to", "experts"}, 0);
  ASSERT_EQ(::kill(second.pid(), SIGSTOP), 0);
  const JsonValue late =
      run_json({"push", checkpoint().string(), "--to", "experts", "--version", "push/9", "--connect-timeout-ms", "500"}, 3);
  EXPECT_NE(text(member(late, "error"), "message").find("missing 1"), std::string::npos) << text(member(late, "error"), "message");
  ASSERT_EQ(::kill(second.pid(), SIGCONT), 0);
  run_json({"push", checkpoint().string(), "--to", "experts", "--version", "push/10"}, 0);
  run_json({"verify", checkpoint().string(), "experts"}, 0);
}

TEST_F(ExpertJob, RepairsTheOneRankOfFourThatWasKilledWhileTheOthersKeepTheirVersion) {
  const auto words = [&](int rank) {
    auto all = serve_words(rank);
    *(std::find(all.begin(), all.end(), "ep2")) = "ep4";
    return all;
  };
  std::vector<std::unique_ptr<Serve>> ranks;
  for (int r = 0; r < 4; ++r) ranks.push_back(std::make_unique<Serve>(words(r)));
  run_json({"push", checkpoint().string(), "--to", "experts"}, 0);
  run_json({"push", checkpoint().string(), "--to", "experts", "--repair"}, 3);
  ranks[2]->stop(SIGKILL);
  ranks[2] = std::make_unique<Serve>(words(2));
  const auto guard_open = [&] { return member(member(run_json({"status", "experts"}, 0), "guards").as_array()->at(0), "open").as_bool(); };
  EXPECT_EQ(guard_open(), false);
  run_json({"push", checkpoint().string(), "--to", "experts", "--repair", "--version", "push/2"}, 3);
  const JsonValue report = member(run_json({"push", checkpoint().string(), "--to", "experts", "--repair"}, 0), "report");
  EXPECT_EQ(text(report, "version"), "push/1");
  ASSERT_EQ(member(report, "receipts").as_array()->size(), 1u);
  EXPECT_EQ(member(member(report, "receipts").as_array()->at(0), "rank").as_int64(), 2);
  EXPECT_EQ(guard_open(), true);
  run_json({"verify", checkpoint().string(), "experts"}, 0);
  const JsonValue status = run_json({"status", "experts"}, 0);
  for (const JsonValue& rank : *member(status, "ranks").as_array()) {
    EXPECT_EQ(text(rank, "version"), "push/1");
    EXPECT_EQ(member(rank, "updates").as_int64(), 1) << "the others were left alone";
  }
  run_json({"push", checkpoint().string(), "--to", "experts"}, 0);
}

TEST_F(DenseJob, LeavesOutWhatTheCommandLineNames) {
  const Serve serve(serve_words());
  const JsonValue refused = run_json({"push", new_weights(), "--to", "job", "--ignore", "*"}, 3);
  EXPECT_NE(text(member(refused, "error"), "message").find("leave no tensor"), std::string::npos);
  const JsonValue missing = run_json({"push", new_weights(), "--to", "job", "--only", "*weight"}, 3);
  EXPECT_NE(text(member(missing, "error"), "message").find("no sender brings it"), std::string::npos)
      << text(member(missing, "error"), "message");
  run_json({"push", new_weights(), "--to", "job", "--only", "*"}, 0);
}

}  // namespace
}  // namespace headrace::system_test
