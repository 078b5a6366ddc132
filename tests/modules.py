"""Small nn.Modules that the tests of `dbuf.nn` train, on ranks and by torch alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cheap_kernels
import dbuf
import dbuf.nn
import models
from dbuf import tree
from dbuf.optim import GradientTransformation

WIDTH, VOCAB = 8, 11
RATES = {"sgd": 0.1, "adamw": 0.003}
EPS = 1e-3  # at 1e-8 Adam makes a whole step of a gradient that is rounding alone


class Block(nn.Module):
    """A transformer block. No bias where a shift changes nothing: Adam would make a direction of its rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in self.qkv(self.norm(h)).chunk(3, -1))
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return h + self.mlp(h)


class Language(nn.Module):
    """Embedding, blocks that attend, a norm and a head; written without a thought of dbuf."""

    def __init__(self, layers: int = 2, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        shape = h.shape
        return self.head(self.norm(h.reshape(-1, WIDTH)).reshape(shape))


def plain() -> nn.Module:
    return Language()


def tied() -> nn.Module:
    """One tensor in the embedding and in the head."""
    net = Language()
    net.head.weight = net.embed.weight
    return net


def shared() -> nn.Module:
    """One tensor in both blocks, and one module in both."""
    net = Language()
    net.blocks[1].qkv.weight = net.blocks[0].qkv.weight
    net.blocks[1].mlp = net.blocks[0].mlp
    return net


def frozen() -> nn.Module:
    """A frozen block, and frozen parts of the others."""
    net = Language()
    for part in (net.blocks[0], net.blocks[1].mlp, net.embed):
        part.requires_grad_(False)
    return net


def statistics() -> nn.Module:
    return Language(norm=nn.BatchNorm1d)


def everything() -> nn.Module:
    net = Language(1, norm=nn.BatchNorm1d)
    net.head.weight = net.embed.weight
    net.blocks[0].mlp.requires_grad_(False)
    return net


def language_loss(call: Callable[..., torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(call(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A module to train, how to group it, and its loss.

    `same_batch`: every rank has the whole batch, as one process has, for modules that look at all of it at once.
    """

    make: Callable[[], nn.Module]
    groups: Any
    loss: Callable[..., torch.Tensor] = language_loss
    remat: bool = False
    same_batch: bool = False
    vocab: int = VOCAB


SEPARATE = (Block, "embed", "head")  # the root is left with the norm
CASES = {
    "one group": Case(plain, None),
    "blocks": Case(plain, Block),
    "nested": Case(plain, (Block, nn.Linear)),
    "named": Case(plain, {"ends": ["embed", "head"], "blocks": Block}),
    "remat": Case(plain, SEPARATE, remat=True),
    "nested remat": Case(plain, (Block, "blocks.0.mlp", "blocks.1.mlp.0"), remat=True),
    "tied in the root": Case(tied, Block),
    "tied groups": Case(tied, SEPARATE),
    "shared": Case(shared, SEPARATE),
    "frozen": Case(frozen, SEPARATE),
    "statistics": Case(statistics, SEPARATE, same_batch=True),
    "everything": Case(everything, (*SEPARATE, "blocks.0.qkv", "blocks.0.mlp"), remat=True, same_batch=True),
}


def build(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return case.make()


def batch(case: Case, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(case.vocab, (8, 6), generator=generator)


# Both optimizers in one run, on every other group each: SGD shows a gradient's scale, AdamW a wrong state.


def _kinds(names: Any) -> dict[str, str]:
    return {name: ("sgd", "adamw")[i % 2] for i, name in enumerate(names)}


def optimizer(of_group: dict[str, str]) -> GradientTransformation:
    parts = {
        "sgd": dbuf.optim.sgd(RATES["sgd"], momentum=0.9),
        "adamw": dbuf.optim.adamw(RATES["adamw"], weight_decay=0.1, eps=EPS),
    }

    def pick(groups: dict[str, Any], kind: str) -> dict[str, Any]:
        return {group: groups[group] for group in groups if of_group[group] == kind}

    def init(params: dict[str, Any]) -> Any:
        return {kind: part.init(pick(params, kind)) for kind, part in parts.items()}

    def update(grads: dict[str, Any], state: Any, params: dict[str, Any]) -> tuple[Any, Any]:
        done = {k: part.update(pick(grads, k), state[k], pick(params, k)) for k, part in parts.items()}
        return {group: done[of_group[group]][0][group] for group in params}, {k: new for k, (_, new) in done.items()}

    return GradientTransformation(init, update)


@functools.cache
def alone(case: Case, steps: int) -> dict[str, Any]:
    """Losses of every step, gradients of the first, and the state dict after the last; by torch alone."""
    module = build(case)
    model = dbuf.nn.functionalize(module, case.groups)
    trained = {name: paths for name, paths in model.groups.items() if not name.endswith("(frozen)")}
    named = dict(module.named_parameters(remove_duplicate=False))
    kinds = _kinds(trained)
    lists = {k: [named[p] for name, paths in trained.items() if kinds[name] == k for p in paths] for k in RATES}
    optimizers = [torch.optim.SGD(lists["sgd"] or [nn.Parameter(torch.ones(()))], lr=RATES["sgd"], momentum=0.9)]
    if lists["adamw"]:
        optimizers.append(torch.optim.AdamW(lists["adamw"], lr=RATES["adamw"], weight_decay=0.1, eps=EPS))
    out: dict[str, Any] = {"losses": []}
    for i in range(steps):
        module.zero_grad()
        loss = case.loss(module, batch(case, i))
        loss.backward()
        if i == 0:
            out["grads"] = {n: [named[p].grad.clone() for p in paths] for n, paths in trained.items()}
        for one in optimizers:
            one.step()
        out["losses"].append(loss.detach())
    out["state"] = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return out


def train(case: Case, shape: tuple[int, ...], placements: Any, steps: int, compiled: bool = False) -> dict[str, Any]:
    """What `alone` returns, by `dbuf.nn` on this rank; with a report if compiled, all-gathers counted if not."""
    mesh = dbuf.init_mesh(("outer", "inner")[-len(shape) :], shape)
    module = build(case)
    model = dbuf.nn.functionalize(module, case.groups, remat=case.remat)
    params, rest = model.shard(module, mesh, placements)
    optim = optimizer(_kinds(params))
    keeps = any(isinstance(part, nn.BatchNorm1d) for part in module.modules())
    del module

    def loss_fn(params: Any, rest: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
        after = [rest]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not keeps:
                return model.apply(params | rest, *args, **kwargs)
            out, after[0] = model.apply_and_update(params, rest, *args, **kwargs)
            return out

        return case.loss(call, tokens), after[0]

    def step(params: Any, state: Any, rest: Any, tokens: torch.Tensor) -> Any:
        (loss, rest), grads = dbuf.value_and_grad(loss_fn, has_aux=True)(params, rest, tokens)
        grads = dbuf.redistribute(grads, placements)
        updates, state = optim.update(grads, state, params)
        return dbuf.optim.apply_updates(params, updates), state, rest, dbuf.pmean(loss, mesh), grads

    run = dbuf.jit(step, donate_argnums=(0, 1, 2)) if compiled else step
    state = optim.init(params)
    out: dict[str, Any] = {"losses": [], "groups": list(model.groups), "trained": list(params)}
    for i in range(steps):
        tokens = batch(case, i)
        mine = tokens if case.same_batch else models.share(tokens, torch.distributed.get_rank(), mesh.size())
        gathers = models.Gathers()  # no compiled program runs inside a dispatch mode
        with cheap_kernels.graphs_alone() if compiled else gathers:
            params, state, rest, loss, grads = run(params, state, rest, mine)
        if i == 0:
            out["gathers"] = len(gathers.made)
            out["grads"] = {name: list(tree.leaves(models.whole(g))) for name, g in grads.items()}
        out["losses"].append(loss)
    out["state"] = model.state_dict(params | rest)
    if isinstance(run, dbuf.Jitted):
        out["report"] = run.inspect(params, state, rest, mine)
    return out
