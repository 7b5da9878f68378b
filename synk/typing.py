"""What functions take, give and are: types to annotate with. Nobody makes one by hand."""

from ._call.spec import Stats
from ._check.blame import Blame
from ._data.dataset import Data
from ._explain.hlo import Collective
from ._explain.report import Explanation, InputReport, Measured, ProgramReport, Spent, VariableReport
from ._function.function import Function
from ._runtime.group import Group
from ._variables.variable import Shared

__all__ = [
    "Blame", "Collective", "Data", "Explanation", "Function", "Group", "InputReport", "Measured", "ProgramReport",
    "Shared", "Spent", "Stats", "VariableReport",
]  # fmt: skip

for _name in __all__:
    globals()[_name].__module__ = "synk.typing"
