#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/receiver_process.h"
#include "benchmarks/report.h"
#include "benchmarks/rows.h"
#include "core/base/status.h"
#include "core/checkpoint/json_text.h"

// headrace-bench [NAME...] [--json FILE] [--markdown FILE] [--commit TEXT]: measures the rows whose names begin with one of NAME, all
// without any. With --peers FILE only the rows beside other packages, whose figures are in FILE. Exit code 0: every target was reached; 1:
// one was missed, or a row could not be measured; 2: usage.

namespace headrace::bench {
namespace {

struct Options {
  std::vector<std::string> names;
  std::string json;
  std::string markdown;
  std::string commit;
  std::string peers;
};

Status read_options(std::span<char*> arguments, Options& options) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view word = arguments[i];
    std::string* value = word == "--json"       ? &options.json
                         : word == "--markdown" ? &options.markdown
                         : word == "--commit"   ? &options.commit
                         : word == "--peers"    ? &options.peers
                                                : nullptr;
    if (value != nullptr) {
      if (++i == arguments.size()) return Status(Code::kInvalidArgument, fmt::format("{} needs a value", word));
      *value = arguments[i];
    } else if (word.starts_with("-")) {
      return Status(Code::kInvalidArgument, fmt::format("unknown option {}", word));
    } else {
      options.names.emplace_back(word);
    }
  }
  if (!options.peers.empty() && !options.names.empty()) {
    return Status(Code::kInvalidArgument, fmt::format("with --peers there are no rows to choose, {} was given", options.names.front()));
  }
  for (const std::string& name : options.names) {
    const auto begins = [&](const std::string& row) { return row.starts_with(name); };
    if (std::none_of(row_names().begin(), row_names().end(), begins)) {
      return Status(Code::kInvalidArgument, fmt::format("no row begins with {}; there are {}", name, fmt::join(row_names(), " ")));
    }
  }
  return ok_status();
}

Status write_file(const std::string& path, const std::string& text) {
  if (path == "-") return std::fputs(text.c_str(), stdout) >= 0 ? ok_status() : errno_status(errno, "write to standard output");
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "we"), &std::fclose);
  if (!file) return errno_status(errno, "create " + path);
  if (std::fwrite(text.data(), 1, text.size(), file.get()) != text.size() || std::fflush(file.get()) != 0) {
    return errno_status(errno, "write " + path);
  }
  return ok_status();
}

std::vector<Row> measure(const Options& options) {
  std::vector<Row> rows;
  if (!options.peers.empty()) {
    peer_rows(options.peers, rows);
    return rows;
  }
  const Selection selection(options.names);
  for (RowGroup* const group : {apply_rows, index_rows, plan_rows, runs_rows, fingerprint_rows, e2e_rows}) group(selection, rows);
  return rows;
}

int run(const Options& options) {
  remove_leftovers();
  const Machine machine = this_machine(options.commit);
  const std::vector<Row> rows = measure(options);
  if (options.json != "-" && options.markdown != "-") fmt::print("{}", report_text(machine, rows));
  if (!options.json.empty()) throw_if_error(write_file(options.json, json_text(report_json(machine, rows)) + "\n"));
  if (!options.markdown.empty()) throw_if_error(write_file(options.markdown, report_markdown(machine, rows)));
  return all_reached(rows) ? 0 : 1;
}

}  // namespace
}  // namespace headrace::bench

int main(int count, char** arguments) {
  try {
    const std::span<char*> words = std::span(arguments, static_cast<std::size_t>(count)).subspan(1);
    if (!words.empty() && words[0] == headrace::bench::kReceiverRole) return headrace::bench::receiver_process_main(words.subspan(1));
    headrace::bench::Options options;
    const headrace::Status read = read_options(words, options);
    if (!read.ok()) {
      fmt::print(stderr, "headrace-bench: {}\n", read.message());
      return 2;
    }
    return headrace::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "headrace-bench: {}\n", error.what());
    return 1;
  }
}
