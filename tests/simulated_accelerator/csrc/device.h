// The simulated accelerator as a device of torch's.
#pragma once

#include "runtime.h"

#include <ATen/core/Generator.h>
#include <c10/core/DeviceType.h>

namespace sim {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

// Makes torch use this library's memory, streams and events for the device type. Once per process.
void register_device();

// The random generator of a device; of the current one for -1.
at::Generator& generator(int device);

}  // namespace sim
