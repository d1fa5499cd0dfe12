# %% [markdown] minutes=1 core=true
# # Start here
#
# Eight ranks will work for you in the next minute, on this machine, without a GPU.
#
# Run each cell with **Shift+Enter**. Where it says *Guess*, guess first; the saved answers are in the way, so choose
# *Edit > Clear Outputs of All Cells* before you begin.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from lessons_lib import Layout, Mesh, run
from lessons_lib.grading import predict

# %% [markdown] minutes=1 core=true
# ## Eight ranks
#
# A *rank* is one of the workers of a parallel program. All of them run the same function.

# %% name="hello"
def hello():
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"

run(hello, ranks=8)

# %% [markdown] minutes=1 core=true
# One lane per rank, time from left to right, and at its end what the rank returned. (`run` takes the function
# itself: `hello`, not `hello()`.)

# %% [markdown] minutes=1 core=true
# ## What does rank 0 see?
#
# The notebook has an `x`, and it is 10. Four ranks change it: rank r adds r + 1. Click on your guess.

# %% name="change-guess"
x_afterwards = predict(
    "What do the four ranks return, and what is x in the notebook afterwards?",
    A="11, 13, 16, 20: they share x; and the notebook has 20",
    B="11, 12, 13, 14; the notebook has that of rank 0, 11",
    C="11, 12, 13, 14; the notebook still has 10",
)

# %% name="change"
x = torch.tensor([10.0])

def change():
    x.add_(dist.get_rank() + 1)
    return x.item()

values = run(change, ranks=4).values

# %% name="change-seen"
x_afterwards.reveal(
    f"ranks {values}, notebook {x.item()}",
    answer="C",
    A="ranks share no variable, not even here, where they are threads",
    B="rank 0 is a rank like the others; the notebook is no rank at all",
)

# %% [markdown] minutes=1 core=true
# A rank has its own memory: the function and everything it uses travelled to it *by value*.
# On a cluster the ranks are processes on different machines, and it could not be otherwise.
# What one rank knows reaches another only if it is **sent**.

# %% [markdown] minutes=1 core=true
# ## Ranks meet
#
# `all_reduce` adds up a tensor over all ranks. Each rank brings 1000 numbers of 4 bytes.

# %% name="meet-guess"
who_has_it = predict("On which rank is the sum afterwards?", A="rank 0", B="the last rank", C="all four")

# %% name="meet"
def meet():
    x = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x[0].item()

together = run(meet, ranks=4)
together

# %% name="meet-seen"
who_has_it.reveal(
    together.values,
    answer="C",
    A="rank 0 is not the boss of anything: 'all' in all-reduce means that all have the result",
    B="the ranks do not add up one after the other and leave the sum with the last",
)

# %% [markdown] minutes=1 core=true
# 1 + 2 + 3 + 4 = 10, everywhere.
#
# The upright line is the moment at which the lanes meet: who comes early waits (hatched). The table counts what
# every rank *sends*: 6000 bytes, though it brought only 4000. A sum over p ranks costs each of them 2 (p − 1) / p of
# what it brings, 1.5 times for 4; lesson 01 builds the ring that does it.
#
# Now change one number, and nothing else.

# %% name="one-number"
for ranks in (1, 2, 4, 8):
    result = run(meet, ranks=ranks)
    sent = result.trace.bytes_sent(rank=0)
    print(f"ranks={ranks}   sum {result.values[0]:4.0f}   each sends {sent} bytes")

# %% [markdown] minutes=1 core=true
# The same code on 1 rank and on 8. The bytes grow, but not eightfold: they stay below 8000, however many ranks.

# %% [markdown] minutes=1 core=true
# ## Break it
#
# Rank 2 leaves out the `all_reduce`. **Guess:** which rank will complain?

# %% name="broken" tags=["raises-exception"]
def broken():
    x = torch.ones(1000)
    if dist.get_rank() != 2:
        dist.all_reduce(x)

run(broken, ranks=4)

# %% [markdown] minutes=1 core=true
# On a cluster nobody would: three ranks wait, for ten minutes (NCCL) or thirty (gloo), and then a rank that did
# nothing wrong reports a time-out. Here ranks take turns, so it can be *proved* at once that nobody can go on, and
# the report names the rank at fault and the line.
#
# A failed run can be looked at like any other:

# %% name="failed-run"
from lessons_lib.errors import DeadlockError

try:
    run(broken, ranks=4)
except DeadlockError as error:
    failed = error.run

failed

# %% [markdown] minutes=1 core=true
# ## Your turn
#
# Change the two marked lines, so that eight ranks find the *largest* of their numbers. It must print 49.0.

# %% name="your-turn"
def combine():
    x = torch.tensor([float(dist.get_rank() ** 2)])
    dist.all_reduce(x, op=dist.ReduceOp.SUM)  # make it MAX
    return x.item()

print(run(combine, ranks=4).values[0])  # make it 8

# %% [markdown] minutes=1 core=true
# ## A pipeline, with a slider
#
# Four ranks hold a quarter of a model's layers each, and a batch runs through them in pieces, *micro-batches*. Hatched
# is a rank that waits: the *bubble*. Drag the micro-batches from 4 to 12. (Click on the slider, then use the arrow
# keys.)

# %% name="pipeline"
from lessons_lib.widgets import pipeline_explorer

pipeline_explorer("gpipe", "nothing", m=4)

# %% [markdown] core=true
# The bubble shrinks from 43 % to 20 %, and what each rank must keep for its backward grows from 4 micro-batches to 12.
# Lessons 16 to 19 get rid of both.

# %% [markdown] minutes=1 core=true
# ## A GPT, on one rank and on four
#
# This trains a small GPT on Python's own documentation, first on one rank, then with every large matrix cut
# over four ranks (*tensor parallelism*). **Guess:** how far apart are the two loss curves?

# %% name="two-trainings"
from lessons_lib.models.gpt import GPTConfig
from lessons_lib.train import Settings, train

sizes = GPTConfig(L=2, H=4, D=64)
how = dict(steps=40, lr=3e-3, n_sample=0, dtype=torch.float64)
serial = run(train, Settings(sizes, tp=1, **how), ranks=1)
parallel = run(train, Settings(sizes, tp=4, **how), ranks=4)

# %% name="two-curves"
from lessons_lib.views import loss_curves

one, four = serial.values[0].losses, parallel.values[0].losses
loss_curves({"1 rank": one, "4 ranks": four})

# %% [markdown] minutes=1 core=true
# One line. How far apart in numbers, and what did it cost?

# %% name="what-it-cost"
print(f"largest difference {max(abs(a - b) for a, b in zip(one, four)):.0e}")

for name, result in (("1 rank ", serial), ("4 ranks", parallel)):
    n_weights = result.values[0].n_parameters
    sent = result.trace.bytes_sent(rank=0, region="train")
    print(f"{name}   a rank holds {n_weights:7,} weights and sends {sent:11,} bytes")

# %% [markdown] minutes=1 core=true
# The sums were added up in another order, which changes the last digits of a float64, no more. A rank holds more
# than a quarter of the weights, since positions and norms stayed whole. And what travels is not the weights but the
# *activations*, in every layer of every step.
#
# **You can stop here:** that was the whole idea, and the [README](../README.md) has the map. What follows looks at
# the same things slowly.

# %% [markdown] minutes=2 core=true
# ## What is real here, and what is not
#
# | | |
# |---|---|
# | **real** | the arithmetic, the `torch.distributed` calls, who waits for whom |
# | **counted, not moved** | bytes: what a ring of real GPUs would send |
# | **not real** | the speed. Ranks are threads that *take turns*. A lane shows its rank's own time, as if all had run side by side; the clock on the wall shows the sum |
#
# A fixed amount of work is shared out over 1, 2, 4 and 8 ranks.

# %% name="take-turns-guess"
how_soon = predict(
    "How much sooner are 8 ranks done, on this machine, than 1?",
    A="8 times sooner",
    B="as many times sooner as the machine has cores",
    C="no sooner",
)

# %% name="take-turns"
def share():
    x = torch.ones(256, 256)
    for _ in range(240 // dist.get_world_size()):
        x = x @ x / 256

run(share, ranks=1)  # warms torch up
for ranks in (1, 2, 4, 8):
    runs = [run(share, ranks=ranks) for _ in range(3)]
    own = min(result.trace.timeline.makespan for result in runs) * 1000
    wall = min(result.seconds for result in runs) * 1000
    print(f"ranks={ranks}   a rank works {own:4.0f} ms   here it takes {wall:4.0f} ms")

# %% name="take-turns-seen"
how_soon.reveal(
    f"{wall:.0f} ms with 8 ranks",
    answer="C",
    A="8 ranks are 8 times faster on 8 GPUs; here they take turns on one",
    B="one rank runs at a time, so that their order, and every hang, is the same each time",
)

# %% [markdown] minutes=1 core=true
# Eight ranks here are eight times the *ranks*, not eight times the *machine*. What a
# cluster would need stands under *a rank works*.

# %% [markdown] minutes=4 core=true
# ## The relay
#
# A number goes from rank to rank, and each adds its own. `send` and `recv` name the other side.

# %% name="relay"
def relay():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    total = torch.zeros(1)
    if rank > 0:
        dist.recv(total, src=rank - 1)
    total += rank
    if rank < last:
        dist.send(total, dst=rank + 1)
    return total.item()

passed = run(relay, ranks=8)
passed

# %% [markdown] minutes=2 core=true
# An arrow is a message. Seven of them, one number each: rank 7 could not add before all the others had.
#
# Under every picture lies the *trace*, a list of what each rank did, with the line that did it:

# %% name="trace"
for event in passed.trace.events[:4]:
    what = f"{event.n_elements} x {event.dtype}"
    print(f"rank {event.rank} {event.kind} {what}, rank {event.peer}, line {event.where.line}")

print("bytes:", [passed.trace.bytes_sent(rank) for rank in range(8)])

# %% [markdown] minutes=2 core=true
# Only what is sent is counted, so that nothing is counted twice.
#
# Try it: let rank 0, too, begin with a `recv`, from rank 7. Who waits for whom?

# %% [markdown] minutes=3 core=true
# ## Ranks on a grid
#
# Large systems arrange ranks on a grid with named axes and talk along one axis at a time.

# %% name="grid"
def grid():
    mesh = Mesh(row=2, col=3)
    mine = torch.full((6,), float(mesh.rank))
    return mesh["col"].all_reduce(mine)[0].item()

run(grid, ranks=6)

# %% [markdown] minutes=1 core=true
# `mesh["col"]` holds the ranks that differ only in `col`: 0, 1, 2 make one group, and 3, 4, 5 the other. Its
# `all_reduce` *returns* the sum; `dist.all_reduce` overwrites its argument.
#
# Which rank *owns* what is written as a layout. Take a matrix W with dims D (4 rows) and F (6 columns): in
# `D F@col` D is whole and F is cut over the axis `col`.

# %% name="layout"
from lessons_lib.views import layout_picture

layout_picture(Layout("D F@col"), (4, 6), {"row": 2, "col": 3}, name="W")

# %% [markdown] minutes=1 core=true
# The layout does not name `row`, so over `row` W is a copy: two ranks hold each block.

# %% [markdown] minutes=2 core=true
# ## The same in production
#
# None of this was a toy interface: the functions are plain `torch.distributed`, and `Mesh` lies on PyTorch's own
# `DeviceMesh`, with the same groups and the same sums.

# %% name="production"
from torch.distributed.device_mesh import init_device_mesh

def with_torch():
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("row", "col"))
    mine = torch.full((6,), float(dist.get_rank()))
    dist.all_reduce(mine, group=mesh.get_group("col"))
    return mine[0].item()

print("torch:", run(with_torch, ranks=6).values)

# %% [markdown] minutes=2 core=true
# ## To remember
#
# 1. All ranks run the same function. They share nothing; what another rank needs is sent.
# 2. After an all-reduce *every* rank has the sum. No rank is special.
# 3. Every rank of a group must call the same collectives in the same order. If one does not, the others wait.
# 4. The trace counts what each rank sends, and says where in the code.
# 5. Here ranks take turns: bytes, order and numbers are those of a cluster, the speed is not.
#
# **Where next:** lesson 01, [Collectives](01_collectives.ipynb). Or see that the library tells the truth:
# `python -m lessons_lib.train --check` compares every gradient with the serial model's.
#
# *Sources:* the calls are those of [`torch.distributed`](https://docs.pytorch.org/docs/stable/distributed.html);
# tensor parallelism as in Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053).
