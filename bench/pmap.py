"""pmap: what a step of the programs in examples/pmap takes by synk, beside the same program by `jax.pmap`.

    python bench/pmap.py [--replicas 4] [--rounds 40] [--only training,loops,chains] [--small] [--json OUT]

- training: steps on NumPy rows.
- loops: learners and samplers that communicate in scans; their state stays on the devices, each step has new keys.
- chains: chains of Hamiltonian Monte Carlo, one and three a replica, and a population's rollouts.

Claim: as fast as pmap, or faster; chains within a tenth. Each call is awaited; or its results are read as numbers, as
programs log them: by pmap entry 0 of what is equal on all devices. Chains are concatenated for all replicas; or they
are left where they were made, as pmap leaves them. All ways take turns in random order, in one process. Medians of all
calls, and the ratio of both; then the ratio of the first quartiles.
"""

import argparse
import os
import random
import runpy
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import jax
from record import Table, about, cpu_devices, heading, progress, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default="training,loops,chains")
    parser.add_argument("--small", action="store_true", help="one program of each kind")
    parser.add_argument("--json")
    options = parser.parse_args()
    cpu_devices(options.replicas)

import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

EXAMPLES, TURN = Path(__file__).parent.parent / "examples" / "pmap", 8
HOW = "awaited", "read", "left there"


def example(name):
    """Return what a file of examples/pmap defines."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


def stacked(tree):
    return jax.tree.map(lambda a: jnp.stack([a] * options.replicas), tree)


def shard(tree):
    return jax.tree.map(lambda a: a.reshape(options.replicas, -1, *a.shape[1:]), tree)


def keys(*shape):
    """Yield keys, new ones each time, that were made before."""
    return cycle([jax.random.split(jax.random.key(i), shape or (options.replicas,)) for i in range(16)])


def carry(step, *state):
    """Return a call that goes on from the first results of the call before."""
    held = list(state)

    def run(*args):
        *held[:], result = step(*held, *args)
        return result

    return run


def read(tree):
    return jax.tree.map(np.asarray, tree)


def read_first(tree):
    """Read what is equal on all devices, as `unreplicate` does."""
    return jax.tree.map(lambda a: np.asarray(a[0]), tree)


# Each program: a call by pmap, how its results are read, a call by synk, and one whose results stay on the replicas.


def trained(loss, params, tx, axis, batches):
    """Make the steps of a training by a loss with aux outputs."""

    @partial(jax.pmap, axis_name=axis, donate_argnums=(0, 1))
    def p_step(params, opt_state, batch):
        result, grads = jax.value_and_grad(loss, has_aux=True)(params, *batch)
        result, grads = jax.lax.pmean((result, grads), axis)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, result

    by_pmap, turn = carry(p_step, *stacked((params, tx.init(params)))), cycle(batches)
    step, turn_s = synk.train.step(loss, params, tx, aux="mean", axis_name=axis), cycle(batches)
    return lambda: by_pmap(shard(next(turn))), read_first, lambda: step(*next(turn_s))


def of_rank(key):
    return jax.random.fold_in(key, jax.lax.axis_index("batch"))


def classification():
    its, key = example("classification"), jax.random.key(0)
    batches = [(its.x[rows], its.y[rows]) for rows in its.batches]
    return trained(lambda p, x, y: (its.loss(p, x, y, of_rank(key)), ()), its.params, its.tx, "batch", batches)


def contrastive():
    its = example("contrastive")
    return trained(its.loss, its.params, its.tx, "batch", [(its.images[rows], its.texts[rows]) for rows in its.batches])


def nerf():
    its, key = example("nerf"), jax.random.key(0)
    batches = [(batch,) for batch in its.batches]
    return trained(lambda p, b: its.loss(p, b, of_rank(key)), its.params, optax.adam(1e-3), "batch", batches)


def ppo():
    its = example("ppo")

    @partial(jax.pmap, axis_name="i")
    def p_epoch(training, states, key):
        training, states, metrics = its.learn(training, states, key)
        return training, states, jax.lax.pmean(metrics, "i")

    @synk.function(inputs=["states"], outputs=("same", "scatter", "mean"), axis_name="i")
    def s_epoch(training, states, keys):
        return its.learn(training, states, keys[synk.rank()])

    by_pmap = carry(p_epoch, stacked(its.training), shard(its.environments))
    by_synk, turn, turn_s = carry(s_epoch, its.training, its.environments), keys(), keys()
    return lambda: by_pmap(next(turn)), read_first, lambda: by_synk(next(turn_s))


def stoix():
    its = example("stoix")
    by_synk = carry(synk.map(its.learn, outputs="scatter", axis_name="device"), its.start())
    return carry(jax.pmap(its.learn, axis_name="device"), its.start()), read, by_synk


def score_sde():
    its = example("score_sde")
    p_steps = jax.pmap(partial(jax.lax.scan, its.step), axis_name="batch", donate_argnums=0)

    @synk.function(inputs=["rows"], outputs="same", axis_name="batch")
    def s_steps(state, keys, rows):
        (_, state), values = jax.lax.scan(its.step, (keys[synk.rank()], state), rows.swapaxes(0, 1))
        return state, values

    def step(state, keys, batch):
        (_, state), values = p_steps((keys, state), batch.reshape(its.STEPS, its.DEVICES, -1, 4).swapaxes(0, 1))
        return state, values

    by_pmap, by_synk, turn, turn_s = carry(step, stacked(its.state)), carry(s_steps, its.state), keys(), keys()
    batch = its.batches[0]
    return lambda: by_pmap(next(turn), batch), read_first, lambda: by_synk(next(turn_s), batch.swapaxes(0, 1))


def ferminet():
    its = example("ferminet")

    @synk.function(inputs=["walkers"], outputs=("same", "same", "scatter", "same"), axis_name="qmc")
    def s_step(params, opt_state, walkers, keys):
        return its.step(params, opt_state, walkers, keys[synk.rank()])

    p_step, start = jax.pmap(its.step, axis_name="qmc", donate_argnums=(0, 1, 2)), (its.params, its.tx.init(its.params))
    by_pmap, by_synk = carry(p_step, *stacked(start), shard(its.walkers)), carry(s_step, *start, its.walkers)
    turn, turn_s = keys(), keys()
    return lambda: by_pmap(next(turn)), read_first, lambda: by_synk(next(turn_s))


def chains(each, samples):
    """Make so many chains a replica, of so many samples."""
    its, count = example("chains"), each * options.replicas
    fn, starts, turn, turn_s = partial(its.chain, num_samples=samples), its.starts[:count], keys(count), keys(count)
    p_chains = jax.pmap(fn if each == 1 else jax.vmap(fn))
    dealt = (lambda a: a) if each == 1 else shard
    by_synk = [synk.map(fn, outputs=op) for op in ("concat", "scatter")]
    calls = [lambda f=f: f(next(turn_s), starts) for f in by_synk]
    return lambda: p_chains(dealt(next(turn)), dealt(starts)), read, *calls


def evolution():
    its = example("evolution")
    states = np.asarray(its.reset(jax.random.key(0)))
    members = np.asarray(jnp.repeat(its.ask(its.center, jax.random.key(1)), its.EPISODES, axis=0))
    rollout = partial(its.rollout, steps=its.STEPS)
    p_rollout = jax.pmap(lambda *args: rollout(*args)[0], in_axes=(0, 0, None))
    by_synk = [
        synk.function(lambda states, members, known: rollout(states, members, known)[0], {"known": "broadcast"}, op)
        for op in ("concat", "scatter")
    ]
    calls = [lambda f=f: f(states, members, its.known) for f in by_synk]
    return lambda: p_rollout(shard(states), shard(members), its.known), read, *calls


PROGRAMS = {
    "training": ("<= 1.0", {"classification": classification, "contrastive": contrastive, "nerf": nerf}),
    "loops": ("<= 1.0", {"ppo": ppo, "stoix": stoix, "score_sde": score_sde, "ferminet": ferminet}),
    "chains": (
        "<= 1.1",
        {
            "one a replica, 50 samples": partial(chains, 1, 50),
            "one a replica, 1000 samples": partial(chains, 1, 1000),
            "three a replica, 50 samples": partial(chains, 3, 50),
            "evolution": evolution,
        },
    ),
}


def milliseconds(ways):
    """Return all times of each way in turns of random order; a call before each turn is not counted."""
    times = {name: [] for name in ways}
    for run in [*ways.values()] * 2:
        run()
    for _ in progress(range(options.rounds), "turns"):
        for name in random.sample([*ways], len(ways)):
            ways[name]()
            for _ in range(TURN):
                start = perf_counter()
                ways[name]()
                times[name].append(1e3 * (perf_counter() - start))
    return {name: np.quantile(each, [0.5, 0.25]).tolist() for name, each in times.items()}


def measured(by_pmap, reads, by_synk, staying=None):
    """Return the times of both ways, by how the results are waited for."""
    times = milliseconds({
        ("awaited", "pmap"): lambda: jax.block_until_ready(by_pmap()),
        ("awaited", "synk"): lambda: jax.block_until_ready(by_synk()),
        ("read", "pmap"): lambda: reads(by_pmap()),
        ("read", "synk"): lambda: read(by_synk()),
    } | ({("left there", "synk"): lambda: jax.block_until_ready(staying())} if staying else {}))  # fmt: skip
    return times | {("left there", "pmap"): times["awaited", "pmap"]}


def main():
    os.environ["DEVICES"] = str(options.replicas)
    synk.init(options.replicas)
    found, table = about("pmap") | {"rounds": options.rounds}, Table()
    print(heading(found))
    for kind in options.only.split(","):
        wanted, programs = PROGRAMS[kind]
        for name, make in list(programs.items())[-1 if options.small else 0 :]:
            times = measured(*make())
            for how in [how for how in HOW if (how, "synk") in times]:
                (by_pmap, low_by_pmap), (by_synk, low) = times[how, "pmap"], times[how, "synk"]
                more = {"kind": kind, "how": how, "of_quartiles": low / low_by_pmap}
                end, figure = f"{low / low_by_pmap:6.2f}", f"{kind}: {name}, {how}"
                table.add(options.replicas, figure, by_synk, by_pmap, unit="ms", wanted=wanted, end=end, **more)
            save(options.json, found | {"results": table.rows, "load after": os.getloadavg()})


if __name__ == "__main__":
    main()
