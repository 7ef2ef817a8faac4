// `./run demo`: what the whole of Headrace does, shown and judged in a minute.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>
#include <string>

#include "cli/output.h"
#include "core/base/unique_fd.h"
#include "core/checkpoint/json_text.h"
#include "examples/demo/demo.h"

namespace headrace {
namespace {

constexpr const char* kUsage =
    "usage: ./run demo [--small] [--json FILE] [--registered] [--poke]\n"
    "  --small       a model of few layers, in under 1 GiB\n"
    "  --json FILE   the result as JSON (- is standard output)\n"
    "  --registered  the ranks read the trainers' weights in place, without packing\n"
    "  --poke        flip one bit in a live rank, to see the demo fail\n";

std::optional<DemoOptions> parse_options(int argc, char** argv) {
  DemoOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool has_value = i + 1 < argc;
    if (word == "--small") {
      options.small = true;
    } else if (word == "--poke") {
      options.poke = true;
    } else if (word == "--registered") {
      options.registered = true;
    } else if (word == "--json" && has_value) {
      options.json = argv[++i];
    } else if (word == "--programs" && has_value) {
      options.programs = argv[++i];
    } else if (word == "--work" && has_value) {
      options.work = argv[++i];
    } else {
      return std::nullopt;
    }
  }
  return options.programs.empty() || options.work.empty() ? std::nullopt : std::optional(options);
}

/// Where the document goes; no descriptor when none is wanted. With "-" standard output carries the document alone, and what is for people
/// goes to standard error.
Result<UniqueFd> open_json(const std::string& file) {
  if (file.empty()) return UniqueFd();
  if (file != "-") {
    UniqueFd fd(::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (!fd.valid()) return errno_status(errno, "create " + file);
    return fd;
  }
  UniqueFd fd(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
  if (!fd.valid() || ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) return errno_status(errno, "set standard output aside");
  return fd;
}

int run(int argc, char** argv) {
  const std::optional<DemoOptions> options = parse_options(argc, argv);
  if (!options) {
    fmt::print(stderr, "{}", kUsage);
    return cli::to_int(cli::ExitCode::kUsage);
  }
  std::signal(SIGPIPE, SIG_IGN);  // a child that died is a failed write, not our end
  Result<UniqueFd> json = open_json(options->json);
  if (!json.ok()) {
    fmt::print(stderr, "demo: {}\n", json.status().to_string());
    return cli::to_int(cli::exit_code(json.status().code()));
  }
  const auto start = std::chrono::steady_clock::now();
  DemoResult result;
  Status outcome;
  {
    Demo demo(*options);
    outcome = demo.run();
    result = demo.result();
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("\n{} in {:.1f} s: {} bytes compared with the oracle, {} different\n", result.verified ? "VERIFIED" : "NOT VERIFIED", seconds,
             result.bytes_compared, result.bytes_different);
  std::fflush(stdout);
  if (!outcome.ok()) {
    fmt::print(stderr, "demo: {}\ndemo: logs are in {}\n", outcome.to_string(), (options->work / "logs").string());
  }
  if (json.value().valid()) {
    const std::string text = json_text(demo_json(result)) + "\n";
    if (::write(json.value().get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
      fmt::print(stderr, "demo: {}\n", errno_status(errno, "write " + options->json).to_string());
      return cli::to_int(cli::ExitCode::kRefused);
    }
  }
  return cli::to_int(result.verified ? cli::ExitCode::kDone : outcome.ok() ? cli::ExitCode::kDifference : cli::exit_code(outcome.code()));
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) {
  return headrace::run(argc, argv);
}
