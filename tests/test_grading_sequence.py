"""Lesson 10: right solutions pass, however they are written; wrong ones are told by name."""

import re
from functools import cache, partial

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from lessons_lib import mesh as pairs
from lessons_lib import run
from lessons_lib.grading import check
from lessons_lib.grading.lesson_10 import gather_reduce_scatter, reduce_scatter_gather, train
from lessons_lib.mesh import copy_sum, gather_split, sum_copy
from lessons_lib.mesh import reduce_scatter_gather as scatter
from tests.test_exercises import solved


@pytest.fixture(autouse=True)
def _own_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("LESSONS_PROGRESS", str(tmp_path / "progress.json"))


def gradients(y, t, leaves):
    return torch.autograd.grad((y - t).square().sum() / 2, leaves)


def moved(leaves, steps):
    return tuple(leaf.detach() - 0.001 * step for leaf, step in zip(leaves, steps, strict=True))


def leaves_of(*parameters):
    return [parameter.detach().requires_grad_() for parameter in parameters]


def branch(x, gamma, w1, w2, tp):
    h = gelu(pairs.gather_reduce_scatter(layer_norm(x, x.shape[-1:]) * gamma, tp) @ w1)
    return x + scatter(h @ w2, tp)


def train_by_copies(x, t, gamma, bias, w1, w2, n_steps, tp):
    """Copies handed through copy_sum, as the library has it."""
    for _ in range(n_steps):
        leaves = leaves_of(gamma, bias, w1, w2)
        y = branch(x, copy_sum(leaves[0], tp), *leaves[2:], tp) + copy_sum(leaves[1], tp)
        gamma, bias, w1, w2 = moved(leaves, gradients(y, t, leaves))
    return gamma, bias, w1, w2


def train_without_sum(x, t, gamma, bias, w1, w2, n_steps, tp):
    for _ in range(n_steps):
        leaves = leaves_of(gamma, bias, w1, w2)
        y = branch(x, leaves[0], *leaves[2:], tp) + leaves[1]
        gamma, bias, w1, w2 = moved(leaves, gradients(y, t, leaves))
    return gamma, bias, w1, w2


def train_with_one_call(x, t, gamma, bias, w1, w2, n_steps, tp):
    """The two vectors in one sum, as Megatron has it; and what comes back is a list."""
    leaves = [parameter.clone().requires_grad_() for parameter in (gamma, bias, w1, w2)]
    optimizer = torch.optim.SGD(leaves, lr=0.001)
    for _ in range(n_steps):
        optimizer.zero_grad()
        y = branch(x, leaves[0], *leaves[2:], tp) + leaves[1]
        ((y - t).square().sum() / 2).backward()
        both = tp.all_reduce(torch.cat([leaf.grad for leaf in leaves[:2]]))
        leaves[0].grad, leaves[1].grad = both.chunk(2)
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


def train_and_sum(x, t, gamma, bias, w1, w2, n_steps, tp, which, half=0.5):
    """The gradients of ``which`` parameters are summed."""
    for _ in range(n_steps):
        leaves = leaves_of(gamma, bias, w1, w2)
        y = branch(x, leaves[0], *leaves[2:], tp) + leaves[1]
        steps = torch.autograd.grad((y - t).square().sum() * half, leaves)
        steps = [tp.all_reduce(step) if at in which else step for at, step in enumerate(steps)]
        gamma, bias, w1, w2 = moved(leaves, steps)
    return gamma, bias, w1, w2


GAMMA_ALONE = partial(train_and_sum, which=(0,))
BIAS_ALONE = partial(train_and_sum, which=(1,))
ALL_FOUR = partial(train_and_sum, which=(0, 1, 2, 3))
NO_HALF = partial(train_and_sum, which=(0, 1), half=1)


def train_with_mean(x, t, gamma, bias, w1, w2, n_steps, tp):
    for _ in range(n_steps):
        leaves = leaves_of(gamma, bias, w1, w2)
        y = branch(x, leaves[0], *leaves[2:], tp) + leaves[1]
        dgamma, dbias, *rest = gradients(y, t, leaves)
        gamma, bias, w1, w2 = moved(
            leaves, [tp.all_reduce(dgamma, "avg"), tp.all_reduce(dbias, "avg"), *rest]
        )
    return gamma, bias, w1, w2


def train_with_p_biases(x, t, gamma, bias, w1, w2, n_steps, tp):
    for _ in range(n_steps):
        leaves = leaves_of(gamma, bias, w1, w2)
        g, b, *ws = leaves
        h = gelu(pairs.gather_reduce_scatter(layer_norm(x, x.shape[-1:]) * copy_sum(g, tp), tp) @ ws[0])
        y = x + scatter(h @ ws[1] + b, tp)
        gamma, bias, w1, w2 = moved(leaves, gradients(y, t, leaves))
    return gamma, bias, w1, w2


def train_whole(x, t, gamma, bias, w1, w2, n_steps, tp):
    """1D: right numbers, and the stream whole on every rank."""
    X, T = tp.all_gather(x, 0), tp.all_gather(t, 0)
    for _ in range(n_steps):
        leaves = leaves_of(gamma, bias, w1, w2)
        g, b, a, c = leaves
        y = X + sum_copy(gelu(copy_sum(layer_norm(X, X.shape[-1:]) * g, tp) @ a) @ c, tp) + b
        gamma, bias, w1, w2 = moved(leaves, gradients(y, T, leaves))
    return gamma, bias, w1, w2


def train_whole_behind_the_scatter(x, t, gamma, bias, w1, w2, n_steps, tp):
    """Reduce-scatter, and all-gather at once: an all-reduce in two calls."""
    X, T = tp.all_gather(x, 0), tp.all_gather(t, 0)
    for _ in range(n_steps):
        leaves = leaves_of(gamma, bias, w1, w2)
        g, b, a, c = leaves
        terms = gelu(copy_sum(layer_norm(X, X.shape[-1:]) * g, tp) @ a) @ c
        y = X + gather_split(scatter(terms, tp), tp) + b
        gamma, bias, w1, w2 = moved(leaves, gradients(y, T, leaves))
    return gamma, bias, w1, w2


def train_a_little_apart(x, t, gamma, bias, w1, w2, n_steps, tp):
    """Right to ten digits, and not the same bits."""
    gamma, bias, w1, w2 = train(x, t, gamma, bias, w1, w2, n_steps, tp)
    return gamma * (1 + 1e-14 * tp.rank), bias, w1, w2


def stub(*args):
    """Do it."""


def gathered_and_cut(x, tp):
    """The gradient is taken for complete: a piece of one's own."""
    return gather_split(x, tp)


def summed_whole(x, tp):
    """Twice the bytes: an all-reduce, of which a piece is taken."""
    return pairs.split_gather(sum_copy(x, tp), tp)


def summed_backward(x, tp):
    """All-gather backward of what was summed up before: p times."""
    return scatter(x, tp) if not x.requires_grad else _Twice.apply(x, tp)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return tp.reduce_scatter(x, 0)

    @staticmethod
    def backward(ctx, dy):
        return ctx.tp.all_gather(dy * ctx.tp.size, 0), None


@pytest.mark.parametrize(
    "id, functions",
    [
        ("10-pair", (gather_reduce_scatter, reduce_scatter_gather)),
        pytest.param(
            "10-pair", (pairs.gather_reduce_scatter, pairs.reduce_scatter_gather), marks=pytest.mark.slow
        ),
        ("10-train", (train,)),
        pytest.param("10-train", (train_by_copies,), marks=pytest.mark.slow),
        ("10-train", (train_with_one_call,)),
    ],
)
def test_right_solutions_pass(id, functions):
    report = check(id, *functions, seed=11)
    assert report.passed, [line for line in report.lines if not line.passed]


WRONG = [
    ("10-pair", (stub, stub), "gather", "nothing came back"),
    ("10-pair", (gathered_and_cut, scatter), "gather backward", "each rank's own term"),
    ("10-pair", (gather_reduce_scatter, summed_whole), "traffic", "times as much was sent"),
    ("10-pair", (gather_reduce_scatter, summed_backward), "scatter backward", "p times too large"),
    ("10-train", (stub,), "copies", "nothing came back"),
    ("10-train", (train_without_sum,), "copies", "Each rank's tokens had their say on its own copy alone"),
    ("10-train", (train_without_sum,), "same bits", "ranks have gone apart"),
    ("10-train", (train_with_mean,), "copies", "a mean over the ranks, and the loss is a sum"),
    ("10-train", (GAMMA_ALONE,), "copies", "the gradients of gamma alone were added up"),
    ("10-train", (BIAS_ALONE,), "copies", "the gradients of bias alone were added up"),
    ("10-train", (ALL_FOUR,), "parts", "the gradients of w1 and w2, which are complete, were added up"),
    ("10-train", (NO_HALF,), "parts", "every gradient is twice what it should be"),
    (
        "10-train",
        (train_with_p_biases,),
        "copies",
        "the bias was added by every rank before the sum: p times",
    ),
    ("10-train", (train_whole,), "traffic", "made the sum whole on every rank"),
    ("10-train", (train_whole,), "memory", "Is the stream whole on it"),
    ("10-train", (train_whole_behind_the_scatter,), "memory", "Is the stream whole on it"),
    ("10-train", (train_a_little_apart,), "same bits", "ranks have gone apart"),
]


@cache
def checked(id, functions):
    return check(id, *functions, seed=5)


ALWAYS = (gathered_and_cut, train_without_sum)


@pytest.mark.parametrize(
    "id, functions, claim, words",
    [pytest.param(*each, marks=() if each[1][0] in ALWAYS else pytest.mark.slow) for each in WRONG],
)
def test_a_wrong_solution_is_told(id, functions, claim, words):
    report = checked(id, functions)
    (line,) = (line for line in report.lines if line.claim == claim)
    assert not line.passed and re.search(words, line.message), line.message


def test_the_numbers_in_the_text_of_the_exercise():
    text, names = solved("10_megatron_sequence_parallel")
    assert "From one token on each rank the gather makes four ones, and the gradient of the one is 4" in text
    assert "from four tokens the other one makes one, a 4, and the gradient is four ones" in text
    pair = names["gather_reduce_scatter"], names["reduce_scatter_gather"]
    assert run(names["try_pair"], pair[0], 1, ranks=4).values == [([1, 1, 1, 1], [4])] * 4
    assert run(names["try_pair"], pair[1], 4, ranks=4).values == [([4], [1, 1, 1, 1])] * 4
    assert "Two of the four: gamma and bias" in text
    one, four = names["one"][0], names["four"]
    for mine in four:
        for at in range(2):
            assert (mine[at] - one[at]).norm() < 1e-12 * one[at].norm()
            assert torch.equal(mine[at], four[0][at])


def test_what_is_apart_in_its_last_bits_alone_is_right_otherwise():
    report = checked("10-train", (train_a_little_apart,))
    assert next(line.claim for line in report.lines if not line.passed) == "same bits"
