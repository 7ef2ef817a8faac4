#include "receiver/session_table.h"

#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <sstream>

namespace headrace {
namespace {

// The table once more, as words: o old state kept and event refused, - ignored, b back to what was before OPEN, or the first letter of the
// next state (i idle, O open, a applying, p prepared, t torn, d in doubt); ! says that the version is forgotten. Columns: idle, open,
// applying, prepared, torn, in doubt.
constexpr std::array<std::array<std::string_view, kSessionStates>, kSessionEvents> kExpected{{
    {"O", "o", "o", "o", "O", "O"},       // OPEN
    {"o", "b", "o", "o", "o", "o"},       // reject
    {"o", "a!", "-", "o", "o", "o"},      // first enqueue
    {"o", "p", "p", "o", "o", "o"},       // prepared
    {"o", "o", "o", "i", "o", "i"},       // COMMIT
    {"-", "b", "t!", "t!", "-", "o"},     // ABORT
    {"-", "b", "t!", "t!", "-", "-"},     // failure
    {"-", "b", "t!", "-", "-", "-"},      // sender lost
    {"-", "b", "t!", "d", "-", "-"},      // lead lost
    {"i", "b", "t!", "t!", "t", "t!"},    // sleep
    {"i!", "b!", "t!", "t!", "t", "t!"},  // discard
    {"i", "b", "t!", "t!", "t", "t!"},    // rebalance
    {"i", "b", "t!", "t!", "t", "t!"},    // LoRA
    {"i!", "b!", "t!", "t!", "t", "t!"},  // foreign reload
    {"i", "b", "t!", "t!", "t", "t!"},    // recapture
    {"i!", "O!", "t!", "t!", "t", "t!"},  // discard found
}};

std::string word(const Transition& t) {
  switch (t.answer) {
    case Answer::kRefuse: return "o";
    case Answer::kIgnore: return "-";
    case Answer::kTake: break;
  }
  static constexpr std::string_view kLetters = "iOaptd";
  std::string text = t.back ? "b" : std::string(1, kLetters[static_cast<std::size_t>(t.next)]);
  return t.forget_version ? text + "!" : text;
}

TEST(SessionTable, SaysForEveryPairOfStateAndEventWhatHappens) {
  for (int e = 0; e < kSessionEvents; ++e) {
    for (int s = 0; s < kSessionStates; ++s) {
      EXPECT_EQ(word(transition(static_cast<SessionState>(s), static_cast<SessionEvent>(e))),
                kExpected[static_cast<std::size_t>(e)][static_cast<std::size_t>(s)])
          << wire::session_state_name(static_cast<SessionState>(s)) << ", " << session_event_name(static_cast<SessionEvent>(e));
    }
  }
}

TEST(SessionTable, NeverKeepsAVersionOnceBytesWereWritten) {
  for (int e = 0; e < kSessionEvents; ++e) {
    const Transition t = transition(SessionState::kApplying, static_cast<SessionEvent>(e));
    if (t.answer == Answer::kTake && t.next == SessionState::kTorn) {
      EXPECT_TRUE(t.forget_version);
    }
    EXPECT_NE(t.answer == Answer::kTake ? t.next : SessionState::kTorn, SessionState::kIdle)
        << "applying cannot end as if nothing had happened";
  }
}

TEST(SessionTable, StandsInTheProtocolDocumentAsItIs) {
  std::ifstream file(std::string(HEADRACE_SOURCE_DIR) + "/docs/protocol.md");
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_NE(text.str().find(transition_table_markdown()), std::string::npos) << transition_table_markdown();
}

}  // namespace
}  // namespace headrace
