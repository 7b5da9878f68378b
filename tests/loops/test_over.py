"""Over: many batches of any sizes give the answer of one call over all their rows, and combine once."""

import re
import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk import stats
from synk._loops import over

from ..helpers import assert_same, group_of, numbers, slow_but

X, Y = numbers(37, 3), numbers(37)[:, 0]
# Sizes that divide and do not, one row, none for some replicas.
BATCHES: dict[str, Any] = {
    "minibatches": lambda: synk.minibatches(37, 8, seed=1),
    "mixed": lambda: [[7], [3, 1, 0, 9], slice(20, 37), [36], 5, X[:, 0] > 0],
}
OUTPUTS = {
    "sum": "sum", "mean": "mean", "half": "mean", "max": "max", "least": "min", "prod": "prod", "any": "any", "rows": "concat",
    "numbers": "concat", "parts": lambda parts: parts.sum(0), "weighted": "mean", "none": "concat", "own": "merge",
    "std": "merge", "argmax": "merge", "top": "merge", "quantile": "merge", "counts": "merge",
}  # fmt: skip


def compose(a, b):
    """Of affine maps: a, then b."""
    return b[0] * a[0], b[0] * a[1] + b[1]


def everything(x, y, w):
    """An output for each op."""
    maps = jax.lax.associative_scan(compose, (jnp.cos(x[:, 0]), y))
    weight = jnp.abs(y).sum()
    return {
        "sum": x.sum(0), "mean": (x * w.value).mean(0), "half": (60 + x).astype(np.float16).mean(0), "max": x.max(0),
        "least": x.min(0), "prod": jnp.cos(x).prod(0), "any": (x > 1).any(0), "rows": x * 2, "numbers": synk.row_numbers(),
        "parts": x.sum(0), "weighted": synk.Weighted((x[:, 0] * y).sum() / weight, weight), "none": x[:, :0],
        "own": synk.Monoid(jax.tree.map(lambda leaf: leaf[-1], maps), compose), "std": stats.std(x),
        "argmax": stats.argmax(x), "top": stats.top_k(jnp.round(y), 3), "quantile": stats.quantile(x, 0.3),
        "counts": stats.histogram(x, 5, (-2, 2)),
    }  # fmt: skip


def order(batches: Any, rows=37):
    """The rows of all batches, one after another."""
    numbers = np.arange(rows)
    return np.concatenate([numbers[:b] if isinstance(b, int) else numbers[... if b is None else b] for b in batches])


QUICK = [(("devices", 2), "minibatches")]
CASES = [*QUICK, (("simulated", 3), "mixed")]


@pytest.mark.parametrize(("group", "batches"), slow_but(QUICK, CASES))
def test_over_is_one_call_over_all_rows(group, batches):
    """Every op, any batches and slices, warm as fresh; and calls of the same function come between."""
    with group_of(*group):
        w = synk.shared(np.float32(2))
        f = synk.function(lambda x, y: everything(x, y, w), outputs=OUTPUTS)
        want = f.serial(X, Y, batch=order(BATCHES[batches]()))
        for slices, prefetch in ((1, 2), (3, 0)):
            got = f.over(X, Y, batches=BATCHES[batches](), num_slices=slices, prefetch=prefetch)
            for name in want:
                near = partial(np.testing.assert_allclose, rtol=2e-3 if name == "half" else 1e-4, atol=1e-5)
                jax.tree.map(near, got[name], want[name])
                for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
                    assert (a.shape, a.dtype) == (b.shape, b.dtype)
        before = f.stats.compilations
        f.over(X, Y, batches=BATCHES[batches]())
        assert f.stats.compilations == before


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("group", "slices"),
    slow_but(
        [(("devices", 3), 2)],
        [(group, slices) for group in (("devices", 1), ("devices", 3), ("simulated", 4)) for slices in (1, 2)],
    ),
)
def test_entries_are_joined_on_the_host(group, slices):
    """Of rows, parts and ordered Monoids, in the order of the batches' rows: NumPy arrays, which may be written to."""
    ops = {"rows": "concat", "half": "concat", "most": lambda parts: parts.max(0), "own": "merge", "middle": "merge"}
    last = lambda x: synk.Monoid(x[-1], lambda a, b: b)  # noqa: E731
    with group_of(*group):
        f = synk.function(
            lambda x: {
                "rows": x * 2, "half": x[:, 0].astype(np.float16), "most": x.max(0), "own": last(x),
                "middle": stats.quantile(x, 0.5),
            },
            outputs=ops,
        )  # fmt: skip
        for batches in (BATCHES["minibatches"](), BATCHES["mixed"](), BATCHES["minibatches"]()):
            got, rows = f.over(X, batches=batches, num_slices=slices), X[order(batches)]
            assert {type(value) for value in got.values()} == {np.ndarray}
            np.testing.assert_array_equal(got["rows"], 2 * rows)
            np.testing.assert_array_equal(got["half"], rows[:, 0].astype(np.float16), strict=True)
            np.testing.assert_array_equal(got["most"], rows.max(0))
            np.testing.assert_array_equal(got["own"], rows[-1])
            np.testing.assert_allclose(got["middle"], np.median(rows, 0), rtol=1e-6)
            for value in got.values():
                value[...] = 0
        # What is made of sums alone stays on the replicas.
        assert isinstance(synk.function(lambda x: x.sum()).over(X, batches=[4]), jax.Array)


def test_a_stack_over_batches():
    """One entry for each replica that had rows, of one batch after another; not with slices, as in a call."""
    with group_of("devices", 3):
        f = synk.function(lambda x: x.sum(), reduce="stack", name="f")
        x = np.arange(8, dtype=np.float32)
        np.testing.assert_array_equal(f.over(x, batches=[slice(0, 6), [6], [7, 0]]), [1, 5, 9, 6, 7, 0])
        with pytest.raises(ValueError, match=r"'stack' .* does not go with num_slices > 1"):
            f.over(x, batches=[slice(0, 6)], num_slices=2)


def test_keys_and_rows_without_elements():
    """Keys come back as keys, on every replica; entries without elements in as many rows as there are."""
    with group_of("devices", 2):
        f = synk.function(lambda x, key: (synk.row_keys(key), x[:, :0]), {"key": "broadcast"}, reduce="concat")
        key = jax.random.key(3)
        got, none = f.over(X, key, batches=[4, slice(4, 11)])
        want, _ = f(X, key, batch=11)
        assert got.sharding == want.sharding
        assert_same(jax.random.key_data(got), jax.random.key_data(want))
        assert none.shape == (11, 0)


def test_entries_leave_the_devices_batch_by_batch():
    """Devices hold those of the newest batches alone, however many there are."""
    with group_of("devices", 2):
        f = synk.function(lambda x: jnp.tile(x, (1, 100)), reduce="concat")
        x, most = np.ones((8, 125), np.float32), []

        def batches():
            for _ in range(12):
                yield slice(0, 8)
                most.append(sum(array.nbytes for array in jax.live_arrays()))

        f.over(x, batches=batches())
        most.clear()
        assert f.over(x, batches=batches()).shape == (96, 12500)
        assert max(most) - most[0] <= 2 * 8 * 12500 * 4


@pytest.mark.slow
def test_places():
    """Rows on the host and on the replicas, pieces of a file, rows that this process holds: the same answer."""
    with group_of("devices", 2):
        f = synk.function(lambda x: (x.sum(0), stats.argmax(x), x[:, 0]), outputs=("sum", "merge", "concat"))
        batches = BATCHES["mixed"]()
        want = f.serial(X, batch=order(batches))
        for place in ("host", "scatter", "broadcast"):
            assert_same(f.over(synk.data(X, place=place), batches=batches), want)
        assert_same(f.over(jnp.asarray(X), batches=batches), want)
        assert_same(f.over(synk.local(X), batches=batches[:1]), f.serial(X, batch=order(batches[:1])))


def test_stats_and_subset():
    """It is one call, of all rows; a subset of the outputs may be asked for."""
    with group_of("devices", 2):
        f = synk.function(lambda x: {"a": x.sum(0), "b": x.max(0)}, outputs={"a": "sum", "b": "max"})
        (b,) = f.over(X, batches=synk.minibatches(37, 10), output_subset=["b"])
        assert_same(b, X.max(0))
        assert (f.stats.calls, f.stats.rows) == (1, 37)


def collectives(monkeypatch, act):
    """How many collectives the programs have that are compiled meanwhile, in all."""
    texts, compile = [], jax.stages.Lowered.compile

    def noted(lowered, *args, **kwargs):
        texts.append(lowered.as_text())
        return compile(lowered, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", noted)
        act()
    assert texts
    return len(re.findall("all_reduce|all_gather|all_to_all|collective_permute|reduce_scatter", " ".join(texts)))


@pytest.mark.slow
@pytest.mark.smoke
def test_one_combination(monkeypatch):
    """Nine statistics: at most two collectives a dtype; over many batches as many as in one call."""

    def nine(x):
        digit = jnp.round(x[:, 0]).astype(int) % 4
        return (
            stats.mean(x), stats.var(x), stats.std(x), stats.cov(x), stats.logsumexp(x), stats.argmax(x),
            stats.top_k(x[:, 0], 3), stats.bincount(digit, 4), stats.confusion(digit, digit, 4),
        )  # fmt: skip

    with group_of("devices", 2):
        x = numbers(16, 3)
        one = collectives(monkeypatch, lambda: synk.function(nine)(x))
        over = collectives(monkeypatch, lambda: synk.function(nine).over(x, batches=synk.minibatches(16, 2)))
        assert over == one
        assert one <= 2 * 2  # float32 and int32


REFUSED = {
    "then": (lambda x: x.sum(), {"then": lambda s: s}, ValueError, "f.over: the function has a then"),
    "scatter": (lambda x: x, {"reduce": "scatter"}, ValueError, "does not go with over. Use an op that combines"),
    "first": (lambda x: x.sum(), {"reduce": "first"}, ValueError, "does not go with over"),
    "shapes": (
        lambda x: jnp.zeros(len(x) + 4),
        {},
        ValueError,
        r"output is float32\[7\] on a replica in batch 1, but float32\[6\]",
    ),
    "top_k": (lambda x: stats.top_k(x[:, 0], 30), {}, ValueError, "needs 30 rows, .* but this call has 11"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_refused(which):
    """What has no one answer over all batches says so, and the next call is right."""
    fn, options, error, message = REFUSED[which]
    with group_of("devices", 2):
        f = synk.function(fn, name="f", **options)
        for _ in range(2):
            with pytest.raises(error, match=message):
                f.over(X, batches=[slice(0, 4), slice(4, 10), [5]])
        if which == "top_k":
            assert f.over(X, batches=[slice(0, 20), slice(20, 37)])[0].shape == (30,)


def test_rows_without_numbers(monkeypatch):
    """Row numbers, and statistics of all rows at once, end where int32 does; what needs neither goes on."""
    monkeypatch.setattr(over, "MOST_ROWS", 30)
    with group_of("devices", 2):
        batches = [slice(0, 20), slice(20, 37)]
        for fn, op in ((stats.argmax, "merge"), (lambda x: stats.quantile(x, 0.5), "merge")):
            with pytest.raises(ValueError, match="rows beyond 30 have no number in int32"):
                synk.function(fn, reduce=op).over(X, batches=batches)
        assert_same(synk.function(lambda x: x.max(0), reduce="max").over(X, batches=batches), X.max(0))
        assert_same(synk.function(lambda x: 2 * x, reduce="concat").over(X, batches=batches), 2 * X)


@pytest.mark.parametrize(("fn", "op", "count"), [(jnp.sum, "sum", 0), (stats.argmax, "merge", 1)])
def test_only_who_asks_is_told_row_numbers(monkeypatch, fn, op, count):
    """They differ from batch to batch, so they travel; all else that a launch is told has been told before."""
    told = []
    put = over.put
    monkeypatch.setattr(over, "put", lambda group, value, layout: told.append(value.shape) or put(group, value, layout))
    with group_of("devices", 2):
        f = synk.function(lambda x: fn(x), reduce=op)
        x = np.append(X[:29, 0], 9).astype(np.float32)
        assert_same(f.over(x, batches=[slice(0, 10), slice(10, 20), slice(20, 30)]), f.serial(x))
    assert len(told) == count


def test_refused_batches():
    """No batch, no row, rows that are not there; what is no iterable of batches."""
    with group_of("devices", 2):
        f = synk.function(lambda x: x.sum(), name="f")
        for batches, error, message in (
            ([], ValueError, "f.over: there was no batch"),
            ([[]], ValueError, "selects no rows"),
            ([slice(0, 4), [99]], IndexError, "99"),
            (4, TypeError, "f.over: batches is 4"),
        ):
            with pytest.raises(error, match=message):
                f.over(X, batches=batches)
        assert_same(f.over(X, batches=[4, slice(4, None)]), X.sum())


def test_updates_are_refused():
    """A function that updates a variable has more than an answer to give; the variable stays as it was."""
    with group_of("devices", 2):
        w = synk.shared(np.float32(1), name="w")
        f = synk.function(lambda x: setattr(w, "value", x.sum()), name="f")
        with pytest.raises(ValueError, match=r"f\.over: it updates w"):
            f.over(X, batches=[4])
        assert float(w.value) == 1


def test_a_variable_set_between_batches():
    """All batches make one answer, so all must find the same values."""
    with group_of("devices", 2):
        w = synk.shared(np.float32(1), name="w")
        f = synk.function(lambda x: x.sum() * w.value, name="f")

        def batches():
            yield 4
            w.value = np.float32(2)
            yield 4

        with pytest.raises(synk.SynkError, match=r"f\.over: w was set between two batches"):
            f.over(X, batches=batches(), prefetch=0)
        assert_same(f.over(X, batches=[4]), 2 * X[:4].sum())


def test_under_a_trace():
    """It runs when called, so a trace refuses it; warm too."""
    with group_of("devices", 2):
        f = synk.function(lambda x: x.sum(), name="f")
        for _ in range(2):
            with pytest.raises(synk.SynkError, match=r"f\.over: it runs when called"):
                jax.jit(lambda x: f.over(x, batches=[4]))(X)
            f.over(X, batches=[4])


def test_batches_of_unlike_shapes():
    """An output whose shape depends on the rows of a batch does not combine, and is named."""
    with group_of("devices", 1):
        f = synk.function(lambda x: {"a": x.sum(), "b": jnp.zeros(2 * len(x))}, name="f")
        with pytest.raises(ValueError, match=r"f.over: output\['b'\] is float32\[10\] .* batch 1, but float32\[8\]"):
            f.over(X, batches=[4, 5])
        g = synk.function(lambda x: [x.sum()] * len(x), name="g")
        with pytest.raises(ValueError, match=r"g.over: what it returns has another tree in batch 1"):
            g.over(X, batches=[4, 5])


def test_under_debug_infs():
    """What changes a maximum nothing is infinite; it is no result, also in slices and on replicas without rows."""
    with group_of("devices", 2), jax.debug_infs(True):
        f = synk.function(lambda x: (x.max(0), x.min(0), jnp.cos(x).prod(0)), outputs=("max", "min", "prod"))
        for rows, got in (
            (X[:5], f(X[:5], num_slices=3)),
            (X[:5], f.over(X[:5], batches=[[0], [1], slice(2, 5)])),
            (X[:1], f(X[:1], num_slices=2)),
            (X[:1], f.over(X[:1], batches=[1])),
        ):
            assert_same(got[:2], (rows.max(0), rows.min(0)))
            np.testing.assert_allclose(got[2], np.cos(rows).prod(0), rtol=1e-5)


class TestSources:
    """f.over(source=loader): the items bring all arguments."""

    @pytest.mark.parametrize(("slices", "prefetch"), slow_but([(2, 2)], [(1, 0), (1, 2), (2, 0), (2, 2)]))
    def test_a_loader_with_a_short_last_batch(self, group, slices, prefetch):
        """Equal to NumPy over all rows, whatever the sizes of batches; tuples and mappings; fresh and warm."""
        x = np.random.default_rng(0).normal(3, 2, 1001).astype(np.float32)
        y = np.arange(1001, dtype=np.float32) % 7
        f = synk.function(
            lambda x, y: {"mean": jnp.mean(x * y), "std": synk.stats.std(x), "y": y},
            {"x": "scatter", "y": "scatter"},
            {"mean": "mean", "std": "merge", "y": "concat"},
        )
        for size in (64, 1001, 300):
            pairs = [(x[i : i + size], y[i : i + size]) for i in range(0, 1001, size)]
            for items in (pairs, iter([{"y": b, "x": a} for a, b in pairs])):
                found = f.over(source=items, prefetch=prefetch, num_slices=slices)
                np.testing.assert_allclose(found["mean"], np.mean(np.float64(x) * y), rtol=1e-6)
                np.testing.assert_allclose(found["std"], np.std(np.float64(x)), rtol=1e-5)
                np.testing.assert_array_equal(found["y"], y)

    def test_arguments_may_be_anything_that_stream_takes(self, group):
        """A generator whose memory is used again, and one array an item."""

        def loader():
            kept = np.zeros(4, np.float32)
            for number, rows in enumerate((4, 4, 1)):
                kept[:] = number
                yield kept[:rows]

        f = synk.function(lambda x: x.sum())
        assert float(f.over(source=loader())) == 0 * 4 + 1 * 4 + 2
        assert float(f.over(source=loader())) == 6

    def test_each_item_is_run_before_the_next_is_asked_for(self, group):
        """So nothing of it is copied, and it may have its memory again."""
        f = synk.function(lambda x: x.sum())
        add, seen = jax.jit(lambda x: x + 1, donate_argnums=0), []

        def loader(x):
            for _ in range(4):
                yield x
                seen.append(f.stats.rows)
                x = add(x)

        def placed(rows):
            return jax.device_put(jnp.zeros(rows), group.stacked if rows % group.size == 0 else None)

        for rows in (2 * group.size, 2 * group.size + 1):
            before = f.stats.rows
            assert float(f.over(source=loader(placed(rows)))) == 6 * rows
            assert [number - before for number in seen[-4:]] == [rows, 2 * rows, 3 * rows, 4 * rows]

    def test_one_batch_in_memory(self, group):
        """A batch is let go of before the next one is asked for."""
        made, alive = [], []

        def load(rows):
            x = np.ones(rows, np.float32)
            made.append(weakref.ref(x))
            alive.append(sum(reference() is not None for reference in made))
            return x

        f = synk.function(lambda x: x.sum())
        for _ in range(2):
            f.over(source=map(load, [8, 8, 3, 8]))
        assert alive == [1] * 8

    def test_what_is_refused(self, group):
        """In words that say what to write."""
        f = synk.function(lambda x, y: x.sum(), name="f")
        loader = [(np.ones(3), np.ones(3))]
        with pytest.raises(TypeError, match=r"f\.over: batches pick rows of its arguments.*f\.over\(source=loader\)"):
            f.over(batches=loader)
        with pytest.raises(TypeError, match=r"f\.iterate: batches pick rows.*f\.stream\(loader\)"):
            f.iterate(batches=loader)
        with pytest.raises(ValueError, match=r"f\.over: prefetch is -1"):
            f.over(source=loader, prefetch=-1)
        for wrong in (lambda: f.over(loader), lambda: f.over(batches=loader, source=loader)):
            with pytest.raises(TypeError, match=r"f\.over: give batches=, .* or source=, a loader"):
                wrong()
        with pytest.raises(TypeError, match=r"f\.over: source= brings all arguments"):
            f.over(np.ones(3), source=loader)
        with pytest.raises(TypeError, match=r"f\.over: its source is 3"):
            f.over(source=3)
        with pytest.raises(ValueError, match="there was no batch"):
            f.over(source=[])
        assert float(f.over(source=loader)) == 3


def test_a_torch_data_loader():
    """As it is, the short last batch too."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = np.random.default_rng(0).normal(size=(1001, 3)).astype(np.float32)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.from_numpy(x)), batch_size=64)
    f = synk.function(lambda x: jnp.mean(x), reduce="mean")
    np.testing.assert_allclose(f.over(source=loader), x.mean(dtype=np.float64), rtol=1e-6)
