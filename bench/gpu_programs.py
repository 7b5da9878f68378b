"""GPU programs: what of a training step's gradients travels behind its backward pass, as XLA schedules it for GPUs.

    pip install '.[bench,target]'
    python bench/gpu_programs.py [--device h100] [--replicas 8] [--hosts 1] [--models resnet50,gpt2,mlp]
        [--ways synk,shard_map,pmap,jit,bf16,int8,PowerSGD,sharded] [--combine-mb 4,16] [--json OUT]

Compiled on a machine without any, for ResNet-50 (64 images of 224 pixels a GPU, bfloat16), GPT-2 small (8 texts of
1,024 tokens a GPU, bfloat16) and a perceptron (8 layers of 2,048, 4,096 rows a GPU), each in a process of its own: by
synk, and by hand: `jit(shard_map)` with `lax.pmean`, the same by `jax.pmap`, and `jit` of `NamedSharding`s, which has
no mean of its own; and by synk with each wire, and with the optimizer's state in pieces. For each: bytes that a GPU
gives to all-reduces, how much of them travels while a convolution or a matrix product runs, what begins after the last
of these (the tail), temporary memory, and how much of the state is updated in place. Claim: 90 % of ResNet-50's
gradients behind convolutions and a tail of 12 MB, where by hand it is 36 % and 31 MB. These are schedules, not
measurements; of times it says nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from record import about, say

import synk
import synk.train
from synk._explain.hlo import read_collectives
from synk._runtime import executable

BENCH = Path(__file__).resolve()
SHAPE = jax.ShapeDtypeStruct


class Model(NamedTuple):
    """A loss of parameters, state and rows; all else as shapes."""

    loss: object  # (params, state, *rows) -> (loss, new state)
    params: object
    state: object
    rows: tuple  # of one GPU
    tx: object


def resnet50():
    from resnet import Training

    with jax.default_device(jax.devices("cpu")[0]):
        training = Training(224, jnp.bfloat16)

    def loss(params, stats, x, y):
        variables = {"params": params, "batch_stats": stats}
        logits, new = training.model.apply(variables, x.astype(jnp.bfloat16) / 255, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new["batch_stats"]

    shapes = jax.tree.map(lambda leaf: SHAPE(leaf.shape, leaf.dtype), (training.params, training.stats))
    return Model(loss, *shapes, (SHAPE((64, 224, 224, 3), jnp.uint8), SHAPE((64,), jnp.int32)), training.tx)


def gpt2():
    from gpt2 import Gpt2

    model, tokens = Gpt2(), SHAPE((8, 1024), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params, state, x, y):
        logits = model.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state

    return Model(loss, params, {}, (tokens, tokens), optax.adamw(1e-4))


def mlp():
    def loss(params, state, x, y):
        for w in params[:-1]:
            x = jax.nn.relu(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        return jnp.mean((x.astype(jnp.float32) @ params[-1] - y) ** 2), state

    params = [SHAPE((2048, 2048), jnp.float32)] * 8 + [SHAPE((2048, 16), jnp.float32)]
    rows = SHAPE((4096, 2048), jnp.float32), SHAPE((4096, 16), jnp.float32)
    return Model(loss, params, {}, rows, optax.adam(1e-3))


MODELS = {"resnet50": resnet50, "gpt2": gpt2, "mlp": mlp}


OPTIONS = {
    "synk": {},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "PowerSGD": {"wire": synk.contrib.PowerSGD(rank=2)},
    "sharded": {"shard_optimizer": True},
}


def by_synk(model, group, **options):
    rows = [SHAPE((group.size * len_, *rest), row.dtype) for row in model.rows for len_, *rest in [row.shape]]
    if model.state:
        return synk.train.step(model.loss, model.params, model.tx, state=model.state, **options).compile(*rows)

    def loss(params, x, y):
        return model.loss(params, {}, x, y)[0]

    return synk.train.step(loss, model.params, model.tx, **options).compile(*rows)


def body_of(model, mean):
    def body(state, x, y):
        params, stats, opt_state = state
        (loss, stats), grads = jax.value_and_grad(model.loss, has_aux=True)(params, stats, x, y)
        loss, grads, stats = mean((loss, grads, stats))
        updates, opt_state = model.tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    return body


def by_hand(way, model, group):
    mesh, size = group.mesh, group.size
    state = (model.params, model.state, jax.eval_shape(model.tx.init, model.params))
    mean = partial(lax.pmean, axis_name="replica")
    if way == "pmap":
        mapped = jax.pmap(body_of(model, mean), axis_name="replica", devices=list(group.devices), donate_argnums=0)
        cut = NamedSharding(mesh, P("replica"))
        state, rows = jax.tree.map(lambda a: SHAPE((size, *a.shape), a.dtype, sharding=cut), (state, model.rows))
        return mapped.lower(state, *rows).compile(compiler_options={"xla_gpu_autotune_level": 0})
    everywhere, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))
    if way == "shard_map":
        specs = (P(), P("replica"), P("replica"))
        step = jax.shard_map(body_of(model, mean), mesh=mesh, in_specs=specs, out_specs=(P(), P()), check_vma=False)
    else:
        step = body_of(model, lambda values: values)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(everywhere, everywhere))
    state = jax.tree.map(lambda a: SHAPE(a.shape, a.dtype, sharding=everywhere), state)
    rows = [SHAPE((size * len(row), *row.shape[1:]), row.dtype, sharding=cut) for row in model.rows]
    return jitted.lower(state, *rows).compile(compiler_options={"xla_gpu_autotune_level": 0})


def trial(options):
    """One model by one way, in this process."""
    group = synk.target(options.device, options.replicas, options.hosts)
    if options.combine_mb:
        executable.COMBINE_BYTES = int(float(options.combine_mb) * 2**20)
    model, way = MODELS[options.models](), options.ways
    compiled = by_synk(model, group, **OPTIONS[way]) if way in OPTIONS else by_hand(way, model, group)
    memory, found = compiled.memory_analysis(), read_collectives(compiled.as_text(), is_in_order=True)
    sums = [each for each in found if each.kind in ("all-reduce", "reduce-scatter", "all-to-all")]
    gradients = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.params))
    total = sum(each.operand_bytes for each in sums)
    state = jax.tree.leaves((model.params, model.state, jax.eval_shape(model.tx.init, model.params)))
    return {
        "model": options.models,
        "way": way + (f", {options.combine_mb} MB" if options.combine_mb else ""),
        "device": options.device,
        "replicas": options.replicas,
        "hosts": options.hosts,
        "gradient bytes": gradients,
        "all-reduced bytes": total,
        "collectives": [
            {
                "kind": each.kind,
                "ranks": each.ranks,
                "bytes": max(each.operand_bytes, each.result_bytes),
                "behind": each.behind,
            }
            for each in found
        ],
        "all-reduces": [each.operand_bytes for each in sums],
        "exposed": [each.operand_bytes for each in sums if not each.behind],
        "behind": sum(each.operand_bytes for each in sums if each.behind) / total,
        "tail bytes": sum(each.operand_bytes for each in sums if each.after_last and not each.behind),
        "exposed bytes": sum(each.operand_bytes for each in sums if not each.behind),
        "temporary bytes": memory.temp_size_in_bytes,
        "in place": memory.alias_size_in_bytes / sum(leaf.size * leaf.dtype.itemsize for leaf in state),
        "jax": jax.__version__,
    }


def in_a_process(model, way, options, combine=""):
    """Its trial; None where it fails, which is said."""
    command = [sys.executable, str(BENCH), "--trial", "--models", model, "--ways", way, "--device", options.device]
    command += ["--replicas", str(options.replicas), "--hosts", str(options.hosts), "--combine-mb", combine]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    if done.returncode:
        say(f"{model} by {way} failed:\n{done.stderr[-2000:]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main(options):
    found = []
    for model in options.models.split(","):
        each = [(way, "") for way in options.ways.split(",")]
        each += [("synk", combine) for combine in options.combine_mb.split(",") if combine]
        for way, combine in each:
            one = in_a_process(model, way, options, combine)
            if one is None:
                continue
            found.append(one)
            count, total = len(one["all-reduces"]), one["all-reduced bytes"] / 1e6
            say(
                f"{model:9} {one['way']:12} {count:3} sums of {total:6.1f} MB: "
                f"{100 * one['behind']:3.0f} % behind, tail {one['tail bytes'] / 1e6:5.1f} MB, "
                f"temporary {one['temporary bytes'] / 1e6:6.0f} MB, {100 * one['in place']:.1f} % of the state in place"
            )
    if options.json:
        Path(options.json).write_text(json.dumps(about("gpu_programs") | {"programs": found}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--models", default="resnet50,gpt2,mlp")
    parser.add_argument("--ways", default="synk,shard_map,pmap,jit")
    parser.add_argument("--combine-mb", default="", help="other bounds of synk's on one all-reduce, to compare")
    parser.add_argument("--trial", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.trial:
        print(json.dumps(trial(options)))
    else:
        main(options)
