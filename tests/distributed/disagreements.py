"""Disagreements: what process 1 does in another way than process 0."""

import time

import jax
import jax.numpy as jnp
import numpy as np

import synk

from ..harness import say
from .programs import join

DISAGREEMENTS = {}


def row_sums(name, scale=1.0, **options):
    return synk.function(lambda x: x.sum(0) * jnp.asarray(scale, x.dtype), name=name, **options)


def disagreement(fn):
    DISAGREEMENTS[fn.__name__] = fn
    return fn


def disagree(what):
    """Run a case in which process 1 does something else. Each process prints its error."""
    join()
    is_odd = jax.process_index() == 1
    f, g, x = row_sums("f"), row_sums("g", 100.0), np.ones((12, 3), np.float32)
    try:
        DISAGREEMENTS[what](is_odd, f, g, x)
    except Exception as error:
        say("raised", kind=type(error).__name__, message=str(error))
        raise
    say("unnoticed")


@disagreement
def op(is_odd, f, g, x):
    row_sums("h", reduce="max" if is_odd else "sum")(x)


@disagreement
def order(is_odd, f, g, x):
    for one in (f, g) if is_odd else (g, f):
        one(x)


@disagreement
def known_order(is_odd, f, g, x):
    f(x), g(x)
    for one in (f, g) if is_odd else (g, f):
        float(one(x)[0])


@disagreement
def dtype(is_odd, f, g, x):
    f(x.astype(np.int32) if is_odd else x)


@disagreement
def rows(is_odd, f, g, x):
    f(x[:6] if is_odd else x)


@disagreement
def uneven_rows(is_odd, f, g, x):
    f(x[:11] if is_odd else x)


@disagreement
def known_rows(is_odd, f, g, x):
    f(x), f(x[:6])
    float(f(x[:6] if is_odd else x)[0])


@disagreement
def constant(is_odd, f, g, x):
    row_sums("h", 2.0 if is_odd else 3.0)(x)


@disagreement
def shape_of_variable(is_odd, f, g, x):
    w = synk.shared(np.zeros(3 + is_odd, np.float32), name="w")
    np.asarray(w.value)


@disagreement
def collective(is_odd, f, g, x):
    w = synk.shared(np.zeros(3, np.float32), name="w")
    synk.all_reduce(w, "sum") if is_odd else synk.broadcast(w)


@disagreement
def new_beside_known(is_odd, f, g, x):
    float(f(x)[0])
    float(f(x)[0]) if is_odd else float(g(x)[0])


@disagreement
def fewer_calls(is_odd, f, g, x):
    for _ in range(2 if is_odd else 3):
        float(f(x)[0])
    float(g(x)[0])


@disagreement
def local_rows(is_odd, f, g, x):
    f(x if is_odd else synk.local(x))


@disagreement
def save(is_odd, f, g, x):
    w = synk.shared(np.zeros(3, np.float32), name="w")
    float(f(x)[0])
    if is_odd:
        float(f(x)[0])
    else:
        synk.check_replicas(w)


@disagreement
def read_alone(is_odd, f, g, x):
    own = synk.shared(np.zeros(3, np.float32), name="own")
    add = synk.function(lambda x: own.update(own.value + x.sum(0)), name="add")
    add(x), f(x)
    if is_odd:
        own.get_value(0)
    float(f(x)[0])
    float(f(x)[0])


def local_call(of_odd, of_even=lambda f, g, x: f(synk.local(x))):
    """Return a case whose processes call known programs with local rows."""

    def case(is_odd, f, g, x):
        for each in (f, g):
            float(each(synk.local(x))[0])
        float(f(synk.local(x.astype(np.int32)))[0])
        float((of_odd if is_odd else of_even)(f, g, x)[0])
        float(g(synk.local(x))[0])

    return case


def streamed(items):
    return lambda f, g, x: [*f.stream([synk.local(x)] * items), *f.stream([synk.local(x)])][-1]


def named(kind, **cases):
    """Add cases of one kind. A case takes whether this is process 1, f, g and rows."""
    DISAGREEMENTS.update({f"{kind}_{name}": case for name, case in cases.items()})


def adding(constant, **options):
    """Return a case that calls a function in which a constant differs."""

    def case(is_odd, f, g, x):
        value = constant(is_odd)
        synk.function(lambda x: x.sum(0) + jnp.asarray(value).sum().astype(x.dtype), name="h", **options)(x)

    return case


LABELS = np.arange(1_000_000_000, 1_000_000_100, dtype=np.int32)
named(
    "constant",
    labels=adding(lambda is_odd: LABELS + is_odd),
    one_hot=adding(lambda is_odd: np.eye(40, dtype=np.int8)[np.arange(100) % 40 - is_odd]),
    mask=adding(lambda is_odd: np.arange(100) % 3 == is_odd),
    seed_of_9=adding(lambda is_odd: 123456789 + is_odd),
    seed_of_10=adding(lambda is_odd: np.uint32(4123456789 + is_odd)),
    last_bit=adding(lambda is_odd: np.nextafter(np.float32(1), np.float32(1 + is_odd))),
    minus_zero=adding(lambda is_odd: np.array([-0.0 if is_odd else 0.0] * 70, np.float32)),
    nan_bits=adding(lambda is_odd: np.array([0x7FC00001 + is_odd] * 9, np.uint32).view(np.float32)),
    halves=adding(lambda is_odd: jnp.full(90, 1 + is_odd / 128, jnp.bfloat16)),
    complex=adding(lambda is_odd: np.full(60, 1 + 2j + is_odd, np.complex64).real),
    one_of_many=adding(lambda is_odd: np.arange(1_000_000) == 999_999 - is_odd),
    on_device=adding(lambda is_odd: jnp.arange(1_000_000_000, 1_000_000_050) + is_odd),
    key=adding(lambda is_odd: jax.random.key_data(jax.random.key(1234567890 + is_odd))),
    noise=adding(lambda is_odd: np.random.default_rng(is_odd).normal(size=500)),
    static=lambda is_odd, f, g, x: synk.function(lambda x, n: x.sum(0) * n, inputs={"n": "static"}, name="h")(
        x, 3 + is_odd
    ),
    default=lambda is_odd, f, g, x: synk.function(lambda x, n=3 + is_odd: x.sum(0) * n, name="h")(x),
)
named(
    "program",
    reduction=lambda is_odd, f, g, x: row_sums("h", reduce="mean" if is_odd else "sum")(x),
    mode=lambda is_odd, f, g, x: synk.function(
        lambda x, y: x.sum(0) + y.sum(0), inputs=["scatter", "scatter" if is_odd else "broadcast"], name="h"
    )(x, x),
    shape=lambda is_odd, f, g, x: f(x[:, : 3 - is_odd]),
    outputs=lambda is_odd, f, g, x: synk.function(lambda x: (x.sum(0),) * (1 + is_odd), name="h")(x),
    slices=lambda is_odd, f, g, x: f(x, num_slices=1 + is_odd),
    precision=lambda is_odd, f, g, x: synk.function(
        lambda x: jnp.dot(x.T, x, precision="highest" if is_odd else None), name="h"
    )(x),
    promotion=lambda is_odd, f, g, x: synk.function(lambda x: x.sum(0) * (jnp.float16(1) if is_odd else 1.0), name="h")(
        x.astype(np.float16) if is_odd else x
    ),
    then=lambda is_odd, f, g, x: synk.function(lambda x: x.sum(0), name="h", then=lambda s: s * 2 if is_odd else s)(x),
    name=lambda is_odd, f, g, x: row_sums("h" if is_odd else "k")(x),
    variable=lambda is_odd, f, g, x: reader(*variables("v" if is_odd else "w"))(x),
    variables=lambda is_odd, f, g, x: reader(*variables(*("v", "w")[: 1 + is_odd]))(x),
    update=lambda is_odd, f, g, x: updater(*variables("w"), 1.0 + is_odd)(x),
    donated_or_not=lambda is_odd, f, g, x: (f(x), row_sums("h")(x)) if is_odd else (row_sums("h")(x), f(x)),
)
named(
    "order",
    of_collectives=lambda is_odd, f, g, x: [
        (synk.all_reduce if is_odd == (i == 0) else synk.broadcast)(*variables("w")) for i in range(2)
    ],
    of_variables=lambda is_odd, f, g, x: [np.asarray(w.value) for w in variables("v", "w")[:: 1 - 2 * is_odd]],
    collective_and_call=lambda is_odd, f, g, x: (
        (f(x), synk.check_replicas(*variables("w"))) if is_odd else (synk.check_replicas(*variables("w")), f(x))
    ),
    save_and_call=lambda is_odd, f, g, x: (
        synk.save(FOLDER, {}, step=1) if is_odd else [float(row_sums(f"f{i}")(x)[0]) for i in range(3)]
    ),
)


def variables(*names):
    return [synk.shared(np.ones(3, np.float32), name=name) for name in names]


def reader(*variables):
    return synk.function(lambda x: x.sum(0) * sum(v.value for v in variables), name="h")


def updater(w, scale):
    return synk.function(lambda x: x.sum(0), name="h", then=lambda s: setattr(w, "value", w.value + scale * s))


def often(count, act):
    for _ in range(count):
        act()


FOLDER = "/nonexistent/of/disagreements"
named(
    "count",
    of_calls=lambda is_odd, f, g, x: (often(3 + is_odd, lambda: float(f(x)[0])), g(x)),
    of_collectives=lambda is_odd, f, g, x: (often(1 + is_odd, lambda: synk.check_replicas(*variables("w"))), float(f(x)[0])),
    of_slices=lambda is_odd, f, g, x: (f(x), f(x, num_slices=2 + 2 * is_odd), float(g(x)[0])),
    of_batches=lambda is_odd, f, g, x: (list(f.iterate(x, batches=[2] * (3 + is_odd))), float(g(x)[0])),
    of_steps=lambda is_odd, f, g, x: (
        often(4 + 2 * is_odd, lambda: float(f(x)[0])), synk.save(FOLDER, {}, step=1), float(g(x)[0]),
    ),
)  # fmt: skip


def given(*args, **options):
    """Return a case that calls known programs with other values, which SYNK_CHECK compares."""

    def case(is_odd, f, g, x):
        f(x), g(x)
        chosen = [arg(is_odd) for arg in args]
        synk.function(lambda *x: sum(jnp.sum(each) for each in x), name="h", **options)(
            *chosen[:-1] if isinstance(chosen[-1], dict) else chosen,
            **chosen[-1] if isinstance(chosen[-1], dict) else {},
        )

    return case


named(
    "local",
    function=local_call(lambda f, g, x: g(synk.local(x))),
    dtype=local_call(lambda f, g, x: f(synk.local(x.astype(np.int32)))),
    slices=local_call(lambda f, g, x: f(synk.local(x), num_slices=2)),
    items=local_call(streamed(2), streamed(3)),
)
X = np.arange(36, dtype=np.float32).reshape(12, 3)
named(
    "known_value",
    rows=given(lambda is_odd: X + is_odd),
    one_row=given(lambda is_odd: np.where(np.arange(12)[:, None] == 11, X + is_odd, X)),
    number=given(lambda is_odd: 0.1 + is_odd, inputs=["broadcast"]),
    array=given(lambda is_odd: X + is_odd, inputs=["broadcast"]),
    indexes=given(lambda is_odd: X, lambda is_odd: {"batch": [0, 1, 2, 3 + is_odd]}),
    seeded_batch=given(lambda is_odd: X, lambda is_odd: {"batch": np.random.default_rng(is_odd).permutation(12)[:6]}),
    data=given(lambda is_odd: synk.data(X + is_odd)),
    resident=given(lambda is_odd: synk.data(X + is_odd, place="scatter")),
    on_all=given(lambda is_odd: synk.data(X + is_odd, place="broadcast")),
    batch_s=given(lambda is_odd: synk.data(X, place="scatter"), lambda is_odd: {"batch_s": [1 + is_odd, 0]}),
    learning_rate=lambda is_odd, f, g, x: [
        (h := synk.function(lambda x, lr: x.sum() * lr, inputs=["x"], name="h"))(x, 0.1), h(x, 0.1 + 0.01 * is_odd),
    ],
    set_value=lambda is_odd, f, g, x: [w.set_value(w.value + is_odd, rank=0) for w in variables("w")],
    assigned=lambda is_odd, f, g, x: [(w.value, setattr(w, "value", np.full(3, is_odd, np.float32))) for w in variables("w")],
)  # fmt: skip
named(
    "initial",
    values=lambda is_odd, f, g, x: reader(synk.shared(np.full(3, is_odd, np.float32), name="w"))(x),
    last_bit=lambda is_odd, f, g, x: reader(
        synk.shared(np.nextafter(np.ones(3, np.float32), np.float32(1 + is_odd)), name="w")
    )(x),
    unseeded=lambda is_odd, f, g, x: synk.shared(np.random.default_rng().normal(size=9), name="w").value,
    tree=lambda is_odd, f, g, x: synk.shared({"a": np.ones(3), "b": np.full(2, is_odd)}, name="w").value,
    key=lambda is_odd, f, g, x: synk.shared(jax.random.key(is_odd), name="w").value,
    set_before=lambda is_odd, f, g, x: [setattr(w, "value", np.full(3, is_odd, np.float32)) for w in variables("w")],
    shapes=lambda is_odd, f, g, x: synk.shared(np.zeros((3, 1) if is_odd else (1, 3)), name="w").value,
    dtypes=lambda is_odd, f, g, x: synk.shared(np.zeros(3, np.int32 if is_odd else np.float32), name="w").value,
)
named(
    "exchange",
    save_alone=lambda is_odd, f, g, x: (
        [synk.save(FOLDER, {}, step=1)] if is_odd else [time.sleep(1), *(float(f(x)[0]) for _ in range(5))]
    ),
    load_alone=lambda is_odd, f, g, x: (
        [synk.load(FOLDER, {})] if is_odd else [time.sleep(1), *(float(f(x)[0]) for _ in range(5))]
    ),
    save_by_process_0=lambda is_odd, f, g, x: (
        [float(f(x)[0]) for _ in range(5)] if is_odd else [float(f(x)[0]), synk.save(FOLDER, {}, step=1)]
    ),
    save_and_load=lambda is_odd, f, g, x: synk.save(FOLDER, {}, step=1) if is_odd else synk.load(FOLDER, {}),
    steps=lambda is_odd, f, g, x: synk.save(FOLDER, {}, step=1 + is_odd),
    names=lambda is_odd, f, g, x: synk.save(FOLDER, dict(zip("ab"[is_odd], variables("w"), strict=True)), step=1),
    save_and_place=lambda is_odd, f, g, x: (
        synk.save(FOLDER, {}, step=1) if is_odd else [w.value for w in variables("w")]
    ),
    caught=lambda is_odd, f, g, x: (float(f(x)[0]), caught(is_odd, f, x)),
)


def caught(is_odd, f, x):
    """Process 1 keeps the error to itself and computes on; process 0 waits in a program for it."""
    if not is_odd:
        return [float(f(x)[0]) for _ in range(5)]
    try:
        synk.save(FOLDER, {}, step=1)
    except synk.errors.DisagreementError as error:
        say("raised", kind=type(error).__name__, message=str(error))
        time.sleep(20)
