"""Tune: try settings of a step's programs on the devices that are here, and keep those that are faster."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .._base.errors import public_api
from .._base.units import seconds_text
from .._call.binding import BoundArguments, CallOptions
from .._call.compiler import RunsAlone
from .._call.execute import Outcome, execute_calls
from .._call.feed import Fed, feed, prepare
from .._call.plan import Site
from .._call.spec import Repeat
from .._check.check import check_wires
from .._check.compare import Tolerance, distance
from .._check.serial import Runner
from .._explain.explain import Rehearsal, copied_states, rehearse
from .._loops.per_launch import launch_several
from .._reductions.wire import WireName
from .._runtime.dispatch import LOCK, drain
from .._runtime.executable import translate_error, translate_peer_errors
from ..errors import DisagreementError, LawError, PeerError
from ..train import Step
from ..train.model import checked_number
from ..typing import Function

# Rounds in which two settings take turns.
_FEWEST, _MOST = 5, 40


@public_api
def tune(
    step: Step,
    /,
    *args: Any,
    seconds: float = 60,
    wires: WireName | Sequence[WireName] = (),
    batch: Any = None,
    batch_s: Any = None,
    num_slices: int | Literal["auto"] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Find the options of `step.with_options` that make a step over such rows fastest on the devices that are here.

    It tries one setting after the other against the best so far, prints what it finds, and changes nothing: no
    step is kept, and neither Ctrl-C nor an error leaves a trace in the variables or `stats`. Slices are tried
    everywhere, except with `blocks`, where they change nothing. On several GPUs also: how many bytes of gradients
    XLA packs into one all-reduce, the barrier before the update, and XLA's latency hiding scheduler. At last it
    times steps that loops with `per_launch` run in a row, which is not among the options.

    Steps are awaited one by one, and the two settings take turns; other threads may make calls in between, which
    then disturb the times. The table shows the median, over the rounds, of a setting's time relative to the best's,
    and its margin: three times the distance of the quartiles, divided by the root of the number of rounds. A
    setting wins if the median is below 1 by more than that, and by at least 1 %; otherwise the best so far stays.
    What does not compile, does not fit into memory or gives another answer to more than rounding (see `check`) is
    listed and not chosen.

    Args:
      step: a step of `synk.train.step`.
      *args, **kwargs: the rows, as in a call: as many, and from the same place, as in training.
      seconds: about how long all may take, compiling included. What is under way then is not cut short.
      wires: wires to try too. They round gradients, so the answer differs by that; by default none is tried.
      batch, batch_s: as in a call.
      num_slices: as in a call; the number stays as it is then. By default numbers are tried.

    Returns:
      Options for `with_options`, without those that stay as they are. In a group of several processes all make
      this call, and all get the same.

    Raises:
      MemoryError: the step as it is, beside a copy of its variables, does not fit into memory.

    Other errors are those of a call.

    Example:
      >>> import numpy as np, optax, synk.contrib, synk.train
      >>> step = synk.train.step(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.25))
      >>> options = synk.contrib.tune(step, np.ones(8), seconds=0.1)  # doctest: +ELLIPSIS
      tuning <lambda>: ...
      >>> fast = step.with_options(**options)
      >>> print(fast(np.ones(8)), step.stats.calls)
      1.0 0
    """
    name, wanted = f"synk.contrib.tune({step.function.name}): seconds", "give how long it may take, a finite number > 0"
    seconds = checked_number(seconds, name, wanted, lambda seconds: 0 < seconds < float("inf"))
    wires = (wires,) if isinstance(wires, str) else tuple(wires)
    for wire in wires:
        step.with_options(wire=wire)
    slices = step._options.num_slices or 1 if num_slices is None else num_slices
    call = CallOptions(batch, batch_s, slices)
    bound = step.function._bind(args, kwargs, call, "tune")
    # With blocks a program is the same for any slices.
    is_free = num_slices is None and slices != "auto" and step.function._spec.blocks is None

    def build(**settings: Any) -> Function:
        return step.with_options(**settings).function

    return Tuner(step.function, build, (bound, call), seconds).search((1, 2, 4) if is_free else (), wires)


class _Trial(NamedTuple):
    """A step with some settings, as `Step.with_options` takes them, and the call on which it is tried."""

    settings: dict[str, Any]
    site: Site
    bound: BoundArguments
    options: CallOptions

    def ready(self) -> Fed:
        with LOCK:
            return prepare(self.site, self.bound, self.options)

    def run(self) -> Rehearsal:
        try:
            with LOCK, translate_peer_errors(self.site.group):
                drain()
                return rehearse(self.ready)
        except Exception as error:
            translated = translate_error(error, self.site.function.name)
            if translated is error:
                raise
            raise translated from error

    @property
    def runner(self) -> Runner:
        """Return what runs the step up to the update, as `check` does."""
        # Outputs are gathered and compared before `then`, as `check` does.
        function = replace(self.site.function.gathering(), then=None)
        return Runner(function, self.site.plans, self.bound, self.options, self.site.home or self.site.group)

    def digest(self) -> int:
        plan = self.ready().plan
        return hash(tuple([program.compiled.as_text() for program in (*plan.programs.values(), plan.last)]))


class Tuner:
    """Search for the settings under which a call of a step is fastest. A search prints the result of each setting."""

    def __init__(
        self,
        function: Function,
        build: Callable[..., Function],
        call: tuple[BoundArguments, CallOptions],
        seconds: float,
    ) -> None:
        """Run the call as it is; `build` makes the function with other settings."""
        self._build, self._deadline, self._name = build, perf_counter() + seconds, f"synk.contrib.tune({function.name})"
        # Another function counts what is tried. It shares the step's plans, so what is compiled here serves later.
        site = build()._site("tune")._replace(plans=function._plans)
        self._group = site.group
        self._best = self._as_it_is = _Trial({}, site, *call)
        outcome = self._best.run().outcome
        if outcome.is_refused:
            raise FloatingPointError(f"{self._name}: outputs or updates of the step are not finite.")
        self._variables, self._lengths = list(outcome.updates), self._best.ready().rows.lengths or (1,)
        self._tried = {self._best.digest()}
        # New values of variables, beside which a copy may not fit.
        del outcome
        self._say(f"tuning {function.name}: {self._group}, {sum(self._lengths)} rows")
        self._row("setting", "a step", "of the best", "answer")
        self._row("as it is", seconds_text(median(self._best.run().seconds for _ in range(_FEWEST))))

    def search(self, slices: Sequence[int], wires: Sequence[str]) -> dict[str, Any]:
        """Try one setting after the other, these numbers of slices and wires among them, and return the best."""
        candidates = [*self._candidates(slices, wires)]
        for i, (label, setting) in enumerate(candidates):
            self._row(label, *self._try(label, setting, len(candidates) - i))
        for most in (4, 16):
            self._row(f"per_launch={most}", *self._time_in_a_row(most))
        shown = ", ".join(f"{name}={value!r}" for name, value in self._best.settings.items())
        self._say(f"  => step.with_options({shown})" if shown else "  => as it is")
        return self._best.settings

    def _candidates(self, slices: Sequence[int], wires: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield settings to try, and their names; wires come last, since the answer is another with them."""
        if self._group.platform == "gpu" and not self._group._has_one_device:
            for mib in (1, 32, 256):
                # XLA counts the bytes of one replica's result: of a reduce-scatter that is a fraction.
                limits = {"all_reduce": mib << 20, "reduce_scatter": max((mib << 20) // self._group.size, 1)}
                bounds = {f"xla_gpu_{kind}_combine_threshold_bytes": limit for kind, limit in limits.items()}
                yield f"all-reduces of up to {mib} MiB", {"compiler_options": bounds}
            barrier = not self._best.site.function.has_barrier
            yield f"barrier={barrier}", {"barrier": barrier}
            yield "latency hiding scheduler", {"compiler_options": {"xla_gpu_enable_latency_hiding_scheduler": True}}
        for number in slices:
            # More slices than rows would leave launches without any.
            if number <= max(self._lengths) and number != self._best.options.num_slices:
                yield f"num_slices={number}", {"num_slices": number}
        for wire in wires if self._group.size > 1 else ():
            yield f"wire={wire!r}", {"wire": wire}

    def _try(self, label: str, setting: dict[str, Any], left: int) -> Sequence[str]:
        """Try a setting beside the best, and keep it if it is faster; return what its row shows."""
        start = perf_counter()
        if not self._all_agree(f"whether time is left for {label}", start < self._deadline):
            return "", "", "not tried: no time is left"
        trial = self._trial(setting)
        if failure := self._failure_to_compile(label, trial):
            return "", "", failure
        # Compiler options and the barrier show in the text that XLA compiles to.
        digest = trial.digest() if setting.keys() <= {"compiler_options", "barrier"} else None
        # An option that does not apply, or that XLA knows as its default, compiles to the same text.
        if self._all_agree(f"whether {label} has been tried", digest in self._tried):
            return "", "", "the same program as one before"
        self._tried |= {digest} - {None}
        try:
            # Between two answers no other thread may update a variable.
            with LOCK:
                answer, is_right = self._compare(trial)
            pairs = self._race(label, trial, start + (self._deadline - start) / left)
        except Exception as error:
            # The other processes cannot know that this program has died here.
            if self._group._is_multi_process:
                raise
            return "", "", _said(error)
        # Quartiles, since a pause of the machine spoils single rounds.
        low, middle, high = quantiles([mine / best for mine, best in pairs], n=4, method="inclusive")
        # Three standard errors of the median, for normal noise. A gain below 1 % is not worth a setting.
        margin = 3 * (high - low) / len(pairs) ** 0.5
        is_faster = middle + max(margin, 0.01) < 1
        if is_chosen := self._all_agree(f"whether {label} is chosen", is_right and is_faster):
            self._best = trial
        answer += ", more than rounding" if not is_right else ", chosen" if is_chosen else ""
        return seconds_text(median(mine for mine, _ in pairs)), f"{middle:.3f} +- {margin:.3f}", answer

    def _time_in_a_row(self, most: int) -> Sequence[str]:
        """Time steps of the best setting that one program runs in a row, as loops with `per_launch` do."""
        if not self._all_agree(f"whether time is left for per_launch={most}", perf_counter() < self._deadline):
            return "", "", "not tried: no time is left"
        times, best = list[float](), [self._best.run().seconds for _ in range(_FEWEST)]

        def run(calls: Sequence[Fed], repeat: Repeat) -> list[Any]:
            states, start = copied_states(calls[0]), perf_counter()
            results = jax.block_until_ready(execute_calls(calls, repeat, states))
            times.append((perf_counter() - start) / most)
            return results

        try:
            # The first run compiles.
            for _ in range(1 + _FEWEST):
                with LOCK, translate_peer_errors(self._group):
                    drain()
                    calls = (feed(*self._best[1:]) for _ in range(most))
                    launch_several(calls, most, Repeat(most, ()), run)
        except RunsAlone as alone:
            return "", "", f"not tried: {alone}"
        return seconds_text(median(times[1:])), f"{median(times[1:]) / median(best):.3f}", "for iterate and stream"

    def _trial(self, setting: dict[str, Any]) -> _Trial:
        settings = {**self._best.settings, **setting}
        if "compiler_options" in setting:
            settings["compiler_options"] = self._best.settings.get("compiler_options", {}) | setting["compiler_options"]
        options = self._best.options._replace(num_slices=settings.get("num_slices", self._best.options.num_slices))
        return self._best._replace(settings=settings, site=self._build(**settings)._site("tune"), options=options)

    def _failure_to_compile(self, label: str, trial: _Trial) -> str:
        """Compile a trial in all processes, and say why that fails; "" if it does not."""
        failure = ""
        try:
            trial.ready()
        except (DisagreementError, PeerError):
            raise
        except Exception as error:
            failure = _said(translate_error(error, self._name))
        what, done = f"{self._name}: whether {label} compiles", np.array(not failure)
        try:
            # All processes take part, those in which it failed too: else the others would wait.
            self._group._peers.compare_values(what, lambda: [done], "It is not chosen.", always=True)
        except DisagreementError:
            failure = failure or "does not compile in another process"
        return failure

    def _compare(self, trial: _Trial) -> tuple[str, bool]:
        """Tell how far an answer is from that of the step as it is, and whether rounding explains it."""
        pairs = [*zip(*(self._numbers(each.run().outcome) for each in (self._as_it_is, trial)), strict=True)]
        if all(a.tobytes() == b.tobytes() for a, b in pairs):
            return "same bits", True
        answer, admits = f"differs by {max(distance(a, b) for a, b in pairs):.0e}", Tolerance().admits
        if trial.runner.function.wires is not None:
            try:
                check_wires(trial.runner, trial.runner.function, Tolerance())
            except LawError:
                return answer, False
            return answer, True
        if all(admits(a, b) for a, b in pairs):
            return answer, True
        # Optimizers that divide by the size of a gradient make whole steps of its rounding.
        one, other = (t.runner.run(t.runner.parallel, t.runner.function).leaves for t in (self._as_it_is, trial))
        return answer, all(map(admits, one, other))

    def _numbers(self, outcome: Outcome) -> list[np.ndarray]:
        numbers = [*map(np.asarray, outcome.leaves)]
        for variable in self._variables:
            ranks = variable._spec.storage.each_on_host(self._group, outcome.updates[variable])
            # Values that replicas share are there once.
            for rank in range(self._group.size):
                numbers += ranks[rank % len(ranks)]
        return numbers

    def _race(self, label: str, trial: _Trial, until: float) -> list[tuple[float, float]]:
        """Run a trial and the best in turns; return the seconds of both in each round."""

        def run_both(number: int) -> tuple[float, float]:
            # In turns first and second: whoever runs second may find a warmer machine.
            if number % 2:
                return trial.run().seconds, self._best.run().seconds
            best = self._best.run().seconds
            return trial.run().seconds, best

        start = perf_counter()
        pairs = [run_both(0)]
        fitting = str(min(max(int((until - start) / (perf_counter() - start)), _FEWEST), _MOST))
        # Process 0 counts the rounds, since clocks differ and a process with one round more would wait for the others.
        rounds = self._group._peers.from_process_0(f"{self._name}: rounds of {label}", lambda: fitting)
        return pairs + [run_both(number) for number in range(1, int(rounds))]

    def _all_agree(self, what: str, is_so: bool) -> bool:
        """Return the answer of process 0, which all processes take."""
        # Times differ between processes, and all must run the same programs.
        return self._group._peers.from_process_0(f"{self._name}: {what}", lambda: str(is_so)) == "True"

    def _say(self, line: str) -> None:
        if jax.process_index() == 0:
            print(line, flush=True)

    def _row(self, setting: str, time: str, ratio: str = "", note: str = "") -> None:
        self._say(f"  {setting:<28}{time:>12}{ratio:>18}  {note}".rstrip())


def _said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "does not fit into memory"
    return f"does not run: {type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
