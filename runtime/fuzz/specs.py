"""Specs that are drawn: an option for each key of the reference spec that changes a step."""

from __future__ import annotations

from typing import Any

from planner.pipeline.schedule import KINDS, default_kind

AXES = ("tp", "pp", "dp", "cp")
ORDERS = ("tp-cp-ep-dp-pp", "dp-tp-pp-cp-ep")

FIELDS: dict[str, tuple[Any, ...]] = {
    "mesh.tp": (1, 2, 3, 4),
    "mesh.pp": (1, 2, 3, 4),
    "mesh.dp": (1, 2, 3, 4),
    "mesh.cp": (1, 2),
    "mesh.ep": (1, 2),
    "mesh.etp": (None, 1, 2),
    "mesh.vpp": (1, 2),
    "mesh.order": ORDERS,
    "microbatches": (2, 1, 3, 4),
    "batch.micro": (2, 1, 3),
    "tensor_parallel.sequence_parallel": (False, True),
    "tensor_parallel.regather": (True, False),
    "tensor_parallel.overrides": ("none", "mlp", "attention", "head"),
    "tensor_parallel.vocabulary_multiple": (8, 1, 128),
    "pipeline.schedule": tuple(dict.fromkeys((default_kind(1), *KINDS))),
    "pipeline.split": ("auto", "uneven", "ends", "layout"),
    "pipeline.group_size": (None, 2, 3),
    "optimizer.name": ("adamw", "adam", "sgd", "adagrad"),
    "optimizer.lr": (1e-3, 1e-2),
    "optimizer.momentum": (None, 0.9),
    "optimizer.nesterov": (None, True),
    "optimizer.betas": ((0.9, 0.95), (0.5, 0.9)),
    "optimizer.eps": (1e-8, 1e-3),
    "optimizer.weight_decay": (0.0, 0.1),
    "optimizer.no_decay": ("none", "vectors"),
    "optimizer.groups": ("none", "blocks"),
    "optimizer.zero": (1, 0, 2, 3),
    "optimizer.reshard": ("auto", False, 1),
    "optimizer.shard_group": (None, 2),
    "optimizer.clip_grad_norm": (1.0, None, 0.01),
    "optimizer.alignment": ("nccl", "none"),
    "optimizer.bucket_size": (None, 64, 1000),
    "optimizer.ema": (None, 0.9),
    "optimizer.schedule.kind": ("constant", "cosine", "linear"),
    "optimizer.schedule.warmup": (0, 1),
    "optimizer.schedule.steps": (10, 4),
    "optimizer.schedule.min_lr": (0.0, 1e-5),
    "precision.parameters": ("float64", "float32", "bfloat16"),
    "half precision": ("bfloat16", "float16"),
    "precision.gradients": (None, "float32"),
    "precision.loss_scale": ("none", 1024.0, "dynamic"),
    "precision.nonfinite": (None, "skip"),
    "cuda_graphs.impl": ("none", "emulate"),
    "cuda_graphs.scope": ((), ("attn",), ("mlp",), ("attn", "mlp"), ("moe",), ("moe_router",), ("full_iteration",)),
    "cuda_graphs.warmup_steps": (1, 2),
    "recompute": ("none", "full", "selective", "first full", "all but first"),
    "blocks recomputed": ("all", "even", "odd"),
    "compile": (False, True),
    "fuse_norms": (False, True),
    "dropout": ("fast", "layout_invariant"),
    "initial_weights": ("broadcast", "require_equal"),
    "audit.every": (None, 1),
    "audit.on_difference": ("stop", "warn"),
    "seed": (1234, 7),
    "rows given": ("all", "own"),
    "lengths": ("one", "two"),
    "continued on": ("nothing", "one", "tp", "pp", "dp", "cp"),
}

RARE = {
    "compile": 0.97,
    "precision.parameters": 0.3,
    "lengths": 0.5,
}  # the chance to become the simplest again: it takes long, or hides differences

# A capture depends on these, and so do the weights of the user's own model: all cases of one model share them.
OF_CAPTURES = ("batch.micro", "precision.parameters", "half precision", "dropout", "seed")
