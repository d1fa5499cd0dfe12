# %% [markdown] minutes=1 core=true
# # Exercise: what is kept, and what is made again
#
# To lesson 03, [Where memory and time go](../notebooks/03_memory_and_time.ipynb). **Guess:** which step of a block keeps
# most for its backward?

# %% tags=["setup"]
import torch

from lessons_lib.grading import hint, reveal
from lessons_lib.models import GPT, GPTConfig

# %% [markdown] minutes=5 core=true
# ## To the byte
#
# All that L blocks keep, from sizes alone. The check draws thirty configurations. (`config` has `L`, `H`, `D`, `S`, `F` and
# `K`.)

# %% nbgrader={"grade_id": "stored"}
def stored_bytes(config, B, itemsize):
    """Return the bytes that the L blocks of a GPT keep for the backward of
    ``B`` sequences.

    A number has ``itemsize`` bytes. Every block keeps what the meter of the
    lesson finds: of attention only what a fused kernel keeps, and nothing for
    dropout.
    """
    ### BEGIN SOLUTION
    stream, n_tokens = B * config.S * config.D, B * config.S
    norms = 2 * (2 * stream + 2 * n_tokens)
    attention = 3 * stream + stream + n_tokens * config.H
    mlp = 2 * n_tokens * config.F
    return config.L * (norms + attention + mlp) * itemsize
    ### END SOLUTION

# %% [markdown] core=true
# Try it beside the meter of the lesson.

# %% name="meter"
def measured(block, x):
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(x)
    return sum(n for at, n in kept.items() if at not in weights)

# %% name="try-stored"
config, B = GPTConfig(L=3, H=2, D=24, S=10), 2
x = torch.randn(B, config.S, config.D, dtype=torch.float64, requires_grad=True)
by_meter = config.L * measured(GPT(config).double().blocks[0], x)
print("by the meter", by_meter, "  by yours", stored_bytes(config, B, itemsize=8))

# %% name="stuck-stored"
# hint("03-stored")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "03-stored", "grade": true}
from lessons_lib.grading import check

reports = [check("03-stored", stored_bytes)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("03-stored", stored_bytes, seed=2179))
    reports.append(check("03-stored", stored_bytes, seed=4217))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=4 core=true
# ## Run it again
#
# A block is a function here, and its weights are a list of tensors. The check measures what forward leaves in memory, and
# counts FLOPs by the clock of a machine that needs 1 µs for one forward.

# %% nbgrader={"grade_id": "again"}
### BEGIN SOLUTION
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, *inputs):
        ctx.block = block
        ctx.save_for_backward(*inputs)
        return block(*inputs)

    @staticmethod
    def backward(ctx, dy):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.block(*inputs)
        return None, *torch.autograd.grad(y, inputs, dy)
### END SOLUTION

def run_again(block, x, ws):
    """Return ``block(x, *ws)``, of which nothing is kept for backward but ``x``
    and ``ws``.

    Backward runs the block once more, and gives ``x`` and all of ``ws`` their
    gradients.
    """
    ### BEGIN SOLUTION
    return Again.apply(block, x, *ws)
    ### END SOLUTION

# %% [markdown] core=true
# Try it. y = tanh(2 x) at x = 0: y should be 0, the gradient of x 2, and that of the weight 0. The block runs twice.

# %% name="try-again"
times = []

def block(x, w):
    times.append(len(times))
    return torch.tanh(w * x)

x, w = torch.zeros(1, requires_grad=True), torch.full((1,), 2.0, requires_grad=True)
y = run_again(block, x, [w])
if y is not None:
    y.backward()
    print(y.item(), x.grad.item(), w.grad.item(), "  runs:", len(times))

# %% name="stuck-again"
# hint("03-again")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "03-again", "grade": true}
from lessons_lib.grading import check

reports = [check("03-again", run_again)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("03-again", run_again, seed=2203))
    reports.append(check("03-again", run_again, seed=4219))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=1 core=true
# ## Afterwards
#
# GELU and the layer behind it keep half of it all: 8 of 16 streams. With the block run again it is one of 16, for a third
# more FLOPs. The library's formula is in [`activations.py`](../lessons_lib/cost/activations.py); for the other one it uses
# PyTorch's `torch.utils.checkpoint`.
