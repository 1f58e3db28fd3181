"""Faults of the exchanges over tp: each collective of passes/ops left out, doubled, or over another axis."""

from typing import Any

from torch import Tensor

from passes.ops import collectives, linear, over_ranks, vocabulary
from tests.tools.planted import changes
from tests.tools.planted.fault import Fault, Function


def _without_maximum(whole: Function) -> Function:
    """The maximum over ranks is left out, the sums are not."""
    return lambda x, axis, phase, op=None, **rest: x if op is not None else whole(x, axis, phase, op, **rest)


def _padding_unmasked(whole: Any) -> Any:
    class Unmasked(whole):
        @staticmethod
        def apply(logits: Tensor, target: Tensor, axis: Any, weight: Tensor | None, options: Any) -> Any:
            columns = options.vocabulary if axis is None else logits.shape[1] * axis.size
            return whole.apply(logits, target, axis, weight, options._replace(vocabulary=columns))

    return Unmasked


def _padding_unmasked_in_softmax(whole: Any) -> Any:
    class Unmasked(whole):
        @staticmethod
        def apply(x: Tensor, dim: int, axis: Any, size: int) -> Any:
            return whole.apply(x, dim, axis, x.shape[dim] * axis.size)

    return Unmasked


def _kept_on_all(x: Tensor) -> Tensor:
    return x.view_as(x)


def _of_flipped(move: Any) -> Function:
    return lambda gradient: move(gradient.flip(move.keywords["cut"].dim))


FAULTS = {
    "f: all-reduce of a gradient left out": Fault(
        collectives, "Way", changes.way_of("f", "g_f", back=changes.left_out(changes.as_it_is)), seed=25
    ),
    "f: all-reduce of a gradient doubled": Fault(
        collectives, "Way", changes.way_of("f", "g_f", back=changes.added_again), seed=25
    ),
    "f: all-reduce of a gradient on the wrong axis": Fault(
        collectives, "Way", changes.way_of("f", "g_f", back=changes.elsewhere), seed=186
    ),
    "f before column-parallel products: all-reduce left out": Fault(
        linear, "start_all_reduce", lambda whole: lambda x, axis, phase: None, seed=25
    ),
    "f before column-parallel products: all-reduce doubled": Fault(
        linear, "start_all_reduce", changes.started_sum_twice, seed=25
    ),
    "f before column-parallel products: all-reduce on the wrong axis": Fault(
        linear, "start_all_reduce", changes.on_wrong_axis, seed=186
    ),
    "g: all-reduce left out": Fault(collectives._G, "forward", changes.forward_left_out(changes.as_it_is), seed=25),
    "g: all-reduce doubled": Fault(collectives._G, "forward", changes.forward_twice, seed=62),
    "g: all-reduce on the wrong axis": Fault(collectives._G, "forward", changes.forward_on_wrong_axis, seed=265),
    "g f: all-reduce left out": Fault(
        collectives, "Way", changes.way_of("g_f", there=changes.left_out(changes.as_it_is)), seed=25
    ),
    "g f: all-reduce doubled": Fault(collectives, "Way", changes.way_of("g_f", there=changes.summed_again), seed=113),
    "slice: all-gather of the gradient left out": Fault(
        collectives, "Way", changes.way_of("slice_part", "scatter", back=changes.left_out(changes.own_again)), seed=86
    ),
    "slice: all-gather of the gradient on the wrong axis": Fault(
        collectives, "Way", changes.way_of("slice_part", "scatter", back=changes.elsewhere), seed=554
    ),
    "first: the value kept on all ranks": Fault(
        collectives, "Way", changes.way_of("first", there=lambda move: _kept_on_all), seed=25
    ),
    "gather: all-gather left out": Fault(
        collectives, "Way", changes.way_of("gather", "collect", there=changes.left_out(changes.own_again)), seed=17
    ),
    "gather: all-gather on the wrong axis": Fault(
        collectives, "Way", changes.way_of("gather", "collect", there=changes.elsewhere), seed=554
    ),
    "gather: reduce-scatter of the gradient left out": Fault(
        collectives, "Way", changes.way_of("gather", back=changes.left_out(changes.own_part_of_gradient)), seed=554
    ),
    "gather: reduce-scatter of the gradient doubled": Fault(
        collectives, "Way", changes.way_of("gather", back=changes.added_again), seed=554
    ),
    "gather: reduce-scatter of the gradient on the wrong axis": Fault(
        collectives, "Way", changes.way_of("gather", back=changes.elsewhere), seed=554
    ),
    "collect: the gradient of another part": Fault(
        collectives, "Way", changes.way_of("collect", back=_of_flipped), seed=157
    ),
    "scatter: reduce-scatter left out": Fault(
        collectives, "Way", changes.way_of("scatter", there=changes.left_out(changes.own_part)), seed=86
    ),
    "scatter: reduce-scatter on the wrong axis": Fault(
        collectives, "Way", changes.way_of("scatter", there=changes.elsewhere), seed=554
    ),
    "gather before products: all-gather left out": Fault(
        linear, "all_gather", lambda whole: changes.own_again, seed=86
    ),
    "gather before products: all-gather on the wrong axis": Fault(
        linear, "all_gather", changes.on_wrong_axis, seed=554
    ),
    "gather before products: reduce-scatter of the gradient left out": Fault(
        linear, "start_reduce_scatter", changes.ended_at_once(changes.own_part), seed=86
    ),
    "gather before products: reduce-scatter of the gradient doubled": Fault(
        linear, "start_reduce_scatter", changes.ended_twice, seed=86
    ),
    "gather before products: reduce-scatter of the gradient on the wrong axis": Fault(
        linear, "start_reduce_scatter", changes.on_wrong_axis, seed=554
    ),
    "gather before products: all-gather in the backward left out": Fault(
        linear, "start_all_gather", changes.ended_at_once(changes.own_again), seed=86
    ),
    "gather before products: all-gather in the backward on the wrong axis": Fault(
        linear, "start_all_gather", changes.on_wrong_axis, seed=628
    ),
    "cross-entropy: sums over ranks left out": Fault(vocabulary, "all_reduce", changes.sum_left_out, seed=25),
    "cross-entropy: maximum over ranks left out": Fault(vocabulary, "all_reduce", _without_maximum, seed=25),
    "cross-entropy: sums over ranks doubled": Fault(vocabulary, "all_reduce", changes.sum_twice, seed=25),
    "cross-entropy: sums on the wrong axis": Fault(vocabulary, "all_reduce", changes.on_wrong_axis, seed=554),
    "cross-entropy: padded vocabulary unmasked": Fault(
        vocabulary, "_VocabularyCrossEntropy", _padding_unmasked, seed=113
    ),
    "softmax: sum over ranks left out": Fault(over_ranks, "all_reduce", changes.sum_left_out, seed=186),
    "softmax: sum over ranks doubled": Fault(over_ranks, "all_reduce", changes.sum_twice, seed=186),
    "softmax: padded vocabulary unmasked": Fault(over_ranks, "_LogSumExp", _padding_unmasked_in_softmax, seed=113),
    "norm of cut features: sum over ranks left out": Fault(
        over_ranks, "g_f", lambda whole: lambda x, axis: x.clone(), seed=2
    ),
}
