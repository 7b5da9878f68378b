"""Which argument is scattered, broadcast or a constant, whatever is wrapped around the function."""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import sparse

import synk

from ..helpers import group_of, slow, slow_but

DATA = np.arange(4, dtype=np.float32)
X = np.arange(4, dtype=np.float32) / 4


def of_row(x, data):
    """A row, and what is the same for all rows."""
    return x + data.sum()


def of_rows(x, data, scale=1.0):
    return (x + data.sum()) * scale


def passed_on(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


class Model:
    def __init__(self, data):
        self.method = functools.partial(self.of_rows, data=data)

    def of_rows(self, x, data):
        return x + data.sum()

    def __call__(self, x, scale=2.0):
        return x * scale


row, rows = functools.partial(of_row, data=DATA), functools.partial(of_rows, data=DATA)
WAYS = {
    "partial": rows,
    "partial of partial": functools.partial(rows, scale=2.0),
    "by position": functools.partial(lambda data, x: x + data.sum(), DATA),
    "vmap": jax.vmap(row),
    "jit": jax.jit(rows),
    "jit of vmap": jax.jit(jax.vmap(row)),
    "vmap of jit": jax.vmap(jax.jit(row)),
    "checkpoint": jax.checkpoint(rows),
    "wraps": passed_on(rows),
    "wraps of vmap": passed_on(jax.vmap(row)),
    "vmap of wraps": jax.vmap(passed_on(row)),
    "partial of jit": functools.partial(jax.jit(of_rows), data=DATA),
    "partial of wraps": functools.partial(passed_on(of_rows), data=DATA),
    "jit of partial of jit": jax.jit(functools.partial(jax.jit(of_rows), data=DATA, scale=3.0)),
    "method": Model(DATA).method,
    "jit of a method": jax.jit(Model(DATA).method),
    "object": Model(DATA),
    "filter_jit": eqx.filter_jit(rows),
    "filter_vmap": eqx.filter_vmap(row),
    "nnx.jit": nnx.jit(rows),
    "named_call": jax.named_call(rows, name="rows"),
}
# Of each library, and of each kind of JAX's.
QUICK = (
    "partial",
    "by position",
    "vmap",
    "jit",
    "vmap of wraps",
    "partial of jit",
    "method",
    "object",
    "filter_jit",
    "nnx.jit",
)


@pytest.mark.parametrize("way", slow_but(QUICK, WAYS))
def test_what_a_partial_has_bound_is_a_constant(way):
    """As many numbers as rows, or not; called, serially, in slices and under jit."""
    fn = WAYS[way]
    with group_of("devices", 2):
        f = synk.function(fn, reduce="concat")
        for x in (X, X[:3], X):
            wanted = fn(x)
            for got in (f(x), f.serial(x), f(x, num_slices=2), jax.jit(f)(x)):
                np.testing.assert_allclose(got, wanted)
        f.check(X)


def test_defaults_behind_a_wrapper_are_as_the_wrapper_has_them():
    """jax.vmap does not map a default; one of jax.jit is dealt out as that of the function itself."""

    def of_row(x, data=DATA):
        return x + data.sum()

    def of_rows(x, y=DATA):
        return x * y

    with group_of("devices", 2):
        f = synk.function(jax.vmap(of_row), reduce="concat")
        np.testing.assert_allclose(f(X), X + 6)
        f.check(X)
        for fn in (of_rows, jax.jit(of_rows)):
            f = synk.function(fn, reduce="concat")
            np.testing.assert_allclose(f(X), X * DATA)
            f.check(X)


def test_parameters_named_like_options_come_by_position():
    """The keyword is the option's; items of a loader name parameters."""
    with group_of("devices", 2):

        @synk.function(inputs=["batch"], reduce="concat")
        def train_step(state, batch, rtol=2.0):
            return batch["x"] * state * rtol

        batch = {"x": X}
        np.testing.assert_allclose(train_step(1.0, batch), X * 2)
        np.testing.assert_allclose(train_step(1.0, batch, batch=[3, 0, 1]), X[[3, 0, 1]] * 2)
        train_step.check(1.0, batch, batch=3)
        np.testing.assert_allclose(train_step.serial(1.0, batch, 3.0, batch=slice(1, 4)), X[1:] * 3)
        items = [{"state": 2.0, "batch": batch}, {"state": 1.0, "batch": {"x": X[:3]}}]
        for got, wanted in zip(train_step.stream(items), (X * 4, X[:3] * 2), strict=True):
            np.testing.assert_allclose(got, wanted)
        with pytest.raises(
            TypeError, match=r"missing a required argument: 'batch'.* batch comes by position; batch= is"
        ):
            train_step(1.0, batch=batch)
        with pytest.raises(TypeError, match="num_slices is an option of other ways"):
            train_step.serial(1.0, batch, num_slices=2)
        only = synk.function(lambda batch, /: jnp.sum(batch))
        assert float(only(X)) == X.sum()
        with pytest.raises(ValueError, match="'batch' comes by keyword alone"):
            synk.function(lambda x, *, batch: x)


EIGHT = np.arange(8, dtype=np.float32)


def test_masked_arrays_are_refused(four):
    """Their mask would be lost in silence."""
    masked = np.ma.masked_array(EIGHT, EIGHT > 3)
    with pytest.raises(TypeError, match="argument a is a masked array"):
        synk.function(lambda a: a.sum())(masked)
    with pytest.raises(TypeError, match="masked array"):
        synk.shared(masked)


def test_array_defaults_are_dealt_out(four):
    """A scattered parameter's default is scattered."""
    f = synk.function(lambda x, w=EIGHT: (x * w).sum())
    assert float(f(EIGHT)) == float(f.serial(EIGHT)) == float((EIGHT * EIGHT).sum())


def test_integers_that_jax_does_not_have(four):
    """In lists and first values as in numbers; with 64 bits it has them."""
    total = synk.function(jnp.sum)
    for make in (
        lambda: total([2**31, 1]),
        lambda: total([[1, 2], [3, -(2**40)]]),
        lambda: synk.shared(2**40),
        lambda: synk.shared({"a": 1, "b": 2**63}),
        lambda: total(synk.data([2**40, 1])),
    ):
        with pytest.raises(ValueError, match=r"Python int.*\. Give smaller .* or set jax_enable_x64"):
            make()
    with jax.enable_x64(True):
        assert int(total([2**31, 1])) == 2**31 + 1
        assert int(synk.shared(2**40).value) == 2**40
    assert int(total([2**31 - 1, -5])) == 2**31 - 6


def test_wrappers_with_parameters_of_their_own(four):
    """`functools.wraps` names the wrapped function; what is called is the wrapper, unless it takes whatever it gets."""

    def of_two(x, scale):
        return jnp.sum(x) * scale

    @functools.wraps(of_two)
    def doubled(x):
        return of_two(x, 2.0)

    @functools.wraps(doubled)
    def scaled(x, by):
        return doubled(x) * by

    @functools.wraps(of_two)
    def logged(*args, **kwargs):
        return of_two(*args, **kwargs)

    assert float(synk.function(doubled)(EIGHT)) == 2 * EIGHT.sum()
    assert float(synk.function(scaled, inputs=["x"])(EIGHT, by=3.0)) == 6 * EIGHT.sum()
    for fn in (logged, jax.jit(of_two), jax.checkpoint(of_two)):
        assert float(synk.function(fn, inputs=["x"])(EIGHT, scale=3.0)) == 3 * EIGHT.sum()


def test_a_static_parameter_by_position_and_a_keyword_of_its_name(four):
    """Either could be meant."""
    f = synk.function(lambda n, /, x, **more: n * jnp.sum(x), inputs={"n": "static", "more": "broadcast"}, name="f")
    assert float(f(2, EIGHT, m=1.0)) == 2 * EIGHT.sum()
    with pytest.raises(TypeError, match="f: 'n' names a static parameter given by position, and a keyword"):
        f(2, EIGHT, n=1.0)


def test_sparse_matrices_are_refused(four):
    """They are indexed by position, but their rows are no arrays."""
    sparse = pytest.importorskip("scipy.sparse")
    for give in (synk.data, synk.function(jnp.sum)):
        with pytest.raises(TypeError, match=r"is a csr_array, which is sparse; give \.todense\(\)"):
            give(sparse.eye_array(6, format="csr"))


class Power(NamedTuple):
    """A setting."""

    of: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Another."""

    of: float
    notes: list = dataclasses.field(default_factory=list, compare=False)


@pytest.mark.parametrize("kind", [Power, Frozen, lambda of: (of,), lambda of: Power(Frozen(of))])
def test_static_values_that_are_equal(four, kind):
    """2 and 2.0 are, in a named tuple or a dataclass too, and compile to other programs."""

    def power(x, setting):
        while not isinstance(setting, int | float):
            setting = setting[0] if isinstance(setting, tuple) else setting.of
        return jnp.sum(jnp.asarray(x, jnp.asarray(setting).dtype))

    f, x = synk.function(power, inputs=["scatter", "static"]), np.arange(6, dtype=np.int32)
    for of, dtype in ((2, np.int32), (2.0, np.float32), (2, np.int32)):
        assert f(x, kind(of)).dtype == dtype
    before = f.stats.compilations
    f(x, kind(2.0))
    assert f.stats.compilations == before


@pytest.mark.parametrize("w", [[1.0, 2.0, 3.0, 4.0], {"w": np.arange(4.0, dtype=np.float32)}, np.ones(4, np.float32)])
def test_defaults_are_dealt_out_as_arguments_are(four, w):
    """Left out or given, it is the same call."""
    f, x = synk.function(lambda x, w=w: sum(jnp.sum(leaf) for leaf in jax.tree.leaves((x, w)))), np.ones(4, np.float32)
    assert f(x) == f(x, w) == f.serial(x)
    f.check(x)
    scaled = synk.function(
        lambda x, w=w: jnp.sum(x) * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(w)), inputs={"w": "broadcast"}
    )
    if not isinstance(w, list):
        assert scaled(x) == scaled(x, w)


M = np.where(np.arange(60).reshape(12, 5) % 7, 0, np.arange(60).reshape(12, 5)).astype(np.float32)
SPARSE = {
    "BCOO of rows": lambda: sparse.BCOO.fromdense(M, n_batch=1),
    "BCOO": lambda: sparse.BCOO.fromdense(M),
    "BCSR": lambda: sparse.BCSR.fromdense(M),
    "COO": lambda: sparse.COO.fromdense(M),
    "CSR": lambda: sparse.CSR.fromdense(M),
}


@pytest.mark.parametrize(
    ("kind", "n", "form"),
    [*[("devices", 3, form) for form in SPARSE], slow("devices", 1, "BCOO"), slow("simulated", 4, "BCSR")],
)
def test_sparse_arrays(kind, n, form):
    """Are refused where replicas would get parts, or combine some, and work where all have the whole."""
    matrix, x = SPARSE[form](), np.ones(4, np.float32)
    total = synk.function(lambda b: b.todense().sum(), name="f")
    product = synk.function(lambda t: (t["b"] @ jnp.ones(5)).sum() * t["x"].sum(), [{"x": "scatter", "b": "broadcast"}])
    with group_of(kind, n):
        w = synk.shared(matrix, name="w")
        for _ in range(2):
            for call, what in (
                (lambda: total(matrix), "f: argument b"),
                (lambda: total.serial(matrix), "f: argument b"),
                (lambda: list(total.iterate(matrix, batches=[4])), "f: argument b"),
                (lambda: synk.function(lambda t: t, name="f")({"b": [matrix]}), r"f: argument t\['b'\]\[0\]"),
                (lambda: synk.scatter(w, matrix), "synk.scatter: w"),
                (lambda: synk.contrib.scan(lambda a, b: a, matrix), r"synk.contrib.scan\(<lambda>\): x"),
                (lambda: synk.function(lambda x: {"g": matrix}, name="f")(x), r"f: output\['g'\]"),
            ):
                with pytest.raises(TypeError, match=f"{what} is a {form.split()[0]}, a sparse array.* its .todense"):
                    call()
            assert float(product({"x": x, "b": matrix})) == 4 * M.sum()
            assert float(synk.function(lambda x: (w.value @ jnp.ones(5)).sum() * x.sum())(x)) == 4 * M.sum()
            same = synk.function(lambda x: matrix, reduce="same")(x)
            np.testing.assert_array_equal(same.todense(), M)


FORGOTTEN = {
    "added": lambda x, y: (x + y).sum(),
    "multiplied as matrices": lambda x, y: x @ y,
    "joined": lambda x, y: jnp.concatenate([x[:, None], y[:, None]], 1).sum(),
    "mapped": lambda x, y: jax.vmap(jnp.multiply)(x, y).sum(),
}


@pytest.mark.parametrize("fn", FORGOTTEN.values(), ids=FORGOTTEN)
@pytest.mark.parametrize("rows", [12, 13])
def test_rows_forgotten_in_inputs(four, fn, rows):
    """JAX's own error of shapes says how many rows each argument has here, on every way of calling."""
    x = np.arange(rows, dtype=np.float32)
    f = synk.function(lambda x, y: fn(x, y), inputs=["x"])
    for call, part in (
        (lambda: f(x, x), -(-rows // 4)), (lambda: jax.jit(f)(x, x), -(-rows // 4)),
        (lambda: f(x, x, batch=8), 2), (lambda: list(f.iterate(x, x, batches=[8])), 2),
    ):  # fmt: skip
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)) as caught:
                call()
            said = f'Rows in this part: x {part}, y {rows}. One with an entry a row is "scatter": name it in inputs=.'
            assert said in caught.value.__notes__


def test_other_errors_of_shapes_get_no_note(four):
    """Those that speak of no rows, and those of rows that agree."""
    x = np.arange(12, dtype=np.float32)
    for fn in (lambda x, w: (x[:, None] @ w).sum(), lambda x, w: (w @ w).sum(), lambda x, w: x.reshape(7, 7)):
        with pytest.raises((TypeError, ValueError)) as caught:
            synk.function(fn, inputs=["x"])(x, np.ones((5, 2), np.float32))
        assert not any("Rows in this part" in note for note in getattr(caught.value, "__notes__", ()))
