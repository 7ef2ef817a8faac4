#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/exit_code.h"
#include "cli/model_options.h"
#include "core/wire/limits.h"

// The verbs of `headrace`, one file each. Every option struct is what the command line says; `json` is the file of --json.
namespace headrace::cli {

struct ServeOptions {
  std::string job;
  std::string config;      // folder with config.json
  std::string checkpoint;  // folder or file whose headers (and config) say what the model is
  ModelOptions model;
  std::int32_t rank = 0;
  std::string engine = "engine-0";
  std::string endpoint;
  std::string load;
  std::uint32_t threads = 1;
  std::int64_t deadline_ms = limits::kDeadlineMsDefault;
  std::int64_t bucket_bytes_max = limits::kBucketBytesMax;
  std::vector<std::string> optional_names;
  std::string json;
};
/// Owns host storage and receives updates until SIGTERM or SIGINT. Must be called before the process has started threads.
ExitCode serve(const ServeOptions& options);

struct PushOptions {
  std::string checkpoint;
  std::vector<std::string> to;
  std::string job;      // for tcp endpoints
  std::string version;  // RUN/STEP; empty: the step after what is served
  std::vector<std::string> scopes{"target"};
  std::string sender = "push";
  std::string data_path = "auto";
  std::uint32_t threads = 1;
  std::int64_t bucket_bytes = limits::kBucketBytesDefault;
  std::int64_t connect_timeout_ms = 10'000;
  std::int64_t deadline_ms = limits::kDeadlineMsDefault;
  bool repair = false;
  std::vector<std::string> only;    // fnmatch patterns of checkpoint names; empty: all
  std::vector<std::string> ignore;  // fnmatch patterns of checkpoint names that are left out
  std::string json;
};
/// One update from a checkpoint on disk.
ExitCode push(const PushOptions& options);

struct PlanOptions {
  std::string checkpoint;  // folder or file; its weights need not be there
  ModelOptions model;
  std::string rank = "all";
  std::vector<std::string> optional_names;
  std::int64_t bucket_bytes = limits::kBucketBytesDefault;
  std::string json;
};
/// What an update would move, without any peer.
ExitCode plan(const PlanOptions& options);

struct PlotOptions {
  std::string file;  // JSON; "-": standard input
  std::string out = "-";
};
/// Draws the document of a push or a plan.
ExitCode plot(const PlotOptions& options);

struct StatusOptions {
  std::string job;  // empty: all
  std::string json;
};
ExitCode status(const StatusOptions& options);

struct FingerprintOptions {
  std::vector<std::string> source;  // a checkpoint, a job, or endpoints
  std::string job;
  std::uint32_t threads = 1;
  std::string json;
};
/// Whole-tensor fingerprints, in the same form for a checkpoint and for a job.
ExitCode fingerprint(const FingerprintOptions& options);

struct VerifyOptions {
  std::string checkpoint;
  std::vector<std::string> to;
  std::string job;
  std::uint32_t threads = 1;
  std::uint32_t differences_max = 20;
  std::string json;
};
/// Compares what a job serves with a checkpoint.
ExitCode verify(const VerifyOptions& options);

struct DoctorOptions {
  bool clean = false;
  std::string json;
};
/// What this machine can do, what to change, and what killed processes left.
ExitCode doctor(const DoctorOptions& options);

}  // namespace headrace::cli
