"""A verl platform for host memory, registered as verl's plug-in point for chips asks: verl ships none, and its fallback needs a GPU."""

import os
import types
from contextlib import nullcontext
from typing import Any

os.environ["VERL_PLATFORM"] = "host"

from verl.plugin.platform import PlatformBase, PlatformRegistry, get_platform


def _nothing(*_: Any, **__: Any) -> None:
    """There is nothing to wait for and nothing cached."""


_DEVICE = types.ModuleType("host_device")
_DEVICE.synchronize = _DEVICE.ipc_collect = _DEVICE.empty_cache = _nothing


@PlatformRegistry.register("host")
class HostPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "host"
    device_module = _DEVICE
    synchronize = set_device = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "HOST_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"  # of which Ray can be told to count some that are not there

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


assert isinstance(get_platform(), HostPlatform)
