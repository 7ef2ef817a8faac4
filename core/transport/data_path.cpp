#include "core/transport/data_path.h"

#include "core/transport/inline_data_path.h"
#include "core/transport/shm_data_path.h"

namespace headrace {

std::string_view data_path_name(DataPathKind kind) noexcept {
  switch (kind) {
    case DataPathKind::kShm: return "shm";
    case DataPathKind::kInline: return "inline";
  }
  return "unknown";
}

std::optional<DataPathKind> parse_data_path(std::string_view name) noexcept {
  for (const DataPathKind kind : {DataPathKind::kShm, DataPathKind::kInline}) {
    if (name == data_path_name(kind)) return kind;
  }
  return std::nullopt;
}

std::unique_ptr<DataSource> make_data_source(DataPathKind kind, Device& device) {
  switch (kind) {
    case DataPathKind::kShm: return make_shm_source(device);
    case DataPathKind::kInline: return make_inline_source(device);
  }
  return nullptr;
}

std::unique_ptr<DataSink> make_data_sink(DataPathKind kind, Device& device) {
  switch (kind) {
    case DataPathKind::kShm: return make_shm_sink(device);
    case DataPathKind::kInline: return make_inline_sink();
  }
  return nullptr;
}

}  // namespace headrace
