"""The table of attentions over a cut sequence."""

from __future__ import annotations

from lessons_lib.sequence_parallel.assignment import Contiguous, Striped, Zigzag
from lessons_lib.sequence_parallel.attention import SequenceAttention
from lessons_lib.sequence_parallel.ring import RingAttention
from lessons_lib.sequence_parallel.ring_self_attention import RingSelfAttention, RingSelfAttentionScattered
from lessons_lib.sequence_parallel.ulysses import Ulysses

ATTENTIONS: dict[str, SequenceAttention] = {
    "ring": RingAttention(Contiguous()),
    "zigzag": RingAttention(Zigzag()),
    "striped": RingAttention(Striped()),
    "ulysses": Ulysses(),
    "rsa": RingSelfAttention(),
}
ATTENTION_VARIANTS: dict[str, SequenceAttention] = {"rsa scattered": RingSelfAttentionScattered()}
"""Ring self-attention that sums dK and dV in two thirds of the bytes."""
