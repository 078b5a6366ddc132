"""Train a byte-level GPT on real text: sharded over all processes, each step one compiled program.

    torchrun --standalone --nproc-per-node=2 examples/train_lm.py      # any number of processes
    python examples/train_lm.py --data my_text.txt                     # or alone, on your own text

The text is the Python standard library's own sources unless `--data` names a file. The model is a set of
pure functions of a dict of tensors and knows nothing of dbuf. The weights of each block are one flat buffer,
of which a process holds its share; `gathered` puts them together for as long as the block runs, forward and
backward. `--strategy` says what is shared out: ZeRO-3 unless told otherwise. The last line printed is one JSON object.

Shapes: b batch, t context, w width, h heads, d = w / h, v = 256 byte values.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _report import Progress, fail, plot_losses, print_sample, run_until_interrupted

import dbuf
from dbuf.train import Strategy, init, make_train_step

STEPS, BATCH, CONTEXT = 600, 8, 128  # BATCH windows a step, over all processes together
WIDTH, LAYERS, HEADS = 192, 4, 4
LEARNING_RATE, WARMUP, B2, WEIGHT_DECAY = 1e-3, 0.1, 0.95, 0.1  # WARMUP is a fraction of STEPS
EVALUATIONS, EVALUATION_WINDOWS = 12, 64
HELDOUT = 0.05  # the last part of the text, never trained on
SAMPLE_BYTES, TEMPERATURE = 400, 0.8
MAX_TEXT_BYTES = 10_000_000
SKIP = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "pydoc_data", "encodings"}

OPTIMIZERS = ("adamw", "adamw8bit", "lion", "muon", "shampoo")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")

Tensors = dict[str, torch.Tensor]
Turn = tuple[torch.Tensor, torch.Tensor]


# The model: pure functions, the first argument of each a dict of tensors.


def embed(p: Tensors, x_bt: torch.Tensor) -> torch.Tensor:
    return F.embedding(x_bt, p["bytes"])


def block(p: Tensors, h_btw: torch.Tensor, turn: Turn) -> torch.Tensor:
    head_dim = 2 * turn[0].shape[-1]
    qkv = F.linear(normed(h_btw, p["attention_norm"]), p["qkv"]).chunk(3, dim=-1)
    q_bhtd, k_bhtd, v_bhtd = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in qkv)
    q_bhtd, k_bhtd = rotate(q_bhtd, turn), rotate(k_bhtd, turn)
    a_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, is_causal=True)
    h_btw = h_btw + F.linear(a_bhtd.transpose(1, 2).flatten(2), p["attention_out"])
    return h_btw + F.linear(F.gelu(F.linear(normed(h_btw, p["mlp_norm"]), p["mlp_up"])), p["mlp_down"])


def head(p: Tensors, h_btw: torch.Tensor) -> torch.Tensor:
    return F.linear(normed(h_btw, p["norm"]), p["logits"]).float()


def normed(h_btw: torch.Tensor, scale_w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(h_btw, scale_w.shape, scale_w)


def turns(context: int, head_dim: int, like: torch.Tensor) -> Turn:
    """Cosine and sine of each position's angles, (t, d / 2): rotary embedding, https://arxiv.org/abs/2104.09864."""
    speed = 10_000 ** (-torch.arange(0, head_dim, 2, device=like.device) / head_dim)
    angle = torch.arange(context, device=like.device)[:, None] * speed
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x_bhtd: torch.Tensor, turn: Turn) -> torch.Tensor:
    (a, b), (cos, sin) = x_bhtd.chunk(2, dim=-1), turn
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def as_it_is(fn: Callable) -> Callable:
    return fn


def forward(params: Any, x_bt: torch.Tensor, head_dim: int, use: Callable = as_it_is) -> torch.Tensor:
    """Bytes to logits (b, t, v); on sharded buffers `use` is `dbuf.gathered`, on plain tensors nothing."""
    h_btw = use(embed)(params["embed"], x_bt)
    turn = turns(x_bt.shape[1], head_dim, like=h_btw)
    for name in params:
        if name.startswith("block"):
            h_btw = use(block)(params[name], h_btw, turn)
    return use(head)(params["head"], h_btw)


def weights(width: int, layers: int) -> Iterator[tuple[str, Tensors]]:
    """Each group's first weights, one group at a time, so that no process ever holds them all."""

    def matrix(out: int, fan_in: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(out, fan_in) * (scale / math.sqrt(fan_in))

    yield "embed", {"bytes": torch.randn(256, width) * 0.02}
    for i in range(layers):
        yield (
            f"block{i}",
            {
                "attention_norm": torch.ones(width),
                "qkv": matrix(3 * width, width),
                "attention_out": matrix(width, width, 1 / math.sqrt(2 * layers)),
                "mlp_norm": torch.ones(width),
                "mlp_up": matrix(4 * width, width),
                "mlp_down": matrix(width, 4 * width, 1 / math.sqrt(2 * layers)),
            },
        )
    yield "head", {"norm": torch.ones(width), "logits": torch.randn(256, width) * 0.02}


# The text.


def read_text(file: Path | None) -> bytes:
    """The file's bytes, or the standard library's sources in sorted order; up to MAX_TEXT_BYTES of either."""
    if file is not None:
        try:
            with file.open("rb") as stream:
                text = stream.read(MAX_TEXT_BYTES)
        except OSError as error:
            fail(f"cannot read {file}: {error.strerror}")
        return text or fail(f"{file} is empty")
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [f for f in library.rglob("*.py") if not SKIP.intersection(f.relative_to(library).parts)]
    text = b"\n".join(f.read_bytes() for f in sorted(sources))
    return text[:MAX_TEXT_BYTES] or fail(f"no Python sources under {library}: name a text with --data FILE")


class Text:
    """This process's share of every batch. The whole batch depends on seed and step, not on the processes."""

    def __init__(self, args: argparse.Namespace, text: bytes, rank: int, ranks: int, device: str) -> None:
        heldout = max(int(len(text) * HELDOUT), args.context + 1)
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.train, self.heldout = whole[:-heldout], whole[-heldout:]
        self.rank, self.ranks, self.device = rank, ranks, device
        self.seed, self.context = args.seed, args.context
        equal = ranks * args.microbatches
        self.batch = math.ceil(args.batch / equal) * equal  # equal shares, and pieces of them

    def batch_at(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - self.context, (self.batch,), generator=generator)
        return self._share(self.train, starts)

    def heldout_batches(self) -> list[torch.Tensor]:
        """The same evenly spaced windows every time, in pieces of a batch's size."""
        number = math.ceil(EVALUATION_WINDOWS / self.ranks) * self.ranks
        starts = torch.linspace(0, len(self.heldout) - self.context - 1, number).long()
        return list(self._share(self.heldout, starts).split(self.batch // self.ranks))

    def _share(self, data: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Runs of context + 1 bytes: all but the last are a model's input, all but the first its targets."""
        mine = starts.chunk(self.ranks)[self.rank]
        return data[mine[:, None] + torch.arange(self.context + 1)].long().to(self.device)


# Training.


def learning_rate(peak: float, steps: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Linear warm-up, then a cosine down to zero, as a function of a 0-d step tensor: no step recompiles."""
    warmup = max(int(steps * WARMUP), 1)

    def at(step: torch.Tensor) -> torch.Tensor:
        return peak * torch.minimum((step + 1) / warmup, 0.5 + 0.5 * torch.cos(math.pi * step / steps))

    return at


def make_optimizer(name: str, rate: dbuf.optim.LearningRate) -> dbuf.optim.GradientTransformation:
    """One for all, or one for the matrices of the blocks and AdamW for embedding, head and norms."""
    optim, adamw = dbuf.optim, dbuf.optim.adamw(rate, b2=B2, weight_decay=WEIGHT_DECAY)
    if name == "adamw":
        return adamw
    if name == "adamw8bit":
        return optim.adamw8bit(rate, b2=B2, weight_decay=WEIGHT_DECAY)
    if name == "lion":
        return optim.lion(rate, weight_decay=WEIGHT_DECAY)
    if name == "muon":  # its updates as large as AdamW's, so that one learning rate does for both
        matrices = optim.muon(rate, weight_decay=WEIGHT_DECAY, scale="match_rms_adamw")
    else:
        matrices = optim.shampoo(rate, weight_decay=WEIGHT_DECAY)
    return optim.partition(
        {name: matrices, "adamw": adamw},
        lambda path, shape: name if "block" in path and optim.is_matrix(path, shape) else "adamw",
    )


def make_loss(head_dim: int) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def loss_fn(params: Any, window_bt: torch.Tensor) -> torch.Tensor:
        logits_btv = forward(params, window_bt[:, :-1], head_dim, dbuf.gathered)
        return F.cross_entropy(logits_btv.flatten(0, 1), window_bt[:, 1:].flatten())

    return loss_fn


def make_mesh(strategy: str) -> Any:
    """One axis, or two for a strategy that treats them differently: two replicas of the weights where that works."""
    if strategy not in ("hsdp", "hfsdp"):
        return dbuf.init_mesh(("dp",))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return dbuf.init_mesh(("outer", "inner"), (2 if ranks % 2 == 0 else 1, -1))


@dataclass
class Run:
    """What a run leaves behind; `losses` are of training batches, `heldout` pairs a step and a loss."""

    strategy: str
    ranks: int
    parameters: int
    batch_tokens: int
    losses: list[float] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def tokens_per_s(self, last: int = 0) -> float:
        """The usual speed, of the last steps or of all: neither compilation nor one slow step counts."""
        return self.batch_tokens / statistics.median(self.step_s[-last:])


def train(args: argparse.Namespace, text: bytes) -> None:
    started_s = time.perf_counter()
    mesh, strategy, dtype = make_mesh(args.strategy), getattr(Strategy, args.strategy)(), getattr(torch, args.dtype)
    rank, ranks, device = dist.get_rank(), mesh.size(), mesh.device_type
    data = Text(args, text, rank, ranks, device)

    torch.manual_seed(args.seed)  # every process draws the same weights, and keeps its share of them
    params = {
        name: dbuf.shard(
            {key: tensor.to(device) for key, tensor in tensors.items()},
            mesh,
            strategy.optim,
            dp_size=strategy.dp_size(mesh),
        )
        for name, tensors in weights(args.width, args.layers)
    }
    optimizer = make_optimizer(args.optimizer, learning_rate(args.lr, args.steps))
    state = init(params, optimizer, strategy, compute_dtype=dtype)
    loss_fn = make_loss(args.width // args.heads)
    step: Any = make_train_step(
        loss_fn,
        optimizer,
        strategy,
        microbatches=args.microbatches,
        compute_dtype=dtype,
        clip_norm=args.clip,
    )
    if not args.eager:
        step = dbuf.jit(step, donate_argnums=0)  # the new state is written over the old one

    size = sum(math.prod(shape) for buf in params.values() for shape in buf.layout.tensor_shapes)
    run, progress = Run(args.strategy, ranks, size, data.batch * args.context), Progress(args.steps, show=rank == 0)
    progress.say(f"{size / 1e6:.2f}M parameters, {ranks} ranks, {data.batch} x {args.context} bytes a step")
    heldout_batches = data.heldout_batches()
    evaluate_at = {round(i * args.steps / EVALUATIONS) for i in range(EVALUATIONS + 1)}
    for i in range(args.steps + 1):
        if i in evaluate_at:
            with torch.no_grad():  # the same functions, uncompiled
                losses = torch.stack([loss_fn(state.weights, batch) for batch in heldout_batches])
            run.heldout.append((i, dbuf.pmean(losses.mean(), mesh).item()))
            progress.say(f"step {i}: held-out loss {run.heldout[-1][1]:.3f} nats per byte")
        if i < args.steps:
            batch, start_s = data.batch_at(i), time.perf_counter()
            state, metrics = step(state, batch)
            run.losses.append(metrics["loss"].item())
            run.step_s.append(time.perf_counter() - start_s)
            progress.update(run.losses[-1], run.tokens_per_s(last=20))
    progress.close()
    train_s = time.perf_counter() - started_s
    seen = None if args.eager else dbuf.inspect(step, state, data.batch_at(0))

    whole = {name: dbuf.unpack(dbuf.allgather(buf)) for name, buf in state.params.items()}
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        prompt = data.heldout[: args.context // 2]
        print_sample(prompt, sample(args, whole, prompt.to(device)))
        title = f"Byte GPT, {size / 1e6:.2f}M parameters, {args.strategy} over {ranks} ranks"
        print(plot_losses(args.out / "train_lm.png", run.losses, run.heldout, title))
        print(json.dumps({**summary(run, seen), "train_s": round(train_s, 1)}), flush=True)


def summary(run: Run, seen: Any) -> dict[str, Any]:
    """The numbers of a run; those that are read from the compiled step are None if there is none."""
    return {
        "heldout_nats_per_byte": round(run.heldout[-1][1], 4),
        "first_heldout": round(run.heldout[0][1], 4),
        "steps": len(run.losses),
        "tokens_per_s": round(run.tokens_per_s()),
        "collectives": seen and seen.collectives,
        "scalar_collectives": seen and seen.scalars,
        "graph_breaks": seen and seen.graph_breaks,
        "compiles": seen and seen.compiles,
        "strategy": run.strategy,
        "ranks": run.ranks,
        "parameters": run.parameters,
        "first_step_s": round(run.step_s[0], 1),
    }


@torch.no_grad()
def sample(args: argparse.Namespace, params: dict[str, Tensors], prompt: torch.Tensor) -> torch.Tensor:
    """Continue a prompt, on whole weights: the model's functions work on plain tensors as they are."""
    generator = torch.Generator(prompt.device).manual_seed(args.seed)
    text = prompt.long()
    for _ in range(SAMPLE_BYTES):
        logits_v = forward(params, text[None, -args.context :], args.width // args.heads)[0, -1]
        chances_v = (logits_v / TEMPERATURE).softmax(-1)
        text = torch.cat([text, torch.multinomial(chances_v, 1, generator=generator)])
    return text[len(prompt) :]


# The command line.


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.error = fail  # type: ignore[assignment]  # one line from one process, not the usage from each
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help="text to train on; if none, the standard library's sources")
    add("--steps", type=int, default=STEPS, help="optimizer steps")
    add("--batch", type=int, default=BATCH, help="windows a step, over all processes")
    add("--context", type=int, default=CONTEXT, help="bytes a window")
    add("--width", type=int, default=WIDTH, help="size of a position's vector")
    add("--layers", type=int, default=LAYERS, help="blocks")
    add("--heads", type=int, default=HEADS, help="attention heads")
    add("--lr", type=float, default=LEARNING_RATE, help="peak learning rate")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="muon and shampoo: of the blocks' matrices")
    add("--strategy", choices=STRATEGIES, default="zero3", help="where weights, gradients and optimizer state live")
    add("--microbatches", type=int, default=1, help="pieces that a batch is cut into, one after the other")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of compute and gathers")
    add("--clip", type=float, metavar="NORM", help="scale gradients down to this global norm; if none, do not")
    add("--seed", type=int, default=0, help="of weights, batches and the sample")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="for the picture")
    add("--eager", action="store_true", help="do not compile the step")
    args = parser.parse_args()
    for name in ("steps", "batch", "context", "width", "layers", "heads", "microbatches"):
        if getattr(args, name) < 1:
            fail(f"--{name} is {getattr(args, name)}, and must be at least 1")
    if args.width % (2 * args.heads):
        fail(f"--width is {args.width}, and must be a multiple of twice --heads, {2 * args.heads}")
    return args


def main() -> None:
    args = arguments()
    text = read_text(args.data)
    need = (args.batch + 1) * (args.context + 1)
    if len(text) < need:
        name = args.data or "the standard library"
        fail(f"{name} has {len(text):,} bytes, and one batch and one held-out window take {need:,}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"cannot write to {args.out}: {error.strerror}")
    train(args, text)


if __name__ == "__main__":
    run_until_interrupted(main)
