"""Info: what there is to run on: versions, devices, memory, settings that matter, and what is wrong with them."""

import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from ._base.units import UNKNOWN, number_text, size_text
from ._runtime.dispatch import CPU_CAN_WEDGE
from ._runtime.group import Device
from ._runtime.target import known_accelerator

PACKAGES = ("jax", "jaxlib", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "optax", "flax", "equinox")
SETTINGS = ("XLA_", "JAX_", "CUDA_VISIBLE_DEVICES", "NCCL_", "SYNK_")


def report() -> str:
    """All of it as text, for people, and for those who read their reports.

    Starts JAX's backend, as the first use of any device does.
    """
    devices, trouble = _started()
    return "\n".join([*_versions(), *_devices(devices), settings(), *_troubles(devices, trouble)])


def machine(device: Device) -> str:
    """Describe what programs on a device run on: versions, its kind and what it can do."""
    cores = "" if device.platform != "cpu" else f", {os.cpu_count()} cores"
    return "\n".join([*_versions(), f"device: {device.device_kind}{cores}", *_of_kind(device)])


def _started() -> tuple[Sequence[Device], str | None]:
    """The devices, or none and why JAX does not start."""
    try:
        return jax.devices(), None
    except Exception as error:  # among them a bare AssertionError, where JAX_PLATFORMS names one without its plugin
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        return [], f"JAX does not start with these settings: {first_line}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[str]:
    yield f"synk {_version('synk-jax') or UNKNOWN}, Python {platform.python_version()}, {platform.platform()}"
    found = [f"{name} {_version(name)}" for name in PACKAGES if _version(name)]
    yield f"packages: {', '.join(found)}"


def _devices(devices: Sequence[Device]) -> Iterator[str]:
    if not devices:
        yield f"devices: none, {os.cpu_count()} CPU cores"
        return
    yield f"devices: {len(devices)} {devices[0].device_kind} ({devices[0].platform}), {os.cpu_count()} CPU cores"
    yield from _of_kind(devices[0])


def _of_kind(device: Device) -> Iterator[str]:
    memory = None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")
    yield f"memory of a device that JAX uses: {size_text(memory)}"
    known = known_accelerator(device)
    if known is not None:
        speeds = f"{size_text(known.bandwidth)}/s, {number_text(known.flops)}flop/s in bfloat16"
        yield f"  by its data sheet: {size_text(known.memory)}, {speeds}"


def settings() -> str:
    """Name the environment variables that matter."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    return "settings: " + (", ".join(f"{name}={value}" for name, value in found.items()) or "none")


def _troubles(devices: Sequence[Device], trouble: str | None) -> Iterator[str]:
    troubles = [*_of_versions(), *([trouble] if trouble else []), *(_of_devices(devices) if devices else [])]
    yield "what may be wrong:" + (" nothing that shows here" if not troubles else "")
    for trouble in troubles:
        yield f"  - {trouble}"


def _of_versions() -> Iterator[str]:
    jax_version, jaxlib = _version("jax"), _version("jaxlib")
    for plugin in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        has = _version(plugin)
        if has is not None and has != jaxlib:
            yield f"{plugin} {has} goes with jaxlib {has}, but this one is {jaxlib}: install both of one version."
    if jax_version and jaxlib and jax_version.split(".")[:2] != jaxlib.split(".")[:2]:
        yield f"jax {jax_version} beside jaxlib {jaxlib}: install both of one version."


def _of_devices(devices: Sequence[Device]) -> Iterator[str]:
    device, count = devices[0], len(devices)
    flags = os.environ.get("XLA_FLAGS", "")
    if device.platform == "cpu" and Path("/proc/driver/nvidia/version").exists():
        yield "an NVIDIA driver is here, but JAX runs on the CPU: pip install 'jax[cuda12]', and see JAX_PLATFORMS."
    if device.platform == "cpu" and count == 1:
        yield "one CPU device is one replica: JAX_NUM_CPU_DEVICES=4, synk.init(4) or synk.simulate(4) make more."
    if device.platform == "cpu" and count > 1 and CPU_CAN_WEDGE:
        yield (
            f"jaxlib {_version('jaxlib')} stops for good at 33 programs in flight on several CPU devices: synk keeps "
            f"4; programs of yours around it should be waited for."
        )
    if device.platform == "cpu" and count > (os.cpu_count() or 1):
        yield f"{count} CPU devices share {os.cpu_count()} cores: right answers, but no speed to be measured."
    if "xla_force_host_platform_device_count" in flags and "JAX_NUM_CPU_DEVICES" in os.environ:
        yield "XLA_FLAGS and JAX_NUM_CPU_DEVICES both say how many CPU devices there are: keep the second."
