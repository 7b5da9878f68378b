"""States of variables: compared by what programs are compiled for, and one object for each new value."""

import gc
from dataclasses import replace
from weakref import ref

import jax
import numpy as np
import pytest

import synk
from synk._variables.state import AbstractState, VariableState


def shapes(rows):
    return (jax.ShapeDtypeStruct((rows, 2), np.float32),)


def test_abstract_states_are_values():
    """Equal ones are one object as long as something refers to it, and any difference makes another one."""
    state = AbstractState(shapes(3), "stacked", (3, 2))
    same = replace(AbstractState(shapes(3)), layout="stacked", rows_per_replica=(3, 2))
    assert state is same and (state.layout, state.rows_per_replica) == ("stacked", (3, 2))
    others = [replace(state, shapes=shapes(4)), replace(state, layout="rows"), replace(state, rows_per_replica=(3, 3))]
    assert all(state != other for other in others) and len({state, same, *others}) == 4
    assert state != "stacked"
    weak = ref(state)
    del state, same
    gc.collect()
    assert weak() is None


def test_warm_calls_compare_no_shapes(group, monkeypatch):
    """Where functions take turns with a variable, whichever first had its state."""
    w = synk.shared([np.zeros(2, np.float32), np.ones(3, np.float32)])
    evaluate = synk.function(lambda x: x.sum() + w.value[0].sum())
    train = synk.function(lambda x: x.sum())
    train.then(lambda total: setattr(w, "value", [leaf + total for leaf in w.value]))
    x, compared = np.ones((4, 2), np.float32), []
    for turn in range(3):
        if turn == 2:
            monkeypatch.setattr(jax.ShapeDtypeStruct, "__eq__", lambda *pair: compared.append(pair))
        evaluate(x), train(x)
    assert w.value[0].tolist() == [24, 24] and compared == []


def test_a_state_is_itself_alone():
    """Values are never compared; whoever refers to a state weakly keeps no value alive; it has no other attributes."""
    state = VariableState([jax.numpy.ones(2)], AbstractState(shapes(2)))
    assert state != replace(state, is_equal=True) and replace(state, is_equal=False).leaves is state.leaves
    with pytest.raises(AttributeError):
        state.is_equl = False  # pyright: ignore[reportAttributeAccessIssue]
    weak = ref(state)
    del state
    gc.collect()
    assert weak() is None
