"""Init: make the group of devices that a user asks for, over other processes too, and make it the current one."""

import contextlib
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.backend import backends, clear_backends

from .._base.errors import checked_integer, public_api, shown
from .._base.jax_context import is_traced
from .._base.units import counted, parse_memory
from .._runtime.dispatch import LOCK, drain, leave_to_runtime
from .._runtime.group import ALONE, CURRENT, Group, current_group, make_group
from .._runtime.watchdog import WATCHDOG
from .._runtime.way import Device
from .compilation_cache import checked_folder, use_folder


@public_api
def init(
    devices: int | Sequence[Device] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    memory: int | float | str | None = None,
    distributed: bool = False,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    watchdog: float | None = None,
    exit_hook: bool = True,
    heartbeat: int = 30,
    shutdown: int = 30,
    start: int = 120,
) -> Group:
    """Make a group of devices and make it the current one.

    If the current group has these devices and this `memory`, it is returned as it is, with its variables: a cell of a
    notebook may run twice. After `synk.close()` the group is a new one.

    On a machine with CPUs only `init(n)` makes n virtual CPU devices (the option `jax_num_cpu_devices`). Where JAX has
    started with fewer, as in a notebook, its backend starts anew: arrays of before stay readable, functions compile
    again, and a shared variable of before lives on in its own group. It cannot start anew inside a trace, over several
    processes, or beside an accelerator, and `JAX_NUM_CPU_DEVICES` and `XLA_FLAGS` in the environment outrank `n`.

    With `distributed=True` the group spans all processes of the program. Each process makes this call before any other
    use of JAX: it is `jax.distributed.initialize` with shorter time-outs. `coordinator`, `num_processes` and
    `process_id`, or `SYNK_COORDINATOR`, `SYNK_NUM_PROCESSES` and `SYNK_PROCESS_ID` in the environment (which
    `python -m synk launch` sets), say who is who. `JAX_LOCAL_DEVICE_IDS` says which GPUs this process takes. Without
    them JAX finds a launcher (SLURM, Open MPI, MPICH, Kubernetes). If the runtime runs already, as under Ray, it is
    used as it is.

    With `cache=folder` this process keeps in a folder all programs that it compiles, and takes from there those that
    an earlier run has compiled: it is JAX's persistent cache, for programs of any size. JAX names a program by its
    text, compiler options, the version of jaxlib and the kind of device, so no answer changes. The folder stays in use
    until the process ends or `init` is given another one, after `synk.close()` too. Programs with host callbacks
    (`jax.debug.print`) are compiled in each run before JAX 0.12. Over processes, process 0 writes and all read, so
    several machines need a folder that all of them see; on CPUs only process 0 finds its programs again. Whoever can
    write to the folder can run code in this process.

    Args:
      devices: None for all of `jax.devices()`; an int n for the first n; or a sequence of distinct devices.
      cache: a folder for compiled programs, made if it is missing. None: that of `SYNK_CACHE` in the environment, or
        else whatever JAX's own option `jax_compilation_cache_dir` says.
      memory: how much of a device's memory programs may use, for `num_slices="auto"` and `f.explain`: bytes, text like
        "14GB" or "14GiB", or a fraction of what the device tells. CPUs tell nothing, and need bytes. Over processes
        the value of process 0 counts.
      distributed: whether other processes take part.
      coordinator: "host:port" of process 0.
      num_processes: how many processes there are.
      process_id: the number of this process, from 0.
      watchdog: seconds without a call to synk after which this process prints the stacks of its threads and ends.
      exit_hook: whether an uncaught error ends this process at once, so that the others need not wait for it.
      heartbeat: seconds without a sign of life after which a process counts as dead.
      shutdown: seconds that the runtime waits for the other processes once all programs have ended.
      start: seconds to wait for the other processes at the start.

    Returns:
      The group, to be used in `with` or left as it is.

    Raises:
      ValueError: there are, and can be made, fewer devices than were asked for, a device is named twice, no
        launcher is found, or files cannot be written in the folder of `cache`.
      TypeError: `devices`, `cache` or `memory` is of another type.

    Example:
      >>> import synk
      >>> with synk.init(1) as group:
      ...     group.size
      1
    """
    if watchdog is not None and (isinstance(watchdog, bool) or not isinstance(watchdog, int | float) or watchdog <= 0):
        raise ValueError(f"synk.init: watchdog is {watchdog!r}; give seconds > 0, or None.")
    most, folder = parse_memory(memory, "synk.init"), checked_folder(cache, "synk.init")
    # What other processes need is imported where there are some, so that `import synk` is quick.
    if distributed:
        from .coordinator import initialize
        from .liveness import attend

        initialize(coordinator, num_processes, process_id, heartbeat, shutdown, start)
        leave_to_runtime()
        attend(exit_hook, shutdown)
    elif (coordinator, num_processes, process_id) != (None, None, None):
        raise ValueError("synk.init: coordinator, num_processes and process_id go with distributed=True.")
    if watchdog is not None:
        from .coordinator import is_running
        from .liveness import NOTICE_SECONDS

        # Process 0 takes the store along when it ends: first the other processes show their stacks.
        is_last = is_running() and jax.process_count() > 1 and jax.process_index() == 0
        WATCHDOG.start(watchdog + NOTICE_SECONDS * is_last)
    made = _use(_chosen_devices(devices, distributed), False, most)
    use_folder(folder)
    return made


@public_api
def simulate(n: int, *, memory: int | float | str | None = None) -> Group:
    """Make a group of `n` replicas that share one device, and make it the current one.

    The program of a replica is mapped by `jax.vmap` with a named axis. The answers are the same to rounding, and
    nothing is communicated. Use it in tests, on laptops, and on one GPU for a program that is meant for eight. As
    `synk.init` does, it returns the current group if that is the one asked for.
    `SYNK_CACHE` in the environment counts as for `synk.init`.

    Args:
      n: how many replicas, >= 1.
      memory: how much of the shared device's memory programs may use, as for `synk.init`.

    Raises:
      ValueError: `n` is below 1, `memory` is no amount, or files cannot be written in the folder of SYNK_CACHE.
      TypeError: `n` is no integer.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> with synk.simulate(8):
      ...     round(float(synk.function(jnp.mean, reduce="mean")(np.arange(11.0))), 4)
      5.0
    """
    n, most = checked_integer(n, "synk.simulate: the number of replicas", 1), parse_memory(memory, "synk.simulate")
    folder = checked_folder(None, "synk.simulate")
    made = _use((jax.local_devices()[0],) * n, True, most)
    use_folder(folder)
    return made


@public_api
def group() -> Group:
    """Return the current group, made of all devices on first use.

    Example:
      >>> import synk
      >>> with synk.simulate(2) as two:
      ...     synk.group() is two
      True
    """
    return current_group()


@public_api
def close() -> None:
    """Wait for running work and forget the current group; the next use makes a new one.

    It raises nothing: reading the results of a program that died raises.

    Example:
      >>> import synk
      >>> synk.close()
    """
    drain()
    CURRENT.forget()


CURRENT.make_default = init


def _use(devices: tuple[Device, ...], is_simulated: bool, memory: int | float | None) -> Group:
    """Make a group of the devices, or the current group if it has these, the current one."""
    # A process hands its rows on as one run, so its ranks must be consecutive.
    process = jax.process_index()
    local = [rank for rank, device in enumerate(devices) if device.process_index == process]
    if not local or local != [*range(local[0], local[-1] + 1)]:
        raise ValueError(
            f"synk.init: of the devices {devices}, those of one process must stand together, and each process that "
            f"runs this needs one; this is process {process}."
        )
    missing = {*range(jax.process_count())} - {device.process_index for device in devices}
    if missing and len(local) < len(devices):
        raise ValueError(
            f"synk.init: the devices {devices} are those of several processes, but none is of process {min(missing)}. "
            f"Give some of each process, or of this one alone."
        )
    peers = ALONE
    if len(local) < len(devices):
        from .agreement import PEERS as peers
    group, settings = CURRENT.group, (devices, is_simulated, peers, memory)
    # A cell of a notebook may run twice, and variables live in the group of its first run.
    if group is None or (group.devices, group.is_simulated, group._peers, group._memory) != settings:
        group = make_group(devices, is_simulated, peers, memory=memory)
    return CURRENT.use(group)


def _chosen_devices(devices: Any, is_distributed: bool) -> tuple[Device, ...]:
    if devices is None:
        return tuple(jax.devices())
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        return _first_devices(int(devices), is_distributed)
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"synk.init: devices is {shown(devices)}; give None, a number or a list of jax.Devices.")
    chosen = tuple(devices)
    if not chosen or not all(isinstance(device, jax.Device) for device in chosen):
        raise TypeError(
            f"synk.init: devices is {shown(devices)}; give at least one jax.Device, e.g. jax.devices()[:2]."
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"synk.init: a device is named twice in {devices!r}; use synk.simulate to share one.")
    return chosen


def _first_devices(n: int, is_distributed: bool) -> tuple[Device, ...]:
    """Return the first n devices. Make virtual CPU devices, unless the environment says how many there are."""
    checked_integer(n, "synk.init: the number of replicas", 1)
    environment = f"JAX_NUM_CPU_DEVICES={os.environ.get('JAX_NUM_CPU_DEVICES')} {os.environ.get('XLA_FLAGS')}"
    fixed = re.findall(r"(?:JAX_NUM_CPU_DEVICES|host_platform_device_count)=(\d+)", environment)
    chosen = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # options are not typed
    # The option counts until the backend starts. What the user has set, here or in the environment, stays.
    if not is_distributed and not fixed and chosen == -1:
        with contextlib.suppress(RuntimeError):  # the backend has started
            jax.config.update("jax_num_cpu_devices", n)
    have = jax.devices()
    # A number that the environment got after JAX had started is made now.
    may_make = not is_distributed and all(int(number) >= n for number in fixed)
    if len(have) >= n or (may_make and _restart_cpus(n)):
        return tuple(jax.devices()[:n])
    if have[0].platform == "cpu":
        raise ValueError(
            f"synk.init: {n} replicas were asked for, but JAX has started with {counted(len(have), 'CPU device')}. "
            f"Set JAX_NUM_CPU_DEVICES={n} before Python starts, or use synk.simulate({n})."
        )
    found = f"{counted(len(have), f'{have[0].platform} device')} {'is' if len(have) == 1 else 'are'}"
    raise ValueError(
        f"synk.init: {n} replicas were asked for, but {found} here. "
        f"Ask for at most {len(have)}, or use synk.simulate({n})."
    )


def _restart_cpus(n: int) -> bool:
    """Start JAX's backend anew with n CPU devices, and return whether this can be done."""
    # Tracers, the other processes, and arrays on an accelerator depend on the backend that would go.
    if is_traced() or jax.process_count() > 1 or {*backends()} != {"cpu"}:
        return False
    with LOCK:
        drain()
        # Arrays, groups and programs of before live on in the old backend, as long as something holds them.
        clear_backends()
        jax.config.update("jax_num_cpu_devices", n)
    return True
