# %% [markdown] minutes=1 core=true
# # Pipeline IV: split the backward
#
# A backward does two things: it makes the gradient of a stage's input, and the gradient of its weights. The stage before
# needs the first one at once. **Who waits for the second, the gradient of the weights?**

# %% tags=["setup"]
from fractions import Fraction

import torch

from lessons_lib import run
from lessons_lib.grading import predict, recap
from lessons_lib.pipeline_parallel import Schedule, Times, draw, first_fault, one_f_one_b, simulate, zb_h1, zb_h2, zb_v

p, m = 4, 8  # ranks, micro-batches; every F, I and W of a rank's share takes 1
HALVES = Times(F=Fraction(1, 2), I=Fraction(1, 2), W=Fraction(1, 2))  # with two chunks on each rank

who = predict("Who waits for the gradient of a stage's weights?",
    A="the stage before, for its own backward", B="the next forward on this stage, which needs the new weights",
    C="the next backward on this stage: gradients are added up in order", D="nobody, until the optimizer comes")

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("19")

# %% [markdown] minutes=3 core=true
# ## A backward is two products
#
# Lesson 08 wrote the backward of a linear layer by hand:
#
# $$dX = dY\, W^T \qquad\qquad dW = X^T\, dY$$
#
# Pipelines call the first **I**, for input, and the second **W**. Here are both for three micro-batches, all I first, all W
# afterwards, beside autograd.

# %% name="by-hand"
torch.manual_seed(0)
W = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
Xs, dYs = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)

kept = list(zip(Xs, dYs))  # what each W needs: X from the forward, dY from the backward
dXs = [dY @ W.detach().T for X, dY in kept]
dW = sum(X.T @ dY for X, dY in kept)

inputs = [X.clone().requires_grad_() for X in Xs]
for X, dY in zip(inputs, dYs):
    (X @ W).backward(dY)
print("dX the same:", all(torch.allclose(dX, X.grad) for dX, X in zip(dXs, inputs)))
print("dW the same:", torch.allclose(dW, W.grad))

# %% [markdown] core=true
# How much work is each?

# %% name="work"
from torch.utils.flop_counter import FlopCounterMode

(X, dY), w = kept[0], W.detach()
for name, product in (("F", lambda: X @ w), ("I", lambda: dY @ w.T), ("W", lambda: X.T @ dY)):
    with FlopCounterMode(display=False) as counter:
        product()
    print(name, counter.get_total_flops(), "operations")

# %% [markdown] minutes=1 core=true
# Three products of the same three sizes. So F, I and W take about the same time, and a backward B = I + W takes two
# forwards. That is what the pictures of the last lessons were drawn with.

# %% [markdown] minutes=2 core=true
# ## Who waits
#
# The library has one table of what every action needs. Ask it: of all that a pipeline makes, what is needed by whom?

# %% name="who-waits"
from lessons_lib.pipeline_parallel.rules import makes, needs

actions = [action for row in zb_h1(p, m).rows for action in row]
for kind, what in (("F", "output"), ("I", "input gradient"), ("W", "weight gradient")):
    made = {result for action in actions if action.kind == kind for result in makes(action)}
    needy = [action.kind for action in actions if made & set(needs(action, p))]
    print(f"{what:16}", {kind: needy.count(kind) for kind in dict.fromkeys(needy)} or "nobody")

# %% [markdown] core=true
# One micro-batch alone. The way there is F, the way back is I, and each W stands beside it:

# %% name="one-micro-batch"
draw(zb_h1(p, 1))

# %% name="who-waits-seen"
who.reveal(
    "no action of the schedule needs a weight gradient",
    answer="D",
    A="the stage before needs dX; dW stays where the weights are",
    B="one step uses the same weights for all micro-batches: they change after the last",
    C="a sum has no order: W of a later micro-batch may come first",
)

# %% [markdown] core=true
# An output is awaited by the next stage and by its own I. An input gradient, by the stage before and by its own W. A
# weight gradient by nobody: it is work that can fill a pause.

# %% [markdown] minutes=3 core=true
# ## Split, and move nothing
#
# 1F1B, with each B replaced by I and then W, where it stands.

# %% name="split-guess"
only_split = predict(
    "1F1B takes 33, of which 24 are work. With I, W in place of each B?",
    A="33: it is the same work in the same order",
    B="30",
    C="24: a W can fill every pause",
)

# %% name="split"
def halves(action):
    kind, stage, k = action
    return [("I", stage, k), ("W", stage, k)] if kind == "B" else [action]

split = Schedule.of("1F1B, split", [[half for a in row for half in halves(a)] for row in one_f_one_b(p, m).rows])
whole, parts = simulate(one_f_one_b(p, m)), simulate(split)
print(whole.makespan, parts.makespan)

# %% name="split-picture"
draw(one_f_one_b(p, m), split)

# %% name="split-seen"
only_split.reveal(
    parts.makespan,
    answer="B",
    A="the same order on each rank, but what a neighbour waits for is there earlier: after I, not after I and W",
    C="W still stands right behind its I, pause or no pause",
)

# %% [markdown] minutes=1 core=true
# The way back is shorter now: a gradient comes through p−1 stages in (p−1) I, not (p−1)(I+W). The bubble is (p−1)(F+I),
# 6 in place of 9. And no W has moved yet.

# %% [markdown] minutes=5 core=true
# ## Put it off
#
# At the end ranks wait for input gradients, and could do a W meanwhile, if one were left. So each W is put off: while
# micro-batch k has its I, the W of an earlier one is done.

# %% name="lag-guess"
how_far = predict(
    "By how many micro-batches should a rank put its W off?",
    A="all of them: first everything that others wait for, all W at the end",
    B="rank r by r: the last rank most, the first not at all",
    C="every rank by 1",
)

# %% name="lag"
def row(r, lag, warm):
    def all_of(kind):
        return [(kind, r, k) for k in range(m)]

    F, I, W = all_of("F"), all_of("I"), all_of("W")
    actions = F[:warm]
    for k in range(m):
        actions += [*F[warm + k : warm + k + 1], I[k]]
        actions += W[k - lag : k - lag + 1] if k >= lag else []
    return actions + W[max(m - lag, 0) :]

def put_off(name, lag):
    return Schedule.of(name, [row(r, lag(r), warm=p - 1 - r) for r in range(p)])

# %% name="lags"
LAGS = {"not at all": lambda r: 0, "by 1": lambda r: 1, "rank r by r": lambda r: r}
LAGS |= {"by 2r": lambda r: 2 * r, "all": lambda r: m}
for name, lag in LAGS.items():
    timeline = simulate(put_off(name, lag))
    print(f"{name:12} ends at {timeline.makespan}, the ranks keep {timeline.peak_in_flight()}")

# %% name="lag-seen"
how_far.reveal(
    "27 for r; 30 for all others",
    answer="B",
    A="at the end there are then eight W in a row on every rank, and nothing is left for the pauses before",
    C="the last I of each rank is one earlier than that of the rank before, so it needs one W more to fill its end",
)

# %% name="h1-picture"
draw(one_f_one_b(p, m), zb_h1(p, m))

# %% [markdown] minutes=2 core=true
# This is **ZB-H1**. Rank 0 has no W to spare when the last gradients come in, but it needs none: between two of them there
# is room for just one W. The last rank is done with its I first, and ends with the three W that it has put off.
#
# The bubble is (p−1)(F+I−W): 3 of 27, where 1F1B has 9 of 33. And every rank keeps p micro-batches, as much as rank 0 of
# 1F1B. What a rank puts off it must keep: X and dY. Rank r has r micro-batches fewer under way than rank 0, and so has
# room for r of them. (1F1B's memory was uneven; ZB-H1 uses what was left free.)

# %% name="as-the-library"
print("the library's:", put_off("mine", lambda r: r).rows == zb_h1(p, m).rows)

# %% [markdown] minutes=4 core=true
# ## The rest of the bubble
#
# The pauses that are left are at the start: a rank waits for its first forward, and then for its first gradient. **ZB-H2**
# fills the second with more forwards, 2(p−r)−1 before the first I, and puts W off by 2r.

# %% name="h2-guess"
bought = predict(
    "ZB-H2 has no pause inside. When is it done, compared with ZB-H1's 27?",
    A="at 24: there is no bubble any more",
    B="at 27 too, and it bought nothing",
    C="at 27 too, but each rank has all its idle time before its first action and after its last",
)

# %% name="h2-picture"
draw(zb_h1(p, m), zb_h2(p, m))

# %% name="h2"
for timeline in (simulate(zb_h1(p, m)), simulate(zb_h2(p, m))):
    print(f"{timeline.schedule.name}: ends at {timeline.makespan}, each rank idle for {timeline.idle[0]}, rank 0 keeps",
          f"{timeline.peak_in_flight()[0]}; from first start to last end {timeline.spans_of_ranks}")

# %% name="h2-seen"
bought.reveal(
    "both end at 27; the longest span of a rank is 27 and 24; rank 0 keeps 4 and 7",
    answer="C",
    A="a pipeline has to fill: the last rank cannot begin before 3, and it has 24 to do",
    B="the idle time has moved to the ends, and there the next step may begin",
)

# %% [markdown] minutes=1 core=true
# The same end, the same idle time. It only stands elsewhere, as a staircase: rank r begins at r and works 24 without a
# pause. The staircases of two steps fit into each other.

# %% [markdown] minutes=2 core=true
# ## Two steps in a row
#
# Let the next step begin on each rank as soon as that rank is done.

# %% name="steps-in-a-row"
def in_a_row(schedule, n):
    rows = [[(kind, stage, k + step * m) for step in range(n) for kind, stage, k in row] for row in schedule.rows]
    return Schedule.of(f"{schedule.name}, {n} steps", rows)

for schedule in (one_f_one_b(p, m), zb_h1(p, m), zb_h2(p, m)):
    print(f"{schedule.name:6}", [int(simulate(in_a_row(schedule, n)).makespan) for n in (1, 2, 3, 10)])

# %% name="steps-picture"
draw(in_a_row(zb_h1(p, m), 2), in_a_row(zb_h2(p, m), 2))

# %% [markdown] minutes=1 core=true
# Each further step takes 27 with H1, and 24 with H2: all of it work. That is the zero in *zero bubble*. It has a price
# that no picture shows. A rank updates its weights as soon as it is done, when the others have not computed their
# gradients yet. A global norm for clipping, or a check for NaN, needs all of them. The authors update first, check while
# the next step fills the pipeline, and take the update back if it was wrong.

# %% [markdown] minutes=3 core=true
# ## Zero bubble is not free
#
# Time and memory of five schedules of the same model (S58). ZB-V, below, has two chunks on every rank.

# %% name="time-and-memory"
from lessons_lib.pipeline_parallel import interleaved

for schedule in (one_f_one_b(p, m), interleaved(p, m, 2), zb_h1(p, m), zb_h2(p, m), zb_v(p, m)):
    timeline = simulate(schedule, HALVES if schedule.n_chunks == 2 else Times())
    span, peaks = float(max(timeline.spans_of_ranks)), [float(peak) for peak in timeline.peak_in_flight()]
    print(f"{schedule.name:16} ends at {float(timeline.makespan):4}, longest span {span:4}, keeps", peaks)

# %% [markdown] core=true
# ZB-H2 nearly doubles what rank 0 keeps: 2p−1 micro-batches in place of p. And is what W keeps as much as what I needs?
# Of a Transformer layer, by the formulas of the paper, in units of s·b·h (without the S x S scores of attention):

# %% name="kept-for-w"
for M_B, M_W in ((34, 32), (34, 0)):
    peaks = {schedule.name: simulate(schedule).peak_in_flight(M_B, M_W) for schedule in (zb_h1(p, m), zb_h2(p, m))}
    print(f"34 until I, {M_W:2} from there until W:", peaks)

# %% [markdown] minutes=1 core=true
# Nearly as much. Every product of W needs its X, and dY comes on top. If W's part were free (the second row), the later
# ranks would keep less; on rank 0, which puts nothing off, it changes nothing.
#
# **Break it:** what if one W is forgotten?

# %% name="forgotten"
without = [[a for a in row if str(a) != "2W5"] for row in zb_h1(p, m).rows]
print(first_fault(Schedule.of("forgotten", without)))

# %% [markdown] core=true
# Nothing would wait for it, nothing would hang, and the loss would go on falling: the gradient of one micro-batch is
# missing on one stage. Nobody waits for W, so nobody misses it. A checker must ask.

# %% [markdown] minutes=2 core=true
# ## One number does not say all
#
# Three measures of the same bubble. *Of the total*: idle time over p times the end. *Of the ideal*: idle time over work.
# *Of the span*: what is not work from a rank's own first start to its last end, of the rank for which that is longest.

# %% name="three-measures"
for schedule in (one_f_one_b(p, m), zb_h1(p, m), zb_h2(p, m)):
    timeline = simulate(schedule)
    print(f"{schedule.name:6} of the total {float(timeline.bubble):.1%}, of the ideal {float(timeline.bubble_ratio):.1%}, "
          f"of the span {float(timeline.span_bubble):.1%}")

# %% [markdown] core=true
# The zero-bubble paper prints the third. With the times of its 14.6 B model on 16 GPUs, in milliseconds:

# %% name="paper"
times = Times(F=11.347, I=11.248, W=8.132, send=0.377)
printed = {"1F1B": 0.2552, "ZB-H1": 0.1397, "ZB-H2": 0.0672}
for schedule in (one_f_one_b(16, 48), zb_h1(16, 48), zb_h2(16, 48)):
    timeline = simulate(schedule, times)
    rates = f"of the span {timeline.span_bubble:.4f}, in the paper {printed[schedule.name]:.4f}"
    print(f"{schedule.name:6} {rates}; of the total {timeline.bubble:.4f}")

# %% [markdown] minutes=1 core=true
# To four digits, ours is the paper's. H2's 6.7 % of the span is 10.7 % of the total: whose step has to end before the next
# may begin pays the second. And why is it not zero? A W takes less than an F or an I here, and two of them do not fill
# what one F and one I leave open: (p−1)(F+I−2W) remains.

# %% [markdown] minutes=1 core=true
# ## Move it
#
# 1F1B beside ZB-H1. Choose ZB-H2, then ZB-V; then let W take no time: who still wins? Then give messages a latency.

# %% name="explorer"
from lessons_lib.widgets import pipeline_explorer

pipeline_explorer("1f1b", "zb-h1")

# %% [markdown] minutes=3 core=true
# ## On real stages
#
# Eight layers on four ranks, trained by the library's `execute`. I walks back to the inputs of a stage and puts aside what
# W will need; W comes when its row says so. On a virtual clock each action takes 1, a message nothing.

# %% name="real-stages"
from torch import nn

from lessons_lib import Mesh
from lessons_lib.machines import Machine
from lessons_lib.pipeline_parallel import cut_batch, execute

torch.manual_seed(0)
LAYERS = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(8)]
X, Y = torch.randn(16, 6).double(), torch.randn(16, 6).double()

def squares(y, target):
    return (y - target).square().sum()

nn.functional.mse_loss(nn.Sequential(*LAYERS)(X), Y).backward()
SERIAL = {n: layer[0].weight.grad for n, layer in enumerate(LAYERS)}

# %% name="train"
def train(schedule, times):
    group, size = Mesh(pp=p)["pp"], len(LAYERS) // schedule.n_stages
    mine = {stage: range(stage * size, (stage + 1) * size) for stage in schedule.stages[group.rank]}
    stages = {stage: nn.Sequential(*(LAYERS[n] for n in layers)) for stage, layers in mine.items()}
    for stage in stages.values():
        stage.zero_grad()
    done = execute(schedule, stages, cut_batch(X, Y, m), squares, group, times=times)
    return done.timeline, {n: LAYERS[n][0].weight.grad for layers in mine.values() for n in layers}

# %% name="trained"
def error(values):
    gradients = {n: gradient for of_rank in values for n, gradient in of_rank.items()}
    return max(((gradients[n] - SERIAL[n]).norm() / SERIAL[n].norm()).item() for n in SERIAL)

for schedule, times in ((one_f_one_b(p, m), Times()), (zb_h1(p, m), Times()), (zb_h2(p, m), Times()), (zb_v(p, m), HALVES)):
    result = run(train, schedule, times, ranks=p, machine=Machine("all is free"))
    timelines, gradients = zip(*result.values)
    print(f"{schedule.name:6} ends at {timelines[0].makespan:4g}, gradients off by {error(gradients):.0e}")

# %% name="executed-picture"
run(train, zb_h1(p, m), Times(), ranks=p, machine=Machine("all is free")).values[0][0]

# %% [markdown] minutes=2 core=true
# ### The same in production
#
# PyTorch has `ScheduleInterleavedZeroBubble`, which is ZB-H1's idea with chunks, and `ScheduleZBVZeroBubble`, which is
# ZB-V. The same eight layers on the same ranks:

# %% name="production"
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

def with_torch(kind, stages_of):
    group = Mesh(pp=p)["pp"]
    mine = stages_of[group.rank]
    for n in mine:
        LAYERS[n].zero_grad()
    stages = [PipelineStage(LAYERS[n], n, len(LAYERS), torch.device("cpu")) for n in mine]
    theirs = kind(stages, m, loss_fn=nn.functional.mse_loss)
    target = {"target": Y} if len(LAYERS) - 1 in mine else {}
    theirs.step(*([X] if 0 in mine else []), **target)
    order = [str(action) for action in theirs.pipeline_order[group.rank] if action]
    return order, {n: LAYERS[n][0].weight.grad for n in mine}

# %% name="production-compared"
LOOP, V = [[r, r + p] for r in range(p)], zb_v(p, m).stages
for kind, stages_of in ((ScheduleInterleavedZeroBubble, LOOP), (ScheduleZBVZeroBubble, V)):
    orders, gradients = zip(*run(with_torch, kind, stages_of, ranks=p).values)
    print(f"{kind.__name__:29} gradients off by {error(gradients):.0e}")
print("ZB-V in the same order:", list(orders) == [[str(action) for action in row] for row in zb_v(p, m).rows])

# %% [markdown] minutes=1 core=true
# Whoever keeps I and W apart in code of their own must not lose what autograd does on the side: hooks that wait for a
# parameter's gradient (data parallel uses them) run with W now, or not at all, and a weight that two layers share needs
# both of its W.

# %% [markdown] minutes=4 more=true
# ## More: ZB-V, without a staircase
#
# Two chunks on each rank, in a V: rank r has stages r and 2p−1−r, so the way back begins on the rank where the way there
# ended.

# %% name="zb-v" more=true
print(zb_v(p, m).stages)
draw(zb_v(p, m), times=HALVES)

# %% [markdown] minutes=1 more=true
# No pause in any rank's span, and p micro-batches on every rank: H2's span with 1F1B's memory. Rank 0 has both ends of
# the model, so tied embeddings lie on one rank, and the loss is where the tokens are. The price: twice the messages, and
# it is zero only where F = I = W. With I a little longer and W shorter:

# %% name="zb-v-uneven" more=true
uneven = Times(F=Fraction(1, 2), I=Fraction(3, 5), W=Fraction(7, 20))
timeline = simulate(zb_v(p, m), uneven)
print("longest span", float(max(timeline.spans_of_ranks)), "  work", float(timeline.work[0]))

# %% [markdown] minutes=5 more=true
# ## More: from both ends
#
# Chimera and DualPipe let micro-batches enter at both ends. Every rank holds two stages, one of each copy of the model.

# %% name="chimera" more=true
from lessons_lib.pipeline_parallel import chimera, dualpipe, dualpipe_v

draw(chimera(p, m))

# %% [markdown] more=true
# Chimera is two 1F1B pipelines, each in the other's pauses. DualPipe splits the backward as well, and pairs a forward of
# one direction with a backward of the other, so that one computes while the other communicates.

# %% name="dualpipe" more=true
draw(dualpipe(p, m))

# %% [markdown] more=true
# DualPipe's table, with F = 1, B = 2, W = 1, for 8 stages and 20 micro-batches; a pair takes F + B, and then a little
# less:

# %% name="dualpipe-table" more=true
for pair in (3, Fraction(5, 2)):
    for schedule in (one_f_one_b(8, 20), zb_h1(8, 20), dualpipe(8, 20), dualpipe_v(4, 20)):
        timeline = simulate(schedule, Times(FB=pair))
        keeps = max(timeline.peak_in_flight()) * schedule.n_stages / schedule.n_ranks
        print(f"{schedule.name:9} on {schedule.n_ranks} ranks: idle {float(max(timeline.idle)):4}, each rank keeps",
              f"{float(keeps):g} micro-batches of a stage, stages on a rank: {len(schedule.stages[0])}")

# %% [markdown] minutes=1 more=true
# Bubbles (p−1)(F+B), (p−1)(F+B−2W) and (p/2−1)(FB+B−3W), as the table has them. DualPipe pays with a second copy of the
# weights and one more micro-batch. DualPipeV, "cut in half", does the same on half as many ranks with a single copy.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. A backward is two products. The stage before waits for I; nobody waits for W until the optimizer.
# 2. ZB-H1: rank r puts its W off by r. Bubble (p−1)(F+I−W), memory as rank 0 of 1F1B. As late as possible is worse.
# 3. ZB-H2 ends when H1 does. It moves the idle time to the ends, where the next step may begin, and keeps 2p−1 in place
#    of p micro-batches.
# 4. Zero bubble is paid for: in memory, in messages, or in an optimizer that updates before it can check.
# 5. Say which bubble: of the total, of the ideal, of a rank's own span.
#
# **Where next:** place W yourself in the exercise; the [README](../README.md) has the map of the lessons.
#
# *Sources:* Qi et al. 2024, [Zero bubble pipeline parallelism](https://arxiv.org/abs/2401.10241): sections 2 and 6,
# tables 5 and 9. DeepSeek-AI 2024, [DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 3.2.1, and the table of
# [DualPipe](https://github.com/deepseek-ai/DualPipe). Li and Hoefler 2021,
# [Chimera](https://arxiv.org/abs/2107.06925). Hooks and shared weights:
# [PyTorch issue 144530](https://github.com/pytorch/pytorch/issues/144530),
# [pull request 181365](https://github.com/pytorch/pytorch/pull/181365). Memory of the variants as users meet it:
# [zero-bubble issue 21](https://github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/21).
