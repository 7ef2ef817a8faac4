#include "core/base/ids.h"

#include <sys/random.h>

#include "core/base/check.h"

namespace headrace {

std::uint64_t random_u64() {
  std::uint64_t number = 0;
  while (number == 0) HEADRACE_CHECK(::getrandom(&number, sizeof number, 0) == static_cast<ssize_t>(sizeof number), "getrandom of 8 bytes");
  return number;
}

}  // namespace headrace
