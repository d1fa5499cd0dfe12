# %% [markdown] minutes=1 core=true
# # Attention and vocabulary
#
# Lesson 08 cut an MLP. A GPT has two more things to cut: attention, and the vocabulary, which stands at both of its ends. At
# the last one every token has 50,000 logits. Cut by words over four ranks, a rank has a quarter of them. But the loss is a
# softmax over all. **Must anybody ever see all logits of a token?**

# %% tags=["setup"]
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention

from lessons_lib import Layout, Mesh, region, run
from lessons_lib.grading import predict, recap
from lessons_lib.views import heads_picture, layout_picture, words_picture

B, S, H, K, V, D = 2, 3, 8, 4, 12, 32  # sequences, tokens in each, heads, numbers per head, words, model width
torch.manual_seed(9)
X, WQKV, WO, TABLE = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, S, D), (D, 3 * D), (D, D), (V, D)))
LOGITS, TOKENS, LABELS = 3 * torch.randn(B * S, V).double(), torch.randint(V, (B * S,)), torch.randint(V, (B * S,))
WORDS = Layout("B V@tp")

def error(ours, truth):
    return f"{(ours - truth).norm() / truth.norm():.0e}"

all_logits = predict("Must anybody ever see all logits of a token?",
    A="yes: a softmax divides by a sum over all words", B="no: three numbers per token are enough",
    C="only the rank that has the label", D="forward no, but backward yes")

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("09")

# %% [markdown] minutes=2 core=true
# ## Heads over ranks
#
# Attention is two matrices with something in between, like the MLP. The first makes queries, keys and values, the second
# takes the result back to D. In between, each head works on its own columns and asks nobody. So heads are what we hand out:

# %% name="heads-of-a-rank"
two_each = [[2 * rank, 2 * rank + 1] for rank in range(4)]
heads_picture(two_each, two_each)

# %% name="attend"
def attend(qkv):  # the columns of qkv: q, k and v of the first head, then of the next one
    q, k, v = qkv.unflatten(-1, (-1, 3, K)).permute(3, 0, 2, 1, 4)
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)

serial = attend(X @ WQKV) @ WO

# %% [markdown] minutes=2 core=true
# A column-cut layer, attention on whole heads, a row-cut layer. **Guess:** how often do the ranks meet?

# %% name="by-heads"
def by_heads():
    mesh = Mesh(tp=4)
    wqkv, wo = Layout("D F@tp").shard(WQKV, mesh), Layout("F@tp D").shard(WO, mesh)
    return mesh["tp"].all_reduce(attend(X @ wqkv) @ wo)

result = run(by_heads, ranks=4)
print("error", error(result.values[0], serial), "  calls", [event.kind for event in result.trace.collectives(0)])

# %% name="by-heads-picture"
result

# %% [markdown] minutes=2 core=true
# Once. Nothing of attention is sent: no score, no key.
#
# **Break it.** `attend` takes the columns head by head: q, k, v of head 0, then of head 1, and so on. Many models store all
# queries first, then all keys, then all values. **Guess:** what happens if that is cut in four?

# %% name="apart"
APART = WQKV.unflatten(1, (H, 3, K)).transpose(1, 2).flatten(1)  # all queries, all keys, all values

def cut_apart():
    mesh = Mesh(tp=4)
    wqkv, wo = Layout("D F@tp").shard(APART, mesh), Layout("F@tp D").shard(WO, mesh)
    return mesh["tp"].all_reduce(attend(X @ wqkv) @ wo)

print("error", error(run(cut_apart, ranks=4).values[0], serial))

# %% [markdown] minutes=1 core=true
# Every shape fits, and the numbers are wrong: rank 0 got queries only, rank 3 values only. A fused matrix is put in order
# head by head *before* it is cut.

# %% [markdown] minutes=1 core=true
# ### Can any dim be cut?
#
# Two heads, four ranks. Each takes half of the numbers of a head: half of its q, of its k and of its v. They are columns
# like any others.

# %% name="half-a-head-guess"
half_a_head = predict("What comes out?",
    A="the same: a column-cut layer cuts where it likes", B="a wrong number", C="an error: the shapes do not fit")

# %% name="half-a-head"
TWO = WQKV[:, : 2 * 3 * K]  # two heads
head_by_head = attend(X @ TWO)

def half_a_head_each():
    head, half = divmod(Mesh(tp=4).rank, 2)
    w = TWO.unflatten(1, (2, 3, 2, K // 2))[:, head, :, half]
    q, k, v = torch.einsum("bsd,dck->cbsk", X, w)
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=K**-0.5)  # that of a whole head

joined = torch.cat(run(half_a_head_each, ranks=4).values, -1)
print("error", error(joined, head_by_head))

# %% name="half-a-head-seen"
half_a_head.reveal(
    f"a wrong number: error {error(joined, head_by_head)}",
    answer="B",
    A="a score q·k is a sum over all numbers of the head, and a rank has a term of it",
    C="every shape fits, and nothing complains",
)

# %% [markdown] minutes=2 core=true
# A score is a sum over the K numbers of a head, so each rank has a *term* of every score. A softmax of a term is not a term
# of the softmax: it is the GELU of lesson 08 once more. One could add up the scores first, S·S numbers for every head. Nobody
# does. **A dim can be cut where what follows takes its parts one by one**: heads, yes; the inside of a head, no.

# %% [markdown] minutes=2 core=true
# ## The embedding
#
# The table E has a row for every word. Cut by words, `V@tp D`, each rank has some of the rows. All ranks have all tokens, which
# are few bytes.

# %% name="table-picture"
layout_picture(Layout("V@tp D"), (V, D), {"tp": 4}, name="E")

# %% [markdown] core=true
# **Guess:** what does a rank give for a word that it does not have?

# %% name="lookup"
def lookup(tokens, table, tp, masked=True):
    at = tokens - tp.rank * len(table)
    here = (at >= 0) & (at < len(table))
    rows = embedding(at.where(here, 0), table)
    return tp.all_reduce(rows * here[:, None] if masked else rows)

def look_up(masked=True):
    mesh = Mesh(tp=4)
    return lookup(TOKENS, Layout("V@tp D").shard(TABLE, mesh), mesh["tp"], masked)

# %% name="lookup-run"
for masked in (True, False):
    result = run(look_up, masked, ranks=4)
    print(f"masked {masked!s:5}  error {error(result.values[0], TABLE[TOKENS])}")
print("bytes sent", result.trace.bytes_sent(0), "for an output of", 8 * B * S * D, "bytes")

# %% [markdown] minutes=2 core=true
# Zeros. One rank has the row, the others add nothing, and the sum is the answer: an all-reduce of the *output*, however long
# the table. Without the mask every rank adds its first row, where it has nothing to say.
#
# Backward is silent: every rank gets all of dX, and keeps the rows of its own words.

# %% [markdown] minutes=3 core=true
# ## Numbers too large for exp
#
# The loss of a token is the log of a sum of exponentials, less the logit of the label. In float64:

# %% name="too-large"
x = torch.tensor([1000.0, 1001.0], dtype=torch.float64)
m = x.max()
print("log of the sum of exp     ", x.exp().sum().log())
print("the same, with max outside", m + (x - m).exp().sum().log())

# %% [markdown] core=true
# exp(1000) is infinite. But for *any* number m
#
# $$\log \sum_i e^{x_i} = m + \log \sum_i e^{x_i - m}$$
#
# With the maximum for m no term is larger than exp(0) = 1, and one of them is 1. Over ranks: if all subtract *the same* m,
# their sums can be added up.

# %% [markdown] minutes=2 core=true
# ## Three numbers per token
#
# Six tokens, twelve words, four ranks. A rank knows the largest of its logits and the sum of its exponentials, and one of
# them has the label's logit. That is all that a loss is made of:

# %% name="words-picture"
words_picture(LABELS.tolist(), V, V, 4)

# %% name="sent-guess"
sent = predict(
    "1000 tokens, 50,000 words, 4 ranks, 4 bytes a number. How many kB does each rank send for the loss?",
    A="150,000", B="50,000", C="18")

# %% [markdown] minutes=2 core=true
# Line by line: m, the sum s, and t, the label's logit less m. The loss is log s − t.

# %% name="losses"
def top(logits, tp):
    return tp.all_reduce(logits.amax(1), "max")

def losses(logits, labels, tp, highest=top):
    m = highest(logits, tp)
    s = tp.all_reduce((logits - m[:, None]).exp().sum(1))
    at = labels - tp.rank * logits.shape[1]
    here = (at >= 0) & (at < logits.shape[1])
    own = logits.gather(1, at.where(here, 0)[:, None])[:, 0] - m
    t = tp.all_reduce(own.where(here, 0))
    return s.log() - t

# %% name="losses-run"
def cut_losses(logits, highest=top):
    mesh = Mesh(tp=4)
    return losses(WORDS.shard(logits, mesh), LABELS, mesh["tp"], highest)

result = run(cut_losses, LOGITS, ranks=4)
print("error", error(result.values[3], cross_entropy(LOGITS, LABELS, reduction="none")))
for event in result.trace.collectives(0):
    print(event.kind, "of", event.n_elements, "numbers")

# %% name="losses-picture"
result

# %% [markdown] minutes=1 core=true
# (Six numbers do not divide by four, so the ranks send 192 to 240 bytes.) Now at the size of the question, beside the way that gathers all logits. (100 tokens, so that your laptop has room for what
# is gathered, and ten times the bytes.)

# %% name="two-ways"
def gathered(logits, labels, tp):
    return cross_entropy(tp.all_gather(logits, 1), labels, reduction="none")

def large(way):
    labels = torch.randint(50_000, (100,))
    return way(torch.randn(100, 50_000 // 4), labels, Mesh(tp=4)["tp"])

# %% name="sent"
for way in (gathered, losses):
    trace = run(large, way, ranks=4, record=("memory",)).trace
    kB = 10 * trace.bytes_sent(0) / 1000
    print(f"{way.__name__:8} {kB:9,.0f} kB per 1000 tokens, peak {trace.peak_bytes(0) / 1e6:3.0f} MB")

# %% name="sent-seen"
sent.reveal(
    f"{kB:.0f} kB",
    answer="C",
    A="that is the logits of all words brought to every rank, three quarters of 200 MB",
    B="that is a rank's own logits: none of them has to leave it",
)

# %% [markdown] minutes=1 core=true
# Three all-reduces of one number per token, 2·(p−1)/p each. The number of words is not in it. And each rank ends with the
# same loss, to the last bit.

# %% [markdown] minutes=2 core=true
# ### Break it: another m
#
# **Guess:** what if each rank subtracts its own maximum? And if nobody subtracts anything?

# %% name="another-m"
ways = {
    "max over ranks": top,
    "each its own": lambda logits, tp: logits.amax(1),
    "none": lambda logits, tp: torch.zeros(len(logits)),
}
for name, highest in ways.items():
    off = [error(run(cut_losses, scale * LOGITS, highest, ranks=4).values[0],
                 cross_entropy(scale * LOGITS, LABELS, reduction="none")) for scale in (1, 300)]
    print(f"{name:14} error {off[0]:>6}, with logits 300 times as large {off[1]}")

# %% [markdown] minutes=1 core=true
# With its own maximum each rank adds up in a unit of its own, and such sums cannot be added. Without any the numbers are
# right until logits get large, and then infinite: a mistake that no test with small numbers finds.

# %% [markdown] minutes=3 core=true
# ## Backward
#
# $$\frac{\partial\, \text{loss}}{\partial x_i} = \text{softmax}_i - [\,i \text{ is the label}\,]$$
#
# **Guess:** what must be sent for it? m and s are there, from forward.

# %% name="gradient"
def gradient():
    mesh = Mesh(tp=4)
    tp, logits = mesh["tp"], WORDS.shard(LOGITS, mesh)
    with region("forward"):
        m = tp.all_reduce(logits.amax(1), "max")
        s = tp.all_reduce((logits - m[:, None]).exp().sum(1))
    with region("backward"):
        softmax = (logits - m[:, None]).exp() / s[:, None]
        words = torch.arange(3) + 3 * tp.rank
        return softmax - (words == LABELS[:, None]).double()

# %% name="gradient-run"
whole = LOGITS.clone().requires_grad_()
cross_entropy(whole, LABELS, reduction="sum").backward()
result = run(gradient, ranks=4)
print("error", error(torch.cat(result.values, 1), whole.grad), "  bytes sent backward", result.trace.bytes_sent(0, "backward"))

# %% name="all-logits-seen"
all_logits.reveal(
    "no rank was sent a logit, forward or backward",
    answer="B",
    A="the sum over all words is one number: each rank adds up its own, and sums can be added up",
    C="it has the label's logit, and needs of the others no more than the maximum and the sum",
    D="backward needs the softmax of a rank's own words, and for that m and s, which are there",
)

# %% [markdown] minutes=1 core=true
# Nothing. Each rank makes the gradient of its own logits. What is sent comes one layer further down: the layer that makes
# the logits, the *output head*, is cut by columns, and its dX is a sum over ranks.

# %% [markdown] minutes=2 core=true
# ## Words that are none
#
# GPT-2 has 50,257 words, which is 29 · 1733: no power of 2 divides it. So the table is **padded** with rows that are nobody's
# word. Ten words on four ranks:

# %% name="padding-picture"
TEN = LABELS % 10
words_picture(TEN.tolist(), 10, 12, 4)

# %% name="padding-guess"
padding = predict("The rows of padding are zeros, so their logits are 0. What do they do to the loss?",
    A="nothing: no label ever is one of them", B="it is too large", C="it is too small")

# %% name="padding"
from lessons_lib.tensor_parallel.cross_entropy import token_losses

PADDED = torch.cat([LOGITS[:, :10], torch.zeros(B * S, 2).double()], 1)

def mean_loss(n_words):  # the library's losses, of the first n_words columns
    mesh = Mesh(tp=4)
    return token_losses(WORDS.shard(PADDED, mesh), TEN, n_words, mesh["tp"]).mean()

truth = cross_entropy(LOGITS[:, :10], TEN)
counted, left_out = (run(mean_loss, n_words, ranks=4).values[0] for n_words in (12, 10))
print(f"serial {truth:.4f}, padding counted {counted:.4f}, padding left out {left_out:.4f}")

# %% name="padding-seen"
padding.reveal(
    f"{counted:.4f} instead of {truth:.4f}",
    answer="B",
    A="no label points there, but exp(0) = 1 is added to the sum, once for each",
    C="a larger sum gives every real word a smaller share, so a larger loss",
)

# %% [markdown] minutes=2 core=true
# Counted, a padding column takes a share of the softmax and gets a gradient, so after some steps it is no zero any more.
# Left out it counts as −∞: its exponential is 0, and so is its gradient. A checkpoint drops the rows again: 50,257 are
# saved, whatever the ranks held.
#
# How many rows? A multiple of the ranks is enough; Megatron rounds up to 128 for each, which GPUs multiply faster:

# %% name="padded"
from lessons_lib.tensor_parallel import padded

for n_ranks in (1, 2, 4, 8):
    print(n_ranks, "ranks:", padded(50_257, n_ranks=n_ranks), "or", padded(50_257, 128, n_ranks))

# %% [markdown] minutes=2 core=true
# ## In the library
#
# [`vocabulary.py`](../lessons_lib/tensor_parallel/vocabulary.py) and
# [`cross_entropy.py`](../lessons_lib/tensor_parallel/cross_entropy.py) have what you have just seen as modules, with
# autograd. Here the first and the last layer of a GPT, and one table for both: the output head is *tied*.

# %% name="library"
from lessons_lib.tensor_parallel import VOCABULARIES, VocabParallelCrossEntropy, VocabParallelEmbedding, VocabParallelHead

words = nn.Embedding(V, D).double()

def ends():
    mesh, vocabulary = Mesh(tp=4), VOCABULARIES["1d"]
    first = VocabParallelEmbedding.from_embedding(words, vocabulary, mesh)
    last = VocabParallelHead.tied(first)
    with region("forward"):
        loss = VocabParallelCrossEntropy(V, vocabulary, mesh)(last(first(TOKENS).tanh()), LABELS)
    with region("backward"):
        loss.backward()
    return loss.item(), first.weight.grad

by_library = run(ends, ranks=4)

# %% name="library-errors"
loss = cross_entropy(words(TOKENS).tanh() @ words.weight.T, LABELS, reduction="sum")
loss.backward()
found, blocks = zip(*by_library.values)
print(f"loss {found[0]:.6f} and {loss.item():.6f}", "  gradient of the table, error", error(torch.cat(blocks), words.weight.grad))
print({way: by_library.trace.bytes_sent(0, way) // 8 for way in ("forward", "backward")}, "elements sent")

# %% name="library-picture"
by_library

# %% [markdown] minutes=1 core=true
# Five all-reduces, the thin lines: the embedding's output and the three numbers forward, the head's dX backward.

# %% [markdown] minutes=2 core=true
# ### The same in production
#
# In PyTorch the output head is `ColwiseParallel`, and inside `loss_parallel()` its `cross_entropy` takes logits that are cut. (It
# changes PyTorch for all threads, so it goes round `run`.)

# %% name="production"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from lessons_lib.tensor_parallel.cross_entropy import token_losses

head = nn.Linear(D, V, bias=False).double()

def with_torch():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    cut = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    logits = parallelize_module(nn.Sequential(head), mesh, {"0": cut})(X.flatten(0, 1))
    with region("loss"):
        return cross_entropy(logits, LABELS).full_tensor().item()

with loss_parallel():
    by_torch = run(with_torch, ranks=4)

# %% name="production-compared"
def ours():
    mesh = Mesh(tp=4)
    logits = X.flatten(0, 1) @ Layout("V@tp D").shard(head.weight.detach(), mesh).T
    with region("loss"):
        return token_losses(logits, LABELS, V, mesh["tp"]).mean().item()

by_us = run(ours, ranks=4)
for name, result in (("PyTorch", by_torch), ("ours", by_us)):
    calls = [event.kind for event in result.trace.collectives(0, "loss")]
    print(f"{name}: {result.values[0]:.12f}, {len(calls)} x {calls[0]}, {result.trace.bytes_sent(0, 'loss')} bytes")

# %% [markdown] minutes=3 more=true
# ## Grouped-query attention
#
# To write a text, a model keeps the keys and values of all tokens so far. **Grouped-query attention** lets several query
# heads share one head of keys and values: 8 query heads and 2 of these take a quarter of the memory. But 2 heads on 4
# ranks?

# %% name="grouped-picture" more=true
heads_picture([[2 * rank, 2 * rank + 1] for rank in range(4)], [[rank // 2] for rank in range(4)])

# %% [markdown] minutes=3 more=true
# A head of keys and values has **copies**. On a mesh of `kv` x `copy` the queries are cut over both axes, and the keys over
# `kv` alone. **Guess:** forward is right. And the gradient of the keys' matrix?

# %% name="grouped" more=true
from lessons_lib.mesh import copy_sum

WQ, WKV, dO = (torch.randn(*shape, dtype=torch.float64) for shape in ((D, D), (D, 2 * 2 * K), (B, S, D)))

def grouped(sizes, copies=copy_sum):
    mesh = Mesh(**sizes)
    wq = Layout("D F@kv@copy").shard(WQ, mesh)
    wkv = Layout("D F@kv").shard(WKV, mesh).requires_grad_()
    q = (X @ wq).unflatten(-1, (-1, K)).transpose(1, 2)
    k, v = (X @ copies(wkv, mesh["copy"])).unflatten(-1, (-1, 2, K)).permute(3, 0, 2, 1, 4)
    y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2)
    y.backward(Layout("B S F@kv@copy").shard(dO, mesh))
    return y.detach(), wkv.grad

# %% name="grouped-run" more=true
y, dwkv = run(grouped, {"kv": 1, "copy": 1}, ranks=1).values[0]
for name, copies in (("copies summed", copy_sum), ("not summed", lambda w, group: w)):
    ys, dws = zip(*run(grouped, {"kv": 2, "copy": 2}, copies, ranks=4).values)
    print(f"{name:13}  Y {error(torch.cat(ys, -1), y)}   dWKV {error(torch.cat(dws[::2], -1), dwkv)}")

# %% [markdown] minutes=2 more=true
# Each copy sees the queries of its own rank, so its gradient is a term. What was copied forward is summed backward, over
# the ranks that hold copies and over no others. Without it two copies of one weight go different ways, and nothing is said.

# %% [markdown] minutes=3 more=true
# ## The vocabulary in 2D and 3D
#
# To be read after lessons 13 to 15 (`1d-sp` is lesson 10). The same table serves every scheme. What lies how:

# %% name="schemes" more=true
from lessons_lib.tensor_parallel import VOCABULARIES

for name, vocabulary in VOCABULARIES.items():
    print(f"{name:5}  table {vocabulary.table!s:11}  stream {vocabulary.stream!s:17}  logits {vocabulary.logits}")

# %% [markdown] more=true
# On a grid rows are cut, too. So a rank looks up its words for the rows of its *whole grid column*, and the sum is scattered
# over these rows: the all-reduce stopped halfway. The loss adds its three numbers up over the axis that cuts V, and in the
# end over the axes that cut B. **Guess:** by how many tokens does a rank divide, to have the mean?

# %% name="divisor" more=true
from lessons_lib.tensor_parallel.cross_entropy import loss_sum, n_counted

LEFT_OUT = LABELS.clone()
LEFT_OUT[:4] = -100  # torch's sign for "no label": the mean is over the others

def on_grid():
    mesh, vocabulary = Mesh(row=2, col=2), VOCABULARIES["2d"]
    total = loss_sum(vocabulary.logits.shard(LOGITS, mesh), LEFT_OUT, V, vocabulary, mesh)
    own = vocabulary.rows(vocabulary.logits, 1).shard(LEFT_OUT, mesh)
    return [(total / n).item() for n in (n_counted(LEFT_OUT), max(1, n_counted(own)))]

print(f"serial {cross_entropy(LOGITS, LEFT_OUT):.4f}")
for rank, (by_all, by_own) in enumerate(run(on_grid, ranks=4).values):
    print(f"rank {rank}: divided by all tokens that count {by_all:.4f}, by those of its own rows {by_own:.4f}")

# %% [markdown] minutes=1 more=true
# By those of the whole batch: rank 0 has none of its own. It is lesson 04's average of averages again.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. Attention is cut by whole heads: columns of QKV, put in order head by head; attention itself sends nothing.
# 2. A dim can be cut where what follows takes its parts one by one. The inside of a head cannot: a score is a sum over it.
# 3. Embedding: each rank looks up its own words, zeros for the others, and the output is added up.
# 4. Loss: max, sum of exp, label's logit. Three numbers per token, whatever V; backward is silent.
# 5. Padding is −∞ in the softmax. A copy forward is a sum backward, also for shared keys and values.
#
# **Where next:** write the loss yourself in the exercise; lesson 10 cuts what is still whole between the layers. The
# [README](../README.md) has the map.
#
# *Sources:* Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053), section 3: heads, vocabulary and loss;
# Ainslie et al. 2023, [GQA](https://arxiv.org/abs/2305.13245). Padding that was left in:
# [vLLM, issue 31474](https://github.com/vllm-project/vllm/issues/31474).
