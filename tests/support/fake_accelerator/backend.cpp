// A device for torch that behaves like a GPU and computes on the CPU.
//
// - Its memory is its own: a tensor of another device among the arguments is an error.
// - Copies that do not block stay undone until something waits for them. Who forgets to wait reads
//   what was there before, always.
// - Memory that another stream still copies from must have been recorded on that stream.
// - Its memory is bounded, and it can be told to have no float64, as Apple's devices have none, and
//   to refuse whatever waits for the whole device.
//
// Kernels are the CPU's: arguments are seen as CPU tensors in the same memory, and results are
// copied into new memory of the device.

#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

constexpr auto kFake = DeviceType::PrivateUse1;
constexpr DeviceIndex kNumDevices = 2;

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// --- streams ------------------------------------------------------------------------------------

struct Queue {
  std::deque<std::function<void()>> undone;
  uint64_t num_done = 0;
  uint64_t num_told() const { return num_done + undone.size(); }
};

std::map<std::pair<DeviceIndex, StreamId>, Queue> queues;
StreamId last_stream = 0;
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_streams[kNumDevices] = {};

Queue& queue_of(const Stream& stream) {
  return queues[{stream.device_index(), stream.id()}];
}

void drain(Queue& queue, uint64_t until) {
  while (queue.num_done < until) {
    auto job = std::move(queue.undone.front());
    queue.undone.pop_front();
    queue.num_done++;
    job();
  }
}

Stream current_stream(DeviceIndex index) {
  return Stream(Stream::UNSAFE, Device(kFake, index), current_streams[index]);
}

void drain_current(DeviceIndex index) {
  auto& queue = queue_of(current_stream(index));
  drain(queue, queue.num_told());
}

bool refuses_waits = false;

void wait_for_all(const char* what) {
  TORCH_CHECK(!refuses_waits, what, " waits for the whole device");
}

void drain_device(DeviceIndex index) {
  for (auto& [key, queue] : queues)
    if (key.first == index) drain(queue, queue.num_told());
}

struct Instant {
  Stream stream;
  uint64_t num_told;
  std::chrono::steady_clock::time_point at;
};

void reach(const Instant& instant) {
  drain(queue_of(instant.stream), instant.num_told);
}

// --- memory -------------------------------------------------------------------------------------

struct Block {
  size_t num_bytes;
  Stream stream;            // On which the memory was taken.
  std::set<StreamId> used;  // Streams it was recorded on.
};

std::unordered_map<void*, Block> blocks;
size_t allocated[kNumDevices] = {};
size_t capacity = size_t(4) << 30;
bool has_float64 = true;

void give_back(void* data) {
  Lock lock(mutex);
  auto found = blocks.find(data);
  if (found == blocks.end()) return;
  allocated[found->second.stream.device_index()] -= found->second.num_bytes;
  std::memset(data, 0xff, found->second.num_bytes);  // NaN to whoever still reads it.
  blocks.erase(found);
  std::free(data);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    Lock lock(mutex);
    auto device = Device(kFake, current_device);
    auto& sum = allocated[current_device];
    TORCH_CHECK_WITH(OutOfMemoryError, sum + num_bytes <= capacity,
        "fake out of memory. Tried to allocate ", num_bytes, " bytes.");
    if (num_bytes == 0) return {nullptr, nullptr, &give_back, device};
    void* data = nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&data, 64, num_bytes) == 0,
        "fake out of memory. The host has none.");
    std::memset(data, 0xff, num_bytes);
    sum += num_bytes;
    blocks.insert({data, Block{num_bytes, current_stream(current_device), {}}});
    return {data, data, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& ptr, Stream stream) override {
    Lock lock(mutex);
    auto found = blocks.find(ptr.get());
    if (found != blocks.end()) found->second.used.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = allocated[index];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    return {capacity - allocated[index], capacity};
  }
};

Memory memory;
REGISTER_ALLOCATOR(kFake, &memory);

std::set<std::pair<const char*, const char*>> pinned;  // Beginnings and ends.

void unpin(void* data) {
  Lock lock(mutex);
  for (auto each = pinned.begin(); each != pinned.end(); ++each)
    if (each->first == data) {
      pinned.erase(each);
      break;
    }
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    Lock lock(mutex);
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(num_bytes, 1)) == 0);
    pinned.insert({static_cast<char*>(data), static_cast<char*>(data) + num_bytes});
    return {data, data, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

PinnedMemory pinned_memory;

bool is_pinned(const void* data) {
  Lock lock(mutex);
  auto place = static_cast<const char*>(data);
  for (auto& [begin, end] : pinned)
    if (begin <= place && place < end) return true;
  return false;
}

// --- what torch asks of a device ----------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kFake; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kFake, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kNumDevices, "there is no device ", device);
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Stream getStream(Device device) const override {
    return current_stream(device.index() < 0 ? current_device : device.index());
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override {
    Lock lock(mutex);
    auto index = device.index() < 0 ? current_device : device.index();
    return Stream(Stream::UNSAFE, Device(kFake, index), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::DeviceCapability getDeviceCapability(Device) const override {
    c10::DeviceCapability capability;
    capability.capability_data.supported_scalar_types.has_Double = has_float64;
    return capability;
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag)
      const override {
    Lock lock(mutex);
    delete static_cast<Instant*>(*event);
    *event = new Instant{stream, queue_of(stream).num_told(), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream&) const override {
    Lock lock(mutex);
    if (event != nullptr) reach(*static_cast<Instant*>(event));
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex);
    if (event == nullptr) return true;
    auto& instant = *static_cast<Instant*>(event);
    return queue_of(instant.stream).num_done >= instant.num_told;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Instant*>(event);
  }
  void synchronizeEvent(void* event) const override { block(event, getStream(getDevice())); }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    auto span = static_cast<Instant*>(end)->at - static_cast<Instant*>(begin)->at;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(mutex);
    return queue_of(stream).undone.empty();
  }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock(mutex);
    auto& queue = queue_of(stream);
    drain(queue, queue.num_told());
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    Lock lock(mutex);
    wait_for_all("synchronize");
    drain_device(index < 0 ? current_device : index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const Stream& stream) const override {
    memory.recordStream(ptr, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(kFake, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(kFake, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

// --- kernels ------------------------------------------------------------------------------------

void require(bool condition, at::ScalarType type) {
  TORCH_CHECK_TYPE(condition || has_float64, "fake devices have no ", type);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  auto type = dtype.value_or(at::kFloat);
  require(type != at::kDouble, type);
  c10::impl::VirtualGuardImpl guard(kFake);
  auto before = guard.exchangeDevice(device.value_or(Device(kFake, current_device)));
  auto result = at::detail::empty_strided_generic(
      sizes, strides, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  guard.setDevice(before);
  return result;
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat>) {
  return empty_strided(sizes, c10::contiguous_strides(sizes), dtype, layout, device, pin);
}

// Returns a tensor of the CPU in the same memory.
at::Tensor on_cpu(const at::Tensor& tensor) {
  auto keeper = new c10::Storage(tensor.storage());
  c10::DataPtr data(
      keeper->mutable_data(), keeper, [](void* it) { delete static_cast<c10::Storage*>(it); },
      Device(DeviceType::CPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), keeper->nbytes(), std::move(data), c10::GetAllocator(DeviceType::CPU), true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

at::Tensor on_device(const at::Tensor& tensor, Device device) {
  // The same strides, and no gaps: as a kernel of the device would have left it.
  auto result = tensor.is_non_overlapping_and_dense()
      ? empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, device, {})
      : empty(tensor.sizes(), tensor.scalar_type(), {}, device, {}, {});
  on_cpu(result).copy_(tensor);
  return result;
}

void compute_on_cpu(
    const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Lock lock(mutex);
  const auto& schema = op.schema();
  const auto num_arguments = schema.arguments().size();
  const auto begin = stack->size() - num_arguments;
  // CUDA's kernels take indices from the CPU, too.
  const bool indexes = schema.name().rfind("aten::index", 0) == 0 ||
      schema.name().rfind("aten::_index", 0) == 0;
  std::vector<std::pair<at::Tensor, at::Tensor>> seen;  // Of the device, and as the CPU sees them.
  std::optional<Device> device;
  bool mixed = false;

  auto see = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kFake) {
      mixed = mixed || (tensor.dim() > 0 && !indexes);
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device(), schema.name(), " got tensors of ", *device,
        " and ", tensor.device());
    device = tensor.device();
    auto seen_by_cpu = on_cpu(tensor);
    seen.emplace_back(tensor, seen_by_cpu);
    return seen_by_cpu;
  };

  for (size_t i = 0; i < num_arguments; i++) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) {
      value = see(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      c10::List<at::Tensor> changed;
      for (const auto& each : list.vec()) changed.push_back(see(each));
      value = changed;
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorList();
      c10::List<std::optional<at::Tensor>> changed;
      for (const auto& each : list.vec())
        changed.push_back(each ? std::optional<at::Tensor>(see(*each)) : each);
      value = changed;
    } else if (value.isDevice()) {
      if (!device) device = value.toDevice();
      value = Device(DeviceType::CPU);
    }
  }
  TORCH_CHECK(!mixed, schema.name(), " got tensors of the device and of the CPU");
  TORCH_CHECK(device, schema.name(), " names no device");
  if (device->index() < 0) device = Device(kFake, current_device);
  for (auto& pair : seen) require(pair.first.scalar_type() != at::kDouble, at::kDouble);
  drain_current(device->index());

  op.callBoxed(stack);

  // A result that had no room was given new memory.
  for (auto& [own, cpu] : seen) {
    if (cpu.storage().data() == own.storage().data() && cpu.sizes() == own.sizes() &&
        cpu.strides() == own.strides())
      continue;
    auto moved = cpu.storage().data() == own.storage().data() ? cpu : on_device(cpu, *device);
    auto impl = own.unsafeGetTensorImpl();
    if (!moved.is_same(cpu)) impl->set_storage_keep_dtype(moved.storage());
    impl->set_storage_offset(moved.storage_offset());
    impl->set_sizes_and_strides(moved.sizes(), moved.strides());
  }
  auto take = [&](const at::Tensor& result) -> at::Tensor {
    if (!result.defined() || result.device().type() == kFake) return result;
    for (auto& [own, cpu] : seen) {
      if (cpu.is_same(result)) return own;
      if (result.has_storage() && result.storage().data() != nullptr &&
          result.storage().data() == cpu.storage().data())
        return at::native::as_strided_tensorimpl(
            own, result.sizes(), result.strides(), result.storage_offset());
    }
    return on_device(result, *device);
  };
  const auto num_results = schema.returns().size();
  for (auto& value : torch::jit::last(stack, num_results)) {
    auto& changed = const_cast<c10::IValue&>(value);
    if (value.isTensor()) {
      changed = take(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& each : value.toTensorVector()) list.push_back(take(each));
      changed = list;
    }
  }
}

// Copies what is said now, or when its turn comes on the stream.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Lock lock(mutex);
  auto seen = [](const at::Tensor& tensor) {
    return tensor.device().type() == kFake ? on_cpu(tensor) : tensor;
  };
  const auto& there = from.device().type() == kFake ? from : to;
  const auto& host = from.device().type() == kFake ? to : from;
  auto index = there.device().index();
  require(from.scalar_type() != at::kDouble || from.device().type() != kFake, at::kDouble);
  auto copy = [from = seen(from), to = seen(to)]() { at::Tensor(to).copy_(from); };
  if (!non_blocking || host.device().type() == kFake || !is_pinned(host.const_data_ptr())) {
    if (!non_blocking && host.device().type() != kFake) wait_for_all("a copy that blocks");
    drain_current(index);
    copy();
    return to;
  }
  auto stream = current_stream(index);
  auto data = there.storage().mutable_data();
  queue_of(stream).undone.push_back([copy, storage = there.storage(), data, stream]() {
    auto found = blocks.find(data);
    TORCH_CHECK(
        found == blocks.end() || found->second.stream.id() == stream.id() ||
            storage.use_count() > 2 || found->second.used.count(stream.id()),
        "memory was given up while another stream copied it: record_stream was not called");
    copy();
  });
  return to;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  Lock lock(mutex);
  wait_for_all("item()");
  drain_current(tensor.device().index());
  return on_cpu(tensor).item();
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(
      sizes, strides.empty() && !sizes.empty() ? at::IntArrayRef(c10::contiguous_strides(sizes)) : strides);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& self, Stream stream) {
  memory.recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  // torch's own way by `mse_loss.out` warns of a result that it resizes.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

TORCH_LIBRARY(fake_accelerator, m) {
  m.def("refuse_waits(bool refuses) -> ()", [](bool refuses) { refuses_waits = refuses; });
  m.def("set_capacity(int num_bytes) -> ()", [](int64_t num_bytes) { capacity = num_bytes; });
  m.def("set_has_float64(bool has) -> ()", [](bool has) { has_float64 = has; });
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
