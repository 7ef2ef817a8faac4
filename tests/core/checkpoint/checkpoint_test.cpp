#include "core/checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "tests/core/checkpoint/temp_folder.h"

namespace headrace {
namespace {

using testing::safetensors_text;
using testing::TempFolder;
using std::string_literals::operator""s;

constexpr const char* kIndex = "model.safetensors.index.json";

/// A file with one U8 tensor of `bytes` bytes, which count up.
std::string one(const std::string& name, std::size_t bytes) {
  const std::string n = std::to_string(bytes);
  return safetensors_text("{\"" + name + R"(":{"dtype":"U8","shape":[)" + n + R"(],"data_offsets":[0,)" + n + "]}}", bytes);
}

std::vector<std::string> names(const Checkpoint& checkpoint) {
  std::vector<std::string> result;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) result.push_back(tensor.name);
  return result;
}

TEST(Checkpoint, ReadsFilesInNaturalOrderWithoutAnIndex) {
  const TempFolder folder;
  folder.write("part 10.safetensors", one("c", 1));
  folder.write("part 2.safetensors", one("b", 2));
  folder.write("część.safetensors", one("d", 3));
  folder.write("part 1.safetensors", safetensors_text("{}", 0));
  folder.write("notes.txt", "nothing");
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  std::vector<std::string> expected{"b", "c", "d"};
  std::vector<std::string> found = names(checkpoint.value());
  EXPECT_LT(std::find(found.begin(), found.end(), "b"), std::find(found.begin(), found.end(), "c"));
  std::sort(found.begin(), found.end());
  EXPECT_EQ(found, expected);
  EXPECT_EQ(checkpoint.value().files().size(), 4u);
  EXPECT_EQ(checkpoint.value().total_bytes(), 6);
  EXPECT_EQ(checkpoint.value().config(), nullptr);
}

TEST(Checkpoint, GivesTheBytesOfATensor) {
  const TempFolder folder;
  folder.write(
      "m.safetensors",
      safetensors_text(R"({"z":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
                       5));
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  ASSERT_NE(checkpoint.value().find("b"), nullptr);
  const auto bytes = checkpoint.value().bytes(*checkpoint.value().find("b"));
  ASSERT_TRUE(bytes.ok());
  ASSERT_EQ(bytes.value().size(), 2u);
  EXPECT_EQ(bytes.value()[0], std::byte{3});
  EXPECT_EQ(bytes.value()[1], std::byte{4});
  const auto none = checkpoint.value().bytes(*checkpoint.value().find("z"));
  ASSERT_TRUE(none.ok());
  EXPECT_TRUE(none.value().empty());
  EXPECT_EQ(checkpoint.value().find("c"), nullptr);
}

TEST(Checkpoint, ReadsHeadersAloneWhenTheDataIsCutOrMissing) {
  const TempFolder folder;
  const std::string whole = one("a", 1000);
  for (const std::size_t kept : {whole.size() - 1000, whole.size() - 1, whole.size()}) {
    folder.write("model.safetensors", whole.substr(0, kept));
    EXPECT_EQ(Checkpoint::open(folder.path()).ok(), kept == whole.size()) << kept;
    const auto headers = Checkpoint::open(folder.path(), ParseMode::kStrict, DataPart::kIgnored);
    ASSERT_TRUE(headers.ok()) << headers.status().message();
    EXPECT_EQ(headers.value().tensors().front().shape, Shape{1000});
    EXPECT_EQ(headers.value().bytes(headers.value().tensors().front()).status().code(), Code::kFailedPrecondition);
  }
  folder.write("model.safetensors", whole.substr(0, 20));
  EXPECT_FALSE(Checkpoint::open(folder.path(), ParseMode::kStrict, DataPart::kIgnored).ok());
}

TEST(Checkpoint, RefusesOffsetsThatNoFileHasThoughTheDataIsIgnored) {
  const TempFolder folder;
  const std::string huge = R"({"a":{"dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807]}})";
  folder.write("model.safetensors", safetensors_text(huge, 0));
  const auto headers = Checkpoint::open(folder.path(), ParseMode::kStrict, DataPart::kIgnored);
  EXPECT_EQ(headers.status().code(), Code::kInvalidArgument);
}

TEST(Checkpoint, MapsEachFileOnceForAllThreads) {
  const TempFolder folder;
  folder.write("m.safetensors", one("a", 1000));
  auto opened = Checkpoint::open(folder.path() / "m.safetensors");
  ASSERT_TRUE(opened.ok());
  const Checkpoint checkpoint = std::move(opened).value();
  std::vector<const std::byte*> seen(4);
  {
    std::vector<std::jthread> threads;
    for (auto& place : seen)
      threads.emplace_back([&checkpoint, &place] { place = checkpoint.bytes(checkpoint.tensors()[0]).value().data(); });
  }
  EXPECT_NE(seen[0], nullptr);
  EXPECT_EQ(std::count(seen.begin(), seen.end(), seen[0]), 4);
}

TEST(Checkpoint, ReadsTheConfigBesideItsFiles) {
  const TempFolder folder;
  folder.write("m.safetensors", one("a", 1));
  folder.write("config.json", R"({"model_type":"dense"})");
  for (const auto& path : {folder.path(), folder.path() / "m.safetensors"}) {
    const auto checkpoint = Checkpoint::open(path);
    ASSERT_TRUE(checkpoint.ok());
    ASSERT_NE(checkpoint.value().config(), nullptr);
    EXPECT_EQ(*checkpoint.value().config()->find("model_type")->as_string(), "dense");
  }
  folder.write("config.json", "{");
  EXPECT_FALSE(Checkpoint::open(folder.path()).ok());
}

TEST(Checkpoint, RefusesANameThatTwoFilesHold) {
  const TempFolder folder;
  folder.write("one.safetensors", one("a", 1));
  folder.write("two.safetensors", one("a", 1));
  const Status status = Checkpoint::open(folder.path()).status();
  for (const char* expected : {"\"a\"", "one.safetensors", "two.safetensors"}) {
    EXPECT_NE(status.message().find(expected), std::string::npos) << status.message();
  }
}

TEST(Checkpoint, RefusesFoldersWithoutFilesAndPathsThatAreNotThere) {
  const TempFolder folder;
  EXPECT_FALSE(Checkpoint::open(folder.path()).ok());
  EXPECT_FALSE(Checkpoint::open(folder.path() / "none").ok());
  folder.write("x.bin", "12345678");
  EXPECT_FALSE(Checkpoint::open(folder.path() / "x.bin").ok());
}

TEST(Checkpoint, OpensOnlyTheFilesOfTheIndex) {
  const TempFolder folder;
  folder.write("x.safetensors", one("a", 1));
  folder.write("y.safetensors", one("b", 1));
  folder.write("consolidated.safetensors", one("a", 1));
  folder.write("broken.safetensors", "1");
  folder.write(kIndex, R"({"metadata":{"total_size":99.5,"more":1},"weight_map":{"b":"y.safetensors","a":"x.safetensors"}})");
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_EQ(names(checkpoint.value()), (std::vector<std::string>{"a", "b"}));
}

TEST(Checkpoint, RefusesAnIndexThatCannotBeTrusted) {
  const TempFolder folder;
  folder.write("x.safetensors", one("a", 1));
  std::filesystem::create_directory(folder.path() / "sub");
  const TempFolder outside;
  outside.write("x.safetensors", one("a", 1));
  for (const std::string& index :
       {R"({"weight_map":)"s, R"([])"s, R"({})"s, R"({"weight_map":[]})"s, R"({"weight_map":{}})"s, R"({"weight_map":{"a":1}})"s,
        R"({"weight_map":{"a":"none.safetensors"}})"s, R"({"weight_map":{"a":""}})"s, R"({"weight_map":{"a":".."}})"s,
        R"({"weight_map":{"a":"sub"}})"s, R"({"weight_map":{"a":"../)"s + folder.path().filename().string() + R"(/x.safetensors"}})",
        R"({"weight_map":{"a":")"s + (outside.path() / "x.safetensors").string() + R"("}})",
        R"({"weight_map":{"a":"x.safetensors","a":"x.safetensors"}})"s}) {
    folder.write(kIndex, index);
    EXPECT_FALSE(Checkpoint::open(folder.path()).ok()) << index;
  }
  folder.write(kIndex, R"({"weight_map":{"a":"x.safetensors"}})");
  EXPECT_TRUE(Checkpoint::open(folder.path()).ok());
}

TEST(Checkpoint, ChecksIndexAndHeadersBothWays) {
  const TempFolder folder;
  folder.write("x.safetensors", one("a", 1));
  folder.write("y.safetensors", one("b", 1));
  const auto message = [&](const char* map) {
    folder.write(kIndex, "{\"weight_map\":"s + map + "}");
    return Checkpoint::open(folder.path()).status().message();
  };
  const std::string missing = message(R"({"a":"x.safetensors","b":"y.safetensors","gone":"x.safetensors"})");
  EXPECT_NE(missing.find("\"gone\" is not in x.safetensors"), std::string::npos) << missing;
  const std::string unlisted = message(R"({"a":"x.safetensors","c":"y.safetensors"})");
  EXPECT_NE(unlisted.find("\"b\" is not in model.safetensors.index.json"), std::string::npos) << unlisted;
  EXPECT_NE(unlisted.find("\"c\" is not in y.safetensors"), std::string::npos) << unlisted;
  const std::string swapped = message(R"({"b":"x.safetensors","a":"y.safetensors"})");
  EXPECT_NE(swapped.find("\"a\": model.safetensors.index.json puts it into y.safetensors"), std::string::npos) << swapped;
}

TEST(Checkpoint, NamesEveryBadFile) {
  const TempFolder folder;
  folder.write("one.safetensors", "1");
  folder.write("two.safetensors", one("a", 4).substr(0, 60));
  folder.write("ok.safetensors", one("b", 1));
  const Status status = Checkpoint::open(folder.path()).status();
  EXPECT_NE(status.message().find("one.safetensors"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("two.safetensors"), std::string::npos) << status.message();
}

TEST(Checkpoint, GivesAnErrorNotASignalWhenAFileIsCutAfterOpen) {
  const TempFolder folder;
  const auto path = folder.write("m.safetensors", one("a", 100000));
  for (const bool mapped_before : {false, true}) {
    folder.write("m.safetensors", one("a", 100000));
    const auto checkpoint = Checkpoint::open(path);
    ASSERT_TRUE(checkpoint.ok());
    if (mapped_before) {
      ASSERT_TRUE(checkpoint.value().bytes(checkpoint.value().tensors()[0]).ok());
    }
    std::filesystem::resize_file(path, 5000);
    const auto bytes = checkpoint.value().bytes(checkpoint.value().tensors()[0]);
    EXPECT_EQ(bytes.status().code(), Code::kFailedPrecondition);
    EXPECT_NE(bytes.status().message().find("5000"), std::string::npos) << bytes.status().message();
  }
}

TEST(NaturalOrder, ComparesRunsOfDigitsAsNumbers) {
  const std::vector<std::string> sorted{"", "1", "2", "10", "a", "a1", "a01b", "a2", "a2b", "a10", "b"};
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    for (std::size_t j = 0; j < sorted.size(); ++j)
      EXPECT_EQ(natural_less(sorted[i], sorted[j]), i < j) << sorted[i] << " and " << sorted[j];
  }
  EXPECT_TRUE(natural_less("model-99999999999999999999998", "model-99999999999999999999999"));
  EXPECT_NE(natural_less("a01", "a1"), natural_less("a1", "a01"));
}

}  // namespace
}  // namespace headrace
