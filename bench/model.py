"""Model: predictions of how a step scales to machines that are not here, from its time on one replica.

    python bench/model.py [--step-ms 120 | --measured resnet50.json] [--bytes 102.4e6,3e6]
        [--programs gpu_programs.json] [--wires bench/results/wires-16-h100.json] [--json OUT] [--plot OUT.png]

Claim: with published step times, what one step of ResNet-50 communicates leaves an efficiency above 0.98 on 8 GPUs of
every DGX. All of these numbers are predictions, under this link model; none is a measurement:

- ring: 2 (n - 1) / n * bytes / bandwidth + 2 (n - 1) * latency; tree: 2 log2(n) * latency + 2 * bytes / bandwidth; the
  sooner of both, and START for each collective;
- up to 8 replicas by NVLink; of more, machines of 8 reduce inside, then all-reduce between machines, whose adapters the
  8 replicas share, then gather inside. Other collectives than an all-reduce take half its time;
- without overlap communication follows the step of one replica; with overlap it hides behind the backward pass, the
  last two thirds of the step, but for the last collective, whose gradients come last; with --programs what hides is
  what XLA has scheduled behind a convolution, and the rest is waited for.

Nothing else slows a step down in it: no input pipeline, no stragglers, no shared power. The check against published
runs says what that leaves out. Without --step-ms and --measured each machine has its published step time, without
--bytes and --measured the collectives are those of ResNet-50 compiled for 8 virtual devices.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from math import log2
from statistics import median

MXNET = "https://github.com/NVIDIA/DeepLearningExamples/blob/master/MxNet/Classification/RN50v1.5/README.md"
TENSORFLOW = "https://www.tensorflow.org/performance/benchmarks"  # its DGX-1 table, 2017
SYNKHRONOS = "https://arxiv.org/abs/1710.04162"  # abstract; it gives no step times

# NCCL's cost model, src/graph/tuning.cc at 01afd20a: ring, "Simple" protocol: 8.4 us once, 3.4 us a step by NVLink, 9.6
# us by the network; A100 gets at most 235 of 300 GB/s by NVLink, and that fraction is assumed for the others too.
START, NVLINK_LATENCY, INFINIBAND_LATENCY, NVLINK_FRACTION = 8.4e-6, 3.4e-6, 9.6e-6, 235 / 300
INFINIBAND_FRACTION = 0.85  # assumed
ETHERNET_LATENCY, ETHERNET_FRACTION = 30e-6, 0.75  # assumed: TCP through host memory
HIDES = 2 / 3  # of a step: the backward pass, twice the work of the forward pass

# float32 gradients of ResNet-50's 25,557,032 parameters.
GRADIENTS = 25_557_032 * 4


@dataclass(frozen=True)
class Machine:
    """8 GPUs; peak bandwidths in GB/s, one way."""

    inside: dict[int, float]  # a GPU's, among so many
    network: float  # a machine's
    step_ms: float  # published, of one GPU, ResNet-50
    step_source: str
    images: int  # of that step
    network_latency: float = INFINIBAND_LATENCY
    network_fraction: float = INFINIBAND_FRACTION


# DGX-1 data sheets and white paper WP-08437: NVLink 1, 4 links a P100 of 20 GB/s, one to each of 3 GPUs of its quad and
# one beyond; NVLink 2, 6 links a V100 of 25 GB/s, 4 of them inside the quad, 1 between GPUs 0 and 1; 4 EDR adapters of
# 100 Gb/s. DGX A100 data sheet: 12 links of 25 GB/s into NVSwitch (600 GB/s both ways), 8 HDR adapters of 200 Gb/s.
# DGX H100 data sheet: 18 links of 25 GB/s (900 GB/s both ways), 8 NDR adapters of 400 Gb/s.
P100 = Machine({2: 20, 4: 60, 8: 80}, 50, 1e3 * 64 / 219, "TensorFlow, float32, batch 64", 64)
V100 = Machine({2: 25, 4: 100, 8: 150}, 50, 1e3 * 192 / 1376, "MXNet, float16, batch 192", 192)
A100 = Machine({2: 300, 4: 300, 8: 300}, 200, 1e3 * 256 / 2180, "MXNet, float16, batch 256", 256)
H100 = Machine({2: 450, 4: 450, 8: 450}, 400, A100.step_ms, "an A100's, as a stand-in", 256)
ETHERNET = Machine(A100.inside, 12.5, A100.step_ms, A100.step_source, 256, ETHERNET_LATENCY, ETHERNET_FRACTION)
TWO_H100 = Machine(H100.inside, 12.5, A100.step_ms, A100.step_source, 256, ETHERNET_LATENCY, ETHERNET_FRACTION)
# Of one GPU: 64 images; and 8 texts of 1,024 tokens, 7.0e12 operations (6 a parameter and token, and attention).
WIRE_STEPS = {
    "resnet50": (1e3 * 64 / 2180, "MXNet's rate on an A100, float16"),
    "gpt2": (1e3 * 7.0e12 / (0.4 * 989e12), "40 % of an H100's bfloat16 peak assumed"),
}
MACHINES = {
    "DGX-1 (P100, NVLink 1)": P100,
    "DGX-1 (V100, NVLink 2)": V100,
    "DGX A100": A100,
    "DGX H100": H100,
    "8 A100 a machine, 100 Gb/s Ethernet": ETHERNET,
}

# Images/s of so many GPUs.
# MXNet reduces gradients of the network's dtype; its buckets are taken as 8. TensorFlow used no all-reduce.
PUBLISHED = [
    ("MXNet, DGX-1 V100, float16", V100, 192, {1: 1376, 2: 2768, 4: 5357, 8: 10723}, GRADIENTS / 2, 8, True, MXNET),
    ("MXNet, DGX-1 V100, float32", V100, 96, {1: 384, 2: 763, 4: 1513, 8: 3005}, GRADIENTS, 8, True, MXNET),
    ("MXNet, DGX A100, float16", A100, 256, {1: 2180, 2: 4332, 4: 8587, 8: 16925}, GRADIENTS / 2, 8, True, MXNET),
    ("MXNet, DGX A100, TF32", A100, 256, {1: 1022, 2: 2032, 4: 4035, 8: 8001}, GRADIENTS, 8, True, MXNET),
    ("TensorFlow, DGX-1 P100, float32", P100, 64, {1: 219, 2: 422, 4: 852, 8: 1734}, GRADIENTS, 8, True, TENSORFLOW),
    # The abstract says DGX-1: of October 2017, so P100s are assumed, and TensorFlow's step time on one.
    ("Synkhronos, DGX-1 (P100 assumed)", P100, 64, {1: 219, 8: 7.5 * 219}, GRADIENTS, 1, False, SYNKHRONOS),
]


def all_reduce(size, n, bandwidth, latency):
    """Seconds of an all-reduce among n equals: by a ring or a tree."""
    ring = 2 * (n - 1) / n * size / bandwidth + 2 * (n - 1) * latency
    tree = 2 * log2(n) * latency + 2 * size / bandwidth
    return min(ring, tree)


def communication(machine, n, kind, size):
    """Seconds of one collective of so many bytes a replica, among n replicas."""
    if n == 1:
        return 0.0
    near = min(n, 8)
    seconds = START + all_reduce(size, near, machine.inside[near] * NVLINK_FRACTION * 1e9, NVLINK_LATENCY)
    if n > 8:
        bandwidth = machine.network * machine.network_fraction * 1e9
        seconds += all_reduce(size, n // 8, bandwidth, machine.network_latency)
    return seconds if kind == "all-reduce" else seconds / 2


def predict(machine, n, step_ms, talk, overlap):
    """The predicted step of n replicas."""
    each = [1e3 * communication(machine, n, kind, size) for kind, size in talk]
    exposed = sum(each)
    if overlap and each:
        exposed = max(exposed - HIDES * step_ms, each[-1])
    ms = step_ms + exposed
    return {"replicas": n, "overlap": overlap, "ms": ms, "speedup": n * step_ms / ms, "efficiency": step_ms / ms}


def predict_as_compiled(machine, n, step_ms, program):
    """The predicted step of n replicas whose program XLA has scheduled: what travels behind nothing is waited for."""
    sizes = list(program["all-reduces"])
    for size in program["exposed"]:
        sizes.remove(size)
    exposed, hidden = (
        1e3 * sum(communication(machine, n, "all-reduce", size) for size in each)
        for each in (program["exposed"], sizes)
    )
    return step_ms + exposed + max(0.0, hidden - HIDES * step_ms)


def seconds_of(machine, n, one):
    """Of one collective as compiled: among all of n replicas, those of a machine, or one of each machine."""
    ranks, hosts = one["ranks"], n // 8
    if ranks is None:
        return communication(machine, n, one["kind"], one["bytes"])
    if ranks[-1] - ranks[0] == len(ranks) - 1:  # in a machine
        return communication(machine, len(ranks), one["kind"], one["bytes"])
    bandwidth = machine.network * machine.network_fraction * 1e9
    sent = 8 * one["bytes"] * (hosts - 1) / hosts  # by a machine's 8 replicas, which share its adapters
    return START + sent / bandwidth + (hosts - 1) * machine.network_latency


def compare_wires(path):
    """The predicted step by each wire on two machines of 8 H100 with 100 Gb/s between them."""
    with open(path) as file:
        programs = [one for one in json.load(file)["programs"] if one["hosts"] == 2]
    machine, rows = TWO_H100, []
    print("\nPredictions, no measurements: ms a step (to None's) of 16 H100 in two machines, 100 Gb/s between them")
    for model, (step_ms, source) in WIRE_STEPS.items():
        found = {}
        for one in (one for one in programs if one["model"] == model):
            times = [(each["behind"], 1e3 * seconds_of(machine, 16, each)) for each in one["collectives"]]
            exposed, hidden = (sum(ms for behind, ms in times if bool(behind) is which) for which in (False, True))
            found[one["way"]] = {"ms": step_ms + exposed + max(0.0, hidden - HIDES * step_ms), "exposed": exposed}
        rows.append({"model": model, "step ms": step_ms, "step source": source, "ways": found})
        none = found["synk"]["ms"]
        shown = ", ".join(
            f"{way.replace('synk', 'None')} {one['ms']:.1f} ({one['ms'] / none:.2f} x)" for way, one in found.items()
        )
        print(f"{model:9} {step_ms:.1f} ms alone, {source}: {shown}")
    return rows


def compare_programs(path):
    """The predicted step of each way that bench/gpu_programs.py has compiled ResNet-50, and by synk beside it."""
    with open(path) as file:
        programs = [one for one in json.load(file)["programs"] if one["model"] == "resnet50"]
    print(
        "\nResNet-50 as compiled, predicted ms a step of 64 images a GPU (to synk's), from published rates of one GPU"
    )
    rows = []
    for name, machine in MACHINES.items():
        step_ms = machine.step_ms * 64 / machine.images  # of as many images as were compiled
        for n in (8, 16, 64):
            ms = {one["way"]: predict_as_compiled(machine, n, step_ms, one) for one in programs}
            rows.append({"machine": name, "replicas": n, "ms": ms})
            shown = ", ".join(f"{way} {one:.1f} ({one / ms['synk']:.2f} x)" for way, one in ms.items())
            print(f"{name:36} {n:3} GPUs: {shown}")
    return rows


def compiled_talk():
    """The collectives of ResNet-50 by synk, compiled for 8 virtual CPU devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from resnet import talk_of

    return talk_of(8)


def measured(path):
    """Step time of one replica, and the collectives of most replicas, from a result of bench/resnet50.py."""
    with open(path) as file:
        found = json.load(file)
    runs = sorted(found["scaling"], key=lambda run: run["replicas"])
    most = runs[-1]
    count = most["collectives"]
    talk = [("all-reduce", 1e6 * most["reduced MB"] / count)] * count if count else None
    if runs[0]["replicas"] != 1:
        raise SystemExit(f"{path} has no run of one replica; its step time is what predictions start from.")
    return runs[0]["ms"][0], found["device"], talk


def check():
    """Predict the published runs from their own one-GPU step times; say how far off."""
    print("\nCheck against published ResNet-50 runs: predicted speedup (error), from the published time on one GPU")
    rows = []
    for name, machine, batch, rates, size, buckets, overlap, source in PUBLISHED:
        talk = [("all-reduce", size / buckets)] * buckets
        for n in list(rates)[1:]:
            found = predict(machine, n, 1e3 * batch / rates[1], talk, overlap)
            actual = rates[n] / rates[1]
            error = found["speedup"] / actual - 1
            rows.append({"run": name, **found, "published": actual, "error": error, "source": source})
            print(f"{name:34} {n} GPUs: predicted {found['speedup']:.2f}, published {actual:.2f}, {100 * error:+.1f} %")
    errors = [abs(row["error"]) for row in rows]
    print(f"error: median {100 * median(errors):.1f} %, largest {100 * max(errors):.1f} %")
    return rows


def main(options):
    step_ms, origin, talk = options.step_ms, "given", None
    if options.measured:
        step_ms, origin, talk = measured(options.measured)
    if options.bytes:
        talk = [("all-reduce", float(size)) for size in options.bytes.split(",")]
    talk = talk or compiled_talk()
    total = sum(size for _, size in talk) / 1e6
    print(f"Predictions, no measurements. {len(talk)} collectives, {total:.2f} MB a step")
    print(f"{'machine':36} {'one replica':40} {'replicas':>8} {'ms':>8} {'speedup':>8} {'eff.':>6}   with overlap")
    results = {}
    for name, machine in MACHINES.items():
        one, source = (step_ms, origin) if step_ms else (machine.step_ms, machine.step_source)
        rows = []
        for n in [2**i for i in range(11)]:
            plain, hidden = (predict(machine, n, one, talk, overlap) for overlap in (False, True))
            rows += [plain, hidden]
            print(
                f"{name:36} {f'{one:.1f} ms, {source}':40} {n:8} {plain['ms']:8.1f} {plain['speedup']:8.1f} "
                f"{plain['efficiency']:6.3f}   {hidden['ms']:.1f} ms, {hidden['speedup']:.1f}, "
                f"{hidden['efficiency']:.3f}"
            )
        results[name] = {"constants": asdict(machine), "step ms": one, "step source": source, "predictions": rows}
    checks = check()
    compared = compare_programs(options.programs) if options.programs else []
    wires = compare_wires(options.wires) if options.wires else []
    if options.json:
        sizes = {"collectives": [{"name": kind, "bytes": size} for kind, size in talk], "MB": total}
        with open(options.json, "w") as file:
            json.dump(
                {
                    "bench": "model: predictions",
                    **sizes,
                    "machines": results,
                    "check": checks,
                    "as compiled": compared,
                    "wires": wires,
                },
                file,
                indent=1,
            )
    if options.plot:
        plot(results, options.plot)


def plot(results, path):
    from record import canvas

    plt = canvas()

    for name, result in results.items():
        for overlap, style in ((False, "-"), (True, ":")):
            rows = [row for row in result["predictions"] if row["overlap"] == overlap]
            color = f"C{list(results).index(name)}"
            label = name if not overlap else None
            efficiencies = [row["efficiency"] for row in rows]
            plt.plot([row["replicas"] for row in rows], efficiencies, style, color=color, label=label)
    plt.xscale("log", base=2), plt.ylim(0, 1.02), plt.xlabel("replicas"), plt.ylabel("predicted efficiency")
    plt.title("ResNet-50: predictions (dotted: with overlap)"), plt.legend()
    plt.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--step-ms", type=float, help="measured on one replica")
    given.add_argument("--measured", help="JSON that bench/resnet50.py wrote")
    parser.add_argument("--bytes", help="of each all-reduce, with commas between")
    parser.add_argument("--programs", help="JSON that bench/gpu_programs.py wrote: schedules instead of an assumption")
    parser.add_argument(
        "--wires", help="the same of wires: --hosts 2 --replicas 16 --ways synk,bf16,int8,PowerSGD,sharded"
    )
    parser.add_argument("--json")
    parser.add_argument("--plot")
    main(parser.parse_args())
