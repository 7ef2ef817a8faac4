#include "core/wire/value_names.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace headrace::wire {
namespace {

using Match = ValueNames::Match;

const std::vector<ValueRule> kRules{{"layers.0.ffn.experts.", "w1.scale", 12}, {"layers.1.ffn.experts.", "w1.scale", 3}, {"e", "s.0.t", 2}};

TEST(ValueNames, AreThePrefixANumberAPointAndTheSuffix) {
  const ValueNames names(kRules);
  EXPECT_EQ(names.find("layers.0.ffn.experts.0.w1.scale"), (Match{0, 0}));
  EXPECT_EQ(names.find("layers.0.ffn.experts.11.w1.scale"), (Match{0, 11}));
  EXPECT_EQ(names.find("layers.1.ffn.experts.2.w1.scale"), (Match{1, 2}));
  EXPECT_EQ(names.find("e1.s.0.t"), (Match{2, 1}));
}

TEST(ValueNames, OfRulesWithoutExpertsAreWholeAndTied) {
  const std::vector<ValueRule> rules{{"embed.0.weight", "head.weight", 0}, {"embed.0.weight", "embed.0.weight", 0}};
  const ValueNames names(rules);
  EXPECT_EQ(names.find("head.weight"), (Match{0, 0}));
  EXPECT_EQ(names.find("embed.0.weight"), (Match{1, 0}));
  EXPECT_FALSE(names.find("embed.1.weight"));
  ASSERT_NE(names.tied_to("head.weight"), nullptr);
  EXPECT_EQ(*names.tied_to("head.weight"), "embed.0.weight");
  EXPECT_EQ(names.tied_to("other"), nullptr);
  EXPECT_FALSE(names.empty());
  EXPECT_TRUE(names.conflict().empty());
  EXPECT_EQ(ValueNames(std::vector<ValueRule>{rules[0], {"other", "head.weight", 0}}).conflict(), "head.weight");
}

TEST(ValueNames, CarryFingerprintsOf16BytesLittleEndian) {
  FingerprintSum sum;
  sum.lanes = {0x0807060504030201, 0x100F0E0D0C0B0A09};
  const std::vector<std::byte> value = value_of(sum);
  ASSERT_EQ(value.size(), 16u);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(std::to_integer<int>(value[static_cast<std::size_t>(i)]), i + 1);
  EXPECT_EQ(fingerprint_of(value), sum);
  EXPECT_FALSE(fingerprint_of(std::span(value).first(15)));
}

TEST(ValueNames, AreNoOthers) {
  const ValueNames names(kRules);
  for (const char* name : {"", "0", "0.", ".0.", "layers.0.ffn.experts.12.w1.scale", "layers.1.ffn.experts.3.w1.scale",
                           "layers.0.ffn.experts.01.w1.scale", "layers.0.ffn.experts..w1.scale", "layers.0.ffn.experts.0.w1.scale2",
                           "xlayers.0.ffn.experts.0.w1.scale", "layers.0.ffn.experts.-1.w1.scale",
                           "layers.0.ffn.experts.99999999999999999999.w1.scale", "e1.s.1.t", "layers.2.ffn.experts.0.w1.scale"}) {
    EXPECT_FALSE(names.find(name)) << name;
  }
  EXPECT_FALSE(ValueNames().find("layers.0.ffn.experts.0.w1.scale"));
  EXPECT_TRUE(ValueNames().empty());
}

TEST(ValueNames, OfTwoReceiversAreThoseOfTheOneThatAsksForMore) {
  const std::vector<ValueRule> rules{{"e.", "s", 2}, {"e.", "s", 4}, {"e.", "s", 3}};
  const ValueNames names(rules);
  EXPECT_TRUE(names.find("e.3.s"));
  EXPECT_FALSE(names.find("e.4.s"));
}

/// Against the list of all names that the rules spell out.
TEST(ValueNames, AgreeWithTheListOfAllNames) {
  std::mt19937_64 random(20);
  const std::vector<std::string> pieces{"0", "1", "7", "10", "01", ".", "..", "a", "e.", "s", "s.1"};
  const std::vector<std::string> prefixes{"", ".", "a", "a.", "1.", "e.0."};
  const std::vector<std::string> suffixes{"", ".", "s", "1", "s.1", "0.s"};
  std::size_t found = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<ValueRule> rules;
    for (int i = 0; i < 4; ++i) {
      rules.push_back(
          {prefixes[random() % prefixes.size()], suffixes[random() % suffixes.size()], static_cast<std::uint32_t>(random() % 12)});
    }
    const ValueNames names(rules);
    for (int i = 0; i < 200; ++i) {
      std::string name;
      if (i % 2 == 0) {
        const ValueRule& rule = rules[random() % rules.size()];
        name = rule.prefix + std::to_string(random() % 12) + "." + rule.suffix;
      } else {
        for (std::size_t n = random() % 7; n > 0; --n) name += pieces[random() % pieces.size()];
      }
      bool listed = false;
      for (const ValueRule& rule : rules) {
        listed = listed || (rule.experts == 0 && name == rule.suffix);
        for (std::uint32_t e = 0; e < rule.experts; ++e) listed = listed || name == rule.prefix + std::to_string(e) + "." + rule.suffix;
      }
      ASSERT_EQ(names.find(name).has_value(), listed) << name;
      found += listed ? 1U : 0U;
    }
  }
  EXPECT_GT(found, 1'000U);
}

}  // namespace
}  // namespace headrace::wire
