"""Every optimizer of `dbuf.optim`, a dense single-process reference of each, and the tensors that they are tried on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import cheap_kernels  # noqa: F401
import dbuf
from dbuf import optim
from dbuf.optim import GradientTransformation

RATE = 0.05
# At 3 and 4 ranks rows do not divide. Two matrices of one shape in one buffer and one in the other are one batch.
SHAPES = {
    "first": {"up": (6, 4), "down": (4, 6), "bias": (6,), "same": (6, 4), "experts": (2, 3, 4)},
    "last": {"up": (6, 4), "wide": (2, 9), "norm": (8,), "empty": (0, 3)},
    "odd": {"gain": (), "bias": (7,)},  # blocks of two rows do not divide it
}
MATRICES = {name: {k: s for k, s in SHAPES[name].items() if len(s) >= 2} for name in ("first", "last")}
Tensors = dict[str, dict[str, torch.Tensor]]
Step = Callable[[torch.Tensor, torch.Tensor, dict[str, Any], int, float], torch.Tensor]


def tensors(shapes: dict[str, dict[str, tuple[int, ...]]], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {n: {k: torch.randn(s, generator=generator) for k, s in group.items()} for n, group in shapes.items()}


class Case(NamedTuple):
    """An optimizer, what it takes, and `reference(param, grad, state, step, rate) -> param` of one tensor."""

    make: Callable[[Any], GradientTransformation]
    reference: Step
    shapes: dict[str, dict[str, tuple[int, ...]]] = SHAPES
    elementwise: bool = True


def torchs(make: Callable[..., torch.optim.Optimizer]) -> Step:
    """A step of an optimizer of torch, one for each tensor."""

    def step(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], step: int, rate: float) -> torch.Tensor:
        if not state:
            state["param"] = param.clone()
            state["optimizer"] = make([state["param"]])
        state["param"].grad = grad
        state["optimizer"].param_groups[0]["lr"] = rate
        state["optimizer"].step()
        return state["param"].clone()

    return step


def lion(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], step: int, rate: float) -> torch.Tensor:
    mean = state.get("mean", torch.zeros_like(param))
    state["mean"] = 0.99 * mean + 0.01 * grad
    return param - rate * ((0.9 * mean + 0.1 * grad).sign() + 0.1 * param)


def of_each_matrix(step: Step) -> Step:
    """The step on each matrix of a stack."""

    def each(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], n: int, rate: float) -> torch.Tensor:
        if param.ndim == 2:
            return step(param, grad, state, n, rate)
        states = state.setdefault("stack", [{} for _ in param])
        return torch.stack([each(p, g, s, n, rate) for p, g, s in zip(param, grad, states, strict=True)])

    return each


def split(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], step: int, rate: float) -> torch.Tensor:
    rule = muon if param.ndim >= 2 else ADAMW
    return rule(param, grad, state, step, rate)


def whitened(grad: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A matrix optimizer of a user: gradients over the root of the mean of their squares by row and by column."""
    rows = 0.9 * state["rows"] + 0.1 * grad.square().mean(-1)
    columns = 0.9 * state["columns"] + 0.1 * grad.square().mean(-2)
    scale = (rows.unsqueeze(-1) * columns.unsqueeze(-2)).sqrt() + 1e-3
    return grad / scale, {"rows": rows, "columns": columns}


def by_owner(learning_rate: Any) -> GradientTransformation:
    def init(param: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "rows": param.new_zeros(param.shape[:-1]),
            "columns": param.new_zeros(param.shape[:-2] + param.shape[-1:]),
        }

    return optim.chain(
        optim.by_owner(init, whitened, select=optim.is_matrix), optim.scale_by_learning_rate(learning_rate)
    )


def by_owner_reference(
    param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], step: int, rate: float
) -> torch.Tensor:
    if param.ndim < 2:
        return param - rate * grad
    state.setdefault("rows", torch.zeros(param.shape[:-1]))
    state.setdefault("columns", torch.zeros(param.shape[:-2] + param.shape[-1:]))
    direction, new = whitened(grad, state)
    state.update(new)
    return param - rate * direction


ADAMW = torchs(lambda p: torch.optim.AdamW(p, weight_decay=0.1))


@of_each_matrix
def muon(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], step: int, rate: float) -> torch.Tensor:
    """The rule of `torch.optim.Muon`, which itself computes in bf16 alone, in double precision."""
    mean = state["mean"] = 0.95 * state.get("mean", torch.zeros_like(param)) + 0.05 * grad
    x = (0.95 * mean + 0.05 * grad).double()
    x = x / max(float(x.norm()), 1e-7)
    for _ in range(5):
        gram = x.T @ x
        x = x @ (3.4445 * torch.eye(x.shape[1]) - 4.7750 * gram + 2.0315 * gram @ gram)
    return (1 - 0.1 * rate) * param - rate * 0.2 * math.sqrt(max(param.shape)) * x.float()


@of_each_matrix
def shampoo(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], step: int, rate: float) -> torch.Tensor:
    """In double precision, the power of a matrix by its singular values."""
    g, (rows, columns) = grad.double(), param.shape
    old = state or {"left": torch.zeros(rows, rows), "right": torch.zeros(columns, columns), "square": 0.0, "mean": 0.0}
    state.update(
        left=0.99 * old["left"] + 0.01 * g @ g.T,
        right=0.99 * old["right"] + 0.01 * g.T @ g,
        square=0.99 * old["square"] + 0.01 * g * g,
    )
    correction = 1 - 0.99 ** (step + 1)

    def root(x: torch.Tensor) -> torch.Tensor:
        x = x / correction
        u, s, _ = torch.linalg.svd(x + 1e-6 * x.trace() * torch.eye(len(x)))
        return u @ torch.diag(s**-0.25) @ u.T

    direction = root(state["left"]) @ g @ root(state["right"])
    direction *= (g / ((state["square"] / correction).sqrt() + 1e-6)).norm() / direction.norm()
    state["mean"] = 0.9 * old["mean"] + 0.1 * direction
    return param - rate * state["mean"].float()


def masked(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], step: int, rate: float) -> torch.Tensor:
    decay = 0.1 if param.ndim >= 2 else 0.0
    return torchs(lambda p: torch.optim.AdamW(p, weight_decay=decay))(param, grad, state, step, rate)


CASES = {
    "sgd": Case(lambda rate: optim.sgd(rate), torchs(lambda p: torch.optim.SGD(p))),
    "momentum": Case(lambda rate: optim.sgd(rate, 0.9), torchs(lambda p: torch.optim.SGD(p, momentum=0.9))),
    "nesterov": Case(
        lambda rate: optim.sgd(rate, 0.9, nesterov=True),
        torchs(lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True)),
    ),
    "adamw": Case(lambda rate: optim.adamw(rate, weight_decay=0.1), ADAMW),
    "amsgrad": Case(
        lambda rate: optim.adamw(rate, weight_decay=0.1, amsgrad=True),
        torchs(lambda p: torch.optim.AdamW(p, weight_decay=0.1, amsgrad=True)),
    ),
    "masked": Case(lambda rate: optim.adamw(rate, weight_decay=0.1, mask=optim.is_matrix), masked),
    "lion": Case(lambda rate: optim.lion(rate, weight_decay=0.1), lion),
    "muon": Case(
        lambda rate: optim.muon(rate, scale="match_rms_adamw", dtype=torch.float32), muon, MATRICES, elementwise=False
    ),
    "partition": Case(
        lambda rate: optim.partition(
            {
                "muon": optim.muon(rate, scale="match_rms_adamw", dtype=torch.float32),
                "adamw": optim.adamw(rate, weight_decay=0.1),
            },
            lambda path, shape: "muon" if optim.is_matrix(path, shape) else "adamw",
        ),
        split,
        elementwise=False,
    ),
    "shampoo": Case(lambda rate: optim.shampoo(rate), shampoo, MATRICES, elementwise=False),
    "by_owner": Case(by_owner, by_owner_reference, elementwise=False),
}


def rate_at(step: Any) -> Any:
    """A schedule, for tensors and for numbers."""
    return RATE / (1 + step)


def reference(name: str, steps: int) -> Tensors:
    """The parameters after some steps of one process, tensor by tensor."""
    case = CASES[name]
    params = tensors(case.shapes, 0)
    states: dict[Any, dict[str, Any]] = {}
    for step in range(steps):
        grads = tensors(case.shapes, 100 + step)
        params = {
            n: {
                k: case.reference(p, grads[n][k], states.setdefault((n, k), {}), step, float(rate_at(step)))
                for k, p in group.items()
            }
            for n, group in params.items()
        }
    return params


def make_step(name: str) -> Callable[..., Any]:
    optimizer = CASES[name].make(rate_at)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def train(name: str, steps: int, shard: Callable[[Tensors], Any], step: Callable[..., Any]) -> tuple[Any, Any]:
    """Parameters and state after some steps."""
    case = CASES[name]
    params = shard(tensors(case.shapes, 0))
    state = case.make(rate_at).init(params)
    for i in range(steps):
        params, state = step(params, state, shard(tensors(case.shapes, 100 + i)))
    return params, state


def whole(params: Any) -> Tensors:
    return {name: dbuf.unpack(dbuf.allgather(buf)) for name, buf in params.items()}
