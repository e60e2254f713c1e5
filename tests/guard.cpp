// What autograd asks of CUDA, answered where there is none: guards that do nothing, and hooks that know one device.
// A torch built without CUDA aborts in the backward pass of tensors that say cuda:0; with this loaded before it, it runs.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

namespace {

const Device DEVICE(DeviceType::CUDA, 0);

struct Guard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return DEVICE; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, DEVICE); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};

}  // namespace

namespace at {
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at
