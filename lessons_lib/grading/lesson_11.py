"""The exercises of lesson 11: attention whose keys come in blocks, and ring attention in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lessons_lib.grading.exercise import Axis, Budget, Claim, Draw, Exercise, Output, Trial, sizes_text
from lessons_lib.grading.rules import no_collective, only_to_the_right
from lessons_lib.layout import coordinates
from lessons_lib.mesh import Group
from lessons_lib.sequence_parallel.online_softmax import attend_part, finish, gradients_of_part, merge
from lessons_lib.sequence_parallel.ring import RingAttention

# ---- the solutions ----


def attend_in_blocks(q: Tensor, ks: list[Tensor], vs: list[Tensor], visible: list[Tensor]) -> Tensor:
    """Return the attention of the queries to the keys of all blocks.

    ``q`` is H s K; block n has the keys ``ks[n]`` and the values ``vs[n]``, H t K, and ``visible[n]``, s t,
    is True where a query sees a key. Every query sees a key of some block, and may see none of another.
    Scores are q k / sqrt(K), and those of one block at a time are all that is held.
    """
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -math.inf)
    for k, v, seen in zip(ks, vs, visible, strict=True):
        o, lse = _merged(o, lse, q, k, v, seen)
    return o


def _merged(o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """An answer, after one more block of keys."""
    scores = _scores(q, k, seen)
    more = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
    finite = more.masked_fill(more == -math.inf, 0)
    return (lse - finite).exp() * o + (scores - finite).exp() @ v, more


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, at: Tensor, cp: Group) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the causal attention, H s K, and the lse of each of its rows, H s 1.

    ``q``, ``k`` and ``v`` are this rank's, H s K. ``at[r]`` holds the places in the text of the s tokens of
    rank r of ``cp``; a token sees itself and those whose place is before its own. Keys and values go to the
    right neighbour, P - 1 times, and the scores of one block at a time are all that is held.
    """
    o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -math.inf)
    for hop in range(cp.size):
        seen = at[cp.rank][:, None] >= at[(cp.rank - hop) % cp.size]
        o, lse = _merged(o, lse, q, k, v, seen)
        if hop < cp.size - 1:
            k, v = cp.shift(torch.stack([k, v]), 1)
    return o, lse


def ring_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, at: Tensor, cp: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's parts of dQ, dK and dV, each H s K.

    ``do`` is this rank's part of dO; ``o`` and ``lse`` are what ring_forward returned, the rest is as there.
    Keys and values go to the right neighbour P - 1 times, and their gradients go with them, P times.
    """
    delta, scale = (do * o).sum(-1, keepdim=True), math.sqrt(q.shape[-1])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for hop in range(cp.size):
        seen = at[cp.rank][:, None] >= at[(cp.rank - hop) % cp.size]
        weights = (_scores(q, k, seen) - lse).exp()
        dz = weights * (do @ v.mT - delta) / scale
        dq += dz @ k
        dk, dv = cp.shift(torch.stack([dk + dz.mT @ q, dv + weights.mT @ do]), 1)
        if hop < cp.size - 1:
            k, v = cp.shift(torch.stack([k, v]), 1)
    return dq, dk, dv


# ---- the trials ----

H, K = 2, 3
TWO = {"cp": 2}
ALL_SCORES = "Are the scores of all keys in one tensor? Those of one block are enough at a time."
IN_BLOCKS = "keys and values are passed on P - 1 times"
FROM_THE_LEFT = "keys come from the left: after hop shifts they are those of rank (cp.rank - hop) % cp.size"
NOT_SCALED = "scores are q k / sqrt(K): they were not divided by sqrt(K)"
HOME = "keys and values are passed on P - 1 times, and their gradients P times"


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return _scores(q, k, seen).softmax(-1) @ v


def _merge_trials(draw: Draw) -> list[Trial]:
    """Blocks in any order; a first block that nobody sees; large scores; the last sizes twice."""
    n_keys, s = draw.different(6, 12, 7), draw.between(8, 12)
    return [
        _merge_trial(draw, "order", s, n_keys, "7 blocks"),
        _merge_trial(draw, "hidden", s, n_keys[::-1], "the first block all hidden", n_hidden=1),
        _merge_trial(draw, "large", s, n_keys, "scores up to some thousands", scale=1000),
        _merge_trial(draw, "order", s, n_keys, "7 blocks"),
    ]


def _merge_trial(
    draw: Draw, claim: str, s: int, n_keys: Sequence[int], facts: str, n_hidden: int = 0, scale: float = 1.0
) -> Trial:
    args, wholes = [], []
    mistakes: dict[str, list[Tensor]] = {}
    for _ in range(TWO["cp"]):
        q = scale * draw.tensor(H, s, K)
        ks, vs = ([draw.tensor(H, t, K) for t in n_keys] for _ in range(2))
        visible = [draw.tensor(s, t) > -0.5 for t in n_keys]
        for at in range(n_hidden):
            visible[at][:] = False
        visible[-1][:, 0] = True
        args.append((q, ks, vs, visible))
        wholes.append(_attention(q, torch.cat(ks, -2), torch.cat(vs, -2), torch.cat(visible, -1)))
        for what, wrong in _merged_wrongly(q, ks, vs, visible).items():
            mistakes.setdefault(what, []).append(wrong)
    block = H * s * max(n_keys)
    return Trial(
        function="attend_in_blocks",
        sizes=TWO,
        facts=f"s={s}, {facts}",
        args=args,
        outputs=[Output("o", claim, wholes, None, mistakes)],
        spare=5 * block + 6 * wholes[0].numel(),
        too_much=ALL_SCORES,
    )


def _merged_wrongly(
    q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], visible: Sequence[Tensor]
) -> dict[str, Tensor]:
    """What the usual mistakes make of the blocks."""
    blocks = list(zip(ks, vs, visible, strict=True))
    k, v, seen = torch.cat([*ks], -2), torch.cat([*vs], -2), torch.cat([*visible], -1)
    parts = torch.stack([_attention(q, *block).nan_to_num() for block in blocks])
    lse = torch.stack([_scores(q, k, seen).logsumexp(-1, keepdim=True) for k, _, seen in blocks])
    so_far = lse.logcumsumexp(0)
    return {
        "this is the mean of the blocks' answers: a block counts by the sum of its exp(score)": parts.mean(0),
        "this is the answer of the last block alone": parts[-1],
        "what came before was not scaled down: of a larger sum it is a smaller share": (
            (lse - so_far).exp().nan_to_num() * parts
        ).sum(0),
        "lse began with 0, as if a score of 0 had been seen: it begins with -inf": (
            so_far[-1].sigmoid() * _attention(q, k, v, seen)
        ),
        "queries have looked at keys that visible hides": _attention(q, k, v, torch.ones_like(seen)),
        NOT_SCALED: _attention(q * math.sqrt(K), k, v, seen),
    }


class Ring:
    """The tensors of a trial. Data-parallel rows of the mesh have texts of their own."""

    def __init__(self, draw: Draw, sizes: Mapping[str, int], s: int, contiguous: bool) -> None:
        self.sizes, self.P, self.s = sizes, sizes["cp"], s
        S = self.P * s
        order = torch.arange(S) if contiguous else torch.tensor(draw.random.sample(range(S), S))
        self.at = order.view(self.P, s)
        self.texts = [
            [draw.tensor(H, self.P, s, K) for _ in range(4)] for _ in range(sizes.get("dp", 1))
        ]  # dO, Q, K and V
        self.seen = self.at.flatten()[:, None] >= self.at.flatten()

    def each(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The part of every rank, of the tensor H P s _ of its data-parallel row."""
        return [wholes[place.get("dp", 0)][:, place["cp"]].contiguous() for place in coordinates(self.sizes)]

    def whole(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)

    def cut(self, X: Tensor) -> Tensor:
        return X.unflatten(1, (self.P, self.s))

    def serial(self, seen: Tensor, times: float = 1.0) -> list[tuple[Tensor, ...]]:
        """For every text O, lse, dQ, dK and dV, on one rank, by autograd; of scores times a number."""
        results = []
        for text in self.texts:
            do, *leaves = map(self.whole, text)
            leaves = [x.clone().requires_grad_() for x in leaves]
            q, k, v = leaves[0] * times, *leaves[1:]
            O = _attention(q, k, v, seen)
            lse = _scores(q, k, seen).logsumexp(-1, keepdim=True)
            gradients = torch.autograd.grad(O, leaves, do)
            results.append(tuple(self.cut(x.detach()) for x in (O, lse, *gradients)))
        return results

    def of(self, results: Sequence[tuple[Tensor, ...]], number: int) -> list[Tensor]:
        return self.each([result[number] for result in results])

    @property
    def restarted(self) -> Tensor:
        """What is seen if every rank counts its tokens from 0."""
        places = torch.arange(self.s).repeat(self.P)
        return places[:, None] >= places

    @property
    def own(self) -> Tensor:
        """What is seen if every rank has its own keys alone."""
        ranks = torch.arange(self.P).repeat_interleave(self.s)
        return self.seen & (ranks[:, None] == ranks)

    def seen_of(self, source: Callable[[int, int], int]) -> Tensor:
        """What is seen if rank r takes the keys of rank s for those of rank source(r, s)."""
        rows = [
            torch.cat([self.at[r][:, None] >= self.at[source(r, s)] for s in range(self.P)], 1)
            for r in range(self.P)
        ]
        return torch.cat(rows)

    @property
    def facts(self) -> str:
        order = "contiguous" if self.at.diff().eq(1).all() else "in drawn places"
        return f"{sizes_text(self.sizes, s=self.s)}, tokens {order}"


def _ring_trials(draw: Draw) -> list[Trial]:
    """Tokens in drawn places, and contiguous ones, with whole blocks hidden; the last sizes twice."""
    s, other = draw.different(10, 14, 2)
    rings = [
        Ring(draw, {"cp": 2}, other, contiguous=False),
        Ring(draw, {"dp": 2, "cp": 3}, s, contiguous=True),
        Ring(draw, {"cp": 6}, s, contiguous=False),
        Ring(draw, {"cp": 6}, s, contiguous=True),
    ]
    return [trial(of) for of in rings for trial in (_forward, _backward)]


def _forward(of: Ring) -> Trial:
    right = of.serial(of.seen)
    results = {
        "the mask was made of places that restart at 0 on every rank": of.serial(of.restarted),
        "tokens look at what comes after them: is there a mask?": of.serial(torch.ones_like(of.seen)),
        "each rank has looked at its own keys alone": of.serial(of.own),
        "the places of this rank's own tokens were taken for those of the keys": of.serial(
            of.seen_of(lambda r, s: r)
        ),
        FROM_THE_LEFT: of.serial(of.seen_of(lambda r, s: (2 * r - s) % of.P)),
        NOT_SCALED: of.serial(of.seen, times=math.sqrt(K)),
    }
    mistakes = [{what: of.of(result, number) for what, result in results.items()} for number in (0, 1)]
    n = H * of.s * K
    return Trial(
        function="ring_forward",
        sizes=of.sizes,
        facts=of.facts,
        args=[
            (q, k, v, of.at, Axis("cp"))
            for q, k, v in zip(*(of.each([text[at] for text in of.texts]) for at in (1, 2, 3)), strict=True)
        ],
        outputs=[
            Output("o", "forward", of.of(right, 0), None, mistakes[0]),
            Output("lse", "lse", of.of(right, 1), None, mistakes[1]),
        ],
        budgets={"forward": Budget.even(2 * (of.P - 1) * n, of.sizes, IN_BLOCKS)},
        spare=8 * n + 5 * H * of.s**2,
        too_much=ALL_SCORES,
        rules=(no_collective, only_to_the_right),
    )


def _backward(of: Ring) -> Trial:
    right = of.serial(of.seen)
    own = of.serial(of.own)
    tensors = [of.each([text[at] for text in of.texts]) for at in range(4)]
    names = ("dQ", "dK", "dV")
    outputs = []
    for number, name in enumerate(names, 2):
        mistakes = {
            "each rank has looked at its own keys alone": of.of(own, number),
            **_with_wrong_rows(of, number),
        }
        outputs.append(Output(name, name, of.of(right, number), None, mistakes))
    n, messages = H * of.s * K, 2 * (of.P - 1) + 2 * of.P
    n_ranks = len(coordinates(of.sizes))
    return Trial(
        function="ring_backward",
        sizes=of.sizes,
        facts=of.facts,
        args=[
            (*each, of.at, Axis("cp"))
            for each in zip(*tensors, of.of(right, 0), of.of(right, 1), strict=True)
        ],
        outputs=outputs,
        budgets={"forward": Budget.even(messages * n, of.sizes, HOME, possible=4 * (of.P - 1) * n * n_ranks)},
        spare=12 * n + 6 * H * of.s**2,
        too_much=ALL_SCORES,
        rules=(no_collective, only_to_the_right),
    )


def _with_wrong_rows(of: Ring, number: int) -> dict[str, list[Tensor]]:
    """Gradients whose rows are not what they are of the whole softmax."""
    by_mistake: dict[str, list[Tensor]] = {}
    for name, wrong in (
        ("each block had a softmax of its own: the weights are exp(scores - lse), with the final lse", "lse"),
        ("delta is missing, the sum of dO times O of each row", "delta"),
        ("dZ was not divided by sqrt(K), as the scores were", "scale"),
        ("hidden scores are -inf in the backward, too", "mask"),
    ):
        wholes = []
        for text in of.texts:
            do, q, k, v = map(of.whole, text)
            scores = _scores(q, k, of.seen)
            lse, weights = scores.logsumexp(-1, keepdim=True), scores.softmax(-1)
            O = weights @ v
            delta = (do * O).sum(-1, keepdim=True) * (wrong != "delta")
            if wrong == "lse":
                blocks = scores.split(of.s, -1)
                weights = torch.cat([block.softmax(-1).nan_to_num() for block in blocks], -1)
            if wrong == "mask":
                weights = (q @ k.mT / math.sqrt(K) - lse).exp()
            dz = weights * (do @ v.mT - delta) / (1 if wrong == "scale" else math.sqrt(K))
            wholes.append(of.cut((dz @ k, dz.mT @ q, weights.mT @ do)[number - 2]))
        by_mistake[name] = of.each(wholes)
    return by_mistake


EXERCISES = (
    Exercise(
        id="11-merge",
        title="Attention in blocks",
        objective="Put the exact attention together from blocks of keys, in any order.",
        functions=(attend_in_blocks,),
        claims=(
            Claim("order", "the exact answer, in any order", 2),
            Claim("hidden", "a block in which nothing is seen", 2),
            Claim("large", "scores of some thousands", 1),
            Claim("memory", "no more than a block of scores", 1),
        ),
        trials=_merge_trials,
        hints=(
            "Keep the answer so far, and for each row the logarithm of the sum of exp(score) so far. What "
            "share of the new sum is the old one?",
            "new = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True)): the old answer counts "
            "exp(lse - new), a new score exp(score - new). Begin with 0 and -inf.",
            "Where new is still -inf, subtract 0 instead: finite = new.masked_fill(new == -torch.inf, 0). "
            "Then o = (lse - finite).exp() * o + (scores - finite).exp() @ v.",
        ),
        shown=(attend_part, merge, finish),
    ),
    Exercise(
        id="11-ring",
        title="Ring attention",
        objective="Compute causal ring attention, forward and backward, wherever the tokens lie.",
        functions=(ring_forward, ring_backward),
        claims=(
            Claim("forward", "O: each rank's rows", 2),
            Claim("lse", "lse of each row", 1),
            Claim("dQ", "dQ: stays at home", 2),
            Claim("dK", "dK: home after P hops", 2),
            Claim("dV", "dV: home after P hops", 2),
            Claim("traffic", "P - 1 hops, and P for dK and dV", 2),
            Claim("memory", "no more than a block of scores", 2),
            Claim("no deadlock", "no rank is left waiting, whoever begins", 1),
        ),
        trials=_ring_trials,
        hints=(
            "cp.shift(x, 1) sends x to the right and returns what came from the left. Whose keys does a rank "
            "have after one shift, and where do their tokens stand?",
            "After hop shifts a rank has the keys of rank (cp.rank - hop) % cp.size. Their gradients so far "
            "came along with them: add your term, then send both on.",
            "Backward, for each block: weights = (scores - lse).exp(); dz = weights * (do @ v.mT - delta) / "
            "sqrt(K), with delta = (do * o).sum(-1, keepdim=True); dq += dz @ k; then shift dk + dz.mT @ q "
            "and dv + weights.mT @ do, also after the last block.",
        ),
        shown=(RingAttention.forward, RingAttention.backward, gradients_of_part),
    ),
)
