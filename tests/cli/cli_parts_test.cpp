#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "cli/box_bytes.h"
#include "cli/exit_code.h"
#include "cli/fingerprints.h"
#include "cli/model_options.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/receiver_client.h"

namespace headrace::cli {
namespace {

TEST(ExitCodes, TellInputPeersAndOurBugsApart) {
  EXPECT_EQ(exit_code(Code::kOk), ExitCode::kDone);
  for (const Code code :
       {Code::kInvalidArgument, Code::kFailedPrecondition, Code::kCorruption, Code::kResourceExhausted, Code::kUnsupported}) {
    EXPECT_EQ(to_int(exit_code(code)), 3) << code_name(code);
  }
  for (const Code code : {Code::kDeadlineExceeded, Code::kUnavailable, Code::kCancelled, Code::kDeviceLost}) {
    EXPECT_EQ(to_int(exit_code(code)), 4) << code_name(code);
  }
  EXPECT_EQ(to_int(exit_code(Code::kInternal)), 5);
}

TEST(ConvertedBytes, AreWhatStorageOfAnotherTypeHolds) {
  CheckpointTensor tensor;
  tensor.name = "w";
  tensor.dtype = Dtype::kF32;
  tensor.shape = {2};
  const auto of = [](std::initializer_list<int> list) {
    std::vector<std::byte> bytes;
    for (const int value : list) bytes.push_back(static_cast<std::byte>(value));
    return bytes;
  };
  const auto singles = of({0x00, 0x00, 0x80, 0x3F, 0x00, 0x80, 0x81, 0xBF});  // 1 and a tie below -1
  const auto converted = converted_bytes(tensor, singles, Dtype::kBF16);
  ASSERT_TRUE(converted.ok()) << converted.status().to_string();
  EXPECT_EQ(converted.value(), of({0x80, 0x3F, 0x82, 0xBF}));
  EXPECT_FALSE(converted_bytes(tensor, singles, Dtype::kU8).ok());
  EXPECT_FALSE(converted_bytes(tensor, singles, Dtype::kF32).ok());
}

TEST(ModelOptions, NameTheDtypeOfLiveFloatingPointTensors) {
  ModelOptions options;
  EXPECT_EQ(model_request(options, 0).value_or_throw().dtype, std::nullopt);
  options.dtype = "f16";
  EXPECT_EQ(model_request(options, 0).value_or_throw().dtype, Dtype::kF16);
  options.dtype = "fp16";
  const auto refused = model_request(options, 0);
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("dtype fp16"), std::string::npos) << refused.status().to_string();
}

TEST(HumanBytes, UsePowersOfThousandAndThreeDigits) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(1'000), "1.00 kB");
  EXPECT_EQ(human_bytes(90'868'376), "90.9 MB");
  EXPECT_EQ(human_bytes(999'999), "1.00 MB");
  EXPECT_EQ(human_bytes(375'000'000'000), "375 GB");
}

TEST(ProgressLine, SaysShareRateAndTimeLeft) {
  EXPECT_EQ(progress_line("pushing", 500'000'000, 2'000'000'000, 2.0), "pushing   25 %  500 MB of 2.00 GB  250 MB/s  6 s left");
  EXPECT_EQ(progress_line("pushing", 10, 10, 0.0), "pushing  100 %  10 B of 10 B  0 B/s");
}

TEST(Targets, AreOneJobOrEndpointsOfOneJob) {
  const Result<Target> job = parse_target({"job-1"});
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(job.value().job, "job-1");
  EXPECT_TRUE(job.value().endpoints.empty());

  const Result<Target> ipc = parse_target({"ipc:///run/x/headrace/job-2/engine-0-0.ipc", "ipc:///run/x/headrace/job-2/engine-0-1.ipc"});
  ASSERT_TRUE(ipc.ok()) << ipc.status().to_string();
  EXPECT_EQ(ipc.value().job, "job-2");
  EXPECT_EQ(ipc.value().endpoints.size(), 2u);

  const Result<Target> tcp = parse_target({"tcp://127.0.0.1:7000"}, "job-3");
  ASSERT_TRUE(tcp.ok());
  EXPECT_EQ(tcp.value().job, "job-3");
}

TEST(Targets, RefuseTwoJobsAndNamelessTcp) {
  EXPECT_EQ(parse_target({"job-1", "job-2"}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(parse_target({"ipc:///r/headrace/a/e-0.ipc", "ipc:///r/headrace/b/e-0.ipc"}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(parse_target({"job-1"}, "job-2").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(parse_target({"tcp://127.0.0.1:7000"}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(parse_target({}).status().code(), Code::kInvalidArgument);
}

/// Element numbers of a box, by plain loops over up to three dimensions.
std::vector<std::int64_t> elements_of(const Shape& shape, const Box& box) {
  std::vector<std::int64_t> elements;
  for (std::int64_t i = box.lo[0]; i < box.hi[0]; ++i) {
    for (std::int64_t j = box.lo[1]; j < box.hi[1]; ++j) {
      for (std::int64_t k = box.lo[2]; k < box.hi[2]; ++k) elements.push_back((i * shape[1] + j) * shape[2] + k);
    }
  }
  return elements;
}

TEST(CutBox, CoversEveryElementOnceWithinTheLimit) {
  const Shape shape{7, 300, 11};
  const Box box{{1, 17, 2}, {6, 290, 9}};
  const std::vector<std::int64_t> whole = elements_of(shape, box);
  for (const std::int64_t limit : {1, 5, 7, 50, 1'000, 2'000, 100'000}) {
    std::multiset<std::int64_t> seen;
    for (const Box& part : cut_box(box, limit)) {
      EXPECT_LE(part.elements(), limit);
      const std::vector<std::int64_t> elements = elements_of(shape, part);
      seen.insert(elements.begin(), elements.end());
    }
    EXPECT_EQ(seen, std::multiset<std::int64_t>(whole.begin(), whole.end())) << "limit " << limit;
  }
}

TEST(CutBox, LeavesAScalarWhole) {
  EXPECT_EQ(cut_box(Box::whole({}), 1).size(), 1u);
  EXPECT_TRUE(cut_box(Box::whole({0, 4}), 1).empty());
}

TEST(ElementOffset, FollowsRowMajorOrder) {
  const Shape shape{4, 5, 6};
  const Box box{{1, 2, 3}, {3, 5, 5}};
  const std::vector<std::int64_t> expected = elements_of(shape, box);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(element_offset(shape, box, static_cast<std::int64_t>(i)), expected[i]);
}

TEST(FirstDifference, IsTheByteWithinTheWholeTensor) {
  const Shape shape{4, 6, 5};
  constexpr std::int64_t kElementBytes = 2;
  std::vector<std::byte> tensor(4 * 6 * 5 * kElementBytes);
  for (std::size_t i = 0; i < tensor.size(); ++i) tensor[i] = static_cast<std::byte>(i * 31);
  const Box box{{1, 2, 1}, {4, 5, 4}};
  std::vector<std::byte> packed;
  for (const std::int64_t element : elements_of(shape, box)) {
    for (std::int64_t b = 0; b < kElementBytes; ++b) packed.push_back(tensor[static_cast<std::size_t>(element * kElementBytes + b)]);
  }
  EXPECT_EQ(first_difference(tensor, shape, kElementBytes, box, packed), std::nullopt);
  const std::int64_t element = elements_of(shape, box)[13];
  packed[27] ^= std::byte{1};
  packed[40] ^= std::byte{1};
  EXPECT_EQ(first_difference(tensor, shape, kElementBytes, box, packed), element * kElementBytes + 1);
}

wire::TensorFingerprint part(const std::string& name, const Shape& shape, const Box& box, std::uint64_t value) {
  wire::TensorFingerprint fingerprint;
  fingerprint.name = name;
  fingerprint.shape = shape;
  fingerprint.box = box;
  fingerprint.sum.lanes = {value, value * 3};
  return fingerprint;
}

TEST(MergeValues, AddsPartsAndTakesReplicasOnce) {
  const Shape shape{4, 2};
  const Box upper{{0, 0}, {2, 2}};
  const Box lower{{2, 0}, {4, 2}};
  const Result<JobValues> merged = merge_values(
      {{part("b", shape, upper, 5), part("a", {3}, Box::whole({3}), 1)}, {part("b", shape, lower, 7)}, {part("b", shape, lower, 7)}});
  ASSERT_TRUE(merged.ok());
  EXPECT_TRUE(merged.value().defects.empty());
  ASSERT_EQ(merged.value().tensors.size(), 2u);
  EXPECT_EQ(merged.value().tensors[0].name, "a");
  EXPECT_EQ(merged.value().tensors[1].sum.lanes[0], 12u);
  EXPECT_EQ(merged.value().tensors[1].sum.lanes[1], 36u);
  ASSERT_EQ(merged.value().parts[1].size(), 2u);
  EXPECT_EQ(merged.value().parts[1][1].clients, (std::vector<std::size_t>{1, 2}));
}

TEST(MergeValues, NamesReplicasThatDifferAndPartsThatAreMissing) {
  const Shape shape{4};
  const Box half{{0}, {2}};
  wire::TensorFingerprint torn = part("torn", {2}, Box::whole({2}), 1);
  torn.equal = false;
  const Result<JobValues> merged =
      merge_values({{part("replica", shape, Box::whole(shape), 1), part("missing", shape, half, 1), torn, part("overlap", shape, half, 1)},
                    {part("replica", shape, Box::whole(shape), 2), part("overlap", shape, Box{{1}, {4}}, 2)}});
  ASSERT_TRUE(merged.ok());
  EXPECT_TRUE(merged.value().tensors.empty());
  ASSERT_EQ(merged.value().defects.size(), 4u);
  for (const char* name : {"missing", "overlap", "replica", "torn"}) {
    bool named = false;
    for (const JobValues::Defect& defect : merged.value().defects) named = named || defect.name == name;
    EXPECT_TRUE(named) << name;
  }
}

TEST(MergeValues, RefusesABoxOutsideItsTensor) {
  EXPECT_EQ(merge_values({{part("a", {3}, Box{{0}, {4}}, 1)}}).status().code(), Code::kCorruption);
}

}  // namespace
}  // namespace headrace::cli
