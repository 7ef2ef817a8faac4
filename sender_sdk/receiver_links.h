#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/transport/control.h"
#include "core/transport/data_path.h"
#include "core/wire/messages.h"
#include "sender_sdk/sender.h"
#include "sender_sdk/sender_environment.h"

namespace headrace {

/// A connection whose receiver has said WELCOME.
struct ReceiverLink {
  std::unique_ptr<ControlConnection> connection;
  wire::Welcome welcome;
  Incarnation incarnation;

  std::string name() const { return welcome.engine + " rank " + std::to_string(welcome.rank); }
};

/// Connects and exchanges HELLO and WELCOME with one receiver, as `sender` (empty: only to ask). Asks again, within the connect timeout,
/// while the receiver has not noticed that an earlier connection of that name is gone.
Result<ReceiverLink> greet_receiver(const SenderEnvironment& environment, const SenderOptions& options, const std::string& endpoint,
                                    const std::string& sender);

/// All receivers of `options`: those named, or every live rank of the job's run directory, waited for until each engine has all its ranks
/// or the connect timeout is over.
Result<std::vector<ReceiverLink>> connect_receivers(const SenderEnvironment& environment, const SenderOptions& options);

/// The best data path that all receivers can do, its descriptor sockets opened. kUnsupported says what each side has.
Result<DataPathKind> choose_data_path(const SenderOptions& options, const DeviceIdentity& identity, std::vector<ReceiverLink>& links);

/// Ranks that are missing, as "engine-0: 2 of 4 ranks (missing 1, 3)"; empty when every engine is whole.
std::string missing_ranks(const std::vector<const wire::Welcome*>& welcomes);

}  // namespace headrace
