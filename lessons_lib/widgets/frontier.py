"""Explorer 8: bytes that ranks send against memory that they hold."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

from lessons_lib.cost.compare import DTYPE, TRANSFORMER, Bill, Way, count, formula, ways
from lessons_lib.errors import RefusedError
from lessons_lib.machines import machine as machine_of
from lessons_lib.views import Figure
from lessons_lib.views.frontier import Dot, Frontier, frontier_picture
from lessons_lib.widgets.explorer import Choice, Explorer

RANKS = ("4", "8", "9", "16", "64")
TOKENS = ("1/8 h", "1/4 h", "1/2 h", "h", "2 h", "4 h", "12 h")
GPUS = ("V100", "A100", "H100", "B200")
MEMORY = {"kept": "bytes kept from forward to backward", "peak": "most bytes at once"}
H = 9216  # can be cut into 4, 8, 9, 16 and 64; a layer has 12 h^2 weights, about a billion
MOST_COUNTED = 16
PASSES = 3  # forward once, backward twice the FLOPs
HELD_AXIS = (30_000_000, 15_000_000_000)  # wide enough for all that the controls can show
SENT_AXIS = (100_000_000, 20_000_000_000)
GPUS_PER_NODE = 8


def bytes_memory_explorer(
    ranks: str = "8", tokens: str = "1/4 h", memory: str = "kept", gpu: str = "H100", *, theme: str = "light"
) -> Explorer:
    """See what each way to run a transformer layer sends, and what it holds.

    >>> print(bytes_memory_explorer("4", "h").figure.title)
    A layer of h = 9,216 with 9,216 tokens on 4 ranks

    Dots up to 16 ranks are counted in runs on thread ranks; those for 64 are the formulas', which the
    tests hold equal to what is counted. The dashed line is where sending takes as long as multiplying, at
    the speed of the slowest link: a node has 8 GPUs. Latencies are left out.
    It opens with a question: with so few tokens, which way holds least, and what does it pay? Try more.
    Raises RefusedError for values it does not know.
    """
    for name, value, known in (
        ("ranks", ranks, RANKS),
        ("tokens", tokens, TOKENS),
        ("memory", memory, tuple(MEMORY)),
        ("gpu", gpu, GPUS),
    ):
        if value not in known:
            raise RefusedError(f"{name}={value!r}: choose one of {', '.join(known)}.")

    def draw(ranks: str, tokens: str, memory: str, gpu: str) -> Figure:
        return frontier_picture(frontier(int(ranks), n_tokens(tokens), memory, gpu), theme=theme)

    return Explorer(
        draw,
        {
            "ranks": Choice("Ranks", RANKS),
            "tokens": Choice("Tokens", TOKENS),
            "memory": Choice("Memory", list(MEMORY)),
            "gpu": Choice("on GPUs", GPUS),
        },
        start={"ranks": ranks, "tokens": tokens, "memory": memory, "gpu": gpu},
        settings={
            "2D draws level": {"ranks": "4", "tokens": "12 h"},
            "the cube pays off": {"ranks": "64", "tokens": "h", "memory": "peak"},
        },
    )


def n_tokens(words: str) -> int:
    """
    >>> n_tokens("1/4 h"), n_tokens("h"), n_tokens("2 h")
    (2304, 9216, 18432)
    """
    times = words.removesuffix("h").strip()
    return int(Fraction(times or 1) * H)


@cache
def bill(n_ranks: int, name: str, tokens: int) -> Bill:
    """What a way costs: counted, up to 16 ranks."""
    way = next(way for way in ways(n_ranks) if way.name == name)
    return (count if n_ranks <= MOST_COUNTED else formula)(way, tokens, H)


def frontier(n_ranks: int, tokens: int, memory: str, gpu: str) -> Frontier:
    """The dots of all ways that ``n_ranks`` ranks have.

    >>> [dot.name for dot in frontier(4, 2304, "kept", "H100").dots]
    ['1D', '2D']
    """
    dots = tuple(_dot(way, tokens, memory) for way in ways(n_ranks))
    best = tuple(
        not any(other.held <= dot.held and other.sent <= dot.sent and other != dot for other in dots)
        for dot in dots
    )
    on = f"{n_ranks}x{gpu}" if n_ranks <= GPUS_PER_NODE else _nodes(n_ranks, gpu)
    nodes = machine_of(on)
    products_s = nodes.compute_s(layer_flops(tokens, H) / n_ranks)
    return Frontier(
        f"A layer of h = {H:,} with {tokens:,} tokens on {n_ranks} ranks",
        f"{MEMORY[memory]}, each rank",
        dots,
        HELD_AXIS,
        SENT_AXIS,
        products_s * nodes.link(*range(n_ranks)).bandwidth_bytes_per_s,
        on,
        best,
    )


def layer_flops(tokens: int, h: int) -> int:
    """
    >>> layer_flops(1, 1)
    72
    """
    return PASSES * 2 * tokens * sum(d * f for d, f in TRANSFORMER) * h**2


def _nodes(n_ranks: int, gpu: str) -> str:
    return f"{-(-n_ranks // GPUS_PER_NODE)}x{GPUS_PER_NODE}x{gpu}"


def _dot(way: Way, tokens: int, memory: str) -> Dot:
    costs = bill(way.n_ranks, way.name, tokens)
    mesh = ", ".join(f"{axis}={size}" for axis, size in way.sizes.items())
    return Dot(
        way.name,
        mesh,
        getattr(costs, memory) * DTYPE.itemsize,
        int(costs.sent * DTYPE.itemsize),
        way.n_ranks <= MOST_COUNTED,
    )
