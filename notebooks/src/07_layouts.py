# %% [markdown] minutes=1 core=true
# # Layouts
#
# Four ranks compute Y = X W together. All numbers in X and in W are ones, and X has 8 columns, so every number of Y
# is 8. Rank 1 holds Y[0,0] = 2. **Is it wrong?**

# %% tags=["setup"]
import torch
import torch.distributed as dist

from lessons_lib import Layout, Mesh, run
from lessons_lib.grading import predict, recap
from lessons_lib.redistribute import redistribute, redistribution
from lessons_lib.tensor_parallel import SCHEMES
from lessons_lib.views import layout_picture, mesh_picture

B, D, F = 32, 8, 16  # rows, the dim that is summed over, columns
X, W = torch.ones(B, D, dtype=torch.float64), torch.ones(D, F, dtype=torch.float64)

is_wrong = predict("Every number of Y is 8, and rank 1 holds Y[0,0] = 2. Is it wrong?",
    A="yes, 2 is not 8", B="no, others hold the rest of it", C="from the number alone, nobody can say")

# %% [markdown] minutes=1 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("07")

# %% [markdown] minutes=1 core=true
# ## Is it wrong?
#
# A product can be shared out by the columns of W, by the rows of X, or by the dim that is summed over, D.
# `B D@tp` says that dim D is cut over the mesh axis tp; `shard` gives each rank its block.

# %% name="three-products"
def product(x_layout, w_layout):
    mesh = Mesh(tp=4)
    x, w = Layout(x_layout).shard(X, mesh), Layout(w_layout).shard(W, mesh)
    return x @ w

# %% [markdown] core=true
# **Guess:** in which of the three does rank 1 hold a 2?

# %% name="three-products-run"
held = []
for x_layout, w_layout in (("B D", "D F@tp"), ("B@tp D", "D F"), ("B D@tp", "D@tp F")):
    y = run(product, x_layout, w_layout, ranks=4).values[1]
    held.append(y[0, 0].item())
    print(f"{x_layout:6} times {w_layout:6}  rank 1 has shape {tuple(y.shape)}, and Y[0,0] = {y[0, 0].item()}")

# %% name="is-wrong-seen"
is_wrong.reveal(
    f"Y[0,0] on rank 1, three times the same Y: {held}",
    answer="C",
    A="it is right as a term of a sum: four ranks hold 2 each, which makes 8",
    B="they do in the third way; in the others rank 1 has to hold 8, and 2 would be an error",
)

# %% [markdown] minutes=1 core=true
# In the third, where each rank multiplies two columns of X with two rows of W. Its 2 is a right *term*, and as a value
# it would be wrong. Nor does the shape help. The only product of the full shape is the one that is not finished.
#
# What gives a number its meaning is the **layout**: which dims are cut, over which mesh axes, and what has still to
# be added up. This one is `B F +tp`, a partial sum over tp.

# %% name="partial-picture"
layout_picture(Layout("B F +tp"), (B, F), {"tp": 4}, name="Y")

# %% [markdown] minutes=2 core=true
# ## What a term may do
#
# A partial sum looks like a value. May you use it like one? Each rank does something to its term; after that the
# terms are added up.

# %% name="on-terms"
OPERATIONS = {
    "3 y": lambda y: 3 * y,
    "y + y": lambda y: y + y,
    "y V": lambda y: y @ torch.ones(F, 2, dtype=torch.float64),
    "y + 1": lambda y: y + 1,
    "y * y": lambda y: y * y,
    "relu(y - 5)": lambda y: torch.relu(y - 5),
}

def on_terms():
    mesh = Mesh(tp=4)
    term = Layout("B D@tp").shard(X, mesh) @ Layout("D@tp F").shard(W, mesh)
    return [mesh["tp"].all_reduce(operation(term))[0, 0].item() for operation in OPERATIONS.values()]

# %% name="on-terms-guess"
early = predict(
    "Which of the six come out as if the sum had been there from the start?",
    A="all: it does not matter when one adds up",
    B="3 y, y + y and y V",
    C="all but y V, which mixes the columns",
)

# %% name="on-terms-run"
truths = {name: operation(X @ W)[0, 0].item() for name, operation in OPERATIONS.items()}
found = dict(zip(OPERATIONS, run(on_terms, ranks=4).values[0]))
for name, truth in truths.items():
    print(f"{name:12} {found[name]:6}   right: {truth:5}   {'' if found[name] == truth else 'WRONG'}")

# %% name="on-terms-seen"
early.reveal(
    "right: " + ", ".join(name for name in OPERATIONS if found[name] == truths[name]),
    answer="B",
    A="a term is not a value: y + 1 adds a one on each of four ranks, so 12 comes out and not 9",
    C="y V may mix, it is linear; y + 1, y * y and relu take each number for itself, and need the whole of it",
)

# %% [markdown] minutes=1 core=true
# Scaling, adding two partial sums, another product: what is linear may come before the sum. A constant is added once
# per rank, squares and activations mix what is not there yet. So a partial sum may wait, and sometimes should, but only
# behind something linear.
#
# The layout knows what the number does not. It refuses to put terms together as if they were blocks:

# %% name="no-value" tags=["raises-exception"]
def as_if_a_value():
    mesh = Mesh(tp=4)
    return Layout("B F +tp").unshard(torch.ones(B, F), mesh)

run(as_if_a_value, ranks=4)

# %% [markdown] minutes=1 core=true
# ## Two axes
#
# A grid of ranks has two axes, and a tensor may use one, the other, or both. Here each cuts a dim:

# %% name="grid-picture"
layout_picture(Layout("B@row F@col"), (B, F), {"row": 2, "col": 2}, name="Y")

# %% [markdown] minutes=1 core=true
# Both axes may cut the *same* dim: `B@i@k` cuts the rows over i, and each half again over k. Or is it the other way
# round, and does it matter?

# %% name="i-then-k"
layout_picture(Layout("B@i@k F"), (4, 2), {"i": 2, "k": 2}, name="Y")

# %% [markdown] core=true
# **Guess:** in `B@k@i`, which row does rank 1 hold? Ranks are numbered with the last axis fastest, so rank 1 is at i=0,
# k=1.

# %% name="orders"
rows = torch.arange(4)

def orders():
    mesh = Mesh(i=2, k=2)
    return [Layout(order).shard(rows, mesh).item() for order in ("B@i@k", "B@k@i")]

for rank, (i_first, k_first) in enumerate(run(orders, ranks=4).values):
    print(f"rank {rank}   B@i@k: row {i_first}   B@k@i: row {k_first}")

# %% name="k-then-i"
layout_picture(Layout("B@k@i F"), (4, 2), {"i": 2, "k": 2}, name="Y")

# %% [markdown] minutes=1 core=true
# Row 2. The same shapes, the same sizes, and two of four ranks hold something else.
#
# **Break it.** Cut by one order, put together by the other.

# %% name="wrong-order-guess"
mixed_up = predict(
    "Cut by B@i@k, put together by B@k@i. What happens?",
    A="nothing, both cut the rows in four",
    B="an error, the layouts do not match",
    C="two rows change places, and nobody notices",
)

# %% name="wrong-order"
def wrong_order():
    mesh = Mesh(i=2, k=2)
    block = Layout("B@i@k").shard(rows, mesh)
    return Layout("B@k@i").unshard(block, mesh).tolist()

together = run(wrong_order, ranks=4).values
print(together)

# %% name="wrong-order-seen"
mixed_up.reveal(
    f"rows on rank 0: {together[0]}",
    answer="C",
    A="in four, but ranks 1 and 2 get different rows: the order of axes is part of a layout",
    B="a block does not remember how it was cut, and the shapes are the same",
)

# %% [markdown] minutes=1 core=true
# On every rank alike, and nobody complains: a layout is a promise. The order of axes is not cosmetic. In a model it would
# exchange two sentences, or two halves of every vector, and the loss would still be a number.

# %% [markdown] minutes=2 core=true
# ## From any layout to any other
#
# `redistribution` finds the collectives that lead from one layout to another, with a bill: how many elements each rank
# sends. It needs no ranks.

# %% name="one-way"
for step in redistribution(Layout("B F +tp"), Layout("B@tp F"), (B, F), {"tp": 4}):
    print(step)

# %% [markdown] core=true
# **Guess:** Y has 512 elements. From a copy to a cut, from a cut to a copy, from a partial sum to a copy: what does each
# cost on four ranks?

# %% name="all-ways"
layouts = [Layout(text) for text in ("B F", "B@tp F", "B F@tp", "B F +tp")]
print("from \\ to  ", *(f"{to!s:>8}" for to in layouts))
for source in layouts:
    bills = [sum(step.sent for step in redistribution(source, to, (B, F), {"tp": 4})) for to in layouts]
    print(f"{source!s:10}", *(f"{bill:8}" for bill in bills))

# %% [markdown] minutes=2 core=true
# * From a **copy** every way is free: each rank has all, and keeps a part.
# * From a **cut** to a copy is an all-gather, 3/4 of Y. To another cut is an all-to-all: each rank keeps a quarter of its
#   quarter and sends the rest, 96.
# * From a **partial sum** to a copy is an all-reduce, twice an all-gather. To a cut it is half of that. So if the next
#   step is content with a piece, do not ask for the whole.
#
# The same bill, paid by ranks:

# %% name="paid"
def paid():
    mesh = Mesh(tp=4)
    y = Layout("B F@tp").shard(X @ W, mesh)
    return redistribute(y, Layout("B F@tp"), Layout("B@tp F"), mesh)

moved = run(paid, ranks=4)
moved

# %% [markdown] minutes=1 core=true
# The picture counts bytes: 96 elements of 8 bytes are 768.
#
# Now the two orders of axes. **Guess:** what does it cost to get from `B@i@k` to `B@k@i`? Both cut the rows in four.

# %% name="exchange"
for step in redistribution(Layout("B@i@k F"), Layout("B@k@i F"), (B, F), {"i": 2, "k": 2}):
    print(step)

# %% [markdown] minutes=1 core=true
# Two of four ranks swap their blocks of 128, so on average a rank sends 64. To gather Y and cut it again would have been
# 384 each. With more axes a bill has several items:

# %% name="two-axes-bill"
for step in redistribution(Layout("B F +row +col"), Layout("B F"), (B, F), {"row": 2, "col": 2}):
    print(step)

# %% [markdown] minutes=1 core=true
# Reduce-scatter, all-reduce of the part, all-gather: the way over two boxes in lesson 01, found by search.

# %% [markdown] minutes=2 core=true
# ## One product, four layouts, four bills
#
# Everybody wants Y whole, `B F`. X and W may lie as we like. Three ways to cut them are above; the fourth cuts both dims of
# both, on a 2 x 2 grid. How that is multiplied is lesson 13, here we only pay for it.

# %% name="grid-of-all"
grid = SCHEMES["2d"]
mesh_picture({"X": grid.X, "W": grid.W, "Y": grid.Y}, {"row": 2, "col": 2})

# %% name="four-ways"
IN_1D = {
    "columns of W": ("B D", "D F@tp", "B F@tp"),
    "rows of X": ("B@tp D", "D F", "B@tp F"),
    "inner dim": ("B D@tp", "D@tp F", "B F +tp"),
}

def in_1d(x_layout, w_layout, y_layout, wish, X, W):
    mesh = Mesh(tp=4)
    y = Layout(x_layout).shard(X, mesh) @ Layout(w_layout).shard(W, mesh)
    return redistribute(y, Layout(y_layout), Layout(wish), mesh)

def in_2d(wish, X, W):
    mesh = Mesh(row=2, col=2)
    y = grid.forward(grid.X.shard(X, mesh), grid.W.shard(W, mesh), mesh)
    return redistribute(y, grid.Y, Layout(wish), mesh)

# %% name="bills"
def bills(B, D, F, wish="B F", wish_on_grid="B F"):
    X, W = torch.randn(B, D, dtype=torch.float64), torch.randn(D, F, dtype=torch.float64)
    runs = {name: run(in_1d, *layouts, wish, X, W, ranks=4) for name, layouts in IN_1D.items()}
    runs["grid"] = run(in_2d, wish_on_grid, X, W, ranks=4)
    if wish == "B F":
        assert all(torch.allclose(y, X @ W) for result in runs.values() for y in result.values)
    return {name: result.trace.bytes_sent(rank=0) // 8 for name, result in runs.items()}

# %% [markdown] core=true
# **Guess:** which way sends the least, and which the most? B = 32, D = 8, F = 16.

# %% name="bills-run"
print(bills(32, 8, 16))

# %% [markdown] minutes=2 core=true
# Four times the same Y, and bills from 384 to 768. The first two gather a Y that is cut. The inner dim must also *add*,
# which costs twice as much. The grid gathers Y, too, and 96 more for blocks of X and W on the way.
#
# So never cut the dim that is summed over? The same three sizes, dealt out differently:

# %% name="turned-guess"
sends_most = predict(
    "B = 8, D = 32, F = 16. Who sends most now?",
    A="the inner dim, and more than before: D is four times as long",
    B="the grid",
    C="the inner dim, as before: each layout has its price",
)

# %% name="bills-turned"
turned = bills(8, 32, 16)
sends_most.reveal(
    turned,
    answer="B",
    A="however long D is, what is sent are terms of Y, and Y has a quarter of its size",
    C="only layouts and shape together have a price: Y was the largest of the three and is now the smallest",
)

# %% [markdown] minutes=2 core=true
# Now Y is the smallest of the three. The inner dim sends only Y, however long D is; the grid sends blocks of
# X and W. The order has turned.
#
# And if the wish is another? Next comes something that works row by row, and each rank is content with some rows of Y. On
# the grid that is `B@row@col F`:

# %% name="grid-rows-picture"
layout_picture(Layout("B@row@col F"), (B, F), {"row": 2, "col": 2}, name="Y")

# %% name="bills-of-rows"
print(bills(32, 8, 16, wish="B@tp F", wish_on_grid="B@row@col F"))

# %% [markdown] minutes=1 core=true
# Nothing, for who had cut the rows from the start. A product has no price: only a product *with the layouts before it and
# the wish behind it* has one. That is why a column-cut layer is followed by a row-cut one in lesson 08, and why all of
# lessons 13 to 15 are about three layouts each.

# %% [markdown] core=true
# Any product, any layouts: choose how X and W lie and how you want Y, and read the cheapest way and its bill.

# %% name="bill-explorer"
from lessons_lib.widgets import layout_bill_explorer

layout_bill_explorer()

# %% [markdown] minutes=2 core=true
# ## The same in production
#
# PyTorch's DTensor has one *placement* per mesh axis: `Replicate()` is a copy, `Shard(0)` a cut of dim 0, `Partial()` a
# partial sum. `redistribute` is a method.

# %% name="placements"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

PLACEMENTS = {"B F": Replicate(), "B@tp F": Shard(0), "B F@tp": Shard(1), "B F +tp": Partial()}
MOVES = [("B F +tp", "B F"), ("B F +tp", "B F@tp"), ("B@tp F", "B F"), ("B F", "B@tp F")]

def block(source):
    return torch.ones(Layout(source).local_shape((B, F), {"tp": 4})) * (1 + dist.get_rank())

def by_torch(source, target):
    mesh = init_device_mesh("cpu", (4,))
    y = DTensor.from_local(block(source), mesh, [PLACEMENTS[source]], run_check=False)
    return y.redistribute(mesh, [PLACEMENTS[target]]).to_local()

def by_lesson(source, target):
    return redistribute(block(source), Layout(source), Layout(target), Mesh(tp=4))

# %% name="placements-compared"
for source, target in MOVES:
    ours, theirs = (run(how, source, target, ranks=4) for how in (by_lesson, by_torch))
    equal = all(torch.equal(*both) for both in zip(ours.values, theirs.values))
    sent = [result.trace.bytes_sent(rank=0) // 4 for result in (ours, theirs)]
    print(f"{source:7} -> {target:7} equal: {equal}   elements sent {sent}")

# %% [markdown] minutes=2 core=true
# Two differences. From one cut to another, DTensor uses an all-to-all on GPUs; on CPUs, as here, it gathers and cuts.
# And placements are one per axis in the order of the mesh, so of `B@i@k` and `B@k@i` they can say only the one that
# has the mesh's own order. Lesson 15 needs both in one layer.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. A number means something only with its layout: a cut, a copy, or a term of a sum.
# 2. Before the sum only what is linear is allowed. A bias, a square or an activation has to wait.
# 3. The order of axes is part of the layout: `B@i@k` is not `B@k@i`, and a mix-up is silent.
# 4. Copy → anything is free, cut → copy is an all-gather, partial → copy costs twice that, partial → cut half of it.
# 5. A product has a price only together with the layouts before it and the one wanted behind it.
#
# **Where next:** lesson 08 builds on `D F@tp` and `D@tp F`; the [README](../README.md) has the map of the lessons.
#
# *Sources:* the notation follows Austin et al. 2025,
# [How to Scale Your Model](https://jax-ml.github.io/scaling-book/sharding/), section "Sharded matrices", and
# the placements are those of [DTensor](https://docs.pytorch.org/docs/stable/distributed.tensor.html).
# Collectives and their costs: lesson 01.
