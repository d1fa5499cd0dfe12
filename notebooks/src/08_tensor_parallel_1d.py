# %% [markdown] minutes=1 core=true
# # Tensor parallel in 1D
#
# An MLP has two matrices: W1 makes the activations wide, W2 makes them narrow again. They are too large for one
# GPU, so four GPUs share them: W1 cut by its columns, W2 by its rows. **How many all-reduces does one training
# step of this MLP need?**

# %% tags=["setup"]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu

from lessons_lib import Layout, Mesh, compute, region, run
from lessons_lib.grading import predict, recap
from lessons_lib.mesh import copy_sum, sum_copy, sum_sum
from lessons_lib.views import layout_picture

B, D, F = 6, 8, 32  # rows, model width, feed-forward width
torch.manual_seed(0)
X, W1, W2, dY2 = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, D), (D, F), (F, D), (B, D)))

def error(ours, truth):
    return f"{(ours - truth).norm() / truth.norm():.0e}"

how_many = predict("How many all-reduces does one training step of this MLP need?",
    A="four, one behind each matrix, forward and backward", B="two, one forward and one backward",
    C="one, forward: nothing sent there, nothing sent back", D="none, each rank does its own part")

# %% [markdown] minutes=3 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("08")

# %% [markdown] minutes=2 core=true
# ## Layouts, in two minutes
#
# A **layout** says for every dim of a tensor over which mesh axis it is cut. W1 has the dims D and F. `D F@tp` cuts
# its columns:

# %% name="columns-picture"
layout_picture(Layout("D F@tp"), (D, F), {"tp": 4}, name="W1")

# %% [markdown] core=true
# W2 has the dims F and D, and `F@tp D` cuts its rows.

# %% name="rows-picture"
layout_picture(Layout("F@tp D"), (F, D), {"tp": 4}, name="W2")

# %% [markdown] core=true
# `layout.shard(W, mesh)` gives each rank its block. A capital letter is the whole tensor, a small one what this rank
# holds: `W` and `w`.

# %% [markdown] minutes=1 core=true
# ## Cut the columns
#
# Each rank has all of X and some columns of W1. **Guess:** what must the ranks send, so that each has its columns of
# X · W1?

# %% name="by-columns"
def by_columns():
    mesh = Mesh(tp=4)
    w1 = Layout("D F@tp").shard(W1, mesh)
    return X @ w1

# %% name="by-columns-run"
columns = run(by_columns, ranks=4)
joined = torch.cat(columns.values, dim=1)
print("a rank has", tuple(columns.values[0].shape), "  all together", tuple(joined.shape))
print("error", error(joined, X @ W1), "  bytes sent", columns.trace.bytes_sent(rank=0))

# %% [markdown] minutes=1 core=true
# Nothing. A column of the product needs one column of W1, and all of X, which is there. In layouts: `B D` times
# `D F@tp` gives `B F@tp`.

# %% [markdown] minutes=2 core=true
# ## And backward?
#
# From above comes dY, cut like Y: each rank gets the columns that it made. Two products are due:
#
# $$dW_1 = X^T\, dY \qquad\qquad dX = dY\, W_1^T$$
#
# %% name="columns-backward-guess"
what_travels = predict(
    "Forward sent nothing. What must be sent now?",
    A="nothing",
    B="the blocks of dW1, which must be added up",
    C="dX, which must be added up",
)

# %% name="columns-backward"
dY = torch.randn(B, F, dtype=torch.float64)

def columns_backward():
    mesh = Mesh(tp=4)
    w1, dy = Layout("D F@tp").shard(W1, mesh), Layout("B F@tp").shard(dY, mesh)
    dw1, dx = X.T @ dy, dy @ w1.T
    return dw1, dx, mesh["tp"].all_reduce(dx)

# %% name="columns-backward-errors"
result = run(columns_backward, ranks=4)
dw1, dx, dx_summed = result.values[0]
print("dW1, my columns ", error(dw1, (X.T @ dY)[:, : F // 4]))
print("dX              ", error(dx, dY @ W1.T))
print("dX, summed      ", error(dx_summed, dY @ W1.T))

# %% name="columns-backward-seen"
what_travels.reveal(
    f"dX is right after the sum: error {error(dx_summed, dY @ W1.T)}",
    answer="C",
    A="backward may have to send where forward did not: X was a copy, and every copy has its own gradient",
    B="each block of dW1 is complete: its columns are nobody else's",
)

# %% [markdown] minutes=2 core=true
# My columns of dW1 need only my columns of dY. But *every* column of Y was made from all of X, so every rank has
# a say in dX, and what one rank computes is a **partial sum**: of the right shape, and nowhere near right.
#
# **What is copied forward is summed backward.** X was copied to four ranks, without a word, because it was there.
# Its gradient has to be fetched together. So it is not true that backward is silent where forward was.

# %% [markdown] minutes=2 core=true
# ## Cut the rows
#
# The second matrix gets its input as the first leaves it: cut by columns, `B F@tp`. So W2 is cut by rows, and each
# rank multiplies *its* columns with *its* rows. **Guess:** what does a rank have then?

# %% name="by-rows"
H = torch.randn(B, F, dtype=torch.float64)

def by_rows():
    mesh = Mesh(tp=4)
    h, w2 = Layout("B F@tp").shard(H, mesh), Layout("F@tp D").shard(W2, mesh)
    y = h @ w2
    return y, mesh["tp"].all_reduce(y)

y, y_summed = run(by_rows, ranks=4).values[0]
print("Y         ", error(y, H @ W2))
print("Y, summed ", error(y_summed, H @ W2))

# %% [markdown] minutes=1 core=true
# A term of the sum. One number of Y needs *all* of a row of H, and no rank has it: forward needs an all-reduce.
#
# And backward? Each rank then has all of dY. **Guess:** what must be sent?

# %% name="rows-backward"
def rows_backward():
    mesh = Mesh(tp=4)
    h, w2 = Layout("B F@tp").shard(H, mesh), Layout("F@tp D").shard(W2, mesh)
    return h.T @ dY2, dY2 @ w2.T

# %% name="rows-backward-run"
result = run(rows_backward, ranks=4)
dw2, dh = (torch.cat(blocks, dim) for blocks, dim in zip(zip(*result.values), (0, 1)))
print("dW2", error(dw2, H.T @ dY2), "  dH", error(dh, dY2 @ W2.T), "  bytes", result.trace.bytes_sent(0))

# %% [markdown] minutes=1 core=true
# Nothing. The two are mirror images:
#
# | | X | W | Y | forward | backward |
# |---|---|---|---|---|---|
# | **column** | `B D` | `D F@tp` | `B F@tp` | – | all-reduce dX |
# | **row** | `B D@tp` | `D@tp F` | `B F` | all-reduce Y | – |

# %% [markdown] minutes=2 core=true
# ## The bias
#
# A row-cut layer with a bias of 1, 2, 3, and a weight of zeros, so that the bias is all you see. **Guess:** what
# comes out on four ranks, if each adds the bias to what it has?

# %% name="bias-too-early"
bias = torch.tensor([1.0, 2.0, 3.0])

def bias_too_early():
    term = torch.zeros(3)
    return Mesh(tp=dist.get_world_size())["tp"].all_reduce(term + bias).tolist()

for ranks in (1, 2, 4):
    print(ranks, run(bias_too_early, ranks=ranks).values[0])

# %% [markdown] minutes=1 core=true
# The bias is added once per rank. On one rank it is right, so the test on one GPU passes. It has happened in many a
# library. A bias is added **after** the sum, to a value and not to a term:

# %% name="bias-in-time"
def bias_in_time():
    term = torch.zeros(3)
    return (Mesh(tp=dist.get_world_size())["tp"].all_reduce(term) + bias).tolist()

print(run(bias_in_time, ranks=4).values)

# %% [markdown] minutes=1 core=true
# ## A pair
#
# Column first, then row, and in between the GELU, number by number. **Guess:** how often do the ranks meet?

# %% name="pair"
def pair():
    mesh = Mesh(tp=4)
    w1, w2 = Layout("D F@tp").shard(W1, mesh), Layout("F@tp D").shard(W2, mesh)
    h = gelu(X @ w1)
    return mesh["tp"].all_reduce(h @ w2)

# %% name="pair-run"
run(pair, ranks=4)

# %% [markdown] minutes=1 core=true
# Once. The row-cut layer wants its input as the column-cut one leaves it, so nothing happens between them: that is
# the whole trick of Megatron-LM.
#
# Why not the other way round, row first? Then h would be a partial sum. **Guess:** does GELU mind?

# %% name="gelu-of-a-term"
def gelu_of_a_term():
    mesh = Mesh(tp=4)
    x, w1 = Layout("B D@tp").shard(X, mesh), Layout("D@tp F").shard(W1, mesh)
    return mesh["tp"].all_reduce(gelu(x @ w1))

print("error", error(run(gelu_of_a_term, ranks=4).values[0], gelu(X @ W1)))

# %% [markdown] minutes=1 core=true
# It does. The GELU of a sum is not the sum of the GELUs. A partial sum is not a value yet: it may be added to another,
# or scaled, and nothing else.

# %% [markdown] minutes=5 core=true
# ## Tell autograd
#
# So far we wrote the backward by hand. Autograd does not see communication; a `torch.autograd.Function` tells it what
# is done forward and what is done to the gradient. We need two:
#
# | | forward | backward | where |
# |---|---|---|---|
# | *f*, or `copy_sum` | nothing | all-reduce | before the column-cut layer |
# | *g*, or `sum_copy` | all-reduce | nothing | behind the row-cut layer |

# %% name="f-and-g"
class CopySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.group.all_reduce(dy), None

class SumCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx, dy):
        return dy, None

# %% [markdown] core=true
# `backward` returns one gradient per argument of `forward`; the group has none.

# %% name="mlp"
def mlp(f=CopySum.apply, g=SumCopy.apply):
    mesh = Mesh(tp=dist.get_world_size())
    x = X.clone().requires_grad_()
    w1 = Layout("D F@tp").shard(W1, mesh).requires_grad_()
    w2 = Layout("F@tp D").shard(W2, mesh).requires_grad_()
    with region("forward"):
        y = g(gelu(f(x, mesh["tp"]) @ w1) @ w2, mesh["tp"])
    with region("backward"):
        y.backward(dY2)
    return y.detach(), x.grad, w1.grad, w2.grad

serial, four = run(mlp, ranks=1).values[0], run(mlp, ranks=4)

# %% name="mlp-errors"
def errors(values):
    ys, dxs, dw1s, dw2s = zip(*values)
    whole = {"Y": ys[0], "dX": dxs[0], "dW1": torch.cat(dw1s, 1), "dW2": torch.cat(dw2s, 0)}
    return "   ".join(f"{name} {error(*both)}" for (name, *both) in zip(whole, whole.values(), serial))

print(errors(four.values))
for event in four.trace.events:
    if event.rank == 0:
        print(f"{event.region:8} {event.kind}, {event.bytes_sent} bytes sent")

# %% name="first-seen"
how_many.reveal(
    "one forward, one backward",
    answer="B",
    A="between the two matrices nothing is sent: the second takes its input as the first leaves it",
    C="X was copied to all ranks without a byte, and its gradient comes back as a sum",
    D="a number of Y needs all of F, and no rank has it",
)

# %% [markdown] minutes=1 core=true
# One all-reduce forward, one backward, whatever the width F.
#
# Both are of the size of X. The wide H is never sent, and never whole on any rank.

# %% [markdown] minutes=1 core=true
# ### Break it: all-reduce both ways
#
# "An all-reduce forward, so an all-reduce backward" sounds right, and PyTorch's differentiable `all_reduce` does so.
# Here as `sum_sum` in place of *g*. **Guess:** what becomes of Y, and what of the gradients?

# %% name="both-ways"
wrong = run(mlp, copy_sum, sum_sum, ranks=4).values
print(errors(wrong))
print("dW2 is", (wrong[0][3] / four.values[0][3]).mean().item(), "times the right one")

# %% [markdown] minutes=2 core=true
# Forward is perfect. Every gradient is p times too large: four on four ranks.
#
# Which of the two is right depends on what follows. Here all ranks go on with *the same* Y to *the same* loss. It is one
# loss, seen four times, so dY is already complete on each rank. `sum_sum` is for ranks with *different* losses that
# are meant to be added.
#
# A loss curve does not show it: Adam divides by the size of the gradient. Lesson 04 measures that. Compare gradients.

# %% [markdown] minutes=2 core=true
# ## Who waits for dX?
#
# Backward is two products. The layer below waits for dX, and for its all-reduce. For dW nobody waits, until the
# optimizer comes. So send dX off first, and compute dW while it travels.
#
# With the sizes of a real model, on the clock of four H100s. **Guess:** how much is saved?

# %% name="two-orders"
from lessons_lib.machines import machine

rows, width, wide = 2048, 4096, 16384
product_s = machine("4xH100").compute_s(2 * rows * width * wide / 4)

def one_after_the_other():
    compute(product_s)  # dX
    dist.all_reduce(torch.ones(rows, width, dtype=torch.bfloat16))
    compute(product_s)  # dW

def at_the_same_time():
    compute(product_s)  # dX
    travels = dist.all_reduce(torch.ones(rows, width, dtype=torch.bfloat16), async_op=True)
    compute(product_s)  # dW
    travels.wait()

# %% name="two-orders-run"
for order in (one_after_the_other, at_the_same_time):
    result = run(order, ranks=4, machine="4xH100")
    print(f"{order.__name__:20} {result.trace.timeline.makespan * 1e6:.0f} µs")

# %% name="two-orders-picture"
result

# %% [markdown] minutes=1 core=true
# A third. Remember that backward is *two* products, and that only one of them is awaited: lesson 19 fills the idle time
# of whole pipelines with the other one.

# %% [markdown] minutes=2 core=true
# ## Who holds what
#
# More ranks, less memory? A larger MLP, forward and backward. **Guess:** with eight ranks, is the peak an eighth?

# %% name="memory"
def large(rows=512, width=64, wide=1024):
    mesh = Mesh(tp=dist.get_world_size())
    x = torch.randn(rows, width).requires_grad_()
    w1 = torch.randn(width, wide // mesh["tp"].size).requires_grad_()
    w2 = torch.randn(wide // mesh["tp"].size, width).requires_grad_()
    sum_copy(gelu(copy_sum(x, mesh["tp"]) @ w1) @ w2, mesh["tp"]).sum().backward()
    return 4 * (w1.numel() + w2.numel())

for ranks in (1, 2, 4, 8):
    result = run(large, ranks=ranks, record=("memory",))
    print(f"{ranks} ranks: weights {result.values[0] / 1e3:4.0f} kB, peak {result.trace.peak_bytes(0) / 1e3:5.0f} kB")

# %% [markdown] minutes=1 core=true
# The weights are, and so is all that has the width F. X and Y are whole on every rank, and they stay. In a deep model
# these copies are what fills the memory; lesson 10 cuts them, too, without sending a byte more.

# %% [markdown] minutes=2 core=true
# ## In the library
#
# [`column.py`](../lessons_lib/tensor_parallel/column.py) and
# [`row.py`](../lessons_lib/tensor_parallel/row.py) hold what you have just seen: three layouts, a forward, a backward,
# and a formula for the traffic. One wrapper makes a module of any such scheme.

# %% name="schemes"
from lessons_lib.tensor_parallel import SCHEMES, TensorParallelLinear

up, down = nn.Linear(D, F).double(), nn.Linear(F, D).double()

def modules():
    mesh = Mesh(tp=4)
    one, two = (
        TensorParallelLinear.from_linear(layer, SCHEMES[name], mesh)
        for layer, name in ((up, "column"), (down, "row"))
    )
    x = X.clone().requires_grad_()
    with region("forward"):
        y = two(gelu(one(x)))
    with region("backward"):
        y.backward(dY2)
    return y.detach(), x.grad

by_library = run(modules, ranks=4)

# %% name="schemes-traffic"
for name, sizes in (("column", (B, D, F)), ("row", (B, F, D))):
    print(f"{name:6} formula, elements: {SCHEMES[name].traffic(*sizes, {'tp': 4})}")
print("counted:", {way: by_library.trace.bytes_sent(0, way) // 8 for way in ("forward", "backward")})

# %% [markdown] minutes=1 core=true
# ### The same in production
#
# PyTorch calls the two `ColwiseParallel` and `RowwiseParallel`. The same layers, on the same ranks:

# %% name="production"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def with_torch():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = nn.Sequential(up, nn.GELU(), down)
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = X.clone().requires_grad_()
    with region("forward"):
        y = model(x)
    with region("backward"):
        y.backward(dY2)
    return y.detach(), x.grad

by_torch = run(with_torch, ranks=4)

# %% name="production-compared"
for name, ours, theirs in zip(("Y", "dX"), by_library.values[0], by_torch.values[0]):
    print(name, "differs by", error(ours, theirs))
for way in ("forward", "backward"):
    print(f"{way:8} bytes", [trace.bytes_sent(0, way) for trace in (by_library.trace, by_torch.trace)])

# %% [markdown] minutes=2 core=true
# Megatron-LM's names are `ColumnParallelLinear` and `RowParallelLinear`; vLLM and many others have taken them over.
#
# The whole GPT of this course is cut like this: `python -m lessons_lib.train --ranks 4 --tp 4`. It has 4 all-reduces in
# every block, two for the attention and two for the MLP.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. Column: forward is silent, backward all-reduces dX. Row: forward all-reduces Y, backward is silent.
# 2. What is copied forward is summed backward, and a sum that one loss follows is copied.
# 3. Column, then row: one all-reduce forward, one backward, both of the size of X, whatever the width between them.
# 4. A bias is added after the sum. A partial sum may be added and scaled, and nothing else.
# 5. All-reduce both ways: forward right, gradients p times too large, and no loss curve says so.
#
# **Where next:** cut a layer yourself in the exercise; the [README](../README.md) has the map of the lessons.
#
# *Sources:* Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053), section 3, with *f* and *g*.
# The bias added p times: for example
# [text-generation-inference, issue 1036](https://github.com/huggingface/text-generation-inference/issues/1036).
