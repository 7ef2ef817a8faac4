#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "examples/demo/make_checkpoint.h"
#include "tests/system/program.h"

namespace headrace::system_test {
namespace {

namespace fs = std::filesystem;

const std::string kScript = std::string(HEADRACE_SOURCE_DIR) + "/examples/python_sender.py";
/// Debian's own interpreter: it sees Debian's python3-zmq and python3-msgpack, whatever else comes first in PATH.
const std::string kPython = "/usr/bin/python3";

std::vector<std::string> python(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {kPython, "-B"});
  return arguments;
}

/// The program with `statement` run before it, which may change its parts.
std::vector<std::string> changed_sender(const std::string& statement, const std::vector<std::string>& arguments) {
  const std::string folder = fs::path(kScript).parent_path().string();
  std::vector<std::string> words = python({"-c", "import sys\nsys.path.insert(0, '" + folder + "')\nimport python_sender as sender\n" +
                                                     statement + "\nsys.exit(sender.main())"});
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

/// Sent by a program that shares no line with ours: what it does is what docs/protocol.md says.
class PythonSender : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(kPython) || run_program(python({"-c", "import zmq, msgpack"})).code != 0) {
      GTEST_SKIP() << "python3-zmq and python3-msgpack are not installed";
    }
    write_checkpoint(weights(), tensors(), 7);
  }

  static std::vector<MadeTensor> tensors() {
    return {{"encoder.0.weight", Dtype::kF32, {96, 64}},
            {"encoder.0.bias", Dtype::kBF16, {96}},
            {"encoder.10.weight", Dtype::kF8E4M3, {130, 77}},
            {"ids", Dtype::kI64, {1, 33}},
            {"scale", Dtype::kF32, {}},
            {"table", Dtype::kF32, {200, 200}}};
  }
  std::string weights() const { return (files_.path() / "weights").string(); }
  std::vector<std::string> serve_words() const { return {"--job", "job", "--checkpoint", weights(), "--family", "dense"}; }
  static Outcome send(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), kScript);
    return run_program(python(std::move(arguments)));
  }

  PrivateRunDirectory run_directory_;
  ScratchDir files_;
};

TEST_F(PythonSender, UpdatesARankThroughSharedMemoryInBucketsSmallerThanATensor) {
  const Serve serve(serve_words());
  const Outcome sent = send({weights(), "--job", "job", "--version", "python/3", "--bucket-bytes", "65536"});
  EXPECT_EQ(sent.code, 0) << sent.err;
  const std::string bytes = std::to_string(96 * 64 * 4 + 96 * 2 + 130 * 77 + 33 * 8 + 4 + 200 * 200 * 4);
  EXPECT_TRUE(sent.out.starts_with("python/3 is served by 1 rank: " + bytes + " bytes on the wire (shm), " + bytes + " applied"))
      << sent.out;
  EXPECT_NE(sent.out.find("every fingerprint equal"), std::string::npos) << sent.out;
  run_json({"verify", weights(), "job"}, 0);
}

TEST_F(PythonSender, UpdatesARankInline) {
  const Serve serve(serve_words());
  const Outcome sent = send({weights(), "--job", "job", "--data-path", "inline"});
  EXPECT_EQ(sent.code, 0) << sent.err;
  EXPECT_NE(sent.out.find("(inline)"), std::string::npos) << sent.out;
  run_json({"verify", weights(), "job"}, 0);
}

TEST_F(PythonSender, BringsEachRankItsOwnExperts) {
  DemoModel model = demo_model(true);
  model.layers = 2;
  model.experts = 8;
  model.vocab = 256;
  const std::string checkpoint = (files_.path() / "experts").string();
  ASSERT_TRUE(make_demo_checkpoint(checkpoint, model).ok());
  std::vector<std::string> words{"--job", "job", "--config", checkpoint, "--variant", "padded", "--layout", "ep2", "--rank", "0"};
  const Serve first(words);
  words.back() = "1";
  const Serve second(words);
  const Outcome sent = send({checkpoint, "--job", "job"});
  EXPECT_EQ(sent.code, 0) << sent.err;
  EXPECT_NE(sent.out.find("served by 2 ranks"), std::string::npos) << sent.out;
  run_json({"verify", checkpoint, "job"}, 0);
}

/// Rows, columns and whole tensors of an encoder on two ranks, which keep its numbers as BF16.
TEST_F(PythonSender, BringsTwoRanksTheirRowsAndColumnsToBeConverted) {
  const fs::path encoder = files_.path() / "encoder";
  std::vector<MadeTensor> parts{{"embeddings.word_embeddings.weight", Dtype::kF32, {100, 64}},
                                {"encoder.layer.0.intermediate.dense.weight", Dtype::kF32, {128, 64}},
                                {"encoder.layer.0.output.dense.weight", Dtype::kF32, {64, 128}},
                                {"encoder.layer.0.output.dense.bias", Dtype::kF32, {64}}};
  for (const char* part : {"query", "key", "value"})
    parts.push_back({std::string("encoder.layer.0.attention.self.") + part + ".weight", Dtype::kF32, {64, 64}});
  write_checkpoint(encoder, parts, 9);
  std::ofstream(encoder / "config.json")
      << R"({"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128})";
  std::vector<std::string> words{"--job",   "job",      "--checkpoint", encoder.string(), "--family", "dense",  "--variant",
                                 "stacked", "--layout", "tp2",          "--dtype",        "bf16",     "--rank", "0"};
  const Serve first(words);
  words.back() = "1";
  const Serve second(words);
  const Outcome sent = send({encoder.string(), "--job", "job"});
  EXPECT_EQ(sent.code, 0) << sent.err;
  EXPECT_NE(sent.out.find("served by 2 ranks"), std::string::npos) << sent.out;
  const JsonValue verified = run_json({"verify", encoder.string(), "job"}, 0);
  EXPECT_EQ(list(verified, "converted").size(), parts.size());
}

TEST_F(PythonSender, IsRefusedWithAWrongFingerprintAndLeavesTheRankTorn) {
  const Serve serve(serve_words());
  const Outcome sent = run_program(changed_sender(
      "right = sender.fingerprint\nsender.fingerprint = lambda *where: [right(*where)[0] ^ 1, 0]", {weights(), "--job", "job"}));
  EXPECT_EQ(sent.code, 3) << sent.err;
  EXPECT_NE(sent.err.find("fingerprint of live storage differs"), std::string::npos) << sent.err;
  const JsonValue status = run_json({"status", "job"}, 0);
  EXPECT_EQ(text(member(status, "ranks").as_array()->at(0), "state"), "torn");
  EXPECT_EQ(send({weights(), "--job", "job"}).code, 0);
  run_json({"verify", weights(), "job"}, 0);
}

TEST_F(PythonSender, HearsOfEveryDefectAndWritesNothing) {
  const Serve serve(serve_words());
  ASSERT_EQ(send({weights(), "--job", "job"}).code, 0);
  std::vector<MadeTensor> wrong = tensors();
  wrong[0].shape = {64, 96};
  wrong.push_back({"stranger", Dtype::kF32, {2}});
  write_checkpoint(files_.path() / "wrong", wrong, 8);
  const Outcome sent = send({(files_.path() / "wrong").string(), "--job", "job", "--version", "python/2"});
  EXPECT_EQ(sent.code, 3);
  for (const char* part : {"encoder.0.weight", "[64,96]", "[96,64]", "stranger", "2 defects"}) {
    EXPECT_NE(sent.err.find(part), std::string::npos) << part << " is not in: " << sent.err;
  }
  run_json({"verify", weights(), "job"}, 0);
}

TEST_F(PythonSender, TellsALostPeerFromARefusal) {
  EXPECT_EQ(send({weights(), "--job", "nobody"}).code, 4);
  const Serve serve(serve_words());
  ASSERT_EQ(send({weights(), "--job", "job"}).code, 0);
  EXPECT_EQ(send({weights(), "--job", "job"}).code, 3);
}

/// The vectors of docs/protocol.md.
TEST_F(PythonSender, SumsWhatTheProtocolDocumentSums) {
  const Outcome sums = run_program(
      changed_sender("key = sender.tensor_key('norm.weight', 12, [5120])\n"
                     "data = bytes((31 * i * i + 7 * i + 5) % 251 for i in range(777))\n"
                     "print('%016x' % key, *('%016x' % lane for lane in sender.fingerprint(key, 123456789, data)))\nsys.exit(0)",
                     {}));
  EXPECT_EQ(sums.out, "9a2804fbec0e452f 4afdd29f7b4ee9c7 a2959ccfeec901bf\n") << sums.err;
}

}  // namespace
}  // namespace headrace::system_test
