"""Join: a point of a program at which a process may join an elastic group, and take part from there on."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic, TypeVar

from .._base.errors import public_api, shown
from .._base.retry import in_parts, made_again
from .._runtime.group import current_group
from .._tracing.context import eager
from .._variables.checkpoint import arrays_of, check_variables, compare, described, take_values
from .._variables.variable import Shared

T = TypeVar("T")


@public_api
def join(items: Iterable[T], variables: Mapping[str, Shared]) -> Iterator[T]:
    """Iterate over the steps of a program, and let processes join an elastic group between two of them.

    A process that `python -m synk launch --elastic --restarts R` starts in the place of a lost one runs the program
    from its first line, by itself, to this loop. There it waits until the others come to their next step. It takes the
    values of the variables from one of them, leaves out the items that they have had, and goes on with them. In any
    other group the loop is an ordinary one.

    Args:
      items: the steps, the same in every process, again from the first each time that the program is run:
        `range(1000)`, `synk.minibatches(...)`. Those that are left out are asked for too. Number them inside,
        `synk.join(enumerate(batches), ...)`: a count outside begins at 0 in a process that joins.
      variables: from name to shared variable: all that the program trains or counts in, as for `synk.save`. What else
        changes from step to step must follow from the step.

    Returns:
      An iterator of the items.

    Raises:
      TypeError: `items` is not iterable, or `variables` is no such mapping.
      ValueError: the variables of the process that joins are others; in that process alone.

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
    return _Joined(items, variables)


class _Joined(Iterator[T], Generic[T]):
    """Iterator over the steps of a program.

    Attributes:
      taken: how many items the loop has had.
    """

    def __init__(self, items: Iterable[T], variables: Mapping[str, Shared]) -> None:
        self._items, self._variables, self.taken = items, variables, 0
        self._iterator: Iterator[T] | None = None

    # An item that was taken must not be lost, and what gives items may make calls of its own.
    @public_api
    @in_parts
    def __next__(self) -> T:
        made_again(self._meet)
        if self._iterator is None:
            self._iterator = islice(self._items, self.taken, None)
        item = next(self._iterator)
        self.taken += 1
        return item

    def _meet(self) -> None:
        current_group()._peers.meet_new(self._take_state)

    def _take_state(self) -> None:
        """Give all processes the values and the place in the loop that process 0 has."""
        group, variables = current_group(), self._variables
        call = f"synk.join(variables={[*variables]})"

        def tell() -> str:
            return json.dumps([self.taken, [[name, described(variable)] for name, variable in variables.items()]])

        with eager():
            taken, kept = json.loads(group._peers.from_process_0(call, tell))
            kept = dict(kept)
            compare(variables, kept, "synk.join: another process")
            arrays = dict(arrays_of(variables, True, False)) if group._local_ranks.start == 0 else None
            take_values(variables, kept, arrays)
        self.taken = taken
