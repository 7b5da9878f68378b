"""Numbers of less than a byte: JAX's compiled programs refuse them below jaxlib 0.12, synk's functions do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import group_of, slow, smoke

NUMBERS = np.array([1, 3, 2, 0, 2, 1, 3])


@pytest.mark.parametrize("replicas", [smoke(4), slow(1)])
@pytest.mark.parametrize("dtype", [smoke(jnp.int4), smoke(jnp.uint4)])
def test_functions_take_and_give_them(dtype, replicas, tmp_path):
    """As rows, broadcast arguments, data and variables; combined, collected and saved."""
    x, integers = NUMBERS.astype(dtype), NUMBERS.astype(np.int32)
    with group_of("devices", replicas):
        f = synk.function(lambda x: x.astype(jnp.int32) * 2, reduce="concat")
        for _ in range(2):
            assert f(x).tolist() == f(jnp.asarray(x)).tolist() == f(x, num_slices=2).tolist() == (2 * integers).tolist()
        f.check(x)
        for place in ("host", "scatter", "broadcast"):
            assert f(synk.data(x, place=place), batch=[6, 0, 2]).tolist() == [6, 2, 4]
        assert [each.tolist() for each in f.iterate(x, batches=[[6], [0, 2]])] == [[6], [2, 4]]
        assert f.over(x, batches=[[6], [0, 2]]).tolist() == [6, 2, 4]
        assert jax.jit(f)(jnp.asarray(x)).tolist() == (2 * integers).tolist()

        g = synk.function(
            lambda t, i: {"rows": t[i], "most": t.max()}, ["broadcast"], {"rows": "concat", "most": "max"}
        )
        found = g(x, np.arange(7))
        assert found["rows"].dtype == found["most"].dtype == dtype
        assert found["rows"].astype(int).tolist() == integers.tolist() and int(found["most"]) == 3

        w = synk.shared(x, name="w")
        step = synk.function(lambda y: y.sum(), then=lambda total: setattr(w, "value", w.value + jnp.asarray(1, dtype)))
        for _ in range(2):
            step(np.arange(7))
        assert w.value.astype(int).tolist() == (integers + 2).tolist()
        synk.check_replicas(w)
        synk.save(tmp_path, {"w": w}, step=1)
        synk.scatter(w, x)
        assert synk.gather(w, nd_up=0).astype(int).tolist() == integers.tolist()
        synk.all_gather(w)
        synk.load(tmp_path, {"w": w})
        assert w.value.astype(int).tolist() == (integers + 2).tolist()


@pytest.mark.skipif(not hasattr(jnp, "int2"), reason="this JAX has no int2")
def test_numbers_of_two_bits_are_refused():
    """XLA's collectives mix them up, and may end the program; inside a function they serve."""
    x = np.ones(7).astype(jnp.int2)
    with group_of("devices", 2):
        for wrong in (
            lambda: synk.function(lambda x: x.astype(jnp.int32), reduce="concat")(x),
            lambda: synk.function(lambda x: x.astype(jnp.int2), reduce="concat")(np.ones(7)),
            lambda: synk.function(lambda w, x: x, ["x"], reduce="concat")(x, np.ones(7)),
            lambda: synk.shared(x),
        ):
            with pytest.raises(
                TypeError, match=r"is int2, of which XLA sends wrong numbers between devices\. Use int4"
            ):
                wrong()
        f = synk.function(lambda i: jnp.asarray(x)[i].astype(jnp.int32), reduce="concat")
        assert f(np.arange(7)).tolist() == [1] * 7
