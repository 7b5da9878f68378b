"""Info: versions, devices, memory and settings of this machine, and what may be wrong with them."""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from .._base.errors import public_api
from .._base.units import UNKNOWN, counted, number_text, size_text
from .._runtime.dispatch import CPU_CAN_WEDGE
from .._runtime.group import CURRENT
from .._runtime.way import Device
from .page import text
from .target import known_accelerator

_PACKAGES = ("jax", "jaxlib", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "optax", "flax", "equinox")
_SETTINGS = ("XLA_", "JAX_", "CUDA_VISIBLE_DEVICES", "NCCL_", "SYNK_")


class Text(str):
    """Text that a cell of a notebook shows as `print` would."""

    # A notebook shows the repr of a cell's value, where a plain str would show its line ends as \n.
    __repr__ = str.__str__


@public_api
def info() -> str:
    """Describe this machine: versions, devices, memory and settings, what may be wrong with them, and what to do next.

    A cell of a notebook shows the text by itself, and `python -m synk info` prints the same. It starts JAX's backend,
    as the first use of any device does; `synk.init(n)` can still make CPU devices afterwards.

    Example:
      >>> import synk
      >>> print(str(synk.info())[:5])
      synk:
    """
    devices, troubles = _started()
    troubles = [*_version_troubles(), *troubles, *(_device_troubles(devices) if devices else [])]
    facts = machine(devices) | {"settings": settings(), "current group": f"{CURRENT.group or 'none yet'}"}
    wrong = "what may be wrong:" + ("" if troubles else " nothing that shows here")
    after = [f"what to do next: {_next(devices)}"] if devices else []
    return Text("\n".join([text(facts), wrong, *[f"  - {trouble}" for trouble in troubles], *after]))


def machine(devices: Sequence[Device]) -> dict[str, str]:
    packages = [f"{name} {_version(name)}" for name in _PACKAGES if _version(name)]
    facts = {
        "synk": f"{_version('synk-jax') or UNKNOWN}, Python {platform.python_version()}, {platform.platform()}",
        "packages": ", ".join(packages),
        "devices": f"none, {counted(os.cpu_count() or 1, 'CPU core')}",
    }
    if not devices:
        return facts
    device = devices[0]
    facts["devices"] = f"{len(devices)} {device.device_kind} ({device.platform}), {os.cpu_count()} CPU cores"
    # JAX takes 75 % of a GPU, unless told otherwise: https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    stats: Mapping[str, int] = {} if device.platform == "cpu" else device.memory_stats() or {}
    facts["memory of a device that JAX uses"] = size_text(stats.get("bytes_limit"))
    if "bytes_in_use" in stats:
        facts["in use of it"] = size_text(stats["bytes_in_use"])
    known = known_accelerator(device)
    if known is not None:
        speeds = f"{size_text(known.bandwidth)}/s, {number_text(known.flops)}flop/s in bfloat16"
        facts["by its data sheet"] = f"{size_text(known.memory)}, {speeds}"
    return facts


def settings() -> str:
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)]
    return ", ".join(found) or "none"


def _next(devices: Sequence[Device]) -> str:
    """Name the call that makes a group of these devices."""
    count, device = len(devices), devices[0]
    if count > 1:
        return f"synk.init() makes {count} replicas, one on each device."
    if device.platform == "cpu":
        return "synk.init(4) makes four virtual CPU devices, which show that a program is right, not how fast it is."
    return "synk.init() makes one replica; synk.simulate(4) runs a program of four on this one device."


def _started() -> tuple[Sequence[Device], list[str]]:
    """Return the devices; or none, and why JAX does not start."""
    try:
        return jax.devices(), []
    # A bare AssertionError comes where JAX_PLATFORMS names a platform without its plugin.
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        return [], [f"JAX does not start with these settings: {first_line}"]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _version_troubles() -> Iterator[str]:
    jax_version, jaxlib = _version("jax"), _version("jaxlib")
    # A plugin loads into jaxlib of its own version: https://docs.jax.dev/en/latest/installation.html
    for plugin in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        has = _version(plugin)
        if has is not None and has != jaxlib:
            yield f"{plugin} {has} goes with jaxlib {has}, but this one is {jaxlib}: install both of one version."
    if jax_version and jaxlib and jax_version.split(".")[:2] != jaxlib.split(".")[:2]:
        yield f"jax {jax_version} beside jaxlib {jaxlib}: install both of one version."


def _device_troubles(devices: Sequence[Device]) -> Iterator[str]:
    count, cores, device = len(devices), os.cpu_count() or 1, devices[0]
    if device.platform != "cpu":
        # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
        if str(getattr(device, "compute_capability", "")).startswith(("5.", "6.", "7.")):
            yield f"{device.device_kind} has no units for bfloat16: float32, or float16 with a scaled loss, is faster."
        return
    if Path("/proc/driver/nvidia/version").exists():
        yield "an NVIDIA driver is here, but JAX runs on the CPU: pip install 'jax[cuda12]', and see JAX_PLATFORMS."
    if count > 1 and CPU_CAN_WEDGE:
        yield (
            f"jaxlib {_version('jaxlib')} stops for good at 33 programs in flight on several CPU devices: synk keeps "
            f"4; programs of yours around it should be waited for."
        )
    if count > cores:
        yield f"{count} CPU devices share {cores} cores: right answers, but no speed to be measured."
    flags = os.environ.get("XLA_FLAGS", "")
    # XLA's flag is the older way to the same setting.
    if "xla_force_host_platform_device_count" in flags and "JAX_NUM_CPU_DEVICES" in os.environ:
        yield "XLA_FLAGS and JAX_NUM_CPU_DEVICES both say how many CPU devices there are: keep the second."
