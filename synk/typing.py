"""What calls of functions give beside arrays: types to annotate with. Nobody makes one by hand."""

from ._call.spec import Stats
from ._check.blame import Blame
from ._explain.hlo import Collective
from ._explain.report import Explanation, InputReport, Measured, ProgramReport, Spent, VariableReport

__all__ = [
    "Blame", "Collective", "Explanation", "InputReport", "Measured", "ProgramReport", "Spent", "Stats",
    "VariableReport",
]  # fmt: skip

for _name in __all__:
    globals()[_name].__module__ = "synk.typing"
