"""`python -m synk info` says what there is."""

import os
import subprocess
import sys

import jax

import synk


def info(**environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-m", "synk", "info"], capture_output=True, text=True, env=env | environment, check=True
    )
    return done.stdout


def test_what_there_is():
    """Versions, devices and settings; what may be wrong, with the remedy."""
    text = info(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="3", XLA_FLAGS="--xla_force_host_platform_device_count=3")
    assert f"synk {synk.__version__}, Python 3." in text
    assert f"jax {jax.__version__}" in text
    assert "devices: 3 cpu" in text
    assert "memory of a device that JAX uses: unknown" in text
    assert "JAX_NUM_CPU_DEVICES=3" in text
    assert "both say how many CPU devices there are" in text
    assert "one CPU device is one replica" in info(JAX_PLATFORMS="cpu")
