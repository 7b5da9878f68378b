"""Optimizer: the update of an optimizer of optax's, which takes the loss where it is one that asks for it."""

import inspect
from collections.abc import Callable
from typing import Any

from .._base.pytree import PyTree

Update = Callable[[PyTree, PyTree, PyTree, Any], tuple[PyTree, PyTree]]


def update_of(optimizer: Any) -> Update:
    """Of gradients, state, parameters and the loss; some take no `value`, though of a class that says they do."""
    parameters = inspect.signature(optimizer.update).parameters.values()
    takes_value = any(each.name == "value" or each.kind == each.VAR_KEYWORD for each in parameters)

    def update(grads: PyTree, state: PyTree, params: PyTree, loss: Any) -> tuple[PyTree, PyTree]:
        extra = {"value": loss} if takes_value else {}
        return optimizer.update(grads, state, params, **extra)

    return update
