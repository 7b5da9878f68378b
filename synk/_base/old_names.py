"""Old names: what replaces the names of Synkhronos, for messages."""

_INSTEAD = {
    # Keywords of synk.function.
    "updates": "assign shared variables in then: `@f.then`, and `w.value = new` there",
    "givens": "pass what varies as arguments, and read shared variables in the function by `w.value`",
    "bcast_inputs": 'name modes: inputs={"lr": "broadcast"}',
    "collect_modes": 'name ops: outputs=("mean", "concat")',
    "reduce_ops": 'name ops: outputs=("mean", "concat")',
    "sharing": "make data by synk.data(x)",
    # Members of a function.
    "build_inputs": "synk.build_inputs(x, y), or synk.data(x)",
    "as_theano": "f.serial(...), the same function on one device",
    "inputs": "the arguments of the call; synk.data(x) keeps rows ready",
    "outputs": 'the ops given as outputs=("mean", "concat")',
    "exclude_from_collect": "output_subset=",
    # Functions of the module.
    "free_memory": "x.free() of synk.data, and synk.close()",
    "make_slices": "num_slices= of a call",
    "all_to_all": "synk.gather and synk.scatter",
    "get_n": "synk.size()",
    "distribute": "nothing; functions and shared variables reach the devices by themselves",
}


def instead_of(name: str) -> str:
    """Return the end of a message about a missing name: what replaces a name of Synkhronos."""
    return f", which Synkhronos had. Instead: {_INSTEAD[name]}." if name in _INSTEAD else ""
