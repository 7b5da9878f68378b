"""Training steps by optax: synchronous steps, and local steps that average now and then. `synk` does not import it."""

from .local_sgd import LocalSteps, local_steps
from .power_sgd import PowerSGD
from .synchronous import Step, step

__all__ = ["LocalSteps", "PowerSGD", "Step", "local_steps", "step"]

for _name in __all__:
    globals()[_name].__module__ = "synk.train"
