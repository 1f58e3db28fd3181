"""Ops along dims that may be sharded too: a table of the parallel forms beside those that follow from the factors.

sum over the sharded dim            → P
mean over it                        → P        (the local sum over the global count)
logsumexp, softmax over it          → I, V     (ranks exchange the maximum and the sum)
amax, amin without a gradient       → I        (ranks exchange theirs); a Euclidean norm: the sum of squares
norms over it                       → V        (ranks exchange the mean and the mean square)
gather along it                     → P        (one rank holds the element that is picked, the others give zeros)

Ops over a vocabulary: embedding(W[v, h], ids[b, s]); cross_entropy_loss(logits, target), logits never gathered.

vocabulary   W cut by rows, possibly padded: ids out of a rank's range give zeros, the result is P
features     W cut by columns: the result is cut on its last dim (a bias table of [buckets, heads] by heads)
tokens       ids cut, W whole (R)
classes      logits cut on the class dim, padding masked; ranks exchange per token the maximum, then the sum of
             exponentials and the target's logit (Megatron-LM paper, section 3); the result is I
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from passes.partition.typings.base import Covers, Form, Option, Site, by_factors, whole
from passes.program.ops.aten import named, reduced_dims
from passes.program.ops.ctc import CTC_LOSSES
from passes.program.ops.sequence import over_data
from passes.types.types import I, P, Placement, R, V


@dataclass(frozen=True)
class Along:
    """The rule of ops that run along dims of their first input. ``out``: of the result; None: sharded as the input is,
    and so are vectors beside it; cuts that readers ask for are tried too. ``when``: of which calls. ``is_padded``:
    whether padding may take no part; a dim is then of one segment, else every element is data, and on one rank.
    """

    names: str
    form: Form
    out: Placement | None
    when: Callable[[Site], bool] = lambda site: True
    is_padded: bool = False

    def __call__(self, site: Site) -> Iterator[Option]:
        yield from by_factors(site)
        if not self.when(site):
            return
        x, *others = site.inputs
        last = len(site.shape(x)) - 1
        dims = frozenset({last}) if "normalized_shape" in named(site.node) else reduced_dims(site.node)
        for cut in sorted({*site.candidates(x), *(site.candidates() if self.out is None else ())}):
            if cut.dim in dims and (len(cut.segments) == 1 if self.is_padded else cut.is_disjoint):
                given = {x: cut} | (dict.fromkeys(others, cut.moved(0)) if self.out is None else {})
                is_seldom_fast = self.form is Form.OVER_RANKS or (self.form is not Form.PICKED and cut.dim == last)
                yield replace(site.option(self.out or cut, given, self.form), detour=is_seldom_fast)


def _is_euclidean(site: Site) -> bool:
    given = named(site.node)
    return given["ord"] == 2 and given["dtype"] is None and not given["self"].meta["val"].is_complex()


def _is_over_features(site: Site) -> bool:
    return len(named(site.node)["normalized_shape"]) == 1 and site.grad(site.node)


def _picks_with_a_gradient(site: Site) -> bool:
    given = named(site.node)
    return given["self"] is not given["index"] and bool(site.shape(given["self"])) and site.grad(site.node)


# ---- the covered ops, and the forms that rules may give beside whole and partial

TABLE = (
    Along("layer_norm rms_norm", Form.OVER_RANKS, None, _is_over_features),
    Along("sum sum.dim_IntList", Form.SUM, P),
    Along("mean mean.dim", Form.MEAN, P),
    # between equal elements of several ranks a gradient would have to be shared
    Along("amax amin", Form.OVER_RANKS, I, lambda site: not site.grad(site.node)),
    Along("linalg_vector_norm", Form.OVER_RANKS, I, _is_euclidean),
    Along("logsumexp", Form.OVER_RANKS, I, lambda site: len(reduced_dims(site.node)) == 1, is_padded=True),
    Along("softmax.int log_softmax.int", Form.OVER_RANKS, None),
    Along("gather", Form.PICKED, P, _picks_with_a_gradient, is_padded=True),
)


def embedding(site: Site) -> Iterator[Option]:
    weight = site.args[0]
    rows, columns = site.shape(weight)
    if any(site.args[3:4]):
        return  # gradients scaled by how often an id occurs
    for cut in vocabulary_cuts(site, rows, 0):
        yield site.option(P, {weight: cut}, Form.VOCABULARY)
    yield from by_factors(site)
    if site.divides(columns):
        yield site.option(V(len(site.shape()) - 1, columns), {weight: V(1, columns)}, Form.PARTS)


def cross_entropy(site: Site) -> Iterator[Option]:
    logits, target = site.args[:2]
    shape = site.shape(logits)
    weights = [n for n in site.inputs if n not in (logits, target)]  # one for each class, replicated
    if len(shape) != 2 or len(site.shape(target)) != 1 or any(site.grad(n) for n in weights):
        return
    cuts = {c for c in site.candidates(logits) if c.dim == 1 and len(c.segments) == 1}
    for cut in sorted(cuts | set(vocabulary_cuts(site, shape[1], 1))):
        yield Option(tuple(site.settle(n, cut if n is logits else R) for n in site.inputs), I, Form.CLASSES)


def vocabulary_cuts(site: Site, rows: int, dim: int) -> list[Placement]:
    """Return a plain cut if the rows divide; else the padded one, unless padding is most of the table."""
    if site.divides(rows):
        return [V(dim, rows)]
    if rows > 16 * site.tp:
        # 50257 at tp 8, of a multiple of 128, is 51200 (Megatron-LM paper, section 4)
        return [V(dim, rows, padding=-rows % (site.vocabulary_multiple * site.tp))]
    return []


COVERS = (
    *(Covers(row, row.names, gives={Form.PARTS, row.form}) for row in TABLE),
    Covers(embedding, "embedding", gives={Form.PARTS, Form.VOCABULARY}),
    Covers(cross_entropy, "cross_entropy_loss", gives={Form.CLASSES}),
    # CTC: each sequence runs over all of its frames and classes; a sum over data is the same on all ranks of tp
    Covers(whole, targets=(CTC_LOSSES, over_data), gives=frozenset()),
)
