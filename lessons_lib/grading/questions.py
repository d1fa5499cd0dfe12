"""Questions with a number for an answer, about what earlier lessons said.

Numbers are drawn, and answers computed by the library's own formulas, so that no answer is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch
from torch import nn

from lessons_lib.cost.activations import kept, published
from lessons_lib.cost.flops import model_flops_per_token
from lessons_lib.cost.memory import ESTIMATES, RECIPES, model_states, saving
from lessons_lib.data_parallel.replicated import fill_buckets
from lessons_lib.data_parallel.stages import padded, traffic
from lessons_lib.grading.exercise import Draw
from lessons_lib.layout import Layout, coordinates
from lessons_lib.machines import machine
from lessons_lib.models.gpt import GPTConfig
from lessons_lib.pipeline_parallel import Times, bubble_form, gpipe, interleaved, one_f_one_b, simulate, zb_h2
from lessons_lib.redistribute import redistribution
from lessons_lib.rings import _doubling
from lessons_lib.sequence_parallel import ATTENTIONS, SequenceColumn, SequenceRow
from lessons_lib.sequence_parallel.assignment import Contiguous, Zigzag, pairs
from lessons_lib.sequence_parallel.online_softmax import Partial, finish, merge
from lessons_lib.spmd.doctor import find_cycle
from lessons_lib.tensor_parallel import SCHEMES, VOCABULARIES, vocabulary
from lessons_lib.tensor_parallel.cross_entropy import loss_traffic
from lessons_lib.timeline import elements_sent, ring_traffic

TOLERANCE = 0.005  # of an answer, so that rounding is forgiven


@dataclass(frozen=True)
class Question:
    """A question, its answer, and how to find it."""

    name: str
    text: str
    answer: float
    how: str

    @property
    def lesson(self) -> str:
        return self.name[:2]

    def accepts(self, number: float) -> bool:
        return abs(number - self.answer) <= TOLERANCE * abs(self.answer)


Made = tuple[str, float, str]  # text, answer, how


def _all_reduce_bytes(draw: Draw) -> Made:
    p, n = draw.random.choice((2, 4, 8)), 1000 * draw.between(1, 9)
    answer = 4 * float(ring_traffic("all_reduce", n, p))
    return (
        f"{p} ranks add up {n:,} numbers of 4 bytes with an all-reduce. How many bytes does each send?",
        answer,
        f"2 (p-1)/p of the tensor: 2 x {p - 1}/{p} x {4 * n:,} bytes",
    )


def _rank_of_place(draw: Draw) -> Made:
    sizes = {"row": draw.between(2, 3), "col": draw.between(3, 5)}
    row, col = draw.between(1, sizes["row"] - 1), draw.between(0, sizes["col"] - 1)
    answer = coordinates(sizes).index({"row": row, "col": col})
    return (
        f"In Mesh(row={sizes['row']}, col={sizes['col']}), which rank is at row={row}, col={col}?",
        answer,
        f"the last axis is the fastest: {row} x {sizes['col']} + {col}",
    )


def _elements_of_block(draw: Draw) -> Made:
    sizes = {"row": 2, "col": draw.between(2, 4)}
    D, F = draw.between(3, 9), sizes["col"] * draw.between(2, 5)
    answer = prod(Layout("D F@col").local_shape((D, F), sizes))
    return (
        f"W has {D} x {F} elements and lies as D F@col on Mesh(row=2, col={sizes['col']}). "
        "How many of them does a rank hold?",
        answer,
        f"F is cut over col, and row has copies: {D} x {F}/{sizes['col']}",
    )


def _reduce_scatter_bytes(draw: Draw) -> Made:
    p, n = draw.random.choice((2, 4, 5, 8)), 40 * draw.between(2, 20)
    return (
        f"{p} ranks reduce-scatter {n:,} numbers of 8 bytes. How many bytes does each send?",
        8 * float(ring_traffic("reduce_scatter", n, p)),
        f"all chunks but its own: {p - 1}/{p} x {8 * n:,} bytes",
    )


def _chunk_sizes(draw: Draw) -> Made:
    p = draw.between(3, 5)
    n, rank = draw.indivisible(2 * p + 1, 6 * p, p), draw.between(0, p - 1)
    return (
        f"A ring of {p} ranks gathers {n} numbers, cut as tensor_split cuts. How many does rank {rank} send?",
        elements_sent("all_gather", n, p, rank),
        f"all chunks but that of its right neighbour, rank {(rank + 1) % p}",
    )


def _tree_rounds(draw: Draw) -> Made:
    p = draw.between(5, 40)
    return (
        f"After how many rounds has a tree brought a tensor from one rank to all {p}?",
        len(_doubling(p)),
        "every round doubles those that have it: the logarithm of p to base 2, rounded up",
    )


def _who_waits(draw: Draw) -> Made:
    n, p = draw.between(3, 5), draw.between(6, 8)
    waits: dict[int, tuple[int, ...]] = {rank: ((rank + 1) % n,) for rank in range(n)}
    waits |= {rank: (draw.between(0, n - 1),) for rank in range(n, p)}
    text = ", ".join(f"{rank} for {whom[0]}" for rank, whom in waits.items())
    return (
        f"Ranks wait for each other: {text}. How many of them are in the cycle?",
        len(find_cycle(waits)),
        "follow the waiting until a rank comes back; the others only wait for somebody in the cycle",
    )


def _average_of_averages(draw: Draw) -> Made:
    counts = draw.different(1, 9, 2)
    means = [float(number) for number in draw.different(1, 20, 2)]
    answer = sum(n * mean for n, mean in zip(counts, means, strict=True)) / sum(counts)
    return (
        f"Rank 0 has {counts[0]} scores, whose mean is {means[0]:g}, and rank 1 has {counts[1]}, whose "
        f"mean is {means[1]:g}. What is the mean of all scores?",
        answer,
        "sums and counts add up, averages do not: "
        f"({counts[0]} x {means[0]:g} + {counts[1]} x {means[1]:g}) / {sum(counts)}",
    )


def _bytes_of_states(draw: Draw) -> Made:
    billions, name = draw.between(2, 70), draw.random.choice(("mixed adam", "mixed momentum", "mixed sgd"))
    parts, optimizer = RECIPES[name], {"adam": "Adam", "momentum": "momentum", "sgd": "SGD"}[name.split()[1]]
    return (
        f"{billions} B parameters are trained in mixed precision with {optimizer}; gradients have 2 bytes. "
        "How many GB are weights, gradients and optimizer together?",
        billions * parts.total,
        f"{parts.parameters} + {parts.gradients} + {parts.state} bytes for a parameter; the optimizer has a "
        "master copy of 4",
    )


def _kept_inputs(draw: Draw) -> Made:
    config = GPTConfig(L=draw.between(2, 24), H=8, D=128 * draw.between(2, 8), S=128 * draw.between(2, 8))
    B = draw.between(1, 8)
    return (
        f"A GPT with L={config.L}, D={config.D}, S={config.S} runs every block again in backward. How many "
        f"MB do the blocks keep for B={B} sequences, with 2 bytes a number?",
        kept(config, B, itemsize=2, recompute="full")["layers"] / 1e6,
        f"of each block its input: L B S D numbers, {config.L} x {B} x {config.S} x {config.D} x 2 bytes",
    )


def _step_seconds(draw: Draw) -> Made:
    billions, tokens = draw.between(1, 13), 100_000 * draw.between(2, 20)
    flops = tokens * int(model_flops_per_token(billions * 10**9, L=0, D=0, S=0))
    return (
        f"{billions} B weights, {tokens:,} tokens, an H100 at its 989 TFLOP/s: how many seconds does a step "
        "take, without attention's scores?",
        machine("1xH100").compute_s(flops),
        "6 operations for each weight and token, 2 forward and 4 backward, over 989e12",
    )


def _gradient_bytes(draw: Draw) -> Made:
    p, m, millions = draw.random.choice((2, 4, 8)), draw.between(2, 6), 4 * draw.between(5, 90)
    return (
        f"{p} replicas of {millions} M parameters, gradients of 2 bytes, {m} micro-batches that are "
        "accumulated. How many MB does each rank send in a step?",
        2 * float(ring_traffic("all_reduce", millions, p)),
        f"one all-reduce of all gradients, with the last micro-batch: 2 x {p - 1}/{p} x {2 * millions} MB",
    )


def _buckets(draw: Draw) -> Made:
    n, size, room = draw.between(5, 12), draw.between(2, 9), draw.between(10, 25)
    with torch.device("meta"):
        megabytes = torch.zeros(size, dtype=torch.int8)
        parameters = [nn.Parameter(megabytes, requires_grad=False) for _ in range(n)]
    each = -(-room // size)
    return (
        f"{n} parameters of {size} MB each go into buckets that close once they hold {room} MB or more. How "
        "many buckets are sent?",
        len(fill_buckets(parameters, bucket_bytes=room)),
        f"{each} of them fill a bucket: {n}/{each}, rounded up",
    )


def _linear_traffic(name: str, direction: str) -> Callable[[Draw], Made]:
    def make(draw: Draw) -> Made:
        p = draw.random.choice((2, 4))
        B, D, F = 4 * draw.between(1, 3), 4 * draw.between(2, 5), 4 * draw.between(6, 9)
        answer = float(SCHEMES[name].traffic(B, D, F, {"tp": p})[direction])
        what = "dX" if direction == "backward" else "Y"
        size = f"{B} x {D if direction == 'backward' else F}"
        return (
            f"A {name}-parallel linear on {p} ranks, B={B}, D={D}, F={F}: "
            f"how many elements does each rank send in the {direction}?",
            answer,
            f"{what} is a sum over ranks, an all-reduce of {size}: 2 x {p - 1}/{p} of it"
            if answer
            else "every rank has all it needs",
        )

    return make


def _row_block(draw: Draw) -> Made:
    p = draw.between(2, 4)
    D, F = p * draw.between(3, 6), draw.between(5, 9)
    return (
        f"W has D={D} rows and F={F} columns and is cut for a row-parallel linear on {p} ranks. "
        "How many elements does a rank hold?",
        prod(SCHEMES["row"].W.local_shape((D, F), {"tp": p})),
        f"its rows are cut: {D}/{p} x {F}",
    )


def _bill(source: str, target: str) -> Callable[[Draw], Made]:
    def make(draw: Draw) -> Made:
        p = draw.random.choice((2, 4, 8))
        rows, columns = p * draw.between(2, 5), p * draw.between(6, 9)
        steps = redistribution(Layout(source), Layout(target), (rows, columns), {"tp": p})
        size = f"{rows} x {columns}"
        return (
            f"A tensor of {size} elements lies as {source} on {p} ranks and shall lie as {target}. "
            "How many elements does each rank send, at the least?",
            float(sum(step.sent for step in steps)),
            f"one {' and one '.join(step.kind for step in steps)}: see the table of lesson 07, with {size} "
            "elements",
        )

    return make


def _row_of_rank(draw: Draw) -> Made:
    sizes = {"i": draw.between(2, 3), "k": draw.between(2, 4)}
    at = {"i": draw.between(1, sizes["i"] - 1), "k": draw.between(1, sizes["k"] - 1)}
    return (
        f"On Mesh(i={sizes['i']}, k={sizes['k']}) a tensor lies as B@k@i. Which block, counted from 0, has "
        "the rank "
        f"at i={at['i']}, k={at['k']}?",
        Layout("B@k@i").block(sizes, at)[0],
        f"k cuts first: {at['k']} x {sizes['i']} + {at['i']}",
    )


def _grid_traffic(direction: str) -> Callable[[Draw], Made]:
    def make(draw: Draw) -> Made:
        q = draw.between(2, 4)
        B, D, F = (q * draw.between(low, low + 2) for low in (6, 2, 9))
        answer = float(SCHEMES["2d"].traffic(B, D, F, {"row": q, "col": q})[direction])
        once = f"q-1 blocks of X and as many of W: {q - 1} x ({B // q} x {D // q} + {D // q} x {F // q})"
        return (
            f"SUMMA on a {q} x {q} grid, B={B}, D={D}, F={F}: how many elements does each rank send in the "
            f"{direction}?",
            answer,
            once if direction == "forward" else f"two products, each {once}",
        )

    return make


def _weights_of_a_layer(draw: Draw) -> Made:
    q, d = draw.between(2, 3), draw.between(2, 4)
    D, F = q * draw.between(3, 6), q * draw.between(7, 9)
    return (
        f"W has D={D} rows and F={F} columns, on a 2.5D mesh of depth={d} and {q} x {q}. "
        "How many elements of it does a rank hold?",
        prod(SCHEMES["2.5d"].W.local_shape((D, F), {"depth": d, "row": q, "col": q})),
        f"each layer has a whole W, so depth does not count: {D}/{q} x {F}/{q}",
    )


def _sum_over_depth(draw: Draw) -> Made:
    q, d = 2, draw.between(2, 4)
    sizes = {"depth": d, "row": q, "col": q}
    B, D, F = q * d * 3, q * d * draw.between(1, 3), q * draw.between(4, 9)
    layer = float(SCHEMES["2d"].traffic(B // d, D, F, {"row": q, "col": q})["backward"])
    return (
        f"2.5D on depth={d} and {q} x {q}, D={D}, F={F}: how many elements does each rank send for the sum "
        "of dW "
        "over depth?",
        float(SCHEMES["2.5d"].traffic(B, D, F, sizes)["backward"]) - layer,
        f"an all-reduce of a block of W: 2 x {d - 1}/{d} x {D // q} x {F // q}",
    )


def _share_of_a_cube(draw: Draw) -> Made:
    q = draw.between(2, 4)
    B, D = q * q * draw.between(2, 5), q * draw.between(3, 9)
    return (
        f"X has {B} rows and {D} columns, on a cube of {q} x {q} x {q} ranks. How many elements of it does "
        "a rank "
        "hold at rest?",
        prod(SCHEMES["3d"].X.local_shape((B, D), dict.fromkeys("ijk", q))),
        f"it is cut by all three axes: {B} x {D} / {q**3}",
    )


def _cube_traffic(draw: Draw) -> Made:
    q = draw.between(2, 3)
    B, D, F = (q * q * n for n in draw.different(2, 6, 3))
    return (
        f"A 3D linear on {q} x {q} x {q} ranks, B={B}, D={D}, F={F}: how many elements does each rank send "
        "in the "
        "forward?",
        float(SCHEMES["3d"].traffic(B, D, F, dict.fromkeys("ijk", q))["forward"]),
        f"to gather X and W and to scatter Y: {q - 1}/{q**3} of each",
    )


def _updated_by_a_rank(draw: Draw) -> Made:
    p = draw.between(3, 8)
    n = draw.indivisible(50, 400, p)
    return (
        f"The {n} parameters of a model lie in one flat vector, which ZeRO 1 cuts evenly over {p} ranks. "
        "How long is a rank's piece?",
        padded(n, p) // p,
        f"padded with zeros to {padded(n, p)}, and cut in {p}",
    )


def _saved_by_zero_1(draw: Draw) -> Made:
    p = draw.between(2, 40)
    return (
        f"Mixed precision with Adam, 2 + 2 + 12 bytes a parameter. With ZeRO 1 on {p} ranks, how many times "
        "less of it does a rank store?",
        float(saving(1, p)),
        f"only the 12 are cut: 16 / (4 + 12/{p})",
    )


def _sent_by_zero_3(draw: Draw) -> Made:
    p, n, m = draw.random.choice((2, 4, 8)), 8 * draw.between(1, 12), draw.between(1, 4)
    batches = "one micro-batch" if m == 1 else f"{m} micro-batches"
    return (
        f"{n} million parameters, ZeRO 3 on {p} ranks, {batches} in a step. How many million elements does "
        "each rank send?",
        float(sum(traffic(3, n, p, m).values())),
        f"in each micro-batch two gathers and a reduce-scatter: {m} x 3 x {p - 1}/{p} x {n}",
    )


def _stored_by_a_stage(draw: Draw) -> Made:
    stage, p, billions = draw.between(2, 3), draw.random.choice((4, 8, 16, 64)), draw.between(2, 70)
    whole, cut, _ = ESTIMATES["paper", stage]
    return (
        f"{billions} B parameters in mixed precision with Adam, 2 + 2 + 12 bytes each. How many GB of them "
        f"does a rank hold with ZeRO {stage} on {p} ranks?",
        float(sum(model_states(billions, stage, p).values())),
        f"{whole} bytes are copies and {cut} are cut: {billions} x ({whole} + {cut}/{p})",
    )


def _sent_with_the_stream_cut(draw: Draw) -> Made:
    p, n = draw.random.choice((2, 4, 8)), 8000 * draw.between(1, 9)
    sizes = {"tp": p}
    pair = SequenceColumn().traffic(n, 1, 1, sizes), SequenceRow().traffic(n, 1, 1, sizes)
    return (
        f"A branch of a block on {p} ranks, its stream of {n:,} numbers cut along S (Megatron's sequence "
        "parallelism), the gathered input not kept. How many numbers does each rank send, forward and "
        "backward together, for the stream?",
        float(sum(sum(bill.values()) for bill in pair)),
        f"five halves of an all-reduce: gather and scatter, both again backward, and the second gather: "
        f"5 x {p - 1}/{p} x {n:,}",
    )


def _kept_with_the_stream_cut(draw: Draw) -> Made:
    p = draw.random.choice((2, 4, 8))
    less = published("tp, selective", 1, 1, 1, p) - published("tp + sp, selective", 1, 1, 1, p)
    return (
        f"In 1D on {p} ranks a layer keeps (10 + 24/{p}) S B D bytes, scores apart. How many S B D fewer, if "
        "the stream is cut along the sequence, too?",
        float(less),
        f"34/{p} instead: the 10 that were whole are divided, too, and 10 x {p - 1}/{p} are saved",
    )


def _tokens_of_a_norm(draw: Draw) -> Made:
    p, n = draw.random.choice((2, 4, 8)), draw.between(3, 9)
    return (
        f"{p * n} tokens, a gradient of 1 from each, and a stream cut along S over {p} ranks: what is the "
        "gradient of a norm's bias on every rank, after what has to be done with it?",
        p * n,
        f"each rank has {n} tokens, so {n}; summed over {p} ranks, for the loss is over all tokens",
    )


def _padded_words(draw: Draw) -> Made:
    p = draw.random.choice((2, 4, 8))
    V = draw.indivisible(30_000, 60_000, 128)
    return (
        f"A table of {V:,} words on {p} ranks is padded, so that each rank has a multiple of 128 rows. How "
        "many rows has it then?",
        vocabulary.padded(V, multiple_of=128, n_ranks=p),
        f"the next multiple of 128 x {p} = {128 * p}",
    )


def _loss_sent(draw: Draw) -> Made:
    p, tokens, V = draw.random.choice((2, 4, 8)), 1000 * draw.between(1, 9), 1000 * draw.between(30, 60)
    return (
        f"{tokens:,} tokens, {V:,} words cut over {p} ranks: how many numbers does each rank send for the "
        "loss, when no logit is sent?",
        float(loss_traffic(tokens, VOCABULARIES["1d"], {"tp": p})["forward"]),
        f"three all-reduces of one number per token, whatever V: 3 x 2 x {p - 1}/{p} x {tokens:,}",
    )


def _heads_of_a_rank(draw: Draw) -> Made:
    p, each, width = draw.random.choice((2, 4, 8)), draw.between(2, 5), draw.random.choice((64, 80, 128))
    D = p * each * width
    return (
        f"Attention has {p * each} heads of {width} numbers, D={D}. Queries, keys and values are made by one "
        f"matrix of D rows, cut by heads over {p} ranks. How many columns of it does a rank hold?",
        prod(SCHEMES["column"].W.local_shape((D, 3 * D), {"tp": p})) // D,
        f"3 x {width} for each of its {each} heads",
    )


def _merged_answer(draw: Draw) -> Made:
    one, other = (draw.between(1, 9) for _ in range(2))
    n, more = draw.between(1, 3), draw.between(4, 7)
    parts = [
        Partial(
            *(
                torch.full((1, 1, 1, 1), x, dtype=torch.float64)
                for x in (0.0, float(weight), float(weight * value))
            )
        )
        for weight, value in ((n, one), (more, other))
    ]
    return (
        f"Half of the keys answer {one}, with {n} for the sum of exp(score); the other half answer {other}, "
        f"with {more}. What do all keys answer?",
        finish(merge(*parts))[0].item(),
        f"each half counts by its sum: ({n} x {one} + {more} x {other}) / {n + more}",
    )


def _sent_by_a_ring(draw: Draw) -> Made:
    P, n = draw.random.choice((2, 4, 8)), draw.between(1, 9)
    sent = ATTENTIONS["ring"].traffic(B=1, S=P * n * 1000, H=1, K=1, P=P)
    return (
        f"Ring attention on {P} ranks; the keys of a rank are {n},000 elements, and so are its values. "
        "How many elements does it send in the backward?",
        float(sent["backward"]),
        f"keys and values {P - 1} times, their gradients {P} times: ({P - 1} + {P}) x 2 x {n},000",
    )


def _busiest(draw: Draw) -> Made:
    P, s = draw.between(3, 4), draw.between(3, 5)
    work = [sum(steps) for steps in zip(*pairs(Contiguous(), P * s, P), strict=True)]
    return (
        f"{P * s} tokens lie in contiguous pieces on {P} ranks, with a causal mask. On how many pairs of a "
        "query and a key does the busiest rank work?",
        max(work),
        f"the last one: the sum of {(P - 1) * s + 1} to {P * s}",
    )


def _padded_for_zigzag(draw: Draw) -> Made:
    P = draw.random.choice((2, 4, 8))
    multiple = P * Zigzag.pieces_per_rank
    S = draw.indivisible(100 * multiple, 200 * multiple, multiple)
    return (
        f"To how many tokens must a text of {S:,} be padded, so that {P} ranks can have it in zigzag?",
        padded(S, multiple),
        f"the next multiple of 2 x {P}",
    )


def _sent_by_ulysses(draw: Draw) -> Made:
    P, n = draw.random.choice((2, 4, 8)), draw.between(1, 9)
    sent = ATTENTIONS["ulysses"].traffic(B=1, S=P * n * 1000, H=P, K=1, P=P)
    return (
        f"Ulysses on {P} ranks; q, k, v and o of a rank have {P * n},000 elements each. How many elements "
        "does it send forward?",
        float(sent["forward"]),
        f"all four, but for the part that stays: 4 x {P - 1}/{P} x {P * n},000",
    )


def _gpipe_bubble(draw: Draw) -> Made:
    p, m = draw.between(3, 8), draw.between(6, 20)
    return (
        f"GPipe with {p} equal stages and {m} micro-batches: how many percent of all time does a rank wait?",
        100 * float(simulate(gpipe(p, m)).bubble),
        f"(p-1)/(m+p-1) = {p - 1}/{m + p - 1}",
    )


def _twice_the_stages(draw: Draw) -> Made:
    p, m = draw.random.choice((2, 3, 4)), draw.between(6, 24)
    half = Fraction(1, 2)
    whole, halves = gpipe(p, m), gpipe(2 * p, m)
    return (
        f"A model in {p} equal stages, {m} micro-batches. Cut into {2 * p}, how many times as fast is it?",
        float(simulate(whole).makespan / simulate(halves, Times(F=half, I=half, W=half)).makespan),
        f"{m + p - 1} slots become {m + 2 * p - 1} of half the length",
    )


def _messages_of_gpipe(draw: Draw) -> Made:
    p, m = draw.between(3, 6), draw.between(4, 12)
    return (
        f"GPipe with {p} stages and {m} micro-batches: how many messages cross all borders in a step?",
        len(simulate(gpipe(p, m)).messages),
        f"an output and a gradient for each micro-batch and border: 2 x {m} x {p - 1}",
    )


def _kept_by_1f1b(draw: Draw) -> Made:
    p, m = draw.between(4, 8), draw.between(3, 20)
    rank = draw.between(0, p - 2)
    return (
        f"1F1B on {p} ranks, counted from 0, with {m} micro-batches: how many does rank {rank} keep at most?",
        float(simulate(one_f_one_b(p, m)).peak_in_flight()[rank]),
        f"p - r, if there are so many: the smaller of {p} - {rank} and {m}",
    )


def _end_of_1f1b(draw: Draw) -> Made:
    p, m = draw.between(3, 6), draw.between(6, 16)
    return (
        f"1F1B on {p} ranks with {m} micro-batches. A forward takes 1 ms, a backward 2, a message no time. "
        "After how many ms is a step done?",
        float(simulate(one_f_one_b(p, m)).makespan),
        f"as GPipe: (m+p-1) x 3 = {m + p - 1} x 3",
    )


def _interleaved_messages(draw: Draw) -> Made:
    p, v = draw.between(2, 6), draw.between(2, 4)
    m = p * draw.between(2, 4)
    return (
        f"Interleaved 1F1B on {p} ranks with {v} chunks each, {m} micro-batches. How many messages are sent, "
        "forwards and backwards together?",
        len(simulate(interleaved(p, m, v)).messages),
        f"every micro-batch crosses {p} x {v} - 1 borders, there and back: 2 x {m} x {p * v - 1}",
    )


def _interleaved_bubble(draw: Draw) -> Made:
    p, v, F = draw.between(3, 8), draw.random.choice((2, 4)), draw.between(2, 9)
    each = Fraction(F, v)
    claim = bubble_form("interleaved", p, 2 * p, v, Times(F=each, I=each, W=each))
    assert claim.value is not None
    return (
        f"{p} ranks; a rank's whole share takes {F} ms forward and {2 * F} ms backward. For how many ms does "
        f"a rank stand still with {v} chunks, if messages are free?",
        float(claim.value),
        f"(p-1)(F+B)/v: {p - 1} x {3 * F} / {v}",
    )


def _h1_bubble(draw: Draw) -> Made:
    p, W = draw.between(3, 8), draw.between(2, 5)
    F, I = W + draw.between(0, 3), W + draw.between(0, 3)
    claim = bubble_form("zb-h1", p, 2 * p, 1, Times(F=F, I=I, W=W))
    assert claim.value is not None
    return (
        f"ZB-H1 on {p} ranks with F = {F}, I = {I}, W = {W} ms. For how many ms does a rank stand still?",
        float(claim.value),
        f"(p-1)(F+I-W): {p - 1} x ({F} + {I} - {W})",
    )


def _kept_by_h2(draw: Draw) -> Made:
    p = draw.between(3, 8)
    return (
        f"How many micro-batches does each of {p} ranks keep at most with ZB-H2, until their W?",
        float(max(simulate(zb_h2(p, 2 * p)).peak_in_flight())),
        f"2p-1, where 1F1B's first rank keeps p: 2 x {p} - 1",
    )


QUESTIONS: dict[str, Callable[[Draw], Made]] = {  # the first two digits are the lesson's
    "00-all-reduce-bytes": _all_reduce_bytes,
    "00-rank-of-place": _rank_of_place,
    "00-elements-of-block": _elements_of_block,
    "01-reduce-scatter-bytes": _reduce_scatter_bytes,
    "01-chunk-sizes": _chunk_sizes,
    "01-tree-rounds": _tree_rounds,
    "02-who-waits": _who_waits,
    "02-average-of-averages": _average_of_averages,
    "07-partial-to-cut": _bill("B D +tp", "B@tp D"),
    "07-cut-to-cut": _bill("B@tp D", "B D@tp"),
    "07-order-of-axes": _row_of_rank,
    "03-bytes-of-states": _bytes_of_states,
    "03-kept-inputs": _kept_inputs,
    "03-step-seconds": _step_seconds,
    "04-gradient-bytes": _gradient_bytes,
    "04-buckets": _buckets,
    "05-padded-piece": _updated_by_a_rank,
    "05-saving": _saved_by_zero_1,
    "06-bytes-sent": _sent_by_zero_3,
    "06-stored": _stored_by_a_stage,
    "08-column-backward": _linear_traffic("column", "backward"),
    "08-row-forward": _linear_traffic("row", "forward"),
    "08-row-block": _row_block,
    "10-sent": _sent_with_the_stream_cut,
    "10-kept": _kept_with_the_stream_cut,
    "10-tokens": _tokens_of_a_norm,
    "11-merged": _merged_answer,
    "11-sent": _sent_by_a_ring,
    "12-busiest": _busiest,
    "12-padded": _padded_for_zigzag,
    "12-ulysses": _sent_by_ulysses,
    "09-padded": _padded_words,
    "09-loss-sent": _loss_sent,
    "09-heads": _heads_of_a_rank,
    "13-summa-forward": _grid_traffic("forward"),
    "13-summa-backward": _grid_traffic("backward"),
    "14-weights": _weights_of_a_layer,
    "14-sum-over-depth": _sum_over_depth,
    "15-share": _share_of_a_cube,
    "15-forward": _cube_traffic,
    "16-bubble": _gpipe_bubble,
    "16-doubled": _twice_the_stages,
    "16-messages": _messages_of_gpipe,
    "17-kept": _kept_by_1f1b,
    "17-end": _end_of_1f1b,
    "18-messages": _interleaved_messages,
    "18-bubble": _interleaved_bubble,
    "19-bubble": _h1_bubble,
    "19-kept": _kept_by_h2,
}


def ask(name: str, draw: Draw) -> Question:
    """Make a question of this name, with numbers that are drawn.

    >>> question = ask("01-tree-rounds", Draw(1))
    >>> question.text, question.answer, question.accepts(question.answer)
    ('After how many rounds has a tree brought a tensor from one rank to all 13?', 4, True)
    """
    text, answer, how = QUESTIONS[name](draw)
    return Question(name, text, answer, how)
