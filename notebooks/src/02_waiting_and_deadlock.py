# %% [markdown] minutes=1 core=true
# # Waiting and deadlock
#
# Five programs for four ranks. **Which of them hang? And which does `async_op=True` rescue**, with which a
# call returns at once?
#
# | | what the ranks do |
# |---|---|
# | 1 | add up gradients; rank 2 had no data, and leaves the all-reduce out |
# | 2 | add up a loss and a count; rank 3 takes the two in the other order |
# | 3 | send to the right neighbour, then receive from the left |
# | 4 | add up a norm in pairs and print it; both calls stand in an `if` for the first rank of each pair |
# | 5 | gather scores; rank 3 has one fewer |
#
# Write down your guesses: twice five times yes or no.

# %% tags=["setup"]
import time

import torch
import torch.distributed as dist

from lessons_lib import Mesh, compute, run
from lessons_lib.errors import DeadlockError, RunError
from lessons_lib.grading import predict, recap

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about lessons 00 and 01.

# %% name="recap"
recap("02")

# %% [markdown] minutes=1 core=true
# ## 1: a rank stays away
#
# The ranks have 2, 1, 0 and 3 samples. Why should rank 2 send zeros to anybody?

# %% name="stays-away-guess"
still = predict("How many of the four ranks stand still?", A="none", B="one, rank 2", C="three", D="all four")

# %% name="stays-away" tags=["raises-exception"]
def stays_away():
    n_samples = (2, 1, 0, 3)[dist.get_rank()]
    gradient = torch.full((1000,), float(n_samples))
    if n_samples > 0:
        dist.all_reduce(gradient)
    return gradient[0].item()

run(stays_away, ranks=4)

# %% name="stays-away-seen"
still.reveal(
    "3 ranks wait for rank 2",
    answer="C",
    A="an all-reduce is no offer: without a term from every rank there is no sum",
    B="rank 2 is the only one that does not wait: it has left",
    D="rank 2 does not wait, it has returned",
)

# %% [markdown] minutes=1 core=true
# The report says who waits, for whom, in which call, at which line, and where the missing rank is.
#
# **How do you repair it?** Try it above, then click the folded cell below to open it.

# %% name="all-come" jupyter={"source_hidden": true}
def all_come():
    n_samples = (2, 1, 0, 3)[dist.get_rank()]
    gradient = torch.full((1000,), float(n_samples))
    dist.all_reduce(gradient)
    return gradient[0].item()


# %% name="all-come-run"
run(all_come, ranks=4)

# %% [markdown] minutes=1 core=true
# A rank that has nothing to add adds zero. It comes all the same.

# %% [markdown] minutes=2 core=true
# ## The rank that reports
#
# On a cluster the same program is silent: for ten minutes with NCCL, for thirty with gloo, unless somebody
# chose another time-out. Then ranks 0, 1 and 3 write something like this:
#
# ```text
# [Rank 0] Watchdog caught collective operation timeout:
# WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1000, NumelOut=1000,
# Timeout(ms)=600000) ran for 600060 milliseconds before timing out.
# ```
#
# What is wrong?

# %% name="who-waits-guess"
at_fault = predict(
    "Rank 0 reports a time-out. What is wrong?",
    A="something with rank 0, which reports first",
    B="something with the network, or there would be no time-out",
    C="neither",
)

# %% [markdown] core=true
# A failed run can be caught, and looked at:

# %% name="who-waits"
def skip():
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(1000))

try:
    run(skip, ranks=4)
except DeadlockError as error:
    failed = error

# %% name="waiting"
for each in failed.waiting:
    print(f"rank {each.rank} waits for rank", *each.missing, "in", each.operation)

trace = failed.run.trace
print("bytes sent:", [trace.bytes_sent(rank) for rank in range(4)])

# %% name="failed-picture"
failed.run

# %% name="who-waits-seen"
at_fault.reveal(
    "rank 2 is missing everywhere, and no byte was sent",
    answer="C",
    A="the rank that reports is one that came; the rank at fault says nothing",
    B="a time-out is rarely the network: nobody sent a byte, so it had no chance to fail",
)

# %% [markdown] minutes=1 core=true
# Now watch it come about: drag the moment, and see who waits for whom. (Ranks 0, 1 and 3 wait for each other, too, until
# each has come; rank 2 never does.)

# %% name="who-waits-explorer"
from lessons_lib.widgets import wait_explorer

wait_explorer(failed)

# %% [markdown] minutes=1 core=true
# The ranks that report are those that *came*. The one to look for is the one that all of them miss, and on
# a cluster it says nothing. Nobody sent a byte, so the network had no chance to fail.
#
# Here rank 3 will come, but first it saves a checkpoint. Give the run less time than that takes:

# %% name="slow" tags=["raises-exception"]
def slow():
    if dist.get_rank() == 3:
        time.sleep(0.8)  # it saves a checkpoint
    dist.all_reduce(torch.ones(1))

run(slow, ranks=4, timeout_s=0.2)

# %% [markdown] minutes=2 core=true
# This is no deadlock: `run` says that rank 3 *was running*, and where. The watchdog of a cluster cannot tell
# the two apart. A rank that stays away, one that is slow and one that has died all give the same message, and
# so does a broken network, last on the list.
#
# First ask: *which rank is missing in the messages, and what was it doing?*

# %% [markdown] minutes=1 core=true
# ## 2: another order
#
# Rank 3 adds up the count first, the others the loss. Four losses of 2 and four counts of 1000.
#
# %% name="crossed-guess"
in_another_order = predict(
    "What happens?",
    A="rank 3 waits for the others, and they for it",
    B="nothing: a sum is a sum, and each gets both",
    C="no error, and wrong numbers",
)

# %% name="crossed"
def crossed(n_tokens):
    loss = torch.tensor([2.0])
    if dist.get_rank() == 3:
        dist.all_reduce(n_tokens)
        dist.all_reduce(loss)
    else:
        dist.all_reduce(loss)
        dist.all_reduce(n_tokens)
    return loss.item(), n_tokens.item()

mixed = run(crossed, torch.tensor([1000.0]), ranks=4)
mixed

# %% name="crossed-seen"
in_another_order.reveal(
    mixed.values,
    answer="C",
    A="both are all-reduces of one number: nothing tells them apart, so they meet",
    B="a call has no name: the first on one rank meets the first on the others",
)

# %% [markdown] minutes=1 core=true
# It is worse than hanging. Calls have no names. The *first* call on one rank meets the *first* on the
# others: 2 + 2 + 2 + 1000 = 1006. The right sums are 8 and 4000, and no rank has either.
#
# **Guess:** and if the count is an integer, as counts are?

# %% name="crossed-types" tags=["raises-exception"]
run(crossed, torch.tensor([1000]), ranks=4)

# %% [markdown] minutes=1 core=true
# Now the ranks visibly disagree, and `run` refuses. NCCL does not look; its manual promises *undefined
# behavior, including hangs, crashes, or data corruption*.
#
# Nobody writes such an `if`. But many write `for name in {"loss", "n_tokens"}`, and the order of a set of
# strings differs from process to process.
#
# **How do you repair that?**

# %% name="same-order" jupyter={"source_hidden": true}
def same_order():
    sums = {"loss": torch.tensor([2.0]), "n_tokens": torch.tensor([1000])}
    for name in sorted(sums):
        dist.all_reduce(sums[name])
    return sums["loss"].item(), sums["n_tokens"].item()


# %% name="same-order-run"
run(same_order, ranks=4)

# %% [markdown] minutes=1 core=true
# Any order will do, as long as it is the same on every rank.

# %% [markdown] minutes=1 core=true
# ## 3: all send first
#
# Lesson 01 met this one. **Guess:** does a message get through if it is small enough?

# %% name="all-send" tags=["raises-exception"]
def all_send(n):
    r, p = dist.get_rank(), dist.get_world_size()
    x, y = torch.full((n,), float(r)), torch.empty(n)
    dist.send(x, dst=(r + 1) % p)
    dist.recv(y, src=(r - 1) % p)
    return y[0].item()

run(all_send, 1, ranks=4)

# %% [markdown] minutes=1 core=true
# Not even one number. And a million? And on real processes, with PyTorch's gloo?

# %% name="small-and-large"
for n, transport in ((10**6, "threads"), (1, "processes")):
    try:
        run(all_send, n, ranks=4, transport=transport)
    except DeadlockError as error:
        why = str(error).splitlines()[-2]
        print(f"{n:7} on {transport:9}  {why}")

# %% [markdown] minutes=3 core=true
# The size does not matter, here and in gloo: a `send` waits for its `recv`.
#
# MPI and NCCL may *store* a small message on the way. Then `send` returns, the program works, and everybody
# calls it correct. One day the model is larger, the message no longer fits, and it hangs. A program that is
# right only while something stores its messages is wrong, and here one number proves it.
#
# **How do you repair it, with the same two calls?** Does your way also work with five ranks?

# %% name="even-odd" jupyter={"source_hidden": true}
def even_odd():
    r, p = dist.get_rank(), dist.get_world_size()
    x, y = torch.full((1,), float(r)), torch.empty(1)
    if r % 2 == 0:
        dist.send(x, dst=(r + 1) % p)
        dist.recv(y, src=(r - 1) % p)
    else:
        dist.recv(y, src=(r - 1) % p)
        dist.send(x, dst=(r + 1) % p)
    return y.item()


# %% name="even-odd-run"
run(even_odd, ranks=5)

# %% [markdown] minutes=1 core=true
# Odd ranks receive first. With five ranks, 4 and 0 are neighbours and both send first. Still the circle is
# broken: one rank that receives first is enough.

# %% [markdown] minutes=1 core=true
# ## 4: in a branch
#
# Pairs of ranks share the square of a norm. It is wanted once a pair, so the first of each pair prints it.
#
# **Guess:** how many ranks stand still: 1, 2 or 4?

# %% name="in-a-branch" tags=["raises-exception"]
def in_a_branch():
    mesh = Mesh(dp=2, tp=2)
    square = torch.tensor([float(mesh.rank) ** 2])
    if mesh["tp"].rank == 0:
        norm = mesh["tp"].all_reduce(square).sqrt()
        print(f"norm {norm.item():.2f}")

run(in_a_branch, ranks=4)

# %% [markdown] minutes=2 core=true
# Two, one in each pair. The contract holds for each group by itself: *every rank of the group* makes the
# call. Here the group is the pair, and its second rank has gone home.
#
# **Which line has to move?**

# %% name="out-of-the-branch" jupyter={"source_hidden": true}
def out_of_the_branch():
    mesh = Mesh(dp=2, tp=2)
    square = torch.tensor([float(mesh.rank) ** 2])
    norm = mesh["tp"].all_reduce(square).sqrt()
    if mesh["tp"].rank == 0:
        print(f"norm {norm.item():.2f}")


# %% name="out-of-the-branch-run"
run(out_of_the_branch, ranks=4)

# %% [markdown] minutes=1 core=true
# Printing belongs to one rank, the sum to all. Many calls do not look like collectives and are: saving a
# sharded model, clipping by a global norm, a metric's `.compute()`.

# %% [markdown] minutes=1 core=true
# ## 5: another shape
#
# Fifteen samples on four ranks: rank 3 has one fewer.

# %% name="other-shape" tags=["raises-exception"]
def other_shape():
    r = dist.get_rank()
    scores = torch.full((3 if r == 3 else 4,), float(r))
    everyone = [torch.empty_like(scores) for _ in range(4)]
    dist.all_gather(everyone, scores)
    return torch.cat(everyone).mean().item()

run(other_shape, ranks=4)

# %% [markdown] minutes=2 core=true
# Refused, before a number is wrong. For NCCL it is undefined behaviour again.
#
# **How do you repair it?** The mean over all fifteen is wanted, on every rank. What has the same shape on all?

# %% name="same-shape" jupyter={"source_hidden": true}
def same_shape():
    r = dist.get_rank()
    scores = torch.full((3 if r == 3 else 4,), float(r))
    sum_and_count = torch.tensor([scores.sum(), len(scores)])
    dist.all_reduce(sum_and_count)
    return (sum_and_count[0] / sum_and_count[1]).item()


# %% name="same-shape-run"
run(same_shape, ranks=4)

# %% [markdown] minutes=1 core=true
# A sum and a count: 21 / 15. (The average of the four averages would be 1.5. Lesson 04 comes back to this.)

# %% [markdown] minutes=1 core=true
# ## Calls that return at once
#
# With `async_op=True` a collective only *begins*. It returns a handle, and `wait()` ends it.
#
# **Guess:** what is in `x` before `wait()`?

# %% name="early"
def early():
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True)
    before = x.item()
    work.wait()
    return before, x.item()

print(run(early, ranks=4).values)

# %% [markdown] minutes=1 core=true
# The old number. Here that is certain; on a GPU it is the old one, or the new one, or half of each.
#
# What is it good for? A rank can work while its numbers travel. On the clock of a machine with eight H100s,
# one million numbers and 20 µs of work:

# %% name="overlap"
def overlap(async_op):
    work = dist.all_reduce(torch.ones(10**6), async_op=async_op)
    compute(20e-6)
    if async_op:
        work.wait()

for async_op in (False, True):
    result = run(overlap, async_op, ranks=4, machine="8xH100")
    print(f"async_op={async_op}: {result.trace.timeline.makespan * 1e6:.0f} µs")

# %% name="overlap-picture"
result

# %% [markdown] minutes=1 core=true
# The longer of the two, no longer their sum. Lesson 04 hides most of its communication like this.
#
# **Guess:** and if you forget to `wait()`?

# %% name="forgotten"
def forgotten():
    x = torch.ones(1)
    dist.all_reduce(x, async_op=True)
    return x.item()

run(forgotten, ranks=4)

# %% [markdown] minutes=1 core=true
# No error: each rank goes on with its own number. `run` warns; a cluster does not.

# %% [markdown] minutes=1 core=true
# ## The buffer is not yours
#
# Rank 0 begins to send a 0, and writes 99 into the same tensor before it waits.
#
# **Guess:** what does rank 1 receive?

# %% name="changed"
def changed():
    x = torch.zeros(1)
    if dist.get_rank() == 0:
        work = dist.isend(x, dst=1)
        x.fill_(99)
        work.wait()
    else:
        time.sleep(0.3)  # rank 1 comes late
        dist.recv(x, src=0)
    return x.item()

# %% name="changed-twice"
for transport in ("threads", "processes"):
    received = run(changed, ranks=2, transport=transport).values[1]
    print(f"{transport:9}  received {received}")

# %% [markdown] minutes=1 core=true
# The same program, two answers, and both are allowed. Thread ranks copy the tensor at the call. Gloo reads it
# when the other side is ready, and by then it holds 99.
#
# Between the call and `wait()` the tensor belongs to the library: do not change what is being sent, do not
# read what is being received.
#
# **Which two lines must change places?**

# %% name="unchanged" jupyter={"source_hidden": true}
def unchanged():
    x = torch.zeros(1)
    if dist.get_rank() == 0:
        work = dist.isend(x, dst=1)
        work.wait()
        x.fill_(99)
    else:
        time.sleep(0.3)  # rank 1 comes late
        dist.recv(x, src=0)
    return x.item()

# %% name="unchanged-run"
run(unchanged, ranks=2, transport="processes")

# %% [markdown] minutes=1 core=true
# ## Send and receive at once
#
# `isend` begins to send, `irecv` to receive. So program 3 needs no even and odd: all send first, but without
# waiting. **Guess:** does this hang?

# %% name="wait-too-early" tags=["raises-exception"]
def wait_too_early():
    r, p = dist.get_rank(), dist.get_world_size()
    x, y = torch.full((1,), float(r)), torch.empty(1)
    sending = dist.isend(x, dst=(r + 1) % p)
    sending.wait()
    dist.recv(y, src=(r - 1) % p)
    return y.item()

run(wait_too_early, ranks=4)

# %% [markdown] minutes=1 core=true
# It does. A call that returns at once does not remove the waiting, it *moves* it into `wait()`. And this
# `wait()` stands where the `send` stood. **Where should it stand?**

# %% name="wait-afterwards" jupyter={"source_hidden": true}
def wait_afterwards():
    r, p = dist.get_rank(), dist.get_world_size()
    x, y = torch.full((1,), float(r)), torch.empty(1)
    sending = dist.isend(x, dst=(r + 1) % p)
    receiving = dist.irecv(y, src=(r - 1) % p)
    sending.wait()
    receiving.wait()
    return y.item()


# %% name="wait-afterwards-run"
run(wait_afterwards, ranks=4)

# %% [markdown] minutes=1 core=true
# Begin everything, then wait. This is what `shift` did for the rings of lesson 01.

# %% [markdown] minutes=1 core=true
# ## Does async_op rescue them?
#
# All five once more, with nothing but calls that return at once. Each gives its handles back, and only then
# the ranks wait.

# %% name="five"
def away(r):
    return [] if r == 2 else [dist.all_reduce(torch.ones(1), async_op=True)]

def order(r):
    sums = (torch.ones(1), torch.ones(1, dtype=torch.long))
    mine = reversed(sums) if r == 3 else sums
    return [dist.all_reduce(x, async_op=True) for x in mine]

def sends(r):
    x, y = torch.ones(1), torch.empty(1)
    return [dist.isend(x, (r + 1) % 4), dist.irecv(y, (r - 1) % 4)]

def branch(r):
    pair = Mesh(dp=2, tp=2)["tp"]
    group, x = pair.process_group, torch.ones(1)
    return [] if pair.rank else [dist.all_reduce(x, group=group, async_op=True)]

def shape(r):
    return [dist.all_reduce(torch.ones(3 if r == 3 else 4), async_op=True)]

# %% name="five-guess"
rescued = predict(
    "Which of them run now?",
    A="all: calls that return at once cannot wait for each other",
    B="1, 3 and 4, which hung before",
    C="only 3",
    D="none",
)

# %% name="five-runs"
def begin_then_wait(program):
    for work in program(dist.get_rank()):
        work.wait()

for program in (away, order, sends, branch, shape):
    try:
        run(begin_then_wait, program, ranks=4)
        what = "runs"
    except RunError as error:
        what = str(error).splitlines()[0]
    print(f"{program.__name__:6}  {what}")

# %% name="five-seen"
rescued.reveal(
    "see above",
    answer="C",
    A="a call that returns at once moves the waiting into wait(); it does not take it away",
    B="1 and 4 miss a call, and async_op makes no call that is not there",
    D="in 3 each message has its sender and its receiver: they only waited too early",
)

# %% [markdown] minutes=1 core=true
# One of five, and it is the only one whose ranks *agreed*: each message had its sender and its receiver, and
# they only waited too early. In the other four the ranks do not make the same calls. A call that returns at
# once does not change which calls are made.
#
# **Order is a contract.** The n-th call on a group is the n-th for all its ranks, and `async_op` signs the
# same contract.
#
# So, to the first question: 1, 3 and 4 hang. 2 and 5 are refused here, and on a cluster may hang, crash or
# count nonsense. Calls that return at once rescue 3, and no other.

# %% [markdown] minutes=1 core=true
# ## What came before what
#
# Each rank keeps a list of the ranks it has heard of, and sends it along. Rank 3 talks to nobody.
#
# **Guess:** did rank 3 end before rank 2 did?

# %% name="heard"
def heard():
    r, known = dist.get_rank(), torch.zeros(4, dtype=torch.long)
    known[r] = 1
    if r in (1, 2):
        arrived = torch.empty_like(known)
        dist.recv(arrived, src=r - 1)
        known += arrived
    if r in (0, 1):
        dist.send(known, dst=r + 1)
    return known.tolist()

run(heard, ranks=4)

# %% [markdown] minutes=2 core=true
# Neither before nor after. Walk through the picture, along a lane to the right, or along an arrow. What you
# can reach *happened after* the place you came from: rank 2 has heard of 0 and 1. From rank 3 no way leads to
# the others, nor back, so there is no order between them, and no clock can make one: each lane has its own.
# That is why it is called a **partial order**.
#
# An all-reduce joins all lanes: everything before it, on any rank, comes before everything after it.
#
# And a deadlock is a circle in this order: every `send` of program 3 had to come before itself.

# %% [markdown] minutes=1 more=true
# ## Two groups, crossed
#
# The contract holds for each group by itself. Two ranks that share two groups can keep both contracts, and
# still stand still:

# %% name="two-groups" tags=["raises-exception"] more=true
def two_groups():
    mesh = Mesh(row=2, col=2)
    first = ("row", "col") if mesh.rank in (0, 3) else ("col", "row")
    for axis in first:
        mesh[axis].all_reduce(torch.ones(1))

run(two_groups, ranks=4)

# %% [markdown] minutes=2 more=true
# In every group each call has its partner. But the calls of a rank come one after the other, and that closes a
# circle through all four. **Guess:** does `async_op=True` rescue this one?

# %% name="two-groups-async" more=true
def two_groups_async():
    mesh = Mesh(row=2, col=2)
    first = ("row", "col") if mesh.rank in (0, 3) else ("col", "row")
    x = {axis: torch.ones(1) for axis in first}
    begun = [
        dist.all_reduce(x[axis], group=mesh[axis].process_group, async_op=True)
        for axis in first
    ]
    for work in begun:
        work.wait()
    return x["row"].item(), x["col"].item()

run(two_groups_async, ranks=4)

# %% [markdown] minutes=1 more=true
# Here it does, because nobody waits before everything has begun. On GPUs do not build on it: NCCL asks that
# also operations of *different* groups are begun in the same order on every rank.

# %% [markdown] minutes=1 more=true
# ## A group is made by all
#
# `new_group` is a collective of *all* ranks, also of those that will not be in the group. Each rank makes only
# its own:

# %% name="own-group" tags=["raises-exception"] more=true
def own_group():
    mine = [0, 3] if dist.get_rank() in (0, 3) else [1, 2]
    dist.barrier(dist.new_group(mine))

run(own_group, ranks=4)

# %% [markdown] minutes=1 more=true
# **How do you repair it?**

# %% name="both-groups" jupyter={"source_hidden": true} more=true
def both_groups():
    groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    mine = groups[0] if dist.get_rank() in (0, 3) else groups[1]
    me = torch.tensor([dist.get_rank()])
    dist.all_reduce(me, group=mine)
    return me.item()


# %% name="both-groups-run" more=true
run(both_groups, ranks=4)

# %% [markdown] minutes=1 more=true
# All ranks make all groups, in the same order. `Mesh` does it for you.

# %% [markdown] minutes=1 core=true
# ## The same in production
#
# `batch_isend_irecv` begins a list of sends and receives together. NCCL then runs them as one, which two calls
# one after the other do not guarantee. Beside it our `shift`:

# %% name="production"
def exchange():
    r, p = dist.get_rank(), dist.get_world_size()
    x, y = torch.full((3,), float(r)), torch.empty(3)
    sending = dist.P2POp(dist.isend, x, (r + 1) % p)
    receiving = dist.P2POp(dist.irecv, y, (r - 1) % p)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return torch.equal(y, Mesh(ring=p)["ring"].shift(x, by=1))

run(exchange, ranks=4)

# %% [markdown] minutes=1 core=true
# What this lesson's reports do, PyTorch can do in part. With `TORCH_DISTRIBUTED_DEBUG=DETAIL` it compares every
# collective between the ranks before it runs it. Its *flight recorder* keeps the last calls of every rank, and
# can write them to a file when a time-out strikes. There look, rank by rank, for the first call that the others do not
# have: the question of this lesson.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. Order is a contract: the n-th call on a group is the n-th for all its ranks, with `async_op` too.
# 2. The ranks that report are those that came. Look for the one that is missing.
# 3. A time-out says that somebody is not there. Only seldom is it the network.
# 4. Between the call and `wait()`, change nothing that is sent and read nothing that is received.
# 5. Non-blocking calls help against waiting too early, and against nothing else: begin everything, then wait.
#
# **Where next:** the [README](../README.md) has the map of the lessons.
#
# *Sources:* time-outs, `async_op`, `batch_isend_irecv` and `TORCH_DISTRIBUTED_DEBUG`:
# [`torch.distributed`](https://docs.pytorch.org/docs/stable/distributed.html). The watchdog's words: for instance
# [Megatron-LM issue 1207](https://github.com/NVIDIA/Megatron-LM/issues/1207). Undefined behaviour: NCCL's manual,
# [Collective operations](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html); order
# between groups:
# [Using multiple NCCL communicators](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html).
# A `send` larger than NCCL's own buffer: [NCCL issue 1025](https://github.com/NVIDIA/nccl/issues/1025); that a
# program may not count on buffers: the [MPI standard](https://www.mpi-forum.org/docs/), section 3.5. The
# [flight recorder](https://docs.pytorch.org/tutorials/prototype/flight_recorder_tutorial.html). *Happened before*:
# Lamport 1978, [Time, clocks, and the ordering of events](https://doi.org/10.1145/359545.359563).
