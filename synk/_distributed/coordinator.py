"""Coordinator: where the processes of a program meet: its address checked, and waited for with a message at the end."""

import contextlib
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Generator
from time import monotonic, sleep
from typing import Any

import jax

from .._base.errors import SynkError, checked_integer
from .._runtime.dispatch import JAXLIB
from . import kv_store

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">HBBBI", 0, 0, 4, 0, 0)  # and no settings of ours
_SETTINGS = 4  # the frame with which whoever speaks HTTP/2 answers


def initialize(
    coordinator: str | None, num_processes: Any, process_id: Any, heartbeat: int, shutdown: int, start: int
) -> None:
    """Join the other processes, unless JAX's runtime has been started already; arguments are those of `synk.init`."""
    if kv_store.is_running():
        return
    coordinator = coordinator or os.environ.get("SYNK_COORDINATOR")
    num_processes, process_id = _number("num_processes", num_processes), _number("process_id", process_id)
    _check(coordinator, num_processes, process_id)
    joined = [str(coordinator), str(process_id), str(os.getpid())]
    before = os.environ.get("SYNK_JOINED", "").split()  # by this program, or by one that has started it as a helper
    if before[:2] == joined[:2] and before != joined:
        raise SynkError(
            f"synk.init(distributed=True): process {process_id} has joined already, and this is a helper that it has "
            f'started. Make the call under `if __name__ == "__main__":`, where helpers that import the program do not.'
        )
    if kv_store.is_too_late():
        raise RuntimeError(
            "synk.init(distributed=True): JAX has made its devices already. Call it before any use of JAX."
        )
    # Before jaxlib 0.10 the others take two of their own heartbeats to notice that process 0 is frozen.
    halved = JAXLIB < (0, 10) and process_id
    bind_address: str | None = None
    if coordinator is not None:
        until, host, port = monotonic() + start, *_host_and_port(coordinator)
        # Nobody on the network needs to reach a coordinator on the loopback device.
        is_local = host == "localhost" or host.startswith("127.") or host == "::1"
        if is_local and not os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
            bind_address = coordinator
        _go_past_proxies(host)
        if process_id == 0:
            _check_free(coordinator, host if is_local else "", port)
        else:
            _wait_for_answer(coordinator, host, port, start, until)
    where = coordinator or "the coordinator that the launcher names"
    who = f"process {process_id} of {num_processes}" if coordinator else "this process"
    try:
        with _patience(f"{who} has met the others at {where}", start):
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                initialization_timeout=start + 10,  # at which the runtime ends the process without a word of where
                heartbeat_timeout_seconds=-(-heartbeat // 2) if halved else heartbeat,
                shutdown_timeout_seconds=shutdown,
                coordinator_bind_address=bind_address,
                # Who says who is who is the launcher: one found besides, as inside SLURM's allocation, would name GPUs.
                cluster_detection_method=None if coordinator is None else "deactivate",
            )
    except ValueError as error:
        if coordinator is not None:
            raise
        raise ValueError(
            f"synk.init(distributed=True): no launcher was found ({error}). Give coordinator='host:port', "
            f"num_processes and process_id, or start with `python -m synk launch`."
        ) from error
    os.environ["SYNK_JOINED"] = " ".join(joined)
    if num_processes is not None and process_id is not None:
        _compare_counts(num_processes, process_id)


def _host_and_port(coordinator: str) -> tuple[str, int]:
    match = re.fullmatch(r"\[?([^\[\]/\s]+?)\]?:(\d{1,5})", coordinator)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise ValueError(
            f"synk.init: the coordinator is {coordinator!r} (coordinator=, or SYNK_COORDINATOR); give host:port of "
            f"process 0, e.g. 10.0.0.1:1234."
        )
    return match[1], int(match[2])


def _go_past_proxies(host: str) -> None:
    """The runtime would ask a proxy of the environment for the coordinator."""
    if not any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        return
    before = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")
    os.environ["no_grpc_proxy"] = ",".join(filter(None, [before, host]))


def _check_free(coordinator: str, host: str, port: int) -> None:
    """Can process 0 listen there? The runtime would crash."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what another run has just left may be taken
        try:
            trial.bind((host, port))
        except OSError as error:
            raise OSError(
                f"synk.init: process 0 cannot listen at {coordinator} (coordinator=, or SYNK_COORDINATOR): "
                f"{error.strerror}. Give a port of this machine that nobody uses."
            ) from error


def _wait_for_answer(coordinator: str, host: str, port: int, start: float, until: float) -> None:
    """Wait until process 0 listens, and speaks as the runtime does."""
    why = "nobody listens there"
    while monotonic() < until:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, until - monotonic())) as trial:
                why = "what listens there does not answer"
                trial.sendall(_PREFACE)
                answer = trial.recv(9, socket.MSG_WAITALL)
                if len(answer) == 9 and answer[3] == _SETTINGS:
                    return
                why = "what listens there is no coordinator of JAX's"
        except OSError as error:
            if not isinstance(error, TimeoutError | ConnectionError):
                why = str(error)
        sleep(0.1)
    raise TimeoutError(
        f"synk.init: the coordinator {coordinator} (coordinator=, or SYNK_COORDINATOR) could not be reached in "
        f"{start} s: {why}. Has process 0 started, and is this its address?"
    )


@contextlib.contextmanager
def _patience(what: str, seconds: float) -> Generator[None]:
    """End this process with a message where it takes longer: the runtime, which cannot be interrupted, would abort."""
    is_over = threading.Event()

    def watch() -> None:
        if not is_over.wait(seconds):
            print(
                f"synk.init: {seconds} s have passed before {what}. Have all processes started (SYNK_NUM_PROCESSES), "
                f"each with its own SYNK_PROCESS_ID, and the same SYNK_COORDINATOR?",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _compare_counts(num_processes: int, process_id: int) -> None:
    """Do all processes count as many? Those beyond what process 0 counts would be missing, silently."""
    kv_store.put(f"synk/count/{process_id}", str(num_processes))
    for rank in range(num_processes) if process_id == 0 else (0,):
        count = None
        while count is None:
            count = kv_store.wait(f"synk/count/{rank}", 1.0)
        if int(count) != num_processes:
            raise ValueError(
                f"synk.init: num_processes (or SYNK_NUM_PROCESSES) is {num_processes} in process {process_id}, but "
                f"{count} in process {rank}. Give all the same."
            )


def _number(name: str, value: Any) -> int | None:
    """An argument, or what the environment says of it."""
    if value is not None:
        return checked_integer(value, f"synk.init: {name}")
    variable = f"SYNK_{name.upper()}"
    text = os.environ.get(variable)
    if text is not None and not text.isdigit():
        raise ValueError(f"synk.init: {variable} is {text!r}; set it to an integer >= 0.")
    return None if text is None else int(text)


def _check(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """All are given, or none; and they fit."""
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ValueError(
            f"synk.init: {', '.join(name for name in given if name not in missing)} given without "
            f"{' and '.join(missing)}. Give all three (or SYNK_COORDINATOR, SYNK_NUM_PROCESSES, SYNK_PROCESS_ID), "
            f"or none where a launcher is found."
        )
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(
            f"synk.init: process_id is {process_id}, but num_processes is {num_processes}; the ids are from 0 to "
            f"{num_processes - 1}."
        )
