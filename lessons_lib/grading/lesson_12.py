"""The exercises of lesson 12: tokens dealt out so that all ranks work alike; heads exchanged for tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lessons_lib.grading.exercise import Axis, Budget, Claim, Draw, Exercise, Output, Trial, sizes_text
from lessons_lib.layout import coordinates
from lessons_lib.mesh import Group, exchange_exchange
from lessons_lib.sequence_parallel.assignment import Assignment, Contiguous, Striped, Zigzag
from lessons_lib.sequence_parallel.tokens import shard_tokens
from lessons_lib.sequence_parallel.ulysses import Ulysses

# ---- the solutions ----


def deal(text: Tensor, cp: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's tokens, their labels and their places in the text, dealt out in zigzag.

    ``text`` is whole on every rank, B x (S+1): the token at place i, of S places, has the next one for a
    label. Of 2 P equal pieces rank r gets piece r, and behind it piece 2 P - 1 - r. Tokens and labels are
    B x S/P, places S/P. Nothing is sent.
    """
    pieces = torch.arange(text.shape[1] - 1).chunk(2 * cp.size)
    at = torch.cat([pieces[cp.rank], pieces[2 * cp.size - 1 - cp.rank]])
    return text[:, at], text[:, at + 1], at


def pairs(at: Tensor) -> Tensor:
    """Return how many pairs of a query and a key a rank works on, under a causal mask.

    ``at`` holds the places of its tokens in the text; each sees itself and all before it, on whichever rank.
    """
    return (at + 1).sum()


def ulysses(q: Tensor, k: Tensor, v: Tensor, cp: Group) -> Tensor:
    """Return this rank's part of the causal attention, B x H x S/P x K, so that autograd finds dQ, dK and dV.

    ``q`` is B x H x S/P x K; ``k`` and ``v`` have the same shape or fewer heads, each for several
    neighbouring heads of q. P divides the heads of all three. Tokens lie contiguous, in the order of the
    ranks. Heads are exchanged for tokens and back: exchange_exchange(x, group, split_dim, concat_dim) of
    lessons_lib.mesh.
    """
    q, k, v = (exchange_exchange(x, cp, 1, 2) for x in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return exchange_exchange(o, cp, 2, 1)


# ---- the trials of the tokens ----

MESHES: tuple[Mapping[str, int], ...] = ({"cp": 2}, {"dp": 2, "cp": 3}, {"cp": 4})
B = 2


def _deal_trials(draw: Draw) -> list[Trial]:
    """A text for every mesh; then the pairs of ranks whose tokens lie in other ways, too."""
    texts = [_deal_trial(draw, sizes, 2 * sizes["cp"] * draw.between(2, 4)) for sizes in MESHES]
    tokens = draw.different(3, 9, 3)
    ways: tuple[Assignment, ...] = (Zigzag(), Contiguous(), Striped())
    return texts + [_pairs_trial(draw, way, 2 * n) for way, n in zip(ways, tokens, strict=True)]


def _deal_trial(draw: Draw, sizes: Mapping[str, int], S: int) -> Trial:
    P, places = sizes["cp"], coordinates(sizes)
    texts = [
        torch.tensor([draw.random.sample(range(1000), S + 1) for _ in range(B)])
        for _ in range(sizes.get("dp", 1))
    ]
    of = [texts[place.get("dp", 0)] for place in places]

    def dealt(assignment: Assignment) -> list[Tensor]:
        return [torch.tensor(assignment.positions(S, P, place["cp"])) for place in places]

    def at_places(at: Sequence[Tensor], later: int = 0) -> list[Tensor]:
        return [text[:, each + later].double() for text, each in zip(of, at, strict=True)]

    at = dealt(Zigzag())
    tokens, labels = at_places(at), at_places(at, later=1)
    pieces = torch.arange(S).chunk(2 * P)
    others = {
        "they lie in contiguous pieces, so the last rank works most": dealt(Contiguous()),
        "every P-th one was taken: that is striped, and not zigzag": dealt(Striped()),
        "rank r has pieces r and r + P: its second one is 2 P - 1 - r, counted from the back": [
            torch.cat([pieces[place["cp"]], pieces[P + place["cp"]]]) for place in places
        ],
        "the piece from the back lies in front of the other": [each.roll(S // P // 2) for each in at],
    }
    return Trial(
        function="deal",
        sizes=sizes,
        facts=sizes_text(sizes, S=S),
        args=[(text, Axis("cp")) for text in of],
        outputs=[
            Output("tokens", "tokens", tokens, None, {why: at_places(way) for why, way in others.items()}),
            Output(
                "labels",
                "labels",
                labels,
                None,
                {
                    "they were shifted after the cut, so the last of a piece has a token of its own rank": [
                        each.roll(-1, 1) for each in tokens
                    ],
                    "these are the tokens themselves: a label is the next token": tokens,
                },
            ),
            Output(
                "places",
                "places",
                [each.double() for each in at],
                None,
                {
                    "they restart at 0 on every rank, where a token keeps its place": [
                        torch.arange(S // P).double() for _ in places
                    ],
                    **{why: [each.double() for each in way] for why, way in others.items()},
                },
            ),
        ],
        budgets={"forward": Budget.nothing("every rank has the whole text")},
    )


def _pairs_trial(draw: Draw, assignment: Assignment, s: int) -> Trial:
    P = draw.between(3, 4)
    at = [torch.tensor(assignment.positions(P * s, P, rank)) for rank in range(P)]

    def numbers(*each: Tensor) -> list[Tensor]:
        return [number.double() for number in each]

    return Trial(
        function="pairs",
        sizes={"cp": P},
        facts=f"P={P}, S={P * s}, {type(assignment).__name__.lower()}",
        args=[(each,) for each in at],
        outputs=[
            Output(
                "pairs",
                "pairs",
                numbers(*((each + 1).sum() for each in at)),
                None,
                {
                    "a token sees itself, too: that at place i sees i + 1 keys": numbers(
                        *(each.sum() for each in at)
                    ),
                    "these are the pairs among the rank's own tokens, and it sees keys of others": numbers(
                        *((each[:, None] >= each).sum() for each in at)
                    ),
                    "these are the pairs without a mask": numbers(*(torch.tensor(P * s * s) for _ in at)),
                },
            )
        ],
        budgets={"forward": Budget.nothing("a rank knows where its tokens stand")},
    )


# ---- the trials of the heads ----

K = 16


def _ulysses_trials(draw: Draw) -> list[Trial]:
    """Half or a third as many heads of keys as of queries, or as many; the last sizes twice."""
    trials = []
    for sizes, share in zip(MESHES, (2, 3, 1), strict=True):
        s, H_kv = draw.between(3, 4), 2 * sizes["cp"]
        trials.append(_ulysses_trial(draw, sizes, s, share * H_kv, H_kv))
    return [*trials, _ulysses_trial(draw, sizes, s, share * H_kv, H_kv)]


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ulysses_trial(draw: Draw, sizes: Mapping[str, int], s: int, H: int, H_kv: int) -> Trial:
    P, places = sizes["cp"], coordinates(sizes)
    texts = [
        tuple(draw.tensor(B, heads, P * s, K) for heads in (H, H, H_kv, H_kv))
        for _ in range(sizes.get("dp", 1))
    ]  # dO, Q, K and V

    def each(wholes: Sequence[Tensor]) -> list[Tensor]:
        return [
            wholes[place.get("dp", 0)][:, :, place["cp"] * s : (place["cp"] + 1) * s].contiguous()
            for place in places
        ]

    def results(attend: Attend) -> list[list[Tensor]]:
        """O, dQ, dK and dV of every rank."""
        of_texts = []
        for do, *leaves in texts:
            q, k, v = (x.clone().requires_grad_() for x in leaves)
            o = attend(q, k, v)
            of_texts.append((o.detach(), *torch.autograd.grad(o, (q, k, v), do)))
        return [each(wholes) for wholes in zip(*of_texts, strict=True)]

    right = results(_causal)
    wrong = {
        "each rank has looked at its own tokens alone": results(lambda q, k, v: _of_own(q, k, v, s)),
        "tokens look at what comes after them: is_causal=True": results(_all_seen),
    }
    if H_kv < H:
        wrong["a head of keys goes with neighbouring heads of queries, not with every other one"] = results(
            lambda q, k, v: _interleaved(q, k, v, P)
        )
    if s % P == 0:
        wrong["split_dim and concat_dim are the wrong way round: tokens are to be joined, heads split"] = (
            results(lambda q, k, v: _of_own(q, k, v, s // P))
        )
    do, *args = (each([text[at] for text in texts]) for at in range(4))
    n, n_kv = B * H * s * K, B * H_kv * s * K
    sent = Fraction((P - 1) * (2 * n + 2 * n_kv), P)
    why = "q, k, v and o are exchanged once each"
    return Trial(
        function="ulysses",
        sizes=sizes,
        facts=f"{sizes_text(sizes, H=H)}, {H_kv} heads of keys, S={P * s}",
        args=[(*(x.clone().requires_grad_() for x in mine), Axis("cp")) for mine in zip(*args, strict=True)],
        outputs=[
            Output(
                name,
                claim,
                right[at],
                None,
                {why: result[at] for why, result in wrong.items()},
            )
            for at, (name, claim) in enumerate(
                (("O", "forward"), ("dQ", "gradients"), ("dK", "gradients"), ("dV", "gradients"))
            )
        ],
        upstream=do,
        budgets={
            "forward": Budget.even(sent, sizes, why),
            "backward": Budget.even(sent, sizes, f"the gradients of {why}"),
        },
        wholes={"Q": P * n, "K": P * n_kv},
        spare=4 * (n + n_kv) + 3 * B * H * P * s * s,
        metered=("forward",),
    )


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _all_seen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _of_own(q: Tensor, k: Tensor, v: Tensor, s: int) -> Tensor:
    blocks = zip(*(x.split(s, 2) for x in (q, k, v)), strict=True)
    return torch.cat([_causal(*block) for block in blocks], 2)


def _interleaved(q: Tensor, k: Tensor, v: Tensor, P: int) -> Tensor:
    """What comes out if the heads of keys that a rank gets are repeated one after the other."""
    share = q.shape[1] // k.shape[1]
    k, v = (torch.cat([each.repeat(1, share, 1, 1) for each in x.chunk(P, 1)], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True)


EXERCISES = (
    Exercise(
        id="12-zigzag",
        title="Tokens in zigzag",
        objective="Deal the tokens of a text out so that all ranks work alike, with their labels and places.",
        functions=(deal, pairs),
        claims=(
            Claim("tokens", "tokens: two pieces each", 2),
            Claim("labels", "labels: the next token, also at a border", 2),
            Claim("places", "places: those in the whole text", 1),
            Claim("pairs", "pairs of a rank", 1),
            Claim("traffic", "nothing is sent", 1),
        ),
        trials=_deal_trials,
        hints=(
            "Deal out the places and not the tokens: what belongs to a place is text[:, place].",
            "torch.arange(S).chunk(2 * P) makes the pieces. The label of the token at place i is at place "
            "i + 1, whichever rank has it.",
            "at = torch.cat([pieces[cp.rank], pieces[2 * cp.size - 1 - cp.rank]]); then text[:, at] and "
            "text[:, at + 1].",
        ),
        shown=(Zigzag.positions, shard_tokens),
    ),
    Exercise(
        id="12-ulysses",
        title="Ulysses",
        objective="Exchange heads for tokens, attend to whole sequences, and exchange back, with gradients.",
        functions=(ulysses,),
        claims=(
            Claim("forward", "O: each rank's tokens, all heads", 2),
            Claim("gradients", "dQ, dK and dV", 2),
            Claim("traffic", "four exchanges each way", 2),
            Claim("memory", "a P-th of the heads, and nothing whole", 1),
            Claim("no deadlock", "no rank is left waiting, whoever begins", 1),
        ),
        trials=_ulysses_trials,
        hints=(
            "Which dim has a rank whole before the exchange, and which one must it have whole for attention?",
            "On the way in dim 1 is split and dim 2 joined; on the way back the other way round.",
            "exchange_exchange(x, cp, 1, 2) for q, k and v; scaled_dot_product_attention(q, k, v, "
            "is_causal=True, enable_gqa=True); exchange_exchange(o, cp, 2, 1).",
        ),
        shown=(Ulysses.forward, Ulysses.backward),
    ),
)
