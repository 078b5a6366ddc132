"""The committed page on padding: it covers every model, and holds what the planners say today."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dbuf.models import builtin_names, read_model

ROOT = Path(__file__).parents[1]
DATA: dict[str, list[dict[str, Any]]] = json.loads((ROOT / "docs" / "benchmarks" / "padding.json").read_text())
PAGE = (ROOT / "docs" / "padding.md").read_text()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """`examples/benchmarks/padding.py`, which writes the page."""
    spec = importlib.util.spec_from_file_location("padding_script", ROOT / "examples" / "benchmarks" / "padding.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_model_block_atom_and_number_of_ranks_is_there() -> None:
    asked = set(itertools.product((8, 64, 256, 1024, 4096, 16_384), (1, 32, 128), (1, 2)))
    assert set(DATA) == set(builtin_names()) and len(DATA) == 9
    for name, cells in DATA.items():
        assert {(c["ranks"], c["block"], c["row_dims"]) for c in cells} == asked and len(cells) == len(asked)
        for cell in cells:
            assert set(cell["units"]) == {unit.name for unit in read_model(name).units}
            for found in cell["units"].values():
                assert set(found) == {"padded", "compact", "unpadded"} or "does not divide the rows of" in found


def test_the_compact_plan_is_never_worse_than_padded() -> None:
    planned = [u for cells in DATA.values() for c in cells for u in c["units"].values() if isinstance(u, dict)]
    assert len(planned) == 936
    assert all(found["compact"] <= found["padded"] for found in planned)


@pytest.mark.parametrize("name", builtin_names())
def test_the_numbers_are_todays(name: str, script: ModuleType) -> None:
    for ranks, block, row_dims in ((256, 1, 1), (64, 32, 2), (8, 128, 1), (4096, 1, 2)):
        (kept,) = [c for c in DATA[name] if (c["ranks"], c["block"], c["row_dims"]) == (ranks, block, row_dims)]
        assert script.measure(read_model(name), ranks, block, row_dims) == kept


@pytest.mark.parametrize("name", builtin_names())
def test_the_page_is_made_of_the_data(name: str, script: ModuleType) -> None:
    assert "\n".join(script.table(name, DATA[name])).rstrip() in PAGE
