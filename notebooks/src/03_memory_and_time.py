# %% [markdown] minutes=1 core=true
# # Where memory and time go
#
# GPT-2's largest model has 1.5 B parameters. In bf16, two bytes each, they are 3 GB. **Why does training it overflow a
# card of 24 GB, at batch size 1?**

# %% tags=["setup"]
import matplotlib.pyplot as plt
import torch

from lessons_lib import region, run
from lessons_lib.cost.measured import memory_of_a_step
from lessons_lib.cost.units import text
from lessons_lib.grading import predict, recap
from lessons_lib.machines import machine
from lessons_lib.models import GPT, GPTConfig, corpus

SMALL = GPTConfig(L=4, H=4, D=64, S=64)  # trained here
XL = GPTConfig(L=48, H=25, D=1600, S=1024, V=50257)  # GPT-2's largest: only computed with

def furthest(ours, truth):
    return f"{max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, truth)):.0e}"

why_full = predict("Weights of 3 GB overflow a card of 24 GB at batch size 1. What fills it?",
    A="the weights: they are needed in 4 bytes, too",
    B="what belongs to the weights, 14 more bytes for each parameter, and activations on top",
    C="the activations of one sequence, seven times the weights")

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("03")

# %% [markdown] minutes=6 core=true
# ## The model, and eight letters
#
# One GPT goes through the whole course, and every lesson cuts another dim of it. So here it is once, with the letters
# that all lessons use for its dims:
#
# | | | here |
# |---|---|---|
# | `B` | sequences of a batch | 16 |
# | `S` | tokens of a sequence | 64 |
# | `D` | width of the model | 64 |
# | `F` | width inside the MLP, 4 D | 256 |
# | `H` | heads of attention | 4 |
# | `K` | width of a head, D / H | 16 |
# | `V` | vocabulary: a token is a byte | 256 |
# | `L` | layers | 4 |

# %% name="tour"
model = GPT(SMALL)
model.blocks[0]

# %% [markdown] core=true
# A block reads the stream of `B S D` numbers, adds what attention found, adds what the MLP made, and hands it on.
# Attention widens D to 3 D (`qkv`) and comes back (`proj`); the MLP widens D to F (`up`) and comes back (`down`).
# **Guess:** how many parameters has a block, in units of D²?

# %% name="tour-parameters"
def n_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())

for name, module in (("embedding", model.embedding), ("a block", model.blocks[0]), ("head", model.head)):
    print(f"{name:10} {n_parameters(module):7,} parameters, {n_parameters(module) / SMALL.D**2:.2f} D²")

# %% [markdown] core=true
# 12 D² and a little: 3 and 1 for attention, 4 and 4 for the MLP. The rest are biases and norms. Now the sizes of what
# flows through it:

# %% name="tour-shapes"
tokens, targets = corpus.batch(step=0, n_sequences=16, S=SMALL.S)
stream = model.embedding(tokens)
heads = model.blocks[0].attention.qkv(stream).unflatten(-1, (SMALL.H, 3, SMALL.K))
wide = model.blocks[0].mlp.up(stream)
for name, x in {"stream": stream, "q, k, v of all heads": heads, "in the MLP": wide, "logits": model(tokens)}.items():
    print(f"{name:22} {tuple(x.shape)}   {x.numel() / stream.numel():.0f} times the stream")

# %% [markdown] core=true
# A picture of one block, measured by hooks on its modules:

# %% name="tour-picture"
block, widths = model.blocks[0], {}
for name, module in block.named_modules():
    if list(module.parameters(recurse=False)):
        module.register_forward_hook(lambda module, x, y, name=name: widths.__setitem__(name, y.numel()))
block(stream)
figure, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
axes.bar(list(widths), [n / stream.numel() for n in widths.values()], color="#0072b2")
axes.set(title="What the modules of a block put out, one after the other", ylabel="times the stream")
axes.tick_params(axis="x", rotation=20)
plt.show()

# %% [markdown] core=true
# Parameters know nothing of B and S, and what flows is proportional to both. Keep the two apart: the one is there all
# the time, the other comes and goes with every batch.

# %% [markdown] minutes=6 core=true
# ## Sixteen bytes for a parameter
#
# Large models compute in bf16, with two bytes: 8 bits of exponent, and only 8 of precision. **Guess:** a weight is 1, and
# a thousand steps add 0.001 each. What is it then?

# %% name="bf16"
weight, master = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)
for _ in range(1000):
    weight = weight + 0.001
    master = master + 0.001
print("in bf16:", weight.item(), "   in fp32:", round(master.item(), 3))

# %% [markdown] core=true
# In bf16 it has not moved: the next number after 1 is 1.0078. So the optimizer keeps a **master copy** of all weights in
# fp32 and changes that, and the two bytes are a rounded copy of it for the matrix products. Adam has two more numbers for
# each parameter, the moving means of the gradient and of its square.

# %% name="mixed-guess"
halved = predict("Mixed precision: weights and gradients in two bytes in place of four. The memory of training becomes",
    A="half", B="the same", C="less by a quarter")

# %% name="recipes"
from lessons_lib.cost.memory import RECIPES

for name in ("fp32 adam", "mixed adam", "mixed adam, both gradients", "mixed momentum", "mixed sgd"):
    recipe = RECIPES[name]
    print(f"{name:27} weights {recipe.parameters}, gradients {recipe.gradients}, optimizer {recipe.state:2}:"
          f" {recipe.total:2} bytes,  of 1.5 B {text(1_500_000_000 * recipe.total)}")

# %% name="mixed-seen"
halved.reveal([RECIPES["fp32 adam"].total, RECIPES["mixed adam"].total], answer="B",
    A="weights and gradients are half as large, and the master copy in fp32 is new: 4 + 4 + 8, or 2 + 2 + 12",
    C="2 bytes less for weights and 2 for gradients, and 4 more for the master copy")

# %% [markdown] core=true
# Mixed precision saves time, and half of the activations. It saves nothing here. (Papers and tools say 12, 16, 18 or 20
# bytes; the difference is which gradients are kept. So ask for the parts.)
#
# 16 bytes for 1.5 B parameters are 24 GB. The card is full before the first token comes.

# %% [markdown] minutes=4 core=true
# ## What a step holds
#
# Now the small GPT, with AdamW, on one rank. `record="memory"` counts every byte that is alive. This is the second of two
# steps, since Adam makes its moments in the first:

# %% name="curve"
batches = [corpus.batch(step, 16, SMALL.S) for step in range(2)]

def two_steps():
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for batch in batches:
        optimizer.zero_grad()
        model.loss(*batch).backward()
        optimizer.step()
    return sum(parameter.nbytes for parameter in model.parameters())

result = run(two_steps, ranks=1, machine="1xH100", record="memory")

# %% [markdown] core=true
# **Guess:** when in a step is the peak?

# %% name="curve-picture"
times, held = zip(*result.trace.live_bytes[0])
figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
axes.fill_between([t * 1e6 for t in times], [n / 1e6 for n in held], step="post", color="#b1b8bf")
axes.axhline(result.values[0] / 1e6, color="#0072b2", label="the weights")
axes.set(title="Memory in two steps", xlabel="µs on an H100, virtual", ylabel="MB", ylim=0)
axes.legend()
plt.show()

# %% [markdown] core=true
# From the second step on the floor is higher, by Adam's moments. Through the forward pass it rises: layer by layer, something is put aside for backward. It falls through backward,
# though gradients come, because what was put aside is used up. The peak is where the one turns into the other.

# %% name="share-guess"
share = predict("What share of that peak are the weights?",
    A="more than half", B="a quarter: weights, gradients and two moments", C="less than a tenth")

# %% name="share-seen"
share.reveal(f"{result.values[0] / result.trace.peak_bytes(rank=0):.0%}", answer="C",
    A="weights are what one thinks of, and the smallest of what is held",
    B="that is what is there all the time; activations come on top of it, and here they are most of it")

# %% [markdown] minutes=4 core=true
# ## A smaller batch
#
# "Out of memory? Halve the batch." The library measures a step by kind, in float64, beside what its formulas say.
# **Guess:** which bars shrink?

# %% name="by-kind"
kinds = ("parameters", "gradients", "state", "activations")
measured = {}
for B in (1, 2, 4, 8, 16):
    rows = {row.kind: row for row in memory_of_a_step(SMALL, B, stage=0, dp=1)}
    measured[B] = {kind: rows[kind].measured for kind in kinds}
    predicted = {kind: rows[kind].predicted for kind in kinds}
    print(f"B={B:2}", measured[B], "  as predicted:", predicted == measured[B])

# %% name="by-kind-picture"
figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
floor = [0] * len(measured)
for kind, colour in zip(kinds, ("#0072b2", "#56b4e9", "#009e73", "#e69f00")):
    heights = [of_kind[kind] / 1e6 for of_kind in measured.values()]
    axes.bar([f"B = {B}" for B in measured], heights, bottom=floor, color=colour, label=kind)
    floor = [low + high for low, high in zip(floor, heights)]
axes.set(title="What a step holds, by kind", ylabel="MB")
axes.legend()
plt.show()

# %% [markdown] core=true
# One: activations are proportional to the batch, and nothing else knows of it. From 16 sequences to 8 the sum falls by
# 41 %, from 2 to 1 by 19 %. For what is left, there are lessons 05 and 06.
#
# And for the 1.5 B parameters, in bf16:

# %% name="first-seen"
from lessons_lib.cost.activations import kept
from lessons_lib.cost.memory import RECIPES

states = 1_500_000_000 * RECIPES["mixed adam"].total
activations = sum(kept(XL, B=1, itemsize=2).values())
print(f"weights and what belongs to them {text(states)}, activations of one sequence {text(activations)}")
print(f"together {text(states + activations)}, which is {text(states + activations, 'GiB')}")
why_full.reveal(text(states + activations), answer="B",
    A="two or four bytes: the weights are the small bar, whatever their dtype",
    C="they are as large as the weights; at batch size 1 they are the small part of what is on top")

# %% [markdown] core=true
# A GB is 10⁹ bytes, a GiB 2³⁰. A card sold with 24 GB may have 24 GiB, which is 7 % more: compare in one unit. Here
# it overflows in both.

# %% [markdown] minutes=5 core=true
# ## What is put aside
#
# Autograd tells what it keeps: a hook sees every tensor that is saved for backward. That is a memory meter in ten lines.
# A storage counts once, and weights do not count: they are there anyway.

# %% name="meter"
def stored_bytes(layer, *inputs):
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        layer(*inputs)
    return sum(n for at, n in kept.items() if at not in weights)

# %% [markdown] core=true
# The stream X is `B S D` = 65,536 numbers here, of 8 bytes. **Guess:** what does a linear layer from D to F keep? Its
# input, its output, or both? And GELU?

# %% name="meter-layers"
from torch import nn

class Residual(nn.Module):
    def forward(self, x, y):
        return x + y

B, S, D, F = 16, SMALL.S, SMALL.D, SMALL.F
X, H = (torch.randn(B, S, width, dtype=torch.float64, requires_grad=True) for width in (D, F))
up, down = nn.Linear(D, F).double(), nn.Linear(F, D).double()
for name, layer, x in (("D to F", up, X), ("GELU", nn.GELU(), H), ("F to D", down, H)):
    print(f"{name:7} keeps {stored_bytes(layer, x) / X.nbytes:.0f} times the stream")
print("X + X   keeps", stored_bytes(Residual(), X, X))

# %% [markdown] core=true
# Each keeps its *input*: dW = Xᵀ dY needs X and dY, and nobody needs Y. A sum keeps nothing. So the terms of a whole block
# can be written down, and be compared with the meter, to the byte:

# %% name="meter-block"
from lessons_lib.cost.activations import kept_by_layer

block = GPT(SMALL).double().blocks[0]
terms = kept_by_layer(SMALL, B)
for name, n in terms.items():
    print(f"{name:22} {n / X.numel():5.2f} times the stream")
print("in bytes", 8 * sum(terms.values()), "   by the meter", stored_bytes(block, X))

# %% name="meter-picture"
figure, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
axes.barh(list(terms), [n / X.numel() for n in terms.values()], color="#e69f00")
axes.set(title="What a block keeps for its backward", xlabel="times the stream B S D")
axes.invert_yaxis()
plt.show()

# %% [markdown] core=true
# Sixteen streams and a little: half of it is the wide part of the MLP. With 2 bytes a number that is 32 B S D bytes for a
# layer, where the papers write 34: two more are for dropout's masks. Attention keeps nothing of size S x S, since its
# kernel computes that again (see *more*).

# %% [markdown] minutes=7 core=true
# ## Keep less, compute again
#
# Of a block, keep nothing but its input, and run it again when backward comes. In an `autograd.Function` we say
# what is done forward and what backward:

# %% name="again"
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # inside a Function autograd keeps nothing

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(dy)  # adds to the gradients of the block's weights
        return None, x.grad

# %% name="again-guess"
more_work = predict("Every block is run again in backward. How many FLOPs more are that?",
    A="twice as many", B="a third more", C="none; only memory changes")

# %% name="again-run"
torch.manual_seed(0)
X, dY = torch.randn(2, 16, SMALL.S, SMALL.D, dtype=torch.float64)

def through(way, config=SMALL):
    blocks, x = GPT(config).double().blocks, X.clone().requires_grad_()
    torch.manual_seed(0)  # what dropout draws, below
    with region("forward"):
        y = x
        for block in blocks:
            y = way(block, y)
    with region("backward"):
        y.backward(dY)
    return [x.grad] + [parameter.grad for parameter in blocks.parameters()]

def once(block, x):
    return block(x)

# %% name="again-measured"
def report(name, result):
    flops = {way: result.trace.flops_of(0, way) / 1e9 for way in ("forward", "backward")}
    print(f"{name:10} peak {text(result.trace.peak_bytes(0), 'MB', 3)}, GFLOP: "
          f"forward {flops['forward']:.3f}, backward {flops['backward']:.3f}")

plain, again = (run(through, way, ranks=1, record=("memory", "flops")) for way in (once, Again.apply))
report("plain", plain)
report("again", again)
print("largest difference of a gradient:", furthest(again.values[0], plain.values[0]))

# %% name="again-seen"
more = again.trace.flops_of(0) / plain.trace.flops_of(0) - 1
more_work.reveal(f"{more:.0%} more", answer="B",
    A="a product costs one forward and two backward, dX and dW: one forward is added to three",
    C="what is not kept must be made again, by the same products")

# %% name="again-picture"
figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for name, way, colour in (("plain", once, "#0072b2"), ("again", Again.apply, "#d55e00")):
    times, held = zip(*run(through, way, ranks=1, machine="1xH100", record="memory").trace.live_bytes[0])
    axes.step([t * 1e6 for t in times], [n / 1e6 for n in held], where="post", color=colour, label=name)
axes.set(title="Memory of a forward and a backward pass", xlabel="µs on an H100, virtual", ylabel="MB", ylim=0)
axes.legend()
plt.show()

# %% [markdown] core=true
# The same gradients. What was 16 streams for each layer is 1, and while backward goes on, one block at a time has its 16.
# The price is one forward, exactly.
#
# ### Break it
#
# Give the blocks dropout. **Guess:** what happens to the gradients?

# %% name="other-masks"
from dataclasses import replace

with_dropout = replace(SMALL, dropout=0.2)
truth = run(through, once, with_dropout, ranks=1).values[0]
ours = run(through, Again.apply, with_dropout, ranks=1).values[0]
print("largest difference of a gradient:", furthest(ours, truth))

# %% [markdown] core=true
# The second time dropout draws *other* numbers, and backward goes through a network that was never used. Nothing
# stops, and a loss may still fall. Who computes again must put the random numbers back first.

# %% [markdown] core=true
# ### The same in production
#
# `torch.utils.checkpoint` does all this. Same blocks, same meter:

# %% name="production"
from torch.utils.checkpoint import checkpoint

def by_torch(block, x):
    return checkpoint(block, x, use_reentrant=False)

theirs = run(through, by_torch, ranks=1, record=("memory", "flops"))
report("ours", again)
report("checkpoint", theirs)
print("largest difference of a gradient:", furthest(theirs.values[0], again.values[0]))
print("with dropout:", furthest(run(through, by_torch, with_dropout, ranks=1).values[0], truth))

# %% [markdown] core=true
# It puts the random numbers back. And it does a little less than one forward: it stops as soon as backward has what it
# needs, before the last product of each block. The library's formulas know that, too:

# %% name="library"
from lessons_lib.cost.flops import step_flops

for what in ("none", "full"):
    kept = next(row for row in memory_of_a_step(SMALL, 16, 0, dp=1, what_again=what) if row.kind == "activations")
    print(f"{what}: activations of a step {kept.predicted:,} bytes predicted, {kept.measured:,} measured; "
          f"{step_flops(SMALL, 16, recompute=what) / 1e9:.3f} GFLOP")

# %% [markdown] minutes=3 core=true
# ## Many small batches
#
# Or keep the batch, and go through it in m pieces, one after the other. Gradients add up, and one step follows. This is
# **accumulation**.

# %% name="accumulation-guess"
buffers = predict("16 sequences in 4 micro-batches of 4. How many copies of the gradients are held in the end?",
    A="four, to be averaged", B="one", C="one, and the activations of all 16 until backward")

# %% name="accumulation"
tokens, targets = corpus.batch(0, 16, SMALL.S)

def accumulate(m):
    model = GPT(SMALL).double()
    for some, of_them in zip(tokens.chunk(m), targets.chunk(m)):
        (model.loss_sum(some, of_them) / targets.numel()).backward()
    return [parameter.grad for parameter in model.parameters()]

gradients = {}
for m in (1, 2, 4, 8, 16):
    result = run(accumulate, m, ranks=1, record="memory")
    gradients[m] = result.values[0]
    print(f"{m:2} pieces: gradients {text(sum(g.nbytes for g in gradients[m]), 'MB', 3)}, "
          f"peak {text(result.trace.peak_bytes(0), 'MB', 3)}")

# %% name="accumulation-picture"
figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for m, colour in ((1, "#0072b2"), (4, "#d55e00"), (16, "#009e73")):
    times, held = zip(*run(accumulate, m, ranks=1, machine="1xH100", record="memory").trace.live_bytes[0])
    axes.step([t * 1e6 for t in times], [n / 1e6 for n in held], where="post", color=colour, label=f"m = {m}")
axes.set(title="16 sequences in m pieces", xlabel="µs on an H100, virtual", ylabel="MB", ylim=0)
axes.legend()
plt.show()

# %% name="accumulation-seen"
buffers.reveal(f"one; it differs from that of the whole batch by {furthest(gradients[4], gradients[1])}", answer="B",
    A="backward adds to what is there: a sum needs one place, however many terms it has",
    C="each piece has a backward of its own, which uses up what its forward put aside")

# %% [markdown] core=true
# One buffer, and the activations of one piece. Look at who divides: each piece's loss is *summed*, and divided by the
# number of *all* targets. The mean of each piece, added up, is m times too much. Lesson 04 goes on from here.

# %% [markdown] minutes=5 core=true
# ## A machine in three numbers
#
# Lesson 01 had two: latency and bandwidth of a link. The third is how much it computes, in FLOP/s. A product of X and W
# takes 2 operations for each weight and token; backward has two such products. So a step takes **6 per weight and
# token**, and 12 L D S per token for attention.

# %% name="time-guess"
seconds = predict("1.5 B parameters, half a million tokens, one H100 at its 989 TFLOP/s. How long is a step?",
    A="50 milliseconds", B="5 seconds", C="8 minutes")

# %% name="time-of-xl"
from lessons_lib.cost.flops import hardware_flops_per_token, model_flops_per_token

sizes = (1_500_000_000, XL.L, XL.D, XL.S)
step_s = {}
for name, per_token in (("plain", model_flops_per_token), ("with recomputation", hardware_flops_per_token)):
    flops = int(per_token(*sizes))
    step_s[name] = machine("1xH100").compute_s(flops * 500_000)
    print(f"{name:18} {flops / 1e9:5.2f} GFLOP for a token, {step_s[name]:.2f} s for a step")

# %% name="time-seen"
seconds.reveal(f"{step_s['plain']:.1f} s", answer="B",
    A="6 operations for each of 1.5 B weights and each of half a million tokens are 4.5e15",
    C="an H100 does 1e15 operations in a second")

# %% [markdown] core=true
# No program reaches that. **MFU** is the share it does reach, counted by the model's FLOPs: in the paper on recomputation below it is 42 to 56 %. What
# recomputation does again counts in HFU, hardware utilisation, and never in MFU.
#
# Now all three numbers at once. Four ranks run the small GPT on a batch each, and then add up the gradients:

# %% name="step-on-four"
import torch.distributed as dist

def step():
    model = GPT(SMALL)
    model.loss(*corpus.batch(dist.get_rank(), 16, SMALL.S)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

result = run(step, ranks=4, machine="4xH100")
result

# %% [markdown] core=true
# **Guess:** what is the wait made of, bytes or latency?

# %% name="step-predicted"
from lessons_lib.cost.flops import step_flops

h100, everyone = machine("4xH100"), range(4)
sizes = [parameter.nbytes for parameter in GPT(SMALL).parameters()]
compute_s = h100.compute_s(step_flops(SMALL, 16))
bytes_s = sum(h100.collective_s("all_reduce", n, everyone) for n in sizes)
latency_s = sum(h100.collective_s("all_reduce", 0, everyone) for n in sizes)
print(f"computing {compute_s * 1e6:.1f} µs, all-reduces {bytes_s * 1e6:.1f} µs, of which latency {latency_s * 1e6:.1f} µs")
print(f"together {(compute_s + bytes_s) * 1e6:.1f} µs; on the clock {result.trace.timeline.makespan * 1e6:.1f} µs")

# %% [markdown] core=true
# Latency: 53 small messages, one after the other, cost as much as they would with no bytes at all. Three numbers of a
# machine, two of a program (its FLOPs and its bytes), and the time is predicted. What to do about it is lesson 04.

# %% [markdown] minutes=4 more=true
# ## The scores of attention
#
# Before there were fused kernels, attention kept its scores: S x S for each head. `keep_scores` brings them back.
# **Guess:** who keeps more, the scores or all the rest of a layer, for a GPT-3 with S=2048, D=12288 and H=96?

# %% name="scores" more=true
from lessons_lib.cost.activations import published

for way in ("none", "tp", "tp + sp", "tp, selective", "tp + sp, selective", "full"):
    print(f"{way:20} {float(published(way, S=2048, D=12288, H=96, tp=8)):6.2f} S B D bytes for a layer")

# %% [markdown] more=true
# These are the numbers of Korthikanti et al.; tp and sp are tensor and sequence parallelism on 8 ranks, of lessons 08 and
# 10. Without any of it, 80 of 114 are scores: they are 70 %, and
# making them again is little work. That is **selective** recomputation. A fused kernel has it built in. Measured here:

# %% name="selective" more=true
for attention, what in (("scores", "none"), ("scores", "selective"), ("fused", "none")):
    rows = memory_of_a_step(SMALL, 16, 0, 1, attention, what)
    row = next(row for row in rows if row.kind == "activations")
    print(f"{attention:6} recompute {what:9} {row.predicted:,} bytes predicted, {row.measured:,} measured")

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. Weights are the small bar: 2 of 16 bytes for each parameter, and activations come on top.
# 2. A smaller batch shrinks activations, and nothing else. A second gradient buffer is never needed.
# 3. A product keeps its input for backward; a layer keeps 16 streams and a little, to the byte.
# 4. Computing a block again leaves one stream of the 16, and costs one forward: a third more.
# 5. Time: FLOPs over FLOP/s, bytes over bandwidth, and a latency for every round.
#
# **Where next:** predict stored bytes and build a block that is run again in the exercise; then lesson 04. The
# [README](../README.md) has the map.
#
# *Sources:* Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054), section 3 (16 bytes); Korthikanti et al. 2022,
# [Reducing Activation Recomputation](https://arxiv.org/abs/2205.05198), Table 2 and section 5; Chen et al. 2016,
# [Sublinear Memory Cost](https://arxiv.org/abs/1604.06174); Chowdhery et al. 2022,
# [PaLM](https://arxiv.org/abs/2204.02311), appendix B (MFU).
