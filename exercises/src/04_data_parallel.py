# %% [markdown] minutes=1 core=true
# # Exercise: weights and buckets
#
# To lesson 04, [Data parallel](../notebooks/04_data_parallel.ipynb). Ranks have unequally many tokens, and one may have
# none. **Guess:** what does that rank send?
#
# `dp` is the group of ranks: `dp.all_reduce(x)` returns the sum of every rank's `x`.

# %% tags=["setup"]
import torch

from lessons_lib import Mesh, run
from lessons_lib.grading import hint, reveal

# %% [markdown] minutes=9 core=true
# ## Averaged gradients
#
# A bucket is closed as soon as it holds `bucket_elements` elements: for gradients of 4, 3, 5 and 1 elements and buckets of
# 6 these are 4 + 3, and 5 + 1. So there are at most n / `bucket_elements` of them, rounded up, and one more call is for the
# tokens.

# %% nbgrader={"grade_id": "buckets"}
def averaged_gradients(gradients, n_tokens, bucket_elements, dp):
    """Return the gradients of the mean over the tokens of all ranks, in the
    shapes of ``gradients``.

    ``gradients`` are those of the mean over this rank's ``n_tokens`` tokens,
    and zeros if it has none. They travel in buckets: a bucket takes one
    gradient after the other, and is sent as one vector as soon as it holds
    ``bucket_elements`` elements.
    """
    ### BEGIN SOLUTION
    share = n_tokens / dp.all_reduce(torch.tensor(float(n_tokens))).item()
    averaged, bucket = [], []
    for at, gradient in enumerate(gradients, start=1):
        bucket.append(gradient)
        sizes = [each.numel() for each in bucket]
        if sum(sizes) >= bucket_elements or at == len(gradients):
            vector = dp.all_reduce(share * torch.cat([each.flatten() for each in bucket]))
            averaged += [piece.view_as(like) for piece, like in zip(vector.split(sizes), bucket)]
            bucket = []
    return averaged
    ### END SOLUTION

# %% [markdown] core=true
# Try it: 2 tokens on rank 0 with gradients of 1, 6 tokens on rank 1 with gradients of 3, none on rank 2. Every number
# should be 2.5, in the shapes 2 x 2, 3, 5 and 1, after three calls.

# %% name="try-buckets"
def try_buckets():
    dp = Mesh(dp=3)["dp"]
    gradient, n_tokens = [(1.0, 2), (3.0, 6), (0.0, 0)][dp.rank]
    gradients = [torch.full(shape, gradient) for shape in ((2, 2), (3,), (5,), (1,))]
    return averaged_gradients(gradients, n_tokens, 6, dp)

tried = run(try_buckets, ranks=3)
if tried.values[0]:
    print(*(gradient.tolist() for gradient in tried.values[0]))
print("calls:", len(tried.trace.collectives(rank=0)))

# %% name="stuck-buckets"
# hint("04-buckets")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "04-buckets", "grade": true}
from lessons_lib.grading import check

reports = [check("04-buckets", averaged_gradients)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("04-buckets", averaged_gradients, seed=2143))
    reports.append(check("04-buckets", averaged_gradients, seed=4177))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=1 core=true
# ## Afterwards
#
# The rank without tokens sends zeros, in every bucket, like all others: its weight is 0. The library's
# [`Bucketed`](../lessons_lib/data_parallel/replicated.py) does not wait for the list to be complete: hooks fill its
# buckets while backward goes on.
