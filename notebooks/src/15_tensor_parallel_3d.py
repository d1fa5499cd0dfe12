# %% [markdown] minutes=1 core=true
# # Tensor parallel in 3D, and which one when
#
# A product Y = X W has three dims: rows B, columns F, and D, which is summed over. Eight ranks in a cube have three axes
# i, j, k: one for each dim. Rank (i, j, k) multiplies X[i,k] by W[k,j]. Those are 1/4 of X and 1/4 of W, and two ranks
# need the same. **Who keeps what?**

# %% tags=["setup"]
import torch

from lessons_lib import Layout, Mesh, run
from lessons_lib.grading import predict, recap
from lessons_lib.tensor_parallel import Cube, CubeKept, tensor_parallel_linear
from lessons_lib.views import cube_picture

B, D, F = 12, 8, 16  # rows, model width, outputs
torch.manual_seed(0)
X, W, dY = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, D), (D, F), (B, F)))
LAYOUTS = {"X": Layout("B@i@j D@k"), "W": Layout("D@k@i F@j"), "Y": Layout("B@i@k F@j")}
SIZES = {"i": 2, "j": 2, "k": 2}

def in_cube(product):
    mesh = Mesh(**SIZES)
    return product(LAYOUTS["X"].shard(X, mesh), LAYOUTS["W"].shard(W, mesh), mesh)

def error(blocks, truth, layout):
    joined = layout.join(blocks, SIZES)
    return f"{(joined - truth).norm() / truth.norm():.0e}"

# %% [markdown] minutes=1 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("15")

# %% [markdown] minutes=2 core=true
# ## A cube of ranks
#
# Each rank is a small cube, each tensor a face of the large one. A block on a face is what the ranks in line with it need.

# %% name="keeps-guess"
keeps = predict(
    "Each block is needed by two ranks. Who keeps what?",
    A="each rank keeps the two blocks it needs, 1/4 of X and of W",
    B="each keeps half of either, 1/8, and the two of a pair lend each other their halves",
    C="half of the ranks keep X, the other half W",
)

# %% name="cube"
cube_picture(*LAYOUTS.values(), SIZES, rank=1)

# %% name="keeps-seen"
keeps.reveal(
    "a rank keeps " + ", ".join(f"{layout.share(SIZES)} of {name}" for name, layout in LAYOUTS.items()),
    answer="B",
    A="then everything would be there twice, and a rank of eight would hold as much as one of four",
    C="each rank needs both, so every block would be sent whole, by one rank to the other",
)

# %% [markdown] minutes=2 core=true
# X[0,1] is needed by the ranks along j, so they share its rows: `B@i@j D@k`. W[1,0] is shared along i, and Y[0,0]
# along k. So three tensors and three axes: **each tensor is cut by two axes into blocks, and by the third, the one it does
# not depend on, into the shares of a block.**
#
# | | blocks | shared along | layout |
# |---|---|---|---|
# | X | i, k | j | `B@i@j D@k` |
# | W | k, j | i | `D@k@i F@j` |
# | Y | i, j | k | `B@i@k F@j` |

# %% [markdown] minutes=2 core=true
# ## One product
#
# `in_cube`, in the setup cell, gives each rank its shares. **Guess:** which collective for which tensor, and along which
# axis?

# %% name="forward"
def forward(x, w, mesh):
    x_ik = mesh["j"].all_gather(x, dim=0)
    w_kj = mesh["i"].all_gather(w, dim=0)
    return mesh["k"].reduce_scatter(x_ik @ w_kj, dim=0)

result = run(in_cube, forward, ranks=8, machine="8xH100")
print("error", error(result.values, X @ W, LAYOUTS["Y"]))
result

# %% [markdown] minutes=2 core=true
# Gather the two blocks, multiply, *once*, and then: what a rank has is a term, for D is cut over k. The partial sum is
# resolved along k by a reduce-scatter, since nobody needs a whole Y[i,j]. No steps, no panels: three collectives.
#
# **Break it.** Gather along the wrong axes. **Guess:** who notices?

# %% name="wrong-axes"
def wrong_axes(x, w, mesh):
    x_ik = mesh["i"].all_gather(x, dim=0)
    w_kj = mesh["j"].all_gather(w, dim=0)
    return mesh["k"].reduce_scatter(x_ik @ w_kj, dim=0)

print("error", error(run(in_cube, wrong_axes, ranks=8).values, X @ W, LAYOUTS["Y"]))

# %% [markdown] minutes=2 core=true
# Nobody. In a cube all groups have the same size, so every shape fits. Only the layouts know which rows belong together.

# %% [markdown] minutes=2 core=true
# ## At rest, and while computing
#
# X is 16 x 256 and W is 256 x 64. **Guess:** which part of them does a rank hold between two layers, and which at its
# fullest?

# %% name="memory"
scheme = Cube()
rows, width, outputs = 16, 256, 64
everything = rows * width + width * outputs + rows * outputs

def one_product():
    mesh = Mesh(**SIZES)
    x = torch.randn(scheme.X.local_shape((rows, width), SIZES))
    w = torch.randn(scheme.W.local_shape((width, outputs), SIZES))
    y = scheme.forward(x, w, mesh)
    return x.numel(), w.numel(), y.numel()

result = run(one_product, ranks=8, record=("memory",), machine="8xH100")
x, w, y = result.values[0]
print(f"at rest: {x} of X, {w} of W, {y} of Y:  1/{everything / (x + w + y):g} of all")
print(f"peak: {result.trace.peak_bytes(rank=0) / 4 / everything:.3f} of all")

# %% name="memory-picture"
result

# %% [markdown] minutes=2 core=true
# Its own 1/8, and on top of it 1/4 of all, gathered or not yet scattered. In general 1/q³ at rest and 1/q² on top, while
# one layer computes. A table that says "memory 1/p" speaks of the first.

# %% [markdown] minutes=3 core=true
# ## Backward
#
# What was gathered forward is scattered backward, and the other way round. Three blocks, three gathers and two products:
#
# $$dX_{ik} = \sum_j dY_{ij} W_{kj}^T \qquad\qquad dW_{kj} = \sum_i X_{ik}^T dY_{ij}$$
#
# **Guess:** along which axis are the terms of dX, along which those of dW?

# %% name="backward"
def backward(dy, x, w, mesh):
    dy_ij = mesh["k"].all_gather(dy, dim=0)
    w_kj = mesh["i"].all_gather(w, dim=0)
    dx = mesh["j"].reduce_scatter(dy_ij @ w_kj.T, dim=0)
    x_ik = mesh["j"].all_gather(x, dim=0)
    dw = mesh["i"].reduce_scatter(x_ik.T @ dy_ij, dim=0)
    return dx, dw

def backward_in_cube():
    mesh = Mesh(**SIZES)
    x, w, dy = (LAYOUTS[name].shard(whole, mesh) for name, whole in (("X", X), ("W", W), ("Y", dY)))
    return backward(dy, x, w, mesh)

dxs, dws = zip(*run(backward_in_cube, ranks=8).values)
print("dX", error(dxs, dY @ W.T, LAYOUTS["X"]), "  dW", error(dws, X.T @ dY, LAYOUTS["W"]))

# %% [markdown] minutes=2 core=true
# Each along the axis its tensor does not depend on, the one it is shared along.
#
# X and W were gathered in forward already. Keep them, and backward need not gather again. **Guess:** what is saved, and what
# does it cost?

# %% name="kept"
from lessons_lib.cost.compare import Way, count

for name, cube in (("gathered again", Cube()), ("kept", CubeKept())):
    bill = count(Way(name, (cube,), SIZES), tokens=8, h=8, layer=((3, 2),))  # X 8 x 24, W 24 x 16
    print(f"{name:14}  {bill.sent} elements sent, {bill.kept} kept until backward")

# %% [markdown] minutes=2 core=true
# 176 elements instead of 248, and three times the memory (1 + q times), in every layer. Published tables tend to give the
# bytes of the one and the memory of the other.

# %% [markdown] minutes=2 core=true
# ## Two in a row
#
# The MLP has two layers: the Y of the first is the X of the second.

# %% name="row-guess"
go_on = predict(
    "Simply go on with the same scheme. What happens?",
    A="nothing odd: Y lies as X lay",
    B="an error: the blocks do not fit",
    C="a wrong number, and no error",
)

# %% name="two-in-a-row"
W2 = torch.randn(F, D, dtype=torch.float64)

def two_in_a_row(first, second):
    mesh = Mesh(**SIZES)
    x, w1, w2 = first.X.shard(X, mesh), first.W.shard(W, mesh), second.W.shard(W2, mesh)
    y = tensor_parallel_linear(x, w1, first, mesh)
    return tensor_parallel_linear(y, w2, second, mesh)

again = run(two_in_a_row, Cube(), Cube(), ranks=8).values
print("the same again  error", error(again, X @ W @ W2, Cube().Y))

# %% name="row-seen"
go_on.reveal(
    f"error {error(again, X @ W @ W2, Cube().Y)}, and shapes as they should be: {tuple(again[0].shape)}",
    answer="C",
    A="the output has another layout than the input: j and k have changed places",
    B="both blocks have B/4 rows and half of the columns; a shape does not say which rows",
)

# %% [markdown] minutes=2 core=true
# Y lies as `B@i@k F@j`, and the second layer takes it for `B@i@j D@k`. The output does *not* have the layout of the input: j
# and k have changed places. So the next layer changes them, too:

# %% name="exchanged"
first, second = Cube(), Cube().exchanged()
for scheme in (first, second):
    print(f"{scheme.X}  times  {scheme.W}  gives  {scheme.Y}")
turned = run(two_in_a_row, first, second, ranks=8).values
print("exchanged  error", error(turned, X @ W @ W2, second.Y))
cube_picture(second.X, second.W, second.Y, SIZES, rank=1)

# %% [markdown] minutes=2 core=true
# After two layers everything lies as in the beginning. Hence: linears in pairs, and whatever mixes X with Y, like the residual
# X + Y, only behind a pair. **Guess:** and behind a single one?

# %% name="residual"
def residuals(W):
    mesh, one, two = Mesh(**SIZES), Cube(), Cube().exchanged()
    x = one.X.shard(X, mesh)
    y = one.forward(x, one.W.shard(W, mesh), mesh)
    z = two.forward(y, two.W.shard(W, mesh), mesh)
    return x + y, x + z

square = torch.randn(D, D, dtype=torch.float64)
behind_one, behind_two = zip(*run(residuals, square, ranks=8).values)
print("behind one linear ", error(behind_one, X + X @ square, Cube().Y), "or", error(behind_one, X + X @ square, Cube().X))
print("behind a pair     ", error(behind_two, X + X @ square @ square, Cube().X))

# %% [markdown] minutes=1 core=true
# Wrong, whichever layout you take it for: rows of different tokens were added. In Colossal-AI a global switch exchanges the
# roles behind each layer; here it stands in the layouts, where it can be checked.

# %% [markdown] minutes=3 core=true
# ## The five at 64 ranks
#
# A transformer layer with its four linears, forward and backward, on 64 ranks: 1D; 2D on 8 x 8; 2.5D on 4 x 4 x 4; 3D on
# 4 x 4 x 4, gathering again or keeping. All run, all is counted: what a rank sends, and what it keeps from forward to
# backward.

# %% name="five-guess"
five = predict(
    "As many tokens as h: who sends least, and who most?",
    A="3D kept least, 1D most: the more axes, the fewer bytes",
    B="3D kept least, 2.5D most",
    C="1D least, it sends no weights; 2.5D most",
)

# %% name="counted"
from lessons_lib.cost import count, formula, ways

bills = {way.name: count(way, tokens=64, h=64) for way in ways(64)}
for name in sorted(bills, key=lambda name: bills[name].sent):
    print(f"{name:8} sends {float(bills[name].sent / 64**2):.2f} b·s·h, keeps {bills[name].kept / 64**2:.2f} b·s·h")
print("all as by the formulas:", all(bills[way.name] == formula(way, tokens=64, h=64) for way in ways(64)))
five.reveal(
    "from least to most: " + ", ".join(sorted(bills, key=lambda name: bills[name].sent)),
    answer="B",
    A="2.5D has an axis more than 2D and sends more: depth copies W, so its blocks are four times as large",
    C="no weights, but whole activations: for each linear an all-reduce of its input or output",
)

# %% [markdown] core=true
# And with h = 4 b·s? To see who gains, two of the five are enough:

# %% name="wide-guess"
gains = predict(
    "h = 4 b·s, so large weights and few tokens. Who gains?",
    A="3D: large weights are what it cuts best",
    B="1D",
    C="nobody: what all of them send grows alike",
)

# %% name="counted-wide"
wide = {way.name: count(way, tokens=64, h=256) for way in ways(64) if way.name in ("1D", "3D")}
before = {name: round(float(bills[name].sent / 64**2), 2) for name in wide}
now = {name: round(float(wide[name].sent / (64 * 256)), 2) for name in wide}
gains.reveal(
    f"sent in b·s·h: before {before}, now {now}",
    answer="B",
    A="it holds them best, but it sends them, too: four times as much of W for each b·s·h",
    C="1D sends activations only, and these grow with h; weights grow with h²",
)

# %% name="counted-picture"
import matplotlib.pyplot as plt

by_formula = {way.name: formula(way, tokens=64, h=256) for way in ways(64)}
figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharex=True, sharey=True)
for axes, h, of_way, title in zip(panels, (64, 256), (bills, by_formula), ("h = b·s, counted", "h = 4 b·s, by formula")):
    for name, bill in of_way.items():
        x, y = float(bill.kept / (64 * h)), float(bill.sent / (64 * h))
        axes.plot(x, y, "o", color="#0072b2")
        axes.annotate(name, (x, y), xytext=(6, 4), textcoords="offset points")
    axes.set(title=title, xlabel="kept until backward, in b·s·h", xscale="log", yscale="log")
    axes.set(xlim=(0.2, 10), ylim=(2, 60))
    axes.set_xticks([0.3, 1, 3], ["0.3", "1", "3"])
    axes.set_yticks([3, 10, 30], ["3", "10", "30"])
    axes.minorticks_off()
panels[0].set_ylabel("sent, in b·s·h")
plt.show()

# %% [markdown] minutes=3 core=true
# Left and low is good. With h = b·s the order of bytes is 3D kept, 3D, 2D, 1D, 2.5D. With h = 4 b·s 1D has overtaken
# all but one: it is the only one that sends no weights. In memory 2D and 3D are equal and the smallest, both times: everything
# of theirs is cut by p. 1D has whole activations, 2.5D copies of W, "3D kept" its gathered blocks.
#
# So a higher dimension is not always better, not even in bytes. With more shapes, by the formulas:

# %% name="by-shape"
print(f"{'h / (b·s)':10}", *(f"{way.name:>8}" for way in ways(64)), "   sends least")
for tokens, h in ((1024, 64), (256, 64), (64, 64), (64, 256), (64, 512)):
    sent = {way.name: float(formula(way, tokens, h).sent / (tokens * h)) for way in ways(64)}
    print(f"{h / tokens:<10g}", *(f"{n:8.2f}" for n in sent.values()), "  ", min(sent, key=sent.get))

# %% [markdown] minutes=2 core=true
# Three different winners. And seconds are another matter: eight H100s in one box, forward and backward of the four linears.
# **Guess:** is the one that sends least the fastest?

# %% name="seconds"
from lessons_lib.cost import compare_ways

for tokens, h in ((16384, 4096), (256, 8192)):
    print(f"{tokens} tokens, h = {h}")
    for row in compare_ways(tokens, h, n_ranks=8, on="8xH100"):
        print(f"   {row.way.name:8} {row.bill.sent / 1e6:5.0f} M elements sent, {row.rounds} rounds, {row.time_s * 1e3:5.2f} ms")

# %% [markdown] minutes=2 core=true
# Not always: for 16384 tokens 2.5D sends more than "3D kept" and is done sooner, since its panels travel while the ranks
# compute. And for 256 tokens of a wide model 1D takes a third of what the next one takes.
#
# How to choose, then: 1D inside one box, as long as activations fit. Many ranks and activations or weights that must not be whole
# anywhere: 2D or 3D; 2.5D for very many tokens. And always with your own h / (b·s).

# %% [markdown] core=true
# Bytes against memory for any of these: dots up to 16 ranks are counted runs. **When is 1D on the frontier?**

# %% name="frontier"
from lessons_lib.widgets import bytes_memory_explorer

bytes_memory_explorer(ranks="8", tokens="1/4 h")

# %% [markdown] minutes=2 core=true
# ## The same in production
#
# There is no maintained production API for 3D either. Nor can PyTorch's DTensor say our three layouts: placements follow the
# order of the mesh's axes, and X wants i before j, W wants k before i, Y wants i before k. But the product itself, with
# the gathered blocks, it can do:

# %% name="production"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

def with_dtensor():
    ours = Mesh(**SIZES)
    x_ik, w_kj = Layout("B@i D@k").shard(X, ours), Layout("D@k F@j").shard(W, ours)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("i", "j", "k"))
    x = DTensor.from_local(x_ik, mesh, [Shard(0), Replicate(), Shard(1)])
    w = DTensor.from_local(w_kj, mesh, [Replicate(), Shard(1), Shard(0)])
    term = x @ w
    y = term.redistribute(mesh, [Shard(0), Shard(1), Shard(0)])
    return y.to_local(), str(term.placements)

# %% name="production-run"
by_torch, by_hand = run(with_dtensor, ranks=8), run(in_cube, Cube().forward, ranks=8)
print("placements of the product", by_torch.values[0][1])
equal = all(torch.allclose(theirs, ours) for (theirs, _), ours in zip(by_torch.values, by_hand.values))
sent = [[event.bytes_sent // 8 for event in result.trace.collectives(0) if event.kind == "reduce_scatter"]
        for result in (by_torch, by_hand)]
print("equal on all ranks:", equal, "  elements sent in the reduce-scatter", sent)

# %% [markdown] minutes=1 core=true
# It finds by itself that the product is a partial sum over k, and scatters it as we do.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. Each tensor is cut by two axes into blocks and shared along the third. Forward: gather X along j and W along i, multiply,
#    reduce-scatter Y along k.
# 2. 1/q³ at rest, and 1/q² more while computing; to keep what was gathered saves bytes, and costs 1 + q times the
#    memory.
# 3. The output has another layout than the input. Exchange j and k in the next layer; mix only behind a pair.
# 4. Which one sends least turns with h / (b·s): at 64 ranks 2.5D for very many tokens, 3D in between, 1D for very few.
# 5. Bytes, rounds, memory and seconds give different orders. Compute them for your own sizes.
#
# **Where next:** lesson 20 puts the families together; the [README](../README.md) has the map of the lessons.
#
# *Sources:* Agarwal et al. 1995, a three-dimensional approach to parallel matrix multiplication; Bian et al. 2021,
# [3D tensor parallelism](https://arxiv.org/abs/2105.14450), whose groups *input*, *weight* and *output* are our j, i and k;
# Colossal-AI's [3D page](https://colossalai.org/docs/features/3D_tensor_parallel).
