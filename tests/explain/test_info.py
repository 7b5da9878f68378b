"""`synk.info()` and `python -m synk info` say what there is."""

from importlib.metadata import distributions
from types import SimpleNamespace

import jax
import pytest

import synk

from .. import harness


def printed(**environment):
    return harness.python("-m", "synk", "info", **{"XLA_FLAGS": ""} | environment).stdout


def test_what_there_is():
    """Versions, devices and settings; what may be wrong, with the remedy."""
    text = printed(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="3", XLA_FLAGS="--xla_force_host_platform_device_count=3")
    # Where a clone is on Python's path and not installed, there is no metadata.
    is_installed = any(package.name == "synk-jax" for package in distributions())
    assert f"synk: {synk.__version__ if is_installed else 'unknown'}, Python 3." in text
    assert f"jax {jax.__version__}" in text
    assert "devices: 3 cpu" in text
    assert "memory of a device that JAX uses: unknown" in text
    assert "JAX_NUM_CPU_DEVICES=3" in text
    assert "both say how many CPU devices there are" in text
    assert text.endswith("what to do next: synk.init() makes 3 replicas, one on each device.\n")
    assert "what to do next: synk.init(4) makes four virtual CPU devices" in printed(JAX_PLATFORMS="cpu")


def test_where_jax_does_not_start():
    """All but the devices is said, and why there are none."""
    text = printed(JAX_PLATFORMS="nonsense")
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
    assert synk.info().endswith(f"  - JAX does not start with these settings: {said}")


def test_a_cell_shows_it(group):
    """As it is printed, with the current group."""
    assert repr(synk.info()) == str(synk.info())
    assert f"current group: {group}\n" in synk.info()


@pytest.mark.parametrize(("capability", "says"), [("7.5", True), ("8.0", False), (None, False)])
def test_bfloat16_on_old_gpus(monkeypatch, capability, says):
    """A GPU that computes it slowly is named, with what is faster."""
    stats = {"bytes_limit": 12_000_000_000, "bytes_in_use": 3_000_000}
    device = SimpleNamespace(platform="gpu", device_kind="Tesla T4", memory_stats=lambda: stats)
    if capability is not None:
        device.compute_capability = capability
    monkeypatch.setattr(jax, "devices", lambda: [device, device])
    said = synk.info()
    assert ("Tesla T4 has no units for bfloat16: float32, or float16" in said) == says
    assert "devices: 2 Tesla T4 (gpu)" in said and "in use of it: 3 MB" in said
    assert said.endswith("synk.init() makes 2 replicas, one on each device.")
