"""Every pipeline schedule: who does what in which order.

Pure functions of sizes; an action is ``(kind, stage, microbatch)``, as :mod:`.actions` says.

    p   ranks               r   this rank, from 0
    m   micro-batches       k   a micro-batch, from 0
    v   stages of a rank, its chunks
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lessons_lib.errors import RefusedError
from lessons_lib.pipeline_parallel.actions import Action, Pair, Row, Schedule

# ---- one stage per rank


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards.

    Bubble (p-1)(F+B), that is (p-1)/m of the ideal time; every rank keeps m micro-batches.
    Source: Huang et al. 2019 (1811.06965).
    """
    _check(p=p, m=m)
    return Schedule("GPipe", tuple((*_all("F", r, m), *_all("B", r, m)) for r in range(p)), p, m)


def one_f_one_b(p: int, m: int) -> Schedule:
    """Forwards until the first gradient can be there, then one forward and one backward in turn.

    >>> print(one_f_one_b(2, 3))
    rank 0  0F0 0F1  .  0B0 0F2 0B1  .  0B2
    rank 1   .  1F0 1B0 1F1 1B1 1F2 1B2  .

    Bubble as GPipe's; rank r keeps p-r micro-batches.
    Source: Narayanan et al. 2021 (2006.09503), PipeDream-Flush; Fan et al. 2021 (2007.01045), DAPPLE.
    """
    _check(p=p, m=m)
    return Schedule("1F1B", tuple(_one_forward_one_backward(p, m, r) for r in range(p)), p, m)


def _one_forward_one_backward(p: int, m: int, r: int) -> Row:
    F, B = _all("F", r, m), _all("B", r, m)
    warm = min(p - 1 - r, m)
    return (*F[:warm], *_in_turn(F[warm:], B), *B[m - warm :])


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with the backward split: nobody waits for W, so rank r puts it off by r micro-batches.

    Bubble (p-1)(F+I-W) for W <= F, I and m >= p; memory as 1F1B's at most.
    Source: Qi et al. 2024 (2401.10241), section 2.
    """
    _check(p=p, m=m)
    return Schedule("ZB-H1", tuple(_split(m, r, warm=p - 1 - r, lag=r) for r in range(p)), p, m)


def zb_h2(p: int, m: int) -> Schedule:
    """More forwards at the start and W put off longer: ranks start in steps, and never stand still after.

    Bubble (p-1)(F+I-2W) within a rank's own span, for W <= F, I; rank 0 keeps 2p-1 micro-batches.
    The step of (p-1) F at start and end remains, unless the next iteration may begin there, which the
    optimizer must allow for. Needs m >= 2p-1.
    Source: Qi et al. 2024 (2401.10241), section 2.
    """
    _check(p=p, m=m)
    _check_enough("ZB-H2", "2p-1", 2 * p - 1, m)
    return Schedule("ZB-H2", tuple(_split(m, r, warm=2 * (p - 1 - r), lag=2 * r) for r in range(p)), p, m)


def _split(m: int, r: int, warm: int, lag: int) -> Row:
    """``warm`` forwards, then in turn a forward, the next I, and the W of ``lag`` micro-batches before."""
    F, I, W = (_all(kind, r, m) for kind in "FIW")
    row = F[:warm]
    for k in range(m):
        row += [*F[warm + k : warm + k + 1], I[k]]  # the one F, as long as there are any
        row += W[k - lag : k - lag + 1] if k >= lag else []
    return (*row, *W[max(m - lag, 0) :])


# ---- v stages per rank, its chunks: stage c p + r is chunk c of rank r


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """1F1B over v chunks: micro-batches go round in groups of p, each group through every chunk in turn.

    >>> print(interleaved(2, 2, 2))
    rank 0  0F0 0F1 2F0 2F1  .  2B0  .  2B1 0B0 0B1
    rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1  .

    Bubble (p-1)(F+B)/v, with F and B of a rank's whole stage; v times the messages. m must be a multiple
    of p, so that every group is whole.
    Source: Narayanan et al. 2021 (2104.04473), section 2.2; warm-up as in Megatron-LM.
    """
    _check(p=p, m=m, v=v)
    _check_multiple("interleaved 1F1B", "p", p, m)

    def row(r: int) -> Row:
        group = [(c, k) for g in range(0, m, p) for c in range(v) for k in range(g, g + p)]
        F = [Action("F", c * p + r, k) for c, k in group]
        B = [Action("B", (v - 1 - c) * p + r, k) for c, k in group]
        warm = min(2 * (p - 1 - r) + (v - 1) * p, m * v)
        return (*F[:warm], *_in_turn(F[warm:], B), *B[m * v - warm :])

    return Schedule("interleaved 1F1B", tuple(map(row, range(p))), p * v, m)


def breadth_first(p: int, m: int, v: int = 2) -> Schedule:
    """All micro-batches through a chunk before the next chunk begins; then back the same way.

    Bubble (p-1)(F+B)/v; every rank keeps m micro-batches. A chunk's weights are needed in one stretch, so a
    sharded rank gathers them once per pass.
    Source: Lamy-Poirier 2023 (2211.05953).
    """
    _check(p=p, m=m, v=v)
    chunks = range(v)
    rows = tuple(
        tuple(action for c in chunks for action in _all("F", c * p + r, m))
        + tuple(action for c in reversed(chunks) for action in _all("B", c * p + r, m))
        for r in range(p)
    )
    return Schedule("breadth-first", rows, p * v, m)


# ---- two chunks per rank in a V: rank r has stages r and 2p-1-r, so rank 0 has the first and the last


def zb_v(p: int, m: int) -> Schedule:
    """Zero bubble with the memory of 1F1B, the same on every rank.

    No bubble within a rank's own span where F = I = W; every rank keeps p micro-batches. Needs m >= 2p-1.
    Source: Qi et al. 2024 (2401.10241), section 6.
    """
    _check(p=p, m=m)
    _check_enough("ZB-V", "2p-1", 2 * p - 1, m)

    def row(r: int) -> Row:
        tokens = [
            *_times(2 * (p - r) - 1, "F0"),
            *_times(r, "F1 F0"),
            *_times(p - r, "F1 I1 W1"),
            *_times(m - 2 * p + r + 1, "F0 I0 W0 F1 I1 W1"),
            *_times(p - r - 1, "I0 W0 F1 I1 W1"),
            *_times(r, "I0 I1"),
            *_times(p - r, "I0 W0"),
            *_times(r, "W1"),
            *_times(r, "W0"),
        ]
        return _numbered(tokens, stages=(r, 2 * p - 1 - r))

    return Schedule("ZB-V", tuple(map(row, range(p))), 2 * p, m)


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe cut in half: both directions of it on the same rank, so that no weights are held twice.

    Bubble (p-1)(FB+B-3W), times per action; a rank keeps (2p+1)/2 micro-batches. Needs m >= 2p.
    Source: DeepSeek-AI, repository of DualPipe, where it is credited to Sea AI Lab ("cut in half").
    """
    _check(p=p, m=m)
    _check_enough("DualPipeV", "2p", 2 * p, m)
    rows = tuple(_numbered(_dualpipe(p, r, m), stages=(r, 2 * p - 1 - r)) for r in range(p))
    return Schedule("DualPipeV", rows, 2 * p, m)


# ---- two directions: rank r has stage r of one copy of the model and stage p-1-r of the other


def dualpipe(p: int, m: int) -> Schedule:
    """Micro-batches enter at both ends; a forward of one direction overlaps a backward of the other.

    Bubble (p/2-1)(FB+B-3W); a rank keeps p+1 micro-batches and the weights of two stages. The first half of
    the micro-batches enters at rank 0, the other at rank p-1. Needs p even, m even and m >= 2p.
    Source: DeepSeek-AI 2024 (2412.19437), section 3.2.1; the phases as in the repository of DualPipe.
    """
    _check(p=p, m=m)
    _check_multiple("DualPipe", "2, since micro-batches enter at both ends", 2, p, letter="p")
    _check_multiple("DualPipe", "2, since micro-batches enter at both ends", 2, m)
    _check_enough("DualPipe", "2p", 2 * p, m)
    half = m // 2

    def row(r: int) -> Row:
        chains = [(r, 0), (p - 1 - r, half)]  # stage and first micro-batch, of either direction
        (near, near_first), (far, far_first) = chains if r < p // 2 else reversed(chains)
        tokens = _dualpipe(p // 2, min(r, p - 1 - r), half)
        return _numbered(tokens, stages=(near, far), first=(near_first, far_first))

    return Schedule("DualPipe", tuple(map(row, range(p))), p, m)


def _dualpipe(h: int, r: int, n: int) -> list[str]:
    """The eight phases of DualPipe, r ranks from the end at which chunk 0 enters and h from the middle.

    n micro-batches of each chunk. No W is in a hurry: the last h backwards leave theirs to the end.
    """
    a, b = h - 1 - r, r + 1
    steady = _times(n - 2 * h + b, "F0B1 F1B0")
    if a == 0:
        steady[:1] = ["F0", "B1"]  # in the middle, the first pair apart: its backward is awaited
    cooling = _times(b, "B1 B0")
    late = [token.replace("B", "I") for token in cooling[b:]]
    weights = [token.replace("I", "W") for token in [*late, *_times(a, "I0")]]
    return [
        *_times(2 * a, "F0"),
        *_times(b, "F0 F1"),
        *_times(a, "I1 W1 F1"),
        *steady,
        *_times(a, "B1 F1B0"),
        *cooling[:b],
        *late,
        *_in_turn(weights[:a], _times(a, "I0")),
        *weights[a:],
    ]


def chimera(p: int, m: int) -> Schedule:
    """Two 1F1B pipelines in opposite directions, each in the other's bubble.

    >>> print(chimera(4, 4))
    rank 0  0F0 0F1  .  3F2 3B2 3F3 3B3 0B0  .  0B1
    rank 1   .  1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1  .
    rank 2   .  1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3  .
    rank 3  0F2 0F3  .  3F0 3B0 3F1 3B1 0B2  .  0B3

    Bubble p-2 actions where F = B; a rank keeps p/2+1 to p micro-batches and the weights of two stages. Of
    every p micro-batches the first half enters at rank 0. Needs p even and m a multiple of p.
    Source: Li and Hoefler 2021 (2107.06925), units of p micro-batches directly concatenated.
    """
    _check(p=p, m=m)
    _check_multiple("Chimera", "2, since micro-batches enter at both ends", 2, p, letter="p")
    _check_multiple("Chimera", "p", p, m)

    def row(r: int) -> Row:
        slots = []
        for unit in range(0, m, p):
            for j in range(p // 2):
                for stage, k in ((r, unit + j), (p - 1 - r, unit + p // 2 + j)):
                    slots.append((2 * unit + stage + 2 * j, Action("F", stage, k)))
                    slots.append((2 * unit + 2 * p - 1 - stage + 2 * j, Action("B", stage, k)))
        return tuple(action for _, action in sorted(slots))

    return Schedule("Chimera", tuple(map(row, range(p))), p, m)


# ---- asynchronous: the weights change while micro-batches are under way


def pipedream(p: int, m: int) -> Schedule:
    """1F1B that never drains: weights are updated after every backward.

    >>> print(pipedream(2, 3))
    rank 0  0F0 0F1  .  0B0 0U0 0F2 0B1 0U1  .  0B2 0U2
    rank 1   .  1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2  .

    No bubble but at the very start and end. Rank r keeps p-r versions of its weights, since a backward uses
    those of its forward, and its gradients are p-1-r updates old (:func:`.weight_versions`).
    Source: Narayanan et al. 2019 (SOSP), section 3.3.
    """
    _check(p=p, m=m)
    rows = tuple(_with_updates(_one_forward_one_backward(p, m, r), every=1) for r in range(p))
    return Schedule("PipeDream", rows, p, m)


def pipedream_2bw(p: int, m: int, n_updates: int = 3) -> Schedule:
    """PipeDream that updates once per m micro-batches and needs two versions of the weights.

    All micro-batches of update t use version t-1, the newest that every stage has in time:
    W(t+1) = W(t) - lr grad(W(t-1)). Needs m >= p. The schedule has n_updates times m micro-batches.
    Source: Narayanan et al. 2021 (2006.09503), section 3.1.
    """
    _check(p=p, m=m, n_updates=n_updates)
    _check_enough("PipeDream-2BW", "p", p, m)
    n = m * n_updates
    rows = tuple(_with_updates(_one_forward_one_backward(p, n, r), every=m) for r in range(p))
    return Schedule("PipeDream-2BW", rows, p, n, tuple(max(k // m - 1, 0) for k in range(n)))


def _with_updates(row: Row, every: int) -> Row:
    """An update after the backward of each so many-th micro-batch."""

    def updated() -> Iterator[Action | Pair]:
        for action in row:
            yield action
            _, stage, k = action.parts[-1]
            if action.kind == "B" and (k + 1) % every == 0:
                yield Action("U", stage, k)

    return tuple(updated())


# ---- rows out of pieces


def _all(kind: str, stage: int, m: int) -> list[Action]:
    """One action for each micro-batch."""
    return [Action(kind, stage, k) for k in range(m)]


def _in_turn(firsts: Sequence[Any], seconds: Sequence[Any]) -> list[Any]:
    """One of each in turn, as long as there are firsts.

    >>> _in_turn("abc", "xyz!")
    ['a', 'x', 'b', 'y', 'c', 'z']
    """
    return [each for both in zip(firsts, seconds, strict=False) for each in both]


def _times(n: int, tokens: str) -> list[str]:
    return tokens.split() * n


def _numbered(tokens: Iterable[str], stages: Sequence[int], first: Sequence[int] = (0, 0)) -> Row:
    """Actions from tokens such as ``F0``, ``I1`` and ``F1B0``: a kind and the chunk it is done for.

    >>> [str(action) for action in _numbered("F0 F0 I0 W0 F1B0".split(), stages=(2, 5))]
    ['2F0', '2F1', '2I0', '2W0', '5F0&2B1']

    Each chunk takes its micro-batches in order, from its ``first`` on; W is that of the oldest I without.
    """
    done: Counter[tuple[bool, int]] = Counter()
    without_w: tuple[deque[int], ...] = tuple(deque() for _ in stages)

    def action(kind: str, chunk: int) -> Action:
        if kind == "W":
            return Action("W", stages[chunk], without_w[chunk].popleft())
        k = first[chunk] + done[kind == "F", chunk]
        done[kind == "F", chunk] += 1
        if kind == "I":
            without_w[chunk].append(k)
        return Action(kind, stages[chunk], k)

    def read(token: str) -> Action | Pair:
        one, *other = (action(token[at], int(token[at + 1])) for at in range(0, len(token), 2))
        return Pair(one, *other) if other else one

    return tuple(read(token) for token in tokens)


# ---- choices that make no schedule


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RefusedError(f"{name}={number!r}: p, m and v are whole numbers from 1 on.")


def _check_multiple(what: str, of: str, divisor: int, number: int, letter: str = "m") -> None:
    if number % divisor:
        below, above = number // divisor * divisor, -(-number // divisor) * divisor
        nearest = f"{letter}={above}" if below == 0 else f"{letter}={below} or {letter}={above}"
        raise RefusedError(f"{what}: {letter}={number} is not a multiple of {of}. Nearest: {nearest}.")


def _check_enough(what: str, bound: str, least: int, m: int) -> None:
    if m < least:
        raise RefusedError(
            f"{what} needs m >= {bound} micro-batches to fill, and m={m} < {least}: try m={least}."
        )


SCHEDULES: dict[str, Callable[..., Schedule]] = {  # by the names of the command line
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "chimera": chimera,
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
}
