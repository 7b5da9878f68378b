"""Stream and each: the results of plain calls on what a loader gives, in order, and on a value for each batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from ..helpers import GROUPS, Bar, assert_close, assert_same, group_of, numbers, slow, slow_but

ITEMS = [(numbers(rows, 3, seed), np.float32(seed + 1)) for seed, rows in enumerate((4, 7, 4, 1, 9, 4))]
of_every_size = pytest.mark.parametrize("size", [0, 1, 3])


@synk.function(inputs=["x"], outputs=("sum", "concat"))
def scaled(x, rate):
    return rate * x.sum(0), x * rate


def wanted(items=ITEMS):
    return [scaled(*item) for item in items]


FORMS = {
    "tuple": lambda x, rate: (x, rate),
    "list": lambda x, rate: [x, rate],
    "mapping": lambda x, rate: {"rate": rate, "x": x},
    "arrays of JAX": lambda x, rate: (jnp.asarray(x), jnp.asarray(rate)),
    "data": lambda x, rate: (synk.data(x, place="scatter"), rate),
}


@pytest.mark.parametrize(
    ("group", "form"),
    [*[(GROUPS[1], form) for form in FORMS], slow(GROUPS[2], "arrays of JAX"), slow(GROUPS[2], "data")],
)
@of_every_size
def test_results_in_order(group, size, form):
    """Of any numbers of rows; warm as well as fresh, and in slices."""
    with group_of(*group):
        for slices in (1, 2):
            found = list(scaled.stream((FORMS[form](*item) for item in ITEMS), prefetch=size, num_slices=slices))
            for got, want in zip(found, wanted(), strict=True):
                assert_same(got, want)


def test_one_argument(four):
    """What is no tuple, list or mapping is the only one."""
    total = synk.function(lambda x: x.sum(0))
    for got, (x, _) in zip(total.stream(x for x, _ in ITEMS), ITEMS, strict=True):
        assert_same(got, x.sum(0))
    assert list(total.stream([])) == []


@of_every_size
def test_memory_that_is_used_again(four, size):
    """A loader may write its next item where the last one lay, rows and broadcast ones."""

    def loader():
        x, rate = np.zeros((4, 3), np.float32), np.zeros((), np.float32)
        for i in range(6):
            x[:], rate[...] = i, i
            yield x, rate

    found = [np.asarray(total) for total, _ in scaled.stream(loader(), prefetch=size)]
    assert [total.tolist() for total in found] == [[4.0 * i * i] * 3 for i in range(6)]


def test_its_length(four):
    """Where the source says one; some have a len() that raises."""

    class Endless:
        def __iter__(self):
            return iter(ITEMS)

        def __len__(self):
            raise TypeError("no")

    with scaled.stream(ITEMS) as results:
        assert len(results) == 6
    for source in (Endless(), iter(ITEMS)):
        with scaled.stream(source) as results, pytest.raises(TypeError, match="number of items"):
            len(results)
    assert len(list(scaled.stream(Endless()))) == 6


@of_every_size
def test_errors_come_at_their_item(four, size):
    """Of the source, of an item's form, and of a call."""

    def loader(bad):
        yield from ITEMS[:2]
        if isinstance(bad, Exception):
            raise bad
        yield bad

    for bad, kind in (
        (KeyError("loader"), KeyError),
        ((np.ones(3), 1.0, 2), TypeError),
        ({"rows": np.ones(3)}, TypeError),
        ((np.ones((0, 3), np.float32), 1.0), ValueError),
        (("text", 1.0), TypeError),
    ):
        results = scaled.stream(loader(bad), prefetch=size)
        for want in wanted(ITEMS[:2]):
            assert_same(next(results), want)
        with pytest.raises(kind):
            next(results)
        with pytest.raises(StopIteration):
            next(results)
    for got, want in zip(scaled.stream(ITEMS, prefetch=size), wanted(), strict=True):  # and goes on
        assert_same(got, want)


def test_leaving_closes_a_generator(four):
    """By break, and by the end of a with block."""
    is_closed = []

    def loader():
        try:
            while True:
                yield ITEMS[0]
        finally:
            is_closed.append(True)

    for i, _ in enumerate(scaled.stream(loader())):
        if i == 3:
            break
    with scaled.stream(loader()) as results:
        next(results)
    results.close()
    assert len(is_closed) == 2


def test_where_it_may_not_run(four):
    """Nor what is no source."""
    results = scaled.stream(ITEMS)
    for refused in (lambda x: scaled.stream(ITEMS), lambda x: next(results)):
        with pytest.raises(synk.SynkError, match=r"scaled\.stream"):
            jax.jit(refused)(1.0)
    with pytest.raises(TypeError, match=r"scaled\.stream: its source is 3"):
        scaled.stream(3)
    with pytest.raises(TypeError, match="prefetch"):
        scaled.stream(ITEMS, prefetch="2")
    assert len(list(results)) == 6


def test_torch_tensors(four):
    """As a DataLoader of PyTorch collates them: lists of tensors, the last one short."""
    torch = pytest.importorskip("torch")
    x, y = numbers(22, 3), np.arange(22, dtype=np.float32)
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    dot = synk.function(lambda x, y: (x * y[:, None]).sum(0))
    results = dot.stream(loader)
    assert len(results) == 3
    for i, got in enumerate(results):
        part = slice(8 * i, 8 * i + 8)
        assert_same(got, (x[part] * y[part, None]).sum(0))


@pytest.mark.slow
def test_training_on_a_stream(four):
    """Steps, and local ones, which average what is left."""

    def loss(w, x):
        return ((w - x.mean(1)) ** 2).mean()

    items = [(x,) for x, _ in ITEMS]
    plain, streamed = [synk.train.step(loss, np.float32(0), optax.sgd(0.1)) for _ in range(2)]
    assert [float(value) for value in streamed.stream(items)] == [float(plain(*item)) for item in items]
    plain, streamed = [synk.contrib.local_steps(loss, np.float32(0), optax.sgd(0.1), every=4) for _ in range(2)]
    for item in items:
        plain(*item)
    plain.finish()
    assert len(list(streamed.stream(items))) == 6
    assert float(streamed.params.value) == float(plain.params.value)


# Each.


@of_every_size
@pytest.mark.parametrize("place", slow_but(["host", "scatter"], ["raw", "host", "scatter"]))
def test_a_value_for_each_batch(four, size, place):
    """Numbers and keys, one after the other; also where the data is written to between two batches."""
    x, batches = numbers(11, 3), [[3, 1], slice(5), None, [7]]
    rows = x if place == "raw" else synk.data(x, place=place)
    rates = (np.float32(rate) for rate in (1, 2, 3, 4, 5))  # more do no harm
    for i, (got, _) in enumerate(scaled.iterate(rows, synk.each(rates), batches=batches, prefetch=size)):
        picked = x if batches[i] is None else x[batches[i]]
        assert_same(got, (i + 1) * picked.sum(0))
        if place != "raw" and size == 0:
            rows[0] = x[0]
    keys = jax.random.split(jax.random.key(0), 4)
    noisy = synk.function(lambda x, key: x.sum() + jax.random.normal(key), inputs=["x"], reduce="stack")
    found = [np.asarray(got) for got in noisy.iterate(x, synk.each(keys), batches=batches, prefetch=size)]
    for got, key, batch in zip(found, keys, batches, strict=True):
        assert_same(got, noisy(x, key, batch=batch))


@of_every_size
def test_values_in_one_array(four, size):
    """Values may be written into the same memory one after another: each is taken as it was when it came."""
    x, memory = numbers(11, 3), np.zeros((), np.float32)

    def values():
        for i in range(6):
            memory[...] = i
            yield memory

    found = [got for got, _ in scaled.iterate(x, synk.each(values()), batches=[slice(4)] * 6, prefetch=size)]
    assert_same(np.stack(found), np.arange(6, dtype=np.float32)[:, None] * x[:4].sum(0))


class Tensor:
    """Shows its memory as an array, as PyTorch's on the host do."""

    def __init__(self, array):
        self.array = array

    shape, dtype, ndim = (
        property(lambda self, name=name: getattr(self.array, name)) for name in ("shape", "dtype", "ndim")
    )
    __array_interface__ = property(lambda self: self.array.__array_interface__)

    def __array__(self, dtype=None, copy=None):
        return self.array


@of_every_size
def test_tensors_in_one_memory(four, size):
    """They are copied as arrays are."""
    x, memory = numbers(4, 3), np.zeros((), np.float32)

    def values():
        for i in range(1, 7):
            memory[...] = i
            yield Tensor(memory)

    want = np.arange(1, 7, dtype=np.float32)[:, None] * x.sum(0)
    streamed = [got for got, _ in scaled.stream(((x, value) for value in values()), prefetch=size)]
    each = [got for got, _ in scaled.iterate(x, synk.each(values()), batches=[None] * 6, prefetch=size)]
    assert_same((np.stack(streamed), np.stack(each)), (want, want))


def test_each_over_batches(four):
    """Of `over` too."""
    x = numbers(12, 3)
    total = synk.function(lambda x, rate: rate * x.sum(0), inputs=["x"])
    got = total.over(x, synk.each([1.0, 2.0, 3.0]), batches=synk.minibatches(12, 4, shuffle=False))
    assert_same(got, sum((i + 1) * x[4 * i : 4 * i + 4].sum(0) for i in range(3)))


def test_each_that_does_not_fit(four):
    """Too few, of a scattered input, outside of loops, and what is no iterable."""
    x = numbers(8, 3)
    results = scaled.iterate(x, synk.each([1.0]), batches=synk.minibatches(8, 4))
    next(results)
    with pytest.raises(ValueError, match="fewer values than there are batches"):
        next(results)
    with pytest.raises(ValueError, match="fewer values"):
        next(scaled.iterate(x, synk.each([]), batches=synk.minibatches(8, 4)))
    with pytest.raises(ValueError, match="argument x is scattered"):
        scaled.iterate(synk.each([x]), 1.0, batches=synk.minibatches(8, 4))
    with pytest.raises(TypeError, match="rate"):
        scaled(x, synk.each([1.0]))
    with pytest.raises(TypeError, match="argument rate is a masked array"):
        list(scaled.iterate(x, synk.each([np.ma.array([1.0], mask=True)] * 2), batches=synk.minibatches(8, 4)))
    f = synk.function(lambda x, flag: x.sum() if flag else -x.sum(), inputs={"flag": "static"})
    for call in (f.iterate, f.over):
        with pytest.raises(
            TypeError, match=r"static argument flag .*synk\.each gives each batch a value of its own.*broadcast"
        ):
            list(call(x, synk.each([True, False]), batches=synk.minibatches(8, 4)))
    with pytest.raises(TypeError, match=r"synk\.each: 3 is no iterable"):
        synk.each(3)
    with pytest.raises(TypeError, match="argument rate"):
        list(scaled.iterate(x, synk.each([1.0, "a"]), batches=synk.minibatches(8, 4)))


@pytest.mark.parametrize(
    ("group", "bar", "start"),
    [
        *[(("devices", 3), bar, start) for bar in (lambda batches: batches, Bar) for start in (1, 5, 8)],
        slow(("devices", 1), Bar, 1),
        slow(("simulated", 3), Bar, 5),
    ],
)
def test_each_of_a_run_that_goes_on(group, start, bar):
    """Values go with their batches, whether those that are left out are given too or not; in a second epoch too."""
    x, rates = numbers(11, 3), np.arange(1, 9, dtype=np.float32)
    with group_of(*group):
        order = {"seed": 2, "epochs": 2}
        whole = [total for total, _ in scaled.iterate(x, synk.each(rates), batches=synk.minibatches(11, 3, **order))]
        for values in (rates, list(rates), jnp.asarray(rates), rates[start:]):
            for _ in range(2):
                rest = bar(synk.minibatches(11, 3, start=start, **order))
                assert_same([total for total, _ in scaled.iterate(x, synk.each(values), batches=rest)], whole[start:])
            if start < 8:
                assert_close(scaled.over(x, synk.each(values), batches=rest)[0], sum(whole[start:]), atol=1e-5)


@pytest.mark.parametrize("values", [np.ones(5), np.ones(9), np.ones(1), iter(np.ones(8)), (1.0 for _ in range(5))])
def test_each_of_another_number_than_start_tells(group, values):
    """Nobody could tell which of them belong to the batches that are left."""
    step = synk.train.step(lambda w, x, rate: ((w - rate * x) ** 2).mean(), np.float32(0), optax.sgd(0.1), inputs=["x"])
    for call in (scaled.iterate, scaled.over, step.iterate):
        for batches in (synk.minibatches(8, 1, start=2), Bar(synk.minibatches(4, 1, epochs=2, start=2))):
            with pytest.raises(ValueError, match=r"argument rate.* start=2.* all 8 batches.* the 6 that are left"):
                call(numbers(8, 3), synk.each(values), batches=batches)


def test_each_key_of_a_run_that_goes_on(group):
    """Keys of `row_keys` are the same for a batch, however many batches there will be."""
    key, order = jax.random.key(3), {"epochs": 2, "shuffle": False}
    draw = synk.function(lambda x, key: jax.random.normal(synk.part_key(key), x.shape), inputs=["x"], reduce="concat")
    runs = []
    for epochs, start in ((2, 0), (2, 3), (5, 3)):
        order = {"epochs": epochs, "shuffle": False}
        keys = synk.row_keys(key, len(synk.minibatches(8, 4, **order)))
        batches = synk.minibatches(8, 4, start=start, **order)
        runs.append(list(draw.iterate(np.zeros(8, np.float32), synk.each(keys), batches=batches)))
    assert_same(runs[1], runs[0][3:])
    assert_same(runs[2][:1], runs[0][3:])


def test_each_is_of_batches(group):
    """In an item it would begin anew with each."""
    f = synk.function(lambda x, rate: x.sum() * rate, inputs=["x"], name="f")
    rates = synk.each([1.0, 2.0])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"f.stream: argument rate is synk.each, .* Put the value itself"):
            list(f.stream((np.ones(3), rates) for _ in range(2)))
    assert [float(y) for y in f.stream((np.ones(3), rate) for rate in (1.0, 2.0))] == [3, 6]


def test_each_names_its_argument(group):
    """Where values are too few, or trees."""
    f = synk.function(lambda x, rate: x.sum() * rate["a"], inputs=["x"], name="f")
    x, batches = np.ones(3), [[0], [1]]
    with pytest.raises(
        ValueError, match=r"f.iterate: synk.each of argument rate\['a'\] has fewer values than there are"
    ):
        list(f.iterate(x, {"a": synk.each([1.0])}, batches=batches))
    with pytest.raises(TypeError, match=r"synk.each gives argument rate a dict. Give it a tree of synk.each instead"):
        list(f.iterate(x, synk.each([{"a": 1.0}] * 2), batches=batches))
    assert [float(y) for y in f.iterate(x, {"a": synk.each([1.0, 2.0])}, batches=batches)] == [1, 2]


def test_items_that_bring_no_rows(four):
    """Broadcast arguments alone, none at all, and minibatch data: as calls of the function."""
    doubled = synk.function(lambda s: s * 2, inputs=["broadcast"], reduce="max")
    ranks = synk.function(lambda: synk.rank(), reduce="stack")
    totals = synk.function(jnp.sum)
    for _ in range(2):
        assert [float(y) for y in doubled.stream([3.0, 4.0])] == [6, 8]
        assert [y.tolist() for y in ranks.stream([(), ()])] == [[0, 1, 2, 3]] * 2
        batches = [synk.data(np.full(5, i, np.float32), minibatch=True) for i in (1, 2)]
        assert [float(y) for y in totals.stream(batches)] == [5, 10]
    with pytest.raises(ValueError, match="batches pick rows of scattered inputs, but this call has none"):
        doubled.iterate(3.0, batches=[[0]])


def test_a_mapping_is_keywords():
    """For a mapping as the only argument the message says what to yield."""
    with group_of("devices", 2):
        f = synk.function(lambda b: b["x"].sum(), name="f")
        with pytest.raises(TypeError, match=r"missing a required argument: 'b'.*gives arguments by name.*\(item,\)"):
            list(f.stream([{"x": np.ones(3)}]))
        assert [float(out) for out in f.stream([({"x": np.ones(3)},)])] == [3]
