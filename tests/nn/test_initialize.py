"""A model built on the meta device: made group by group, and never whole on any rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dbuf
import models
import modules
from dbuf import RowAtomic, TreeError, testing
from dbuf.nn import functionalize
from modules import Block, Language


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _made(seed: int, broadcast: bool) -> dict[str, Any]:
    mesh = dbuf.init_mesh(("dp",))
    model = functionalize(on_meta(tied_with_statistics), (Block, "embed"))
    group_of = {path: name for name, paths in model.groups.items() for path in paths}
    sizes: list[int] = []
    groups: set[frozenset[str]] = set()

    def init_module(module: nn.Module) -> None:
        alive = {name: p for name, p in model.module.named_parameters() if not p.is_meta}
        sizes.append(sum(p.numel() for p in alive.values()))
        groups.add(frozenset(group_of[name].removesuffix(" (frozen)") for name in alive))
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    torch.manual_seed(seed + (mesh.get_rank() if broadcast else 0))
    options = {"broadcast_from": 1} if broadcast else {}
    params, rest = model.init(mesh, RowAtomic(), init_module=init_module, **options)
    out = model.state_dict(params | rest)
    whole = {name: tensor for name, tensor in out.items() if name in group_of}
    assert max(len(one) for one in groups) == 1  # one group at a time
    assert max(sizes) < sum(tensor.numel() for tensor in whole.values()) / 2
    assert all(parameter.is_meta for parameter in model.module.parameters())
    loss, _ = dbuf.value_and_grad(lambda p: model.apply_and_update(p, rest, modules.batch(CASE, 0))[0].sum())(params)
    assert loss.isfinite()
    return out


CASE = modules.CASES["statistics"]


def tied_with_statistics() -> nn.Module:
    net = Language(norm=nn.BatchNorm1d)
    net.head.weight = net.embed.weight
    net.blocks[0].mlp.requires_grad_(False)  # type: ignore[index]
    return net


@pytest.mark.parametrize("broadcast", [False, True])
def test_group_by_group(broadcast: bool) -> None:
    """The same on every rank, whatever the number of ranks."""
    two, three = (testing.run(_made, 3, broadcast, world_size=n) for n in (2, 3))
    testing.assert_same_on_all_ranks([*two, *three])
    got = two[0]
    testing.assert_bitwise(got["norm.weight"], torch.ones(modules.WIDTH))
    testing.assert_bitwise(got["norm.running_var"], torch.ones(modules.WIDTH))
    assert got["norm.num_batches_tracked"] == 0
    assert 0.2 < got["embed.weight"].std() < 2 and not torch.equal(
        got["blocks.0.qkv.weight"], got["blocks.1.qkv.weight"]
    )
    assert torch.equal(got["head.weight"], got["embed.weight"])


def test_one_group_is_what_the_module_itself_makes() -> None:
    """Children before parents, as `nn.Module.apply` goes: the same numbers from the same seed."""
    net = Language()
    torch.manual_seed(5)
    net.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    model = functionalize(on_meta(Language))
    torch.manual_seed(5)
    params, rest = model.init(dbuf.init_mesh(), RowAtomic())
    testing.assert_bitwise(model.state_dict(params | rest), dict(net.state_dict()))


class Own(nn.Module):
    """Weights and a constant that only the model knows how to make."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.empty(2))
        self.register_buffer("scale", torch.full((2,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.weight * self.scale


class Knows(Own):
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)
            nn.init.zeros_(module.bias)
        else:
            nn.init.ones_(module.weight)
            module.scale.fill_(0.5)


def test_what_nothing_sets_is_refused() -> None:
    with pytest.raises(TreeError, match=r"(?s)nothing has set these.*weight\n +scale\n.*init_module=fn"):
        functionalize(on_meta(Own), "inner").init(dbuf.init_mesh(), RowAtomic())


def test_the_models_own_init_weights_comes_first() -> None:
    model = functionalize(on_meta(Knows), "inner")
    params, rest = model.init(dbuf.init_mesh(), RowAtomic())
    assert rest["scale"].tolist() == [0.5, 0.5]
    assert model.apply(params | rest, torch.ones(2)).tolist() == [3.0, 3.0]
    with pytest.raises(TreeError, match=r"(?s)'scale': missing, and the module was built on meta.*params \| rest"):
        model.apply(params, torch.ones(2))


def test_values_that_are_there_are_kept() -> None:
    """A module with parameters on meta and real constants, as many libraries build them."""
    net = Own()
    model = functionalize(net, "inner")

    def init_module(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    params, _ = model.init(dbuf.init_mesh(), RowAtomic(), init_module=init_module)
    assert model.apply(params, torch.ones(2)).tolist() == [1.5, 1.5]


def _llama() -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    mesh = dbuf.init_mesh(("dp",))
    model = functionalize(on_meta(lambda: LlamaForCausalLM(config)), lambda path: path.endswith((".0", ".1")))
    torch.manual_seed(0)
    params, rest = model.init(mesh, RowAtomic())
    tokens = torch.arange(8).reshape(2, 4)
    real = LlamaForCausalLM(config)
    real.load_state_dict(model.state_dict(params | rest))
    got = model.apply(params | rest, input_ids=tokens, use_cache=False).logits
    return {"got": got, "expected": real(input_ids=tokens, use_cache=False).logits, "std": models.whole(params)["root"]}


def test_llama_by_its_own_init_weights() -> None:
    """Also its rotary frequencies, which are in no state dict."""
    pytest.importorskip("transformers")
    for result in testing.run(_llama, world_size=2):
        testing.assert_close(result["got"], result["expected"])
        assert 0.01 < result["std"]["model.embed_tokens.weight"].std() < 0.03
