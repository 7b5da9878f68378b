"""Cases at the edges of JAX and NumPy that have gone wrong once."""

import ctypes
import dataclasses
import functools
import json
import threading
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk

pytestmark = pytest.mark.smoke

X = np.arange(8, dtype=np.float32)


def test_functions_refuse_to_run_inside_functions(four):
    """A call, serial, check and compile see all rows, which a replica has not."""
    inner = synk.function(jnp.sum)
    for call in (inner, inner.serial, inner.check, inner.compile):
        with pytest.raises(synk.SynkError, match="it calls the synk function sum inside"):
            synk.function(lambda x, call=call: call(X))(X)


def test_serial_refuses_to_run_under_a_transformation(four):
    """What runs at once cannot be traced."""
    with pytest.raises(synk.SynkError, match="serial: it runs when called"):
        jax.jit(synk.function(jnp.sum).serial)(X)


def test_first_under_jit_is_the_first_replicas_everywhere(four):
    """Under a transformation the value is the first replica's for all that follows, and so is its gradient."""
    first = synk.function(lambda x: x[0], reduce="first")
    total = synk.function(jnp.sum)
    assert float(jax.jit(lambda x: total(x * first(x + 1)))(X)) == X.sum()
    np.testing.assert_array_equal(jax.grad(first)(X), [1, 0, 0, 0, 0, 0, 0, 0])


def test_max_without_infinity(four):
    """Types of 8 bits that have no infinity have a maximum all the same, on fewer rows than replicas."""
    x = jnp.array([1, 2], jnp.float8_e4m3fn)
    assert float(synk.function(jnp.max, reduce="max")(x)) == 2


def test_large_unsigned_indexes(four):
    """They are out of range, not negative."""
    with pytest.raises(IndexError, match="18446744073709551615"):
        synk.function(jnp.sum)(X, batch=np.array([2**64 - 1], np.uint64))


def test_options_of_jax_are_part_of_a_program(four):
    """Under other options the function is traced anew, as by jax.jit."""
    f = synk.function(lambda x: x.sum(), name="f")
    assert f(X.astype(np.float64)).dtype == np.float32
    jax.config.update("jax_enable_x64", True)
    try:
        assert f(X.astype(np.float64)).dtype == np.float64
    finally:
        jax.config.update("jax_enable_x64", False)


def test_masked_arrays_are_refused(four):
    """Their mask would be lost in silence."""
    masked = np.ma.masked_array(X, X > 3)
    with pytest.raises(TypeError, match="argument a is a masked array"):
        synk.function(lambda a: a.sum())(masked)
    with pytest.raises(TypeError, match="masked array"):
        synk.shared(masked)


def test_traced_indexes_out_of_range_give_no_other_row(four):
    """A traced batch cannot be checked; what is not there is NaN."""
    rows = synk.function(lambda x: x, reduce="concat")
    got = jax.jit(lambda x, batch: rows(x, batch=batch))(X, np.array([7, -1, 9, -9]))
    np.testing.assert_array_equal(got, [7, 7, np.nan, np.nan])


def test_batch_s_under_jit_raises(four):
    """As outside it."""
    with pytest.raises(ValueError, match="batch_s"):
        jax.jit(lambda x: synk.function(jnp.sum)(x, batch_s=2))(X)


def test_arrays_of_no_size_in_slices(four):
    """They add up to arrays of no size."""
    assert synk.function(lambda x: x.sum(0))(np.zeros((8, 0), np.float32), num_slices=2).shape == (0,)


def test_pmap_without_mapped_arguments():
    """The pmap engine runs what has no rows."""
    with synk.init(4):
        ranks = synk.function(lambda: synk.rank(), reduce="stack", engine="pmap")()
        np.testing.assert_array_equal(ranks, [0, 1, 2, 3])


def test_shared_keys_are_copies(four):
    """The user's key may be donated elsewhere."""
    key = jax.random.key(0)
    w = synk.shared(key)
    jax.jit(lambda k: jax.random.split(k)[0], donate_argnums=0)(key)
    np.testing.assert_array_equal(jax.random.key_data(w.value), jax.random.key_data(jax.random.key(0)))


def test_collectives_inside_on_scalars_and_keys(four):
    """Keys gather as rows; a scalar has none."""
    keys = jax.random.split(jax.random.key(0), 8)
    got = synk.function(lambda k: synk.all_gather(k), reduce="first")(keys)
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys))
    with pytest.raises(ValueError, match="a scalar has no rows"):
        synk.function(lambda x: synk.all_gather(x.sum()))(X)


def test_check_of_a_scalar_weighted_raises_the_law_error(four):
    """The message comes, whatever the leaf's shape."""
    f = synk.function(lambda x: synk.Weighted(x.max(), len(x)), reduce="mean")
    with pytest.raises(synk.LawError, match='"mean" of Weighted'):
        f.check(np.arange(7, dtype=np.float32))


def test_check_frees_what_it_copied():
    """After a check of one replica there are as many live bytes as before."""
    with synk.init(1):
        w = synk.shared(np.zeros(100_000, np.float32))
        f = synk.function(lambda x: x.mean() + w.value[0], reduce="mean")
        f(X)

        def bytes_alive():
            return sum(a.nbytes for a in jax.live_arrays() if a.nbytes >= 400_000)

        before = bytes_alive()
        f.check(X)
        assert bytes_alive() == before


def test_dtypes_that_narrow_to_one_share_a_program(four):
    """float64 rows are float32 rows."""
    f = synk.function(jnp.sum)
    f(X), f(X.astype(np.float64))
    assert f.stats.compilations == 1


def test_array_defaults_are_dealt_out(four):
    """A scattered parameter's default is scattered."""
    f = synk.function(lambda x, w=X: (x * w).sum())
    assert float(f(X)) == float(f.serial(X)) == float((X * X).sum())


def test_serial_asks_only_for_what_it_reads(four):
    """A variable of another branch may be unequal."""
    v = synk.shared(np.float32(0))

    def fn(x, flag):
        if flag:
            v.value = v.value + x.sum()
        return x.sum()

    f = synk.function(fn, inputs={"flag": "static"})
    f(X, True), f(X, False)
    assert float(f.serial(X, False)) == X.sum()


@pytest.mark.parametrize("how", ["axis_index", "inner jit", "ppermute", "cond"])
def test_what_tells_ranks_apart_makes_a_variable_unequal(four, how):
    """JAX's own ways to see the rank count as much as `synk.rank`."""
    ways = {
        "axis_index": lambda: lax.axis_index("replica"),
        "inner jit": lambda: jax.jit(lambda: lax.axis_index("replica"))(),
        "ppermute": lambda: lax.ppermute(jnp.int32(1), "replica", [(i, (i + 1) % 4) for i in range(4)]),
        "cond": lambda: lax.cond(True, lambda: lax.axis_index("replica"), lambda: jnp.int32(0)),
    }
    w = synk.shared(np.int32(0))
    f = synk.function(jnp.sum)

    @f.then
    def after(total):
        w.value = w.value + ways[how]()

    after(X)
    with pytest.raises(synk.DivergedError):
        w.value


@pytest.mark.parametrize("op", ["sum", "mean", "max", "prod"])
def test_what_is_combined_inside_stays_equal(four, op):
    """`synk.all_reduce` and `synk.all_gather` in then give all replicas one value."""
    w = synk.shared(np.float32(0))
    f = synk.function(jnp.sum)

    @f.then
    def after(total):
        w.value = synk.all_reduce(total, op) + synk.all_gather(total[None]).sum()

    after(X)
    assert np.isfinite(w.value)


def step_and_collectives():
    """A little of everything, uneven rows included."""
    w = synk.shared(np.zeros(3, np.float32), name="w")
    f = synk.function(lambda x: jnp.mean(x) + w.value.sum(), reduce="mean")
    g = synk.function(lambda x: jnp.sum(x, 0), then=lambda total: w.update(w.value + total))
    for rows in (8, 7, 2):
        g(np.ones((rows, 3), np.float32))
    synk.all_reduce(w)
    return f(np.arange(7, dtype=np.float32)), w.value


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_another_mesh_is_set(four, kind):
    """What the user's own arrays lie on is not synk's business."""
    kind = getattr(jax.sharding.AxisType, kind)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(kind,))):
        mean, w = step_and_collectives()
    assert (round(float(mean), 3), w.tolist()) == (54.0, [17.0] * 3)


@pytest.mark.parametrize("context", [jax.disable_jit, jax.checking_leaks, lambda: jax.debug_nans(True)])
def test_under_debugging_options(four, context):
    """They disturb no call, and no call disturbs them."""
    with context():
        mean, w = step_and_collectives()
    assert (round(float(mean), 3), w.tolist()) == (54.0, [17.0] * 3)


def test_integers_that_jax_does_not_have(four):
    """In lists and first values as in numbers; with 64 bits it has them."""
    total = synk.function(jnp.sum)
    for make in (
        lambda: total([2**31, 1]),
        lambda: total([[1, 2], [3, -(2**40)]]),
        lambda: synk.shared(2**40),
        lambda: synk.shared({"a": 1, "b": 2**63}),
        lambda: synk.data([2**40, 1]),
    ):
        with pytest.raises(OverflowError, match=r"which is no int32\. Give a float, or set jax_enable_x64"):
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

    assert float(synk.function(doubled)(X)) == 2 * X.sum()
    assert float(synk.function(scaled, inputs=["x"])(X, by=3.0)) == 6 * X.sum()
    for fn in (logged, jax.jit(of_two), jax.checkpoint(of_two)):
        assert float(synk.function(fn, inputs=["x"])(X, scale=3.0)) == 3 * X.sum()


def test_a_static_parameter_by_position_and_a_keyword_of_its_name(four):
    """Either could be meant."""
    f = synk.function(lambda n, /, x, **more: n * jnp.sum(x), inputs={"n": "static", "more": "broadcast"}, name="f")
    assert float(f(2, X, m=1.0)) == 2 * X.sum()
    with pytest.raises(TypeError, match="f: 'n' names a static parameter given by position, and a keyword"):
        f(2, X, n=1.0)


def test_a_boolean_is_no_batch(four):
    """Not as an array either, as `jnp.any(mask)` without its axis gives one."""
    for batch in (True, np.array(True), jnp.array(False)):
        with pytest.raises(TypeError, match=r"batch is (True|False), a single boolean; give a number of rows, a slice"):
            synk.function(jnp.sum)(X, batch=batch)


@pytest.mark.parametrize("batch", [2**70, -(2**70), [2**70], [1, -(2**70)], [2**63]], ids=str)
def test_a_row_that_no_array_has(four, batch):
    """Whatever integers it takes to say so."""
    with pytest.raises(IndexError, match=r"batch.* but x has 8 rows\. |batch=.* but x has 8\. "):
        synk.function(lambda x: x.sum())(X, batch=batch)


def test_a_batch_of_lists(four):
    """Ragged ones too; and objects are no indexes, whatever they hold."""
    total = synk.function(lambda x: x.sum(), name="total")
    with pytest.raises(ValueError, match="total: batch is a list of lists; give indexes"):
        total(X, batch=[[1, 2], [3]])
    with pytest.raises(TypeError, match="total: batch has dtype object"):
        total(X, batch=np.array([1, 2], object))


def test_sparse_matrices_are_refused(four):
    """They are indexed by position, but their rows are no arrays."""
    sparse = pytest.importorskip("scipy.sparse")
    for give in (synk.data, synk.function(jnp.sum)):
        with pytest.raises(TypeError, match=r"is a csr_array, which is sparse; give \.todense\(\)"):
            give(sparse.eye_array(6, format="csr"))


@pytest.mark.parametrize("call", ["function", "scan", "pairs"])
def test_an_outer_axis_of_the_name_of_the_replicas(group, call):
    """Collectives would meet over that one; with another name it is right."""
    calls = {
        "function": synk.function(jnp.sum, name="total"),
        "scan": lambda x: synk.scan(jnp.add, x)[-1],
        "pairs": lambda x: synk.pairs(lambda a, b: b, jnp.zeros(1), x)[0],
    }
    x = jnp.stack([jnp.linspace(0.5, 1.5, 7), jnp.ones(7)])
    with pytest.raises(synk.SynkError, match='has an axis named "replica", as that of the replicas is called'):
        jax.vmap(calls[call], axis_name="replica")(x)
    np.testing.assert_allclose(jax.vmap(calls[call], axis_name="batch")(x), [7, 7], rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(calls[call])(x), [7, 7], rtol=1e-6)


def test_whole_outputs_inside_others(four):
    """A Monoid's state or a weighted mean has no mean of its own."""
    for nested in (
        lambda x: synk.Weighted({"loss": x.mean(), "std": synk.stats.std(x)}, len(x)),
        lambda x: synk.Weighted(synk.Weighted(x.mean(), 1.0), len(x)),
    ):
        for run in (synk.function(nested, reduce="mean"), synk.function(nested, reduce="mean").serial):
            with pytest.raises(ValueError, match="output holds a Weighted or Monoid inside another one"):
                run(X)


def test_check_of_integers_is_exact(four):
    """However large they are; and what it prints shows them apart."""
    counts = synk.function(lambda x: x.sum() + jnp.int32(1), name="counts")
    with pytest.raises(synk.LawError, match="it is 128000004, serially 128000001"):
        counts.check(np.full(32, 4_000_000, np.int32))
    counts.check(np.full(32, 4_000_000, np.int32), rtol=1e-6)
    with jax.enable_x64(True):
        stamps = synk.function(lambda x: x.max() + x.sum() // 10**15, reduce="max", name="stamps")
        with pytest.raises(synk.LawError, match="serially 1000000000000032"):
            stamps.check(np.full(32, 10**15))
    synk.function(lambda x: (x.max(), x.sum()), outputs=("max", "sum")).check(np.arange(9))


def test_check_says_what_it_finds(four):
    """Where the function refuses other numbers of rows, and without warnings that would come up instead."""

    def by_fives(x):
        assert x.shape[0] % 5 == 0
        return x.std()

    with pytest.raises(synk.LawError, match="on 4 replicas the answer is not the serial one"):
        synk.function(by_fives, reduce="mean").check(np.arange(60, dtype=np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(synk.LawError, match='"mean" would have matched'):
            synk.function(lambda x: jnp.stack([x.mean(), jnp.inf])).check(X)
        with pytest.raises(synk.LawError, match='"mean" would have matched'):
            synk.function(lambda x: x.mean() * 1e37).check(X + 20, num_slices=2)


def test_explain_of_array_constants_and_numpy_numbers(four):
    """Neither has one truth value, nor a place in JSON."""
    bound = synk.function(functools.partial(lambda x, w: jnp.sum(x * w.sum()), w=np.ones(3, np.float32)))
    bound(X)
    assert "arguments: PyTreeDef" in bound.explain(x=X).why[0]
    json.loads(synk.function(jnp.sum).explain(X, num_slices=np.int64(2)).json())
    scaled = synk.function(lambda x, by: x.sum() * by, inputs={"by": "static"})
    scaled(X, 1)
    scaled(X, 1.0)
    assert scaled.explain(X, 1.0).why == ["by: 1.0, was 1"]


@pytest.mark.slow
def test_skeletons_meet_the_users_options_and_dtypes(four):
    """Debugging options raise what users catch; sums of small integers are as wide as `jnp.sum` makes them."""
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"synk\.scan\(add\): a result holds NaN"):
        synk.scan(jnp.add, np.array([1, np.nan], np.float32))
    for dtype in (np.uint8, np.int8, np.int16, np.bool_):
        x = np.array([100, 100, 50], np.int64).astype(dtype)
        for reduce, op in (("sum", jnp.sum), ("prod", jnp.prod), ("max", jnp.max)):
            got, want = synk.pairs(jnp.maximum, x, reduce=reduce), op(jnp.asarray(np.maximum.outer(x, x)), axis=1)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    total = jax.jit(lambda x: synk.scan(jnp.add, x)[-1])
    if not synk.group().is_simulated:
        with jax.set_mesh(mesh), pytest.raises(synk.SynkError, match=r"synk\.scan\(add\): it is traced inside jax"):
            total(jnp.asarray(X))
    with jax.set_mesh(synk.group().mesh):
        assert float(total(jnp.asarray(X))) == X.sum()


@pytest.mark.smoke
def test_a_callback_that_asks_for_a_variable_is_told():
    """The thread of a device would wait for itself, so it gets an error, whatever it does, and never a deadlock."""
    with synk.init(2):
        v, told = synk.shared(np.float32(2), name="v"), []
        asks = [
            lambda: v.value, lambda: v.get_value(1), lambda: v.get_value(1, borrow=True), lambda: synk.get_lengths(v),
            lambda: setattr(v, "value", np.float32(0)), lambda: synk.broadcast(v),
        ]  # fmt: skip

        # Each catches its error: where one device fails, XLA's CPU collectives end the process.
        def look(total):
            for ask in asks:
                with pytest.raises(synk.SynkError, match=r"host callback .* pass its value to the callback"):
                    ask()
                told.append(ask)
            return total

        f = synk.function(lambda x: jax.pure_callback(look, jax.ShapeDtypeStruct((), np.float32), x.sum()))
        for _ in range(3):
            total = f(X)
        assert v.value == 2
        assert total == X.sum() and len(told) == 3 * 2 * len(asks)


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


def test_many_more_slices_than_rows(four):
    """Each has a row; the others are none."""
    f = synk.function(jnp.sum)
    for slices in (10**6, 10**12):
        assert f(np.arange(5.0, dtype=np.float32), num_slices=slices) == 10


def test_what_differs_is_shown_where_it_does(four):
    """And not where numbers are large."""
    f = synk.function(
        lambda x: (
            jnp.array([4000001.0, 0.1], np.float32) + (jnp.array([1.0, 0.1], np.float32) if synk.size() > 1 else 0)
        ),
        reduce="max",
    )
    with pytest.raises(synk.LawError, match=r"it is 0\.2, serially 0\.1"):
        f.check(np.ones(4, np.float32))


@pytest.mark.smoke
def test_a_thread_that_python_has_not_started():
    """As those of a window toolkit: it is no callback, and calls, reads and sets as any other does."""
    with synk.init(2):
        w, u = synk.shared(np.float32(1), name="w"), synk.shared(np.float32(5), name="u")
        f = synk.function(lambda x: jnp.sin(x @ x.T).sum(), then=lambda s: setattr(w, "value", w.value + 0 * s + 1))
        told = []

        def body(_):
            try:
                told.append(threading.current_thread().name[:5])
                told.append(float(u.value))
                u.value = np.float32(7)
                for _ in range(3):
                    f(np.ones((200, 200), np.float32))
                    told.append(float(w.value))
                w.value = np.float32(0)
                told.append(float(w.value))
            except BaseException as error:
                told.append(error)

        start = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(body)
        library, thread = ctypes.CDLL(None), ctypes.c_ulong()
        assert library.pthread_create(ctypes.byref(thread), None, start, None) == 0
        library.pthread_join(thread, None)
        assert told == ["Dummy", 5, 2, 3, 4, 0]


def test_functions_of_rows_do_not_communicate(four):
    """Those of `synk.scan` and `synk.pairs` see rows alone."""
    with pytest.raises(ValueError, match=r"synk\.all_reduce communicates inside.* Do it outside"):
        synk.scan(lambda a, b: synk.all_reduce(a, "sum") + b, np.ones(8, np.float32))
