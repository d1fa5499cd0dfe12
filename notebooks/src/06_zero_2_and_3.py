# %% [markdown] minutes=1 core=true
# # ZeRO 2 and 3
#
# ZeRO 1 has cut the optimizer's state. Gradients and parameters are still whole on every rank, and can be cut in the same
# way: then a rank holds a quarter of every layer. **Can a rank run a layer that it does not hold?**

# %% tags=["setup"]
import torch
import torch.distributed as dist

from lessons_lib import Mesh, region, run
from lessons_lib.data_parallel import rows_of_rank
from lessons_lib.grading import predict, recap
from lessons_lib.machines import Link, Machine

L, D, B = 6, 256, 128  # layers, width, rows of all ranks together
LAYER = 8 * D * D  # bytes of a layer, in float64
GPUS = Machine("4 small GPUs", flops_per_s=4e11, in_node=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11))

def matrix(seed, n_rows=D):  # the same on every rank
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_rows, D, generator=generator, dtype=torch.float64).mul_(D**-0.5)

def my_rows(group):
    return rows_of_rank(matrix(100, B), group).clone()

# %% [markdown] minutes=2 core=true
# ## Before you begin
#
# Three questions about earlier lessons.

# %% name="recap"
recap("06")

# %% [markdown] minutes=3 core=true
# ## ZeRO 2: keep a piece of the gradient
#
# Each layer here is a product, Y = X · W. With ZeRO 1 a rank keeps all its terms of all gradients until backward is over,
# and then needs a quarter of the sums. Why wait? Sum each gradient as soon as it is there, keep the piece, drop the rest.

# %% name="zero-2"
def reduce(w, group):
    piece = group.reduce_scatter(w.grad, dim=0)
    w.piece = getattr(w, "piece", 0) + piece
    w.grad = None

def backward(when, n_microbatches):
    group = Mesh(dp=4)["dp"]
    ws = [matrix(layer).requires_grad_() for layer in range(L)]
    for w in ws:
        if when == "as it is made":
            w.register_post_accumulate_grad_hook(lambda w: reduce(w, group))
    for x in my_rows(group).chunk(n_microbatches):
        for w in ws:
            x = x @ w
        x.square().sum().backward()
    for w in ws:
        if when == "at the end":
            reduce(w, group)

# %% [markdown] core=true
# (`register_post_accumulate_grad_hook` calls a function when a gradient is complete.)

# %% name="zero-2-guess"
microbatches = predict("With 4 micro-batches, what does ZeRO 2 send for its gradients, beside ZeRO 1?",
    A="the same: they are added up first", B="four times as much", C="a quarter: only pieces are kept")

# %% name="zero-2-run"
sent = {}
for when in ("at the end", "as it is made"):
    for n in (1, 4):
        zero_2 = run(backward, when, n, ranks=4, machine=GPUS, record=("memory",))
        sent[when, n] = zero_2.trace.bytes_sent(0)
        print(f"{when:13} {n} micro-batches: sends {sent[when, n] / LAYER} layers, "
              f"peak {zero_2.trace.peak_bytes(0) / LAYER:.1f} layers")

# %% name="zero-2-picture"
zero_2

# %% name="zero-2-seen"
microbatches.reveal(
    f"{sent['as it is made', 4] / sent['at the end', 4]} times", answer="B",
    A="the place where they were added up is what ZeRO 2 has given away: each micro-batch is summed over the ranks at once",
    C="what is kept is a piece, and what is sent are terms of everything",
)

# %% [markdown] core=true
# A quarter of the gradients stays, and the price is paid with micro-batches. Frameworks let you choose; the rest of this
# lesson has one micro-batch, where stages 0, 1 and 2 send the same.

# %% [markdown] minutes=4 core=true
# ## ZeRO 3: gather just in time, free after use
#
# Now a rank holds the piece `w` of each layer, a quarter of its rows. Before it multiplies, it gathers the whole `W`, and
# afterwards lets go of it. Lesson 08 told autograd what is sent; here is what to do with a borrowed layer:

# %% name="borrowed"
class Borrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, group):
        ctx.save_for_backward(x, w)  # the piece, and not W
        ctx.group = group
        return x @ group.all_gather(w, dim=0)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        W = ctx.group.all_gather(w, dim=0)
        dw = ctx.group.reduce_scatter(x.T @ dy, dim=0)
        return dy @ W.T, dw, None

# %% name="can-it"
can_it = predict("Four ranks hold a quarter of every layer. How does rank 0 get its rows through?",
    A="it computes a quarter of each layer, and the others the rest",
    B="it borrows the other quarters, one layer at a time",
    C="not at all: a layer has to lie where it is computed")

# %% name="network"
def network(layer):
    group = Mesh(dp=4)["dp"]
    ws = [group.piece(matrix(at), dim=0).requires_grad_() for at in range(L)]
    y = my_rows(group)
    with region("forward"):
        for w in ws:
            y = layer(y, w, group)
    with region("backward"):
        y.square().sum().backward()
    return [w.grad for w in ws]

# %% name="serial"
WS = [matrix(at).requires_grad_() for at in range(L)]
Y = matrix(100, B)
for W in WS:
    Y = Y @ W
Y.square().sum().backward()

def errors(values):
    whole = [torch.cat(pieces) for pieces in zip(*values)]
    return max(((dw - W.grad).norm() / W.grad.norm()).item() for dw, W in zip(whole, WS))

# %% name="network-run"
zero_3 = run(network, Borrowed.apply, ranks=4, machine=GPUS, record=("memory",))

# %% name="network-seen"
can_it.reveal(
    f"error of all gradients {errors(zero_3.values):.0e}; a rank holds {zero_3.values[0][0].numel() / D**2} of a layer",
    answer="B",
    A="ZeRO is data parallel: each rank runs every layer whole, on rows of its own, and nobody else's",
    C="it has to be there while it is computed, and no longer",
)

# %% name="network-picture"
zero_3

# %% [markdown] minutes=2 core=true
# Under the lanes is the memory: forward has one whole layer at a time, backward one and its gradient.
#
# ### What it costs

# %% name="bytes-guess"
how_much = predict("What does a rank send now, beside data parallel training?",
    A="the same, as with stages 1 and 2", B="one and a half times as much", C="three times as much: three collectives a layer, not one",
    D="L times as much: all L layers go around all the time")

# %% name="bytes"
def data_parallel():
    dist.all_reduce(torch.empty(L, D, D, dtype=torch.float64))  # of all gradients

sent = [result.trace.bytes_sent(0) for result in (run(data_parallel, ranks=4), zero_3)]
print({way: zero_3.trace.bytes_sent(0, way) / LAYER for way in ("forward", "backward")}, "layers")

# %% name="bytes-seen"
how_much.reveal(
    sent[1] / sent[0], answer="B",
    A="stages 1 and 2 gather parameters once a step, and stage 3 twice: forward, and again backward",
    C="there are three collectives, and each is half an all-reduce",
    D="each layer is gathered when it is needed, twice in a step",
)

# %% [markdown] minutes=1 core=true
# All-reduce: 2 Ψ for Ψ parameters, times (N−1)/N. ZeRO 3: gather, gather, reduce-scatter, 3 Ψ. Backward can see its
# layers only if they are gathered a second time.

# %% [markdown] minutes=3 core=true
# ### Break it: forget to free
#
# One more name for W, and it lives as long as the graph does:

# %% name="forgotten"
class Forgotten(Borrowed):
    @staticmethod
    def forward(ctx, x, w, group):
        ctx.save_for_backward(x, w)
        ctx.group = group
        ctx.W = group.all_gather(w, dim=0)
        return x @ ctx.W

# %% name="forgotten-guess"
what_shows = predict("What shows it?", A="wrong gradients", B="more bytes are sent", C="memory alone, whole layers of it")

# %% name="forgotten-run"
forgotten = run(network, Forgotten.apply, ranks=4, machine=GPUS, record=("memory",))
for name, result in (("freed", zero_3), ("forgotten", forgotten)):
    print(f"{name:9} error {errors(result.values):.0e}, sends {result.trace.bytes_sent(0) / LAYER} layers,",
          f"peak {result.trace.peak_bytes(0) / LAYER:.1f} layers")
forgotten

# %% name="forgotten-seen"
what_shows.reveal(
    f"peaks of {zero_3.trace.peak_bytes(0) / LAYER:.1f} and {forgotten.trace.peak_bytes(0) / LAYER:.1f} layers", answer="C",
    A="W is right, it only lives too long; every test of numbers passes",
    B="backward gathers again all the same; nobody looks at what is still there",
)

# %% [markdown] minutes=2 core=true
# The numbers are right, and the memory is that of whole layers. A plain `x @ gathered` in autograd does it, too, since
# autograd saves W for the backward.
#
# If W is kept *on purpose*, backward need not gather. **Guess:** the bytes, and the peak?

# %% name="kept"
class Kept(Forgotten):
    @staticmethod
    def backward(ctx, dy):
        x, _ = ctx.saved_tensors
        return dy @ ctx.W.T, ctx.group.reduce_scatter(x.T @ dy, dim=0), None

kept = run(network, Kept.apply, ranks=4, machine=GPUS, record=("memory",))
print(f"error {errors(kept.values):.0e}, sends {kept.trace.bytes_sent(0) / LAYER} layers,",
      f"peak {kept.trace.peak_bytes(0) / LAYER:.1f} layers")

# %% [markdown] minutes=1 core=true
# 9 layers' worth, as data parallel training, and the memory of whole layers until backward has passed. PyTorch has a
# switch for it, `reshard_after_forward=False`: the state is cut, and parameters are between two steps.

# %% [markdown] minutes=5 core=true
# ## Fetch the next one ahead
#
# On a clock, a rank waits for every gather, with nothing to do:

# %% name="just-in-time"
def start(w):
    W = w.new_empty(D, D)
    return W, dist.all_gather_single(W, w, async_op=True)

def just_in_time():
    group = Mesh(dp=4)["dp"]
    ws, y = [group.piece(matrix(at), dim=0) for at in range(L)], my_rows(group)
    for w in ws:
        W, arrives = start(w)
        arrives.wait()
        y = y @ W
        del W, arrives  # each of them holds it

# %% name="just-in-time-picture"
late = run(just_in_time, ranks=4, machine=GPUS, record=("memory",))
late

# %% [markdown] core=true
# Which layer comes next is known. So begin to gather it, and then compute: a **prefetch** of one.

# %% name="one-ahead"
def one_ahead():
    group = Mesh(dp=4)["dp"]
    ws, y = [group.piece(matrix(at), dim=0) for at in range(L)], my_rows(group)
    W, arrives = start(ws[0])
    for following in ws[1:]:
        arrives.wait()
        coming, arrives = start(following)
        y = y @ W
        W = coming
    arrives.wait()
    y = y @ W

# %% [markdown] core=true
# **Guess:** how much of the waiting is left? And what does it cost?

# %% name="one-ahead-run"
ahead = run(one_ahead, ranks=4, machine=GPUS, record=("memory",))
for name, result in (("just in time", late), ("one ahead", ahead)):
    print(f"{name:12} {result.trace.timeline.makespan * 1e6:.0f} µs, peak {result.trace.peak_bytes(0) / LAYER:.1f} layers")
ahead

# %% [markdown] minutes=1 core=true
# Of six waits one is left, the first. The cost is memory for one layer more: at most *two* gathered layers are alive. To
# fetch two ahead buys nothing where a gather takes no longer than a layer, and costs one more.

# %% [markdown] minutes=3 core=true
# ## Is that model parallelism?
#
# "With ZeRO 3 the model is spread over the ranks, so it is model parallel." Compare it with a tensor parallel model
# (lesson 08) on the same ranks. All ranks together have 64, then 128, then 256 rows.

# %% name="rows-guess"
more_rows = predict("Twice the rows: who sends twice as much?", A="both", B="tensor parallel only", C="ZeRO 3 only", D="neither")

# %% name="rows"
from torch import nn
from torch.optim import SGD

from lessons_lib.data_parallel import Zero
from lessons_lib.mesh import copy_sum, sum_copy

def by_zero_3(n_rows):
    model, group = nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(L))), Mesh(dp=4)["dp"]
    zero = Zero(model, 3, group, SGD)
    model(torch.ones(n_rows // 4, D)).sum().backward()
    zero.step()

def by_tensor_parallel(n_rows):
    y, tp = torch.ones(n_rows, D, requires_grad=True), Mesh(tp=4)["tp"]
    for _ in range(L // 2):  # a layer cut by columns, and one by rows
        y = sum_copy(copy_sum(y, tp) @ torch.ones(D, D // 4) @ torch.ones(D // 4, D), tp)
    y.sum().backward()

# %% name="rows-run"
for way in (by_zero_3, by_tensor_parallel):
    print(f"{way.__name__:19}", [f"{run(way, n, ranks=4).trace.bytes_sent(0):,} bytes" for n in (64, 128, 256)])

# %% name="rows-seen"
more_rows.reveal("see above", answer="B",
    A="ZeRO sends parameters and gradients, never an activation: it is data parallel, with parameters lent",
    C="it is the other way round", D="what tensor parallelism sends are sums of activations, one row for each row")

# %% [markdown] minutes=3 core=true
# ## A step of each stage
#
# [`stages.py`](../lessons_lib/data_parallel/stages.py) has the whole of ZeRO as a table. The second step of each stage,
# with Adam, in float32:

# %% name="stages"
from torch import nn
from torch.optim import Adam

from lessons_lib.data_parallel import STAGES, Zero, stored

def steps(stage):
    model, group = nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(L))), Mesh(dp=4)["dp"]
    zero = Zero(model, stage, group, lambda ps: Adam(ps, foreach=False))
    for _ in range(2):
        zero.zero_grad()
        model(torch.ones(32, D)).sum().backward()
        zero.step()
    return zero.stored_bytes()

stages = {stage: run(steps, stage, ranks=4, machine=GPUS, record=("memory",)) for stage in STAGES}

# %% name="stages-table"
for stage, row in STAGES.items():
    formula = stored(stage, L * D * D, 4)
    for what, layout in row._asdict().items():
        print(f"stage {stage}: {what:10} {layout!s:4} {formula[what] / D**2} layers,",
              f"measured {stages[stage].values[0][what]:9,} bytes")

# %% name="stages-curves"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
for (stage, result), colour in zip(stages.items(), ("#57606a", "#0072b2", "#009e73", "#d55e00")):
    times, n_bytes = zip(*result.trace.live_bytes[0])
    axes.step([1e6 * t for t in times], [n / 1e6 for n in n_bytes], where="post", color=colour, label=f"stage {stage}")
axes.set(title="What rank 0 holds in two steps", xlabel="virtual time (µs)", ylabel="MB", ylim=0)
axes.legend()
plt.show()

# %% name="stage-3-picture"
stages[3]

# %% [markdown] core=true
# From stage to stage one row of the table is cut. (The state is two vectors of moments, and a counter for each layer.)
# The moments appear with the first update; the spikes are what Adam works with. Stages 0 and 1 fill up while backward
# makes gradients, stages 2 and 3 with a quarter of them, and buffers.
#
# In time, stage 3 hides nearly all of its gathers behind the computing. It waits at the beginning of forward and of
# backward, where nobody could know earlier what comes, and for the last sum.

# %% [markdown] minutes=3 core=true
# ## What about activations?
#
# A GPT, with what forward keeps for backward beside the three vectors. `memory_of_a_step` measures on ranks.

# %% name="activations-guess"
what_of_them = predict("From stage 0 to stage 3 on four ranks, what becomes of the activations on a rank?",
    A="a quarter, like everything else", B="nothing", C="they grow, by the gathered layers")

# %% name="activations"
from lessons_lib.cost.measured import memory_of_a_step
from lessons_lib.models.gpt import GPTConfig

kinds = {}
for stage in range(4):
    rows = memory_of_a_step(GPTConfig(L=2, H=2, D=64, S=64), n_sequences=2, stage=stage, dp=4)
    kinds[stage] = {row.kind: row.measured / 1e6 for row in rows}
    print(stage, "  ".join(f"{kind} {n:4.2f} MB" for kind, n in kinds[stage].items() if kind != "step counters"))

# %% name="activations-picture"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
left = [0.0] * 4
names = {"activations": "#cc79a7", "parameters": "#0072b2", "gradients": "#009e73", "state": "#e69f00"}
for kind, colour in names.items():
    widths = [kinds[stage][kind] for stage in range(4)]
    axes.barh([f"stage {stage}" for stage in range(4)], widths, left=left, color=colour, label=kind)
    left = [a + b for a, b in zip(left, widths)]
axes.invert_yaxis()
axes.set(title="What a rank stores of a small GPT, measured", xlabel="MB")
axes.legend(loc="lower right")
plt.show()

# %% name="activations-seen"
what_of_them.reveal(
    [round(kinds[stage]["activations"], 3) for stage in range(4)], answer="B",
    A="activations belong to the rank's rows, which no other rank has: there is no copy to be cut",
    C="gathered layers are buffers, and soon free; what forward keeps is the same",
)

# %% [markdown] minutes=1 core=true
# ZeRO cuts what is *copied*. Activations are no copies. They shrink with fewer rows per rank, by computing them again
# (lesson 03), or when they are cut themselves, by tensor and sequence parallelism (08 and 10).

# %% [markdown] core=true
# All of it in one picture, and every tick is a run. **Which control shortens the bar that no stage of ZeRO touches?**

# %% name="memory-explorer"
from lessons_lib.widgets import memory_explorer

memory_explorer(ranks="4", sequences=2)

# %% [markdown] minutes=3 core=true
# ## The table of the paper
#
# 7.5 billion parameters in mixed precision, 16 bytes each. By the convention of the paper: 2 for the parameter, 2 for
# the gradient, 12 for the state; a GB is 10⁹ bytes; activations and buffers are left out.
#
# **Guess:** how many ranks until it fits into 32 GB, with stages 1, 2 and 3?

# %% name="table"
from lessons_lib.cost.memory import estimate
from lessons_lib.cost.units import in_unit

def gigabytes(stage, n_ranks):
    return in_unit(estimate("paper", stage, 7_500_000_000, n_ranks), "GB")

print("ranks   ZeRO 1    ZeRO 2    ZeRO 3   GB on each, convention: paper")
for n_ranks in (1, 4, 16, 64, 256, 1024):
    print(f"{n_ranks:5}", *(f"{gigabytes(stage, n_ranks):9.4g}" for stage in (1, 2, 3)))

# %% name="table-curve"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
ranks = [2**k for k in range(11)]
for stage, colour in zip(range(4), ("#57606a", "#0072b2", "#009e73", "#d55e00")):
    axes.plot(ranks, [gigabytes(stage, n) for n in ranks], "o-", color=colour, label=f"stage {stage}")
axes.axhline(32, color="#57606a", linestyle="--", label="a card of 32 GB")
axes.set(title="7.5 billion parameters: GB on each rank", xlabel="ranks", xscale="log", yscale="log")
axes.set_xticks(ranks, map(str, ranks))
axes.legend()
plt.show()

# %% [markdown] minutes=1 core=true
# Stage 1 fits from 45 ranks on, stage 2 from 7, stage 3 from 4. Stages 1 and 2 run into a floor, 4 and 2 bytes a
# parameter: 30 and 15 GB. Stage 3 has none.

# %% [markdown] minutes=3 more=true
# ## The same stage, three formulas
#
# Three formulas for the memory of stage 2 are in circulation. **Guess:** how far apart are they, for 64 ranks?

# %% name="formulas" more=true
from lessons_lib.cost.memory import estimate
from lessons_lib.cost.units import text

n = 7_500_000_000
for name, formula in (("paper", "2 + 14/N"), ("old helper", "4 + 16/N"), ("helper", "2 + 18/N")):
    n_bytes = estimate(name, 2, n, 64)
    print(f"{name:10} {formula} bytes a parameter: {text(n_bytes)} = {text(n_bytes, 'GiB')}")
print("all of it:", text(16 * n), "=", text(16 * n, "GiB", digits=5))

# %% [markdown] minutes=1 more=true
# A factor of two. None is wrong: DeepSpeed's helper once did not cut gradients, and keeps a second copy of them, in 32
# bits, today. And it prints GiB, 2³⁰ bytes, and writes GB. Ask of every such number which bytes it counts, in which unit,
# and what it leaves out.

# %% [markdown] minutes=3 more=true
# ## When ZeRO 2 needs more than ZeRO 1
#
# It has been reported as a bug: on a small model, stage 2 needs *more* memory. **Guess:** how can that be? Here is the
# peak of forward and backward; no update, so no state.

# %% name="small" more=true
from torch import nn
from torch.optim import Adam

from lessons_lib.data_parallel import Zero

def gradients_only(stage, n_layers):
    model, group = nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(n_layers))), Mesh(dp=4)["dp"]
    zero = Zero(model, stage, group, Adam)
    model(torch.ones(1, D)).sum().backward()
    zero.reduce()

peaks = {
    (n, stage): run(gradients_only, stage, n, ranks=4, record=("memory",)).trace.peak_bytes(0) / (LAYER / 2)
    for n in (1, 2, 4, 8) for stage in (1, 2, 3)
}

# %% name="small-table" more=true
for n in (1, 2, 4, 8):
    print(f"{n} layers:", "   ".join(f"ZeRO {stage} {peaks[n, stage]:5.2f}" for stage in (1, 2, 3)), "  layers at the peak")

# %% [markdown] minutes=1 more=true
# A piece in place of a vector saves with every layer. The *buffers*, a gradient on its way and one being made, two
# gathered layers, are there from the first layer on, and do not grow. On a toy they are most of what you see.

# %% [markdown] minutes=3 core=true
# ## The same in production
#
# PyTorch's ZeRO 3 is FSDP2, and its call is `fully_shard`: for every layer, then for the model. The same six layers by
# it and by the library, on the same ranks:

# %% name="production"
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from lessons_lib.data_parallel import Zero

def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(L))).double()

def by_torch():
    model, mesh = layers(), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with region("step"):
        (4 * model(my_rows(Mesh(dp=4)["dp"])).square().sum()).backward()  # it takes the mean over 4 ranks
    return [p.grad.full_tensor() for p in model.parameters()]

# %% name="production-ours"
def by_library():
    model, group = layers(), Mesh(dp=4)["dp"]
    zero = Zero(model, 3, group, SGD)
    with region("step"):
        model(my_rows(group)).square().sum().backward()
        zero.reduce()
    return list(zero.whole_gradients().values())

# %% name="production-compared"
theirs, ours = (run(way, ranks=4, machine=GPUS, record=("memory",)) for way in (by_torch, by_library))
worst = max(((a - b).norm() / b.norm()).item() for one, other in zip(theirs.values, ours.values) for a, b in zip(one, other))
print(f"gradients differ by {worst:.0e}")
for name, result in (("torch", theirs), ("ours", ours)):
    calls = [event.kind for event in result.trace.collectives(0, "step")]
    print(f"{name:5} {calls.count('all_gather')} gathers, {calls.count('reduce_scatter')} reduce-scatters,",
          f"{result.trace.bytes_sent(0, 'step') / LAYER} layers sent")
theirs

# %% [markdown] minutes=1 core=true
# Equal gradients, equal bytes. (The last six gathers are not FSDP's: `full_tensor` fetched the gradients, to compare them.
# On CPUs it waits for each gather; on GPUs its gathers run beside the computing.)
#
# `reshard_after_forward=False` is `Kept` from above. Each parameter stays a tensor of its own, cut along its rows, where
# ours are pieces of one flat vector. And what you call `fully_shard` on is gathered together: forget the layers, call it
# on the model alone, and all six are whole at once.

# %% [markdown] minutes=1 core=true
# ## To remember
#
# 1. ZeRO 2: each gradient is summed as soon as it is there, and a piece is kept. Each micro-batch pays for it.
# 2. ZeRO 3: gather a layer just in time, free it after use, gather it again in backward. Bytes: 2, 2, 3 times (N−1)/N Ψ.
# 3. Prefetch of one hides the gathers and holds two layers. Forget to free, and only the memory tells.
# 4. It is data parallelism: each rank runs every layer, on rows of its own. What it sends does not know how many.
# 5. Copies are cut. Activations are no copies; they stay.
#
# **Where next:** lesson 07 takes the word *layout* seriously; the [README](../README.md) has the map.
#
# *Sources:* Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054), table 1 and sections 5 and 7; Zhao et al.
# 2023, [PyTorch FSDP](https://arxiv.org/abs/2304.11277); [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
# Memory estimates that disagree: DeepSpeed, issues [4076](https://github.com/deepspeedai/DeepSpeed/issues/4076) and
# [5102](https://github.com/deepspeedai/DeepSpeed/issues/5102); stage 2 above stage 1:
# [1302](https://github.com/deepspeedai/DeepSpeed/issues/1302).
