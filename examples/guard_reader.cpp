// Reads an engine's serving guard as docs/protocol.md describes the page, and nothing else of Headrace: what an inference scheduler does
// before each step. Prints one line of JSON. Ends with 0 when the guard is open, 1 when it is closed, 3 when the page cannot be read.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr std::size_t kHeaderBytes = 128;
constexpr std::size_t kSlotBytes = 64;
constexpr std::uint64_t kCommitted = 1;

struct Slot {
  std::uint64_t state = 0;
  std::uint64_t session = 0;
  std::uint64_t run = 0;
  std::uint64_t step = 0;
};

std::uint64_t load(const unsigned char* at) {
  auto* word = reinterpret_cast<std::uint64_t*>(const_cast<unsigned char*>(at));
  return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire);
}

/// A slot's word names the state and the bank in which its numbers stand; the writer fills the other bank first. The same word after
/// reading the bank means that the bank was not reused in between.
bool read_slot(const unsigned char* slot, Slot& out) {
  for (int tries = 0; tries < 1000; ++tries) {
    const std::uint64_t word = load(slot);
    const unsigned char* bank = slot + 8 + ((word >> 8) & 1) * 24;
    out = {word & 0xff, load(bank), load(bank + 8), load(bank + 16)};
    if (load(slot) == word) return true;
  }
  return false;
}

int report(const unsigned char* page, std::uint32_t ranks) {
  bool open = ranks > 0;
  Slot first;
  char engine[65] = {};
  std::memcpy(engine, page + 16, 64);
  std::printf("{\"engine\": \"%s\", \"slots\": [", engine);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    Slot slot;
    const bool whole = read_slot(page + kHeaderBytes + rank * kSlotBytes, slot);
    if (rank == 0) first = slot;
    open = open && whole && slot.state == kCommitted && slot.run == first.run && slot.step == first.step;
    std::printf("%s{\"state\": %llu, \"step\": %llu}", rank == 0 ? "" : ", ", static_cast<unsigned long long>(slot.state),
                static_cast<unsigned long long>(slot.step));
  }
  std::printf("], \"open\": %s}\n", open ? "true" : "false");
  return open ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: headrace-guard-reader PAGE\n");
    return 2;
  }
  const int fd = ::open(argv[1], O_RDONLY | O_CLOEXEC);
  struct stat info{};
  if (fd < 0 || ::fstat(fd, &info) != 0 || info.st_size < static_cast<off_t>(kHeaderBytes)) {
    std::perror(argv[1]);
    return 3;
  }
  const auto bytes = static_cast<std::size_t>(info.st_size);
  void* mapping = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (mapping == MAP_FAILED) {
    std::perror("mmap");
    return 3;
  }
  const auto* page = static_cast<const unsigned char*>(mapping);
  std::uint32_t ranks = 0;
  std::memcpy(&ranks, page + 12, sizeof ranks);
  if (std::memcmp(page, "HARGARD1", 8) != 0 || kHeaderBytes + ranks * kSlotBytes > bytes) {
    std::fprintf(stderr, "%s is no guard page\n", argv[1]);
    return 3;
  }
  return report(page, ranks);
}
