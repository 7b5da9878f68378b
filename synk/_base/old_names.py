"""Old names: what replaces names that others have, for messages."""

_SYNKHRONOS, _PMAP, _LAX, _FLAX = "Synkhronos had", "jax.pmap has", "jax.lax has", "Flax has"
_MOVED = "has another place"
_ELASTIC = (
    "synk no longer has",
    "when a process dies, start all again from a checkpoint: `python -m synk launch --restarts R`, with synk.save and "
    "synk.load in the program",
)
# Name: who has it, and what replaces it.
_INSTEAD = {
    # Keywords of synk.function.
    "updates": (_SYNKHRONOS, "assign shared variables in then: `@f.then`, and `w.value = new` there"),
    "givens": (_SYNKHRONOS, "pass what varies as arguments, and read shared variables in the function by `w.value`"),
    "bcast_inputs": (_SYNKHRONOS, 'name modes: inputs={"lr": "broadcast"}'),
    "collect_modes": (_SYNKHRONOS, 'name ops: outputs=("mean", "concat")'),
    "reduce_ops": (_SYNKHRONOS, 'name ops: outputs=("mean", "concat")'),
    "sharing": (_SYNKHRONOS, "make data by synk.data(x)"),
    "in_axes": (_PMAP, 'name modes: inputs={"rate": "broadcast"} for None; rows are axis 0'),
    "out_axes": (_PMAP, 'name ops: outputs="same" for None, "concat" for 0 (of a training step aux=, for aux outputs)'),
    "static_broadcasted_argnums": (_PMAP, 'name modes: inputs={"config": "static"}'),
    "donate_argnums": (_PMAP, "leave it out: arguments are never overwritten; donate=True is for shared variables"),
    "axis_size": (_PMAP, "leave it out: rows are counted"),
    "devices": (_PMAP, "synk.init(devices), or `with synk.init(devices):` around calls"),
    "backend": (_PMAP, "synk.init(jax.devices(backend))"),
    "axis_name": (_PMAP, 'name the axis for each function: synk.function(fn, axis_name="batch")'),
    "has_aux": ("jax.grad has", 'name the op of aux outputs: aux="mean", or aux="concat" for an entry a row'),
    "reduction": ("losses of torch have", 'name an op: reduce="mean"'),
    "num_slices": ("calls have", "f(x, num_slices=2)"),
    "batch_size": ("loaders have", "f.iterate(x, y, batches=synk.minibatches(len(x), 64))"),
    # Members of a function.
    "build_inputs": (_SYNKHRONOS, "synk.contrib.synkhronos.build_inputs(x, y), or synk.data(x)"),
    "as_theano": (_SYNKHRONOS, "f.serial(...), the same function on one device"),
    "inputs": (_SYNKHRONOS, "the arguments of the call; synk.data(x) keeps rows ready"),
    "outputs": (_SYNKHRONOS, 'the ops given as outputs=("mean", "concat")'),
    "exclude_from_collect": (_SYNKHRONOS, "output_subset="),
    # Functions of the module.
    "free_memory": (_SYNKHRONOS, "x.free() of synk.data, and synk.close()"),
    "make_slices": (_SYNKHRONOS, "num_slices= of a call"),
    "all_to_all": (_SYNKHRONOS, "synk.gather and synk.scatter"),
    "get_n": (_SYNKHRONOS, "synk.size()"),
    "distribute": (_SYNKHRONOS, "nothing; functions and shared variables reach the devices by themselves"),
    "pmap": ("JAX has", 'synk.function(fn, reduce="mean") of rows, or synk.map(fn) of items'),
    "pmean": (_LAX, 'op "mean" of the function, or synk.all_reduce(v, "mean") inside'),
    "psum": (_LAX, 'op "sum" of the function, or synk.all_reduce(v, "sum") inside'),
    "axis_index": (_LAX, "synk.rank()"),
    "replicate": (_FLAX, 'w = synk.shared(state); or pass state as a "broadcast" argument'),
    "unreplicate": (_FLAX, "w.value; or synk.contrib.unstack(state) for a state that was saved stacked"),
    "shard": (_FLAX, "pass rows as they are"),
    "prefetch_to_device": (_FLAX, "f.iterate(x, y, batches=...), or f.stream(batches, prefetch=2)"),
    "pad_shard_unpad": (_FLAX, "pass any number of rows; f.over(x, batches=...) for a whole dataset"),
    # Names that are not at the top, and members that are not in the core.
    "fork": (_SYNKHRONOS, "synk.init(n); or all of its names, by import synk.contrib.synkhronos as synk"),
    "get_value": (_SYNKHRONOS, "w.get_value(rank), or synk.contrib.synkhronos.get_value(rank, w)"),
    "set_value": (_SYNKHRONOS, "w.set_value(value, rank=rank), or synk.contrib.synkhronos.set_value(rank, w, value)"),
    "get_lengths": (_SYNKHRONOS, "synk.contrib.synkhronos.get_lengths(w)"),
    "get_shapes": (_SYNKHRONOS, "synk.contrib.synkhronos.get_shapes(w)"),
    "tune": (_MOVED, "synk.contrib.tune(step, ...)"),
    **{name: (_MOVED, f"synk.contrib.{name}") for name in "pairs scan unstack PowerSGD LocalSteps local_steps".split()},
    "pytensor": (_MOVED, "import synk.contrib.pytensor"),
    **{name: (_MOVED, f"synk.typing.{name}") for name in ("Data", "Function", "Group", "Shared")},
    **{
        name: (_MOVED, f"synk.errors.{name}")
        for name in "CheckpointError DisagreementError DivergedError PeerError Preempted SharedLostError".split()
    },
    # Elastic groups: of synk.init, of the module, of the command line.
    **dict.fromkeys(("elastic", "join", "--elastic", "--min"), _ELASTIC),
}


def instead_of(name: str) -> str:
    """Return the end of a message about a missing name: who has that name, and what replaces it."""
    if name not in _INSTEAD:
        return ""
    origin, instead = _INSTEAD[name]
    return f", which {origin}. Instead: {instead}."
