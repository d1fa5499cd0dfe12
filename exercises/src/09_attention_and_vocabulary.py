# %% [markdown] minutes=1 core=true
# # Exercise: attention and vocabulary
#
# To lesson 09, [Attention and vocabulary](../notebooks/09_attention_and_vocabulary.ipynb). The two ends of a GPT, on ranks
# that each have some of the words. **Guess:** which of the two sends more, the embedding or the loss?
#
# `tp.all_reduce(x)` adds up over the ranks, `tp.all_reduce(x, "max")` takes the maximum. `tp.rank` and `tp.size` say who you
# are.

# %% tags=["setup"]
import torch
from torch.nn.functional import cross_entropy, embedding

from lessons_lib import Layout, Mesh, run
from lessons_lib.grading import hint, reveal
from lessons_lib.mesh import sum_copy

B, D, V, N_WORDS = 6, 4, 10, 12  # tokens, model width, words, words with padding
torch.manual_seed(9)
TABLE, LOGITS = torch.randn(N_WORDS, D).double(), 3 * torch.randn(B, N_WORDS).double()
TOKENS, LABELS = torch.tensor([0, 9, 4, 4, 7, 2]), torch.tensor([3, 9, -100, 0, 5, 8])

def error(ours, truth):
    return f"{(ours - truth).norm() / truth.norm():.0e}"

# %% [markdown] minutes=3 core=true
# ## The embedding
#
# The table lies as `V@tp D`, n rows on each rank: rank r has those from r·n on. Which of the tokens are here, and what does a
# rank give for the others? `sum_copy`, the *g* of lesson 08, is all that is to be sent.

# %% nbgrader={"grade_id": "embedding"}
def embed(tokens, table, tp):
    """Return the rows of the table that ``tokens`` name, whole on every rank,
    so that autograd finds dtable.

    ``tokens`` are all tokens; ``table`` is this rank's n rows of the table,
    n x D, layout ``V@tp D``: rank r of ``tp`` has the rows of the words r n to
    (r+1) n - 1.
    """
    ### BEGIN SOLUTION
    at = tokens - tp.rank * len(table)
    here = (at >= 0) & (at < len(table))
    rows = embedding(at.where(here, 0), table)
    return sum_copy(rows * here[:, None], tp)
    ### END SOLUTION

# %% [markdown] core=true
# Try it on four ranks.

# %% name="try-embedding"
def try_embedding():
    mesh = Mesh(tp=4)
    return embed(TOKENS, Layout("V@tp D").shard(TABLE, mesh), mesh["tp"])

tried = run(try_embedding, ranks=4)
if tried.values[0] is not None:
    print("X", [error(x, TABLE[TOKENS]) for x in tried.values])

# %% name="stuck-embedding"
# hint("09-embedding")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "09-embedding", "grade": true}
from lessons_lib.grading import check

reports = [check("09-embedding", embed)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("09-embedding", embed, seed=2129))
    reports.append(check("09-embedding", embed, seed=4139))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=7 core=true
# ## The loss
#
# Three numbers per token: the maximum m, the sum s of exp(logit − m), and the label's logit, less m. Four things make it a
# loss that one can train with:
#
# * logits may be near 1000, and near −1000,
# * the last columns are padding, and a rank may have nothing else,
# * a label of −100 is none: its token has no loss and no gradient,
# * backward sends nothing.

# %% nbgrader={"grade_id": "loss"}
def losses_forward(logits, labels, V, tp):
    """Return the loss of every token, whole on every rank, and this rank's
    columns of the softmax.

    ``logits`` is this rank's columns of all logits, layout ``B V@tp``. From
    word ``V`` on, counted over all ranks, columns are padding, whatever they
    hold: the softmax is 0 there. ``labels`` are all labels; where one is -100
    the loss is 0. Logits may be as large as 1000, and as small as -1000.
    """
    ### BEGIN SOLUTION
    n = logits.shape[1]
    word = torch.arange(n) + tp.rank * n
    scores = logits.masked_fill(word >= V, float("-inf"))
    scores = scores - tp.all_reduce(scores.amax(1), "max")[:, None]
    softmax = scores.exp()
    total = tp.all_reduce(softmax.sum(1))
    own = scores.masked_fill(word != labels[:, None], 0).sum(1)
    losses = total.log() - tp.all_reduce(own)
    return losses.masked_fill(labels == -100, 0), softmax / total[:, None]
    ### END SOLUTION

def losses_backward(dlosses, softmax, labels, tp):
    """Return this rank's columns of dlogits.

    ``dlosses`` is the gradient of every token's loss; ``softmax`` is this
    rank's columns, as the forward returned them, and ``labels`` are all
    labels. Where a label is -100, no logit has a gradient.
    """
    ### BEGIN SOLUTION
    n = softmax.shape[1]
    is_label = torch.arange(n) + tp.rank * n == labels[:, None]
    counts = labels != -100
    return (softmax - is_label.double()) * (dlosses * counts)[:, None]
    ### END SOLUTION

# %% [markdown] core=true
# Try it on four ranks, beside the serial loss: ten words, two columns of padding, one label left out.

# %% name="try-loss"
def try_loss():
    mesh = Mesh(tp=4)
    return losses_forward(Layout("B V@tp").shard(LOGITS, mesh), LABELS, V, mesh["tp"])

tried = run(try_loss, ranks=4)
if tried.values[0]:
    losses, softmax = zip(*tried.values)
    print("losses ", error(losses[0], cross_entropy(LOGITS[:, :V], LABELS, reduction="none")))
    print("softmax", error(torch.cat(softmax, 1)[:, :V], LOGITS[:, :V].softmax(1)), "  bytes", tried.trace.bytes_sent(0))

# %% name="stuck-loss"
# hint("09-loss")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "09-loss", "grade": true}
from lessons_lib.grading import check

reports = [check("09-loss", losses_forward, losses_backward)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("09-loss", losses_forward, losses_backward, seed=2131))
    reports.append(check("09-loss", losses_forward, losses_backward, seed=4153))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# The embedding sends D numbers per token, the loss three. The library's versions are in
# [`vocabulary.py`](../lessons_lib/tensor_parallel/vocabulary.py) and
# [`cross_entropy.py`](../lessons_lib/tensor_parallel/cross_entropy.py); there they also serve 2D, 2.5D and 3D, by layouts.
