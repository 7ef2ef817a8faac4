#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/wire/messages.h"
#include "core/wire/value_names.h"
#include "receiver/sync_plan.h"
#include "receiver/weight_index.h"

// Numbers that every rank must know before it accepts an update, whichever rank has their bytes: of pairs that the engine keeps as one, and
// of launch constants. Pure.
namespace headrace {

/// An entry whose value is asked for.
struct AskedValue {
  std::uint32_t sender = 0;
  std::uint32_t entry = 0;
  wire::ValueNames::Match at;
};

/// What a layout declares, as rules of names. Immutable; any thread.
class GlobalValues {
 public:
  struct Pair {
    std::uint32_t first = 0;  // indices into rules(), as are all below
    std::uint32_t second = 0;
    double tolerance = 0;  // of the greater one
  };
  struct Constant {
    std::string name;
    std::uint32_t rule = 0;  // it is the greatest of this rule's values
  };

  /// kInvalidArgument: more rules than a WELCOME has, or a prefix that ends in a digit. `index` need not outlive the object.
  static Result<GlobalValues> build(const WeightIndex& index);

  bool empty() const noexcept { return rules_.empty(); }
  const std::vector<wire::ValueRule>& rules() const noexcept { return rules_; }
  const wire::ValueNames& names() const noexcept { return names_; }
  std::span<const Pair> pairs() const noexcept { return pairs_; }
  std::span<const Constant> constants() const noexcept { return constants_; }
  std::string name_of(wire::ValueNames::Match at) const;
  /// The entries of these parts whose values are asked for in an update of `scopes`, by sender and entry.
  std::vector<AskedValue> asked(std::span<const SenderPart> parts, std::span<const std::string> scopes) const;
  /// What an engine says of its constants, in the order of constants(). kInvalidArgument names one that the layout has not.
  Result<std::vector<std::optional<double>>> by_constant(const std::map<std::string, double>& said) const;

 private:
  std::uint32_t rule(const ModelLayout& layout, std::uint32_t map, const std::string& prefix, const std::string& suffix, std::string scope);

  std::vector<wire::ValueRule> rules_;
  std::vector<std::string> scopes_;  // per rule
  std::vector<Pair> pairs_;
  std::vector<Constant> constants_;
  wire::ValueNames names_;
};

/// What captured graphs have by value, as far as it is known. Progress thread.
class CapturedConstants {
 public:
  explicit CapturedConstants(std::size_t count) : committed_(count), recaptured_(count, false) {}
  /// Where an engine says what its graphs have, that counts and not what was committed last; none: no graph has it.
  void engine_says(std::vector<std::optional<double>> values) { said_ = std::move(values); }
  /// Graphs are captured again: the next value is taken, whatever it is.
  void recapture() { recaptured_.assign(recaptured_.size(), true); }
  /// The values of an update that was committed; none: it did not bring it.
  void commit(std::span<const std::optional<double>> values);
  /// What an update must bring; none: anything.
  std::optional<double> expected(std::size_t constant) const;

 private:
  std::vector<std::optional<double>> committed_;
  std::vector<bool> recaptured_;  // since it was committed
  std::optional<std::vector<std::optional<double>>> said_;
};

/// The values of one update.
class ValueTable {
 public:
  explicit ValueTable(const GlobalValues& declared);

  /// Takes a number; the first one of a place stays. False: there was one.
  bool set(wire::ValueNames::Match at, double value);
  /// The same for the fingerprint of a tied name.
  bool set(wire::ValueNames::Match at, const FingerprintSum& sum);
  void unset(wire::ValueNames::Match at) { is_tied(at.rule) ? sums_[at.rule].reset() : values_[at.rule][at.expert].reset(); }
  bool is_tied(std::uint32_t rule) const { return declared_->rules()[rule].experts == 0; }
  /// Adds a defect for each pair of `touched` places that is unequal, and for each launch constant that they change. `whole`: no more
  /// values come, so that a constant of which some are missing is one too; before that it counts from the moment on that it is too great.
  void check(std::span<const wire::ValueNames::Match> touched, const CapturedConstants& captured, bool whole, wire::Reject& refusal) const;
  /// All places that have a value.
  std::vector<wire::ValueNames::Match> present() const;
  /// Per constant the greatest of its values, once all are there.
  std::vector<std::optional<double>> constants() const;

 private:
  struct Greatest {
    std::optional<double> value;
    std::size_t count = 0;  // of values that are there
  };
  Greatest greatest(std::uint32_t rule) const;
  void check_ties(std::span<const wire::ValueNames::Match> touched, wire::Reject& refusal) const;
  void check_pair(const GlobalValues::Pair& pair, std::uint32_t expert, wire::Reject& refusal) const;
  void check_constant(const GlobalValues::Constant& constant, const std::optional<double>& captured, bool whole,
                      wire::Reject& refusal) const;

  const GlobalValues* declared_;
  std::vector<std::vector<std::optional<double>>> values_;  // per rule and expert
  std::vector<std::optional<FingerprintSum>> sums_;         // per rule, of tied names
};

/// Adds a defect to those that REJECT tells of together; those beyond its limit are counted.
void add_defect(wire::Reject& refusal, wire::Failure failure);

/// The number that these bytes are, of a tensor of one element. kInvalidArgument: no such tensor, or not finite.
Result<double> read_number(Dtype dtype, std::span<const std::byte> bytes);

/// Fills in what the senders' MANIFESTs say: `values` of each part, in the order of their entries. Adds a defect for each asked value that
/// is missing, and for each value that no entry has.
void take_values(std::span<const SenderPart> parts, std::span<const std::span<const wire::EntryValue>> values,
                 std::span<const AskedValue> asked, ValueTable& table, wire::Reject& refusal);

}  // namespace headrace
