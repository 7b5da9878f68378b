"""What all tests of contrib share."""

import jax
import pytest


@pytest.fixture(autouse=True)
def promotion():
    """Optimizers of optax's multiply floats with integers, and biases are added to rows."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
