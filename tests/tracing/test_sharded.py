"""Evaluation on shards: what functions make of variables in shards is what they make of whole ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk

from ..helpers import assert_close, group_of, slow

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(23, 131)).astype(np.float32)


def leaf(*shape):
    return (RANDOM.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)


# 16,384 numbers of four bytes lie in shards, and nothing of these divides by 2, 3 or 5.
VALUE = {
    "w": leaf(131, 127), "v": leaf(127, 131), "s": leaf(3, 131, 127), "t": leaf(3, 127, 131), "b": leaf(1, 127)[0],
    "i": RANDOM.integers(-9, 9, (131, 127)).astype(np.int32), "h": jnp.asarray(leaf(263, 127), jnp.bfloat16),
    "conv": leaf(31, 3, 11, 17), "keys": jax.random.split(jax.random.key(1), 8209), "key": jax.random.key(2),
}  # fmt: skip
GROUPS = [("devices", 3), slow(("simulated", 5))]


@pytest.fixture(autouse=True)
def promotion():
    """Functions here speak of shards, not of dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@jax.custom_vjp
def clipped(w):
    return w * 2


clipped.defvjp(lambda w: (w * 2, w), lambda w, g: (jnp.clip(g, -0.1, 0.1) + w.mean(0),))


@jax.custom_jvp
def bent(w):
    return jnp.sin(w)


@bent.defjvp
def bent_jvp(primals, tangents):
    return bent(*primals), jnp.cos(primals[0].T).T * tangents[0] / 2


def layers(p, x, **options):
    return lax.scan(
        lambda h, w: ((h + jnp.tanh(jnp.tanh(h @ w[0]) @ w[1])).astype(h.dtype), h.sum()),
        x,
        (p["s"], p["t"]),
        **options,
    )


def checked(p, x, **options):
    body = jax.checkpoint(lambda h, w: (h + jnp.tanh(jnp.tanh(h @ w[0]) @ w[1]), None), **options)
    return lax.scan(body, x, (p["s"], p["t"]))[0]


def by_layer(p, x):
    for i in range(3):
        x = x + jnp.tanh(x @ p["s"][i]) @ p["t"][i]
    return x


def recurrent(p, x):
    return lax.scan(lambda h, row: (jnp.tanh(h @ p["w"] @ p["v"] + row), None), jnp.zeros(131), x)[0]


def nested(p, x):
    def outer(h, w):
        def inner(h, v):
            return h + jnp.tanh(jnp.tanh(h @ w[0]) @ v), None

        return lax.scan(inner, h, p["t"] * w[1].mean())

    return lax.scan(outer, x, (p["s"], p["t"]))[0]


def grown(p, x):
    """As many rounds as the rows say: replicas leave the loop at different times."""
    rounds = jnp.abs(x[0, 0] * 5).astype(int) + 1
    return lax.while_loop(lambda c: c[0] < rounds, lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"] @ p["v"])), (0, x))[1]


# What functions make of a value and rows. Those of READS are differentiated too.
READS = {
    "product": lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"],
    "tied": lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T,
    "decay by rows": lambda p, x: (p["w"] * x.mean()) ** 2,
    "decay by an array of rows": lambda p, x: (p["s"] * x.sum(0)[:127]) ** 2,
    "rank": lambda p, x: p["w"] * (1 + synk.rank()) + p["w"].T.sum() * x.mean(),
    "rows picked": lambda p, x: p["w"][synk.row_numbers() % 131] * x[:, :127],
    "literal": lambda p, x: (2 * p["w"] + 1).sum() * x.sum() + jnp.maximum(p["w"], 0),
    "constant": lambda p, x: jnp.where(np.eye(131, 127) > 0, p["w"], 0.5).sum() * x.sum(),
    "sums": lambda p, x: (p["w"].sum(0), p["w"].sum(), p["s"].sum((1, 2)), (p["s"] ** 2).sum(), x.sum() * p["w"].T.sum()),
    "extremes": lambda p, x: (p["w"].max() * x.mean(), (p["w"] - 9).max(), (p["s"] + 9).min(), p["w"].min(1)),
    "product of all": lambda p, x: jnp.prod(1 + p["w"] / 99) * x.mean(),
    "branch of rows": lambda p, x: lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ (w * 2) + 1, p["w"]),
    "switch of rank": lambda p, x: lax.switch(synk.rank() % 3, [lambda: x @ p["w"], lambda: x @ p["v"].T, lambda: x[:, :127]]),
    "vmap over rows": lambda p, x: jax.vmap(lambda row: jnp.tanh(row @ p["w"]) * p["w"].mean())(x),
    "vmap over layers": lambda p, x: jax.vmap(lambda w: jnp.tanh(x @ w).sum(0))(p["s"]),
    "custom_vjp": lambda p, x: x @ clipped(p["w"]),
    "custom_jvp": lambda p, x: x @ bent(p["w"]),
    "jit": lambda p, x: jax.jit(lambda w, x: jax.jit(jnp.tanh)(x @ w) + w.mean())(p["w"], x),
    "checkpoint": lambda p, x: jax.checkpoint(lambda w, v: jnp.tanh(x @ w) @ v)(p["w"], p["v"]),
    "scan": lambda p, x: layers(p, x),
    "scan backwards": lambda p, x: layers(p, x, reverse=True),
    "scan unrolled": lambda p, x: layers(p, x, unroll=2),
    "scan, checkpoint": lambda p, x: checked(p, x),
    "scan, checkpoint without barrier": lambda p, x: checked(p, x, prevent_cse=False),
    "scan, policy": lambda p, x: checked(p, x, policy=jax.checkpoint_policies.dots_saveable),
    "scan of a function of layers": lambda p, x: layers(p | {"s": jnp.tanh(p["s"]) * 2, "t": p["t"].astype(jnp.bfloat16)}, x.astype(jnp.bfloat16)),
    "scan that carries": lambda p, x: lax.scan(lambda w, _: (jnp.tanh(w) * 2, None), p["w"], length=2)[0] * x.mean(),
    "nested": nested,
    "recurrent": recurrent,
    "loop": by_layer,
    "layers in slices": lambda p, x: jnp.einsum("rk,lkj->lj", x, p["s"][1:]),
    "a layer in a loop": lambda p, x: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["s"][i] @ p["t"][i]), x),
    "map": lambda p, x: lax.map(lambda w: (x @ w).sum(0), p["s"]),
    "associative scan": lambda p, x: lax.associative_scan(jnp.add, p["w"] * x.mean()),
    "narrow": lambda p, x: (x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(np.float32),
    "narrow sums": lambda p, x: (p["h"].sum().astype(np.float32) * x.mean(), x @ p["h"][:131].astype(np.float32)),
    "other shapes": lambda p, x: (x @ p["w"].reshape(127, 131).T, p["w"][None] + p["v"].T, p["conv"].reshape(-1, 17) * x.mean()),
    "moved alike": lambda p, x: (p["w"].T * p["w"].T, p["w"].T + p["v"], p["s"].reshape(393, 127).T.sum() * x.mean()),
    "convolution": lambda p, x: lax.conv(x[:, :121].reshape(-1, 1, 11, 11), p["conv"][:, :1, :, :11], (1, 1), "SAME"),
    "a kernel": lambda p, x: p["conv"][3] * x.mean() + p["conv"][3].mean(),
    "norms": lambda p, x: (jnp.linalg.norm(p["w"]) * x.mean(), jax.nn.logsumexp(p["w"]), jnp.linalg.norm(p["s"], axis=(1, 2))),
    "nested gradient": lambda p, x: jax.grad(lambda w: jnp.tanh(x @ w).sum())(p["w"]) * p["w"],
}  # fmt: skip
ALONE = {
    "while": grown,
    "while by a leaf": lambda p, x: lax.while_loop(lambda h: h.sum() < p["w"].max() + 9, lambda h: h + 1, x),
    "while that carries": lambda p, x: lax.while_loop(lambda w: w.max() < 9, lambda w: w * 2, p["w"]) * x.mean(),
    "integers": lambda p, x: (p["i"].sum(), p["i"].max(), p["i"].min(0), p["i"] * x.mean(), (p["i"] > 3).sum()),
    "conditions": lambda p, x: [1.0 * c for c in ((p["w"] < 9).all(), (p["w"] > 9).any(), (p["w"] > 0).max(), (p["w"] > 0).min(), x.max() > 9)],
    "sorted": lambda p, x: (jnp.sort(p["w"], 1) * x.mean(), jnp.cumsum(p["w"]), jnp.argmax(p["w"])),
    "keys": lambda p, x: jax.vmap(jax.random.uniform)(p["keys"]) * x.mean() + jax.random.uniform(p["key"]),
    "complex": lambda p, x: ((p["w"] * 1j).sum().imag * x.mean(), jnp.abs(jnp.exp(p["w"] * 1j).sum())),
    "whole": lambda p, x: {name: p[name] for name in "wvstbi"},
}  # fmt: skip


QUICK = ("tied", "decay by rows", "branch of rows", "scan, checkpoint", "recurrent", "while", "conditions", "whole")


def in_turns(quick, values):
    """These cases with a group: quick ones on devices, the others by turns with one of two."""
    groups = ("devices", 3), ("simulated", 5)
    return [(case, groups[0]) if case in quick else slow(case, groups[i % 2]) for i, case in enumerate(values)]


NUMBERS = ("w", "v", "s", "t", "b", "h", "conv")


def read(case, p, x):
    """What a case returns, of which outputs with an entry a row are added up."""
    out = (READS | ALONE)[case](p, x)
    return jax.tree.map(lambda leaf: leaf.sum(0) if leaf.shape[:1] == x.shape[:1] else leaf, out)


def both(make, *args, value=VALUE):
    """What a function returns that reads a variable, and the variable then: whole, and in shards."""
    for sharded in (False, True):
        w = synk.shared(value, "w", sharded=sharded)
        yield make(w)(*args), w.value


@pytest.mark.parametrize(("case", "group"), in_turns(QUICK, dict.fromkeys([*QUICK, *ALONE])), ids=str)
def test_reading(case, group):
    """A function of a value in shards, whose rows do not divide, returns what it returns of the whole."""
    with group_of(*group):
        want, got = both(lambda w: synk.function(lambda x: read(case, w.value, x)), X)
        narrow = "narrow" in case or "function of layers" in case
        assert_close(got[0], want[0], rtol=0.02 if narrow else 2e-6, atol=0.1 if narrow else 2e-5)


@pytest.mark.parametrize(("case", "group"), in_turns(QUICK, READS), ids=str)
def test_gradients(case, group):
    """So does its gradient, of which `then` gets shards of the sum."""

    def loss(p, x):
        return sum(jnp.sqrt(1.0 + out * out).astype(np.float32).mean() for out in jax.tree.leaves(read(case, p, x)))

    def made(w):
        def of_part(x):
            rest = {name: leaf for name, leaf in w.value.items() if name not in NUMBERS}
            return jax.value_and_grad(lambda p: loss(p | rest, x))({name: w.value[name] for name in NUMBERS})

        def update(value, grads):
            w.value = w.value | {name: w.value[name] - grads[name] / 8 for name in NUMBERS}
            return value

        return synk.function(of_part, outputs=("sum", "sum"), then=update)

    with group_of(*group):
        want, got = both(made, X)
        numbers = [[out[0], *(out[1][name].astype(np.float32) for name in NUMBERS)] for out in (got, want)]
        assert_close(*numbers, rtol=0.02 if "narrow" in case else 1e-5, atol=0.01 if "narrow" in case else 1e-5)


def orthogonal(w):
    return lax.fori_loop(0, 3, lambda _, w: 1.5 * w - 0.5 * w @ (w.T @ w), w / jnp.linalg.norm(w))


# What `then` makes of a value and a sum of its shapes: the next value, and a result.
UPDATES = {
    "elementwise": lambda p, g: (jax.tree.map(lambda p, g: p - 0.1 * jnp.sign(g) * p.max(), p, g), g["w"].sum()),
    "mixed": lambda p, g: (p | {"v": p["w"].T - g["v"], "w": p["v"].T * g["w"]}, p["w"] @ g["v"]),
    "norm": lambda p, g: (jax.tree.map(lambda p, g: p - g / jnp.linalg.norm(g), p, g), [*map(jnp.linalg.norm, g.values())]),
    "rows and columns": lambda p, g: (p | {"w": p["w"] - g["w"].mean(0) * g["w"].mean(1)[:, None]}, g["w"].max(0)),
    "layers": lambda p, g: (p | {"s": p["s"] * jnp.square(g["s"]).sum((1, 2), keepdims=True)}, p["s"][1] + g["w"]),
    "a layer": lambda p, g: (p | {"s": p["s"].at[1].set(g["s"][2]), "w": p["s"][0] - p["w"]}, p["s"][2].sum() + g["s"][0].max()),
    "scan": lambda p, g: (p | {"s": lax.scan(lambda c, e: (c + e[0].sum(), e[0] - e[1] * c), 0.0, (p["s"], g["s"]))[1]}, 0.0),
    "branch": lambda p, g: lax.cond(g["b"].sum() > 0, lambda: (p, 1.0), lambda: (jax.tree.map(lambda p, g: p.T.T - g, p, g), 2.0)),
    "other branch": lambda p, g: (lax.cond(g["b"].sum() <= 0, lambda p: p, lambda p: p | {"s": p["s"] * 2}, p), 0.0),
    "loop": lambda p, g: (p | {"w": orthogonal(p["w"] + g["w"])}, 0.0),
    "noise": lambda p, g: (p | {"w": p["w"] + jax.random.normal(jax.random.key(0), p["w"].shape)}, jax.random.uniform(jax.random.key(1))),
    "constant": lambda p, g: (p | {"w": p["w"] * np.arange(131 * 127, dtype=np.float32).reshape(131, 127), "v": jnp.ones_like(p["v"])}, 0.0),
    "a scalar chooses": lambda p, g: (jax.tree.map(lambda p, g: jnp.where(g.sum() > 0, p, g), p, g), jnp.isfinite(g["w"]).all()),
    "narrow": lambda p, g: (jax.tree.map(lambda p, g: (p.astype(jnp.bfloat16) + g.astype(jnp.bfloat16)).astype(p.dtype), p, g), 0.0),
    "infinite behind the end": lambda p, g: (jax.tree.map(lambda p: 1 / p, p), [(1 / p).sum() for p in p.values()] + [(1 / p).max() for p in p.values()]),
    "unchanged": lambda p, g: (p, p["w"]),
}  # fmt: skip
THEN = {name: VALUE[name] for name in ("w", "v", "s", "b")}


@pytest.mark.parametrize(
    ("case", "group"), in_turns(["elementwise", "mixed", "branch", "a scalar chooses"], UPDATES), ids=str
)
def test_then(case, group):
    """`then` makes of shards what it makes of the whole, cold and warm."""

    def made(w):
        def update(total):
            w.value, result = UPDATES[case](w.value, total)
            return result

        f = synk.function(lambda x: jax.tree.map(lambda leaf: leaf * x.mean(), w.value), then=update)
        return lambda *args: [f(*args) for _ in range(2)]

    with group_of(*group):
        want, got = both(made, X, value=THEN)
        assert_close(got, want, rtol=0.02 if case == "narrow" else 1e-5, atol=1e-5)


# What replicas hold of a variable of their own, and of one in shards, and what they make of both.


def own_value():
    """A variable that holds on each replica its rank, plus one."""
    own = synk.shared(np.float32(0), "own")
    synk.function(lambda: own.update(jnp.float32(synk.rank()) + 1))()
    return own


def then_reads(w, own):
    return synk.function(lambda x: x.sum(), then=lambda total: (w.value["w"] * own.value + total, own.value))


def then_branches(w, own):
    """Replicas take different branches."""

    def update(total):
        own.value = lax.cond(own.value > 1.5, lambda w: w["w"].sum(), lambda w: w["v"].T[2, 2], w.value)
        return total

    return synk.function(lambda x: x.sum(), then=update)


def then_rank(w, own):
    def update(total):
        own.value = (w.value["w"] * synk.rank()).sum()
        return w.value["w"] * (synk.rank() + 1)

    return synk.function(lambda x: x.sum(), then=update)


def updated_by_rows(w, own):
    """Equal before the first call, and no more after it."""
    own.value = np.float32(0)
    update = synk.function(lambda x: own.update(x.sum() + w.value["b"].sum(), slices="last"))
    read = synk.function(lambda x: x.sum(), then=lambda total: (w.value["w"] * (1 + own.value)).sum())

    def read_and_update(x, num_slices):
        result = read(x, num_slices=num_slices)
        update(x, num_slices=num_slices)
        return result

    return read_and_update


def weights(w, own):
    """A weight that is a literal, and one of which a part has none."""

    def fn(x):
        return synk.Weighted(w.value["w"] * x.mean(), 2.0), synk.Weighted(w.value["v"], (x[:, 0] > 1).sum() * 1.0)

    def update(one, other):
        w.value = w.value | {"w": one, "v": other}
        return one.sum()

    return synk.function(fn, outputs="mean", then=update)


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("make", [then_reads, then_branches, then_rank, updated_by_rows, weights])
def test_what_differs(make, group):
    """Values that differ on the replicas meet the whole, never a shard; cold, warm, and with slices."""

    def made(w):
        own = own_value()
        f = make(w, own)
        return lambda x: [(f(x, num_slices=n), own.get_value(synk.size() - 1)) for n in (1, 1, 2)]

    with group_of(*group):
        want, got = both(made, X, value=THEN)
        assert_close(got, want)


def test_shards_of_one_value(four):
    """A value that would differ on the replicas is refused, and nothing changes."""
    w, own = synk.shared(THEN, "w", sharded=True), own_value()

    def update(factor):
        w.value = jax.tree.map(lambda leaf: leaf * factor(), w.value)

    total = synk.function(lambda x: x.sum(), then=lambda _: update(lambda: own.value), name="total")
    with pytest.raises(synk.errors.DivergedError, match="own"):
        total(X)
    with pytest.raises(ValueError, match=r"total\.then: it asks for its rank and updates w, which lies in shards"):
        synk.function(lambda x: x.sum(), then=lambda _: update(synk.rank), name="total")(X)
    assert_close(w.value, THEN, rtol=0, atol=0)
    own.value = np.float32(2)
    total(X)
    assert_close(w.value, {name: 2 * leaf for name, leaf in THEN.items()}, rtol=0, atol=0)
