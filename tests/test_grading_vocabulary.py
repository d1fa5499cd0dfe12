"""Lesson 09: right solutions pass, however they are written; wrong ones are told by name."""

import re
from functools import cache

import pytest
import torch
from torch.nn import functional

from lessons_lib.grading import check
from lessons_lib.grading.catalogue import find
from lessons_lib.grading.exercise import Draw
from lessons_lib.grading.lesson_09 import EXERCISES, embed, losses_backward, losses_forward
from lessons_lib.mesh import sum_copy, sum_sum
from lessons_lib.tensor_parallel import VOCABULARIES


@pytest.fixture(autouse=True)
def _own_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("LESSONS_PROGRESS", str(tmp_path / "progress.json"))


def stub(*args):
    """Do it."""


# ---- right, and unlike ours ----


def embed_by_one_hot(tokens, table, tp):
    """As a product: a row of zeros for the words of others."""
    words = torch.arange(len(table)) + tp.rank * len(table)
    return sum_copy((tokens[:, None] == words).to(table.dtype) @ table, tp)


class OneAxis:
    """As much of a mesh as the library's embedding asks for."""

    def __init__(self, tp):
        self.sizes, self.coordinate, self.tp = {"tp": tp.size}, {"tp": tp.rank}, tp

    def __getitem__(self, axis):
        return self.tp


def embed_by_library(tokens, table, tp):
    return VOCABULARIES["1d"].embed(tokens, table, OneAxis(tp))


def by_logsumexp(logits, labels, V, tp):
    """Sums of a rank's own unit, made comparable before they are added up: fewer bytes, too."""
    n = logits.shape[1]
    n_real = min(max(V - tp.rank * n, 0), n)
    real = logits[:, :n_real]
    lse = real.logsumexp(1) if n_real else logits.new_full((len(logits),), -torch.inf)
    top = tp.all_reduce(lse, "max")
    at = labels - tp.rank * n
    here = (at >= 0) & (at < n)
    own = logits.gather(1, at.where(here, 0)[:, None])[:, 0] - top
    sums = tp.all_reduce(torch.stack([(lse - top).exp(), own.where(here, 0)]))
    total = sums[0].log()
    softmax = functional.pad((real - (top + total)[:, None]).exp(), (0, n - n_real))
    return (total - sums[1]) * (labels != -100), softmax


def backward_in_place(dlosses, softmax, labels, tp):
    n = softmax.shape[1]
    dlogits, at = softmax.clone(), labels - tp.rank * n
    rows = ((at >= 0) & (at < n)).nonzero()[:, 0]
    dlogits[rows, at[rows]] -= 1
    return dlogits * torch.where(labels == -100, 0, dlosses)[:, None]


OTHERS = [
    ("09-embedding", (embed_by_one_hot,)),
    ("09-embedding", (embed_by_library,)),
    ("09-loss", (by_logsumexp, backward_in_place)),
]


@pytest.mark.slow
@pytest.mark.parametrize("id, functions", OTHERS)
def test_a_right_solution_unlike_ours_passes(id, functions):
    for seed in (1, 2):
        report = check(id, *functions, seed=seed)
        assert report.passed, report


# ---- wrong ----


def looked_up(tokens, table, tp, pair=sum_copy, masked=True):
    at = tokens - tp.rank * len(table)
    here = (at >= 0) & (at < len(table))
    rows = functional.embedding(at.where(here, 0), table)
    return pair(rows * here[:, None] if masked else rows, tp)


def unmasked(tokens, table, tp):
    return looked_up(tokens, table, tp, masked=False)


def one_too_many(tokens, table, tp):
    """The first word of the next rank is taken for this rank's."""
    at = tokens - tp.rank * len(table)
    here = (at >= 0) & (at <= len(table))
    return sum_copy(functional.embedding(at.where(here, 0), table) * here[:, None], tp)


def detached(tokens, table, tp):
    return looked_up(tokens, table.detach(), tp, pair=lambda rows, tp: tp.all_reduce(rows))


def own_words(tokens, table, tp):
    return looked_up(tokens, table, tp, pair=lambda rows, tp: rows)


def gradient_p_times(tokens, table, tp):
    return looked_up(tokens, table, tp, pair=sum_sum)


def whole_table(tokens, table, tp):
    return functional.embedding(tokens, tp.all_gather(table.detach(), 0))


def variant(
    name,
    top=lambda scores, tp: tp.all_reduce(scores.amax(1), "max"),
    add=lambda x, tp: tp.all_reduce(x),
    padding=-torch.inf,
    masked=True,
    ignored=0.0,
    less=True,
    divided=True,
):
    """Right, but for what is given."""

    def forward(logits, labels, V, tp):
        n = logits.shape[1]
        word = torch.arange(n) + tp.rank * n
        scores = logits if padding is None else logits.masked_fill(word >= V, padding)
        scores = scores - top(scores, tp)[:, None]
        total = add(scores.exp().sum(1), tp)
        at = labels - tp.rank * n
        here = (at >= 0) & (at < n)
        own = (scores if less else logits).gather(1, at.where(here, 0)[:, None])[:, 0]
        losses = total.log() - tp.all_reduce(own.where(here, 0) if masked else own)
        keeps = labels != -100
        softmax = scores.exp() / (total[:, None] if divided else 1)
        return (losses.where(keeps, ignored) if ignored is not None else losses), softmax

    forward.__name__ = name
    return forward


own_max = variant("own_max", top=lambda scores, tp: scores.nan_to_num(neginf=-1e9).amax(1))
no_max = variant("no_max", top=lambda scores, tp: torch.zeros(len(scores)))
padding_counted = variant("padding_counted", padding=None)
own_sum = variant("own_sum", add=lambda x, tp: x)
word_0 = variant("word_0", masked=False, padding=-1e6)
ignored_counted = variant("ignored_counted", ignored=None)


label_not_less = variant("label_not_less", less=False)
undivided = variant("undivided", divided=False)


def three_gathered(logits, labels, V, tp):
    """Three numbers per token and rank, gathered: right, and more bytes."""
    n = logits.shape[1]
    word = torch.arange(n) + tp.rank * n
    scores = logits.masked_fill(word >= V, -1e9)
    top, own = scores.amax(1), scores.masked_fill(word != labels[:, None], 0).sum(1)
    tops, sums, at_label = tp.all_gather(
        torch.stack([top, (scores - top[:, None]).exp().sum(1), own])[None], 0
    ).unbind(1)
    m = tops.amax(0)
    total = (sums * (tops - m).exp()).sum(0)
    losses = (m + total.log() - at_label.sum(0)).masked_fill(labels == -100, 0)
    return losses, (scores - m[:, None]).exp() / total[:, None]


def all_logits(logits, labels, V, tp):
    whole = tp.all_gather(logits, 1)[:, :V]
    n = logits.shape[1]
    softmax = functional.pad(whole.softmax(1), (0, n * tp.size - V)).split(n, 1)[tp.rank]
    return functional.cross_entropy(whole, labels, reduction="none"), softmax.clone()


def gradient(dlosses, softmax, labels, tp, counted=False, first_word=False):
    n = softmax.shape[1]
    is_label = torch.arange(n) + tp.rank * n == labels[:, None]
    if first_word:
        is_label[:, 0] |= (labels >= 0) & (labels // n != tp.rank)
    kept = torch.ones(len(labels)) if counted else labels != -100
    return (softmax - is_label.double()) * (dlosses * kept)[:, None]


def softmax_alone(dlosses, softmax, labels, tp):
    return softmax * (dlosses * (labels != -100))[:, None]


def words_from_0(dlosses, softmax, labels, tp):
    """As if every rank had the words from 0 on."""
    is_label = torch.arange(softmax.shape[1]) == labels[:, None]
    return (softmax - is_label.double()) * (dlosses * (labels != -100))[:, None]


def gradient_of_ignored(dlosses, softmax, labels, tp):
    return gradient(dlosses, softmax, labels, tp, counted=True)


def gradient_of_word_0(dlosses, softmax, labels, tp):
    return gradient(dlosses, softmax, labels, tp, first_word=True)


def without_dlosses(dlosses, softmax, labels, tp):
    return gradient(torch.ones_like(dlosses), softmax, labels, tp)


def added_up(dlosses, softmax, labels, tp):
    return tp.all_reduce(gradient(dlosses, softmax, labels, tp))


WRONG = [
    ("09-embedding", (stub,), "X", "nothing came back"),
    ("09-embedding", (unmasked,), "X", "a rank that has not the word added its first row"),
    ("09-embedding", (one_too_many,), "X", "IndexError"),
    ("09-embedding", (detached,), "dtable", "autograd not find its way from X to it"),
    ("09-embedding", (own_words,), "X", "own part: the parts were not added up over tp"),
    ("09-embedding", (own_words,), "traffic", "nothing was sent, and X is a sum over ranks"),
    ("09-embedding", (gradient_p_times,), "dtable", r"exactly \d times too large"),
    ("09-embedding", (gradient_p_times,), "traffic", "backward, .* bytes was sent"),
    ("09-embedding", (whole_table,), "traffic", "all_gather brought the whole of the table to every rank"),
    ("09-loss", (stub, stub), "losses", "nothing came back"),
    ("09-loss", (own_max, losses_backward), "losses", "each rank subtracted its own maximum"),
    ("09-loss", (no_max, losses_backward), "losses", "near 1000.*not a finite number.*exp of a large number"),
    ("09-loss", (padding_counted, losses_backward), "losses", "padding was counted"),
    ("09-loss", (padding_counted, losses_backward), "softmax", "padding was counted"),
    ("09-loss", (own_sum, losses_backward), "softmax", "each rank divided by the sum of its own words"),
    ("09-loss", (word_0, losses_backward), "losses", "another rank's word was taken for this rank's first"),
    ("09-loss", (ignored_counted, losses_backward), "losses", "a token whose label is -100 was counted"),
    ("09-loss", (label_not_less, losses_backward), "losses", "m is to be taken from the label's logit, too"),
    ("09-loss", (undivided, losses_backward), "softmax", "not yet divided by the sum"),
    ("09-loss", (three_gathered, losses_backward), "traffic", "1.5 times as much was .* an all-reduce of"),
    ("09-loss", (losses_forward, softmax_alone), "dlogits", "this is the softmax alone"),
    ("09-loss", (losses_forward, words_from_0), "dlogits", "labels count over all ranks"),
    ("09-loss", (all_logits, losses_backward), "traffic", "all_gather brought the whole of the logits"),
    ("09-loss", (losses_forward, gradient_of_ignored), "dlogits", "label is -100 was counted"),
    ("09-loss", (losses_forward, gradient_of_word_0), "dlogits", "taken for this rank's first word"),
    ("09-loss", (losses_forward, without_dlosses), "dlogits", "dlosses is missing"),
    ("09-loss", (losses_forward, added_up), "dlogits", "blocks of different ranks were added up"),
    ("09-loss", (losses_forward, added_up), "traffic", "bytes was sent by all ranks together, where nothing"),
]
ALWAYS = (padding_counted, unmasked)


@cache
def checked(id, functions):
    """One check, however many lines of its table are looked at."""
    return check(id, *functions, seed=1)


@pytest.mark.parametrize(
    "id, functions, claim, why",
    [pytest.param(*case, marks=() if case[1][0] in ALWAYS else pytest.mark.slow) for case in WRONG],
    ids=lambda value: "-".join(each.__name__ for each in value) if isinstance(value, tuple) else None,
)
def test_a_wrong_solution_is_told_by_its_mistake(id, functions, claim, why):
    report = checked(id, functions)
    (exercise,) = (each for each in EXERCISES if each.id == id)
    (line,) = (line for line, each in zip(report.lines, exercise.claims, strict=True) if each.key == claim)
    assert not line.passed
    assert re.search(why, line.message, re.DOTALL), line.message


@pytest.mark.slow
def test_the_solutions_pass_on_many_seeds():
    for seed in (3, 4):
        assert check("09-embedding", embed, seed=seed).passed
        assert check("09-loss", losses_forward, losses_backward, seed=seed).passed


def test_words_beside_a_border_are_always_among_the_tokens():
    """An index that is off by one is wrong with every seed."""
    for seed in range(20):
        for trial in find("09-embedding").trials(Draw(seed)):
            tokens, table, _ = trial.args[0]
            assert {0, len(table) - 1, len(table)} <= set(tokens.tolist())
