"""The skeletons of Cluster-SkePU as synk functions, each against NumPy or SciPy: prints `11 of 11 right`.

Map, Reduce, MapReduce, Scan, MapOverlap, MapPairsReduce and Generate, over rows that do not divide by 4 replicas: dot
product, prefix sum, Taylor series of ln 2, Mandelbrot, median and Gaussian filter, heat diffusion, a cellular
automaton, n-body, conjugate gradients, and Monte Carlo with one random key a row.

    python examples/ports/skepu_skeletons.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import ndimage, sparse
from scipy.sparse.linalg import spsolve

import synk

ROWS, STEPS, TERMS, BODIES, POINTS = 203, 50, 100_000, 301, 400_001
rng = np.random.default_rng(0)
right: list[str] = []


def note(name, found, wanted, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=rtol, atol=atol, err_msg=name)
    right.append(name)
    print(f"{name:20} {np.asarray(found).ravel()[0]:.6g}")


def neighbours(width, edge):  # rows stay where they are made: the next step exchanges those at the seams alone
    return lambda fn: synk.function(fn, inputs=[synk.Overlap(width, edge=edge)], reduce="scatter")


def sides(x, width, mode):  # columns are a block's own business
    return jnp.pad(x, ((0, 0), (width, width)), mode=mode)


dot = synk.function(lambda x, y: jnp.vdot(x, y))  # MapReduce
taylor = synk.function(lambda k: ((-1.0) ** (k + 1) / k).sum())  # Generate, MapReduce


@synk.function(reduce="concat")  # Map
def mandelbrot(c):
    def turn(_, state):
        z, count = state
        z = jnp.where(jnp.abs(z) <= 2, z * z + c, z)
        return z, count + (jnp.abs(z) <= 2)

    return jax.lax.fori_loop(0, STEPS, turn, (jnp.zeros_like(c), jnp.zeros(c.shape, int)))[1]


@neighbours(2, "nearest")  # MapOverlap, as all down to life
def median(x):
    x = sides(x, 2, "edge")
    rows, columns = x.shape[0] - 4, x.shape[1] - 4
    return jnp.median(jnp.stack([x[i : i + rows, j : j + columns] for i in range(5) for j in range(5)]), 0)


@neighbours(3, "nearest")
def gaussian(x):
    kernel = jnp.exp(-(jnp.arange(-3.0, 4.0) ** 2) / 4)
    blur = jax.vmap(lambda line: jnp.convolve(line, kernel / kernel.sum(), "valid"))
    return blur(blur(sides(x, 3, "edge")).T).T


@neighbours(1, "fill")
def heat(x):
    x = sides(x, 1, "constant")
    return x[1:-1, 1:-1] + 0.2 * (x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2] - 4 * x[1:-1, 1:-1])


@neighbours(1, "cyclic")
def life(x):
    wide, rows = sides(x, 1, "wrap"), x.shape[0] - 2
    around = sum(wide[i : i + rows, j : j + x.shape[1]] for i in range(3) for j in range(3))
    return ((around == 3) | ((x[1:-1] == 1) & (around == 4))).astype(int)


def pull(body, other):
    apart = other["x"] - body["x"]
    return other["mass"] * apart / (jnp.sum(apart**2) + 1e-2) ** 1.5


@synk.function(inputs=["keys"], reduce="mean")  # Map with Random, Reduce
def quarter(keys):
    points = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    return jnp.mean(4.0 * ((points**2).sum(1) < 1))


def conjugate_gradients(b, steps):
    """Of the equation of heat at rest: each step a stencil of rows that stay, and two dot products."""
    laplacian = synk.function(lambda p: 4 * p[1:-1] - p[2:] - p[:-2], [synk.Overlap(1, edge="fill")], reduce="scatter")
    update = synk.function(lambda a, x, y: y + a * x, ["x", "y"], reduce="scatter")
    x, r = (synk.data(rows, place="scatter") for rows in (np.zeros_like(b), b))
    p, size = r, dot(r, r)
    for _ in range(steps):
        q = laplacian(p)
        alpha = size / dot(p, q)
        x, r = update(alpha, p, x), update(-alpha, q, r)
        new = dot(r, r)
        p, size = update(new / size, p, r), new
    return x


def by_numpy_mandelbrot(c):
    z, count = np.zeros_like(c), np.zeros(c.shape, int)
    for _ in range(STEPS):
        z = np.where(np.abs(z) <= 2, z * z + c, z)
        count += np.abs(z) <= 2
    return count


def by_numpy_life(x):
    around = sum(np.roll(x, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1))
    return ((around == 3) | ((x == 1) & (around == 4))).astype(int)


def times(step, x, count=STEPS):
    for _ in range(count):
        x = step(x)
    return x


if __name__ == "__main__":
    synk.init(4)
    x, y = rng.normal(size=(2, ROWS)).astype(np.float32)
    note("dot product", dot(x, y), np.dot(x, y), atol=1e-4)
    note("prefix sum", synk.contrib.scan(jnp.add, x), np.cumsum(x))
    note("Taylor, ln 2", taylor(np.arange(1, TERMS + 1, dtype=np.float32)), np.log(2))
    plane = (np.linspace(-2, 1, 160)[None] + 1j * np.linspace(-1, 1, ROWS)[:, None]).astype(np.complex64)
    wanted = by_numpy_mandelbrot(plane)
    note("Mandelbrot, equal", np.mean(np.asarray(mandelbrot(plane)) == wanted), 1, atol=1e-3)  # at its edge bits count
    image = rng.normal(size=(ROWS, 160)).astype(np.float32)
    note("median filter", median(image), ndimage.median_filter(image, 5, mode="nearest"))
    note("Gaussian filter", gaussian(image), ndimage.gaussian_filter(image, 2**0.5, mode="nearest", radius=3))
    plate = np.abs(image)
    cold = lambda x: x + 0.2 * ndimage.laplace(x, mode="constant")  # noqa: E731
    note("heat diffusion", times(heat, plate), times(cold, plate.astype(float)))
    cells = (rng.random((ROWS, 64)) < 0.3).astype(int)
    note("cellular automaton", times(life, cells), times(by_numpy_life, cells), 0, 0)
    bodies = {
        "x": rng.normal(size=(BODIES, 3)).astype(np.float32),
        "mass": rng.uniform(1, 2, BODIES).astype(np.float32),
    }
    apart = bodies["x"][None].astype(float) - bodies["x"][:, None]
    near = ((apart**2).sum(-1) + 1e-2)[..., None] ** 1.5
    forces = (bodies["mass"][None, :, None] * apart / near).sum(1)
    note("n-body", synk.contrib.pairs(pull, bodies), forces, atol=1e-5 * np.abs(forces).max())
    rest = sparse.diags_array([-1.0, 4, -1], offsets=[-1, 0, 1], shape=(ROWS, ROWS)).tocsc()
    note("conjugate gradients", conjugate_gradients(x, STEPS // 2), spsolve(rest, x))
    keys = synk.row_keys(jax.random.key(0), POINTS)
    note("Monte Carlo, pi", quarter(keys), quarter.serial(keys))
    print(f"{len(right)} of 11 right; pi is about {quarter(keys):.3f}")
    assert len(right) == 11
