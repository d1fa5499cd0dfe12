# %% [markdown] minutes=1 core=true
# # Start here
#
# Eight ranks will work for you in the next minute, on this machine, without a GPU.
# Run each cell with **Shift+Enter** and look at what comes out before you read on.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from lessons_lib import Layout, Mesh, run

# %% [markdown] minutes=1 core=true
# ## Eight ranks
#
# A *rank* is one of the workers of a parallel program. All of them run the same function.

# %% name="hello"
def hello():
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"

run(hello, ranks=8)

# %% [markdown] minutes=1 core=true
# One lane per rank, and at its end what the rank returned.

# %% [markdown] minutes=2 core=true
# ## What does rank 0 see?
#
# The notebook has an `x`. Four ranks each add their own number to it: rank 0 adds 1, rank 3 adds 4.
#
# **Guess before you run:** what does each rank return, and what is `x` in the notebook afterwards?
#
# * A: they share `x`, so the last rank sees 10 + 1 + 2 + 3 + 4 = 20, and so does the notebook
# * B: each sees its own sum, and the notebook sees that of rank 0
# * C: each sees its own sum, and the notebook still has 10

# %% name="change"
x = torch.tensor([10.0])

def change():
    x.add_(dist.get_rank() + 1)
    return x.item()

print("ranks:", run(change, ranks=4).values, "  notebook:", x.item())

# %% [markdown] minutes=1 core=true
# C. A rank has its own memory: the function and everything it uses travelled to it *by value*.
# On a cluster the ranks are processes on different machines, and it could not be otherwise.
# What one rank knows reaches another only if it is **sent**.

# %% [markdown] minutes=2 core=true
# ## Ranks meet
#
# `all_reduce` adds up a tensor over all ranks. Each rank brings 1000 numbers of 4 bytes.
#
# **Guess:** on which rank is the sum afterwards?

# %% name="meet"
def meet():
    x = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x[0].item()

run(meet, ranks=4)

# %% [markdown] minutes=1 core=true
# On all four: 1 + 2 + 3 + 4 = 10. Rank 0 is not the boss of anything.
#
# The upright line is the moment at which the lanes meet: who comes early waits (hatched).
# The table counts what every rank *sends*. It brought 4000 bytes, and sent 6000: why, is lesson 01.
#
# Now change one number, and nothing else.

# %% name="one-number"
for ranks in (1, 2, 4, 8):
    result = run(meet, ranks=ranks)
    print(f"ranks={ranks}   sum {result.values[0]:4.0f}   each sends {result.trace.bytes_sent(rank=0)} bytes")

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
# Nobody complains: three ranks wait for ever. On a cluster that is half an hour of silence, and then a message
# about a time-out on a rank that did nothing wrong. Here ranks take turns, so it can be *proved* at once that
# nobody can go on, and the report names the rank at fault and the line.
#
# A failed run can be looked at like any other. Python keeps the last error:

# %% name="failed-run"
import sys

sys.last_value.run

# %% [markdown] minutes=1 core=true
# ## Your turn
#
# Change the two marked lines, so that eight ranks find out the *largest* of their numbers. It must print 49.0.

# %% name="your-turn"
RANKS = 4                        # make it 8
OPERATION = dist.ReduceOp.SUM    # make it dist.ReduceOp.MAX

def combine():
    x = torch.tensor([float(dist.get_rank() ** 2)])
    dist.all_reduce(x, op=OPERATION)
    return x.item()

print(run(combine, ranks=RANKS).values[0])

# %% [markdown] minutes=1 core=true
# ## A GPT, on one rank and on four
#
# This trains a small GPT on Python's own documentation, first on one rank, then with every large matrix cut
# over four ranks (*tensor parallelism*, lesson 08). **Guess:** how far apart are the two loss curves?

# %% name="two-trainings"
from lessons_lib.models.gpt import GPTConfig
from lessons_lib.train import Settings, train

settings = dict(config=GPTConfig(L=2, H=4, D=64), steps=40, lr=3e-3, n_sample=0, dtype=torch.float64)
serial = run(train, Settings(tp=1, **settings), ranks=1)
parallel = run(train, Settings(tp=4, **settings), ranks=4)

# %% name="two-curves"
import matplotlib.pyplot as plt

one, four = serial.values[0].losses, parallel.values[0].losses
figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
axes.plot(range(1, 41), one, color="#0072B2", linewidth=6, alpha=0.35, label="1 rank")
axes.plot(range(1, 41), four, color="#D55E00", linewidth=1.5, label="4 ranks")
axes.set(title="Training loss on 1 rank and on 4", xlabel="step", ylabel="loss (nats per byte)")
axes.legend(frameon=False)
plt.show()
print(f"largest difference {max(abs(a - b) for a, b in zip(one, four, strict=True)):.0e}")

# %% [markdown] minutes=1 core=true
# One line. The sums were added up in another order, and that changes the last digits of a float64, no more.
#
# And each rank had fewer weights, and sent this much to the others:

# %% name="what-it-cost"
for name, result in (("1 rank ", serial), ("4 ranks", parallel)):
    outcome = result.values[0]
    sent = result.trace.bytes_sent(rank=0, region="train")
    print(f"{name}   a rank holds {outcome.n_parameters:7,} weights and sends {sent:11,} bytes")

# %% [markdown] minutes=2 core=true
# ## What is real here, and what is not
#
# | | |
# |---|---|
# | **real** | the arithmetic, the `torch.distributed` calls, who waits for whom, every byte in every table |
# | **counted, not moved** | bytes: what a ring of real GPUs would send (lesson 01 builds that ring) |
# | **not real** | the speed. Ranks are threads that *take turns*. A lane shows its rank's own time, as if all had run side by side; the clock on the wall shows the sum |
#
# **Guess:** a fixed amount of work, shared out over 8 ranks. How much sooner is it done here?

# %% name="take-turns"
def share():
    x = torch.ones(256, 256)
    for _ in range(240 // dist.get_world_size()):
        x = x @ x / 256

for ranks in (1, 2, 4, 8):
    result = run(share, ranks=ranks)
    own, wall = result.trace.timeline.makespan, result.seconds
    print(f"ranks={ranks}   a rank works {own * 1000:4.0f} ms   it takes {wall * 1000:4.0f} ms here")

# %% [markdown] minutes=1 core=true
# Not sooner at all. Eight ranks here are eight times the *ranks*, not eight times the *machine*. What a cluster
# would need is in the first column.

# %% [markdown] minutes=6 core=true
# ## The relay, slowly
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
# An arrow is a message. Seven of them, one number each: rank 7 could not start before all the others were done.
#
# Under every picture lies the *trace*, a list of what each rank did, with the line that did it:

# %% name="trace"
for event in passed.trace.events[:4]:
    what = f"{event.n_elements} x {event.dtype}"
    print(f"rank {event.rank}  {event.kind}  {what}  peer {event.peer}  line {event.where.line}")

print("bytes:", [passed.trace.bytes_sent(rank) for rank in range(8)])

# %% [markdown] minutes=2 core=true
# Only what is sent is counted, so that nothing is counted twice.
#
# Try it: let rank 0 receive from rank 7, too, before it adds. Who waits for whom?

# %% [markdown] minutes=4 core=true
# ## Ranks on a grid
#
# Large systems arrange ranks on a grid with named axes and talk along one axis at a time.

# %% name="grid"
def grid():
    mesh = Mesh(row=2, col=3)
    mine = torch.tensor([float(mesh.rank)])
    return mesh["col"].all_reduce(mine).item()

run(grid, ranks=6)

# %% [markdown] minutes=1 core=true
# `mesh["col"]` holds the ranks that differ only in `col`: 0, 1, 2 make one group, and 3, 4, 5 the other.
#
# Which rank *owns* what is written as a layout: the dims of a tensor, each with the axis it is cut over.

# %% name="layout"
from lessons_lib.views import layout_picture

layout_picture(Layout("D F@col"), (4, 6), {"row": 2, "col": 3}, name="W")

# %% [markdown] minutes=1 core=true
# W is cut over `col` by its columns. Over `row` it is a copy: two ranks hold each block.

# %% [markdown] minutes=3 core=true
# ## The same in production
#
# Nothing above was a toy interface: the functions are plain `torch.distributed`. `Mesh` lies on PyTorch's own
# `DeviceMesh`, and gives the same groups.

# %% name="production"
from torch.distributed.device_mesh import init_device_mesh

def with_torch():
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("row", "col"))
    mine = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(mine, group=mesh.get_group("col"))
    return mine.item()

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
# **Where next:** the [README](../README.md) has the map of the lessons.
#
# *Sources:* the calls are those of [`torch.distributed`](https://docs.pytorch.org/docs/stable/distributed.html);
# tensor parallelism as in Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053).
