#include "sender_sdk/entry_table.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace headrace {
namespace {

constexpr std::uint32_t kEntries = 5;

EntryTable table_of_five() {
  std::vector<SenderEntry> entries;
  for (std::uint32_t e = 0; e < kEntries; ++e) entries.push_back({"layers." + std::to_string(e) + ".weight", Dtype::kF32, {2, 3}, {}});
  EntryTable table;
  EXPECT_TRUE(table.assign(entries).ok());
  return table;
}

TEST(EntryTable, FindsANameWhicheverEntryWasExpected) {
  const EntryTable table = table_of_five();
  for (std::uint32_t e = 0; e < kEntries; ++e) {
    for (std::size_t expected = 0; expected <= kEntries + 1; ++expected) {
      EXPECT_EQ(table.find("layers." + std::to_string(e) + ".weight", expected), e) << "expected " << expected;
    }
  }
}

TEST(EntryTable, FindsNothingForANameThatIsOnlyAlikeTheExpectedOne) {
  const EntryTable table = table_of_five();
  for (const std::string_view name : {"layers.1", "layers.1.weight ", "", "layers.9.weight"}) {
    EXPECT_EQ(table.find(name, 1), std::nullopt) << name;
  }
}

}  // namespace
}  // namespace headrace
