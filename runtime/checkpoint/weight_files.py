"""The weights of a directory of the Hub; of quantised ones, their values: q.float() · scale.float(), then cast.

weight [r, c] in FP8, beside it      weight_scale_inv [⌈r / b0⌉, ⌈c / b1⌉]     a block has one, the last are shorter
                                     weight_scale [r] or [r, 1], [1] or []     a row has one, or the tensor
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.files.json_text import read_json
from planner.files.text import is_file
from planner.sharding.boxes import Box
from runtime.checkpoint.assembled import whole_box
from runtime.checkpoint.safetensors_files import FP8, SafetensorsFiles, StoredTensor

_UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale")  # of activations
_METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8")


class WeightFiles(SafetensorsFiles):
    """``tensors``: those of the model; ``scales``: name of a weight → its scales, and the block that one is for.

    Raises PlanError, naming file and tensor, for other kinds of quantised weights, and scales that do not fit.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.scales: dict[str, tuple[Tensor, tuple[int, int]]] = {}
        try:
            self._pair(_settings(directory))
        except BaseException:
            self.__exit__()
            raise

    def read(self, name: str, box: Box, target: Tensor) -> None:
        if name not in self.scales:
            super().read(name, box, target)
            return
        scale, block = self.scales[name]
        held = torch.empty(box.shape, dtype=self.tensors[name].dtype)
        super().read(name, box, held)
        if scale.dim() > 1:
            places = [torch.arange(box.start[d], box.stop[d]) // block[d] for d in (-2, -1)]
            scale = scale[tuple(map(slice, box.start[:-2], box.stop[:-2]))]
            scale = scale.index_select(-2, places[0]).index_select(-1, places[1])
        target.copy_(held.float() * scale)

    def _pair(self, settings: Mapping[str, Any]) -> None:
        for name in [name for name in self.tensors if name.endswith(_UNUSED)]:
            del self.tensors[name]
        for weight in [stored for stored in self.tensors.values() if stored.dtype in FP8]:
            if not settings:
                raise _refused(weight, "is stored in FP8, but config.json has no quantization_config")
            names = [name for name in _names_of_scale(weight.name) if name in self.tensors]
            if len(names) != 1:
                raise _refused(weight, f"has {len(names)} scales" if names else "has no scale")
            self.scales[weight.name] = self._scale(weight, self.tensors[names[0]], settings)
            del self.tensors[names[0]]
        if settings and not self.scales:
            stored = next(iter(self.tensors.values()))
            raise _refused(stored, "is not quantised, but config.json has a quantization_config")

    def _scale(
        self, weight: StoredTensor, stored: StoredTensor, settings: Mapping[str, Any]
    ) -> tuple[Tensor, tuple[int, int]]:
        held = torch.empty(stored.shape, dtype=stored.dtype)
        super().read(stored.name, whole_box(stored.shape), held)
        scale = (held.float() - 127).exp2() if held.dtype == torch.uint8 else held.float()
        if not scale.isfinite().all():
            raise _refused(stored, "has values that are not finite")
        if scale.numel() == 1:
            return scale.reshape(()), (1, 1)
        *outer, rows, columns = weight.shape
        if stored.shape in ((*outer, rows), (*outer, rows, 1)):
            return scale.reshape(*outer, rows, 1), (1, columns)
        block = settings.get("weight_block_size") or (0, 0)
        if all(block) and stored.shape == (*outer, -(-rows // block[0]), -(-columns // block[1])):
            return scale, (block[0], block[1])
        raise _refused(
            stored, f"has shape {list(stored.shape)}, which fits neither rows nor blocks {list(block)} of {weight.name}"
        )


def _names_of_scale(name: str) -> tuple[str, ...]:
    path = name.removesuffix("weight")
    return f"{name}_scale_inv", f"{name}_scale", f"{path}scale", f"{path}qscale_weight"


def _settings(directory: Path) -> Mapping[str, Any]:
    """The quantization_config of config.json; empty if the weights are plain. Raises PlanError for other methods."""
    config = directory / "config.json"
    content = read_json(config, "config") if is_file(config) else {}
    found = content.get("quantization_config") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        return {}
    if (method := found.get("quant_method")) not in _METHODS:
        raise PlanError(
            f"the weights are quantised by {str(method)[:60]!r}, which is not read",
            where=str(config),
            fix="load the directory of the model that was quantised",
        )
    return found


def _refused(stored: StoredTensor, how: str) -> PlanError:
    return PlanError(
        f"{stored.name} in {stored.file.name} {how}", where=str(stored.file), fix="provide the files of one save"
    )
