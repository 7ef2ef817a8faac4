#include "python/src/receiver.h"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <unordered_map>
#include <utility>

#include "core/transport/run_directory.h"
#include "python/src/bucket.h"
#include "python/src/errors.h"
#include "python/src/hooks.h"
#include "python/src/layout.h"
#include "python/src/open_end.h"
#include "python/src/records.h"
#include "python/src/table.h"
#include "python/src/tensors.h"
#include "receiver/receiver.h"

namespace nb = nanobind;

namespace headrace::python {
namespace {

constexpr std::size_t kBatchTensorsMax = 4'096;  // of an iterable, at a time
constexpr std::int64_t kBatchBytesMax = std::int64_t{256} << 20;

EngineEvent event_of(const std::string& name) {
  constexpr std::array<std::pair<std::string_view, EngineEvent>, 6> kEvents{{{"sleep", EngineEvent::kSleep},
                                                                             {"discard", EngineEvent::kDiscard},
                                                                             {"expert_rebalance", EngineEvent::kExpertRebalance},
                                                                             {"lora_load", EngineEvent::kLoraLoad},
                                                                             {"foreign_reload", EngineEvent::kForeignReload},
                                                                             {"recapture", EngineEvent::kRecapture}}};
  for (const auto& [known, event] : kEvents)
    if (known == name) return event;
  raise(Status(Code::kInvalidArgument, fmt::format("event {}: expected sleep, discard, expert_rebalance, lora_load, foreign_reload or "
                                                   "recapture",
                                                   name)));
}

WeightVersion version_of(const std::string& version) {
  const std::optional<WeightVersion> parsed = parse_weight_version(version);
  if (!parsed) raise(Status(Code::kInvalidArgument, fmt::format("version '{}': expected RUN/STEP, such as run-1/17", version)));
  return *parsed;
}

/// Which tensors belong to staged groups, and which groups are there in part: these must come whole in one call of Receiver::load().
class GroupWatch {
 public:
  explicit GroupWatch(const ModelLayout& layout) {
    for (const StagedGroup& group : layout.groups) {
      for (const NamedRule& entry : group.entries) group_of_.emplace(entry.name, static_cast<std::uint32_t>(left_.size()));
      left_.push_back(group.entries.size());
      sizes_.push_back(group.entries.size());
    }
  }
  bool none() const noexcept { return group_of_.empty(); }
  /// Whether it belongs to a group of which something is missing.
  bool is_open(std::string_view name) const {
    const auto found = group_of_.find(std::string(name));
    return found != group_of_.end() && left_[found->second] != sizes_[found->second];
  }
  void take(std::string_view name) {
    const auto found = group_of_.find(std::string(name));
    if (found == group_of_.end()) return;
    const std::uint32_t g = found->second;
    if (left_[g] == sizes_[g]) ++open_;
    if (--left_[g] != 0) return;
    --open_;
    left_[g] = sizes_[g];
  }
  bool any_open() const noexcept { return open_ != 0; }
  void reset() {
    left_ = sizes_;
    open_ = 0;
  }

 private:
  std::unordered_map<std::string, std::uint32_t> group_of_;
  std::vector<std::size_t> left_;
  std::vector<std::size_t> sizes_;
  std::size_t open_ = 0;
};

/// Members of a group that is not whole at the end of a call; their bytes are the next call's.
struct Kept {
  std::string name;
  Dtype dtype = Dtype::kU8;
  Shape shape;
  std::vector<std::byte> bytes;
};

}  // namespace

class PyReceiver {
 public:
  PyReceiver(nb::object table, nb::object layout, const ReceiverOptions& options, const nb::dict& hooks, const nb::dict& staged)
      : table_object_(std::move(table)),
        hooks_(hooks, staged, table_object_, *device_),
        job_(options.job),
        groups_(nb::inst_ptr<PyLayout>(layout)->model()) {
    const ModelLayout& model = nb::inst_ptr<PyLayout>(layout)->model();
    const StorageTable& storages = nb::inst_ptr<PyTable>(table_object_)->table();
    EngineHooks engine = hooks_.engine_hooks();
    std::optional<Result<std::unique_ptr<Receiver>>> started;
    end_.waits().run([&] { started = Receiver::start(options, model, storages, *device_, std::move(engine)); }, [] {});
    if (!started->ok()) leave_run_directory();
    end_.set(value_or_raise(std::move(*started)));
  }
  ~PyReceiver() { end(); }
  PyReceiver(const PyReceiver&) = delete;
  PyReceiver& operator=(const PyReceiver&) = delete;

  /// Views that Python kept of scratch memory go on holding it; everything else of the receiver is gone when this returns.
  void close() {
    refuse_in_hook("close");
    end();
  }
  bool closed() const noexcept { return end_.closed(); }
  std::string endpoint() { return end_.get().endpoint(); }

  void begin(const std::string& version) {
    const WeightVersion begun = version_of(version);
    refuse_in_hook("begin");
    hooks_.take_cause();
    run([&](Receiver& receiver) { return receiver.begin(begun); });
    kept_.clear();
    groups_.reset();
  }
  void load(nb::handle tensors);
  void load_bucket(const Bucket& bucket);
  nb::object finish() {
    refuse_in_hook("finish");
    // What misses a member is refused with the member's name.
    if (!kept_.empty()) load_views({}, {});
    std::optional<Result<wire::Receipt>> receipt;
    run([&](Receiver& receiver) {
      receipt = receiver.finish();
      return receipt->status();
    });
    return receipt_record(receipt->value());
  }
  void abort(const std::string& reason) {
    kept_.clear();
    run([&](Receiver& receiver) { return receiver.abort(reason); });
  }
  void notify(const std::string& event) {
    const EngineEvent known = event_of(event);
    run([&](Receiver& receiver) { return receiver.notify(known); });
  }
  std::uint64_t mark() {
    UpdateMark mark;
    run([&](Receiver& receiver) {
      mark = receiver.mark();
      return ok_status();
    });
    return mark.ended;
  }
  nb::object wait_for(const std::string& version, std::optional<std::uint64_t> since, std::int64_t deadline_ms,
                      const std::stop_source& stop);
  nb::object status() {
    wire::StatusReply reply;
    run([&](Receiver& receiver) {
      reply = receiver.status();
      return ok_status();
    });
    return status_record(reply);
  }
  nb::dict fingerprint() {
    refuse_in_hook("fingerprint");
    (void)end_.get();
    raise_if_error(hooks_.check_places());
    std::optional<Result<std::vector<wire::TensorFingerprint>>> values;
    run([&](Receiver& receiver) {
      values = receiver.fingerprints();
      return values->status();
    });
    nb::dict all;
    for (const wire::TensorFingerprint& value : values->value())
      all[nb::str(value.name.c_str(), value.name.size())] = fingerprint_record(value);
    return all;
  }

 private:
  /// What waits for the thread that a hook runs on would wait for ever.
  void refuse_in_hook(const char* call) const {
    if (!hooks_.running_here()) return;
    raise(Status(Code::kFailedPrecondition, fmt::format("{}() in a hook waits for the hook's own end: raise to fail the update", call)));
  }
  static void interrupt(Receiver& receiver, const char* why) { (void)receiver.abort(why); }
  void end() {
    const auto let_go = [](Receiver& receiver) {
      interrupt(receiver, "the receiver is closed");
      receiver.end_waits("the receiver is closed");
    };
    if (end_.close(let_go)) leave_run_directory();
  }
  template <class Work>
  void run(const Work& work) {
    Status status;
    end_.run([&](Receiver& receiver) { status = work(receiver); }, [](Receiver& receiver) { interrupt(receiver, "interrupted"); });
    if (!status.ok()) raise(status, hooks_.take_cause());
  }
  /// Loads these, and what is kept from earlier calls before them; `keep` says which go to the next call instead.
  void load_views(const std::vector<NamedView>& views, const std::vector<bool>& keep);
  /// The last batch of a call holds back the members of groups that are not whole.
  void load_batch(const std::vector<NamedView>& views, bool last);

  /// The guard page and the job's folder belong to all ranks: the last one to leave, and be it for a failed start, takes them along.
  void leave_run_directory() const {
    if (const Result<RunDirectory> directory = RunDirectory::open(job_); directory.ok()) directory.value().clean(false);
  }

  // Before the receiver, which uses them until it ends.
  nb::object table_object_;
  std::unique_ptr<LeasingDevice> device_ = std::make_unique<LeasingDevice>();
  PyHooks hooks_;
  std::string job_;
  GroupWatch groups_;
  std::vector<Kept> kept_;
  OpenEnd<Receiver> end_{"receiver"};
};

nb::object PyReceiver::wait_for(const std::string& version, std::optional<std::uint64_t> since, std::int64_t deadline_ms,
                                const std::stop_source& stop) {
  refuse_in_hook("wait_for");
  const WeightVersion awaited = version_of(version);
  WaitOptions options{std::nullopt, deadline_ms};
  if (since) options.since = UpdateMark{*since};
  std::stop_source mine = stop;  // sources of one stop
  std::optional<Result<wire::Receipt>> receipt;
  end_.run([&](Receiver& receiver) { receipt = receiver.wait_for(awaited, options, mine.get_token()); },
           [&](Receiver&) { mine.request_stop(); });
  if (receipt->ok()) return receipt_record(receipt->value());
  raise(receipt->status(), receipt->status().code() == Code::kFailedPrecondition ? hooks_.cause_of(receipt->status()) : nb::handle());
}

void PyReceiver::load_views(const std::vector<NamedView>& views, const std::vector<bool>& keep) {
  const std::vector<Kept> before = std::exchange(kept_, {});
  std::vector<NamedView> now;
  now.reserve(before.size() + views.size());
  for (const Kept& kept : before) now.push_back({kept.name, kept.dtype, kept.shape, kept.bytes});
  for (std::size_t i = 0; i < views.size(); ++i) {
    const NamedView& view = views[i];
    if (keep.empty() || !keep[i]) {
      now.push_back(view);
    } else {
      kept_.push_back({std::string(view.name), view.dtype, Shape(view.shape.begin(), view.shape.end()),
                       std::vector<std::byte>(view.bytes.begin(), view.bytes.end())});
    }
  }
  if (now.empty()) return;
  run([&](Receiver& receiver) { return receiver.load(now); });
}

void PyReceiver::load_batch(const std::vector<NamedView>& views, bool last) {
  std::vector<bool> keep;
  if (last && groups_.any_open())
    for (const NamedView& view : views) keep.push_back(groups_.is_open(view.name));
  load_views(views, keep);
}

void PyReceiver::load(nb::handle tensors) {
  refuse_in_hook("load");
  (void)end_.get();
  nb::object iterator = given_iterable(tensors, "tensors", "pairs of name and tensor");
  bool more = true;
  while (more) {
    TensorReader reader(TensorReader::Hold::kCall);
    std::vector<nb::object> names;  // whose text the views have
    std::vector<Tensor> read;
    std::vector<NamedView> views;
    std::int64_t bytes = 0;
    while (groups_.any_open() || (views.size() < kBatchTensorsMax && bytes < kBatchBytesMax)) {
      nb::object item = nb::steal(PyIter_Next(iterator.ptr()));
      if (!item.is_valid()) {
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        more = false;
        break;
      }
      const auto [name, text, object] = named_item(item);
      read.push_back(reader.read(object, name));
      const auto packed = reader.packed(read.back(), name);
      views.push_back({name, read.back().dtype, {}, packed});
      if (!groups_.none()) groups_.take(name);
      bytes += static_cast<std::int64_t>(packed.size());
      names.push_back(text);
    }
    for (std::size_t i = 0; i < views.size(); ++i) views[i].shape = read[i].shape();
    load_batch(views, !more);
  }
}

void PyReceiver::load_bucket(const Bucket& bucket) {
  refuse_in_hook("load");
  (void)end_.get();
  if (!groups_.none())
    for (const NamedView& view : bucket.views()) groups_.take(view.name);
  load_batch(bucket.views(), true);
}

void init_receiver(nb::module_& module) {
  nb::class_<std::stop_source>(module, "Stop", "Ends the waits that it was given to, when it is asked.")
      .def(nb::init<>())
      .def("ask", [](std::stop_source& self) { self.request_stop(); });
  nb::class_<PyReceiver>(module, "Receiver", "What stands behind headrace.Receiver.")
      .def(
          "__init__",
          [](PyReceiver* self, nb::object table, nb::object layout, std::string job, std::string engine, std::uint32_t rank,
             std::uint32_t ranks, std::string endpoint, std::uint32_t threads, std::vector<std::string> data_paths, std::uint32_t credits,
             std::int64_t bucket_bytes_max, std::int64_t deadline_ms, std::vector<std::string> optional_names, const nb::dict& hooks,
             const nb::dict& staged) {
            if (!nb::isinstance<PyTable>(table))
              raise(Status(Code::kInvalidArgument, "table: expected a headrace.StorageTable, not " + short_repr(table)));
            if (!nb::isinstance<PyLayout>(layout))
              raise(Status(Code::kInvalidArgument, "layout: expected a headrace.Layout, not " + short_repr(layout)));
            ReceiverOptions options;
            options.job = std::move(job);
            options.engine = std::move(engine);
            options.rank = rank;
            options.ranks = ranks;
            options.endpoint = std::move(endpoint);
            options.threads = threads;
            options.data_paths = std::move(data_paths);
            options.credits = credits;
            options.bucket_bytes_max = bucket_bytes_max;
            options.deadline_ms = deadline_ms;
            options.optional_names = std::move(optional_names);
            new (self) PyReceiver(std::move(table), std::move(layout), options, hooks, staged);
          },
          nb::arg("table"), nb::arg("layout"), nb::kw_only(), nb::arg("job"), nb::arg("engine"), nb::arg("rank"), nb::arg("ranks"),
          nb::arg("endpoint"), nb::arg("threads"), nb::arg("data_paths"), nb::arg("credits"), nb::arg("bucket_bytes_max"),
          nb::arg("deadline_ms"), nb::arg("optional_names"), nb::arg("hooks"), nb::arg("staged"))
      .def_prop_ro("endpoint", &PyReceiver::endpoint)
      .def_prop_ro("closed", &PyReceiver::closed)
      .def("begin", &PyReceiver::begin, nb::arg("version"))
      .def("load", &PyReceiver::load, nb::arg("tensors"))
      .def("load_bucket", &PyReceiver::load_bucket, nb::arg("bucket"))
      .def("finish", &PyReceiver::finish)
      .def("abort", &PyReceiver::abort, nb::arg("reason"))
      .def("notify", &PyReceiver::notify, nb::arg("event"))
      .def("mark", &PyReceiver::mark)
      .def("wait_for", &PyReceiver::wait_for, nb::arg("version"), nb::arg("since").none(), nb::arg("deadline_ms"), nb::arg("stop"))
      .def("status", &PyReceiver::status)
      .def("fingerprint", &PyReceiver::fingerprint)
      .def("close", &PyReceiver::close);
}

}  // namespace headrace::python
