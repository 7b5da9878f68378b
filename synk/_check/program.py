"""Program: check any parallel JAX program: whether it gives on several devices the answer of one, and why not."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from .._base.errors import SynkError, checked_integer, public_api, shown
from .laws import IN_PART, LINES, REPLICAS, ROUNDING, Leaf, apart, law_in_n, law_of_places, like_one_device, plain_fault
from .runs import Program, Run

DEVICES = (2, 3, 4, 8)
ROWS = (24, 23)
SECONDS = 300.0  # for a run
IN_FLOAT64 = 1e-9  # a difference that falls below it in float64 was rounding
_REFUSES = re.compile(r"divi[sd]|evenly|modulo by zero|equal division|not.*multiple", re.IGNORECASE)

RAISES = "it raises on several devices"
COUNTS = "it chooses its number of devices itself: make the mesh of jax.devices()"
TREE = "it returns another tree than on one device"
ONE_ALONE = "the value of one device alone: it is not combined"
DROPPED = "only where rows do not divide: the last rows are dropped"
ZEROS = "only where rows do not divide: rows of zeros that pad are counted in a mean"
UNEVEN = "only where rows do not divide: a mean of means of unequal parts, or rows that are padded or repeated"
NOISE = "noise by shard: with the same noise in every row the answers agree (draw by row, or outside shard_map)"
NARROWED = "it computes in {} bits on several devices, in {} on one: values are narrowed before they are sent"
NO_LAW = (
    "no law in n: parts that see only their own rows (batch norm, std, max, a root, clipping before the mean), or that "
    "weigh alike and count differently (masked means)"
)
FOLLOWS = "leaves without a law of their own may follow from those that have one: an optimizer is not linear"
NOT_PARALLEL = "no compiled program spans more than one device: it is not parallel, or not by jit"
# Words of a source to look at where no law tells.
_HINTS = r"BatchNorm|clip\w*\(|mask|softmax|\bstd|\bvar\(|norm\(|sqrt|max\(|median|quantile|top_k"
_SEEDS = "default_rng|RandomState"
_LINES = LINES | {
    DROPPED: "//", ZEROS: "pad|zeros|concatenate", UNEVEN: "pmean|mean|concatenate|pad", NOISE: r"random\.",
    NO_LAW: _HINTS, COUNTS: "Mesh|make_mesh|devices", NARROWED: "bfloat16|float16|int8|float8",
}  # fmt: skip


class CheckReport:
    """The findings of a check of a program, as text, as JSON and in fields.

    Attributes:
      table: for each leaf and number of rows (None where the program takes none), by the number of devices, how far
        the leaf is from one device's: "=", a relative difference, "~" before one that is rounding, or a word.
      wrong: causes in words, most certain first, and the leaves that each explains.
      refuses: errors for rows that do not divide, and the numbers of devices that raise them.
      notes: what else there is to know, such as differences that are rounding.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.table: dict[tuple[str, int | None], dict[int, str]] = {}
        self.wrong: dict[str, list[str]] = {}
        self.refuses: dict[str, list[int]] = {}
        self.notes: list[str] = []

    @property
    def ok(self) -> bool:
        return not self.wrong

    def json(self) -> str:
        table = [{"leaf": leaf, "rows": rows, "devices": row} for (leaf, rows), row in self.table.items()]
        fields = {"target": self.target, "ok": self.ok, "wrong": self.wrong, "refuses": self.refuses}
        return json.dumps(fields | {"notes": self.notes, "table": table}, indent=1)

    def __str__(self) -> str:
        causes = [f"WRONG: {cause}\n    {', '.join(leaves)}" for cause, leaves in self.wrong.items()]
        lines = causes or ["right: on every number of devices the answer is that of one"]
        lines += [f"refuses on {', '.join(map(str, ns))} devices: {text}" for text, ns in self.refuses.items()]
        lines += [f"note: {text}" for text in self.notes]
        columns = sorted({n for row in self.table.values() for n in row})
        names = {key: key[0] + (f"  {key[1]} rows" if key[1] else "") for key in self.table}
        width = max(map(len, names.values()), default=4)
        for key, row in self.table.items():
            cells = "".join(f"{row.get(n, ''):>11}" for n in columns)
            if key == next(iter(self.table)):
                lines += ["", "leaf".ljust(width) + "".join(f"{f'{n} devices':>11}" for n in columns)]
            lines.append(names[key].ljust(width) + cells)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<synk.check_program({self.target!r}): {'right' if self.ok else 'wrong'}>"


@public_api
def check_program(
    target: str,
    devices: Sequence[int] = DEVICES,
    rows: Sequence[int] | None = None,
    rtol: float | None = None,
    timeout: float | None = None,
) -> CheckReport:
    """Check whether a parallel JAX program gives on several devices the answer of one, and tell why it does not.

    The program need not use synk. It runs on 1 device and on each number of `devices`, virtual ones of the CPU, each
    time in a process of its own, and each leaf that it returns is compared with one device's.

    Args:
      target: "FILE:FUNCTION". The function makes its mesh of `jax.devices()` and returns a tree of arrays, such as loss
        and gradients. If it has a parameter, it is given a number of rows.
      devices: the numbers of devices; three or more tell how a fault grows.
      rows: the numbers of rows for a function that takes one. By default 24, and where these are right 23, which does
        not divide, on the fewest and the most devices; where 23 are refused, 48 on the most devices.
      rtol: the admitted difference, relative to a leaf's largest number. By default that of rounding, which is told
        from faults by runs in float64.
      timeout: seconds for a run (300).

    Returns:
      A report: `ok`, `wrong` (causes and their leaves), `refuses`, `notes`, and `json()`; `print` it.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: `target` names no function, or a number is below 1.
      SynkError: the program cannot run on one device, dies, or does not end in time.

    Example:
      >>> import pathlib, synk, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "train.py")
      >>> _ = path.write_text('''
      ... import functools, jax, numpy as np
      ... def one_step(rows):
      ...     step = functools.partial(jax.pmap, axis_name="d")(lambda x: jax.lax.pmean(x.sum(), "d"))
      ...     return step(np.ones((rows,), "f4").reshape(len(jax.devices()), -1))[0]
      ... ''')
      >>> report = synk.check_program(f"{path}:one_step", rows=[24])
      >>> print(str(report).splitlines()[0])
      WRONG: 1/n of it: a mean over devices of sums, or divided by n twice
    """
    return check(target, devices, rows, rtol, timeout, lambda done, begun: None)


def check(
    target: str,
    devices: Sequence[int],
    rows: Sequence[int] | None,
    rtol: float | None,
    timeout: float | None,
    on_run: Callable[[int, int], None],
) -> CheckReport:
    """Check a program as `check_program` does; call `on_run` with the numbers of runs ended and begun."""
    path, _, name = target.rpartition(":")
    if not path or not name.isidentifier():
        raise ValueError(
            f'check_program: target is {shown(target)}; give "FILE:FUNCTION", such as "train.py:one_step".'
        )
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"check_program: there is no file {path}.")
    numbers = [checked_integer(n, "check_program: a number of devices", 2) for n in dict.fromkeys(devices)]
    cases: list[int | None] = [checked_integer(r, "check_program: a number of rows", 1) for r in rows or ()]
    report = CheckReport(target)
    with Program(file, name, timeout or SECONDS, on_run) as program:
        if cases or not _takes_rows(program.source, name):
            _Check(program, report, numbers, rtol).run(cases or [None])
            return report
        _Check(program, report, numbers, rtol).run([ROWS[0]])
        if report.ok:
            _Check(program, report, sorted({min(numbers), max(numbers)}), rtol).run([ROWS[1]])
        if report.ok and report.refuses:
            # Few rows may have all that counts, such as the largest number, in the first part.
            _Check(program, report, [max(numbers)], rtol).run([2 * ROWS[0]])
        return report


def _takes_rows(source: str, name: str) -> bool:
    """Tell whether a function of a source has a parameter. What is no function there has none."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return False
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    return bool(found and (found[-1].args.args or found[-1].args.posonlyargs))


class _Check:
    def __init__(self, program: Program, report: CheckReport, devices: Sequence[int], rtol: float | None) -> None:
        self.program, self.report, self.devices, self.rtol = program, report, devices, rtol

    def run(self, cases: Sequence[int | None]) -> CheckReport:
        """Compare all numbers of devices with one, for each number of rows."""
        report = self.report
        if not report.table:
            self.program.start(1, cases[0])
        for rows in cases:
            for n in self.devices:
                self.program.start(n, rows)
        # Where nothing ran before, one device must run: what all others refuse may be no program at all.
        if not report.table:
            self._one_device(cases[0])
        for rows in cases:
            self._compare_runs(rows)
        if any("n times" in cause or "1/n" in cause or "once a device" in cause for cause in report.wrong):
            report.notes += [FOLLOWS] if len(report.wrong) > 1 else []
        # A cause by a law comes before one that was found because no law told.
        certain = [cause for cause in report.wrong if not cause.startswith(NO_LAW)]
        report.wrong = {cause: report.wrong[cause] for cause in (*certain, *report.wrong)}
        return report

    def _blame(self, cause: str, leaf: str) -> None:
        """Note a cause, with the lines of the source that have its words."""
        pattern = next((words for known, words in _LINES.items() if cause.startswith(known.partition("{")[0])), None)
        lines = [(i, line.strip()) for i, line in enumerate(self.program.source.splitlines(), 1)]
        # Comments, docstrings and imports have the words, but not the fault.
        code = [(i, line) for i, line in lines if not line.startswith(("#", '"', "import ", "from "))]
        found = [f"line {i}: {line}" for i, line in code if pattern and re.search(pattern, line)]
        # More lines than that point nowhere.
        if 0 < len(found) <= 3:
            cause = "\n    ".join([cause, *found])
        leaves = self.report.wrong.setdefault(cause, [])
        leaves += [leaf] if leaf not in leaves else []

    def _note(self, text: str) -> None:
        self.report.notes += [text] if text not in self.report.notes else []

    def _compare_runs(self, rows: int | None) -> None:
        """Compare the runs for a number of rows."""
        at = "" if rows is None else f" at {rows} rows"
        runs = {n: run for n in self.devices if self._has_run(n, rows, run := self.program(n, rows), at)}
        if not runs:
            return
        one = self._one_device(rows)
        if max(run.spans for run in runs.values()) <= 1:
            self._note(NOT_PARALLEL)
        for n, run in runs.items():
            if [*run.leaves] != [*one.leaves]:
                self._blame(TREE, f"{n} devices{at}")
        for name, leaf in one.leaves.items():
            found = {n: run.leaves[name] for n, run in runs.items() if name in run.leaves}
            self._compare_leaf(leaf, found, rows, at)

    def _one_device(self, rows: int | None) -> Run:
        """Return the run on one device, which there must be."""
        one, at = self.program(1, rows), "" if rows is None else f" at {rows} rows"
        if one.error is not None:
            raise SynkError(f"check_program: {self.report.target} cannot run on one device{at}: {one.error}")
        return one

    def _has_run(self, n: int, rows: int | None, run: Run, at: str) -> bool:
        report = self.report
        if run.error is None:
            if run.devices != n:
                self._blame(COUNTS, f"{run.devices} of {n}{at}")
            return True
        if run.is_over:
            raise SynkError(f"check_program: {report.target} cannot run on {n} devices{at}: {run.error}")
        report.table.setdefault(("(all)", rows), {})[n] = "raises"
        # Whatever it says: a program may ask for rows that divide.
        if (rows is not None and rows % n) or (rows is None and _REFUSES.search(run.error)):
            report.refuses.setdefault(f"{run.error.partition(':')[0]}{at}", []).append(n)
        else:
            self._blame(f"{RAISES}: {run.error}", f"{n} devices{at}")
        return False

    def _compare_leaf(self, leaf: Leaf, found: Mapping[int, Leaf], rows: int | None, at: str) -> None:
        """Compare a leaf of several numbers of devices with one device's, and name the cause of differences."""
        limit = ROUNDING[leaf.bits] if self.rtol is None else self.rtol
        row = self.report.table.setdefault((leaf.name, rows), {}) if found else {}
        bad: dict[int, np.ndarray] = {}
        for n, other in found.items():
            cause, mark = plain_fault(leaf, other, n)
            same = like_one_device(leaf.value, other.value, n)
            off = np.inf if same is None else apart(leaf.value, same)
            row[n] = mark or ("=" if off == 0 else f"{off:.0e}")
            # Replicas may round by more than the whole does: each adds up for itself.
            if other.parted > max(limit, 1e-3 if leaf.bits in (8, 16) else 1e-5):
                cause = REPLICAS
            if cause:
                self._blame(cause, f"{leaf.name}{at} on {n}")
            elif off > limit and same is not None:
                bad[n] = same
        if not bad:
            return
        # A law in n speaks of all numbers of devices. Where some are right, rows or places decide.
        law = law_in_n(leaf, bad) if len(bad) == len(found) else None
        if law is None and self.rtol is None and (why := self._rounding(leaf, bad, rows)):
            row |= {n: f"~{row[n]}" for n in bad}
            self._note(f"{leaf.name}{at}: {max(apart(leaf.value, b) for b in bad.values()):.0e} off; {why}")
            return
        self._blame(law or self._cause(leaf, bad, rows), f"{leaf.name}{at}")

    def _rounding(self, leaf: Leaf, bad: Mapping[int, np.ndarray], rows: int | None) -> str | None:
        """Tell in words that a difference is rounding: in float64 that shrinks, and a fault does not."""
        if not leaf.bits:
            return None
        n, off = max(bad), max(apart(leaf.value, b) for b in bad.values())
        if self.program(n, rows).narrow < self.program(1, rows).narrow:
            # Float64 would hide it: there nothing is narrowed.
            return None
        # Rounding shrinks by a factor of 2**29 in float64, and a fault stays as large as it is.
        one, several = (run.result() for run in [self.program.start(count, rows, "x64") for count in (1, n)])
        narrow = min(self.program(1, rows).narrow, leaf.bits)
        a, b = one.leaves.get(leaf.name), several.leaves.get(leaf.name)
        same = None if a is None or b is None else like_one_device(a.value, b.value, n)
        if a is not None and same is not None and a.bits == 64:
            narrow = one.narrow
            was, now = (np.abs(value).max(initial=0.0) for value in (leaf.value, a.value))
            if now < 1e-4 * was:
                return f"it is zero but for rounding: {was:.0e}, in float64 {now:.0e}"
            if (far := apart(a.value, same)) < max(IN_FLOAT64, 1e-6 * off):
                return f"in float64 by {far:.0e}: rounding, however much an optimizer amplifies it (return gradients)"
        # Bits that are as few in float64 runs, such as those of np.float16.
        has_few = narrow < 32 and off <= ROUNDING[narrow]
        return f"it computes in {narrow} bits, which may round by as much" if has_few else None

    def _cause(self, leaf: Leaf, bad: Mapping[int, np.ndarray], rows: int | None) -> str:
        """Name the likely cause of a difference that no law in n tells."""
        cause = (rows and self._cause_in_rows(leaf, bad, rows)) or self._cause_in_noise(leaf, bad, rows)
        if cause := cause or law_of_places(leaf, bad):
            return cause
        one, several = self.program(1, rows), self.program(min(bad), rows)
        if several.narrow < one.narrow:
            return NARROWED.format(several.narrow, one.narrow)
        if rows is not None and all(rows % n for n in bad):
            return UNEVEN
        source = self.program.source
        seen = dict.fromkeys(word.rstrip("(") for word in re.findall(_HINTS, source) or re.findall(_SEEDS, source))
        said = f"; its source has {', '.join(seen)}" * bool(seen)
        return NO_LAW + said + "; it draws random numbers by shard" * bool(several.draws)

    def _cause_in_rows(self, leaf: Leaf, bad: Mapping[int, np.ndarray], rows: int) -> str | None:
        """Name a cause that one device shows with other numbers of rows."""
        a, near = leaf.value, 30 * leaf.rounding

        def equals_one_device(count: Callable[[int], int]) -> bool:
            runs = ((count(n) and self.program(1, count(n)).leaves.get(leaf.name), b) for n, b in bad.items())
            return all(isinstance(x, Leaf) and apart(x.value, b) < near for x, b in runs)

        if not leaf.bits and all(apart(a % -(-rows // n), b) == 0 for n, b in bad.items()):
            return IN_PART
        if equals_one_device(lambda n: rows // n):
            return ONE_ALONE
        if not all(rows % n for n in bad):
            return None
        if equals_one_device(lambda n: rows - rows % n):
            return DROPPED
        if all(apart(a * rows / (rows + -rows % n), b) < near for n, b in bad.items()):
            return ZEROS
        return None if self.program(1, rows).draws else UNEVEN

    def _cause_in_noise(self, leaf: Leaf, bad: Mapping[int, np.ndarray], rows: int | None) -> str | None:
        """Tell noise by shard: the answers agree where all rows have the same noise."""
        n = min(bad)
        if not self.program(n, rows).draws:
            return None
        runs = [self.program.start(count, rows, "quiet") for count in (1, n)]
        one, several = (run.result().leaves.get(leaf.name) for run in runs)
        if one is None or several is None:
            return None
        limit = min(100 * leaf.rounding, 0.05 * apart(leaf.value, bad[n]))
        same = like_one_device(one.value, several.value, n)
        return NOISE if same is not None and apart(one.value, same) < limit else None
