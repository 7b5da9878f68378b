"""Small: the networks of the benchmarks of training steps, as functions of parameters and rows."""

import jax


def perceptron(params, x):
    """Layers of (weights, bias), with relu between them."""
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ params[-1][0] + params[-1][1]


def lenet(params, x):
    """Two convolutions of (kernel, bias), each averaged over 2 x 2, and a perceptron."""
    for kernel, bias in params[:2]:
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + bias
        x = jax.lax.reduce_window(jax.nn.relu(x), 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    return perceptron(params[2:], x.reshape(len(x), -1))
