"""Functions: how arguments are dealt out, what comes back and where it lies, and how seldom anything compiles."""

import copy
import enum
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import SERIAL, assert_close, members, needs_devices, numbers, parts_of, slow, smoke

pytestmark = pytest.mark.usefixtures("four")

X, W = numbers(9), np.array([2.0, 3.0], np.float32)
S = np.float32


# Inputs.


def dot(x, w):
    return x @ w


@pytest.mark.parametrize(
    "inputs",
    [["scatter", "broadcast"], ("scatter", "broadcast"), {"w": "broadcast"}, {"x": "scatter", "w": "broadcast"}, ["x"]],
    ids=str,
)
def test_forms_of_inputs(inputs):
    """Modes by position, a mapping, and the names of what is scattered say the same."""
    assert_close(synk.function(dot, inputs, reduce="concat")(X, W), X @ W)


def test_all_scatter_by_default():
    """Without inputs every parameter is scattered; keywords and positions mix as in Python."""
    f = synk.function(lambda x, y, *, z: x * y + z, reduce="concat")
    assert_close(f(X, z=X, y=X), X * X + X)


def test_modes_are_prefixes():
    """A mode may be a tree that begins as its argument does."""
    f = synk.function(lambda p: p["x"] @ p["w"][0] + p["w"][1], [{"x": "scatter", "w": "broadcast"}], reduce="concat")
    assert_close(f({"x": X, "w": (W, S(1))}), X @ W + 1)


def test_static():
    """A static argument is a Python constant in the function; each value has a program of its own."""
    power = synk.function(lambda x, n: x**n if n > 1 else x, {"n": "static"}, reduce="concat")
    assert_close([power(X, 1), power(X, 2), power(X, n=3)], [X, X**2, X**3])


def test_static_values_of_other_types_are_others():
    """1, 1.0 and True are equal in Python, but not the same constants."""
    f = synk.function(lambda x, n: jnp.asarray(type(n) is int), {"n": "static"}, reduce="all")
    assert [bool(f(X, n)) for n in (1, 1.0, True)] == [True, False, False]


def test_defaults():
    """A parameter left out has its default, seen as it is."""
    f = synk.function(lambda x, scale=2, mode="up": x * scale if mode == "up" else x, ["x"], reduce="concat")
    assert_close([f(X), f(X, scale=3), f(X, 5)], [2 * X, 3 * X, 5 * X])


def test_variadic():
    """Values of *args and **kwargs share one mode."""
    f = synk.function(lambda *xs, **ws: sum(xs) * ws["a"] + ws["b"], {"ws": "broadcast"}, reduce="concat")
    assert_close(f(X, X, a=2, b=1), 4 * X + 1)


def test_modes_of_variadic_by_position():
    """A sequence of modes may go on for the values of *args."""
    f = synk.function(lambda x, *ws: x * ws[0] + ws[1], ["scatter", "broadcast", "broadcast"], reduce="concat")
    assert_close(f(X, 2, 1), 2 * X + 1)


def test_a_parameter_named_like_a_mode():
    """It needs the mapping."""
    f = synk.function(lambda broadcast, x: x * broadcast, {"broadcast": "broadcast"}, reduce="concat")
    assert_close(f(2, X), 2 * X)


KINDS_OF_ARRAYS = {
    "numpy": lambda x: x,
    "float64": lambda x: x.astype(np.float64),
    "jax": jnp.asarray,
    "list": lambda x: x.tolist(),
    "numpy view": lambda x: np.repeat(x, 2, 0)[::2],
    "fortran": np.asfortranarray,
    "sharded": lambda x: jax.device_put(x, synk.group().stacked) if len(x) % 4 == 0 else jnp.asarray(x),
    "array-like": lambda x: type("Wrapped", (), {"__array__": lambda self, dtype=None, copy=None: x})(),
}


@pytest.mark.parametrize("rows", [8, 9])
@pytest.mark.parametrize("kind", KINDS_OF_ARRAYS)
def test_kinds_of_arrays(kind, rows):
    """Whatever holds the numbers, they arrive; float64 narrows as JAX does."""
    x = numbers(rows)
    given = KINDS_OF_ARRAYS[kind](x)
    got = synk.function(lambda x: x, reduce="concat")(given, batch=slice(None, None, -1) if rows == 9 else None)
    assert_close(got, x[::-1] if rows == 9 else x)
    assert got.dtype == np.float32


def test_memory_mapped(tmp_path):
    """Rows of a file on disk."""
    x = numbers(9)
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=x.shape)
    mapped[:] = x
    assert_close(synk.function(lambda x: x, reduce="concat")(mapped, batch=[8, 0, -2]), x[[8, 0, -2]])


def test_typed_keys():
    """Typed PRNG keys scatter, broadcast and come back as keys."""
    key, keys = jax.random.key(1), jax.random.split(jax.random.key(0), 9)
    f = synk.function(lambda keys, key: (keys, jax.random.normal(key)), ["keys"], ("concat", "first"))
    got, noise = f(keys, key)
    assert (got == keys).all()
    assert float(noise) == float(jax.random.normal(key))


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    "number",
    [2.0, 3, 1j, Level.HIGH, np.int8(3), jnp.asarray(2.0), *map(slow, (True, float("nan"), np.float32(2), np.float64(2), np.bool_(True)))],
    ids=repr,
)  # fmt: skip
def test_numbers_take_the_dtype_that_jax_gives_them(group, number):
    """Python's do not widen 16-bit rows, NumPy's do; in slices, serially and under jit too; placed and compiled once."""
    x = jnp.ones(9, jnp.bfloat16)
    f = synk.function(lambda x, scale: x * scale, ["x"], reduce="concat")
    with jax.numpy_dtype_promotion("standard"):
        want = x * number
        for slices in (1, 2, 1):
            got = f(x, number, num_slices=slices)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(np.asarray(got, np.complex64), np.asarray(want, np.complex64))
        assert f.serial(x, number).dtype == jax.jit(f)(x, number).dtype == want.dtype
        count = f.stats.compilations
        f(x, number), f(x, number, num_slices=2)
        assert f.stats.compilations == count


class Hidden(float):
    def __repr__(self):
        return "hidden"


@pytest.mark.smoke
def test_numbers_are_told_apart_by_their_bits(group):
    """Placed numbers are found again by what they are, not by what they are written as."""
    f = synk.function(lambda x, scale: x * scale, ["x"], reduce="concat")
    for slices in (1, 2):
        got = [f(np.ones(5, np.float32), number, num_slices=slices) for number in (Hidden(1), Hidden(2), -0.0, 0.0)]
        np.testing.assert_array_equal(got, np.float32([[1], [2], [0], [0]]) * np.ones((4, 5), np.float32))
        assert [bool(np.signbit(each).all()) for each in got] == [False, False, True, False]


@pytest.mark.parametrize("kind", ["numpy", "jax"])
@pytest.mark.parametrize("rows", [8, 9])
def test_arguments_are_never_changed(kind, rows):
    """Neither donated, nor shared with what comes back."""
    x = (np if kind == "numpy" else jnp).ones((rows, 2), np.float32)
    w = synk.shared(np.zeros((rows, 2), np.float32))
    f = synk.function(lambda x: x * 1, reduce="concat", then=lambda x: setattr(w, "value", w.value + x) or x)
    first, *_ = f(x), f(x), f(x)
    assert float(x.sum()) == float(first.sum()) == 2 * rows
    if kind == "numpy":
        x[:] = 5
        assert float(first.sum()) == 2 * rows


def test_later_writes_to_an_array_are_not_seen():
    """A call takes what an argument holds when it is made, though it returns before the work is done."""
    x, w = np.ones((4096, 8), np.float32), np.ones(8, np.float32)
    f = synk.function(lambda x, w: x * w[None], ["x"], reduce="concat")
    for batch in (None, slice(0, 4094), 4095):
        x[:], w[:] = 1, 1
        got = f(x, w, batch=batch)
        x[:], w[:] = 2, 2
        assert float(got.max()) == 1


# Outputs.


def test_outputs_are_a_prefix():
    """One op may stand for a whole subtree; None is the first replica's own."""
    ops = ({"a": "sum", "b": "max"}, "mean", None)
    f = synk.function(lambda x: ({"a": x.sum(), "b": x.max()}, x.mean(), x.sum()), outputs=ops)
    assert_close(f(X), ({"a": X.sum(), "b": X.max()}, X.mean(), X[:3].sum()))


def test_reduce_is_for_all():
    """`reduce` names the op of every output, `outputs` of each."""
    f = synk.function(lambda x: {"a": x.mean(), "b": (x.mean(0), None)}, reduce="mean")
    assert_close(f(X), {"a": X.mean(), "b": (X.mean(0), None)})


def test_sum_is_the_default():
    """Bare, a function's outputs are summed."""
    assert_close(synk.function(jnp.sum)(X), X.sum())


def test_no_outputs():
    """A function may return nothing."""
    assert synk.function(lambda x: None)(X) is None


def test_numbers_and_constants_as_outputs():
    """Python numbers and arrays that do not depend on rows are outputs as any."""
    assert_close(synk.function(lambda x: (1.0, np.float32(2), len(x)), reduce="sum")(X), (4.0, 8.0, 9))


@pytest.mark.parametrize("rows", [8, 9, 2])
def test_output_subset(rows):
    """Indexes pick top-level outputs in the order named; updates still happen."""
    w = synk.shared(np.float32(0))

    @functools.partial(synk.function, outputs=("sum", "concat", "first"))
    def f(x):
        w.update(w.value + 1)
        return x.sum(), x, (x.max(), x.min())

    x, mine = numbers(rows), parts_of(numbers(rows), 4)[0][0]
    assert_close(f(x, output_subset=[2, 0]), ((mine.max(), mine.min()), x.sum()))
    assert_close(f(x, output_subset=[-2]), (x,))
    assert_close(f(x, output_subset=[]), ())
    assert float(w.get_value(0)) == 3


def test_output_subset_by_key():
    """Keys name the entries of a dict; then's results are picked likewise."""
    f = synk.function(lambda x: {"a": x.sum(), "b": x.max()}, then=lambda out: {**out, "c": out["a"] + 1})
    assert_close(f(X, output_subset=["c", "a"]), (X.sum() + 1, X.sum()))


# Forms of the decorator, and then.


def test_decorator_forms():
    """Bare, with options, and as a call."""

    @synk.function
    def bare(x):
        return x.sum()

    @synk.function(reduce="mean")
    def with_options(x):
        return x.mean()

    assert_close((bare(X), with_options(X), synk.function(jnp.max, reduce="max")(X)), (X.sum(), X.mean(), X.max()))
    assert (bare.name, with_options.name, with_options.__name__) == ("bare", "with_options", "with_options")


def test_then_gets_outputs_and_extras():
    """A tuple is spread; after it come broadcast and static parameters by name, with their defaults."""

    @synk.function(inputs=["x"], outputs=("sum", "max"))
    def f(x, scale, shift=1):
        return x.sum(), x.max()

    @f.then
    def g(total, top, shift, scale):
        return (total + top) * scale + shift

    assert g is f
    assert_close(f(X, 2.0), (X.sum() + X.max()) * 2 + 1)
    assert_close(f(X, scale=2.0, shift=5), (X.sum() + X.max()) * 2 + 5)


@pytest.mark.parametrize("rows", [8, 9, 2])
def test_then_gets_what_is_no_tuple_whole(rows):
    """A dict, a list or one array is one argument; static parameters stay Python values."""
    f = synk.function(lambda x, flip: {"a": x, "b": x.sum()}, {"flip": "static"}, {"a": "concat", "b": "sum"})
    f.then(lambda out, flip: out["a"][::-1] if flip else out["a"] + out["b"])
    x = numbers(rows)
    assert_close((f(x, True), f(x, flip=False)), (x[::-1], x + x.sum()))


def test_then_sees_first_everywhere():
    """Under then, `"first"` is the first replica's value on every replica."""
    f = synk.function(lambda x: x[0], reduce="first", then=lambda first: first + synk.rank().astype(np.float32) * 0)
    assert_close((f(X), f(numbers(8)), f(numbers(2))), (X[0], numbers(8)[0], numbers(2)[0]))


def test_lists_of_numbers_in_trees_are_arrays():
    """A list of numbers, nested or not, is an array wherever it stands; a list of arrays stays a tree, then too."""
    f = synk.function(lambda rows: jax.tree.map(lambda x: x.sum(0), rows))
    ids, mask, pair = [[1, 2], [3, 4], [5, 6]], [1.5, 0.5, 1.0], [numbers(3), numbers(3, 2)]
    forms = [{"ids": ids, "mask": mask}, ({"deep": {"ids": ids}}, mask), {"pair": pair}, {"pair": pair, "mask": mask}]
    for _ in range(2):  # the second time warm
        for form in forms:
            want = jax.tree.map(lambda x: np.sum(x, 0), form, is_leaf=lambda x: x is ids or x is mask)
            assert_close((f(form), f.serial(form)), (want, want))
            assert_close((next(f.stream([{"rows": form}])), f.over(form, batches=[[2, 0], [1]])), (want, want))
    before = f.stats.compilations
    f({"ids": np.asarray(ids), "mask": np.asarray(mask)})
    assert f.stats.compilations == before
    scaled = synk.function(lambda x, cfg: x.sum() * cfg["scale"][0] * cfg["scale"][1], ["x"])
    for scale in ([2.0, 3.0], [np.float32(2), jnp.float32(3)], [2.0, 3.0]):
        assert_close(scaled(X, {"scale": scale}), X.sum() * 6)
    with pytest.raises(ValueError, match="f: argument rows is a list that makes no array"):
        synk.function(lambda rows: rows, name="f")({"ids": [[1, 2], [3]]})


def test_a_function_without_rows():
    """Parts are replicas then, and each counts once."""
    f = synk.function(lambda w: (w, w, synk.rank()), ["broadcast"], ("sum", "mean", "stack"))
    assert_close(f(W), (4 * W, W, np.arange(4)))


# Where results lie.


@pytest.mark.parametrize("rows", [8, smoke(9), 2])
@pytest.mark.parametrize("op", [*SERIAL, "stack", lambda parts: parts.sum(0)])
def test_results_lie_on_every_replica(op, rows):
    """Whole, on each of the group's devices."""
    got = synk.function(lambda x: SERIAL.get(op, SERIAL["sum"])(x), reduce=op)(numbers(rows))
    assert {shard.device for shard in got.addressable_shards} == set(synk.group().devices)
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, got)


@pytest.mark.parametrize("rows", [8, 9, 2])
def test_what_the_first_replica_has_lies_on_all(rows):
    """As every result."""
    got, total = synk.function(lambda x: (x.max(0), x.sum()), outputs=(None, "sum"))(numbers(rows))
    assert got.devices() == set(synk.group().devices)
    assert_close((got, total), (parts_of(numbers(rows), 4)[0][0].max(0), numbers(rows).sum()))


def test_results_meet_in_one_expression():
    """Results of calls, of serial and of variables combine without being moved."""
    w = synk.shared(W)
    f = synk.function(lambda x: x.sum(0))
    assert_close(f(X) + f.serial(X) + f(numbers(8)) + w.value, 2 * X.sum(0) + numbers(8).sum(0) + W)


@needs_devices(8)
def test_groups_of_some_devices():
    """A group's programs run on its own devices; a function serves many groups."""
    f = synk.function(lambda x: x.sum(0))
    for devices in (jax.devices()[5:8], jax.devices()[1:2], jax.devices()[3::-1]):
        with synk.init(devices):
            got = f(X)
            assert_close(got, X.sum(0))
            assert got.devices() == set(devices)


# How often anything is traced and compiled.


def counted(counts):
    """A training step that counts its traces."""
    w = synk.shared(np.zeros(2, np.float32))

    @synk.function(inputs=["x", "y"], outputs=("mean", "mean"))
    def step(x, y, rate):
        counts.append("fn")
        return jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w.value)

    @step.then
    def step(loss, gradient, rate):
        counts.append("then")
        w.value = w.value - rate * gradient
        return loss

    return step, w


@pytest.mark.smoke
@pytest.mark.parametrize("read", [False, True])
def test_one_compilation_over_a_training_loop(group, read):
    """Variables are born where they stay: no call after the first traces or compiles, whatever is read between."""
    step, w = counted(counts := [])
    x, y = numbers(16), numbers(16)[:, 0]
    traces = 0
    for i in range(5):
        step(x, y, 0.1 / (i + 1))
        traces = traces or len(counts)
        if read:
            w.value, w.get_value(0)
    assert (step.stats.compilations, step.stats.calls, step.stats.rows) == (1, 5, 80)
    assert len(counts) == traces


@pytest.mark.parametrize("rows", [9, 3])
def test_no_second_trace_of_uneven_rows(group, rows):
    """Calls of the same rows trace and compile the first time only."""
    step, _ = counted(counts := [])
    x, y = numbers(rows), numbers(rows)[:, 0]
    step(x, y, 0.1)
    before = len(counts), step.stats.compilations
    for _ in range(3):
        step(x, y, 0.2)
        step(numbers(20), numbers(20)[:, 0], 0.1, batch=np.arange(rows))
    assert (len(counts), step.stats.compilations) == before


def test_no_second_trace_of_slices(group):
    """Nor do sliced calls, of as many slices or of more of the same size."""
    step, _ = counted(counts := [])
    x, y = numbers(96), numbers(96)[:, 0]
    step(x[:48], y[:48], 0.1, num_slices=2)
    before = len(counts), step.stats.compilations
    step(x[:48], y[:48], 0.1, num_slices=2)
    step(x, y, 0.1, num_slices=4)
    assert (len(counts), step.stats.compilations) == before


def test_batches_of_one_length_share_a_program():
    """However the rows are picked."""
    f = synk.function(lambda x: x.sum(0))
    for batch in (8, slice(0, 8), slice(8, 0, -1), np.arange(8), np.arange(9) > 0, [-1] * 8):
        f(X, batch=batch)
    assert f.stats.compilations == 1


def test_stats():
    """Calls, rows selected, programs, and seconds that add up as time passes."""
    f = synk.function(lambda x: x.sum(0))
    assert (f.stats.calls, f.stats.compilations, f.stats.rows) == (0, 0, 0)
    f(X), f(X, batch=8)
    assert (f.stats.calls, f.stats.rows) == (2, 17)
    assert min(f.stats.selecting, f.stats.sending, f.stats.dispatching) > 0
    assert "calls=2" in repr(f.stats)


@pytest.mark.smoke
@pytest.mark.parametrize(("rows", "slices"), [(8, 1), (9, 1), (8, 2)])
def test_compile(rows, slices):
    """Compiling ahead changes nothing and spares the first call the work."""
    step, w = counted([])
    x, y = numbers(rows), numbers(rows)[:, 0]
    compiled = step.compile(x, y, 0.1, num_slices=slices)
    assert isinstance(compiled, jax.stages.Compiled)
    np.testing.assert_array_equal(w.value, [0, 0])
    before = step.stats.compilations
    step(x, y, 0.1, num_slices=slices)
    assert step.stats.compilations == before
    assert step.stats.calls == 1


def test_members():
    """`fn`, `name`, `shared` and a readable repr."""
    step, w = counted([])
    x = numbers(8)
    step(x, x[:, 0], 0.1)
    assert step.shared == (w,)
    assert step.name == "step"
    assert step.fn.__name__ == "step"
    assert repr(step) == "synk.function(step(x: scatter, y: scatter, rate: broadcast) -> mean, then)"


def test_the_users_fn_is_called_as_it_is():
    """`f.fn` is the user's function, for use inside another."""
    inner = synk.function(lambda x: x.sum(0))
    assert_close(synk.function(lambda x: inner.fn(x) * 2)(X), 2 * X.sum(0))


def test_methods_and_partials():
    """A bound method and a partial are functions too."""

    class Model:
        def loss(self, x):
            return x.mean()

    assert_close(synk.function(Model().loss, reduce="mean")(X), X.mean())
    assert_close(synk.function(functools.partial(dot, w=W), reduce="concat")(X), X @ W)


def test_many_threads():
    """Calls from several threads, the first included, each get their answer."""
    f = synk.function(lambda x: x.sum())
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda rows: float(f(np.ones(rows, np.float32))), [5, 8, 9, 8, 5, 12, 3, 8]))
    assert got == [5, 8, 9, 8, 5, 12, 3, 8]


@pytest.mark.parametrize("bound", [{"k": 2.0}, {"w": np.float32([2])}, {}])
def test_defaults_of_partials_are_dealt_out(group, bound):
    """An array that is a default, and not what the partial has bound."""

    def fn(x, w=np.arange(3, dtype=np.float32), *, k=1.0):  # noqa: B008  # what is tested
        return (x * w).sum() * k

    f, one = synk.function(functools.partial(fn, **bound), name="f"), np.ones(3, np.float32)
    for _ in range(2):
        assert float(f(one)) == float(f.serial(one)) == float(jax.jit(f)(one)) == fn(one, **bound)


def test_static_values_that_are_equal_and_differ(group):
    """0.0 and -0.0, 1 and 1.0 and True also within tuples: each has its own program; NaN is found again."""
    f = synk.function(lambda x, s: x / s, inputs={"s": "static"}, reduce="concat")
    g = synk.function(lambda x, s: x * s[0][0], inputs={"s": "static"}, reduce="concat")
    for _ in range(2):
        for zero in (0.0, -0.0, np.float32(0.0), np.float32(-0.0)):
            np.testing.assert_array_equal(f(np.ones(4, np.float32), zero), np.float32(np.copysign(np.inf, zero)))
        for one in (1, 1.0, True):
            with jax.numpy_dtype_promotion("standard"):
                assert g(np.ones(4, np.int32), ((one,),)).dtype == (np.float32 if type(one) is float else np.int32)
    for _ in range(2):
        f(np.ones(4, np.float32), float("nan"))
    assert (f.stats.compilations, g.stats.compilations) == (5, 3)


@synk.function
def named(x):
    return x.sum()


def test_pickles():
    """By their names, as Python's functions, so that pools of processes take them."""
    assert pickle.loads(pickle.dumps(named)) is named
    anew = synk.function(named.fn)
    for f in (anew, synk.function(functools.partial(jnp.sum, axis=0)), synk.function(lambda x: x.sum())):
        with pytest.raises(TypeError, match=f"{f.name}: a synk function is pickled by its name"):
            pickle.dumps(f)


def test_copies(four):
    """A function is its own copy, as Python's are; a shared variable has none, used or not."""
    w = synk.shared(np.float32(2), name="w")
    f = synk.function(lambda x: x.sum() * w.value)
    for _ in range(2):
        model = copy.deepcopy({"f": f})
        assert model["f"] is f is copy.copy(f)
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"w: a shared variable is not copied .*synk\.shared\(w\.value\)"):
                make(w)
        assert float(model["f"](np.ones(5, np.float32))) == 10


X8 = numbers(8)


def branches(amount):
    return amount if amount.sum() > 0 else -amount


class Model:
    @synk.function
    def loss(self, x):
        return x.sum()


def test_a_decorated_method():
    """Accessed on an instance it says what to do; on the class it is the function."""
    with pytest.raises(TypeError, match=r"loss.*(method|self)[\s\S]*synk\.function\("):
        Model().loss(X8)
    assert isinstance(Model.loss, synk.typing.Function)


def test_members_of_a_function(group):
    """Beside what `functools.wraps` brings."""
    f = synk.function(branches, then=lambda total: total)
    assert members(f) == {
        "fn",
        "name",
        "stats",
        "then",
        "shared",
        "iterate",
        "stream",
        "over",
        "serial",
        "check",
        "compile",
        "explain",
        "blame",
    }
