#include "core/transport/run_directory.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "core/transport/control.h"
#include "tests/core/transport/child_process.h"
#include "tests/core/transport/temporary_folder.h"

namespace headrace {
namespace {

namespace fs = std::filesystem;

class RunDirectoryTest : public ::testing::Test {
 protected:
  void SetUp() override { ::setenv("XDG_RUNTIME_DIR", folder_.path().c_str(), 1); }
  void TearDown() override { ::unsetenv("XDG_RUNTIME_DIR"); }

  static RunDirectory create(std::string_view job) {
    auto directory = RunDirectory::create(job);
    EXPECT_TRUE(directory.ok()) << directory.status().to_string();
    return std::move(directory).value();
  }

  static EndpointClaim claim(const RunDirectory& directory, std::string_view engine, std::uint32_t rank) {
    auto claimed = directory.claim(engine, rank);
    EXPECT_TRUE(claimed.ok()) << claimed.status().to_string();
    return std::move(claimed).value();
  }

  static void touch(const fs::path& path) { std::ofstream(path) << "x"; }

  static unsigned mode_of(const fs::path& path) {
    struct stat info = {};
    EXPECT_EQ(::lstat(path.c_str(), &info), 0) << path;
    return info.st_mode & 07777U;
  }

  TemporaryFolder folder_;
};

TEST_F(RunDirectoryTest, LiesInTheRuntimeFolderOrInTmp) {
  EXPECT_EQ(RunDirectory::base(), folder_.path() / "headrace");
  const std::string fallback = "/tmp/headrace-" + std::to_string(::geteuid());
  ::setenv("XDG_RUNTIME_DIR", (folder_.path() / "missing").c_str(), 1);
  EXPECT_EQ(RunDirectory::base(), fallback);
  ::setenv("XDG_RUNTIME_DIR", "relative", 1);
  EXPECT_EQ(RunDirectory::base(), fallback);
  ::unsetenv("XDG_RUNTIME_DIR");
  EXPECT_EQ(RunDirectory::base(), fallback);
}

TEST_F(RunDirectoryTest, IsForItsOwnerOnly) {
  const RunDirectory directory = create("job");
  EXPECT_EQ(directory.path(), folder_.path() / "headrace" / "job");
  EXPECT_EQ(mode_of(directory.path()), 0700U);
  EXPECT_EQ(mode_of(directory.path().parent_path()), 0700U);
  const EndpointClaim held = claim(directory, "engine", 0);
  EXPECT_EQ(mode_of(directory.path() / "engine-0.lock"), 0600U);
}

TEST_F(RunDirectoryTest, RefusesDirectoriesThatOthersMayEnter) {
  create("job");
  ::chmod((RunDirectory::base() / "job").c_str(), 0750);
  EXPECT_EQ(RunDirectory::create("job").status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(RunDirectory::open("job").status().code(), Code::kFailedPrecondition);
  ::chmod(RunDirectory::base().c_str(), 0777);
  EXPECT_EQ(RunDirectory::create("other").status().code(), Code::kFailedPrecondition);
}

TEST_F(RunDirectoryTest, RefusesLinksInItsPlace) {
  const TemporaryFolder trap;
  fs::create_directory_symlink(trap.path(), folder_.path() / "headrace");
  EXPECT_EQ(RunDirectory::create("job").status().code(), Code::kFailedPrecondition);
  EXPECT_TRUE(fs::is_empty(trap.path()));
  fs::remove(folder_.path() / "headrace");
  const RunDirectory directory = create("job");
  touch(trap.path() / "victim");
  fs::create_symlink(trap.path() / "victim", directory.path() / "engine-0.lock");
  EXPECT_FALSE(directory.claim("engine", 0).ok());
}

TEST_F(RunDirectoryTest, RefusesNamesThatCouldLeaveIt) {
  for (const std::string& name : {std::string(), std::string("."), std::string(".."), std::string("a/b"), std::string("a b"),
                                  std::string("ä"), std::string(65, 'a'), std::string("a\0b", 3)}) {
    EXPECT_EQ(RunDirectory::create(name).status().code(), Code::kInvalidArgument) << name;
    EXPECT_EQ(RunDirectory::open(name).status().code(), Code::kInvalidArgument) << name;
    EXPECT_EQ(create("job").claim(name, 0).status().code(), Code::kInvalidArgument) << name;
  }
  EXPECT_TRUE(RunDirectory::create(std::string(64, 'a')).ok());
}

TEST_F(RunDirectoryTest, OpensOnlyWhatIsThere) {
  EXPECT_EQ(RunDirectory::open("job").status().code(), Code::kUnavailable);
  EXPECT_TRUE(RunDirectory::jobs().empty());
  create("b");
  create("a");
  EXPECT_TRUE(RunDirectory::open("a").ok());
  EXPECT_EQ(RunDirectory::jobs(), (std::vector<std::string>{"a", "b"}));
}

TEST_F(RunDirectoryTest, AClaimIsExclusiveUntilItEnds) {
  const RunDirectory directory = create("job");
  std::optional<EndpointClaim> first = claim(directory, "engine-x", 3);
  EXPECT_EQ(first->endpoint(), "ipc://" + (directory.path() / "engine-x-3.ipc").string());
  EXPECT_EQ(first->descriptor_path(), (directory.path() / "engine-x-3.fds").string());
  const auto second = directory.claim("engine-x", 3);
  EXPECT_EQ(second.status().code(), Code::kFailedPrecondition);
  EXPECT_NE(second.status().message().find(first->endpoint()), std::string::npos) << second.status().message();
  EXPECT_TRUE(directory.claim("engine-x", 4).ok());
  touch(directory.path() / "engine-x-3.ipc");
  touch(directory.path() / "engine-x-3.fds");
  first.reset();
  EXPECT_TRUE(fs::is_empty(directory.path()));
  EXPECT_TRUE(directory.claim("engine-x", 3).ok());
}

TEST_F(RunDirectoryTest, AMovedClaimIsHeldOnce) {
  const RunDirectory directory = create("job");
  EndpointClaim kept = claim(directory, "engine", 0);
  {
    EndpointClaim other = claim(directory, "engine", 1);
    kept = std::move(other);
  }
  EXPECT_EQ(kept.endpoint(), "ipc://" + (directory.path() / "engine-1.ipc").string());
  EXPECT_TRUE(directory.claim("engine", 0).ok());
  EXPECT_FALSE(directory.claim("engine", 1).ok());
}

TEST_F(RunDirectoryTest, AnotherProcessHoldsItsClaimUntilItIsKilled) {
  const RunDirectory directory = create("job");
  ChildProcess owner([&](ChildProcess::Lines& lines) {
    const auto held = directory.claim("engine", 0);
    if (!held.ok()) return 1;
    const auto listener = listen_zmq(held.value().endpoint(), held.value().descriptor_path());
    if (!listener.ok()) return 2;
    lines.say("serving");
    lines.hear();
    return 0;
  });
  ASSERT_EQ(owner.lines().hear(), "serving");
  EXPECT_EQ(directory.claim("engine", 0).status().code(), Code::kFailedPrecondition);
  ASSERT_EQ(directory.endpoints().size(), 1U);
  EXPECT_TRUE(directory.endpoints()[0].alive);
  EXPECT_TRUE(directory.clean(false).empty());
  owner.kill();
  EXPECT_TRUE(fs::exists(directory.path() / "engine-0.ipc"));
  EXPECT_TRUE(fs::exists(directory.path() / "engine-0.fds"));
  ASSERT_EQ(directory.endpoints().size(), 1U);
  EXPECT_FALSE(directory.endpoints()[0].alive);
  const EndpointClaim next = claim(directory, "engine", 0);
  EXPECT_FALSE(fs::exists(directory.path() / "engine-0.ipc"));
  EXPECT_FALSE(fs::exists(directory.path() / "engine-0.fds"));
}

TEST_F(RunDirectoryTest, ListsItsReceiversInOrder) {
  const RunDirectory directory = create("job");
  const EndpointClaim b10 = claim(directory, "b", 10);
  const EndpointClaim b9 = claim(directory, "b", 9);
  const EndpointClaim a = claim(directory, "a-1", 0);
  touch(directory.path() / "c-0.lock");
  touch(directory.path() / "unrelated.txt");
  touch(directory.path() / "d-007.lock");
  std::vector<std::string> found;
  for (const FoundEndpoint& endpoint : directory.endpoints()) {
    EXPECT_EQ(endpoint.job, "job");
    EXPECT_EQ(endpoint.endpoint, "ipc://" + (directory.path() / (endpoint.engine + "-" + std::to_string(endpoint.rank) + ".ipc")).string());
    found.push_back(endpoint.engine + " " + std::to_string(endpoint.rank) + (endpoint.alive ? " alive" : " dead"));
  }
  EXPECT_EQ(found, (std::vector<std::string>{"a-1 0 alive", "b 9 alive", "b 10 alive", "c 0 dead"}));
}

TEST_F(RunDirectoryTest, CleansWhatNobodyOwns) {
  const RunDirectory directory = create("job");
  const EndpointClaim held = claim(directory, "live", 0);
  touch(directory.path() / "live-0.ipc");
  touch(directory.path() / "live.guard");
  for (const char* name : {"live-1.lock", "live-1.ipc", "dead-0.ipc", "dead-0.fds", "dead-0.lock", "dead.guard", "notes.txt"}) {
    touch(directory.path() / name);
  }
  EXPECT_EQ(directory.guard_path("dead"), directory.path() / "dead.guard");
  const std::vector<fs::path> expected = {directory.path() / "dead-0.fds",  directory.path() / "dead-0.ipc",
                                          directory.path() / "dead-0.lock", directory.path() / "dead.guard",
                                          directory.path() / "live-1.ipc",  directory.path() / "live-1.lock"};
  const auto sorted = [](std::vector<fs::path> paths) {
    std::sort(paths.begin(), paths.end());
    return paths;
  };
  EXPECT_EQ(sorted(directory.clean(true)), expected);
  EXPECT_TRUE(fs::exists(directory.path() / "dead.guard"));
  EXPECT_EQ(sorted(directory.clean(false)), expected);
  for (const fs::path& path : expected) EXPECT_FALSE(fs::exists(path)) << path;
  for (const char* name : {"live-0.lock", "live-0.ipc", "live.guard", "notes.txt"})
    EXPECT_TRUE(fs::exists(directory.path() / name)) << name;
}

TEST_F(RunDirectoryTest, CleaningRemovesAnEmptyJobAndAClaimBringsItBack) {
  const RunDirectory directory = create("job");
  touch(directory.path() / "dead-0.lock");
  EXPECT_EQ(directory.clean(true), (std::vector<fs::path>{directory.path() / "dead-0.lock", directory.path()}));
  EXPECT_EQ(directory.clean(false), (std::vector<fs::path>{directory.path() / "dead-0.lock", directory.path()}));
  EXPECT_FALSE(fs::exists(directory.path()));
  EXPECT_TRUE(directory.clean(false).empty());
  const EndpointClaim held = claim(directory, "engine", 0);
  EXPECT_TRUE(fs::exists(directory.path() / "engine-0.lock"));
}

TEST_F(RunDirectoryTest, RefusesSocketPathsThatAreTooLong) {
  ::setenv("XDG_RUNTIME_DIR", folder_.path().c_str(), 1);
  const RunDirectory directory = create(std::string(64, 'j'));
  const auto held = directory.claim(std::string(64, 'e'), 0);
  EXPECT_EQ(held.status().code(), Code::kInvalidArgument);
  EXPECT_NE(held.status().message().find(std::string(64, 'e') + "-0.ipc"), std::string::npos) << held.status().message();
}

}  // namespace
}  // namespace headrace
