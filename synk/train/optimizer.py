"""Optimizer: the update of an optimizer of optax's, which takes the loss where it is one that asks for it."""

import inspect
import re
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
        try:
            return optimizer.update(grads, state, params, **extra)
        except TypeError as error:
            if not re.search(r"missing .* keyword-only argument.*('grad'|'value_fn')", str(error)):
                raise
            raise TypeError(
                "synk.train: the optimizer evaluates the loss itself (a line search, as in optax.lbfgs), but a step "
                'gives it gradients alone. Make f = synk.function(loss, inputs=[...], reduce="mean"), and call the '
                "optimizer under a jax.jit of your own, with value_fn=lambda params: f(params, *rows)."
            ) from error

    return update
