"""A Keras model: trained by synk on four replicas, exactly, then a Keras model again.

    python examples/keras_model.py    # needs the extra `examples`

With the JAX back end, `stateless_call` is the model as a function of its variables: the trainable ones are what
`synk.train.step` trains; the others (running averages of batch norm, the seed of dropout) are its `state`. At the end
both are assigned, and Keras itself evaluates. On scikit-learn's 1,797 digits.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import synk

synk.init(4)  # before Keras asks JAX for its devices

import jax.numpy as jnp
import keras
import numpy as np
import optax
from sklearn.datasets import load_digits

import synk.train

EPOCHS, BATCH, SEED = 15, 64, 0

x, y = load_digits(return_X_y=True)
order = np.random.default_rng(SEED).permutation(len(x))
x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
train, test = slice(0, 1500), slice(1500, None)

keras.utils.set_random_seed(SEED)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((64,)),
        layers.Dense(128),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Dropout(0.2),
        layers.Dense(10),
    ]
)
trainable = [v.value for v in model.trainable_variables]
others = [v.value for v in model.non_trainable_variables]


def loss(trainable, others, x, y):
    # Each part of a batch makes the seed its own, or all would drop out the same units.
    others = [synk.part_key(each) if each.dtype == "uint32" else each for each in others]
    scores, others, *_ = model.stateless_call(trainable, others, x, training=True)
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean(), others


step = synk.train.step(loss, trainable, optax.adamw(2e-3), state=others)


@synk.function(reduce="mean")
def evaluate(x, y):
    scores, *_ = model.stateless_call(step.params.value, step.state.value, x, training=False)
    each = optax.softmax_cross_entropy_with_integer_labels(scores, y)
    return {"loss": each.mean(), "accuracy": jnp.mean(scores.argmax(1) == y)}


batches = synk.minibatches(1500, BATCH, seed=SEED, epochs=EPOCHS)
losses = list(step.iterate(x[train], y[train], batches=batches))
print(f"Loss {losses[0]:.3f}, after {len(batches)} steps {losses[-1]:.3f}")
found = evaluate.over(x[test], y[test], batches=synk.minibatches(len(x[test]), 64))

for variable, value in zip(model.trainable_variables, step.params.value, strict=True):
    variable.assign(value)
for variable, value in zip(model.non_trainable_variables, step.state.value, strict=True):
    variable.assign(value)
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
of_keras = model.evaluate(x[test], y[test], verbose=0)
np.testing.assert_allclose([found["loss"], found["accuracy"]], of_keras, atol=1e-5)
print(f"Test accuracy {100 * float(found['accuracy']):.1f} %, by Keras {100 * of_keras[1]:.1f} %")
