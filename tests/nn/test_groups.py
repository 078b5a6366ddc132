"""Which parameter is in which buffer, and what is refused with which words; no ranks, no numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import modules
from dbuf import TreeError
from dbuf.nn import functionalize
from modules import Block, Language


def groups_of(module: nn.Module, groups: Any) -> dict[str, int]:
    return {name: len(paths) for name, paths in functionalize(module, groups).groups.items()}


BLOCK = 6  # tensors in one
ONE_A_BLOCK = {"root": 4, "blocks.0": BLOCK, "blocks.1": BLOCK}


@pytest.mark.parametrize(
    "groups",
    [
        Block,
        (Block,),
        ["blocks.0", "blocks.1"],
        lambda path: path.startswith("blocks.") and path.count(".") == 1,
        {"blocks.0": "blocks.0", "blocks.1": ["blocks.1"]},
    ],
    ids=["class", "tuple", "paths", "rule", "mapping"],
)
def test_ways_to_choose_the_same_groups(groups: Any) -> None:
    assert groups_of(Language(), groups) == ONE_A_BLOCK


def test_modules_themselves_choose_groups() -> None:
    net = Language()
    assert groups_of(net, list(net.blocks)) == ONE_A_BLOCK
    assert groups_of(net, net.head) == {"root": 3 + 2 * BLOCK, "head": 1}


def test_names_of_groups() -> None:
    net = Language()
    assert groups_of(net, None) == {"root": 4 + 2 * BLOCK}
    assert groups_of(net, lambda path: "all" if path in ("blocks.0", "blocks.1") else None) == {
        "root": 4,
        "all": 2 * BLOCK,
    }
    assert groups_of(net, {"trunk": net, "ends": ["embed", "head"]}) == {"trunk": 2 + 2 * BLOCK, "ends": 2}


def test_a_group_inside_another_takes_its_parameters() -> None:
    found = groups_of(Language(), (Block, "blocks.0.mlp"))
    assert found == {"root": 4, "blocks.0": BLOCK - 3, "blocks.0.mlp": 3, "blocks.1": BLOCK}


def test_a_tied_tensor_is_in_one_buffer_the_roots_if_it_is_there_or_the_first() -> None:
    assert functionalize(modules.tied(), Block).groups["root"][:1] == ("embed.weight",)
    assert functionalize(modules.tied(), "embed").groups.keys() == {"root"}  # the head is in the root
    assert "embed" in functionalize(modules.tied(), ("embed", "head")).groups
    assert "head" not in functionalize(modules.tied(), ("embed", "head")).groups


def test_equal_blocks_have_equal_keys() -> None:
    """Keys are paths within the group, so that equal layers have equal specs."""
    model = functionalize(Language(), Block)
    tensors = model.tensors(Language())
    assert list(tensors["blocks.0"]) == list(tensors["blocks.1"])
    assert "qkv.weight" in tensors["blocks.0"] and "embed.weight" in tensors["root"]


def test_frozen_parameters_have_buffers_of_their_own() -> None:
    groups = functionalize(modules.frozen(), Block).groups
    assert groups["root (frozen)"] == ("embed.weight",)
    assert "blocks.0" not in groups and len(groups["blocks.0 (frozen)"]) == BLOCK


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(2, 2)
        self.narrow = nn.Linear(2, 2).to(torch.bfloat16)


REFUSED: dict[str, tuple[nn.Module, Any, str]] = {
    "a class that matches nothing": (Language(), nn.Conv2d, "matches no module.*got:  Conv2d.*Linear"),
    "a path": (Language(), ["blocks.7"], "matches no module.*blocks.7"),
    "a module of another model": (Language(), nn.Linear(1, 1), "matches no module"),
    "a rule": (Language(), lambda path: False, "matches no module"),
    "two groups": (Language(), {"a": "blocks.0", "b": Block}, "'blocks.0' in 'a' and in 'b'"),
    "no forward": (Language(), "blocks", "has no forward.*blocks: ModuleList.*'blocks.0'"),
    "several dtypes": (Half(), None, "several dtypes.*float32: wide.weight.*bfloat16: narrow.weight.*'(wide|narrow)'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_four_parts(case: str) -> None:
    module, groups, words = REFUSED[case]
    with pytest.raises(TreeError, match=f"(?s){words}") as error:
        functionalize(module, groups)
    for part in ("dbuf.nn", "got: ", "need: ", "try: "):
        assert part in str(error.value)


def test_the_name_of_the_root_is_taken() -> None:
    net = nn.Sequential()
    net.add_module("root", nn.Linear(1, 1))
    with pytest.raises(TreeError, match="'root'"):
        functionalize(net, "root")
    assert groups_of(net, {"trunk": "root"}) == {"trunk": 2}


def test_several_dtypes_in_groups_of_their_own() -> None:
    assert groups_of(Half(), "narrow") == {"root": 2, "narrow": 2}


def test_remat_takes_names_of_groups() -> None:
    functionalize(Language(), Block, remat=["blocks.1"])
    with pytest.raises(TreeError, match="no group has that name"):
        functionalize(Language(), Block, remat=["block1"])
