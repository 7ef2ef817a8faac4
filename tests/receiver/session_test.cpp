#include <fmt/format.h>

#include "tests/receiver/receiver_fixture.h"

namespace headrace {
namespace {

class Session : public ReceiverFixture {};

TEST_F(Session, WritesEveryByteInPlaceAndPublishesTheVersion) {
  start();
  WireSender sender = connect("lead");
  const auto welcome = sender.hello();
  EXPECT_EQ(welcome.version, "");
  EXPECT_FALSE(guard().slots[0].state == SlotState::kCommitted);
  const wire::Receipt receipt = update(sender, 7, "run/1", 1);
  expect_live(1);
  EXPECT_EQ(receipt.applied_bytes, 140U);
  EXPECT_EQ(receipt.wire_bytes, 140U);
  EXPECT_EQ(receipt.tensors, 4U);
  EXPECT_EQ(receipt.expert_tensors, 2U);
  EXPECT_EQ(receipt.runs, 1U) << "two experts in one run";
  EXPECT_EQ(receipt.run_experts, 2U);
  EXPECT_EQ(receipt.copies, 3U) << "the run and two plain tensors";
  EXPECT_EQ(receipt.batches, 1U);
  EXPECT_TRUE(receipt.proven);
  EXPECT_EQ(receipt.engram_calls, 0U);
  EXPECT_EQ(status().version, "run/1");
  EXPECT_EQ(guard().slots[0].state, SlotState::kCommitted);
  EXPECT_EQ(guard().slots[0].step, 1U);
  EXPECT_FALSE(guard().open()) << "the other rank has not committed";
}

TEST_F(Session, RefusesASecondConnectionOfASendersNameUntilTheFirstIsGone) {
  start();
  wire::Hello again;
  again.protocol_min = again.protocol_max = limits::kProtocolVersion;
  again.job = "job";
  again.sender = "lead";
  again.data_paths = {"inline"};
  WireSender second = connect("lead");
  {
    WireSender first = connect("lead");
    first.hello();
    second.send(again);
    const auto refusal = second.expect<wire::ErrorReport>();
    EXPECT_EQ(static_cast<Code>(refusal.failure.code), Code::kUnavailable) << "asking again may help";
    EXPECT_NE(refusal.failure.message.find("lead is connected already"), std::string::npos) << refusal.failure.message;
  }
  second.hello();
}

TEST_F(Session, KeepsTheServedVersionWhileAnUpdateIsOnlyOpen) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 7, "run/1", 1);
  open_update(sender, 8, "run/2");
  EXPECT_EQ(state(), "open");
  EXPECT_EQ(status().version, "run/1");
  EXPECT_EQ(guard().slots[0].state, SlotState::kCommitted);
}

TEST_F(Session, TakesAllThatASenderThatIsAloneMaySayBeforeItHearsAnAnswer) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  for (const std::uint32_t seed : {1U, 2U}) {
    const auto data = payload(seed);
    sender.open(seed, "run/" + std::to_string(seed));
    sender.manifest(full_manifest());
    sender.expect<wire::Opened>();
    sender.expect<wire::Accept>();
    sender.send(wire::Confirm{});
    sender.send(wire::Bucket{0, payload_extents()}, data);
    sender.send(wire::End{1, payload_sums(data)});
    sender.expect<wire::Begin>();
    sender.expect<wire::Consumed>();
    const wire::Receipt prepared = sender.expect<wire::Prepared>().receipt;
    EXPECT_TRUE(prepared.proven);
    EXPECT_EQ(prepared.fingerprints, 4U);
    sender.send(wire::Commit{});
    sender.expect<wire::Committed>();
    expect_live(seed);
  }
}

TEST_F(Session, FindsAWrongByteAlsoWhenEndFollowsTheBucketAtOnce) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 1, "run/1");
  auto data = payload(1);
  const auto sums = payload_sums(data);
  data[100] ^= std::byte{1};
  sender.send(wire::Bucket{0, payload_extents()}, data);
  sender.send(wire::End{1, sums});
  sender.expect<wire::Consumed>();
  const wire::Failure failure = sender.expect<wire::ErrorReport>().failure;
  EXPECT_EQ(failure.code, static_cast<std::uint32_t>(Code::kCorruption));
  EXPECT_EQ(failure.name, "rows.weight");
  EXPECT_EQ(state(), "torn");
}

TEST_F(Session, TakesNoBucketBehindTheConfirmOfOneSenderWhileAnotherHasYetToConfirm) {
  start();
  WireSender lead = connect("lead");
  WireSender other = connect("other");
  lead.hello();
  other.hello();
  lead.open(1, "run/1", {"lead", "other"});
  lead.manifest(full_manifest());
  lead.expect<wire::Opened>();
  other.expect<wire::Opened>();
  other.session = other.last_session;
  other.manifest({});
  lead.expect<wire::Accept>();
  lead.send(wire::Confirm{});
  lead.send(wire::Bucket{0, payload_extents()}, payload(1));
  EXPECT_NE(lead.expect<wire::ErrorReport>().failure.message.find("BUCKET of sender lead before BEGIN"), std::string::npos);
  EXPECT_EQ(state(), "idle");
  for (const std::byte byte : live("plain")) ASSERT_EQ(byte, std::byte{0}) << "not one was written";
}

TEST_F(Session, AnswersAllDefectsAtOnceAndWritesNothing) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 7, "run/1", 1);
  sender.open(8, "run/2");
  sender.expect<wire::Opened>();
  auto entries = full_manifest();
  entries[0].shape = {6, 9};  // a wrong shape
  entries[0].box = Box::whole(entries[0].shape);
  entries[1].dtype = Dtype::kI8;                     // a wrong dtype
  entries[2].name = "layers.0.ffn.experts.0.w9.up";  // an unknown name, so expert 0 is missing too
  sender.manifest(entries);
  const auto reject = sender.expect<wire::Reject>();
  EXPECT_EQ(reject.defects_total, 4U);
  std::string all;
  for (const auto& defect : reject.defects) {
    all += wire::to_status(defect).message() + "\n";
    EXPECT_EQ(defect.rank, 0);
  }
  EXPECT_NE(all.find("a.weight: shape [6,9], table has [6,8]"), std::string::npos) << all;
  EXPECT_NE(all.find("rows.weight: dtype I8, table has U8"), std::string::npos) << all;
  EXPECT_NE(all.find("layers.0.ffn.experts.0.w9.up: unknown name; nearest: "), std::string::npos) << all;
  EXPECT_NE(all.find("layers.0.ffn.experts.0.w1.weight: no sender brings it"), std::string::npos) << all;
  EXPECT_EQ(state(), "idle");
  EXPECT_EQ(status().version, "run/1");
  expect_live(1);
  update(sender, 9, "run/2", 2);
  expect_live(2);
}

TEST_F(Session, SaysThatNothingMatchedWhenEveryNameHasAWrongPrefix) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  sender.open(8, "run/1");
  sender.expect<wire::Opened>();
  auto entries = full_manifest();
  for (auto& entry : entries) entry.name = "module." + entry.name;
  sender.manifest(entries);
  const auto reject = sender.expect<wire::Reject>();
  ASSERT_FALSE(reject.defects.empty());
  EXPECT_NE(reject.defects[0].message.find("0 of 5 names matched"), std::string::npos) << reject.defects[0].message;
  EXPECT_NE(reject.defects[0].message.find("a.weight"), std::string::npos) << reject.defects[0].message;
}

TEST_F(Session, FindsOneWrongByteByItsFingerprintAndNamesTheTensor) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 8, "run/1");
  const auto data = payload(2);
  auto flipped = data;
  flipped[130] ^= std::byte{1};
  sender.send(wire::Bucket{0, payload_extents()}, flipped);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, payload_sums(data)});
  const auto error = sender.expect<wire::ErrorReport>();
  EXPECT_EQ(static_cast<Code>(error.failure.code), Code::kCorruption);
  EXPECT_EQ(error.failure.name, "layers.0.ffn.experts.1.w1.weight");
  EXPECT_NE(error.failure.expected, error.failure.actual);
  EXPECT_EQ(state(), "torn");
}

TEST_F(Session, RefusesAnUpdateWithoutFingerprints) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 8, "run/1");
  sender.send(wire::Bucket{0, payload_extents()}, payload(2));
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, {}});
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("no fingerprint"), std::string::npos);
}

TEST_F(Session, CommitsWithoutFingerprintsOnlyWhenToldToAndCallsItUnproven) {
  ReceiverOptions options;
  options.require_proof = false;
  start(options);
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 8, "run/1");
  sender.send(wire::Bucket{0, payload_extents()}, payload(2));
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, {}});
  EXPECT_FALSE(sender.expect<wire::Prepared>().receipt.proven);
  sender.send(wire::Commit{});
  EXPECT_FALSE(sender.expect<wire::Committed>().receipt.proven);
  expect_live(2);
}

TEST_F(Session, SaysWhatIsMissingWhenTheSendersEndTooEarly) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 8, "run/1");
  const auto data = payload(2);
  sender.send(wire::Bucket{0, {payload_extents()[0]}}, data);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, payload_sums(data)});
  const auto error = sender.expect<wire::ErrorReport>();
  EXPECT_NE(error.failure.message.find("rows.weight"), std::string::npos) << error.failure.message;
  EXPECT_EQ(state(), "torn");
}

TEST_F(Session, RefusesACountOfBucketsThatDoesNotAgree) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  open_update(sender, 8, "run/1");
  sender.send(wire::End{3, {}});
  const auto error = sender.expect<wire::ErrorReport>();
  EXPECT_EQ(error.failure.expected, "3");
  EXPECT_EQ(error.failure.actual, "0");
}

TEST_F(Session, GoesBackToTheOldVersionWhenASenderIsLostBeforeTheFirstByte) {
  start();
  WireSender lead = connect("lead");
  lead.hello();
  update(lead, 7, "run/1", 1);
  {
    WireSender second = connect("second");
    second.hello();
    lead.open(8, "run/2", {"lead", "second"});
    lead.expect<wire::Opened>();
    second.expect<wire::Opened>();
  }
  const auto error = lead.expect<wire::ErrorReport>();
  EXPECT_EQ(static_cast<Code>(error.failure.code), Code::kUnavailable);
  EXPECT_EQ(error.failure.sender, "second");
  EXPECT_EQ(state(), "idle");
  EXPECT_EQ(status().version, "run/1");
}

TEST_F(Session, IsTornWhenASenderIsLostAfterTheFirstByteAndTellsTheOthers) {
  start();
  WireSender lead = connect("lead");
  lead.hello();
  {
    WireSender second = connect("second");
    second.hello();
    lead.open(8, "run/1", {"lead", "second"});
    lead.expect<wire::Opened>();
    second.expect<wire::Opened>();
    auto list = full_manifest();
    lead.manifest({list.begin(), list.begin() + 2});
    second.session = lead.session;
    second.manifest({list.begin() + 2, list.end()});
    lead.expect<wire::Accept>();
    second.expect<wire::Accept>();
    lead.send(wire::Confirm{});
    second.send(wire::Confirm{});
    lead.expect<wire::Begin>();
    second.expect<wire::Begin>();
    second.send(wire::Bucket{0, {{0, MemoryId{1}, 0, std::nullopt, {}}}}, payload(2));
    second.expect<wire::Consumed>();
  }
  const auto error = lead.expect<wire::ErrorReport>();
  EXPECT_EQ(error.failure.sender, "second");
  EXPECT_EQ(error.failure.phase, "transfer");
  EXPECT_EQ(state(), "torn");
  // Whoever goes on talking in that session hears the same.
  lead.send(wire::Bucket{0, {}});
  EXPECT_EQ(lead.expect<wire::ErrorReport>().failure.sender, "second");
}

TEST_F(Session, IsInDoubtWhenThePreparedLeadIsLostAndAnotherFinishesIt) {
  start();
  {
    WireSender lead = connect("lead");
    lead.hello();
    prepare_update(lead, 8, "run/1", 4);
    EXPECT_EQ(guard().slots[0].state, SlotState::kPrepared);
  }
  WireSender other = connect("other");
  wire::Welcome welcome = other.hello();
  EXPECT_TRUE(becomes("in_doubt"));
  EXPECT_FALSE(guard().open());
  other.session = SessionId{8};
  other.send(wire::Commit{});
  EXPECT_EQ(other.expect<wire::Committed>().receipt.version.to_string(), "run/1");
  expect_live(4);
  EXPECT_EQ(status().version, "run/1");
  other.send(wire::Commit{});
  EXPECT_EQ(other.expect<wire::Committed>().receipt.session, 8U) << "COMMIT twice gives the same receipt";
}

TEST_F(Session, StaysInDoubtWhenTheNextUpdateIsRejected) {
  start();
  {
    WireSender lead = connect("lead");
    lead.hello();
    prepare_update(lead, 8, "run/1", 4);
  }
  WireSender other = connect("other");
  other.hello();
  other.open(9, "run/1");
  other.expect<wire::Opened>();
  auto list = full_manifest();
  list.pop_back();
  list.pop_back();
  other.manifest(list);
  other.expect<wire::Reject>();
  EXPECT_EQ(state(), "in_doubt");
  other.session = SessionId{8};
  other.send(wire::Commit{});
  other.expect<wire::Committed>();
  EXPECT_EQ(status().version, "run/1");
}

TEST_F(Session, RefusesCommitFromAnybodyButTheLead) {
  start();
  WireSender lead = connect("lead");
  lead.hello();
  prepare_update(lead, 8, "run/1", 4);
  WireSender other = connect("other");
  other.hello();
  other.session = SessionId{8};
  other.send(wire::Commit{});
  other.expect<wire::ErrorReport>();
  EXPECT_EQ(state(), "prepared");
  lead.send(wire::Commit{});
  lead.expect<wire::Committed>();
}

TEST_F(Session, RefusesASecondUpdateWithoutDisturbingTheFirst) {
  start();
  WireSender lead = connect("lead");
  lead.hello();
  open_update(lead, 8, "run/1");
  WireSender other = connect("other");
  other.hello();
  other.open(9, "run/1");
  const auto error = other.expect<wire::ErrorReport>();
  EXPECT_EQ(static_cast<Code>(error.failure.code), Code::kFailedPrecondition);
  const auto data = payload(5);
  lead.send(wire::Bucket{0, payload_extents()}, data);
  lead.expect<wire::Consumed>();
  lead.send(wire::End{1, payload_sums(data)});
  lead.expect<wire::Prepared>();
  lead.send(wire::Commit{});
  lead.expect<wire::Committed>();
  expect_live(5);
}

TEST_F(Session, LetsStepsOnlyRiseWithinARunAndANewRunStartAnywhere) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 7, "run/530", 1);
  for (const char* version : {"run/530", "run/500", "no slash", "run/", "/4", "run/x"}) {
    sender.open(8, version);
    EXPECT_FALSE(sender.expect<wire::ErrorReport>().failure.message.empty()) << version;
  }
  update(sender, 9, "other/3", 2);
  update(sender, 10, "other/4", 3);
  expect_live(3);
}

TEST_F(Session, AbortLeavesTheOldVersionBeforeTheFirstByteAndTornAfter) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  update(sender, 7, "run/1", 1);
  open_update(sender, 8, "run/2");
  sender.send(wire::Abort{wire::make_failure(Status(Code::kCancelled, "changed my mind"), "transfer")});
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("changed my mind"), std::string::npos);
  EXPECT_EQ(status().version, "run/1");
  open_update(sender, 9, "run/2");
  sender.send(wire::Bucket{0, {payload_extents()[0]}}, payload(2));
  sender.expect<wire::Consumed>();
  sender.send(wire::Abort{wire::make_failure(Status(Code::kCancelled, "again"), "transfer")});
  sender.expect<wire::ErrorReport>();
  EXPECT_EQ(state(), "torn");
}

TEST_F(Session, NamesWhoIsLateWhenTheDeadlinePasses) {
  start();
  WireSender lead = connect("lead");
  lead.hello();
  lead.open(8, "run/1", {"lead", "late"});
  lead.expect<wire::Opened>();
  lead.manifest(full_manifest());
  lead.send(wire::Ping{1});  // answered after the manifest was taken
  lead.expect<wire::Pong>();
  clock_.advance_ms(10'001);
  const auto error = lead.expect<wire::ErrorReport>();
  EXPECT_EQ(static_cast<Code>(error.failure.code), Code::kDeadlineExceeded);
  EXPECT_NE(error.failure.message.find("MANIFEST of sender late (not connected)"), std::string::npos) << error.failure.message;
  EXPECT_EQ(error.failure.phase, "manifest");
  EXPECT_EQ(state(), "idle");
}

TEST_F(Session, APingWithoutProgressDoesNotHoldTheDeadline) {
  start();
  WireSender lead = connect("lead");
  lead.hello();
  open_update(lead, 8, "run/1");
  lead.send(wire::Ping{3});
  lead.expect<wire::Pong>();
  clock_.advance_ms(6'000);
  lead.send(wire::Ping{4});  // progress: the whole period again
  lead.expect<wire::Pong>();
  clock_.advance_ms(6'000);
  lead.send(wire::Ping{4});
  lead.expect<wire::Pong>();
  clock_.advance_ms(6'000);
  EXPECT_EQ(static_cast<Code>(lead.expect<wire::ErrorReport>().failure.code), Code::kDeadlineExceeded);
}

TEST_F(Session, APreparedUpdateWhoseLeadFallsSilentIsInDoubt) {
  start();
  WireSender lead = connect("lead");
  lead.hello();
  prepare_update(lead, 8, "run/1", 2);
  clock_.advance_ms(10'001);
  lead.expect<wire::ErrorReport>();
  EXPECT_EQ(state(), "in_doubt");
}

TEST_F(Session, RefusesMessagesForAnotherLifeOfTheReceiver) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  sender.incarnation.value ^= 1;
  sender.open(8, "run/1");
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("started anew"), std::string::npos);
  EXPECT_EQ(state(), "idle");
}

TEST_F(Session, RefusesWhoeverDoesNotSayHelloOrServesAnotherJob) {
  start();
  WireSender stranger = connect("stranger");
  stranger.open(8, "run/1");
  EXPECT_NE(stranger.expect<wire::ErrorReport>().failure.message.find("OPEN before HELLO"), std::string::npos);
  stranger.send_raw(small_model::bytes(40, 3));
  EXPECT_EQ(static_cast<Code>(stranger.expect<wire::ErrorReport>().failure.code), Code::kInvalidArgument);
  wire::Hello hello;
  hello.protocol_min = hello.protocol_max = 1;
  hello.job = "other";
  hello.data_paths = {"inline"};
  stranger.send(hello);
  EXPECT_NE(stranger.expect<wire::ErrorReport>().failure.message.find("job other, this receiver serves job"), std::string::npos);
  hello.job = "job";
  hello.protocol_min = hello.protocol_max = 9;
  stranger.send(hello);
  EXPECT_EQ(static_cast<Code>(stranger.expect<wire::ErrorReport>().failure.code), Code::kUnsupported);
  hello.protocol_min = hello.protocol_max = 1;
  hello.sender = "x";
  hello.data_paths = {"carrier-pigeon"};
  stranger.send(hello);
  EXPECT_EQ(static_cast<Code>(stranger.expect<wire::ErrorReport>().failure.code), Code::kUnsupported);
}

TEST_F(Session, TakesAKnownManifestByItsDigestAndReusesThePlan) {
  start();
  WireSender sender = connect("lead");
  sender.hello();
  EXPECT_FALSE(update(sender, 7, "run/1", 1).plan_cached);
  sender.open(8, "run/2");
  sender.expect<wire::Opened>();
  sender.send(wire::Manifest{digest_of(wire::encode_entries(full_manifest())), true, {}});
  const auto accept = sender.expect<wire::Accept>();
  EXPECT_TRUE(accept.known);
  EXPECT_TRUE(accept.wanted.empty());
  sender.send(wire::Confirm{});
  sender.expect<wire::Begin>();
  const auto data = payload(2);
  sender.send(wire::Bucket{0, payload_extents()}, data);
  sender.expect<wire::Consumed>();
  sender.send(wire::End{1, payload_sums(data)});
  EXPECT_TRUE(sender.expect<wire::Prepared>().receipt.plan_cached);
  sender.send(wire::Commit{});
  sender.expect<wire::Committed>();
  expect_live(2);
  sender.open(9, "run/3");
  sender.expect<wire::Opened>();
  sender.send(wire::Manifest{digest_of(payload(3)), true, {}});
  EXPECT_NE(sender.expect<wire::ErrorReport>().failure.message.find("not known here"), std::string::npos);
}

TEST_F(Session, GivesEqualBoxesToTheFirstSenderWhenTheLeadSaysSo) {
  start();
  WireSender lead = connect("lead");
  WireSender second = connect("second");
  lead.hello();
  second.hello();
  lead.open(8, "run/1", {"lead", "second"});
  lead.expect<wire::Opened>();
  second.expect<wire::Opened>();
  second.session = lead.session;
  lead.manifest(full_manifest());
  second.manifest(full_manifest());
  EXPECT_NE(lead.expect<wire::Reject>().defects[0].message.find("overlap"), std::string::npos);
  second.expect<wire::Reject>();

  lead.open(9, "run/1", {"lead", "second"}, wire::OverlapRule::kFirstSenderOwns);
  lead.expect<wire::Opened>();
  second.expect<wire::Opened>();
  second.session = lead.session;
  lead.manifest(full_manifest());
  second.manifest(full_manifest());
  const auto wanted = lead.expect<wire::Accept>().wanted;
  EXPECT_EQ(wanted[0].boxes.size(), 1U);
  for (const auto& none : second.expect<wire::Accept>().wanted) EXPECT_TRUE(none.boxes.empty());
}

TEST_F(Session, AsksOnlyForTheRowsThatThisRankNeedsAndTakesThemInPieces) {
  start();
  WireSender lead = connect("lead");
  WireSender second = connect("second");
  lead.hello();
  second.hello();
  lead.open(8, "run/1", {"lead", "second"});
  lead.expect<wire::Opened>();
  second.expect<wire::Opened>();
  second.session = lead.session;
  // rows.weight [6, 4] is cut between the senders at row 2; this rank wants rows [0, 3).
  auto first_list = full_manifest();
  first_list[1].box = Box{{0, 0}, {2, 4}};
  lead.manifest(first_list);
  second.manifest({{"rows.weight", Dtype::kU8, {6, 4}, Box{{2, 0}, {6, 4}}}});
  EXPECT_EQ(lead.expect<wire::Accept>().wanted[1].boxes, (std::vector<Box>{Box{{0, 0}, {2, 4}}}));
  EXPECT_EQ(second.expect<wire::Accept>().wanted[0].boxes, (std::vector<Box>{Box{{2, 0}, {3, 4}}}));
  lead.send(wire::Confirm{});
  second.send(wire::Confirm{});
  lead.expect<wire::Begin>();
  second.expect<wire::Begin>();
  const auto data = payload(6);
  auto extents = payload_extents();
  extents[0].box = Box{{0, 0}, {5, 8}};  // a tensor in two pieces,
  extents.push_back({0, MemoryId{1}, 80, Box{{5, 0}, {6, 8}}, {}});
  lead.send(wire::Bucket{0, extents}, data);
  lead.expect<wire::Consumed>();
  // and a row given with strides: every second byte of a wider memory is refused, a packed row in a wider one is not.
  second.send(wire::Bucket{0, {{0, MemoryId{1}, 104, Box{{2, 0}, {3, 4}}, {16, 1}}}}, data);
  second.expect<wire::Consumed>();
  auto sums = payload_sums(data);
  const auto key = tensor_key("rows.weight", Dtype::kU8, Shape{6, 4});
  sums[1].sum = fingerprint(key, 0, std::span(data).subspan(96, 8));
  lead.send(wire::End{1, sums});
  second.send(wire::End{1, {{0, fingerprint(key, 8, std::span(data).subspan(104, 4))}}});
  lead.expect<wire::Prepared>();
  second.expect<wire::Prepared>();
  lead.send(wire::Commit{});
  lead.expect<wire::Committed>();
  second.expect<wire::Committed>();
  expect_live(6);
}

}  // namespace
}  // namespace headrace
