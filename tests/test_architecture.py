"""The house rules hold in dbuf/, and each rule is shown to fail on a small source that breaks it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import architecture as rules
from architecture import Source

SOURCES = rules.read_package(Path(__file__).resolve().parents[1] / "dbuf")
MODULES = frozenset(source.name for source in SOURCES)

# Over the budget for a reason. An entry that is no longer needed fails, too.
ALLOWED_LONG: dict[str, str] = {}


@pytest.fixture(params=SOURCES, ids=lambda source: source.name)
def source(request: pytest.FixtureRequest) -> Source:
    return request.param


def test_imports_go_one_way(source: Source) -> None:
    assert rules.wrong_direction(source, MODULES) == []


def test_every_door_has_one_module(source: Source) -> None:
    assert rules.wrong_door(source, MODULES) == []


def test_no_hidden_state(source: Source) -> None:
    assert rules.bad_state(source) == []


def test_everything_is_annotated(source: Source) -> None:
    assert rules.not_annotated(source) == []


def test_no_import_cycles() -> None:
    assert rules.cycles([source for source in SOURCES if source.name != "dbuf"]) == []


def test_sizes_stay_in_their_budgets() -> None:
    over = {name: text for source in SOURCES for name, text in rules.too_long(source).items()}
    assert [text for name, text in over.items() if name not in ALLOWED_LONG] == []
    assert [name for name in ALLOWED_LONG if name not in over] == []
    assert all(ALLOWED_LONG.values())


# --- the rules can fail -------------------------------------------------------------------------------------


def _source(text: str, name: str = "dbuf.layout") -> Source:
    return Source(name, textwrap.dedent(text))


@pytest.mark.parametrize(
    "text",
    [
        "from dbuf.buffer import DBuffer",
        "import dbuf.movement",
        "from dbuf import movement",
        "from . import buffer",
        "from .buffer import DBuffer",
        "import dbuf",
        "def f():\n    from dbuf.train import step",
    ],
)
def test_an_import_from_below_is_seen(text: str) -> None:
    modules = frozenset({"dbuf", "dbuf.layout", "dbuf.buffer", "dbuf.movement", "dbuf.train"})
    assert len(rules.wrong_direction(_source(text), modules)) == 1


def test_imports_from_above_and_from_the_own_package_pass() -> None:
    modules = frozenset({"dbuf", "dbuf.errors", "dbuf.plan", "dbuf.plan.rows", "dbuf.plan.owners"})
    text = "from dbuf import errors\nfrom dbuf.errors import explain\nfrom .owners import plan\nimport torch"
    assert rules.wrong_direction(_source(text, "dbuf.plan.rows"), modules) == []


def test_a_module_that_is_not_in_the_plan_is_seen() -> None:
    assert "no row" in rules.wrong_direction(_source("", "dbuf.surprise"), frozenset())[0]


def test_a_cycle_is_seen() -> None:
    a, b = (_source(f"import dbuf.plan.{o}", f"dbuf.plan.{n}") for n, o in (("a", "b"), ("b", "a")))
    assert rules.cycles([a, b]) == ["dbuf.plan.a -> dbuf.plan.b -> dbuf.plan.a"]
    assert rules.cycles([a, _source("", "dbuf.plan.b")]) == []


@pytest.mark.parametrize(
    "text",
    [
        "import optree",
        "from optree import tree_map",
        "from torch.utils import _pytree",
        "import torch.utils._pytree as pytree",
        "from torch.distributed.device_mesh import DeviceMesh",
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
        "from torch.distributed import new_group",
        "import torch\ntorch.ops._c10d_functional.wait_tensor(x)",
        "import torch._dynamo",
        "from torch._inductor import config",
        "import torch\ndef f(): return torch._C._functorch.peek_interpreter_stack()",
        "from torch.distributed.tensor import _redistribute",
        "import hypothesis",
        "import cloudpickle",
    ],
)
def test_a_name_at_the_wrong_door_is_seen(text: str) -> None:
    assert rules.wrong_door(_source(text), MODULES)


def test_public_torch_and_the_right_door_pass() -> None:
    public = "import torch\nfrom torch.distributed.tensor import Shard\ntorch.distributed.get_rank()\nx.__dict__"
    assert rules.wrong_door(_source(public), MODULES) == []
    assert rules.wrong_door(_source("import torch._dynamo", "dbuf.compat.tracing"), MODULES) == []
    door = "import torch\ntorch.ops._c10d_functional.wait_tensor(x)"
    assert rules.wrong_door(_source(door, "dbuf.collectives"), MODULES) == []


@pytest.mark.parametrize("count, over", [(400, False), (401, True)])
def test_a_long_file_is_seen(count: int, over: bool) -> None:
    assert ("dbuf.layout" in rules.too_long(_source("x = 1\n" * count))) == over


@pytest.mark.parametrize("count, over", [(59, False), (60, True)])
def test_a_long_function_is_seen_and_its_docstring_is_not_counted(count: int, over: bool) -> None:
    text = 'class C:\n    def f(self):\n        """One.\n\n        Two.\n        """\n' + "        x = 1\n" * count
    assert ("dbuf.layout.C.f" in rules.too_long(_source(text))) == over


@pytest.mark.parametrize(
    "text",
    [
        "cache = {}",
        "cache: dict[int, int] = {}",
        "seen = set()",
        "table = collections.defaultdict(list)",
        "_items = [i for i in range(3)]",
        "def f():\n    global x\n    x = 1",
        "import os\ndebug = os.environ.get('DEBUG')",
        "import os\ndef f(x=os.getenv('X')): pass",
        "import os\nclass C:\n    x = os.environ['X']",
    ],
)
def test_hidden_state_is_seen(text: str) -> None:
    assert len(rules.bad_state(_source(text))) == 1


def test_constants_and_reads_inside_functions_pass() -> None:
    text = "import os\n_TABLE = {1: 2}\n__all__ = ['f']\nnames = (1, 2)\ndef f(): return os.environ['X']"
    assert rules.bad_state(_source(text)) == []


def test_a_file_named_utils_is_seen() -> None:
    assert rules.bad_state(_source("", "dbuf.plan.utils"))


@pytest.mark.parametrize(
    "text, missing",
    [
        ("def f(a, *b, c=1, **d): pass", "a, c, b, d, return"),
        ("def f(a: int): pass", "return"),
        ("class C:\n    def f(self, a) -> None: pass", "a"),
        ("class C:\n    @staticmethod\n    def f(a) -> None: pass", "a"),
        ("def f() -> None:\n    def g(x) -> None: pass", "x"),
    ],
)
def test_a_missing_type_is_seen(text: str, missing: str) -> None:
    (found,) = rules.not_annotated(_source(text))
    assert found.endswith(f"no type for {missing}")


def test_typed_functions_pass() -> None:
    text = "class C:\n    @classmethod\n    def f(cls, a: int, *b: int, **c: int) -> None: pass"
    assert rules.not_annotated(_source(text)) == []
