"""Published numbers to their printed digits, estimates told apart, and predictions beside what is counted."""

import math
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest
import torch

from lessons_lib import Mesh, plan, run
from lessons_lib.cost.activations import PUBLISHED, kept, kept_by_layer, published
from lessons_lib.cost.flops import (
    hardware_flops_per_token,
    hfu_over_mfu,
    model_flops_per_token,
    step_flops,
    weights,
)
from lessons_lib.cost.measured import FREE, live_bytes, memory_of_a_step, padded_parameters, time_of_a_step
from lessons_lib.cost.memory import (
    ESTIMATES,
    RECIPES,
    bytes_sent,
    estimate,
    messages,
    model_states,
    recipe_of,
    saving,
)
from lessons_lib.cost.units import UNITS, beside_device, in_unit, text
from lessons_lib.data_parallel import STAGES
from lessons_lib.errors import RefusedError
from lessons_lib.machines import Link, Machine, machine
from lessons_lib.models import corpus
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.models.recompute import MADE_AGAIN, keep_scores, recompute
from lessons_lib.spmd import compute

# ---- T4: ZeRO, Table 1. GB per rank, as printed: stage 1, 2, 3, for 7.5 B, 128 B and 1 T parameters.

TABLE_1 = {
    1: "120 120 120 | 2048 2048 2048 | 16000 16000 16000",
    4: "52.5 41.3 30 | 896 704 512 | 7000 5500 4000",
    16: "35.6 21.6 7.5 | 608 368 128 | 4750 2875 1000",
    64: "31.4 16.6 1.88 | 536 284 32 | 4187 2218 250",
    256: "30.4 15.4 0.47 | 518 263 8 | 4046 2054 62.5",
    1024: "30.1 15.1 0.12 | 513 257 2 | 4011 2013 15.6",
}
MODELS = (7_500_000_000, 128_000_000_000, 1_000_000_000_000)
CELLS = [
    (n_ranks, n, stage, printed)
    for n_ranks, row in TABLE_1.items()
    for n, cells in zip(MODELS, row.split("|"), strict=True)
    for stage, printed in enumerate(cells.split(), start=1)
]


@pytest.mark.parametrize("n_ranks, n, stage, printed", CELLS)
def test_table_1_of_zero(n_ranks, n, stage, printed):
    """To the digits it prints, which are rounded or cut off."""
    exact = sum(model_states(n, stage, n_ranks).values()) / 10**9
    value, digit = Decimal(exact.numerator) / Decimal(exact.denominator), Decimal(printed)
    printings = {value.quantize(digit, rounding) for rounding in (ROUND_HALF_UP, ROUND_DOWN)}
    assert digit in printings


def test_table_1_has_54_cells():
    assert len(CELLS) == 54


# ---- T6: Korthikanti et al.


def test_activations_of_a_layer():
    """Table 2, for the 175 B model on 8 ranks, in units of s b h; 5 a s / h is 80."""
    sizes = dict(S=2048, D=12288, H=96)
    assert published("none", **sizes) == 114
    units = {way: float(published(way, **sizes, tp=8)) for way in PUBLISHED}
    assert units == {
        "none": 114,
        "tp": 23,
        "tp + sp": 14.25,
        "tp, selective": 13,
        "tp + sp, selective": 4.25,
        "full": 2,
    }
    assert round(100 * units["tp + sp, selective"] / units["tp"], 1) == 18.5  # "5x"
    assert round(100 * 80 / 114) == 70  # of the activations; what selective recomputation saves


# 22 B layer, milliseconds: forward, backward, and the printed overhead in percent.
TABLE_4 = {
    "full": (7.7, 19.5, 39),
    "selective": (7.7, 13.2, 7),
    "selective and sp": (7.2, 13.1, 4),
}


@pytest.mark.parametrize("way", TABLE_4)
def test_overheads_of_recomputation(way):
    forward, backward, printed = TABLE_4[way]
    assert round(100 * ((forward + backward) / (7.7 + 11.9) - 1)) == printed


# Size: seconds with full recomputation and with theirs, printed percent, MFU, HFU, and the model's L and D.
TABLE_5 = {
    "22B": (1.42, 1.10, 29.0, 41.5, 43.7, 48, 6144),
    "175B": (18.13, 13.75, 31.8, 51.4, 52.8, 96, 12288),
    "530B": (49.05, 37.83, 29.7, 56.0, 57.0, 105, 20480),
    "1T": (94.42, 71.49, 32.1, 56.3, 57.0, 128, 25600),
}
PRINTED_RATIO = {"22B": 1.052, "175B": 1.027, "530B": 1.016, "1T": 1.013}


@pytest.mark.parametrize("size", TABLE_5)
def test_end_to_end_times_and_utilisation(size):
    """The throughput gained; and hardware over model utilisation, which the printed digits allow."""
    full_s, theirs_s, printed, mfu, hfu, L, D = TABLE_5[size]
    assert abs(100 * (full_s / theirs_s - 1) - printed) < 0.15  # times are printed to a hundredth of a second
    ratio = hfu_over_mfu(S=2048, D=D, L=L, V=51200)
    assert round(ratio, 3) == PRINTED_RATIO[size]
    assert (hfu - 0.05) / (mfu + 0.05) <= ratio <= (hfu + 0.05) / (mfu - 0.05)


# ---- S09: three formulas for stage 2, told apart by name


def test_estimates_in_circulation():
    n, n_ranks = 7_500_000_000, 64
    paper = [float(estimate("paper", stage, n, n_ranks)) / 1e9 for stage in range(4)]
    assert [round(x, 3) for x in paper] == [120, 31.406, 16.641, 1.875]
    assert estimate("old helper", 2, n, n_ranks) == 31_875_000_000
    assert round(float(estimate("helper", 2, n, n_ranks)) / 1e9, 2) == 17.11
    sizes = dict(stage=3, n=6_805_000_000, n_ranks=4, largest=131_000_000)
    in_gib = [
        round(in_unit(estimate(name, **sizes), "GiB"), 2)
        for name in ("helper", "helper, optimizer on CPU", "helper, all on CPU")
    ]
    assert in_gib == [29.01, 3.66, 0.49]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n_ranks", [1, 3, 64])
def test_the_paper_s_estimate_is_what_the_layouts_say(stage, n_ranks):
    """Two ways to say it, which must not part: the formula, and the stage table with a recipe."""
    n = 6_805_000_001
    assert estimate("paper", stage, n, n_ranks) == sum(model_states(n, stage, n_ranks).values())


# ---- S17: GB or GiB


def test_gb_and_gib_are_never_mixed():
    n_bytes = 7_500_000_000 * 16
    assert (in_unit(n_bytes, "GB"), round(in_unit(n_bytes, "GiB"), 2)) == (120, 111.76)
    assert (text(n_bytes), text(n_bytes, "GiB", digits=5)) == ("120 GB", "111.76 GiB")
    card = machine("8xH100")
    for unit in ("GB", "GiB"):
        said = beside_device(83e9, card, unit)
        assert said.count(unit) == 3 and ("83" in said) == (unit == "GB"), said
    assert beside_device(60e9, card) == "60 GB of 80 GB: 20 GB left"
    assert UNITS["GiB"] / UNITS["GB"] == 2**30 / 10**9


# ---- S52, S54, S88


@pytest.mark.parametrize(
    "recipe, each, total_gb",
    [
        ("fp32 adam, no stored gradients", 12, 80.4),
        ("fp32 adam", 16, 107.2),
        ("mixed adam", 16, 107.2),
        ("mixed adam, fp32 gradients", 18, 120.6),
        ("mixed adam, both gradients", 20, 134.0),
        ("mixed sgd", 8, 53.6),
    ],
)
def test_bytes_of_a_parameter(recipe, each, total_gb):
    states = model_states(6_700_000_000, 0, 1, recipe)
    assert sum(RECIPES[recipe]) == each and float(sum(states.values())) == total_gb * 1e9
    assert list(states) == ["parameters", "gradients", "state"]


def test_zero_1_saves_four_times_in_the_limit():
    rounded = {stage: [round(float(saving(stage, n)), 2) for n in (4, 8, 64)] for stage in (1, 2, 3)}
    assert rounded == {1: [2.29, 2.91, 3.82], 2: [2.91, 4.27, 7.21], 3: [4, 8, 64]}
    assert float(saving(1, 10**9)) == pytest.approx(4) and float(saving(2, 10**9)) == pytest.approx(8)
    assert float(saving(1, 10**9, "mixed sgd")) == pytest.approx(2), "with SGD there is less to share out"
    assert [bytes_sent(stage, 1000, 4) / bytes_sent(0, 1000, 4) for stage in STAGES] == [1, 1, 1, 1.5]


def test_reduce_scatter_and_all_gather_of_different_size():
    """S88: 7 B parameters, half on each of tp = 2; gradients in 32 bits, parameters in 16."""
    n, recipe = 7_000_000_000 // 2, "mixed adam, fp32 gradients"
    assert messages(1, n, recipe) == [
        ("gradients", "reduce_scatter", 14_000_000_000),
        ("parameters", "all_gather", 7_000_000_000),
    ]
    assert bytes_sent(1, n, 2, recipe) == 7_000_000_000 + 3_500_000_000


# ---- S53: FLOPs per token


def test_flops_of_a_token():
    sizes = dict(n_weights=10**9, L=24, D=2048, S=4096)
    assert [
        float(f"{float(flops):.4g}")
        for flops in (
            model_flops_per_token(**sizes),
            model_flops_per_token(**sizes, attended="causal"),
            hardware_flops_per_token(**sizes),
        )
    ] == [8.416e9, 7.208e9, 11.22e9]
    attention = model_flops_per_token(**sizes) - 6 * 10**9
    assert model_flops_per_token(**sizes, attended="causal") - 6 * 10**9 == attention / 2


CONFIG = GPTConfig(L=2, H=4, D=16, S=8)
N_SEQUENCES = 3
PREPARED = [(attention, what) for attention in ("fused", "scores") for what in MADE_AGAIN]


def prepared(attention, what, tp=1):
    model = GPT(CONFIG).double()
    if attention == "scores":
        keep_scores(model)
    if tp > 1:
        plan.parallelize(model, plan.GPT_1D, Mesh(tp=tp))
    return recompute(model, what)


def forward_and_backward(attention, what, tp=1):
    def body():
        model = prepared(attention, what, tp)
        tokens, targets = corpus.batch(0, N_SEQUENCES, CONFIG.S)
        compute(2.0)
        loss = model.loss(tokens, targets)
        compute(1.0)
        loss.backward()

    return run(body, ranks=tp, record=("flops", "memory"), machine=FREE).trace


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("attention, what", PREPARED)
def test_flops_and_activations_are_what_is_counted(attention, what, tp):
    """Both exactly, on every rank."""
    trace = forward_and_backward(attention, what, tp)
    flops = step_flops(CONFIG, N_SEQUENCES, tp, attention, what)
    activations = sum(kept(CONFIG, N_SEQUENCES, 8, tp, attention, what).values())
    for rank in range(tp):
        assert trace.flops_of(rank) == flops
        curve = trace.live_bytes[rank]
        assert live_bytes(curve, 2)[-1] - live_bytes(curve, 1)[-1] == activations


def test_what_recomputation_saves_and_costs():
    """In units of the published table: without dropout, in 16 bits, scores kept once."""
    unit = N_SEQUENCES * CONFIG.S * CONFIG.D
    scores = 5 * CONFIG.H * CONFIG.S / CONFIG.D

    def bytes_of(what, **options):
        terms = kept_by_layer(CONFIG, N_SEQUENCES, recompute=what, attention="scores", **options)
        return 2 * (sum(terms.values()) - terms.get("statistics of norms", 0)) / unit

    assert bytes_of("none") == 34 - 2 + scores * 2 / 5
    assert bytes_of("selective") == 34 - 2
    assert bytes_of("selective", tp=4) == 10 - 2 + 24 / 4
    assert bytes_of("full") == 2
    forward = 2 * weights(CONFIG) + 4 * CONFIG.L * CONFIG.D * CONFIG.S
    head, last = 2 * CONFIG.D * CONFIG.V, CONFIG.L * 2 * CONFIG.D * CONFIG.F
    again = step_flops(CONFIG, 1, recompute="full") - step_flops(CONFIG, 1)
    assert again == CONFIG.S * (forward - head - last), "one forward of the blocks, less their last products"


def test_counted_and_published_flops_differ_by_named_terms():
    """Per token: the fused kernel makes scores once more, a product of D x S in each layer."""
    once_more = 2 * CONFIG.L * CONFIG.D * CONFIG.S
    model = model_flops_per_token(weights(CONFIG), CONFIG.L, CONFIG.D, CONFIG.S)
    assert step_flops(CONFIG, 1) == CONFIG.S * (model + once_more)
    assert step_flops(CONFIG, 1, attention="scores") == CONFIG.S * model


# ---- predictions beside measurements


@pytest.mark.parametrize("stage", STAGES)
def test_memory_of_a_step(stage):
    rows = {row.kind: row for row in memory_of_a_step(CONFIG, 2, stage, dp=2)}
    for row in rows.values():
        assert row.difference or row.predicted == row.measured, row
    assert {kind for kind, row in rows.items() if row.difference} == {"peak"}
    peak = rows["peak"]
    assert 0.8 * peak.predicted < peak.measured < 1.6 * peak.predicted
    n = padded_parameters(CONFIG, 2)
    cut = {0: 1, 1: 1, 2: 1, 3: 2}[stage]
    assert rows["parameters"].measured == 8 * n // cut


def test_activations_do_not_move_with_zero():
    """What ZeRO shares out is not what a larger batch needs."""
    measured = [memory_of_a_step(CONFIG, 2, stage, dp=2)[3].measured for stage in (0, 3)]
    assert measured[0] == measured[1] > 0
    assert memory_of_a_step(CONFIG, 4, 3, dp=2)[3].measured > 1.9 * measured[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_time_of_a_step(stage):
    """What communication does not cost is hidden behind computing; where that is free, nothing is."""
    link = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    busy = time_of_a_step(CONFIG, 2, stage, 4, Machine("slow chips", flops_per_s=1e9, in_node=link))
    assert 0 < busy.overlapped_s < busy.communication_s
    assert max(busy.compute_s, busy.communication_s) < busy.measured_s
    idle = time_of_a_step(CONFIG, 2, stage, 4, Machine("free chips", in_node=link))
    assert idle.measured_s == pytest.approx(idle.communication_s) and idle.compute_s == 0
    assert idle.overlapped_s == pytest.approx(0, abs=1e-12)
    assert time_of_a_step(CONFIG, 2, stage, 4, "4xH100").measured_s > 0


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: in_unit(1, "Gb"), r"unit='Gb' is unknown; known: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        (lambda: recipe_of("adam"), r"recipe='adam' is unknown; known: 'fp32 adam', "),
        (
            lambda: estimate("helper", 1, 1, 1),
            r"no estimate 'helper' for stage 1; known: paper for stage 0; ",
        ),
        (lambda: published("sp", 1, 1, 1), r"way='sp' is unknown; known: 'none', 'tp', 'tp \+ sp', "),
        (lambda: step_flops(CONFIG, 1, attention="flash"), r"attention='flash', .*known are 'fused' and 'sc"),
        (lambda: kept_by_layer(CONFIG, 1, recompute="all"), r"recompute='all', .*known are .*'full'"),
    ],
)
def test_what_is_refused(wrong, message):
    with pytest.raises(RefusedError, match=message):
        wrong()


def test_recipes_of_your_own():
    assert recipe_of(RECIPES["mixed sgd"]) is RECIPES["mixed sgd"]
    assert len(ESTIMATES) == 9 and math.isclose(float(estimate("paper", 0, 1, 1)), 16)
    assert torch.float64.itemsize == recipe_of("fp64 adam").parameters
