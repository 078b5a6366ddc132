"""Optimizers as pairs of pure functions over pytrees of DBuffers, after optax."""

from dbuf.optim.adamw import adamw, adamw8bit
from dbuf.optim.base import GradientTransformation, LearningRate, apply_updates, chain
from dbuf.optim.by_owner import by_owner
from dbuf.optim.clip import clip_by_global_norm
from dbuf.optim.decay import add_decayed_weights
from dbuf.optim.lion import lion, scale_by_lion
from dbuf.optim.muon import muon, orthogonalize
from dbuf.optim.partition import partition
from dbuf.optim.paths import Rule, is_matrix
from dbuf.optim.quantized import Quantized, quantized
from dbuf.optim.scale import (
    LearningRateState,
    ScaleByAdamState,
    TraceState,
    ema,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    set_learning_rate,
    trace,
)
from dbuf.optim.schedules import Schedule, constant, linear_warmup, warmup_cosine, warmup_stable_decay
from dbuf.optim.sgd import sgd
from dbuf.optim.shampoo import shampoo

__all__ = [
    "GradientTransformation",
    "LearningRate",
    "LearningRateState",
    "Quantized",
    "Rule",
    "ScaleByAdamState",
    "Schedule",
    "TraceState",
    "adamw",
    "adamw8bit",
    "add_decayed_weights",
    "apply_updates",
    "by_owner",
    "chain",
    "clip_by_global_norm",
    "constant",
    "ema",
    "is_matrix",
    "linear_warmup",
    "lion",
    "muon",
    "orthogonalize",
    "partition",
    "quantized",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "set_learning_rate",
    "sgd",
    "shampoo",
    "trace",
    "warmup_cosine",
    "warmup_stable_decay",
]
