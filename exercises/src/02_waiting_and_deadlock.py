# %% [markdown] minutes=1 core=true
# # Exercise: five repairs
#
# To lesson 02, [Waiting and deadlock](../notebooks/02_waiting_and_deadlock.ipynb). The five broken programs once more, now
# as functions. Four of them stop, one gives wrong numbers. **Guess** which one, before you run anything.
#
# Repair each where it stands, or write it anew below. The checks draw the numbers of every rank at random, so no rank
# can know those of another without being told.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from lessons_lib import Mesh, run
from lessons_lib.grading import hint, reveal

# %% [markdown] minutes=1 core=true
# ## 1: a rank stays away
#
# Rank 2 has no samples, and a gradient of zeros.

# %% nbgrader={"grade_id": "sum-of-gradients"}
def sum_of_gradients(gradient, n_samples):
    """Return the sum of the gradients of all ranks, on every rank. Without samples
    a gradient is zero."""
    if n_samples > 0:
        dist.all_reduce(gradient)
    return gradient

### BEGIN SOLUTION
def sum_of_gradients(gradient, n_samples):
    """Return the sum of the gradients of all ranks, on every rank. Without samples
    a gradient is zero."""
    dist.all_reduce(gradient)
    return gradient
### END SOLUTION

# %% [markdown] core=true
# Repaired, it returns 6 on every rank.

# %% name="try-1" tags=["raises-exception"]
def try_1():
    n_samples = (2, 1, 0, 3)[dist.get_rank()]
    return sum_of_gradients(torch.tensor([float(n_samples)]), n_samples)

run(try_1, ranks=4)

# %% name="stuck-1"
# hint("02-repair-1")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "02-repair-1", "grade": true}
from lessons_lib.grading import check

reports = [check("02-repair-1", sum_of_gradients)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("02-repair-1", sum_of_gradients, seed=2039))
    reports.append(check("02-repair-1", sum_of_gradients, seed=4049))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=1 core=true
# ## 2: another order
#
# The last rank takes the two sums in the other order.

# %% nbgrader={"grade_id": "totals"}
def totals(loss, n_tokens):
    """Return the sum of the losses and the sum of the token counts of all
    ranks, on every rank."""
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.all_reduce(n_tokens)
        dist.all_reduce(loss)
    else:
        dist.all_reduce(loss)
        dist.all_reduce(n_tokens)
    return loss, n_tokens

### BEGIN SOLUTION
def totals(loss, n_tokens):
    """Return the sum of the losses and the sum of the token counts of all
    ranks, on every rank."""
    both = torch.cat([loss, n_tokens])
    dist.all_reduce(both)
    return both[:1], both[1:]
### END SOLUTION

# %% [markdown] core=true
# Repaired, it returns 8 and 4000 on every rank.

# %% name="try-2"
run(lambda: totals(torch.tensor([2.0]), torch.tensor([1000.0])), ranks=4)

# %% name="stuck-2"
# hint("02-repair-2")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "02-repair-2", "grade": true}
from lessons_lib.grading import check

reports = [check("02-repair-2", totals)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("02-repair-2", totals, seed=2053))
    reports.append(check("02-repair-2", totals, seed=4051))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=2 core=true
# ## 3: all send first
#
# Your repair has to work on any number of ranks, odd numbers too.

# %% nbgrader={"grade_id": "from-the-left"}
def from_the_left(x):
    """Return the left neighbour's ``x``; rank 0's left neighbour is the last
    rank."""
    r, p = dist.get_rank(), dist.get_world_size()
    y = torch.empty_like(x)
    dist.send(x, dst=(r + 1) % p)
    dist.recv(y, src=(r - 1) % p)
    return y

### BEGIN SOLUTION
def from_the_left(x):
    """Return the left neighbour's ``x``; rank 0's left neighbour is the last
    rank."""
    r, p = dist.get_rank(), dist.get_world_size()
    y = torch.empty_like(x)
    begun = [dist.isend(x, dst=(r + 1) % p), dist.irecv(y, src=(r - 1) % p)]
    for work in begun:
        work.wait()
    return y
### END SOLUTION

# %% [markdown] core=true
# Repaired, it returns 4, 0, 1, 2, 3.

# %% name="try-3" tags=["raises-exception"]
run(lambda: from_the_left(torch.tensor([float(dist.get_rank())])), ranks=5)

# %% name="stuck-3"
# hint("02-repair-3")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "02-repair-3", "grade": true}
from lessons_lib.grading import check

reports = [check("02-repair-3", from_the_left)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("02-repair-3", from_the_left, seed=2063))
    reports.append(check("02-repair-3", from_the_left, seed=4057))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=1 core=true
# ## 4: in a branch
#
# `pair` is a group of two ranks, and `pair.rank` is 0 on one of them and 1 on the other.

# %% nbgrader={"grade_id": "norm-of-pair"}
def norm_of_pair(x, pair):
    """Return the norm of the two tensors of a pair of ranks taken together,
    on both ranks."""
    norm = torch.zeros(1)
    if pair.rank == 0:
        norm = pair.all_reduce(x.square().sum().reshape(1)).sqrt()
    return norm

### BEGIN SOLUTION
def norm_of_pair(x, pair):
    """Return the norm of the two tensors of a pair of ranks taken together,
    on both ranks."""
    square = x.square().sum().reshape(1)
    return pair.all_reduce(square).sqrt()
### END SOLUTION

# %% [markdown] core=true
# Repaired, it returns 5 on every rank: the squares of 3 and 4 are 9 and 16.

# %% name="try-4" tags=["raises-exception"]
def try_4():
    pair = Mesh(dp=2, tp=2)["tp"]
    return norm_of_pair(torch.tensor([3.0 + pair.rank]), pair)

run(try_4, ranks=4)

# %% name="stuck-4"
# hint("02-repair-4")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "02-repair-4", "grade": true}
from lessons_lib.grading import check

reports = [check("02-repair-4", norm_of_pair)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("02-repair-4", norm_of_pair, seed=2069))
    reports.append(check("02-repair-4", norm_of_pair, seed=4073))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=2 core=true
# ## 5: another shape
#
# Ranks have different numbers of scores, and every score counts the same. What has the same shape on all ranks?

# %% nbgrader={"grade_id": "mean-score"}
def mean_score(scores):
    """Return the mean of all scores of all ranks, a tensor of one element, on
    every rank.

    Ranks have different numbers of scores.
    """
    everyone = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, scores)
    return torch.cat(everyone).mean().reshape(1)

### BEGIN SOLUTION
def mean_score(scores):
    """Return the mean of all scores of all ranks, a tensor of one element, on
    every rank."""
    total, count = scores.sum().reshape(1), scores.new_tensor([scores.numel()])
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count
### END SOLUTION

# %% [markdown] core=true
# Repaired, it returns 21 / 15 = 1.4 on every rank.

# %% name="try-5" tags=["raises-exception"]
def try_5():
    r = dist.get_rank()
    return mean_score(torch.full((3 if r == 3 else 4,), float(r)))

run(try_5, ranks=4)

# %% name="stuck-5"
# hint("02-repair-5")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "02-repair-5", "grade": true}
from lessons_lib.grading import check

reports = [check("02-repair-5", mean_score)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("02-repair-5", mean_score, seed=2081))
    reports.append(check("02-repair-5", mean_score, seed=4079))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# The one that gave wrong numbers was the second. It is the dangerous one: the others at least stopped.
