"""Optimizers as pairs of pure functions over pytrees of DBuffers, after optax."""

from dbuf.optim.adamw import AdamWState, adamw
from dbuf.optim.base import GradientTransformation, LearningRate, apply_updates, chain
from dbuf.optim.sgd import SGDState, sgd

__all__ = [
    "AdamWState",
    "GradientTransformation",
    "LearningRate",
    "SGDState",
    "adamw",
    "apply_updates",
    "chain",
    "sgd",
]
