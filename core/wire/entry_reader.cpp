#include <fmt/format.h>

#include <algorithm>
#include <msgpack.hpp>
#include <new>
#include <string>
#include <utility>

#include "core/wire/codec.h"
#include "core/wire/limits.h"

namespace headrace::wire {
namespace {

// A manifest has up to millions of entries, and is all of what a receiver has to read before its first answer. So they are built while the
// bytes are walked, once; the other messages are short and go through msgpack's objects.

/// The least that an entry takes: its head, an empty name, a dtype, no dimensions.
constexpr std::size_t kEntryBytesMin = 4;

/// Every member returns false, with the reason in why(), when reading must stop.
class EntryReader : public msgpack::null_visitor {
 public:
  explicit EntryReader(std::size_t bytes) : entries_max_(bytes / kEntryBytesMin) {}

  std::vector<ManifestEntry> take() { return std::move(entries_); }
  const std::string& why() const noexcept { return why_; }

  bool start_array(std::uint32_t items) {
    switch (depth_) {
      case Depth::kDocument: return start_list(items);
      case Depth::kList: return start_entry(items);
      case Depth::kEntry: return start_numbers(items);
      case Depth::kNumbers: break;
    }
    return unexpected("an array");
  }
  bool end_array() {
    switch (depth_) {
      case Depth::kDocument: break;
      case Depth::kList: depth_ = Depth::kDocument; break;
      case Depth::kEntry: return finish_entry();
      case Depth::kNumbers:
        depth_ = Depth::kEntry;
        ++item_;
        break;
    }
    return true;
  }
  bool visit_str(const char* text, std::uint32_t bytes) {
    if (depth_ != Depth::kEntry || item_ != 0) return unexpected("text");
    if (bytes > limits::kNameBytesMax) return refuse(fmt::format("text of {} bytes, the limit is {}", bytes, limits::kNameBytesMax));
    entries_.back().name.assign(text, bytes);
    ++item_;
    return true;
  }
  bool visit_positive_integer(std::uint64_t number) {
    if (depth_ == Depth::kEntry && item_ == 1) return read_dtype(number);
    if (depth_ != Depth::kNumbers) return unexpected("a number");
    if (number > static_cast<std::uint64_t>(INT64_MAX)) return refuse(fmt::format("number {} is beyond {}", number, INT64_MAX));
    numbers_->push_back(static_cast<std::int64_t>(number));
    return true;
  }
  bool visit_negative_integer(std::int64_t number) {
    if (depth_ != Depth::kNumbers) return unexpected("a negative number");
    numbers_->push_back(number);
    return true;
  }
  bool visit_nil() { return unexpected("nil"); }
  bool visit_boolean(bool /*value*/) { return unexpected("a boolean"); }
  bool visit_float32(float /*value*/) { return unexpected("a float"); }
  bool visit_float64(double /*value*/) { return unexpected("a float"); }
  bool visit_bin(const char* /*data*/, std::uint32_t /*bytes*/) { return unexpected("bytes"); }
  bool visit_ext(const char* /*data*/, std::uint32_t /*bytes*/) { return unexpected("an extension"); }
  bool start_map(std::uint32_t /*pairs*/) { return unexpected("a map"); }

 private:
  enum class Depth : std::uint8_t { kDocument, kList, kEntry, kNumbers };

  bool refuse(std::string_view why) {
    const std::size_t entry = depth_ == Depth::kList ? entries_.size() : entries_.size() - 1;
    why_ = depth_ == Depth::kDocument ? std::string(why) : fmt::format("entry {}: {}", entry, why);
    return false;
  }
  bool unexpected(std::string_view what) {
    switch (depth_) {
      case Depth::kDocument:
      case Depth::kList: return refuse(fmt::format("expected an array, got {}", what));
      case Depth::kNumbers: return refuse(fmt::format("expected a number, got {}", what));
      case Depth::kEntry: break;
    }
    const std::string_view wanted = item_ == 0 ? "text" : item_ == 1 ? "a non-negative number" : "an array";
    return refuse(fmt::format("expected {}, got {}", wanted, what));
  }
  bool start_list(std::uint32_t items) {
    if (items > limits::kManifestEntriesMax) {
      return refuse(fmt::format("{} entries are beyond the limits, at most {} are taken", items, limits::kManifestEntriesMax));
    }
    entries_.reserve(std::min<std::size_t>(items, entries_max_));
    depth_ = Depth::kList;
    return true;
  }
  bool start_entry(std::uint32_t items) {
    if (items != 3 && items != 5) return refuse("an entry is [name, dtype, shape] or [name, dtype, shape, lo, hi]");
    entries_.emplace_back();
    items_ = items;
    item_ = 0;
    depth_ = Depth::kEntry;
    return true;
  }
  bool start_numbers(std::uint32_t items) {
    if (item_ < 2) return unexpected("an array");
    if (items > limits::kDimsMax) return refuse(fmt::format("{} items, the limit is {}", items, limits::kDimsMax));
    ManifestEntry& entry = entries_.back();
    numbers_ = item_ == 2 ? &entry.shape : item_ == 3 ? &entry.box.lo : &entry.box.hi;
    numbers_->reserve(items);
    depth_ = Depth::kNumbers;
    return true;
  }
  bool read_dtype(std::uint64_t number) {
    const auto dtype = dtype_from_number(number);
    if (!dtype) return refuse(fmt::format("unknown dtype number {}", number));
    entries_.back().dtype = *dtype;
    ++item_;
    return true;
  }
  bool finish_entry() {
    ManifestEntry& entry = entries_.back();
    if (!byte_count(entry.dtype, entry.shape)) {
      return refuse(fmt::format("{}: shape {} of {} has no whole number of bytes below 2^63", entry.name, to_string(entry.shape),
                                dtype_name(entry.dtype)));
    }
    if (items_ == 3) entry.box = Box::whole(entry.shape);
    if (entry.box.lo.size() != entry.box.hi.size()) {
      return refuse(fmt::format("a box with {} and {} coordinates", entry.box.lo.size(), entry.box.hi.size()));
    }
    if (!box_fits(entry.box, entry.shape)) {
      return refuse(fmt::format("{}: box {} does not lie in shape {}", entry.name, to_string(entry.box), to_string(entry.shape)));
    }
    depth_ = Depth::kList;
    return true;
  }

  std::size_t entries_max_;  // more would not fit the bytes
  std::vector<ManifestEntry> entries_;
  Depth depth_ = Depth::kDocument;
  std::uint32_t items_ = 0;  // of the entry at hand
  std::uint32_t item_ = 0;
  std::vector<std::int64_t>* numbers_ = nullptr;  // the list at hand
  std::string why_;
};

}  // namespace

Result<std::vector<ManifestEntry>> decode_entries(std::span<const std::byte> bytes) {
  const auto refused = [](std::string_view why) { return Status(Code::kInvalidArgument, fmt::format("manifest entries: {}", why)); };
  EntryReader reader(bytes.size());
  std::size_t offset = 0;
  bool whole = false;
  try {
    whole = msgpack::parse(reinterpret_cast<const char*>(bytes.data()), bytes.size(), offset, reader);
  } catch (const msgpack::unpack_error&) {
    return refused("not msgpack");
  } catch (const std::bad_alloc&) {
    return Status(Code::kResourceExhausted, "manifest entries: no memory to unpack them");
  }
  if (!reader.why().empty()) return refused(reader.why());
  if (!whole) return refused("not msgpack, or cut short");
  if (offset != bytes.size()) return refused(fmt::format("{} bytes after the end of the document", bytes.size() - offset));
  return reader.take();
}

}  // namespace headrace::wire
