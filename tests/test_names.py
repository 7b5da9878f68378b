"""Names: the modules and names that synk exports, and its words for names that it does not have."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

import synk


def test_train_after_import_synk_alone():
    """`import synk` is enough for `synk.train.step`."""
    code = "import synk; print(synk.train.step.__name__, synk.train.local_steps.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["step", "local_steps"], done.stderr


def test_import_leaves_out_what_most_programs_never_use():
    """Checks, reports, checkpoints and other processes are loaded when they are first used."""
    code = """
import sys, synk, synk.train
rare = ("_check", "_explain", "_skeletons", "_loops.over", "_variables.checkpoint", "_distributed.agreement")
print([name for name in sys.modules if name.startswith(tuple(f"synk.{module}" for module in rare))])
from synk import save, scan
print(save.__module__, scan.__module__, "synk._skeletons.scan" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["[]", "synk synk True"], done.stderr


OLD_NAMES = {
    "updates=": (lambda: synk.function(jnp.sum, updates=[]), TypeError, r"\.value|then"),
    "givens=": (lambda: synk.function(jnp.sum, givens=[]), TypeError, "arguments|broadcast"),
    "bcast_inputs=": (lambda: synk.function(jnp.sum, bcast_inputs=[]), TypeError, "broadcast"),
    "f.build_inputs": (lambda: synk.function(jnp.sum).build_inputs, AttributeError, r"synk\.(data|build_inputs)"),
    "f.as_theano": (lambda: synk.function(jnp.sum).as_theano, AttributeError, "serial"),
    "synk.free_memory": (lambda: synk.free_memory, AttributeError, r"\.free\b|synk\.close"),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names_point_to_new_ones(name):
    """What Synkhronos called otherwise says what it is called here."""
    act, kind, replacement = OLD_NAMES[name]
    with pytest.raises(kind, match=replacement) as raised:
        act()
    assert name.strip("=").split(".")[-1] in str(raised.value) and type(raised.value) is kind


def test_unknown_names_are_unknown():
    """Other names that are not there raise as everywhere."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'updated'"):
        synk.function(jnp.sum, updated=[])
    for owner in (synk, synk.function(jnp.sum)):
        assert not hasattr(owner, "no_such_name")
