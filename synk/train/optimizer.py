"""Optimizer: take the step of an optimizer of optax's, with the loss if it asks for it, and check its updates."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from .._base.pytree import PyTree

# A function from gradients, state, parameters and the loss to the new parameters, the new state and the updates.
Update = Callable[[PyTree, PyTree, PyTree, Any], tuple[PyTree, PyTree, PyTree]]

# Messages of optax if an optimizer gets the gradient of the mean loss and asks for more.
_ASKS_FOR_LOSS = r"missing .* keyword-only argument.*('grad'|'value_fn')|grad_fn must be provided"


def update_of(optax: Any, optimizer: Any) -> Update:
    """Return the function that takes a step of an optimizer."""
    # The signature tells: some optimizers are a GradientTransformationExtraArgs and take no `value` all the same.
    parameters = inspect.signature(optimizer.update).parameters.values()
    takes_value = any(p.name == "value" or p.kind == p.VAR_KEYWORD for p in parameters)

    def update(grads: PyTree, state: PyTree, params: PyTree, loss: Any) -> tuple[PyTree, PyTree, PyTree]:
        extra = {"value": loss} if takes_value else {}
        try:
            updates, new = optimizer.update(grads, state, params, **extra)
        except (TypeError, ValueError) as error:
            if not re.search(_ASKS_FOR_LOSS, str(error)):
                raise
            raise TypeError(
                "synk.train: the optimizer evaluates the loss itself (a line search, as in optax.lbfgs, or an opaque "
                "optax.contrib.sam), but a step gives it gradients alone. Make f = synk.function(loss, inputs=[...], "
                'reduce="mean"), and call the optimizer under a jax.jit of your own, with value_fn=lambda params: '
                "f(params, *rows), or grad_fn=jax.grad(lambda params, _: f(params, *rows))."
            ) from error
        jax.tree_util.tree_map_with_path(_check_shape, params, updates, is_leaf=lambda leaf: leaf is None)
        # If trees differ, assigning the variable raises.
        if jax.tree.structure(new) == jax.tree.structure(state):
            jax.tree_util.tree_map_with_path(_check_dtype, state, new)
        return optax.apply_updates(params, updates), new, updates

    return update


def _check_dtype(path: Any, before: Any, after: Any) -> None:
    """Raise TypeError if an update changes the dtype of the state."""
    was, has = getattr(before, "dtype", None), getattr(after, "dtype", None)
    if was is not None and has is not None and was != has:
        raise TypeError(
            f"synk.train: an update makes {has} of the optimizer's state{keystr(path)}, which was {was} before, and a "
            f"variable keeps its dtype. Give the optimizer a dtype of its own (mu_dtype= of optax.adam), or parameters "
            f"one dtype; to optax.inject_hyperparams name what is no hyperparameter: static_args=('b1', 'b2', ...)."
        )


def _check_shape(path: Any, param: Any, update: Any) -> None:
    """Raise ValueError if adding the update would broadcast the update or the parameter."""
    if param is not None and np.shape(update) != np.shape(param):
        raise ValueError(
            f"synk.train: the optimizer's update of params{keystr(path)} has shape {np.shape(update)}, but that has "
            f"shape {np.shape(param)}. If it takes each example's gradient, as optax.contrib.dpsgd does, return "
            f'jax.vmap(gradient, (None, 0))(params, rows) from a synk.function with reduce="concat", and call '
            f"optimizer.update in its then."
        )
