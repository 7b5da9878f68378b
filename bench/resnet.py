"""ResNet-50 v1.5 in flax, and its training step by synk and by hand: what the benchmarks share."""

import re
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from imagenet import BLOCKS, CLASSES, FEATURES, LR, MOMENTUM, images
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import synk

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}


class Block(nn.Module):
    """Three convolutions and a way around them; v1.5 strides in the middle one."""

    features: int
    stride: int
    conv: type
    norm: type

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.features, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.features, (3, 3), self.stride, padding=((1, 1), (1, 1)))(y)))
        y = self.norm(scale_init=nn.initializers.zeros_init())(self.conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(4 * self.features, (1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """25.6 million parameters, in float32; computes in `dtype`."""

    dtype: type = jnp.float32
    blocks: tuple[int, ...] = BLOCKS

    @nn.compact
    def __call__(self, x):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=MOMENTUM, epsilon=1e-5, dtype=self.dtype)
        x = nn.relu(norm()(conv(64, (7, 7), 2, padding=((3, 3), (3, 3)))(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, (features, blocks) in enumerate(zip(FEATURES, self.blocks, strict=False)):
            for block in range(blocks):
                x = Block(features, 2 if stage and not block else 1, conv, norm)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2))).astype(jnp.float32)


class Training:
    """A model, its optimizer and their first state."""

    def __init__(self, image, dtype=jnp.float32, blocks=BLOCKS):
        self.model, self.tx, self.dtype = ResNet50(dtype, blocks), optax.sgd(LR, momentum=MOMENTUM), dtype
        start = jax.jit(self.model.init)(jax.random.key(0), jnp.zeros((1, image, image, 3), dtype))
        self.params, self.stats = jax.device_get((start["params"], start["batch_stats"]))
        self.momentum = jax.device_get(self.tx.init(self.params))

    def gradients(self, params, stats, x, y):
        """Loss, its gradients, and the running averages of batch norm after these rows."""

        def loss(params):
            pixels = x.astype(self.dtype) / 255
            logits, new = self.model.apply({"params": params, "batch_stats": stats}, pixels, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new["batch_stats"]

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, grads, new

    def updated(self, params, momentum, grads):
        """Parameters and momentum after a step."""
        updates, momentum = self.tx.update(grads, momentum, params)
        return optax.apply_updates(params, updates), momentum

    def state(self):
        """What a step by hand carries."""
        return self.params, self.stats, self.momentum


class Way:
    """One way to run the step: `step(x, y)` gives the loss; `compiled` is its program."""

    def __init__(self, put, step, compiled, function=None):
        self.put, self.step, self.compiled, self.function = put, step, compiled, function


def by_synk(training, replicas, x, y, num_slices=1):
    return on_group(training, synk.init(replicas), x, y, num_slices)


def on_group(training, group, x, y, num_slices=1):
    """By synk, on a group that is made already; while that is current."""
    with group:
        return _by_synk(training, group, x, y, num_slices)


def _by_synk(training, group, x, y, num_slices):
    params, stats = synk.shared(training.params, name="params"), synk.shared(training.stats, name="stats")
    momentum = synk.shared(training.momentum, name="momentum")

    @synk.function(inputs=["x", "y"], reduce="mean")
    def step(x, y):  # on each replica's rows
        return training.gradients(params.value, stats.value, x, y)

    @step.then
    def step(loss, grads, averages):  # on every replica, with the means
        params.value, momentum.value = training.updated(params.value, momentum.value, grads)
        stats.value = averages
        return loss

    put = partial(_put, group.stacked)
    call = partial(step, num_slices=num_slices) if num_slices > 1 else step
    return Way(put, call, step.compile(*put(x, y), num_slices=num_slices), step)


def by_shard_map(training, replicas, x, y):
    return on_mesh(training, mesh_of(replicas), x, y)


def on_mesh(training, mesh, x, y):
    def body(state, x, y):
        params, stats, momentum = state
        loss, grads, stats = lax.pmean(training.gradients(params, stats, x, y), "replica")
        params, momentum = training.updated(params, momentum, grads)
        return (params, stats, momentum), loss

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("replica"), P("replica")), out_specs=(P(), P()), check_vma=False
    )
    everywhere, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))
    put = partial(_put, cut)
    return _carried(jax.jit(mapped, donate_argnums=0), _of_its_own(training, everywhere), put, x, y)


def by_jit(training, replicas, x, y):
    """Sharded by annotation alone; batch norm sees the whole batch, so it communicates too."""
    mesh = mesh_of(replicas)
    everywhere, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))

    def body(state, x, y):
        params, stats, momentum = state
        loss, grads, stats = training.gradients(params, stats, x, y)
        params, momentum = training.updated(params, momentum, grads)
        return (params, stats, momentum), loss

    jitted = jax.jit(body, donate_argnums=0, in_shardings=(everywhere, cut, cut), out_shardings=everywhere)
    return _carried(jitted, _of_its_own(training, everywhere), partial(_put, cut), x, y)


def by_pmap(training, replicas, x, y):
    devices = jax.devices()[:replicas]

    def body(state, x, y):
        params, stats, momentum = state
        loss, grads, stats = lax.pmean(training.gradients(params, stats, x, y), "replica")
        params, momentum = training.updated(params, momentum, grads)
        return (params, stats, momentum), loss

    mapped = jax.pmap(body, "replica", devices=devices, donate_argnums=0)
    mesh = mesh_of(replicas)
    cut = NamedSharding(mesh, P("replica"))

    def put(x, y):
        return jax.device_put([a.reshape(replicas, len(a) // replicas, *a.shape[1:]) for a in (x, y)], cut)

    state = jax.tree.map(lambda a: jax.device_put(np.broadcast_to(a, (replicas, *np.shape(a))), cut), training.state())
    return _carried(mapped, state, put, x, y)


def by_serial_jit(training, replicas, x, y):
    """The whole batch on one device."""
    return by_jit(training, 1, x, y)


WAYS = {
    "synk": by_synk,
    "jit(shard_map)": by_shard_map,
    "pmap": by_pmap,
    "jit(NamedSharding)": by_jit,
    "serial jit": by_serial_jit,
}


def _of_its_own(training, everywhere):
    """A state that may be donated; every process places its own part."""
    leaves, treedef = jax.tree.flatten(training.state())
    return treedef.unflatten([jnp.copy(leaf) for leaf in _put(everywhere, *map(np.asarray, leaves))])


def _put(cut, *rows):
    """On the devices; every process gives its own their part."""
    return [jax.make_array_from_callback(a.shape, cut, a.__getitem__) for a in rows]


def _carried(jitted, state, put, x, y):
    """A step by hand that carries its state from call to call."""
    compiled = jitted.lower(state, *put(x, y)).compile()

    def step(x, y):
        nonlocal state
        state, loss = compiled(state, x, y)
        return loss

    return Way(put, step, compiled)


def mesh_of(replicas):
    return Mesh(np.array(jax.devices()[:replicas]), ("replica",), axis_types=(AxisType.Auto,))


def collectives(compiled):
    """The collectives of a compiled program: (name, bytes that one device gives), one entry each."""
    found = []
    pattern = r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    for line in compiled.as_text().splitlines():
        match = re.search(pattern, line)
        if match:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            size = sum(BYTES[dtype] * prod(int(d) for d in dims.split(",") if d) for dtype, dims in shapes)
            found.append((match[2], size))
    return found


def talk_of(replicas, blocks=BLOCKS):
    """The collectives of the step by synk compiled for so many replicas; tiny rows, as bytes do not depend on them."""
    return collectives(by_synk(Training(32, blocks=blocks), replicas, *images(replicas, 32)).compiled)


def gradient_bytes(training):
    """What has to be reduced: as many bytes as the parameters have."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(training.params))


def donated(compiled, training):
    """How much of the state a program writes where it lay: 1 if it copies nothing."""
    state = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(training.state()))
    return compiled.memory_analysis().alias_size_in_bytes / state


def peak_memory(compiled):
    """Bytes a device needs for a program: arguments, results that are no arguments, and temporaries."""
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
