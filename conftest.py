"""Eight virtual CPU devices for every test and docstring; with JAX_PLATFORMS=cuda, what GPUs there are."""

import os

import jax

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
