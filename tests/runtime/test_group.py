"""Groups: which devices, which one is current, and what a machine with CPUs only makes of it."""

import contextlib
import copy
import ctypes
import operator
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from .. import harness
from ..helpers import assert_close, group_of, numbers


def run(code, **environment):
    """What a fresh Python prints."""
    done = harness.python(code, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_all_devices_by_default():
    """`init()` and the first use take every device."""
    assert synk.init().devices == tuple(jax.devices())
    synk.close()
    assert synk.group().devices == tuple(jax.devices())
    assert synk.size() == jax.device_count()


def test_some_devices():
    """An int takes the first; a list is taken as it is, in its order."""
    assert synk.init(3).devices == tuple(jax.devices()[:3])
    assert synk.init(jax.devices()[:1:-2]).devices == tuple(jax.devices()[:1:-2])
    assert synk.init(np.int64(2)).size == 2


def test_members(group):
    """Size, devices, mesh, platform, and a readable repr."""
    assert len(group.devices) == group.size
    assert group.mesh.size == (1 if group.is_simulated else group.size)
    assert group.mesh.axis_names == ("replica",)
    assert group.platform == jax.devices()[0].platform
    ids = ", ".join(str(device.id) for device in dict.fromkeys(group.devices))
    kind = "simulated replicas" if group.is_simulated else "replicas"
    assert repr(group) == f"Group({group.size} {kind} on {group.platform}:{ids})"
    assert repr(synk.init(1)) == f"Group(1 replica on {group.platform}:{jax.devices()[0].id})"


def test_simulated():
    """n replicas on one device."""
    group = synk.simulate(5)
    assert (group.size, group.is_simulated, set(group.devices)) == (5, True, {jax.devices()[0]})
    assert repr(group) == f"Group(5 simulated replicas on {group.platform}:{jax.devices()[0].id})"


def test_with_restores():
    """Leaving `with` makes the previous group current again, after an error too."""
    outer = synk.init(2)
    with synk.simulate(3) as inner:
        assert synk.group() is inner
        with outer:
            assert synk.group() is outer
        assert synk.group() is inner
    assert synk.group() is outer
    with pytest.raises(KeyError), inner:
        raise KeyError
    assert synk.group() is outer


def test_a_function_binds_the_current_group():
    """At each call; it may be made before there is one."""
    f = synk.function(lambda x: x.sum(0), reduce="stack")
    for make, n in [(synk.init, 1), (synk.init, 4), (synk.simulate, 3), (synk.init, 8)]:
        with make(n):
            assert_close(f(numbers(9)), np.stack([part.sum(0) for part in np.array_split(numbers(9), n)]))


def test_a_variable_lives_in_the_group_of_its_first_use():
    """And reads there from anywhere; after close it is copied into a new one."""
    w = synk.shared(np.arange(3), name="w")
    with synk.init(2):
        assert w.value.tolist() == [0, 1, 2]
    with synk.simulate(4):
        with pytest.raises(synk.SynkError, match=r"w: it lives in Group\(2 replicas .* or make a new one"):
            synk.function(lambda x: x.sum() + w.value.sum())(np.ones(4, np.int32))
        again = synk.shared(w.get_value())
        assert int(synk.function(lambda x: x.sum() + again.value.sum(), reduce="max")(np.ones(4, np.int32))) == 4


def test_close():
    """Waits for what runs and forgets the group; the next use makes another."""
    group = synk.simulate(2)
    got = synk.function(jnp.sum)(np.ones(4, np.float32))
    synk.close()
    assert got.is_ready()
    assert synk.group() is not group


def test_virtual_devices_before_jax_starts():
    """On a machine with CPUs only `init(4)` makes four."""
    code = "import synk; print(synk.init(4)); import jax; print(jax.device_count())"
    assert run(code).split("\n") == ["Group(4 replicas on cpu:0, 1, 2, 3)", "4"]


BEFORE = """
import jax, jax.numpy as jnp, numpy as np
ten = jnp.arange(10.0)  # JAX has started, with one device
key, double, there = jax.random.key(0), jax.jit(lambda v: 2 * v), jax.device_put(ten, jax.devices()[0])
import synk
first = synk.init(1)
f = synk.function(lambda x: (x * ten.sum()).mean(), reduce="mean")
w, later = synk.shared(np.float32(2), name="w"), synk.shared({"ten": ten, "key": key})
g = synk.function(lambda x: x.sum() * w.value, name="g")
lying = {place: synk.data(np.arange(10.0), place=place) for place in ("host", "scatter", "broadcast")}
loop = f.iterate(ten, batches=synk.minibatches(10, 4), prefetch=2)
print(double(ten).sum(), f(ten), f(there), g(ten), f(lying["scatter"]), float(next(loop)))
"""


@pytest.mark.smoke
@pytest.mark.parametrize("sizes", [(4,), (3, 8, 2, 4)], ids=str)
def test_virtual_devices_after_jax_has_started(sizes):
    """They are made then; arrays, functions, data, loops and `with` go on, and a variable says where it lives."""
    after = f"""
for n in {sizes}:
    group = synk.init(n)
    assert group.size == n and group is synk.init(n) and group.devices == tuple(jax.devices()[:n])
print(double(ten).sum(), f(ten), f(there), w.value * 45, *{{float(f(rows)) for rows in lying.values()}}, float(f(ten[:4])))
f.check(ten, batch=7)
assert len(list(loop)) == 2 and len([*f.iterate(ten, batches=synk.minibatches(10, 4))]) == 3
try: g(ten)
except synk.SynkError as error: print(error)
with first: print(g(ten), f(lying["scatter"]))
with synk.init(12): print(synk.group())
assert synk.group() is group
h = synk.function(lambda x: (x * later.value["ten"].sum()).mean() + jax.random.normal(later.value["key"]), reduce="mean")
h.check(ten)
"""
    before, now, error, old, wider = run(BEFORE + after).split("\n")
    assert before.startswith("90.0 202.5 202.5 90.0 202.5 ")
    assert now == "90.0 202.5 202.5 90.0 202.5 67.5"
    assert error.startswith("w: it lives in Group(1 replica on cpu:0), but the current group is Group(4 replicas on")
    assert old == "90.0 202.5"
    assert wider == "Group(12 replicas on cpu:0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)"


@pytest.mark.parametrize(
    ("environment", "call"),
    [
        ({"JAX_NUM_CPU_DEVICES": "1"}, "synk.init(4)"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, "synk.init(4)"),
        ({}, "jax.eval_shape(lambda: synk.init(4))"),
    ],
    ids=["variable", "flag", "traced"],
)
def test_where_no_devices_can_be_made(environment, call):
    """Where the environment says how many, or inside a trace, it raises and says what to set."""
    code = f"import jax, synk\njax.devices()\ntry: {call}\nexcept ValueError as error: print(error)"
    said = run(code, **environment)
    assert "4 replicas were asked for, but JAX has started with 1 CPU device. Set JAX_NUM_CPU_DEVICES=4" in said


def test_the_environment_counts():
    """What the user has chosen is kept."""
    code = "import synk; print(synk.init(2), synk.init().size)"
    assert run(code, JAX_NUM_CPU_DEVICES="3") == "Group(2 replicas on cpu:0, 1) 3"


def test_nothing_starts_a_backend():
    """Neither importing synk nor making functions and variables: `init(4)` can still choose afterwards."""
    code = """
import numpy as np, synk
w = synk.shared({"a": np.zeros(3), "n": 1.0}, name="w")
@synk.function(inputs=["x"], outputs="mean")
def f(x, rate):
    return x.mean() * w.value["n"] * rate
@f.then
def f(mean, rate):
    return mean
repr(w), repr(f), f.shared, f.stats
print(synk.init(4).size, float(f(np.arange(9.0), 2.0)))
"""
    assert run(code) == "4 8.0"


def test_a_later_group_of_that_kind():
    """Where both print alike, the message says which is meant."""
    first = synk.simulate(2)
    w = synk.shared(np.float32(3), name="w")
    f = synk.function(lambda x: x.sum() * w.value)
    assert f(np.ones(4, np.float32)) == 12
    synk.close()
    synk.simulate(2)
    with pytest.raises(synk.SynkError, match=r"w: it lives in .* the current group is a later one of that kind"):
        f(np.ones(4, np.float32))
    with first:
        assert f(np.ones(4, np.float32)) == 12


def step_and_collectives():
    """A little of everything, uneven rows included."""
    w = synk.shared(np.zeros(3, np.float32), name="w")
    f = synk.function(lambda x: jnp.mean(x) + w.value.sum(), reduce="mean")
    g = synk.function(lambda x: jnp.sum(x, 0), then=lambda total: w.update(w.value + total))
    for rows in (8, 7, 2):
        g(np.ones((rows, 3), np.float32))
    synk.all_reduce(w)
    return f(np.arange(7, dtype=np.float32)), w.value


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_another_mesh_is_set(four, kind):
    """What the user's own arrays lie on is not synk's business."""
    kind = getattr(jax.sharding.AxisType, kind)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(kind,))):
        mean, w = step_and_collectives()
    assert (round(float(mean), 3), w.tolist()) == (54.0, [17.0] * 3)


@pytest.mark.smoke
@pytest.mark.parametrize("context", [jax.disable_jit, jax.checking_leaks, lambda: jax.debug_nans(True)])
def test_under_debugging_options(four, context):
    """They disturb no call, and no call disturbs them."""
    with context():
        mean, w = step_and_collectives()
    assert (round(float(mean), 3), w.tolist()) == (54.0, [17.0] * 3)


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


def test_nested_with_of_one_group():
    """A group entered again is still there after the inner block."""
    with synk.simulate(2) as group:
        with group:
            pass
        assert synk.group() is group


def test_a_group_made_before_with_stays():
    """`g = synk.init(4)` makes g current for good, a `with g:` in between or not."""
    group = synk.init(4)
    with group:
        assert synk.group() is group
    assert synk.group() is group


@pytest.mark.parametrize("make", [synk.init, synk.simulate, synk.init])
def test_with_restores_the_group_of_before(make):
    """`with synk.init(4):` restores what was current before, also after an error, and by an ExitStack."""
    before = synk.simulate(2)
    with pytest.raises(KeyError), make(4):
        raise KeyError
    assert synk.group() is before
    with contextlib.ExitStack() as stack:
        stack.enter_context(make(4))
    assert synk.group() is before


AGAIN = [lambda: synk.init(2), lambda: synk.init(jax.devices()[:2]), lambda: synk.simulate(3), synk.init, synk.init]


@pytest.mark.parametrize("make", AGAIN)
def test_a_cell_that_runs_twice(make):
    """The group of the same devices is the current one, whose variables and programs go on."""
    first, w = make(), synk.shared(np.float32(2))
    total = synk.function(lambda x: x.sum() * w.value)
    assert float(total(np.ones(7, np.float32))) == 14
    assert make() is first is synk.group()
    w.value = np.float32(3)
    assert float(total(np.ones(7, np.float32))) == 21 and total.stats.compilations == 1
    synk.close()
    assert make() is not first


@pytest.mark.parametrize(
    "other",
    [
        lambda: synk.init(3),
        lambda: synk.init(2, memory="1GB"),
        lambda: synk.simulate(2),
        lambda: synk.init(jax.devices()[1::-1]),
    ],
)
def test_a_group_of_other_settings_is_another(other):
    """Other devices, another order, another kind and other memory make a new group, there and back."""
    first = synk.init(2)
    second = other()
    assert second is not first and synk.group() is second
    assert synk.init(2) not in (first, second)


@pytest.mark.parametrize("make", AGAIN)
def test_with_of_the_current_group(make):
    """A block of the same group, nested or in turn, leaves current what was so before it."""
    before = synk.simulate(5)
    with make() as outer:
        for _ in range(2):
            with make() as inner:
                assert inner is outer is synk.group()
                with before:
                    assert make() is not outer
                    with make(), outer:
                        assert synk.group() is outer
                assert synk.group() is outer
            assert synk.group() is outer
        with pytest.raises(KeyError), make():
            raise KeyError
        assert make() is outer is synk.group()
    assert synk.group() is before
    group = make()
    with make():
        pass
    with group:
        assert make() is group
    assert synk.group() is group


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_group_is_not_copied(group, take):
    """Its devices are those of one process, and a copy would be another group."""
    with pytest.raises(TypeError, match=r"Group\(2 replicas .*not copied or pickled. Make one there"):
        take({"group": group}["group"])


def test_groups_in_turn():
    """Blocks of three groups, one of them twice, end in their order."""
    with synk.init(2) as a, synk.simulate(3) as b:
        with a, synk.simulate(2):
            with b:
                assert synk.group() is b
        assert synk.group() is b
    with a:
        assert synk.group() is a


def test_a_group_is_a_number(group):
    """As `n = synk.init()` was."""
    n = len(group.devices)
    assert (operator.index(group), int(group)) == (n, n)
    assert list(range(group)) == list(range(n)) and "%d" % group == str(n)  # noqa: UP031
    assert np.zeros(group).shape == (n,)


def test_a_new_number_each_call_keeps_groups():
    """Numbers that are placed once do not push other things out."""
    with group_of("devices", 1) as group:
        f = synk.function(lambda x, rate: x.sum() * rate, inputs={"rate": "broadcast"})
        f.check(np.ones(4, np.float32), 1.0)
        f(np.ones(4, np.float32), 1.0)
        before, two = f.stats.compilations, group._derived(group.devices[:1] * 2, True)
        for i in range(1100):
            f(np.ones(4, np.float32), float(i))
        f.check(np.ones(4, np.float32), 1.0)
        assert group._derived(group.devices[:1] * 2, True) is two and f.stats.compilations == before
