# %% [markdown] minutes=1 core=true
# # Megatron sequence parallel
#
# In lesson 08 four ranks shared the matrices of an MLP. What stands between the matrices, LayerNorm and dropout, they did
# not share: each rank had all of X. **All four ranks compute the same LayerNorm on the same data. What does that cost?**

# %% tags=["setup"]
import torch
from torch import nn
from torch.nn.functional import layer_norm

from lessons_lib import Layout, Mesh, region, run
from lessons_lib.grading import predict, recap
from lessons_lib.models.gpt import GPT, GPTConfig
from lessons_lib.plan import GPT_1D, PLANS, parallelize, serial
from lessons_lib.sequence_parallel import SequenceColumn, SequenceColumnKept, SequenceParallelBlock
from lessons_lib.views import layout_picture, loss_curves
from lessons_lib.views.branches import Step, branches_picture

CONFIG, B = GPTConfig(L=2, H=8, D=32, S=32), 4  # a small GPT, and how many sequences it is given

def error(ours, truth):
    return f"{(ours - truth).norm() / truth.norm():.0e}"

same_work = predict("All four ranks compute the same LayerNorm on the same data. What does that cost?",
    A="time alone: each computes what one could", B="memory: each keeps what it takes and gives, whole",
    C="bytes: the four results have to be compared")

# %% [markdown] minutes=3 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("10")

# %% [markdown] minutes=2 core=true
# ## What 1D leaves whole
#
# A block has two branches, and each is a column layer, something in between, and a row layer. Here are their tensors
# under 1D, on four ranks. S, the sequence, runs down; the width runs across.

# %% name="one-d"
def one_d(inside, last):
    behind = [Step(f"{last}, terms", "B S D +tp"), Step("to the stream", "B S D", by="all_reduce")]
    return [Step("norm", "B S D"), *inside, *behind]

# %% name="one-d-picture"
HEADS = [Step("q, k, v", "B S F@tp", 3), Step("heads", "B S D@tp")]
HIDDEN = [Step("up, GELU", "B S F@tp", 4)]
branches = {"Attention": one_d(HEADS, "proj"), "MLP": one_d(HIDDEN, "down")}
branches_picture(branches, 4, title="1D tensor parallelism: cut along the width, or not at all")

# %% [markdown] minutes=2 core=true
# What is in colour becomes thinner with every rank. The stacks do not: each rank has all of it.
#
# Backward needs what forward took and gave. So count what autograd keeps of a block, weights apart. **Guess:** with eight
# ranks, is it an eighth?

# %% name="kept"
def kept(block, x):
    """Bytes that autograd keeps of one forward, besides the weights."""
    found, weights = {}, {p.untyped_storage().data_ptr() for p in block.parameters()}

    def note(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(x.requires_grad_())
    return sum(tensor.untyped_storage().nbytes() for place, tensor in found.items() if place not in weights)

# %% name="kept-1d"
def kept_1d():
    mesh = Mesh(tp=torch.distributed.get_world_size())
    return kept(parallelize(GPT(CONFIG), GPT_1D, mesh).blocks[0], torch.randn(B, CONFIG.S, CONFIG.D))

# %% name="kept-1d-run"
of_1d = {p: run(kept_1d, ranks=p).values[0] for p in (1, 2, 4, 8)}
for p, n_bytes in of_1d.items():
    print(f"p = {p}: {n_bytes / 1000:4.0f} kB, {n_bytes / of_1d[1]:4.0%}")

# %% name="kept-1d-seen"
same_work.reveal(
    f"on 8 ranks each keeps {of_1d[8] / of_1d[1]:.0%} of what one kept, not 12 %",
    answer="B",
    A="the time is lost, too, and it is little: a norm is no product of matrices. Its tensors are as large as any",
    C="nothing is sent: from the same input all get the same result, to the last bit",
)

# %% [markdown] minutes=1 core=true
# What norms take and give is a quarter of what one rank keeps. On eight ranks it is most of it: it has not become less,
# while all else has.

# %% [markdown] minutes=2 core=true
# ### An all-reduce, stopped halfway
#
# A norm works on each token alone, and so do dropout and the addition to the stream. So each rank could take a quarter of
# the tokens.
#
# And an all-reduce is a reduce-scatter and an all-gather (lesson 01). Halfway, each rank has the finished sum of *a part*:
# just what is wanted. So stop there, norm, and go on:

# %% name="halfway"
TERMS = torch.randn(4, CONFIG.S, CONFIG.D, dtype=torch.float64)  # what the row layers of four ranks give, one sequence

def in_one_go():
    tp = Mesh(tp=4)["tp"]
    x = tp.all_reduce(TERMS[tp.rank])
    return layer_norm(x, (CONFIG.D,))

def halfway():
    tp = Mesh(tp=4)["tp"]
    x = tp.reduce_scatter(TERMS[tp.rank], dim=0)
    return tp.all_gather(layer_norm(x, (CONFIG.D,)), dim=0)

# %% name="halfway-guess"
how_much = predict(
    "Two collectives where there was one. What is sent?",
    A="twice as much",
    B="less: only a part is normed",
    C="the same",
)

# %% name="halfway-run"
results = {way.__name__: run(way, ranks=4) for way in (in_one_go, halfway)}
for name, result in results.items():
    print(f"{name:10} {result.trace.bytes_sent(0):6} bytes", error(result.values[0], layer_norm(TERMS.sum(0), (CONFIG.D,))))

# %% name="halfway-seen"
how_much.reveal(
    f"{results['halfway'].trace.bytes_sent(0):,} bytes, and {results['in_one_go'].trace.bytes_sent(0):,}",
    answer="C",
    A="each of the two is half of an all-reduce",
    B="the norm is computed on a part; what is summed, and what is gathered, is all of X",
)

# %% [markdown] minutes=1 core=true
# The same numbers for the same bytes, and each rank has normed a quarter of the tokens. On the clock of four H100s:

# %% name="halfway-picture"
run(halfway, ranks=4, machine="4xH100")

# %% [markdown] minutes=1 core=true
#
# Why along S? A norm needs all of a token's width, so D must stay whole. B would do, too, but a batch may be of one.

# %% [markdown] minutes=2 core=true
# ### The whole block
#
# Put the two halves to both branches. **Guess, before you look:** what is still whole on every rank?

# %% name="sp"
def cut_along_s(inside, first, last):
    before = [Step("norm", "B S@tp D"), Step(f"input of {first}", "B S D", by="all_gather")]
    behind = [Step(f"{last}, terms", "B S D +tp"), Step("to the stream", "B S@tp D", by="reduce_scatter")]
    return [*before, *inside, *behind]

# %% name="sp-picture"
sp_branches = {"Attention": cut_along_s(HEADS, "qkv", "proj"), "MLP": cut_along_s(HIDDEN, "up", "down")}
branches_picture(sp_branches, 4, title="Megatron's sequence parallelism: along S outside, along the width inside")

# %% [markdown] minutes=2 core=true
# Two tensors in each branch, and for a moment: the gathered input of the first matrix, and the terms of the second.
#
# The gathered input has a sting. Backward needs it once more: dW is Xᵀ dY, for *all* tokens. Either each rank keeps it
# whole, or it keeps its part and gathers again. In the library these are two schemes of the column layer:

# %% name="kept-sp"
def kept_sp(column):
    mesh = Mesh(tp=torch.distributed.get_world_size())
    block = SequenceParallelBlock(GPT(CONFIG).blocks[0], CONFIG.S, mesh, column)
    return kept(block, torch.randn(B, CONFIG.S // mesh["tp"].size, CONFIG.D))

for p in (2, 4, 8):
    keeps, again = (run(kept_sp, column, ranks=p).values[0] / of_1d[1] for column in (SequenceColumnKept(), SequenceColumn()))
    print(f"p = {p}: 1D {of_1d[p] / of_1d[1]:3.0%}   input kept {keeps:3.0%}   gathered again {again:3.0%}")

# %% [markdown] minutes=1 core=true
# Gathered again, it is an eighth on eight ranks: all that is kept is cut. Kept, half of the profit is gone.

# %% [markdown] minutes=2 core=true
# ## And what is sent?
#
# Megatron gathers again, and the paper says that sequence parallelism sends as much as 1D. **Guess:** can both be true?

# %% name="sent"
def sent_1d():
    block = parallelize(GPT(CONFIG), GPT_1D, Mesh(tp=4)).blocks[0]
    step(block, torch.randn(B, CONFIG.S, CONFIG.D))

def sent_sp(column):
    block = SequenceParallelBlock(GPT(CONFIG).blocks[0], CONFIG.S, Mesh(tp=4), column)
    step(block, torch.randn(B, CONFIG.S // 4, CONFIG.D))

def step(block, x):
    with region("forward"):
        y = block(x.requires_grad_())
    with region("backward"):
        y.backward(torch.ones_like(y))

# %% name="sent-run"
def of_the_stream(trace, way):
    unit = 4 * 3 / 4 * B * CONFIG.S * CONFIG.D  # bytes of (p-1)/p B S D numbers
    return sum(event.bytes_sent for event in trace.collectives(0, way) if event.n_elements > CONFIG.D) / unit

# %% name="sent-bill"
traces = {"1D": run(sent_1d, ranks=4).trace}
for name, column in (("input kept", SequenceColumnKept()), ("gathered again", SequenceColumn())):
    traces[name] = run(sent_sp, column, ranks=4).trace

for name, trace in traces.items():
    forward, backward = (of_the_stream(trace, way) for way in ("forward", "backward"))
    print(f"{name:15} forward {forward:g}   backward {backward:g}   together {forward + backward:g}")

# %% name="sent-picture"
run(sent_sp, SequenceColumn(), ranks=4, machine="4xH100")

# %% [markdown] minutes=2 core=true
# In units of (p−1)/p · B·S·D: 8, 8 and 10. "No extra communication" holds for who keeps the gathered input; who wants
# all of the memory gathers two more times. Megatron does, and hides that gather behind the product for dX, for which
# nobody needs X.
#
# Left out are six sums of vectors of D numbers. They are hardly any bytes, and in the picture more than half of the time:
# each waits for the latency of an all-reduce. Their turn comes.

# %% [markdown] minutes=2 core=true
# ## Tell autograd
#
# What is gathered forward goes into the work of all ranks, so its gradient comes back in terms: they are summed, and each
# rank gets its part of the sum. The two halves are each other's backward:
#
# | | forward | backward | where |
# |---|---|---|---|
# | `gather_reduce_scatter` | all-gather | reduce-scatter | before the column layer |
# | `reduce_scatter_gather` | reduce-scatter | all-gather | behind the row layer |
#
# **Break it:** undo the gather by taking one's piece of the gradient, `gather_split`. **Guess:** what becomes of Y and dX?

# %% name="pairs"
from lessons_lib.mesh import gather_reduce_scatter, gather_split, reduce_scatter_gather

torch.manual_seed(0)
X, W1, W2, dY = (torch.randn(shape, dtype=torch.float64) for shape in ((32, 8), (8, 16), (16, 8), (32, 8)))

def mlp(gather):
    mesh = Mesh(tp=4)
    tp = mesh["tp"]
    x = Layout("S@tp D").shard(X, mesh).requires_grad_()
    h = gather(x, tp) @ Layout("D F@tp").shard(W1, mesh)
    y = reduce_scatter_gather(h @ Layout("F@tp D").shard(W2, mesh), tp)
    y.backward(Layout("S@tp D").shard(dY, mesh))
    return y.detach(), x.grad

# %% name="pairs-run"
for gather in (gather_reduce_scatter, gather_split):
    y, dx = map(torch.cat, zip(*run(mlp, gather, ranks=4).values))
    print(f"{gather.__name__:22} Y {error(y, X @ W1 @ W2)}   dX {error(dx, dY @ W2.T @ W1.T)}")

# %% [markdown] minutes=1 core=true
# Y is right, and dX is one rank's opinion: three of four terms are lost.

# %% [markdown] minutes=2 core=true
# ## The norm's own weights
#
# A norm has a weight and a bias, D numbers each. They are on every rank, and every rank does the same with them. In 1D
# all ranks had the same tokens, so the same gradient. And now? The same holds for the biases behind a row layer.
#
# Here is training without a sum over their gradients: plain `nn.LayerNorm`s take the place of the library's.

# %% name="norms"
from lessons_lib.models import corpus

def with_sum(model):
    return [name for name, _ in model.named_modules() if name.endswith("norm")]

def without_sum(model):
    for name in with_sum(model):
        model.set_submodule(name, nn.LayerNorm(CONFIG.D))
    return with_sum(model)

# %% name="training"
def train(prepare, n_steps=40):
    mesh = Mesh(tp=4)
    model = parallelize(GPT(CONFIG), PLANS["1d-sp"], mesh)
    norms = [model.get_submodule(name) for name in prepare(model)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, apart = [], []
    for at in range(n_steps):
        loss = train_step(model, optimizer, at)
        weights = mesh["tp"].all_gather(torch.stack([norm.weight.detach() for norm in norms])[None], dim=0)
        losses.append(loss)
        apart.append((weights - weights[0]).abs().max().item())
    tokens, targets = corpus.batch(1000, 8, CONFIG.S)
    return losses, apart, serial(model, mesh).loss(tokens, targets).item()

# %% name="training-step"
def train_step(model, optimizer, at):
    loss = model.loss(*corpus.batch(at, 8, CONFIG.S))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

# %% name="drift-guess"
when = predict("The norms' gradients are not summed. After how many steps does the loss curve show it?",
    A="after the first: gradients are wrong at once",
    B="after about ten, when the errors have added up",
    C="not in 40 steps",
    D="never, and rightly: what is the same on all ranks needs no sum")

# %% name="drift"
right, wrong = (run(train, prepare, ranks=4).values for prepare in (with_sum, without_sum))
for at in (0, 1, 9, 39):
    print(f"step {at + 1:2}: loss {right[0][0][at]:.3f} and {wrong[0][0][at]:.3f}, norms of ranks differ by {wrong[0][1][at]:.3f}")

# %% name="drift-picture"
loss_curves({"norms summed": right[0][0], "norms not summed": wrong[0][0]})

# %% name="drift-seen"
largest = max(abs(a - b) / a for a, b in zip(right[0][0], wrong[0][0]))
when.reveal(
    f"in 40 steps the two losses never differ by more than {largest:.1%}; the ranks' norms differ from step 1 on",
    answer="C",
    A="the gradients are wrong at once, and Adam goes a step of the same length in nearly the same direction",
    B="errors do add up, in the weights: look at them, and not at the loss",
    D="it is the same weight, and other tokens: after one step it is no longer the same weight",
)

# %% [markdown] minutes=2 core=true
# All ranks report the same loss, and it falls. Yet there are four different models now: each rank's tokens pass through
# its own norms. Which one do you save?

# %% name="four-models"
for name, values in (("summed", right), ("not summed", wrong)):
    print(f"{name:10}", "  ".join(f"rank {rank}: {loss:.4f}" for rank, (_, _, loss) in enumerate(values)))

# %% [markdown] minutes=2 core=true
# The loss on new text of the model that each rank would save. With the sum they are one model, to the last bit. Without
# it there are four, and none of them is the one that was trained.
#
# So the rule: **a parameter that all ranks have, and that sees another part of the tokens on each, has a gradient of
# terms.** Sum them. Not the mean: the loss is over all tokens, and each rank has added up its own. The library does it by
# handing the weights through `copy_sum`, once a step and for D numbers.

# %% [markdown] minutes=2 core=true
# ## Not context parallel
#
# The sequence is cut. So does a rank see only its part of the text in attention?

# %% name="context-guess"
sees = predict(
    "Four ranks, 32 tokens, 8 heads. What does attention on one rank work on?",
    A="8 tokens, 8 heads",
    B="32 tokens, 2 heads",
    C="8 tokens, 2 heads",
)

# %% name="context"
def in_attention():
    block = SequenceParallelBlock(GPT(CONFIG).blocks[0], CONFIG.S, Mesh(tp=4))
    attend, seen = block.attention.attend, []
    block.attention.attend = lambda q, k, v: (seen.append(q.shape), attend(q, k, v))[1]
    block(torch.randn(B, CONFIG.S // 4, CONFIG.D))
    return seen[0]

_, heads, tokens, _ = run(in_attention, ranks=4).values[0]

# %% name="context-seen"
sees.reveal(
    f"{tokens} tokens, {heads} heads",
    answer="B",
    A="that is context parallelism: lessons 11 and 12. There keys and values have to travel, here the input does",
    C="the input is gathered before q, k and v are made: what is cut inside a branch is the width",
)

# %% name="context-picture"
layout_picture("B S H@tp K", (B, CONFIG.S, CONFIG.H, CONFIG.K), {"tp": 4}, name="q")

# %% [markdown] minutes=1 core=true
# Two different things with nearly one name. Megatron's *sequence parallelism* cuts S where 1D left copies, and gathers it
# for attention. *Context parallelism* cuts S everywhere, in attention, too; it is for texts too long for one rank.

# %% [markdown] minutes=1 core=true
# ## A model of the real size
#
# GPT-3, with 96 heads, on eight ranks: bytes kept for each layer, in units of S·B·D, by the formulas of the paper.

# %% name="published"
from lessons_lib.cost.activations import published

for way in ("none", "tp", "tp + sp", "tp + sp, selective"):
    print(f"{way:18} {float(published(way, S=2048, D=12288, H=96, tp=8)):6.2f}")

# %% [markdown] minutes=2 core=true
# The 23 of 1D are 10 that do not shrink and 104/8 that do; with the sequence cut all 114 are over 8. "Selective" makes the
# scores of attention again (lesson 03), and 34/8 are left: 32 for tensors in 16 bits, as counted above, and 2 for masks of
# dropout.

# %% [markdown] minutes=2 more=true
# ## More: dropout
#
# Where ranks hold copies they must drop the same numbers, or they are copies no longer. Where they hold parts they must
# *not*: else tokens 0, 8, 16 and 24 of 32 lose the same numbers. Megatron keeps two states of the random generator, a
# common one and, in a `fork`, each rank's own.

# %% name="dropout" more=true
from lessons_lib.tensor_parallel.dropout import RandomStreams

def masks():
    tp = Mesh(tp=4)["tp"]
    streams = RandomStreams(seed=1, rank=tp.rank)
    common = torch.rand(8) < 0.5
    with streams.fork():
        own = torch.rand(8) < 0.5
    return common.int().tolist(), own.int().tolist()

for rank, (common, own) in enumerate(run(masks, ranks=4).values):
    print(f"rank {rank}: common {common}, own {own}")

# %% [markdown] minutes=1 more=true
# This library does it otherwise: a mask is a function of one drawn key and of a number's place in the whole tensor. So
# every rank drops what one device would drop there, and the test with dropout can ask for equal numbers.

# %% [markdown] minutes=2 core=true
# ## The same in production
#
# PyTorch has a style for norms, `SequenceParallel`, and tells the two linear styles that the stream is cut: `Shard(1)`.

# %% name="production"
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

def styled(block, mesh):
    first, last = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    norm = SequenceParallel(use_local_output=True)
    styles = {"attention_norm": norm, "attention.qkv": first, "attention.proj": last}
    styles |= {"mlp_norm": norm, "mlp.up": first, "mlp.down": last}
    return parallelize_module(block, mesh.device_mesh, styles)

def ours(block, mesh):
    return SequenceParallelBlock(block, CONFIG.S, mesh, SequenceColumnKept())

# %% name="production-run"
STREAM = torch.randn(B, CONFIG.S, CONFIG.D, dtype=torch.float64)

def run_block(make):
    mesh = Mesh(tp=4)
    block, x = make(GPT(CONFIG).double().blocks[0], mesh), Layout("B S@tp D").shard(STREAM, mesh).requires_grad_()
    with region("forward"):
        y = block(x)
    with region("backward"):
        y.backward(y.detach())
    return x.grad

# %% name="production-compared"
by_us, by_torch = run(run_block, ours, ranks=4), run(run_block, styled, ranks=4)
print("dX differs by", error(by_us.values[0], by_torch.values[0]))
for way in ("forward", "backward"):
    print(f"{way:8} bytes", [result.trace.bytes_sent(0, way) for result in (by_us, by_torch)])

# %% [markdown] minutes=2 core=true
# Forward the same. Backward torch's count ends earlier: it sums the norms' gradients when somebody reads them, and takes
# that of a row layer's bias from the gathered dY, where all tokens are at hand.
#
# In Megatron-LM the switch is `--sequence-parallel`; parameters with such gradients are marked, and summed in one go at the
# end of backward: one latency for all. The whole GPT of this course trains like this by
# `python -m lessons_lib.train --scheme 1d-sp --ranks 4`.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. 1D cuts what is inside the branches. What norms and dropout take and give stays whole, and soon is most of the memory.
# 2. An all-reduce stopped halfway leaves each rank a part of the tokens, for the same bytes: reduce-scatter behind the
#    row layer, all-gather before the column layer.
# 3. 8 units sent if the gathered input is kept, 10 if it is gathered again; only then all that is kept is cut.
# 4. Norms and biases of row layers see a part of the tokens: sum their gradients. The loss curve will not remind you.
# 5. Attention sees the whole sequence, for some of the heads. Cutting it there, too, is context parallelism.
#
# **Where next:** write the pair, and train with it, in the exercise; the [README](../README.md) has the map of the lessons.
#
# *Sources:* Korthikanti et al. 2022,
# [Reducing Activation Recomputation in Large Transformer Models](https://arxiv.org/abs/2205.05198), section 4. Gradients
# that were not summed: for example [Megatron-LM, issue 1446](https://github.com/NVIDIA/Megatron-LM/issues/1446).
