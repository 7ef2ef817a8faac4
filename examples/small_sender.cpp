// A trainer's side of an update in ten lines, for the engine of embedded_receiver.cpp.
// usage: headrace-small-sender JOB
// README.md shows its function; a test holds the two together.
#include <cstdio>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "sender_sdk/sender.h"

namespace headrace {
namespace {

UpdateReport send(std::span<const float> q, std::span<const float> k, const std::string& job) {
  SenderOptions options;
  options.job = job;
  const std::unique_ptr<Sender> sender = Sender::connect(options).value_or_throw();
  UpdateOptions update;
  update.version = WeightVersion{"run-1", 1};
  update.entries = {{"attn.q", Dtype::kF32, {4, 8}, {}}, {"attn.k", Dtype::kF32, {4, 8}, {}}};
  throw_if_error(sender->open(update));
  throw_if_error(sender->add("attn.q", {q.data(), {}}));
  throw_if_error(sender->add("attn.k", {k.data(), {}}));
  return sender->finish().value_or_throw();
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: headrace-small-sender JOB\n", stderr);
    return 2;
  }
  std::vector<float> trained(64);
  std::iota(trained.begin(), trained.end(), 1.0F);
  try {
    const headrace::UpdateReport report = headrace::send(std::span(trained).first(32), std::span(trained).last(32), argv[1]);
    std::printf("%s: %llu bytes applied, %s\n", report.version.to_string().c_str(), static_cast<unsigned long long>(report.applied_bytes),
                report.proven ? "proven" : "not proven");
    return report.proven ? 0 : 1;
  } catch (const headrace::Error& error) {
    std::fprintf(stderr, "small-sender: %s\n", error.what());
    return 1;
  }
}
