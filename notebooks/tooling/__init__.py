"""From notebooks/src/NN_name.py to an executed notebooks/NN_name.ipynb, and what must hold for both.

source.py   the cells of a lesson, as written
execute.py  the cells of a lesson, as run in a fresh kernel
saved.py    a notebook as it is saved: with pictures, without anything of the machine that ran it
check.py    what `make check` asks of every lesson
"""
