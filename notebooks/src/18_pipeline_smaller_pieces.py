# %% [markdown] minutes=1 core=true
# # Pipeline III: smaller pieces
#
# A pipeline stands still while it fills and while it empties. Shorter stages would fill it sooner, but there are no more
# ranks to put them on. So each rank takes *two* stages, half as long. **What becomes of the bubble, of the messages, of
# the memory?**

# %% tags=["setup"]
from fractions import Fraction

from lessons_lib import run
from lessons_lib.grading import predict, recap
from lessons_lib.pipeline_parallel import Schedule, Times, first_fault, gpipe, interleaved, one_f_one_b, simulate
from lessons_lib.views.pipeline import pipeline_picture

p, m = 4, 8  # ranks, micro-batches

def pieces(v, latency="0"):
    """A rank's share of the model takes 1 for F, for I and for W: with v pieces, each takes 1/v."""
    part = Fraction(1, v)
    return Times(F=part, I=part, W=part, send=Fraction(latency))

smaller = predict("Twice as many stages, each half as long, on the same four ranks. What becomes of it?",
    A="half the bubble; messages and memory as before",
    B="half the bubble, more than twice the messages, more memory",
    C="half the bubble, twice the messages, each half as large", D="the same bubble: there are still four ranks")

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("18")

# %% [markdown] minutes=2 core=true
# ## Where the bubble comes from
#
# 1F1B, as lesson 17 left it: a forward takes 1, a backward 2.

# %% name="whole-stages"
pipeline_picture(simulate(one_f_one_b(p, m), pieces(1)), critical_path=True)

# %% [markdown] core=true
# The last rank begins when one micro-batch has come through three stages. At the end the first rank waits until its
# gradient has come back through three. That is all the bubble: (p−1)(F+B), where F and B are the times of *one stage*.
# Nothing in it asks how much a rank has to do. It asks how long a stage is.

# %% [markdown] minutes=3 core=true
# ## Two pieces for each rank
#
# A model of 8 stages on 4 ranks. Rank 0 gets stages 0 and 4, rank 1 gets 1 and 5: a micro-batch goes round twice. A
# rank's stages are called its *chunks*; there are v of them.

# %% name="placement"
for rank, stages in enumerate(interleaved(p, m, v=2).stages):
    print(f"rank {rank}: stages {stages}")

# %% name="compared"
one, two = simulate(one_f_one_b(p, m), pieces(1)), simulate(interleaved(p, m, v=2), pieces(2))
for timeline in (one, two):
    idle, peak = float(timeline.idle[0]), float(timeline.peak_in_flight()[0])
    print(f"{timeline.schedule.name:16} idle {idle}, {len(timeline.messages):3} messages, rank 0 keeps {peak:g}")

# %% name="compared-picture"
pipeline_picture(one, two)

# %% name="compared-seen"
smaller.reveal(
    "idle 9 and 4.5; 48 and 112 messages; rank 0 keeps 4 and 5.5",
    answer="B",
    A="a micro-batch goes round twice, so it crosses twice as many borders, and the one from the last rank back to the first",
    C="a message is the activation of one micro-batch, as large behind one layer as behind ten",
    D="the bubble is made of stages, not of ranks: a stage is half as long now",
)

# %% [markdown] minutes=1 core=true
# This is *interleaved 1F1B*. The bubble is (p−1)(F+B)/v, with F and B of a rank's whole share. Instead of p−1 borders
# there are pv−1, each crossed twice by every micro-batch: 2 m (pv−1) messages. They are as large as before.

# %% [markdown] minutes=5 core=true
# ## In which order
#
# A rank now has a choice: the next micro-batch on its first chunk, or an older one on its second? The rule: micro-batches
# go round in **groups of p**. A group runs through chunk 0, then through chunk 1, then comes the next group. By the time
# the fourth of a group is through chunk 0, the first one has come round. Backward does the same, the last chunk first.

# %% name="orders"
def forwards(p, m, v, r):
    groups = range(0, m, p)
    return [("F", c * p + r, k) for g in groups for c in range(v) for k in range(g, g + p)]

def backwards(p, m, v, r):
    groups, back = range(0, m, p), reversed
    return [("B", c * p + r, k) for g in groups for c in back(range(v)) for k in range(g, g + p)]

print(" ".join(f"{stage}{kind}{k}" for kind, stage, k in forwards(p, m, 2, r=0)))
print(" ".join(f"{stage}{kind}{k}" for kind, stage, k in backwards(p, m, 2, r=0)))

# %% [markdown] core=true
# The rest is 1F1B: some forwards to warm up, then one forward and one backward in turn, then the backwards that are left.
# How many to warm up? The first group runs through all chunks but the last: (v−1)p. And then two for each rank behind
# this one. (One would do if messages were free: *More: what the second one is for*, near the end.)

# %% name="rows"
def warm_up(p, m, v, r):
    return min(2 * (p - 1 - r) + (v - 1) * p, m * v)

def row(p, m, v, r, forwards=forwards, backwards=backwards, warm_up=warm_up):
    F, B, warm = forwards(p, m, v, r), backwards(p, m, v, r), warm_up(p, m, v, r)
    in_turn = [action for pair in zip(F[warm:], B) for action in pair]
    return F[:warm] + in_turn + B[len(B) - warm :]

def my_schedule(p, m, v, **rules):
    return Schedule.of("mine", [row(p, m, v, r, **rules) for r in range(p)])

# %% name="as-the-library"
for sizes in ((4, 8, 2), (4, 8, 4), (3, 9, 2), (2, 2, 5)):
    print(sizes, my_schedule(*sizes).rows == interleaved(*sizes).rows)

# %% [markdown] core=true
# Your rules, for a single group:

# %% name="one-group-picture"
pipeline_picture(simulate(my_schedule(p, 4, v=2), pieces(2)))

# %% [markdown] minutes=3 core=true
# ## Break it
#
# 1F1B warms up with p−1−r forwards: one for each rank behind. (The rules of the section before, once more, so that you
# can begin here.)

# %% name="warm-up-guess"
too_few = predict(
    "Interleaved, with the warm-up of 1F1B, p−1−r. What happens?",
    A="it runs, and ends later",
    B="it runs, and keeps less: fewer forwards are under way",
    C="it comes to a standstill",
)

# %% name="warm-up-of-1f1b"
def with_warm_up(p, m, v, warm_up):
    rows = []
    for r, right in enumerate(interleaved(p, m, v).rows):
        F, B = ([action for action in right if action.kind == kind] for kind in "FB")
        warm = warm_up(r)
        rows.append(F[:warm] + [a for pair in zip(F[warm:], B) for a in pair] + B[len(B) - warm :])
    return Schedule.of("mine", rows)

fault = first_fault(with_warm_up(p, m, 2, lambda r: p - 1 - r))
print(fault)

# %% name="warm-up-seen"
too_few.reveal(
    f"{fault.action} on rank {fault.rank} waits for {fault.waits_for}",
    answer="C",
    A="the order of a rank is fixed: a backward that stands too early is not late, it is never possible",
    B="memory falls with fewer forwards, as long as the first gradient can still be made: here it cannot",
)

# %% [markdown] minutes=1 core=true
# Rank 0 wants the gradient of the *last* chunk first, and has not sent anything through it yet. No time is wasted here,
# it never ends: a schedule is an order, and this one asks for what comes after it.
#
# And the groups: with m = 6 on 4 ranks the second group is not whole.

# %% name="not-whole" tags=["raises-exception"]
interleaved(p=4, m=6, v=2)

# %% [markdown] core=true
# Megatron-LM says the same. Its newer versions let you choose another size for the groups. PyTorch takes larger groups by
# itself: here one of all six.

# %% [markdown] minutes=3 core=true
# ## Who keeps what
#
# Rank 0 of 1F1B keeps 4 micro-batches, with v = 2 it is 5.5. (A chunk is a v-th of a rank's share, so what it keeps of a
# micro-batch counts 1/v.)

# %% name="memory-guess"
memory = predict(
    "And with v = 4?",
    A="4: a rank has the same layers, however they are cut",
    B="4.75: less than with v = 2",
    C="7: finer keeps more",
)

# %% name="memory"
for v in (2, 4, 8):
    timeline = simulate(interleaved(p, m, v), pieces(v))
    keeps = [f"{float(peak):5.3g}" for peak in timeline.peak_in_flight()]
    print(f"v = {v}: the ranks keep", *keeps, f"  bubble {float(timeline.bubble):.1%}")

pipeline_picture(*(simulate(interleaved(p, m, v), pieces(v)) for v in (2, 4)))

# %% name="memory-seen"
memory.reveal(
    "rank 0 keeps 5.5 with v = 2, 4.75 with v = 4, 4.375 with v = 8",
    answer="B",
    A="the same layers, but forwards run further ahead: to the last chunk and back is a longer way",
    C="what is kept over 4 is p−1 = 3 chunks, with any v, and with v = 4 a chunk is half as large as with v = 2",
)

# %% [markdown] minutes=1 core=true
# Rank 0 has 2(p−1) + (v−1)p chunks under way when it warms up, and one more: p + (p−1)/v micro-batches. The more pieces,
# the nearer it comes to the p of 1F1B. So finer pieces have less bubble, *and* less memory than v = 2. Why not cut on?

# %% [markdown] minutes=4 core=true
# ## A message takes time
#
# So far a message arrived the moment it was sent. Now it arrives later: by 0.1 of a rank's forward, by 0.25, and so on.
# Nobody pays for sending; computing goes on meanwhile.

# %% name="latency-guess"
winner = predict(
    "A message takes half a forward. Which is done first?",
    A="v = 4: it has the smallest bubble",
    B="v = 2",
    C="1F1B: it sends the fewest messages",
    D="all as before, a little later: messages travel while ranks compute",
)

# %% name="latencies"
COMPARED = {"GPipe": (gpipe(p, m), 1), "1F1B": (one_f_one_b(p, m), 1)}
COMPARED |= {f"v = {v}": (interleaved(p, m, v), v) for v in (2, 4)}
LATENCIES = ("0", "0.1", "0.25", "0.5", "1")

ends = {
    latency: {name: float(simulate(s, pieces(v, latency)).makespan) for name, (s, v) in COMPARED.items()}
    for latency in LATENCIES
}
print("latency ", *(f"{name:>7}" for name in COMPARED))
for latency, of in ends.items():
    print(f"{latency:8}", *(f"{end:7.2f}" for end in of.values()), "  first:", min(of, key=of.get))

# %% name="latency-seen"
winner.reveal(
    ", ".join(f"{name} {end:g}" for name, end in ends["0.5"].items()),
    answer="B",
    A="finer is better while messages are free: 15 borders there and back cost more than the bubble saves",
    C="as few as GPipe, but it waits for them one after the other, in turn with its forwards",
    D="they travel while others compute, but whoever waits for one has nothing to do",
)

# %% [markdown] core=true
# One latency, and another winner. As curves:

# %% name="latency-curves"
import matplotlib.pyplot as plt

at = [Fraction(n, 20) for n in range(25)]
LINES = {"GPipe": ("#57606a", ":"), "1F1B": ("#0062a3", "--"), "v = 2": ("#b35900", "-."), "v = 4": ("#613d99", "-")}
figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
for name, (s, v) in COMPARED.items():
    color, line = LINES[name]
    axes.plot(at, [float(simulate(s, pieces(v, latency)).makespan) for latency in at], line, color=color, label=name)
axes.set(title="When it ends (p = 4, m = 8)", xlim=(0, 1.2), ylabel="forwards of a rank")
axes.set(xlabel="latency of a message, in forwards of a rank")
axes.legend()
plt.show()

# %% [markdown] minutes=3 core=true
# ## Why finer pays more
#
# The end is decided by a chain of actions, each of which waits for the one before: the critical path, outlined. Count how
# often it goes from one rank to another.

# %% name="critical-path"
slow = simulate(interleaved(p, m, v=2), pieces(2, "0.5"))
pipeline_picture(slow, critical_path=True)

# %% name="crossings"
from itertools import pairwise

def crossings(timeline):
    ranks = [rank for rank, _ in timeline.critical_path]
    return sum(a != b for a, b in pairwise(ranks))

for s, v in ((gpipe(p, m), 1), (one_f_one_b(p, m), 1), (interleaved(p, m, 2), 2), (interleaved(p, m, 4), 4)):
    print(f"{s.name:16} v = {v}: {crossings(simulate(s, pieces(v, '0.1')))} messages on the path")

# %% [markdown] minutes=1 core=true
# GPipe waits for 2(p−1) = 6 messages, once there and once back. Interleaved waits for 2(pv−1): 14 with v = 2, 30 with
# v = 4, as the first micro-batch has to go round v times. 1F1B waits for 16, and the more, the more micro-batches there
# are: after its warm-up each forward waits for a gradient, and that one for a forward.
#
# Cutting every piece in two saves half of the bubble, (p−1)(F+B)/2v, and puts 2pv more messages on the path. From 2 to 4
# pieces that pays while a message takes less than 0.14 of a forward: there the two curves cross.

# %% [markdown] minutes=1 core=true
# ## Move the latency
#
# Interleaved beside GPipe. Drag the latency to 1: what grows, and where? Then choose 1F1B in place of GPipe.

# %% name="explorer"
from lessons_lib.widgets import pipeline_explorer

pipeline_explorer("interleaved", "gpipe", latency="0.25")

# %% [markdown] minutes=3 core=true
# ## How long is a message?
#
# A model with 32 layers of width 4096 on four H100s, micro-batches of 2048 tokens. A rank's forward is the products of 8
# layers, each with 12 D² weights. A message is 2048 x 4096 numbers of 2 bytes. **Guess:** on which of these wires would
# you take v = 4?

# %% name="wires"
from lessons_lib.machines import Link, machine

D, tokens, layers = 4096, 2048, 8
H100 = machine("2x8xH100")
forward_s, n_bytes = H100.compute_s(2 * tokens * 12 * D**2 * layers), 2 * tokens * D
WIRES = {"in a box": H100.in_node, "between boxes": H100.between_nodes}
WIRES |= {"100 Gbit/s Ethernet": Link(50e-6, 12.5e9), "10 Gbit/s Ethernet": Link(50e-6, 1.25e9)}
for name, wire in WIRES.items():
    print(f"{name:20} a message takes {wire.message_s(n_bytes) / forward_s:.3f} of a forward")

# %% [markdown] core=true
# The same four schedules on these wires. A message now keeps its wire busy, and the next one has to wait for it.

# %% name="on-wires"
def on_wire(schedule, v, wire):
    each = forward_s / v
    sent = {"send": wire.latency_s, "message_bytes": n_bytes, "bandwidth": wire.bandwidth_bytes_per_s}
    return simulate(schedule, Times(F=each, I=each, W=each, **sent)).makespan / forward_s

made_of = {"GPipe": (gpipe(p, m), 1), "1F1B": (one_f_one_b(p, m), 1)}
made_of |= {f"v = {v}": (interleaved(p, m, v), v) for v in (2, 4, 8)}
print(" " * 20, *(f"{name:>6}" for name in made_of))
for name, wire in WIRES.items():
    print(f"{name:20}", *(f"{on_wire(s, v, wire):6.2f}" for s, v in made_of.values()))

# %% [markdown] minutes=1 core=true
# In a box finer is better, down to a single layer for a piece. Between boxes v = 4 wins, on 100 Gbit/s v = 2, and on
# 10 Gbit/s GPipe. (The 50 µs of Ethernet are an assumption; the other wires stand in
# [`machines.py`](../lessons_lib/machines.py). A forward is counted at the data sheet's FLOP/s; a slower one makes messages
# shorter beside it.)

# %% [markdown] minutes=3 core=true
# ## On real stages
#
# Eight layers, four ranks. The library's `execute` lets every rank carry out its row: real forwards, real backwards,
# real messages. (On a virtual clock, on which a message takes nothing.) **Guess:** do the gradients change when the order
# of the work does?

# %% name="real-stages"
import torch
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

for made, v in ((gpipe(p, m), 1), (one_f_one_b(p, m), 1), (interleaved(p, m, 2), 2)):
    result = run(train, made, pieces(v), ranks=p, machine=Machine("all is free"))
    timelines, gradients = zip(*result.values)
    sent = sum(event.kind == "send" and event.n_elements == 2 * 6 for event in result.trace.events)
    print(f"{made.name:16} ends at {timelines[0].makespan:4}, {sent:3} messages, gradients off by {error(gradients):.0e}")

# %% name="executed-picture"
timelines[0]

# %% [markdown] minutes=1 core=true
# They do not: a sum over micro-batches has no order, and each layer sees the same micro-batches. Ends and messages are
# those that were simulated.

# %% [markdown] minutes=3 core=true
# ### The same in production
#
# PyTorch calls it `ScheduleInterleaved1F1B`. The same stages, on the same ranks:

# %% name="production"
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

def with_torch():
    group, n_stages = Mesh(pp=p)["pp"], len(LAYERS)
    mine = range(group.rank, n_stages, p)
    for n in mine:
        LAYERS[n].zero_grad()
    stages = [PipelineStage(LAYERS[n], n, n_stages, torch.device("cpu")) for n in mine]
    theirs = ScheduleInterleaved1F1B(stages, m, loss_fn=nn.functional.mse_loss)
    theirs.step(*([X] if group.rank == 0 else []), **({"target": Y} if group.rank == p - 1 else {}))
    order = [str(action) for action in theirs.pipeline_order[group.rank] if action]
    return order, {n: LAYERS[n][0].weight.grad for n in mine}

# %% name="production-compared"
orders, gradients = zip(*run(with_torch, ranks=p).values)
print(f"gradients off by {error(gradients):.0e}")
ours = [[str(action) for action in row] for row in interleaved(p, m, 2).rows]
print("the same order of actions:", list(orders) == ours)

# %% [markdown] minutes=1 core=true
# Megatron-LM: `--num-layers-per-virtual-pipeline-stage`; a chunk is called a *virtual stage* there.

# %% [markdown] minutes=4 more=true
# ## More: what the second one is for
#
# The warm-up has two forwards for each rank behind, 2(p−1−r). Plain 1F1B has one. **Guess:** what does interleaved lose
# with one?

# %% name="one-for-each" more=true
def with_extra(per_rank, v):
    rows = []
    for r, right in enumerate(interleaved(p, m, v).rows):
        F, B = ([action for action in right if action.kind == kind] for kind in "FB")
        warm = per_rank * (p - 1 - r) + (v - 1) * p
        rows.append(F[:warm] + [a for pair in zip(F[warm:], B) for a in pair] + B[len(B) - warm :])
    return Schedule.of(f"{per_rank} for each rank behind", rows)

for v in (1, 2):
    for schedule in (with_extra(1, v), with_extra(2, v)):
        timelines = [simulate(schedule, pieces(v, latency)) for latency in ("0", "0.5")]
        free, slow = (float(timeline.makespan) for timeline in timelines)
        peak = float(timelines[0].peak_in_flight()[0])
        print(f"v = {v}, {schedule.name}: ends at {free}, with a latency of 0.5 at {slow}; rank 0 keeps {peak:g}")

# %% [markdown] minutes=1 more=true
# As long as messages are free: nothing, and it keeps less, 4 as plain 1F1B does. With a latency the second forward is
# what a rank does while a gradient is under way. So the longer warm-up buys time with memory. It is the same with one
# chunk: 1F1B with two for each rank behind ends with GPipe, at 36, and keeps 7 in place of 8.

# %% [markdown] minutes=3 more=true
# ## More: breadth first
#
# Another order for the same stages: *all* micro-batches through chunk 0, then all through chunk 1, and back in the same
# way.

# %% name="breadth-first" more=true
from lessons_lib.pipeline_parallel import breadth_first

for latency in ("0", "0.5"):
    timelines = [simulate(generator(p, m, 2), pieces(2, latency)) for generator in (interleaved, breadth_first)]
    print(f"latency {latency:3}", [(float(t.makespan), float(t.peak_in_flight()[0])) for t in timelines])

# %% name="breadth-first-picture" more=true
pipeline_picture(simulate(breadth_first(p, m, 2), pieces(2)))

# %% [markdown] minutes=1 more=true
# The same bubble, all m micro-batches kept, and less harm from latency: 31.5 where interleaved has 35.5. It suits ZeRO 3:
# a chunk's weights are needed in one stretch, so they are gathered once forward and once backward, and not for every
# group.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. The bubble is made of stages. With v chunks on every rank it is (p−1)(F+B)/v.
# 2. There are 2m(pv−1) messages in place of 2m(p−1), each as large as before, and 2(pv−1) on the path that decides.
# 3. So finer is better as long as messages are short beside a forward; look at the wire first.
# 4. Micro-batches go round in groups of p: m must be a multiple of p, and backward takes the last chunk first.
# 5. Rank 0 keeps p + (p−1)/v micro-batches: more than 1F1B's p, and less with more chunks.
#
# **Where next:** write the generator in the exercise; the [README](../README.md) has the map of the lessons.
#
# *Sources:* Narayanan et al. 2021, [Efficient large-scale language model training on GPU
# clusters](https://arxiv.org/abs/2104.04473), section 2.2. Breadth-first: Lamy-Poirier 2023,
# [arXiv 2211.05953](https://arxiv.org/abs/2211.05953).
