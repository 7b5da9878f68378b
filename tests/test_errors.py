"""Errors: each names the call, what was given, what was expected and what to do; and none loses anything."""

import collections
import os
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from .helpers import numbers, raised_by

pytestmark = pytest.mark.usefixtures("four")

X = numbers(9)
MANY = jax.device_count() + 1
HERE = os.path.dirname(synk.__file__)


def loss(x):
    return x.mean()


def act(x, w):
    return (x * w).sum()


class DataSet:
    """Columns of Hugging Face's `datasets`."""

    column_names, shape = ("x", "y"), (9, 2)


def mean():
    return synk.function(loss, reduce="mean")


def sum_with_w():
    return synk.function(act, ["x"])


def held(rows=9):
    w = synk.shared(np.zeros((1, 2), np.float32), name="held")
    synk.scatter(w, numbers(rows))
    return w


def assigning(new, **options):
    """A function that assigns to a variable with value zeros of (2,), and the call of it."""
    w = synk.shared(np.zeros(2, np.float32), name="w")

    def step(x):
        w.value = new(x)

    return lambda: synk.function(step)(X, **options)


def sliced(slices, dtype=np.float32):
    """A sliced call of a function whose update of w combines slices so."""
    w = synk.shared(np.zeros(2, dtype), name="w")

    def step(x):
        w.update(w.value + 1, slices=slices)

    return lambda: synk.function(step)(X, num_slices=2)


def data(place, rows=9):
    return synk.data(numbers(rows), place=place, name="data")


def resident(rows=9):
    return data("scatter", rows)


def freed():
    x = synk.data(X, name="x")
    x.free()
    return x


def rows_read_by(fn):
    return lambda: fn(held())


def twice_then():
    f = synk.function(loss, then=lambda m: m)
    f.then(lambda m: m)


def late_then():
    f = mean()
    f(X)
    f.then(lambda m: m)


def nested():
    inner = synk.function(loss, name="inner")
    synk.function(lambda x: inner(x), name="outer")(X)


def other_group():
    w = synk.shared(np.zeros(2, np.float32), name="w")
    step = synk.function(lambda x: x.sum(0) + w.value)
    step(X)
    with synk.simulate(2):
        step(X)


def with_reserved(name):
    scope = {}
    exec(f"def step(x, *, {name}): return x", scope)
    return lambda: synk.function(scope["step"])


def under_jit_with_shared():
    w = synk.shared(np.float32(1), name="w")
    step = synk.function(lambda x: (x * w.value).sum(), name="step")
    jax.jit(step)(X)


def then_under_jit_with_shared():
    w = synk.shared(np.float32(1), name="w")
    step = synk.function(lambda x: x.sum(), name="step", then=lambda s: s + w.value)
    jax.jit(step)(X)


def closed_over_tracer():
    jax.jit(lambda w: synk.function(lambda x: (x * w).sum(), name="step")(X))(jnp.float32(2))


def collective_under_jit():
    w = synk.shared(np.float32(1), name="w")
    jax.jit(lambda x: synk.all_reduce(w))(1.0)


def traced_into_shared():
    w = synk.shared(np.float32(1), name="w")
    jax.jit(lambda x: setattr(w, "value", x))(np.float32(2))


def writing_outside():
    ref = jax.new_ref(jnp.float32(0))
    synk.function(lambda x: ref.__setitem__(..., x.sum()), name="f")(X)


def set_value_inside():
    w = synk.shared(np.float32(1), name="w")
    synk.function(lambda x: w.set_value(x[0]), name="step")(X)


def collective_inside():
    w = synk.shared(np.float32(1), name="w")
    synk.function(lambda x: synk.broadcast(w), name="step")(X)


# What raises, its class, and what the message says: the argument or name, and the value given.
ERRORS = {
    # Groups.
    "too many devices": (
        lambda: jax.eval_shape(lambda: synk.init(MANY)),  # in a trace JAX does not start anew
        ValueError,
        rf"{MANY} replicas .* {MANY - 1} (CPU device.*JAX_NUM_CPU_DEVICES={MANY}|gpu device.*synk.simulate\({MANY}\))",
    ),
    "no replicas": (lambda: synk.init(0), ValueError, r"synk.init: the number of replicas is 0; .* >= 1"),
    "no simulated replicas": (lambda: synk.simulate(0), ValueError, r"synk.simulate: the number of replicas is 0; .* >= 1"),
    "half a replica": (lambda: synk.simulate(1.5), TypeError, r"synk.simulate: .* is 1.5; give an integer"),
    "true replicas": (lambda: synk.init(True), TypeError, r"synk.init: .*True"),
    "devices by name": (lambda: synk.init("cpu"), TypeError, r"devices is 'cpu'"),
    "no devices": (lambda: synk.init([]), TypeError, r"devices is \[\]; give at least one"),
    "a device twice": (lambda: synk.init([jax.devices()[0]] * 2), ValueError, "named twice"),
    "another group": (other_group, synk.SynkError, r"w: it lives in Group\(4 .* current group is Group\(2 simulated"),
    "rank outside": (synk.rank, synk.SynkError, "synk.rank: .* only inside a synk function"),
    # Building functions.
    "fn is no function": (lambda: synk.function(3), TypeError, "fn is 3"),
    "unknown op": (lambda: synk.function(loss, reduce="averge"), ValueError, 'loss: op \'averge\' .* did you mean "mean"'),
    "unknown op in outputs": (lambda: synk.function(loss, outputs=("sum", "maen")), ValueError, '\'maen\' .* "mean"'),
    "op of a wrong kind": (lambda: synk.function(loss, reduce=3), TypeError, "loss: op 3 is none of synk's"),
    "unknown engine": (lambda: synk.function(loss, engine="xmap"), ValueError, "loss: engine='xmap'; use 'shard_map' or"),
    "inputs of nothing": (lambda: synk.function(loss, []), TypeError, r'loss: inputs is \[\]; give .*"x": "broadcast"'),
    "a scattered key": (lambda: mean()(jax.random.key(0)), ValueError, 'x is a scalar and has no rows .*"x": "broadcast"'),
    "scan of local rows": (lambda: synk.contrib.scan(jnp.add, synk.local(X)), TypeError, "synk.local rows are for the arguments of synk functions"),
    "prefetch of local rows": (lambda: next(synk.prefetch([synk.local(X)])), TypeError, "synk.local rows are for the arguments of synk functions"),
    "a scalar in a tree": (lambda: mean()({"a": X, "s": 1.0}), ValueError, r"argument x\['s'\] is a scalar .* or give it a tree of modes"),
    "a variable set under jit": (lambda: jax.jit(lambda x: synk.shared(X, "w").set_value(X) or x)(X), synk.SynkError, "set_value: .* w is used inside jit"),
    "a variable is no number": (lambda: synk.shared(X, "w") == 3, TypeError, "its value is w.value"),
    "a variable is other than one": (lambda: np.float32(1) != synk.shared(X, "w"), TypeError, "its value is w.value"),
    "a variable as a condition": (lambda: 1 if synk.shared(X, "w") else 2, TypeError, "its value is w.value"),
    "each in a call": (lambda: mean()(synk.each([X])), TypeError, "synk.each gives a value to each batch of iterate or over"),
    "inputs is one string": (lambda: synk.function(loss, "x"), TypeError, "loss: inputs is 'x'; give a sequence"),
    "inputs names nothing": (lambda: synk.function(loss, ["y"]), ValueError, "inputs names 'y', but .* are x"),
    "inputs maps nothing": (lambda: synk.function(loss, {"y": "static"}), ValueError, "inputs names 'y', but .* are x"),
    "unknown mode": (lambda: synk.function(loss, {"x": "copy"}), ValueError, "mode of x is 'copy'; use \"scatter\""),
    "too many modes": (lambda: synk.function(loss, ["scatter"] * 2), ValueError, "inputs has 2 modes, but .* are x"),
    "static subtree": (lambda: synk.function(loss, {"x": ["static"]}), ValueError, r"mode of x is \['static'\]"),
    "inputs of a wrong kind": (lambda: synk.function(loss, 3), TypeError, "loss: inputs is 3"),
    **{
        f"parameter {name}": (with_reserved(name), ValueError, f"step: its parameter '{name}' comes by keyword alone.* Rename it")
        for name in ("batch", "batch_s", "num_slices", "output_subset", "batches", "prefetch", "rtol", "atol", "update")
    },
    "then twice": (twice_then, synk.SynkError, "loss: it has a then already"),
    "then after a call": (late_then, synk.SynkError, "loss: then comes before the first call"),
    "then is no function": (lambda: synk.function(loss, then=3), TypeError, "loss: then is 3"),
    # Arguments.
    "missing argument": (lambda: sum_with_w()(X), TypeError, "act: missing a required argument: 'w'"),
    "unknown argument": (lambda: mean()(X, y=1), TypeError, "loss: got an unexpected keyword argument 'y'"),
    "another's option": (lambda: mean().serial(X, num_slices=2), TypeError, "loss: num_slices is an option of other ways to call it; this one takes none"),
    "no argument but an option": (lambda: synk.function(lambda x, **more: x.sum()).blame(X, batch_s=[[0], [0, 1]]), TypeError, "batch_s is an option of other ways"),
    "a leaf that is no array": (
        lambda: synk.function(lambda x, m: x, ["x"], name="step")(X, {"act": jnp.tanh}),
        TypeError, r"step: argument m\['act'\] is a .*; give arrays",
    ),
    "a string": (lambda: mean()("x"), TypeError, "loss: argument x is a str"),
    "strings": (lambda: mean()(np.array(["a"] * 4)), TypeError, "loss: argument x has dtype <U1"),
    "objects": (lambda: mean()(np.array([None] * 4)), TypeError, "loss: argument x has dtype object"),
    "dates": (lambda: mean()(np.zeros(4, "M8[s]")), TypeError, "loss: argument x has dtype datetime64"),
    "a long double": (lambda: sum_with_w()(X, np.longdouble(1)), TypeError, "act: argument w has dtype .*; give numbers or booleans that JAX has"),
    "records": (
        lambda: mean()(np.rec.array([(1, 2.0)] * 4, dtype=[("a", int), ("b", float)])), TypeError,
        "loss: argument x has dtype .* give numbers or booleans that JAX has",
    ),
    "rows of long doubles": (lambda: mean()(np.ones(4, np.clongdouble)), TypeError, "loss: argument x has dtype .* that JAX has"),
    "a mapping that JAX does not know": (lambda: synk.function(lambda batch: batch["x"])(collections.UserDict(x=X)), TypeError, r"argument batch is a UserDict, whose items JAX does not see: pass dict"),
    "a ragged list": (lambda: mean()([[1, 2], [3]]), ValueError, "argument x is a list that makes no array"),
    "a seed for a key": (lambda: synk.row_keys(0, 3), TypeError, r"synk.row_keys: the key is 0; give a PRNG key, such as jax.random.key"),
    "a seed as an argument": (lambda: synk.function(lambda x, key: x + synk.part_key(key), ["x"])(X, 0), TypeError, r"synk.part_key: the key is .*; give a PRNG key"),
    "variables for each batch": (lambda: next(synk.function(lambda w, x: x.sum(), ["x"], name="f").iterate(synk.each([held()]), X, batches=[[0]])), TypeError, "synk.each gives values, not shared variables"),
    "a misspelt attribute": (lambda: setattr(held(), "valeu", 1), AttributeError, "valeu"),
    "a shared variable": (lambda: synk.function(lambda tree: tree["w"])({"w": held()}), TypeError, r"argument tree\['w'\] is the shared variable held; read held.value .* an argument of its own"),
    "a scalar to scatter": (lambda: mean()(1.0), ValueError, 'x is a scalar .* inputs={"x": "broadcast"}'),
    "rows differ": (lambda: synk.function(act)(X, X[:5]), ValueError, "argument w has 5 rows, but x has 9"),
    "no rows": (lambda: mean()(X[:0]), ValueError, "argument x has 0 rows"),
    "an item without rows": (lambda: mean().over(source=[X, X[:0]]), ValueError, "argument x has 0 rows.* Let loaders skip such items"),
    "a data set": (lambda: mean()(DataSet()), TypeError, r"argument x is a DataSet; give each column as an array, np.asarray\(dataset"),
    "modes are no prefix": (
        lambda: synk.function(loss, {"x": ["scatter", "broadcast"]})(X), ValueError, "modes .* of x are no prefix",
    ),
    "no hash": (
        lambda: synk.function(lambda x, n: x, {"n": "static"}, name="step")(X, []), TypeError, "argument n is a list, .* no hash",
    ),
    # Batches.
    "batch too long": (lambda: mean()(X, batch=10), IndexError, "batch=10 .* but x has 9"),
    "batch negative": (lambda: mean()(X, batch=-1), IndexError, "batch=-1 .* but x has 9"),
    "index too large": (lambda: mean()(X, batch=[0, 9]), IndexError, "index 9, but x has 9 rows"),
    "index too small": (lambda: mean()(X, batch=np.array([-10])), IndexError, "index -10, but x has 9 rows"),
    "mask too short": (lambda: mean()(X, batch=np.ones(8, bool)), ValueError, "mask of length 8, but x has 9 rows"),
    "empty mask": (lambda: mean()(X, batch=np.zeros(9, bool)), ValueError, "selects no rows"),
    "empty slice": (lambda: mean()(X, batch=slice(9, None)), ValueError, r"slice\(9, None, None\) selects no rows"),
    "empty list": (lambda: mean()(X, batch=[]), ValueError, "selects no rows"),
    "batch 0": (lambda: mean()(X, batch=0), ValueError, "0 selects no rows"),
    "float indexes": (lambda: mean()(X, batch=[0.0, 1.0]), TypeError, "batch has dtype float64"),
    "a bool": (lambda: mean()(X, batch=True), TypeError, "batch is True"),
    "two-dimensional batch": (lambda: mean()(X, batch=[[0]]), ValueError, r"batch has shape \(1, 1\)"),
    "batch without rows": (
        lambda: synk.function(lambda w: w, ["broadcast"], name="step")(1.0, batch=3), ValueError, "step: batch picks rows .* none to pick from",
    ),
    "batch_s without rows": (lambda: mean()(X, batch_s=3), ValueError, "loss: batch_s picks rows .* none of its inputs"),
    "rows of the batch, without minibatch": (
        lambda: synk.function(act)(X, X[:3], batch=[1, 5, 8]),
        ValueError, r"w has 3 rows, but x has 9\. .* \"broadcast\", .* synk.data\(..., minibatch=True\)",
    ),
    "axes of pmap": (lambda: synk.function(act, (None, 0)), ValueError, "mode of w is 0; .* jax.pmap, 0 is .scatter. and None is .broadcast."),
    "None of pmap": (lambda: synk.function(act, ("scatter", None))(X, X), ValueError, "no prefix .* jax.pmap, 0 is"),
    "keys of replicas": (
        lambda: synk.function(act)(X, jax.random.split(jax.random.key(0), 8)),
        ValueError, r'w has 8 rows, but x has 9\. .*inputs=\{"w": "broadcast"\}, and use w\[synk\.rank\(\)\]; synk\.row_keys',
    ),
    "raw keys of replicas": (
        lambda: synk.function(act)(np.asarray(jax.random.split(jax.random.PRNGKey(0), 8)), X),
        ValueError, r'w has 9 rows, but x has 8\. .*inputs=\{"x": "broadcast"\}, and use x\[synk\.rank\(\)\]',
    ),
    "rows of two kinds": (lambda: synk.function(act)(X, X[:3]), ValueError, 'w has 3 .* others of its own, as "broadcast'),
    "rows of no batch": (lambda: synk.function(act)(X, X[:3], batch=4), ValueError, "w has 3 rows, but x has 9. Scattered ones"),
    "minibatch of other rows": (
        lambda: synk.function(act)(X, synk.data(X[:5], minibatch=True), batch=4),
        ValueError, "act: this call gets different numbers of rows: 4 of x, 5 of w",
    ),
    "batch of minibatch data alone": (
        lambda: mean()(synk.data(X, minibatch=True), batch=4), ValueError, "batch picks rows .* Minibatch data is taken whole",
    ),
    "batch and batch_s": (
        lambda: mean()(resident(), batch_s=[0], batch=4), ValueError, "batch picks rows .* batch_s picks from data on the replicas",
    ),
    "batch_s beside other rows": (
        lambda: synk.function(act)(resident(), X, batch_s=[0], batch=5),
        ValueError, "act: this call gets different numbers of rows: 4 of x, 5 of w",
    ),
    "batch_s for too few": (
        lambda: mean()(resident(), batch_s=[[0], [1]]), ValueError, "batch_s has 2 selections, but there are 4 replicas",
    ),
    "batch_s out of range": (
        lambda: mean()(resident(), batch_s=[-1, 2]), IndexError, "batch_s holds the index 2, but x on replica 1 has 2 rows",
    ),
    "batch_s too long": (lambda: mean()(resident(), batch_s=3), IndexError, "batch_s=3 .* but x on replica 1 has 2"),
    "batch_s empty": (lambda: mean()(resident(), batch_s=[[], [], [], []]), ValueError, "batch_s selects no rows on any"),
    "batch_s of floats": (lambda: mean()(resident(), batch_s=[0.5]), TypeError, "loss: batch_s has dtype float64"),
    "batch_s a short mask": (
        lambda: mean()(resident(), batch_s=np.ones(3, bool)), ValueError, "batch_s is a mask of length 3, but x on replica 1 has 2",
    ),
    "batch_s of a variable out of range": (
        rows_read_by(lambda w: synk.function(lambda: w.value.sum(), name="f")(batch_s=[[3], [0], [0], [0]])),
        IndexError, "f: batch_s holds the index 3, but held on replica 0 has 3 rows",
    ),
    "batch_s updates held rows": (
        rows_read_by(lambda w: synk.function(lambda: setattr(w, "value", w.value), name="f")(batch_s=[0])),
        ValueError, "f: held holds rows, so it cannot be updated .* batch_s",
    ),
    "batch_s beside other data": (
        rows_read_by(lambda w: synk.function(lambda x: (x * w.value).sum(), name="f")(resident(8), batch_s=[0])),
        ValueError, r"f: held holds \[3, 2, 2, 2\] rows .* gives them \[2, 2, 2, 2\]",
    ),
    "batch_s under jit": (lambda: jax.jit(lambda: mean()(resident(), batch_s=[0]))(), ValueError, "loss: batch_s cannot enter jit"),
    # Data.
    **{
        f"{what} of {place} data": (lambda place=place, batch=batch: mean()(data(place), batch=batch), error, match)
        for place in ("host", "scatter", "broadcast")
        for what, batch, error, match in (
            ("index", [0, 9], IndexError, "loss: batch holds the index 9, but x has 9 rows. .* from -9 to 8"),
            ("negative index", [-10], IndexError, "index -10, but x has 9 rows"),
            ("number", 10, IndexError, "batch=10 .* but x has 9"),
            ("mask", np.ones(8, bool), ValueError, "mask of length 8, but x has 9 rows"),
            ("float index", np.zeros(2), TypeError, "batch has dtype float64"),
            ("empty batch", [], ValueError, "selects no rows"),
        )
    },
    "data in no place": (lambda: synk.data(X, place="device", name="x"), ValueError, "x: place is 'device'; use 'host', 'scatter'"),
    "data to no place": (lambda: synk.data(X, name="x").to("device"), ValueError, "x.to: place is 'device'; use 'host'"),
    "data of a tree": (lambda: synk.data({"a": X}, name="x"), TypeError, r"x: .* is a dict; give one array; .* jax.tree.map"),
    "data of a number": (lambda: synk.data(3.0, name="x"), TypeError, "x: its value is a float; give one array"),
    "data of a scalar": (lambda: synk.data(np.float32(3), name="x"), ValueError, "x: its value is a scalar and has no rows"),
    "data of strings": (lambda: synk.data(["a"], name="x"), TypeError, "x: its value has dtype <U1"),
    "data of long doubles": (lambda: synk.data(np.ones(4, np.longdouble), name="x"), TypeError, "x: its value has dtype .*; give numbers or booleans that JAX has"),
    "data of a key": (lambda: synk.data(jax.random.key(0), name="x"), ValueError, "x: its value is a scalar and has no rows"),
    "data of a masked array": (lambda: synk.data(np.ma.array(X), name="x"), TypeError, "x: .* masked array.*filled"),
    "data of a tracer": (lambda: jax.jit(lambda x: synk.data(x, name="x"))(X), synk.SynkError, "x: its value"),
    "data of too many rows": (
        lambda: mean()(synk.data(np.broadcast_to(np.float32(0), (2**31,)), place="broadcast", name="x"), batch=4),
        ValueError, "x: devices hold at most 2147483647 rows; .*place=\"host\"",
    ),
    "rows of too large a number": (
        lambda: mean()(np.broadcast_to(np.uint8(0), (2**31,)), num_slices=64), ValueError,
        "a call has at most 2147483647 rows, .*; this one has 2147483648. Give them in batches to .*over",
    ),
    "traced rows of too large a number": (
        lambda: jax.eval_shape(mean(), jax.ShapeDtypeStruct((2**31,), np.uint8)), ValueError, "a call has at most 2147483647",
    ),
    "data of other columns": (
        lambda: synk.data(X, name="x").set_value(X[:, :1]), ValueError, r"x.set_value: the new rows have shape \(1,\), .* \(2,\)",
    ),
    "length too long": (lambda: synk.data(X, name="x").set_length(10), ValueError, "x.set_length: .* of 9 rows, .* not 10"),
    "length negative": (lambda: synk.data(X, name="x").set_length(-1), ValueError, "x.set_length: rows is -1; give an integer >= 0"),
    "half a length": (lambda: synk.data(X, name="x").set_length(1.5), TypeError, "x.set_length: rows is 1.5; give an integer"),
    "length of freed data": (lambda: freed().set_length(1), synk.SynkError, "x: it was freed.* x.set_value"),
    "freed data read": (lambda: freed()[0], synk.SynkError, "x: it was freed.* x.set_value"),
    "number too large": (lambda: sum_with_w()(X, 2**40), ValueError, "act: argument w: .* 1099511627776 out of bounds for int32.* or set jax_enable_x64"),
    "freed data broadcast": (lambda: sum_with_w()(X, freed()), synk.SynkError, "x: it was freed.* x.set_value"),
    "data differs in rows": (
        lambda: synk.function(act)(data("scatter"), resident(8)), ValueError, "act: argument w has 8 rows, but x has 9",
    ),
    # Iterating.
    "iterate without rows": (
        lambda: synk.function(act, ["broadcast"] * 2).iterate(X, X, batches=[1]),
        ValueError, "act.iterate: batches pick rows .* none",
    ),
    "iterate over minibatch data alone": (
        lambda: mean().iterate(synk.data(X, minibatch=True), batches=[1]), ValueError, "loss.iterate: batches pick rows",
    ),
    "iterate over no batches": (lambda: mean().iterate(X, batches=4), TypeError, "loss.iterate: batches is 4; give an iterable"),
    "iterate over other rows": (lambda: synk.function(act).iterate(X, X[:5], batches=[1]), ValueError, "w has 5 rows, but x has 9"),
    "prefetch negative": (lambda: mean().iterate(X, batches=[1], prefetch=-1), ValueError, "loss.iterate: prefetch is -1; .* >= 0"),
    "prefetch of half": (lambda: mean().iterate(X, batches=[1], prefetch=1.5), TypeError, "loss.iterate: prefetch is 1.5"),
    "iterate in no slices": (lambda: mean().iterate(X, batches=[1], num_slices=0), ValueError, "loss: num_slices is 0"),
    "iterate out of range": (lambda: next(mean().iterate(X, batches=[[9]])), IndexError, "loss: .* index 9, but x has 9"),
    "iterate under jit": (
        lambda: jax.jit(lambda x: next(mean().iterate(x, batches=[1])))(X), synk.SynkError, "loss.iterate: it runs when called",
    ),
    "prefetch size": (lambda: synk.prefetch([X], size=-1), ValueError, "synk.prefetch: size is -1; give an integer >= 0"),
    "prefetch of other rows": (
        lambda: next(synk.prefetch([(X, X[:5])])), ValueError, r"synk.prefetch: batch\[1\] has 5 rows, batch\[0\] has 9",
    ),
    # Slices.
    "no slices": (lambda: mean()(X, num_slices=0), ValueError, "loss: num_slices is 0; give an integer >= 1"),
    "half a slice": (lambda: mean()(X, num_slices=1.5), TypeError, "loss: num_slices is 1.5"),
    "true slices": (lambda: mean()(X, num_slices=True), TypeError, "loss: num_slices is True"),
    "slices without rows": (
        lambda: synk.function(lambda w: w, ["broadcast"], name="step")(1.0, num_slices=2),
        ValueError, "step: num_slices=2 cuts rows, but",
    ),
    "slices of stack": (
        lambda: synk.function(loss, reduce="stack")(X, num_slices=2), ValueError, "loss: output: 'stack' .* num_slices > 1",
    ),
    "slices of first": (
        lambda: synk.function(lambda x: (x.sum(), x.sum()), outputs=("sum", None), name="f")(X, num_slices=2),
        ValueError, r"f: output\[1\]: 'first' .* num_slices > 1",
    ),
    **{
        f"slices of a key by {name}": (
            lambda op=op: synk.function(lambda x, key: key, ["x"], op, name="f")(X, jax.random.key(0), num_slices=2),
            error, 'f: output.*se "concat".* A broadcast argument reaches then by its name: then=lambda total, key',
        )
        for name, op, error in (
            ("first", "first", ValueError), ("stack", "stack", ValueError), ("a callable", lambda keys: keys[0], TypeError),
        )
    },
    "slices of no rows": (
        lambda: synk.function(lambda x: x.sum(), reduce="concat", name="f")(X, num_slices=2),
        ValueError, "f: output has shape .* Use a callable, which gets all parts",
    ),
    "slices of an assignment": (
        assigning(lambda x: x.sum(0), num_slices=2), ValueError, r"step: with num_slices > 1 the update of w .*\n?.*w.update",
    ),
    "unknown slices": (sliced("median"), ValueError, "w.update: slices='median' is none of mean, max, min, last, add"),
    "mean of integer slices": (sliced("mean", np.int32), ValueError, 'step: the update of w .* "mean", .* int32'),
    # Outputs.
    "ops are no prefix": (
        lambda: synk.function(loss, outputs=("sum", "sum"))(X), ValueError, r"loss: outputs=.*'sum', 'sum'.* is no prefix",
    ),
    "output is no array": (lambda: synk.function(lambda x: "a", name="f")(X), TypeError, "f: output is a str"),
    "concat without rows": (
        lambda: synk.function(lambda x: x.sum(0), reduce="concat", name="f")(X),
        ValueError, r'f: output has shape \(2,\) for 3 rows; "concat" needs one output row',
    ),
    "unequal parts": (
        lambda: synk.function(lambda x: {"a": x}, reduce="stack", name="f")(X),
        ValueError, r"f: output\['a'\] has shape \(3, 2\) in a part of length 3, \(2, 2\) in one of 2, .* 'stack' need equal shapes",
    ),
    "unequal parts of a callable": (
        lambda: synk.function(lambda x: x, reduce=lambda p: p, name="f")(X), ValueError, "parts under .*a callable.* need equal shapes",
    ),
    "unequal parts of a sum": (
        lambda: synk.function(lambda x: jnp.concatenate([x, x]), name="f")(X[:, :1]), ValueError, "'sum' need equal shapes",
    ),
    "an entry a row of a sum": (
        lambda: synk.function(lambda x: x, name="f")(X),
        ValueError, r"f: output has shape \(3, 2\) in a part of length 3, \(2, 2\) in one of 2, .* use .concat. for an entry a row",
    ),
    "Weighted under sum": (
        lambda: synk.function(lambda x: synk.Weighted(x.sum(), 1.0), name="f")(X),
        ValueError, "f: output is Weighted, which goes with \"mean\", but its op is 'sum'",
    ),
    "a weight that is no scalar": (
        lambda: synk.function(lambda x: synk.Weighted(x.sum(0), x.sum(0)), reduce="mean", name="f")(X),
        ValueError, r"f: output: its weight has shape \(2,\)",
    ),
    "keys under sum": (
        lambda: synk.function(lambda x: jax.random.key(0), name="f")(X), TypeError, "f: output holds PRNG keys, .* 'sum'",
    ),
    "a gradient of integers": (
        lambda: synk.function(lambda x: {"n": jax.grad(lambda n: x.sum(), allow_int=True)(1)}, name="f")(X),
        TypeError, r"f: output\['n'\] is float0, .* Leave it out",
    ),
    "a Ref from outside": (writing_outside, TypeError, "f: it uses a jax.Ref from outside, .* synk.shared variable"),
    "row keys in then": (
        lambda: synk.function(loss, then=lambda a: synk.row_keys(jax.random.key(0)))(X),
        synk.SynkError, "loss.then: synk.row_keys: it has no scattered input",
    ),
    "subset of one output": (lambda: mean()(X, output_subset=[0]), ValueError, r"loss: output_subset=\[0\] .* one output"),
    "subset out of range": (
        lambda: synk.function(lambda x: (x.sum(),), name="f")(X, output_subset=[1]), IndexError, "f: output_subset names 1",
    ),
    "subset of no key": (
        lambda: synk.function(lambda x: {"a": x.sum()}, name="f")(X, output_subset=["b"]), KeyError, "names 'b', .*'a'",
    ),
    "subset is one key": (lambda: mean()(X, output_subset="a"), TypeError, "loss: output_subset is 'a'"),
    "then takes too few": (
        lambda: synk.function(lambda x: (x.sum(), x.sum()), then=lambda a: a, name="f")(X),
        TypeError, r"f.then: it takes 1 argument, but f has 2 outputs",
    ),
    "then takes too many": (
        lambda: synk.function(loss, then=lambda a, b: a)(X), TypeError, "loss.then: its parameter 'b' .* \"broadcast\" or",
    ),
    "then takes what is scattered": (
        lambda: synk.function(loss, then=lambda a, x: a)(X), TypeError, "loss.then: its parameter 'x'",
    ),
    # Shared variables.
    "not an array": (lambda: synk.shared({"a": [np.zeros(2), jnp.tanh]}, "w"), TypeError, r"w\['a'\]\[1\]: .* is a "),
    "long doubles to share": (lambda: synk.shared(np.longdouble(1), "w"), TypeError, "w: .* holds numbers that JAX has"),
    "strings to share": (lambda: synk.shared(np.array(["a"]), "w"), TypeError, "w: .* dtype <U1"),
    "another tree": (assigning(lambda x: (x.sum(0),)), ValueError, r"step: the new value of w has the tree .*\(\*,\)"),
    "another shape": (assigning(lambda x: x.sum()), ValueError, r"step: the new value of w has shape \(\), .* \(2,\)"),
    "another dtype": (
        assigning(lambda x: x.sum(0).astype(jnp.int32)), TypeError, "w has dtype int32, but its old one has float32",
    ),
    "floats for integers": (
        lambda: setattr(synk.shared(0, "w"), "value", 0.3), TypeError, r"w of floats: synk\.shared\(0\.0\), not 0",
    ),
    "another number of rows": (
        lambda: setattr(synk.shared(np.zeros(2), "w"), "value", np.zeros(3)), ValueError, r"w has shape \(3,\), .* \(2,\)",
    ),
    "a key for a number": (
        lambda: setattr(synk.shared(np.zeros(2), "w"), "value", jax.random.key(0)), TypeError, "w is a PRNG key of .*, but",
    ),
    "update outside": (
        lambda: synk.shared(np.zeros(2), "w").update(np.ones(2)), synk.SynkError, "w.update: .* inside a function",
    ),
    "no such rank": (lambda: synk.shared(1.0, "w").get_value(4), IndexError, "w: there is no rank 4; ranks are 0 to 3"),
    "no such rank to set": (lambda: synk.shared(1.0, "w").set_value(1.0, rank=-1), IndexError, "w: there is no rank -1"),
    "rank of a wrong kind": (lambda: synk.shared(1.0, "w").get_value("0"), TypeError, "w: rank is '0'"),
    "set_value inside": (set_value_inside, synk.SynkError, "step: set_value of w is for the serial program"),
    "a traced value kept": (traced_into_shared, synk.SynkError, "assigning w.value: .* used inside jit"),
    "rows differ from those held": (
        rows_read_by(lambda w: synk.function(lambda x: (x * w.value).sum(), name="f")(X[:8])),
        ValueError, r"f: held holds \[3, 2, 2, 2\] rows .* gives them \[2, 2, 2, 2\]",
    ),
    "a value of rows": (rows_read_by(lambda w: w.value), synk.errors.DivergedError, r"held: .* different rows, \[3, 2, 2, 2\]"),
    "sliced rows": (
        rows_read_by(lambda w: synk.function(lambda: w.update(w.value, slices="last"), name="f")(num_slices=2)),
        ValueError, 'f: held holds rows, so it cannot be updated with num_slices > 1. Take the rows as an .* op "scatter"',
    ),
    "sliced rows assigned": (
        rows_read_by(lambda w: synk.function(lambda: setattr(w, "value", w.value), name="f")(num_slices=2)),
        ValueError, 'f: held holds rows, so it cannot be updated with num_slices > 1. Take the rows as an .* op "scatter"',
    ),
    "uneven rows in then": (
        rows_read_by(lambda w: synk.function(loss, then=lambda m: w.value)(X)),
        ValueError, r"loss.then: held holds \[3, 2, 2, 2\] rows",
    ),
    # Modules, and other trees with leaves that are no arrays.
    "a module": (lambda: sum_with_w()(X, {"f": jnp.tanh, "w": 1.0}), TypeError, r"w\['f'\] .* equinox\.partition\(model"),
    "a static module": (
        lambda: synk.function(act, {"w": "static"})(X, {"f": jnp.tanh, "w": X}), TypeError,
        r'w is a dict, .* no hash.* arrays as "broadcast", and keep the rest outside, e.g. with equinox\.partition',
    ),
    "a static array": (lambda: synk.function(act, {"w": "static"})(X, X), TypeError, 'no hash.*; pass arrays as "broadcast"'),
    # Collectives.
    "no variable": (lambda: synk.all_reduce(3), TypeError, "synk.all_reduce: 3 is no shared variable"),
    "much that is no variable": (
        lambda: synk.broadcast({"w": X, "more": [X] * 99}), TypeError, "broadcast: a dict of float32.* and 99 more is no",
    ),
    "arguments in another order": (
        lambda: synk.train.step(loss, optax.sgd(0.1), {"w": np.ones((40, 50))}), TypeError,
        r"optimizer is a dict of float64\[40, 50\]; give one of optax's",
    ),
    "no variables": (lambda: synk.broadcast([3]), TypeError, r"synk.broadcast: \[3\] is no shared variable"),
    "too few values": (lambda: synk.scatter([held(), held()], [X]), ValueError, "synk.scatter: 2 variables need a list"),
    "scatter of other columns": (lambda: synk.scatter(held(), X[:, :1]), ValueError, r"held has shape \(9, 1\)"),
    "scatter of no rows": (lambda: synk.scatter(held(), X, batch=[]), ValueError, "selects no rows"),
    "scatter out of range": (lambda: synk.scatter(held(), X, batch=[9]), IndexError, "synk.scatter: .* index 9, but held"),
    "scatter of a scalar": (lambda: synk.scatter(synk.shared(1.0, "w"), 1.0), ValueError, "synk.scatter: the leaves of w"),
    "gather up": (lambda: synk.gather(held(), nd_up=2), ValueError, "synk.gather: nd_up=2; give 1"),
    "reduce by concat": (lambda: synk.all_reduce(held(8), "concat"), ValueError, "op 'concat' does not combine elementwise"),
    "weights of a sum": (lambda: synk.all_reduce(held(8), "sum", weights=[1] * 4), ValueError, "weights go with \"mean\""),
    "too few weights": (lambda: synk.all_reduce(held(8), weights=[1, 2]), ValueError, r"weights are \[1.0, 2.0\]; give 4"),
    "no weight": (lambda: synk.all_reduce(held(8), weights=[0] * 4), ValueError, r"weights are \[0.0.* not all 0"),
    "lengths of a scalar": (lambda: synk.contrib.synkhronos.get_lengths(synk.shared(1.0, "w")), ValueError, "get_lengths: the leaves of w"),
    "collective inside": (collective_inside, synk.SynkError, "step: broadcast of w is for the serial program"),
    "collective under jit": (collective_under_jit, synk.SynkError, "synk.all_reduce: .* w is used inside jit"),
    # Composition.
    "nested": (nested, synk.SynkError, r"outer: it calls the synk function inner inside.* Call inner.fn"),
    "shared under jit": (under_jit_with_shared, synk.SynkError, 'step: .* variable w, .* "broadcast" argument .* w.value'),
    "shared in then under jit": (then_under_jit_with_shared, synk.SynkError, "step: .* variable w, .*w.value"),
    "a closed-over tracer": (closed_over_tracer, synk.SynkError, 'step: it uses values of .* as "broadcast" arguments'),
    "a traced mask": (
        lambda: jax.jit(lambda mask: mean()(X, batch=mask))(np.ones(9, bool)), TypeError, "loss: a traced batch is a 1-d",
    ),
    "row keys of no rows": (lambda: synk.row_keys(jax.random.key(0), 0), ValueError, "row_keys: rows is 0; .* at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_message(case):
    """It names argument and value; at most one frame of synk's follows the user's last line; and it fits a screen."""
    call, error, match = ERRORS[case]
    with pytest.raises(error, match=match) as caught:
        call()
    files = [frame.filename for frame in traceback.extract_tb(caught.tb)]
    after = files[len(files) - files[::-1].index(__file__) :]
    assert [file.startswith(HERE) for file in after] in ([], [True])
    assert len(str(caught.value)) < 600


def test_freed_data_in_a_call():
    """The same message as when it is read."""
    with pytest.raises(synk.SynkError, match=r"x: it was freed.* x\.set_value"):
        mean()(freed())


def test_a_users_own_error_arrives_as_it_is():
    """The very exception, whatever its class, with the user's lines in its traceback."""
    mine = ZeroDivisionError("mine")

    def fails(x):
        raise mine

    for call in (lambda: synk.function(fails)(X), lambda: synk.function(loss, then=fails)(X)):
        with pytest.raises(ZeroDivisionError) as caught:
            call()
        assert caught.value is mine
        assert traceback.extract_tb(caught.tb)[-1].name == "fails"


@pytest.mark.smoke
def test_an_error_of_jax_in_the_users_code_shows_the_users_line():
    """The last line of the user's in the traceback is the one at fault."""

    def wrong(x):
        return x @ jnp.ones((3, 3))

    with pytest.raises(TypeError, match="dot_general") as caught:
        synk.function(wrong)(X)
    assert "wrong" in [frame.name for frame in traceback.extract_tb(caught.tb)]


LOSING = {
    "rows differ": lambda step: step(X, X[:5]),
    "a batch out of range": lambda step: step(X, X, batch=[9]),
    "not an array": lambda step: step(X, "x"),
    "an error in fn": lambda step: step(X, X[:, :1]),
    "no slices": lambda step: step(X, X, num_slices=0),
    "an unnamed update of slices": lambda step: step(X, X, num_slices=2),
    "other rows than held": lambda step: step(X[:8], X[:8]),
    "an unknown output": lambda step: step(X, X, output_subset=[5]),
}


@pytest.mark.parametrize("case", LOSING)
def test_bad_input_loses_nothing(case):
    """Every variable is as it was, and the next good call counts as if the bad one had not been."""
    total, own, rows = synk.shared(np.zeros(2, np.float32)), synk.shared(np.float32(1)), held()

    @synk.function
    def step(x, y):
        own.value = own.value + x.sum()
        return ((x - y) * rows.value).sum(0) + jnp.dot(x, y.T).sum() * 0 + x.sum(0)

    @step.then
    def step(s):
        total.value = total.value + s
        return s, s

    step(X, X)
    with pytest.raises((ValueError, TypeError, IndexError)):
        LOSING[case](step)
    np.testing.assert_allclose(total.value, X.sum(0))
    assert [float(own.get_value(rank)) for rank in range(4)] == [1 + part.sum() for part in np.array_split(X, 4)]
    np.testing.assert_array_equal(synk.gather(rows, nd_up=0), X)
    step(X, X)
    np.testing.assert_allclose(total.value, 2 * X.sum(0))


def test_an_error_on_the_shorter_parts_changes_nothing():
    """A call of several launches takes effect whole or not at all."""
    w = synk.shared(np.float32(0))

    def step(x):
        if len(x) == 2:
            raise ValueError("two rows")
        w.value = w.value + x.sum()

    with pytest.raises(ValueError, match="two rows"):
        synk.function(step)(X)
    assert float(w.value) == 0


def test_the_base_of_synks_own():
    """One class to catch."""
    for error in (synk.LawError, synk.errors.DivergedError, synk.errors.SharedLostError):
        assert issubclass(error, synk.SynkError)


X8 = numbers(8)


def branches(amount):
    return amount if amount.sum() > 0 else -amount


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("how", ["call", "serial", "check", "compile", "jit"])
def test_errors_of_tracing_name_the_users_function(group, how, rows):
    """As `jax.jit` does: function, file and argument, and nothing of synk's."""
    f = synk.function(branches)
    act = {"call": f, "jit": jax.jit(f)}.get(how) or getattr(f, how)
    message = str(raised_by(lambda: act(numbers(rows))))
    assert "branches at " in message and __file__ in message and "argument amount" in message
    assert "leaves[" not in message


@pytest.mark.smoke
def test_errors_of_tracing_name_parts_of_arguments(group):
    """Of a tree, the leaf; in then, its parameter."""
    f = synk.function(lambda tree: tree["a"] if tree["b"].sum() > 0 else 0)
    assert "argument tree['b']" in str(raised_by(lambda: f({"a": X8, "b": X8})))
    f = synk.function(lambda x: x.sum(), then=lambda total: total if total > 0 else 0)
    assert "argument total" in str(raised_by(lambda: f(X8)))


def misspelt(x):
    return x * undefined_weight  # noqa: F821  # pyright: ignore[reportUndefinedVariable]  # the NameError is the test


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("how", ["call", "serial", "check", "compile", "then", "iterate"])
def test_errors_of_the_user_show_the_users_lines(group, how, rows):
    """Between the call and the line that is wrong stands at most one frame of synk's."""
    f = synk.function(misspelt) if how != "then" else synk.function(lambda x: x.sum(0), then=misspelt)
    act = {"call": f, "then": f, "iterate": lambda x: next(f.iterate(x, batches=[rows]))}.get(how) or getattr(f, how)
    error = raised_by(lambda: act(numbers(rows)))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert isinstance(error, NameError) and files[-1] == __file__
    assert sum("synk" in os.path.dirname(file) and file != __file__ for file in files) <= 1
