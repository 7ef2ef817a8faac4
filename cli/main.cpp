#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <string_view>
#include <system_error>

#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/output.h"

namespace headrace::cli {
namespace {

constexpr const char* kTarget = "a job name (all its ranks in the run directory), or endpoints: ipc://PATH, tcp://127.0.0.1:PORT";

void add_json(CLI::App& verb, std::string& file) {
  verb.add_option("--json", file, "write the result as JSON to this file; - is standard output")->type_name("FILE");
}

void add_model(CLI::App& verb, ModelOptions& model) {
  verb.add_option("--family", model.family, "auto, deepseek_v4, fused_moe or dense")->capture_default_str();
  verb.add_option("--variant", model.variant, "the form that the engine keeps the weights in: words of the family, joined by +")
      ->capture_default_str();
  verb.add_option("--layout", model.layout, "how ranks divide the model: ep4, tp2, tp2,ep4")->capture_default_str();
  verb.add_option("--redundant-experts", model.redundant_experts, "physical experts beyond the logical ones, over all ranks")
      ->check(CLI::Range(0, 1 << 18))
      ->capture_default_str();
  verb.add_option("--scope", model.scopes, "models that the engine holds: target, draft, vision")->capture_default_str();
  verb.add_option("--dtype", model.dtype, "what floating-point tensors are kept as: auto (as the checkpoint has them), f32, f16, bf16")
      ->check(CLI::IsMember({"auto", "f32", "f16", "bf16"}))
      ->capture_default_str();
}

void add_serve(CLI::App& app, std::function<ExitCode()>& action) {
  auto options = std::make_shared<ServeOptions>();
  CLI::App* verb = app.add_subcommand("serve", "own the live storage of one rank and receive updates");
  verb->add_option("--job", options->job, "name of the job")->required();
  auto* config = verb->add_option("--config", options->config, "folder with the model's config.json")->type_name("DIR");
  auto* checkpoint =
      verb->add_option("--checkpoint", options->checkpoint, "checkpoint whose headers and config say what the model is")->type_name("DIR");
  config->excludes(checkpoint);
  add_model(*verb, options->model);
  verb->add_option("--rank", options->rank, "which of the ranks this is, from 0")->capture_default_str();
  verb->add_option("--engine", options->engine, "name of the engine")->capture_default_str();
  verb->add_option("--endpoint", options->endpoint, "tcp://127.0.0.1:PORT instead of a socket in the run directory");
  verb->add_option("--load", options->load, "fill the storage from this checkpoint first")->type_name("DIR");
  verb->add_option("--threads", options->threads, "threads that copy and fingerprint")->check(CLI::Range(1, 1024))->capture_default_str();
  verb->add_option("--deadline-ms", options->deadline_ms, "give a session up after this long without progress")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  verb->add_option("--bucket-bytes-max", options->bucket_bytes_max, "largest bucket to accept")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  verb->add_option("--optional", options->optional_names, "checkpoint names that an update need not bring (pattern)")->type_name("PATTERN");
  add_json(*verb, options->json);
  verb->callback([&action, options] { action = [options] { return serve(*options); }; });
}

void add_push(CLI::App& app, std::function<ExitCode()>& action) {
  auto options = std::make_shared<PushOptions>();
  CLI::App* verb = app.add_subcommand("push", "update running receivers from a checkpoint on disk");
  verb->add_option("checkpoint", options->checkpoint, "folder or safetensors file")->required()->type_name("DIR");
  verb->add_option("--to", options->to, kTarget)->required()->type_name("JOB|ENDPOINT");
  verb->add_option("--job", options->job, "name of the job, for tcp endpoints");
  verb->add_option("--version", options->version, "RUN/STEP; without it the step after what is served or was attempted, push/1 at first");
  verb->add_option("--scope", options->scopes, "what the update covers: target, draft, vision, tables")->capture_default_str();
  verb->add_option("--sender", options->sender, "name of this sender")->capture_default_str();
  verb->add_option("--data-path", options->data_path, "auto, shm or inline")
      ->check(CLI::IsMember({"auto", "shm", "inline"}))
      ->capture_default_str();
  verb->add_option("--threads", options->threads, "threads that pack")->check(CLI::Range(1, 1024))->capture_default_str();
  verb->add_option("--bucket-bytes", options->bucket_bytes, "size of a bucket; receivers may lower it")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  verb->add_option("--deadline-ms", options->deadline_ms, "give up after this long without progress")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  verb->add_option("--connect-timeout-ms", options->connect_timeout_ms, "how long to wait for every rank to answer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  verb->add_option("--only", options->only, "tensors of the checkpoint to send (patterns)")->type_name("PATTERN");
  verb->add_option("--ignore", options->ignore, "tensors of the checkpoint to leave out (patterns)")->type_name("PATTERN");
  verb->add_flag("--repair", options->repair, "bring only ranks that lack it to the version that the others hold");
  add_json(*verb, options->json);
  verb->callback([&action, options] { action = [options] { return push(*options); }; });
}

void add_plan(CLI::App& app, std::function<ExitCode()>& action) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* verb = app.add_subcommand("plan", "what an update would move, without any rank");
  verb->add_option("checkpoint", options->checkpoint, "folder or safetensors file, headers are enough; or a folder with config.json")
      ->required()
      ->type_name("DIR");
  add_model(*verb, options->model);
  verb->add_option("--rank", options->rank, "which rank to show, or all")->capture_default_str();
  verb->add_option("--optional", options->optional_names, "checkpoint names that need not be there (pattern)")->type_name("PATTERN");
  verb->add_option("--bucket-bytes", options->bucket_bytes, "size of a bucket")->check(CLI::PositiveNumber)->capture_default_str();
  add_json(*verb, options->json);
  verb->callback([&action, options] { action = [options] { return plan(*options); }; });
}

void add_plot(CLI::App& app, std::function<ExitCode()>& action) {
  auto options = std::make_shared<PlotOptions>();
  CLI::App* verb = app.add_subcommand("plot", "draw what push or plan wrote as JSON");
  verb->add_option("file", options->file, "the document of a push or a plan; - is standard input")->required()->type_name("FILE");
  verb->add_option("out", options->out, "where the SVG goes; - is standard output")->capture_default_str()->type_name("OUT.svg");
  verb->callback([&action, options] { action = [options] { return plot(*options); }; });
}

void add_status(CLI::App& app, std::function<ExitCode()>& action) {
  auto options = std::make_shared<StatusOptions>();
  CLI::App* verb = app.add_subcommand("status", "states, versions and serving guard");
  verb->add_option("job", options->job, "name of a job; without it all jobs")->type_name("JOB");
  add_json(*verb, options->json);
  verb->callback([&action, options] { action = [options] { return status(*options); }; });
}

void add_fingerprint(CLI::App& app, std::function<ExitCode()>& action) {
  auto options = std::make_shared<FingerprintOptions>();
  CLI::App* verb = app.add_subcommand("fingerprint", "whole-tensor fingerprints of a checkpoint or of what a job serves");
  verb->add_option("source", options->source, fmt::format("a checkpoint on disk, {}", kTarget))->required()->type_name("DIR|JOB");
  verb->add_option("--job", options->job, "name of the job, for tcp endpoints");
  verb->add_option("--threads", options->threads, "threads that read a checkpoint")->check(CLI::Range(1, 1024))->capture_default_str();
  add_json(*verb, options->json);
  verb->callback([&action, options] { action = [options] { return fingerprint(*options); }; });
}

void add_verify(CLI::App& app, std::function<ExitCode()>& action) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* verb = app.add_subcommand("verify", "compare what a job serves with a checkpoint");
  verb->add_option("checkpoint", options->checkpoint, "folder or safetensors file")->required()->type_name("DIR");
  verb->add_option("target", options->to, kTarget)->required()->type_name("JOB");
  verb->add_option("--job", options->job, "name of the job, for tcp endpoints");
  verb->add_option("--threads", options->threads, "threads that read the checkpoint")->check(CLI::Range(1, 1024))->capture_default_str();
  verb->add_option("--differences-max", options->differences_max, "differences to print and to locate; all are counted")
      ->capture_default_str();
  add_json(*verb, options->json);
  verb->callback([&action, options] { action = [options] { return verify(*options); }; });
}

void add_doctor(CLI::App& app, std::function<ExitCode()>& action) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App* verb = app.add_subcommand("doctor", "what this machine can do, what to change, and leftovers");
  verb->add_flag("--clean", options->clean, "remove what killed processes left");
  add_json(*verb, options->json);
  verb->callback([&action, options] { action = [options] { return doctor(*options); }; });
}

int run(int argc, char** argv) {
  CLI::App app("Puts new weights into running inference ranks, in place and proven.", "headrace");
  app.require_subcommand(1);
  app.set_version_flag("--program-version", HEADRACE_VERSION);
  std::function<ExitCode()> action;
  add_serve(app, action);
  add_push(app, action);
  add_plan(app, action);
  add_plot(app, action);
  add_status(app, action);
  add_fingerprint(app, action);
  add_verify(app, action);
  add_doctor(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : to_int(ExitCode::kUsage);
  }
  try {
    const ExitCode code = action();
    // What stood in the buffer until now may not fit on the disk.
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return to_int(code);
    const Status unwritten = errno_status(errno, "write to standard output");
    say(fmt::format("headrace: {}\n", unwritten.to_string()));
    return to_int(code == ExitCode::kDone ? exit_code(unwritten.code()) : code);
  } catch (const Error& error) {
    say(fmt::format("headrace: {}\n", error.status().to_string()));
    return to_int(exit_code(error.status().code()));
  } catch (const std::system_error& error) {
    // Mostly a standard output that takes no more, or a thread that the system does not give.
    const Status status(Code::kResourceExhausted, error.what());
    say(fmt::format("headrace: {}\n", status.to_string()));
    return to_int(exit_code(status.code()));
  } catch (const std::bad_alloc&) {
    say("headrace: resource_exhausted: out of memory\n");
    return to_int(exit_code(Code::kResourceExhausted));
  } catch (const std::exception& error) {
    say(fmt::format("headrace: a bug of ours: {}\n", error.what()));
    return to_int(ExitCode::kInternal);
  }
}

/// Checkpoints are read where they are mapped: whoever shortens one meanwhile, or a disk that fails, is heard of by signal only.
void on_bus_error(int) {
  constexpr std::string_view kText =
      "headrace: unavailable: a mapped file ended or could not be read: it was shortened while in use, or its disk failed\n";
  if (::write(STDERR_FILENO, kText.data(), kText.size()) < 0) ::_exit(to_int(ExitCode::kInternal));
  ::_exit(to_int(exit_code(Code::kUnavailable)));
}

}  // namespace
}  // namespace headrace::cli

int main(int argc, char** argv) {
  // A file that grows beyond the limit is an error where it is written, with its name, not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGBUS, headrace::cli::on_bus_error);
  return headrace::cli::run(argc, argv);
}
