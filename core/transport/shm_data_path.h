#pragma once

#include <memory>

#include "core/transport/data_path.h"

namespace headrace {

std::unique_ptr<DataSource> make_shm_source(Device& device);
std::unique_ptr<DataSink> make_shm_sink(Device& device);

}  // namespace headrace
