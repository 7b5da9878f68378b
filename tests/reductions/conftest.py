"""Groups for tests of ops: simulated replicas combine parts by programs of their own, as they hold variables."""

from ..variables.conftest import four, group

__all__ = ["four", "group"]
