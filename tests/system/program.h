#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "core/checkpoint/json.h"
#include "examples/demo/child_process.h"

/// Real processes of the build, each test in a run directory of its own.
namespace headrace::system_test {

/// What a program that ran to its end left.
struct Outcome {
  int code = 0;  // minus the signal when one ended it
  std::string out;
  std::string err;
};

/// A folder that is empty at first and gone afterwards, short enough for socket paths.
class ScratchDir {
 public:
  ScratchDir();
  ~ScratchDir();
  ScratchDir(const ScratchDir&) = delete;
  ScratchDir& operator=(const ScratchDir&) = delete;
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// Points XDG_RUNTIME_DIR of this process and its children to a scratch folder while it lives.
class PrivateRunDirectory {
 public:
  PrivateRunDirectory();
  ~PrivateRunDirectory();
  std::filesystem::path job(const std::string& name) const { return dir_.path() / "headrace" / name; }
  const std::filesystem::path& scratch() const noexcept { return dir_.path(); }

 private:
  ScratchDir dir_;
  std::optional<std::string> before_;
};

/// Runs a program to its end: one of the build, e.g. {"headrace", "status"}, or one by its absolute path.
Outcome run_program(const std::vector<std::string>& words);
/// Runs `headrace VERB ... --json -` and parses its document; fails the test when it is none.
JsonValue run_json(std::vector<std::string> words, int expected_code);

/// A `headrace serve` that said that it is ready.
class Serve {
 public:
  /// Throws std::runtime_error with its messages when it does not come up.
  explicit Serve(std::vector<std::string> arguments);
  const std::string& ready_line() const noexcept { return ready_; }
  /// The endpoint that it announced.
  std::string endpoint() const;
  pid_t pid() const noexcept { return process_->pid(); }
  /// Sends a signal and returns how it ended.
  int stop(int signal);

 private:
  ScratchDir logs_;
  std::optional<ChildProcess> process_;
  std::string ready_;
};

struct MadeTensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  Shape shape;
};
/// Writes model.safetensors with bytes that depend on `seed`, name and place.
void write_checkpoint(const std::filesystem::path& dir, const std::vector<MadeTensor>& tensors, unsigned seed);
/// Flips one bit of a tensor in dir/model.safetensors.
void flip_byte(const std::filesystem::path& file, const std::string& tensor, std::int64_t offset);

const JsonValue& member(const JsonValue& object, const std::string& key);
std::string text(const JsonValue& object, const std::string& key);
/// -1 where it is no whole number.
std::int64_t number(const JsonValue& object, const std::string& key);
/// Empty where it is no array.
const JsonValue::Array& list(const JsonValue& object, const std::string& key);

/// The figures of a rank that `plan` and a receipt have in common.
void expect_same_figures(const JsonValue& planned, const JsonValue& receipt);
/// What `plan` said, of all ranks together and of each, and what the report of a push said afterwards.
void expect_planned(const JsonValue& planned, const JsonValue& report);

}  // namespace headrace::system_test
