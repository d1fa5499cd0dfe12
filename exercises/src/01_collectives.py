# %% [markdown] minutes=1 core=true
# # Exercise: a ring of your own
#
# To lesson 01, [Collectives](../notebooks/01_collectives.ipynb). You build an all-reduce out of `send` and `recv`. The
# lesson's ring had as many numbers as ranks. Here there are eleven numbers on four ranks: 3, 3, 3 and 2.
# **Guess:** does each rank still send the same?
#
# The first part belongs to the lesson; the others are for those who want **more**.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from lessons_lib import Mesh, run
from lessons_lib.grading import hint, reveal

# %% [markdown] minutes=4 core=true
# ## Reduce-scatter: partial sum → cut
#
# `x.tensor_split(p)` cuts `x` into p chunks. At the end rank r has chunk r of the sum, and nobody has called a
# collective. `ring` is a group of ranks, with ranks of its own:
#
# | | |
# |---|---|
# | `ring.size`, `ring.rank` | how many ranks, and which of them is this? |
# | `ring.send(x, 3)` | send `x` to rank 3 of the ring |
# | `ring.recv(like, 2)` | return what rank 2 of the ring sends, a tensor of the size of `like` |
#
# A `send` waits for its `recv`, so not all may send first.

# %% nbgrader={"grade_id": "ring-reduce-scatter"}
def ring_reduce_scatter(x, ring):
    """Return chunk r of the sum of every rank's ``x``, on rank r of ``ring``.

    ``x`` has one dim. Chunks are those of ``x.tensor_split(p)``, so their
    sizes may differ by one.
    """
    ### BEGIN SOLUTION
    chunks = [chunk.clone() for chunk in x.tensor_split(ring.size)]
    for step in range(1, ring.size):
        outgoing = (ring.rank - step) % ring.size
        incoming = (outgoing - 1) % ring.size
        chunks[incoming] += to_the_right(chunks[outgoing], chunks[incoming], ring)
    return chunks[ring.rank]

def to_the_right(outgoing, like, ring):
    right, left = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    if ring.rank == 0:  # one that receives first is enough
        arrived = ring.recv(like, left)
        ring.send(outgoing, right)
    else:
        ring.send(outgoing, right)
        arrived = ring.recv(like, left)
    return arrived
    ### END SOLUTION

# %% [markdown] core=true
# Try it: rank r brings eleven times 10 to the r. Every digit should be 1 in the end.

# %% name="try-reduce-scatter"
def try_reduce_scatter():
    ring = Mesh(ring=4)["ring"]
    return ring_reduce_scatter(torch.full((11,), 10**ring.rank), ring)

run(try_reduce_scatter, ranks=4)

# %% name="stuck-reduce-scatter"
# hint("01-reduce-scatter")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "01-reduce-scatter", "grade": true}
from lessons_lib.grading import check

reports = [check("01-reduce-scatter", ring_reduce_scatter)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("01-reduce-scatter", ring_reduce_scatter, seed=2011))
    reports.append(check("01-reduce-scatter", ring_reduce_scatter, seed=4013))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# Numbers right, deadlock all the same? Think of a `send` that waits until somebody receives. Red under *traffic*? Look
# at who sends to whom in the picture above: every arrow goes to the next rank.

# %% [markdown] minutes=6 more=true
# ## More: all-gather, cut → copy
#
# Once more around the ring, but what arrives is kept and not added. Every rank brings its chunk and the size `n` of
# the whole, from which it knows how large the others are.

# %% nbgrader={"grade_id": "ring-all-gather"} more=true
def ring_all_gather(chunk, ring, n):
    """Return all ranks' chunks, one after the other in one tensor of ``n``
    elements, on every rank.

    Rank r of ``ring`` brings chunk r, as ``tensor_split`` cuts ``n`` elements.
    """
    ### BEGIN SOLUTION
    chunks = list(torch.empty(n, dtype=chunk.dtype).tensor_split(ring.size))
    chunks[ring.rank] = chunk
    for step in range(ring.size - 1):
        outgoing = (ring.rank - step) % ring.size
        incoming = (outgoing - 1) % ring.size
        chunks[incoming] = to_the_right(chunks[outgoing], chunks[incoming], ring)
    return torch.cat(chunks)
    ### END SOLUTION

# %% [markdown] more=true
# Try it: chunk r is full of the number r, so each rank should have 0 0 0 1 1 1 2 2 2 3 3.

# %% name="try-all-gather" more=true
def try_all_gather():
    ring = Mesh(ring=4)["ring"]
    size = (3, 3, 3, 2)[ring.rank]
    return ring_all_gather(torch.full((size,), ring.rank), ring, 11)

run(try_all_gather, ranks=4)

# %% name="stuck-all-gather" more=true
# hint("01-all-gather")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "01-all-gather", "grade": true} more=true
from lessons_lib.grading import check

reports = [check("01-all-gather", ring_all_gather)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("01-all-gather", ring_all_gather, seed=2017))
    reports.append(check("01-all-gather", ring_all_gather, seed=4019))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=3 more=true
# ## More: all-reduce, partial sum → copy
#
# You have both halves.

# %% nbgrader={"grade_id": "ring-all-reduce"} more=true
def ring_all_reduce(x, ring):
    """Return the sum of every rank's ``x``, on every rank of ``ring``. ``x``
    has one dim."""
    ### BEGIN SOLUTION
    chunk = ring_reduce_scatter(x, ring)
    return ring_all_gather(chunk, ring, len(x))
    ### END SOLUTION

# %% [markdown] more=true
# Try it beside PyTorch's own, on the same ranks.

# %% name="try-all-reduce" more=true
def try_all_reduce():
    ring = Mesh(ring=4)["ring"]
    x = torch.arange(11) * (ring.rank + 1)
    return ring_all_reduce(x, ring), ring.all_reduce(x)

run(try_all_reduce, ranks=4).values[3]

# %% name="stuck-all-reduce" more=true
# hint("01-all-reduce")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "01-all-reduce", "grade": true} more=true
from lessons_lib.grading import check

reports = [check("01-all-reduce", ring_all_reduce)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("01-all-reduce", ring_all_reduce, seed=2027))
    reports.append(check("01-all-reduce", ring_all_reduce, seed=4021))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=9 more=true
# ## More: a tree
#
# Broadcast: rank `root` has the tensor, and all need it. One rank can tell one other, then two can tell two, then four
# can tell four. **Guess:** in how many rounds do eight ranks have it? And seven?
#
# Count the ranks from the root on, `(tree.rank - root) % tree.size`, and the root is number 0.

# %% nbgrader={"grade_id": "tree-broadcast"} more=true
def tree_broadcast(x, tree, root):
    """Return the ``x`` of rank ``root`` of ``tree``, on every rank.

    Every rank passes a tensor of the same shape. In each round, all ranks
    that have it send it on.
    """
    ### BEGIN SOLUTION
    me, have = (tree.rank - root) % tree.size, 1
    while have < tree.size:
        if have <= me < 2 * have:
            x = tree.recv(x, (me - have + root) % tree.size)
        elif me + have < min(2 * have, tree.size):
            tree.send(x, (me + have + root) % tree.size)
        have *= 2
    return x.clone()
    ### END SOLUTION

# %% [markdown] more=true
# Try it: rank 2 of eight has a 42. Count the arrows that leave rank 2.

# %% name="try-broadcast" more=true
def try_broadcast():
    tree = Mesh(tree=8)["tree"]
    return tree_broadcast(torch.tensor([42 if tree.rank == 2 else 0]), tree, root=2)

run(try_broadcast, ranks=8)

# %% name="stuck-broadcast" more=true
# hint("01-broadcast")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "01-broadcast", "grade": true} more=true
from lessons_lib.grading import check

reports = [check("01-broadcast", tree_broadcast)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("01-broadcast", tree_broadcast, seed=2029))
    reports.append(check("01-broadcast", tree_broadcast, seed=4027))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# You have built what NCCL runs for a large tensor. The library's version is
# [`lessons_lib/rings.py`](../lessons_lib/rings.py): compare it with yours, or `reveal("01-reduce-scatter")`.
