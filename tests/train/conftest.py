"""What all tests of training share."""

import jax
import pytest


@pytest.fixture(autouse=True)
def promotion():
    """Optimizers of optax's multiply floats with integers."""
    with jax.numpy_dtype_promotion("standard"):
        yield
