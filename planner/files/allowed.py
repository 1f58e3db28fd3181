"""The names that a plan file may contain: classes, enums, functions, ops and marks of nodes. No other is looked up.

Each value that is read must have the declared type of its field (``checked``, ``fits``). Tests compare the lists with
the classes that are written, and with many plans.
"""

import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache, partial
from importlib import import_module
from keyword import iskeyword
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._ops import OpOverload

from passes.moe.domain import Domain
from passes.program.ops.aten import aten, is_mutable, packet_of
from passes.rules.notation import Pattern
from passes.types.types import Draw, Placement

Record = TypeVar("Record")
RECORDS = {
    "passes.blocks.blocks": "Block Blocks",
    "passes.errors": "Where",
    "passes.lowering": "Documents Lowering Options",
    "passes.moe.domain": "Domain",
    "passes.moe.layers": "Doubt ExpertLayer ExpertPart ExpertWeight Experts",
    "passes.parameters": "LocalParameter",
    "passes.partition.loss.counts": "LossTerms",
    "passes.partition.typings.base": "Option",
    "passes.partition.type_changes": "Placements TypeChange",
    "passes.partition.sequence.facts": "Context",
    "passes.pieces": "AgainCall CompiledPiece Piece Region",
    "passes.program.program": "Assumption BoundaryPlan Condition Program StageAssignment",
    "passes.program.matrices": "Matrices",
    "passes.rules.notation": "Pattern",
    "passes.types.conversions": "CollectivePlan Conversion",
    "passes.types.types": "Draw Placement Segment",
    "planner.mesh": "Mesh",
    "planner.sharding.buckets": "Bucket BufferLayout Range Slot",
    "planner.sharding.buffers": "Buffer",
    "planner.updates": "UpdateRules",
}
ENUMS = {"passes.moe.layers": "Dispatch", "passes.partition.typings.base": "Form", "passes.rules.rule": "Role"}
FUNCTIONS = {
    "passes.moe.exchange": "combine count_by_group count_experts count_taken dispatch dispatch_tokens drop_rows "
    "ends_of give_back grouped_mm ids_of join name_rows own_member own_slices part return_slots send_slots share "
    "slots_of with_gradient",
    "passes.program.ops.sequence": "causal_attention gather_sequence gathered_attention local_rows over_data "
    "sum_over_ranks",
}
# Ops without a rule that only compute tensors from tensors. All ops with a rule are allowed.
UNRULED = (
    # factories, random draws
    "arange empty_permuted empty_strided eye linspace new_empty_strided normal poisson randint randint_like randperm "
    "scalar_tensor tril_indices triu_indices alpha_dropout feature_alpha_dropout multinomial rrelu "
    # losses
    "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss ctc_loss hinge_embedding_loss "
    "huber_loss kl_div l1_loss linear_cross_entropy margin_ranking_loss mse_loss multi_margin_loss nll_loss nll_loss2d "
    "multilabel_margin_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss "
    # products, distances, matrices
    "addr bilinear cdist chain_matmul cosine_similarity dist inner kron linalg_cholesky linalg_cholesky_ex "
    "linalg_cross linalg_det linalg_eigh linalg_eigvalsh linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_exp "
    "linalg_matrix_norm linalg_multi_dot linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve "
    "linalg_solve_ex linalg_solve_triangular linalg_svd linalg_vecdot logdet matrix_exp matrix_power outer "
    "pairwise_distance renorm tensordot trace vdot "
    # indexing, shapes
    "as_strided as_strided_scatter block_diag broadcast_tensors broadcast_to bucketize channel_shuffle col2im "
    "diag_embed diagonal_scatter dsplit dstack fliplr flipud hsplit hstack im2col index_fill isin kthvalue "
    "lift_fresh masked_scatter meshgrid mode native_channel_shuffle pixel_shuffle pixel_unshuffle put "
    "repeat_interleave rot90 searchsorted select_scatter slice_scatter sum_to_size take take_along_dim tensor_split "
    "tile unsafe_chunk unsafe_split vander vsplit vstack "
    # sums, spectra, images, sequences
    "corrcoef cov cumulative_trapezoid gradient histc nanmedian nanquantile quantile trapezoid fft_fft2 fft_fftn "
    "fft_fftshift fft_ifft2 fft_ifftn fft_ifftshift fft_irfft2 fft_irfftn fft_rfft2 fft_rfftn istft stft "
    "affine_grid_generator fractional_max_pool2d native_group_norm prelu upsample_nearest3d upsample_trilinear3d"
)
# Keys of node.meta, with the types of their values.
MARKS: dict[str, Any] = {
    "val": Tensor | tuple[Tensor | None, ...] | list[Tensor | None] | bool | int | float | None,
    "nn_module_stack": dict[str, tuple[str, Any]],
    "stack_trace": str | None,
    "inferred": Pattern,
    "domain": Domain,
    "draw": Draw,
    "placement": Placement,
    "parameter": str,
    "unsqueezed": int,
    "cut_whole": tuple[int, ...],
    **dict.fromkeys(("grad", "stopped", "known", "has_scores", "selected"), bool),
}
_UNRULED = {getattr(aten, name) for name in UNRULED.split() if hasattr(aten, name)}


def checked(cls: type[Record], values: Mapping[str, Any]) -> Record:
    """Return the dataclass ``cls`` with these fields. Raises TypeError if a value does not have its field's type."""
    kinds = _kinds(cls)
    for name, value in values.items():
        if not fits(value, kinds[name]):
            raise TypeError(f"{cls.__name__}.{name} must not be a {type(value).__name__}")
    return cls(**values)


def fits(value: Any, kind: Any) -> bool:
    """Whether ``value`` has the type ``kind``. ``float`` accepts an int; a kind that is no class accepts everything."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if kind is Any or kind is type(None):
        return kind is Any or value is None
    if kind in (int, float):
        return type(value) is int or type(value) is kind
    if not isinstance(origin or kind, type):
        return True
    return isinstance(value, origin or kind) and _parts_fit(value, origin, parts)


def _parts_fit(value: Any, origin: Any, parts: tuple[Any, ...]) -> bool:
    if not parts or origin is type:
        return True
    if isinstance(value, Mapping):
        return all(fits(key, parts[0]) and fits(part, parts[-1]) for key, part in value.items())
    if origin is tuple and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(fits, value, parts))
    return not isinstance(value, (tuple, list, set, frozenset)) or all(fits(part, parts[0]) for part in value)


@cache
def _kinds(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}  # pyright: ignore[reportArgumentType]


FUNCTIONS["passes.moe.exchange"] += " meet"


class NotAllowed(ValueError):
    """Raised for a name or value that no plan may contain."""


def _named(table: dict[str, str], module: str, name: str) -> Any:
    """Return the dataclass, enum or function of that name. Raises NotAllowed."""
    if name not in table.get(module, "").split():
        raise NotAllowed(f"{module}.{name} is no part of a plan")
    return getattr(import_module(module), name)


record, enum, function = (partial(_named, table) for table in (RECORDS, ENUMS, FUNCTIONS))


def check_mark(name: str, value: Any) -> None:
    """Raise NotAllowed unless a node of a plan may have this mark, with a value of this type."""
    if name not in MARKS or not fits(value, MARKS[name]):
        raise NotAllowed(f"a {type(value).__name__} marked {name[:60]!r} is no part of a plan")


def op(name: str) -> OpOverload:
    """Return the registered op ``namespace.packet.overload``. Raises NotAllowed."""
    namespace, packet, overload = [*name.split("."), "", ""][:3]
    target = getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload, None)
    if not isinstance(target, OpOverload) or str(target) != name or not is_allowed(target):
        raise NotAllowed(f"{name} is no op that a plan may call")
    return target


def is_allowed(target: OpOverload) -> bool:
    """Whether an op writes to no argument, and has a rule or is listed in UNRULED."""
    from passes.partition.typings.table import has_rule  # imported here: loading rules is slow, and few callers need it
    from passes.rules.table import builder_of

    if is_mutable(target):
        return False
    return builder_of(target) is not None or has_rule(target) or packet_of(target) in _UNRULED


def of_source(name: Any) -> str:
    """Return ``name`` if torch.fx may write it into source: an identifier, not a keyword. Raises NotAllowed."""
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
        raise NotAllowed(f"{str(name)[:60]!r} is no name of a value")
    return name
