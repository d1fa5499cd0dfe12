# %% [markdown] minutes=1 core=true
# # Tensor parallel in 2.5D
#
# Four ranks multiply on a 2 x 2 square. Four more arrive. **A larger square, or two squares?**

# %% tags=["setup"]
import torch

from lessons_lib import Layout, Mesh, region, run
from lessons_lib.grading import predict, recap
from lessons_lib.layout import coordinates
from lessons_lib.tensor_parallel import SCHEMES, Summa, Tesseract, TensorParallelLinear
from lessons_lib.views import layout_picture, mesh_picture

B, D, F = 24, 8, 12  # rows, model width, outputs
torch.manual_seed(0)
X, W, dY = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, D), (D, F), (B, F)))
LAYOUTS = {"X": Layout("B@depth@row D@col"), "W": Layout("D@row F@col"), "Y": Layout("B@depth@row F@col")}
SIZES = {"depth": 2, "row": 2, "col": 2}
summa = Summa()  # lesson 13

def error(blocks, truth, layout, sizes=SIZES):
    wholes = [layout.cut(truth, sizes, place) for place in coordinates(sizes)]
    return max(((x - whole).norm() / whole.norm()).item() for x, whole in zip(blocks, wholes))

# %% [markdown] minutes=1 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("14")

# %% [markdown] minutes=1 core=true
# ## Four more ranks
#
# Each of the first four holds a quarter of X and a quarter of W. How are eight to share the work?

# %% name="eight-guess"
eight = predict(
    "A larger square, or two squares?",
    A="a larger square, everything cut into eight",
    B="two squares, each with half of the rows of X and with all of W",
    C="two squares, each with half of X and half of W",
)

# %% [markdown] minutes=1 core=true
# Two squares, one behind the other, along a third axis called depth. Two *layers* of the grid, each a square as in
# lesson 13.

# %% name="grid-picture"
mesh_picture(LAYOUTS, SIZES)

# %% name="eight-seen"
owners = {name: LAYOUTS[name].owners(SIZES)[0, 0] for name in LAYOUTS}
eight.reveal(
    f"ranks with block [0,0]: {owners}",
    answer="B",
    A="eight is no square, and on 2 x 4 the blocks of X and W would not meet",
    C="half of the rows times half of the columns is a quarter of Y: two squares would make half of it",
)

# %% [markdown] minutes=1 core=true
# The rows of X are cut over depth, and then over the rows of the square: `B@depth@row`. W does not know depth. Rank 4 has
# the same block of W as rank 0, and other rows of X.
#
# **Guess:** forward, what do the two layers have to say to each other?

# %% name="forward"
def forward():
    mesh = Mesh(**SIZES)
    x, w = LAYOUTS["X"].shard(X, mesh), LAYOUTS["W"].shard(W, mesh)
    return summa.forward(x, w, mesh)

# %% name="forward-run"
result = run(forward, ranks=8, machine="8xH100")
print("error", f"{error(result.values, X @ W, LAYOUTS['Y']):.0e}")
result

# %% [markdown] minutes=1 core=true
# Nothing. Each layer runs SUMMA over its own rows, and the table knows only `row` and `col`. The call is
# lesson 13's.

# %% [markdown] minutes=2 core=true
# ## What a rank holds
#
# With 4, 8, 12 ranks the depth is 1, 2, 3.

# %% name="shares-guess"
of_w = predict(
    "4, 8, 12 ranks: which part of W does a rank hold?",
    A="1/4, 1/8, 1/12: the more ranks, the less",
    B="1/4, 1/4, 1/4",
    C="1/4, and from 8 ranks on all of it: every layer needs W",
)

# %% name="shares"
def held(sizes):
    mesh = Mesh(**sizes)
    return LAYOUTS["X"].shard(X, mesh).numel(), LAYOUTS["W"].shard(W, mesh).numel()

# %% name="shares-run"
for d in (1, 2, 3):
    sizes = SIZES | {"depth": d}
    x, w = run(held, sizes, ranks=4 * d).values[0]
    print(f"{4 * d:2} ranks: {x} of {X.numel()} elements of X, {w} of {W.numel()} of W")

# %% name="shares-seen"
of_w.reveal(
    f"with {4 * d} ranks still {w / W.numel():.2f} of W, and {x / X.numel():.3f} of X",
    answer="B",
    A="that is X. Depth adds copies of W, and no cut",
    C="every layer needs W, and its four ranks share it",
)

# %% [markdown] minutes=1 core=true
# X shrinks with every rank. W does not shrink at all: a quarter, whatever the depth. More ranks, and not one byte less of
# weights. So depth is for activations, that is for many tokens. Where weights are the burden, widen the square.

# %% name="w-picture"
layout_picture(LAYOUTS["W"], (D, F), SIZES, name="W")

# %% [markdown] minutes=3 core=true
# ## Backward: what depth is owed
#
# dX has the rows of X, so each layer makes its own. And dW?
#
# $$dW = X^T dY = \sum_{\text{layers } k} X_k^T\, dY_k$$
#
# A layer sees only its own rows. What it computes is a term of a sum over depth, which the layers have to add up: an
# all-reduce of W's blocks, as in data parallel. **Break it:** forget it, and see whether a test finds out.
#
# First a test that gives **the same rows** to both layers, for simplicity. **Guess:** what does it say of dW?

# %% name="gradient"
def weight_gradient(rows_of_x, reduce):
    mesh, layer_of_x, layer_of_y = Mesh(**SIZES), Layout(f"{rows_of_x} D@col"), Layout(f"{rows_of_x} F@col")
    x, w, dy = layer_of_x.shard(X, mesh), LAYOUTS["W"].shard(W, mesh), layer_of_y.shard(dY, mesh)
    _, dw = summa.backward(dy, x, w, mesh)
    return reduce(dw, mesh["depth"])

WAYS = {
    "nothing": lambda dw, depth: dw,
    "a sum": lambda dw, depth: depth.all_reduce(dw),
    "a mean": lambda dw, depth: depth.all_reduce(dw, "avg"),
}

# %% name="same-rows"
for name, reduce in WAYS.items():
    found = run(weight_gradient, "B@row", reduce, ranks=8).values
    print(f"the same rows, over depth {name:8} error {error(found, X.T @ dY, LAYOUTS['W']):.2f}")

# %% [markdown] minutes=1 core=true
# It is content with nothing, and with a mean. The only one it objects to is the sum. Now each layer gets rows of its own,
# as it is meant:

# %% name="own-rows"
for name, reduce in WAYS.items():
    found = run(weight_gradient, "B@depth@row", reduce, ranks=8).values
    print(f"rows of its own, over depth {name:8} error {error(found, X.T @ dY, LAYOUTS['W']):.2f}")

# %% [markdown] minutes=2 core=true
# The verdict is turned round. Without the sum the gradient is off by 83 % on some rank, and the test before could not
# see it: where all ranks hold the same data, a missing sum does not show. **Give different data to ranks that
# should hold different data.**
#
# What a layer has is a block of a partial sum, and the notation has a word for it:

# %% name="partial-picture"
layout_picture("D@row F@col +depth", (D, F), SIZES, name="dW")

# %% [markdown] minutes=1 core=true
# This is no invented example. The 2.5D code of Colossal-AI has no sum over depth, and its test cuts the batch by q only.
#
# Sum or mean? dY comes from a loss that was divided by the number of *all* rows, once. What is left is a sum.

# %% [markdown] minutes=3 core=true
# ## Would the loss tell?
#
# Train W on 24 rows with noise, with and without the sum over depth.

# %% name="loss-guess"
loss = predict(
    "Without the sum, what does the training loss do?",
    A="it falls less far: half of the gradient is missing",
    B="it falls further",
    C="it jumps about: the gradient is off by 83 %",
)

# %% name="train"
target = X @ torch.randn(D, F, dtype=torch.float64) + 0.5 * torch.randn(B, F, dtype=torch.float64)

def train(over_depth, n_steps=35):
    mesh, losses = Mesh(**SIZES), []
    x, w, wanted = (LAYOUTS[n].shard(t, mesh) for n, t in (("X", X), ("W", 0 * W), ("Y", target)))
    for _ in range(n_steps):
        off = summa.forward(x, w, mesh) - wanted
        losses.append((off**2).sum().item() / target.numel())
        _, dw = summa.backward(2 * off / B, x, w, mesh)
        w -= 0.3 * (mesh["depth"].all_reduce(dw) if over_depth else dw)
    return losses, w

# %% name="train-run"
with_sum, without = run(train, True, ranks=8).values, run(train, False, ranks=8).values

# %% name="train-curves"
import matplotlib.pyplot as plt

ends = {}
figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
for name, values, colour in (("with the sum", with_sum, "#0072b2"), ("without", without, "#d55e00")):
    losses = [sum(terms) for terms in zip(*(losses for losses, _ in values))]
    ends[name] = round(losses[-1], 3)
    axes.plot(losses, color=colour, label=f"{name}, at the end {ends[name]}")
axes.set(title="Training loss", xlabel="step", yscale="log")
axes.legend()
plt.show()

# %% name="loss-seen"
loss.reveal(
    f"at the end {ends}",
    answer="B",
    A="for a layer nothing is missing: its term is the whole gradient of its own 12 rows",
    C="off for the whole batch, and right for the rows that the layer has",
)

# %% name="copies"
for name, values in (("with the sum", with_sum), ("without", without)):
    w = [w for _, w in values]
    print(f"{name:12}  rank 0 and rank 4, copies of one block of W, differ by {(w[0] - w[4]).norm() / w[0].norm():.2f}")

# %% [markdown] minutes=2 core=true
# It falls *further*. Each layer fits its own 12 rows, and there are two models now, in what was to be one.
# The loss is happy. Whoever saves a checkpoint takes the copy of layer 0 and gets a model that has never seen half of the
# data.

# %% [markdown] minutes=2 core=true
# ## Bias and norms
#
# The bias of a rank's columns is a copy on every rank with the same columns. Its gradient is the sum of dY over all rows.
# **Guess:** over which axes must it be added up?

# %% name="bias"
def bias_gradients():
    mesh = Mesh(**SIZES)
    mine = LAYOUTS["Y"].shard(dY, mesh).sum(0)
    over_row = mesh["row"].all_reduce(mine)
    return mine, over_row, mesh["depth"].all_reduce(over_row)

for name, found in zip(("mine", "over row", "over row and depth"), zip(*run(bias_gradients, ranks=8).values)):
    print(f"{name:18}", f"error {error(found, dY.sum(0), Layout('F@col')):.1e}")

# %% [markdown] minutes=1 core=true
# Over every axis that cuts the rows: `B@depth@row` says which. For the gradients of a LayerNorm it is the same. The rule
# holds for all methods of this course: **a parameter's gradient is added up over every axis that cuts the data and not the
# parameter.**

# %% [markdown] minutes=2 core=true
# ## The bill
#
# Three SUMMA products, now with 1/d of X, and the all-reduce of dW. The library's scheme does it all:

# %% name="scheme"
def as_scheme(sizes):
    mesh, scheme = Mesh(**sizes), Tesseract()
    x, w, dy = (LAYOUTS[n].shard(t, mesh) for n, t in (("X", X), ("W", W), ("Y", dY)))
    with region("forward"):
        scheme.forward(x, w, mesh)
    with region("backward"):
        scheme.backward(dy, x, w, mesh)

# %% name="scheme-run"
for d in (1, 2, 3):
    sizes = SIZES | {"depth": d}
    trace = run(as_scheme, sizes, ranks=4 * d).trace
    counted = [sum(trace.bytes_sent(rank, way) for rank in range(4 * d)) / 8 / (4 * d) for way in ("forward", "backward")]
    formula = Tesseract().traffic(B, D, F, sizes)
    print(f"depth {d}: counted {counted}, formula", [float(formula[way]) for way in ("forward", "backward")])

# %% name="scheme-picture"
run(as_scheme, SIZES, ranks=8, machine="8xH100")

# %% [markdown] minutes=2 core=true
# The last line in the picture is the all-reduce over depth. Depth 1 is lesson 13, to the element.
#
# With 64 ranks there is a choice: 8 x 8, or 4 x 4 x 4. A transformer layer, in units of b·s·h. **Guess:** for many tokens or
# for few, which of the two sends less?

# %% name="which-depth"
from lessons_lib.cost import formula, ways

square, deep = (next(way for way in ways(64) if way.name == name) for name in ("2D", "2.5D"))
for times in (1, 2, 3, 4, 16):
    tokens, h = 64 * times, 64
    sent = [float(formula(way, tokens, h).sent / (tokens * h)) for way in (square, deep)]
    print(f"b·s = {times:2} h:  8 x 8 sends {sent[0]:5.2f}   4 x 4 x 4 sends {sent[1]:5.2f}")

# %% [markdown] minutes=2 core=true
# Depth makes X smaller and leaves W larger. So with few tokens it loses, and from b·s = 3 h on it wins. And always it
# holds 1/16 of the weights where the square holds 1/64.

# %% [markdown] minutes=3 core=true
# ## A published table
#
# Colossal-AI's documentation has a table of costs: 2.5D, one linear with X, W and Y of one size, costs
# 3 (q−1)(d+1)/(d q). That is not our formula. It counts a broadcast as q−1 hops one after another, where we count what is
# sent. A trace can be counted either way:

# %% name="published"
from lessons_lib.cost.compare import Way, trace
from lessons_lib.cost.conventions import hops, priced, published_2_5d, ring

print("  q d   published   ours, by hops   of which over depth   ours, by the ring")
for q, d in ((2, 1), (2, 2), (2, 3), (3, 2)):
    n, n_ranks = 12 * d, q * q * d
    events = trace(Way("2.5D", (Tesseract(),), {"depth": d, "row": q, "col": q}), n, n, layer=((1, 1),)).events
    over_depth = [event for event in events if event.group == "depth"]
    prices = [priced(*each, n_ranks) / n**2 for each in ((events, hops), (over_depth, hops), (events, ring))]
    print(f"  {q} {d} {float(published_2_5d(q, d)):11.3f} {float(prices[0]):15.3f} {float(prices[1]):21.3f} {float(prices[2]):19.3f}")

# %% [markdown] minutes=2 core=true
# By hops, our count is the table's number plus what goes over depth. So the table is right in its own convention, and it
# leaves out the same sum that the code leaves out. When you read a cost table, ask two things: how is a broadcast counted,
# and is everything in it that a training step needs?

# %% [markdown] minutes=2 core=true
# ## Is d = q the 3D algorithm?
#
# With d = q there are q³ ranks, a cube.

# %% name="cube-guess"
cube = predict(
    "Is that the 3D of the next lesson, under another name?",
    A="yes, both cut a product over three axes",
    B="in memory yes, in bytes no",
    C="no, neither",
)

# %% name="not-3d"
from lessons_lib.cost import count, ways

measured = []
for way in (way for way in ways(8) if way.name in ("2.5D", "3D")):
    bill = count(way, 64, 64)
    w = way.schemes[0].W.share(way.sizes)
    measured.append(f"{way.name} holds {w} of W and sends {float(bill.sent / 64**2):.2f} b·s·h")

# %% name="cube-seen"
cube.reveal(
    "; ".join(measured),
    answer="C",
    A="2.5D cuts W over two axes and copies it over the third",
    B="neither: 2.5D copies W over depth, and 3D cuts it over all three axes",
)

# %% [markdown] minutes=1 core=true
# It has copies of W, 1/q² on each rank, where the cube has 1/q³; and it sends another amount. Same ranks, another
# algorithm. In the cube no two ranks hold the same of W:

# %% name="w-in-the-cube"
layout_picture(SCHEMES["3d"].W, (D, F), {"i": 2, "j": 2, "k": 2}, name="W")

# %% [markdown] minutes=3 core=true
# ## The same in production
#
# There is no maintained production API for 2.5D. But depth alone is data parallelism, and for that there is one: PyTorch's
# DDP, over the group `mesh["depth"]`, around a 2D layer. DDP takes the *mean* over its ranks, so with our dY we have to
# multiply by d.

# %% name="production"
from torch import nn
from torch.nn.parallel import DistributedDataParallel

serial = nn.Linear(D, F).double()

def one_step(wrap, scheme):
    mesh = Mesh(**SIZES)
    layer = TensorParallelLinear.from_linear(serial, scheme, mesh)
    model = wrap(layer, mesh)
    y = model(LAYOUTS["X"].shard(X, mesh))
    with region("backward"):
        y.backward(LAYOUTS["Y"].shard(dY, mesh))
    return layer.weight.grad, layer.bias.grad

def with_ddp(layer, mesh):
    return DistributedDataParallel(layer, process_group=mesh["depth"].process_group)

# %% name="production-run"
ours = run(one_step, lambda layer, mesh: layer, Tesseract(), ranks=8)
theirs = run(one_step, with_ddp, summa, ranks=8)
d = SIZES["depth"]
print("dW", f"{error([d * dw for dw, _ in theirs.values], X.T @ dY, LAYOUTS['W']):.0e}",
      " dbias", f"{error([d * db for _, db in theirs.values], dY.sum(0), Layout('F@col')):.0e}")
print("elements sent backward", [result.trace.bytes_sent(0, "backward") // 8 for result in (ours, theirs)])

# %% [markdown] minutes=1 core=true
# The same gradients and the same bytes, the bias's in one bucket with those of W.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. 2.5D is d squares with the same W, each with rows of its own. Forward they do not talk.
# 2. dW is summed over depth, bias and norms over depth and row. Forget it, and every number is plausible.
# 3. A test in which all ranks hold the same rows cannot see that; the training loss even falls further.
# 4. Depth thins X and not W. At 64 ranks it sends less than the larger square from b·s = 3 h on.
# 5. d = 1 is 2D; d = q is a cube of ranks, and not the 3D algorithm.
#
# **Where next:** lesson 15 uses the third axis for W and Y, too; the [README](../README.md) has the map of the lessons.
#
# *Sources:* Wang et al. 2021, [Tesseract](https://arxiv.org/abs/2105.14500), section 3. Solomonik and Demmel 2011, for
# where the name 2.5D comes from. Colossal-AI's
# [2.5D page](https://colossalai.org/docs/features/2p5D_tensor_parallel), with the table, and its `legacy` code.
