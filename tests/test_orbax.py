"""Checkpoints by orbax: what comes back is what was there when it was saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
import synk.orbax

from .helpers import assert_same, group_of

ocp = pytest.importorskip("orbax.checkpoint", reason="install the extra `orbax`")
pytestmark = pytest.mark.filterwarnings("ignore")  # of orbax's own


def values():
    """A tree of several dtypes with a key, and rows."""
    return {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "h": jnp.full(2, 0.1, jnp.bfloat16)}


@pytest.fixture
def manager(tmp_path):
    """Saves in the background."""
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        yield manager


def test_round_trip(manager):
    """Equal values come back into another number of replicas, too; functions may run on at once."""
    with group_of("devices", 4):
        w, k = synk.shared(values()), synk.shared(jax.random.key(3), name="k")
        before = w.value
        double = synk.function(lambda: None, then=lambda _: w.update(jax.tree.map(lambda v: v * 2, w.value)))
        assert synk.orbax.save(manager, {"w": w, "k": k}, step=1, extra={"at": [2]})
        double()
        manager.wait_until_finished()
        assert synk.orbax.load(manager, {"w": w, "k": k}) == (1, {"at": [2]})
        assert_same(w.value, before)
        double()
    with group_of("simulated", 3):
        w, k = synk.shared(jax.tree.map(lambda v: v * 0, values())), synk.shared(jax.random.key(0))
        synk.orbax.load(manager, {"w": w, "k": k}, step=1)
        assert_same(w.value, before)
        assert_same(jax.random.key_data(k.value), jax.random.key_data(jax.random.key(3)))


def test_what_differs(manager):
    """Replicas' own values and rows come back into as many."""
    with group_of("devices", 2):
        rows, own = synk.shared(np.zeros((1, 2), np.float32), name="rows"), synk.shared(np.float32(0), name="own")
        synk.scatter(rows, np.arange(10, dtype=np.float32).reshape(5, 2))
        own.set_value(np.float32(7), rank=1)
        synk.orbax.save(manager, {"rows": rows, "own": own}, step=3)
        manager.wait_until_finished()
        synk.broadcast(own, np.float32(1))
        synk.broadcast(rows, np.zeros((1, 2), np.float32))
        synk.orbax.load(manager, {"rows": rows, "own": own})
        assert (synk.contrib.synkhronos.get_lengths(rows), float(own.get_value(0)), float(own.get_value(1))) == (
            [3, 2],
            0,
            7,
        )
        assert_same(synk.gather(rows, nd_up=0), np.arange(10, dtype=np.float32).reshape(5, 2))


@pytest.mark.parametrize("kept", [True, False], ids=["in shards", "whole"])
@pytest.mark.parametrize("sharded", [True, False], ids=["in shards", "whole"])
@pytest.mark.parametrize(
    "place", [("devices", 4), ("devices", 3), ("simulated", 4), ("simulated", 5), ("devices", 1)], ids=str
)
def test_shards(manager, place, sharded, kept):
    """Values in shards and whole ones come back as either, in any group, and functions run on at once."""
    rng = np.random.default_rng(3)
    value = {
        "layers": rng.normal(size=(3, 77, 78)).astype(np.float32), "flat": jnp.asarray(rng.normal(size=33_001), jnp.bfloat16),
        "small": np.float32([1, 2]), "empty": np.zeros((0, 3), np.float32), "key": jax.random.key(3),
    }  # fmt: skip
    with group_of("devices", 4):
        w = synk.shared(value, sharded=kept)
        double = synk.function(lambda: None, then=lambda _: w.update(jax.tree.map(lambda v: v, w.value)))
        synk.orbax.save(manager, {"w": w}, step=1)
        double()
        manager.wait_until_finished()
        if kept:
            assert (4, 3, 1502) in [leaf.shape for leaf in jax.tree.leaves(manager.item_metadata(1)["state"])]
    with group_of(*place):
        zeros = {name: jnp.zeros_like(leaf) for name, leaf in value.items() if name != "key"}
        other = synk.shared(zeros | {"key": jax.random.key(9)}, sharded=sharded)
        synk.orbax.load(manager, {"w": other})
        assert_same(jax.tree.map(_numbers, other.value), jax.tree.map(_numbers, value))
        update = synk.function(lambda: None, then=lambda _: other.update(jax.tree.map(lambda v: v, other.value)))
        update()
        assert_same(jax.tree.map(_numbers, other.value), jax.tree.map(_numbers, value))


def test_small_leaves_of_a_variable_in_shards(manager):
    """None is cut, and they come back on another number of replicas."""
    with group_of("devices", 4):
        synk.orbax.save(manager, {"w": synk.shared(values(), sharded=True)}, step=1)
        manager.wait_until_finished()
    with group_of("devices", 3):
        w = synk.shared(jax.tree.map(lambda v: v * 0, values()), sharded=True)
        synk.orbax.load(manager, {"w": w})
        assert_same(w.value, values())


def _numbers(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def test_a_damaged_checkpoint(tmp_path):
    """The newest that can be read is loaded, and a warning names the damaged one. A step that was asked for raises."""
    with group_of("simulated", 2), ocp.CheckpointManager(tmp_path) as manager:
        w = synk.shared(np.zeros(3, np.float32))
        for step in (1, 2, 3):
            w.value = np.full(3, step, np.float32)
            synk.orbax.save(manager, {"w": w}, step=step, extra=step)
        manager.wait_until_finished()
        (tmp_path / "3" / "about" / "metadata").write_text("{")
        for part in (tmp_path / "2" / "state").rglob("d/*"):
            part.write_bytes(b"")
        with pytest.warns(UserWarning, match=r"step 2 in .* cannot be read .*Step 1 is loaded in its place") as told:
            assert synk.orbax.load(manager, {"w": w}) == (1, 1) and w.value.tolist() == [1] * 3
        assert any("step 3 in" in str(one.message) for one in told)
        for step in (2, 3):
            with pytest.raises(synk.errors.CheckpointError, match=f"step {step} in .* cannot be read"):
                synk.orbax.load(manager, {"w": w}, step=step)
        with pytest.raises(ValueError, match=r"shape was \[3\]"):
            synk.orbax.load(manager, {"w": synk.shared(np.zeros(4, np.float32))})
        assert w.value.tolist() == [1] * 3


def test_messages(manager):
    """As `synk.load` says them; nothing changes."""
    with group_of("devices", 2):
        w = synk.shared(np.zeros(3, np.float32), name="w")
        with pytest.raises(FileNotFoundError, match="has none"):
            synk.orbax.load(manager, {"w": w})
        synk.orbax.save(manager, {"w": w}, step=1)
        manager.wait_until_finished()
        with pytest.raises(ValueError, match=r"synk.orbax.load: step is '1'; give an integer >= 0, or None"):
            synk.orbax.load(manager, {"w": w}, step="1")
        with pytest.raises(ValueError, match=r"shape was \[3\]"):
            synk.orbax.load(manager, {"w": synk.shared(np.zeros(4, np.float32))})
        with pytest.raises(ValueError, match="has no v and has w besides"):
            synk.orbax.load(manager, {"v": w})


def test_leaves_of_no_size(manager):
    """Come back too, alone and beside others; orbax itself refuses them."""
    with group_of("devices", 2):
        variables = {
            "w": synk.shared({"a": np.ones(3, np.float32), "e": np.zeros((0, 4), np.float32)}),
            "e": synk.shared(np.zeros(0, np.int32)),
            "none": synk.shared({}),
        }
        synk.orbax.save(manager, variables, step=1)
        variables["w"].value = {"a": np.zeros(3, np.float32), "e": np.zeros((0, 4), np.float32)}
        assert synk.orbax.load(manager, variables) == (1, None)
        assert variables["w"].value["a"].tolist() == [1, 1, 1] and variables["w"].value["e"].shape == (0, 4)
        assert (variables["e"].value.shape, variables["none"].value) == ((0,), {})


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"step": -1}, ValueError, "synk.orbax.save: step is -1"),
        ({"step": True}, ValueError, "synk.orbax.save: step is True"),
        ({"step": 1, "extra": {1: (1, 2)}}, TypeError, "synk.orbax.save: extra holds .*which JSON does not give back"),
        ({"step": 1, "extra": {1}}, TypeError, "synk.orbax.save: extra holds .*which JSON does not give back"),
    ],
)
def test_what_is_refused(manager, given, error, match):
    """As by synk.save, before anything is written; and a step that is not there, with those that are."""
    w = {"w": synk.shared(np.float32(1))}
    with pytest.raises(error, match=match):
        synk.orbax.save(manager, w, **given)
    synk.orbax.save(manager, w, step=3, extra={"n": np.int32(2)})
    with pytest.raises(FileNotFoundError, match=r"has steps \[3\], not 7"):
        synk.orbax.load(manager, w, step=7)
    assert synk.orbax.load(manager, w) == (3, {"n": 2})


def test_going_back(manager):
    """Orbax would save nothing before the latest step: refused, with a cure that works."""
    w = synk.shared(np.float32(0), name="w")
    for step in (100, 300):
        synk.orbax.save(manager, {"w": w}, step=step)
    assert not synk.orbax.save(manager, {"w": w}, step=300)
    manager.wait_until_finished()
    synk.orbax.load(manager, {"w": w}, step=100)
    for step in (99, 100, 110):
        with pytest.raises(ValueError, match=rf"synk.orbax.save: step {step} is before 300, .*manager\.delete\(step\)"):
            synk.orbax.save(manager, {"w": w}, step=step)
    manager.delete(300)
    for saved in (True, False):
        assert synk.orbax.save(manager, {"w": w}, step=110) == saved
    manager.wait_until_finished()
    assert synk.orbax.load(manager, {"w": w}) == (110, None)


def test_no_variables(manager):
    """What is kept besides comes back, as by `synk.save`; steps with variables go beside."""
    w = synk.shared(np.float32(3), name="w")
    assert synk.orbax.save(manager, {}, step=1, extra=[2])
    assert synk.orbax.save(manager, {"w": w}, step=2)
    assert synk.orbax.load(manager, {}, step=1) == (1, [2])
    assert synk.orbax.load(manager, {"w": w}) == (2, None)
    with pytest.raises(ValueError, match="step 1 has no w"):
        synk.orbax.load(manager, {"w": w}, step=1)
