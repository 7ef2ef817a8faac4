#include "tests/oracle/bert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <vector>

namespace headrace::oracle {
namespace {

std::uint32_t rounded(std::uint32_t word) {
  std::vector<std::uint8_t> bytes;
  for (int b = 0; b < 4; ++b) bytes.push_back(static_cast<std::uint8_t>(word >> (8 * b)));
  const std::vector<std::uint8_t> half = bfloat16_of(bytes);
  EXPECT_EQ(half.size(), 2u);
  return half.at(0) + 256u * half.at(1);
}

TEST(OracleBfloat16, RoundsToTheNearestAndTiesToTheEvenOne) {
  EXPECT_EQ(rounded(std::bit_cast<std::uint32_t>(1.0F)), 0x3F80u);
  EXPECT_EQ(rounded(0x3F80'8000u), 0x3F80u);  // a tie, below it an even one
  EXPECT_EQ(rounded(0x3F80'8001u), 0x3F81u);
  EXPECT_EQ(rounded(0x3F81'8000u), 0x3F82u);  // a tie, below it an odd one
  EXPECT_EQ(rounded(0x3F81'7FFFu), 0x3F81u);
  EXPECT_EQ(rounded(0x8000'0001u), 0x8000u);
}

TEST(OracleBfloat16, GoesToInfinityAndKeepsWhatIsNoNumber) {
  EXPECT_EQ(rounded(0x7F7F'FFFFu), 0x7F80u);
  EXPECT_EQ(rounded(0xFF80'0000u), 0xFF80u);
  EXPECT_EQ(rounded(0x7F80'0001u), 0x7FC0u);
  EXPECT_EQ(rounded(0xFFC1'0000u), 0xFFC1u);
}

}  // namespace
}  // namespace headrace::oracle
