"""What a cell of a notebook shows of each object: it starts nothing, waits for nothing, and takes a line or a drawing."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from .helpers import group_of


def loss(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


def test_functions():
    """The mode of each parameter, the ops and whether `then` follows."""

    @synk.function(inputs={"rate": "broadcast", "power": "static"}, outputs={"a": "mean", "b": "mean", "c": "concat"})
    def step(x, rate, power=2): ...

    said = "synk.function(step(x: scatter, rate: broadcast, power: static) -> mean, concat"
    assert repr(step) == f"{said})"
    assert repr(step.then(lambda outputs: None)) == f"{said}, then)"
    stencil = synk.function(lambda x: x[1:-1], inputs={"x": synk.Overlap(1)}, reduce="concat", name="stencil")
    assert repr(stencil).startswith("synk.function(stencil(x: Overlap(before=1")


def test_variables():
    """Shapes and dtypes; of many leaves the first and their number."""
    assert repr(synk.shared([np.float32(0)] * 6, name="w")) == f"Shared(w: {', '.join(['float32[]'] * 4)}, 2 more)"


@pytest.mark.parametrize("size", [2, 3])
def test_variables_that_differ(size):
    """Who made the replicas differ is said."""
    with group_of("simulated", size):
        w = synk.shared(np.float32(0), name="w")
        w.set_value(np.float32(1), rank=1)
        assert repr(w).startswith("Shared(w: float32[]; replicas may differ since ")


def test_variables_of_another_group():
    """It says that it lives in a group that is not the current one."""
    w = synk.shared(np.float32(0), name="w")
    with group_of("simulated", 2):
        assert repr(w) == "Shared(w: float32[])"
        assert w.value == 0
        assert repr(w) == "Shared(w: float32[])"
    with group_of("simulated", 3):
        assert repr(w).startswith("Shared(w: float32[]; it lives in Group(2 simulated replicas on")


@pytest.mark.parametrize("make", [synk.train.step, synk.contrib.local_steps])
def test_steps(make):
    """Their variables, once."""
    step = make(loss, {"w": np.zeros((3, 2), np.float32)}, optax.sgd(0.1, 0.9))
    assert repr(step).startswith(
        f"synk.{'train.step' if make is synk.train.step else 'contrib.local_steps'}(loss, Shared(params: "
    )
    assert repr(step).count("Shared(params: float32[3, 2])") == 1


def test_findings(group):
    """A `Blame` and a `LawError` show their sentences, whose lines stay lines."""
    x = np.ones(10, np.float32)
    x[7] = -1
    blame = synk.function(lambda x: jnp.log(x).sum(), name="f").blame(x)
    assert repr(blame) == f"Blame({blame})" and str(blame).startswith("f: row 7 makes it not finite")
    with pytest.raises(synk.LawError) as error:
        synk.function(jnp.mean).check(np.arange(8.0, dtype=np.float32))
    assert repr(error.value) == f"LawError: {error.value}" and "\n" in repr(error.value)


def test_an_explanation_is_drawn(on_group):
    """By its drawing and tables, without what would style or title the page around it."""
    shown = synk.function(lambda x: x.sum())
    html = shown.explain(np.ones(8, np.float32))._repr_html_()
    assert html.startswith("<div><svg ") and "<h2>programs</h2>" in html
    assert not any(word in html for word in ("<style", "<html", "<body", "<script", "src=", "<h1"))
