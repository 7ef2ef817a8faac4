#include "cli/output.h"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>

namespace headrace::cli {

JsonObject JsonOutput::document() const {
  JsonObject object;
  object.set("schema", schema_);
  return object;
}

Status JsonOutput::write(const JsonValue& document) const {
  return write_text(file_, json_text(document) + "\n");
}

Status write_text(const std::string& file, const std::string& text) {
  if (file == "-") {
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
      return errno_status(errno, "write to standard output");
    }
    return ok_status();
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> opened(std::fopen(file.c_str(), "we"), &std::fclose);
  if (!opened) return errno_status(errno, "create " + file);
  if (std::fwrite(text.data(), 1, text.size(), opened.get()) != text.size() || std::fflush(opened.get()) != 0) {
    return errno_status(errno, "write " + file);
  }
  return ok_status();
}

void say(const std::string& text) noexcept {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

ExitCode finish_failed(const Status& status, const JsonOutput& json) {
  say(fmt::format("headrace: {}\n", status.to_string()));
  if (json.wanted()) {
    const JsonValue error = JsonObject().set("code", code_name(status.code())).set("message", status.message()).done();
    const Status written = json.write(json.document().set("ok", false).set("error", error).done());
    if (!written.ok()) say(fmt::format("headrace: {}\n", written.to_string()));
  }
  return exit_code(status.code());
}

ExitCode finish_done(const JsonOutput& json, JsonObject document, ExitCode code) {
  if (!json.wanted()) return code;
  const Status written = json.write(document.set("ok", code == ExitCode::kDone).done());
  if (written.ok()) return code;
  say(fmt::format("headrace: {}\n", written.to_string()));
  return exit_code(written.code());
}

std::string human_bytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits{"kB", "MB", "GB", "TB", "PB"};
  if (bytes < 1000) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1000;
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : value < 100 ? 1 : 0, kUnits[unit]);
}

}  // namespace headrace::cli
