"""Coordinator: join the other processes of a program, and share text with them through JAX's key-value store.

The store lives in process 0, at the address of the coordinator. Nothing else in synk uses private JAX.
"""

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Generator
from typing import Any

import jax
from jax._src import distributed  # noqa: TID251  # the client of the store has no public name

from .._base.errors import SynkError, checked_integer
from .._runtime.dispatch import JAXLIB

EXIT_NOT_MET = 69  # the exit code of a process that the others have not met in time


def initialize(
    coordinator: str | None, num_processes: Any, process_id: Any, heartbeat: int, shutdown: int, start: int
) -> None:
    """Join the other processes, unless JAX's runtime has been started already. Arguments are those of `synk.init`."""
    if is_running():
        return
    coordinator = coordinator or os.environ.get("SYNK_COORDINATOR")
    num_processes, process_id = _number("num_processes", num_processes), _number("process_id", process_id)
    _refuse_helper(coordinator, process_id)
    bind_address = None if coordinator is None else _prepare_address(coordinator, process_id)
    # Before jaxlib 0.10 the others notice after two of their own heartbeats that process 0 is frozen.
    if JAXLIB < (0, 10) and process_id:
        heartbeat = -(-heartbeat // 2)
    who = f"process {process_id} of {num_processes}" if coordinator else "this process"
    try:
        with _time_limit(f"{who} has met the others at {coordinator or 'the address that the launcher names'}", start):
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                # The runtime ends the process when this time is over. The limit above says why before that.
                initialization_timeout=start + 10,
                heartbeat_timeout_seconds=heartbeat,
                shutdown_timeout_seconds=shutdown,
                coordinator_bind_address=bind_address,
                # A launcher that JAX finds besides, as inside SLURM's allocation, would name other GPUs.
                cluster_detection_method=None if coordinator is None else "deactivate",
            )
    except ValueError as error:  # an argument is missing or wrong, and no launcher was found
        raise ValueError(
            f"synk.init(distributed=True): {error} Start with `python -m synk launch`, or give coordinator=, "
            f"num_processes= and process_id= (or SYNK_COORDINATOR, SYNK_NUM_PROCESSES and SYNK_PROCESS_ID)."
        ) from error
    os.environ["SYNK_JOINED"] = f"{coordinator} {process_id} {os.getpid()}"
    if num_processes is not None and process_id is not None:
        _compare_counts(num_processes, process_id)


def _number(name: str, value: Any) -> int | None:
    if value is not None:
        return checked_integer(value, f"synk.init: {name}")
    variable = f"SYNK_{name.upper()}"
    text = os.environ.get(variable)
    if text is not None and not text.isdigit():
        raise ValueError(f"synk.init: {variable} is {text!r}; set it to an integer >= 0.")
    return None if text is None else int(text)


def _refuse_helper(coordinator: str | None, process_id: int | None) -> None:
    """Raise SynkError in a helper, such as a loader of data, that imports the program and joins a second time."""
    # Helpers inherit the environment, and a program that is started by `spawn` runs the module of its parent again.
    joined = os.environ.get("SYNK_JOINED", "").split()
    if joined[:2] == [str(coordinator), str(process_id)] and joined[2] != str(os.getpid()):
        raise SynkError(
            f"synk.init(distributed=True): process {process_id} has joined already, and this is a helper that it has "
            f'started. Make the call under `if __name__ == "__main__":`, where helpers that import the program do not.'
        )


def _prepare_address(coordinator: str, process_id: int | None) -> str | None:
    """Check the address of process 0. Return where process 0 shall listen, or None for JAX's default."""
    match = re.fullmatch(r"\[?([^\[\]/\s]+?)\]?:(\d{1,5})", coordinator)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise ValueError(
            f"synk.init: the coordinator is {coordinator!r} (coordinator=, or SYNK_COORDINATOR); give host:port of "
            f"process 0, e.g. 10.0.0.1:1234."
        )
    host = match[1]
    is_local = host == "localhost" or host.startswith("127.") or host == "::1"
    # The runtime would ask a proxy of the environment for the coordinator:
    # https://github.com/grpc/grpc/blob/master/doc/environment_variables.md
    if any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        others = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")
        os.environ["no_grpc_proxy"] = ",".join(filter(None, [others, host]))
    if process_id == 0:
        _check_free(coordinator, host if is_local else "", int(match[2]))
    # JAX listens on all interfaces (https://github.com/jax-ml/jax/pull/20562). Nobody on the network needs to reach a
    # coordinator on the loopback device.
    return coordinator if is_local and not os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") else None


def _check_free(coordinator: str, host: str, port: int) -> None:
    """Raise OSError if process 0 cannot listen at its address: the runtime would crash there."""
    # The runtime aborts the process where it cannot listen, so a trial socket tells first.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that another run has just left is free
        try:
            trial.bind((host, port))
        except OSError as error:
            raise OSError(
                f"synk.init: process 0 cannot listen at {coordinator} (coordinator=, or SYNK_COORDINATOR): "
                f"{error.strerror}. Give a port of this machine that nobody uses."
            ) from error


@contextlib.contextmanager
def _time_limit(what: str, seconds: float) -> Generator[None]:
    """End this process with a message if the block takes longer: the runtime cannot be interrupted, and would abort."""

    def give_up() -> None:
        print(
            f"synk.init: {seconds} s have passed before {what}. Have all processes started (SYNK_NUM_PROCESSES), "
            f"each with its own SYNK_PROCESS_ID, and the same SYNK_COORDINATOR, which is the address of process 0?",
            file=sys.stderr,
            flush=True,
        )
        # sys.exit would end this thread alone.
        os._exit(EXIT_NOT_MET)

    # A timer, since Python handles no signal while the runtime waits: Ctrl-C comes after it.
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _compare_counts(num_processes: int, process_id: int) -> None:
    """Raise ValueError if processes count differently: those that process 0 does not count would be missing."""
    # The runtime of process 0 starts when as many have come as process 0 counts. It would never miss the others.
    put(f"synk/count/{process_id}", str(num_processes))
    for rank in range(num_processes) if process_id == 0 else (0,):
        count = None
        while count is None:
            count = wait(f"synk/count/{rank}", 1.0)
        if int(count) != num_processes:
            raise ValueError(
                f"synk.init: num_processes (or SYNK_NUM_PROCESSES) is {num_processes} in process {process_id}, but "
                f"{count} in process {rank}. Give all the same."
            )


# The key-value store.


def is_running() -> bool:
    return _client() is not None


def put(key: str, value: str) -> None:
    _client().key_value_set(key, value, allow_overwrite=True)


# The client tells the end of its patience by the status DEADLINE_EXCEEDED, in the text of the error alone.
def wait(key: str, seconds: float) -> str | None:
    """Read a value as soon as it is written; None if that takes longer."""
    try:
        return _client().blocking_key_value_get(key, int(seconds * 1000))
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def get_all(folder: str) -> dict[str, str]:
    """Read all values whose keys begin with `folder`, by the last part of the key."""
    return {key.rsplit("/", 1)[1]: value for key, value in _client().key_value_dir_get(folder)}


def delete(key: str) -> None:
    _client().key_value_delete(key)


def _client() -> Any:
    return distributed.global_state.client
