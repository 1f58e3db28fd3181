"""A model in eager mode, without torch.compile, key-value caches and checkpoints that users set up beside its forward.

    blocks.0._orig_mod.up.weight     as torch.compile(blocks[0]) names a parameter
    blocks.0.up.weight               as the module that was compiled names it

A plan shards the model's own ops, and compiles what each rank then runs. ``Module.compile()``, compiled functions and
methods are no modules: they run as written under PyTorch's own switch for all of them, its stance.

FlexAttention in a forward is captured as the attention that it computes: on a CPU PyTorch has no gradient of it, and a
plan is made without a GPU. The blocks that a BlockMask lists say what a kernel may skip; its mask_mod says which keys a
query attends to. So blocks that were given by hand have to agree with the mask_mod.

    block_mask alone      scaled_dot_product_attention under the mask that its mask_mod computes
    score_mod             the scores, each changed by it: PyTorch's own implementation without a kernel
"""

import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import math_attention
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import flex_attention as flex

from passes.errors import PlanError, Where
from passes.interceptors import Interceptor, installed
from passes.program.source_lines import users_frame, where_of_frame

NOTE = (
    "torch.compile in the model has no effect here: the model is captured uncompiled, and compile: true in the spec "
    "compiles the code of each rank"
)
T = TypeVar("T")
_WRAPPER = re.compile(r"(?<![^./])_orig_mod\.")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_uncompiled: WeakSet[nn.Module] = WeakSet()


def plain_name(name: str) -> str:
    """Return the name of a tensor in the module that was compiled."""
    return _WRAPPER.sub("", name)


def unwrapped(module: Any) -> Any:
    """Return the module that torch.compile was given, or ``module``. Raises PlanError for a wrapper with hooks."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    while kind is not None and isinstance(module, kind):
        if any(vars(module).get(hooks) for hooks in _HOOKS):
            raise PlanError(
                "hooks are registered on what torch.compile returned, and would not run",
                where=type(module._orig_mod).__name__,  # pyright: ignore[reportAttributeAccessIssue]
                fix="register them on the module before it is compiled, or use module.compile()",
            )
        module = module._orig_mod  # pyright: ignore[reportAttributeAccessIssue]
    return module


def uncompiled(model: nn.Module) -> nn.Module:
    """Return ``model`` without the wrappers of torch.compile; ``model`` is not changed. The result shares all modules
    without wrappers, all tensors, and the attributes of the other modules.
    """
    plain = _without_wrappers(model, {})
    if plain is not model:
        _uncompiled.add(plain)
    return plain


def was_compiled(model: nn.Module) -> bool:
    """Return whether ``uncompiled`` removed wrappers to make it."""
    return model in _uncompiled


@contextmanager
def in_eager_mode() -> Iterator[list[Any]]:
    """Run compiled modules, functions and methods as written, and flex_attention as ops. Yields a list of compiled ones
    that have run.
    """
    eval_frame: Any = import_module("torch._dynamo.eval_frame")  # here: it takes a second
    found: list[Any] = []
    original, compiled = eval_frame._callback_from_stance, eval_frame.OptimizedModule

    def noted(callback: Any) -> Any:
        if callable(callback):
            found.append(callback)
        return original(callback)

    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:  # one that is no submodule: a closure has it
        found.append(wrapper)
        return unwrapped(wrapper)(*args, **kwargs)

    watched = installed(
        (eval_frame, "_callback_from_stance", noted), (compiled, "__call__", call), *flex_attention_as_ops()
    )
    # a scripted or traced function runs its graph as written, not as its first calls have specialised it
    with watched, torch.compiler.set_stance("force_eager"), torch.jit.optimized_execution(False):
        yield found


def _without_wrappers(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """``made``: copies of modules with several names."""
    own = unwrapped(module)
    if id(own) not in made:
        made[id(own)] = own
        held = own._modules.items()
        inner = {name: None if child is None else _without_wrappers(child, made) for name, child in held}
        if any(inner[name] is not child for name, child in held):
            made[id(own)] = copy = object.__new__(type(own))
            object.__setattr__(copy, "__dict__", {**vars(own), "_modules": inner})
    return made[id(own)]


def caches_off(model: nn.Module) -> AbstractContextManager[None]:
    """Disable key-value caches and recomputation, which are of no use in a traced training step."""
    owners = [(module, "gradient_checkpointing") for module in model.modules()]
    owners += [(getattr(module, "config", None), "use_cache") for module in model.modules()]
    return installed(*((owner, name, False) for owner, name in owners if getattr(owner, name, None) is True))


def flex_attention_as_ops() -> tuple[Interceptor, ...]:
    """Return interceptors with which flex_attention runs as ops that have a gradient on every device."""
    by_mask_mod = WeakSet[flex.BlockMask]()
    with_blocks = flex._create_sparse_block_from_block_mask

    def mask_of_mod(*args: Any, **kwargs: Any) -> flex.BlockMask:
        mask = with_blocks(*args, **kwargs)
        by_mask_mod.add(mask)
        return mask

    def attention(
        query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float, options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask, _ = block_mask
        if mask not in by_mask_mod:
            _refuse_other_blocks(mask)
        if score_mod is flex._identity and not options.get("OUTPUT_LOGSUMEXP") and not options.get("OUTPUT_MAX"):
            return _plain(query, key, value, mask, scale), query.new_empty(0), query.new_empty(0)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return math_attention(query, key, value, score_mod, block_mask, scale, options)

    return (
        (flex, "_create_sparse_block_from_block_mask", mask_of_mod),
        (flex, "_validate_device", lambda *_: None),
        (flex, "flex_attention_hop", attention),
        (flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        (flex, "setup_compilation_env", lambda: nullcontext("eager")),  # it would end the record of vmap
        (flex.BlockMask, "as_tuple", lambda mask, flatten=True: (mask, mask.mask_mod)),
    )


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: flex.BlockMask, scale: float) -> Tensor:
    """Return the attention [b, h, t, s] with unchanged scores as one call; key heads are repeated to all heads."""
    grouped = query.shape[1] != key.shape[1]
    allowed = None if _is_everything(mask) else _dense(mask, query.shape[2], key.shape[2], query.device)
    return F.scaled_dot_product_attention(query, key, value, allowed, scale=scale, enable_gqa=grouped)


def _is_everything(mask: flex.BlockMask) -> bool:
    """Return whether the mask is the one that flex_attention makes if it gets none."""
    return mask.BLOCK_SIZE[0] == flex._LARGE_SPARSE_BLOCK_SIZE


def _dense(mask: flex.BlockMask, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return [b or 1, h or 1, t, s], true where a query attends to a key."""
    batch, heads = mask.kv_num_blocks.shape[:2]
    return flex.create_mask(mask.mask_mod, batch, heads, queries, keys, device)


def _refuse_other_blocks(mask: flex.BlockMask) -> None:
    """Raise PlanError unless the blocks of a mask that create_block_mask did not make here fit its mask_mod."""
    if _is_everything(mask):
        return
    if isinstance(mask.kv_indices, FakeTensor) or not outside_of_the_trace(lambda: _blocks_agree(mask)):
        raise PlanError(
            "the blocks of a BlockMask for flex_attention may allow other keys than its mask_mod",
            where=where_of_frame(*line) if (line := users_frame()) else Where(),
            fix="make the mask by create_block_mask, which derives the blocks from the mask_mod",
        )


def outside_of_the_trace(compute: Callable[[], T]) -> T:
    """Compute in another thread: tracing is a state of the current one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(compute).result()


def _blocks_agree(mask: flex.BlockMask) -> bool:
    with torch.no_grad():
        allowed = _dense(mask, mask.shape[-2], mask.shape[-1], mask.kv_indices.device)
        queries, keys = mask.BLOCK_SIZE
        some, _ = flex._convert_mask_to_block_mask(allowed, queries, keys)
        others, _ = flex._convert_mask_to_block_mask(~allowed, queries, keys)
        listed = flex._ordered_to_dense(mask.kv_num_blocks, mask.kv_indices, mask.kv_indices.shape[-1])
        whole = torch.zeros_like(listed)
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            whole = flex._ordered_to_dense(mask.full_kv_num_blocks, mask.full_kv_indices, whole.shape[-1])
        return not (some.bool() & ~(listed | whole).bool()).any() and not (whole.bool() & others.bool()).any()
