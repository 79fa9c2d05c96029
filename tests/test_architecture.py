"""House rules that a machine can read off the source: where imports point, how long things are, what is banned."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

#: The rooms, higher ones first, and which others each may import from. The root, where the public names stand, may
#: import all; all may import what is in OPEN.
ARROWS = {
    "cli": {
        "accelerator",
        "estimate",
        "trainer",
        "doctor",
        "data",
        "callbacks",
        "report",
        "checkpoint",
        "big_model",
        "processes",
        "settings",
        "devices",
    },
    "compat": {
        "accelerator",
        "trainer",
        "data",
        "memory",
        "utilities",
        "callbacks",
        "profilers",
        "checkpoint",
        "big_model",
        "strategies",
        "processes",
        "settings",
        "loggers",
        "devices",
    },
    "utilities": {"trainer", "data", "callbacks", "checkpoint", "strategies", "big_model", "processes"},
    "estimate": {"trainer", "data", "callbacks", "strategies", "processes"},
    "tuner": {"devices", "trainer", "memory", "data", "callbacks", "checkpoint", "strategies", "processes", "loggers"},
    "trainer": {
        "doctor",
        "profilers",
        "memory",
        "data",
        "callbacks",
        "checkpoint",
        "strategies",
        "processes",
        "settings",
        "loggers",
        "devices",
    },
    "accelerator": {
        "doctor",
        "memory",
        "data",
        "checkpoint",
        "big_model",
        "strategies",
        "processes",
        "settings",
        "loggers",
        "devices",
    },
    "doctor": {"devices", "profilers", "report", "data", "callbacks", "strategies", "processes"},
    "profilers": {"devices"},
    "memory": {"devices", "data", "processes"},
    "data": {"devices", "callbacks", "checkpoint", "processes"},
    "callbacks": {"devices", "report", "checkpoint", "loggers"},
    "report": {"devices", "checkpoint", "loggers"},
    "checkpoint": {"devices", "strategies", "big_model", "processes"},
    "strategies": {"devices", "big_model", "processes", "settings"},
    "big_model": {"devices", "processes"},
    "processes": {"devices"},
    "settings": set(),
    "loggers": {"devices"},
    "devices": set(),
}
ROOMS = tuple(ARROWS)
#: Files at the root that every room may import.
OPEN = {"lazy_names", "messages", "torch_private", "torch_versions"}
#: What a room may name for the type checker only.
TYPING_ARROWS = {
    "callbacks": {"strategies", "trainer", "tuner"},
    "checkpoint": {"loggers", "trainer"},
    "data": {"trainer"},
    "doctor": {"trainer", "accelerator"},
    "memory": {"trainer", "strategies"},
    "processes": {"trainer"},
    "profilers": {"trainer", "doctor"},
}
ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
FILES = sorted(
    {*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))} - {ROOT / "setup.py"}
)
NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]
TREES = {path: ast.parse(path.read_text()) for path in FILES}

#: Packages that cost a user's start, or that need not be installed: only functions may import them.
LAZY = {
    "accelerate",
    "bitsandbytes",
    "jsonargparse",
    "matplotlib",
    "numpy",
    "onnx",
    "onnxscript",
    "pandas",
    "rich",
    "safetensors",
    "sklearn",
    "tensorboard",
    "torchmetrics",
    "tqdm",
    "transformers",
    "wandb",
    "yaml",
}

#: Modules with a class that derives from one of these packages; they are imported only when they are used.
DERIVED = {("cli.argument_parser", "jsonargparse")}


class Import(NamedTuple):
    """One resolved import: ``target`` is dotted from the package's root, or the full name of a third party."""

    source: str
    target: str
    own: bool
    typing: bool
    top: bool
    line: int


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a file, whose tree is asked for many times."""
    return list(ast.walk(tree))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def is_typing_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Every import of a file, with whether it is for the type checker only and whether it runs at import time."""

    def walk(node: ast.AST, typing: bool, top: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, typing, top
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, typing or is_typing_block(node), top and not inside)

    return walk(tree, False, True)


def imports_of(path: Path) -> Iterator[Import]:
    source = module_name(path)
    package = source if path.name == "__init__.py" else source.rpartition(".")[0]
    for node, typing, top in statements(TREES[path]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source, alias.name, False, typing, top and not typing, node.lineno)
        elif node.level == 0:
            yield Import(source, node.module or "", False, typing, top and not typing, node.lineno)
        else:
            up = package.split(".") if package else []
            base = ".".join([*up[: len(up) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{base}.{alias.name}".lstrip(".")
                yield Import(
                    source, deeper if deeper in MODULES else base, True, typing, top and not typing, node.lineno
                )


IMPORTS = [found for path in FILES for found in imports_of(path)]


def room(module: str) -> str:
    first = module.partition(".")[0]
    return first if first in ROOMS else ""


def test_arrows_between_rooms_point_down() -> None:
    wrong = []
    for i in IMPORTS:
        source, target = room(i.source), room(i.target)
        allowed = ARROWS[source] | (TYPING_ARROWS.get(source, set()) if i.typing else set()) if source else set(ROOMS)
        if i.own and target != source and target not in allowed and i.target not in OPEN:
            wrong.append(f"{i.source}:{i.line} imports {i.target or 'the root'}")
    assert not wrong


def test_rooms_are_listed_above_those_they_import_from() -> None:
    assert not [(a, b) for a, below in ARROWS.items() for b in below if ROOMS.index(b) < ROOMS.index(a)]


def test_every_relative_import_names_a_module_that_exists() -> None:
    assert not [f"{i.source}:{i.line} imports {i.target}" for i in IMPORTS if i.own and i.target not in MODULES]


def test_no_module_imports_itself_through_others_not_even_inside_a_function() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for i in IMPORTS:
        if i.own and not i.typing and i.source and i.target != i.source:
            graph[i.source].add(i.target)
    assert cycle_in(graph) is None


def cycle_in(graph: dict[str, set[str]]) -> list[str] | None:
    """Some cycle of the graph, as a path that ends where it began."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for target in sorted(graph.get(node, ())):
            found = visit(target, [*path, node])
            if found:
                return found
        done.add(node)
        return None

    return next((found for node in sorted(graph) if (found := visit(node, []))), None)


#: Types that the files of their room may name for the type checker without counting as part of a cycle.
ESSENTIAL = {
    "trainer.trainer": "users hold a Trainer, and its modules and callbacks are handed to it",
    "trainer.run": "a Run hands itself to the parts that it makes",
}
#: Files that may know each other, at most, if imports for the type checker count too.
MOST_TOGETHER = 3


def test_few_files_of_a_room_know_each_other_even_for_the_type_checker() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for i in IMPORTS:
        essential = i.typing and i.target in ESSENTIAL
        if i.own and not essential and room(i.source) == room(i.target) and i.target != i.source:
            graph[i.source].add(i.target)
    assert not [together for together in components(graph) if len(together) > MOST_TOGETHER]


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that all lead to each other, the largest such groups."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        path.append(node)
        for target in sorted(graph[node]):
            if target not in order:
                visit(target)
            if target in path:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == order[node]:
            found.append(sorted(path[path.index(node) :]))
            del path[path.index(node) :]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def test_the_cycle_finder_finds_a_cycle() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
    assert components({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["d"], ["b", "c"], ["a"]]


def test_the_package_imports_itself_relatively() -> None:
    assert not [f"{i.source}:{i.line}" for i in IMPORTS if not i.own and i.target.partition(".")[0] == "paceline"]


def test_packages_that_cost_start_up_time_are_imported_where_they_are_used() -> None:
    heavy = [i for i in IMPORTS if i.top and not i.own and i.target.partition(".")[0] in LAZY]
    assert not [f"{i.source}:{i.line} imports {i.target}" for i in heavy if (i.source, i.target) not in DERIVED]


def test_a_name_says_what_is_inside() -> None:
    vague = {"utils", "util", "utilities", "helpers", "misc", "common"}
    lightnings = [name for name in NAMES if Path(name).parts[0] == "utilities"]  # its name, for programs written for it
    assert not [name for name in NAMES if name not in lightnings and vague & set(Path(name).with_suffix("").parts)]


#: Names of more than one class. Programs for Accelerate or Lightning know both, or one is a stand-in for the other.
REPEATED = {
    "Accelerator": "Accelerate's, the stand-in's, and Lightning's kind of device",
    "DataLoaderShard": "the type that programs construct, and the type of a prepared loader",
    "DeepSpeedPlugin": "the stand-in's",
    "FullyShardedDataParallelPlugin": "the stand-in's",
    "GradientState": "the stand-in's",
    "ParallelismConfig": "the stand-in's",
    "ThroughputMonitor": "Lightning's callback, and Fabric's helper",
    "AcceleratedOptimizer": "the stand-in's",
    "AcceleratedScheduler": "the stand-in's",
    "TorchDynamoPlugin": "the stand-in's",
}


def test_no_two_classes_have_the_same_name() -> None:
    found: dict[str, list[str]] = {}
    for name in NAMES:
        for one in classes(TREES[ROOT / name]):
            found.setdefault(one.name, []).append(name)
    repeated = {name: files for name, files in found.items() if len(files) > 1}
    assert not {name: files for name, files in repeated.items() if name not in REPEATED}
    assert not REPEATED.keys() - repeated


def code_lines(path: Path, first: int = 1, last: int | None = None) -> int:
    """Lines that hold code: no blank lines, no comments, no docstrings."""
    return len([n for n in lines_of_code(path) if first <= n <= (last or n)])


@cache
def lines_of_code(path: Path) -> set[int]:
    source = path.read_text()
    text_lines: set[int] = set()
    for node in nodes(TREES[path]):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text_lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    empty = {tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines - text_lines


def test_no_file_is_longer_than_600_lines_of_code() -> None:
    assert not {name: lines for name in NAMES if (lines := code_lines(ROOT / name)) > 600}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def all_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return ((name, function) for name in NAMES for function in functions(ROOT / name))


def test_no_function_is_longer_than_60_lines_of_code() -> None:
    found = [(name, f.name, code_lines(ROOT / name, f.body[0].lineno, f.end_lineno)) for name, f in all_functions()]
    assert not [one for one in found if one[2] > 60]


def test_only_the_two_loops_of_a_run_go_over_its_batches() -> None:
    doors = [name for name in NAMES if not name.startswith("accelerator/") and name != "data/batches.py"]
    assert [name for name in doors if calls(TREES[ROOT / name], "Batches")] == [
        "trainer/evaluation.py",
        "trainer/loop.py",
    ]


def calls(tree: ast.AST, name: str) -> bool:
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name for n in nodes(tree))


def test_nothing_prints_on_its_own_and_nothing_asserts() -> None:
    found = []
    for name in NAMES:
        path = ROOT / name
        # `trainer.print` and `module.print` print: that is what a user calls them for.
        own = [range(f.lineno, (f.end_lineno or f.lineno) + 1) for f in functions(path) if f.name == "print"]
        for node in nodes(TREES[path]):
            if isinstance(node, ast.Assert):
                found.append(f"{name}: assert in line {node.lineno}")
            calls_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if calls_print and name != "messages.py" and not any(node.lineno in lines for lines in own):
                found.append(f"{name}: print in line {node.lineno}")
    assert not found


def test_the_source_is_ascii_and_says_what_is_not_what_was() -> None:
    for name in NAMES:
        text = (ROOT / name).read_text()
        assert text.isascii(), name
        assert not [word for word in ("TODO", "FIXME", "XXX", "HACK") if word in text], name


def imported() -> list[ModuleType]:
    """All modules but programs."""
    programs = {module for module in MODULES if module.rpartition(".")[2] == "__main__"}
    return [importlib.import_module(f"paceline.{module}".rstrip(".")) for module in sorted(MODULES - programs)]


def test_every_public_class_method_and_function_is_described() -> None:
    assert not [f"{module.__name__}.{name}" for module in imported() for name in undescribed(module)]


def undescribed(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            named = [(key, m.__name__) for key, m in vars(value).items() if inspect.isfunction(m)]
            methods = [own for key, own in named if not key.startswith("_") and not own.startswith("_")]
            # An overriding method is described where it is first defined: getdoc looks there.
            yield from (f"{name}.{own}" for own in methods if not inspect.getdoc(getattr(value, own)))
        if (inspect.isclass(value) or inspect.isfunction(value)) and not value.__doc__:
            yield name


#: Where tests may let real time pass: in the one loop that polls, and in work that is made slow to be looked at.
SLEEPS = {
    "faults/train.py": "a step that is worth striking in, of a process that is killed at any moment",
    "rank_processes.py": "until(), for which every other test waits",
    "doctor/test_findings.py": "a slow network, which torch's own timers measure",
}


def test_tests_wait_for_what_they_need_and_not_for_seconds() -> None:
    found = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py") if sleeps(path.read_text())}
    assert found == set(SLEEPS)


def test_a_sleep_is_found_in_a_program_too_that_a_test_starts() -> None:
    assert sleeps("import time\ntime." + "sleep(1)")
    assert sleeps("SCRIPT = 'from time " + "import sleep'")
    assert not sleeps("CLOCK.sleep(1)")


def sleeps(text: str) -> bool:
    return re.search(r"\b(time|asyncio)\.sleep\b|from (time|asyncio) import .*\bsleep\b", text) is not None


# ---- what is not public in torch -------------------------------------------------------------------------------------

#: Attributes of other libraries that are not public, and one of ours that lies on tensors of torch.
NOT_PUBLIC = {
    "sys": {"_getframe", "_current_frames"},
    "os": {"_exit"},
    "runpy": {"_run_module_as_main"},
    "multiprocessing": {"_inheriting"},
    "argparse": {"_option_string_actions"},
    "importlib.metadata": {"_normalized_name"},
    "torchmetrics": {
        "_copy_state_dict",
        "_forward_cache",
        "_reduce_states",
        "_reductions",
        "_to_sync",
        "_update_count",
    },
    "transformers": {
        "_attn_implementation",
        "_init_weights",
        "_model_mapping",
        "_no_split_modules",
        "_tied_weights_keys",
    },
    "datasets": {"_ex_iterable"},
    "deepspeed": {"_hp_mapping", "_offload_accumulated_param_ids", "_offload_boundary_param_ids"},
    "accelerate": {"_hf_hook", "_old_forward"},
    "paceline": {"_split_over"},
}
#: What torch asks subclasses to define, by class.
TO_DEFINE = {"ParallelStyle": {"_apply"}}
#: What metaclasses give every class.
OF_METACLASSES = {"_abc_impl", "_backward_cls"}
#: What a ``NamedTuple`` has.
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
#: Attributes of an Accelerator that other files read, and that are named as one of torch's.
OF_ACCELERATOR = {"_schedulers"}
READS = {"getattr", "setattr", "hasattr", "delattr"}
PRIVATE = ROOT / "torch_private.py"
#: The table of the names of that file.
TABLE = ROOT / "torch_versions.py"


def is_private(name: str | None) -> bool:
    return bool(name) and re.fullmatch(r"_[A-Za-z]\w*", name or "") is not None


def names_of_torch(tree: ast.AST) -> set[str]:
    """The names that a file's imports of torch bind, at its top or in a function."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            mine = [alias for alias in node.names if alias.name.partition(".")[0] == "torch"]
            found |= {alias.asname or alias.name.partition(".")[0] for alias in mine}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def private_imports(tree: ast.AST) -> Iterator[str]:
    """Imports of something private in torch."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            first, *rest = path.split(".")
            if first == "torch" and any(map(is_private, rest)):
                yield f"{node.lineno}: {path}"


def private_chains(tree: ast.AST) -> Iterator[str]:
    """Attributes that begin with a name of torch and go over something private."""
    known = names_of_torch(tree)
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base: ast.expr = node.value
            while isinstance(base, ast.Attribute | ast.Call | ast.Subscript):
                base = base.func if isinstance(base, ast.Call) else base.value
            if isinstance(base, ast.Name) and base.id in known:
                yield f"{node.lineno}: {ast.unparse(node)}"


def private_paths(tree: ast.AST) -> Iterator[str]:
    """Texts, other than descriptions, that name something private in torch."""
    described = {
        id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            for found in re.findall(r"\btorch(?:\.\w+)*\._[A-Za-z]\w*", node.value):
                yield f"{node.lineno}: {found}"


def mentions(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Private attributes that a file mentions: the name, of what, and the line."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, ast.unparse(node.value), node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READS:
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield name.value, ast.unparse(node.args[0]), node.lineno


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in nodes(tree) if isinstance(node, ast.ClassDef))


def defined_in(owner: ast.ClassDef) -> set[str]:
    """The private attributes that a class defines: methods, fields, slots, what it assigns to ``self``."""
    found: set[str | None] = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if ast.unparse(node.value) in ("self", "cls") else None)
        elif isinstance(node, ast.keyword):  # vars(self).update(_x=...)
            found.add(node.arg)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # vars(self)["_x"] = ...
            found.add(node.slice.value if isinstance(node.slice.value, str) else None)
    return {name for name in found if name is not None and is_private(name)}


def owned() -> set[str]:
    """The private names that torch_private.py has: as attributes, as texts, as methods that it overrides."""
    found: set[str] = set()
    for node in nodes(TREES[PRIVATE]):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return {name for name in found if is_private(name)}


OTHERS = {path.relative_to(ROOT).as_posix(): tree for path, tree in TREES.items() if path not in (PRIVATE, TABLE)}
OWNED = owned()


@pytest.mark.parametrize("look", [private_imports, private_chains, private_paths])
def test_only_one_file_names_what_is_private_in_torch(look: Callable[[ast.AST], Iterator[str]]) -> None:
    assert not [f"{name}:{found}" for name, tree in OTHERS.items() for found in look(tree)]


def test_no_other_file_mentions_an_attribute_that_this_one_has() -> None:
    assert "_local_tensor" in OWNED
    wrong = []
    for name, tree in OTHERS.items():
        ours = set().union(*map(defined_in, classes(tree))) | OF_TUPLES
        for attribute, base, line in mentions(tree):
            ours_here = base in ("self", "cls") and attribute in ours
            ours_there = base.rpartition(".")[2] in ("accelerator", "_accelerator") and attribute in OF_ACCELERATOR
            if attribute in OWNED and not ours_here and not ours_there:
                wrong.append(f"{name}:{line}: {base}.{attribute}")
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and node.value in OWNED - ours:
                wrong.append(f"{name}:{node.lineno}: {node.value!r}")
            elif isinstance(node, ast.keyword) and node.arg in OWNED - ours:
                wrong.append(f"{name}:{node.lineno}: {node.arg}=")
    assert not wrong


def test_every_private_attribute_is_ours_or_listed() -> None:
    ours = set().union(*(defined_in(owner) for tree in TREES.values() for owner in classes(tree)), OF_TUPLES)
    listed = set().union(*NOT_PUBLIC.values())
    found = {(attribute, f"{name}:{line}") for name, tree in OTHERS.items() for attribute, _, line in mentions(tree)}
    assert not sorted((attribute, where) for attribute, where in found if attribute not in ours | listed)
    assert listed <= {attribute for attribute, _ in found}


def test_no_class_overrides_a_private_method_of_torch() -> None:
    wrong = []
    for module in imported():
        if module.__name__ != "paceline.torch_private":
            own = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
            wrong += [
                f"{module.__name__}.{found}" for kind in own if inspect.isclass(kind) for found in overrides(kind)
            ]
    assert not wrong


def overrides(kind: type) -> Iterator[str]:
    """The private methods that a class has in the place of those of a class of torch."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            both = (vars(kind).keys() & vars(base).keys()) - TO_DEFINE.get(base.__name__, set()) - OF_METACLASSES
            yield from (f"{kind.__name__}.{name} of {base.__name__}" for name in both if is_private(name))


@pytest.mark.parametrize(
    ("look", "text"),
    [
        (private_imports, "import torch._dynamo.config as dynamo"),
        (private_imports, "def f():\n    from torch.nn.modules.batchnorm import _BatchNorm"),
        (private_imports, "from torch._C import x"),
        (private_chains, "import torch\ntorch.ops.aten._unique2.default"),
        (private_chains, "from torch import nn\nnn.modules.conv._ConvNd"),
        (private_chains, "import torch.distributed as dist\ndist.group.WORLD._get_backend()"),
        (private_chains, "from torch.utils.data import DataLoader\nDataLoader(x)._iterator"),
        (private_paths, "import sys\nsys.modules.get('torch._dynamo')"),
    ],
)
def test_the_private_of_torch_is_found(look: Callable[[ast.AST], Iterator[str]], text: str) -> None:
    assert list(look(ast.parse(text)))


#: Kinds of device, whose modules in torch only their own file under devices/ may use.
KINDS_OF_DEVICE = {"cuda", "xpu", "mps", "tpu"}


def device_modules(tree: ast.AST) -> Iterator[str]:
    """Where a file uses torch's module of a kind of device, under any name."""
    torches = {"torch", "torch.backends"}  # the names under which the file knows torch and torch.backends
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            torches |= {one.asname for one in node.names if one.asname and one.name in ("torch", "torch.backends")}
            yield from (f"{node.lineno}: {one.name}" for one in node.names if is_of_device(one.name.split(".")))
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = (node.module or "").split(".")
            torches |= {one.asname or one.name for one in node.names if [*module, one.name] == ["torch", "backends"]}
            names = [[*module, one.name] for one in node.names]
            yield from (f"{node.lineno}: {'.'.join(name)}" for name in names if is_of_device(name))
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in KINDS_OF_DEVICE and ast.unparse(node.value) in torches:
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and node.args:
            called, words = ast.unparse(node.func), [one.value for one in node.args if isinstance(one, ast.Constant)]
            asks = called in READS and ast.unparse(node.args[0]) in torches and KINDS_OF_DEVICE & {*words}
            if asks or called.rpartition(".")[2] == "get_device_module":
                yield f"{node.lineno}: {ast.unparse(node)}"


def is_of_device(name: list[str]) -> bool:
    """Return True for the name of a module like torch.cuda, or of something in it."""
    return name[0] == "torch" and bool(KINDS_OF_DEVICE & {*name[1:3]}) and name[1] != "version"


@pytest.mark.parametrize(
    "text",
    [
        "from torch import cuda",
        "import torch as t\nt.cuda.is_available()",
        "import torch\ntorch.get_device_module('cuda')",
        "import torch\ngetattr(torch, 'mps')",
        "from torch.cuda import amp",
        "import torch.xpu as x",
        "from torch.backends import mps",
        "from torch import backends\nbackends.cuda.is_built()",
    ],
)
def test_a_module_of_a_kind_of_device_is_found_under_any_name(text: str) -> None:
    assert [*device_modules(ast.parse(text))]


def test_only_the_files_of_devices_use_torchs_modules_of_a_kind_of_device() -> None:
    assert not [
        f"{path}:{found}" for path in FILES if path.parent.name != "devices" for found in device_modules(TREES[path])
    ]
    cuda = {path.stem for path in FILES if any("torch.cuda" in found for found in device_modules(TREES[path]))}
    assert cuda == {"cuda"}
