"""The weights of a directory of the Hub; quantised weights are dequantised: q.float() · scale.float(), then cast.

FP8     w [.., r, c]             w_scale_inv [.., ⌈r / b0⌉, ⌈c / b1⌉]     one scale per block, the last are smaller
                                 w_scale [r] or [r, 1], [1] or []         one scale per row, or per tensor
                                 w_scale [r, c / g]                       one scale per group of g values of a row
FP4     w [.., r, c / 2]         scale [.., r, c / 32]                    two values per byte, the low half is first
MXFP4   w_blocks [.., r, c / 32, 16]    w_scales [.., r, c / 32]          w is [.., c, r]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.files.text import is_file, read_json, shorten
from planner.progress import say
from planner.sharding.boxes import Box
from runtime.checkpoint.safetensors_files import SafetensorsFiles, StoredTensor, listed

_UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale")  # scales of activations
_METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "mxfp4")
_FORMATS = ("float-quantized", "naive-quantized")  # of compressed-tensors
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_GROUP = 32  # FP4 values with one scale
_FP4 = torch.tensor([sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
_MOST = 1 << 20  # elements that are dequantised at a time


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised weight. ``shape``: of the stored weight; each ``block`` of its last two dims has a scale."""

    values: StoredTensor
    scale: StoredTensor
    shape: tuple[int, ...]
    block: tuple[int, int]

    @property
    def is_packed(self) -> bool:
        return self.values.dtype not in _FP8

    @property
    def is_transposed(self) -> bool:
        return len(self.values.shape) > len(self.shape)

    @property
    def grid(self) -> tuple[int, ...]:
        return (*self.shape[:-2], *(-(-n // b) for n, b in zip(self.shape[-2:], self.block, strict=True)))


class WeightFiles(SafetensorsFiles):
    """The weight files of a model. ``tensors``: with their names and shapes in the model. ``quantised``: those that are
    dequantised as they are read.

    Raises PlanError, naming file and tensor, for other kinds of quantised weights, and scales that do not fit.
    """

    def _open_all(self) -> None:
        super()._open_all()
        self.quantised: dict[str, Quantised] = {}
        self._pair(_settings(self.directory))

    def tell_unread(self) -> None:
        """Print a line with the files and tensors that are not read, if there are any; on rank 0 only."""
        if self.unread:
            say(f"{shorten(self.directory)}: not read: {listed(self.unread)}")

    def read(self, name: str, box: Box, target: Tensor) -> None:
        quantised = self.quantised.get(name)
        if quantised is None:
            super().read(name, box, target)
            return
        start, stop = box.start, box.stop
        if quantised.is_transposed:
            target = target.transpose(-1, -2)
            start, stop = ((*ends[:-2], ends[-1], ends[-2]) for ends in (start, stop))
        (*_, first, left), (*_, last, right) = start, stop
        step = max(_MOST // max(right - left, 1), 1)
        for place in product(*map(range, start[:-2], stop[:-2])):
            matrix = target[tuple(at - begin for at, begin in zip(place, start, strict=False))]
            for top in range(first, last, step):
                bottom = min(top + step, last)
                matrix[top - first : bottom - first].copy_(self._values(quantised, place, (top, bottom), (left, right)))

    def _values(self, of: Quantised, place: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Return values of one matrix, float32 [rows, columns]. Blocks of FP4 are read as a whole."""
        unit = _GROUP if of.is_packed else 1
        first, last = columns[0] // unit * unit, -(-columns[1] // unit) * unit
        inner = ((first // 2, last // 2),) if of.is_packed else ((first, last),)
        if of.is_transposed:
            inner = (first // unit, last // unit), (0, _GROUP // 2)
        stored = self._stored(of.values, *((at, at + 1) for at in place), rows, *inner).reshape(rows[1] - rows[0], -1)
        if of.is_packed:
            stored = stored.view(torch.uint8)
            values = _FP4[torch.stack((stored & 15, stored >> 4), -1).flatten(-2).long()]
        else:
            values = stored.float()
        values *= self._scales(of, place, rows, (first, last))
        return values[:, columns[0] - first : columns[1] - first]

    def _scales(self, of: Quantised, place: tuple[int, ...], *ranges: tuple[int, int]) -> Tensor:
        """Return the scale of each element, float32 [rows, columns]."""
        ends = [(a // b, -(-z // b)) for (a, z), b in zip(ranges, of.block, strict=True)]
        if of.scale.shape == of.grid:
            scale = self._stored(of.scale, *((at, at + 1) for at in place), *ends)
        else:
            scale = self._stored(of.scale, *((0, n) for n in of.scale.shape))
            scale = scale.reshape(of.grid if scale.numel() == prod(of.grid) else (1,) * len(of.grid)).expand(of.grid)
            scale = scale[(*place, *(slice(*end) for end in ends))]
        is_exponent = scale.dtype == torch.uint8  # powers of 2
        scale = (scale.view(torch.float8_e8m0fnu) if is_exponent else scale).float().reshape([z - a for a, z in ends])
        for dim, ((a, z), (begin, _), b) in enumerate(zip(ranges, ends, of.block, strict=True)):
            scale = scale.index_select(dim, torch.arange(a, z) // b - begin)
        return scale

    def _stored(self, stored: StoredTensor, *ranges: tuple[int, int]) -> Tensor:
        """Return the elements in ``ranges`` of the dims, as stored."""
        box = Box(tuple(a for a, _ in ranges), tuple(z for _, z in ranges))
        values = torch.empty(box.shape, dtype=stored.dtype)
        self.read_stored(stored, box, values)
        return values

    # ---- opening

    def _pair(self, settings: Mapping[str, Any]) -> None:
        if settings:
            self.unread += (unused := [name for name in self.tensors if name.endswith(_UNUSED)])
            for name in unused:
                del self.tensors[name]
        for weight in [*self.tensors.values()]:
            name, scales = _names(weight, settings)
            names = [scale for scale in scales if scale in self.tensors]
            if not scales or (weight.dtype not in _FP8 and not names and name == weight.name):
                continue
            if not settings:
                raise _refused(weight, "is stored in FP8, but config.json has no quantization_config")
            if len(names) != 1:
                raise _refused(weight, f"has {len(names)} scales" if names else "has no scale")
            quantised = _quantised(weight, self.tensors[names[0]], settings)
            self._check(quantised.scale)
            del self.tensors[weight.name], self.tensors[names[0]]
            *outer, rows, columns = quantised.shape
            shape = (*outer, columns, rows) if quantised.is_transposed else quantised.shape
            self.quantised[name] = quantised
            self.tensors[name] = replace(weight, name=name, shape=shape, dtype=torch.float32)
        if settings and not self.quantised:
            stored = next(iter(self.tensors.values()))
            raise _refused(stored, "is not quantised, but config.json has a quantization_config")

    def _check(self, scale: StoredTensor) -> None:
        values = self._stored(scale, *((0, n) for n in scale.shape))
        is_finite = (values != 255).all() if values.dtype == torch.uint8 else values.float().isfinite().all()
        if not is_finite:
            raise _refused(scale, "has values that are not finite")


def _names(weight: StoredTensor, settings: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the name of a weight in the model, and the possible names of its scale; none if it is not quantised."""
    name, is_byte = weight.name, weight.dtype in (torch.uint8, torch.int8)
    if is_byte and settings.get("quant_method") == "mxfp4" and name.endswith("_blocks"):
        return name.removesuffix("_blocks"), (f"{name.removesuffix('blocks')}scales",)
    if weight.dtype in _FP8 or (is_byte and settings.get("quant_method") == "fp8"):
        path = name.removesuffix("weight")
        return name, (f"{name}_scale_inv", f"{name}_scale", f"{path}scale", f"{path}qscale_weight")
    return name, ()


def _quantised(values: StoredTensor, scale: StoredTensor, settings: Mapping[str, Any]) -> Quantised:
    """Return the quantised weight. Raises PlanError, naming both tensors, for a scale that does not fit."""
    shape, fits = [*values.shape], len(values.shape) > 1
    blocks: list[Any] = [(1, _GROUP)]
    if fits and values.name.endswith("_blocks"):
        fits = shape.pop() == _GROUP // 2 and len(shape) > 1
        shape[-1] *= _GROUP
    elif values.dtype not in _FP8:
        shape[-1] *= 2
        fits = fits and shape[-1] % _GROUP == 0
    elif fits:
        size = shape[-2] if prod(scale.shape) == 1 else 1
        blocks = [(size, shape[-1]), *_blocks(settings)]
    for block in blocks if fits else ():
        quantised = Quantised(values, scale, tuple(shape), block)
        is_of_rows = block[1] == shape[-1] and scale.shape in ((), (1,), tuple(shape[:-1]))
        if is_of_rows or scale.shape == quantised.grid:
            return quantised
    raise _refused(
        scale, f"has shape {list(scale.shape)}, which fits neither rows nor blocks {list(blocks[-1])} of {values.name}"
    )


def _blocks(settings: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the block sizes of config.json: for all weights, or by groups of modules, as in compressed-tensors."""
    groups = settings.get("config_groups")
    groups = groups.values() if _is_dict(groups) else ()
    named = [settings.get("weight_block_size")]
    for weights in filter(_is_dict, [group.get("weights") for group in filter(_is_dict, groups)]):
        named += [weights.get("block_structure"), [1, weights.get("group_size")]]
    return [(block[0], block[1]) for block in named if _is_block(block)]


def _is_dict(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_block(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)


def _settings(directory: Path) -> Mapping[str, Any]:
    """Return the quantization_config of config.json; empty without one. Raises PlanError for an unknown method."""
    config = directory / "config.json"
    content = read_json(config, "config") if is_file(config) else {}
    settings = content.get("quantization_config") if isinstance(content, dict) else None
    if not isinstance(settings, dict):
        return {}
    method = settings.get("quant_method")
    if method == "compressed-tensors" and settings.get("format", _FORMATS[0]) not in _FORMATS:
        method = f"{method} {settings['format']}"
    if method not in _METHODS:
        what = f"the weights are quantised by {str(method)[:60]!r}, which is not read"
        raise PlanError(what, where=str(config), fix="load the directory of the model that was quantised")
    return settings


def _refused(stored: StoredTensor, how: str) -> PlanError:
    return PlanError(
        f"{stored.name} in {stored.file.name} {how}", where=str(stored.file), fix="provide the files of one save"
    )
