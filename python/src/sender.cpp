#include "python/src/sender.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python/src/dtypes.h"
#include "python/src/errors.h"
#include "python/src/open_end.h"
#include "python/src/records.h"
#include "python/src/tensors.h"
#include "sender_sdk/sender.h"

namespace nb = nanobind;

namespace headrace::python {
namespace {

/// The corners (lo, hi) of an entry's box.
Box box_from(nb::handle box, const std::string& name) {
  if (PySequence_Check(box.ptr()) == 0 || PySequence_Size(box.ptr()) != 2)
    refuse(name, fmt::format("expected a box (lo, hi), not {}", short_repr(box)));
  return Box{shape_from(box[0], name), shape_from(box[1], name)};
}

/// Whether it is a tuple of (name, dtype's name, shape), tuples all: nothing of it can change.
bool is_fixed(nb::handle metadata) {
  if (PyTuple_CheckExact(metadata.ptr()) == 0) return false;
  return std::ranges::all_of(nb::borrow<nb::tuple>(metadata), [](nb::handle item) {
    PyObject* fields = item.ptr();
    if (PyTuple_CheckExact(fields) == 0 || PyTuple_Size(fields) != 3) return false;
    PyObject* shape = PyTuple_GetItem(fields, 2);
    return PyUnicode_CheckExact(PyTuple_GetItem(fields, 0)) != 0 && PyUnicode_CheckExact(PyTuple_GetItem(fields, 1)) != 0 &&
           PyTuple_CheckExact(shape) != 0 &&
           std::ranges::all_of(nb::borrow<nb::tuple>(shape), [](nb::handle dim) { return PyLong_CheckExact(dim.ptr()) != 0; });
  });
}

/// Entries from (name, dtype, shape), perhaps with a box (lo, hi) and a value behind it, each of them None where there is none. Packed FP4
/// (F4, shape in elements) becomes U8.
class MetadataReader {
 public:
  /// `value`: the tensor of the entry, or none.
  SenderEntry read(nb::handle item, nb::object& value) {
    const bool list = PyList_Check(item.ptr()) != 0;
    const Py_ssize_t size = list ? PyList_Size(item.ptr()) : PyTuple_Check(item.ptr()) != 0 ? PyTuple_Size(item.ptr()) : 0;
    if (size < 3 || size > 5) {
      raise(Status(Code::kInvalidArgument,
                   fmt::format("metadata: expected (name, dtype, shape), perhaps with a box and a value, not {}", short_repr(item))));
    }
    // Held: what a list has may be another object by the time that this one has been asked.
    const auto at = [&](Py_ssize_t i) { return nb::borrow(list ? PyList_GetItem(item.ptr(), i) : PyTuple_GetItem(item.ptr(), i)); };
    SenderEntry entry;
    entry.name = name_text(at(0));
    if (at(1).ptr() != last_dtype_.ptr()) {
      dtype_ = dtype_from_object(at(1));
      last_dtype_ = nb::borrow(at(1));
    }
    entry.dtype = dtype_;
    entry.shape = shape_from(at(2), entry.name);
    if (size > 3 && !at(3).is_none()) entry.box = box_from(at(3), entry.name);
    if (size > 4 && !at(4).is_none()) value = nb::borrow(at(4));
    if (dtype_bytes(entry.dtype) != 0) return entry;
    const std::int64_t per_byte = 8 / dtype_bits(entry.dtype);
    if (dtype_bits(entry.dtype) != 4 || entry.shape.empty() || entry.shape.back() % per_byte != 0 || entry.box)
      refuse(entry.name, fmt::format("{} {} does not travel as bytes", dtype_name(entry.dtype), to_string(entry.shape)));
    entry.dtype = Dtype::kU8;
    entry.shape.back() /= per_byte;
    return entry;
  }

 private:
  nb::object last_dtype_;  // held, so that its address is nothing else's
  Dtype dtype_ = Dtype::kU8;
};

TensorView view_of(const Tensor& tensor) {
  const auto steps = tensor.packed() ? std::span<const std::int64_t>() : tensor.steps();
  return {tensor.data, {steps.begin(), steps.end()}};
}

/// The view of a tensor that is what its entry says; what is read is of the entry's dtype and shape.
TensorView view_of(const Tensor& tensor, const SenderEntry& entry, const char* what) {
  const Shape part = entry.box ? entry.box->shape() : Shape();
  const Shape& shape = entry.box ? part : entry.shape;
  if (tensor.dtype == entry.dtype && std::ranges::equal(tensor.shape(), shape)) return view_of(tensor);
  refuse(entry.name, fmt::format("{} is {} of shape {}, its entry {} of shape {}", what, dtype_name(tensor.dtype),
                                 to_string(tensor.shape()), dtype_name(entry.dtype), to_string(shape)));
}

/// What an update was opened with, by name. Tensors mostly come in the order of their entries.
class OpenEntries {
 public:
  /// `entries` stay until the next call.
  void watch(std::span<const SenderEntry> entries) {
    entries_ = entries;
    by_name_.clear();
    next_ = 0;
  }
  /// Null for a name that is none of them.
  const SenderEntry* find(std::string_view name) {
    if (next_ < entries_.size() && entries_[next_].name == name) return &entries_[next_++];
    if (by_name_.empty())
      for (const SenderEntry& entry : entries_) by_name_.emplace(entry.name, &entry);
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return nullptr;
    next_ = static_cast<std::size_t>(found->second - entries_.data()) + 1;
    return found->second;
  }

 private:
  std::span<const SenderEntry> entries_;
  std::unordered_map<std::string_view, const SenderEntry*> by_name_;
  std::size_t next_ = 0;
};

wire::OverlapRule overlap_of(const std::string& word) {
  if (word == "refuse") return wire::OverlapRule::kRefuse;
  if (word == "first_sender_owns") return wire::OverlapRule::kFirstSenderOwns;
  raise(Status(Code::kInvalidArgument, fmt::format("overlap '{}': expected refuse or first_sender_owns", word)));
}

}  // namespace

class PySender {
 public:
  PySender(const SenderOptions& options, nb::object part_type) : part_type_(std::move(part_type)) {
    const auto connected = std::make_shared<std::optional<Result<std::unique_ptr<Sender>>>>();
    end_.waits().run([connected, options] { *connected = Sender::connect(options); });
    end_.set(value_or_raise(std::move(**connected)));
  }
  ~PySender() { close(); }
  PySender(const PySender&) = delete;
  PySender& operator=(const PySender&) = delete;

  void close() {
    end_.close([](Sender& sender) { sender.abort("the sender is closed"); });
  }
  bool closed() const noexcept { return end_.closed(); }
  bool wants_value(const std::string& name) { return sender().wants_value(name); }
  nb::tuple receivers() {
    nb::list list;
    for (const ReceiverInfo& info : sender().receivers()) list.append(receiver_record(info));
    return nb::tuple(list);
  }

  /// `metadata`: entries are what MetadataReader reads, else (name, tensor), where a Part stands for a part. Bytes of the tensors.
  std::int64_t open(const std::string& version, nb::handle entries, bool metadata, std::vector<std::string> scopes,
                    std::vector<std::string> senders, const std::string& overlap, bool repair) {
    const std::optional<WeightVersion> parsed = parse_weight_version(version);
    if (!parsed) raise(Status(Code::kInvalidArgument, fmt::format("version '{}': expected RUN/STEP, such as run-1/17", version)));
    const wire::OverlapRule rule = overlap_of(overlap);
    // Whatever is asked for below may run Python, and with it other calls of this sender.
    settle();
    // The same tuple says the same as last time, and is not read again.
    const bool known = metadata && entries.is(announced_);
    TensorReader values(TensorReader::Hold::kCall);
    UpdateOptions fresh;
    std::int64_t bytes = 0;
    if (!known) bytes = metadata ? read_metadata(entries, values, fresh.entries) : read_tensors(entries, values, fresh.entries);
    // A generator may give up the update whose tensors it is asked for and open another one: none of them is sent in that.
    settle();
    // From here on options_ is read, and changed where it is known, without the GIL.
    UpdateOptions& options = known ? options_ : fresh;
    options.version = *parsed;
    options.scopes = std::move(scopes);
    options.senders = std::move(senders);
    options.overlap = rule;
    options.repair = repair;
    // Not yet open, there is nothing to abort: an interrupted call is given up once it has returned.
    bool interrupted = false;
    Status status;
    const Talk talk(*this, "open");
    auto turn = std::make_unique<Turn>(*this);
    end_.run(
        [&](Sender& opened) {
          const std::unique_ptr<Turn> ends = std::move(turn);
          status = opened.open(options);
          if (interrupted) opened.abort("interrupted");
        },
        [&](Sender& opened) { interrupted = true, opened.abort("interrupted"); });
    // One that was refused changes nothing: another update may be open.
    raise_if_error(status);
    if (!known) {
      for (SenderEntry& entry : fresh.entries) entry.value.reset();
      options_ = std::move(fresh);
      announced_ = metadata && is_fixed(entries) ? nb::borrow(entries) : nb::object();
    }
    entries_.watch(options_.entries);
    ++opened_;
    return bytes;
  }
  std::vector<std::uint32_t> order() {
    settle();
    return sender().order();
  }

  /// Sends what an iterable of (name, tensor) gives, batch by batch: while one is sent the next one is gathered. No tensor is asked for
  /// while `tensors_max` of them, or `bytes_max` bytes, are held. `progress`, unless it is None, gets the bytes so far from time to time.
  /// Bytes of all.
  std::int64_t add(nb::handle tensors, std::size_t tensors_max, std::int64_t bytes_max, nb::handle progress) {
    const nb::object iterator = given_iterable(tensors, "tensors", "pairs of name and tensor");
    std::int64_t total = 0;
    // Gathering runs Python. Views that were checked against the entries of one update are no tensors of another.
    const auto check_update = [this, opened = opened_] {
      if (opened != opened_) raise(Status(Code::kFailedPrecondition, "add: another update was opened while its tensors were gathered"));
    };
    const auto count = [&](const Batch& sent) {
      total += sent.bytes;
      if (!progress.is_none()) progress(total);
    };
    std::optional<Flight> flight;
    for (bool more = true; more;) {
      const std::int64_t room = flight ? bytes_max - flight->batch().bytes : bytes_max;
      auto batch = std::make_unique<Batch>();
      try {
        more =
            gather(iterator, std::max<std::size_t>(tensors_max / 2, 1), std::min(std::max<std::int64_t>(bytes_max / 2, 1), room), *batch);
      } catch (const nb::python_error& error) {
        if (flight) end_early(error.matches(PyExc_KeyboardInterrupt));
        throw;
      }
      check_update();
      if (flight) {
        wait([&](Sender&) { return flight->landed(); });
        count(flight->batch());
        flight.reset();
      }
      if (batch->views.empty()) break;
      settle();  // what a generator sends itself goes first, or another thread's
      check_update();
      if (more && tensors_max > 1 && batch->bytes < bytes_max) {
        flight.emplace(*this, std::move(batch));
      } else {
        // Nothing is gathered meanwhile.
        in_turn([&](Sender& target) { return batch->send(target); });
        count(*batch);
      }
    }
    return total;
  }
  nb::object finish() {
    return report("finish", [](Sender& sender) { return sender.finish(); });
  }
  nb::object resolve_in_doubt() {
    return report("resolve_in_doubt", [](Sender& sender) { return sender.resolve_in_doubt(); });
  }
  void abort(const std::string& reason) {
    end_.run([&](Sender& sender) { sender.abort(reason); }, [](Sender&) {});
  }

 private:
  /// Tensors that have been read, and what holds them.
  struct Batch {
    TensorReader reader{TensorReader::Hold::kCall};
    std::vector<nb::object> names;  // whose text the views have
    std::vector<std::pair<std::string_view, TensorView>> views;
    std::int64_t bytes = 0;

    Status send(Sender& target) const {
      for (const auto& [name, view] : views) HEADRACE_RETURN_IF_ERROR(target.add(name, view));
      return ok_status();
    }
  };
  /// Whether a Sender is in use: it wants one call at a time.
  class Traffic {
   public:
    void begin() {
      const std::lock_guard lock(mutex_);
      busy_ = true;
    }
    void end() {
      const std::lock_guard lock(mutex_);
      busy_ = false;
      ended_.notify_all();
    }
    bool busy() {
      const std::lock_guard lock(mutex_);
      return busy_;
    }
    void wait() {
      std::unique_lock lock(mutex_);
      ended_.wait(lock, [this] { return !busy_; });
    }

   private:
    std::mutex mutex_;
    std::condition_variable ended_;
    bool busy_ = false;  // guarded by mutex_
  };
  /// The use of the Sender by one call or one batch. Made with the GIL, behind settle(); ends with the work, on whichever thread does that:
  /// what Python runs meanwhile may ask for the next one, or close the sender.
  class Turn {
   public:
    explicit Turn(PySender& of) : use_(of.end_), traffic_(of.traffic_) { traffic_.begin(); }
    ~Turn() { traffic_.end(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    OpenEnd<Sender>::Use use_;
    Traffic& traffic_;
  };
  /// A call that waits for what receivers do. Made and destroyed with the GIL.
  class Talk {
   public:
    Talk(PySender& of, const char* call) : of_(of) { of_.talking_ = call; }
    ~Talk() { of_.talking_ = nullptr; }
    Talk(const Talk&) = delete;
    Talk& operator=(const Talk&) = delete;

   private:
    PySender& of_;
  };
  /// A batch that is being sent, on a thread of its own. Made and destroyed with the GIL.
  class Flight {
   public:
    Flight(PySender& of, std::unique_ptr<Batch> batch) : of_(of), batch_(std::move(batch)) {
      Sender& target = of.sender();
      try {
        *sent_ = std::async(std::launch::async, [&target, &sent = *batch_, turn = std::make_unique<Turn>(of)]() mutable {
          const std::unique_ptr<Turn> ends = std::move(turn);
          return sent.send(target);
        });
      } catch (const std::system_error& error) {
        raise(Status(Code::kResourceExhausted, fmt::format("add: start a thread that sends: {}", error.what())));
      }
    }
    ~Flight() {
      if (of_.end_.forked()) {
        // Its thread is in the process that this one was forked from.
        [[maybe_unused]] const auto* left = sent_.release();
        return;
      }
      const nb::gil_scoped_release without_gil;
      if (sent_->valid()) sent_->wait();
    }
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    const Batch& batch() const noexcept { return *batch_; }
    /// Waits; once.
    Status landed() { return sent_->get(); }

   private:
    PySender& of_;
    std::unique_ptr<Batch> batch_;
    std::unique_ptr<std::future<Status>> sent_ = std::make_unique<std::future<Status>>();
  };
  /// Reads what comes next, up to so many tensors or bytes; false when that was all.
  bool gather(nb::handle iterator, std::size_t tensors_max, std::int64_t bytes_max, Batch& batch) {
    while (batch.views.size() < tensors_max && batch.bytes < bytes_max) {
      const nb::object item = next(iterator);
      if (!item.is_valid()) return false;
      const auto [name, text, object] = named_item(item);
      const Tensor tensor = batch.reader.read(piece_of(object).tensor, name);
      const SenderEntry* entry = entries_.find(name);
      batch.views.emplace_back(name, entry != nullptr ? view_of(tensor, *entry, "the tensor") : view_of(tensor));
      batch.bytes += tensor.bytes();
      batch.names.push_back(text);
    }
    return true;
  }
  /// What stands in the place of a tensor: itself, or a part of one.
  struct Piece {
    nb::object tensor;
    nb::object part{};  // headrace.Part, or none
  };
  Piece piece_of(nb::handle object) {
    if (Py_TYPE(object.ptr()) == bare_type_) return {nb::borrow(object)};
    if (nb::isinstance(object, part_type_)) return {object.attr("tensor"), nb::borrow(object)};
    bare_type_ = Py_TYPE(object.ptr());
    bare_type_held_ = nb::borrow(object.type());
    return {nb::borrow(object)};
  }
  /// The next item, or none.
  static nb::object next(nb::handle iterator) {
    nb::object item = nb::steal(PyIter_Next(iterator.ptr()));
    if (!item.is_valid() && PyErr_Occurred() != nullptr) throw nb::python_error();
    return item;
  }
  Sender& sender() { return end_.get(); }
  /// The entries that metadata has; values are held by `values`. Bytes of the tensors: 0, they are not here.
  std::int64_t read_metadata(nb::handle metadata, TensorReader& values, std::vector<SenderEntry>& entries) {
    MetadataReader reader;
    const nb::object iterator = given_iterable(metadata, "metadata", "(name, dtype, shape) of each tensor");
    while (const nb::object item = next(iterator)) {
      nb::object value;
      SenderEntry& entry = entries.emplace_back(reader.read(item, value));
      if (value.is_valid() && wants_value(entry.name)) entry.value = view_of(values.read(value, entry.name), entry, "its value");
    }
    return 0;
  }
  /// The entries of (name, tensor), where a Part stands for a part.
  std::int64_t read_tensors(nb::handle tensors, TensorReader& values, std::vector<SenderEntry>& entries) {
    TensorReader look(TensorReader::Hold::kLook);
    std::int64_t bytes = 0;
    const nb::object iterator = given_iterable(tensors, "tensors", "pairs of name and tensor");
    while (const nb::object item = next(iterator)) {
      const auto [name, text, object] = named_item(item);
      const Piece piece = piece_of(object);
      const Tensor tensor = look.read(piece.tensor, name);
      SenderEntry& entry = entries.emplace_back();
      entry.name = name;
      entry.dtype = tensor.dtype;
      if (piece.part.is_valid()) {
        entry.shape = shape_from(piece.part.attr("shape"), name);
        entry.box = box_from(piece.part.attr("box"), entry.name);
      } else {
        entry.shape.assign(tensor.shape().begin(), tensor.shape().end());
      }
      if (wants_value(entry.name)) entry.value = view_of(values.read(piece.tensor, entry.name), entry, "its value");
      bytes += tensor.bytes();
      look.forget();  // a callable's tensors need not all exist at once
    }
    return bytes;
  }
  /// Returns when no batch has the Sender; with the GIL from then on. Refused in the midst of a call that waits for receivers: these may
  /// wait for a hook that asks.
  void settle() {
    (void)sender();
    const auto refuse_while_talking = [this] {
      if (talking_ != nullptr)
        raise(Status(Code::kFailedPrecondition, fmt::format("another call of this sender, {}(), waits for its receivers", talking_)));
    };
    refuse_while_talking();
    while (traffic_.busy()) {
      wait_for_traffic();
      refuse_while_talking();
    }
  }
  void wait_for_traffic() {
    wait([this](Sender&) {
      traffic_.wait();
      return ok_status();
    });
  }
  /// Sees a batch out that is on its way while something is thrown. After Control-C it is not waited for, nor after the next one.
  void end_early(bool interrupted) {
    if (end_.closed() || end_.forked()) return;
    if (interrupted) abort("interrupted");
    while (traffic_.busy()) wait_for_traffic();  // no settle(): its own refusal would take the place of what is thrown
  }
  /// Waits for `work`; Control-C gives the update up.
  template <class Work>
  void wait(const Work& work) {
    Status status;
    end_.run([&](Sender& target) { status = work(target); }, [](Sender& target) { target.abort("interrupted"); });
    raise_if_error(status);
  }
  /// The same for work that has the Sender meanwhile; behind settle().
  template <class Work>
  void in_turn(const Work& work) {
    auto turn = std::make_unique<Turn>(*this);
    wait([&](Sender& target) {
      const std::unique_ptr<Turn> ends = std::move(turn);
      return work(target);
    });
  }
  template <class Ask>
  nb::object report(const char* call, const Ask& ask) {
    settle();
    const Talk talk(*this, call);
    std::optional<Result<UpdateReport>> report;
    in_turn([&](Sender& target) {
      report = ask(target);
      return report->status();
    });
    return report_record(report->value());
  }

  nb::object part_type_;
  PyTypeObject* bare_type_ = nullptr;  // of the last object that was no part
  nb::object bare_type_held_;
  OpenEnd<Sender> end_{"sender"};
  UpdateOptions options_;  // of the last update; its entries are those of the next one while `announced_` stays
  const char* talking_ = nullptr;
  std::uint64_t opened_ = 0;  // updates
  nb::object announced_;
  OpenEntries entries_;
  Traffic traffic_;
};

/// (dtype, shape in elements of it) of a tensor, as an entry has them.
static nb::tuple describe(nb::handle tensor, const std::string& name) {
  TensorReader reader(TensorReader::Hold::kLook);
  const Tensor read = reader.read(tensor, name);
  nb::list shape;
  for (const std::int64_t dim : read.shape()) shape.append(dim);
  return nb::make_tuple(std::string(dtype_name(read.dtype)), nb::tuple(shape), read.bytes());
}

void init_sender(nb::module_& module) {
  nb::class_<PySender>(module, "Sender", "What stands behind headrace.Sender.")
      .def(
          "__init__",
          [](PySender* self, std::string job, std::string sender, std::vector<std::string> endpoints, std::string data_path,
             std::int64_t bucket_bytes, std::uint32_t staging_buffers, std::uint32_t threads, bool fingerprints,
             std::int64_t connect_timeout_ms, std::int64_t deadline_ms, nb::object part) {
            SenderOptions options;
            options.job = std::move(job);
            options.sender = std::move(sender);
            options.endpoints = std::move(endpoints);
            options.data_path = std::move(data_path);
            options.bucket_bytes = bucket_bytes;
            options.staging_buffers = staging_buffers;
            options.threads = threads;
            options.fingerprints = fingerprints;
            options.connect_timeout_ms = connect_timeout_ms;
            options.deadline_ms = deadline_ms;
            new (self) PySender(options, std::move(part));
          },
          nb::kw_only(), nb::arg("job"), nb::arg("sender"), nb::arg("endpoints"), nb::arg("data_path"), nb::arg("bucket_bytes"),
          nb::arg("staging_buffers"), nb::arg("threads"), nb::arg("fingerprints"), nb::arg("connect_timeout_ms"), nb::arg("deadline_ms"),
          nb::arg("part"))
      .def_prop_ro("receivers", &PySender::receivers)
      .def_prop_ro("closed", &PySender::closed)
      .def("wants_value", &PySender::wants_value, nb::arg("name"))
      .def("open", &PySender::open, nb::arg("version"), nb::arg("entries"), nb::arg("metadata"), nb::arg("scopes"), nb::arg("senders"),
           nb::arg("overlap"), nb::arg("repair"))
      .def("order", &PySender::order)
      .def("add", &PySender::add, nb::arg("tensors"), nb::arg("tensors_max"), nb::arg("bytes_max"), nb::arg("progress").none())
      .def("finish", &PySender::finish)
      .def("resolve_in_doubt", &PySender::resolve_in_doubt)
      .def("abort", &PySender::abort, nb::arg("reason"))
      .def("close", &PySender::close);
  module.def("describe", &describe, nb::arg("tensor").none(), nb::arg("name"),
             "(dtype, shape, bytes) of a tensor, with the dtype that it travels as. Refuses by `name` what is no tensor in host memory.");
}

}  // namespace headrace::python
