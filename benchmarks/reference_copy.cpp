#include "benchmarks/reference_copy.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/base/check.h"

namespace headrace::bench {
namespace {

#if defined(__x86_64__)
constexpr std::size_t kLine = 64;

__attribute__((target("avx512f"))) void stream_lines_avx512(const std::byte* src, std::byte* dst, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kLine) _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
}

__attribute__((target("avx2"))) void stream_lines_avx2(const std::byte* src, std::byte* dst, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kLine) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), high);
  }
}

void stream_lines_sse2(const std::byte* src, std::byte* dst, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
}

void streaming_copy(const std::byte* src, std::byte* dst, std::size_t bytes) {
  const std::size_t head = std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine) % kLine);
  std::memcpy(dst, src, head);
  const std::size_t lines = (bytes - head) / kLine * kLine;
  if (__builtin_cpu_supports("avx512f")) {
    stream_lines_avx512(src + head, dst + head, lines);
  } else if (__builtin_cpu_supports("avx2")) {
    stream_lines_avx2(src + head, dst + head, lines);
  } else {
    stream_lines_sse2(src + head, dst + head, lines);
  }
  std::memcpy(dst + head + lines, src + head + lines, bytes - head - lines);
  _mm_sfence();
}

void rep_movsb(const std::byte* src, std::byte* dst, std::size_t bytes) {
  asm volatile("rep movsb" : "+S"(src), "+D"(dst), "+c"(bytes) : : "memory");
}
#endif

void copy_with(CopyKind kind, const std::byte* src, std::byte* dst, std::size_t bytes) {
  switch (kind) {
    case CopyKind::kGlibc: std::memcpy(dst, src, bytes); return;
#if defined(__x86_64__)
    case CopyKind::kStreaming: streaming_copy(src, dst, bytes); return;
    case CopyKind::kRepMovsb: rep_movsb(src, dst, bytes); return;
#else
    case CopyKind::kStreaming:
    case CopyKind::kRepMovsb: HEADRACE_CHECK(false, "copy_kinds() does not offer it here");
#endif
  }
}

}  // namespace

std::string_view copy_kind_name(CopyKind kind) noexcept {
  switch (kind) {
    case CopyKind::kGlibc: return "memcpy";
    case CopyKind::kStreaming: return "streaming stores";
    case CopyKind::kRepMovsb: return "rep movsb";
  }
  return "unknown";
}

std::vector<CopyKind> copy_kinds() {
#if defined(__x86_64__)
  return {CopyKind::kGlibc, CopyKind::kStreaming, CopyKind::kRepMovsb};
#else
  return {CopyKind::kGlibc};
#endif
}

void plain_copy(CopyKind kind, std::span<const std::byte> source, std::span<std::byte> destination) {
  HEADRACE_CHECK(source.size() == destination.size(), "a copy has one size");
  if (!source.empty()) copy_with(kind, source.data(), destination.data(), source.size());
}

void plain_copy(CopyKind kind, WorkerPool& pool, std::span<const std::byte> source, std::span<std::byte> destination) {
  const std::size_t parts = pool.threads();
  pool.run(parts, [&](std::size_t i) {
    const std::size_t begin = source.size() * i / parts / 64 * 64;
    const std::size_t end = i + 1 == parts ? source.size() : source.size() * (i + 1) / parts / 64 * 64;
    plain_copy(kind, source.subspan(begin, end - begin), destination.subspan(begin, end - begin));
  });
}

std::uint64_t read_sum(std::span<const std::byte> bytes) noexcept {
  // Eight sums, so that the compiler may use vectors and no addition waits for the one before it.
  std::array<std::uint64_t, 8> sums{};
  std::size_t i = 0;
  for (; i + sizeof(sums) <= bytes.size(); i += sizeof(sums)) {
    std::array<std::uint64_t, 8> words;
    std::memcpy(words.data(), bytes.data() + i, sizeof(words));
    for (std::size_t w = 0; w < words.size(); ++w) sums[w] += words[w];
  }
  std::uint64_t sum = 0;
  for (; i < bytes.size(); ++i) sum += static_cast<std::uint64_t>(bytes[i]);
  for (const std::uint64_t each : sums) sum += each;
  return sum;
}

}  // namespace headrace::bench
