#include "cli/commands.h"
#include "cli/output.h"
#include "cli/picture.h"

namespace headrace::cli {

ExitCode plot(const PlotOptions& options) {
  const JsonOutput no_json("", "plot");
  const Result<JsonValue> document = read_json_file(options.file == "-" ? "/dev/stdin" : options.file);
  if (!document.ok()) return finish_failed(document.status(), no_json);
  const Result<std::string> picture = draw(document.value());
  if (!picture.ok()) return finish_failed(Status(picture.status().code(), options.file + ": " + picture.status().message()), no_json);
  const Status written = write_text(options.out, picture.value());
  return written.ok() ? ExitCode::kDone : finish_failed(written, no_json);
}

}  // namespace headrace::cli
