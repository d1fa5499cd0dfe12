"""Explorer 7: attention over a sequence that is cut, coloured by who computes what, and when."""

from __future__ import annotations

from functools import cache

from lessons_lib.errors import RefusedError
from lessons_lib.sequence_parallel.assignment import Contiguous, busy, pairs
from lessons_lib.sequence_parallel.attentions import ATTENTIONS
from lessons_lib.views import Figure
from lessons_lib.views.attention import Mask, Shared, attention_picture
from lessons_lib.widgets.explorer import Choice, Explorer, Slider

METHODS = ("ring", "zigzag", "striped", "ulysses")
RANKS = ("2", "4", "8")
MASKS = {"causal": True, "none": False}
S, H, K = 16, 8, 16  # tokens, heads, and width of a head, of the small case that is drawn


def attention_explorer(
    method: str = "ring", ranks: str = "4", mask: str = "causal", *, theme: str = "light"
) -> Explorer:
    """See which rank computes which pairs of a query and a key, in which step, and for how long it waits.

    >>> print(attention_explorer("zigzag", "4").figure.alt)
    zigzag: 16 tokens on 4 ranks, causal mask: ranks compute 34, 34, 34, 34 pairs and are 100.0 % busy. \
Each rank sends 10,240 elements.

    It opens with a question: all ranks have equally many tokens; which assignment lets no one wait? Step 0
    shows all steps, any other one of them.
    Raises RefusedError for a method, a number of ranks or a mask that it does not know.
    """
    for name, value, known in (("method", method, METHODS), ("ranks", ranks, RANKS), ("mask", mask, MASKS)):
        if value not in known:
            raise RefusedError(f"{name}={value!r} is unknown; known: {', '.join(map(repr, known))}.")

    def draw(method: str, ranks: str, mask: str, step: int) -> Figure:
        shared = shared_out(method, int(ranks), mask)
        return attention_picture(shared, step - 1 if step else None, theme=theme)

    return Explorer(
        draw,
        {
            "method": Choice("Attention", METHODS),
            "ranks": Choice("Ranks", RANKS),
            "mask": Choice("Mask", tuple(MASKS)),
            "step": Slider("Step (0: all)", 0, 8),
        },
        start={"method": method, "ranks": ranks, "mask": mask, "step": 0},
        settings={
            "an early and a late piece": {"method": "zigzag", "ranks": "4", "mask": "causal", "step": 0},
            "8 ranks, one step": {"method": "ring", "ranks": "8", "mask": "causal", "step": 6},
        },
        limits=lambda values: {"step": len(shared_out(values["method"], int(values["ranks"]), "none").pairs)},
    )


@cache
def shared_out(method: str, P: int, mask: str) -> Shared:
    """What is drawn of a method: pairs by step and rank, counted as :func:`pairs` counts them.

    With Ulysses a rank computes all pairs, of its share of the heads: as much work as its share of the pairs.
    """
    causal, attention = MASKS[mask], ATTENTIONS[method]
    attention.check(S, P, H)
    held = [attention.assignment.positions(S, P, rank) for rank in range(P)]
    holders = tuple(next(rank for rank in range(P) if token in held[rank]) for token in range(S))
    if method == "ulysses":
        steps = tuple(tuple(None if causal and k > q else 0 for k in range(S)) for q in range(S))
        masks = tuple(Mask(f"rank {r}, {_heads(r, P)}", (r,) * S, steps) for r in range(P))
        all_pairs = sum(map(sum, pairs(Contiguous(), S, P, causal)))
        counted = [[all_pairs // P] * P]
    else:
        steps = tuple(
            tuple(None if causal and k > q else (holders[q] - holders[k]) % P for k in range(S))
            for q in range(S)
        )
        masks = (Mask("all heads", holders, steps),)
        counted = pairs(attention.assignment, S, P, causal)
    title = f"{method}: {S} tokens on {P} ranks, {'causal mask' if causal else 'no mask'}"
    sent = sum(attention.traffic(1, S, H, K, P).values())
    return Shared(
        title,
        masks,
        holders,
        tuple(map(tuple, counted)),
        float(busy(counted)),
        f"{sent:,} elements",
        axis=S * S // P,  # what each rank has to do without a mask
    )


def _heads(rank: int, P: int) -> str:
    first, last = rank * H // P, (rank + 1) * H // P - 1
    return f"head {first}" if first == last else f"heads {first} to {last}"
