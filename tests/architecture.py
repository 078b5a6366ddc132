"""The house rules as functions from source text to violations; `test_architecture.py` applies them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# A module imports only from rows above its own. `dbuf/__init__.py` stands below all of them.
ROWS = (
    "errors",
    "compat",
    "tree",
    "mesh",
    "placement",
    "layout",
    "plan",
    "collectives",
    "refusals",
    "spec",
    "buffer",
    "agreement",
    "creation",
    "movement",
    "reduce",
    "transforms",
    "once",
    "rematerialize",
    "schedule",
    "donation",
    "inspection",
    "compile",
    "optim",
    "train",
    "nn",
    "checkpoint",
    "models",
    "reports",
    "testing",
    "cli",
    "__main__",
)

# Dotted name -> the modules that may import or name it (and anything below it).
DOORS: Mapping[str, tuple[str, ...]] = {
    "optree": ("dbuf.tree", "dbuf.compat.runtime"),  # compat: private and renamed names only
    "torch.utils._pytree": ("dbuf.tree", "dbuf.compat.runtime"),
    "torch.distributed.device_mesh": ("dbuf.mesh", "dbuf.compat.runtime"),
    "torch.distributed.init_device_mesh": ("dbuf.mesh",),
    # A worker of the test pool is what torchrun is to a user: it makes the ranks that the mesh finds.
    "torch.distributed.init_process_group": ("dbuf.mesh", "dbuf.testing.worker"),
    "torch.distributed.destroy_process_group": ("dbuf.mesh", "dbuf.testing.worker", "dbuf.compat.runtime"),
    "torch.distributed.new_group": ("dbuf.mesh",),
    "torch.ops._c10d_functional": ("dbuf.collectives",),
    "hypothesis": ("dbuf.testing.strategies",),
    "cloudpickle": ("dbuf.testing.protocol",),
}
PRIVATE_DOOR = "dbuf.compat"  # a package: every other name with a private part of torch in it

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # without the docstring
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque"}
MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One module: its dotted name, its text, whether it is a package's `__init__.py`, and its syntax tree."""

    name: str
    text: str
    is_package: bool = False

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def read_package(root: Path) -> list[Source]:
    """All modules below `root`, a package folder."""
    sources = []
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        sources.append(Source(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return sources


def imports(source: Source, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported anywhere in a module, functions and TYPE_CHECKING included.

    `from a import b` gives `a.b`; where that is one of ours and no module, it gives `a`.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                ours = base.split(".")[0] == "dbuf"
                yield node.lineno, base if ours and full not in modules else full


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.name.split(".") if source.is_package else source.name.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def wrong_direction(source: Source, modules: frozenset[str]) -> list[str]:
    """Imports of a row that is not above the module's own."""
    if source.name == "dbuf":
        return []
    own = source.name.split(".")[1]
    if own not in ROWS:
        return [f"{source.name}: no row of the house plan is named {own!r}"]
    found = []
    for line, name in imports(source, modules):
        parts = name.split(".")
        if parts[0] != "dbuf":
            continue
        target = parts[1] if len(parts) > 1 else "dbuf"
        if target != own and (target not in ROWS or ROWS.index(target) > ROWS.index(own)):
            found.append(f"{source.name}:{line}: imports {name}, which is not in a row above {own!r}")
    return found


def cycles(sources: list[Source]) -> list[str]:
    """Import cycles between files, as chains of names."""
    modules = frozenset(source.name for source in sources)
    edges = {s.name: sorted({n for _, n in imports(s, modules) if n in modules and n != s.name}) for s in sources}
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, chain: tuple[str, ...]) -> None:
        if name in chain:
            found.append(" -> ".join([*chain[chain.index(name) :], name]))
        elif name not in done:
            for target in edges[name]:
                visit(target, (*chain, name))
            done.add(name)

    for name in edges:
        visit(name, ())
    return found


def wrong_door(source: Source, modules: frozenset[str]) -> list[str]:
    """Names that belong to one module and are used in another, imported or spelt out."""
    found = []
    for line, name in [*imports(source, modules), *_dotted_names(source.tree)]:
        door = next((door for door in DOORS if name == door or name.startswith(door + ".")), None)
        private = name.startswith("torch.") and any(_is_private(part) for part in name.split("."))
        allowed = DOORS[door] if door else (PRIVATE_DOOR,) if private else (source.name,)
        inside = private and not door and source.name.startswith(f"{PRIVATE_DOOR}.")
        if source.name not in allowed and not inside:
            found.append(f"{source.name}:{line}: {name} belongs to {' or '.join(allowed)}")
    return found


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def _dotted_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Attribute chains that start at an imported name, with the alias resolved: `dist.new_group`."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                aliases[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            chain = ast.unparse(node).split(".")
            if chain[0] in aliases and all(part.isidentifier() for part in chain):
                yield node.lineno, ".".join([aliases[chain[0]], *chain[1:]])


def too_long(source: Source) -> dict[str, str]:
    """Files and functions over their budget: name -> what is wrong."""
    found = {}
    lines = len(source.text.splitlines())
    if lines > MAX_FILE_LINES:
        found[source.name] = f"{source.name}: {lines} lines, the budget of a file is {MAX_FILE_LINES}"
    for name, node in _functions(source.tree, source.name):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
        if lines > MAX_FUNCTION_LINES:
            found[name] = f"{name}: {lines} lines without its docstring, the budget is {MAX_FUNCTION_LINES}"
    return found


def _docstring_lines(node: Function) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}.{child.name}"
        if isinstance(child, Function):
            yield name, child
        yield from _functions(child, name)


def bad_state(source: Source) -> list[str]:
    """Files named utils, mutable values under lower-case names, `global`, the environment read at import."""
    found = []
    if source.name.split(".")[-1] in ("utils", "util", "helpers", "common"):
        found.append(f"{source.name}: a file is named after its one idea")
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            found += [
                f"{source.name}:{node.lineno}: {name} is mutable module state"
                for name in names
                if not (name.isupper() or name.startswith("__"))
            ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            found.append(f"{source.name}:{node.lineno}: global {', '.join(node.names)}")
    for node in _run_at_import(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            found.append(f"{source.name}:{node.lineno}: reads the environment at import")
    return found


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in MUTABLE_CALLS
    return isinstance(value, MUTABLE_NODES)


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but the bodies of functions: decorators and defaults do run."""
    yield node
    for field, value in ast.iter_fields(node):
        if isinstance(node, Function | ast.Lambda) and field == "body":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _run_at_import(child)


def not_annotated(source: Source) -> list[str]:
    """Parameters and returns without a type; `self` and `cls` need none."""
    found = []
    methods = {id(m) for c in ast.walk(source.tree) if isinstance(c, ast.ClassDef) for m in c.body if not _is_static(m)}
    for name, node in _functions(source.tree, source.name):
        a = node.args
        positional = [*a.posonlyargs, *a.args][1 if id(node) in methods else 0 :]
        every = [*positional, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x is not None)]
        bare = [arg.arg for arg in every if arg.annotation is None]
        if node.returns is None:
            bare.append("return")
        if bare:
            found.append(f"{name}:{node.lineno}: no type for {', '.join(bare)}")
    return found


def _is_static(node: ast.stmt) -> bool:
    decorators = node.decorator_list if isinstance(node, Function) else []
    return any(ast.unparse(d) == "staticmethod" for d in decorators)
