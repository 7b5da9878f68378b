"""Join: a point of a program at which a process may join an elastic group, and take part from there on."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import Generic, TypeVar

import jax
import numpy as np

from .._base.errors import checked_integer, public_api, shown
from .._base.retry import in_parts, made_again
from .._runtime.group import current_group
from .._tracing.context import eager
from .._variables.checkpoint import arrays_of, check_variables, compare, described, take_values
from .._variables.variable import Shared

T = TypeVar("T")


@public_api
def join(items: Iterable[T], variables: Mapping[str, Shared], *, start: int = 0) -> Iterator[T]:
    """Iterate over the steps of a program, and let processes join an elastic group between two of them.

    A process that `python -m synk launch --elastic --restarts R` starts in the place of a lost one runs the program
    from its first line, by itself, to this loop. There it waits until the others come to their next step. It takes the
    values of the variables from one of them, leaves out the items that they have had, and goes on with them. In any
    other group the loop is an ordinary one. A program has one such loop, over all its steps.

    Args:
      items: the steps, the same in every process, again from the first each time that the program is run:
        `range(1000)`, `synk.minibatches(...)`. Those that are left out are asked for too. Number them inside,
        `synk.join(enumerate(batches), ...)`: a count outside begins at 0 in a process that joins. Begin with the first
        also where the program goes on from a checkpoint: that is for `start`.
      variables: from name to shared variable: all that the program trains or counts in, as for `synk.save`. What else
        changes from step to step must follow from the step.
      start: how many items the program has had before, as `synk.load` tells. It leaves them out.

    Returns:
      An iterator of the items.

    Raises:
      TypeError: `items` is not iterable, or `variables` is no such mapping.
      ValueError: the variables of the process that joins are others, or its items, or the others are in another loop;
        in that process alone. Or `start` is negative.

    Example:
      >>> import numpy as np, synk
      >>> w = synk.shared(np.float32(0))
      >>> total = synk.function(lambda x: x.sum(), inputs=["x"]).then(lambda s: setattr(w, "value", w.value + s))
      >>> for step in synk.join(range(3), {"w": w}):
      ...     total(np.full(4, step, np.float32))
      >>> float(w.value)
      12.0
    """
    check_variables(variables, "join")
    if not isinstance(items, Iterable):
        raise TypeError(f"synk.join: items is {shown(items)}; give an iterable of steps, e.g. range(1000).")
    return _Joined(items, variables, checked_integer(start, "synk.join: start", 0))


_loops = count(1)


class _Joined(Iterator[T], Generic[T]):
    """Iterator over the steps of a program.

    Attributes:
      taken: how many items the loop has had.
    """

    def __init__(self, items: Iterable[T], variables: Mapping[str, Shared], start: int) -> None:
        self._items, self._variables, self.taken = items, variables, start
        self._place, self._iterator = f"its synk.join number {next(_loops)}", None

    # An item that was taken must not be lost, and what gives items may make calls of its own.
    @public_api
    @in_parts
    def __next__(self) -> T:
        is_joining = current_group()._peers.is_waiting
        if self._iterator is None:
            items = iter(self._items)
            first = [*islice(items, 1)]
            self._place += f", whose items begin with {_described(first)}"
            if is_joining:
                made_again(self._meet)
            self._iterator = islice(chain(first, items), self.taken, None)
        # After the last item nobody is let in: nothing would be left for it.
        item = next(self._iterator)
        if not is_joining:
            made_again(self._meet)
        self.taken += 1
        return item

    def _meet(self) -> None:
        current_group()._peers.meet_new(self._take_state)

    def _take_state(self) -> None:
        """Give all processes the values and the place in the loop that process 0 has."""
        group, variables = current_group(), self._variables
        call = f"synk.join(variables={[*variables]})"

        def tell() -> str:
            told = [[name, described(variable)] for name, variable in variables.items()]
            return json.dumps([self._place, self.taken, told])

        with eager():
            place, taken, kept = json.loads(group._peers.from_process_0(call, tell))
            if place != self._place:
                raise ValueError(
                    f"synk.join: this process cannot join: it is at {self._place}; the others, at {place}. Put all "
                    f"steps of the program into one loop, from the first; start= leaves out those of a checkpoint."
                )
            kept = dict(kept)
            compare(variables, kept, "synk.join: another process")
            arrays = dict(arrays_of(variables, True, False)) if group._local_ranks.start == 0 else None
            take_values(variables, kept, arrays)
        self.taken = taken


def _described(items: Sequence[object]) -> str:
    """Describe items by what is equal in every process: numbers, text, arrays of NumPy by a checksum, else types."""
    texts = list[str]()
    for leaf in jax.tree.leaves(items):
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            texts.append(f"{leaf.dtype}{[*leaf.shape]} [{zlib.crc32(leaf.tobytes()):08x}]")
        else:
            texts.append(shown(leaf) if isinstance(leaf, int | float | str | np.generic) else type(leaf).__name__)
    return "(" + ", ".join(texts) + ")"
