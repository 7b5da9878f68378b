"""The package's shape: modules in one order, every public name documented with an example that runs."""

import ast
import doctest
import importlib
import inspect
import re
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import jax
import pytest
from jax._src import config  # noqa: TID251  # what it lists has no public name

import synk
import synk.contrib.synkhronos
import synk.train
from synk._base.jax_context import TRACE_OPTIONS

from . import harness

PACKAGE = Path(__file__).resolve().parent.parent / "synk"
# Rooms from the ground up. A room imports rooms before it; those of one floor only where NEIGHBOURS says so. "" is the
# public modules beside the rooms.
FLOORS = [
    {"_base"}, {"_runtime"}, {"_distributed", "_reductions", "_tracing"}, {"_data"}, {"_variables"}, {"_call"},
    {"_check", "_explain", "_loops"}, {"_saving"}, {"_function"}, {"train", "_command"}, {""}, {"contrib"},
]  # fmt: skip
NEIGHBOURS = set()
GUIDE = (PACKAGE.parent / "docs/how_it_works.md").read_text()
LONGEST = 40  # lines of a function, its docstring and comments not counted
PATHS = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
MODULES = {name: ast.parse(path.read_text()) for name, path in PATHS.items()}
TEXTS = {name: path.read_text().splitlines() for name, path in PATHS.items()}
PUBLIC_MODULES = [synk, synk.train, synk.typing, synk.errors, synk.contrib, synk.contrib.synkhronos]
if find_spec("pytensor"):
    PUBLIC_MODULES.append(importlib.import_module("synk.contrib.pytensor"))
PUBLIC_NAMES = {module.__name__.partition(".")[2] or None: module.__all__ for module in PUBLIC_MODULES}
PUBLIC = {f"{module.__name__}.{name}": getattr(module, name) for module in PUBLIC_MODULES for name in module.__all__}
MEMBERS = {
    f"{name}.{member}": value
    for name, public in PUBLIC.items()
    if inspect.isclass(public)
    for member, value in vars(public).items()
    if not member.startswith("_") and inspect.isfunction(value)
}


def imported(name):
    """Yield the modules of synk that a module imports, wherever in its text."""
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = name.split(".")[: -node.level] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                candidates = (".".join([*parts, alias.name]), ".".join(parts))
                yield next((found for found in candidates if found in MODULES), f"{candidates[1]}.__init__")


def room(name):
    return name.split(".")[0] if "." in name else ""


ROOMS = sorted({room(name) for name in MODULES} - {""})
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
GRAPH = {name: {*imported(name)} for name in MODULES if room(name) and not name.endswith("__init__")}


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_rooms_below(name):
    """No room imports one above it, or one of its floor that it is not said to know; imports for checkers of types count."""
    for module, others in GRAPH.items():
        if room(module) == name:
            above = {other for other in others if room(other) != name and FLOOR[room(other)] >= FLOOR[name]}
            assert not {other for other in above if (name, room(other)) not in NEIGHBOURS}, module


def test_the_guide_has_each_room():
    """The page for readers has each room in its table, and says of each whether it is of the core."""
    text = GUIDE.partition("## Rooms")[2]
    table, _, after = text.partition("The core is")
    assert sorted(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.+?)\|", table, re.M)))) == ROOMS
    core, others = [re.findall(r"`(\w+)`", sentence) for sentence in after.split(".")[:2]]
    assert sorted([*core, *others]) == ROOMS
    for name in set(core) - {"_function"}:
        assert {room(other) for module, found in GRAPH.items() if room(module) == name for other in found} <= {*core}


def test_the_guide_has_records_that_there_are():
    """Each record of a call that the page for readers names is a class of the module beside it."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+)/(\w+)\.py` \|$", GUIDE, re.M)
    assert len(rows) > 9
    for record, *place in rows:
        assert record in {node.name for node in MODULES[".".join(place)].body if isinstance(node, ast.ClassDef)}


def test_a_program_imports_no_command():
    """What `python -m synk` does is imported by that alone."""
    importers = {name for name in MODULES for other in imported(name) if room(other) == "_command"}
    assert {name for name in importers if room(name) != "_command"} == {"__main__"}


def test_nothing_imports_contrib():
    """But its own modules, and the top for checkers of types."""
    importers = {name for name in MODULES for other in imported(name) if other.startswith("contrib")}
    assert {name for name in importers if room(name) != "contrib"} <= {"__init__"}


# Private names that contrib imports and private members that it uses, by its files. The list only shrinks: whoever changes
# what it names changes contrib too.
PRIVATE = {
    "_local_steps":
        "._cures ._is_averaged ._spec ._state _base.errors.checked_integer _base.errors.public_api "
        "_base.pytree.PyTree _loops.prefetch.Prefetch _function.decorator.Inputs _reductions.collectives.all_sum "
        "_reductions.reduction.Op _runtime.dispatch.drain _runtime.dispatch.retire_finished "
        "_tracing.context.current_trace train.model.LeafKind train.model.StepOptions train.model.TrainingModel "
        "train.model.kinds_of",
    "_pairs":
        "._refuse_if_absent _base.errors.public_api _base.partition.lengths_of _base.pytree.PyTree "
        "_reductions.outputs.is_whole _reductions.reduction.ELEMENTWISE _reductions.reduction.ElementwiseOp "
        "_reductions.reduction.Reduction _reductions.reduction.fold _reductions.reduction.reduction_of "
        "_reductions.reduction.result_dtype _runtime.way.replica_axis",
    "_power_sgd": "_base.errors.checked_integer",
    "_scan":
        "._refuse_if_absent _base.errors.public_api _base.partition.lengths_of _base.pytree.PyTree "
        "_base.pytree.exactly _base.pytree.first_change _call.parts.fill_up _reductions.collectives.all_gather "
        "_reductions.reduction.constant_unless _runtime.way.replica_axis",
    "_skeletons":
        "._cached ._key ._way _base.errors.shown _base.jax_context.is_traced _base.jax_context.trace_options "
        "_base.partition.lengths_of _base.pytree.PyTree _base.pytree.SCALARS _base.pytree.key_of "
        "_base.pytree.narrow _base.pytree.refuse_sparse _base.pytree.to_jax _call.binding.told_apart "
        "_call.compose.in_blocks _call.compose.own_mesh _call.compose.place_traced _call.compose.run_inlined "
        "_call.execute.run _call.parts.spare_rows _data.dataset.data_of_replicas _data.dataset.resident "
        "_data.dataset.source_of _reductions.collectives.all_gather _runtime.way.replica_axis "
        "_runtime.dispatch.LOCK _runtime.executable.Executable _runtime.executable.ProgramSpec "
        "_runtime.layout.layouts _tracing.context.current_trace _tracing.context.stateless _tracing.names.Names "
        "_variables.collectives.rows_held",
    "_tune":
        "._bind ._has_one_device ._is_multi_process ._options ._peers ._plans ._site ._spec _base.errors.public_api "
        "_base.units.seconds_text _call.binding.BoundArguments _call.binding.CallOptions _call.execute.Outcome "
        "_call.feed.Fed _call.feed.feed _call.execute.execute_calls _runtime.executable.translate_error _call.feed.prepare "
        "_call.plan.Site _call.compiler.RunsAlone _call.spec.Repeat "
        "_loops.per_launch.launch_several _check.check.check_wires _check.compare.Tolerance _check.compare.distance _check.serial.Runner "
        "_explain.explain.Rehearsal _explain.explain.copied_states _explain.explain.rehearse "
        "_reductions.wire.WireName _runtime.dispatch.LOCK _runtime.dispatch.drain "
        "_runtime.executable.translate_peer_errors train.model.checked_number",
    "_unstack": "_base.errors.public_api",
    "pytensor.build": "_base.errors.public_api _base.errors.shown _call.binding.OPTIONS",
    "pytensor.held": "_base.errors.public_api _base.errors.shown",
    "synkhronos":
        "._spec ._state _base.errors.public_api _tracing.context.eager _variables.collectives.variables_of "
        "_variables.variable.commit_all _variables.variable.group_of _variables.variable.logical_shapes "
        "_variables.variable.state_with_rank",
}  # fmt: skip


def private_names(name):
    """Return what a module of contrib imports from outside it, and private members of others."""
    tree, depth = MODULES[name], name.count(".")
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {"_replace", "_fields", "_asdict"}  # of named tuples
    found = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level > depth
        for alias in node.names
        if alias.name not in PUBLIC_NAMES.get(node.module, ())
    }
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {*found, *(f".{attr}" for attr in used - own if re.match("_[a-z]", attr))}


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) == "contrib"])
def test_contrib_imports_no_other_private_names(name):
    """Exactly those of the list."""
    assert private_names(name) == set(PRIVATE.get(name.removeprefix("contrib."), "").split())


MUTABLE = re.compile(
    r"(\w+\.)?(count|Lock|RLock|local|ContextVar|Weak\w+|deque|Event|Watchdog|Writer|JaxPeers|_CurrentGroup)"
)
GLOBALS = 28  # names that a process changes; each has its reason beside it


def test_globals_have_reasons():
    """What a module changes while the process runs stands below a comment that says why, and there is no more of it."""
    found = []
    for name, tree in MODULES.items():
        changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None or room(name) == "contrib":
                continue
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            is_made = isinstance(node.value, ast.Call) and MUTABLE.fullmatch(ast.unparse(node.value.func).split("[")[0])
            is_empty = isinstance(node.value, ast.Dict | ast.List) and not ast.unparse(node.value)[1:-1]
            if target in changed or is_made or is_empty or ast.unparse(node.value) == "set()":
                found.append(f"{name}.{target}")
                said = TEXTS[name][node.lineno - 2] + TEXTS[name][node.lineno - 1]
                assert "#" in said, f"{found[-1]}: why is it there?"
    assert len(found) <= GLOBALS, found


def test_no_circle_of_imports():
    """Modules can be read in an order in which each knows only those before it."""
    assert len([*TopologicalSorter(GRAPH).static_order()]) >= len(GRAPH)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_names_its_idea(name):
    """One idea a module, named in its first line; functions of at most 6 parameters by position and of 40 lines."""
    assert ast.get_docstring(MODULES[name])
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.FunctionDef):
            positional = [
                arg.arg for arg in (*node.args.posonlyargs, *node.args.args) if arg.arg not in ("self", "cls")
            ]
            assert len(positional) <= 6, f"{name}.{node.name}"
            body = node.body[ast.get_docstring(node) is not None :]
            lines = TEXTS[name][body[0].lineno - 1 : node.end_lineno] if body else []
            lines = [line for line in lines if line.strip() and not line.strip().startswith("#")]
            assert len(lines) <= LONGEST, f"{name}.{node.name}"


def test_docstrings_name_their_object():
    """No docstring begins with a word that leaves open what it speaks of."""
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                begins = re.match(r"(Of|What|How|Whether|Those|These|They|The same|It|Names|Runs|Writes)\b", text)
                assert not begins, f"{name}.{node.name}: {text}"


def test_private_jax_is_in_one_place():
    """Where nothing public serves: the store that processes share."""
    found = [name for name, tree in MODULES.items() if "jax._src" in ast.unparse(tree)]
    assert found == ["_distributed.coordinator"]


def test_messages_install_what_there_is():
    """synk is on no package index, so none says to install it, or an extra of it, from there."""
    assert not [name for name, tree in MODULES.items() if "synk-jax[" in ast.unparse(tree)]


def test_trace_options_are_all_that_jax_has():
    """Whatever of JAX's options changes a trace is in the key of a plan."""
    names = getattr(config, "trace_context_names", None)
    if names is None or not (names := _called(names)):
        pytest.skip(f"JAX {jax.__version__} does not say which options change a trace")
    # What synk sets itself around its programs, or no user sets by an option.
    others = {
        "mesh_context_manager", "abstract_mesh_context_manager", "compute_on_context_manager", "axis_env_state",
        "xla_metadata_context_manager", "pallas_tpu_interpret_mode_context_manager", "user_context", "check_vma",
        "jax_disable_jit", "eager_constant_folding", "jax_no_collectives",
    }  # fmt: skip
    public = {name for name in names if name not in others and hasattr(jax.config, name)}
    assert public <= set(TRACE_OPTIONS)
    assert {name for name in names if name not in others and name.startswith("jax_")} == public


def _called(names):
    try:
        return set(names())
    except NotImplementedError:
        return set()


def test_public_names():
    """What `import synk` gives is what it names, sorted, and nothing private or borrowed."""
    public = {name for name, value in vars(synk).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert list(synk.__all__) == sorted(public) and len(public) <= 36
    assert {getattr(synk, name).__module__ for name in synk.__all__} == {"synk"}


def test_names_that_are_completed():
    """What dir(synk) lists loads nothing, and looking through all of it leaves JAX's 64-bit mode as it is."""
    program = """
import inspect, sys, jax, synk
names = {name for name in dir(synk) if name[0] != "_"}
assert not {"synk.stats", "synk.train", "synk.typing", "synk.orbax", "synk.contrib"} & {*sys.modules}
assert names == {*synk.__all__, "contrib", "errors", "stats", "train", "typing", "orbax"}
assert {name for name, _ in inspect.getmembers(synk) if name[0] != "_"} == names
of_contrib = {name for name in dir(synk.contrib) if name[0] != "_"}
assert of_contrib == {*synk.contrib.__all__, "pytensor", "synkhronos"}
assert {name for name, _ in inspect.getmembers(synk.contrib) if name[0] != "_"} == of_contrib - {"pytensor"}
assert "pytensor" not in sys.modules and not jax.config.jax_enable_x64
"""
    ended = harness.python(program)
    assert (ended.stderr, ended.returncode) == ("", 0)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_an_example(name):
    """Every public name but an error is documented with an example; pytest runs it as a doctest."""
    is_error = inspect.isclass(PUBLIC[name]) and issubclass(PUBLIC[name], BaseException)
    text = inspect.getdoc(PUBLIC[name])
    assert text and (is_error or "Example:\n" in text)


@pytest.mark.parametrize("name", MEMBERS)
def test_public_members_are_documented(name):
    """Members of public classes too; doctest overlooks those, so their examples run here."""
    assert inspect.getdoc(MEMBERS[name])
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(MEMBERS[name]), {}, name, None, None)
    assert doctest.DocTestRunner().run(examples).failed == 0
