# %% [markdown] minutes=1 core=true
# # Collectives
#
# Eight GPUs each hold 1 GB of gradients, and each needs the sum of all eight. **How many GB must each
# *send*?**

# %% tags=["setup"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from lessons_lib import Layout, Mesh, region, run
from lessons_lib.grading import predict, recap
from lessons_lib.mesh import Group
from lessons_lib.rings import ring_all_reduce
from lessons_lib.views import layout_picture

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about lesson 00.

# %% name="recap"
recap("01")

# %% [markdown] minutes=1 core=true
# ## How much must each send?

# %% name="how-much-guess"
gigabytes = predict(
    "Eight GPUs hold 1 GB each and want the sum. What must each send?",
    A="1 GB, its own gradients, once",
    B="1.75 GB",
    C="7 GB, its own gradients to each of the seven others",
    D="one of them sends 7 GB and the others 1, because somebody has to do the adding",
)

# %% [markdown] core=true
# Here each rank has 1 MB, which is 250 000 numbers of 4 bytes.

# %% name="how-much"
def add_up():
    dist.all_reduce(torch.ones(250_000))

for ranks in (2, 4, 8):
    sent = run(add_up, ranks=ranks).trace.bytes_sent(rank=0)
    print(f"{ranks} ranks: each sends {sent / 1e6:.2f} MB")

# %% name="how-much-seen"
gigabytes.reveal(
    f"{sent / 1e6} MB of each 1 MB",
    answer="B",
    A="what each sends once is somebody's term, not yet the sum; the sum has to travel, too",
    C="an all-reduce does not cost p times the tensor: terms are added up on the way",
    D="nobody has to do all the adding: each rank can add up its share",
)

# %% [markdown] minutes=1 core=true
# Four times as many ranks send not even twice as much each. This lesson builds the program behind these
# numbers, out of `send` and `recv`.

# %% [markdown] minutes=1 core=true
# ## Copy, cut, partial sum
#
# A tensor on several ranks is in one of three states. A **copy**: every rank has all of it.

# %% name="a-copy"
layout_picture(Layout("D"), (8,), {"dp": 4}, name="G")

# %% [markdown] minutes=1 core=true
# **Cut**: every rank has one piece. `D@dp` says that dim D is cut over the mesh axis dp.

# %% name="a-cut"
layout_picture(Layout("D@dp"), (8,), {"dp": 4}, name="G")

# %% [markdown] minutes=1 core=true
# And a **partial sum**: every rank has a term of the right shape, and the truth is the sum of all terms,
# which nobody has added up yet. Gradients are born that way: each rank saw other data.

# %% name="a-partial-sum"
layout_picture(Layout("D +dp"), (8,), {"dp": 4}, name="G")

# %% [markdown] minutes=1 core=true
# A collective changes one state into another:
#
# | collective | from | to | |
# |---|---|---|---|
# | all-reduce | partial sum | copy | `D +dp` → `D` |
# | reduce-scatter | partial sum | cut | `D +dp` → `D@dp` |
# | all-gather | cut | copy | `D@dp` → `D` |
#
# Watch the numbers: rank 0 brings 1 2 3 ... 8, rank 1 brings 10 20 ... 80, rank 2 hundreds, rank 3 thousands.

# %% name="changes"
def changes():
    dp = Mesh(dp=4)["dp"]
    term = torch.arange(1, 9) * 10**dp.rank
    copy = dp.all_reduce(term)
    cut = dp.reduce_scatter(term, dim=0)
    again = dp.all_gather(cut, dim=0)
    return copy, cut, torch.equal(again, copy)

# %% [markdown] core=true
# **Guess:** on which rank is the sum after each of the three?

# %% name="three-changes"
for rank, (copy, cut, equal) in enumerate(run(changes, ranks=4).values):
    print(f"rank {rank}  copy {copy.tolist()}  cut {cut.tolist()}  {equal}")

# %% [markdown] minutes=1 core=true
# A copy is on every rank, a cut lies on all of them together. Rank 0 is not special in either.
#
# The last column says that reduce-scatter, then all-gather, *is* an all-reduce: partial sum → cut → copy.
# The way from a copy to a cut is missing in the table, because there is nothing to send: each rank keeps
# its piece.

# %% [markdown] minutes=2 core=true
# ## All through one rank
#
# The obvious way is a star: all send to rank 0, which adds up and sends the sum back.

# %% name="star"
def star():
    rank, x = dist.get_rank(), torch.ones(250_000)
    if rank > 0:
        dist.send(x, dst=0)
        dist.recv(x, src=0)
        return x[0].item()
    for other in range(1, 8):
        term = torch.empty_like(x)
        dist.recv(term, src=other)
        x += term
    for other in range(1, 8):
        dist.send(x, dst=other)
    return x[0].item()

# %% [markdown] core=true
# **Guess:** how much does rank 0 send, and how much do all eight together?

# %% name="star-picture"
by_star = run(star, ranks=8)
by_star

# %% name="star-bytes"
by_all_reduce = run(lambda: dist.all_reduce(torch.ones(250_000)), ranks=8)
for name, result in (("star      ", by_star), ("all_reduce", by_all_reduce)):
    sent = [result.trace.bytes_sent(rank) / 1e6 for rank in range(8)]
    print(f"{name} MB sent {sent}   in all {sum(sent)}")

# %% [markdown] minutes=1 core=true
# In all, both send the same. The star is not wasteful, it is *unfair*: seven ranks look on while rank 0
# sends 7 MB. Shared out evenly, the same 14 MB are 1.75 MB each. So the question is how to share them out.

# %% [markdown] minutes=2 core=true
# ## The ring, first half
#
# Each rank cuts its tensor into chunks, one for each rank, here A, B, C, D. In a *round* it sends one chunk
# to its right neighbour, and adds what comes from the left to its own. `shift` sends and receives at once,
# in a `Group`; `dist.group.WORLD` is all ranks.
#
# Rank 0 brings ones, rank 1 tens, rank 2 hundreds, rank 3 thousands, so the digits of a chunk say whose
# terms are in it.

# %% name="first-half"
def first_half(n_rounds):
    ring = Group(dist.group.WORLD)
    p, r = ring.size, ring.rank
    chunks = list(torch.full((p,), 10**r).chunk(p))
    for step in range(n_rounds):
        outgoing, incoming = (r - 1 - step) % p, (r - 2 - step) % p
        arrived = ring.shift(chunks[outgoing], by=1)
        chunks[incoming] = chunks[incoming] + arrived
    return [int(chunk) for chunk in chunks]

# %% [markdown] core=true
# **Guess:** after how many rounds is some chunk complete, and where?

# %% name="first-half-rounds"
held = [run(first_half, n, ranks=4).values for n in range(4)]
print("      start", *(f"after round {n}" for n in (1, 2, 3)), sep=" " * 8)
print("rank", *[" A    B    C    D  "] * 4, sep="  ")
for rank in range(4):
    row = (" ".join(f"{chunk:04}" for chunk in values[rank]) for values in held)
    print(f"{rank:4}", *row, sep="  ")

# %% [markdown] minutes=1 core=true
# After three rounds each rank has *one* complete chunk: rank 0 has A, rank 1 has B. A partial sum has
# become a cut: that was a **reduce-scatter**. Follow chunk A: it sets out on rank 1, and ends on rank 0
# with all four digits.

# %% name="first-half-picture"
run(first_half, 3, ranks=4)

# %% [markdown] minutes=1 core=true
# Every arrow goes to the next rank, from the last to rank 0, and in every round every rank sends. A chunk
# here is one number of 8 bytes, so 24 bytes are three chunks of the four: (p−1)/p of the tensor.

# %% [markdown] minutes=2 core=true
# ## The ring, second half
#
# Now each rank has one complete chunk, and wants the other three. The same ring once more, but what arrives
# is *kept*, not added.

# %% name="second-half"
def second_half(n_rounds):
    ring = Group(dist.group.WORLD)
    p, r = ring.size, ring.rank
    chunks = list(torch.zeros(p, dtype=torch.long).chunk(p))
    chunks[r] = torch.tensor([1111])
    for step in range(n_rounds):
        outgoing, incoming = (r - step) % p, (r - 1 - step) % p
        chunks[incoming] = ring.shift(chunks[outgoing], by=1)
    return [int(chunk) for chunk in chunks]

# %% [markdown] core=true
# **Guess:** which rank is the first to have the whole sum?

# %% name="second-half-rounds"
held = [run(second_half, n, ranks=4).values for n in range(4)]
print("      start", *(f"after round {n}" for n in (1, 2, 3)), sep=" " * 8)
print("rank", *[" A    B    C    D  "] * 4, sep="  ")
for rank in range(4):
    row = (" ".join(f"{chunk or '-':>4}" for chunk in values[rank]) for values in held)
    print(f"{rank:4}", *row, sep="  ")

# %% [markdown] minutes=1 core=true
# None is: all four have it in the same round. A cut has become a copy: that was an **all-gather**, and
# again each rank sent three chunks of four.

# %% [markdown] minutes=2 core=true
# ## Both halves
#
# One half after the other is an all-reduce: 2(p−1) rounds, and each rank sends 2(p−1)/p of the tensor.
# [`lessons_lib/rings.py`](../lessons_lib/rings.py) has the two loops you have just run, for any size.
#
# **Guess:** ten numbers on four ranks. What happens to the two that are left over?

# %% name="both-halves"
def ten_numbers():
    return ring_all_reduce(torch.ones(10), Group(dist.group.WORLD))

both = run(ten_numbers, ranks=4)
both

# %% name="both-halves-bytes"
elements = [both.trace.bytes_sent(rank) // 4 for rank in range(4)]
print("elements sent", elements, "  in all", sum(elements))
print("rank 3 has", both.values[3].tolist())

# %% [markdown] minutes=1 core=true
# The chunks have 3, 3, 2 and 2 numbers, as `torch.tensor_split` cuts. Nothing is padded, so ranks send one
# number more or less, and together 2(p−1)n = 60. Six rounds, so each rank sends six times.
#
# Step through it: round by round, with any number of ranks. **Which chunk is the first to be complete, and where?**
# Then choose the star, and see who is idle. (What you see was recorded from the functions of `rings.py`.)

# %% name="stepper"
from lessons_lib.widgets import collective_stepper

collective_stepper("ring all-reduce", ranks=4, step=2)

# %% [markdown] minutes=1 core=true
# ## What flattens, and what does not
#
# The same measurement for 2 to 16 ranks, with the bytes in units of the tensor, n.

# %% name="bytes-and-rounds"
def reduce_8000():
    ring_all_reduce(torch.ones(8000), Group(dist.group.WORLD))

sizes, tensors_sent, rounds = range(2, 17), {}, {}
for p in sizes:
    trace = run(reduce_8000, ranks=p).trace
    tensors_sent[p] = trace.bytes_sent(rank=0) / 32_000
    rounds[p] = sum(event.kind == "send" for event in trace.events) // p

# %% [markdown] core=true
# **Guess:** from 2 ranks to 8, what becomes of the bytes that each sends? And of the rounds?

# %% name="table"
for p in (2, 4, 8):
    print(f"{p} ranks: each sends {tensors_sent[p]:.2f} n, in {rounds[p]:2} rounds")

# %% name="curve"
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(sizes, [tensors_sent[p] for p in sizes], "o-", color="#613d99")
left.axhline(2, color="#57606a", linestyle="--")
left.set(title="Sent by each rank, in tensors n", xlabel="ranks p", ylim=(0, 2.2))
right.plot(sizes, [rounds[p] for p in sizes], "o-", color="#613d99")
right.set(title="Rounds", xlabel="ranks p", ylim=(0, 32))
plt.show()

# %% [markdown] minutes=2 core=true
# The bytes never reach 2 n. That is why a thousand GPUs can share one gradient. It is also the least
# possible, as long as the ranks do the adding.
#
# The rounds grow with every rank, and their messages shrink. A message costs time even when it is tiny:
# this *latency* is what large groups pay.

# %% [markdown] minutes=2 core=true
# ## Seconds: latency and bandwidth
#
# A wire is two numbers: a message of n bytes takes *latency* + n / *bandwidth*. Between two H100s in one box:

# %% name="a-wire"
from lessons_lib.machines import machine

wire = machine("8xH100").in_node
for n_bytes in (4, 10**6, 10**9):
    print(f"{n_bytes:13,} bytes: {wire.message_s(n_bytes) * 1e6:7.1f} µs")

# %% [markdown] core=true
# With `machine=` the ranks keep the time of that machine, not of yours: what they send costs what its wires
# cost. (The bandwidth is from the data sheet, the 3 µs are assumed.) A third number, how fast it computes,
# comes in lesson 03.
#
# Eight ranks all-reduce one number, then a million.

# %% name="time-guess"
how_long = predict(
    "How many times longer do the million take?",
    A="a million times",
    B="4 times, as a single message would",
    C="about 1.4 times",
)

# %% name="time-of-sizes"
def all_reduce_of(n):
    dist.all_reduce(torch.ones(n))

time_us = {}
for n in (1, 1000, 10**6, 10**7):
    timeline = run(all_reduce_of, n, ranks=8, machine="8xH100").trace.timeline
    time_us[n] = timeline.makespan * 1e6
    print(f"{n:10,} numbers: {time_us[n]:5.1f} µs")

# %% name="time-seen"
how_long.reveal(
    time_us[10**6] / time_us[1],
    answer="C",
    A="bytes are not all that costs time: a message takes its latency, however small it is",
    B="a collective is many rounds, and each of them waits for its latency",
)

# %% [markdown] minutes=2 core=true
# Fourteen rounds of 3 µs are 42 µs, whatever is sent; the million adds 16. The formula has one term for each of
# the two curves above, rounds times latency and bytes over bandwidth:

# %% name="two-terms"
latency_us = 14 * wire.latency_s * 1e6
for n, measured_us in time_us.items():
    bytes_us = 1.75 * 4 * n / wire.bandwidth_bytes_per_s * 1e6
    print(f"{n:10,} numbers: {latency_us:.0f} + {bytes_us:5.1f} = {latency_us + bytes_us:5.1f} µs, measured {measured_us:5.1f}")

# %% [markdown] minutes=2 core=true
# So many small all-reduces are a bad idea. **Guess:** a hundred tensors of a thousand numbers each: how much sooner
# are they summed as one tensor?

# %% name="hundred-or-one"
def hundred():
    for _ in range(100):
        dist.all_reduce(torch.ones(1000))

apart = run(hundred, ranks=8, machine="8xH100").trace
at_once = run(all_reduce_of, 100_000, ranks=8, machine="8xH100").trace
for name, trace in (("apart", apart), ("at once", at_once)):
    sent, took = trace.bytes_sent(rank=0), trace.timeline.makespan * 1e6
    print(f"{name:8} {sent:,} bytes in {took:6.1f} µs")

# %% [markdown] core=true
# The same bytes, ninety-six times sooner. Real frameworks collect gradients in *buckets* before they send them; lesson
# 04 builds that.

# %% [markdown] minutes=1 core=true
# ## A collective computes
#
# What if a collective only *moved* data? Then all ranks would gather all tensors and add them up at home.

# %% name="only-moving-guess"
by_gathering = predict(
    "What would each of eight ranks send, of 1 MB?", A="1.75 MB, as before", B="7 MB", C="0.875 MB"
)

# %% name="only-moving"
def gather_and_add():
    x = torch.ones(250_000)
    everything = [torch.empty_like(x) for _ in range(8)]
    dist.all_gather(everything, x)
    return sum(everything)

trace = run(gather_and_add, ranks=8).trace
by_gathering.reveal(
    f"{trace.bytes_sent(rank=0) / 1e6} MB",
    answer="B",
    A="a collective does not only move data: an all-reduce adds up on the way, and one sum travels for many terms",
    C="that is an all-gather of eighths; here what is gathered are eight whole tensors",
)

# %% [markdown] minutes=1 core=true
# Four times an all-reduce. The ring is cheap *because* it adds on the way:
# many terms travel as one sum.
#
# What computes also rounds. Four ranks bring a hundred million, 1, minus a hundred million, and 1, four
# times over. **Guess:** the sum is 2. What comes out?

# %% name="rounding"
def rounding():
    term = (1e8, 1.0, -1e8, 1.0)[dist.get_rank()]
    return ring_all_reduce(torch.full((4,), term), Group(dist.group.WORLD)).tolist()

print(run(rounding, ranks=4).values)

# %% [markdown] minutes=1 core=true
# Each chunk sets out on another rank, so each is added up in another order, and in float32 a 1 is lost
# beside a hundred million. All ranks make **the same** mistake: a chunk is added up once, then copied. With
# another number of ranks the last digits of a sum change, and that is no bug.

# %% [markdown] minutes=1 core=true
# ## Break it
#
# One round by hand. Even ranks send first, odd ranks receive first.

# %% name="one-round"
def one_round():
    r, p = dist.get_rank(), dist.get_world_size()
    mine, arrived = torch.tensor([r]), torch.tensor([-1])
    if r % 2 == 0:
        dist.send(mine, dst=(r + 1) % p)
        dist.recv(arrived, src=(r - 1) % p)
    else:
        dist.recv(arrived, src=(r - 1) % p)
        dist.send(mine, dst=(r + 1) % p)
    return arrived.item()

# %% name="one-round-picture"
run(one_round, ranks=4)

# %% [markdown] minutes=1 core=true
# Why so complicated? Swap the two lines of the odd ranks, so that all send first. **Guess:** who waits for
# whom?

# %% name="all-send-first" tags=["raises-exception"]
def all_send_first():
    r, p = dist.get_rank(), dist.get_world_size()
    mine, arrived = torch.tensor([r]), torch.tensor([-1])
    dist.send(mine, dst=(r + 1) % p)
    dist.recv(arrived, src=(r - 1) % p)
    return arrived.item()

run(all_send_first, ranks=4)

# %% [markdown] minutes=1 core=true
# A `send` is done when it is received, and nobody gets as far as receiving. MPI and NCCL may store a small
# message on the way, so that it slips through; then the model grows, and the same program hangs.
#
# Two ways out: some ranks receive first, as above, or each does both at once, as `shift` and the rings do.
# How, is lesson 02.

# %% [markdown] minutes=2 more=true
# ## One to all: chain and tree
#
# Rank 0 has new weights, and all eight ranks need them: a **broadcast**. A chain hands them on from
# neighbour to neighbour. In a tree, all that have them send them on at the same time.

# %% name="chain-and-tree" more=true
from lessons_lib.rings import chain_broadcast, tree_broadcast

def broadcast(how):
    weights = torch.full((1000,), 7.0 if dist.get_rank() == 0 else 0.0)
    return how(weights, Group(dist.group.WORLD), root=0)[0].item()

def chain():
    return broadcast(chain_broadcast)

def tree():
    return broadcast(tree_broadcast)

# %% [markdown] more=true
# **Guess:** which of the two sends less?

# %% name="chain-and-tree-bytes" more=true
by_chain, by_tree = run(chain, ranks=8), run(tree, ranks=8)
for result in (by_chain, by_tree):
    sent = [result.trace.bytes_sent(rank) // 4000 for rank in range(8)]
    print(f"{result.name:5} sends {sent} tensors, in all {sum(sent)}")

# %% [markdown] minutes=1 more=true
# Neither: seven ranks need the tensor, so it travels seven times. What differs is the order.

# %% name="chain" more=true
by_chain

# %% name="tree" more=true
by_tree

# %% [markdown] minutes=3 more=true
# The chain takes seven rounds, the tree three: 1, 2, 4, 8 ranks have it. For a small tensor, where only
# rounds count, the tree wins.
#
# For a large one look at rank 0. In the tree it sends the tensor three times, in the chain once. And a
# chain need not wait for the whole tensor: it hands on the first piece while the second arrives. Its rounds
# then overlap, and the bytes stay the same. So the trace counts a broadcast as a chain: one tensor for each
# rank but the last.
#
# A reduce is either of them backwards: `chain_reduce`, `tree_reduce`.

# %% [markdown] minutes=2 core=true
# ## Groups of a mesh
#
# Eight GPUs in two boxes of four: `Mesh(row=2, col=4)`, a box is a row. Collectives run along one axis at a
# time.

# %% name="groups"
def groups():
    mesh = Mesh(row=2, col=4)
    me = torch.tensor([mesh.rank])
    return [mesh[axis].all_gather(me, dim=0).tolist() for axis in ("row", "col")]

# %% name="groups-guess"
whose_row = predict('Which ranks does mesh["row"] hold, seen from rank 5?', A="4, 5, 6, 7: its row", B="1 and 5")

# %% name="groups-of-all"
for rank, (row, col) in enumerate(run(groups, ranks=8).values):
    print(f'rank {rank}   mesh["row"] {row}   mesh["col"] {col}')

# %% name="groups-seen"
whose_row.reveal(
    "see rank 5 above", answer="B", A="the axis is the coordinate that changes, not the one that stays"
)

# %% [markdown] minutes=1 core=true
# `mesh["row"]` holds the ranks that differ *in the coordinate* row, and in nothing else. Along a row of
# the grid runs `mesh["col"]`.
#
# A `root` counts within the group: here `root=1` is rank 1 for some, and rank 5 for others.

# %% name="root"
def from_the_second():
    mesh = Mesh(row=2, col=4)
    return mesh["col"].broadcast(torch.tensor([mesh.rank]), root=1).item()

print(run(from_the_second, ranks=8).values)

# %% [markdown] minutes=1 core=true
# (`dist.broadcast(x, src=5, group=...)` counts `src` over all ranks. That is why we call ours `root`.)
#
# Now the gradients again. Between boxes the wire is slow. First a reduce-scatter inside each box:

# %% name="half-way"
layout_picture(Layout("D@col +row"), (8,), {"row": 2, "col": 4}, name="G")

# %% [markdown] minutes=1 core=true
# Each rank has a quarter, and it is still a partial sum over the two boxes. All-reduce that quarter over
# `row`, and all-gather inside the box: `D +row +col` → `D@col +row` → `D@col` → `D`.

# %% name="by-axes"
def by_axes():
    mesh = Mesh(row=2, col=4)
    x = torch.full((250_000,), float(mesh.rank))
    quarter = mesh["col"].reduce_scatter(x, dim=0)
    quarter = mesh["row"].all_reduce(quarter)
    return mesh["col"].all_gather(quarter, dim=0)[0].item()

# %% [markdown] core=true
# **Guess:** does each rank send more than the 1.75 MB of one large ring?

# %% name="by-axes-picture"
run(by_axes, ranks=8)

# %% [markdown] minutes=3 core=true
# Exactly as much. But only 0.25 MB of it crosses between the boxes: the collective over `row` works on a
# quarter. **Guess:** how much sooner is it done?

# %% name="two-boxes"
def one_ring():
    dist.all_reduce(torch.ones(250_000))

for how in (one_ring, by_axes):
    timeline = run(how, ranks=8, machine="2x4xH100").trace.timeline
    print(f"{how.__name__:8} {timeline.makespan * 1e6:5.1f} µs")

# %% [markdown] minutes=1 core=true
# One large ring goes at the pace of its slowest wire, in every round. By axes, the slow wire is used for two rounds
# of the eight.
#
# This is how the whole course goes on: a layout for every tensor, an axis for every kind of parallelism,
# and a collective where a layout must change.

# %% [markdown] minutes=1 core=true
# ## The same in production
#
# The ring from send and receive, and PyTorch's own call, on the same ranks:

# %% name="production"
def both_ways():
    x = torch.arange(12.0) * (dist.get_rank() + 1)
    with region("ring"):
        by_ring = ring_all_reduce(x, Group(dist.group.WORLD))
    with region("torch"):
        by_torch = x.clone()
        dist.all_reduce(by_torch)
    return torch.equal(by_ring, by_torch)

# %% name="production-bytes"
compared = run(both_ways, ranks=4)
sent = [compared.trace.bytes_sent(0, name) for name in ("ring", "torch")]
print("equal on every rank:", compared.values, "  bytes sent:", sent)

# %% [markdown] core=true
# The ring did send these bytes. For an `all_reduce` the trace counts what that ring would send. On a cluster NCCL
# chooses: a ring for large tensors, a tree for small ones, or switches that do the adding.
#
# PyTorch has the two halves as well:

# %% name="production-halves"
def halves():
    x = torch.arange(12.0) * (dist.get_rank() + 1)
    cut, copy, at_once = torch.empty(3), torch.empty(12), x.clone()
    dist.reduce_scatter_single(cut, x)
    dist.all_gather_single(copy, cut)
    dist.all_reduce(at_once)
    return torch.equal(copy, at_once)

print("equal on every rank:", run(halves, ranks=4).values)

# %% [markdown] minutes=1 core=true
# Older programs say `reduce_scatter_tensor` and `all_gather_into_tensor`. In `torch.distributed.tensor` a
# layout is called a *placement*: `Replicate()` is a copy, `Shard(0)` a cut of dim 0, `Partial()` a partial
# sum.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. A tensor on several ranks is a copy, cut, or a partial sum. A collective changes one into another.
# 2. All-reduce = reduce-scatter, then all-gather: partial sum → cut → copy.
# 3. In a ring each rank sends 2(p−1)/p of the tensor, never twice of it. The rounds, 2(p−1), keep growing.
# 4. No rank is special: all have the sum in the same round, with the same bits.
# 5. A collective computes. In which order it adds up shows in the last digits.
#
# **Where next:** the [README](../README.md) has the map of the lessons.
#
# *Sources:* the ring, and the proof that it sends the least: Patarasuk and Yuan 2009,
# [Bandwidth optimal all-reduce algorithms for clusters of workstations](https://doi.org/10.1016/j.jpdc.2008.09.002).
# Trees: Thakur, Rabenseifner and Gropp 2005,
# [Optimization of collective communication operations in MPICH](https://doi.org/10.1177/1094342005051521).
# What NCCL chooses from: `NCCL_ALGO` in its
# [manual](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html). When a `send` may wait for its
# `recv`: the [MPI standard](https://www.mpi-forum.org/docs/), section 3.5.
