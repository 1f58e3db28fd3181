"""JSON and tensors in one file, with a digest over all of it: a changed byte is an error, and nothing in it can run.

    FORM digest\\n      the SHA-256 of all that follows
    length              of the JSON: 8 bytes
    JSON                {"content": …, "tensors": {name: [dtype, shape]}}
    values              of the tensors, in this order

Read as a whole, and checked before a value is used: no size in it can ask for more memory than the file has bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from planner.files.json_text import LARGEST

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def seal(form: str, content: Any, tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a file of this ``form``, a text of one line."""
    held = {name: (str(value.dtype), list(value.shape)) for name, value in tensors.items()}
    text = json.dumps({"content": content, "tensors": held}, allow_nan=False).encode()
    parts = len(text).to_bytes(8, "little"), text, *map(_bytes_of, tensors.values())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join((f"{form} {digest.hexdigest()}\n".encode(), *parts))


def unseal(form: str, file: bytes) -> tuple[Any, dict[str, Tensor]]:
    """Content and tensors, each with memory of its own. Raises ValueError if the file is damaged or of another form."""
    head, _, rest = file.partition(b"\n")
    found, _, digest = head.decode(errors="replace").rpartition(" ")
    if found != form:
        raise ValueError("its format is another, or its digest")
    if digest != hashlib.sha256(rest).hexdigest():
        raise ValueError("its bytes have changed: the digest is another")
    start = 8 + int.from_bytes(rest[:8], "little")
    try:
        given = json.loads(rest[8:start], parse_int=_integer, parse_constant=_constant)
        content, held = given["content"], given["tensors"]
        tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in held.items():
            tensors[name], start = _tensor(rest, start, _DTYPES[dtype], shape)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if start != len(rest):
        raise ValueError("it has other sizes than it says")
    return content, tensors


def _bytes_of(value: Tensor) -> memoryview:
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _tensor(file: bytes, start: int, dtype: torch.dtype, shape: list[int]) -> tuple[Tensor, int]:
    """The tensor at ``start``, and the end of them."""
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"no tensor has the shape {shape}")
    end = start + math.prod(shape) * dtype.itemsize
    if end > len(file):
        raise ValueError("a tensor is larger than the file")
    made = torch.empty(shape, dtype=dtype)
    _bytes_of(made)[:] = file[start:end]
    return made, end


def _integer(digits: str) -> int:
    """Raises ValueError for a number that no machine word holds."""
    if len(digits) > 20 or not -LARGEST - 1 <= (value := int(digits)) <= LARGEST:
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
