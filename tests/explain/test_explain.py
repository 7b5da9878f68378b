"""What explain says of calls: exact bytes, causes, nothing run and nothing changed, pages that need no network."""

import functools
import gc
import json
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk._explain.hlo import read_collectives, size_in_bytes
from synk._explain.page import chart, page, text
from synk._runtime.way import Accelerator

from ..helpers import group_of, needs_devices, slow, tells_no_memory

SCHEDULED = """HloModule step, is_scheduled=true, entry_computation_layout={()->f32[]}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%scatter_body (p: bf16[16]) -> bf16[2] {
  %p = bf16[16]{0} parameter(0)
  ROOT %rs = bf16[2]{0} reduce-scatter(%p), to_apply=%add
}

%gemm (p.1: f32[4,4]) -> f32[4,4] {
  %p.1 = f32[4,4]{1,0} parameter(0)
  ROOT %d = f32[4,4]{1,0} dot(%p.1, %p.1), lhs_contracting_dims={1}
}

ENTRY %main (x: f32[4,4], y: bf16[16]) -> f32[] {
  %x = f32[4,4]{1,0} parameter(0)
  %y = bf16[16]{0} parameter(1)
  %ar = (f32[4,4]{1,0}, f32[3]{0}) all-reduce-start(%x, %small), to_apply=%add
  %mm = f32[4,4]{1,0} fusion(%x), kind=kOutput, calls=%gemm
  %ar.done = (f32[4,4]{1,0}, f32[3]{0}) all-reduce-done(%ar)
  %small = f32[3]{0} constant({1, 2, 3})
  %rs.start = ((bf16[16]), bf16[2]) async-start(%y), calls=%scatter_body
  %cheap = f32[4,4]{1,0} add(%x, %x)
  %rs.done = bf16[2]{0} async-done(%rs.start)
  %conv = (f32[4,4]{1,0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$convForward"
  ROOT %ag = f32[8,4]{1,0} all-gather(%cheap), dimensions={0}
}
"""


def test_a_schedule_is_read():
    """Bytes that replicas give and get, what runs meanwhile and what comes after the last heavy one."""
    found = read_collectives(SCHEDULED, is_in_order=True)
    assert [(c.kind, c.operand_bytes, c.result_bytes, c.behind, c.after_last) for c in found] == [
        ("all-reduce", 76, 76, True, False), ("reduce-scatter", 32, 4, False, False), ("all-gather", 64, 128, False, True)
    ]  # fmt: skip
    unknown = read_collectives(SCHEDULED, is_in_order=False)
    assert {(c.behind, c.after_last) for c in unknown} == {(None, None)}


LOOPS = """HloModule step, is_scheduled=true, entry_computation_layout={()->f32[]}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %p = (s32[], f32[4,4]{1,0}) parameter(0)
  %p.1 = f32[4,4]{1,0} get-tuple-element(%p), index=1
  %inner.ar = f32[4,4]{1,0} all-reduce-start(%p.1), to_apply=%add
  %inner.dot = f32[4,4]{1,0} dot(%p.1, %p.1), lhs_contracting_dims={1}
  %inner.done = f32[4,4]{1,0} all-reduce-done(%inner.ar)
  ROOT %inner.tuple = (s32[], f32[4,4]{1,0}) tuple(%p.1, %inner.done)
}

%scattered (q: f32[16]) -> f32[2] {
  %q = f32[16]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%q), to_apply=%add
}

%test (t: (s32[], f32[4,4])) -> pred[] {
  %t = (s32[], f32[4,4]{1,0}) parameter(0)
  ROOT %all = pred[] all-reduce(%t), to_apply=%add
}

%graph (g: f32[4,4]) -> f32[4,4] {
  %g = f32[4,4]{1,0} parameter(0)
  ROOT %graph.ag = f32[8,4]{1,0} all-gather(%g), dimensions={0}
}

%outer (o: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %o = (s32[], f32[4,4]{1,0}) parameter(0)
  %rs.start = ((f32[16]), f32[2]) async-start(%sixteen), calls=%scattered
  %loop = (s32[], f32[4,4]{1,0}) while(%o), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %rs.done = f32[2]{0} async-done(%rs.start)
  %graphed = f32[4,4]{1,0} call(%x), to_apply=%graph
  ROOT %kernel = f32[2]{0} fusion(%sixteen), kind=kCustom, calls=%scattered
}

%yes (y: f32[3]) -> f32[3] {
  %y = f32[3]{0} parameter(0)
  %yes.dot = f32[3]{0} dot(%y, %y), lhs_contracting_dims={0}
  ROOT %yes.ar = f32[3]{0} all-reduce(%y), to_apply=%add
}

%no (n: f32[3]) -> f32[3] {
  ROOT %n = f32[3]{0} parameter(0)
}

ENTRY %main (x: f32[4,4]) -> f32[] {
  %x = f32[4,4]{1,0} parameter(0)
  %sixteen = f32[16]{0} reshape(%x)
  %loops = (s32[], f32[4,4]{1,0}) while(%x), condition=%add, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %three = f32[3]{0} slice(%x)
  %started = f32[3]{0} all-reduce-start(%three), to_apply=%add
  %branch = f32[3]{0} conditional(%x, %three, %three), true_computation=%yes, false_computation=%no
  ROOT %ended = f32[3]{0} all-reduce-done(%started)
}
"""


def test_loops_and_branches_are_read():
    """They have an order in time too, behind which comes what follows the loop, and its next round."""
    found = read_collectives(LOOPS, is_in_order=True)
    assert [(c.kind, c.operand_bytes, c.times, c.behind, c.after_last) for c in found] == [
        ("reduce-scatter", 64, 3, True, False),  # started in the outer loop, behind the inner one
        ("all-reduce", 68, 15, False, False), ("all-reduce", 64, 15, True, False), ("all-gather", 64, 3, False, False),
        ("reduce-scatter", 64, 3, None, None),  # in one kernel
        ("all-reduce", 12, 1, True, False), ("all-reduce", 12, 1, False, True)
    ]  # fmt: skip
    unknown = read_collectives(LOOPS.replace("known_trip_count", "another"), is_in_order=False)
    assert [c.times for c in unknown] == [None] * 5 + [1, 1]
    assert {(c.behind, c.after_last) for c in unknown} == {(None, None)}


# As XLA for TPUs writes a loop, without a count.
COUNTER = """HloModule step, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0, metadata={op_name="i"}
  %one = s32[]{:T(128)} constant(1), metadata={op_name="one"}
  %grown = s32[]{:T(128)} add(%i, %one)
  %h = f32[8]{0} get-tuple-element(%p), index=1
  %ar = f32[8]{0} all-reduce(%h)
  ROOT %out = (s32[]{:T(128)}, f32[8]{0}) tuple(%grown, %ar)
}

%test (t: (s32[], f32[8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(12)
  %t = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %bound), direction=LT
}

ENTRY %main (x: f32[8]) -> (s32[], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = s32[]{:T(128)} copy(%zero)
  %state = (s32[]{:T(128)}, f32[8]{0}) tuple(%start, %x)
  ROOT %while = (s32[]{:T(128)}, f32[8]{0}) while(%state), condition=%test, body=%body
}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""), ("constant(0)", "constant(3)"), ("constant(1)", "constant(2)"), ("=LT", "=NE"), ("add(", "multiply("),
        ("copy(%zero)", "negate(%zero)"), ("tuple(%grown, ", "tuple(%one, "), ("add(%i, ", "add(%one, "),
        ("constant(12)", "parameter(1)"), ("while(%state)", "while(%x)"), ("(%p), index=0", "(%p), index=1"),
        ("(%p), index=0", "(%out), index=0"),
    ],
)  # fmt: skip
def test_rounds_from_zero_in_steps_of_one_are_counted(old, new):
    """And those of no other loop."""
    [found] = read_collectives(COUNTER.replace(old, new), is_in_order=True)
    assert found.times == (None if old else 12)


@pytest.mark.parametrize(
    ("attributes", "ranks"),
    [
        ("replica_groups={{0,1},{2,3}}, x", (0, 1)),
        ("replica_groups={{0,1,2,3}}, x", None),
        ("replica_groups={}", None),
        ("replica_groups=[1,4]<=[4]", None),
        ("replica_groups=[2,4]<=[8], x", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", (0, 4)),
    ],
)
def test_who_takes_part(attributes, ranks):
    """The first set of replicas, in both ways that HLO names them; None where it is all."""
    text = (
        f"HloModule m\nENTRY %main (x: f32[8]) -> f32[8] {{\n  ROOT %r = f32[8]{{0}} all-reduce(%x), {attributes}\n}}\n"
    )
    [found] = read_collectives(text, is_in_order=False)
    assert found.ranks == ranks


@pytest.mark.parametrize(
    ("shape", "size"),
    [("f32[]", 4), ("(f32[2,3]{1,0:T(8,128)}, bf16[5])", 34), ("pred[7]", 7), ("s4[3]", 2), ("f8e4m3fn[6]", 6), ("c64[2]", 16), ("f32[<=4]", 16), ("token[]", 0)],
)  # fmt: skip
def test_sizes(shape, size):
    """Of arrays as HLO writes them."""
    assert size_in_bytes(shape) == size


def all_reduced(e):
    return sum(c.operand_bytes for program in e.programs for c in program.collectives if c.kind == "all-reduce")


def lenet_loss(params, x, y):
    for kernel, bias in params["convolutions"]:
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + bias
        x = jax.lax.reduce_window(jnp.tanh(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(len(x), -1)
    for kernel, bias in params["dense"]:
        x = jnp.tanh(x @ kernel + bias)
    return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()


def lenet():
    def layer(*shape):
        return np.full(shape, 0.01, np.float32), np.zeros((1,) * (len(shape) - 1) + shape[-1:], np.float32)

    params = {"convolutions": [layer(5, 5, 1, 6), layer(5, 5, 6, 16)], "dense": [layer(784, 120), layer(120, 10)]}
    return synk.train.step(lenet_loss, params, optax.sgd(0.1, momentum=0.9)), params


@needs_devices(2)
@pytest.mark.parametrize("num_slices", [slow(1), 3])
@pytest.mark.parametrize("rows", [slow(16), 13])
def test_the_bytes_of_lenet(rows, num_slices):
    """Gradients and the loss, and no more, whatever rows and slices; nothing ran, and nothing is another after it."""
    step, params = lenet()
    x, y = np.ones((rows, 28, 28, 1), np.float32), np.zeros(rows, np.int32)
    want = 4 * (sum(leaf.size for leaf in jax.tree.leaves(params)) + 1)
    with group_of("devices", 2):
        for _ in range(2):
            e = step.explain(x, y, num_slices=num_slices)
            assert all_reduced(e) == want
            assert step.stats.calls == step.stats.rows == 0
            assert step.params._group is None  # not even placed
        assert e.was_compiled
        count = step.stats.compilations
        step(x, y, num_slices=num_slices)
        assert step.stats.compilations == count
        convolutions = 2 * 28 * 28 * 25 * 6 + 2 * 14 * 14 * 150 * 16
        dense = 2 * (784 * 120 + 120 * 10)
        first = -(-rows // 2) * (3 * (convolutions + dense) - 2 * 28 * 28 * 25 * 6)  # no gradient of the images
        assert e.flops == first


def test_rows_that_are_exchanged():
    """The program that brings them is told, with its collectives, and the data that stays where it lies."""
    with synk.init(2, memory="1MB"):
        lying = synk.function(lambda x: x, reduce="scatter")(np.ones((50_000, 10), np.float32))
        f = synk.function(lambda x: x.sum(0))
        e = f.explain(lying, batch=np.arange(20_000))
        assert [program.role for program in e.programs] == ["exchange of x", "the call"]
        assert {each.kind for each in e.programs[0].collectives} == {"all-to-all"}
        # The second is in a loop whose rounds depend on the rows that a batch picks: it counts once.
        assert [each.times for each in e.programs[0].collectives] == [1, None]
        assert e.programs[0].collective_bytes == sum(each.operand_bytes for each in e.programs[0].collectives)
        assert (e.programs[1].resident_bytes, e.fits) == (1_000_000, False)
        with pytest.raises(MemoryError, match="in slices of one row it still needs"):
            f(lying, batch=np.arange(20_000), num_slices="auto")


def nested(x, w):
    """All-reduce 4 floats 5 times in each of 3 rounds, and then 2."""

    def outer(h, w):
        h = jax.lax.fori_loop(0, 5, lambda _, h: jnp.tanh(jax.lax.psum(h * w, "r")), h)
        return h, jax.lax.psum(h[:2] * w[:2], "r")

    h, sums = jax.lax.scan(outer, x.sum(0), w)
    return h.sum() + sums.sum()


@pytest.mark.parametrize("replicas", [slow(2), 3, slow(4), 8])
@needs_devices(8)
def test_loops_count_in_all_rounds(replicas, tmp_path):
    """In records, totals, text and drawing, of a first call and of later ones."""
    x, w = np.ones((24, 4), np.float32), np.ones((3, 4), np.float32)
    f = synk.function(nested, inputs=["x"], axis_name="r")
    for _ in range(2):
        with group_of("devices", replicas):
            e = f.explain(x, w)
        [program] = e.programs
        assert [(c.operand_bytes, c.times) for c in program.collectives] == [(16, 15), (8, 3), (4, 1)]
        assert (program.collective_bytes, program.behind_bytes) == (15 * 16 + 3 * 8 + 4, None)
        assert "  the call  all-reduce  16 B     16 B    unknown  unknown     15\n" in str(e)
        e.html(tmp_path / "call.html")
        assert "19 collectives" in (tmp_path / "call.html").read_text()


@needs_devices(3)
def test_rounds_of_rows_that_do_not_divide():
    """All devices are one replica there; what XLA puts into its loops counts in all rounds too."""
    x, w = np.ones((13, 6), np.float32), np.ones((4, 6, 6), np.float32)

    def centred(x, w):
        return jax.lax.scan(lambda h, w: (h - (h @ w).mean(0, keepdims=True), None), x, w)[0].sum()

    f = synk.function(centred, inputs=["x"], engine="jit")
    with group_of("devices", 3):
        [program] = f.explain(x, w).programs
    assert 4 in [c.times for c in program.collectives]
    assert program.collective_bytes == sum(c.operand_bytes * (c.times or 0) for c in program.collectives)


def test_the_lower_bound_is_one(monkeypatch):
    """Of rows that lie there those that are picked count, of slices what is new, of branches the shortest."""
    monkeypatch.setattr("synk._explain.explain.known_accelerator", lambda _: Accelerator("one", 0, 0, 1e30, 1.0, 1.0))
    x = np.ones((1000, 25), np.float32)
    f = synk.function(lambda x: (x.sum(), x @ x.T), outputs=("sum", "scatter"))
    with group_of("devices", 2):
        for place, options in (("broadcast", "batch"), ("scatter", "batch"), ("scatter", "batch_s")):
            data = synk.data(x, place=place)
            e = synk.function(lambda x: x.sum()).explain(data, **{options: np.arange(8)})
            assert 400 <= (e.lower_bound_seconds or 0) < 1000  # the index and the sum included
            data.free()
        rows = synk.function(lambda x: x, reduce="scatter").explain(x, num_slices=10)
        assert 0 < (rows.lower_bound_seconds or 0) < 5 * x.nbytes / 2
        assert f.explain(x[:8], output_subset=[0]).flops == 0 < f.explain(x[:8]).flops
        branches = synk.function(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: (x @ x.T).sum(), lambda: x.sum()))
        assert branches.explain(x[:8]).flops == 0


def causes_of(f, *calls):
    """Why each call had to be compiled."""
    return ["; ".join(f.explain(*args, **options).why) for args, options in calls]


def test_causes():
    """The nearest earlier call, and what differs from it."""
    x = np.ones((8, 4), np.float32)
    w = synk.shared(np.float32(2), name="w")
    f = synk.function(
        lambda x, lr, k=1: (x.astype(np.float32) * lr * k * w.value).sum(0),
        inputs={"lr": "broadcast", "k": "static"},
        name="f",
    )
    calls = [
        ((x, 1.0), {}), ((x[:, :3], 1.0), {}), ((x.astype(np.float16), 1.0), {}), ((x, np.float32(1)), {}),
        ((x[:4], 1.0), {}), ((x[:5], 1.0), {}), ((x, 1.0), {"num_slices": 2}), ((x, 1.0, 2), {}), ((x, 1.0, 3), {}),
        ((synk.data(x, place="scatter"), 1.0), {}), ((synk.data(x, place="broadcast"), 1.0), {"batch": [1, 2, 3, 4, 5, 6, 7, 0]}),
        (({"a": x}["a"], {"b": 1.0}["b"]), {}),
    ]  # fmt: skip
    with group_of("devices", 2):
        assert causes_of(f, *calls) == [
            "the first call", "rows of x: float32[3], was float32[4]", "rows of x: float16[4], was float32[3]",
            "lr: float32[], was a Python number (float32)", "rows of parts, by launch: ((2,),), was ((4,),)",
            "rows of parts, by launch: ((3, 2),), was ((2,),); as many rows on all replicas: False, was True",
            "rows of parts, by launch: ((2,), (2,)), was ((2,),); num_slices: 2, was 1", "k: 2, was 1", "k: 3, was 2",
            "feed of x: layout=stacked, size=4, was rows from the host",
            "feed of x: layout=replicated, index=gather, size=8, was layout=stacked, size=4",
            "the first call",
        ]  # fmt: skip
        with jax.numpy_rank_promotion("warn"):
            assert causes_of(f, calls[0]) == ["jax_numpy_rank_promotion: 'warn', was 'raise'"]
        w.set_value(np.float32(3), rank=1)
        assert causes_of(f, calls[0]) == ["w: a value each replica, float32[], was float32[]"]
        assert causes_of(f, calls[1])[0].startswith("rows of x: float32[3], was float32[4]")
    with group_of("simulated", 2):
        g = synk.function(jnp.sum)
        assert causes_of(g, ((x,), {})) == ["the first call"]
    with group_of("simulated", 3):
        assert causes_of(g, ((x,), {}))[0].startswith("group: Group(3 simulated")


def test_the_cause_is_another_variable(group):
    """One that took the place of another, which is nowhere any more, or one that another kind of call uses too."""
    w = synk.shared(np.float32(1), name="w")
    more = synk.shared(np.float32(1), name="more")
    f = synk.function(lambda x, k: x.sum() * w.value * (more.value if k else 1), inputs={"k": "static"})
    call = (np.ones(8, np.float32), False)
    assert causes_of(f, (call, {})) == ["the first call"]
    w = synk.shared(np.float32(2), name="another w")
    gc.collect()
    assert causes_of(f, (call, {})) == ["another w: float32[], was absent"]
    found = causes_of(f, ((call[0], True), {}))
    assert found == ["k: True, was False; more: float32[], was absent"]


def test_run_changes_nothing(group):
    """Times are real ones; variables keep their values, which the calls were given copies of."""
    total = synk.shared(np.zeros(3, np.float32), name="total")

    @synk.function
    def add(x):
        return x.sum(0)

    @add.then
    def add(part):
        total.value = total.value + part

    x = np.ones((7, 3), np.float32)
    for _ in range(2):
        e = add.explain(x, run=3)
        assert e.measured.calls == 3
        assert 0 < e.measured.host_seconds <= e.measured.seconds
        assert total.value.tolist() == [0, 0, 0]
    add(x)
    assert total.value.tolist() == [7, 7, 7]
    assert "measured\ncalls: 3\n" in str(e)


@pytest.mark.parametrize(("run", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_wrong_runs(run, error):
    """Refused by name."""
    with pytest.raises(error, match="give a number of calls"):
        synk.function(jnp.sum).explain(np.ones(3), run=run)


def test_under_a_trace_it_raises():
    """It compiles what a call runs, which a trace has not."""
    f = synk.function(jnp.sum)
    with pytest.raises(synk.SynkError, match="not inside jit"):
        jax.jit(lambda x: f.explain(x).flops)(np.ones(3))
    assert f.explain(np.ones(3)).why == ["the first call"]


class _Page(HTMLParser):
    """What a page loads, and whether its tags match."""

    def __init__(self):
        super().__init__()
        self.open, self.loaded, self.seen = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "rect":
            assert self.open.pop() == tag


@needs_devices(2)
@tells_no_memory
def test_what_it_writes(tmp_path):
    """JSON that reads back, and a page that is whole and loads nothing."""
    f = synk.function(lambda x, w: jnp.tanh(x @ w).sum(0), inputs=["x"], name="a<b")
    with group_of("devices", 2):
        e = f.explain(np.ones((9, 4), np.float32), np.ones((4, 3), np.float32), num_slices=2)
    found = json.loads(e.json())
    assert found["lengths"] == [5, 4]
    assert found["memory_limit"] is None  # unknown, and not 0
    assert {"lengths: 5, 4", "memory limit: unknown", "why: the first call"} <= {*str(e).splitlines()}
    assert re.search(r"\n  combine .* 12 B +unknown\n", str(e))  # how much runs behind computation
    e.html(tmp_path / "call.html")
    written = (tmp_path / "call.html").read_text()
    parser = _Page()
    parser.feed(written)
    assert parser.open == parser.loaded == []
    assert {"svg", "rect", "table"} <= parser.seen
    assert re.findall("<h1>(.*?)</h1>", written) == ["A call of a&lt;b"]
    assert written.count("<svg") == 1 and "<td>all-reduce</td>" in written
    # A colour has one meaning.
    squares = re.findall(r'width="11.0" height="11" fill="(#\w+)"/>\n<text [^>]*>(.*?)</text>', written)
    assert len(set(squares)) == len({color for color, _ in squares}) >= 5


def test_long_tables_are_cut_in_print():
    """And lengths of many replicas; a page's tables have all."""
    tree = {"lengths": [1] * 40, "records": [{"name": str(i), "sent_bytes": None} for i in range(40)]}
    lines = text(tree).splitlines()
    assert lines[0] == "lengths: " + "1, " * 16 + "..." and lines[-1] == "  and 24 more"
    assert page("a<b", tree, "").count("<td>unknown</td>") == 40


@pytest.mark.parametrize("meanings", [1, 3, 8])
def test_drawings_fit_a_phone(meanings):
    """However many bars and meanings there are, no word or box leaves the drawing, which is as wide as a phone."""
    segments = [("what it is " * (1 + i % 3), 1.0 + i) for i in range(meanings)]
    drawing = chart(
        "a", [("some", [("a bar", segments, "10 MB")] * 20), ("others", [("another", segments[:1], "1 B")])]
    )
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing).groups())
    assert width <= 390 and "min-width" not in drawing
    boxes = re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)"', drawing)
    assert all(float(x) + float(wide) <= width + 0.1 and int(y) < height for x, y, wide in boxes)
    words = re.findall(r'<text x="([\d.]+)" y="(\d+)" fill="currentColor">(.*?)<', drawing)
    assert all(float(x) + 5 * len(text) <= width and int(y) < height for x, y, text in words)


@pytest.mark.parametrize(("records", "side_by_side"), [(1, True), (3, True), (9, False)])
def test_wide_tables_stand_on_their_side(records, side_by_side):
    """A page shows a few records of many fields as columns, so that nobody scrolls."""
    tree = {"programs": [{f"field_{i}": f"{i}{record}" for i in range(8)} for record in range(records)]}
    assert ("<tr><th>field 1</th><td>10</td>" in page("a", tree, "")) == side_by_side
    assert page("a", tree, "").count("<td>") == 8 * records


EIGHT = np.arange(8, dtype=np.float32)


def test_explain_of_array_constants_and_numpy_numbers(four):
    """Neither has one truth value, nor a place in JSON."""
    bound = synk.function(functools.partial(lambda x, w: jnp.sum(x * w.sum()), w=np.ones(3, np.float32)))
    bound(EIGHT)
    assert "arguments: PyTreeDef" in bound.explain(x=EIGHT).why[0]
    json.loads(synk.function(jnp.sum).explain(EIGHT, num_slices=np.int64(2)).json())
    scaled = synk.function(lambda x, by: x.sum() * by, inputs={"by": "static"})
    scaled(EIGHT, 1)
    scaled(EIGHT, 1.0)
    assert scaled.explain(EIGHT, 1.0).why == ["by: 1.0, was 1"]


@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_bytes_from_the_host(engine):
    """What lies on the devices is not sent; what the host sends goes to each device once."""
    f = synk.function(lambda x, y: (x @ y.T).sum(), ["x"], engine=engine)
    x, y = np.ones((6, 5), np.float32), np.ones((4, 5), np.float32)
    data = synk.data(y, place="broadcast"), synk.data(y)
    for group, devices in ((group_of("devices", 2), 2), (group_of("simulated", 2), 1)):
        with group:
            cut, whole = (
                jax.NamedSharding(group.mesh, jax.sharding.PartitionSpec(*axis)) for axis in (["replica"], [])
            )
            there = jax.device_put(x, cut), jax.device_put(y, whole)
            for given, sent in (
                ((x, y), (x.nbytes, y.nbytes * devices)),
                (there, (0, 0)),
                ((x[:5], data[0]), (x.nbytes, 0)),
                ((x, data[1]), (x.nbytes, y.nbytes * devices)),
                ((jax.ShapeDtypeStruct(x.shape, x.dtype), y), (x.nbytes, y.nbytes * devices)),
            ):
                assert tuple(each.sent_bytes for each in f.explain(*given).inputs) == sent
