"""All benchmarks in a short form: `make bench`, ten minutes on two cores.

    python bench/run.py [--only overhead,slices] [--trial] [--results bench/results] [--readme bench/README.md]

Each runs in a process of its own, one after the other. Writes `<date>-<device>.json` into the folder of results, and
the table between the two marks in the README. `--trial` takes the smallest settings there are.
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

HERE = Path(__file__).parent
SHORT = {
    "resnet50": "--replicas 1,2 --against 2 --steps 6",
    "calls": "--replicas 1,2 --rounds 9",
    "loops": "--replicas 1,2 --rounds 5",
    "start": "--times 3",
    "pmap": "--rounds 15",
    "overhead": "--replicas 1,2 --leaves 10,160 --rounds 3",
    "uneven": "--rounds 9",
    "unequal": "--rounds 9",
    "over": "--rounds 9",
    "batches": "--replicas 1,2 --rows 20000 --batches 512,4096 --rounds 7",
    "slices": "--replicas 1,2 --slices 1,4 --models CNN --rounds 3",
    "collectives": "--replicas 2,8 --sizes 1e3,1e7 --rounds 30",
}
TRIAL = {
    "resnet50": "--replicas 1 --against 2 --steps 3 --blocks 1 --image 32 --batch-per-replica 4 "
    "--ways synk,jit(shard_map)",
    "calls": "--replicas 1,2 --small",
    "loops": "--replicas 1,2 --small",
    "start": "--replicas 2 --times 1 --layers 1",
    "pmap": "--replicas 2 --rounds 1 --small",
    "overhead": "--replicas 1,2 --leaves 10 --rounds 1",
    "uneven": "--rounds 1",
    "unequal": "--rounds 1 --rows 8 --texts 64",
    "over": "--rounds 1 --replicas 2",
    "batches": "--replicas 1,2 --rows 400 --batches 32 --rounds 1",
    "slices": "--replicas 1 --slices 1,4 --models CNN --divide 16 --rounds 1",
    "collectives": "--replicas 2 --sizes 1e3 --rounds 3",
}
BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"


def run(name, settings):
    """Run one benchmark and return its result, or None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        shown = [f"{name}.py", *shlex.split(settings)]
        command = [sys.executable, str(HERE / shown[0]), *shown[1:], "--json", str(path)]
        print(f"\n== bench/{shlex.join(shown)}", flush=True)
        start = monotonic()
        try:
            subprocess.run(command, check=True, timeout=600)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"bench/{name}.py failed: {error}", flush=True)
            return None
        found = json.loads(path.read_text())
        return found | {"command": f"python bench/{shlex.join(shown)}", "took": monotonic() - start}


# The table: for each benchmark its rows, (figure, value, wanted). It shows the largest cases alone; the JSON has all.


def rows_of_resnet50(result):
    replicas = f"{result['against']['synk']['replicas']} replicas" if result["against"] else "one replica"
    named = {
        "images/s / best by hand": (f"ResNet-50 on {replicas}: images/s / best by hand", ">= 0.98"),
        "recompiled after the first step": ("programs compiled after the first step", "0"),
        "live bytes grown after the first step": ("growth of live device memory after the first step, bytes", "<= 0"),
        "state donated": ("part of the state that is updated in place", "1"),
        "collectives of 8 replicas": ("collectives in the program of 8 replicas", "1"),
        "reduced by 8 replicas / gradients": ("bytes that 8 replicas reduce / gradient bytes", "< 1.01"),
        "peak memory / least by hand": ("peak memory of the program / by hand", "<= 1.02"),
    }
    for name, value in result["figures"].items():
        if name in named:
            figure, wanted = named[name]
            yield figure, f"{value:.4g}", wanted


OF_CALLS = ("step of 6 leaves, awaited", "step of 6 leaves, eight", "step of 480", "synk's own", "more for")


def rows_of_table(result):
    for row in result["results"]:
        if result["bench"] == "start" or row["figure"].startswith(OF_CALLS):
            taken, by_hand = row["synk"], row["hand"]
            value = f"{taken:.3g} {row['unit']}"
            if by_hand is not None:
                more = f"{taken - by_hand:+.3g} {row['unit']}".strip()
                value = f"{taken / by_hand:.2f} x ({more})"
            if row["figure"].startswith("more"):
                value = f"{taken:+.0f} us (by hand {by_hand:+.0f})"
            yield f"{row['figure']}, replicas {row['replicas']}", value, row["wanted"]


def rows_of_loops(result):
    for row in result["results"]:
        if row["figure"].endswith("each loss read"):
            value = f"{row['synk'] / row['hand']:.2f} ({row['synk'] - row['hand']:+.0f} us)"
            yield f"{row['figure']}, replicas {row['replicas']}: time / a program a step by hand", value, ""


def rows_of_pmap(result):
    for kind in dict.fromkeys(row["kind"] for row in result["results"]):
        of_kind = [row for row in result["results"] if row["kind"] == kind]
        for how in dict.fromkeys(row["how"] for row in of_kind):
            rows = [row for row in of_kind if row["how"] == how]
            ratios = ", ".join(f"{row['synk'] / row['hand']:.2f}" for row in rows)
            yield (
                f"{kind} of examples/pmap, replicas {rows[0]['replicas']}, {how}: time / pmap",
                ratios,
                rows[0]["wanted"],
            )


def rows_of_overhead(result):
    for case in result["results"]:
        figure = f"step of {case['leaves']} leaves, replicas {case['replicas']}: time / best by hand"
        yield figure, f"{case['ratio']:.2f} ({case['over_us']:+.0f} us)", ""


def rows_of_uneven(result):
    for (name, case), wanted in zip(result["results"].items(), ("<= 1.6", "<= 2.2"), strict=True):
        yield f"{name}, on 4 replicas: time", f"{case['ratio']:.2f}", wanted


def rows_of_unequal(result):
    for (name, value), wanted in zip(
        result["results"].items(), ("<= 0.2", "<= 0.3", "<= 1.05", ">= 3", "< 1e-10", "<= 14"), strict=True
    ):
        yield f"{name}, on 2 replicas", f"{value:.2g}", wanted


def rows_of_over(result):
    for name, case in list(result["results"].items())[-2:]:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in case["ratios"].values())
        yield f"`f.over`, {name}: time / by hand, with prefetch=0, 2", ratios, "<= 1.05"


def rows_of_batches(result):
    cases = [case for case in result["cases"] if case["kind"] == "float32" and "synk" in case["GB/s"]]
    replicas = max(case["replicas"] for case in cases)
    batch = max(case["batch"] for case in cases)
    for case in cases:
        if (case["replicas"], case["batch"]) == (replicas, batch) and "in a row" not in case["case"]:
            rates = case["GB/s"]
            best = max(rate for name, rate in rates.items() if name != "synk")
            figure = f"{batch} rows, {case['case']}, replicas {replicas}: GB/s; / best by hand"
            yield figure, f"{rates['synk']:.1f}; {rates['synk'] / best:.2f}", ""
    fed = next(case for case in reversed(result["cases"]) if case["case"] == "fed")
    ratio = fed["seconds"]["iterate, host"] / fed["seconds"]["iterate, resident"]
    yield f"step with rows from the host, replicas {fed['replicas']}: time / resident rows", f"{ratio:.2f}", ""


def rows_of_slices(result):
    for case in result["results"]:
        if case["way"] == "synk" and case["slices"] > 1:
            ratios = f"{case['time ratio']:.2f}, {case['temporary ratio']:.2f}"
            figure = f"{case['model']}, slices {case['slices']}, replicas {case['replicas']}: time, temporary memory"
            yield figure, ratios, "<= 1.1, <= 0.35" if (case["model"], case["slices"]) == ("CNN", 4) else ""


def rows_of_collectives(result):
    size = max(case["bytes"] for case in result["results"])
    replicas = min(case["replicas"] for case in result["results"])
    for case in result["results"]:
        if (case["bytes"], case["replicas"]) == (size, replicas):
            figure = f"{case['operation']} of {size:.0e} bytes, replicas {replicas}: time / by hand"
            yield figure, f"{case['ratio']:.2f} ({case['over_us']:+.0f} us)", ""


ROWS = {
    "resnet50": rows_of_resnet50,
    "calls": rows_of_table,
    "loops": rows_of_loops,
    "start": rows_of_table,
    "pmap": rows_of_pmap,
    "overhead": rows_of_overhead,
    "uneven": rows_of_uneven,
    "unequal": rows_of_unequal,
    "over": rows_of_over,
    "batches": rows_of_batches,
    "slices": rows_of_slices,
    "collectives": rows_of_collectives,
}


def table(found):
    """Return Markdown: each figure, the value that is wanted, and the commands."""
    lines = ["| figure | value | wanted | by |", "| --- | ---: | ---: | --- |"]
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
    found = {name: result for name in names if (result := run(name, settings[name]))}
    print(f"\n{monotonic() - start:.0f} s in all")
    write(found, options)
    if len(found) < len(names):
        raise SystemExit(f"Failed: {', '.join(name for name in names if name not in found)}")


def write(found, options):
    """Write the result file and the table. With `--only` both keep the results of the other benchmarks of this day."""
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
