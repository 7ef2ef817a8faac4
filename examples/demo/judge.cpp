#include "examples/demo/judge.h"

#include <fmt/format.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>

#include "cli/fingerprints.h"
#include "core/base/worker_pool.h"
#include "examples/demo/demo_values.h"
#include "kernels/fingerprint.h"

namespace headrace {
namespace {

constexpr std::size_t kPiecesAtATime = 64;

/// One piece of one storage of one rank.
struct Task {
  std::size_t rank = 0;
  std::size_t storage = 0;
  std::size_t piece = 0;
  std::uint64_t offset = 0;  // of the piece within the storage
};

/// Bytes of another process, whose addresses are numbers here.
iovec remote_bytes(std::uint64_t address, std::size_t bytes) {
  return {reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), bytes};  // NOLINT(performance-no-int-to-ptr)
}

Status read_memory(pid_t pid, std::uint64_t address, std::span<std::uint8_t> out) {
  std::size_t done = 0;
  while (done < out.size()) {
    const iovec local{out.data() + done, out.size() - done};
    const iovec remote = remote_bytes(address + done, out.size() - done);
    const ssize_t got = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (got <= 0) return errno_status(errno, fmt::format("read {} bytes at {:#x} of process {}", out.size(), address, pid));
    done += static_cast<std::size_t>(got);
  }
  return ok_status();
}

/// What differs between two sets of (name, bytes), as text; empty when nothing does.
std::string difference_of_sets(const std::map<std::string, std::uint64_t>& expected, const std::map<std::string, std::uint64_t>& actual) {
  std::string text;
  for (const auto& [name, bytes] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end()) {
      text += fmt::format("; {} ({} bytes) is missing", name, bytes);
    } else if (found->second != bytes) {
      text += fmt::format("; {} has {} bytes, {} expected", name, found->second, bytes);
    }
  }
  for (const auto& [name, bytes] : actual) {
    if (expected.count(name) == 0) text += fmt::format("; {} ({} bytes) is not expected", name, bytes);
  }
  return text;
}

}  // namespace

Judge::Layout Judge::experts_divided(bool padded) {
  return [padded](const oracle::CheckpointBytes& files, std::uint32_t rank, std::uint32_t ranks) {
    return oracle::deepseek_v41_storages(files, oracle::read_oracle_model(files, padded), rank, ranks);
  };
}

Result<Judge> Judge::open(const Options& options) {
  Judge judge;
  try {
    if (Status built = judge.build(options); !built.ok()) return built;
  } catch (const std::runtime_error& error) {
    return Status(Code::kInvalidArgument, fmt::format("oracle: {}", error.what()));
  }
  return judge;
}

Status Judge::build(const Options& options) {
  options_ = options;
  files_ = std::make_unique<oracle::CheckpointBytes>(options.checkpoint);
  std::vector<std::vector<oracle::ExpectedStorage>> all;
  for (std::uint32_t rank = 0; rank < options.ranks; ++rank) {
    all.push_back(options.layout(*files_, rank, options.ranks));
    for (const oracle::ExpectedStorage& storage : all.back()) live_bytes_ += storage.bytes;
  }
  wire_bytes_ = oracle::wanted_wire_bytes(*files_, all);
  for (std::vector<oracle::ExpectedStorage>& expected : all) ranks_.push_back({0, std::move(expected), {}});
  return ok_status();
}

Status Judge::find_storages() {
  Result<std::vector<cli::ReceiverClient>> clients = cli::connect_target({options_.job, {}});
  if (!clients.ok()) return clients.status();
  if (clients.value().size() != ranks_.size()) {
    return Status(Code::kUnavailable, fmt::format("{} ranks expected, {} answer", ranks_.size(), clients.value().size()));
  }
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    Result<wire::StorageReply> reply = clients.value()[rank].storages();
    if (!reply.ok()) return reply.status();
    std::map<std::string, std::uint64_t> expected;
    std::map<std::string, std::uint64_t> actual;
    std::map<std::string, std::uint64_t> addresses;
    for (const oracle::ExpectedStorage& storage : ranks_[rank].expected) expected[storage.name] = storage.bytes;
    for (const wire::StorageInfo& storage : reply.value().storages) {
      actual[storage.name] = storage.bytes;
      addresses[storage.name] = storage.address;
    }
    const std::string difference = difference_of_sets(expected, actual);
    if (!difference.empty()) {
      return Status(Code::kFailedPrecondition,
                    fmt::format("storages of rank {} are not the oracle's{}", rank, difference.substr(0, 2'000)));
    }
    ranks_[rank].pid = static_cast<pid_t>(reply.value().pid);
    ranks_[rank].addresses.clear();
    for (const oracle::ExpectedStorage& storage : ranks_[rank].expected) ranks_[rank].addresses.push_back(addresses[storage.name]);
  }
  return ok_status();
}

Result<oracle::Comparison> Judge::compare(std::uint64_t version, const Progress& progress) const {
  std::vector<Task> tasks;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (std::size_t s = 0; s < ranks_[rank].expected.size(); ++s) {
      std::uint64_t offset = 0;
      const auto& pieces = ranks_[rank].expected[s].pieces;
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        tasks.push_back({rank, s, p, offset});
        offset += pieces[p].bytes;
      }
    }
  }
  std::vector<oracle::Comparison> outcomes(tasks.size());
  std::vector<Status> failures(tasks.size());
  WorkerPool pool(options_.threads);
  oracle::Comparison total;
  for (std::size_t first = 0; first < tasks.size(); first += kPiecesAtATime) {
    const std::size_t count = std::min(kPiecesAtATime, tasks.size() - first);
    pool.run(count, [&](std::size_t i) {
      const Task& task = tasks[first + i];
      const oracle::ExpectedStorage& storage = ranks_[task.rank].expected[task.storage];
      const std::vector<std::uint8_t> expected = storage.pieces[task.piece].expected(version);
      std::vector<std::uint8_t> live(expected.size());
      failures[first + i] = read_memory(ranks_[task.rank].pid, ranks_[task.rank].addresses[task.storage] + task.offset, live);
      if (!failures[first + i].ok()) return;
      const std::string name = fmt::format("rank {} {}", task.rank, storage.name);
      outcomes[first + i] = oracle::compare_bytes(name, task.offset, expected, live);
    });
    for (std::size_t i = first; i < first + count; ++i) {
      if (!failures[i].ok()) return failures[i];
      total += outcomes[i];
    }
    progress(total.bytes_compared, live_bytes_);
  }
  if (total.bytes_compared != live_bytes_) {
    return Status(Code::kInternal, fmt::format("{} bytes compared, the storages have {}", total.bytes_compared, live_bytes_));
  }
  return total;
}

Status Judge::compare_fingerprints(std::uint64_t version) const {
  Result<std::vector<cli::ReceiverClient>> clients = cli::connect_target({options_.job, {}});
  if (!clients.ok()) return clients.status();
  const Result<cli::JobValues> job = cli::job_values(clients.value());
  if (!job.ok()) return job.status();
  if (!job.value().defects.empty()) {
    const cli::JobValues::Defect& defect = job.value().defects.front();
    return Status(Code::kCorruption, "fingerprints: " + defect.name + ": " + defect.what);
  }
  std::set<std::string> wanted;
  for (const LiveRank& rank : ranks_) {
    for (const oracle::ExpectedStorage& storage : rank.expected) wanted.insert(storage.sources.begin(), storage.sources.end());
  }
  const std::vector<cli::TensorValue>& live = job.value().tensors;
  if (live.size() != wanted.size()) {
    return Status(Code::kCorruption, fmt::format("fingerprints: the ranks hold {} tensors, {} expected", live.size(), wanted.size()));
  }
  std::vector<std::string> wrong(live.size());
  WorkerPool pool(options_.threads);
  pool.run(live.size(), [&](std::size_t i) {
    const cli::TensorValue& tensor = live[i];
    if (wanted.count(tensor.name) == 0) {
      wrong[i] = tensor.name + " is served but not expected";
      return;
    }
    const std::span<const std::uint8_t> base = files_->at(tensor.name).bytes;
    std::vector<std::byte> bytes(base.size());
    apply_demo_version(tensor.name, version, std::as_bytes(base), bytes.data());
    const FingerprintSum sum = fingerprint(tensor_key(tensor.name, tensor.dtype, tensor.shape), 0, bytes);
    if (!(sum == tensor.sum)) {
      wrong[i] = fmt::format("{}: {} expected, {} live", tensor.name, cli::fingerprint_text(sum), cli::fingerprint_text(tensor.sum));
    }
  });
  for (const std::string& text : wrong) {
    if (!text.empty()) return Status(Code::kCorruption, "fingerprints: " + text);
  }
  return ok_status();
}

Status Judge::no_weight_file_open() const {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const std::filesystem::path process = fmt::format("/proc/{}", ranks_[rank].pid);
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(process / "fd", error)) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
      if (target.find(".safetensors") != std::string::npos) {
        return Status(Code::kFailedPrecondition, fmt::format("rank {} has {} open", rank, target));
      }
    }
    if (error) return errno_status(error.value(), fmt::format("list open files of rank {}", rank));
    std::ifstream maps(process / "maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find(".safetensors") != std::string::npos) {
        return Status(Code::kFailedPrecondition, fmt::format("rank {} has mapped {}", rank, line.substr(line.find('/'))));
      }
    }
  }
  return ok_status();
}

Status Judge::poke(std::uint32_t rank) const {
  const LiveRank& live = ranks_.at(rank);
  const std::size_t storage = live.expected.size() / 2;
  const std::uint64_t address = live.addresses[storage] + live.expected[storage].bytes / 2;
  std::uint8_t byte = 0;
  HEADRACE_RETURN_IF_ERROR(read_memory(live.pid, address, std::span(&byte, 1)));
  byte ^= 0x10;
  const iovec local{&byte, 1};
  const iovec remote = remote_bytes(address, 1);
  if (::process_vm_writev(live.pid, &local, 1, &remote, 1, 0) != 1) {
    return errno_status(errno, fmt::format("write a byte at {:#x} of process {}", address, live.pid));
  }
  return ok_status();
}

Result<std::vector<wire::StatusReply>> Judge::statuses() const {
  Result<std::vector<cli::ReceiverClient>> clients = cli::connect_target({options_.job, {}});
  if (!clients.ok()) return clients.status();
  std::vector<wire::StatusReply> replies;
  for (cli::ReceiverClient& client : clients.value()) {
    Result<wire::StatusReply> reply = client.status();
    if (!reply.ok()) return reply.status();
    replies.push_back(std::move(reply).value());
  }
  return replies;
}

}  // namespace headrace
