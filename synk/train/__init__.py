"""Training steps on optax: synchronous ones, and local ones that average now and then. `synk` does not import it."""

from .local_sgd import LocalSteps, local_steps
from .step import Step, step

__all__ = ["LocalSteps", "Step", "local_steps", "step"]

for _name in __all__:
    globals()[_name].__module__ = "synk.train"
