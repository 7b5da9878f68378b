"""Random programs of loops, each drawn from a seed: a function, arguments, who writes to them when, what goes wrong."""

import random
import signal
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

ROWS, COLUMNS = 24, 4
PLACES = ("host", "scatter", "broadcast")
GROUPS = [("devices", 1), ("devices", 2), ("devices", 3), ("devices", 8), ("simulated", 2), ("simulated", 3)]


def noise(rng, *shape, nan=0.0):
    """Random rows; by the probability `nan` one of them is NaN."""
    rows = rng.normal(size=shape).astype(np.float32)
    if rng.random() < nan:
        rows[rng.integers(len(rows))] = np.nan
    return rows


# Functions, and the variables that the body of a loop may write.


def scaled(x, rate):
    return x * jnp.broadcast_to(getattr(rate, "value", rate), (COLUMNS,))[None]


def error_of(w, x, y, rate):
    return jnp.mean((jnp.tanh(scaled(x, rate) @ w) - y) ** 2)


def plain(w, **options):
    """No variable at all, and an entry a row."""

    def f(x, y, rate):
        return {"rows": jnp.tanh(scaled(x, rate)), "top": synk.stats.logsumexp(y), "sum": (x * y[:, None]).sum(0)}

    return synk.function(f, ["x", "y"], {"rows": "concat", "top": "merge", "sum": "sum"}, **options), []


def descent(w, **options):
    count = synk.shared(np.int32(0))

    @synk.function(inputs=["x", "y"], reduce="mean", **options)
    def f(x, y, rate):
        return jax.value_and_grad(error_of)(w.value, x, y, rate)

    @f.then
    def f(error, grad):
        w.value, count.value = w.value - 0.1 * grad, count.value + 1
        return error, count.value

    return f, [w, count]


def local(w, **options):
    """An update in `f`, by which replicas diverge."""

    def f(x, y, rate):
        w.update(0.9 * w.value + scaled(x, rate).mean(0) * y.max(), slices="mean")
        return (x @ w.value).sum()

    return synk.function(f, ["x", "y"], **options), [w]


def coupled(w, **options):
    """Communication inside, of rows that divide or not."""

    def f(x, y, rate):
        return ((scaled(x, rate) - synk.all_reduce(jnp.mean(x, 0), "mean")[None]) * y[:, None] * w.value[None]).sum(0)

    def then(sums):
        w.value = 0.5 * w.value + jnp.tanh(sums)
        return sums

    return synk.function(f, ["x", "y"], then=then, **options), [w]


def held(w, **options):
    """A variable that brings rows."""
    rows = synk.shared(np.zeros((1, COLUMNS), np.float32))
    return synk.function(lambda x, y, rate: (scaled(x, rate) * rows.value).sum(0), ["x", "y"], **options), [rows]


def mapped(w, **options):
    f = synk.map(lambda x, y, rate: jnp.tanh(scaled(x[None], rate)[0] * w.value) * y, ["x", "y"], **options)

    @f.then
    def _(rows):
        w.value = 0.5 * w.value + rows.mean(0)
        return rows

    return f, [w]


def trained(w, **options):
    step = synk.train.step(error_of, w, optax.sgd(0.1, momentum=0.9), inputs={"rate": "broadcast"}, **options)
    return step, [*step.variables.values()]


PROGRAMS = [plain, descent, local, coupled, held, mapped, trained]


# What a history does, drawn before it runs.


def drawn(seed):
    """A history: its function, its arguments, who writes to which data, and its loops."""
    rng = random.Random(seed)
    h = SimpleNamespace(seed=seed, group=rng.choice(GROUPS), make=rng.choice(PROGRAMS), is_stream=rng.random() < 0.5)
    h.awaits, h.looks, h.writes_variables = [rng.random() < 0.4 for _ in range(3)]
    h.engine = "jit" if h.make not in (mapped, held) and rng.random() < 0.2 else "shard_map"
    h.nan = 0.1 if h.make is not mapped and rng.random() < 0.25 else 0.0
    h.slices = 2 if h.engine != "jit" and h.make is not coupled and rng.random() < 0.2 else 1
    h.kind = rng.choice([None] * 3 + ["body", "body", "source", "source", "apart", "both"])
    _draw_arguments(rng, h)
    _draw_rows(rng, h)
    h.phases = [[_drawn_loop(rng, h)] for _ in range(rng.choice([1, 2]))]
    # When a source writes, only its own loop can know, so nothing else reads between.
    h.calls_between = h.kind in (None, "body") and rng.random() < 0.3
    if h.kind in (None, "body") and h.phases[0][0].error != "Ctrl-C" and rng.random() < 0.3:
        other = _drawn_loop(rng, h)
        h.phases[0] += [other] * (other.error != "Ctrl-C")
    return h


def _draw_arguments(rng, h):
    """The form of each argument, and who writes to it."""
    some = ["numpy", "jax", *PLACES, *["lent"] * 4 * h.is_stream, *["donated", "new data"] * h.is_stream]
    rates = ["number", "array", "jax", "variable", "data", "lent", *["each", "lent each"] * (not h.is_stream)]
    h.forms = {"x": rng.choice(some), "y": rng.choice(some), "rate": rng.choice(rates)}
    h.is_alias = h.kind != "apart" and rng.random() < 0.2  # x and y lie in one memory
    pairs = [("body", "source"), ("source", "body")] if h.kind == "apart" else [(h.kind, h.kind)]
    pairs += [(h.kind, None), (None, h.kind)] * (h.kind != "apart" and not h.is_alias)
    h.writes = dict(zip("xy", rng.choice(pairs), strict=True))
    h.forms |= {name: rng.choice(PLACES) for name in "xy" if h.is_alias or h.writes[name]}
    if h.kind == "source" and not h.is_stream and not h.is_alias and rng.random() < 0.2:
        h.forms["x"] = "numpy"
    h.writes["rate"] = "body" if h.forms["rate"] == "data" and h.kind == "body" else None
    h.by_source = [name for name, writer in h.writes.items() if writer in ("source", "both")]
    h.by_body = [name for name, writer in h.writes.items() if writer in ("body", "both")]


def _draw_rows(rng, h):
    h.length, even = rng.choice([ROWS, ROWS, ROWS - 1]), h.group[1] * h.slices
    even *= 4 // min(even, 4)
    h.sizes = rng.choice([[even], [even, min(2 * even, 16)], rng.sample([1, 3, 5, 7, 13], 2), [even, 3]])
    # An item is a whole `Data`, and only a source that gives it may change its length.
    is_whole = h.is_stream and any(h.forms[name] in PLACES and h.writes[name] != "source" for name in "xy")
    h.sizes = [h.length] if h.make is held or is_whole or (h.is_stream and h.is_alias) else h.sizes
    h.grows = h.by_body[:2] == ["x", "y"] and h.sizes != [h.length] and not h.is_alias
    h.is_minibatch = not (h.is_stream or h.is_alias or h.grows) and len(h.sizes) == 1 and rng.random() < 0.3


def _drawn_loop(rng, h):
    wrong = ["columns", "rows", "arity", "text", "empty"] if h.is_stream else ["index", "none", "float", "mask"]
    loop = SimpleNamespace(
        k=rng.choice([None, None, 1, 3, 16]), prefetch=rng.randrange(4), count=rng.randint(4, 16),
        bad=rng.randrange(12),
        error=rng.choice([None] * 10 + ["OSError", "Ctrl-C", *rng.sample(wrong, 2)]), seed=rng.randrange(10**6),
        stop=rng.choice([None] * 8 + ["leave", "drop", "Ctrl-C in the body"]), turns=rng.randint(1, 5),
        source=rng.choice(["generator"] * 4 + ["list"] + ["one buffer", "minibatches"] * (not h.is_stream)),
        item=rng.choice([tuple, list, dict]),
    )  # fmt: skip
    if h.by_source or loop.error or (loop.source == "list" and {"lent", "donated"} & {*h.forms.values()}):
        loop.source = loop.source if loop.source == "one buffer" else "generator"
    return loop


def kinds(h):
    """What a history is an example of."""
    said = {None: "nobody writes data", "both": "both write one data", "apart": "both write data apart"}
    flags = "engine slices awaits writes_variables calls_between is_alias is_minibatch grows"
    found = {said.get(h.kind, f"{h.kind} writes data"), "stream" if h.is_stream else "iterate", h.make.__name__}
    found |= {f"{h.group[1]} {h.group[0]}", f"{len(h.phases[0])} in turns", f"{len(h.sizes)} sizes", f"nan {h.nan}"}
    found |= {f"{name} {getattr(h, name)}" for name in flags.split()} | {f"{n}: {form}" for n, form in h.forms.items()}
    for loop in (loop for phase in h.phases for loop in phase):
        found |= {f"per_launch {loop.k}", f"prefetch {loop.prefetch}", f"stop: {loop.stop}", f"error: {loop.error}"}
        found |= {f"source: {loop.source}"}
    return found


# What it does it to: one world for loops, one for calls.


class World:
    """A function, its variables and its arguments."""

    def __init__(self, h):
        self.h, rng = h, np.random.default_rng(h.seed)
        w, nan = synk.shared(noise(rng, COLUMNS)), {"nan": "raise"} if h.nan else {}
        jit = {"engine": "jit"} if h.engine == "jit" else {}
        self.f, self.variables = h.make(w, name="f", **nan, **jit)
        x, y, rate = noise(rng, h.length, COLUMNS, nan=2 * h.nan), noise(rng, h.length), noise(rng, COLUMNS)
        rows = {"x": x, "y": x[:, 0] if h.is_alias else y[: h.sizes[0]] if h.is_minibatch else y, "rate": rate}
        self.args = {name: self._arg(name, h.forms[name], array) for name, array in rows.items()}
        self.variables = [*self.variables, *[self.args["rate"]] * (h.forms["rate"] == "variable")]
        if h.make is held:
            synk.scatter(self.variables[0], noise(rng, h.length, COLUMNS))

    def _arg(self, name, form, rows):
        is_minibatch = name == "y" and self.h.is_minibatch
        if form in (*PLACES, "data") or is_minibatch:
            place = form if form in PLACES else "host"
            return synk.data(rows, place=place, minibatch=is_minibatch, name=name)
        made = {"number": lambda: 0.5, "jax": lambda: jnp.array(rows), "variable": lambda: synk.shared(rows)}
        return made.get(form, lambda: rows)()

    def write(self, name, rng, rows=None, whole=False):
        """Write to data in some way, or to an array of NumPy's."""
        data: Any = self.args[name]
        new = noise(rng, *(data.shape if rows is None else (rows, *data.shape[1:])), nan=self.h.nan)
        order, of = rng.permutation(len(new))[: rng.integers(1, len(new) + 1)], np.arange(len(new))
        at: Any = [int(order[0]), slice(order[0], None), order, np.isin(of, order), ..., None][rng.integers(6)]
        if isinstance(data, np.ndarray):
            data[...] = new
        elif at is None or whole or len(new) != len(data):
            data.set_value(new)
        else:
            data[at] = new[at]
        if not isinstance(data, np.ndarray) and name != "rate" and rng.random() < 0.1:
            # Data that the body moves elsewhere is refused if the source has written to other data of the item.
            data.to(data.place if self.h.kind == "apart" and name in self.h.by_body else str(rng.choice(PLACES)))

    def write_variable(self, variable, rng):
        if self.h.make is held and variable is self.variables[0]:
            return synk.scatter(variable, noise(rng, self.h.length, COLUMNS))
        old = jax.tree.map(np.asarray, variable.get_value(0))
        variable.value = jax.tree.map(lambda a: noise(rng, *a.shape) if a.dtype == np.float32 else a.dtype.type(7), old)

    def call(self, loop, item, rate=None):
        """A single call, with what a loop would take from its source."""
        if not self.h.is_stream:
            x, y, same = self.args.values()
            return self.f(x, y, same if rate is None else rate, batch=item, num_slices=self.h.slices)
        named = item if loop.item is dict else {}
        return self.f(*(() if named else item), num_slices=self.h.slices, **named)


def shapes(rows):
    return {"x": (rows, COLUMNS), "y": (rows,), "rate": (COLUMNS,)}


def source(world, loop):
    """Give batches or items; write to data, and write an item where the last one lay."""
    h, donated = world.h, []
    lent = {name: np.empty(shape, np.float32) for name, shape in shapes(32).items()} | {"index": np.empty(32, np.int64)}
    for i in range(loop.count + 1):
        rng = np.random.default_rng([loop.seed, i])
        for array in lent.values():
            array.fill(99)
        while donated:
            donated.pop().delete()
        if i == loop.bad and loop.error == "OSError":
            raise OSError("the disk is gone")
        if i == loop.bad and loop.error == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        if i == loop.count:
            return
        size = int(rng.choice(h.sizes))
        for name in h.by_source:
            if rng.random() < 0.6 or (h.is_stream and len(world.args[name]) != size):
                world.write(name, rng, size if h.is_stream else None)
        make = _item if h.is_stream else _batch
        yield make(world, loop, rng, size, loop.error if i == loop.bad else None, lent, donated)


def _batch(world, loop, rng, size, wrong, lent, _):
    h, rows = world.h, world.h.length
    order, start = rng.permutation(rows)[:size], int(rng.integers(rows - size + 1))
    bad = {"index": [0, rows + 1], "none": [], "float": [0.5], "mask": np.ones(rows + 9, bool)}
    if wrong in bad:
        return bad[wrong]
    if loop.source == "one buffer":
        lent["index"][:size] = order
        return lent["index"][:size]
    some = [size, slice(start, start + size), order, order.tolist(), order.astype(np.int32), order - rows]
    return some[rng.integers(6)] if h.grows or rng.random() < 0.8 else np.isin(np.arange(rows), order)


def _item(world, loop, rng, size, wrong, lent, donated):
    h, item = world.h, {}
    for name, form in h.forms.items():
        new = noise(rng, *shapes(size)[name], nan=h.nan * (name == "x"))
        item[name] = world.args[name]
        if form == "lent":
            item[name] = lent[name][: len(new)]
            item[name][:] = new
        elif form == "new data":
            item[name] = synk.data(new, place=str(rng.choice(PLACES)), name=name)
        elif form == "number":
            item[name] = float(new[0])
        elif form in ("numpy", "array"):
            item[name] = new
        elif form in ("jax", "donated"):
            item[name] = jnp.array(new)
            donated += [item[name]] * (form == "donated")
    bad = {"columns": (size, 5), "rows": (size + 1, COLUMNS), "empty": (0, COLUMNS)}
    item |= {"x": np.ones(bad[wrong], np.float32)} if wrong in bad else {"x": "text"} if wrong == "text" else {}
    item |= {"more": 1} if wrong == "arity" else {}
    return item if loop.item is dict else loop.item(item.values())


def given(world, loop):
    """What a loop is given: its source, and values for `synk.each` or None."""
    h, items = world.h, source(world, loop)
    if loop.source == "minibatches":
        items = synk.minibatches(h.length, h.sizes[0], epochs=2, seed=loop.seed, drop_last=h.is_minibatch)
    return [*items] if loop.source == "list" else items, rates(h, loop) if "each" in h.forms["rate"] else None


def rates(h, loop):
    rng, memory = np.random.default_rng(loop.seed), np.empty(COLUMNS, np.float32)
    while True:
        memory[:] = noise(rng, COLUMNS)
        yield memory if "lent" in h.forms["rate"] else float(memory[0])
