#include "sender_sdk/receiver_links.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/transport/run_directory.h"
#include "core/wire/codec.h"
#include "core/wire/limits.h"

namespace headrace {
namespace {

constexpr std::int64_t kLookAgainMs = 50;

Status check_welcome(const SenderOptions& options, const std::string& endpoint, const wire::Welcome& welcome) {
  if (welcome.protocol != limits::kProtocolVersion) {
    return Status(Code::kUnsupported,
                  fmt::format("{} speaks protocol {}, this sender {}", endpoint, welcome.protocol, limits::kProtocolVersion));
  }
  if (welcome.job != options.job) {
    return Status(Code::kFailedPrecondition,
                  fmt::format("{} serves job '{}', this sender belongs to '{}'", endpoint, welcome.job, options.job));
  }
  return ok_status();
}

Status send_hello(ControlConnection& connection, const SenderEnvironment& environment, const SenderOptions& options,
                  const std::string& sender) {
  wire::Hello hello;
  hello.protocol_min = limits::kProtocolVersion;
  hello.protocol_max = limits::kProtocolVersion;
  hello.job = options.job;
  hello.sender = sender;
  hello.boot_id = environment.device->identity().boot_id;
  hello.devices = {environment.device->identity().device_uuid};
  for (const DataPathKind kind : {DataPathKind::kShm, DataPathKind::kInline}) {
    if (options.data_path == "auto" || options.data_path == data_path_name(kind)) hello.data_paths.emplace_back(data_path_name(kind));
  }
  return connection.send(wire::encode({SessionId{}, Incarnation{}, std::move(hello)}));
}

/// `taken`: the receiver still has an earlier connection of this sender, which may be about to end.
Result<ReceiverLink> await_welcome(std::unique_ptr<ControlConnection> connection, const SenderEnvironment& environment,
                                   const SenderOptions& options, bool& taken) {
  const std::string endpoint = connection->endpoint();
  const ProgressDeadline deadline(*environment.clock, options.connect_timeout_ms);
  do {
    auto event = connection->poll(std::min<std::int64_t>(deadline.left_ms() + 1, kLookAgainMs));
    if (!event.ok()) return event.status();
    if (!event.value()) continue;
    if (event.value()->kind == ControlEventKind::kPeerLost) {
      return Status(Code::kUnavailable, fmt::format("{}: lost before WELCOME: {}", endpoint, event.value()->status.message()));
    }
    if (event.value()->kind != ControlEventKind::kMessage) continue;
    auto message = wire::decode(event.value()->message);
    if (!message.ok()) return Status(message.status().code(), fmt::format("{}: {}", endpoint, message.status().message()));
    if (const auto* error = std::get_if<wire::ErrorReport>(&message.value().body)) {
      const Status refused = wire::to_status(error->failure);
      taken = refused.code() == Code::kUnavailable;
      return Status(refused.code(), fmt::format("{} refused HELLO: {}", endpoint, refused.message()));
    }
    auto* welcome = std::get_if<wire::Welcome>(&message.value().body);
    if (welcome == nullptr) continue;
    HEADRACE_RETURN_IF_ERROR(check_welcome(options, endpoint, *welcome));
    return ReceiverLink{std::move(connection), std::move(*welcome), message.value().incarnation};
  } while (!deadline.expired());
  return Status(Code::kDeadlineExceeded,
                fmt::format("hello: {} did not answer with WELCOME within {} ms", endpoint, options.connect_timeout_ms));
}

Status check_no_receiver_twice(const std::vector<ReceiverLink>& links) {
  std::map<std::pair<std::string, std::uint32_t>, std::string> seen;
  for (const ReceiverLink& link : links) {
    const auto [place, added] = seen.try_emplace({link.welcome.engine, link.welcome.rank}, link.connection->endpoint());
    if (added) continue;
    return Status(Code::kInvalidArgument, fmt::format("{} and {} are both {}", place->second, link.connection->endpoint(), link.name()));
  }
  return ok_status();
}

std::vector<const wire::Welcome*> welcomes_of(const std::vector<ReceiverLink>& links) {
  std::vector<const wire::Welcome*> welcomes;
  for (const ReceiverLink& link : links) welcomes.push_back(&link.welcome);
  return welcomes;
}

Result<std::vector<ReceiverLink>> connect_found(const SenderEnvironment& environment, const SenderOptions& options) {
  const ProgressDeadline deadline(*environment.clock, options.connect_timeout_ms);
  std::vector<ReceiverLink> links;
  std::set<std::string> connected;
  Status refused;
  while (true) {
    auto directory = RunDirectory::open(options.job);
    if (!directory.ok() && directory.status().code() != Code::kUnavailable) return directory.status();
    const auto found = directory.ok() ? directory.value().endpoints() : std::vector<FoundEndpoint>{};
    for (const FoundEndpoint& each : found) {
      if (!each.alive || connected.contains(each.endpoint)) continue;
      auto link = greet_receiver(environment, options, each.endpoint, options.sender);
      if (!link.ok()) {
        // It may just be starting or ending; anything else will not get better by waiting.
        refused = link.status();
        if (refused.code() != Code::kUnavailable && refused.code() != Code::kDeadlineExceeded) return refused;
        continue;
      }
      connected.insert(each.endpoint);
      links.push_back(std::move(link).value());
    }
    if (!links.empty() && missing_ranks(welcomes_of(links)).empty()) return links;
    if (deadline.expired()) break;
    ::poll(nullptr, 0, static_cast<int>(std::min(kLookAgainMs, deadline.left_ms() + 1)));
  }
  if (!links.empty()) return links;  // open() says what is missing, unless it is a repair
  return Status(Code::kUnavailable, fmt::format("job '{}': no receiver within {} ms{}{}", options.job, options.connect_timeout_ms,
                                                refused.ok() ? "" : ": ", refused.message()));
}

/// Why shared memory cannot be used with this receiver; its descriptor socket is open when it can.
Status try_shm(const SenderOptions& options, const DeviceIdentity& identity, ReceiverLink& link) {
  const wire::Welcome& welcome = link.welcome;
  const auto refused = [&](std::string_view why) { return Status(Code::kUnsupported, fmt::format("{}: {}", link.name(), why)); };
  if (std::find(welcome.data_paths.begin(), welcome.data_paths.end(), "shm") == welcome.data_paths.end()) {
    return refused(fmt::format("offers {}, not shm", fmt::join(welcome.data_paths, ", ")));
  }
  if (welcome.boot_id != identity.boot_id) return refused("shm needs the same host, it runs on another");
  if (welcome.descriptor_path.empty()) return refused("shm needs a descriptor socket, it has none");
  const Status status = link.connection->connect_descriptors(welcome.descriptor_path, options.connect_timeout_ms);
  return status.ok() ? status : refused(fmt::format("shm: {}", status.message()));
}

}  // namespace

Result<ReceiverLink> greet_receiver(const SenderEnvironment& environment, const SenderOptions& options, const std::string& endpoint,
                                    const std::string& sender) {
  ControlOptions control;
  control.connect_timeout_ms = options.connect_timeout_ms;
  const ProgressDeadline deadline(*environment.clock, options.connect_timeout_ms);
  while (true) {
    auto connection = environment.connect(endpoint, control);
    if (!connection.ok()) return connection.status();
    HEADRACE_RETURN_IF_ERROR(send_hello(*connection.value(), environment, options, sender));
    bool taken = false;
    auto link = await_welcome(std::move(connection).value(), environment, options, taken);
    if (!taken || deadline.expired()) return link;
    ::poll(nullptr, 0, static_cast<int>(std::min(kLookAgainMs, deadline.left_ms() + 1)));
  }
}

Result<std::vector<ReceiverLink>> connect_receivers(const SenderEnvironment& environment, const SenderOptions& options) {
  std::vector<ReceiverLink> links;
  if (options.endpoints.empty()) {
    auto found = connect_found(environment, options);
    if (!found.ok()) return found.status();
    links = std::move(found).value();
  }
  for (const std::string& endpoint : options.endpoints) {
    auto link = greet_receiver(environment, options, endpoint, options.sender);
    if (!link.ok()) return link.status();
    links.push_back(std::move(link).value());
  }
  HEADRACE_RETURN_IF_ERROR(check_no_receiver_twice(links));
  return links;
}

Result<DataPathKind> choose_data_path(const SenderOptions& options, const DeviceIdentity& identity, std::vector<ReceiverLink>& links) {
  std::string reasons;
  if (options.data_path != "inline") {
    bool all = true;
    for (ReceiverLink& link : links) {
      const Status status = try_shm(options, identity, link);
      if (status.ok()) continue;
      all = false;
      reasons += fmt::format("{}{}", reasons.empty() ? "" : "; ", status.message());
    }
    if (all) return DataPathKind::kShm;
  }
  if (options.data_path != "shm") {
    bool all = true;
    for (const ReceiverLink& link : links) {
      const auto& offered = link.welcome.data_paths;
      if (std::find(offered.begin(), offered.end(), "inline") != offered.end()) continue;
      all = false;
      reasons += fmt::format("{}{}: offers {}, not inline", reasons.empty() ? "" : "; ", link.name(), fmt::join(offered, ", "));
    }
    if (all) return DataPathKind::kInline;
  }
  return Status(Code::kUnsupported, fmt::format("no data path in common, this sender has {}: {}",
                                                options.data_path == "auto" ? "shm, inline" : options.data_path, reasons));
}

std::string missing_ranks(const std::vector<const wire::Welcome*>& welcomes) {
  std::map<std::string, std::pair<std::uint32_t, std::set<std::uint32_t>>> engines;
  for (const wire::Welcome* welcome : welcomes) {
    auto& [ranks, present] = engines[welcome->engine];
    ranks = std::max(ranks, welcome->ranks);
    present.insert(welcome->rank);
  }
  std::string text;
  for (const auto& [engine, state] : engines) {
    const auto& [ranks, present] = state;
    if (present.size() >= ranks) continue;
    std::vector<std::uint32_t> missing;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      if (!present.contains(rank)) missing.push_back(rank);
    }
    text +=
        fmt::format("{}{}: {} of {} ranks (missing {})", text.empty() ? "" : "; ", engine, present.size(), ranks, fmt::join(missing, ", "));
  }
  return text;
}

}  // namespace headrace
