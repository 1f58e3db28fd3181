"""The placeholders of dispatch and combine in an opened graph. In one process nothing moves.

    counts = count_experts(E, chosen)         [E]           rows of each expert
    here = meet(counts, n)                    [E]           … that come to this rank, by an exchange of counts
    rows = dispatch(rows, here)               [n, …]        to the ranks that have the experts, by expert
    ends_of(here), ids_of(here, n)            [E], [n]      the ends of each expert's rows; the expert of each row
    grouped_mm(rows, W[E, i, o], here)        [n, o]        the rows of each expert times its own matrix
    part(rows, here, e), join(parts)          [m, …]        the rows of one expert that is here; those of all of them
    rows = give_back(rows, here)              [n, …]        each to where it came from
    rows = dispatch_tokens(x, token, here)    [n, …]        rows that are copies of tokens: each goes once to a rank
    y = combine(rows, token, here, t, dtype)  [t, …]        of each token the sum of its rows
    own = share(w)                            w            a weight of no expert, as a branch of one reads it
    own = own_member(w, …)                    w            of weights on one rank of ep each, the one that is here
    own = with_gradient(own)                  w            of such of which some are frozen: all ranks run one backward
    own = own_slices(v, dim)                  v            of a value of all experts, those of the experts here
    names = name_rows(t)                      [t, 2]        sample and place of each token, by which its draws are named
    drop_rows(rows, p, names, sites)          [m, …]        dropout of rows by their names, wherever they are

    slots = send_slots(x, e, c, counts)       [.., E, .., C, ..]     dim c of each expert, of all ranks
    own = slots_of(slots, e, number)          [.., C, ..]            those of one expert that is here
    y = return_slots(slots, e, c)             [.., E, .., C, ..]     each to where it came from

From ``meet`` to ``give_back`` or ``combine``, and from ``send_slots`` to ``return_slots``, is the experts' domain:
values there are typed over etp, dims of experts are sharded over ep, and the number of rows depends on the routing; the
number of slots does not.
"""

import torch
from torch import Tensor


def count_experts(num_experts: int, *chosen: Tensor) -> Tensor:
    """Return how often each expert was chosen."""
    return count_by_group(num_experts, 1, *chosen)[0]


def count_by_group(num_experts: int, groups: int, *chosen: Tensor) -> Tensor:
    """Return the same, [groups, E], of each of ``groups`` consecutive groups of tokens."""
    flat = torch.cat([ids.reshape(groups, -1) for ids in chosen], 1)
    counts = torch.zeros(groups, num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add(1, flat, torch.ones_like(flat))


def meet(counts: Tensor, num_rows: int, token: Tensor | None = None, num_tokens: int = 0, nodes: int = 1) -> Tensor:
    """Return the counts of the experts on this rank. ``num_rows``: the sum of ``counts``, known without reading them.

    ``token`` [num_rows]: that of each row, if tokens go once to a rank, and before to each of ``nodes`` of ep.
    """
    return counts


def dispatch(rows: Tensor, here: Tensor) -> Tensor:
    return rows


def dispatch_tokens(tokens: Tensor, token: Tensor, here: Tensor) -> Tensor:
    """Return rows by expert, each a copy of its token."""
    return tokens.index_select(0, token)


def combine(rows: Tensor, token: Tensor, here: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Return the sums of the results of the rows of each token, in ``dtype``."""
    return rows.new_zeros(num_tokens, *rows.shape[1:]).index_add(0, token, rows).to(dtype)


def grouped_mm(rows: Tensor, weights: Tensor, here: Tensor) -> Tensor:
    return torch.cat([x @ w for x, w in zip(rows.split(here.tolist()), weights, strict=True)])


def part(rows: Tensor, here: Tensor, number: int) -> Tensor:
    return rows.split(here.tolist())[number]


def share(weight: Tensor) -> Tensor:
    """Return a weight that every rank has and its experts read: its gradient is that of all of them."""
    return weight


def own_member(*weights: Tensor) -> Tensor:
    """Return this rank's of the weights of several experts, one on each rank of ep. A lowered graph has it itself."""
    return weights[0]


def with_gradient(weight: Tensor) -> Tensor:
    """Return a weight that trains on some ranks. A frozen one gets a gradient too, and drops it: the backward of each
    rank has the exchanges of all."""
    is_frozen = torch.is_grad_enabled() and not weight.requires_grad
    return weight.detach().requires_grad_() if is_frozen else weight


def own_slices(value: Tensor, dim: int) -> Tensor:
    """Return the slices of this rank's experts, of a value of all experts that every rank has."""
    return value


def join(*parts: Tensor, dim: int = 0) -> Tensor:
    """Return the rows of all experts, by expert; or their slots, ``dim`` counting the experts."""
    return torch.cat(parts, dim)


def give_back(rows: Tensor, here: Tensor) -> Tensor:
    return rows


def count_taken(num_experts: int, *taken: Tensor) -> Tensor:
    """Return [1, E]: how many tokens each expert takes, of those that take equally many."""
    return taken[0].new_full((1, num_experts), sum(ids.numel() for ids in taken) // num_experts)


def send_slots(x: Tensor, experts: int, slots: int, counts: Tensor | None = None) -> Tensor:
    """Return the slots of this rank's experts. ``counts`` [groups, E], given once a layer: the number of a group's
    tokens that chose each expert."""
    return x


def slots_of(x: Tensor, experts: int, number: int, keepdim: bool) -> Tensor:
    return x.narrow(experts, number, 1) if keepdim else x.select(experts, number)


def return_slots(x: Tensor, experts: int, slots: int) -> Tensor:
    return x


def name_rows(num_tokens: int) -> Tensor:
    """Return (sample, place) of each token; ``meta["draw"]`` says how tokens are numbered."""
    place = torch.arange(num_tokens)
    return torch.stack([torch.zeros_like(place), place], 1)


def drop_rows(rows: Tensor, p: float, names: Tensor, sites: tuple[int, ...]) -> Tensor:
    """Return dropout of rows by name. ``meta["draw"]``: that of one row, but for the site: one for each rank of ep."""
    return torch.dropout(rows, p, True)


def ends_of(here: Tensor, dtype: torch.dtype) -> Tensor:
    return here.cumsum(0).to(dtype)


def ids_of(here: Tensor, num_rows: int) -> Tensor:
    """Return the expert of each row, counted from the first that is here."""
    return torch.arange(len(here), device=here.device).repeat_interleave(here, output_size=num_rows)


# of the calls above, those that move values between ranks of experts
MOVING = (dispatch, give_back)
OF_TOKENS = (dispatch_tokens, combine)
OF_SLOTS = (send_slots, return_slots)
EXCHANGES = (meet, *MOVING, *OF_TOKENS, *OF_SLOTS)

# those that give the same again for the same arguments, so that a backward may recompute them
OF_ONE_RANK = (grouped_mm, part, join, own_slices, slots_of, ends_of, ids_of, drop_rows, with_gradient)
REPEATABLE = frozenset((*MOVING, *OF_TOKENS, *OF_SLOTS, *OF_ONE_RANK))
