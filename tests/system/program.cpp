#include "tests/system/program.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "core/base/unique_fd.h"
#include "core/checkpoint/safetensors.h"

namespace headrace::system_test {
namespace {

constexpr std::int64_t kTimeoutMs = 240'000;

std::string read_file(const std::filesystem::path& path) {
  const std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

std::string program_path(const std::string& name) {
  return (std::filesystem::path(HEADRACE_BINARY_DIR) / name).string();
}

}  // namespace

ScratchDir::ScratchDir() {
  std::string name = (std::filesystem::temp_directory_path() / "hr-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp " + name);
  path_ = name;
}

ScratchDir::~ScratchDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

PrivateRunDirectory::PrivateRunDirectory() {
  if (const char* before = std::getenv("XDG_RUNTIME_DIR")) before_ = before;
  ::setenv("XDG_RUNTIME_DIR", dir_.path().c_str(), 1);
}

PrivateRunDirectory::~PrivateRunDirectory() {
  if (before_) {
    ::setenv("XDG_RUNTIME_DIR", before_->c_str(), 1);
  } else {
    ::unsetenv("XDG_RUNTIME_DIR");
  }
}

Outcome run_program(const std::vector<std::string>& words) {
  const ScratchDir logs;
  ChildOptions options;
  options.name = words.front();
  options.words = words;
  options.words.front() = program_path(words.front());
  options.error_log = (logs.path() / "err").string();
  ChildProcess child = ChildProcess::start(options).value_or_throw();
  Outcome outcome;
  while (true) {
    const Result<std::optional<std::string>> line = child.read_line(kTimeoutMs);
    if (!line.ok()) break;
    if (!line.value()) throw std::runtime_error(words.front() + " says nothing and does not end");
    outcome.out += *line.value() + "\n";
  }
  outcome.code = child.wait(kTimeoutMs).value_or_throw();
  outcome.err = read_file(options.error_log);
  return outcome;
}

JsonValue run_json(std::vector<std::string> words, int expected_code) {
  const std::string verb = words.front();
  words.insert(words.begin(), "headrace");
  words.insert(words.end(), {"--json", "-"});
  const Outcome outcome = run_program(words);
  EXPECT_EQ(outcome.code, expected_code) << outcome.out << outcome.err;
  Result<JsonValue> document = parse_json(outcome.out);
  EXPECT_TRUE(document.ok()) << outcome.out;
  if (!document.ok()) return JsonValue();
  EXPECT_EQ(text(document.value(), "schema"), "headrace." + verb + "/1");
  EXPECT_EQ(member(document.value(), "ok").as_bool(), expected_code == 0);
  return std::move(document).value();
}

Serve::Serve(std::vector<std::string> arguments) {
  ChildOptions options;
  options.name = "serve";
  options.words = {program_path("headrace"), "serve"};
  options.words.insert(options.words.end(), arguments.begin(), arguments.end());
  options.error_log = (logs_.path() / "err").string();
  options.death_signal = SIGKILL;
  process_.emplace(ChildProcess::start(options).value_or_throw());
  const Result<std::optional<std::string>> line = process_->read_line(kTimeoutMs);
  if (!line.ok() || !line.value()) throw std::runtime_error("serve did not start: " + read_file(options.error_log));
  ready_ = *line.value();
}

std::string Serve::endpoint() const {
  const std::size_t from = ready_.find(' ') + 1;
  return ready_.substr(from, ready_.find(' ', from) - from);
}

int Serve::stop(int signal) {
  process_->send_signal(signal);
  return process_->wait(kTimeoutMs).value_or_throw();
}

void write_checkpoint(const std::filesystem::path& dir, const std::vector<MadeTensor>& tensors, unsigned seed) {
  std::filesystem::create_directories(dir);
  std::vector<TensorSpec> specs;
  for (const MadeTensor& tensor : tensors) specs.push_back({tensor.name, tensor.dtype, tensor.shape});
  const SafetensorsHeader header = write_safetensors_header(specs).value_or_throw();
  std::ofstream file(dir / "model.safetensors", std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(header.bytes.data()), static_cast<std::streamsize>(header.bytes.size()));
  std::uint32_t state = seed;
  for (const TensorInfo& tensor : header.tensors) {
    for (std::int64_t i = 0; i < tensor.bytes(); ++i) {
      state = state * 1'664'525u + 1'013'904'223u;
      file.put(static_cast<char>(state >> 24));
    }
  }
}

void flip_byte(const std::filesystem::path& path, const std::string& tensor, std::int64_t offset) {
  std::int64_t at = 0;
  {
    const SafetensorsFile file = SafetensorsFile::open(path).value_or_throw();
    const TensorInfo* info = file.find(tensor);
    if (info == nullptr) throw std::runtime_error("no tensor " + tensor);
    at = info->begin + offset;
  }
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  unsigned char byte = 0;
  if (::pread(fd.get(), &byte, 1, at) != 1) throw std::runtime_error("read " + path.string());
  byte ^= 0x40;
  if (::pwrite(fd.get(), &byte, 1, at) != 1) throw std::runtime_error("write " + path.string());
}

const JsonValue& member(const JsonValue& object, const std::string& key) {
  static const JsonValue kNone;
  const JsonValue* value = object.find(key);
  EXPECT_NE(value, nullptr) << "no member " << key;
  return value == nullptr ? kNone : *value;
}

std::string text(const JsonValue& object, const std::string& key) {
  const std::string* value = member(object, key).as_string();
  return value == nullptr ? std::string() : *value;
}

std::int64_t number(const JsonValue& object, const std::string& key) {
  return member(object, key).as_int64().value_or(-1);
}

const JsonValue::Array& list(const JsonValue& object, const std::string& key) {
  static const JsonValue::Array kNone;
  const JsonValue::Array* items = member(object, key).as_array();
  EXPECT_NE(items, nullptr) << key << " is no list";
  return items == nullptr ? kNone : *items;
}

void expect_same_figures(const JsonValue& planned, const JsonValue& receipt) {
  for (const char* figure :
       {"rank", "wire_bytes", "applied_bytes", "tensors", "expert_tensors", "buckets", "batches", "copies", "runs", "run_experts"}) {
    EXPECT_EQ(number(planned, figure), number(receipt, figure)) << figure;
  }
}

void expect_planned(const JsonValue& planned, const JsonValue& report) {
  for (const char* figure : {"wire_bytes", "applied_bytes", "buckets"})
    EXPECT_EQ(number(planned, figure), number(report, figure)) << figure;
  const JsonValue::Array& ranks = list(planned, "ranks");
  const JsonValue::Array& receipts = list(report, "receipts");
  ASSERT_EQ(ranks.size(), receipts.size());
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) expect_same_figures(ranks[rank], receipts[rank]);
}

}  // namespace headrace::system_test
