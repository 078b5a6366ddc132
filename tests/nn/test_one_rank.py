"""In one process: a module is left as it was, what does not fit is refused, and state dicts go both ways."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cheap_kernels  # noqa: F401
import dbuf
import modules
from dbuf import RowAtomic, TreeError, testing
from dbuf.nn import Functional, functionalize
from modules import Block, Language

Split = tuple[nn.Module, Functional, Any, Any]


def split(module: nn.Module, groups: Any = None) -> Split:
    model = functionalize(module, groups)
    return (module, model, *model.shard(module, dbuf.init_mesh(), RowAtomic()))


TOKENS = torch.arange(10).reshape(2, 5)


class Wrapped(nn.Module):
    """A module whose result may be a tuple, between an input and a linear layer."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner = inner
        self.times = times
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(*[x] * self.times)
        return self.out(y[0] if isinstance(y, tuple) else y)


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)


TORCH: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lstm": lambda: (nn.LSTM(8, 8, batch_first=True), nn.LSTM),
    "gru in the root": lambda: (nn.GRU(8, 8, batch_first=True), None),
    "attention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), nn.MultiheadAttention),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear),
    "encoder": lambda: (nn.TransformerEncoder(_encoder_layer(), 2), nn.TransformerEncoderLayer),  # type: ignore[arg-type]
    "fast path": lambda: (_encoder_layer().eval(), nn.TransformerEncoderLayer),
    "transformer": lambda: (
        nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True),
        (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    ),
    "convolution": lambda: (nn.Sequential(nn.Conv1d(5, 4, 1), nn.GroupNorm(2, 4), nn.ReLU()), nn.Conv1d),
}


@pytest.mark.parametrize("name", TORCH)
def test_modules_of_torch(name: str) -> None:
    """Code that looks at its own weights in ways of its own: equal but for rounding, with equal gradients."""
    torch.manual_seed(0)
    inner, groups = TORCH[name]()
    net = Wrapped(inner, {"attention": 3, "transformer": 2}.get(name, 1))
    _, model, params, rest = split(net, groups)
    x = torch.randn(3, 5, 8)
    weight = torch.randn(net(x).shape)
    testing.assert_close(model.apply(params | rest, x), net(x).detach())
    (net(x) * weight).sum().backward()
    grads = dbuf.grad(lambda params: (model.apply(params | rest, x) * weight).sum())(params)
    named = dict(net.named_parameters())
    for group, paths in model.groups.items():
        found = dbuf.tree.leaves(dbuf.unpack(grads[group]))
        testing.assert_close(found, [named[path].grad for path in paths], rtol=1e-5)
    net.load_state_dict(model.state_dict(params | rest))


def test_the_module_is_left_as_it_was() -> None:
    net, model, params, _ = split(Language(), Block)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    kinds = [type(part) for part in net.modules()]
    attributes = [set(vars(part)) for part in net.modules()]
    dbuf.grad(lambda params: model.apply(params, TOKENS).square().sum())(params)
    testing.assert_bitwise(dict(net.state_dict()), before)
    assert kinds == [type(part) for part in net.modules()]
    assert attributes == [set(vars(part)) for part in net.modules()]
    assert all(parameter.grad is None for parameter in net.parameters())
    testing.assert_bitwise(model.apply(params, TOKENS), net(TOKENS))


def test_the_code_holds_no_parameters_also_after_an_error() -> None:
    _, model, params, _ = split(Language(), Block)
    expected = model.apply(params, TOKENS)
    with pytest.raises(IndexError):
        model.apply(params, TOKENS + 100)
    assert all(parameter.is_meta for parameter in model.module.parameters())
    testing.assert_bitwise(model.apply(params, TOKENS), expected)


def test_it_may_run_inside_itself_and_in_two_threads() -> None:
    _, model, params, _ = split(Language(), Block)
    other = dbuf.tree.map(lambda x: -x, params)
    expected = [model.apply(p, TOKENS) for p in (params, other)]
    inner: list[torch.Tensor] = []

    def again(*_: Any) -> None:
        if not inner:
            inner.append(expected[0])  # once
            inner.append(model.apply(other, TOKENS))

    handle = model.module.blocks[0].register_forward_hook(again)  # type: ignore[index, union-attr]
    testing.assert_bitwise(model.apply(params, TOKENS), expected[0])
    testing.assert_bitwise(inner[1], expected[1])
    handle.remove()

    results: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def loop(i: int) -> None:
        for _ in range(20):
            results[i].append(model.apply((params, other)[i], TOKENS))

    threads = [threading.Thread(target=loop, args=(i,)) for i in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, found in results.items():
        assert len(found) == 20 and all(torch.equal(out, expected[i]) for out in found)


def test_state_dicts_go_out_and_in() -> None:
    """Names, order, ties and buffers are the module's own; full, local, on one rank; into a module, and back again."""
    torch.manual_seed(1)
    net, model, params, rest = split(modules.everything(), (Block, "embed"))
    _, rest = model.apply_and_update(params, rest, TOKENS)
    other = modules.everything()
    other.load_state_dict(model.state_dict(params | rest))
    net(TOKENS)  # its statistics move as those in `rest` did
    testing.assert_bitwise(other.eval()(TOKENS), net.eval()(TOKENS))
    for found in (
        model.state_dict(params | rest),
        model.state_dict(params | rest, rank=0),
        model.local_state_dict(params | rest),
    ):
        testing.assert_bitwise(found, dict(net.state_dict()))
    assert model.state_dict(params | rest, rank=1) == {} or not torch.distributed.is_initialized()
    again, more = model.shard(model.state_dict(params | rest), dbuf.init_mesh(), RowAtomic())
    testing.assert_bitwise(again, params)
    testing.assert_bitwise(more, rest)
    few = {name: value for name, value in net.state_dict().items() if name != "head.weight"}  # as safetensors saves
    testing.assert_bitwise(model.shard(few, dbuf.init_mesh(), RowAtomic())[0], params)


def test_state_dicts_are_copies() -> None:
    _, model, params, rest = split(modules.statistics())
    before = {name: value.clone() for name, value in model.state_dict(params | rest).items()}
    for found in (model.state_dict(params | rest), model.local_state_dict(params | rest)):
        for value in found.values():
            value.zero_()
    testing.assert_bitwise(model.state_dict(params | rest), before)


def test_statistics_are_values() -> None:
    net, model, params, rest = split(modules.statistics(), Block)
    kept = dbuf.tree.map(torch.clone, rest)
    out, after = model.apply_and_update(params, rest, TOKENS)
    testing.assert_bitwise(rest, kept)
    testing.assert_bitwise(out, net(TOKENS))
    testing.assert_bitwise(after, {name: dict(net.named_buffers())[name] for name in rest})
    model.module.eval()
    testing.assert_bitwise(model.apply(params | after, TOKENS), net.eval()(TOKENS))
    testing.assert_bitwise(model.apply(params, TOKENS), model.apply(params | kept, TOKENS))  # what they were


class Writes(nn.Module):
    """A forward that changes what is not its to change, as `how` says."""

    def __init__(self, how: Callable[[Writes], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x * self.weight
        self.how(self)
        return out


def _write(module: Writes) -> None:
    with torch.no_grad():
        module.weight.mul_(2)


def _replace(module: Writes) -> None:
    module.weight = nn.Parameter(torch.zeros(3))


def _count(module: Writes) -> None:
    module.count += 1  # type: ignore[operator]


def _count_anew(module: Writes) -> None:
    module.count = module.count + 1  # type: ignore[operator, assignment]


WRITES = {
    "in place": (_write, "changes parameters.*'root': written in place.*register_buffer"),
    "replaced": (_replace, "changes parameters.*weight: replaced"),
    "buffer": (_count, "writes buffers.*count.*apply_and_update"),
    "buffer replaced": (_count_anew, "writes buffers.*count.*apply_and_update"),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", WRITES)
def test_a_forward_that_writes_is_refused(case: str, compiled: bool) -> None:
    how, words = WRITES[case]
    _, model, params, _ = split(Writes(how))
    run = dbuf.jit(model.apply) if compiled else model.apply
    with pytest.raises(TreeError, match=f"(?s){words}"):
        run(params, torch.ones(3))
    assert all(parameter.is_meta for parameter in model.module.parameters())
    if "buffer" in case:
        _, rest = model.apply_and_update(params, {"count": torch.zeros(())}, torch.ones(3))
        assert rest["count"] == 1


def test_norms_are_refused_before_they_write() -> None:
    _, model, params, rest = split(modules.statistics(), Block)
    kept = dbuf.tree.map(torch.clone, rest)
    with pytest.raises(TreeError, match=r"(?s)writes buffers.*norm.running_mean.*eval"):
        model.apply(params | rest, TOKENS)
    testing.assert_bitwise(rest, kept)


class Outside(nn.Module):
    """Reads a weight of a child without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.inner.weight)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_weight_read_outside_of_its_group_is_refused(compiled: bool) -> None:
    _, model, params, _ = split(Outside(), "inner")
    run = dbuf.jit(model.apply) if compiled else model.apply
    with pytest.raises(
        TreeError, match=r"(?s)read while its group is not gathered.*inner.weight in linear.*leave that module out"
    ):
        run(params, torch.ones(2, 3))


class Checkpointed(Language):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=False)
        return self.head(self.norm(h))


def test_groups_that_run_outside_of_apply_are_refused() -> None:
    """The code called by itself, and a model that checkpoints its blocks: the backward runs them again, alone."""
    words = r"(?s)runs outside of apply.*'blocks.1'.*remat=True"
    _, model, params, _ = split(Checkpointed(), Block)
    with pytest.raises(TreeError, match=words):
        model.module(TOKENS)
    whole = dbuf.allgather(params)  # a gathered group has saved-tensor hooks of its own, inside the checkpoint's
    with pytest.raises(TreeError, match=words):
        dbuf.grad(lambda params: model.apply(params, TOKENS).sum())(whole)


def test_buffers_that_do_not_fit_are_refused() -> None:
    _, model, params, rest = split(modules.frozen(), Block)
    mesh = dbuf.init_mesh()
    wrong = dbuf.shard({"a": torch.ones(2)}, mesh, RowAtomic())
    tensors = model.tensors(modules.frozen())["root"]
    longer = dbuf.shard({**tensors, "norm.bias": torch.ones(3)}, mesh, RowAtomic())
    for values, words in (
        (params, r"'root \(frozen\)': missing.*params \| rest"),
        (params | rest | {"more": wrong}, "'more': no such group"),
        (params | rest | {"root": wrong}, r"'root': tensors \['a'\]; without \['norm.weight'\]"),
        (params | rest | {"root": longer}, r"'norm.bias' of shape \(3,\), not \(8,\)"),
        (params | rest | {"root": torch.ones(3)}, "'root': Tensor, not a DBuffer"),
    ):
        with pytest.raises(TreeError, match=f"(?s)dbuf.nn: apply.*{words}"):
            model.apply(values, TOKENS)
    _, model, params, rest = split(modules.statistics())
    with pytest.raises(TreeError, match=r"(?s)norm.running_mean': missing.*with both"):
        model.apply_and_update(params, {}, TOKENS)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    net = Language()
    net.lock = threading.Lock()
    with pytest.raises(TreeError, match=r"(?s)cannot be copied.*TypeError: cannot pickle"):
        functionalize(net)


def test_sources_that_do_not_fit_are_refused() -> None:
    net, model, _, _ = split(Language(), Block)
    state = net.state_dict()
    with torch.device("meta"):
        empty = Language()
    for source, words in (
        ({name: value for name, value in state.items() if name != "norm.bias"}, "norm.bias: missing"),
        ({**state, "norm.bias": torch.ones(3)}, r"norm.bias: shape \(3,\), not \(8,\)"),
        ({**state, "more": torch.ones(3)}, "more: no such parameter"),
        (empty, "norm.bias: on the meta device.*model.init"),
    ):
        with pytest.raises(TreeError, match=f"(?s)dbuf.nn: shard.*{words}"):
            model.shard(source, dbuf.init_mesh(), RowAtomic())


def test_the_ready_made_step_trains_it() -> None:
    from dbuf.train import Strategy, init, make_train_step

    net, mesh, strategy = Language(), dbuf.init_mesh(), Strategy.zero3()
    model = functionalize(net, Block)
    params, _ = model.shard(net, mesh, strategy.optim, dp_size=strategy.dp_size(mesh))
    optimizer = dbuf.optim.sgd(0.1)
    step = make_train_step(
        lambda params, tokens: modules.language_loss(lambda x: model.apply(params, x), tokens), optimizer, strategy
    )
    state, metrics = step(init(params, optimizer, strategy), TOKENS)
    loss = modules.language_loss(net, TOKENS)
    testing.assert_close(metrics["loss"], loss.detach())
    loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    testing.assert_close(model.state_dict(state.params), dict(net.state_dict()))
