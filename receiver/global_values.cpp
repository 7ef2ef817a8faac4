#include "receiver/global_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string_view>

#include "core/wire/limits.h"
#include "kernels/element_cast.h"

namespace headrace {
namespace {

using Match = wire::ValueNames::Match;

/// As few digits as give the number back; most are F32.
std::string number_text(double value) {
  const auto narrow = static_cast<float>(value);
  return static_cast<double>(narrow) == value ? fmt::format("{}", narrow) : fmt::format("{}", value);
}

void add(wire::Reject& refusal, Code code, std::string name, std::string message, std::string expected = {}, std::string actual = {}) {
  wire::Failure failure = wire::make_failure(Status(code, std::move(message)), "manifest");
  failure.name = std::move(name);
  failure.expected = std::move(expected);
  failure.actual = std::move(actual);
  add_defect(refusal, std::move(failure));
}

}  // namespace

void add_defect(wire::Reject& refusal, wire::Failure failure) {
  ++refusal.defects_total;
  if (refusal.defects.size() < limits::kDefectsMax) refusal.defects.push_back(std::move(failure));
}

Result<double> read_number(Dtype dtype, std::span<const std::byte> bytes) {
  double number = 0;
  float narrow = 0;
  const bool single = castable(dtype, Dtype::kF32) && static_cast<std::int64_t>(bytes.size()) == dtype_bytes(dtype);
  if (dtype == Dtype::kF64 && bytes.size() == sizeof(number)) {
    std::memcpy(&number, bytes.data(), sizeof(number));
  } else if (single && dtype == Dtype::kF32) {
    std::memcpy(&narrow, bytes.data(), sizeof(narrow));
    number = narrow;
  } else if (single) {
    cast_rows({dtype, Dtype::kF32}, bytes.data(), reinterpret_cast<std::byte*>(&narrow), 1, 0, 0, 1);
    number = narrow;
  } else {
    return Status(Code::kInvalidArgument, fmt::format("{} bytes of {} are not one floating-point number", bytes.size(), dtype_name(dtype)));
  }
  if (!std::isfinite(number)) return Status(Code::kInvalidArgument, fmt::format("{} is no finite number", number_text(number)));
  return number;
}

// ---- what a layout declares -----------------------------------------------------------------------------------------------------

Result<GlobalValues> GlobalValues::build(const WeightIndex& index) {
  GlobalValues declared;
  const ModelLayout& layout = index.layout();
  for (const PairedValues& pair : layout.paired_values) {
    const Resolution first = index.resolve(fmt::format("{}0.{}", pair.prefix, pair.first));
    const bool known = first.kind == Resolution::Kind::kPlaced || first.kind == Resolution::Kind::kNotLocal;
    if (!known) return Status(Code::kInvalidArgument, fmt::format("paired values {}*.{}: no rule has them", pair.prefix, pair.first));
    const std::string& scope = index.rule(first.rule).scope;
    const std::uint32_t one = declared.rule(layout, pair.map, pair.prefix, pair.first, scope);
    const std::uint32_t other = declared.rule(layout, pair.map, pair.prefix, pair.second, scope);
    declared.pairs_.push_back({one, other, pair.tolerance});
  }
  for (const LaunchConstant& constant : layout.launch_constants) {
    declared.constants_.push_back({constant.name, declared.rule(layout, constant.map, constant.prefix, constant.suffix, constant.scope)});
  }
  for (const std::vector<std::string>& names : layout.tied) {
    const Resolution first = index.resolve(names.front());
    if (first.kind != Resolution::Kind::kPlaced) continue;  // a layout without that storage
    for (const std::string& name : names) {
      declared.rules_.push_back({names.front(), name, 0});
      declared.scopes_.push_back(index.rule(first.rule).scope);
    }
  }
  if (declared.rules_.size() > limits::kValueRulesMax) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{} rules of values to ask for, the limit is {}", declared.rules_.size(), limits::kValueRulesMax));
  }
  for (const wire::ValueRule& rule : declared.rules_) {
    if (rule.experts == 0 || rule.prefix.empty() || rule.prefix.back() < '0' || rule.prefix.back() > '9') continue;
    return Status(Code::kInvalidArgument, fmt::format("values {}*.{}: the prefix ends in a digit", rule.prefix, rule.suffix));
  }
  declared.names_ = wire::ValueNames(declared.rules_);
  return declared;
}

std::uint32_t GlobalValues::rule(const ModelLayout& layout, std::uint32_t map, const std::string& prefix, const std::string& suffix,
                                 std::string scope) {
  const wire::ValueRule made{prefix, suffix, static_cast<std::uint32_t>(layout.experts.at(map).experts())};
  const auto known = std::find(rules_.begin(), rules_.end(), made);
  if (known != rules_.end()) return static_cast<std::uint32_t>(known - rules_.begin());
  rules_.push_back(made);
  scopes_.push_back(std::move(scope));
  return static_cast<std::uint32_t>(rules_.size() - 1);
}

std::string GlobalValues::name_of(Match at) const {
  if (rules_[at.rule].experts == 0) return rules_[at.rule].suffix;
  return fmt::format("{}{}.{}", rules_[at.rule].prefix, at.expert, rules_[at.rule].suffix);
}

std::vector<AskedValue> GlobalValues::asked(std::span<const SenderPart> parts, std::span<const std::string> scopes) const {
  std::vector<AskedValue> asked;
  if (empty()) return asked;
  for (std::uint32_t s = 0; s < parts.size(); ++s) {
    for (std::uint32_t e = 0; e < parts[s].entries.size(); ++e) {
      const std::optional<Match> at = names_.find(parts[s].entries[e].name);
      if (at && std::find(scopes.begin(), scopes.end(), scopes_[at->rule]) != scopes.end()) asked.push_back({s, e, *at});
    }
  }
  // A tensor that comes under one of its names only is compared with nothing.
  std::map<std::string_view, std::set<std::uint32_t>> tied;  // a name has one rule, however many entries it comes as
  for (const AskedValue& each : asked) {
    if (rules_[each.at.rule].experts == 0) tied[rules_[each.at.rule].prefix].insert(each.at.rule);
  }
  std::erase_if(asked,
                [&](const AskedValue& each) { return rules_[each.at.rule].experts == 0 && tied[rules_[each.at.rule].prefix].size() == 1; });
  return asked;
}

Result<std::vector<std::optional<double>>> GlobalValues::by_constant(const std::map<std::string, double>& said) const {
  std::vector<std::optional<double>> values(constants_.size());
  for (const auto& [name, value] : said) {
    const auto known = std::find_if(constants_.begin(), constants_.end(), [&](const Constant& each) { return each.name == name; });
    if (known == constants_.end()) {
      return Status(Code::kInvalidArgument, fmt::format("{} is none of the {} launch constants of the layout", name, constants_.size()));
    }
    values[static_cast<std::size_t>(known - constants_.begin())] = value;
  }
  return values;
}

// ---- what graphs have -----------------------------------------------------------------------------------------------------------

void CapturedConstants::commit(std::span<const std::optional<double>> values) {
  for (std::size_t c = 0; c < values.size(); ++c) {
    if (!values[c]) continue;
    committed_[c] = values[c];
    recaptured_[c] = false;
  }
}

std::optional<double> CapturedConstants::expected(std::size_t constant) const {
  if (recaptured_[constant]) return std::nullopt;
  return said_ ? (*said_)[constant] : committed_[constant];
}

// ---- one update -----------------------------------------------------------------------------------------------------------------

ValueTable::ValueTable(const GlobalValues& declared) : declared_(&declared) {
  for (const wire::ValueRule& rule : declared.rules()) values_.emplace_back(rule.experts);
  sums_.resize(values_.size());
}

bool ValueTable::set(Match at, double value) {
  std::optional<double>& place = values_[at.rule][at.expert];
  if (place) return false;
  place = value;
  return true;
}

bool ValueTable::set(Match at, const FingerprintSum& sum) {
  if (sums_[at.rule]) return false;
  sums_[at.rule] = sum;
  return true;
}

std::vector<Match> ValueTable::present() const {
  std::vector<Match> places;
  for (std::uint32_t rule = 0; rule < values_.size(); ++rule) {
    if (sums_[rule]) places.push_back({rule, 0});
    for (std::uint32_t expert = 0; expert < values_[rule].size(); ++expert) {
      if (values_[rule][expert]) places.push_back({rule, expert});
    }
  }
  return places;
}

ValueTable::Greatest ValueTable::greatest(std::uint32_t rule) const {
  Greatest found;
  for (const std::optional<double>& value : values_[rule]) {
    if (!value) continue;
    ++found.count;
    found.value = std::max(found.value.value_or(*value), *value);
  }
  return found;
}

std::vector<std::optional<double>> ValueTable::constants() const {
  std::vector<std::optional<double>> result;
  for (const GlobalValues::Constant& constant : declared_->constants()) {
    const Greatest found = greatest(constant.rule);
    result.push_back(found.count == values_[constant.rule].size() ? found.value : std::nullopt);
  }
  return result;
}

void ValueTable::check(std::span<const Match> touched, const CapturedConstants& captured, bool whole, wire::Reject& refusal) const {
  std::vector<std::vector<bool>> experts(values_.size());  // by rule: which were touched; empty for none
  check_ties(touched, refusal);
  for (const Match& at : touched) {
    if (is_tied(at.rule)) continue;
    experts[at.rule].resize(values_[at.rule].size());
    experts[at.rule][at.expert] = true;
  }
  const auto is_touched = [&](std::uint32_t rule, std::uint32_t expert) { return expert < experts[rule].size() && experts[rule][expert]; };
  for (const GlobalValues::Pair& pair : declared_->pairs()) {
    for (std::uint32_t expert = 0; expert < values_[pair.first].size(); ++expert) {
      if (is_touched(pair.first, expert) || is_touched(pair.second, expert)) check_pair(pair, expert, refusal);
    }
  }
  for (std::size_t c = 0; c < declared_->constants().size(); ++c) {
    const GlobalValues::Constant& constant = declared_->constants()[c];
    if (!experts[constant.rule].empty()) check_constant(constant, captured.expected(c), whole, refusal);
  }
}

void ValueTable::check_ties(std::span<const Match> touched, wire::Reject& refusal) const {
  std::map<std::string_view, std::uint32_t> first;  // by the name that all are tied to: the first that came
  for (std::uint32_t rule = 0; rule < sums_.size(); ++rule) {
    if (!sums_[rule]) continue;
    const std::uint32_t other = first.try_emplace(declared_->rules()[rule].prefix, rule).first->second;
    const auto is_one = [&](const Match& at) { return at.rule == rule || at.rule == other; };
    if (*sums_[rule] == *sums_[other] || std::none_of(touched.begin(), touched.end(), is_one)) continue;
    const std::string& name = declared_->rules()[rule].suffix;
    const auto hex = [](const FingerprintSum& sum) { return fmt::format("{:016x}{:016x}", sum.lanes[0], sum.lanes[1]); };
    add(refusal, Code::kInvalidArgument, name,
        fmt::format("{}: not what {} holds, and the engine keeps one tensor for both", name, declared_->rules()[other].suffix),
        hex(*sums_[other]), hex(*sums_[rule]));
  }
}

void ValueTable::check_pair(const GlobalValues::Pair& pair, std::uint32_t expert, wire::Reject& refusal) const {
  const std::optional<double>& first = values_[pair.first][expert];
  const std::optional<double>& second = values_[pair.second][expert];
  if (!first || !second) return;
  if (std::abs(*first - *second) <= pair.tolerance * std::max(std::abs(*first), std::abs(*second))) return;
  const std::string name = declared_->name_of({pair.second, expert});
  add(refusal, Code::kInvalidArgument, name,
      fmt::format("{}: not the value of {}; the engine keeps one number for both, they may differ by {} of the greater", name,
                  declared_->name_of({pair.first, expert}), pair.tolerance),
      number_text(*first), number_text(*second));
}

void ValueTable::check_constant(const GlobalValues::Constant& constant, const std::optional<double>& captured, bool whole,
                                wire::Reject& refusal) const {
  const Greatest found = greatest(constant.rule);
  const std::size_t experts = values_[constant.rule].size();
  const std::string values = fmt::format("{}*.{}", declared_->rules()[constant.rule].prefix, declared_->rules()[constant.rule].suffix);
  if (found.count < experts && whole) {
    return add(
        refusal, Code::kInvalidArgument, constant.name,
        fmt::format("launch constant {}: the greatest of the {} values {}, {} of them come", constant.name, experts, values, found.count),
        std::to_string(experts), std::to_string(found.count));
  }
  const bool changed = captured && found.value && (found.count == experts ? *found.value != *captured : *found.value > *captured);
  if (!changed) return;
  add(refusal, Code::kFailedPrecondition, constant.name,
      fmt::format(
          "launch constant {}: captured graphs have another value than the greatest of {}; an update that changes it is taken after "
          "the engine said that it captures its graphs again (EngineEvent::kRecapture)",
          constant.name, values),
      number_text(*captured), number_text(*found.value));
}

namespace {

std::string wrong_value(const SenderPart& part, const wire::EntryValue& value) {
  if (value.entry >= part.entries.size()) {
    return fmt::format("a value of entry {} of a manifest of {} (sender {})", value.entry, part.entries.size(), part.sender);
  }
  const wire::ManifestEntry& entry = part.entries[value.entry];
  const auto bytes = static_cast<std::size_t>(byte_count(entry.dtype, entry.shape).value_or(0));
  // A fingerprint that another receiver asks for harms nobody.
  if (value.bytes.size() == bytes || wire::fingerprint_of(value.bytes)) return {};
  return fmt::format("{}: a value of {} bytes, {} of shape {} has {}", entry.name, value.bytes.size(), dtype_name(entry.dtype),
                     to_string(entry.shape), bytes);
}

}  // namespace

void take_values(std::span<const SenderPart> parts, std::span<const std::span<const wire::EntryValue>> values,
                 std::span<const AskedValue> asked, ValueTable& table, wire::Reject& refusal) {
  const auto refuse = [&](const SenderPart& part, std::string name, std::string message) {
    wire::Failure failure = wire::make_failure(Status(Code::kInvalidArgument, std::move(message)), "manifest");
    failure.name = std::move(name);
    failure.sender = part.sender;
    add_defect(refusal, std::move(failure));
  };
  for (std::size_t s = 0; s < parts.size(); ++s) {
    for (std::size_t i = 0; i < values[s].size(); ++i) {
      const std::uint32_t entry = values[s][i].entry;
      std::string why = wrong_value(parts[s], values[s][i]);
      if (why.empty() && i > 0 && values[s][i - 1].entry == entry) why = fmt::format("{}: a second value", parts[s].entries[entry].name);
      if (!why.empty()) refuse(parts[s], entry < parts[s].entries.size() ? parts[s].entries[entry].name : "", std::move(why));
    }
  }
  for (const AskedValue& each : asked) {
    const SenderPart& part = parts[each.sender];
    const wire::ManifestEntry& entry = part.entries[each.entry];
    const auto& given = values[each.sender];
    const auto found = std::lower_bound(given.begin(), given.end(), each.entry,
                                        [](const wire::EntryValue& value, std::uint32_t at) { return value.entry < at; });
    if (found == given.end() || found->entry != each.entry) {
      refuse(part, entry.name,
             table.is_tied(each.at.rule) && entry.box != Box::whole(entry.shape)
                 ? fmt::format("{}: sender {} has a part of it, and it comes under another name too: these are compared as a whole",
                               entry.name, part.sender)
                 : fmt::format("{}: WELCOME asks for its value, MANIFEST of sender {} has none", entry.name, part.sender));
      continue;
    }
    if (!wrong_value(part, *found).empty()) continue;
    if (table.is_tied(each.at.rule)) {
      const auto sum = wire::fingerprint_of(found->bytes);
      if (sum) table.set(each.at, *sum);
      if (!sum) refuse(part, entry.name, fmt::format("{}: a fingerprint of {} bytes", entry.name, found->bytes.size()));
      continue;
    }
    const Result<double> number = read_number(entry.dtype, found->bytes);
    if (number.ok()) {
      table.set(each.at, number.value());
    } else {
      refuse(part, entry.name, fmt::format("{}: its value: {}", entry.name, number.status().message()));
    }
  }
}

}  // namespace headrace
