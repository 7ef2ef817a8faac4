#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string_view>

#include "core/wire/limits.h"
#include "kernels/fingerprint.h"
#include "kernels/strided_copy.h"
#include "sender_sdk/sender_impl.h"

namespace headrace {
namespace {

constexpr std::size_t kMissingNamesTold = 10;

}  // namespace

wire::ValueNames SenderImpl::asked_of(std::span<const ReceiverInfo> receivers) {
  std::vector<wire::ValueRule> rules;
  for (const ReceiverInfo& receiver : receivers) {
    const std::vector<wire::ValueRule>& asked = receiver.welcome.values;
    rules.insert(rules.end(), asked.begin(), asked.end());
  }
  return wire::ValueNames(rules);
}

Status SenderImpl::read_values(std::span<const SenderEntry> given, bool alone) {
  values_.clear();
  if (value_names_.empty()) return ok_status();
  if (asked_manifest_ != entries_.digest()) {
    asked_.clear();
    for (std::uint32_t e = 0; e < entries_.entries().size(); ++e) {
      if (wants_value(entries_.entries()[e].name)) asked_.push_back(e);
    }
    asked_manifest_ = entries_.digest();
  }
  if (asked_.size() > limits::kValuesMax)
    return Status(Code::kInvalidArgument, fmt::format("open: {} values are wanted, the limit is {}", asked_.size(), limits::kValuesMax));
  if (!value_names_.conflict().empty()) {
    return Status(
        Code::kFailedPrecondition,
        fmt::format("open: receivers keep {} as one with different tensors: send to one engine at a time", value_names_.conflict()));
  }
  // How many names of one tensor there are: one needs no comparison, unless another sender has another one.
  std::map<std::string_view, std::size_t> tied;
  for (const std::uint32_t e : asked_) {
    if (const std::string* to = value_names_.tied_to(given[e].name)) ++tied[*to];
  }
  std::string missing;
  std::size_t count = 0;
  for (const std::uint32_t e : asked_) {
    const std::string* to = value_names_.tied_to(given[e].name);
    const wire::ManifestEntry& entry = entries_.entries()[e];
    if (to != nullptr && tied[*to] == 1 && (alone || !given[e].value || entry.box != Box::whole(entry.shape))) continue;
    if (!given[e].value) {
      if (++count <= kMissingNamesTold) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", given[e].name);
      continue;
    }
    Result<wire::EntryValue> value = read_value(e, *given[e].value);
    if (!value.ok()) return value.status();
    values_.push_back(std::move(value).value());
  }
  if (count == 0) return ok_status();
  return Status(Code::kInvalidArgument,
                fmt::format("open: receivers must know beforehand what {} entries hold, whose value was not given: {}{}", count, missing,
                            count > kMissingNamesTold ? ", ..." : ""));
}

Result<wire::EntryValue> SenderImpl::read_value(std::uint32_t entry, const TensorView& view) const {
  const wire::ManifestEntry& known = entries_.entries()[entry];
  const auto refused = [&](std::string_view why) {
    return Status(Code::kInvalidArgument, fmt::format("open: the value of {}: {}", known.name, why));
  };
  const std::string* to = value_names_.tied_to(known.name);
  const std::int64_t elem_bytes = dtype_bytes(known.dtype);
  const std::int64_t bytes = known.box.elements() * elem_bytes;
  if (known.box != Box::whole(known.shape)) return refused("it is wanted of the whole tensor, this sender has a part");
  if (to == nullptr && static_cast<std::size_t>(bytes) > limits::kValueBytesMax)
    return refused(fmt::format("{} bytes are wanted, the limit is {}", bytes, limits::kValueBytesMax));
  const std::vector<std::int64_t> packed = packed_strides(known.shape, elem_bytes);
  const std::vector<std::int64_t>& strides = view.strides.empty() ? packed : view.strides;
  if (strides.size() != known.shape.size()) return refused(fmt::format("{} strides for shape {}", strides.size(), to_string(known.shape)));
  if (std::any_of(strides.begin(), strides.end(), [](std::int64_t stride) { return stride < 0; }))
    return refused(fmt::format("strides {}: negative ones are not supported", to_string(strides)));
  if (view.data == nullptr && bytes > 0) return refused("no data");
  if (to != nullptr) {
    const Result<StridedCopy> nest = pack_nest(known.shape, elem_bytes, strides);
    if (!nest.ok()) return refused(nest.status().message());
    const TensorKey key = tensor_key(*to, known.dtype, known.shape);
    return wire::EntryValue{entry, wire::value_of(fingerprint_nest(key, inverse(nest.value()), static_cast<const std::byte*>(view.data)))};
  }
  wire::EntryValue value{entry, std::vector<std::byte>(static_cast<std::size_t>(bytes))};
  for (std::int64_t at = 0; at < bytes; at += elem_bytes) {
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < strides.size(); ++d) offset += at / packed[d] % known.shape[d] * strides[d];
    std::memcpy(value.bytes.data() + at, static_cast<const std::byte*>(view.data) + offset, static_cast<std::size_t>(elem_bytes));
  }
  return value;
}

}  // namespace headrace
