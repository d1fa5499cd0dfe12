# %% [markdown] minutes=1 core=true
# # Data parallel
#
# Every rank holds the whole model and works on rows of its own. Then gradients are averaged. But rank 0 got 2 tokens, with
# a mean loss of 1, and rank 1 got six, with a mean loss of 3. **Average the two gradients?**

# %% tags=["setup"]
import torch
import torch.distributed as dist

from lessons_lib import Mesh, region, run
from lessons_lib.data_parallel import Bucketed, rows_of_rank, total
from lessons_lib.grading import predict, recap
from lessons_lib.models import GPT, GPTConfig, corpus

CONFIG = GPTConfig(L=1, H=2, D=32, S=32)
BATCH = corpus.batch(step=0, n_sequences=16, S=CONFIG.S)
def serial():
    model = GPT(CONFIG).double()
    (model.loss_sum(*BATCH) / BATCH[1].numel()).backward()
    return [parameter.grad for parameter in model.parameters()]

def furthest(ours, truth):
    return f"{max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, truth)):.0e}"

average = predict("2 tokens have a mean loss of 1, six one of 3. The loss of the step?",
    A="2.0, the average of the two", B="2.5, the mean of the eight tokens", C="4.0, the sum")

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("04")

# %% [markdown] minutes=4 core=true
# ## The same step, on four ranks
#
# The loss of a step is the mean over all tokens: a sum, divided once. A gradient of a sum is the sum of gradients. So
# each rank takes the sum over *its* tokens, divides it by the number of *all*, and an all-reduce adds up what comes out.

# %% name="naive"
def naive():
    model = GPT(CONFIG).double()
    group = Mesh(dp=4)["dp"]
    tokens, targets = (rows_of_rank(x, group) for x in BATCH)
    loss = model.loss_sum(tokens, targets) / total(targets.numel(), group)
    loss.backward()
    with region("gradients"):
        for parameter in model.parameters():
            parameter.grad = group.all_reduce(parameter.grad)
    return [parameter.grad for parameter in model.parameters()]

# %% [markdown] core=true
# **Guess:** with n parameters, how many numbers does each rank send?

# %% name="naive-run"
truth, result = serial(), run(naive, ranks=4)
n = sum(gradient.numel() for gradient in truth)
print("largest difference of a gradient on any rank:", max(furthest(values, truth) for values in result.values))
print("numbers sent by a rank:", result.trace.bytes_sent(0, "gradients") // 8, "  parameters:", n)

# %% name="naive-picture"
result

# %% [markdown] core=true
# One and a half times n: 2 (p−1)/p, as lesson 01 promised, and never more than twice, whatever the number of ranks. All
# ranks have the same gradients and take the same step, so weights stay the same without being sent.

# %% [markdown] minutes=5 core=true
# ## Two tokens here, six there
#
# The first question. The model is one weight w, and the loss of a token is w times 1 on rank 0, w times 3 on rank 1:

# %% name="two-and-six"
def two_and_six(combine):
    group = Mesh(dp=2)["dp"]
    w = torch.ones((), requires_grad=True)
    losses = w * torch.tensor([[1.0] * 2, [3.0] * 6][group.rank])
    combine(losses, group).backward()
    return group.all_reduce(w.grad).item()

# %% name="two-ways"
def mean_of_means(losses, group):
    return losses.mean() / group.size

def mean_of_tokens(losses, group):
    return losses.sum() / total(losses.numel(), group)

# %% name="two-and-six-run"
found = {way.__name__: run(two_and_six, way, ranks=2).values[0] for way in (mean_of_means, mean_of_tokens)}
found

# %% name="first-seen"
average.reveal(found["mean_of_tokens"], answer="B",
    A="an average of averages: each token of rank 0 counts as much as three of rank 1",
    C="a sum of means is neither; divide once, by the number of all tokens")

# %% [markdown] core=true
# An **average of averages** is right as long as all ranks have equally many tokens. With padded or packed text they
# never have. It is the same with micro-batches, one after the other.
#
# And a rank that has no token at all? Rank 1 has four, with a loss of 3 each. **Guess:** what comes out?

# %% name="none"
def one_has_none(combine):
    group = Mesh(dp=2)["dp"]
    w = torch.ones((), requires_grad=True)
    losses = w * torch.full((4 * group.rank,), 3.0)
    loss = combine(losses, group)
    loss.backward()
    return {"loss": group.all_reduce(loss.detach()).item(), "gradient": group.all_reduce(w.grad).item()}

for way in (mean_of_means, mean_of_tokens):
    print(f"{way.__name__:15}", run(one_has_none, way, ranks=2).values[0])

# %% [markdown] core=true
# The mean of nothing is not a number, and the all-reduce brings it to every rank; the gradient is half of what it should
# be. A sum of nothing is 0, and all is well.

# %% [markdown] minutes=7 core=true
# ## Hooks
#
# The naive way sends when backward is over. All that time the network stood idle. Which gradient could be sent first?
# PyTorch calls a **hook** when a parameter has its gradient:

# %% name="hooks"
order = []
model = GPT(CONFIG)
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
model.loss(*BATCH).backward()
print("first", order[:3], "\nlast ", order[-2:])

# %% [markdown] core=true
# The last layer's come first, and the embedding's last. So a hook can send a gradient off while backward goes on below.
# `async_op=True` returns at once, and we wait in the end:

# %% name="eager"
def eager(model, group):
    works = []

    def send(parameter):
        works.append(dist.all_reduce(parameter.grad, group=group.process_group, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)

    def wait():
        for work in works:
            work.wait()
    return wait

# %% [markdown] core=true
# On a slow machine, and with a model of six equal layers, so that one can see it. First send when all is over:

# %% name="slow"
from lessons_lib.machines import Link, Machine

SLOW = Machine("slow", flops_per_s=1e9, in_node=Link(latency_s=50e-6, bandwidth_bytes_per_s=200e6))

# %% name="six-layers"
def afterwards(model, group):
    def send_all():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group.process_group)
    return send_all

def six_layers(prepare, rows=32, width=64):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(6)))
    finish = prepare(model, Mesh(dp=4)["dp"])
    model(torch.ones(rows, width)).sum().backward()
    finish()

# %% name="afterwards"
run(six_layers, afterwards, ranks=4, machine=SLOW)

# %% name="overlap-guess"
overlap = predict("Now each gradient is sent as soon as it is there. What is saved?",
    A="nothing: the same bytes must be sent", B="most of the waiting; only for the last gradients ranks wait",
    C="everything: all ranks do is compute")

# %% name="overlap"
run(six_layers, eager, ranks=4, machine=SLOW)

# %% name="overlap-seen"
waited = {}
for way in (afterwards, eager):
    spans = run(six_layers, way, ranks=4, machine=SLOW).trace.timeline.spans
    waited[way.__name__] = sum(span.end - span.start for span in spans if span.rank == 0 and span.kind == "wait") * 1e3
overlap.reveal(", ".join(f"{way}: waits {ms:.1f} ms" for way, ms in waited.items()), answer="B",
    A="the same bytes, at a time when the ranks have something else to do",
    C="the first layer's gradient comes last: when it is there, nothing is left to hide it behind")

# %% [markdown] minutes=5 core=true
# ## In buckets
#
# A real model has small parameters, too: a bias, a norm. Each costs all the rounds of a message. So gradients are
# collected in **buckets**: when one is full, it is sent as one vector. `Bucketed` does that, in the order in which backward
# comes to the parameters.

# %% name="buckets"
from lessons_lib.machines import Link, Machine

SLOW = Machine("slow", flops_per_s=1e9, in_node=Link(latency_s=50e-6, bandwidth_bytes_per_s=200e6))

def twelve_layers(bucket_bytes):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    replicas = Bucketed(model, Mesh(dp=4)["dp"], bucket_bytes)
    model(torch.ones(32, 64)).sum().backward()
    replicas.reduce()

# %% [markdown] core=true
# A layer has 16.6 kB. **Guess:** which bucket is best, tiny ones, one for all, or something between?

# %% name="buckets-run"
import matplotlib.pyplot as plt

kilobytes, times, calls = (0.1, 1, 16, 33, 66, 100, 200, 400), [], []
for kB in kilobytes:
    trace = run(twelve_layers, round(kB * 1000), ranks=4, machine=SLOW).trace
    times.append(trace.timeline.makespan * 1e3)
    calls.append(len(trace.collectives(rank=0)))
figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
axes.plot(kilobytes, times, "o-", color="#0072b2")
for kB, ms, n in zip(kilobytes, times, calls):
    axes.annotate(f"{n}", (kB, ms), xytext=(0, 8), textcoords="offset points", ha="center")
axes.set(xscale="log", title="A step in buckets (the numbers: how many are sent)", xlabel="kB of a bucket", ylabel="ms")
axes.margins(y=0.2)
plt.show()

# %% [markdown] core=true
# Something between. Tiny buckets pay latency, and the one large bucket is full only when backward is over: nothing is
# left to hide it. In PyTorch the default is 25 MB.
#
# ### Break it
#
# Rank 1 has no tokens, and so no backward. **Guess:** what do the others say to that?

# %% name="no-backward" tags=["raises-exception"]
def no_backward_on_rank_1():
    model, group = torch.nn.Linear(3, 2, bias=False), Mesh(dp=4)["dp"]
    works = []
    model.weight.register_post_accumulate_grad_hook(
        lambda p: works.append(dist.all_reduce(p.grad, group=group.process_group, async_op=True)))
    if group.rank != 1:
        model(torch.ones(2, 3)).sum().backward()
    for work in works:
        work.wait()

run(no_backward_on_rank_1, ranks=4)

# %% [markdown] core=true
# No backward, no hook, no all-reduce, and three ranks wait for ever. Lesson 02: who has nothing to say must say so. In
# the library `replicas.reduce()` sends zeros for every bucket that was not filled, in the same order on every rank:

# %% name="zeros"
def zeros_from_rank_1():
    model, group = torch.nn.Linear(3, 2, bias=False), Mesh(dp=4)["dp"]
    replicas = Bucketed(model, group)
    if group.rank != 1:
        model(torch.ones(2, 3)).sum().backward()
    replicas.reduce()
    return model.weight.grad[0].tolist()

run(zeros_from_rank_1, ranks=4).values

# %% [markdown] minutes=5 core=true
# ## Accumulation
#
# Four micro-batches, one after the other, then one step (lesson 03). When are gradients sent? Let the hooks send them
# every time:

# %% name="accumulation"
def in_micro_batches(send_every_time):
    model, group = GPT(CONFIG).double(), Mesh(dp=4)["dp"]
    replicas = Bucketed(model, group)
    tokens, targets = (rows_of_rank(x, group).chunk(4) for x in BATCH)
    n_tokens = BATCH[1].numel()
    for m in range(3):
        if send_every_time:
            (model.loss_sum(tokens[m], targets[m]) / n_tokens).backward()
            replicas.reduce()
        else:
            with replicas.accumulating():
                (model.loss_sum(tokens[m], targets[m]) / n_tokens).backward()
    (model.loss_sum(tokens[3], targets[3]) / n_tokens).backward()
    replicas.reduce()
    return [parameter.grad for parameter in model.parameters()]

# %% [markdown] core=true
# **Guess:** four times the bytes. And the gradients?

# %% name="accumulation-run"
for every_time in (True, False):
    result = run(in_micro_batches, every_time, ranks=4)
    print("every time:" if every_time else "at the end:", f"{result.trace.bytes_sent(0):,} bytes sent,",
          f"largest error of a gradient {furthest(result.values[0], serial())}")

# %% name="accumulation-picture"
run(in_micro_batches, True, ranks=4, machine="4xH100")

# %% [markdown] core=true
# Four times the bytes, and wrong: what was summed over the ranks is summed again with the next micro-batch, so that the
# first counts 4 x 4 x 4 times. Accumulate first, and send with the last one. A second backward without a word between is
# refused:

# %% name="refused" tags=["raises-exception"]
def twice():
    model = torch.nn.Linear(3, 2)
    Bucketed(model, Mesh(dp=2)["dp"])
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()

run(twice, ranks=2)

# %% [markdown] minutes=6 core=true
# ## Four times too much
#
# Each rank takes the mean over its own tokens, gradients are summed, and nobody divides by four. Everything else is
# right. Here are 40 steps of training, with SGD and with Adam, right and four times too large:

# %% name="training"
def train(make_optimizer, share, counts=(4, 4, 4, 4), steps=40):
    model, group = GPT(CONFIG), Mesh(dp=4)["dp"]
    replicas, optimizer = Bucketed(model, group), make_optimizer(model.parameters())
    first, losses = sum(counts[: group.rank]), []
    for step in range(steps):
        mine = (x[first : first + counts[group.rank]] for x in corpus.batch(step, sum(counts), CONFIG.S))
        tokens, targets = mine
        optimizer.zero_grad()
        loss = model.loss_sum(tokens, targets)
        share(loss, targets.numel(), group).backward()
        replicas.reduce()
        optimizer.step()
        losses.append(group.all_reduce(loss.detach()).item() / (sum(counts) * CONFIG.S))
    return losses

# %% name="four-guess"
which_moves = predict("Gradients are four times too large. Which loss curve moves?",
    A="both; every step is four times as long", B="SGD's", C="neither; the optimizer makes up for it")

# %% name="four-times"
from functools import partial

SGD, ADAM = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.Adam, lr=3e-3)

def divided(loss, n, group):
    return loss / total(n, group)

def not_divided(loss, n, group):
    return loss / n

curves = {}
for name, optimizer in (("Adam", ADAM), ("SGD", SGD)):
    curves[name] = run(train, optimizer, divided, ranks=4).values[0]
    curves[f"{name}, gradients x4"] = run(train, optimizer, not_divided, ranks=4).values[0]

# %% name="four-picture"
from lessons_lib.views import loss_curves

loss_curves(curves)

# %% name="four-seen"
apart = {name: max(abs(a - b) for a, b in zip(curves[name], curves[f"{name}, gradients x4"])) for name in ("Adam", "SGD")}
which_moves.reveal(", ".join(f"{name} moves by {gap:.5f}" for name, gap in apart.items()), answer="B",
    A="Adam divides every gradient by its usual size, and a factor goes away",
    C="SGD goes four times as far; here it even falls faster")

# %% [markdown] core=true
# Adam does not move. That is why such mistakes live for years: a loss never divided by the micro-batches, an all-reduce too
# many. They come out when somebody changes the optimizer, clips, or compares.
#
# And SGD's curve, with a wrong gradient, *falls faster*. A loss that falls does not say that the gradient is right.

# %% [markdown] minutes=4 core=true
# ### No curve shows it
#
# Now the average of averages. Of 16 sequences, rank 0 has one, and the others have five each. The right curves are the
# ones above: divided once, it does not matter how rows are dealt out.

# %% name="unequal-guess"
what_shows = predict("Rank 0's one sequence counts as much as five of the others. What shows it?",
    A="the loss: it falls more slowly", B="only SGD's loss; Adam hides every bug", C="no curve, only the gradient")

# %% name="unequal"
def mean_of_means(loss, n, group):
    return loss / n / group.size

UNEQUAL = (1, 5, 5, 5)
unequal = {}
for name, optimizer in (("Adam", ADAM), ("SGD", SGD)):
    unequal[name] = curves[name]
    unequal[f"{name}, mean of means"] = run(train, optimizer, mean_of_means, UNEQUAL, ranks=4).values[0]

# %% name="unequal-picture"
loss_curves(unequal)

# %% [markdown] core=true
# Which one is right? All four fall, and the two of a pair are never 0.05 apart, less than the loss jumps from step to
# step. The gradient of the first step says it:

# %% name="unequal-gradient"
def gradients(share, counts=UNEQUAL):
    model, group = GPT(CONFIG).double(), Mesh(dp=4)["dp"]
    replicas = Bucketed(model, group)
    tokens, targets = (x.split(counts)[group.rank] for x in BATCH)
    share(model.loss_sum(tokens, targets), targets.numel(), group).backward()
    replicas.reduce()
    return [parameter.grad for parameter in model.parameters()]

errors = {way.__name__: furthest(run(gradients, way, ranks=4).values[0], serial()) for way in (divided, mean_of_means)}
errors

# %% name="unequal-seen"
gaps = {name: max(abs(a - b) for a, b in zip(unequal[name], unequal[f"{name}, mean of means"])) for name in ("Adam", "SGD")}
what_shows.reveal(f"gradients are off by {errors['mean_of_means']}; Adam's loss moves by {gaps['Adam']:.2f}, "
    f"SGD's by {gaps['SGD']:.2f}", answer="C",
    A="it falls as well, and nearly as fast; to see that it could be better one would have to know the right one",
    B="Adam hides a factor, and nothing else: here the direction is wrong, and its curve moves more than SGD's")

# %% [markdown] core=true
# So compare gradients with the serial ones, in float64, absolutely, and on unequal data. Every test of this course does.

# %% [markdown] minutes=4 core=true
# ## The same in production
#
# PyTorch calls it `DistributedDataParallel`. It has the same hooks and buckets, `no_sync()` is our `accumulating()`, and
# it **averages** over ranks. So a sum is to be multiplied by the number of ranks, and divided by all tokens:

# %% name="production"
from torch.nn.parallel import DistributedDataParallel

class Loss(torch.nn.Module):  # DDP watches a forward, so the loss has to be one
    def __init__(self):
        super().__init__()
        self.gpt = GPT(CONFIG).double()

    def forward(self, tokens, targets):
        return self.gpt.loss_sum(tokens, targets)

def with_torch():
    group = Mesh(dp=4)["dp"]
    model = DistributedDataParallel(Loss(), process_group=group.process_group)
    tokens, targets = (x.split((1, 5, 5, 5))[group.rank] for x in BATCH)
    n_tokens = total(targets.numel(), group)
    with region("gradients"):
        (model(tokens, targets) * group.size / n_tokens).backward()
    return [parameter.grad for parameter in model.parameters()]

# %% name="ours"
def ours():
    model, group = GPT(CONFIG).double(), Mesh(dp=4)["dp"]
    replicas = Bucketed(model, group)
    tokens, targets = (x.split((1, 5, 5, 5))[group.rank] for x in BATCH)
    loss = model.loss_sum(tokens, targets) / total(targets.numel(), group)
    with region("gradients"):
        loss.backward()
        replicas.reduce()
    return [parameter.grad for parameter in model.parameters()]

# %% name="production-compared"
by_torch, by_library = run(with_torch, ranks=4), run(ours, ranks=4)
print("against serial:", furthest(by_torch.values[0], serial()), furthest(by_library.values[0], serial()))
print("bytes of gradients:", *(result.trace.bytes_sent(0, "gradients") for result in (by_torch, by_library)))

# %% name="production-picture"
by_torch

# %% [markdown] core=true
# Equal numbers and equal bytes. What else it sends, once, are the weights of rank 0, so that all begin alike; our GPT is
# made from a seed. ([`replicated.py`](../lessons_lib/data_parallel/replicated.py) is ours, in one sitting.)

# %% [markdown] minutes=3 more=true
# ## A metric, too
#
# Ten samples, of which the first is wrong: 90 % are right. PyTorch's `DistributedSampler` fills up until all ranks have
# equally many. **Guess:** what accuracy do four ranks find?

# %% name="metric" more=true
from torch.utils.data import DistributedSampler

from lessons_lib.data_parallel import mean_over_ranks

def accuracy(ranks):
    group, right = Mesh(dp=ranks)["dp"], torch.arange(10) > 0
    drawn = list(DistributedSampler(range(10), num_replicas=ranks, rank=group.rank, shuffle=False))
    filled, dealt = right[drawn].double(), rows_of_rank(right, group).double()
    return {"filled up": mean_over_ranks(filled, group), "each once": mean_over_ranks(dealt, group)}

for ranks in (1, 2, 4, 5):
    print(ranks, "ranks:", run(accuracy, ranks, ranks=ranks).values[0])

# %% [markdown] more=true
# 83 %: on four ranks two samples are drawn again, and one of them is the wrong one. For training that is harmless; a
# metric should count every sample once.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. Divide once, by the tokens of all ranks, and sum. An average of averages is another number.
# 2. 2 (p−1)/p numbers are sent for each parameter, and weights stay equal without being sent.
# 3. Gradients come last layer first; sent in buckets while backward goes on, most of the sending is hidden.
# 4. Every rank sends every bucket, with tokens or without, and once for all micro-batches.
# 5. Adam hides a factor, and no curve shows an average of averages: compare gradients.
#
# **Where next:** buckets and weights in the exercise; in lesson 05 the all-reduce stops halfway. The
# [README](../README.md) has the map.
#
# *Sources:* Li et al. 2020, [PyTorch Distributed](https://arxiv.org/abs/2006.15704), section 3.2. The average of averages in
# practice: [transformers, pull request 34191](https://github.com/huggingface/transformers/pull/34191),
# [torchtune, pull request 1875](https://github.com/meta-pytorch/torchtune/pull/1875).
