"""Constructs along rows, from which tests draw functions for engine="jit"."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH = 4
_RANDOM = np.random.default_rng(11)
SQUARE, TAPS, PLANE = (_RANDOM.normal(size=shape) for shape in ((4, 4), (3, 4, 4), (3, 3, 1, 2)))


def _integers(x):
    return (x * 100).astype(jnp.int32)


def _window(x, kind, size, stride, dilation, padding):
    zero, op = {"sum": (0.0, lax.add), "max": (-np.inf, lax.max), "min": (np.inf, lax.min), "mul": (1.0, lax.mul)}[kind]
    return lax.reduce_window(x, zero, op, (size, 1), (stride, 1), padding, window_dilation=(dilation, 1))


def _convolved(x, stride=1, padding="SAME", lhs=1, rhs=1, kernel=TAPS, groups=1):
    """A convolution along rows, of a kernel that is made of the rows too."""
    kernel = kernel[..., : x.shape[1] // groups, :] * (1 + x.sum() / 1e3)
    return lax.conv_general_dilated(
        x[None, :, : kernel.shape[1] * groups], kernel, (stride,), padding, (lhs,), (rhs,), ("NWC", "WIO", "NWC"),
        feature_group_count=groups,
    )[0]  # fmt: skip


def _kernel_slope(x, stride=1, padding="SAME", lhs=1, rhs=1, groups=1):
    kernel = TAPS[:, : 4 // groups]
    return jax.grad(lambda k: (_convolved(x, stride, padding, lhs, rhs, k, groups) ** 2).sum())(kernel).reshape(-1, 4)


def _plane(x, stride=1, padding="SAME", lhs=1, rhs=1, kernel=PLANE):
    """A convolution over rows and columns."""
    return lax.conv_general_dilated(
        x[None, :, :, None], kernel, (stride, 1), padding, (lhs, 1), (rhs, 1), ("NHWC", "HWIO", "NHWC")
    )[0].reshape(-1, 2)


def _scanned(x, **options):
    return lax.scan(lambda c, row: (0.5 * c + row, c * row), jnp.zeros(x.shape[1]), x, **options)[1]


def _while(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.cumsum(c[1], 0) / 2), (0, x))[1]


def _roll_while(x):
    return lax.fori_loop(0, len(x), lambda i, c: jnp.roll(c, 1, 0) + 0.1 * c[i], x)


def _spd(x):
    return x @ x.T / x.shape[1] + len(x) * jnp.eye(len(x))


@jax.custom_vjp
def _with_rule(x):
    return jnp.cumsum(x, 0)


_with_rule.defvjp(lambda x: (_with_rule(x), x), lambda x, g: (lax.cummax(x, 0) * g[::-1],))


@jax.custom_jvp
def _with_jvp(x):
    return lax.cummin(x, 0)


_with_jvp.defjvp(lambda x, t: (_with_jvp(x[0]), jnp.cumsum(t[0], 0)))


def _pick(x):
    return jnp.arange(2 * len(x)) * 7 % len(x)


CONSTRUCTS = {
    # Each row for itself.
    "sin": jnp.sin, "product": lambda x: x @ SQUARE[: x.shape[1]], "softmax": lambda x: jax.nn.softmax(x, 1),
    "where": lambda x: jnp.where(x > x.mean(), x, -x), "row sort": lambda x: jnp.sort(x, 1),
    "row sums": lambda x: jnp.cumsum(x, 1), "column strides": lambda x: x[:, ::-1][:, ::2],
    "column pads": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-1, 2, 1))), "vmap": jax.vmap(lambda r: jnp.cumsum(r) / 2),
    # Reductions over rows, beside the rows.
    "centred": lambda x: x - x.mean(0), "normed": lambda x: x / (1 + x.std(0)),
    "max": lambda x: x + x.max(0), "min": lambda x: x * x.min(0), "prod": lambda x: x + x.prod(0),
    "argmax": lambda x: x + x.argmax(0), "argmin": lambda x: x - jnp.nanargmin(x, 0),
    "any": lambda x: x + (x > 1).any(0), "all": lambda x: x + (x > -1).all(0),
    "xor": lambda x: x + jnp.bitwise_xor.reduce(_integers(x), 0), "ptp": lambda x: x + jnp.ptp(x, 0),
    "and": lambda x: x + lax.reduce_and(_integers(x), (0,)), "or": lambda x: x + lax.reduce_or(_integers(x), (0,)),
    "xor of booleans": lambda x: x + lax.reduce_xor(x > 0, (0,)), "parity": lambda x: x + jnp.bitwise_xor.reduce(_integers(x), None),
    "generic": lambda x: x + lax.reduce(x, 1.0, lambda a, b: a * b + a + b - 1, (0,)),
    "pairs": lambda x: x + lax.reduce((x, x), (0.0, -1.0), lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (0,))[1],
    "median": lambda x: x - jnp.median(x, 0), "quantile": lambda x: x - jnp.quantile(x, 0.3, axis=0),
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, 0), "norm": lambda x: x / (1 + jnp.linalg.norm(x, axis=0)),
    "cov": lambda x: x @ (x.T @ x), "nonzero": lambda x: x + jnp.count_nonzero(x > 0, 0),
    # Cumulative ops.
    "cumsum": lambda x: jnp.cumsum(x, 0), "cumprod": lambda x: jnp.cumprod(x, 0),
    "cummax": lambda x: lax.cummax(x, 0), "cummin": lambda x: lax.cummin(x, 0),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 0), "back": lambda x: lax.cumsum(x, 0, reverse=True),
    "two": lambda x: jnp.cumsum(x, 0) + lax.cummax(x, 0), "back max": lambda x: lax.cummax(x, 0, reverse=True),
    "associative": lambda x: lax.associative_scan(jnp.add, x), "flat": lambda x: jnp.cumsum(x).reshape(x.shape),
    "associative pairs": lambda x: lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x), reverse=True)[1],
    "diff": lambda x: jnp.diff(x, axis=0), "diff2": lambda x: jnp.diff(x, 2, axis=0, prepend=x[:1]),
    # Slices, pads and turns.
    **{f"x[{a}::{s}]": lambda x, a=a, s=s: x[a::s] for a, s in product((0, 1, 2), (1, 2, 3, 5))},
    "x[:-1]": lambda x: x[:-1], "x[::-1]": lambda x: x[::-1], "x[::-2]": lambda x: x[::-2], "last": lambda x: x[-1:],
    **{
        f"pad {c}": lambda x, c=c: lax.pad(x, 0.5, (c, (0, 0, 0)))
        for c in ((2, 1, 0), (-1, 0, 0), (0, -1, 0), (-1, 2, 1), (1, -1, 2), (0, 0, 2), (-1, -1, 0), (3, -1, 0))
    },
    "reflect": lambda x: jnp.pad(x, ((1, 2), (0, 0)), "reflect"), "wrap": lambda x: jnp.pad(x, ((2, 1), (0, 0)), "wrap"),
    "edge": lambda x: jnp.pad(x, ((1, 1), (0, 0)), "edge"), "roll": lambda x: jnp.roll(x, 2, 0),
    "roll back": lambda x: jnp.roll(x, -1, 0), "flip": lambda x: jnp.flip(x), "concatenate": lambda x: jnp.concatenate([x, 2 * x[:1], x]),
    "stack": lambda x: jnp.stack([x, x + 1], 1).reshape(-1, x.shape[1]), "repeat": lambda x: jnp.repeat(x, 2, 0),
    "tile": lambda x: jnp.tile(x, (3, 1)), "transpose": lambda x: x.T.reshape(x.shape), "flat half": lambda x: x.reshape(-1)[::2].reshape(-1, 1),
    "split": lambda x: sum(map(jnp.sum, jnp.array_split(x, 3))) + x, "shifts": lambda x: x[1:] - x[:-1],
    "tril": lambda x: jnp.tril(x @ x.T) @ x, "diagonal": lambda x: x + jnp.diagonal(x @ x.T)[:, None],
    # Windows.
    **{
        f"{kind} window {args}": lambda x, kind=kind, args=args: _window(x, kind, *args)
        for kind, args in zip(
            ("sum", "max", "min", "mul", "sum", "max", "min", "sum"),
            ((3, 1, 1, "SAME"), (3, 1, 1, "SAME"), (2, 2, 1, "VALID"), (2, 1, 2, "SAME"), (2, 3, 1, "SAME"),
             (2, 2, 1, "SAME"), (3, 1, 2, ((2, 2), (0, 0))), (2, 1, 1, ((1, 0), (0, 0)))), strict=True,
        )
    },
    "two windows": lambda x: _window(x, "sum", 3, 1, 1, "SAME") * _window(x, "max", 3, 1, 1, "SAME"),
    "average": lambda x: _window(x, "sum", 2, 2, 1, "SAME") / _window(jnp.ones_like(x), "sum", 2, 2, 1, "SAME"),
    # Convolutions.
    "conv": _convolved, "conv stride": lambda x: _convolved(x, 2), "conv valid": lambda x: _convolved(x, 1, ((2, 0),)),
    "conv dilated": lambda x: _convolved(x, 1, "SAME", 1, 2), "conv up": lambda x: _convolved(x, 1, ((1, 2),), 2),
    "conv groups": lambda x: _convolved(x, 2, kernel=TAPS[:, :2], groups=2) if x.shape[1] == 4 else x,
    "conv 3": lambda x: _convolved(x, 3, ((0, 2),)), "plane": _plane, "plane stride": lambda x: _plane(x, 2),
    "plane dilated": lambda x: _plane(x, 1, "SAME", 1, 2), "plane up": lambda x: _plane(x, 1, ((2, 1), (1, 1)), 2),
    "slope": lambda x: _kernel_slope(x @ SQUARE[: x.shape[1]]), "slope stride": lambda x: _kernel_slope(x @ SQUARE[: x.shape[1]], 2),
    "slope 3": lambda x: _kernel_slope(x @ SQUARE[: x.shape[1]], 3, ((0, 2),)),
    "slope dilated": lambda x: _kernel_slope(x @ SQUARE[: x.shape[1]], 1, "SAME", 1, 2),
    "slope up": lambda x: _kernel_slope(x @ SQUARE[: x.shape[1]], 1, ((1, 2),), 2),
    "slope groups": lambda x: _kernel_slope(x @ SQUARE[: x.shape[1]], 2, "SAME", 1, 1, 2),
    "jnp.convolve": lambda x: jax.vmap(lambda c: jnp.convolve(c, jnp.array([1.0, -2, 0.5]), "same"), 1, 1)(x)[: len(x)],
    "correlate": lambda x: jnp.correlate(x[:, 0], x[:, -1], "full")[:, None],
    # Order.
    "sort": lambda x: jnp.sort(x, 0), "argsort": lambda x: x[jnp.argsort(x[:, 0])], "rank": lambda x: x + jnp.argsort(jnp.argsort(x, 0), 0),
    "lexsort": lambda x: x[jnp.lexsort((x[:, -1], x[:, 0] > 0))], "top_k": lambda x: lax.top_k(x.T, min(3, len(x)))[0].T,
    "sort pairs": lambda x: lax.sort((x, x * 2), dimension=0, num_keys=1)[1], "unique": lambda x: x + jnp.unique(_integers(x), size=5)[-1],
    "searchsorted": lambda x: x + jnp.searchsorted(jnp.sort(x[:, 0]), x), "digitize": lambda x: x + jnp.digitize(x, jnp.array([-1.0, 0, 1])),
    "interp": lambda x: jnp.interp(x, jnp.sort(x[:, 0]), x[:, -1]), "histogram": lambda x: x + jnp.histogram(x, 4, (-2, 2))[0].sum(),
    "bincount": lambda x: x + jnp.bincount(_integers(x[:, 0]) % 5, length=5)[_integers(x) % 5],
    # Picks.
    "gather": lambda x: x[_pick(x)], "take": lambda x: jnp.take(x, jnp.array([0, 0, 3]), axis=0, mode="wrap"),
    "take_along": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 0), 0), "one row": lambda x: x + x[len(x) // 2],
    "dynamic": lambda x: lax.dynamic_slice_in_dim(x, (x[0, 0] > 0).astype(int), max(1, len(x) - 1), 0),
    "dynamic update": lambda x: lax.dynamic_update_slice_in_dim(x, 2 * x[:1], len(x) // 2, 0),
    "scatter": lambda x: x.at[_pick(x)].set(0.5), "scatter add": lambda x: x.at[_pick(x)].add(x[_pick(x)] / 2),
    "scatter mul": lambda x: x.at[_pick(x)].multiply(1.5), "scatter max": lambda x: x.at[_pick(x)].max(x[0]),
    "scatter min": lambda x: x.at[_pick(x)].min(x[::-1][_pick(x)]), "apply": lambda x: x.at[_pick(x)].apply(jnp.sin),
    "segments": lambda x: jax.ops.segment_sum(x, jnp.arange(len(x)) // 2, 5), "segment max": lambda x: jnp.maximum(jax.ops.segment_max(x, _integers(x[:, 0]) % 3, 3), -9),
    "strided set": lambda x: x.at[1::2].set(0.25), "strided add": lambda x: x.at[::3].add(x[::3]),
    "one_hot": lambda x: jax.nn.one_hot(_integers(x[:, 0]) % 4, 4, dtype=x.dtype) + x[:, :1], "compress": lambda x: x[jnp.nonzero(x[:, 0] > 0, size=3)[0]],
    # Loops and branches.
    "scan": _scanned, "scan back": lambda x: _scanned(x, reverse=True), "scan 2": lambda x: _scanned(x, unroll=2),
    "while": _while, "fori": _roll_while, "map": lambda x: lax.map(lambda r: jnp.cumsum(r) + r.max(), x),
    "cond": lambda x: lax.cond(x.sum() > 0, lambda x: jnp.cumsum(x, 0), lambda x: lax.cummax(x, 0), x),
    "checkpoint": lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.cumsum(x, 0)))(x), "jit": lambda x: jax.jit(lambda x: lax.cummin(x, 0) + jnp.cumsum(x, 0))(x),
    "custom_vjp": _with_rule, "custom_jvp": _with_jvp,
    # Algebra.
    "fft": lambda x: jnp.fft.fft(x, axis=0).real, "rfft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x, axis=0), len(x), axis=0),
    "einsum": lambda x: jnp.einsum("id,jd,je->ie", x, x, x), "outer": lambda x: jnp.outer(x[:, 0], x[:, -1]) @ x,
    "distances": lambda x: ((x[:, None] - x[None]) ** 2).sum(-1) @ x, "softmax pairs": lambda x: jax.nn.softmax(x @ x.T, 1) @ x,
    "cholesky": lambda x: jnp.linalg.cholesky(_spd(x)) @ x, "solve": lambda x: jnp.linalg.solve(_spd(x), x),
    "inv": lambda x: jnp.linalg.inv(_spd(x)) @ x, "triangular": lambda x: lax.linalg.triangular_solve(_spd(x), x, left_side=True, lower=True),
    "eigvalsh": lambda x: x + jnp.linalg.eigvalsh(_spd(x))[:, None], "qr": lambda x: x + jnp.abs(jnp.linalg.qr(_spd(x))[1]).sum(0)[:, None],
    "slogdet": lambda x: x + jnp.linalg.slogdet(_spd(x))[1], "batched": lambda x: jnp.linalg.solve(jax.vmap(jnp.diag)(2 + jnp.abs(x)), x[..., None])[..., 0],
    "kron": lambda x: jnp.kron(x, jnp.ones((2, 1))), "noise": lambda x: x + jax.random.normal(jax.random.key(0), x.shape, x.dtype),
    "shuffle": lambda x: jax.random.permutation(jax.random.key(1), x), "keys": lambda x: x + jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(2), len(x))[::-1])[:, None],
    "keys strided": lambda x: x[::2] + jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(2), len(x))[::2])[:, None],
    "trapezoid": lambda x: x + jnp.trapezoid(x, axis=0), "gradient": lambda x: jnp.gradient(x, axis=0) if len(x) > 1 else x,
    "polyfit": lambda x: x + jnp.vander(x[:, 0], 3).sum(0)[0], "bits": lambda x: x + jnp.packbits(x > 0, axis=0)[0],
    "resize": lambda x: jax.image.resize(x, (5, x.shape[1]), "linear"), "ema": lambda x: lax.associative_scan(lambda a, b: 0.5 * a + b, x),
}  # fmt: skip


# JAX has no gradients of these.
_FORWARD = {"apply", "while", "mul window (2, 1, 2, 'SAME')", "min window (3, 1, 2, ((2, 2), (0, 0)))"}


def draw(seed):
    """Draw the names of constructs, whether to take the value or a gradient, the number of devices, and of rows."""
    random = np.random.default_rng([52, seed])
    names = tuple(random.choice(list(CONSTRUCTS), int(random.integers(2, 4))).tolist())
    kind = ("value", "slope inside", "slope around")[random.choice(3, p=(0.6, 0.25, 0.15))]
    kind = "value" if _FORWARD & {*names} else kind
    return names, kind, int(random.choice([3, 8])), int(random.integers(1, 18))


def function_of(names):
    """Compose constructs; one that would leave no rows is left out."""

    def fn(x):
        for name in names:
            shape = jax.eval_shape(CONSTRUCTS[name], x).shape
            if min(shape) > 0:
                x = CONSTRUCTS[name](x)
                # So that products of many do not grow.
                x = jnp.tanh(x)
        return x

    return fn
