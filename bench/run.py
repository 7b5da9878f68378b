"""All benchmarks in a short form: `make bench`, ten minutes on two cores.

    python bench/run.py [--only overhead,slices] [--trial] [--results bench/results] [--readme bench/README.md]

Each runs in a process of its own, one after the other. Writes `<date>-<device>.json` and the pictures into the folder
of results, and the table between the two marks in the README. `--trial` takes the smallest settings there are, and
leaves out what is slow with those too.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

from record import results_path
from weak import described

HERE = Path(__file__).parent
SHORT = {
    "resnet50": "--replicas 1,2 --against 2 --steps 6 --peers",
    "weak": "--rounds 3 --patience 60",
    "overhead": "--replicas 1,2 --leaves 10,160 --rounds 3",
    "calls": "--rounds 9",
    "uneven": "--rounds 9",
    "over": "--rounds 9",
    "packing": "--replicas 2 --sizes 16,64,128 --rounds 20",
    "batches": "--replicas 1,2 --rows 20000 --batches 512,4096 --rounds 7",
    "slices": "--replicas 1,2 --slices 1,4 --models CNN --rounds 3",
    "collectives": "--replicas 2,8 --sizes 1e3,1e7 --rounds 30 --peers",
    "processes": "--turns 4",
    "model": "",
}
TRIAL = {
    "resnet50": "--replicas 1 --against 2 --steps 3 --blocks 1 --image 32 --batch-per-replica 4 "
    "--ways synk,jit(shard_map)",
    "weak": "--rounds 1 --steps 1 --patience 0 --blocks 1 --image 32 --batch-per-replica 4 --ways synk",
    "overhead": "--replicas 1,2 --leaves 10 --rounds 1",
    "calls": "--rounds 1",
    "uneven": "--rounds 1",
    "over": "--rounds 1 --replicas 2",
    "packing": "--replicas 2 --sizes 16 --rounds 3",
    "batches": "--replicas 1,2 --rows 400 --batches 32 --rounds 1",
    "slices": "--replicas 1 --slices 1,4 --models CNN --divide 16 --rounds 1",
    "collectives": "--replicas 2 --sizes 1e3 --rounds 3",
    "model": "--bytes 1e8",
}
PICTURES = {"resnet50": "scaling", "overhead": "overhead", "batches": "selection", "slices": "slices"}
BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"


def run(name, settings, results):
    """What one benchmark found; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        shown = [f"{name}.py", *shlex.split(settings)]
        picture = ["--plot", str(results / f"{PICTURES[name]}.png")] if name in PICTURES else []
        command = [sys.executable, str(HERE / shown[0]), *shown[1:], *picture, "--json", str(path)]
        print(f"\n== bench/{shlex.join(shown)}", flush=True)
        start = monotonic()
        try:
            subprocess.run(command, check=True, timeout=600)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"bench/{name}.py failed: {error}", flush=True)
            return None
        found = json.loads(path.read_text())
        return found | {"command": f"python bench/{shlex.join(shown)}", "took": monotonic() - start}


# The table: for each benchmark its rows, (figure, found, wanted).


def of_resnet50(found):
    on = f"{found['against']['synk']['replicas']} replicas" if found["against"] else "one replica"
    named = {
        "images/s / best by hand": (f"ResNet-50 on {on}: images/s / best by hand", ">= 0.98"),
        "images/s / best by hand, quickest steps": (f"ResNet-50 on {on}: the same, of the quickest steps", ""),
        "recompiled after the first step": ("programs compiled after the first step", "0"),
        "live bytes grown after the first step": ("bytes that live on devices, grown after the first step", "0"),
        "state donated": ("part of the state written where it lay", "1"),
        "collectives of 8 replicas": ("collectives in the program of 8 replicas", "1"),
        "reduced by 8 replicas / gradients": ("bytes that 8 replicas reduce / gradient bytes", "< 1.01"),
        "peak memory / least by hand": ("peak memory of the program / by hand", "<= 1.02"),
    }
    for name, value in found["figures"].items():
        figure, wanted = named.get(name, (f"ResNet-50 on {on}: {name}", ""))
        yield figure, f"{value:.4g}", wanted


def of_weak(found):
    for way, value in found["efficiency"].items():
        yield f"weak scaling, 1 core to 2, {way}", described(value), ">= 0.97" if way == "synk" else ""


def of_overhead(found):
    for case in found["results"]:
        figure = f"step of {case['leaves']} leaves on {case['replicas']} replica(s) / best by hand"
        yield figure, f"{case['ratio']:.2f} ({case['over_us']:+.0f} us); with flat=True {case['flat']:.2f}", ""


def of_calls(found):
    for name, (awaited, in_a_row) in found["ratios"].items():
        if name != "by hand":
            yield f"step of 6 leaves on 2 replicas, {name}: awaited, in a row", f"{awaited:.2f}, {in_a_row:.2f}", ""


def of_uneven(found):
    for (name, case), wanted in zip(found["results"].items(), ("<= 1.6", "<= 2.2"), strict=True):
        yield f"{name}, on 4 replicas", f"{case['ratio']:.2f}", wanted


def of_over(found):
    for name, case in found["results"].items():
        ratios = ", ".join(f"{ratio:.2f}" for ratio in case["ratios"].values())
        yield f"f.over, {name}: / by hand without a thread, with one", ratios, "<= 1.05"


def of_packing(found):
    for case in found["results"]:
        yield f"64 leaves of {case['KB']} KB: packed / alone", f"{case['packed us'] / case['alone us']:.2f}", ""


def of_batches(found):
    for case in found["cases"]:
        rates = case["GB/s"]
        if "synk" in rates and case["kind"] == "float32":
            best = max(rate for name, rate in rates.items() if name != "synk")
            figure = f"{case['batch']} rows, {case['case']}, {case['replicas']} replica(s): GB/s, / best by hand"
            yield figure, f"{rates['synk']:.1f}, {rates['synk'] / best:.2f}", ""
        elif case["case"] == "fed":
            ratio = case["seconds"]["iterate, host"] / case["seconds"]["iterate, resident"]
            yield f"step fed from the host / resident, {case['replicas']} replica(s)", f"{ratio:.2f}", ""


def of_slices(found):
    for case in found["results"]:
        if case["way"] == "synk" and case["slices"] > 1:
            ratios = f"{case['time ratio']:.2f}, {case['temporary ratio']:.2f}"
            figure = f"{case['model']}, {case['slices']} slices, {case['replicas']} replica(s): time, temporary memory"
            yield figure, ratios, "<= 1.1, <= 0.35" if (case["model"], case["slices"]) == ("CNN", 4) else ""


def of_collectives(found):
    for case in found["results"]:
        figure = f"{case['operation']} of {case['bytes']:.0e} bytes, {case['replicas']} replicas: time / by hand"
        yield figure, f"{case['ratio']:.2f} ({case['over_us']:+.0f} us)", ""


def of_processes(found):
    results = found["results"]
    for processes, ratio in results["ratio"].items():
        yield f"step of LeNet, 2 replicas in {processes} process(es) / by hand", f"{ratio:.2f}", "<= 1.05"
    yield "agreement of 2 processes on a program, ms", f"{results['agreement_ms']:.1f}", ""
    yield "a save, in 1 and 2 processes, ms", "{:.1f}, {:.1f}".format(*results["save_ms"].values()), ""
    yield "from kill -9 to the first step of the next attempt, s", f"{results['seconds']['resumed']:.1f}", ""


def of_model(found):
    for name, machine in found["machines"].items():
        (row,) = [row for row in machine["predictions"] if row["replicas"] == 8 and not row["overlap"]]
        yield f"prediction, no measurement: {name}, speedup on 8", f"{row['speedup']:.2f}", "7.9"
    yield "largest error of predictions on published runs", f"{max(abs(r['error']) for r in found['check']):.3f}", ""


ROWS = {
    "resnet50": of_resnet50,
    "weak": of_weak,
    "overhead": of_overhead,
    "calls": of_calls,
    "uneven": of_uneven,
    "over": of_over,
    "packing": of_packing,
    "batches": of_batches,
    "slices": of_slices,
    "collectives": of_collectives,
    "processes": of_processes,
    "model": of_model,
}


def table(found):
    """Markdown: every number, what it should be, and the commands below."""
    lines = ["| figure | found | wanted | by |", "| --- | ---: | ---: | --- |"]
    for name, result in found.items():
        lines += [f"| {figure} | {value} | {wanted} | {name} |" for figure, value, wanted in ROWS[name](result)]
    lines.append("")
    for name, result in found.items():
        took = f", {result['took']:.0f} s" if "took" in result else ""
        load = f", load before {result['load before'][0]:.1f}" if "load before" in result else ""
        lines.append(f"- {name}: `{result['command']}`{took}{load}")
    return "\n".join(lines)


def refresh(readme, text):
    """Put the text between the two marks."""
    pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
    whole = readme.read_text()
    if not re.search(pattern, whole, re.DOTALL):
        raise SystemExit(f"{readme} has no two marks {BEGIN} and {END}.")
    readme.write_text(re.sub(pattern, lambda _: f"{BEGIN}\n{text}\n{END}", whole, flags=re.DOTALL))


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="names of benchmarks, with commas between; the others' results of the day stay")
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    options = parser.parse_args()
    settings = TRIAL if options.trial else SHORT
    names = options.only.split(",") if options.only else list(settings)
    options.results.mkdir(parents=True, exist_ok=True)
    start = monotonic()
    found = {name: result for name in names if (result := run(name, settings[name], options.results))}
    print(f"\n{monotonic() - start:.0f} s in all")
    write(found, options)
    if len(found) < len(names):
        raise SystemExit(f"Failed: {', '.join(name for name in names if name not in found)}")


def write(found, options):
    """The result file and the table; what ran earlier this day and not again stays in both."""
    where = next((result for result in found.values() if "date" in result), None)
    if where is None:
        return
    path = options.results / results_path(where).name
    if options.only and path.exists():
        found = json.loads(path.read_text()) | found
    found = {name: found[name] for name in SHORT if name in found}
    path.write_text(json.dumps(found, indent=1) + "\n")
    about = (
        f"{where['date'].split()[0]}; jax {where['jax']}, Python {where['python']}, {where['device']}, "
        f"{where['cores']} cores, {where['machine']}. All of it: `{path.name}` in `bench/results/`."
    )
    refresh(options.readme, f"{about}\n\n{table(found)}")


if __name__ == "__main__":
    main()
