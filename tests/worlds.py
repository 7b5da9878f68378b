"""Worlds: long-lived functions, variables, data and iterators, of which each step is taken again by a twin made anew."""

import contextlib
import gc
import random
import re
import signal
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import synk

from .helpers import group_of, heal_jax

GROUPS = (("devices", 2), ("simulated", 3), ("devices", 1))
PLACES = ("host", "scatter", "broadcast")
TEMPLATES = {
    "total": np.zeros(2, np.float32),
    "own": {"a": np.ones(2, np.float32), "b": np.float32(0.5)},
    "held": np.zeros((6, 2), np.float32),
    "count": np.int32(0),
    "cut": {"layers": np.zeros((2, 91, 91), np.float32), "out": np.zeros((2, 8209), np.float32), "small": np.zeros(2, np.float32)},
}  # fmt: skip
IN_SHARDS = {"cut"}
SLICES = ("mean", "max", "min", "last", "add", None)


def complain(wrong, where):
    """An error of the user's, or Ctrl-C, while the function is traced."""
    if wrong is not None and wrong.startswith(where):
        raise KeyboardInterrupt(where) if "Ctrl-C" in wrong else LookupError(f"{where} is wrong on purpose")


def functions(v):
    """The functions under test, made anew, of these variables."""

    def local(x, slices, wrong):
        v.own.update(jax.tree.map(lambda leaf: jnp.tanh(leaf * 0.5 + x.sum()), v.own.value), slices=slices)
        complain(wrong, "fn")
        return x.sum(0)

    def trained(x, wrong):
        complain(wrong, "fn")
        return jnp.tanh(x - v.total.value[None]).mean(0)

    def train(mean, wrong):
        v.total.value = v.total.value * 0.5 + mean
        complain(wrong, "then")
        return v.total.value

    def either(x):
        if len(x) > 2:
            v.count.update(v.count.value + 1, slices="add")
        else:
            v.total.update(v.total.value + x.sum(0), slices="add")
        return x.max(0)

    def counted(x):
        v.count.value = v.count.value + 1
        return v.count.value

    def picky(x):
        if len(x) == 2:
            raise ValueError("picky: two rows are too few or too many")
        return x.sum(0)

    def scanned(x):
        h = jnp.tile(x.mean(1)[:, None], 91)
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, v.cut.value["layers"])
        return (h.mean(1)[:, None] * v.cut.value["out"][:, :2].sum(0)[None]).sum(0) + v.cut.value["small"]

    def descended(x, wrong):
        def loss(cut):
            h = jnp.tile(x.mean(1)[:, None], 91)
            h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, cut["layers"])
            return jnp.tanh(h.mean(1) + jnp.cos(cut["out"]).mean() + (x @ cut["small"])).mean()

        complain(wrong, "fn")
        return jax.grad(loss)(v.cut.value)

    def descend(mean, wrong):
        norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(mean)))
        v.cut.value = jax.tree.map(lambda leaf, g: leaf * 0.5 - g / (norm + 1), v.cut.value, mean)
        complain(wrong, "then")
        return norm

    def weighted(x):
        weight = (x[:, 1] > 0).sum().astype(jnp.float32)
        return synk.Weighted(jnp.where(x[:, 1] > 0, x[:, 0], 0).sum() / weight, weight)

    def ordered(x):  # affine maps, one after another: how they compose depends on the order
        maps = jnp.cos(x[:, 0]), x[:, 1]

        def merge(a, b):
            return b[0] * a[0], b[0] * a[1] + b[1]

        return synk.Monoid([leaf[-1] for leaf in jax.lax.associative_scan(merge, maps)], lambda a, b: [*merge(a, b)])

    def known(x):
        return {"spread": synk.stats.moments(x), "most": synk.stats.argmax(x), "middle": synk.stats.quantile(x, 0.5)}

    many = {"mean": "mean", "max": "max", "min": "min", "any": "any", "prod": "prod", "rows": "concat"}
    made = {
        "sums": ((lambda x: jnp.exp(x).sum(0)), {}),
        "many": (
            lambda x: {"mean": jnp.tanh(x).mean(), "max": x.max(0), "min": x.min(), "any": (x > 1).any(0),
                       "prod": jnp.cos(x).prod(0), "rows": x * 2},
            {"outputs": many},
        ),
        "stacked": (lambda x: x.sum(0), {"reduce": "stack"}),
        "firsts": (lambda x: (x.sum(0), x.mean()), {"outputs": ("first", "mean")}),
        "weighted": (weighted, {"reduce": "mean"}),
        "ordered": (ordered, {}),
        "known": (known, {"outputs": "merge"}),
        "median": (lambda x: x.mean(0), {"reduce": lambda parts: jnp.median(parts, 0)}),
        "whole": (lambda x: x, {"reduce": "max"}),
        "scaled": (lambda x, scale: jnp.tanh(x * scale).mean(0), {"inputs": ["x"], "reduce": "mean"}),
        "power": (lambda x, n: (x**n).sum(0), {"inputs": {"n": "static"}}),
        "pair": (lambda x, y: (jnp.sin(x) * y).sum(0), {}),
        "talks": (lambda x: synk.all_reduce(x.sum(0), "max"), {"reduce": "mean"}),
        "picky": (picky, {}),
        "noisy": (lambda x, key: (x + jax.random.normal(jax.random.fold_in(key, synk.rank()), ())).sum(), {"inputs": ["x"]}),
        "stays": (lambda x: {"rows": jnp.tanh(x), "sum": x.sum(0)}, {"outputs": {"rows": "scatter", "sum": "sum"}}),
        "engine": (lambda x: jnp.tanh(x).mean(0), {"reduce": "mean", "engine": "pmap"}),
        "trained": (trained, {"inputs": {"wrong": "static"}, "reduce": "mean", "then": train}),
        "local": (local, {"inputs": {"slices": "static", "wrong": "static"}}),
        "either": (either, {"reduce": "max"}),
        "counted": (lambda x: x.sum(), {"then": counted}),
        "scanned": (scanned, {}),
        "descended": (descended, {"inputs": {"wrong": "static"}, "reduce": "mean", "then": descend}),
        "reads": (lambda x: (x * v.total.value[None]).sum(0), {"donate": False}),
        "holds": (lambda x: (x * v.held.value).sum(0), {}),
        "moves": (lambda x: v.held.update(v.held.value + x), {}),
    }  # fmt: skip
    return {name: synk.function(fn, name=name, **options) for name, (fn, options) in made.items()}


USES = {
    "trained": ["total"], "local": ["own"], "either": ["total", "count"], "counted": ["count"], "reads": ["total"],
    "holds": ["held"], "moves": ["held"], "scanned": ["cut"], "descended": ["cut"],
}  # fmt: skip


class Call(NamedTuple):
    """One call: of which function in which group, and how."""

    group: int
    name: str
    rows: int = 6
    seed: int = 0
    form: str = "numpy"
    batch: Any = None
    batch_s: Any = None
    slices: Any = 1
    subset: Any = None
    scale: Any = 1.0
    wrong: Any = None
    via: str = "call"
    more: int = 0


class Act(NamedTuple):
    """Anything else: with variables, data or an open iterator."""

    group: int
    what: str
    name: str = ""
    seed: int = 0
    more: Any = None


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Failing:
    """Rows of a file that cannot be read after so many times."""

    def __init__(self, rows, reads):
        self.rows, self.reads = rows, reads
        self.shape, self.dtype, self.ndim = rows.shape, rows.dtype, rows.ndim

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.reads -= 1
        if self.reads < 0:
            raise OSError("the disk is gone")
        return self.rows[index]


def rows_of(step, data):
    """The rows that a call is given, in its form; those of `data` are as many as it has."""
    kind, _, which = step.form.partition("-")
    if kind == "data":
        return data[which]
    x = normal(step.seed, step.rows, 2)
    group = synk.group()
    divides = step.rows % group.size == 0 and not group.is_simulated
    return {
        "numpy": lambda: x, "float64": lambda: x.astype(np.float64), "int32": lambda: (4 * x).astype(np.int32),
        "strided": lambda: np.repeat(x, 2, 0)[::2], "list": x.tolist, "jax": lambda: jnp.asarray(x),
        "one": lambda: jax.device_put(x, jax.devices()[:2][-1]), "fails": lambda: Failing(x, int(which)),
        "group": lambda: jax.device_put(x, NamedSharding(group.mesh, PartitionSpec("replica" if divides else None))),
    }[kind]()  # fmt: skip


def others_of(step):
    """What a call is given beside its rows."""
    return {
        "scaled": {"scale": step.scale}, "power": {"n": step.more}, "trained": {"wrong": step.wrong},
        "descended": {"wrong": step.wrong},
        "local": {"slices": SLICES[step.seed % len(SLICES)], "wrong": step.wrong},
        "pair": {"y": normal(step.seed + 1, step.rows + (step.more == 3), 2)}, "noisy": {"key": jax.random.key(step.seed)},
    }.get(step.name, {})  # fmt: skip


def picked(batch):
    """A batch as it is given."""
    return np.array(batch[1], batch[0]) if isinstance(batch, tuple) else batch


def run(step, f, data, left):
    """Make a call in the way that a step says; an iterator that is left half way goes to `left`."""
    x, others = rows_of(step, data), others_of(step)
    picks = {"batch": picked(step.batch), "batch_s": step.batch_s}
    options = picks | {"num_slices": step.slices, "output_subset": step.subset}
    if step.via == "serial":
        return f.serial(x, **others, **picks, update=step.more % 2 == 0)
    if step.via == "check":
        return f.check(x, **others, **picks, num_slices=step.slices)
    if step.via == "compile":
        return f.compile(x, **others, **options) and None
    if step.via == "iterate":
        return iterated(step, f, x, others, left)
    if step.via == "over":
        options = {"num_slices": step.slices, "output_subset": step.subset, "prefetch": step.seed % 3}
        return f.over(x, **others, batches=batches_of(step)[: step.more + 1], **options)
    if step.via in TRACES:
        is_array = isinstance(x, np.ndarray | jax.Array)
        given = jnp.asarray(x) if is_array else jnp.float32(0)
        return TRACES[step.via](lambda a: f(a if is_array else x, **others, **options))(given)
    if step.via == "promoted":
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return f(x, **others, **options)
    if step.via == "x64":
        with jax.enable_x64(True):
            return f(x, **others, **options)
    if step.via == "threads":
        return at_once(lambda: f(x, **others, **options), 3)
    return f(x, **others, **options)


def floats(tree):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating))


TRACES = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: floats(f(x))),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x + 1])),
    "eval_shape": lambda f: lambda x: jax.eval_shape(f, x),
}


def batches_of(step):
    return [picked(step.batch) if step.batch is not None else 4, [0, 2, 1], 3, [1]]


def iterated(step, f, x, others, left):
    """The first few results of an iterator."""
    options = {"num_slices": step.slices, "output_subset": step.subset, "prefetch": step.seed % 3}
    results = f.iterate(x, batches=batches_of(step), **others, **options)
    found = [next(results) for _ in range(step.more)]
    left.append(results)
    return found


def at_once(act, count):
    """What so many threads are told, in the order of their answers."""
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(told(act))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(map(repr, (answer for _, answer in answers)))


def like(template, seed, rows):
    """A value of a variable; of one that may hold rows, so many."""
    rng = np.random.default_rng(seed)

    def leaf(t):
        shape = t.shape if t.ndim < 2 else (rows, *t.shape[1:])
        return (
            rng.integers(0, 9, shape).astype(t.dtype) if t.dtype == np.int32 else rng.normal(size=shape).astype(t.dtype)
        )

    return jax.tree.map(leaf, template)


ON_VARIABLES = {
    "assign": lambda v, value, more: setattr(v, "value", value),
    "assign wrong": lambda v, value, more: setattr(v, "value", jax.tree.map(lambda a: a.astype(np.int16), value)),
    "set": lambda v, value, more: v.set_value(value),
    "set rank": lambda v, value, more: v.set_value(value, rank=more % 3),
    "get": lambda v, value, more: v.get_value(more % 3),
    "read": lambda v, value, more: v.value,
    "broadcast": lambda v, value, more: synk.broadcast(v),
    "broadcast value": lambda v, value, more: synk.broadcast(v, value),
    "scatter": lambda v, value, more: synk.scatter(v, value),
    "all_gather": lambda v, value, more: synk.all_gather(v),
    "gather": lambda v, value, more: synk.gather(v, nd_up=more % 2),
    "all_reduce": lambda v, value, more: synk.all_reduce(v, ["mean", "max", "sum"][more % 3]),
    "reduce": lambda v, value, more: synk.reduce(v, "max", in_place=more % 2 == 0),
    "check": lambda v, value, more: synk.check_replicas(v),
}


class State(NamedTuple):
    """What each replica holds of a variable, and why there is no one value."""

    parts: list[Any]
    why: str | None


def state(variable):
    parts = [jax.tree.map(np.array, variable.get_value(rank, borrow=True)) for rank in range(synk.size())]
    try:
        variable.value
    except synk.errors.DivergedError as error:
        return State(parts, str(error))
    return State(parts, None)


def bits(found):
    """States, by name, as what can be compared."""
    return {name: (why, [said(leaf) for leaf in jax.tree.leaves(parts)]) for name, (parts, why) in found.items()}


def remade(name, found):
    """A new variable in such a state."""
    parts, why = found
    if why is None or "different rows" not in why:
        variable = synk.shared(parts[0], name=name, sharded=name in IN_SHARDS)
    else:
        variable = synk.shared(TEMPLATES[name], name=name)
        synk.scatter(variable, np.concatenate(parts))
        if synk.contrib.synkhronos.get_lengths(variable) != list(map(len, parts)):
            for rank, part in enumerate(parts):
                variable.set_value(part, rank=rank)
    if why is not None and "different values" in why:
        culprit = why.split("since ")[1].split(" updated it")[0]
        fn = lambda new: setattr(variable, "value", jax.tree.map(lambda leaf: leaf[0], new))  # noqa: E731
        synk.function(fn, name=culprit)(jax.tree.map(lambda *leaves: np.stack(leaves), *parts))
    return variable


def said(leaf):
    """All that can be seen of one leaf of a result."""
    if isinstance(leaf, synk.typing.Data):
        return repr(leaf), said(leaf[:])
    if isinstance(leaf, jax.Array):
        ids = sorted(device.id for device in leaf.devices())
        return str(leaf.dtype), leaf.shape, leaf.weak_type, ids, np.asarray(leaf).tobytes()
    return (str(leaf.dtype), leaf.shape, leaf.tobytes()) if isinstance(leaf, np.ndarray) else repr(leaf)


def told(act):
    """The leaves of what something gives, None for an error; and what either says."""
    try:
        leaves, treedef = jax.tree.flatten(act())
        return leaves, (str(treedef), [said(leaf) for leaf in leaves])
    except (Exception, KeyboardInterrupt) as error:
        return None, (type(error).__name__, re.sub("0x[0-9a-f]+", "0x", str(error)))


INTERRUPTED = ("KeyboardInterrupt", "")


@contextlib.contextmanager
def interrupt(seconds):
    """Ctrl-C in so many seconds, if what is inside has not ended by then."""
    config: Any = jax.config
    least = config.jax_persistent_cache_min_compile_time_secs
    handler = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # JAX would leave half a file
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        heal_jax()
        config.update("jax_persistent_cache_min_compile_time_secs", least)


@contextlib.contextmanager
def unnoticed():
    """Variables that are made here take nobody's place: functions run by what is cached, and do not look again."""
    before = dict(synk.typing.Shared._living)
    yield
    for number in [*synk.typing.Shared._living]:
        if number not in before:
            synk.typing.Shared._living.pop(number, None)


class World:
    """What lives long: functions, each group's variables, data, iterators that were left, results handed out."""

    def __init__(self):
        self.groups = [group_of(*group) for group in GROUPS]
        self.variables = [
            SimpleNamespace(**{n: synk.shared(t, name=n, sharded=n in IN_SHARDS) for n, t in TEMPLATES.items()})
            for _ in GROUPS
        ]
        self.stateful = [functions(v) for v in self.variables]
        self.stateless = functions(SimpleNamespace())
        self.data = {place: synk.data(normal(i, 13, 2), place=place, name="x") for i, place in enumerate(PLACES)}
        self.open: list[tuple[Call, Any, list[Any]]] = []
        self.kept: list[tuple[list[Any], list[Any]]] = []
        self.compared = 0
        for group, v in zip(self.groups, self.variables, strict=True):
            with group:
                synk.scatter(v.held, normal(9, 6, 2))

    def take(self, step):
        """Take a step, and have a twin take it."""
        act = self.call if isinstance(step, Call) else getattr(self, step.what.replace(" ", "_"), self.variable)
        with self.on(step.group):
            act(step)
        for leaves, before in self.kept:
            assert [said(leaf) for leaf in leaves] == before, "an earlier result has changed"
        del self.kept[:-30]

    def on(self, group):
        """In one of the groups."""
        return contextlib.nullcontext() if synk.group() is self.groups[group] else self.groups[group]

    def end(self):
        """Let iterators go."""
        while self.open:
            self.open.pop()[1].close()

    def compare(self, home, names, warm, fresh, is_interrupted=False):
        """`warm()` and `fresh(variables)` tell the same, and leave the same values of variables; is it a result?"""
        with self.on(home):
            before = {name: state(getattr(self.variables[home], name)) for name in names}
            self.compared += 1
            with unnoticed() if self.compared % 2 else contextlib.nullcontext():
                twins = SimpleNamespace(**{name: remade(name, found) for name, found in before.items()})
            assert bits({name: state(getattr(twins, name)) for name in names}) == bits(before), "not made again"
        leaves, got = told(warm)
        _, want = told(lambda: fresh(twins))
        with self.on(home):
            after = bits({name: state(getattr(self.variables[home], name)) for name in names})
            wanted = bits({name: state(getattr(twins, name)) for name in names})
        if is_interrupted and got == INTERRUPTED:
            assert after in (wanted, bits(before)), f"after Ctrl-C {after} from {bits(before)} to {wanted}"
            return False
        assert got == want, f"it said\n  {got}\nand made anew\n  {want}"
        assert after == wanted, f"it left\n  {after}\nand made anew\n  {wanted}"
        if leaves is not None:
            self.kept.append((leaves, got[1]))
        return leaves is not None

    def anew(self):
        """Data of the same rows."""
        places = {place: data.place for place, data in self.data.items()}
        return {name: synk.data(np.array(self.data[name]), place=place, name="x") for name, place in places.items()}

    def call(self, step):
        home = (step.group + (step.via == "elsewhere")) % 3 if step.name in USES else step.group
        f = (self.stateful[home] if step.name in USES else self.stateless)[step.name]
        left, twins_left, is_interrupted = [], [], step.via == "interrupted"

        def warm():
            seconds = random.Random(step.seed).expovariate(1) * 10 ** -(1 + step.more)
            with interrupt(seconds) if is_interrupted else contextlib.nullcontext():
                return run(step, f, self.data, left)

        def fresh(twins):
            return run(step, functions(twins)[step.name], self.anew(), twins_left)

        self.compare(home, USES.get(step.name, ()), warm, fresh, is_interrupted)
        for results in twins_left:
            results.close()
        for results in left if not step.form.startswith("fails") else ():
            self.open.append((step._replace(via="next"), results, batches_of(step)[step.more :]))
        if len(self.open) > 2:
            self.open.pop(0)[1].close()

    def next(self, step):
        """Go on with an iterator that was left."""
        self.go_on(next, is_inside=False)

    def next_inside(self, step):
        """Where nothing can run it raises, and goes on afterwards."""
        self.go_on(lambda results: jax.jit(lambda: next(results))(), is_inside=True)

    def go_on(self, act, is_inside):
        if not self.open:
            return
        call, results, batches = self.open.pop(0)
        made = []

        def fresh(twins):
            options = {"num_slices": call.slices, "output_subset": call.subset, "prefetch": 0}
            f, x = functions(twins)[call.name], rows_of(call, self.anew())
            made.append(f.iterate(x, batches=list(batches), **others_of(call), **options))
            return act(made[0])

        with self.on(call.group):
            is_result = self.compare(call.group, USES.get(call.name, ()), lambda: act(results), fresh)
        if is_result or is_inside:
            self.open.append((call, results, batches[is_result:]))
        for each in made:
            each.close()

    def variable(self, step):
        """One of the acts on a variable."""
        value = like(TEMPLATES[step.name], step.seed, step.more)
        act = ON_VARIABLES[step.what]
        warm = getattr(self.variables[step.group], step.name)
        self.compare(
            step.group, [step.name], lambda: act(warm, value, step.more),
            lambda twins: act(getattr(twins, step.name), value, step.more),
        )  # fmt: skip

    def data_changes(self, step):
        """Rows are written, replaced, fewer, more, or moved."""
        data = self.data[step.name]
        if step.more == "write":
            data[step.seed % len(data)] = normal(step.seed, 2)
        elif step.more == "set_value":
            data.set_value(normal(step.seed, 13, 2))
        elif step.more == "set_length":
            data.set_length(6 + step.seed % 8)
        else:
            data.to(step.more)

    def close(self, step):
        """The current group is forgotten, garbage collected, and now and then all that JAX has cached."""
        synk.close()
        gc.collect()
        if step.seed % 8 == 0:
            jax.clear_caches()
