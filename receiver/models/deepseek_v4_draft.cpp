#include "receiver/models/deepseek_v4_draft.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/check.h"
#include "receiver/models/deepseek_v4_names.h"

namespace headrace {
namespace {

/// A name of the draft for a storage of the target.
void shared_storage(LayoutWriter& writer, const std::string& name, const std::string& scope) {
  std::vector<StorageSpec>& storages = writer.layout().storages;
  const auto target = std::find_if(storages.begin(), storages.end(), [&](const StorageSpec& spec) { return spec.name == name; });
  HEADRACE_CHECK(target != storages.end(), "the draft's embedding is written before the target's");
  StorageSpec alias = *target;
  alias.alias_of = name;
  alias.name =
      std::string(kDraftPrefix) + name.substr(name.starts_with("language_model.") ? std::string_view("language_model.").size() : 0);
  alias.owners = {scope};
  storages.push_back(std::move(alias));
}

}  // namespace

void write_deepseek_v4_draft(const DeepseekV4Parts& parts, const DeepseekV4Draft& draft, const DeepseekV4Parts& target) {
  const DeepseekV4Config& c = parts.config();
  parts.linear("mtp.0.main_proj", c.hidden, draft.targets * c.hidden);
  parts.tensor("mtp.0.main_norm.weight", Dtype::kBF16, {c.hidden});
  const std::string last = fmt::format("mtp.{}.", draft.stages - 1);
  parts.tensor(last + "norm.weight", Dtype::kBF16, {c.hidden});
  parts.tensor(last + "markov_head.embed.weight", Dtype::kBF16, {c.vocab, draft.markov_rank});
  parts.tensor(last + "markov_head.head.weight", Dtype::kBF16, {c.vocab, draft.markov_rank});
  parts.tensor(last + "confidence_head.proj.weight", Dtype::kBF16, {1, c.hidden + draft.markov_rank});
  for (const std::string_view name : {"embed.weight", "head.weight"}) shared_storage(parts.writer(), target.param_of(name), parts.scope());
}

}  // namespace headrace
