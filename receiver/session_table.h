#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/wire/messages.h"

// The states of an update and what every event does to them: a table, not code. Pure.
namespace headrace {

using wire::SessionState;

enum class SessionEvent : std::uint8_t {
  kOpen,          // a valid OPEN, or begin() of the plain call
  kReject,        // defects in the manifests
  kFirstEnqueue,  // the first byte of live storage is about to be written
  kPrepared,      // everything that can fail has succeeded
  kCommit,        // COMMIT of the session's lead, or finish() of the plain call
  kAbort,         // ABORT from a sender, or abort() of the plain call
  kFailure,       // anything found wrong here: a bad bucket, a fingerprint, a hook, a deadline
  kSenderLost,    // a named sender that is not the lead
  kLeadLost,      // the lead
  kSleep,         // the engine gives its memory back
  kDiscard,       // the engine threw the content of its storage away
  kExpertRebalance,
  kLoraLoad,
  kForeignReload,  // somebody else writes the weights
  kRecapture,      // graphs are captured again
  kDiscardFound,   // a canary is gone when OPEN asks: content was discarded and nobody said so
};
inline constexpr int kSessionStates = 6;
inline constexpr int kSessionEvents = 16;
std::string_view session_event_name(SessionEvent event) noexcept;

enum class Answer : std::uint8_t {
  kTake,    // go to `next`
  kRefuse,  // failed precondition; nothing changes
  kIgnore,  // nothing changes, nobody is told
};

struct Transition {
  Answer answer = Answer::kRefuse;
  SessionState next = SessionState::kIdle;
  bool forget_version = false;  // what is served is no longer known to be whole: version none, guard closed
  bool back = false;            // `next` is what the state was before OPEN: idle, torn or in doubt
};

/// Total: every pair has an entry.
Transition transition(SessionState state, SessionEvent event) noexcept;
/// The table as Markdown, one row per event, for docs/protocol.md.
std::string transition_table_markdown();

}  // namespace headrace
