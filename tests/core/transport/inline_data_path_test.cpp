#include <gtest/gtest.h>

#include <vector>

#include "core/wire/limits.h"
#include "tests/core/transport/data_path_conformance.h"

namespace headrace {
namespace {

struct InlineBackend {
  static constexpr DataPathKind kKind = DataPathKind::kInline;
};
INSTANTIATE_TYPED_TEST_SUITE_P(Inline, DataPathConformance, InlineBackend);

TEST(InlineDataPath, SendsOnlyTheBytesThatAreUsed) {
  const auto device = make_host_device();
  const auto source = make_data_source(DataPathKind::kInline, *device);
  auto memory = source->allocate(1'000);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(source->descriptor(memory.value()), -1);
  EXPECT_EQ(source->attachment(memory.value(), 10).size(), 10U);
}

TEST(InlineDataPath, HasNoUseForDescriptors) {
  const auto device = make_host_device();
  EXPECT_EQ(make_data_source(DataPathKind::kInline, *device)->adopt(UniqueFd(), 10).status().code(), Code::kUnsupported);
  EXPECT_EQ(make_data_sink(DataPathKind::kInline, *device)->attach(MemoryId{1}, 10, UniqueFd()).code(), Code::kUnsupported);
}

TEST(InlineDataPath, RefusesMemoryThatNoMessageCanCarry) {
  const auto device = make_host_device();
  const auto source = make_data_source(DataPathKind::kInline, *device);
  EXPECT_EQ(source->allocate(limits::kAttachmentBytesMax + 1).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace headrace
