"""`python -m synk info` says what there is."""

from importlib.metadata import distributions

import jax
import pytest

import synk
from synk._explain.info import report

from .. import harness


def info(**environment):
    return harness.python("-m", "synk", "info", **{"XLA_FLAGS": ""} | environment).stdout


def test_what_there_is():
    """Versions, devices and settings; what may be wrong, with the remedy."""
    text = info(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="3", XLA_FLAGS="--xla_force_host_platform_device_count=3")
    # Where a clone is on Python's path and not installed, there is no metadata.
    is_installed = any(package.name == "synk-jax" for package in distributions())
    assert f"synk: {synk.__version__ if is_installed else 'unknown'}, Python 3." in text
    assert f"jax {jax.__version__}" in text
    assert "devices: 3 cpu" in text
    assert "memory of a device that JAX uses: unknown" in text
    assert "JAX_NUM_CPU_DEVICES=3" in text
    assert "both say how many CPU devices there are" in text
    assert "one CPU device is one replica" in info(JAX_PLATFORMS="cpu")


def test_where_jax_does_not_start():
    """All but the devices is said, and why there are none."""
    text = info(JAX_PLATFORMS="nonsense")
    assert f"jax {jax.__version__}" in text
    assert "devices: none, " in text
    assert "settings: JAX_PLATFORMS=nonsense" in text
    assert "  - JAX does not start with these settings: Unable to initialize backend 'nonsense'" in text


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no GPU\nand more lines")], ids=repr)
def test_the_first_line_of_an_error(monkeypatch, error):
    """Or its kind, where JAX says no more."""

    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    said = str(error).split("\n")[0] or "AssertionError"
    assert report().endswith(f"  - JAX does not start with these settings: {said}")
