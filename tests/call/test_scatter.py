"""Outputs by "scatter" stay on the replicas that made them, and go from function to function without a gather."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk._call import states
from synk._call.parts import Uneven

from ..helpers import assert_same, group_of, needs_devices, numbers, slow

GATHERS = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def doubled(name="doubled"):
    return synk.function(lambda x: x * 2, reduce="scatter", name=name)


@pytest.mark.parametrize(
    ("kind", "n", "rows"),
    [
        ("devices", 2, 13),
        *(
            slow(*which)
            for which in (
                ("simulated", 3, 1),
                ("devices", 1, 6),
                ("simulated", 3, 13),
                ("devices", 8, 6),
                ("devices", 8, 13),
            )
        ),
    ],
)
def test_rows_go_on(kind, n, rows):
    """Any rows and slices; picked from, whole, and by other functions; serially, checked, and under jit an array."""
    x = numbers(rows, 3)
    with group_of(kind, n):
        f, total = doubled(), synk.function(lambda a, b: (a + b).sum(0))
        for slices in (1, 3, 1):
            made = f(x, num_slices=slices)
            assert isinstance(made, synk.typing.Data)
            assert (made.place, made.shape, made.dtype) == ("scatter", (rows, 3), np.float32)
            assert_same(np.asarray(made), x * 2)
            assert_same(f(made, num_slices=slices)[:], x * 4)
            assert_same(total(made, x), (x * 3).sum(0))
            assert_same(f(made, batch=[0, rows - 1])[:], (x * 4)[[0, rows - 1]])
            f.check(made, num_slices=slices)
        assert_same(f.serial(made), x * 4)
        assert_same(jax.jit(f)(x), x * 2)
        assert_same(jax.grad(lambda x: f(x).sum())(x), np.full_like(x, 2))
        if rows >= n:
            assert_same(f(made, batch_s=slice(0, 1))[:], np.stack([part[0] * 4 for part in np.array_split(x, n)]))


@needs_devices(2)
def test_nothing_is_gathered():
    """Programs have no collective, and each replica holds its rows alone."""
    with group_of("devices", 2):
        x, y = numbers(200, 4), numbers(30, 4)
        distances = synk.function(lambda x, y: jnp.abs(x[:, None] - y[None]).sum(-1), ["x"], reduce="scatter")
        nearest = synk.function(lambda d: d.argmin(1), reduce="concat")
        text = distances.compile(x, y).as_text() or ""
        assert not any(f" {name}" in text for name in GATHERS)
        made = distances(x, y)
        assert [shard.data.shape for shard in made._copy.addressable_shards] == [(1, 100, 30)] * 2  # no public way
        assert_same(nearest(made), np.abs(x[:, None] - y[None]).sum(-1).argmin(1).astype(np.int32))


def test_beside_other_outputs():
    """In a tree with sums and others, subsets, and PRNG keys; row numbers count all rows."""
    with group_of("devices", 2):

        @synk.function(outputs={"sum": "sum", "rows": "scatter", "keys": "scatter"})
        def f(x):
            keys = jax.vmap(jax.random.key)(synk.row_numbers())
            return {"sum": x.sum(0), "rows": synk.row_numbers(), "keys": keys}

        draw = synk.function(lambda keys: jax.vmap(jax.random.normal)(keys), reduce="concat")
        x = numbers(7, 3)
        for slices in (1, 2):
            found = f(x, num_slices=slices)
            assert_same(found["sum"], x.sum(0))
            assert found["rows"][:].tolist() == list(range(7))
            assert_same(draw(found["keys"]), jax.vmap(jax.random.normal)(jax.vmap(jax.random.key)(jnp.arange(7))))
        assert f(x, output_subset=["rows"])[0][:].tolist() == list(range(7))


def test_it_is_data():
    """It can move, be freed and be used in another group; what it holds is not written to."""
    x = numbers(7, 3)
    with group_of("devices", 2):
        f = doubled()
        made = f(x)
        with pytest.raises(ValueError, match=r"doubled\(\.\.\.\): the array it holds is read-only"):
            made[0] = 1
        with group_of("simulated", 3):
            assert_same(f(made)[:], x * 4)
        assert_same(f(made)[:], x * 4)
        assert_same(f(made.to("host"))[:], x * 4)
        assert_same(f(made.to("broadcast"))[:], x * 4)
        made.set_length(3)
        assert_same(f(made)[:], (x * 4)[:3])
        made.free()
        with pytest.raises(synk.SynkError, match=r"doubled\(\.\.\.\): it was freed\. .* doubled\(\.\.\.\)\.set_value"):
            made[0]
        with pytest.raises(synk.SynkError, match="was freed"):
            f(made)


def test_refused():
    """What has no rows that could stay says so."""
    x = numbers(6, 3)
    with group_of("devices", 2):
        with pytest.raises(ValueError, match=r'f: output has shape .* "scatter" needs one output row'):
            synk.function(lambda x: x.sum(), reduce="scatter", name="f")(x)
        with pytest.raises(ValueError, match=r'"scatter", so it stays in parts, but then takes whole outputs'):
            synk.function(lambda x: x, reduce="scatter", then=lambda x: x)(x)
        with pytest.raises(ValueError, match=r"'scatter' shows which replica .* over"):
            doubled().over(x, batches=[2])
        with pytest.raises(ValueError, match="this call has no rows"):
            synk.function(lambda: jnp.ones(3), reduce="scatter")()
        data, f = synk.data(x, place="scatter"), doubled("f")
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"rows dealt out as \[2, 1\], but this call gives the replicas \[1, 2\]"
            ):
                f(data, batch_s=[[0], [0, 1]])
        assert_same(f(data, batch_s=[[0, 1], [0]])[:], x[[0, 1, 3]] * 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda r: r + 1, lambda r: 1 - r, lambda r: -r, lambda r: r > 1, lambda r: r == 1, lambda r: r * jnp.ones(6),
        lambda r: jnp.ones(6) * r, lambda r: float(r), lambda r: jnp.mean(r), lambda r: jax.jit(jnp.sum)(r),
        lambda r: r.mean(), lambda r: r.T,
    ],
)  # fmt: skip
def test_it_is_no_array(use):
    """Used as one it says where its rows lie, and what to do."""
    x = numbers(6, 3)
    with group_of("devices", 2):
        made = doubled()(x)
        with pytest.raises(
            (TypeError, AttributeError, synk.SynkError), match=r"lie on the replicas\. Pass it .* np\.asarray"
        ):
            use(made)
        with pytest.raises((TypeError, AttributeError, synk.SynkError), match=r"x is a .*lie on the host\. Pass it"):
            use(synk.data(x, name="x"))
        for array in (
            np.asarray(made),
            jnp.asarray(made),
            made * np.float32(1),
            np.ones(()) * made,
            np.abs(made) * np.sign(made),
        ):
            np.testing.assert_allclose(array, 2 * x, rtol=1e-6)
        assert made and len(made) == 6 and made == made and made != synk.data(x) and {made: 1}[made] == 1


def test_rows_of_a_variable():
    """A variable that holds rows brings them too."""
    x = numbers(7, 3)
    with group_of("devices", 2):
        held = synk.shared(x, name="held")
        synk.scatter(held, x)
        f = synk.function(lambda: held.value * 2, reduce="scatter")
        assert_same(f()[:], x * 2)
        assert_same(f(num_slices=2)[:], x * 2)


@pytest.mark.parametrize(("kind", "n"), [slow("simulated", 4), ("devices", 4)])
def test_only_real_rows_are_seen(monkeypatch, kind, n):
    """Where every replica runs every branch, also one for more rows than it has."""
    # What calls the host runs in no such way; this one does, to tell what it sees.
    monkeypatch.setattr(states, "choose_uneven", lambda *call: Uneven("all", True))
    seen = []

    def see(x):
        jax.debug.callback(lambda rows: seen.extend(np.ravel(rows)), x)
        return x + 0 * jnp.convolve(x, jnp.ones(1, x.dtype))  # on CPU devices, what is for branches runs outside them

    f = synk.function(see, reduce="concat")
    smooth = synk.function(lambda x: see(x)[1:-1], inputs=[synk.Overlap(1)], reduce="concat")
    with group_of(kind, n):
        for rows in (5, 3):
            x = np.arange(1, rows + 1, dtype=np.float32)
            held = synk.shared(x, name="held")
            synk.scatter(held, x)
            kept = synk.function(lambda x: 1 * x, reduce="scatter")(x)
            for got in (f(kept), f(kept, num_slices=2), smooth(kept), smooth(held)):
                assert_same(got, x)
            assert_same(synk.function(lambda held=held: see(held.value), reduce="concat")(), x)
            assert_same(f(kept, batch_s=[[0], [0], [], []]), x[[0, 2 if rows == 5 else 1]])
            jax.effects_barrier()
            assert min(seen) > 0
