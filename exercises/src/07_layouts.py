# %% [markdown] minutes=1 core=true
# # Exercise: from one layout to another
#
# To lesson 07, [Layouts](../notebooks/07_layouts.ipynb). You write `redistribute`: a tensor lies in one layout and is
# wanted in another. **Guess:** for how many of the twelve pairs below does nothing have to be sent?
#
# Methods of a group that you may need: `all_reduce(x)`, `all_gather(x, dim)`, `reduce_scatter(x, dim)`,
# `all_to_all(x, split_dim, concat_dim)`, and `piece(x, dim)`, which cuts x and keeps this rank's piece, without a word.

# %% tags=["setup"]
import torch

from lessons_lib import Layout, Mesh, run
from lessons_lib.grading import hint, reveal
from lessons_lib.redistribute import redistribution

torch.manual_seed(7)
X = torch.randn(8, 12).double()

# %% [markdown] minutes=9 core=true
# ## One axis
#
# From a copy `B D`, from a cut `B@tp D` or `B D@tp`, from a partial sum `B D +tp`; to a copy or to a cut. For each there
# is one call that sends the least. What a layout says you can ask it: `source.dim("B")`, `source.partial`.

# %% nbgrader={"grade_id": "redistribute"}
def redistribute(x, source, target, mesh):
    """Return this rank's block of X in the layout ``target``, from ``x``, its
    block in ``source``.

    X is a matrix, B x D. Both layouts name no axis but tp. ``source.dim("B")``
    is ``("tp",)`` if B is cut and ``()`` if not, and ``source.partial`` is
    ``("tp",)`` for a partial sum. The target is none.
    """
    ### BEGIN SOLUTION
    tp = mesh["tp"]
    before, after = cut_dim(source), cut_dim(target)
    if source.partial and after is None:
        return tp.all_reduce(x)
    if source.partial:
        return tp.reduce_scatter(x, after)
    if before == after:
        return x
    if before is None:
        return tp.piece(x, after)
    if after is None:
        return tp.all_gather(x, before)
    return tp.all_to_all(x, split_dim=after, concat_dim=before)

def cut_dim(layout):
    """Which dim is cut: 0, 1 or none of them."""
    return 0 if layout.dim("B") else 1 if layout.dim("D") else None
    ### END SOLUTION

# %% [markdown] core=true
# Try all twelve on four ranks: right or not, and the elements that rank 0 sends, of 96. Your smallest bill from a cut
# should be 18, and the largest of all 144.

# %% name="try-redistribute"
SOURCES, TARGETS = ["B D", "B@tp D", "B D@tp", "B D +tp"], ["B D", "B@tp D", "B D@tp"]

def try_redistribute(source, target):
    mesh = Mesh(tp=4)
    term = X * (1 + mesh.rank) / 10  # the four terms add up to X
    x = term if source.partial else source.shard(X, mesh)
    y = redistribute(x, source, target, mesh)
    wanted = target.shard(X, mesh)
    return y is not None and y.shape == wanted.shape and torch.allclose(y, wanted)

for source in SOURCES:
    runs = [run(try_redistribute, Layout(source), Layout(target), ranks=4) for target in TARGETS]
    cells = [f"{target}: {'right' if all(tried.values) else 'wrong'}, {tried.trace.bytes_sent(0) // 8:3}"
             for target, tried in zip(TARGETS, runs)]
    print(f"{source:8} to  ", "    ".join(cells))

# %% name="stuck-redistribute"
# hint("07-redistribute")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "07-redistribute", "grade": true}
from lessons_lib.grading import check

reports = [check("07-redistribute", redistribute)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("07-redistribute", redistribute, seed=2063))
    reports.append(check("07-redistribute", redistribute, seed=4057))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] minutes=10 more=true
# ## More: two axes
#
# On a grid a way may have several steps. `redistribution` plans it: a list of steps, each over one axis, and its bill.

# %% name="a-plan" more=true
for step in redistribution(Layout("B@row D +col"), Layout("B D@col"), (12, 12), {"row": 2, "col": 2}):
    print(step.kind, "over", step.axis, "from", step.source, "to", step.target)

# %% [markdown] more=true
# Carry such a plan out. Kind and axis stand in each step; which dim is cut, or put together, you have to find out from
# its two layouts. The check draws thirty pairs.

# %% nbgrader={"grade_id": "grid"} more=true
def redistribute_on_grid(x, source, target, mesh):
    """Return this rank's block of X in the layout ``target``, from ``x``, its
    block in ``source``.

    X is a matrix, B x D, on a mesh of row and col. The layouts may name both
    axes, in any order. ``redistribution(source, target, shape, mesh.sizes)``
    plans the way, with ``shape`` that of the whole X: steps with ``kind``,
    ``axis``, ``source`` and ``target``. The kinds that occur are all_reduce,
    reduce_scatter, all_gather, all_to_all and keep; keep cuts a copy.
    """
    ### BEGIN SOLUTION
    shape = source.global_shape(x.shape, mesh.sizes)
    for step in redistribution(source, target, shape, mesh.sizes):
        group = mesh[step.axis]
        longer = [len(step.target.dim(dim)) - len(step.source.dim(dim)) for dim in "BD"]
        if step.kind == "all_reduce":
            x = group.all_reduce(x)
        elif step.kind == "reduce_scatter":
            x = group.reduce_scatter(x, longer.index(1))
        elif step.kind == "all_gather":
            x = group.all_gather(x, longer.index(-1))
        elif step.kind == "all_to_all":
            x = group.all_to_all(x, longer.index(1), longer.index(-1))
        else:
            x = group.piece(x, longer.index(1))
    return x
    ### END SOLUTION

# %% [markdown] more=true
# Try the plan above. Rank 0 holds 6 rows and all columns before, all rows and 6 columns after.

# %% name="try-grid" more=true
def try_grid():
    mesh, source, target = Mesh(row=2, col=2), Layout("B@row D +col"), Layout("B D@col")
    whole = torch.arange(144.0).reshape(12, 12)
    term = Layout("B@row D").shard(whole, mesh) / 2
    y = redistribute_on_grid(term, source, target, mesh)
    return None if y is None else (tuple(y.shape), torch.equal(y, target.shard(whole, mesh)))

run(try_grid, ranks=4).values

# %% name="stuck-grid" more=true
# hint("07-grid")  # remove the first #, run up to three times

# %% nbgrader={"grade_id": "07-grid", "grade": true} more=true
from lessons_lib.grading import check

reports = [check("07-grid", redistribute_on_grid)]
# 2 hidden checks will run later.
### BEGIN HIDDEN TESTS
if reports[0].passed:
    reports.append(check("07-grid", redistribute_on_grid, seed=2069))
    reports.append(check("07-grid", redistribute_on_grid, seed=4073))
### END HIDDEN TESTS
display(*reports)
min(report.points for report in reports)

# %% [markdown] core=true
# ## Afterwards
#
# Of the twelve, five send nothing: three from a copy, and two from a cut to itself. The others cost what their collective costs. The
# library's version, [`redistribute.py`](../lessons_lib/redistribute.py), has the same calls in a table, and a search in
# front of them that finds the way.
