"""A Llama of Hugging Face's transformers, code that we did not write and do not change, trains as in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cheap_kernels
import modules
from dbuf import Replicate, RowAtomic, testing
from modules import Case

pytest.importorskip("transformers")

STEPS = 3
ZERO3 = ((2,), (RowAtomic(),))
HSDP = ((2, 2), (Replicate(), RowAtomic()))
VOCAB = 96


def llama(tied: bool, layers: int = 2, width: int = 64, hidden: int = 160) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(  # type: ignore[no-any-return]
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
        )
    )


def loss(call: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
    return call(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]


def groups(path: str) -> bool:
    """Embedding, every layer, head; the last norm is left to the root."""
    parent, _, name = path.rpartition(".")
    return name in ("embed_tokens", "lm_head") or parent == "model.layers"


def case(tied: bool, **sizes: Any) -> Case:
    return Case(functools.partial(llama, tied, **sizes), groups, loss, vocab=VOCAB)


UNTIED, TIED = case(False), case(True)
SMALL = case(True, layers=1, width=16, hidden=32)
LARGE = case(False, width=640, hidden=2048)  # 10 M parameters


def check(results: list[dict[str, Any]], of: Case) -> None:
    expected = modules.alone(of, STEPS)
    for got in results:
        for key in ("losses", "grads", "state"):
            testing.assert_close(got[key], expected[key], rtol=1e-5)


def _both(*mesh: Any) -> list[dict[str, Any]]:
    return [modules.train(of, *mesh, STEPS) for of in (UNTIED, TIED)]


@pytest.mark.parametrize("mesh", [ZERO3, HSDP], ids=["zero3", "hsdp"])
def test_eager(mesh: Any) -> None:
    results = testing.run(_both, *mesh, world_size=torch.Size(mesh[0]).numel())
    for i, of in enumerate((UNTIED, TIED)):
        check([result[i] for result in results], of)
    untied, tied = results[0]
    assert untied["groups"] == ["root", "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
    assert untied["gathers"] == 2 * 5 - 1
    # The head has no tensor of its own: it gathers the embedding's.
    assert tied["groups"] == untied["groups"][:-1] and tied["gathers"] == 2 * 5 - 1


def _without_kernels(*args: Any) -> dict[str, Any]:
    with cheap_kernels.graphs_alone():
        return modules.train(*args)


@pytest.mark.slow
def test_ten_million_parameters_in_one_program() -> None:
    """ZeRO-3: two gathers a group, one for the embedding; a reduce-scatter each; at most two alive; no graph break."""
    assert 9e6 < sum(p.numel() for p in modules.build(LARGE).parameters()) < 11e6
    results = testing.run(_without_kernels, LARGE, *ZERO3, STEPS, True, world_size=2, timeout_s=600)
    check(results, LARGE)
    report = results[0]["report"]
    assert report.collectives == {"all_gather": 2 * 5 - 1, "reduce_scatter": 5}
    assert report.gathered_alive <= 2
    assert (report.compiles, report.graph_breaks) == (1, 0)


@pytest.mark.slow
@pytest.mark.exhaustive  # four compiles of a whole Llama
def test_hybrid_and_tied_in_one_program() -> None:
    results = testing.run(modules.train, SMALL, *HSDP, STEPS, True, world_size=4, timeout_s=600)
    check(results, SMALL)
    report = results[0]["report"]
    # Root, embedding, layer, and the head, which reads the embedding's buffer; three gradients summed over replicas.
    assert report.collectives == {"all_gather": 2 * 4 - 1, "reduce_scatter": 4, "all_reduce": 3}
    assert (report.compiles, report.graph_breaks) == (1, 0)
