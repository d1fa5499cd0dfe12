# %% [markdown] minutes=1 core=true
# # Pipeline I: stages
#
# A model too deep for one GPU is cut *between* layers. Each rank has some of them, a **stage**, and hands what comes out
# to the next. Say four ranks train such a model, with 12 micro-batches in a step. You buy four more and cut into eight
# stages. **How much faster is a step?**

# %% tags=["setup"]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from lessons_lib import compute, run
from lessons_lib.grading import predict, recap
from lessons_lib.machines import Machine
from lessons_lib.models import corpus

D, FREE = 32, Machine("free")  # width; a machine on which nothing takes time but compute()
tokens, targets = corpus.batch(step=0, n_sequences=24, S=8)
torch.manual_seed(0)
middle = (nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(6))
LAYERS = nn.Sequential(nn.Embedding(256, D), *middle, nn.Linear(D, 256)).double()
def stage(r, p):
    return LAYERS[r * 8 // p : (r + 1) * 8 // p]
def loss_share(y, t):  # the share of these targets in the mean over all
    return cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum") / targets.numel()
doubled = predict("From 4 to 8 stages with 12 micro-batches: how much faster?", A="2 times", B="1.58 times", C="no faster")

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("16")

# %% [markdown] minutes=6 core=true
# ## Cut autograd at a border
#
# The model has eight layers and guesses the next byte of a text. Autograd records what all eight do, in one graph. Now the
# last four shall be on another rank. A graph does not reach that far, so we cut it: **detach** what comes out of the first
# half, and let the copy require a gradient of its own.

# %% name="cut"
first, second = stage(0, 2), stage(1, 2)
y = first(tokens)
x = y.detach().requires_grad_()  # the border: the same numbers, another graph
loss = loss_share(second(x), targets)

# %% name="cut-guess"
what_returns = predict("loss.backward() stops at x. What must cross the border, so that the first half gets its gradients?",
    A="the loss", B="the gradients of the second half's weights", C="the gradient of x")

# %% name="cut-backward"
def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]

def furthest(ours, truth):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, truth, strict=True))

loss.backward()
print("first half, after loss.backward():", {parameter.grad for parameter in first.parameters()})
y.backward(x.grad)
in_two = gradients(first) + gradients(second)

LAYERS.zero_grad()
loss_share(LAYERS(tokens), targets).backward()
print(f"with both, compared with one graph: {furthest(in_two, gradients(LAYERS)):.0e}")
print("across the border:", tuple(y.shape), "forward,", tuple(x.grad.shape), "back")
LAYERS.zero_grad()

# %% [markdown] core=true
# In time, with the two halves on two ranks. (What the second line says about a bubble comes below.)

# %% name="cut-picture"
from lessons_lib.pipeline_parallel import draw, gpipe

draw(gpipe(2, 1))

# %% name="cut-seen"
what_returns.reveal(f"y.backward(x.grad): a tensor of {x.grad.numel()} numbers", answer="C",
    A="a number says nothing about how it changes with x",
    B="each half has gradients of its own weights, and the other half does not need them")

# %% [markdown] core=true
# One tensor forward, and one of the same shape back: that is all that two stages have in common. `y.backward(dy)` begins
# a backward in the middle of a model, with a gradient from elsewhere. It is the chain rule, with a messenger in the middle.

# %% [markdown] minutes=5 core=true
# ## Stages on ranks
#
# The messenger is `send` and `recv`. One function for each direction; `x` is what came in, `y` what went out:

# %% name="forward"
def forward(mine, x, t, loss=loss_share):
    r, p = dist.get_rank(), dist.get_world_size()
    if r > 0:
        x = torch.empty(*t.shape, D, dtype=torch.float64)
        dist.recv(x, r - 1)
        x.requires_grad_()
    y = mine(x)
    compute(len(t) * len(mine))  # virtual time: 1 for each sequence and layer
    if r == p - 1:
        return x, loss(y, t)
    dist.send(y.detach(), r + 1)
    return x, y

# %% name="backward"
def backward(mine, x, y):
    r, p = dist.get_rank(), dist.get_world_size()
    dy = None
    if r < p - 1:
        dy = torch.empty_like(y)
        dist.recv(dy, r + 1)
    y.backward(dy)
    compute(2 * len(x) * len(mine))  # two products
    if r > 0:
        dist.send(x.grad, r - 1)

# %% [markdown] core=true
# First the whole batch at once.

# %% name="stairs-guess"
at_once = predict("Four ranks with two layers each, one batch. How much faster than one rank with all eight?",
    A="4 times: four ranks share the work", B="not at all", C="2 times: forward and backward overlap")

# %% name="stairs"
def whole_batch():
    mine = stage(dist.get_rank(), dist.get_world_size())
    x, y = forward(mine, tokens, targets)
    backward(mine, x, y)
    return gradients(mine)

def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]

one, four = (run(whole_batch, ranks=ranks, machine=FREE) for ranks in (1, 4))
four

# %% name="stairs-seen"
times = {"1 rank": one.trace.timeline.makespan, "4 ranks": four.trace.timeline.makespan}
at_once.reveal(times, answer="B",
    A="they do share it, but one after the other: each needs what the one before makes",
    C="the last rank's backward needs the last rank's forward, and the others need it")

# %% [markdown] core=true
# Stairs down, stairs up, and at any time one rank works. The model fits now, and that is all.

# %% [markdown] minutes=4 core=true
# ### In micro-batches: GPipe
#
# So cut the batch, too, into **micro-batches**: while rank 1 has the first, rank 0 can begin the second. All forwards, then
# all backwards; gradients add up in `.grad`.

# %% name="gpipe"
def gpipe_step(m, loss=loss_share):
    mine = stage(dist.get_rank(), dist.get_world_size())
    micro_batches = zip(tokens.tensor_split(m), targets.tensor_split(m))
    kept = [forward(mine, x, t, loss) for x, t in micro_batches]
    for x, y in kept:
        backward(mine, x, y)
    return gradients(mine), [y.item() for _, y in kept if y.dim() == 0]

# %% name="gpipe-guess"
same = predict("4 ranks, 12 micro-batches. The gradients, compared with those of the whole batch?",
    A="close: smaller batches are noisier", B="equal, but for rounding", C="12 times as large, as 12 are added")

# %% name="gpipe-run"
by_gpipe = run(gpipe_step, 12, ranks=4, machine=FREE)
by_gpipe

# %% name="gpipe-compared"
def furthest(ours, truth):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, truth, strict=True))

def all_gradients(result):
    return [gradient for mine, _ in result.values for gradient in mine]

errors = {m: furthest(all_gradients(run(gpipe_step, m, ranks=4, machine=FREE)), one.values[0]) for m in (1, 3, 7, 12)}
print({m: f"{error:.0e}" for m, error in errors.items()})

# %% name="gpipe-seen"
same.reveal(f"largest difference of any gradient {max(errors.values()):.0e}", answer="B",
    A="the weights do not change in between, and a mean over all is a sum of shares: the mathematics is the same",
    C="each micro-batch has its share of one mean; it is divided once")

# %% [markdown] core=true
# Also with 3 micro-batches, fewer than stages, and with 7, which are not of one size. And the loss? Look at rank 0's, and
# at the last one's:

# %% name="gpipe-loss"
losses = [losses for _, losses in by_gpipe.values]
print("rank 0:", losses[0], "  rank 3:", [round(share, 3) for share in losses[3]])
print(f"sum {sum(losses[3]):.6f}, serial {loss_share(LAYERS(tokens), targets).item():.6f}")

# %% [markdown] core=true
# Only the last stage has one, in shares. Rank 0 prints none, and nothing is wrong. Who logs a −1 there, to have a number,
# will average it one day.

# %% [markdown] minutes=4 core=true
# ### The bubble
#
# In the picture above rank 0 stands still in the middle, and rank 3 at both ends, for the same time: a rank waits for a
# forward and a backward of each of the p − 1 others, and works for m. So it is idle for (p − 1) / (m + p − 1) of the time.
# **Guess:** with 24 micro-batches on 4 ranks?

# %% name="bubble"
def idle(result):
    timeline = result.trace.timeline
    work = sum(span.end - span.start for span in timeline.spans if span.kind == "compute")
    return 1 - work / (len(result.values) * timeline.makespan)

for m in (1, 2, 4, 8, 12, 24):
    measured = idle(run(gpipe_step, m, ranks=4, machine=FREE))
    print(f"m = {m:2}   measured {measured:6.2%}   (p-1)/(m+p-1) = {3 / (m + 3):6.2%}   of ideal time {3 / m:6.1%}")

# %% [markdown] core=true
# That share is of *all* time. Some papers divide by the ideal time instead, in which nobody waits: (p − 1) / m. It can be
# more than 100 %. Ask which one is meant. Pictures of schedules print both here, and a third: idle within the longest time
# that one rank takes from its first action to its last.
#
# ### Twice the stages

# %% name="doubled"
on = {p: run(gpipe_step, 12, ranks=p, machine=FREE) for p in (1, 2, 4, 8)}
makespan = {p: result.trace.timeline.makespan for p, result in on.items()}
for p, time in makespan.items():
    print(f"p = {p}: {time:g}, {makespan[1] / time:.2f} times as fast as one rank")
on[8]

# %% name="first-seen"
doubled.reveal(f"{makespan[4]:g} / {makespan[8]:g} = {makespan[4] / makespan[8]:.2f}", answer="B",
    A="the work of a rank halves, but its bubble grows: 15 slots become 19, half as long",
    C="a micro-batch still passes through every layer, but while it is on its way others are, too")

# %% [markdown] core=true
# A rank's work is half as long, but now it waits for seven others: 12 + 3 slots become 12 + 7 of half the length,
# 2 · 15 / 19 = 1.58. More stages want more micro-batches; with m = 4 p the bubble stays below a fifth.

# %% [markdown] minutes=3 core=true
# ### What travels
#
# **Guess:** in 12 pieces instead of one, how many more messages cross a border, and how many more bytes?

# %% name="travels"
for m in (1, 12):
    trace = run(gpipe_step, m, ranks=4, machine=FREE).trace
    across = [event for event in trace.events if event.kind == "send" and {event.rank, event.peer} == {1, 2}]
    print(f"m = {m:2}: {len(across):2} messages over the border 1 | 2, {sum(event.bytes_sent for event in across):,} bytes")

# %% [markdown] core=true
# 2 m messages and the same bytes: one activation of the batch, and its gradient. It does not matter how many layers or
# weights a stage has. 1D tensor parallelism sends at least twice that, from every rank, in *every* block; that is why
# pipelines run *between* machines.

# %% [markdown] minutes=6 core=true
# ### Break it: forget 1/m
#
# `loss_share` divides by *all* targets. Natural, and wrong, is the mean of each micro-batch:

# %% name="forget-guess"
shows = predict("Each of 12 micro-batches adds the gradient of its own mean. What shows it?",
    A="the loss curve, with any optimizer", B="nothing: a mean is a mean", C="the gradients; under Adam no curve")

# %% name="forget"
def own_mean(y, t):
    return cross_entropy(y.flatten(0, 1), t.flatten())

wrong = all_gradients(run(gpipe_step, 12, own_mean, ranks=4, machine=FREE))
factors = [(ours.norm() / truth.norm()).item() for ours, truth in zip(wrong, one.values[0])]
print(f"gradients are {min(factors):.6f} to {max(factors):.6f} times the right ones")
print(f"less 12 times the right ones: {furthest(wrong, [12 * truth for truth in one.values[0]]):.0e}")

# %% [markdown] core=true
# Exactly 12 times. Now train. One rank will do: it adds up the gradients of its micro-batches, and they are the pipeline's.
# The log averages losses, as every log does.

# %% name="forget-train"
from copy import deepcopy
from functools import partial

def train(optimizer, loss, m=12, n_steps=30):
    model, curve = deepcopy(LAYERS), []
    optimizer = optimizer(model.parameters())
    for step in range(n_steps):
        batch = corpus.batch(step, n_sequences=24, S=8)
        losses = [loss(model(x), t) for x, t in zip(*(whole.tensor_split(m) for whole in batch))]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        curve.append(sum(losses).item() / (m if loss is own_mean else 1))
    return curve

# %% name="forget-curves"
from lessons_lib.views import loss_curves

curves = {}
for optimizer in (partial(torch.optim.Adam, lr=5e-3), partial(torch.optim.SGD, lr=0.05)):
    for loss in (loss_share, own_mean):
        name = f"{optimizer.func.__name__}{', 1/m forgotten' if loss is own_mean else ''}"
        curves[name] = run(train, optimizer, loss, ranks=1).values[0]

loss_curves(curves)

# %% name="forget-seen"
apart = {name: max(abs(a - b) for a, b in zip(curves[name], curves[f"{name}, 1/m forgotten"])) for name in ("Adam", "SGD")}
shows.reveal(f"Adam's curve moves by {apart['Adam']:.0e}, SGD's by {apart['SGD']:.2f}", answer="C",
    A="Adam divides a gradient by its own size; a factor of 12 goes away",
    B="a sum of 12 means is 12 times the mean")

# %% [markdown] core=true
# SGD takes steps twelve times as long, and here that even looks like progress. Under Adam the training is right, until
# somebody clips gradients, or changes the optimizer. So check *absolute* gradients, against the serial ones.

# %% [markdown] minutes=4 core=true
# ## The printed table
#
# GPipe's paper prints how fast a Transformer trains on K = 2, 4, 8 TPUs with M micro-batches, relative to K = 2 and M = 1.
# From the bubble follows M·K / (M + K − 1), relative to the same.

# %% name="table-guess"
printed_4 = predict("The paper prints 4.8 for K = 8 and M = 4. What do stages of equal length allow?",
    A="4.8: it is the measurement of just this", B="2.91, less than printed", C="8: there are eight TPUs")

# %% name="table"
PRINTED = {1: (1.0, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}

def allowed(K, M):
    return M * K / (M + K - 1)

for M, row in PRINTED.items():
    for K, printed in zip((2, 4, 8), row):
        print(f"M = {M:2}, K = {K}: printed {printed:4}, allowed {allowed(K, M):4.2f}, ratio {printed / allowed(K, M):.2f}")

# %% name="table-seen"
printed_4.reveal(f"{allowed(8, 4):.2f}", answer="B",
    A="no schedule of one stage per rank can do it: seven others have to be waited for",
    C="eight at once would take an endless batch")

# %% [markdown] core=true
# The row with 32 micro-batches is the bubble, and 4 to 7 % for everything else. The row with 4 prints up to 1.65 times what
# is possible, and with one micro-batch more TPUs cannot help at all. It is no faster pipeline: **the batch was not the same
# in every cell.** It was adjusted to the memory, which grows with K. A speedup counts for equal work only; where a table beats
# the arithmetic, look for what else was changed.

# %% [markdown] minutes=3 core=true
# ## In the library
#
# [`execute`](../lessons_lib/pipeline_parallel/executor.py) takes the order from a schedule, which is data: a list of actions
# for every rank. Sends and receives follow from it, and so do all other schedules of the next three lessons.

# %% name="library"
from lessons_lib import Mesh
from lessons_lib.pipeline_parallel import Times, cut_batch, execute, gpipe

def loss_sum(y, t):
    return cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum")

def by_library(m=12):
    group = Mesh(pp=4)["pp"]
    mine = stage(group.rank, 4)
    batch = cut_batch(tokens, targets, m)
    done = execute(gpipe(4, m), {group.rank: mine}, batch, loss_sum, group, times=Times(F=1, B=2))
    return [parameter.grad for parameter in mine.parameters()], done

# %% name="library-run"
ours = run(by_library, ranks=4, machine=FREE)
print("loss on every rank:", [round(done.loss, 6) for _, done in ours.values])
ours.values[0][1].timeline

# %% [markdown] core=true
# The same fifteen slots. The curve under each rank is what it keeps: a micro-batch from its forward to its backward. Here
# these are all twelve, on every rank, and more micro-batches to shrink the bubble are more to keep. Lesson 17 does
# something about it.

# %% [markdown] minutes=2 core=true
# ### The same in production
#
# PyTorch's schedule takes the *mean* of each micro-batch and divides gradients by their number itself:

# %% name="production"
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

def mean(y, t):
    return cross_entropy(y.flatten(0, 1), t.flatten())

def with_torch(m=12):
    r, p = dist.get_rank(), dist.get_world_size()
    mine = stage(r, p)
    schedule = ScheduleGPipe(PipelineStage(mine, r, p, torch.device("cpu")), m, loss_fn=mean)
    schedule.step(*[tokens] * (r == 0), target=targets if r == p - 1 else None)
    return [parameter.grad for parameter in mine.parameters()]

# %% name="production-compared"
def furthest(ours, truth):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, truth, strict=True))

by_us = [gradient for gradients, _ in run(by_library, ranks=4, machine=FREE).values for gradient in gradients]
by_torch = [gradient for gradients in run(with_torch, ranks=4).values for gradient in gradients]
print(f"gradients differ by {furthest(by_torch, by_us):.0e}")

# %% [markdown] core=true
# Equal. And with 7 micro-batches, for 24 sequences?

# %% name="production-uneven" tags=["raises-exception"]
run(with_torch, 7, ranks=4)

# %% [markdown] core=true
# PyTorch takes the first micro-batch for the size of all. And if it did not, means of 4 and of 3 sequences, divided by 7,
# were an average of averages (lesson 04). Ours divides by all targets, and every micro-batch may have its own size.
#
# Megatron-LM, too, divides each micro-batch's loss by their number, in its `forward_step`.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. A border needs one tensor forward and its gradient back: detach, send, and `y.backward(dy)`.
# 2. One batch at once is stairs: p ranks, as fast as one. Micro-batches fill them; the mathematics stays the same.
# 3. Idle is (p − 1) / (m + p − 1) of all time, (p − 1) / m of the ideal time. Say which.
# 4. Twice the stages are not twice as fast: 1.58 times, from 4 to 8 with 12 micro-batches.
# 5. Divide the loss once. Forgotten, gradients are m times too large, and under Adam no curve says so.
#
# **Where next:** GPipe on stages of your own in the exercise; in lesson 17 backward begins earlier. The
# [README](../README.md) has the map.
#
# *Sources:* Huang et al. 2019, [GPipe](https://arxiv.org/abs/1811.06965), sections 2 and 3, table 2. Losses that are not
# divided, or twice: [torchtitan, issue 2972](https://github.com/pytorch/torchtitan/issues/2972) and
# [AReaL, pull request 1273](https://github.com/areal-project/AReaL/pull/1273); a loss of −1 on all ranks but one:
# [torchtitan, issue 547](https://github.com/pytorch/torchtitan/issues/547).
