#include "core/wire/codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <msgpack.hpp>
#include <new>
#include <optional>
#include <string>
#include <type_traits>

#include "core/wire/fields.h"
#include "core/wire/limits.h"

namespace headrace::wire {
namespace {

constexpr std::string_view kMagic = "HR";
constexpr std::size_t kDepthMax = 16;
// No list is longer than a manifest, and no item of one has more parts than an extent with box and strides.
constexpr std::size_t kListItemsMax = limits::kManifestEntriesMax;
constexpr std::size_t kItemsMax = 32 * kListItemsMax;

/// msgpack's buffer concept over a vector of bytes.
struct ByteSink {
  std::vector<std::byte> bytes;
  void write(const char* data, std::size_t size) {
    const auto* begin = reinterpret_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), begin, begin + size);
  }
};
using Packer = msgpack::packer<ByteSink>;

// ---- encoding -------------------------------------------------------------------------------------------------------------------

void pack_text(Packer& out, std::string_view text) {
  out.pack_str(static_cast<std::uint32_t>(text.size()));
  out.pack_str_body(text.data(), static_cast<std::uint32_t>(text.size()));
}

void pack_blob(Packer& out, std::span<const std::byte> blob) {
  out.pack_bin(static_cast<std::uint32_t>(blob.size()));
  out.pack_bin_body(reinterpret_cast<const char*>(blob.data()), static_cast<std::uint32_t>(blob.size()));
}

void pack_numbers(Packer& out, std::span<const std::int64_t> numbers) {
  out.pack_array(static_cast<std::uint32_t>(numbers.size()));
  for (const std::int64_t number : numbers) out.pack_int64(number);
}

/// Shortens a text to `bytes`, not in the middle of a character.
void clip(std::string& text, std::size_t bytes) {
  if (text.size() <= bytes) return;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0U) == 0x80U) --bytes;
  text.resize(bytes);
}

struct CountKeys {
  std::uint32_t keys = 0;
  template <class... A>
  void operator()(A&&...) {
    ++keys;
  }
};

struct CollectKeys {
  std::vector<std::string> keys;
  template <class... A>
  void operator()(std::string_view key, A&&...) {
    keys.emplace_back(key);
  }
};

/// A struct that fields.h lists.
template <class T>
concept IsMessage = requires(T& message, CountKeys& count) { fields(message, count); };

class Encoder {
 public:
  explicit Encoder(Packer& out) : out_(out) {}

  template <class T, class... Limit>
  void operator()(std::string_view key, const T& member, Limit...) {
    pack_text(out_, key);
    value(member);
  }

  void value(bool v) { v ? out_.pack_true() : out_.pack_false(); }
  void value(std::uint32_t v) { out_.pack_uint32(v); }
  void value(std::uint64_t v) { out_.pack_uint64(v); }
  void value(std::int64_t v) { out_.pack_int64(v); }
  void value(double v) { out_.pack_double(v); }
  void value(const std::string& v) { pack_text(out_, v); }
  void value(Dtype v) { out_.pack_uint8(static_cast<std::uint8_t>(v)); }
  void value(const WeightVersion& v) { pack_text(out_, v.run.empty() ? std::string() : v.to_string()); }
  void value(const Digest& v) { pack_blob(out_, std::as_bytes(std::span(v.bytes))); }
  void value(const std::vector<std::byte>& v) { pack_blob(out_, v); }
  void value(const FingerprintSum& v) {
    out_.pack_array(2);
    out_.pack_uint64(v.lanes[0]);
    out_.pack_uint64(v.lanes[1]);
  }
  void value(const Box& v) {
    out_.pack_array(2);
    pack_numbers(out_, v.lo);
    pack_numbers(out_, v.hi);
  }
  void value(const Shape& v) { pack_numbers(out_, v); }
  void value(const Wanted& v) {
    if (v.boxes.empty()) {
      v.ignored ? out_.pack_false() : out_.pack_nil();
      return;
    }
    out_.pack_array(static_cast<std::uint32_t>(1 + v.boxes.size()));
    pack_numbers(out_, v.granule);
    for (const Box& box : v.boxes) value(box);
  }
  void value(const Extent& v) {
    const std::uint32_t items = v.strides.empty() ? (v.box ? 4 : 3) : 5;
    out_.pack_array(items);
    out_.pack_uint32(v.entry);
    out_.pack_uint64(v.memory.value);
    out_.pack_int64(v.offset);
    if (items >= 4) value(v.box.value_or(Box{}));
    if (items >= 5) pack_numbers(out_, v.strides);
  }
  void value(const Failure& v) {
    // What failed names names that others chose, as many as there are: a reader would refuse the whole report for one long text.
    Failure failure = v;
    for (std::string* text : {&failure.message, &failure.expected, &failure.actual}) clip(*text, limits::kTextBytesMax);
    clip(failure.name, limits::kNameBytesMax);
    CountKeys count;
    fields(failure, count);
    out_.pack_map(count.keys);
    fields(failure, *this);
  }
  void value(const EntryValue& v) {
    out_.pack_array(2);
    out_.pack_uint32(v.entry);
    pack_blob(out_, v.bytes);
  }
  void value(const EntryFingerprint& v) {
    out_.pack_array(3);
    out_.pack_uint32(v.entry);
    out_.pack_uint64(v.sum.lanes[0]);
    out_.pack_uint64(v.sum.lanes[1]);
  }
  template <class T>
  void value(const std::vector<T>& v) {
    out_.pack_array(static_cast<std::uint32_t>(v.size()));
    for (const T& item : v) value(item);
  }
  template <class T>
    requires IsMessage<T>
  void value(const T& message) {
    CountKeys count;
    auto& mutable_message = const_cast<T&>(message);  // fields() serves the decoder too; the encoder only reads
    fields(mutable_message, count);
    out_.pack_map(count.keys);
    fields(mutable_message, *this);
  }

 private:
  Packer& out_;
};

// ---- decoding -------------------------------------------------------------------------------------------------------------------

/// Thrown inside this file only, caught by decode().
struct Malformed {
  std::string why;
};

/// Adds up declared items, so that no header makes msgpack reserve room for more items than there are bytes, or than any message has: an
/// unpacked item takes 24 times the room of its byte.
class DeclaredItems : public msgpack::null_visitor {
 public:
  explicit DeclaredItems(std::size_t bytes) : left_(std::min(bytes, kItemsMax)) {}
  bool start_array(std::uint32_t items) { return enter(items, items); }
  bool start_map(std::uint32_t pairs) { return enter(pairs, std::uint64_t{2} * pairs); }
  bool end_array() { return leave(); }
  bool end_map() { return leave(); }

 private:
  bool enter(std::uint64_t length, std::uint64_t items) {
    if (length > kListItemsMax || items > left_ || ++depth_ > kDepthMax) return false;
    left_ -= items;
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }
  std::uint64_t left_;
  std::size_t depth_ = 0;
};

const char* kind_name(const msgpack::object& object) {
  switch (object.type) {
    case msgpack::type::NIL: return "nil";
    case msgpack::type::BOOLEAN: return "a boolean";
    case msgpack::type::POSITIVE_INTEGER: return "a number";
    case msgpack::type::NEGATIVE_INTEGER: return "a negative number";
    case msgpack::type::FLOAT32:
    case msgpack::type::FLOAT64: return "a float";
    case msgpack::type::STR: return "text";
    case msgpack::type::BIN: return "bytes";
    case msgpack::type::ARRAY: return "an array";
    case msgpack::type::MAP: return "a map";
    case msgpack::type::EXT: return "an extension";
  }
  return "something else";
}

void expect(bool condition, std::string_view wanted, const msgpack::object& got) {
  if (!condition) throw Malformed{fmt::format("expected {}, got {}", wanted, kind_name(got))};
}

std::uint64_t get_unsigned(const msgpack::object& object, std::uint64_t max) {
  expect(object.type == msgpack::type::POSITIVE_INTEGER, "a non-negative number", object);
  if (object.via.u64 > max) throw Malformed{fmt::format("number {} is beyond {}", object.via.u64, max)};
  return object.via.u64;
}

std::int64_t get_signed(const msgpack::object& object) {
  if (object.type == msgpack::type::NEGATIVE_INTEGER) return object.via.i64;
  return static_cast<std::int64_t>(get_unsigned(object, INT64_MAX));
}

std::span<const msgpack::object> get_array(const msgpack::object& object, std::size_t max) {
  expect(object.type == msgpack::type::ARRAY, "an array", object);
  if (object.via.array.size > max) throw Malformed{fmt::format("{} items, the limit is {}", object.via.array.size, max)};
  return {object.via.array.ptr, object.via.array.size};
}

std::string_view get_text(const msgpack::object& object, std::size_t max) {
  expect(object.type == msgpack::type::STR, "text", object);
  if (object.via.str.size > max) throw Malformed{fmt::format("text of {} bytes, the limit is {}", object.via.str.size, max)};
  return {object.via.str.ptr, object.via.str.size};
}

std::span<const std::byte> get_blob(const msgpack::object& object, std::size_t max) {
  expect(object.type == msgpack::type::BIN, "bytes", object);
  if (object.via.bin.size > max) throw Malformed{fmt::format("{} bytes, the limit is {}", object.via.bin.size, max)};
  return {reinterpret_cast<const std::byte*>(object.via.bin.ptr), object.via.bin.size};
}

std::vector<std::int64_t> get_numbers(const msgpack::object& object) {
  std::vector<std::int64_t> numbers;
  for (const msgpack::object& item : get_array(object, limits::kDimsMax)) numbers.push_back(get_signed(item));
  return numbers;
}

Box get_box(const msgpack::object& lo, const msgpack::object& hi) {
  Box box{get_numbers(lo), get_numbers(hi)};
  if (box.lo.size() != box.hi.size()) throw Malformed{fmt::format("a box with {} and {} coordinates", box.lo.size(), box.hi.size())};
  return box;
}

Dtype get_dtype(const msgpack::object& object) {
  const std::uint64_t number = get_unsigned(object, UINT8_MAX);
  const auto dtype = dtype_from_number(number);
  if (!dtype) throw Malformed{fmt::format("unknown dtype number {}", number)};
  return *dtype;
}

FingerprintSum get_sum(std::span<const msgpack::object> items) {
  return FingerprintSum{{get_unsigned(items[0], UINT64_MAX), get_unsigned(items[1], UINT64_MAX)}};
}

class Decoder {
 public:
  explicit Decoder(const msgpack::object& map) {
    expect(map.type == msgpack::type::MAP, "a map", map);
    items_ = {map.via.map.ptr, map.via.map.size};
  }

  template <class T>
  void operator()(std::string_view key, T& member, std::size_t limit = 0) {
    try {
      value(find(key), member, limit);
    } catch (Malformed& malformed) {
      malformed.why = fmt::format("{}: {}", key, malformed.why);
      throw;
    }
  }

 private:
  const msgpack::object& find(std::string_view key) {
    // Fields come in our own order from our own encoder, so the next one is nearly always the right one.
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const auto& item = items_[(next_ + i) % items_.size()];
      if (item.key.type == msgpack::type::STR && std::string_view(item.key.via.str.ptr, item.key.via.str.size) == key) {
        next_ = (next_ + i + 1) % items_.size();
        return item.val;
      }
    }
    throw Malformed{"missing"};
  }

  static void value(const msgpack::object& o, bool& v, std::size_t) {
    expect(o.type == msgpack::type::BOOLEAN, "a boolean", o);
    v = o.via.boolean;
  }
  static void value(const msgpack::object& o, std::uint32_t& v, std::size_t) {
    v = static_cast<std::uint32_t>(get_unsigned(o, UINT32_MAX));
  }
  static void value(const msgpack::object& o, std::uint64_t& v, std::size_t) { v = get_unsigned(o, UINT64_MAX); }
  static void value(const msgpack::object& o, std::int64_t& v, std::size_t) { v = get_signed(o); }
  static void value(const msgpack::object& o, double& v, std::size_t) {
    if (o.type == msgpack::type::POSITIVE_INTEGER) {
      v = static_cast<double>(o.via.u64);
      return;
    }
    expect(o.type == msgpack::type::FLOAT64 || o.type == msgpack::type::FLOAT32, "a float", o);
    v = o.via.f64;
  }
  static void value(const msgpack::object& o, std::string& v, std::size_t limit) { v = std::string(get_text(o, limit)); }
  static void value(const msgpack::object& o, Dtype& v, std::size_t) { v = get_dtype(o); }
  static void value(const msgpack::object& o, WeightVersion& v, std::size_t) {
    const std::string_view text = get_text(o, 2 * limits::kIdBytesMax);
    const auto version = parse_weight_version(text);
    if (!version && !text.empty()) throw Malformed{"a version is RUN/STEP"};
    v = version.value_or(WeightVersion{});
  }
  static void value(const msgpack::object& o, Digest& v, std::size_t) {
    const auto digest = Digest::from_bytes(get_blob(o, 16));
    if (!digest) throw Malformed{"a digest has 16 bytes"};
    v = *digest;
  }
  static void value(const msgpack::object& o, std::vector<std::byte>& v, std::size_t limit) {
    const auto blob = get_blob(o, limit);
    v.assign(blob.begin(), blob.end());
  }
  static void value(const msgpack::object& o, FingerprintSum& v, std::size_t) {
    const auto items = get_array(o, 2);
    if (items.size() != 2) throw Malformed{"a fingerprint has two lanes"};
    v = get_sum(items);
  }
  static void value(const msgpack::object& o, Box& v, std::size_t) {
    const auto items = get_array(o, 2);
    if (items.size() != 2) throw Malformed{"a box is [lo, hi]"};
    v = get_box(items[0], items[1]);
  }
  static void value(const msgpack::object& o, Shape& v, std::size_t) { v = get_numbers(o); }
  static void value(const msgpack::object& o, Wanted& v, std::size_t) {
    if (o.type == msgpack::type::NIL) return;
    if (o.type == msgpack::type::BOOLEAN && !o.via.boolean) {
      v.ignored = true;
      return;
    }
    const auto items = get_array(o, 1 + limits::kBoxesMax);
    if (items.size() < 2) throw Malformed{"a wanted entry is nil, false or [granule, box, ...]"};
    v.granule = get_numbers(items[0]);
    v.boxes.resize(items.size() - 1);
    for (std::size_t i = 1; i < items.size(); ++i) value(items[i], v.boxes[i - 1], 0);
  }
  static void value(const msgpack::object& o, Extent& v, std::size_t) {
    const auto items = get_array(o, 5);
    if (items.size() < 3) throw Malformed{"an extent is [entry, memory, offset], perhaps with box and strides"};
    v.entry = static_cast<std::uint32_t>(get_unsigned(items[0], UINT32_MAX));
    v.memory = MemoryId{get_unsigned(items[1], UINT64_MAX)};
    v.offset = get_signed(items[2]);
    if (items.size() >= 4) value(items[3], v.box.emplace(), 0);
    if (items.size() >= 5) v.strides = get_numbers(items[4]);
  }
  static void value(const msgpack::object& o, EntryValue& v, std::size_t) {
    const auto items = get_array(o, 2);
    if (items.size() != 2) throw Malformed{"a value is [entry, bytes]"};
    v.entry = static_cast<std::uint32_t>(get_unsigned(items[0], UINT32_MAX));
    value(items[1], v.bytes, limits::kValueBytesMax);
  }
  static void value(const msgpack::object& o, EntryFingerprint& v, std::size_t) {
    const auto items = get_array(o, 3);
    if (items.size() != 3) throw Malformed{"an entry's fingerprint is [entry, lane 0, lane 1]"};
    v.entry = static_cast<std::uint32_t>(get_unsigned(items[0], UINT32_MAX));
    v.sum = get_sum(items.subspan(1));
  }
  static void value(const msgpack::object& o, std::vector<std::string>& v, std::size_t limit) {
    for (const msgpack::object& item : get_array(o, limits::kSendersMax)) v.emplace_back(get_text(item, limit));
  }
  template <class T>
  static void value(const msgpack::object& o, std::vector<T>& v, std::size_t limit) {
    const auto items = get_array(o, limit);
    v.resize(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      try {
        value(items[i], v[i], limit);
      } catch (Malformed& malformed) {
        malformed.why = fmt::format("item {}: {}", i, malformed.why);
        throw;
      }
    }
  }
  template <class T>
    requires IsMessage<T>
  static void value(const msgpack::object& o, T& message, std::size_t) {
    Decoder inner(o);
    fields(message, inner);
  }

  std::span<const msgpack::object_kv> items_;
  std::size_t next_ = 0;
};

template <std::size_t I = 0>
Body make_body(std::size_t index) {
  if constexpr (I < std::variant_size_v<Body>) {
    if (index == I) return Body(std::in_place_index<I>);
    return make_body<I + 1>(index);
  } else {
    throw Malformed{fmt::format("unknown message type {}", index + 1)};
  }
}

/// Unpacks one document that fills `bytes` exactly.
msgpack::object_handle unpack(std::span<const std::byte> bytes) {
  const auto* data = reinterpret_cast<const char*>(bytes.data());
  DeclaredItems declared(bytes.size());
  std::size_t offset = 0;
  bool whole = false;
  try {
    whole = msgpack::parse(data, bytes.size(), offset, declared);
  } catch (const msgpack::unpack_error&) {
    throw Malformed{"not msgpack"};
  }
  if (!whole) throw Malformed{"not msgpack, cut short, nested too deep, or a length beyond the bytes that arrived or the limits"};
  if (offset != bytes.size()) throw Malformed{fmt::format("{} bytes after the end of the document", bytes.size() - offset)};
  // Texts and blobs stay references into `bytes`, which outlives the handle in every caller.
  return msgpack::unpack(data, bytes.size(), [](msgpack::type::object_type, std::size_t, void*) { return true; });
}

template <class Work>
auto translate(std::string_view what, Work&& work) -> Result<decltype(work())> {
  try {
    return work();
  } catch (const Malformed& malformed) {
    return Status(Code::kInvalidArgument, fmt::format("{}: {}", what, malformed.why));
  } catch (const msgpack::unpack_error&) {
    return Status(Code::kInvalidArgument, fmt::format("{}: not msgpack", what));
  } catch (const std::bad_alloc&) {
    return Status(Code::kResourceExhausted, fmt::format("{}: no memory to unpack it", what));
  }
}

}  // namespace

std::vector<std::byte> encode(const Message& message) {
  ByteSink sink;
  Packer out(sink);
  out.pack_array(6);
  pack_text(out, kMagic);
  out.pack_uint32(limits::kProtocolVersion);
  out.pack_uint8(static_cast<std::uint8_t>(type_of(message.body)));
  out.pack_uint64(message.session.value);
  out.pack_uint64(message.incarnation.value);
  std::visit([&](const auto& body) { Encoder(out).value(body); }, message.body);
  return std::move(sink.bytes);
}

Result<Message> decode(std::span<const std::byte> bytes) {
  if (bytes.size() > limits::kMessageBytesMax) {
    return Status(Code::kInvalidArgument, fmt::format("message of {} bytes, the limit is {}", bytes.size(), limits::kMessageBytesMax));
  }
  std::string what = "message";
  std::optional<std::uint64_t> other_protocol;
  auto result = translate(what, [&]() -> Message {
    const msgpack::object_handle handle = unpack(bytes);
    const auto items = get_array(handle.get(), 16);
    if (items.size() < 6 || get_text(items[0], 16) != kMagic)
      throw Malformed{"it does not begin with [\"HR\", protocol, type, session, incarnation, fields]"};
    const std::uint64_t protocol = get_unsigned(items[1], UINT32_MAX);
    const std::uint64_t type = get_unsigned(items[2], UINT8_MAX);
    // HELLO is read in any protocol: it is how two sides find out what they have in common.
    if (protocol != limits::kProtocolVersion && type != static_cast<std::uint64_t>(MessageType::kHello)) {
      other_protocol = protocol;
      throw Malformed{fmt::format("protocol {} where {} was agreed", protocol, limits::kProtocolVersion)};
    }
    Message message;
    message.session = SessionId{get_unsigned(items[3], UINT64_MAX)};
    message.incarnation = Incarnation{get_unsigned(items[4], UINT64_MAX)};
    message.body = make_body(type - 1);
    std::visit(
        [&](auto& body) {
          try {
            Decoder decoder(items[5]);
            fields(body, decoder);
          } catch (Malformed& malformed) {
            malformed.why = fmt::format("{}: {}", message_name(type_of(message.body)), malformed.why);
            throw;
          }
        },
        message.body);
    return message;
  });
  if (other_protocol) return Status(Code::kUnsupported, result.status().message());
  return result;
}

std::vector<std::byte> encode_entries(std::span<const ManifestEntry> entries) {
  ByteSink sink;
  Packer out(sink);
  out.pack_array(static_cast<std::uint32_t>(entries.size()));
  for (const ManifestEntry& entry : entries) {
    const bool whole = entry.box == Box::whole(entry.shape);
    out.pack_array(whole ? 3 : 5);
    pack_text(out, entry.name);
    out.pack_uint8(static_cast<std::uint8_t>(entry.dtype));
    pack_numbers(out, entry.shape);
    if (!whole) {
      pack_numbers(out, entry.box.lo);
      pack_numbers(out, entry.box.hi);
    }
  }
  return std::move(sink.bytes);
}

namespace {
template <std::size_t I = 0>
void collect_keys(std::vector<MessageKeys>& all) {
  if constexpr (I < std::variant_size_v<Body>) {
    CollectKeys collect;
    std::variant_alternative_t<I, Body> body;
    fields(body, collect);
    all.push_back({static_cast<MessageType>(I + 1), std::move(collect.keys)});
    collect_keys<I + 1>(all);
  }
}
}  // namespace

std::vector<MessageKeys> all_message_keys() {
  std::vector<MessageKeys> all;
  collect_keys(all);
  return all;
}

}  // namespace headrace::wire
