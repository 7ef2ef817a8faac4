#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cli/exit_code.h"
#include "core/base/status.h"
#include "core/checkpoint/json_text.h"

namespace headrace::cli {

/// Where a verb's document goes: nowhere, a file, or standard output ("-"), which then carries nothing else.
class JsonOutput {
 public:
  JsonOutput(std::string file, std::string_view verb) : file_(std::move(file)), schema_("headrace." + std::string(verb) + "/1") {}

  bool wanted() const noexcept { return !file_.empty(); }
  /// Whether text for people may go to standard output.
  bool text_allowed() const noexcept { return file_ != "-"; }
  /// An object that has its `schema` already.
  JsonObject document() const;
  Status write(const JsonValue& document) const;

 private:
  std::string file_;
  std::string schema_;
};

/// Writes to a file, or to standard output ("-").
Status write_text(const std::string& file, const std::string& text);
/// Writes to standard error, or nowhere: a full disk under a log must not end what it should have told of.
void say(const std::string& text) noexcept;
/// Ends a verb that failed: the message to standard error, a document with `ok` false and the error where one is wanted.
ExitCode finish_failed(const Status& status, const JsonOutput& json);
/// Ends a verb that did what it was asked.
ExitCode finish_done(const JsonOutput& json, JsonObject document, ExitCode code = ExitCode::kDone);

/// "1.21 GB", "90.9 MB", "512 B": powers of 1000.
std::string human_bytes(std::uint64_t bytes);

}  // namespace headrace::cli
