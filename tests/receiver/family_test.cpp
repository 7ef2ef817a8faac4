#include "receiver/models/family.h"

#include <gtest/gtest.h>

#include "tests/receiver/deepseek_inventory.h"

namespace headrace {
namespace {

CheckpointTensor tensor(std::string name, Dtype dtype, Shape shape) {
  CheckpointTensor t;
  t.name = std::move(name);
  t.dtype = dtype;
  t.shape = std::move(shape);
  return t;
}

TEST(ParseLayout, ReadsTheThreeForms) {
  const ParallelLayout ep = parse_layout("ep4").value_or_throw();
  EXPECT_EQ(ep.tp, 1);
  EXPECT_EQ(ep.ep, 4);
  EXPECT_EQ(ep.ranks(), 4);
  const ParallelLayout tp = parse_layout("tp2").value_or_throw();
  EXPECT_EQ(tp.tp, 2);
  EXPECT_EQ(tp.ep, 1);
  EXPECT_EQ(tp.ranks(), 2);
  const ParallelLayout both = parse_layout("tp2,ep8").value_or_throw();
  EXPECT_EQ(both.tp, 2);
  EXPECT_EQ(both.ep, 8);
  EXPECT_EQ(both.ranks(), 8);
}

TEST(ParseLayout, WritesWhatItReads) {
  for (const std::string text : {"tp1", "tp2", "ep4", "tp2,ep4"}) EXPECT_EQ(parse_layout(text).value_or_throw().to_string(), text);
}

TEST(ParseLayout, RefusesEverythingElse) {
  for (const std::string text :
       {"",        "4",       "ep",   "ep0",  "ep-1",     "ep+4",    "ep04", "ep4 ",          " ep4",    "EP4", "ep4,tp2",
        "ep4,ep4", "tp2,tp2", "tp2,", ",ep4", "tp2,ep4,", "tp2;ep4", "ep4x", "ep99999999999", "ep65537", "pp2"}) {
    const auto result = parse_layout(text);
    ASSERT_FALSE(result.ok()) << text;
    EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
  }
}

TEST(BuildModel, ChoosesTheFamilyByModelType) {
  const std::vector<CheckpointTensor> tensors{tensor("a", Dtype::kF32, {4})};
  ModelRequest request;
  const JsonValue v41 = testing::json(testing::v41_tiny_config(128, 128, 4));
  EXPECT_EQ(build_model(request, &v41, tensors).value_or_throw().family, "deepseek_v4");
  const JsonValue flash = testing::json(testing::v4_flash_config());
  EXPECT_EQ(build_model(request, &flash, tensors).value_or_throw().family, "deepseek_v4");
  const JsonValue bert = testing::json(R"({"model_type":"bert"})");
  EXPECT_EQ(build_model(request, &bert, tensors).value_or_throw().family, "dense");
  EXPECT_EQ(build_model(request, nullptr, tensors).value_or_throw().family, "dense");
}

TEST(BuildModel, TakesTheFamilyThatIsAskedFor) {
  const std::vector<CheckpointTensor> tensors{tensor("a", Dtype::kF32, {4})};
  const JsonValue v41 = testing::json(testing::v41_tiny_config(128, 128, 4));
  ModelRequest request;
  request.family = "dense";
  EXPECT_EQ(build_model(request, &v41, tensors).value_or_throw().family, "dense");
  request.family = "deepseek_v4";
  EXPECT_EQ(build_model(request, nullptr, tensors).status().code(), Code::kInvalidArgument);
  const JsonValue bert = testing::json(R"({"model_type":"bert"})");
  EXPECT_NE(build_model(request, &bert, tensors).status().message().find("model_type"), std::string::npos);
  request.family = "llama";
  EXPECT_EQ(build_model(request, &v41, tensors).status().code(), Code::kUnsupported);
}

}  // namespace
}  // namespace headrace
