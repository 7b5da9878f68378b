"""States of variables: compared by what programs are compiled for, and one object for each new value."""

import gc
from dataclasses import replace
from weakref import ref

import jax
import numpy as np
import pytest

from synk._variables.state import AbstractState, VariableState


def shapes(rows):
    return (jax.ShapeDtypeStruct((rows, 2), np.float32),)


def test_abstract_states_are_values():
    """Equal ones are one key of a cache, whichever object they are; any difference makes another key."""
    state = AbstractState(shapes(3), "stacked", (3, 2))
    same = AbstractState(shapes(3), "stacked", (3, 2))
    assert state == same and hash(state) == hash(same) and state is not same
    others = [replace(state, shapes=shapes(4)), replace(state, layout="rows"), replace(state, rows_per_replica=(3, 3))]
    assert all(state != other for other in others) and len({state, same, *others}) == 4
    assert state != "stacked"


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
