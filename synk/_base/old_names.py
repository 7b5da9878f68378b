"""Old names: what replaces the names of Synkhronos, for messages."""

from collections.abc import Mapping
from typing import Any

_KEYWORDS = {
    "updates": "assign shared variables in then: `@f.then`, and `w.value = new` there",
    "givens": "pass what varies as arguments, and read shared variables in the function by `w.value`",
    "bcast_inputs": 'name modes: inputs={"lr": "broadcast"}',
    "collect_modes": 'name ops: outputs=("mean", "concat")',
    "reduce_ops": 'name ops: outputs=("mean", "concat")',
    "sharing": "make data by synk.data(x)",
}
_MEMBERS = {
    "build_inputs": "synk.build_inputs(x, y), or synk.data(x)",
    "as_theano": "f.serial(...), the same function on one device",
    "collect_modes": 'the ops given as outputs=("mean", "concat")',
    "inputs": "the arguments of the call; synk.data(x) keeps rows ready",
    "outputs": 'the ops given as outputs=("mean", "concat")',
    "free_memory": "x.free() of synk.data, and synk.close()",
    "exclude_from_collect": "output_subset=",
}
_FUNCTIONS = {
    "free_memory": "x.free() of synk.data, and synk.close()",
    "make_slices": "num_slices= of a call",
    "all_to_all": "synk.gather and synk.scatter",
    "get_n": "synk.size()",
    "distribute": "nothing; functions and shared variables reach the devices by themselves",
}


def refuse_keywords(call: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that a call does not have. Say what replaces those of Synkhronos."""
    for name in given:
        if name in _KEYWORDS:
            raise TypeError(f"synk.{call}: {name}= was Synkhronos's. Instead: {_KEYWORDS[name]}.")
        raise TypeError(f"synk.{call}() got an unexpected keyword argument {name!r}")


def refuse_member(kind: str, name: str) -> AttributeError:
    """Return the error for a missing attribute of an object. Say what replaces a name of Synkhronos."""
    instead = f", as Synkhronos's had. Instead: {_MEMBERS[name]}." if name in _MEMBERS else ""
    return AttributeError(f"a synk {kind} has no {name!r}{instead}")


def refuse_function(name: str) -> AttributeError:
    """Return the error for a missing attribute of the module. Say what replaces a name of Synkhronos."""
    if name in _FUNCTIONS:
        return AttributeError(f"synk has no {name!r}, as Synkhronos had. Instead: {_FUNCTIONS[name]}.")
    return AttributeError(f"module 'synk' has no attribute {name!r}")
