"""A short last batch: Keras on JAX with DataParallel raises where its rows do not divide.

    python examples/compare/keras_last_batch.py    # needs keras

Prints the mean squared error of ten rows in batches of four by NumPy, by Keras on one device and on four, and by synk.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import synk

synk.init(4)  # before Keras asks JAX for its devices

import keras  # type: ignore[import-not-found]  # where it is installed
import numpy as np

x = np.arange(10, dtype=np.float32)[:, None]
y = x**2
print(f"NumPy: {np.mean((x - y) ** 2):.3f}")


def evaluate():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(loss="mse")
    return model.evaluate(x, y, batch_size=4, verbose=0)


print(f"keras {keras.__version__}, one device: {evaluate():.3f}")
keras.distribution.set_distribution(keras.distribution.DataParallel())
try:
    said = f"{evaluate():.3f}"
except Exception as error:
    said = f"raises {type(error).__name__}"
print(f"keras {keras.__version__}, four devices: {said}")

error = synk.function(lambda x, y: ((x - y) ** 2).mean(), reduce="mean")
found = float(error.over(x, y, batches=synk.minibatches(10, 4)))
print(f"synk, four devices: {found:.3f}")
assert np.isclose(found, np.mean((x - y) ** 2)) and said.startswith("raises")
