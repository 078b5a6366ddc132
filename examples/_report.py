"""What a training run shows: a progress line, a loss curve, and a clear line when it cannot go on."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

WIDTH = 78
BOX = {"facecolor": "white", "edgecolor": "tab:orange", "boxstyle": "round,pad=0.2"}


def fail(message: str, code: int = 2) -> NoReturn:
    """End this process with one line on stderr; under torchrun each comes here, and one a machine speaks."""
    if speaks():
        print(f"train_lm: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun ends all processes once one has ended: let the other speak first
    raise SystemExit(code)


def speaks() -> bool:
    """Whether this process is the one of its machine that prints errors."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


class Progress:
    """A bar if tqdm is installed, one rewritten line if not; silent unless `show`."""

    def __init__(self, total: int, show: bool) -> None:
        self.total, self.show, self.bar, self.done, self.last_s = total, show, None, 0, 0.0
        self.tty = sys.stderr.isatty()
        if show:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            # A log file gets a line now and then, a terminal a moving bar.
            self.bar = tqdm(total=total, unit="step", dynamic_ncols=True, mininterval=0.1 if self.tty else 15)

    def update(self, loss: float, tokens_per_s: float) -> None:
        """Move on by one step and show the training loss and the speed."""
        self.done += 1
        text = f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(1)
        elif self.show and (self.tty or time.monotonic() - self.last_s > 15 or self.done == self.total):
            self.last_s = time.monotonic()
            self._print(f"step {self.done}/{self.total}  {text}", end="" if self.tty else "\n")

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        elif self.show:
            self._print(text)

    def close(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self.bar is not None:
            self.bar.close()
        elif self.show and self.tty:
            print(file=sys.stderr)

    def _print(self, text: str, end: str = "\n") -> None:
        print(f"\r{text:<{WIDTH}}" if self.tty else text, end=end, file=sys.stderr, flush=True)


def print_sample(prompt: torch.Tensor, sample: torch.Tensor) -> None:
    """Print two byte tensors as text, one under the other."""
    for name, data in (("prompt: held-out text", prompt), ("sample", sample)):
        print(f"{f'--- {name} ':-<{WIDTH}}")
        print(bytes(data.tolist()).decode("utf-8", errors="replace"))
    print("-" * WIDTH)


def plot_losses(path: Path, train: Sequence[float], heldout: Sequence[tuple[int, float]], title: str) -> str:
    """Draw the two loss curves as a PNG; return a line that says where it is, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), constrained_layout=True)
    steps = range(1, len(train) + 1)
    axes.plot(steps, train, color="tab:blue", alpha=0.35, linewidth=1, label="training batch")
    axes.plot(*zip(*heldout, strict=True), color="tab:orange", marker="o", linewidth=2, label="held-out text")
    axes.axhline(math.log(256), color="gray", linestyle=":", linewidth=1, label="uniform guess, ln 256")
    step, loss = heldout[-1]
    axes.annotate(f"{loss:.2f}", (step, loss), textcoords="offset points", xytext=(0, 14), ha="center", bbox=BOX)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"loss curve: {path}"


def run_until_interrupted(main: Callable[[], None]) -> None:
    """Call `main`; on Ctrl-C end at once with one line and exit code 130.

    torchrun passes the signal on, so every process gets it, some of them twice and some inside a collective
    whose other side is gone already. Whatever error that raises there is the same interruption.
    """
    running, interrupted = True, False

    def on_interrupt(*_: object) -> None:
        nonlocal interrupted
        first, interrupted = not interrupted, True
        if first and running:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        main()
    except BaseException:
        running = False
        time.sleep(0.2)  # a signal that came during a collective is handled only now, after what the collective raised
        if not interrupted:
            raise
        if speaks():
            print("\ntrain_lm: interrupted, nothing saved", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # as in `fail`
        sys.stdout.flush()
        os._exit(130)  # not sys.exit: groups and compile workers would be torn down one by one, noisily
