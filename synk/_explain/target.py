"""Target: groups of devices that this machine does not have, for which programs compile."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from .._base.errors import SynkError, checked_integer, in_a_line, public_api
from .._base.units import parse_memory
from .._runtime.group import CURRENT, Group, make_group
from .._runtime.way import Accelerator, Device


class _Gpu(NamedTuple):
    """The data of a GPU that XLA's compiler asks for, from
    https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs.

    Attributes:
      fpus: arithmetic units a core.
      clock: in GHz.
      shared_memory: bytes a core; a block gets 1 KiB less.
      cache: bytes of the second level.
      memory: bytes.
      bandwidth: bytes a second.
      flops: dense bfloat16 operations a second, from NVIDIA's data sheets of A100, H100, H200 and HGX B200.
      link: bytes a second one way by NVLink, from the same data sheets.
    """

    description: str
    capability: int
    cores: int
    fpus: int
    clock: float
    shared_memory: int
    cache: int
    memory: int
    bandwidth: float
    flops: float
    link: float

    @property
    def config(self) -> str:
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
              shared_memory_per_block_optin: {self.shared_memory - 1024}
              core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              l2_cache_size: {self.cache} memory_bandwidth: {int(self.bandwidth)} device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {self.capability} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 }}
            runtime_version {{ major: 12 minor: 8 }}
            device_description_str: "{self.description}"
        """


_GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 167936, 41943040, 85100068864, 2.03904e12, 312e12, 300e9),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 233472, 52428800, 84942979072, 3.35232e12, 989e12, 450e9),
    "h200": _Gpu("NVIDIA H200 141GB HBM3e", 9, 132, 128, 1.98, 233472, 52428800, 151397597184, 4.8e12, 989e12, 450e9),
    "b200": _Gpu("NVIDIA B200", 10, 148, 128, 1.965, 233472, 132644864, 191514411008, 7.67232e12, 2250e12, 900e9),
}
# https://cloud.google.com/tpu/docs/v5e and https://cloud.google.com/tpu/docs/v6e, which count links in both directions.
_TPUS = {
    "v5e": Accelerator("v5e", 16 * 2**30, 16 * 2**30, 197e12, 819e9, 200e9),
    "v6e": Accelerator("v6e", 32 * 2**30, 32 * 2**30, 918e12, 1638e9, 400e9),
}
# JAX's names. "TPU v5" alone is the faster v5p.
_TPU_KINDS = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v6 lite": "v6e", "TPU v6e": "v6e"}
_TPU_SHAPES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
MOST = 64
# Environment variables while JAX looks for its plugins, which it does once.
_PLUGINS = {
    # Without this the CUDA plugin demands a CUDA runtime, which compiling does not need.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    # Without these libtpu asks a metadata server which machine this is.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@public_api
def target(device: str, replicas: int, hosts: int = 1, *, memory: int | float | str | None = None) -> Group:
    """Make a group of devices that are not here, and make it the current one: functions compile and explain for them.

    Nothing runs there and nothing is placed: arguments, shared variables and data are described by their shapes.
    Arguments and variables may be `jax.ShapeDtypeStruct`s; for `synk.data` an array that takes no memory does as well:
    `np.broadcast_to(np.float32(0), shape)`. Calling raises. GPUs need the extra "target" (JAX's CUDA plugin; no
    GPU, no driver), TPUs "target-tpu" (libtpu).

    Args:
      device: "a100", "h100", "h200" or "b200"; "v5e" or "v6e".
      replicas: how many, 1 to 64; of TPUs 1, 4, 8, 16, 32 or 64.
      hosts: over how many machines, each with as many; 1 for TPUs, whose slices span theirs by themselves.
      memory: as for `synk.init`.

    Returns:
      The group, to be used in `with` or left as it is.

    Raises:
      ValueError: there is no such device, or no such number of them.
      SynkError: what compiles for it is not installed, or was not found when JAX looked for it.

    Example:
      >>> import synk
      >>> try:
      ...     synk.target("h1000", 8)
      ... except ValueError as error:
      ...     print(error)
      synk.target: there is no 'h1000'; known are a100, h100, h200, b200, v5e, v6e.
    """
    replicas = checked_integer(replicas, "synk.target: replicas", 1, f"give 1 to {MOST}")
    hosts = checked_integer(hosts, "synk.target: hosts", 1)
    if device not in _GPUS and device not in _TPUS:
        known = ", ".join([*_GPUS, *_TPUS])
        raise ValueError(f"synk.target: there is no {device!r}; known are {known}.")
    if replicas > MOST:
        raise ValueError(f"synk.target: {replicas} replicas were asked for; give 1 to {MOST}.")
    if replicas % hosts:
        raise ValueError(f"synk.target: {replicas} replicas do not divide over {hosts} hosts. Give each as many.")
    most = parse_memory(memory, "synk.target")
    devices = _devices(device, replicas, hosts)
    return CURRENT.use(make_group(devices, False, accelerator=_accelerator(device), memory=most))


def _accelerator(device: str) -> Accelerator:
    if device in _TPUS:
        return _TPUS[device]
    gpu = _GPUS[device]
    # JAX's default: https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
    return Accelerator(device, gpu.memory, int(gpu.memory * fraction), gpu.flops, gpu.bandwidth, gpu.link)


def known_accelerator(device: Device) -> Accelerator | None:
    """Look up the speed and memory of a device of this machine. Return None if its kind is not in the table."""
    # A driver may say less than the table, or more: "NVIDIA H200" is "NVIDIA H200 141GB HBM3e". But "NVIDIA H100 NVL",
    # whose memory is faster, is no "NVIDIA H100 80GB HBM3".
    for name, gpu in _GPUS.items():
        words = list(zip(device.device_kind.split(), gpu.description.split(), strict=False))
        if len(words) > 1 and all(word == other for word, other in words):
            return _accelerator(name)
    return _TPUS.get(_TPU_KINDS.get(device.device_kind, ""))


def _devices(device: str, replicas: int, hosts: int) -> tuple[Device, ...]:
    if device in _GPUS:
        # XLA compiles for GPUs that are not here since https://github.com/openxla/xla/pull/16913.
        needs, extra, setting = "JAX's CUDA plugin", "target", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"
        shape = f"1x{hosts}x{replicas // hosts}"
        options = {"platform": "cuda", "target_config": _GPUS[device].config, "topology": shape}
    elif replicas in _TPU_SHAPES and hosts == 1:
        needs, extra, setting = "libtpu", "target-tpu", "JAX_PLATFORMS=cpu"
        options = {"platform": "tpu", "topology_name": f"{device}:{_TPU_SHAPES[replicas]}"}
    else:
        counts = ", ".join(map(str, _TPU_SHAPES))
        raise ValueError(
            f"synk.target: {replicas} {device} in {hosts} hosts were asked for; give {counts} "
            f"replicas and hosts=1: a slice spans its hosts by itself."
        )
    # JAX looks for its plugins when a topology or a device is first asked for, and never again.
    with _environment(**_PLUGINS):
        try:
            topology: Any = topologies.get_topology_desc(**options)
        except (NotImplementedError, RuntimeError) as error:
            raise SynkError(
                f"synk.target: {device!r} needs {needs}, which JAX {jax.__version__} has not found "
                f"({in_a_line(error)}).\nInstall it, pip install '.[{extra}]' in a clone of synk, and if JAX is used "
                f"before synk.target, set {setting} before Python starts."
            ) from error
    return tuple(topology.devices)


@contextmanager
def _environment(**values: str) -> Generator[None]:
    """Set environment variables inside a `with` block, unless the user has set them."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
