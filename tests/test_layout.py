"""The package's shape: modules in one order, none too long, every public name documented with an example that runs."""

import ast
import doctest
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import synk
import synk.train

PACKAGE = Path(__file__).resolve().parent.parent / "synk"
ORDER = """
    _context _errors _flight _store _agree _processes _group _split _staging _sources _ops _trace _leaves _engine _slots _rows _shared _flat _data _outputs _bind _local
    _arguments _feed _exchange _inputs _prefetch _collectives _checkpoint _fingerprint _task _program _plan _waves _run _compose _check _iterate _route _function
    _minibatches _random _synkhronos _model _step _local_steps __main__ __init__ train orbax
""".split()
MODULES = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("*.py")}
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name) for module in (synk, synk.train) for name in module.__all__
}
MEMBERS = {
    f"{name}.{member}": value
    for name, public in PUBLIC.items()
    if inspect.isclass(public)
    for member, value in vars(public).items()
    if not member.startswith("_") and inspect.isfunction(value)
}


class Imports(ast.NodeVisitor):
    """The siblings that a module imports when it runs, wherever in it."""

    def __init__(self):
        self.found = set()

    def visit_If(self, node):
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_ImportFrom(self, node):
        if node.level:
            self.found |= {node.module} if node.module else {alias.name for alias in node.names}


def code_lines(tree):
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False)
    }
    nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno") and id(node) not in docstrings]
    return len({line for node in nodes if not isinstance(node, ast.Expr) for line in (node.lineno, node.end_lineno)})


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_only_from_their_left(module):
    """A call flows one way; no module reaches back."""
    imports = Imports()
    imports.visit(MODULES[module])
    assert imports.found <= set(ORDER[: ORDER.index(module)])


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short_and_name_their_idea(module):
    """One idea a module: named in its first line, in at most 400 lines of code."""
    assert ast.get_docstring(MODULES[module])
    assert code_lines(MODULES[module]) <= 400


def test_public_names():
    """What `import synk` gives is what it names, sorted, and nothing private or borrowed."""
    public = {name for name, value in vars(synk).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert list(synk.__all__) == sorted(public)
    assert {getattr(synk, name).__module__ for name in synk.__all__} == {"synk"}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_an_example(name):
    """Every public name is documented, with an example; pytest runs it as a doctest."""
    assert "Example:\n" in (inspect.getdoc(PUBLIC[name]) or "")


@pytest.mark.parametrize("name", MEMBERS)
def test_public_members_are_documented(name):
    """Members of public classes too; doctest overlooks those, so their examples run here."""
    assert inspect.getdoc(MEMBERS[name])
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(MEMBERS[name]), {}, name, None, None)
    assert doctest.DocTestRunner().run(examples).failed == 0
