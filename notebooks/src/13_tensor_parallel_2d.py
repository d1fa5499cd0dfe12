# %% [markdown] minutes=1 core=true
# # Tensor parallel in 2D
#
# In lesson 08 every rank had a whole X. Now X is too large for any rank, and so is W. **Neither fits anywhere. Can you
# still multiply?**

# %% tags=["setup"]
import torch

from lessons_lib import Layout, Mesh, region, run
from lessons_lib.grading import predict, recap
from lessons_lib.tensor_parallel import SCHEMES, Summa, TensorParallelLinear
from lessons_lib.views import mesh_picture

B, D, F = 12, 24, 36  # rows, model width, feed-forward width
torch.manual_seed(0)
X, W, dY = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, D), (D, F), (B, F)))
LAYOUTS = {"X": Layout("B@row D@col"), "W": Layout("D@row F@col"), "Y": Layout("B@row F@col")}

def on_grid(multiply, q):
    mesh = Mesh(row=q, col=q)
    x, w = LAYOUTS["X"].shard(X, mesh), LAYOUTS["W"].shard(W, mesh)
    return multiply(x, w, mesh)

def error(blocks, truth, layout):
    q = round(len(blocks) ** 0.5)
    return f"{(layout.join(blocks, {'row': q, 'col': q}) - truth).norm() / truth.norm():.0e}"

# %% [markdown] minutes=1 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("13")

# %% [markdown] minutes=2 core=true
# ## Everything cut both ways
#
# Nine ranks in a square. Each has one block of nine of X, one of W, and is to have one of Y.

# %% name="multiply-guess"
can_multiply = predict(
    "Neither X nor W fits on any rank. Can they still make Y?",
    A="no: a number of Y needs a whole row of X and a whole column of W",
    B="yes, if every rank gathers its row of X and its column of W for a moment",
    C="yes, and no rank ever needs more than a few blocks",
)

# %% [markdown] core=true
# All three lie alike: rows over `row`, columns over `col`.

# %% name="grid-picture"
mesh_picture(LAYOUTS, {"row": 3, "col": 3}, rank=4)

# %% [markdown] minutes=1 core=true
# Rank 4 is to make block Y[1,1]. A row of blocks times a column of blocks:
#
# $$Y_{11} = X_{10} W_{01} + X_{11} W_{11} + X_{12} W_{21}$$
#
# It has X[1,1] and W[1,1]. The other blocks of X lie with the ranks of its grid row, those of W with the ranks of its
# grid column.

# %% [markdown] minutes=1 core=true
# ### Gather it all
#
# First with B. `on_grid`, in the setup cell, gives each rank its blocks. Remember from lesson 01: `mesh["col"]` holds the
# ranks that differ in `col`, so along a grid *row* runs `mesh["col"]`.

# %% name="gathered"
def gathered(x, w, mesh):
    row_of_x = mesh["col"].all_gather(x, dim=1)
    column_of_w = mesh["row"].all_gather(w, dim=0)
    return row_of_x @ column_of_w

# %% name="gathered-run"
for q in (2, 3):
    result = run(on_grid, gathered, q, ranks=q * q)
    print(f"{q} x {q}: error {error(result.values, X @ W, LAYOUTS['Y'])}, {result.trace.bytes_sent(0) // 8} elements sent")

# %% [markdown] minutes=1 core=true
# Right. But the sum has q terms, and nobody needs them all at once.

# %% [markdown] minutes=3 core=true
# ### One step at a time
#
# In step l each rank needs one block of X, the one in column l of its grid row, and one block of W, the one in row l of
# its grid column. Their owners broadcast them. This is SUMMA:

# %% name="summa"
def summa(x, w, mesh):
    y = 0
    for l in range(mesh["col"].size):
        x_l = mesh["col"].broadcast(x, root=l)  # along my grid row, from its rank in column l
        w_l = mesh["row"].broadcast(w, root=l)  # along my grid column, from its rank in row l
        y = y + x_l @ w_l
    return y

# %% [markdown] core=true
# **Guess:** does SUMMA send more than gathering, less, or the same?

# %% name="summa-run"
for q in (2, 3):
    result = run(on_grid, summa, q, ranks=q * q)
    print(f"{q} x {q}: error {error(result.values, X @ W, LAYOUTS['Y'])}, {result.trace.bytes_sent(0) // 8} elements sent")

# %% [markdown] minutes=1 core=true
# The same. Each block still has to get to the other ranks of its row or column: q−1 blocks of X and q−1 of W are sent by
# each rank, however they are wrapped. On the clock of nine H100s, step by step:

# %% name="summa-picture"
run(on_grid, summa, 3, ranks=9, machine="9xH100")

# %% [markdown] minutes=1 core=true
# **Break it.** Exchange the two axes: X comes along the column, W along the row. **Guess:** a wrong shape, a hang, or a wrong
# number?

# %% name="wrong-axes"
def wrong_axes(x, w, mesh):
    y = 0
    for l in range(mesh["col"].size):
        y = y + mesh["row"].broadcast(x, root=l) @ mesh["col"].broadcast(w, root=l)
    return y

print("error", error(run(on_grid, wrong_axes, 3, ranks=9).values, X @ W, LAYOUTS["Y"]))

# %% [markdown] minutes=1 core=true
# A wrong number, in silence. On a square grid every block of X has one shape, so nothing catches on. And a grid that is
# not square? Blocks of X and W would not meet. The library says so before anything is sent:

# %% name="not-square" tags=["raises-exception"]
def not_square():
    return TensorParallelLinear.from_linear(torch.nn.Linear(D, F), SCHEMES["2d"], Mesh(row=2, col=3))

run(not_square, ranks=6)

# %% [markdown] minutes=2 core=true
# ### Is something whole somewhere?
#
# "In the end some rank must hold all of X, if only for a moment." Measure. X, W and Y have 144 x 144 elements each;
# what does a rank hold at its fullest?

# %% name="held"
def held(multiply, q, n=144):
    mesh = Mesh(row=q, col=q)
    x, w = torch.randn(n // q, n // q), torch.randn(n // q, n // q)
    return tuple(multiply(x, w, mesh).shape)

def held_in_1d(multiply, q, n=144):  # a column-parallel layer: X is whole
    x, w = torch.randn(n, n), torch.randn(n, n // q**2)
    return tuple((x @ w).shape)

# %% [markdown] core=true
# **Guess:** from 4 ranks to 16, what becomes of the peak of each?

# %% name="held-run"
fullest = {}
for name, step, multiply in (
    ("1D", held_in_1d, None),
    ("gathered", held, gathered),
    ("SUMMA, ours", held, summa),
    ("SUMMA, library", held, Summa().forward),
):
    runs = [run(step, multiply, q, ranks=q * q, record=("memory",)) for q in (2, 3, 4)]
    fullest[name] = [result.trace.peak_bytes(rank=0) / 4 / 144**2 for result in runs]
    print(f"{name:15}", *(f"{peak:6.2f} n²" for peak in fullest[name]), "  on 4, 9, 16 ranks")

# %% name="multiply-seen"
can_multiply.reveal(
    "on 16 ranks, in n²: " + ", ".join(f"{name} {peaks[-1]:.2f}" for name, peaks in fullest.items()),
    answer="C",
    A="the row and the column meet in q steps, and each step needs one block of either",
    B="that is one way; but the q terms need not come all at once, and so nobody needs a whole row",
)

# %% [markdown] minutes=2 core=true
# With 1D the peak never falls below one whole X. Gathered rows fall with the *side* of the grid, 1/q: twice as many
# ranks do not halve them. SUMMA falls with the number of ranks: no row of X, nor anything else, is whole anywhere.
#
# The library keeps two panels of each, one in use while the next one travels, and adds into Y in place.

# %% name="held-picture"
run(held, Summa().forward, 2, ranks=4, record=("memory",), machine="4xH100")

# %% [markdown] core=true
# Follow one rank through the steps: of Y, and of dX and dW, which come next.

# %% name="stepper"
from lessons_lib.widgets import scheme_stepper

scheme_stepper("2D on 3 x 3", result="Y", stage=2, rank=4)

# %% [markdown] minutes=4 core=true
# ## Backward
#
# Two products, each with a transpose:
#
# $$dX_{il} = \sum_j dY_{ij} W_{lj}^T \qquad\qquad dW_{lj} = \sum_i X_{il}^T dY_{ij}$$
#
# Look at dX. In step l the block W[l,j] comes along column j, as it did forward. Each rank makes one term. The terms of
# dX[i,l] lie along grid row i.

# %% name="terms-guess"
terms = predict(
    "What is done with the terms of dX[i,l]?",
    A="all-reduce along the row",
    B="reduce along the row, to its rank in column l",
    C="nothing, each rank keeps its own",
)

# %% name="backward"
def backward(dy, x, w, mesh):
    row, col = mesh["row"], mesh["col"]
    for l in range(col.size):
        total = col.reduce(dy @ row.broadcast(w, root=l).T, root=l)
        if col.rank == l:
            dx = total
    for l in range(col.size):
        total = row.reduce(col.broadcast(x, root=l).T @ dy, root=l)
        if row.rank == l:
            dw = total
    return dx, dw

def backward_on_grid(q):
    mesh = Mesh(row=q, col=q)
    x, w, dy = (LAYOUTS[name].shard(whole, mesh) for name, whole in (("X", X), ("W", W), ("Y", dY)))
    return backward(dy, x, w, mesh)

# %% name="backward-run"
result = run(backward_on_grid, 3, ranks=9)
dxs, dws = zip(*result.values)
print("dX", error(dxs, dY @ W.T, LAYOUTS["X"]), "  dW", error(dws, X.T @ dY, LAYOUTS["W"]))
print("elements sent", result.trace.bytes_sent(rank=0) // 8)

# %% name="terms-seen"
terms.reveal(
    f"reduced to the owner: error {error(dxs, dY @ W.T, LAYOUTS['X'])}",
    answer="B",
    A="q ranks would have the block, each as a copy, and only one of them is to keep it",
    C="a term was made from one block of dY's columns, and dX is the sum over all of them",
)

# %% [markdown] minutes=2 core=true
# The sum belongs to the rank that owns the block, and to nobody else. A broadcast forward becomes a reduce backward:
# what went out to many comes back as a sum.
#
# Each of the three products sends q−1 blocks of X and q−1 of W, so backward sends twice what forward does:

# %% name="bill"
for q in (2, 3):
    forward, back = (run(fn, *args, ranks=q * q).trace for fn, *args in ((on_grid, Summa().forward, q), (backward_on_grid, q)))
    print(f"{q} x {q}: formula {SCHEMES['2d'].traffic(B, D, F, {'row': q, 'col': q})}, counted",
          forward.bytes_sent(0) // 8, "and", back.bytes_sent(0) // 8)

# %% [markdown] minutes=1 core=true
# ## As a layer
#
# The library makes a module of it, with a bias. X, W and Y lie alike, so any number of such layers follow each other
# without a word between them, with the activation on blocks.

# %% name="layers"
from torch import nn

up, down = nn.Linear(D, F).double(), nn.Linear(F, D).double()

def layers():
    mesh = Mesh(row=2, col=2)
    one, two = (TensorParallelLinear.from_linear(layer, SCHEMES["2d"], mesh) for layer in (up, down))
    x = LAYOUTS["X"].shard(X, mesh)
    return two(nn.functional.gelu(one(x))).detach()

by_library = run(layers, ranks=4, machine="4xH100")
print("error", error(by_library.values, down(nn.functional.gelu(up(X))).detach(), LAYOUTS["X"]))
by_library

# %% [markdown] minutes=2 core=true
# Attention needs nothing more: rows are cut by sequences, columns by heads, so each rank has whole heads of whole
# sequences. A LayerNorm does: its mean is over all of D, of which a rank has a part (see below, in *more*).

# %% [markdown] minutes=3 core=true
# ## Who sends less?
#
# Now 1D against 2D, a whole transformer layer: four linears, h to 3h, h to h, h to 4h, 4h to h, forward and backward. The
# batch has b·s tokens. `count` runs the layer on ranks and counts what they send.

# %% name="who-guess"
who = predict(
    "As many tokens as h: who sends less at 4, at 9, at 16 ranks?",
    A="2D, each time: it cuts everything",
    B="1D, each time",
    C="1D at 4 ranks, 2D at 9 and 16",
)

# %% name="who-sends-less"
from lessons_lib.cost import count, crossover, formula, ways

def both(n_ranks):
    return [way for way in ways(n_ranks) if way.name in ("1D", "2D")]

times = {}
for n_ranks in (4, 9, 16):
    one, two = (float(count(way, 6 * n_ranks, 6 * n_ranks).sent / (6 * n_ranks) ** 2) for way in both(n_ranks))
    print(f"{n_ranks:2} ranks: 1D sends {one:.2f} b·s·h, 2D sends {two:.2f} b·s·h")
    times[n_ranks] = two / one

# %% name="who-seen"
who.reveal(
    ", ".join(f"{n_ranks} ranks: 2D sends {n:.2f} times as much" for n_ranks, n in times.items()),
    answer="B",
    A="what is cut has to travel, weights too; 1D never sends a weight",
    C="more ranks help 2D, but with so few tokens 16 do not suffice",
)

# %% [markdown] minutes=2 core=true
# 1D sends only activations. 2D sends activations *and weights*, and a layer has 12 h² of those. With more tokens the
# weights count for less. **Guess:** from how many tokens on does 2D win? In units of h.

# %% name="crossovers"
winner = {}
for n_ranks, h, most in ((4, 8, 16), (9, 90, 4), (16, 160, 4)):
    winner[n_ranks] = crossover(*both(n_ranks), h, most)
for n_ranks, tokens in winner.items():
    print(f"{n_ranks:2} ranks: 2D begins to win at b·s = {float(tokens):.1f} h")

# %% name="crossover-curve"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
for n_ranks, colour in ((4, "#0072b2"), (9, "#d55e00"), (16, "#009e73")):
    one, two = both(n_ranks)
    h, tokens = 12 * n_ranks, [12 * n_ranks * k for k in range(1, 17)]
    axes.plot(range(1, 17), [formula(two, t, h).sent / formula(one, t, h).sent for t in tokens], color=colour,
              label=f"{n_ranks} ranks")
    axes.plot(float(winner[n_ranks]), 1, "o", color=colour)
axes.axhline(1, color="#57606a", linestyle="--")
axes.set(title="What 2D sends, over what 1D sends", xlabel="tokens b·s, in units of h", ylim=(0, 2.5))
axes.legend(title="dots: found by counting")
plt.show()

# %% [markdown] minutes=2 core=true
# So 2D does not always win. It wins with many ranks and many tokens: at 4 ranks from 12 h on, at 9 from 3.3 h, at 16
# from 1.9 h. Its advantage is that what a rank sends falls with the grid, about 1/q, while 1D sends nearly 8 b·s·h
# whatever p.
#
# And bytes are not all. Count what must happen one after another:

# %% name="rounds"
from lessons_lib.cost import rounds

for n_ranks in (4, 16):
    print(n_ranks, "ranks:", {way.name: rounds(way) for way in both(n_ranks)}, "rounds")

# %% [markdown] minutes=1 core=true
# More rounds, each with smaller messages. So a small layer is sooner done in 1D, even where 2D sends less. What 2D is really
# for is the section before: nothing is whole anywhere.

# %% [markdown] minutes=3 more=true
# ## LayerNorm over a cut width
#
# LayerNorm subtracts the mean of a row. A rank has a third of the row. **Guess:** what if each takes the mean of what it
# has?

# %% name="layer-norm" more=true
from lessons_lib.tensor_parallel.layer_norm import layer_norm

ones, zeros = torch.ones(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)

def norms():
    mesh = Mesh(row=3, col=3)
    x, weight, bias = LAYOUTS["X"].shard(X, mesh), *(Layout("D@col").shard(w, mesh) for w in (ones, zeros))
    alone = torch.nn.functional.layer_norm(x, x.shape[-1:])
    return alone, layer_norm(x, weight, bias, LAYOUTS["X"], mesh)

normed = run(norms, ranks=9)
alone, together = zip(*normed.values)
for name, blocks in (("each its own mean", alone), ("mean over the row", together)):
    print(f"{name:18}", error(blocks, torch.nn.functional.layer_norm(X, (D,)), LAYOUTS["X"]))

# %% [markdown] minutes=1 more=true
# Each block is a perfect LayerNorm, of the wrong thing. The right one adds up two numbers per row over `mesh["col"]`:
# the sum, and the sum of squared deviations. For a width of thousands that is next to nothing.

# %% [markdown] minutes=3 more=true
# ## Cannon: nobody broadcasts
#
# An older way, from 1969. Blocks of X move on to the left, blocks of W move up, by one place a step, so all messages go to
# neighbours. First each row i is shifted by i and each column j by j, so that the blocks meet.

# %% name="cannon" more=true
def cannon(x, w, mesh):
    row, col = mesh["row"], mesh["col"]
    x, w = col.shift(x, -row.rank), row.shift(w, -col.rank)
    y = x @ w
    for _ in range(col.size - 1):
        x, w = col.shift(x, -1), row.shift(w, -1)
        y = y + x @ w
    return y

# %% [markdown] more=true
# **Guess:** does it send less than SUMMA?

# %% name="cannon-run" more=true
by_cannon = run(on_grid, cannon, 3, ranks=9, machine="9xH100")
print("error", error(by_cannon.values, X @ W, LAYOUTS["Y"]))
print("elements sent by each rank", [by_cannon.trace.bytes_sent(rank) // 8 for rank in range(9)])

# %% name="cannon-picture" more=true
by_cannon

# %% [markdown] minutes=1 more=true
# No, more: rank 0 stays where it is in the first shift and sends what SUMMA does, 256; the others pay for getting into
# position. Its charm is a machine where only neighbours are wired.

# %% [markdown] minutes=3 core=true
# ## The same in production
#
# There is no maintained production API for 2D tensor parallelism. Optimus was a research code; Colossal-AI's
# `parallel_2d` lies in its `legacy` folder. But PyTorch's DTensor accepts a matrix product of two tensors that are cut
# both ways. **Guess:** what does it do?

# %% name="production"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

def with_dtensor():
    mesh, both_ways = init_device_mesh("cpu", (3, 3), mesh_dim_names=("row", "col")), [Shard(0), Shard(1)]
    ours = Mesh(row=3, col=3)
    x, w = (DTensor.from_local(LAYOUTS[name].shard(whole, ours), mesh, both_ways).requires_grad_()
            for name, whole in (("X", X), ("W", W)))
    with region("forward"):
        y = x @ w
    y.backward(DTensor.from_local(LAYOUTS["Y"].shard(dY, ours), mesh, both_ways))
    return y.to_local().detach(), str(y.placements), str(w.grad.placements)

# %% name="production-run"
by_torch, by_summa = run(with_dtensor, ranks=9), run(on_grid, Summa().forward, 3, ranks=9)
blocks, placements, of_gradient = zip(*by_torch.values)
print("error", error(blocks, X @ W, LAYOUTS["Y"]), "  placements of Y", placements[0])
print("elements sent", by_torch.trace.bytes_sent(0, "forward") // 8, "and by SUMMA", by_summa.trace.bytes_sent(0) // 8)
print([event.kind for event in by_torch.trace.collectives(0, "forward")], "  placements of dW", of_gradient[0])

# %% [markdown] minutes=2 core=true
# It gathers a whole row of X and a whole column of W, as we did first. The numbers and the bytes are SUMMA's, the memory
# is not. And the gradient of W comes back as a partial sum over `row`, in another layout than W: what has still to be added up
# before the optimizer may touch it is up to you.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. SUMMA: q steps, in each a block of X comes along the grid row and a block of W along the grid column.
# 2. X, W and Y are all cut by p, always; no rank holds more than its blocks and a few panels.
# 3. Along a row runs `mesh["col"]`. Exchange the two, and only the numbers are wrong.
# 4. A broadcast forward is a reduce backward, to the owner. Backward sends twice what forward does.
# 5. 2D sends weights, too. It beats 1D in bytes from b·s = 12 h at 4 ranks, 1.9 h at 16, and always has more rounds.
#
# **Where next:** lesson 14 puts several such grids on top of each other; the [README](../README.md) has the map.
#
# *Sources:* van de Geijn and Watts 1997, SUMMA; Cannon 1969; Xu et al. 2021,
# [Optimus](https://arxiv.org/abs/2104.05343), section 3: SUMMA for all three products of a transformer.
