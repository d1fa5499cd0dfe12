"""The bubble and the memory of each schedule in closed form, and where the form holds.

A form is claimed only on the domain that stands beside it. There it equals the simulation exactly, which
tests hold; elsewhere a simulation is right, and no form is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from lessons_lib.pipeline_parallel.times import Number, Times, neat


class Case(NamedTuple):
    """The letters of the formulas: sizes, times per action, c the latency of a message."""

    p: int
    m: int
    v: int
    F: Any
    B: Any
    I: Any
    W: Any
    FB: Any
    c: Any


class Form(NamedTuple):
    """The bubble of a schedule: ``value`` is ``formula``, and holds on ``domain``.

    ``measure`` says which bubble. ``idle``: how long the rank stands still that does so longest, until the
    last one ends. ``span``: what is not work in the longest time from a rank's own first start to its last
    end.
    """

    measure: str
    formula: str
    value: Callable[[Case], Any]
    domain: str
    holds: Callable[[Case], bool]


def _one_f_one_b(s: Case) -> Any:
    hops = Fraction(2 * (s.p - 1) * s.m, s.p) + 2 * (s.p - 2) if s.p > 1 else 0
    return (s.p - 1) * (s.F + s.B) + hops * s.c


def _breadth_first(s: Case) -> Any:
    if s.p == 1:
        return 0
    waits = sum(max(0, s.p * (time + s.c) - s.m * time) for time in (s.F, s.B))  # for the first to come round
    return (s.p - 1) * (s.F + s.B + 2 * s.c) + (s.v - 1) * waits


def _chimera(s: Case) -> bool:
    return s.c == 0 and (s.F == s.B or s.m == s.p)


FORMS = {
    "gpipe": Form(
        "idle",
        "(p-1)(F+B) + 2(p-1)c",
        lambda s: (s.p - 1) * (s.F + s.B + 2 * s.c),
        "always",
        lambda s: True,
    ),
    "1f1b": Form(
        "idle",
        "(p-1)(F+B) + [2(p-1)m/p + 2(p-2)]c",
        _one_f_one_b,
        "c = 0, or m a multiple of p",
        lambda s: s.c == 0 or s.m % s.p == 0,
    ),
    "interleaved": Form(
        "idle",
        "(p-1)(F+B) + 2(pv-1)c",
        lambda s: (s.p - 1) * (s.F + s.B) + (2 * (s.p * s.v - 1) * s.c if s.p > 1 else 0),
        "c <= F, B",
        lambda s: s.c <= min(s.F, s.B),
    ),
    "breadth-first": Form(
        "idle",
        "(p-1)(F+B+2c) + (v-1)([p(F+c) - mF]+ + [p(B+c) - mB]+)",
        _breadth_first,
        "always",
        lambda s: True,
    ),
    "zb-h1": Form(
        "idle",
        "(p-1)(F+I) - (min(m,p)-1)W + 4(p-1)c",
        lambda s: (s.p - 1) * (s.F + s.I + 4 * s.c) - (min(s.m, s.p) - 1) * s.W,
        "W <= F, I, and c = 0 or 2c <= W and m >= 2p",
        lambda s: min(s.F, s.I) >= s.W and (s.c == 0 or (2 * s.c <= s.W and s.m >= 2 * s.p)),
    ),
    "zb-h2": Form(
        "span",
        "(p-1)(F+I-2W) + 2(p-1)c",
        lambda s: (s.p - 1) * (s.F + s.I - 2 * s.W + 2 * s.c),
        "W <= F, I, and c = 0 or F = I = W and 2c <= F",
        lambda s: min(s.F, s.I) >= s.W and (s.c == 0 or s.F == s.I == s.W >= 2 * s.c),
    ),
    "zb-v": Form("span", "0", lambda s: 0, "F = I = W and c = 0", lambda s: s.F == s.I == s.W and s.c == 0),
    "dualpipe": Form(
        "idle",
        "(p/2-1)(FB+B-3W)",
        lambda s: Fraction(s.p - 2, 2) * (s.FB + s.B - 3 * s.W),
        "F = I = W, B <= FB <= F + B and c = 0",
        lambda s: s.F == s.I == s.W and s.B <= s.FB <= s.F + s.B and s.c == 0,
    ),
    "dualpipe-v": Form(
        "idle",
        "(p-1)(FB+B-3W)",
        lambda s: (s.p - 1) * (s.FB + s.B - 3 * s.W),
        "F = I = W, B <= FB <= F + B and c = 0",
        lambda s: s.F == s.I == s.W and s.B <= s.FB <= s.F + s.B and s.c == 0,
    ),
    "chimera": Form(
        "idle",
        "(p-2) max(F, B)",
        lambda s: (s.p - 2) * max(s.F, s.B),
        "c = 0, and F = B or m = p",
        _chimera,
    ),
}


@dataclass(frozen=True)
class Claim:
    """A bubble in closed form: ``value`` is ``None`` where no form is claimed, and ``why`` says why not."""

    measure: str
    value: Number | None
    why: str


def bubble_form(name: str, p: int, m: int, v: int = 1, times: Times = Times()) -> Claim:
    """The bubble of a schedule in closed form, if there is one.

    >>> bubble_form("1f1b", p=4, m=8)
    Claim(measure='idle', value=9, why='(p-1)(F+B) + [2(p-1)m/p + 2(p-2)]c')
    >>> bubble_form("interleaved", p=4, m=8, v=4, times=Times(F=1, I=1, W=1, send=2)).value     # c > F: none
    >>> bubble_form("zb-v", p=4, m=8, times=Times(F=1, I=2, W=1)).why
    '0 holds for F = I = W and c = 0; beyond, simulate'

    ``name`` as on the command line.
    """
    form = FORMS.get(name)
    if form is None:
        return Claim("idle", None, f"no form is known for {name}; those with one: {', '.join(FORMS)}")
    case = case_of(p, m, v, times)
    if case is None:
        return Claim(
            form.measure, None, f"{form.formula} is for stages that are all alike, without bandwidth"
        )
    if not form.holds(case):
        return Claim(form.measure, None, f"{form.formula} holds for {form.domain}; beyond, simulate")
    return Claim(form.measure, neat(form.value(case)), form.formula)


def case_of(p: int, m: int, v: int, times: Times) -> Case | None:
    """One time for each letter; ``None`` where stages differ or messages queue for their link."""
    if times.on_link or any(
        isinstance(getattr(times, kind), Sequence) for kind in ("F", "I", "W", "B", "FB")
    ):
        return None
    time = {kind: each[0] for kind, each in times.durations(1).items()}
    pair = time.get("FB", time["F"] + time["B"])
    return Case(p, m, v, time["F"], time["B"], time["I"], time["W"], pair, times.send)


# For rank r: how many micro-batches it keeps at most, whole and for W only, in stages of a rank.
PEAKS: dict[str, Callable[[int, int, int, int], tuple[Any, Any]]] = {
    "gpipe": lambda p, m, v, r: (m, 0),
    "1f1b": lambda p, m, v, r: (min(p - r, m), 0),
    "interleaved": lambda p, m, v, r: (min(Fraction((v - 1) * p + 2 * (p - 1 - r) + 1, v), m), 0),
    "breadth-first": lambda p, m, v, r: (m, 0),
    "zb-h1": lambda p, m, v, r: (p - r, r),  # m >= p
    "zb-h2": lambda p, m, v, r: (2 * (p - r) - 1, 2 * r),
    "zb-v": lambda p, m, v, r: (p, 0),
    "dualpipe": lambda p, m, v, r: (p + 1, 0),
    "dualpipe-v": lambda p, m, v, r: (Fraction(2 * p + 1, 2), 0),
    "chimera": lambda p, m, v, r: (p // 2 + 1 + min(r, p - 1 - r), 0),
    "pipedream": lambda p, m, v, r: (min(p - r, m), 0),
}


def peak_form(name: str, p: int, m: int, v: int = 1, mb: Number = 1, mw: Number = 1) -> list[Number] | None:
    """For each rank, the most it keeps at any time, in closed form; ``None`` where none is claimed.

    >>> peak_form("zb-h1", p=4, m=8, mw=Fraction(1, 2))
    [4, Fraction(7, 2), 3, Fraction(5, 2)]

    Claimed for mw <= mb, and of ZB-H1 for m >= p. Independent of times.
    """
    if name not in PEAKS or mw > mb or (name == "zb-h1" and m < p):
        return None
    counts = (PEAKS[name](p, m, v, r) for r in range(p))
    return [neat(Fraction(whole) * mb + for_w * mw) for whole, for_w in counts]
