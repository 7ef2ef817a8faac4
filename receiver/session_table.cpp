#include "receiver/session_table.h"

#include <array>

namespace headrace {
namespace {

using enum SessionState;

constexpr Transition take(SessionState next) {
  return {Answer::kTake, next, false, false};
}
constexpr Transition back() {
  return {Answer::kTake, kIdle, false, true};
}
constexpr Transition lose(SessionState next) {
  return {Answer::kTake, next, true, false};
}
constexpr Transition refuse() {
  return {Answer::kRefuse, kIdle, false, false};
}
constexpr Transition ignore() {
  return {Answer::kIgnore, kIdle, false, false};
}

using Row = std::array<Transition, kSessionStates>;

// Columns: idle, open, applying, prepared, torn, in doubt.
constexpr std::array<Row, kSessionEvents> kTable{{
    /* open */ {take(kOpen), refuse(), refuse(), refuse(), take(kOpen), take(kOpen)},
    /* reject */ {refuse(), back(), refuse(), refuse(), refuse(), refuse()},
    /* first enqueue */ {refuse(), lose(kApplying), ignore(), refuse(), refuse(), refuse()},
    // A receiver that wants nothing of an update goes from open to prepared.
    /* prepared */ {refuse(), take(kPrepared), take(kPrepared), refuse(), refuse(), refuse()},
    /* commit */ {refuse(), refuse(), refuse(), take(kIdle), refuse(), take(kIdle)},
    /* abort */ {ignore(), back(), lose(kTorn), lose(kTorn), ignore(), refuse()},
    /* failure */ {ignore(), back(), lose(kTorn), lose(kTorn), ignore(), ignore()},
    // Once prepared only the lead decides.
    /* sender lost */ {ignore(), back(), lose(kTorn), ignore(), ignore(), ignore()},
    /* lead lost */ {ignore(), back(), lose(kTorn), take(kInDoubt), ignore(), ignore()},
    /* sleep */ {take(kIdle), back(), lose(kTorn), lose(kTorn), take(kTorn), lose(kTorn)},
    // Without its content nothing that was committed is left.
    /* discard */ {lose(kIdle), {Answer::kTake, kIdle, true, true}, lose(kTorn), lose(kTorn), take(kTorn), lose(kTorn)},
    /* expert rebalance */ {take(kIdle), back(), lose(kTorn), lose(kTorn), take(kTorn), lose(kTorn)},
    /* lora load */ {take(kIdle), back(), lose(kTorn), lose(kTorn), take(kTorn), lose(kTorn)},
    /* foreign reload */ {lose(kIdle), {Answer::kTake, kIdle, true, true}, lose(kTorn), lose(kTorn), take(kTorn), lose(kTorn)},
    /* recapture */ {take(kIdle), back(), lose(kTorn), lose(kTorn), take(kTorn), lose(kTorn)},
    // The update that found it may bring everything again; whether it does is seen in its manifests.
    /* discard found */ {lose(kIdle), lose(kOpen), lose(kTorn), lose(kTorn), take(kTorn), lose(kTorn)},
}};

constexpr std::array<std::string_view, kSessionEvents> kEventNames{"OPEN",
                                                                   "defects in the manifests",
                                                                   "first byte enqueued",
                                                                   "all proven",
                                                                   "COMMIT",
                                                                   "ABORT",
                                                                   "failure found here",
                                                                   "sender lost",
                                                                   "lead lost",
                                                                   "engine sleeps",
                                                                   "content discarded",
                                                                   "experts rebalanced",
                                                                   "LoRA loaded",
                                                                   "foreign reload",
                                                                   "graphs captured again",
                                                                   "discard found at OPEN"};

}  // namespace

std::string_view session_event_name(SessionEvent event) noexcept {
  return kEventNames[static_cast<std::size_t>(event)];
}

Transition transition(SessionState state, SessionEvent event) noexcept {
  return kTable[static_cast<std::size_t>(event)][static_cast<std::size_t>(state)];
}

std::string transition_table_markdown() {
  std::string text = "| event |";
  for (int s = 0; s < kSessionStates; ++s) text += " " + std::string(wire::session_state_name(static_cast<SessionState>(s))) + " |";
  text += "\n|---|---|---|---|---|---|---|\n";
  for (int e = 0; e < kSessionEvents; ++e) {
    text += "| " + std::string(kEventNames[static_cast<std::size_t>(e)]) + " |";
    for (int s = 0; s < kSessionStates; ++s) {
      const Transition t = transition(static_cast<SessionState>(s), static_cast<SessionEvent>(e));
      std::string cell;
      switch (t.answer) {
        case Answer::kTake: cell = t.back ? "as before OPEN" : std::string(wire::session_state_name(t.next)); break;
        case Answer::kRefuse: cell = "refused"; break;
        case Answer::kIgnore: cell = "-"; break;
      }
      if (t.forget_version) cell += ", version none";
      text += " " + cell + " |";
    }
    text += "\n";
  }
  return text;
}

}  // namespace headrace
