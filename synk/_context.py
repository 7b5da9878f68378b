"""Context: what a user asks of JAX around a call, and how synk's own programs keep clear of it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.core
import jax.extend
import numpy as np
from jax.sharding import Mesh, get_abstract_mesh

# Public since JAX 0.10 in jax.extend.core, and before that in jax.core.
trace_state = getattr(jax.extend.core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
EAGER = trace_state()
_NO_MESH = Mesh(np.empty((), object), ())
_config: Any = jax.config


def is_traced() -> bool:
    """Is a transformation of JAX's own under way around this line?"""
    return not trace_state() == EAGER  # there is no != of its own, so that would take another call


def has_wishes() -> bool:
    """Has the user set a mesh for all programs, or asked for no compiled ones?"""
    return _config.jax_disable_jit or not get_abstract_mesh().empty


def is_disturbed() -> bool:
    """The same, of programs of synk's own, which are no part of a transformation."""
    return has_wishes() and not is_traced()


@contextmanager
def undisturbed() -> Generator[None]:
    """Neither holds inside."""
    with ExitStack() as stack:
        if _config.jax_disable_jit:
            stack.enter_context(jax.disable_jit(False))
        if not get_abstract_mesh().empty:
            stack.enter_context(jax.set_mesh(_NO_MESH))
        yield
