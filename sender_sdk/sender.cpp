#include "sender_sdk/sender.h"

#include <utility>

#include "sender_sdk/sender_impl.h"

namespace headrace {

class Sender::Impl {
 public:
  std::unique_ptr<SenderImpl> inner;
};

Sender::Sender(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Sender::~Sender() = default;

Result<std::unique_ptr<Sender>> Sender::connect(const SenderOptions& options) {
  auto inner = SenderImpl::connect(options, SenderEnvironment::real());
  if (!inner.ok()) return inner.status();
  return std::unique_ptr<Sender>(new Sender(std::make_unique<Impl>(Impl{std::move(inner).value()})));
}

const std::vector<ReceiverInfo>& Sender::receivers() const noexcept {
  return impl_->inner->receivers();
}
bool Sender::wants_value(std::string_view name) const {
  return impl_->inner->wants_value(name);
}
Status Sender::open(const UpdateOptions& options) {
  return impl_->inner->open(options);
}
std::vector<std::uint32_t> Sender::order() const {
  return impl_->inner->order();
}
Status Sender::add(std::string_view name, const TensorView& view) {
  return impl_->inner->add(name, view);
}
Status Sender::add_async(std::string_view name, TensorView view, std::function<void(const Status&)> released) {
  return impl_->inner->add_async(name, std::move(view), std::move(released));
}
Result<UpdateReport> Sender::finish() {
  return impl_->inner->finish();
}
void Sender::abort(const std::string& reason) {
  impl_->inner->abort(reason);
}
Result<UpdateReport> Sender::resolve_in_doubt() {
  return impl_->inner->resolve_in_doubt();
}
Result<std::span<std::byte>> Sender::allocate(std::size_t bytes) {
  return impl_->inner->allocate(bytes);
}
Result<std::span<std::byte>> Sender::adopt(UniqueFd descriptor, std::size_t bytes) {
  return impl_->inner->adopt(std::move(descriptor), bytes);
}
Status Sender::release(std::span<std::byte> memory) {
  return impl_->inner->release(memory);
}

}  // namespace headrace
