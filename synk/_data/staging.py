"""Staging: page-locked host memory, from which rows go to a GPU as fast as its bus."""

import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .._base.pytree import bits_of
from .._runtime.dispatch import uninterrupted
from .._runtime.group import Group
from .._runtime.way import Device
from .sources import Copy, copy_rows

# From any other memory XLA sends through a small page-locked buffer, which one thread fills (bench/gpu.py).
# https://docs.jax.dev/en/latest/notebooks/host-offloading.html
MEMORY_KINDS = {"gpu": "pinned_host"}
# Fewer bytes are quicker sent by the program that takes them.
SMALL = 1 << 20
# One buffer is filled while another is sent.
KEPT_OF_A_SHAPE = 2
# The most bytes that a group keeps for later.
LIMIT = 1 << 28


class StagingBuffer:
    """Page-locked memory of one array on its way to a device.

    Attributes:
      device: the device.
      memory: the memory, to be written.
    """

    def __init__(self, device: Device, shape: Sequence[int], dtype: np.dtype) -> None:
        self.device = device
        where = SingleDeviceSharding(device, memory_kind=MEMORY_KINDS[device.platform])
        # The array of JAX whose memory this is. Only transfers read it.
        self._array = jax.block_until_ready(jax.device_put(np.empty(shape, dtype), where))
        address: Any = (ctypes.c_char * self._array.nbytes).from_address(self._array.unsafe_buffer_pointer())
        # After Ctrl-C threads may still write to a view of the memory when the buffer is gone.
        address.owner = self._array
        self.memory = np.ndarray(shape, dtype, address)
        # The array on the device that the last transfer makes. Until it is ready, the transfer may read the memory.
        self._sent: Any = None

    def send(self) -> jax.Array:
        self._sent = jax.device_put(self._array, SingleDeviceSharding(self.device))
        return self._sent

    def is_free(self) -> bool:
        """Check whether the last transfer has ended. Then what it sent may go."""
        # Of an array that was deleted, as a donated one, nothing tells whether it had come. Asked whether it is ready,
        # it ends the process (jaxlib 0.10.2).
        if self._sent is not None and not self._sent.is_deleted() and self._sent.is_ready():
            self._sent = None
        return self._sent is None

    def wait(self) -> bool:
        """Wait for the last transfer, and tell whether it is known to have ended."""
        with suppress(RuntimeError):
            jax.block_until_ready(self._sent)
        return self.is_free()


class StagingPool:
    """Buffers that a group keeps for its next transfers."""

    def __init__(self) -> None:
        # By device, shape and dtype, the least recently used first. A buffer in use is not here: whoever fails while
        # writing to it loses it.
        self._kept: dict[Any, list[StagingBuffer]] = {}
        self._lock = threading.Lock()

    def free_buffer(self, device: Device, shape: tuple[int, ...], dtype: np.dtype) -> StagingBuffer:
        """Return a buffer that no transfer reads: one that is kept, or a new one."""
        # A signal handler may call a function of synk's.
        with uninterrupted(), self._lock:
            for buffer in chain(*self._kept.values()):
                buffer.is_free()
            kept = self._kept.get((device, shape, dtype), [])
            free = next((buffer for buffer in kept if buffer.is_free()), None)
            if free is None and len(kept) >= KEPT_OF_A_SHAPE:
                free = kept[0]
            if free is not None:
                kept.remove(free)
        # Wait for the oldest transfer: its buffer was filled first, so it ends first.
        return free if free is not None and free.wait() else StagingBuffer(device, shape, dtype)

    def give(self, buffers: Sequence[StagingBuffer]) -> None:
        """Keep buffers for later transfers; the limit drops those of the kinds used least recently."""
        with uninterrupted(), self._lock:
            for buffer in buffers:
                kind = (buffer.device, buffer.memory.shape, buffer.memory.dtype)
                self._kept[kind] = [*self._kept.pop(kind, [])[-KEPT_OF_A_SHAPE + 1 :], buffer]
            total = sum(buffer.memory.nbytes for buffer in chain(*self._kept.values()))
            while total > LIMIT:
                kind, kept = next(iter(self._kept.items()))
                total -= kept.pop(0).memory.nbytes
                if not kept:
                    del self._kept[kind]


def is_staged(group: Group, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Check whether arrays of this shape go to the devices from page-locked memory."""
    return group.platform in MEMORY_KINDS and SMALL <= prod(shape) * dtype.itemsize <= LIMIT and bits_of(dtype) >= 8


def staging_buffers(
    group: Group, devices: Sequence[Device], shape: tuple[int, ...], dtype: np.dtype
) -> list[StagingBuffer] | None:
    """Return a buffer for each device. Return None where arrays are not sent from page-locked memory."""
    if not is_staged(group, shape, dtype):
        return None
    pool = _pool(group)
    try:
        return [pool.free_buffer(device, shape, dtype) for device in devices]
    except jax.errors.JaxRuntimeError:
        # The host has no more memory to lock.
        return None


def send_staged(group: Group, buffers: Sequence[StagingBuffer]) -> list[jax.Array]:
    """Start the transfers of buffers to their devices, and keep the buffers for later ones."""
    sent = [buffer.send() for buffer in buffers]
    _pool(group).give(buffers)
    return sent


def send_copy(group: Group, value: np.ndarray, dtype: np.dtype) -> jax.Array | None:
    """Send every replica a copy of an array. Return None where the host has no memory to lock."""
    buffers = staging_buffers(group, group.devices[:1], value.shape, dtype)
    if buffers is None:
        return None
    copy_rows(value, None, [Copy(buffers[0].memory, 0)])
    # Devices pass it on faster than the host sends it to each.
    return jax.device_put(send_staged(group, buffers)[0], group.replicated)


def _pool(group: Group) -> StagingPool:
    return group._cached(StagingPool, None, StagingPool)
